"""The ledger: who runs which micro-batches of an iteration, and how members settle after a fault.

Pure: every member computes the same settlement from the same claims, so nobody has to decide it.
The rules are those of docs/ARCHITECTURE.md, "Settlement".
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

NO_STATE = -1
"""Step version of a member that has only what it built from the seed."""


class Claim(Struct, frozen=True, kw_only=True):
    """What a member brings into a new generation.

    `step_version` counts its optimizer steps (NO_STATE: none of its state counts). Of that
    iteration, `kept` are the micro-batches whole in its sum and `owned` those that it was last
    dealt, in generation `dealt_in`; `begun` says whether it has begun the iteration at all.
    `trained_in` is the generation in which it last trained.
    """

    step_version: int = NO_STATE
    kept: tuple[int, ...] = ()
    owned: tuple[int, ...] = ()
    dealt_in: int = 0
    begun: bool = False
    trained_in: int = 0


class Share(Struct, frozen=True, kw_only=True):
    """A member's part: what it keeps, what it will run, and what of that came from the gone.

    `source` is the place of the member that gives it its state: its own, or NO_STATE when nobody
    has any.
    """

    kept: tuple[int, ...]
    todo: tuple[int, ...]
    dealt: tuple[int, ...]
    source: int


class Settlement(Struct, frozen=True, kw_only=True):
    """The same for all members; `shares[i]` belongs to the member at place i."""

    step_version: int
    begun: bool
    """Whether a member had begun the iteration: if not, it is dealt anew."""
    shares: tuple[Share, ...]


def deal(num_micro_batches: int, num_members: int, place: int) -> tuple[int, ...]:
    """The micro-batches of a new iteration for the member at `place`: every `num_members`-th."""
    return tuple(range(place, num_micro_batches, num_members))


def settle(claims: Sequence[Claim], num_micro_batches: int) -> Settlement:
    """Settle an iteration among the members whose claims these are, in order of place.

    Every micro-batch ends in exactly one member's `kept` or `todo`. An iteration that nobody has
    begun is dealt anew, so that newcomers get their part. O(members x micro-batches).
    """
    assert claims, "a generation has members"
    version = max(claim.step_version for claim in claims)
    current = [version != NO_STATE and claim.step_version == version for claim in claims]
    sources = _sources(current)
    kept = _kept(claims, current)
    begun = any(has and claim.begun for has, claim in zip(current, claims, strict=True))
    if not begun:
        assert not any(kept), "what is kept was begun"
        todo = [list(deal(num_micro_batches, len(claims), place)) for place in range(len(claims))]
        dealt: list[list[int]] = [[] for _ in claims]
    else:
        todo, dealt = _share_out(kept, _owners(claims, current), num_micro_batches)
    return Settlement(
        step_version=version, begun=begun,
        shares=tuple(
            Share(kept=tuple(sorted(kept[place])), todo=tuple(sorted(todo[place])),
                  dealt=tuple(sorted(dealt[place])), source=sources[place])
            for place in range(len(claims))
        ),
    )


def _sources(current: Sequence[bool]) -> list[int]:
    """Whoever is behind takes from the holders in turn, so that no one holder feeds them all."""
    holders = [place for place, has in enumerate(current) if has]
    if not holders:
        return [NO_STATE] * len(current)
    sources: list[int] = []
    num_behind = 0
    for place, has in enumerate(current):
        if has:
            sources.append(place)
        else:
            sources.append(holders[num_behind % len(holders)])
            num_behind += 1
    return sources


def _kept(claims: Sequence[Claim], current: Sequence[bool]) -> list[tuple[int, ...]]:
    """Sums that count. A sum is all or nothing: one micro-batch claimed twice costs it whole."""
    newest_first = sorted((place for place, has in enumerate(current) if has),
                          key=lambda place: (-claims[place].trained_in, place))
    kept: list[tuple[int, ...]] = [() for _ in claims]
    taken: set[int] = set()
    for place in newest_first:
        if taken.isdisjoint(claims[place].kept):
            kept[place] = claims[place].kept
            taken.update(claims[place].kept)
    return kept


def _owners(claims: Sequence[Claim], current: Sequence[bool]) -> dict[int, int]:
    """Micro-batch -> place of the living member that it was last dealt to."""
    oldest_first = sorted((place for place, has in enumerate(current) if has),
                          key=lambda place: (claims[place].dealt_in, -place))
    return {item: place for place in oldest_first for item in claims[place].owned}


def _share_out(kept: Sequence[Sequence[int]], owner: dict[int, int], num_micro_batches: int
               ) -> tuple[list[list[int]], list[list[int]]]:
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
        place = min(range(len(kept)), key=lambda place: (len(todo[place]), place))
        todo[place].append(item)
        dealt[place].append(item)
    return todo, dealt
