"""Assigns the micro-batches of an iteration to replicas, and settles an iteration after a fault.

Pure: every member computes the same settlement from the same claims, without a coordinator.
docs/ARCHITECTURE.md, "Settlement", has the rules.
"""

from collections.abc import Sequence

from msgspec import Struct

from ....events.spec.model import Axes
from ....events.spec.parallelism import Sharding, coordinates, num_positions, replica, shape
from .state_sources import Claim, HeldState, StateHolders, find_state


class MemberAssignment(Struct, frozen=True, kw_only=True):
    """The micro-batches that a member keeps (`kept`), that it will run (`todo`), and the part of
    `todo` that no member goes on with (`reassigned`). With `staged` it first activates its staged
    state; with `steps` it first takes the step for which it is ready."""

    kept: tuple[int, ...]
    todo: tuple[int, ...]
    reassigned: tuple[int, ...]
    steps: bool = False
    staged: bool = False


class Settlement(Struct, frozen=True, kw_only=True):
    """The result for all members; `shares[i]` is the assignment of the member at place i."""

    step_version: int
    begun: bool
    """True if a member had begun the iteration; otherwise all micro-batches are assigned again."""
    shares: tuple[MemberAssignment, ...]
    holders: dict[int, HeldState] = {}
    """The parts that members hold in one layout, by place; together they are the whole state."""
    barrier: tuple[float, ...] = ()
    """The step barrier's result, for the members that still have to step."""
    redone: int = 0
    """How often the iteration was begun anew (Claim)."""


def assign_micro_batches(num_micro_batches: int, num_replicas: int, dp: int) -> tuple[int, ...]:
    """The micro-batches of a new iteration for replica `dp`: every `num_replicas`-th."""
    return tuple(range(dp, num_micro_batches, num_replicas))


def settle(claims: Sequence[Claim], num_micro_batches: int, axes: Axes | None = None) -> Settlement:
    """Settle an iteration among the members with these claims, in order of place. `axes` is the new
    layout; None: all members are data-parallel.

    Afterwards every micro-batch is in `kept` or `todo` of exactly one replica, and all members of a
    replica have the same lists. If no member has begun the iteration, all its micro-batches are
    assigned again, so that new members get their part. O(members x (micro-batches + step
    versions)).
    """
    assert claims, "a generation has members"
    axes = axes or Axes(dp=len(claims))
    assert num_positions(axes) <= len(claims), "a place without a member"
    state = find_state(claims, axes)
    members = [replica(axes, dp) for dp in range(axes.dp)]
    continuing = [
        dp
        for dp, places in enumerate(members)
        if all(_has_sum(claims[place], place, state, axes) for place in places)
    ]
    redone = max(
        (claim.redone for claim in claims if claim.step_version == state.step_version), default=0
    )
    kept = _kept(
        claims,
        members,
        [dp for dp in continuing if all(claims[place].redone == redone for place in members[dp])],
    )
    begun = any(claims[place].begun for place, holder in state.holders.items() if not holder.steps)
    if not begun:
        assert not any(kept), "kept micro-batches of an iteration that has not begun"
        todo = [list(assign_micro_batches(num_micro_batches, axes.dp, dp)) for dp in range(axes.dp)]
        reassigned: list[list[int]] = [[] for _ in members]
    else:
        owners = _owners(claims, members, continuing)
        todo, reassigned = _assign_remaining(kept, owners, num_micro_batches)

    def share(place: int) -> MemberAssignment:
        holder = state.holders.get(place)
        dp = coordinates(axes, place).dp if place < num_positions(axes) else None
        return MemberAssignment(
            kept=() if dp is None else tuple(sorted(kept[dp])),
            todo=() if dp is None else tuple(sorted(todo[dp])),
            reassigned=() if dp is None else tuple(sorted(reassigned[dp])),
            steps=holder is not None and holder.steps,
            staged=holder is not None and holder.staged,
        )

    return Settlement(
        step_version=state.step_version,
        begun=begun,
        shares=tuple(share(place) for place in range(len(claims))),
        holders={place: holder.held for place, holder in state.holders.items()},
        barrier=state.barrier,
        redone=redone,
    )


def find_receivers(
    settlement: Settlement, claims: Sequence[Claim], axes: Axes, optimizer: Sharding
) -> list[int]:
    """Positions of the members that lack some of their own part of the settled state."""

    def has(place: int) -> bool:
        share, claim, held = settlement.shares[place], claims[place], claims[place].held
        # A member that steps during the settlement then has only its own optimizer shard.
        is_gathered = not (claim.stale or (share.steps and optimizer != "whole"))
        return (
            is_gathered
            and place in settlement.holders
            and held is not None
            and held.shards == HeldState(axes=axes, optimizer=optimizer, place=place).shards
        )

    return [place for place in range(num_positions(axes)) if not has(place)]


def _has_sum(claim: Claim, place: int, state: StateHolders, axes: Axes) -> bool:
    """True if this member's sum is for the part of the model at `place` in the new layout."""
    holder = state.holders.get(place)
    if holder is None or holder.steps or holder.staged:
        return False
    at = coordinates(axes, place)
    return holder.held.shape == shape(axes) and holder.held.part == (at.tp, at.pp)


def _kept(
    claims: Sequence[Claim], members: Sequence[Sequence[int]], continuing: Sequence[int]
) -> list[tuple[int, ...]]:
    """By replica: the micro-batches that it keeps, if they are the same on all its members. A sum
    cannot be split: if it shares a micro-batch with a replica that trained later, it is dropped."""
    newest_first = sorted(
        continuing, key=lambda dp: (-min(claims[place].trained_in for place in members[dp]), dp)
    )
    kept: list[tuple[int, ...]] = [() for _ in members]
    taken: set[int] = set()
    for dp in newest_first:
        sums = {claims[place].kept for place in members[dp]}
        if len(sums) == 1 and taken.isdisjoint(*sums):
            kept[dp] = sums.pop()
            taken.update(kept[dp])
    return kept


def _owners(
    claims: Sequence[Claim], members: Sequence[Sequence[int]], continuing: Sequence[int]
) -> dict[int, int]:
    """Micro-batch -> the continuing replica to which it was last assigned."""
    oldest_first = sorted(
        (claims[place].assigned_in, -place, dp) for dp in continuing for place in members[dp]
    )
    return {item: dp for _, place, dp in oldest_first for item in claims[-place].owned}


def _assign_remaining(
    kept: Sequence[Sequence[int]], owner: dict[int, int], num_micro_batches: int
) -> tuple[list[list[int]], list[list[int]]]:
    """By replica: the micro-batches to run, and those of them without a continuing owner."""
    done = {item for items in kept for item in items}
    todo: list[list[int]] = [[] for _ in kept]
    reassigned: list[list[int]] = [[] for _ in kept]
    without_owner: list[int] = []
    for item in range(num_micro_batches):
        if item in done:
            continue
        if item in owner:
            todo[owner[item]].append(item)
        else:
            without_owner.append(item)
    for item in without_owner:
        dp = min(range(len(kept)), key=lambda dp: (len(todo[dp]), dp))
        todo[dp].append(item)
        reassigned[dp].append(item)
    return todo, reassigned
