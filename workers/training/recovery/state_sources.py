"""Who holds the state: the step from which a new generation goes on, and who gives it to whom.

Pure: what the members claim is all that counts. The rules are those of docs/ARCHITECTURE.md,
"Settlement".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ....events.spec.model import Axes
from ....events.spec.parallelism import Kept, coordinates, covers, place_of, shape

NO_STATE = -1
"""Step version of a member that has only what it built from the seed."""
MANY = -2
"""Source of a member whose state is put together from what several hold."""


class Held(Struct, frozen=True, kw_only=True):
    """Of which part of the model a member holds the state: that of a place in a layout.

    `optimizer` is as in a spec's `train.parallel`. Where it is mirrored, the member also has the
    shard of the data-parallel rank before its own.
    """

    axes: Axes = Axes()
    optimizer: Kept = "whole"
    place: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Members of one shape at the same place of a replica have the same part of the model."""
        return shape(self.axes)

    @property
    def part(self) -> tuple[int, int]:
        """Which part of the model: its tensor- and pipeline-parallel ranks."""
        at = coordinates(self.axes, self.place)
        return at.tp, at.pp

    @property
    def part_of_model(self) -> tuple[int, ...]:
        """Gradients of members for whom this is the same add up."""
        return (*self.shape, *self.part)

    @property
    def dp_of_shards(self) -> int:
        """Into how many shards the optimizer of a part is split; 0: it is not."""
        return 0 if self.optimizer == "whole" else self.axes.dp

    @property
    def pieces(self) -> tuple[int, ...]:
        """Members for whom this is the same have the same pieces of the state."""
        dp = coordinates(self.axes, self.place).dp if self.dp_of_shards else 0
        return (*self.part_of_model, self.dp_of_shards, dp)


class Claim(Struct, frozen=True, kw_only=True):
    """What a member brings into a new generation.

    `step_version` counts its optimizer steps (NO_STATE: none of its state counts). Of that
    iteration, `kept` are the micro-batches whole in its sum and `owned` those that it was last
    dealt, in generation `dealt_in`; `begun` says whether it has begun the iteration at all.
    `trained_in` is the generation in which it last trained.

    `held` is what its state and its sum are of (None: of the whole model). `staged` is the same
    state at another place, whole too, but perhaps not on all members, received in generation
    `staged_in`. `ready`: it has the reduced sum of all and entered the gate of this step, and did
    not see whether all had. `gate` is what the gate told those who passed it, until they train on
    or take another's state. `stale`: it has stepped its shard of the optimizer, but
    its parameters are not gathered from those who stepped the others.
    """

    step_version: int = NO_STATE
    kept: tuple[int, ...] = ()
    owned: tuple[int, ...] = ()
    dealt_in: int = 0
    begun: bool = False
    trained_in: int = 0
    held: Held | None = None
    staged: Held | None = None
    staged_in: int = 0
    ready: bool = False
    gate: tuple[float, ...] = ()
    stale: bool = False


class Holder(NamedTuple):
    """What a member has of the state that goes on."""

    held: Held
    steps: bool
    """Once it has taken the step for which it is ready."""
    staged: bool
    """In what it staged."""


class _Layout(NamedTuple):
    """What states of members have to have in common to be put together."""

    shape: tuple[int, int, int]
    dp: int
    staged_in: int
    """Who staged something in that generation counts with it, else with what is in force."""


class Holding(NamedTuple):
    """The state that goes on, and by place who has some of it."""

    step_version: int
    holders: dict[int, Holder]
    gate: tuple[float, ...]


WHOLE = Held()
NOBODY = Holding(NO_STATE, {}, ())


