"""Who has not entered what its peers wait for, from the rows of simulated ranks alone.

Random layouts and schedules are executed op by op: collectives that wait at once or later, messages
between stages, sharded and overlapped reductions. One rank stops at a random place. Beside the
locator stands a definition by brute force: whoever is in no wait, and is reached from all others by
the waits that the execution knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from unicron.control_plane.incidents.group_evidence import Located, locate_stalls
from unicron.control_plane.state.task import Stall
from unicron.events.records.types import GroupProgress
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates, holders, replica
from unicron.workers.ipc.group_rows import strides

ITERATIONS = 3
Group = tuple[str, tuple[int, ...]]


COUNTED = ("world", "dp_cp")


class Op(NamedTuple):
    """One line of a rank's program. `what`: a kind of a collective, "send", "receive", "wait" for
    the handles of all operations that were started without a wait, "item" (the host waits for its
    device), "begin" of an iteration."""

    what: str
    group: Group = ("", ())
    peer: int = -1
    is_async: bool = False
    num_bytes: int = 64


@dataclass
class Rank:
    """A simulated rank: how far its host is, and what it has entered."""

    number: int
    program: Sequence[Op]
    stops_at: int = -1
    at: int = 0
    order: int = 0
    began: int = 0
    entered: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)
    """By group, or by messages of one direction with a peer: the order of each operation."""
    last: dict[tuple[Any, ...], Op] = field(default_factory=dict)
    left: dict[tuple[Any, ...], int] = field(default_factory=dict)
    handles: list[tuple[tuple[Any, ...], int]] = field(default_factory=list)
    waits_for: list[tuple[tuple[Any, ...], int]] = field(default_factory=list)
    """What its host waits for now."""
    queue: list[tuple[tuple[Any, ...], int]] = field(default_factory=list)
    """All that it has entered; its device has run the first `num_run`."""
    num_run: int = 0

    def key(self, op: Op) -> tuple[Any, ...]:
        if op.what == "send":
            return ("message", self.number, op.peer)
        return ("message", op.peer, self.number) if op.what == "receive" else op.group

    def side(self, op: Op) -> tuple[Any, ...]:
        return (op.what, *self.key(op)) if op.peer >= 0 else op.group

    def enter(self, op: Op) -> tuple[tuple[Any, ...], int]:
        self.order += 1
        side = self.side(op)
        self.entered.setdefault(side, []).append(self.order)
        self.last[side] = op
        self.queue.append((side, len(self.entered[side])))
        return self.queue[-1]


class World:
    """All ranks. `is_blocking`: a wait blocks the host, as with gloo; else only "item" does."""

    def __init__(self, programs: Sequence[Sequence[Op]], *, is_blocking: bool) -> None:
        self.ranks = [Rank(number, program) for number, program in enumerate(programs)]
        self.is_blocking = is_blocking
        self._arrived = set[tuple[int, tuple[Any, ...], int]]()

    def ends(self, side: tuple[Any, ...], number: int) -> list[int]:
        """The ranks that have not entered their part of this operation."""
        if side[0] in ("send", "receive"):
            other = ("receive" if side[0] == "send" else "send", *side[1:])
            peer = side[3] if side[0] == "send" else side[2]
            has = len(self.ranks[peer].entered.get(other, ())) >= number
            return [] if has else [peer]
        return [
            member for member in side[1] if len(self.ranks[member].entered.get(side, ())) < number
        ]

    def run(self) -> None:
        """Until no host can go on."""
        while any(self._step(rank) for rank in self.ranks):
            self._run_devices()

    def _step(self, rank: Rank) -> bool:
        moved = False
        while rank.at < len(rank.program):
            if rank.waits_for:
                if self.is_blocking and any(self._is_open(*each) for each in rank.waits_for):
                    return moved
                if not self.is_blocking and rank.num_run < len(rank.queue):
                    return moved
                for side, number in rank.waits_for:
                    if len(rank.waits_for) == 1 and side[0] not in ("send", "receive"):
                        rank.left[side] = number
                rank.waits_for = []
                rank.at += 1
                moved = True
                continue
            if rank.at == rank.stops_at:
                return moved
            moved = True
            self._do(rank, rank.program[rank.at])
        return moved

    def _do(self, rank: Rank, op: Op) -> None:
        if op.what == "begin":
            rank.began = rank.order
        elif op.what == "wait":
            waits, rank.handles = rank.handles, []
            if self.is_blocking and waits:
                rank.waits_for = waits
                return
        elif op.what == "item":
            if not self.is_blocking:
                rank.waits_for = rank.queue[-1:]
                if rank.waits_for:
                    return
        else:
            entered = rank.enter(op)
            if op.is_async:
                rank.handles.append(entered)
            elif self.is_blocking:
                rank.waits_for = [entered]
                return
        rank.at += 1

    def _is_open(self, side: tuple[Any, ...], number: int) -> bool:
        """Whether the operation has not ended for a host that waits for it."""
        return bool(self.ends(side, number))

    def _run_devices(self) -> None:
        """Each device runs what its host has entered in that order. A message is sent without its
        receiver; all else waits there for the devices of the others."""
        while any(self._run_device(rank) for rank in self.ranks):
            pass

    def _run_device(self, rank: Rank) -> bool:
        before = rank.num_run
        while rank.num_run < len(rank.queue):
            side, number = rank.queue[rank.num_run]
            if side[0] == "receive":
                sent = ("send", *side[1:])
                if (side[2], sent, number) not in self._arrived:
                    break
            elif side[0] != "send" and (
                self._arrived.add((rank.number, side, number))
                or any((member, side, number) not in self._arrived for member in side[1])
            ):
                break
            self._arrived.add((rank.number, side, number))
            rank.num_run += 1
        return rank.num_run > before

    # --- what the rows tell ---
    def stalls(self) -> dict[int, Stall]:
        return {rank.number: self._stall(rank) for rank in self.ranks}

    def _stall(self, rank: Rank) -> Stall:
        return Stall(
            iteration=1,
            where="collective",
            what="forward",
            collective=sum(  # the marks count these alone
                len(numbers) for side, numbers in rank.entered.items() if side[0] in COUNTED
            ),
            since_s=10.0,
            normal_s=1.0,
            told_s=15.0,
            seq=rank.number + 1,
            groups=tuple(
                GroupProgress(
                    key=hash(side[1:] if op.peer >= 0 else side) & 0xFFFFFFFF,
                    role="" if op.peer >= 0 else side[0],
                    members=strides((op.peer,) if op.peer >= 0 else side[1]),
                    entered=len(rank.entered[side]),
                    left=rank.left.get(side, 0),
                    kind=op.what,
                    num_bytes=op.num_bytes,
                    order=newest if (newest := rank.entered[side][-1]) > rank.began else 0,
                    in_s=5.0,
                )
                for side, op in rank.last.items()
            ),
            are_groups_complete=True,
            waits=self.is_blocking and bool(rank.waits_for),
        )

    def located(self) -> Located | None:
        return locate_stalls(self.stalls(), range(len(self.ranks)))

    def cause(self) -> int:
        """By brute force: the only rank that waits for nobody, reached from all others."""
        waits = {
            rank.number: {
                member for side, number in rank.waits_for for member in self.ends(side, number)
            }
            for rank in self.ranks
        }
        (cause,) = (rank.number for rank in self.ranks if not rank.waits_for)
        reached, todo = {cause}, [cause]
        while todo:
            new = {number for number in waits if todo[-1] in waits[number]} - reached
            todo.pop()
            reached |= new
            todo += new
        assert len(reached) == len(self.ranks)
        return cause


class Case(NamedTuple):
    axes: Axes
    num_micro_batches: int = 4
    num_layers: int = 2
    is_overlapped: bool = False
    is_sharded: bool = False
    chunks: int = 1
    """More than 1: all chunks in turn. Nobody waits for their sends before the end."""


class Schedule:
    """The program of one rank: Megatron's 1F1B schedule, or with chunks all of them in turn."""

    def __init__(self, case: Case, place: int) -> None:
        axes = case.axes
        at = coordinates(axes, place)
        own = replica(axes, at.dp)
        stages = own[at.tp :: axes.tp]
        self.case, self.at = case, at
        self.tp: Group = ("tp", own[at.pp * axes.tp : (at.pp + 1) * axes.tp])
        self.dp: Group = ("dp_cp", holders(axes, at.tp, at.pp))
        self.world: Group = ("world", tuple(range(axes.tp * axes.pp * axes.dp)))
        self.first, self.last = stages[0], stages[-1]
        self.before = stages[at.pp - 1] if at.pp else -1
        self.after = stages[at.pp + 1] if at.pp + 1 < axes.pp else -1
        self.warm_up = min(axes.pp - at.pp - 1, case.num_micro_batches)

    def iterations(self) -> Iterator[Op]:
        case = self.case
        for _ in range(ITERATIONS):
            yield Op("begin")
            if case.is_sharded and case.axes.dp > 1:
                yield Op("all_gather", self.dp)
            if case.chunks > 1 and case.axes.pp > 1:
                yield from self._chunks()
            else:
                yield from self._one_forward_one_backward()
            if not case.is_overlapped:
                yield from self._reduction()
            yield Op("wait")
            yield Op("all_reduce", self.world)
            yield Op("item")

    def _layers(self) -> Iterator[Op]:
        for _ in range(self.case.num_layers if self.case.axes.tp > 1 else 0):
            yield Op("all_reduce", self.tp)

    def _exchange(self, *wanted: tuple[str, int]) -> Iterator[Op]:
        posted = [Op(what, peer=peer, is_async=True) for what, peer in wanted if peer >= 0]
        yield from posted
        if posted:
            yield Op("wait")

    def _reduction(self) -> Iterator[Op]:
        for bucket in range(2 if self.case.axes.dp > 1 else 0):
            kind = "reduce_scatter" if self.case.is_sharded else "all_reduce"
            yield Op(kind, self.dp, is_async=self.case.is_overlapped, num_bytes=64 << bucket)

    def _one_forward_one_backward(self) -> Iterator[Op]:
        case, before, after = self.case, self.before, self.after
        for _ in range(self.warm_up):
            yield from self._exchange(("receive", before))
            yield from self._layers()
            yield from self._exchange(("send", after))
        steady = case.num_micro_batches - self.warm_up
        yield from self._exchange(("receive", before)) if steady else ()
        for index in range(steady):
            yield from self._layers()
            yield from self._exchange(("send", after), ("receive", after))
            yield from self._layers()
            is_last = index + 1 == steady
            if is_last and case.is_overlapped and not self.warm_up:
                yield from self._reduction()
            yield from self._exchange(("send", before), ("receive", -1 if is_last else before))
        for index in range(self.warm_up):
            yield from self._exchange(("receive", after))
            yield from self._layers()
            if index + 1 == self.warm_up and case.is_overlapped:
                yield from self._reduction()
            yield from self._exchange(("send", before))

    def _chunks(self) -> Iterator[Op]:
        """Forward through all chunks of the stages, as a ring, and back."""
        case = self.case
        for chunk in range(case.chunks):
            for _ in range(case.num_micro_batches):
                yield from self._pass(self._below(chunk), self._above(chunk))
        for chunk in reversed(range(case.chunks)):
            for index in range(case.num_micro_batches):
                yield from self._pass(self._above(chunk), self._below(chunk))
                if not chunk and case.is_overlapped and index + 1 == case.num_micro_batches:
                    yield from self._reduction()

    def _below(self, chunk: int) -> int:
        return self.before if self.at.pp else self.last if chunk else -1

    def _above(self, chunk: int) -> int:
        if self.at.pp + 1 < self.case.axes.pp:
            return self.after
        return self.first if chunk + 1 < self.case.chunks else -1

    def _pass(self, source: int, target: int) -> Iterator[Op]:
        if source >= 0:
            yield Op("receive", peer=source)
        yield from self._layers()
        if target >= 0:
            yield Op("send", peer=target, is_async=True)


