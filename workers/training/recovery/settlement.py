"""The ledger: who runs which micro-batches of an iteration, and how members settle after a fault.

Pure: every member computes the same settlement from the same claims, so nobody has to decide it.
The rules are those of docs/ARCHITECTURE.md, "Settlement".
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ....events.spec.model import Axes
from ....events.spec.parallelism import coordinates, num_places, replica, shape
from .state_sources import NO_STATE, Claim, Holding, find, sources


class Share(Struct, frozen=True, kw_only=True):
    """A member's part: what it keeps, what it will run, and what of that came from the gone.

    `source` is the place of the member that gives it its state: its own, also if it is to have
    none; NO_STATE when nobody has any; MANY when several give it. Before it gives, it puts in force
    what it `staged`, or `steps`: divides and steps the reduced sum with what the gate told.
    """

    kept: tuple[int, ...]
    todo: tuple[int, ...]
    dealt: tuple[int, ...]
    source: int
    steps: bool = False
    staged: bool = False


class Settlement(Struct, frozen=True, kw_only=True):
    """The same for all members; `shares[i]` belongs to the member at place i."""

    step_version: int
    begun: bool
    """Whether a member had begun the iteration: if not, it is dealt anew."""
    shares: tuple[Share, ...]
    holders: tuple[int, ...] = ()
    """Places that hold the state, in one layout; between them they have all of it."""
    gate: tuple[float, ...] = ()
    """What those are to step with who are to step."""
    beyond: int = NO_STATE
    """The highest step version of which there is some state, but not all: it is lost."""


def deal(num_micro_batches: int, num_replicas: int, dp: int) -> tuple[int, ...]:
    """The micro-batches of a new iteration for replica `dp`: every `num_replicas`-th."""
    return tuple(range(dp, num_micro_batches, num_replicas))


def settle(claims: Sequence[Claim], num_micro_batches: int, axes: Axes | None = None,
           nodes: Sequence[str] = ()) -> Settlement:
    """Settle an iteration among the members whose claims these are, in order of place.

    They are to be in layout `axes`; none is data-parallel, with all of them. `nodes` are theirs, so
    that state comes from the nearest. Every micro-batch ends in exactly one replica's `kept` or
    `todo`, which all its members are told. An iteration that nobody has begun is dealt anew, so
    that newcomers get their part. O(members x (micro-batches + step versions)).
    """
    assert claims, "a generation has members"
    axes = axes or Axes(dp=len(claims))
    assert num_places(axes) <= len(claims), "a place without a member"
    holding = find(claims, axes)
    members = [replica(axes, dp) for dp in range(axes.dp)]
    standing = [dp for dp, places in enumerate(members)
                if all(_stands(claims[place], place, holding, axes) for place in places)]
    kept = _kept(claims, members, standing)
    begun = any(claims[place].begun for place, holder in holding.holders.items()
                if not holder.steps)
    if not begun:
        assert not any(kept), "what is kept was begun"
        todo = [list(deal(num_micro_batches, axes.dp, dp)) for dp in range(axes.dp)]
        dealt: list[list[int]] = [[] for _ in members]
    else:
        todo, dealt = _share_out(kept, _owners(claims, members, standing), num_micro_batches)
    gives = sources(holding.holders, axes, nodes or [""] * len(claims))
    highest = max(claim.step_version for claim in claims)

    def share(place: int) -> Share:
        holder = holding.holders.get(place)
        dp = coordinates(axes, place).dp if place < num_places(axes) else None
        return Share(
            kept=() if dp is None else tuple(sorted(kept[dp])),
            todo=() if dp is None else tuple(sorted(todo[dp])),
            dealt=() if dp is None else tuple(sorted(dealt[dp])), source=gives[place],
            steps=holder is not None and holder.steps,
            staged=holder is not None and holder.staged)

    return Settlement(
        step_version=holding.step_version, begun=begun,
        shares=tuple(share(place) for place in range(len(claims))),
        holders=tuple(sorted(holding.holders)), gate=holding.gate,
        beyond=highest if highest > holding.step_version else NO_STATE)


def _stands(claim: Claim, place: int, holding: Holding, axes: Axes) -> bool:
    """Whether what it has of the iteration is of the part that it is to have at `place`."""
    holder = holding.holders.get(place)
    if holder is None or holder.steps or holder.staged:
        return False
    at = coordinates(axes, place)
    return holder.held.shape == shape(axes) and holder.held.part == (at.tp, at.pp)


def _kept(claims: Sequence[Claim], members: Sequence[Sequence[int]], standing: Sequence[int]
          ) -> list[tuple[int, ...]]:
    """Sums that count, by replica: those of the same micro-batches on all its members.

    A sum is all or nothing: one micro-batch claimed twice costs it whole.
    """
    newest_first = sorted(standing, key=lambda dp: (
        -min(claims[place].trained_in for place in members[dp]), dp))
    kept: list[tuple[int, ...]] = [() for _ in members]
    taken: set[int] = set()
    for dp in newest_first:
        sums = {claims[place].kept for place in members[dp]}
        if len(sums) == 1 and taken.isdisjoint(*sums):
            kept[dp] = sums.pop()
            taken.update(kept[dp])
    return kept


def _owners(claims: Sequence[Claim], members: Sequence[Sequence[int]], standing: Sequence[int]
            ) -> dict[int, int]:
    """Micro-batch -> the standing replica to which it was last dealt."""
    oldest_first = sorted((claims[place].dealt_in, -place, dp)
                           for dp in standing for place in members[dp])
    return {item: dp for _, place, dp in oldest_first for item in claims[-place].owned}


def _share_out(kept: Sequence[Sequence[int]], owner: dict[int, int], num_micro_batches: int
               ) -> tuple[list[list[int]], list[list[int]]]:
    """What each replica is to run; and what of that belonged to no standing one."""
    done = {item for items in kept for item in items}
    todo: list[list[int]] = [[] for _ in kept]
    dealt: list[list[int]] = [[] for _ in kept]
    orphans: list[int] = []
    for item in range(num_micro_batches):
        if item in done:
            continue
        if item in owner:
            todo[owner[item]].append(item)
        else:
            orphans.append(item)
    for item in orphans:
        dp = min(range(len(kept)), key=lambda dp: (len(todo[dp]), dp))
        todo[dp].append(item)
        dealt[dp].append(item)
    return todo, dealt
