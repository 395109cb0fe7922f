"""Finds the state from which a new generation continues, and the members that hold it.

Pure. docs/ARCHITECTURE.md, "Settlement", has the rules.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ....events.decoding import from_msgpack
from ....events.spec.model import Axes
from ....events.spec.parallelism import Sharding, coordinates, has_every_part, position_of, shape

NO_STATE = -1
"""Step version of a member that has only its initial state."""


class HeldState(Struct, frozen=True, kw_only=True):
    """The part of the model whose state a member holds, given as a position in a layout. With a
    "mirrored" `optimizer`, the member also has the shard of the previous data-parallel rank."""

    axes: Axes = Axes()
    optimizer: Sharding = "whole"
    place: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """The model split. Members with the same shape and (tp, pp) ranks have the same part."""
        return shape(self.axes)

    @property
    def part(self) -> tuple[int, int]:
        """The part of the model: its tensor- and pipeline-parallel ranks."""
        at = coordinates(self.axes, self.place)
        return at.tp, at.pp

    @property
    def part_of_model(self) -> tuple[int, ...]:
        """Members with equal values have gradients of the same parameters."""
        return (*self.shape, *self.part)

    @property
    def dp_of_shards(self) -> int:
        """The number of optimizer shards of a part; 0: the optimizer is not sharded."""
        return 0 if self.optimizer == "whole" else self.axes.dp

    @property
    def shards(self) -> tuple[int, ...]:
        """Members with equal values have the same shards of the state."""
        dp = coordinates(self.axes, self.place).dp if self.dp_of_shards else 0
        return (*self.part_of_model, self.dp_of_shards, dp)


class Claim(Struct, frozen=True, kw_only=True):
    """What a member brings into a new generation.

    `step_version` is the number of iterations in its state (NO_STATE: no valid one). In the next
    iteration, `kept` are the micro-batches in its partial sum, and `owned` those that it was last
    assigned, in generation `assigned_in`. `begun`: it has begun this iteration. `trained_in` is the
    generation in which it last trained.

    `held` is the part of the model that its state and its sum are for (None: the whole model).
    `staged` is another position, whose part of the same state it received in generation
    `staged_in`. `ready`: it has the reduced sum and has entered the step barrier, but does not know
    whether all members have. `reduced` is then what its part adds to the barrier's result; empty if
    the optimizer is sharded. `barrier` is that result, kept until the member trains in another
    generation or receives another state. `stale`: it has stepped its shard of the optimizer, but
    not gathered the other parameters. `versions` are those of the libraries that compute. `redone`:
    how often this iteration was begun anew after an overflow of exact sums; sums of different
    counts cannot be added.
    """

    step_version: int = NO_STATE
    kept: tuple[int, ...] = ()
    owned: tuple[int, ...] = ()
    assigned_in: int = 0
    begun: bool = False
    trained_in: int = 0
    held: HeldState | None = None
    staged: HeldState | None = None
    staged_in: int = 0
    ready: bool = False
    barrier: tuple[float, ...] = field(name="gate", default=())
    stale: bool = False
    reduced: tuple[float, ...] = ()
    versions: str = ""
    redone: int = 0


def encode_claim(claim: Claim, place: int) -> bytes:
    """The claim of the member at `place`, in relation to the place: usual claims of two members are
    then equal bytes, and all claims together are few."""
    return msgspec.msgpack.encode(_moved(claim, place, -1))


def decode_claims(encoded: Sequence[bytes]) -> list[Claim]:
    """The claims that were encoded, by place. Raises msgspec.MsgspecError."""
    distinct = {data: from_msgpack(data, Claim) for data in dict.fromkeys(encoded)}
    return [_moved(distinct[data], place, 1) for place, data in enumerate(encoded)]


def _moved(claim: Claim, place: int, sign: int) -> Claim:
    """The claim with its place counted from `place` (sign -1) or from 0 again (1), and with its
    micro-batches counted from the first one of its replica, of which they are multiples."""
    held = claim.held
    if held is None:
        return claim
    own = held if sign < 0 else replace(held, place=held.place + place)
    first = coordinates(own.axes, own.place).dp * sign
    return replace(
        claim,
        held=replace(held, place=held.place + place * sign),
        kept=tuple(item + first for item in claim.kept),
        owned=tuple(item + first for item in claim.owned),
    )


class StateHolder(NamedTuple):
    """A member's part of the state that continues."""

    held: HeldState
    steps: bool
    """True if the member must first take the step for which it is ready."""
    staged: bool
    """True if it is the member's staged state."""


class _Layout(NamedTuple):
    """What the states of members must have in common to be combined."""

    shape: tuple[int, int, int]
    dp: int
    staged_in: int
    """If a member staged a state in this generation, its staged state is preferred, otherwise its
    active state."""


class StateHolders(NamedTuple):
    """The state that continues, and its holders by place."""

    step_version: int
    holders: dict[int, StateHolder]
    barrier: tuple[float, ...]


WHOLE = HeldState()
NO_HOLDERS = StateHolders(NO_STATE, {}, ())


def other_versions(claims: Sequence[Claim]) -> tuple[str, list[int]]:
    """The versions of most members that have a state (of all, if none has), of equally many the
    first; and the places of the members with others. Results of other versions may differ."""
    having = [claim for claim in claims if claim.step_version != NO_STATE] or claims
    usual = Counter(claim.versions for claim in having).most_common(1)[0][0]
    return usual, [place for place, claim in enumerate(claims) if claim.versions != usual]