AXES = st.sampled_from(
    [
        Axes(tp=tp, pp=pp, dp=dp)
        for tp in (1, 2, 4)
        for pp in (1, 2, 3)
        for dp in (1, 2, 3)
        if 2 <= tp * pp * dp <= 12
    ]
)
CASES = st.builds(
    Case,
    AXES,
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
)


def stopped(case: Case, victim: int, at: int, *, is_blocking: bool) -> World:
    """The world in which this rank stops before this line of its program, after the first
    iteration."""
    num = case.axes.tp * case.axes.pp * case.axes.dp
    programs = [list(Schedule(case, place).iterations()) for place in range(num)]
    world = World(programs, is_blocking=is_blocking)
    mine = world.ranks[victim % num]
    first = len(mine.program) // ITERATIONS
    mine.stops_at = first + at % first
    world.run()
    return world


@settings(max_examples=400, deadline=None)
@given(CASES, st.integers(0, 11), st.integers(0, 10_000))
def test_the_stopped_rank_is_named_and_nobody_else(case: Case, victim: int, at: int) -> None:
    world = stopped(case, victim, at, is_blocking=True)
    victim %= len(world.ranks)
    assert world.cause() == victim
    located = world.located()
    assert located is not None
    assert (located.kind, located.ranks) == ("rank", (victim,)), located


