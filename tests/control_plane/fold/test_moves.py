"""Moves and preemption: new ranks start first, and no iteration is lost by ranks that leave."""

from __future__ import annotations

import pytest
from decider import Driver, drain, failed, kinds, only, spec, task_of, the
from unicron.control_plane.decide.advance import decision_record
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.state.cluster import open_orders
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records import types as t

pytestmark = pytest.mark.nodes(3)


def check_trains(d: Driver, task: int) -> None:
    """The task trains on, and no iteration is lost."""
    at = task_of(d, task).iteration
    d.progress(task)
    assert (task_of(d, task).iteration, task_of(d, task).iterations_lost) == (at + 1, 0)


# --- moves --------------------------------------------------------------------------------------
def test_a_drained_task_trains_until_all_new_ranks_are_ready(d: Driver, task: int) -> None:
    moved = drain(d, "n2")
    assert kinds(moved) == [
        "PlanChosen",
        "TaskPlaced",
        "StartRank",
        "StartRank",
        "SetCheckpointStores",
    ]
    starts = only(o.StartRank, moved)
    assert kinds(d.obey(starts[:1])) == [], "one new rank is ready, one is starting"
    assert task_of(d, task).phase == "training"
    assert len(task_of(d, task).living_members()) == 4
    check_trains(d, task)
    joined = d.obey(starts[1:])
    assert kinds(joined) == ["Quiesce", "Reconfigure", "StopRank", "StopRank", "Resume"]
    assert (the(o.Quiesce, joined).mode, the(o.Quiesce, joined).save) == ("boundary", False)
    assert [x.rank for x in the(o.Reconfigure, joined).members] == [0, 1, 4, 5]
    check_trains(d, task)
    assert d.state.incidents == {}
    assert not d.state.nodes["n2"].occupants


def test_a_new_rank_that_timed_out_is_not_waited_for(d: Driver, task: int) -> None:
    starts = only(o.StartRank, drain(d, "n2"))
    d.obey(starts[:1])
    late = d.due(f"start/{task}/5/1")
    assert kinds(late) == ["IncidentOpened", "Quiesce", "StopRank"]
    d.obey(late)
    assert len(task_of(d, task).members) == 4
    d.progress(task)


def test_a_new_rank_that_dies_is_restarted_and_waited_for(d: Driver, task: int) -> None:
    starts = only(o.StartRank, drain(d, "n2"))
    d.obey(starts[:1])
    assert kinds(d.exit(task, 5)) == ["IncidentOpened", "StartRank"]
    assert task_of(d, task).phase == "training"
    d.obey(d.log[-1:])
    assert [x.rank for x in task_of(d, task).members] == [0, 1, 4, 5]
    d.progress(task)


def test_a_pure_shrink_quiesces_at_once(d: Driver) -> None:
    task = d.running(spec(throughput={2: 10.0, 4: 15.0, 6: 16.0}, slots={"min": 2, "max": 6}))
    assert len(task_of(d, task).members) == 6
    d.submit(spec(name="beta", throughput={2: 10.0}, slots={"min": 2, "max": 2}))
    quiesce = the(o.Quiesce, d.log[-3:])
    assert (quiesce.task, quiesce.mode) == (task, "boundary")


def test_a_member_that_dies_while_new_ranks_start(d: Driver, task: int) -> None:
    starts = only(o.StartRank, drain(d, "n2"))
    lost = d.exit(task, 3)
    assert kinds(lost) == ["IncidentOpened", "Quiesce"]
    d.obey(lost)
    assert [x.rank for x in task_of(d, task).members] == [0, 1, 2]
    d.progress(task)
    d.obey(starts)
    assert [x.rank for x in task_of(d, task).members] == [0, 1, 4, 5]
    assert the(decisions.IncidentClosed, d.heal(task)).iterations_lost == 0


def placed(d: Driver, task: int, *seats: t.Seat) -> None:
    """Fold seats that the placement would not choose."""
    body = decisions.TaskPlaced(task=task, why="a trade", seats=seats)
    fold(d.state, decision_record(d.state, body, cause=d.log[-1]))


