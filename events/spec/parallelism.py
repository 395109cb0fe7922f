"""Parallel layouts: the spec's `train.parallel`, and the positions of a layout."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from .model import Axes, MegatronModel
from .validation import need

AXIS_NUM_MAX = 1024
VOCABULARY = 256
"""Vocabulary of the model of `train:`: a token is a byte."""
_FILLS_UP = "leave it out: data parallelism takes the remaining slots"
_NO_AXIS = "there is no such axis: unicron doctor --support"
Sharding = Literal["whole", "sharded", "mirrored"]
"""Which part of the optimizer state each rank holds."""


class Parallel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tensor- and pipeline-parallel sizes that the planner may choose from; data parallelism
    takes the remaining slots.

    `chunks` is Megatron's number of virtual pipeline stages per rank, used with a pipeline.
    `optimizer`: with `whole`, each rank holds the optimizer state of its part of the model.
    `sharded` is Megatron's distributed optimizer (ZeRO-1): if the only holder of a shard is lost,
    the task goes back to its last in-memory checkpoint. With `mirrored`, each shard is also on the
    next data-parallel rank, so that no iteration is lost. `mirror` auto: a job with `sharded` is
    submitted as `mirrored` if each layout has the memory for it. never: it stays `sharded`.
    """

    OTHER_NAMES: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("tp", "tensor_parallel", "tensor_model_parallel_size"), "tensor"),
        **dict.fromkeys(("pp", "pipeline_parallel", "pipeline_model_parallel_size"), "pipeline"),
        **dict.fromkeys(
            ("vpp", "virtual_pipeline", "virtual_pipeline_model_parallel_size"), "chunks"
        ),
        **dict.fromkeys(
            ("zero", "zero1", "distributed_optimizer", "use_distributed_optimizer"),
            "optimizer: sharded",
        ),
    }
    """What users write, here or elsewhere, for a key of this mapping (validation.py)."""
    NOT_KEYS: ClassVar[dict[str, str]] = {
        "data": f"{_FILLS_UP}; files are under train.data",
        "dp": _FILLS_UP,
        **dict.fromkeys(("expert", "experts", "ep", "context", "cp", "sequence", "sp"), _NO_AXIS),
    }
    """Hints for words that users write here and that are not keys (validation.py)."""
    tensor: tuple[int, ...] = (1,)
    pipeline: tuple[int, ...] = (1,)
    chunks: int = 1
    optimizer: Sharding = "whole"
    mirror: Literal["auto", "never"] = "auto"

    @property
    def is_plain(self) -> bool:
        """Data-parallel only, with the whole optimizer on each rank."""
        return self.tensor == (1,) and self.pipeline == (1,) and self.optimizer == "whole"

    def shapes(self) -> Iterator[Axes]:
        """Every permitted layout of one replica (dp is 1), in the order of the spec."""
        for tp in self.tensor:
            for pp in self.pipeline:
                yield Axes(tp=tp, pp=pp, chunks=self.chunks if pp > 1 else 1)

    @property
    def largest(self) -> Axes:
        """The permitted layout of the largest replica (dp is 1)."""
        return max(self.shapes(), key=lambda axes: axes.tp * axes.pp)

    def layouts(self, num_slots: int, num_micro_batches: int) -> Iterator[Axes]:
        """Every permitted layout of exactly `num_slots` where each replica has a micro-batch."""
        for axes in self.shapes():
            dp, rest = divmod(num_slots, axes.tp * axes.pp)
            if not rest and 1 <= dp <= num_micro_batches:
                yield replace(axes, dp=dp)


def is_fully_replicated(axes: Axes, parallel: Parallel) -> bool:
    """Whether every member of this layout has the whole state."""
    return axes.tp * axes.pp == 1 and parallel.optimizer == "whole"


def check_parallel(parallel: Parallel, num_layers: int, num_heads: int, *, overlap: bool) -> None:
    """Check `train.parallel`. Raises SpecError."""
    path = "train.parallel"
    check_sizes(parallel, path)
    _check_divides(
        parallel,
        path,
        {
            f"train.model.num_heads {num_heads}": num_heads,
            f"the vocabulary, the {VOCABULARY} bytes": VOCABULARY,
        },
    )
    _check_stages(parallel, path, "train.model.num_layers", num_layers)
    need(
        not overlap or parallel.is_plain,
        "train.overlap",
        "is only for data-parallel training with the whole optimizer",
        "leave it out, or leave out train.parallel",
    )


