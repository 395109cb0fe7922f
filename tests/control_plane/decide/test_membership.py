"""The members of a task's next generation, and their positions in the layout."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, at_rest, kinds, only, spec, the
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_jobs import job
from unicron.control_plane.decide.membership import order_members
from unicron.control_plane.state.task import HeldState, Rank
from unicron.control_plane.throughput.training_layouts import layout_of, layout_within, speed
from unicron.events.errors import SpecError
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.records.types import Slot
from unicron.events.spec.job import JobSpec, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import (
    coordinates,
    has_every_part,
    layout_in_words,
    num_positions,
    replica,
)


def train_of(one: JobSpec) -> Train:
    assert one.train is not None
    return one.train


def seats(order: o.Reconfigure) -> list[int]:
    return [member.rank for member in order.members]


# --- layouts ------------------------------------------------------------------------------------
def test_the_fastest_permitted_layout_is_chosen() -> None:
    both = train_of(job(tensor=[1, 2], pipeline=[1, 2, 3], optimizer="sharded"))
    for num in range(1, 9):
        found = layout_of(both, num)
        assert found is not None
        assert num_positions(found) == num
        assert speed(both, num) == max(
            speed(
                train_of(
                    job(
                        {"min": 1, "max": 8},
                        tensor=[axes.tp],
                        pipeline=[axes.pp],
                        optimizer="sharded",
                    )
                ),
                num,
            )
            for axes in both.parallel.layouts(num, 24)
        )
    pairs = train_of(job(tensor=[2]))
    assert [layout_of(pairs, num) for num in (1, 3)] == [None, None]
    assert [speed(pairs, num) > 0 for num in range(1, 5)] == [False, True, False, True]
    within = layout_within(pairs, 3)
    assert within is not None
    assert layout_in_words(within) == "TP 2 x DP 1"
    assert layout_within(pairs, 1) is None


def test_plain_data_parallelism_has_no_layout() -> None:
    plain = train_of(spec())
    assert layout_of(plain, 4) is layout_within(plain, 4) is None
    assert speed(plain, 4) == 4.0
    sharded = layout_of(train_of(job(optimizer="sharded")), 3)
    assert sharded == Axes(dp=3)


def test_no_more_replicas_than_micro_batches() -> None:
    few = train_of(job(batch=2, tensor=[1, 2]))
    assert layout_of(few, 3) is None
    assert layout_of(few, 4) == Axes(tp=2, dp=2)


def test_chunks_need_a_multiple_of_the_pipeline_size() -> None:
    five, six = (train_of(job(batch=num, pipeline=[2], chunks=2)) for num in (5, 6))
    assert speed(five, 2) == pytest.approx(speed(six, 2) * 5 / 6, rel=0.05)


@pytest.mark.parametrize(
    ("slots", "parallel", "path"),
    [
        ({"min": 1, "max": 3}, {"tensor": [4]}, "train.parallel"),
        ({"sizes": [3, 5]}, {"tensor": [2]}, "train.parallel"),
        ({"min": 1, "max": 4, "floor": 3}, {"tensor": [2]}, "slots.floor"),
    ],
)
def test_a_spec_needs_a_layout_for_some_number_of_slots(
    slots: dict[str, Any], parallel: dict[str, Any], path: str
) -> None:
    with pytest.raises(SpecError) as raised:
        job(slots, **parallel)
    assert raised.value.path == path


def test_state_coverage_depends_on_the_optimizer() -> None:
    axes = Axes(tp=2, dp=2)  # one replica: positions 0 1, the other: 2 3
    assert has_every_part(axes, "whole", [0, 1])
    assert has_every_part(axes, "whole", [0, 3])
    assert not has_every_part(axes, "whole", [0, 2])
    assert not has_every_part(axes, "sharded", [0, 1, 3])
    assert has_every_part(axes, "sharded", [0, 1, 2, 3])
    assert has_every_part(axes, "mirrored", [0, 1])
    assert has_every_part(Axes(dp=3), "mirrored", [0, 1])  # 1 mirrors 0, and 0 mirrors 2
    assert not has_every_part(Axes(dp=3), "mirrored", [0])
    assert not has_every_part(Axes(dp=1), "mirrored", [])


# --- positions ----------------------------------------------------------------------------------
def test_each_node_has_one_replica(d: Driver) -> None:
    task = d.running(job(pipeline=[2]))
    found = the(o.Reconfigure, d.log)
    assert (found.axes, found.dp) == (Axes(pp=2, dp=2), 2)
    # Each node has one replica, so no node has all copies of a stage.
    assert [member.node for member in found.members] == ["n1", "n2", "n1", "n2"]
    assert d.state.tasks[task].axes == found.axes


def test_a_lost_rank_leaves_a_replica_and_a_standby(d: Driver) -> None:
    task = d.running(job(tensor=[2]))
    assert seats(the(o.Reconfigure, d.log)) == [0, 1, 2, 3]
    lost = d.exit(task, 1)
    healed = the(o.Reconfigure, d.obey(lost, start=False))
    assert (healed.axes, healed.dp) == (Axes(tp=2, dp=1), 1)
    assert seats(healed) == [2, 3, 0], "the whole replica, then the standby rank"
    d.progress(task)
    grown = the(o.Reconfigure, d.obey([lost[-1]]))
    assert grown.axes == Axes(tp=2, dp=2)
    assert seats(grown) == [2, 3, 0, 1]
    assert the(decisions.IncidentClosed, d.heal(task)).outcome == "healed"


def test_survivors_of_two_replicas_form_one(d: Driver) -> None:
    """One rank of each tensor position survives. The two ranks form one replica."""
    task = d.running(job(tensor=[2]))
    lost = [*d.exit(task, 0), *d.exit(task, 3)]
    healed = only(o.Reconfigure, d.obey(lost, start=False))[-1].body
    assert (healed.axes, seats(healed)) == (Axes(tp=2, dp=1), [2, 1])
    d.progress(task)
    d.obey([record for record in lost if isinstance(record.body, o.StartRank)])
    d.progress(task)


def test_a_survivor_without_a_layout_waits(d: Driver) -> None:
    """TP 2 has no layout for one slot, so the survivor waits for the restarted rank."""
    task = d.running(job({"min": 1, "max": 2}, tensor=[2]))
    lost = d.exit(task, 0)
    assert "Reconfigure" not in kinds(d.obey(lost, start=False))
    assert d.state.tasks[task].phase == "quiescing"
    assert d.state.tasks[task].ranks[1].quiesced == 1
    again = the(o.Reconfigure, d.obey([lost[-1]]))
    assert (again.axes, seats(again)) == (Axes(tp=2, dp=1), [0, 1])
    assert d.state.tasks[task].phase == "training"
    d.progress(task)


SHAPES = st.builds(
    Axes, tp=st.sampled_from([1, 2, 3]), pp=st.sampled_from([1, 2]), dp=st.integers(1, 3)
)


@given(SHAPES, SHAPES, st.integers(1, 6), st.integers(0, 10), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_each_rank_is_ordered_once_and_replicas_stay(
    old: Axes, new: Axes, each: int, more: int, random: Any
) -> None:
    """Nodes have `each` slots. Some ranks of the old layout survive, and `more` new ranks join."""
    ranks = [
        Rank(
            rank=number,
            attempt=1,
            slot=Slot(f"n{number // each}", number % each),
            held=HeldState(generation=3, axes=old, place=number),
        )
        for number in range(num_positions(old))
    ]
    kept = [rank for rank in ranks if random.random() < 0.7]
    kept += [
        Rank(rank=100 + number, attempt=1, slot=Slot(f"m{number // each}", number % each))
        for number in range(more)
    ]
    if len(kept) < num_positions(new):
        return
    found = order_members(new, kept)
    assert sorted(rank.rank for rank in found) == sorted(rank.rank for rank in kept)
    assert order_members(new, kept[::-1]) == found, "the order of the input has no effect"
    if (old.tp, old.pp) != (new.tp, new.pp):
        return
    whole = [
        dp
        for dp in range(old.dp)
        if {ranks[place].rank for place in replica(old, dp)} <= {rank.rank for rank in kept}
    ]
    stay = 0
    for dp in range(new.dp):
        own = [found[place].held for place in replica(new, dp)]
        if all(
            held is not None and coordinates(old, held.place)[:2] == coordinates(new, place)[:2]
            for held, place in zip(own, replica(new, dp), strict=True)
        ):
            stay += len({coordinates(old, held.place).dp for held in own if held}) == 1
    assert stay >= min(len(whole), new.dp)


def test_ranks_with_the_only_shards_leave_after_sending_them(d: Driver) -> None:
    """The drained node has two of the four shards of the optimizer."""
    task = d.running(job(optimizer="sharded"))
    assert the(o.Reconfigure, d.log).axes == Axes(dp=4)
    lines = d.tell("operator/drain", r.NodeDrained(node="n2"))
    sending, final = [record.body for record in only(o.Reconfigure, d.obey(lines))]
    assert (sending.axes, seats(sending)) == (Axes(dp=2), [0, 1, 2, 3])
    assert (final.axes, seats(final)) == (Axes(dp=2), [0, 1])
    assert set(d.state.tasks[task].ranks) == {0, 1}


@pytest.mark.parametrize("optimizer", ["whole", "mirrored"])
def test_ranks_whose_state_others_have_leave_at_once(d: Driver, optimizer: str) -> None:
    """whole: one of two replicas leaves. mirrored: every second rank of the ring leaves."""
    task = d.running(job(tensor=[2]) if optimizer == "whole" else job(optimizer=optimizer))
    if optimizer == "mirrored":
        members = [member.node for member in the(o.Reconfigure, d.log).members]
        assert members == ["n1", "n2", "n1", "n2"]
    lines = d.tell("operator/drain", r.NodeDrained(node="n2"))
    found = the(o.Reconfigure, d.obey(lines))
    assert set(seats(found)) == {0, 1}
    assert set(d.state.tasks[task].ranks) == {0, 1}


def test_memory_checkpoints_are_named_without_a_full_replica(d: Driver) -> None:
    task = d.running(job({"min": 1, "max": 2}, tensor=[2]))
    it = d.state.tasks[task]
    d.tell(
        d.source("n1"),
        r.MemoryCheckpointStored(
            task=task,
            rank=0,
            attempt=1,
            generation=1,
            step_version=1,
            node="n1",
            copy_bytes=9,
            checksum="crc32:00000000",
        ),
    )
    again = the(o.Reconfigure, d.obey(d.exit(task, 0)))
    assert [copy.step_version for copy in again.copies] == [1]
    assert it.ranks[1].has_state
    d.progress(task)


def test_a_preempted_task_saves_on_its_first_member(d: Driver) -> None:
    task = d.running(job(tensor=[2]))
    saves = d.tell("operator/drain", r.NodeDrained(node="n1"))
    saves += d.obey(saves)
    saves += d.tell("operator/drain", r.NodeDrained(node="n2"))
    order_ = only(o.Quiesce, saves)[-1].body
    members = d.state.tasks[task].members
    assert (order_.mode, order_.save) == ("boundary", True)
    assert order_.ranks == tuple(member.rank for member in members)
    assert order_.saving == tuple(range(len(members)))
    d.obey(saves[-3:])
    assert (d.state.tasks[task].saved_iteration, d.state.tasks[task].phase) == (1, "idle")


def test_a_preempted_task_saves_after_a_fault_if_the_rest_has_the_whole_state(d: Driver) -> None:
    """Those that save are known when all have reported their steps."""
    task = d.running(job({"min": 4, "max": 4}, tensor=[2]))
    it = d.state.tasks[task]
    members = [member.rank for member in it.members]
    for node in ("n1", "n2"):
        d.tell(f"operator/{node}", r.NodeDrained(node=node))
    lines = d.exit(task, members[1])
    for rank in (members[0], members[2]):
        assert not any(record.body.save for record in only(o.Quiesce, lines))
        lines = d.quiesced(task, rank)
    lines = d.quiesced(task, members[3])
    order_ = the(o.Quiesce, lines)
    assert (order_.mode, order_.save, order_.saving) == ("now", True, (0, 2, 3))
    assert order_.ranks == (members[0], members[2], members[3])
    # One that saves ends: the rest no longer has the whole state.
    lines = d.exit(task, members[3])
    assert not only(o.Quiesce, lines)
    assert {record.body.rank for record in only(o.StopRank, lines)} == {members[0], members[2]}


def test_a_preempted_task_without_its_full_state_does_not_save(d: Driver) -> None:
    task = d.running(job({"min": 4, "max": 4}, tensor=[2]))
    d.exit(task, 0)
    for node in ("n1", "n2"):
        lines = d.tell(f"operator/{node}", r.NodeDrained(node=node))
        assert not [record for record in only(o.Quiesce, lines) if record.body.save]
        d.obey(lines)
    assert d.state.tasks[task].phase in ("idle", "starting", "quiescing")


# --- placement ----------------------------------------------------------------------------------
def nodes_of(slots: list[int], one: JobSpec) -> list[list[str]]:
    """The nodes of each replica of a task, if n1, n2, ... have these numbers of slots."""
    d = Driver(nodes=0)
    for number, num in enumerate(slots, 1):
        d.join(f"n{number}", slots=num)
    d.running(one)
    found = the(o.Reconfigure, d.log)
    assert found.axes is not None
    at_rest(d)
    return [
        [found.members[place].node for place in replica(found.axes, dp)]
        for dp in range(found.axes.dp)
    ]


def test_one_replica_is_on_one_node() -> None:
    """A split replica is no safer: the loss of either node loses a part of the model."""
    assert nodes_of([2, 2], job({"min": 1, "max": 2}, tensor=[2])) == [["n1", "n1"]]
    assert nodes_of([3, 3], job({"min": 1, "max": 3}, pipeline=[3])) == [["n1"] * 3]


@pytest.mark.parametrize("parallel", [{"tensor": [2]}, {"pipeline": [2]}])
def test_a_second_replica_is_on_another_node(parallel: dict[str, Any]) -> None:
    assert nodes_of([4, 4], job(**parallel)) == [["n1", "n1"], ["n2", "n2"]]
    assert nodes_of([4], job(**parallel)) == [["n1", "n1"], ["n1", "n1"]]
    assert nodes_of([3, 1], job(**parallel)) == [["n1", "n1"], ["n1", "n2"]]


def test_optimizer_shards_are_spread_over_nodes() -> None:
    assert sorted({node for one in nodes_of([4, 4], job(optimizer="sharded")) for node in one}) == [
        "n1",
        "n2",
    ]


# --- the position that a process builds its part of the model for ---------------------------------
def expected(records: list[Record], rank: int) -> tuple[Axes | None, int]:
    """What the last order that starts this rank names."""
    order = [record.body for record in only(o.StartRank, records) if record.body.rank == rank][-1]
    return order.axes, order.place


def taken(order: o.Reconfigure, rank: int) -> tuple[Axes | None, int]:
    return order.axes, seats(order).index(rank)


JOBS: list[dict[str, Any]] = [
    {"tensor": [2]},
    {"pipeline": [2]},
    {"optimizer": "sharded"},
    {"optimizer": "mirrored"},
    {},
]


@pytest.mark.parametrize("parallel", JOBS)
def test_a_first_start_names_the_positions(d: Driver, parallel: dict[str, Any]) -> None:
    d.running(job(**parallel))
    first = the(o.Reconfigure, d.log)
    for rank in range(4):
        assert expected(d.log, rank) == taken(first, rank)


@pytest.mark.parametrize("parallel", JOBS)
@pytest.mark.parametrize("victim", range(4))
def test_a_restarted_rank_is_expected_in_the_hole(
    d: Driver, parallel: dict[str, Any], victim: int
) -> None:
    """The members that are left form a generation of their own before it is ready."""
    task = d.running(job(**parallel))
    lost = d.exit(task, victim)
    d.obey(lost, start=False)
    d.progress(task)
    grown = only(o.Reconfigure, d.obey([lost[-1]]))[-1].body
    assert expected(lost, victim) == taken(grown, victim)


@pytest.mark.parametrize(
    "parallel", [{"tensor": [2]}, {"pipeline": [2]}, {"tensor": [1, 2], "pipeline": [1, 2]}]
)
def test_shrunk_and_grown_again(d: Driver, parallel: dict[str, Any]) -> None:
    """A node is drained and undrained: the newcomers build for the layout of all."""
    task = d.running(job(**parallel))
    shrunk = the(o.Reconfigure, d.obey(d.tell("operator/drain", r.NodeDrained(node="n2"))))
    assert len(shrunk.members) == 2
    d.progress(task)
    begin = len(d.log)
    d.obey(d.tell("operator/undrain", r.NodeUndrained(node="n2")))
    new = d.log[begin:]
    grown = only(o.Reconfigure, new)[-1].body
    assert len(grown.members) == 4
    started = {record.body.rank for record in only(o.StartRank, new)}
    assert len(started) == 2
    for rank in started:
        assert expected(new, rank) == taken(grown, rank)