@pytest.mark.parametrize("keep", [1, 0])
def test_two_tasks_that_trade_slots_do_not_wait_for_each_other(keep: int) -> None:
    """If each keeps one seat, both train on. If none, the first task to leave saves its state."""
    d = Driver(nodes=2)
    job = {"slots": {"min": 2, "max": 2}}
    alpha, beta = d.running(spec(**job)), d.running(spec(name="beta", **job))
    targets = {task: task_of(d, task).target for task in (alpha, beta)}
    for task, wanted in ((alpha, targets[beta]), (beta, targets[alpha])):
        placed(
            d,
            task,
            *targets[task][:keep],
            *(t.Seat(seat.rank + 2, seat.slot) for seat in wanted[keep:]),
        )
    for _ in range(4):
        for task in (alpha, beta):
            d.obey(d.progress(task) if task_of(d, task).phase == "training" else [])
            d.obey(d.tell(f"operator/{d.state.seq}", r.TaskWeightSet(task=task, weight=1.0)))
    for task in (alpha, beta):
        assert task_of(d, task).phase == "training"
        assert sorted(seat.rank for seat in task_of(d, task).target) == [
            member.rank for member in task_of(d, task).members
        ]
        assert task_of(d, task).iterations_lost == 0
    saves = [x for x in only(o.Quiesce, d.log) if x.body.save]
    assert bool(saves) == (keep == 0)
    assert d.state.incidents == {}


def test_a_step_that_only_a_leaving_rank_finished_is_kept(d: Driver, task: int) -> None:
    starts = only(o.StartRank, drain(d, "n2"))
    ready = d.do(starts[0].body) + d.do(starts[1].body)
    assert the(o.Quiesce, ready).ranks == (0, 1, 2, 3)
    for rank in (0, 1, 3):
        d.quiesced(task, rank)
    d.steps[task] += 1
    last = d.quiesced(task, 2)
    assert [x.rank for x in the(o.Reconfigure, last).members] == [0, 1, 2, 3, 4, 5]
    d.obey(last)
    assert [x.rank for x in task_of(d, task).members] == [0, 1, 4, 5]
    d.progress(task)
    assert (task_of(d, task).iteration, task_of(d, task).iterations_lost) == (3, 0)


def test_nothing_starts_on_a_drained_node(d: Driver, task: int) -> None:
    d.tell(f"leader/{d.state.nonce}", r.NodeUnreachable(node="n1", incarnation=1, silence_s=6.0))
    drain(d, "n2")
    assert {seat.slot.node for seat in task_of(d, task).target} == {"n1", "n2"}
    assert kinds(d.exit(task, 2)) == ["IncidentOpened", "Quiesce"]
    back = d.tell(f"leader/{d.state.nonce}", r.NodeReachable(node="n1", incarnation=1))
    d.obey(only(o.Quiesce, d.log))
    assert {x.body.slot.node for x in only(o.StartRank, back)} == {"n3"}
    d.obey(only(o.StartRank, back))
    d.progress(task)


# --- preemption ---------------------------------------------------------------------------------
def test_a_drain_without_room_loses_no_iteration(d: Driver) -> None:
    task = d.running(spec(slots={"min": 6, "max": 6}))
    d.progress(task, 7)
    left = drain(d, "n2")
    assert kinds(left) == ["PlanChosen", "TaskPlaced", "TaskWaiting", "Quiesce"]
    quiesce = the(o.Quiesce, left)
    assert (quiesce.mode, quiesce.save, quiesce.ranks[0]) == ("boundary", True, 0)
    saved = d.save(task, 0)
    assert kinds(saved) == ["PublishCheckpoint"]
    assert [kinds(d.quiesced(task, rank)) for rank in range(6)] == [[]] * 6, "not published"
    stopped = d.obey(saved)
    assert kinds(stopped) == ["StopRank"] * 6
    d.obey(stopped)
    it = task_of(d, task)
    assert (it.phase, it.ranks, it.iteration) == ("idle", {}, 8)
    assert d.state.deadlines == {}
    back = d.tell("operator/undrain", r.NodeUndrained(node="n2"))
    d.obey(back)
    assert {x.body.checkpoint for x in only(o.StartRank, back)} == {"gen-1/iter-8"}
    check_trains(d, task)
    assert d.state.incidents == {}


def test_slots_that_return_in_time_cancel_the_preemption(d: Driver) -> None:
    task = d.running(spec(slots={"min": 6, "max": 6}))
    drain(d, "n2")
    for rank in range(3):
        d.quiesced(task, rank)
    back = d.tell("operator/undrain", r.NodeUndrained(node="n2"))
    assert kinds(back) == ["PlanChosen", "TaskPlaced"]
    assert [seat.rank for seat in task_of(d, task).target] == list(range(6))
    d.obey(d.save(task, 0))
    d.quiesced(task, 3)
    d.quiesced(task, 4)
    last = d.quiesced(task, 5)
    assert kinds(last) == ["Reconfigure"]
    assert len(the(o.Reconfigure, last).members) == 6
    d.obey(last)
    check_trains(d, task)
    assert not only(o.StopRank, d.log)