def check_splits(parallel: Parallel, model: MegatronModel, path: str) -> None:
    """Check the sizes at `path` of the spec against a model. Raises SpecError."""
    _check_divides(
        parallel,
        path,
        {
            f"{name} {number}": number
            for name, number in (
                ("num_heads", model.num_heads),
                ("num_query_groups", model.num_groups),
                ("ffn_hidden", model.ffn),
                ("vocabulary", model.vocabulary),
            )
        },
        model.gpus_per_node,
    )
    _check_stages(parallel, path, "num_layers", model.num_layers)


def _check_divides(
    parallel: Parallel, path: str, numbers: Mapping[str, int], gpus_per_node: int = AXIS_NUM_MAX
) -> None:
    """Raises SpecError unless each tensor-parallel size divides all numbers, named by their
    keys."""
    shared = math.gcd(*numbers.values())
    hint = "possible: " + ", ".join(
        str(size) for size in range(1, min(shared, gpus_per_node) + 1) if shared % size == 0
    )
    for size in parallel.tensor:
        for words, number in numbers.items():
            need(number % size == 0, f"{path}.tensor", f"{size} does not divide {words}", hint)
        need(
            size <= gpus_per_node,
            f"{path}.tensor",
            f"{size} is more than the {gpus_per_node} GPUs of a node",
            hint,
        )


def _check_stages(parallel: Parallel, path: str, name: str, num_layers: int) -> None:
    """Raises SpecError unless the stages of each pipeline divide the layers. `name`: their key."""
    for size in parallel.pipeline:
        chunks = f" with {parallel.chunks} chunks" if size > 1 < parallel.chunks else ""
        possible = [
            one
            for one in range(1, min(num_layers, AXIS_NUM_MAX) + 1)
            if num_layers % (one * (parallel.chunks if one > 1 else 1)) == 0
        ]
        need(
            size in possible,
            f"{path}.pipeline",
            f"{size}{chunks} does not divide {name} {num_layers}",
            "possible: " + ", ".join(map(str, possible)),
        )


def check_sizes(parallel: Parallel, path: str) -> None:
    """Check the sizes at `path` of the spec, without the model. Raises SpecError."""
    for name, sizes in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)):
        need(bool(sizes), f"{path}.{name}", "names no size", "leave it out for size 1")
        for size in sizes:
            need(
                1 <= size <= AXIS_NUM_MAX,
                f"{path}.{name}",
                f"{size} must be at least 1 and at most {AXIS_NUM_MAX}",
            )
        need(
            len(set(sizes)) == len(sizes), f"{path}.{name}", "names a size twice", "name each once"
        )
    need(
        parallel.mirror == "auto" or parallel.optimizer == "sharded",
        f"{path}.mirror",
        f"{parallel.mirror} contradicts {path}.optimizer, which is {parallel.optimizer}",
        "leave it out, or set the optimizer to sharded",
    )
    need(parallel.chunks >= 1, f"{path}.chunks", "must be at least 1")
    need(
        parallel.chunks == 1 or max(parallel.pipeline) > 1,
        f"{path}.chunks",
        "has no effect without a pipeline",
        "leave it out, or name a pipeline size above 1",
    )


def check_fits(
    parallel: Parallel, num_micro_batches: int, counts: Sequence[int], floor: int, path: str
) -> None:
    """Raises SpecError unless a layout fits one of `counts` (ascending), and one fits the floor."""
    need(
        any(True for count in counts for _ in parallel.layouts(count, num_micro_batches)),
        path,
        f"no layout of it has a number of slots that slots permits, of {counts[0]} to {counts[-1]}",
        "raise slots.max, or name other sizes",
    )
    need(
        not floor or any(True for _ in parallel.layouts(floor, num_micro_batches)),
        "slots.floor",
        f"{path} has no layout of {floor} slots",
        "name a number that has one",
    )


# --- Positions in a layout: which member holds which part of the model, in Megatron's order ---
#
# Members without a position are standby: they send their state to others, and do not train.
# Source: megatron-core, parallel_state.RankGenerator with its default order, tp-cp-ep-dp-pp.


