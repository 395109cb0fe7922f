"""Settlements of members in any layout, against a model of members that know what they add up.

The model has no sums of gradients, only what was added to them: at every step, on every part of
the model, that has to be each micro-batch once.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates, holders, num_positions, replica
from unicron.workers.training.recovery.settlement import (
    MemberAssignment,
    Settlement,
    assign_micro_batches,
    settle,
)
from unicron.workers.training.recovery.state_sources import NO_STATE, SEVERAL, Claim, HeldState

SHAPES = [Axes(tp=tp, pp=pp, dp=dp) for tp in (1, 2) for pp in (1, 2, 3) for dp in (1, 2, 3)]
Gate = tuple[float, float]


class Member:
    """One process: its state, its sum, and what it stands before."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.version = NO_STATE
        self.held: HeldState | None = None
        self.staged: HeldState | None = None
        self.sum: list[int] = []
        self.owned: tuple[int, ...] = ()
        self.assigned_in = self.trained_in = self.staged_in = 0
        self.begun = self.ready = False
        self.gate: tuple[float, ...] = ()
        self.reduced: Counter[int] = Counter()

    def claim(self) -> Claim:
        return Claim(step_version=self.version, kept=tuple(sorted(self.sum)), owned=self.owned,
                     assigned_in=self.assigned_in, begun=self.begun, trained_in=self.trained_in,
                     held=self.held, staged=self.staged,
                     staged_in=self.staged_in, ready=self.ready, gate=self.gate)

    def replace(self, version: int, held: HeldState | None) -> None:
        """Its state is another's now."""
        self.version, self.held, self.staged = version, held, None
        self.sum, self.owned, self.begun, self.ready, self.gate = [], (), False, False, ()

    def activate(self, *, keep_sum: bool) -> None:
        """What was staged; a sum goes along where its member stays of the same part."""
        mine = self.sum if keep_sum else []
        self.replace(self.version, self.staged)
        self.sum = mine

    def step(self, gate: tuple[float, ...]) -> None:
        self.version, self.gate, self.ready = self.version + 1, gate, False
        self.sum, self.owned, self.begun = [], (), False

    def take(self, share: MemberAssignment, generation: int, *, begun: bool) -> None:
        """Go on from a settlement: the sum counts only if the settlement keeps it."""
        if sorted(self.sum) != list(share.kept):
            assert not share.kept, "a sum that this member does not have"
            self.sum = []
        self.ready, self.begun = False, begun
        self.owned, self.assigned_in = tuple(sorted((*share.kept, *share.todo))), generation