def find(claims: Sequence[Claim], axes: Axes) -> Holding:
    """The highest step version whose state the members have whole, in one layout.

    Of several layouts that of `axes` goes first, since then nothing has to move; else the one that
    most hold. O(members x step versions).
    """
    versions = {claim.step_version for claim in claims if claim.step_version != NO_STATE}
    for version in sorted(versions, reverse=True):
        found, gate = _holders(claims, version)
        whole = [layout for layout, holders in found.items() if _is_whole(holders)]
        if whole:
            holders = found[min(whole, key=lambda each: (
                each.shape != shape(axes), each.dp not in (0, axes.dp), -len(found[each]), each))]
            return Holding(version, holders, gate)
    return NOBODY


def _holders(claims: Sequence[Claim], version: int
             ) -> tuple[dict[_Layout, dict[int, Holder]], tuple[float, ...]]:
    """Who has some of the state of that step, by its layout; what the gate said before it.

    The gate tells nobody before all have entered it: where one has stepped, all may, and have to.
    """
    told = {claim.trained_in: claim.gate for claim in reversed(claims)
            if claim.gate and claim.step_version == version}
    ready = [claim.trained_in for claim in claims
             if claim.ready and claim.step_version == version - 1 and claim.trained_in in told]
    passed = max(ready, default=None)  # of two that took this step, the later generation
    found: dict[_Layout, dict[int, Holder]] = {}
    for place, claim in enumerate(claims):
        steps = (claim.ready and claim.step_version == version - 1
                 and claim.trained_in == passed)
        if claim.step_version != version and not steps:
            continue
        has = [Holder(claim.held or WHOLE, steps=steps, staged=False)]
        if claim.staged is not None and not steps:
            has.append(Holder(claim.staged, steps=False, staged=True))
        # Both may be of one layout, of other places: what was staged together goes together.
        for staged_in in sorted({0, *(claim.staged_in for claim in claims)}):
            for holder in has if staged_in != claim.staged_in else reversed(has):
                layout = _Layout(holder.held.shape, holder.held.dp_of_shards, staged_in)
                found.setdefault(layout, {}).setdefault(place, holder)
    return found, () if passed is None else told[passed]


def _is_whole(holders: dict[int, Holder]) -> bool:
    """Whether these have all of the state; where it is not split by dp, their dp may differ."""
    held = [holder.held for holder in holders.values()]
    axes, optimizer = held[0].axes, held[0].optimizer
    if optimizer != "whole":
        return covers(axes, optimizer, [one.place for one in held])
    one_replica = replace(axes, dp=1)
    return covers(one_replica, optimizer, [
        place_of(one_replica, coordinates(one.axes, one.place)._replace(dp=0)) for one in held])


def sources(holders: dict[int, Holder], axes: Axes, nodes: Sequence[str]) -> list[int]:
    """For the member at each place, that of the nearest one that has all that it is to have.

    Itself before one on its own node, before any other; equal ones by turns, so that no one feeds
    them all. Who is beside the layout takes nothing. `nodes` are those of the members; empty names
    are of nodes that nobody knows.
    """
    if not holders:
        return [NO_STATE] * len(nodes)
    found = list(range(len(nodes)))
    num_takers = dict.fromkeys(holders, 0)
    behind = [(place, _givers(holders, axes, place))
              for place in range(axes.tp * axes.pp * axes.dp)]
    behind = [(place, givers) for place, givers in behind if place not in givers]
    # Who has a giver on its own node first: the others then go to those who give less.
    for near in (True, False):
        for place, givers in behind:
            beside = [giver for giver in givers if nodes[place] and nodes[giver] == nodes[place]]
            if bool(beside) != near:
                continue
            if not givers:
                found[place] = MANY
                continue
            giver = min(beside or givers, key=lambda giver: (num_takers[giver], giver))
            found[place] = giver
            num_takers[giver] += 1
    return found


def _givers(holders: dict[int, Holder], axes: Axes, place: int) -> list[int]:
    """Who has all that the member at `place` is to have."""
    at = coordinates(axes, place)
    return [giver for giver, holder in holders.items()
            if holder.held.shape == shape(axes) and holder.held.part == (at.tp, at.pp)
            and (not holder.held.dp_of_shards
                 or (holder.held.dp_of_shards, holder.held.place) == (axes.dp, place))]