class Coordinates(NamedTuple):
    """The index of a member on each axis, from 0."""

    tp: int
    pp: int
    dp: int


def num_positions(axes: Axes) -> int:
    """Number of members that train."""
    return axes.tp * axes.pp * axes.dp


def is_plain(axes: Axes) -> bool:
    """Whether every member is a whole replica: data-parallel only."""
    return axes.tp * axes.pp == 1


def coordinates(axes: Axes, position: int) -> Coordinates:
    """The coordinates of a position of the layout."""
    assert 0 <= position < num_positions(axes), "not a position of the layout"
    rest, tp = divmod(position, axes.tp)
    pp, dp = divmod(rest, axes.dp)
    return Coordinates(tp=tp, pp=pp, dp=dp)


def position_of(axes: Axes, at: Coordinates) -> int:
    """The position with these coordinates."""
    return (at.pp * axes.dp + at.dp) * axes.tp + at.tp


def replica(axes: Axes, dp: int) -> tuple[int, ...]:
    """Positions of the members of one replica, ascending."""
    return tuple(
        position_of(axes, Coordinates(tp=tp, pp=pp, dp=dp))
        for pp in range(axes.pp)
        for tp in range(axes.tp)
    )


def holders(axes: Axes, tp: int, pp: int) -> tuple[int, ...]:
    """Positions of the members that hold the same part of the model, ascending."""
    return tuple(position_of(axes, Coordinates(tp=tp, pp=pp, dp=dp)) for dp in range(axes.dp))


def shape(axes: Axes) -> tuple[int, int, int]:
    """How one replica is split. With equal shapes, equal coordinates hold the same part."""
    return axes.tp, axes.pp, axes.chunks


def has_every_part(axes: Axes, optimizer: Sharding, positions: Collection[int]) -> bool:
    """Whether the members at these positions together hold the whole state."""
    return next(missing_parts(axes, optimizer, positions), None) is None


def missing_parts(
    axes: Axes, optimizer: Sharding, positions: Collection[int]
) -> Iterator[tuple[int, ...]]:
    """For each part of the state that none of `positions` holds: the positions that hold it."""
    given = set(positions)
    if optimizer == "whole":
        parts = (holders(axes, tp, pp) for tp in range(axes.tp) for pp in range(axes.pp))
    elif optimizer == "sharded":
        parts = ((position,) for position in range(num_positions(axes)))
    else:
        parts = ((position, mirror(axes, position)) for position in range(num_positions(axes)))
    return (part for part in parts if given.isdisjoint(part))


def mirror(axes: Axes, position: int) -> int:
    """The position that mirrors this one's optimizer shard: the next on the data-parallel ring."""
    at = coordinates(axes, position)
    return position_of(axes, at._replace(dp=(at.dp + 1) % axes.dp))


def is_representative(axes: Axes, position: int) -> bool:
    """Whether this member reports micro-batches: only the first of each replica does."""
    return position < num_positions(axes) and coordinates(axes, position)[:2] == (0, 0)


def layout_in_words(axes: Axes) -> str:
    """The layout in words: `TP 2 x DP 2`."""
    sizes = [f"{name} {num}" for name, num in (("TP", axes.tp), ("PP", axes.pp)) if num > 1]
    chunks = f", {axes.chunks} chunks a stage" if axes.chunks > 1 else ""
    return f"{' x '.join([*sizes, f'DP {axes.dp}'])}{chunks}"


def layout_label(axes: Axes) -> str:
    """The layout for a table: `TP2xDP2`."""
    sizes = [f"{name}{num}" for name, num in (("TP", axes.tp), ("PP", axes.pp)) if num > 1]
    return "x".join([*sizes, f"DP{axes.dp}"])


def part_in_words(axes: Axes, position: int, *, sharded: bool) -> str:
    """The part of the state that a member holds: `TP 0, stage 1, shard 2`."""
    if position >= num_positions(axes):
        return "beside"
    at = coordinates(axes, position)
    return ", ".join(
        f"{name} {number}"
        for name, number, num in (
            ("TP", at.tp, axes.tp),
            ("stage", at.pp, axes.pp),
            ("shard", at.dp, axes.dp if sharded else 1),
        )
        if num > 1
    )
