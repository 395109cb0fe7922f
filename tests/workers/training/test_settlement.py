"""Settlement: every micro-batch is assigned exactly once, whatever the members claim."""

from __future__ import annotations

from collections import Counter
from copy import copy
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates, holders, num_positions, replica
from unicron.workers.training.recovery.settlement import (
    MemberAssignment,
    Settlement,
    assign_micro_batches,
    settle,
)
from unicron.workers.training.recovery.state_sources import (
    NO_STATE,
    Claim,
    HeldState,
    decode_claims,
    encode_claim,
    other_versions,
)

SHAPES = [Axes(tp=tp, pp=pp, dp=dp) for tp in (1, 2) for pp in (1, 2, 3) for dp in (1, 2, 3)]
Barrier = tuple[float, float]


@st.composite
def claims(draw: st.DrawFn) -> tuple[list[Claim], int]:
    """Arbitrary claims: overlapping sums, stale generations, members without state."""
    num_items = draw(st.integers(1, 16))
    items = st.lists(st.integers(0, num_items - 1), unique=True).map(lambda x: tuple(sorted(x)))
    found: list[Claim] = []
    for _ in range(draw(st.integers(1, 6))):
        version = draw(st.sampled_from([NO_STATE, 3, 4]))
        if version == NO_STATE:
            found.append(Claim())
            continue
        owned = draw(items)
        kept = tuple(item for item in owned if draw(st.booleans()))
        found.append(
            Claim(
                step_version=version,
                kept=kept,
                owned=owned,
                begun=bool(kept) or draw(st.booleans()),
                assigned_in=draw(st.integers(1, 4)),
                trained_in=draw(st.integers(1, 4)),
            )
        )
    return found, num_items


def _check_partition(settlement: Settlement, num_items: int) -> None:
    placed = [item for share in settlement.shares for item in (*share.kept, *share.todo)]
    assert sorted(placed) == list(range(num_items))


@given(claims())
@settings(max_examples=400, deadline=None)
def test_every_micro_batch_is_assigned_exactly_once(case: tuple[list[Claim], int]) -> None:
    members, num_items = case
    settlement = settle(members, num_items)
    _check_partition(settlement, num_items)
    for claim, share in zip(members, settlement.shares, strict=True):
        assert share.kept in ((), claim.kept), "a sum is kept as a whole or dropped"
        assert set(share.reassigned) <= set(share.todo)
        if share.kept:
            assert claim.step_version == settlement.step_version


@given(claims())
@settings(max_examples=200, deadline=None)
def test_holders_have_the_highest_step_version(case: tuple[list[Claim], int]) -> None:
    members, num_items = case
    settlement = settle(members, num_items)
    assert settlement.step_version == max(claim.step_version for claim in members)
    assert [*settlement.holders] == [
        place
        for place, claim in enumerate(members)
        if claim.step_version == settlement.step_version != NO_STATE
    ]


@given(st.integers(1, 16), st.integers(1, 6), st.data())
@settings(max_examples=300, deadline=None)
def test_no_chain_of_faults_loses_or_doubles_a_micro_batch(
    num_items: int, num_members: int, data: st.DataObject
) -> None:
    members = [
        Claim(
            step_version=7,
            assigned_in=1,
            owned=assign_micro_batches(num_items, num_members, place),
            trained_in=1,
        )
        for place in range(num_members)
    ]
    for generation in range(2, data.draw(st.integers(3, 6))):
        trained: list[Claim] = []
        for claim in members:
            missing = [item for item in claim.owned if item not in claim.kept]
            num_done = data.draw(st.integers(0, len(missing)))
            kept = tuple(sorted((*claim.kept, *missing[:num_done])))
            trained.append(
                Claim(
                    step_version=7,
                    kept=kept,
                    owned=claim.owned,
                    assigned_in=generation - 1,
                    begun=True,
                    trained_in=generation - 1,
                )
            )
        living = [claim for claim in trained if data.draw(st.booleans())] or trained[:1]
        newcomers = [Claim()] * data.draw(st.integers(0, 2))
        settlement = settle(living + newcomers, num_items)
        _check_partition(settlement, num_items)
        for claim, share in zip(living, settlement.shares, strict=False):
            assert share.kept == claim.kept, "without a double claim no sum is dropped"
            stays = set(claim.owned) - set(claim.kept)
            assert stays == set(share.todo) - set(share.reassigned), (
                "already assigned to this member"
            )
        members = [
            Claim(
                step_version=7,
                kept=share.kept,
                owned=tuple(sorted((*share.kept, *share.todo))),
                assigned_in=generation,
                trained_in=generation - 1,
            )
            for share in settlement.shares
        ]


