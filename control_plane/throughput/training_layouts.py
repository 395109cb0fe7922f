"""Layouts of a training task: the fastest one on a number of slots, and its speed.

A `train:` spec names no GPU: the shape is that of an A100, and memory is not checked. A custom loop
may describe its model and its GPU; of another loop only micro-batches and bubbles count.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from msgspec.structs import replace

from ...events.spec.job import JobSpec, Loop, Train
from ...events.spec.model import Axes, MegatronModel
from ...events.spec.parallelism import VOCABULARY, Sharding, layout_in_words
from .flops import iteration_flops
from .layouts import Layout, Shards
from .memory import Memory, capacity, in_gib, memory
from .step_time import constants_of, iteration_s

_SPEEDS_NUM = 4096
_SHARDS: Mapping[Sharding, Shards] = {
    "whole": "none",
    "sharded": "optimizer",
    "mirrored": "mirrored",
}


def megatron_model(train: Train) -> MegatronModel:
    """The model of a `train:` task as input of the analytical model."""
    model = train.model
    return MegatronModel(
        num_layers=model.num_layers,
        hidden=model.hidden,
        num_heads=model.num_heads,
        sequence=model.sequence,
        vocabulary=VOCABULARY,
        tie_embeddings=model.tie_embeddings,
        dropout=model.dropout,
        gpu="A100-80",
        global_batch=train.batch.global_,
        micro_batch=train.batch.micro,
        zero1=train.parallel.optimizer != "whole",
        overlap=train.overlap,
    )


def described(train: Train | Loop) -> MegatronModel | None:
    """The model for the analytical model, with the sum that recovery keeps; None: not described."""
    bits = 0 if train.reproducible == "rounding" else train.reproducible_bits
    if isinstance(train, Train):
        return replace(megatron_model(train), kept_sum=train.kept_sum, exact_sum_bits=bits)
    if train.model is None:
        return None
    return replace(
        train.model,
        micro_batch=train.model.global_batch // train.micro_batches,
        kept_sum=train.kept_sum,
        exact_sum_bits=bits,
    )


def layout_on(train: Train | Loop, model: MegatronModel, axes: Axes) -> Layout:
    """The layout as input of the analytical model. `train:` has no sequence parallelism."""
    return Layout(
        tp=axes.tp,
        pp=axes.pp,
        dp=axes.dp,
        micro=model.micro_batch,
        chunks=axes.chunks,
        recompute="none" if model.recompute == "any" else model.recompute,
        sequence_parallel=isinstance(train, Loop),
        shards=_SHARDS[train.parallel.optimizer],
    )


def memory_on(train: Train | Loop, axes: Axes) -> Memory | None:
    """The memory of a rank; None: unknown. Of a `train:` task, which names no GPU, only tensors."""
    model = described(train)
    if model is None:
        return None
    found = memory(model, layout_on(train, model, axes))
    if isinstance(train, Loop):
        return found
    found = replace(found, reserved=0.0)
    if train.precision == "fp32":  # no master copy; twice the width
        return replace(
            found,
            weights=2 * found.weights,
            optimizer=found.optimizer * 2 / 3,
            activations=2 * found.activations,
        )
    return found


def with_mirrors(job: JobSpec) -> JobSpec:
    """The job with a mirror of each optimizer shard, if it has shards, permits mirrors, and every
    number of slots has the same layout with them: memory for them."""
    train = job.training
    if train is None or train.parallel.optimizer != "sharded" or train.parallel.mirror == "never":
        return job
    twice = replace(train, parallel=replace(train.parallel, optimizer="mirrored"))
    if any(layout_of(twice, num) != layout_of(train, num) for num in job.slots.counts):
        return job
    return replace(job, **{"train" if isinstance(train, Train) else "loop": twice})


def slot_flops(train: Train | Loop) -> float:
    """FLOP/s of one slot by the loop's model, if it had room for it; 0 without a model."""
    if isinstance(train, Train) or train.model is None:
        return 0.0
    return iteration_flops(train.model) / _iteration_s(train, Axes())


def refusal(train: Train | Loop, counts: Iterable[int]) -> str:
    """Why no layout on one of these numbers of slots fits into memory; empty if one does."""
    model = described(train)
    if isinstance(train, Train) or model is None:
        return ""
    least: tuple[float, Axes] | None = None
    for count in counts:
        for axes in train.parallel.layouts(count, train.num_micro_batches):
            needs = memory(model, layout_on(train, model, axes)).total
            if needs <= capacity(model):
                return ""
            least = min(least or (needs, axes), (needs, axes), key=lambda one: one[0])
    if least is None:
        return "no layout of loop.parallel has one of these numbers of slots"
    return (
        f"no layout of loop.parallel fits into {in_gib(capacity(model))}: "
        f"{layout_in_words(least[1])} needs {in_gib(least[0])}"
    )


def speed(train: Train | Loop, num_slots: int) -> float:
    """Speed of `num_slots` slots relative to one; 0 if there is no layout. In a data-parallel task,
    an iteration takes the time of ceil(micro-batches / slots) micro-batches."""
    if train.parallel.is_plain and (isinstance(train, Train) or train.model is None):
        num = train.num_micro_batches
        return num / -(-num // num_slots)
    return _fastest(train, num_slots)[0]


def layout_of(train: Train | Loop, num_slots: int) -> Axes | None:
    """The fastest permitted layout of exactly `num_slots`, of equals the first; None if none."""
    return None if train.parallel.is_plain else _fastest(train, num_slots)[1]


@lru_cache(maxsize=_SPEEDS_NUM)
def layout_within(train: Train | Loop, num_slots: int) -> Axes | None:
    """The fastest permitted layout of at most `num_slots` slots; of equals, the smallest."""
    if train.parallel.is_plain:
        return None
    best = max(range(num_slots + 1), key=lambda num: (_fastest(train, num)[0], -num))
    return layout_of(train, best)


@lru_cache(maxsize=_SPEEDS_NUM)
def _fastest(train: Train | Loop, num_slots: int) -> tuple[float, Axes | None]:
    alone_s, model = _iteration_s(train, Axes()), described(train)
    best: tuple[float, Axes | None] = (0.0, None)
    for axes in train.parallel.layouts(num_slots, train.num_micro_batches):
        if (
            isinstance(train, Loop)
            and model is not None
            and (memory(model, layout_on(train, model, axes)).total > capacity(model))
        ):
            continue
        times = alone_s / _iteration_s(train, axes)
        if times > best[0]:
            best = times, axes
    return best


def _iteration_s(train: Train | Loop, axes: Axes) -> float:
    model = described(train)
    if model is None:
        num = -(-train.num_micro_batches // axes.dp)
        return (num + (axes.pp - 1) / axes.chunks) / (axes.tp * axes.pp)
    return iteration_s(model, layout_on(train, model, axes), constants_of(model))
