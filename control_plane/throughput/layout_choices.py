"""Layout, time, memory and limit of one job by number of slots, computed from the spec alone."""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ...events.spec.job import JobSpec, Loop, Train
from ...events.spec.model import Axes, MegatronModel
from ...events.spec.parallelism import layout_in_words, num_positions
from . import table
from .flops import iteration_flops, parameters
from .layout_search import AMPLE_TIMES, GAIN_RATIO_MIN, losses, modelled
from .layouts import Layout
from .lost_rank import lost_rank_costs
from .memory import Memory, capacity, in_gib, memory
from .state_size import NUM_STORES_MAX, OPTIMIZER_BYTES, copies_bytes
from .step_time import constants_of, iteration_s
from .training_layouts import (
    described,
    layout_of,
    layout_on,
    memory_on,
    refusal,
    speed,
    with_mirrors,
)

CHOICES_NUM_MAX = 12
"""If more numbers of slots are permitted, only doublings of the smallest and the largest count."""


class Choice(Struct, frozen=True, kw_only=True):
    """The layout on one number of slots; None: not known. `speed`: relative to the first choice.
    `memory_bytes`: of the fullest rank, with `kept_bytes` for the sums that recovery keeps."""

    slots: int
    layout: str
    axes: Axes
    speed: float
    iteration_s: float | None = None
    rate_flops: float | None = None
    memory_bytes: float | None = None
    kept_bytes: float | None = None
    node_copies_bytes: float | None = None
    """Host memory of in-memory checkpoints on each node, if the spec names the GPUs of a node."""
    notes: tuple[str, ...] = ()
    """How it trains, and what limits it."""


class Choices(Struct, frozen=True, kw_only=True):
    """The answer for a job. `gpu` is empty and `capacity_bytes` 0 if the spec names no GPU."""

    num_parameters: int = 0
    gpu: str = ""
    capacity_bytes: int = 0
    choices: tuple[Choice, ...] = ()
    num_others: int = 0
    """Permitted numbers of slots that have a layout and are left out."""
    copies_bytes: int = 0
    """Host memory of in-memory checkpoints, all nodes together; 0: none, or not known."""
    refused: str = ""
    """Why no number of slots has a layout."""


def choices(spec: JobSpec) -> Choices:
    """Search the layouts of a job; takes up to seconds for a large `model`."""
    spec = with_mirrors(spec)
    if spec.training is not None:
        return _of_training(spec, spec.training)
    return _of_command(spec, spec.model) if spec.model is not None else Choices()


def _of_command(spec: JobSpec, model: MegatronModel) -> Choices:
    found = modelled(model, spec.slots.max)
    about = Choices(
        num_parameters=parameters(model).total,
        gpu=model.gpu,
        capacity_bytes=capacity(model),
        refused=found.refused,
    )
    least = found.sizes[0] if found.sizes else 0
    counts = [count for count in spec.slots.counts if count >= least] if found.sizes else []
    if found.sizes and not counts:
        return replace(about, refused=f"no layout on at most {spec.slots.max} slots")
    rows = list[Choice]()
    for count in shown(counts):
        axes = table.axes(spec, found, count)
        assert axes is not None, "a size has a layout"
        layout = Layout(
            tp=axes.tp,
            pp=axes.pp,
            cp=axes.cp,
            ep=axes.ep,
            dp=axes.dp,
            micro=axes.micro_batch,
            chunks=axes.chunks,
            recompute=axes.recompute,
            shards="optimizer" if model.zero1 else "none",
        )
        limit = table.layout(found, count).rpartition("; ")[2]
        rows.append(_choice(count, axes, model, layout, memory(model, layout), rows, limit))
    return replace(about, choices=tuple(rows), num_others=len(counts) - len(rows))