@settings(max_examples=400, deadline=None)
@given(CASES, st.integers(0, 11), st.integers(0, 10_000))
def test_ranks_whose_hosts_run_ahead_of_their_devices_are_not_named(
    case: Case, victim: int, at: int
) -> None:
    """As with NCCL: the hosts of all others stand where they wait for their devices."""
    world = stopped(case, victim, at, is_blocking=False)
    victim %= len(world.ranks)
    located = world.located()
    if located is not None:
        assert (located.kind, located.ranks) == ("rank", (victim,)), located


# --- what is told may be wrong, or not all ---
def lie(draw: st.DataObject, stall: Stall) -> Stall:
    """The same rank, which tells something else of its groups."""
    number = st.integers(0, 60)
    groups = [
        replace(told, entered=draw.draw(number), order=draw.draw(number))
        if draw.draw(st.booleans())
        else told
        for told in stall.groups
        if draw.draw(st.integers(0, 4))
    ]
    return replace(
        stall,
        groups=tuple(groups),
        waits=draw.draw(st.booleans()),
        are_groups_complete=draw.draw(st.booleans()),
    )


@settings(max_examples=400, deadline=None)
@given(CASES, st.integers(0, 11), st.integers(0, 10_000), st.integers(0, 11), st.data())
def test_a_rank_that_lies_gets_no_healthy_rank_named(
    case: Case, victim: int, at: int, liar: int, draw: st.DataObject
) -> None:
    world = stopped(case, victim, at, is_blocking=True)
    num = len(world.ranks)
    stalls = world.stalls()
    stalls[liar % num] = lie(draw, stalls[liar % num])
    located = locate_stalls(stalls, range(num))
    if located is not None:
        assert {victim % num, liar % num}.issuperset(located.ranks), located