class History:
    """Generations of one task, with all that can befall them; `rnd` is all there is of chance."""

    def __init__(self, rnd: Random, optimizer: str) -> None:
        self.rnd, self.optimizer = rnd, optimizer
        self.num_items = rnd.randint(1, 9)
        self.present = [self._newcomer() for _ in range(rnd.randint(1, 6))]
        self.away: list[Member] = []
        self.generation = 0
        self.axes = Axes()
        self.gates: dict[tuple[int, int], Gate] = {}
        """What the gate of a step of a generation told, where it told anybody."""
        self.seen: Counter[str] = Counter()
        self.met: list[Member] = []
        """Who has met since the last generation came up, and in it."""
        self.least = NO_STATE
        """The step version that it settled on, as long as nobody is missed."""

    def run(self, num_generations: int) -> None:
        for _ in range(num_generations):
            self.generation += 1
            if self._meet():
                self._train()
            self._strike()

    def _newcomer(self) -> Member:
        return Member(self.rnd.choice("abc"))

    def _held(self, place: int) -> HeldState | None:
        if self.optimizer == "whole" and self.axes.tp * self.axes.pp == 1:
            return None
        return HeldState(axes=self.axes, optimizer=self.optimizer, place=place)

    # --- meeting --------------------------------------------------------------------------------
    def _meet(self) -> bool:
        """Settle, and put it in force, unless a second fault strikes; whether all have."""
        self._seat()
        told = [msgspec.msgpack.encode(member.claim()) for member in self.present]
        settlements = [settle([msgspec.msgpack.decode(each, type=Claim) for each in told],
                              self.num_items, self.axes, [each.node for each in self.present])
                       for _ in self.present]
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
        """A layout for those who are there; often such that they stay what they were."""
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
                free = next((place for place in range(num_positions(self.axes))
                             if seats[place] is None
                             and coordinates(self.axes, place)[:2] == held.part
                             and self.rnd.random() < 0.9), None)
            if free is None:
                rest.append(member)
            else:
                seats[free] = member
        self.present = [rest.pop() if seat is None else seat for seat in seats]

    def _have(self, member: Member, place: int, settlement: Settlement) -> None:
        """Step, put in force what was staged, and receive what is missing."""
        share, version = settlement.shares[place], max(settlement.step_version, 0)
        if share.steps:
            assert member.ready
            assert member.version == version - 1, "nobody steps twice"
            assert settlement.gate == self.gates[member.trained_in, member.version], (
                "only if somebody had passed, and with what it was told")
            assert member.reduced == Counter(range(self.num_items))
            member.step(settlement.gate)
            self.seen["steps"] += 1
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
        elif share.source != place:
            if member.version == version:
                member.staged = HeldState(axes=self.axes, optimizer=self.optimizer, place=place)
                member.staged_in = self.generation
            else:
                member.replace(version, self._held(place))

    # --- what has to hold -----------------------------------------------------------------------
    def _whole(self) -> set[int]:
        """Step versions of which the members have all parts of some layout."""
        passed = {(member.trained_in, member.version) for member in self.present if member.gate}
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
                    dps = {"whole": (0,), "sharded": (at.dp,),
                           "mirrored": (at.dp, (at.dp or held.axes.dp) - 1)}[held.optimizer]
                    layout = msgspec.structs.replace(
                        held.axes, dp=1 if held.optimizer == "whole" else held.axes.dp)
                    had.setdefault((version, layout), set()).update(
                        (at.tp, at.pp, dp) for dp in dps)
        return {
            version for (version, axes), parts in had.items() if len(parts) == num_positions(axes)
        }

    def _check_state(self, settlement: Settlement) -> None:
        whole = self._whole()
        if any(member.staged is not None for member in self.present):
            assert settlement.step_version in {NO_STATE, *whole}
        else:
            assert settlement.step_version == max(whole, default=NO_STATE)
        if any(member not in self.present for member in self.met):
            self.least = NO_STATE
        assert settlement.step_version >= self.least, "lost, and nobody was lost"
        beyond = max(member.version for member in self.present)
        assert settlement.lost_version == (beyond if beyond > settlement.step_version else NO_STATE)
        if settlement.lost_version != NO_STATE:
            self.seen["lost"] += 1
        given = {place: self._given(place, settlement) for place in settlement.holders}
        assert all(given.values()), "a holder without the state"
        if settlement.step_version == NO_STATE:
            assert {share.source for share in settlement.shares} == {NO_STATE}
            return
        for place, share in enumerate(settlement.shares[:num_positions(self.axes)]):
            assert share.source == SEVERAL or share.source in settlement.holders
            if share.source in settlement.holders and self.optimizer == "whole":
                held = given[share.source]
                assert held is not None
                assert held.shape == (self.axes.tp, self.axes.pp, 1)
                assert held.part == coordinates(self.axes, place)[:2]
                self._check_near(place, share.source, given)

    def _given(self, place: int, settlement: Settlement) -> HeldState | None:
        """What the holder at `place` has of the settled state once it did as it is told."""
        member, share = self.present[place], settlement.shares[place]
        if share.staged:
            return member.staged
        fits = member.version + share.steps == settlement.step_version
        return (member.held or HeldState()) if fits else None

    def _check_near(self, place: int, source: int, given: dict[int, HeldState | None]) -> None:
        """No other that has the same is nearer."""
        far = self._distance(place, source)
        for other, held in given.items():
            if held is not None and held.shape == (self.axes.tp, self.axes.pp, 1) and (
                    held.part == coordinates(self.axes, place)[:2]):
                assert far <= self._distance(place, other)

    def _distance(self, place: int, other: int) -> int:
        if place == other:
            return 0
        return 1 if self.present[place].node == self.present[other].node else 2

    def _check_shares(self, settlement: Settlement) -> None:
        found: list[int] = []
        for dp in range(self.axes.dp):
            places = replica(self.axes, dp)
            shares = [settlement.shares[place] for place in places]
            assert len({(share.kept, share.todo, share.dealt) for share in shares}) == 1
            assert set(shares[0].dealt) <= set(shares[0].todo)
            found += [*shares[0].kept, *shares[0].todo]
            if not shares[0].kept:
                continue
            self.seen["kept by several" if len(places) > 1 else "kept by one"] += 1
            for place in places:
                member, held = self.present[place], self.present[place].held or HeldState()
                assert tuple(sorted(member.sum)) == shares[0].kept, "a broken replica's sum"
                assert member.version == settlement.step_version
                assert held.shape == (self.axes.tp, self.axes.pp, 1)
                assert held.part == coordinates(self.axes, place)[:2]
        assert sorted(found) == list(range(self.num_items))
        assert settlement.begun == any(
            member.begun and member.version == settlement.step_version
            for place, member in enumerate(self.present) if place in settlement.holders)
        for share in settlement.shares[num_positions(self.axes):]:
            assert (share.kept, share.todo, share.dealt) == ((), (), ()), "who is beside"

    # --- training -------------------------------------------------------------------------------
    def _train(self) -> None:
        """Iterations, until a fault strikes at some point of one."""
        seated = self.present[:num_positions(self.axes)]
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
                    self.num_items, self.axes.dp, coordinates(self.axes, place).dp)
                member.assigned_in = self.generation

    def _micro_batches(self, *, broken: bool) -> None:
        """All that is to do; or some, where members of a replica may be one apart."""
        for dp in range(self.axes.dp):
            places = replica(self.axes, dp)
            todo = [item for item in self.present[places[0]].owned
                    if item not in self.present[places[0]].sum]
            whole = self.rnd.randint(0, len(todo)) if broken else len(todo)
            apart = broken and len(places) > 1 and self.rnd.random() < 0.4
            for place in places:
                num = whole + self.rnd.randint(0, 1) if apart else whole
                self.present[place].sum += todo[:num]

    def _reduce(self, seated: list[Member]) -> bool:
        """The reduction, the gate, the step; whether all have taken it."""
        for place, member in enumerate(seated):
            at = coordinates(self.axes, place)
            member.reduced = Counter(
                item for peer in holders(self.axes, at.tp, at.pp) for item in seated[peer].sum)
            assert member.reduced == Counter(range(self.num_items)), "each exactly once"
        self.seen["reduced"] += 1
        plain = self.optimizer == "whole" and self.axes.tp * self.axes.pp == 1
        faulty = self.rnd.random() < 0.5
        if faulty and not plain and self.rnd.random() < 0.4:
            for member in seated[1:]:
                member.ready = self.rnd.random() < 0.7
            return False
        gate = () if plain else (float(self.generation), float(seated[0].version))
        passing = [not faulty or self.rnd.random() < 0.5 for _ in seated]
        if any(passing) and not plain:
            self.gates[self.generation, seated[0].version] = (gate[0], gate[1])
        for member, passes in zip(seated, passing, strict=True):
            if passes:
                member.step(gate)
            else:
                member.ready = not plain
        return not faulty

    # --- faults ---------------------------------------------------------------------------------
    def _strike(self) -> None:
        """Some die, some stand still for a while, some come back, some come new."""
        fate = [self.rnd.choices(("stays", "dies", "stops"), (8, 1, 1))[0] for _ in self.present]
        if "stays" not in fate:
            fate[0] = "stays"
        back = [member for member in self.away if self.rnd.random() < 0.4]
        self.away = [member for member in self.away if member not in back]
        self.away += [member for member, what in zip(self.present, fate, strict=True)
                      if what == "stops"]
        self.present = [member for member, what in zip(self.present, fate, strict=True)
                        if what == "stays"]
        self.present += back[:max(0, 8 - len(self.present))]
        while len(self.present) < 8 and self.rnd.random() < 0.4:
            self.present.append(self._newcomer())


@given(st.randoms(use_true_random=True), st.sampled_from(["whole", "sharded", "mirrored"]))
@settings(max_examples=100, deadline=None)
def test_after_any_faults_every_step_is_of_each_micro_batch_once(rnd: Random, optimizer: str
                                                                 ) -> None:
    History(rnd, optimizer).run(12)


def test_the_model_comes_past_all_that_it_is_to_hold() -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        history = History(Random(seed), ("whole", "sharded", "mirrored")[seed % 3])
        history.run(12)
        seen += history.seen
    assert min(seen[what] for what in (
        "kept by one", "kept by several", "steps", "staged", "put in force", "lost",
        "reduced")) >= 3, seen
