"""Membership of the next generation: its ranks, their layout and their positions.

Members without a position are standby members: spares, and ranks that alone have some state. If the
shape of a replica stays the same, each rank keeps its part of the model. Otherwise tensor-parallel
groups, then replicas, are on one node if possible, the copies of each part on many nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ...events.records.types import Seat, Slot
from ...events.spec.model import Axes
from ...events.spec.parallelism import (
    Coordinates,
    coordinates,
    num_positions,
    position_of,
    replica,
    shape,
)
from ..placement.tensor_groups import ranked
from ..state.cluster import ClusterState
from ..state.members import is_complete
from ..state.task import HeldState, Rank, Task
from ..throughput.training_layouts import layout_within
from .preemption import is_starting


class Membership(NamedTuple):
    """Members in order of position. If `axes` is None, the layout is data-parallel only."""

    axes: Axes | None
    members: list[Rank]


NO_MEMBERS = Membership(None, [])


def next_membership(state: ClusterState, task: Task) -> Membership:
    """The waiting ranks that have a seat; NO_MEMBERS if they are too few for any layout. Ranks
    without a seat stay members while newcomers are starting. They also stay if only they have the
    state, a part of it, or the newest step: then the others receive it from them."""
    train = task.spec.training
    assert train is not None
    holding = [rank for key in sorted(task.ranks) if _holds(task, rank := task.ranks[key])]
    slots = task.seats_at
    seated = [rank for rank in holding if slots.get(rank.rank) == rank.slot]
    others = [rank for rank in holding if rank.has_state and slots.get(rank.rank) != rank.slot]
    if any(is_starting(state, task, seat) for seat in task.target):
        seated, others = seated + others, []
    if not seated:
        return NO_MEMBERS
    if train.parallel.is_plain:
        most = max(rank.step_version for rank in seated)
        if any(rank.step_version > most for rank in others):
            seated += others
        # The first member reports progress, so it must be a rank with state.
        return Membership(None, sorted(seated, key=lambda rank: (not rank.has_state, rank.rank)))
    axes = layout_within(train, len(seated))
    if axes is None:
        return NO_MEMBERS
    most = max((rank.step_version for rank in holding if rank.has_state), default=-1)
    if not others or is_complete(task, seated, most):
        others = []
    apart = train.parallel.optimizer == "mirrored"
    return Membership(axes, [*order_members(axes, seated, apart=apart), *others])


def expected_positions(task: Task) -> tuple[Axes | None, dict[int, int]]:
    """The positions of the task's ranks once every seat has one, if nothing else changes: starting
    processes build these parts. Members that are left first form a generation of their own."""
    train = task.spec.training
    assert train is not None
    ranks = [_rank_in(task, seat) for seat in task.target]
    if train.parallel.is_plain:
        axes, order = None, sorted(ranks, key=lambda rank: (not rank.has_state, rank.rank))
    else:
        axes = layout_within(train, len(ranks))
        if axes is None:
            return None, {}
        apart = train.parallel.optimizer == "mirrored"
        left = [rank for rank in ranks if rank.has_state]
        between = layout_within(train, len(left))
        if between is not None and len(task.living_members()) < len(task.members):
            held = {
                rank.rank: HeldState(generation=task.generation + 1, axes=between, place=place)
                for place, rank in enumerate(order_members(between, left, apart=apart))
                if place < num_positions(between)
            }
            ranks = [replace(rank, held=held.get(rank.rank)) for rank in ranks]
        order = order_members(axes, ranks, apart=apart)
    return axes, {rank.rank: place for place, rank in enumerate(order)}


def _rank_in(task: Task, seat: Seat) -> Rank:
    """The rank in a seat, or one that is still to be started."""
    rank = task.ranks.get(seat.rank)
    if rank is None or rank.slot != seat.slot or not rank.is_healthy:
        return Rank(rank=seat.rank, attempt=0, slot=seat.slot)
    return rank


def _holds(task: Task, rank: Rank) -> bool:
    member = rank.quiesced == task.generation and task.member(rank.rank) is rank
    return rank.is_healthy and (rank.state == "ready" or (rank.state == "member" and member))


# --- the order of members ---
def order_members(axes: Axes, ranks: Sequence[Rank], *, apart: bool = False) -> list[Rank]:
    """The ranks by position, then the standby members. The ranks must suffice for the layout. With
    `apart`, consecutive replicas are on different nodes, since each mirrors the one before it."""
    last = max(
        (rank.held for rank in ranks if rank.held is not None),
        key=lambda held: held.generation,
        default=None,
    )
    parts: dict[Slot, Coordinates] = {}
    if last is not None and shape(last.axes) == shape(axes):
        parts = {
            rank.slot: coordinates(last.axes, rank.held.place)
            for rank in ranks
            if rank.held is not None and rank.held.generation == last.generation
        }
    places = _kept_positions(axes, parts, same=last is not None and last.axes.dp == axes.dp)
    taken = set(places.values())
    left = [rank.slot for rank in ranks if rank.slot not in taken]
    for dp in range(axes.dp):
        _fill_holes(axes, replica(axes, dp), places, left, parts)
    empty = [dp for dp in range(axes.dp) if replica(axes, dp)[0] not in places]
    each = len(replica(axes, 0))
    left = ranked(left, each, axes.tp)
    groups = [left[at : at + each] for at in range(0, len(empty) * each, each)]
    left = left[len(empty) * each :]
    for dp, slots in zip(empty, _alternate_nodes(groups) if apart else groups, strict=True):
        places |= zip(replica(axes, dp), slots, strict=True)
    there = {rank.slot: rank for rank in ranks}
    return [there[slot] for slot in (*(places[place] for place in sorted(places)), *left)]


def _kept_positions(axes: Axes, parts: dict[Slot, Coordinates], *, same: bool) -> dict[int, Slot]:
    """The slot of each kept position, from the fullest replicas. `same`: dp is unchanged."""
    replicas: dict[int, dict[Slot, Coordinates]] = {}
    for slot, at in parts.items():
        replicas.setdefault(at.dp, {})[slot] = at
    fullest = sorted(replicas, key=lambda dp: (-len(replicas[dp]), dp))[: axes.dp]
    return {
        position_of(axes, at._replace(dp=dp if same else number)): slot
        for number, dp in enumerate(sorted(fullest))
        for slot, at in replicas[dp].items()
    }


def _alternate_nodes(groups: Sequence[list[Slot]]) -> list[list[Slot]]:
    """The groups reordered: the first group of each node, then the second of each, and so on."""
    on: dict[str, list[list[Slot]]] = {}
    for group in groups:
        on.setdefault(group[0].node, []).append(group)
    longest = max(map(len, on.values()), default=0)
    return [own[at] for at in range(longest) for own in on.values() if at < len(own)]


def _fill_holes(
    axes: Axes,
    own: Sequence[int],
    places: dict[int, Slot],
    left: list[Slot],
    parts: dict[Slot, Coordinates],
) -> None:
    """Fill the open positions of a partly filled replica with the nearest slots of `left`."""
    for hole in own if any(place in places for place in own) else ():
        if hole in places:
            continue
        tp, pp, _ = coordinates(axes, hole)
        peers = {places[place].node for place in own if place in places}
        near = {
            places[place].node
            for place in own
            if place in places and coordinates(axes, place).pp == pp
        }
        # A group on two nodes slows every iteration, whereas moving its state costs time once.
        places[hole] = slot = min(
            left,
            key=lambda slot: (
                bool(near) and slot.node not in near,
                parts.get(slot, (-1, -1))[:2] != (tp, pp),
                slot.node not in peers,
                slot,
            ),
        )
        left.remove(slot)