@settings(max_examples=400, deadline=None)
@given(CASES, st.integers(0, 11), st.integers(0, 10_000), st.data())
def test_ranks_that_cannot_tell_all_are_not_blamed_for_it(
    case: Case, victim: int, at: int, draw: st.DataObject
) -> None:
    world = stopped(case, victim, at, is_blocking=True)
    victim %= len(world.ranks)
    stalls = {
        rank: replace(
            stall,
            groups=tuple(told for told in stall.groups if draw.draw(st.booleans())),
            are_groups_complete=False,
        )
        if draw.draw(st.booleans())
        else stall
        for rank, stall in world.stalls().items()
    }
    located = locate_stalls(stalls, range(len(stalls)))
    if located is not None:
        assert (located.kind, located.ranks) == ("rank", (victim,)), located


def test_stalls_that_did_not_change_are_not_located_again() -> None:
    world = stopped(Case(Axes(tp=2, dp=2)), 3, 50, is_blocking=True)
    first, again = world.located(), world.located()
    assert first is not None
    assert first is again


# --- other causes ---
def waiting(rank: int, *told: GroupProgress, waits: bool = True) -> Stall:
    return replace(
        World([[]], is_blocking=True).stalls()[0], seq=rank + 1, groups=told, waits=waits
    )


def entered(group: Group, number: int, *, order: int = 1, **changes: Any) -> GroupProgress:
    told = GroupProgress(
        key=hash(group) & 0xFFFFFFFF,
        role=group[0],
        members=strides(group[1]),
        entered=number,
        left=number - 1,
        kind="all_reduce",
        num_bytes=64,
        order=order,
        in_s=5.0,
    )
    return replace(told, **changes)