def _of_training(spec: JobSpec, train: Train | Loop) -> Choices:
    model = described(train)
    about = Choices(
        num_parameters=parameters(model).total if model is not None else 0,
        copies_bytes=copies_bytes(spec),
    )
    if isinstance(train, Loop) and model is not None:
        about = replace(about, gpu=model.gpu, capacity_bytes=capacity(model))
    if why := refusal(train, spec.slots.counts):
        return replace(about, refused=why)
    counts = [count for count in spec.slots.counts if speed(train, count) > 0]
    rows = list[Choice]()
    for count in shown(counts):
        axes = layout_of(train, count) or Axes(dp=count)
        if model is None or isinstance(train, Train):
            # The spec names no GPU, so times are only relative.
            needs = memory_on(train, axes)
            rows.append(
                Choice(
                    slots=count,
                    layout=layout_in_words(axes),
                    axes=axes,
                    notes=_lost_rank(train, axes, needs),
                    speed=speed(train, count) / speed(train, counts[0]),
                    memory_bytes=needs.total if needs is not None else None,
                    kept_bytes=needs.kept if needs is not None else None,
                )
            )
            continue
        layout = layout_on(train, model, axes)
        needs = memory(model, layout)
        row = _choice(count, axes, model, layout, needs, rows, _limit(train, model, axes))
        nodes = max(NUM_STORES_MAX, -(-count // model.gpus_per_node))  # one node has one store
        rows.append(
            replace(
                row,
                notes=(*row.notes, *_lost_rank(train, axes, needs)),
                node_copies_bytes=about.copies_bytes / nodes or None,
            )
        )
    return replace(about, choices=tuple(rows), num_others=len(counts) - len(rows))


def _choice(
    count: int,
    axes: Axes,
    model: MegatronModel,
    layout: Layout,
    needs: Memory,
    before: Sequence[Choice],
    limit: str,
) -> Choice:
    lasts_s = iteration_s(model, layout, constants_of(model))
    first = before[0].iteration_s if before else None
    return Choice(
        slots=count,
        layout=layout.axes_in_words(),
        axes=axes,
        speed=(first or lasts_s) / lasts_s,
        iteration_s=lasts_s,
        rate_flops=iteration_flops(model) / lasts_s,
        memory_bytes=needs.total,
        kept_bytes=needs.kept,
        notes=(layout.passes_in_words(), limit),
    )


def _limit(train: Loop, model: MegatronModel, axes: Axes) -> str:
    """What limits a loop's layout: memory, if AMPLE_TIMES the memory would allow a faster one."""
    constants = constants_of(model)
    now_s = iteration_s(model, layout_on(train, model, axes), constants)
    gain, other, needs = GAIN_RATIO_MIN, axes, 0.0
    for tried in train.parallel.layouts(num_positions(axes), train.num_micro_batches):
        layout = layout_on(train, model, tried)
        times, room = now_s / iteration_s(model, layout, constants), memory(model, layout).total
        if times > gain and room <= AMPLE_TIMES * capacity(model):
            gain, other, needs = times, tried, room
    if other is not axes:
        return (
            f"memory binds: {layout_in_words(other)} needs {in_gib(needs)} and would be "
            f"{100 * (gain - 1):.0f} % faster"
        )
    what, share = losses(model, layout_on(train, model, axes))[0]
    return f"most is lost to {what}: {100 * share:.0f} % of the time"


def _lost_rank(train: Train | Loop, axes: Axes, needs: Memory | None) -> tuple[str, ...]:
    """What the loss of one rank costs, if that is to be said."""
    mirrored_bytes = needs.optimizer / 2 if needs is not None else 0.0
    each = OPTIMIZER_BYTES[train.precision if isinstance(train, Train) else "bf16"]
    costs = lost_rank_costs(
        train, axes, mirrored_params=mirrored_bytes / each, mirrored_bytes=mirrored_bytes
    )
    return (f"a lost rank costs {costs}",) if costs else ()


def shown(counts: Sequence[int]) -> Iterator[int]:
    """The numbers of slots that the answer has: all if they are few."""
    if len(counts) <= CHOICES_NUM_MAX:
        yield from counts
        return
    after = 0
    for count in counts[:-1]:
        if count >= after:
            yield count
            after = 2 * count
    yield counts[-1]