def _begun(generation: int, *, kept: tuple[int, ...], owned: tuple[int, ...]) -> Claim:
    return Claim(
        step_version=5,
        kept=kept,
        owned=owned,
        assigned_in=generation,
        begun=True,
        trained_in=generation,
    )


def test_lost_micro_batches_go_to_the_members_with_least_to_do() -> None:
    members = [
        _begun(1, kept=(0, 4, 8), owned=(0, 4, 8)),
        _begun(1, kept=(1, 5), owned=(1, 5, 9)),
        _begun(1, kept=(3,), owned=(3, 7, 11)),
    ]
    shares = settle(members, 12).shares
    assert [share.kept for share in shares] == [(0, 4, 8), (1, 5), (3,)]
    assert [share.reassigned for share in shares] == [(2, 6), (10,), ()]
    assert [share.todo for share in shares] == [(2, 6), (9, 10), (7, 11)]


def test_of_two_claims_the_later_generation_wins() -> None:
    members = [_begun(1, kept=(0, 1), owned=(0, 1)), _begun(2, kept=(1, 2), owned=(1, 2))]
    shares = settle(members, 3).shares
    assert [share.kept for share in shares] == [(), (1, 2)]
    assert [share.todo for share in shares] == [(0,), ()]


def test_a_member_behind_receives_the_state_and_drops_its_sum() -> None:
    members = [
        Claim(step_version=4, kept=(0,), owned=(0, 2), assigned_in=1, trained_in=1, begun=True),
        _begun(1, kept=(), owned=(1, 3)),
    ]
    settlement = settle(members, 4)
    assert settlement.step_version == 5
    assert [*settlement.holders] == [1]
    assert settlement.shares[0].todo == (0, 2)


def test_a_first_start_assigns_evenly_and_reassigns_nothing() -> None:
    shares = settle([Claim(), Claim(), Claim()], 7).shares
    assert [share.todo for share in shares] == [(0, 3, 6), (1, 4), (2, 5)]
    assert all(share.reassigned == () for share in shares)


def test_an_iteration_not_begun_is_assigned_anew_with_the_newcomers() -> None:
    members = [
        Claim(step_version=5, owned=(0, 2), assigned_in=1, trained_in=1),
        Claim(step_version=5, owned=(1, 3), assigned_in=1, trained_in=1),
        Claim(),
        Claim(),
    ]
    shares = settle(members, 4).shares
    assert [share.todo for share in shares] == [(0,), (1,), (2,), (3,)]
    assert all(share.reassigned == () for share in shares)


def _part(
    place: int,
    *,
    version: int = 5,
    kept: tuple[int, ...] = (),
    ready: bool = False,
    barrier: tuple[float, ...] = (),
    trained_in: int = 3,
    axes: Axes | None = None,
) -> Claim:
    return Claim(
        step_version=version,
        kept=kept,
        owned=kept,
        begun=version == 5,
        ready=ready,
        barrier=barrier,
        trained_in=trained_in,
        assigned_in=3,
        held=HeldState(axes=axes or Axes(tp=2, dp=2), place=place),
    )


def test_a_replicas_sum_counts_only_if_all_its_members_have_it() -> None:
    whole = [_part(0, kept=(0, 2)), _part(1, kept=(0, 2))]
    apart = [_part(2, kept=(1, 3)), _part(3, kept=(1,))]
    shares = settle([*whole, *apart], 4, Axes(tp=2, dp=2)).shares
    assert [share.kept for share in shares] == [(0, 2), (0, 2), (), ()]
    assert [share.todo for share in shares] == [(), (), (1, 3), (1, 3)]
    shares = settle([whole[0], apart[1], whole[1], apart[0]], 4, Axes(tp=2, dp=2)).shares
    assert {share.kept for share in shares} == {()}, "neither replica has a whole sum"