WORLD: Group = ("world", (0, 1, 2, 3))
TP = [("tp", (0, 1)), ("tp", (2, 3))]
DP = [("dp_cp", (0, 2)), ("dp_cp", (1, 3))]


@pytest.mark.parametrize("changes", [{"num_bytes": 32}, {"kind": "all_gather"}])
def test_another_call_than_that_of_its_peers_is_a_mismatch(changes: dict[str, Any]) -> None:
    stalls = {rank: waiting(rank, entered(WORLD, 7)) for rank in range(4)}
    stalls[2] = waiting(2, entered(WORLD, 7, **changes))
    located = locate_stalls(stalls, range(4))
    assert located is not None
    assert (located.kind, located.ranks) == ("mismatch", (2,)), located


def test_an_agent_cannot_make_the_leader_count_loops_without_a_member() -> None:
    stalls = {rank: waiting(rank, entered(WORLD, 7)) for rank in range(4)}
    stalls[2] = waiting(2, entered(WORLD, 7, members=(0, 0, 0, 1 << 62, 0)))
    began_s = time.process_time()
    locate_stalls(stalls, range(4))
    assert time.process_time() < began_s + 5


def test_two_ranks_that_differ_are_both_told_and_none_is_blamed() -> None:
    stalls = {0: waiting(0, entered(TP[0], 7)), 1: waiting(1, entered(TP[0], 7, num_bytes=1))}
    located = locate_stalls(stalls, range(2))
    assert located is not None
    assert (located.kind, located.ranks) == ("mismatch", ()), located
    assert "rank 0 called" in located.why
    assert "rank 1 called" in located.why


def test_what_all_have_entered_and_does_not_end_is_the_network() -> None:
    stalls = {rank: waiting(rank, entered(TP[rank // 2], 3)) for rank in range(4)}
    located = locate_stalls(stalls, range(4))
    assert located is not None
    assert (located.kind, located.ranks) == ("network", ())
    assert located.why.startswith("all_reduce 3 of tp (ranks 0, 1) was entered by all")


def test_who_enters_alone_what_no_peer_enters_is_a_mismatch() -> None:
    """Rank 1 is at a barrier of all; its peers wait for it in the tensor and data groups."""
    stalls = {
        0: waiting(0, entered(WORLD, 6, order=1), entered(TP[0], 4, order=2)),
        1: waiting(1, entered(WORLD, 7, order=3, kind="barrier"), entered(TP[0], 3, order=2)),
        2: waiting(2, entered(WORLD, 6, order=1), entered(DP[0], 2, order=3)),
        3: waiting(3, entered(WORLD, 6, order=1), entered(DP[1], 2, order=3)),
    }
    located = locate_stalls(stalls, range(4))
    assert located is not None
    assert (located.kind, located.ranks) == ("mismatch", (1,)), located


def test_who_has_launched_fewer_than_its_peers_is_a_mismatch() -> None:
    """All wait for all that they have launched; rank 1 has skipped one before."""
    stalls = {rank: waiting(rank, entered(WORLD, 7 - (rank == 1), order=3)) for rank in range(4)}
    located = locate_stalls(stalls, range(4))
    assert located is not None
    assert (located.kind, located.ranks) == ("mismatch", (1,)), located
    assert located.why.startswith("has entered 6 operations of world")
    moved = {**stalls, 1: replace(stalls[1], collective=stalls[1].collective + 1)}
    elsewhere = locate_stalls(moved, range(4))
    assert elsewhere is None or not elsewhere.ranks


def test_who_skips_a_collective_is_told_with_the_peer_that_waits_for_it() -> None:
    """Rank 1 has skipped one of all, and waits for rank 3, which is there."""
    stalls = {rank: waiting(rank, entered(WORLD, 7, order=3)) for rank in range(4)}
    stalls[1] = waiting(1, entered(WORLD, 6, order=1), entered(DP[1], 2, order=3))
    located = locate_stalls(stalls, range(4))
    assert located is not None
    assert (located.kind, located.ranks) == ("mismatch", ()), located
    assert "waits in a circle with ranks 1 3" in located.why, located