@pytest.mark.parametrize("quiesced", [True, False])
def test_a_save_that_never_comes_has_a_deadline(d: Driver, quiesced: bool) -> None:
    task = d.running(spec(slots={"min": 6, "max": 6}))
    d.progress(task, 7)
    drain(d, "n2")
    for rank in range(6 if quiesced else 0):
        d.quiesced(task, rank)
    late = d.due(f"quiesce/{task}/1")
    stops = [x.body for x in only(o.StopRank, late)]
    assert len(stops) == 6
    if quiesced:
        assert {x.why for x in stops} == {
            "the plan has no seat for it; 8 iterations could not be saved"
        }
    d.obey(late)
    assert task_of(d, task).phase == "idle"
    d.steps[task] = 0
    d.obey(d.tell("operator/undrain", r.NodeUndrained(node="n2")))
    d.progress(task)
    assert task_of(d, task).iterations_lost == 8


def test_too_few_survivors_save_at_once(d: Driver) -> None:
    task = d.running(spec(slots={"min": 5, "max": 6}))
    d.progress(task, 3)
    d.tell(f"leader/{d.state.nonce}", r.NodeUnreachable(node="n1", incarnation=1, silence_s=5.0))
    lost = failed(d, task, 2)
    quiesces = [x.body for x in only(o.Quiesce, lost)]
    assert [(x.mode, x.save) for x in quiesces] == [("now", False), ("now", True)]
    assert quiesces[1].ranks == (2, 3, 4, 5)
    saved = d.save(task, 2)
    assert the(o.PublishCheckpoint, saved).nodes == ("n2",), "the first member's node is lost"
    d.obey(saved)
    for rank in (3, 4):
        d.quiesced(task, rank)
    gone = d.quiesced(task, 5)
    assert kinds(gone) == ["StopRank"] * 4
    d.obey(gone)
    d.obey(d.join("n1", incarnation=2))
    d.progress(task)
    assert task_of(d, task).iteration == 5
    assert the(decisions.IncidentClosed, d.heal(task)).iterations_lost == 0


def test_the_rank_with_the_most_steps_saves(d: Driver) -> None:
    task = d.running(spec(slots={"min": 6, "max": 6}))
    drain(d, "n2")
    d.quiesced(task, 0)
    for rank in (1, 2, 3, 5):
        d.quiesced(task, rank)
    d.steps[task] += 1
    new = d.quiesced(task, 4)
    again = the(o.Quiesce, new)
    assert (again.ranks[0], again.save, again.mode) == (4, True, "now")
    d.obey(new)
    assert task_of(d, task).phase == "idle"
    assert task_of(d, task).checkpoint.step_version == 2  # type: ignore[union-attr]
    d.obey(d.tell("operator/undrain", r.NodeUndrained(node="n2")))
    d.progress(task)
    assert task_of(d, task).iterations_lost == 0


def test_if_the_saving_rank_dies_another_saves(d: Driver) -> None:
    task = d.running(spec(slots={"min": 6, "max": 6}))
    drain(d, "n2")
    new = d.exit(task, 0)
    assert kinds(new) == ["IncidentOpened", "Quiesce"]
    assert (the(o.Quiesce, new).mode, the(o.Quiesce, new).ranks[0]) == ("now", 1)
    second = d.exit(task, 1)
    assert kinds(second) == ["IncidentEscalated", "Quiesce"]
    assert (the(o.Quiesce, second).save, the(o.Quiesce, second).ranks[0]) == (True, 2)
    d.obey(second)
    assert task_of(d, task).phase == "idle"
    d.obey(d.tell("operator/undrain", r.NodeUndrained(node="n2")))
    assert the(decisions.IncidentClosed, d.heal(task)).iterations_lost == 0


def test_a_heavier_task_gets_the_slots_after_the_save(d: Driver) -> None:
    light = d.running(spec(slots={"min": 6, "max": 6}))
    heavy = d.submit(spec(name="heavy", weight=50.0, slots={"min": 6, "max": 6}))
    assert task_of(d, light).target == ()
    assert len(task_of(d, heavy).target) == 6
    assert not [x for x in open_orders(d.state) if x.kind == "StartRank"]
    d.obey([x for x in only(o.Quiesce, d.log) if x.cause == heavy])
    assert task_of(d, light).phase == "idle"
    assert task_of(d, heavy).phase == "training"
    d.progress(heavy)
    d.obey(d.tell("operator/cancel", r.TaskCancelRequested(task=heavy)))
    check_trains(d, light)


def test_a_task_without_progress_saves_nothing(d: Driver) -> None:
    task = d.submit(spec(slots={"min": 6, "max": 6}))
    left = drain(d, "n2")
    assert kinds(left)[-6:] == ["StopRank"] * 6
    d.obey(left)
    assert task_of(d, task).phase == "idle"