def find_state(claims: Sequence[Claim], axes: Axes) -> StateHolders:
    """The highest step version whose whole state the members have in one layout: that of `axes`,
    which needs no transfer, else the one with the most holders. O(members x step versions)."""
    versions = {
        claim.step_version + steps
        for claim in claims
        if claim.step_version != NO_STATE
        for steps in range(1 + claim.ready)
    }
    for version in sorted(versions, reverse=True):
        layouts, barrier = _holders(claims, version)
        whole = [layout for layout, holders in layouts.items() if _is_whole(holders)]
        if whole:
            best = min(whole, key=lambda layout: _rank_of(layout, axes, len(layouts[layout])))
            return StateHolders(version, layouts[best], barrier)
    return NO_HOLDERS


def _rank_of(layout: _Layout, axes: Axes, num_holders: int) -> tuple[bool, bool, int, _Layout]:
    """The lowest is preferred: one that needs no transfer to the layout `axes`, then the one with
    most holders; the layout itself makes the choice equal on all members."""
    has_other_shape = layout.shape != shape(axes)
    has_other_dp = layout.dp not in (0, axes.dp)
    return has_other_shape, has_other_dp, -num_holders, layout


def _holders(
    claims: Sequence[Claim], version: int
) -> tuple[dict[_Layout, dict[int, StateHolder]], tuple[float, ...]]:
    passed, barrier = _barrier(claims, version)
    stagings = sorted({0, *(claim.staged_in for claim in claims)})
    layouts: dict[_Layout, dict[int, StateHolder]] = {}
    for place, claim in enumerate(claims):
        steps = _is_ready(claim, version) and claim.trained_in == passed
        if claim.step_version != version and not steps:
            continue
        has = [StateHolder(claim.held or WHOLE, steps=steps, staged=False)]
        if claim.staged is not None and not steps:
            has.append(StateHolder(claim.staged, steps=False, staged=True))
        # The active and the staged state of a member may have the same layout, but different
        # positions. So staged states are combined only if they were staged in the same generation.
        for staged_in in stagings:
            for holder in has if staged_in != claim.staged_in else reversed(has):
                layout = _Layout(holder.held.shape, holder.held.dp_of_shards, staged_in)
                layouts.setdefault(layout, {}).setdefault(place, holder)
    return layouts, barrier


def _is_ready(claim: Claim, version: int) -> bool:
    return claim.ready and claim.step_version == version - 1


def _barrier(claims: Sequence[Claim], version: int) -> tuple[int | None, tuple[float, ...]]:
    """The generation whose ready members take the step to `version`, and its barrier's result.

    The barrier returns only after all members have entered it. So if one member has stepped, all
    others can step, and must. If none has, they can step if together they have the reduced sum of
    every part of the model, and no survivor of their generation lacks its own: the result is then
    the sum over the parts. If two generations can take this step, the later one does.
    """
    results = {
        claim.trained_in: claim.barrier
        for claim in reversed(claims)
        if claim.barrier and claim.step_version == version
    }
    ready = {claim.trained_in for claim in claims if _is_ready(claim, version)}
    if passed := ready & results.keys():
        return max(passed), results[max(passed)]
    for generation in sorted(ready, reverse=True):
        there = [
            claim
            for claim in claims
            if claim.trained_in == generation and claim.step_version == version - 1
        ]
        reduced = {claim.held.part: claim.reduced for claim in there if claim.held is not None}
        if all(claim.ready and claim.reduced for claim in there) and _is_whole(
            {
                place: StateHolder(claim.held or WHOLE, steps=True, staged=False)
                for place, claim in enumerate(there)
            }
        ):
            return generation, tuple(map(math.fsum, zip(*reduced.values(), strict=True)))
    return None, ()


def _is_whole(holders: dict[int, StateHolder]) -> bool:
    """True if they have the whole state. If the optimizer is not sharded, their dp may differ."""
    held = [holder.held for holder in holders.values()]
    axes, optimizer = held[0].axes, held[0].optimizer
    if optimizer != "whole":
        return has_every_part(axes, optimizer, [part.place for part in held])
    one_replica = replace(axes, dp=1)
    return has_every_part(
        one_replica,
        optimizer,
        [
            position_of(one_replica, coordinates(part.axes, part.place)._replace(dp=0))
            for part in held
        ],
    )


def overlap(wanted: HeldState, held: HeldState) -> tuple[float, float]:
    """How likely `held` has shards of the part `wanted`; larger is likelier: the fraction of the
    model that both share, if tensors and stages are split evenly, then the nearness of the
    optimizer shards. A guess: a receiver reads further lists until it has all that it wants."""
    mine, theirs = _fractions(wanted), _fractions(held)
    stages = sum(_shared(one, other) for one in mine.stages for other in theirs.stages)
    return _shared(mine.tensors, theirs.tensors) * stages, -abs(mine.middle - theirs.middle)


Interval = tuple[float, float]


class _Fractions(NamedTuple):
    """The fractions of each tensor, of the layers and of the optimizer that a member holds."""

    tensors: Interval
    stages: tuple[Interval, ...]
    middle: float
    """The middle of its part of the optimizer."""


@lru_cache(maxsize=4096)
def _fractions(held: HeldState) -> _Fractions:
    axes, at = held.axes, coordinates(held.axes, held.place)
    num_stages = axes.pp * axes.chunks
    return _Fractions(
        (at.tp / axes.tp, (at.tp + 1) / axes.tp),
        tuple(
            (stage / num_stages, (stage + 1) / num_stages)
            for stage in range(at.pp, num_stages, axes.pp)
        ),
        (at.dp + 0.5) / axes.dp if held.dp_of_shards else 0.5,
    )


def _shared(one: Interval, other: Interval) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