def test_a_member_at_the_barrier_steps_only_if_the_others_stepped() -> None:
    stepped = _part(0, version=6, barrier=(2.5, 0.0))
    for ready, steps in (
        (_part(1, ready=True), True),
        (_part(1), False),
        (_part(1, ready=True, trained_in=2), False),
    ):
        settlement = settle([stepped, ready, _part(2, version=6), Claim()], 4, Axes(tp=2, dp=1))
        assert settlement.shares[1].steps == steps
        assert settlement.barrier == ((2.5, 0.0) if steps else ())
        assert settlement.step_version == (6 if steps else NO_STATE)
    taken = settle([_part(0, version=6), _part(1, ready=True)], 4, Axes(tp=2, dp=1))
    assert taken.step_version == NO_STATE, "member 0 has no barrier result"
    without = settle([_part(0, ready=True), _part(1, ready=True)], 4, Axes(tp=2, dp=1))
    assert without.step_version == 5
    assert not any(share.steps for share in without.shares), "no member has taken the step"


def test_without_a_step_the_ready_members_step_if_none_lacks_the_reduced_sum() -> None:
    def ready(place: int, *, norm: float = 0.0) -> Claim:
        return replace(_part(place, ready=True, kept=(place // 2,)), reduced=(norm, 1.0))

    one, same, other = ready(0, norm=2.0), ready(2, norm=2.0), ready(1, norm=0.5)
    settlement = settle([one, other, same, Claim()], 4, Axes(tp=2, dp=2))
    assert settlement.step_version == 6
    assert settlement.barrier == (2.5, 2.0), "each part counts once"
    assert [share.steps for share in settlement.shares] == [True, True, True, False]
    assert not settlement.begun
    lacks = _part(3, kept=(1,))
    settlement = settle([one, other, same, lacks], 4, Axes(tp=2, dp=2))
    assert settlement.step_version == 5, "member 3 has no reduced sum"
    assert not any(share.steps for share in settlement.shares)
    assert settlement.shares[0].kept == (0,)
    without = settle([one, same, Claim()], 4, Axes(dp=3))
    assert without.step_version == NO_STATE, "no member has the other part"


def test_a_mirrored_shard_is_on_the_next_data_parallel_rank() -> None:
    def shard(place: int, *, mirrored: bool) -> Claim:
        return Claim(
            step_version=5,
            held=HeldState(
                axes=Axes(dp=3), place=place, optimizer="mirrored" if mirrored else "sharded"
            ),
        )

    def found(*places: int, mirrored: bool) -> int:
        return settle([shard(place, mirrored=mirrored) for place in places], 4).step_version

    assert found(0, 1, 2, mirrored=False) == 5
    assert found(0, 2, mirrored=False) == NO_STATE
    assert found(0, 2, mirrored=True) == 5, "2 mirrors shard 1, and 0 shard 2"
    assert found(1, mirrored=True) == NO_STATE


def test_another_layout_drops_the_sums() -> None:
    members = [_part(place, kept=(place % 2,), axes=Axes(tp=2, dp=2)) for place in (0, 1, 2)]
    settlement = settle(members, 5, Axes(dp=3))
    assert settlement.step_version == 5
    assert settlement.holders == {place: members[place].held for place in (0, 1, 2)}
    assert [share.todo for share in settlement.shares] == [(0, 3), (1, 4), (2,)]


def test_of_two_complete_layouts_the_wanted_or_most_held_one_wins() -> None:
    whole = Claim(step_version=5, held=HeldState(axes=Axes(dp=1)))
    members = [whole, *(_part(place) for place in range(4))]
    assert settle(members, 4, Axes(dp=5)).holders.keys() == {0}
    assert settle(members, 4, Axes(pp=2, dp=2)).holders.keys() == {1, 2, 3, 4}


def test_the_versions_of_those_with_a_state_are_the_right_ones() -> None:
    old, new = Claim(versions="1"), Claim(versions="2")
    assert other_versions([old, old]) == ("1", [])
    assert other_versions([old, new]) == ("1", [1])
    assert other_versions([old, new, new]) == ("2", [0])
    assert other_versions([old, new, new, Claim(step_version=5, versions="1")]) == ("1", [1, 2])


# --- random histories of faults, against a model that knows every sum ----------------------------
class Member:
    """One process: its state, its gradient sum, and whether it waits at the step barrier."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps = keeps
        """Whether it keeps its sum while a reduction overwrites it (`train.kept_sum`)."""
        self.version = NO_STATE
        self.held: HeldState | None = None
        self.staged: HeldState | None = None
        self.sum: list[int] = []
        self.owned: tuple[int, ...] = ()
        self.assigned_in = self.trained_in = self.staged_in = 0
        self.begun = self.ready = False
        self.barrier: tuple[float, ...] = ()
        self.reduced: Counter[int] = Counter()

    def claim(self) -> Claim:
        part: tuple[float, ...] = ()
        if self.ready and self.held is not None and self.held.optimizer == "whole":
            part = _norm(self.trained_in, self.version, self.held)
        kept = () if self.ready and not self.keeps else tuple(sorted(self.sum))
        return Claim(
            step_version=self.version,
            kept=kept,
            owned=self.owned,
            assigned_in=self.assigned_in,
            begun=self.begun,
            trained_in=self.trained_in,
            held=self.held,
            staged=self.staged,
            staged_in=self.staged_in,
            ready=self.ready,
            barrier=self.barrier,
            reduced=part,
        )

    def replace(self, version: int, held: HeldState | None) -> None:
        """Take over another member's state, without a sum."""
        self.version, self.held, self.staged = version, held, None
        self.sum, self.owned, self.begun, self.ready, self.barrier = [], (), False, False, ()

    def activate(self, *, keep_sum: bool) -> None:
        """Activate the staged state. `keep_sum`: the gradient sum stays valid."""
        mine = self.sum if keep_sum else []
        self.replace(self.version, self.staged)
        self.sum = mine

    def step(self, barrier: tuple[float, ...]) -> None:
        self.version, self.barrier, self.ready = self.version + 1, barrier, False
        self.sum, self.owned, self.begun = [], (), False

    def take(self, share: MemberAssignment, generation: int, *, begun: bool) -> None:
        """Continue from a settlement. The sum counts only if the settlement keeps it."""
        if sorted(self.sum) != list(share.kept):
            assert not share.kept, "the member does not have this sum"
            self.sum = []
        self.ready, self.begun = False, begun
        self.owned, self.assigned_in = tuple(sorted((*share.kept, *share.todo))), generation


def _norm(generation: int, version: int, held: HeldState) -> Barrier:
    """What a part of the model adds to the result of a step barrier: another value for each."""
    tp, pp = held.part
    return float((1000 * generation + version) * 100 ** (3 * tp + pp)), float(tp + pp)


class History:
    """Generations of one task with random faults. `rnd` is the only source of randomness."""

    def __init__(self, rnd: Random, optimizer: str, *, keeps: bool = True) -> None:
        self.rnd, self.optimizer, self.keeps = rnd, optimizer, keeps
        self.num_items = rnd.randint(1, 9)
        self.present = [self._newcomer() for _ in range(rnd.randint(1, 6))]
        self.before: list[Member] = []
        """The present members as they were before the settlement."""
        self.away: list[Member] = []
        self.generation = 0
        self.axes = Axes()
        self.barriers: dict[tuple[int, int], Barrier] = {}
        """(generation, step version) -> the values of the step barrier, if a member entered it."""
        self.seen: Counter[str] = Counter()
        self.met: list[Member] = []
        """The members of the last complete generation and of every attempt since."""
        self.least = NO_STATE
        """The step version of the last complete generation, or NO_STATE if one of `met` is gone."""

    def run(self, num_generations: int) -> None:
        for _ in range(num_generations):
            self.generation += 1
            if self._meet():
                self._train()
            self._strike()

    def _newcomer(self) -> Member:
        return Member(keeps=self.keeps)

    def _held(self, place: int) -> HeldState | None:
        if self.optimizer == "whole" and self.axes.tp * self.axes.pp == 1:
            return None
        return HeldState(axes=self.axes, optimizer=self.optimizer, place=place)

    # --- meeting --------------------------------------------------------------------------------
    def _meet(self) -> bool:
        """Settle and apply the result, unless a second fault occurs. True if all applied it."""
        self._seat()
        self.before = [copy(member) for member in self.present]
        claims = [member.claim() for member in self.present]
        told = decode_claims([encode_claim(claim, at) for at, claim in enumerate(claims)])
        assert told == claims
        settlements = [settle(told, self.num_items, self.axes) for _ in self.present]
        assert all(each == settlements[0] for each in settlements)
        settlement = settlements[0]
        self._check_state(settlement)
        self._check_shares(settlement)
        self.met += self.present
        reached = [2] * len(self.present)
        if self.rnd.random() < 0.3:
            most = self.rnd.choice((1, 2))
            reached = [self.rnd.randint(most - 1, most) for _ in self.present]
        version = max(settlement.step_version, 0)
        for place, member in enumerate(self.present):
            if reached[place] >= 1:
                self._have(member, place, settlement)
        for place, member in enumerate(self.present):
            if reached[place] == 2:
                if member.staged is not None and place < num_positions(self.axes):
                    member.activate(keep_sum=bool(settlement.shares[place].kept))
                    self.seen["put in force"] += 1
                elif place < num_positions(self.axes):
                    member.held = self._held(place)
                if member.version == version:
                    member.take(settlement.shares[place], self.generation, begun=settlement.begun)
        if min(reached) == 2:
            self.met, self.least = list(self.present), version
        return min(reached) == 2

    def _seat(self) -> None:
        """Choose a layout for the present members, often one in which they keep their parts."""
        few = [axes for axes in SHAPES if num_positions(axes) <= len(self.present)]
        like = [axes for axes in few if (axes.tp, axes.pp) == (self.axes.tp, self.axes.pp)]
        self.axes = self.rnd.choice(like if like and self.rnd.random() < 0.7 else few)
        self.rnd.shuffle(self.present)
        if self.rnd.random() < 0.3:
            return
        seats: list[Member | None] = [None] * len(self.present)
        rest: list[Member] = []
        for member in sorted(self.present, key=lambda member: -member.version):
            held, free = member.held or HeldState(), None
            if member.version != NO_STATE and held.shape == (self.axes.tp, self.axes.pp, 1):
                free = next(
                    (
                        place
                        for place in range(num_positions(self.axes))
                        if seats[place] is None
                        and coordinates(self.axes, place)[:2] == held.part
                        and self.rnd.random() < 0.9
                    ),
                    None,
                )
            if free is None:
                rest.append(member)
            else:
                seats[free] = member
        self.present = [rest.pop() if seat is None else seat for seat in seats]

    def _have(self, member: Member, place: int, settlement: Settlement) -> None:
        """Apply a settlement: step, activate the staged state, or receive the missing state."""
        share, version = settlement.shares[place], max(settlement.step_version, 0)
        if share.steps:
            assert member.ready
            assert member.version == version - 1, "a member steps twice"
            assert settlement.barrier == self.barriers[member.trained_in, member.version], (
                "not the result that the members at this barrier received"
            )
            assert member.reduced == Counter(range(self.num_items))
            passed = any(
                other.barrier and other.trained_in == member.trained_in and other.version == version
                for other in self.before
            )
            member.step(settlement.barrier)
            self.seen["steps" if passed else "steps alone"] += 1
        elif share.staged:
            assert member.staged is not None
            member.activate(keep_sum=False)
            self.seen["staged"] += 1
        elif place in settlement.holders:
            member.staged = None
        if place >= num_positions(self.axes):
            return
        if settlement.step_version == NO_STATE:
            member.replace(0, self._held(place))
        elif not self._has_part(place, settlement):
            if member.version == version:
                member.staged = HeldState(axes=self.axes, optimizer=self.optimizer, place=place)
                member.staged_in = self.generation
            else:
                member.replace(version, self._held(place))

    # --- invariants -----------------------------------------------------------------------------
    def _whole(self) -> set[int]:
        """Step versions for which the present members hold all parts of some layout."""
        passed = {(member.trained_in, member.version) for member in self.present if member.barrier}
        ready = {(member.trained_in, member.version) for member in self.present if member.ready}
        passed |= {
            (generation, version + 1)
            for generation, version in ready
            if (generation, version + 1) not in passed and self._can_step(generation, version)
        }
        had: dict[tuple[int, Axes], set[tuple[int, ...]]] = {}
        for member in self.present:
            if member.version == NO_STATE:
                continue
            versions = [member.version]
            if member.ready and (member.trained_in, member.version + 1) in passed:
                versions.append(member.version + 1)
            for version in versions:
                active = member.held or HeldState()
                for held in {active, member.staged or active}:
                    if held == member.staged and version != member.version:
                        continue
                    at = coordinates(held.axes, held.place)
                    dps = {
                        "whole": (0,),
                        "sharded": (at.dp,),
                        "mirrored": (at.dp, (at.dp or held.axes.dp) - 1),
                    }[held.optimizer]
                    layout = replace(held.axes, dp=1 if held.optimizer == "whole" else held.axes.dp)
                    had.setdefault((version, layout), set()).update(
                        (at.tp, at.pp, dp) for dp in dps
                    )
        return {
            version for (version, axes), parts in had.items() if len(parts) == num_positions(axes)
        }

    def _can_step(self, generation: int, version: int) -> bool:
        """Whether those of that generation all have the reduced sum, together of every part."""
        there = [
            member
            for member in self.present
            if (member.trained_in, member.version) == (generation, version)
        ]
        held = [member.held or HeldState() for member in there]
        return (
            self.optimizer == "whole"
            and all(member.ready for member in there)
            and len({each.part for each in held}) == held[0].axes.tp * held[0].axes.pp
        )

    def _check_state(self, settlement: Settlement) -> None:
        whole = self._whole()
        if any(member.staged is not None for member in self.present):
            assert settlement.step_version in {NO_STATE, *whole}
        else:
            assert settlement.step_version == max(whole, default=NO_STATE)
        if any(member not in self.present for member in self.met):
            self.least = NO_STATE
        assert settlement.step_version >= self.least, "a state is lost, but no member is"
        beyond = max(member.version for member in self.present)
        self.seen["lost"] += beyond > settlement.step_version
        given = {place: self._given(place, settlement) for place in settlement.holders}
        assert settlement.holders == {place: held or HeldState() for place, held in given.items()}

    def _given(self, place: int, settlement: Settlement) -> HeldState | None:
        """What the holder at `place` has of the settled state after it applied the settlement."""
        member, share = self.present[place], settlement.shares[place]
        if share.staged:
            return member.staged
        assert member.version + share.steps == settlement.step_version, "a holder lacks the state"
        return member.held

    def _has_part(self, place: int, settlement: Settlement) -> bool:
        """Whether the member holds all of the state of its position."""
        held = settlement.holders.get(place)
        return (
            held is not None
            and held.shards
            == HeldState(axes=self.axes, optimizer=self.optimizer, place=place).shards
        )

    def _check_shares(self, settlement: Settlement) -> None:
        found: list[int] = []
        for dp in range(self.axes.dp):
            places = replica(self.axes, dp)
            shares = [settlement.shares[place] for place in places]
            assert len({(share.kept, share.todo, share.reassigned) for share in shares}) == 1
            assert set(shares[0].reassigned) <= set(shares[0].todo)
            found += [*shares[0].kept, *shares[0].todo]
            if not shares[0].kept:
                continue
            self.seen["kept by several" if len(places) > 1 else "kept by one"] += 1
            for place in places:
                member, held = self.present[place], self.present[place].held or HeldState()
                assert tuple(sorted(member.sum)) == shares[0].kept, "the kept sum is incomplete"
                assert member.version == settlement.step_version
                assert held.shape == (self.axes.tp, self.axes.pp, 1)
                assert held.part == coordinates(self.axes, place)[:2]
        assert sorted(found) == list(range(self.num_items))
        assert settlement.begun == any(
            member.begun and member.version == settlement.step_version
            for place, member in enumerate(self.present)
            if place in settlement.holders
        )
        for share in settlement.shares[num_positions(self.axes) :]:
            assert (share.kept, share.todo, share.reassigned) == ((), (), ()), "standby member"

    # --- training -------------------------------------------------------------------------------
    def _train(self) -> None:
        """Train some iterations, or until a fault occurs in one of them."""
        seated = self.present[: num_positions(self.axes)]
        for _ in range(self.rnd.randint(1, 3)):
            for member in seated:
                member.trained_in, member.begun = self.generation, True
            if self.rnd.random() < 0.5:
                self._micro_batches(broken=True)
                return
            self._micro_batches(broken=False)
            if not self._reduce(seated):
                return
            for place, member in enumerate(seated):
                member.owned = assign_micro_batches(
                    self.num_items, self.axes.dp, coordinates(self.axes, place).dp
                )
                member.assigned_in = self.generation

    def _micro_batches(self, *, broken: bool) -> None:
        """Run all micro-batches; if `broken`, only some: members of a replica may differ by one."""
        for dp in range(self.axes.dp):
            places = replica(self.axes, dp)
            todo = [
                item
                for item in self.present[places[0]].owned
                if item not in self.present[places[0]].sum
            ]
            whole = self.rnd.randint(0, len(todo)) if broken else len(todo)
            apart = broken and len(places) > 1 and self.rnd.random() < 0.4
            for place in places:
                num = whole + self.rnd.randint(0, 1) if apart else whole
                self.present[place].sum += todo[:num]

    def _reduce(self, seated: list[Member]) -> bool:
        """Run the reduction, the step barrier and the step. True if all members stepped."""
        for place, member in enumerate(seated):
            at = coordinates(self.axes, place)
            member.reduced = Counter(
                item for peer in holders(self.axes, at.tp, at.pp) for item in seated[peer].sum
            )
            assert member.reduced == Counter(range(self.num_items)), "missing or doubled item"
        self.seen["reduced"] += 1
        plain = self.optimizer == "whole" and self.axes.tp * self.axes.pp == 1
        faulty = self.rnd.random() < 0.5
        barrier = () if plain else self._barrier(seated)
        if faulty and not plain and self.rnd.random() < 0.4:
            for member in seated:
                member.ready = self.rnd.random() < 0.7
            return False
        passing = [not faulty or self.rnd.random() < 0.5 for _ in seated]
        for member, passes in zip(seated, passing, strict=True):
            if passes:
                member.step(barrier)
            else:
                member.ready = not plain
        return not faulty

    def _barrier(self, seated: list[Member]) -> Barrier:
        """The step barrier's result: every part of the model counts once."""
        version = seated[0].version
        norms = [
            _norm(
                self.generation,
                version,
                HeldState(axes=self.axes, place=replica(self.axes, 0)[part]),
            )
            for part in range(self.axes.tp * self.axes.pp)
        ]
        barrier = sum(norm for norm, _ in norms), sum(num for _, num in norms)
        self.barriers[self.generation, version] = barrier
        return barrier

    # --- faults ---------------------------------------------------------------------------------
    def _strike(self) -> None:
        """Some members die, some pause, some return, and new members join."""
        fate = [self.rnd.choices(("stays", "dies", "stops"), (8, 1, 1))[0] for _ in self.present]
        if "stays" not in fate:
            fate[0] = "stays"
        back = [member for member in self.away if self.rnd.random() < 0.4]
        self.away = [member for member in self.away if member not in back]
        self.away += [
            member for member, what in zip(self.present, fate, strict=True) if what == "stops"
        ]
        self.present = [
            member for member, what in zip(self.present, fate, strict=True) if what == "stays"
        ]
        self.present += back[: max(0, 8 - len(self.present))]
        while len(self.present) < 8 and self.rnd.random() < 0.4:
            self.present.append(self._newcomer())


@given(
    st.randoms(use_true_random=True),
    st.sampled_from(["whole", "sharded", "mirrored"]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_faults_leave_each_step_with_each_micro_batch_once(
    rnd: Random, optimizer: str, keeps: bool
) -> None:
    History(rnd, optimizer, keeps=keeps).run(12)


def test_the_model_covers_all_cases() -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        history = History(Random(seed), ("whole", "sharded", "mirrored")[seed % 3])
        history.run(12)
        seen += history.seen
    assert (
        min(
            seen[what]
            for what in (
                "kept by one",
                "kept by several",
                "steps",
                "steps alone",
                "staged",
                "put in force",
                "lost",
                "reduced",
            )
        )
        >= 3
    ), seen