def test_a_superseded_save_does_not_win(d: Driver) -> None:
    """Rank 0 was writing when rank 4, one step ahead, got the order to save instead."""
    task = d.running(spec(slots={"min": 6, "max": 6}))
    drain(d, "n2")
    old, process = d.steps[task], task_of(d, task).ranks[0]
    for rank in (0, 1, 2, 3, 5):
        d.quiesced(task, rank)
    d.steps[task] += 1
    d.quiesced(task, 4)
    published = d.save(task, 4)
    late = d.tell(
        d.source(process.slot.node),
        r.CheckpointSaved(
            task=task,
            generation=1,
            step_version=old,
            path=f"gen-1/iter-{old}",
            ckpt_bytes=9,
            final=False,
        ),
    )
    assert kinds(late) == []
    d.obey(published)
    assert task_of(d, task).checkpoint.step_version == old + 1  # type: ignore[union-attr]
    assert task_of(d, task).phase == "idle"


# --- one plan for several tasks -----------------------------------------------------------------
@pytest.mark.parametrize("first", ["silence", "collective"])
def test_a_lost_node_is_one_plan_for_both_tasks(d: Driver, first: str) -> None:
    """alpha needs a slot that beta gives up, so alpha is placed after beta."""
    alpha = d.running(spec(throughput={2: 3.2, 3: 4.7, 4: 6.16}, slots={"min": 2, "max": 4}))
    beta = d.running(spec(name="beta", throughput={1: 1.5, 2: 2.5}, slots={"min": 1, "max": 2}))
    assert {seat.slot.node for seat in task_of(d, beta).target} == {"n3"}
    unreachable = r.NodeUnreachable(node="n2", incarnation=1, silence_s=5.0)
    records = [] if first == "silence" else failed(d, alpha, 0)
    records += d.tell(f"leader/{d.state.nonce}", unreachable)
    records += failed(d, alpha, 0) if first == "silence" else []
    plan = the(decisions.PlanChosen, records)
    assert [(x.slots_before, x.slots, x.waf) for x in plan.allocations] == [
        (4, 3, 4.7),
        (2, 1, 1.5),
    ]
    assert plan.ideal_waf == pytest.approx(8.66)
    assert [(x.what, x.slots, x.waf) for x in plan.alternatives] == [
        ("the next best", ((alpha, 4), (beta, 0)), 6.16)
    ]
    assert [len(task_of(d, task).target) for task in (alpha, beta)] == [3, 1]
    d.obey(records)
    for task, num in ((alpha, 3), (beta, 1)):
        assert len(task_of(d, task).members) == num
        d.progress(task)
        assert task_of(d, task).iterations_lost == 0


def test_a_rank_that_misses_the_boundary_is_ended(d: Driver, task: int) -> None:
    starts = only(o.StartRank, drain(d, "n2"))
    ready = d.do(starts[0].body) + d.do(starts[1].body)
    assert the(o.Quiesce, ready).mode == "boundary"
    for rank in (0, 1, 2):
        d.quiesced(task, rank)
    late = d.due(f"quiesce/{task}/1")
    assert kinds(late) == ["IncidentOpened", "Quiesce", "StopRank"]
    assert the(o.Quiesce, late).mode == "now"


@pytest.mark.nodes(2)
def test_a_granted_slot_stays_granted_while_it_is_vacated(d: Driver) -> None:
    alpha = d.running(spec(slots={"min": 1, "max": 1}))
    beta = d.running(spec(name="beta", weight=0.5, slots={"min": 3, "max": 3}))
    drain(d, task_of(d, alpha).target[0].slot.node)
    target = task_of(d, alpha).target
    stops = d.tell("operator/cancel", r.TaskCancelRequested(task=beta))
    between = d.tell("operator/weight", r.TaskWeightSet(task=alpha, weight=2.0))
    assert kinds(between) == ["PlanChosen"]
    assert task_of(d, alpha).target == target
    d.obey(stops)
    check_trains(d, alpha)
    assert [member.rank for member in task_of(d, alpha).members] == [target[0].rank]


@pytest.mark.parametrize("order", [("sleep", "train"), ("train", "sleep")])
def test_in_a_tie_the_task_that_trains_keeps_its_slots(order: tuple[str, str]) -> None:
    """A node of both is drained; the rates are equal, but a command's is nominal."""
    d, small = Driver(nodes=2, slots=4), {"min": 1, "max": 4}
    for name in order:
        if name == "train":
            d.running(spec(name=name, slots=small))
        else:
            d.submit(spec(name=name, train=None, command=["sleep", "9"], slots=small))
            d.obey(d.log[-8:])
    d.obey(d.tell("operator/1", r.NodeDrained(node="n2")))
    slots = {it.spec.name: len(it.target) for it in d.state.tasks.values()}
    assert slots == {"train": 4, "sleep": 0}
