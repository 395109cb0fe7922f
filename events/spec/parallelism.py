"""The layouts that a training task may have: a spec's `train.parallel`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from .model import Axes

AXIS_NUM_MAX = 1024
VOCABULARY = 256
"""Of a trainee: a token is a byte."""
_FILLS_UP = "leave it out: data parallelism takes the slots that are left"
_NO_AXIS = "there is no such axis: unicron doctor --support"
Need = Callable[..., None]
Kept = Literal["whole", "sharded", "mirrored"]
"""What each rank has of the optimizer's state."""


class Parallel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tensor- and pipeline-parallel sizes the plan may choose from; data-parallel fills up.

    `chunks` is Megatron's number of virtual pipeline stages of each rank, where there is a
    pipeline. `optimizer`: `whole`, each rank has all of its part's; `sharded`, Megatron's
    distributed optimizer (ZeRO-1), where the loss of a shard's only holder sets the task back to
    the last copy; `mirrored`, the same with each shard also on the next data-parallel rank, so
    that no iteration is lost.
    """

    NOT_KEYS: ClassVar[dict[str, str]] = {
        "tp": "did you mean tensor?", "pp": "did you mean pipeline?",
        "vpp": "did you mean chunks?", "zero": "did you mean optimizer?",
        "data": f"{_FILLS_UP}; files stand under train.data", "dp": _FILLS_UP,
        **dict.fromkeys(("expert", "experts", "ep", "context", "cp", "sequence", "sp"), _NO_AXIS)}
    """What people write here that is no key, and what to tell them (refused.py)."""
    tensor: tuple[int, ...] = (1,)
    pipeline: tuple[int, ...] = (1,)
    chunks: int = 1
    optimizer: Kept = "whole"

    @property
    def is_plain(self) -> bool:
        """Data-parallel alone, with the whole optimizer on each rank."""
        return self.tensor == (1,) and self.pipeline == (1,) and self.optimizer == "whole"

    def shapes(self) -> Iterator[Axes]:
        """Every permitted layout of one replica (dp is 1), in the order in which they are named."""
        for tp in self.tensor:
            for pp in self.pipeline:
                yield Axes(tp=tp, pp=pp, chunks=self.chunks if pp > 1 else 1)

    def layouts(self, num_slots: int, num_micro_batches: int) -> Iterator[Axes]:
        """Every permitted layout of exactly so many slots: each replica has a micro-batch."""
        for axes in self.shapes():
            dp, rest = divmod(num_slots, axes.tp * axes.pp)
            if not rest and 1 <= dp <= num_micro_batches:
                yield replace(axes, dp=dp)


def whole_on_each(axes: Axes, parallel: Parallel) -> bool:
    """Whether in this layout every member has the whole state."""
    return axes.tp * axes.pp == 1 and parallel.optimizer == "whole"


def check_parallel(parallel: Parallel, num_layers: int, num_heads: int, *, overlap: bool,
                   need: Need) -> None:
    """Tell `need` what has to hold; it raises where something does not."""
    check_sizes(parallel, "train.parallel", need)
    shared = math.gcd(num_heads, VOCABULARY)
    hint = "possible: " + ", ".join(str(size) for size in range(1, shared + 1)
                                    if shared % size == 0)
    for size in parallel.tensor:
        need(num_heads % size == 0, "train.parallel.tensor",
             f"{size} does not divide train.model.num_heads {num_heads}", hint)
        need(VOCABULARY % size == 0, "train.parallel.tensor",
             f"{size} does not divide the vocabulary, the {VOCABULARY} bytes", hint)
    for axes in parallel.shapes():
        stages = axes.pp * axes.chunks
        chunks = f" with {axes.chunks} chunks" if axes.chunks > 1 else ""
        need(num_layers % stages == 0, "train.parallel.pipeline",
             f"{axes.pp}{chunks} does not divide train.model.num_layers {num_layers}")
    need(not overlap or parallel.is_plain, "train.overlap",
         "is for data-parallel training with the whole optimizer alone",
         "leave it out, or leave out train.parallel")


def check_sizes(parallel: Parallel, path: str, need: Need) -> None:
    """The same of what can be said without the model; `path` is where it stands in the spec."""
    for name, sizes in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)):
        need(bool(sizes), f"{path}.{name}", "names no size", "leave it out for 1 alone")
        for size in sizes:
            need(1 <= size <= AXIS_NUM_MAX, f"{path}.{name}",
                 f"{size} must be at least 1 and at most {AXIS_NUM_MAX}")
        need(len(set(sizes)) == len(sizes), f"{path}.{name}", "names a size twice",
             "name each once")
    need(parallel.chunks >= 1, f"{path}.chunks", "must be at least 1")
    need(parallel.chunks == 1 or max(parallel.pipeline) > 1, f"{path}.chunks",
         "is of no use without a pipeline", "leave it out, or name a pipeline size above 1")


def check_fits(parallel: Parallel, num_micro_batches: int, counts: Sequence[int], floor: int,
               path: str, need: Need) -> None:
    """Whether it has a layout of one of these numbers of slots, ascending, and of the floor."""
    need(any(True for count in counts for _ in parallel.layouts(count, num_micro_batches)),
         path, f"no layout of it has a number of slots that slots permits, of {counts[0]} to "
         f"{counts[-1]}", "raise slots.max, or name other sizes")
    need(not floor or any(True for _ in parallel.layouts(floor, num_micro_batches)), "slots.floor",
         f"{path} has no layout of {floor} slots", "name a number that has one")


# --- Places in a layout: who of a generation has which part of the model, in Megatron's order. ---
#
# Members beyond the layout's places are beside it: they give what they hold, and train nothing.
# Source: megatron-core, parallel_state.RankGenerator with its default order, tp-cp-ep-dp-pp.


class Coordinates(NamedTuple):
    """Where a member stands on each axis, from 0."""

    tp: int
    pp: int
    dp: int


def num_places(axes: Axes) -> int:
    """How many members train."""
    return axes.tp * axes.pp * axes.dp


def is_plain(axes: Axes) -> bool:
    """Whether every member is a whole replica: data-parallel alone."""
    return axes.tp * axes.pp == 1


def coordinates(axes: Axes, place: int) -> Coordinates:
    """Of the member at `place`, which is one of the layout's."""
    assert 0 <= place < num_places(axes), "beside the layout"
    rest, tp = divmod(place, axes.tp)
    pp, dp = divmod(rest, axes.dp)
    return Coordinates(tp=tp, pp=pp, dp=dp)


