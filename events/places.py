"""Places in a layout: who of a generation has which part of the model, in Megatron's order.

Members beyond the layout's places are beside it: they give what they hold, and train nothing.
Source: megatron-core, parallel_state.RankGenerator with its default order, tp-cp-ep-dp-pp.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from .model_spec import Axes
from .parallel import Kept


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