def place_of(axes: Axes, at: Coordinates) -> int:
    """The place of the member that stands there."""
    return (at.pp * axes.dp + at.dp) * axes.tp + at.tp


def replica(axes: Axes, dp: int) -> tuple[int, ...]:
    """Places of the members that are one replica, ascending."""
    return tuple(place_of(axes, Coordinates(tp=tp, pp=pp, dp=dp))
                 for pp in range(axes.pp) for tp in range(axes.tp))


def holders(axes: Axes, tp: int, pp: int) -> tuple[int, ...]:
    """Places of the members that have the same part of the model, ascending."""
    return tuple(place_of(axes, Coordinates(tp=tp, pp=pp, dp=dp)) for dp in range(axes.dp))


def shape(axes: Axes) -> tuple[int, int, int]:
    """How one replica is split: in layouts of one shape the same coordinates have the same part."""
    return axes.tp, axes.pp, axes.chunks


def covers(axes: Axes, optimizer: Kept, places: Collection[int]) -> bool:
    """Whether the members at these places have the whole state between them."""
    return next(lacking(axes, optimizer, places), None) is None


def lacking(axes: Axes, optimizer: Kept, places: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Of each part of the state that none of the members at these places has: who has it."""
    had = set(places)
    if optimizer == "whole":
        parts = (holders(axes, tp, pp) for tp in range(axes.tp) for pp in range(axes.pp))
    elif optimizer == "sharded":
        parts = ((place,) for place in range(num_places(axes)))
    else:
        parts = ((place, mirror(axes, place)) for place in range(num_places(axes)))
    return (part for part in parts if had.isdisjoint(part))


def mirror(axes: Axes, place: int) -> int:
    """The place of the next on its data-parallel ring: with a mirrored optimizer it has its shard
    too."""
    at = coordinates(axes, place)
    return place_of(axes, at._replace(dp=(at.dp + 1) % axes.dp))


def speaks(axes: Axes, place: int) -> bool:
    """Whether the member at `place` tells of micro-batches: of a replica its first alone."""
    return place < num_places(axes) and coordinates(axes, place)[:2] == (0, 0)


def in_words(axes: Axes) -> str:
    """As a person would say it: `TP 2 x DP 2`."""
    sizes = [f"{name} {num}" for name, num in (("TP", axes.tp), ("PP", axes.pp)) if num > 1]
    chunks = f", {axes.chunks} chunks a stage" if axes.chunks > 1 else ""
    return f"{' x '.join([*sizes, f'DP {axes.dp}'])}{chunks}"


def briefly(axes: Axes) -> str:
    """The same in a table: `TP2xDP2`."""
    sizes = [f"{name}{num}" for name, num in (("TP", axes.tp), ("PP", axes.pp)) if num > 1]
    return "x".join([*sizes, f"DP{axes.dp}"])


def part_in_words(axes: Axes, place: int, *, sharded: bool) -> str:
    """What the member there has, of what not all have: `TP 0, stage 1, shard 2`."""
    if place >= num_places(axes):
        return "beside"
    at = coordinates(axes, place)
    return ", ".join(f"{name} {number}" for name, number, num in (
        ("TP", at.tp, axes.tp), ("stage", at.pp, axes.pp),
        ("shard", at.dp, axes.dp if sharded else 1)) if num > 1)
