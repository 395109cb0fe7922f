"""Every row of the transition table, and what follows from each fault: decision by decision."""

from __future__ import annotations

from typing import TypeVar

import pytest
from heart_driver import Driver, kinds, spec
from unicron.control_plane.replay import verify
from unicron.control_plane.state import Task, open_orders, state_hash
from unicron.control_plane.transition import TABLE, step
from unicron.control_plane.view import view
from unicron.events import orders as o
from unicron.events import reports as r
from unicron.events.records import Record

T = TypeVar("T", bound=r.Body)


@pytest.fixture
def d() -> Driver:
    return Driver()


@pytest.fixture(autouse=True)
def _at_rest(d: Driver) -> object:
    """After every test: the log verifies, and asking again in the same state orders nothing."""
    yield
    verdict = verify(d.log)
    assert verdict.ok, verdict.words
    before = state_hash(d.state)
    for task in d.state.tasks.values():
        assert list(step(d.state, task)) == []
    assert state_hash(d.state) == before
    view(d.state)


def the(kind: type[T], records: list[Record]) -> T:
    """The one decision of this kind."""
    found = [record.body for record in records if isinstance(record.body, kind)]
    assert len(found) == 1, kinds(records)
    return found[0]


def failed(d: Driver, task: int, rank: int, error: str = "closed by peer") -> list[Record]:
    """A member's collective failed: it says so, then that it holds."""
    it = d.state.tasks[task]
    process = it.ranks[rank]
    told = d.tell(d.source(process.slot.node), r.CollectiveFailed(
        task=task, rank=rank, attempt=process.attempt, generation=it.generation, iteration=1,
        error=error))
    return told + d.quiesced(task, rank)


def finish(d: Driver, task: int, *, save: bool = True) -> list[Record]:
    """The last iteration is done: the final checkpoint, the last reduction, exit 0."""
    it = d.state.tasks[task]
    done: list[Record] = []
    if save:
        done = d.tell(d.source(it.members[0].node), r.CheckpointSaved(
            task=task, generation=it.generation, step_version=50,
            path=f"gen-{it.generation}/iter-50", ckpt_bytes=9, final=True))
        done += d.obey(done)
    for member in it.members:
        done += d.tell(d.source(member.node), r.RankFinished(
            task=task, rank=member.rank, attempt=member.attempt, generation=it.generation,
            step_version=50, forward_calls=150))
    for member in list(it.members):
        done += d.exit(task, member.rank, code=0)
    return done


def task_of(d: Driver, task: int) -> Task:
    return d.state.tasks[task]


# --- the first start ----------------------------------------------------------------------------
def test_the_table_is_closed() -> None:
    """Every phase that a row leads to is left by another; no row stays where it is for ever."""
    left = {row.phase for row in TABLE}
    assert {row.to for row in TABLE} <= left
    assert [(row.phase, row.on.__name__, row.to) for row in TABLE] == [
        ("starting", "every_seat_ready", "reconfiguring"),
        ("training", "member_gone", "quiescing"),
        ("training", "no_root_cause", "quiescing"),
        ("training", "seats_differ", "quiescing"),
        ("quiescing", "boundary_disturbed", "quiescing"),
        ("quiescing", "every_member_quiesced", "reconfiguring"),
        ("reconfiguring", "generation_broken", "quiescing"),
        ("reconfiguring", "every_member_reconfigured", "training"),
    ]


def test_a_submitted_task_is_planned_placed_and_started(d: Driver) -> None:
    task = d.submit(spec())
    batch = d.log[-8:]
    assert kinds(batch) == ["ThroughputSet", "PlanChosen", "TaskPlaced", *["StartRank"] * 4]
    starts = [record.body for record in batch if isinstance(record.body, o.StartRank)]
    assert [(x.rank, x.attempt, x.slot.node, x.slot.index, x.incarnation) for x in starts] == [
        (0, 1, "n1", 0, 1), (1, 1, "n1", 1, 1), (2, 1, "n2", 0, 1), (3, 1, "n2", 1, 1)]
    assert task_of(d, task).phase == "starting"
    assert {record.cause for record in batch[1:]} == {task}
    assert [record.seq for record in open_orders(d.state)] == [x.seq for x in batch[4:]]


def test_when_all_are_ready_they_meet_and_train(d: Driver) -> None:
    task = d.submit(spec())
    records = d.obey(d.log[-4:])
    order = the(o.Reconfigure, records)
    assert (order.generation, order.dp, order.checkpoint) == (1, 4, "")
    assert [member.rank for member in order.members] == [0, 1, 2, 3]
    assert order.store == order.members[0].endpoint
    assert the(o.Resume, records).progress_from == 0
    assert task_of(d, task).phase == "training"
    assert view(d.state)["tasks"][0]["state"] == "running"


def test_a_rank_that_dies_before_it_is_ready_starts_again(d: Driver) -> None:
    task = d.submit(spec())
    new = d.exit(task, 1, code=1)
    assert kinds(new) == ["IncidentOpened", "StartRank"]
    assert the(o.StartRank, new).attempt == 2
    records = d.obey(d.log[-7:])
    assert d.state.tasks[task].phase == "training", kinds(records)


def test_a_rank_that_is_never_ready_is_ended_and_starts_again(d: Driver) -> None:
    task = d.submit(spec())
    new = d.due(f"start/{task}/0/1")
    assert kinds(new) == ["IncidentOpened", "StopRank"]
    assert the(o.StopRank, new).grace_s == 0
    again = d.exit(task, 0)
    assert kinds(again) == ["StartRank"]


def test_a_task_that_never_starts_fails_with_a_reason(d: Driver) -> None:
    task = d.submit(spec(slots={"min": 1, "max": 1}))
    for _ in range(3):
        new = d.exit(task, 0, code=1)
        assert "StartRank" in kinds(new)
    new = d.exit(task, 0, code=1)
    assert kinds(new) == ["IncidentEscalated", "IncidentEscalated", "IncidentClosed", "TaskEnded"]
    ended = the(o.TaskEnded, new)
    assert ended.outcome == "failed"
    assert "exit code 1" in ended.why
    assert "4 times" in ended.why


# --- a member is lost ---------------------------------------------------------------------------
def test_a_killed_rank(d: Driver) -> None:
    task = d.running()
    lost = d.exit(task, 2)
    assert kinds(lost) == ["IncidentOpened", "Quiesce", "StartRank"]
    opened = the(o.IncidentOpened, lost)
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "exited abnormally", (2,))
    assert opened.evidence == (lost[0].seq,)
    quiesce = the(o.Quiesce, lost)
    assert (quiesce.mode, quiesce.generation, quiesce.ranks) == ("now", 1, (0, 1, 3))
    start = the(o.StartRank, lost)
    assert (start.rank, start.attempt, start.slot) == (2, 2, o.Slot("n2", 0))
    assert {record.incident for record in lost[1:]} == {lost[1].seq}

    healed = d.obey(lost, start=False)
    assert [x.rank for x in the(o.Reconfigure, healed).members] == [0, 1, 3]
    assert kinds(d.progress(task)) == [], "not yet at full strength"
    stepped_s = d.state.at_s
    joined = d.obey([lost[-1]])
    assert kinds(joined) == ["Quiesce", "Reconfigure", "Resume"]
    assert the(o.Quiesce, joined).mode == "boundary"
    closed = the(o.IncidentClosed, d.progress(task))
    assert closed.outcome == "healed"
    assert closed.pause_s == pytest.approx(stepped_s - lost[0].at_s)
    assert (closed.kept, closed.dealt, closed.iterations_lost, closed.ckpt_read) == (6, 3, 0, False)
    assert (task_of(d, task).healed, task_of(d, task).incident) == (1, 0)


def test_late_news_from_before_the_fault_does_not_end_the_pause(d: Driver) -> None:
    task = d.running()
    lost = d.exit(task, 2)
    assert kinds(d.progress(task, 2)) == []
    assert task_of(d, task).iteration == 3
    assert d.state.incidents[lost[1].seq].down_since_s == lost[0].at_s
    d.obey(lost, start=False)
    d.progress(task)
    assert d.state.incidents[lost[1].seq].pause_s == pytest.approx(d.state.at_s - lost[0].at_s)


def test_survivors_that_held_already_are_not_waited_for(d: Driver) -> None:
    task = d.running()
    for rank in (0, 1, 3):
        assert kinds(failed(d, task, rank)) == []
    assert kinds(d.exit(task, 2)) == ["IncidentOpened", "Quiesce", "Reconfigure", "StartRank"]
    assert not [x for x in d.state.deadlines if x.startswith("evidence/")]


def test_a_second_fault_while_quiescing(d: Driver) -> None:
    task = d.running()
    d.exit(task, 2)
    d.quiesced(task, 0)
    d.quiesced(task, 1)
    second = d.exit(task, 3)
    assert kinds(second) == ["IncidentEscalated", "Reconfigure", "StartRank"]
    assert [x.rank for x in the(o.Reconfigure, second).members] == [0, 1]


def test_a_second_fault_while_reconfiguring(d: Driver) -> None:
    task = d.running()
    d.exit(task, 2)
    for rank in (0, 1, 3):
        d.quiesced(task, rank)
    assert task_of(d, task).phase == "reconfiguring"
    second = d.exit(task, 3)
    assert kinds(second) == ["IncidentEscalated", "Quiesce", "StartRank"]
    assert (the(o.Quiesce, second).generation, the(o.Quiesce, second).ranks) == (2, (0, 1))
    d.obey(second)
    assert task_of(d, task).generation >= 3
    d.progress(task)


def test_a_generation_that_does_not_come_up(d: Driver) -> None:
    task = d.running()
    d.exit(task, 2)
    for rank in (0, 1, 3):
        d.quiesced(task, rank)
    new = d.tell(d.source("n1"), r.ReconfigureFailed(
        task=task, rank=0, attempt=1, generation=2, error="no store"))
    assert kinds(new) == ["IncidentEscalated", "Quiesce"]
    d.obey(new)
    assert task_of(d, task).phase == "training"
    assert task_of(d, task).generation == 3


def test_reconfiguring_for_too_long(d: Driver) -> None:
    task = d.running()
    d.exit(task, 2)
    for rank in (0, 1, 3):
        d.quiesced(task, rank)
    assert kinds(d.due(f"reconfigure/{task}/2")) == ["IncidentEscalated", "Quiesce"]


def test_quiescing_for_too_long(d: Driver) -> None:
    task = d.running()
    d.exit(task, 2)
    d.quiesced(task, 0)
    d.quiesced(task, 1)
    late = d.due(f"quiesce/{task}/1")
    assert kinds(late) == ["IncidentEscalated", "StopRank"]
    assert (the(o.StopRank, late).rank, the(o.StopRank, late).grace_s) == (3, 0.0)
    gone = d.exit(task, 3)
    assert kinds(gone) == ["Reconfigure", "StartRank"]


def test_a_process_that_cannot_be_ended_is_given_up(d: Driver) -> None:
    task = d.running()
    d.exit(task, 2)
    d.quiesced(task, 0)
    d.quiesced(task, 1)
    d.due(f"quiesce/{task}/1")
    assert kinds(d.due(f"stop/{task}/3/1")) == ["StopRank"]
    assert kinds(d.due(f"stop/{task}/3/1")) == ["StopRank"]
    given_up = d.due(f"stop/{task}/3/1")
    assert kinds(given_up) == ["IncidentEscalated", "Reconfigure", "PlanChosen", "TaskPlaced",
                               "StopRank"]
    assert d.state.nodes["n2"].slots_out == [1]
    assert [seat.rank for seat in task_of(d, task).target] == [0, 1, 2]


def test_all_members_lost_start_again_from_the_checkpoint(d: Driver) -> None:
    task = d.running()
    d.obey(d.tell(d.source("n1"), r.CheckpointSaved(
        task=task, generation=1, step_version=1, path="gen-1/iter-1", ckpt_bytes=9, final=False)))
    d.progress(task, 5)
    records = [x for rank in range(4) for x in d.exit(task, rank)]
    assert task_of(d, task).phase == "starting"
    d.steps[task] = 1
    starts = [x for x in records if x.kind == "StartRank"]
    read = {x.body.checkpoint for x in starts if isinstance(x.body, o.StartRank)}
    assert read == {"gen-1/iter-1"}
    order = the(o.Reconfigure, d.obey(starts))
    assert order.checkpoint == "gen-1/iter-1"
    closed = the(o.IncidentClosed, d.progress(task))
    assert closed.iterations_lost == 5
    assert task_of(d, task).iterations_lost == 5
    assert task_of(d, task).iteration == 2


def test_one_rank_that_never_comes_back_loses_its_slot(d: Driver) -> None:
    task = d.running()
    d.obey(d.exit(task, 2), start=False)
    d.progress(task)
    for _ in range(2):
        assert kinds(d.exit(task, 2)) == ["IncidentEscalated", "StartRank"]
    last = d.exit(task, 2)
    assert kinds(last) == ["IncidentEscalated", "IncidentEscalated", "PlanChosen", "TaskPlaced",
                           "IncidentClosed"]
    assert d.state.nodes["n2"].slots_out == [0]
    assert the(o.PlanChosen, last).num_slots == 3


def test_progress_forgives_restarts(d: Driver) -> None:
    task = d.running()
    for _ in range(6):
        lost = d.exit(task, 2)
        d.obey(lost)
        d.progress(task, 12)
        assert task_of(d, task).restarts == {}
    assert task_of(d, task).healed == 6


def test_an_error_before_the_exit_is_one_incident(d: Driver) -> None:
    task = d.running()
    told = d.tell(d.source("n2"), r.RankErrored(
        task=task, rank=2, attempt=1, generation=1, iteration=1, error="illegal memory access",
        text="an illegal memory access was encountered"))
    assert kinds(told) == ["IncidentOpened"]
    assert the(o.IncidentOpened, told).status == "illegal memory access"
    assert kinds(d.exit(task, 2, code=1)) == ["Quiesce", "StartRank"]
    assert len(d.state.incidents) == 1


def test_an_error_of_the_hardware_takes_the_slot_out(d: Driver) -> None:
    task = d.running()
    told = d.tell(d.source("n2"), r.RankErrored(
        task=task, rank=2, attempt=1, generation=1, iteration=1, error="ECC", text="row 7"))
    assert kinds(told) == ["IncidentOpened", "PlanChosen", "TaskPlaced", "Quiesce"]
    assert the(o.IncidentOpened, told).severity == "SEV1"
    assert [seat.rank for seat in task_of(d, task).target] == [0, 1, 3]
    d.quiesced(task, 0)
    d.exit(task, 2, code=1)
    d.quiesced(task, 1)
    assert kinds(d.quiesced(task, 3)) == ["Reconfigure"]


# --- collectives without a root cause -----------------------------------------------------------
def test_a_collective_that_failed_for_no_reason_is_tried_again_in_place(d: Driver) -> None:
    task = d.running()
    for rank in range(4):
        failed(d, task, rank, "timed out")
    new = d.due(f"evidence/{task}/1")
    assert kinds(new) == ["IncidentOpened", "Quiesce", "Reconfigure"]
    opened = the(o.IncidentOpened, new)
    assert (opened.severity, opened.status) == ("SEV3", "NCCL timeout")
    assert len(opened.evidence) == 5
    assert [x.rank for x in the(o.Reconfigure, new).members] == [0, 1, 2, 3]
    d.obey(new)
    assert the(o.IncidentClosed, d.progress(task)).outcome == "healed"


def test_the_root_cause_in_time_makes_one_incident(d: Driver) -> None:
    task = d.running()
    failed(d, task, 3)
    failed(d, task, 0)
    assert kinds(d.exit(task, 2)) == ["IncidentOpened", "Quiesce", "StartRank"]
    assert len(d.state.incidents) == 1


def test_a_failure_on_the_way_to_a_boundary(d: Driver) -> None:
    task = d.running()
    lost = d.exit(task, 2)
    d.obey(lost, start=False)
    d.progress(task)
    d.do(lost[-1].body)
    assert (task_of(d, task).phase, task_of(d, task).mode) == ("quiescing", "boundary")
    told = failed(d, task, 0)
    assert kinds(told) == ["Quiesce"]
    assert the(o.Quiesce, told).mode == "now"


def test_reattempts_that_do_not_help_become_restarts(d: Driver) -> None:
    task = d.running()
    for _ in range(3):
        failed(d, task, 0)
        new = d.due(f"evidence/{task}/{task_of(d, task).generation}")
        assert "Quiesce" in kinds(new)
        d.obey(new)
        assert task_of(d, task).phase == "training"
    failed(d, task, 0)
    last = d.due(f"evidence/{task}/{task_of(d, task).generation}")
    assert kinds(last) == ["IncidentEscalated", "Quiesce", *["StopRank"] * 4]
    d.obey([x for x in last if x.kind == "StopRank"])
    assert task_of(d, task).phase == "training"


# --- nodes --------------------------------------------------------------------------------------
def test_a_silent_node_is_not_a_lost_one(d: Driver) -> None:
    task = d.running()
    leader = f"leader/{d.state.nonce}"
    silenced = d.tell(leader, r.NodeSilenced(node="n2", incarnation=1, silence_s=5.0))
    assert kinds(silenced) == []
    assert kinds(d.progress(task)) == []
    assert kinds(d.due("replace/n2")) == [], "the task is not wholly there"
    heard = d.tell(leader, r.NodeHeard(node="n2", incarnation=1))
    assert [x for x in kinds(heard) if x not in ("PlanChosen",)] == []
    assert d.state.nodes["n2"].health == "healthy"


@pytest.mark.parametrize("first", ["silence", "collective"])
def test_two_sources_make_a_node_lost(d: Driver, first: str) -> None:
    task = d.running()
    leader = f"leader/{d.state.nonce}"

    def silence() -> list[Record]:
        return d.tell(leader, r.NodeSilenced(node="n2", incarnation=1, silence_s=5.0))

    records = silence() if first == "silence" else failed(d, task, 0)
    records += failed(d, task, 0) if first == "silence" else silence()
    opened = the(o.IncidentOpened, records)
    assert (opened.severity, opened.status, opened.node) == ("SEV1", "lost connection", "n2")
    assert opened.ranks == (2, 3)
    assert [x for x in kinds(records) if x != "Reconfigure"] == [
        "IncidentOpened", "Quiesce", "PlanChosen", "TaskPlaced"]
    assert d.state.nodes["n2"].health == "lost"
    d.quiesced(task, 0)
    more = d.quiesced(task, 1)
    assert [x.rank for x in the(o.Reconfigure, more).members] == [0, 1]
    d.obey(more)
    assert the(o.IncidentClosed, d.progress(task)).outcome == "healed"
    # reached again: what it still runs is stopped before its slots are used
    heard = d.tell(leader, r.NodeHeard(node="n2", incarnation=1))
    assert kinds(heard) == ["StopRank", "StopRank", "PlanChosen", "TaskPlaced"]
    records = d.obey(heard)
    d.progress(task)
    assert len(task_of(d, task).living_members()) == 4


def test_a_task_wholly_on_a_silent_node_is_replaced_in_time(d: Driver) -> None:
    task = d.submit(spec(slots={"min": 1, "max": 1}))
    d.obey(d.log[-1:])
    d.progress(task)
    home = task_of(d, task).target[0].slot.node
    d.tell(f"leader/{d.state.nonce}", r.NodeSilenced(node=home, incarnation=1, silence_s=5.0))
    new = d.due(f"replace/{home}")
    assert kinds(new) == ["IncidentOpened", "PlanChosen", "TaskPlaced", "StartRank"]
    assert the(o.StartRank, new).slot.node != home


def test_an_agent_that_starts_again_has_lost_its_ranks(d: Driver) -> None:
    task = d.running()
    new = d.join("n2", incarnation=2)
    assert kinds(new) == ["IncidentOpened", "Quiesce", "StartRank", "StartRank", "PlanChosen"]
    opened = the(o.IncidentOpened, new)
    assert (opened.severity, opened.ranks) == ("SEV2", (2, 3))
    assert {x.body.incarnation for x in new if isinstance(x.body, o.StartRank)} == {2}
    d.obey(new)
    assert the(o.IncidentClosed, d.progress(task)).outcome == "healed"


def test_a_node_that_leaves_is_no_incident(d: Driver) -> None:
    task = d.running()
    new = d.tell("n2/1", r.NodeLeft(node="n2", incarnation=1, reason="stopped"))
    assert kinds(new) == ["Quiesce", "PlanChosen", "TaskPlaced"]
    d.obey(new)
    d.progress(task)
    assert d.state.incidents == {}
    assert len(task_of(d, task).members) == 2
    back = d.join("n2", incarnation=2)
    assert kinds(back) == ["PlanChosen", "TaskPlaced", "StartRank", "StartRank"]
    d.obey(back)
    assert len(task_of(d, task).members) == 4


def test_waiting_says_for_what(d: Driver) -> None:
    task = d.submit(spec(slots={"min": 9, "max": 9}))
    waiting = the(o.TaskWaiting, d.log[-3:])
    assert waiting.needs == "9 slots; the cluster has had at most 4"
    assert view(d.state)["tasks"][0]["state"] == "waiting"
    d.join("n3", slots=5)
    assert len(task_of(d, task).target) == 9


# --- several tasks ------------------------------------------------------------------------------
def test_an_unhurt_task_gives_slots_to_a_new_one(d: Driver) -> None:
    first = d.running(spec(throughput={2: 2e9, 4: 2.1e9}))
    second = d.submit(spec(name="beta", throughput={2: 2e9}, slots={"min": 2, "max": 2}))
    batch = [x for x in d.log if x.cause == second]
    assert kinds(batch) == ["ThroughputSet", "PlanChosen", "TaskPlaced", "TaskPlaced", "Quiesce"]
    for it in (first, second):
        assert len({seat.slot.node for seat in task_of(d, it).target}) == 2
    d.obey(batch)
    assert task_of(d, second).phase == "training"
    d.progress(first)
    d.progress(second)
    assert d.state.incidents == {}
    done = finish(d, second)
    assert "TaskPlaced" in kinds(done)
    d.obey(done)
    assert len(task_of(d, first).members) == 4


# --- the end ------------------------------------------------------------------------------------
def test_a_task_finishes(d: Driver) -> None:
    task = d.running()
    done = finish(d, task)
    assert kinds(done) == ["PublishCheckpoint", "TaskEnded"]
    assert the(o.PublishCheckpoint, done).path == "gen-1/iter-50"
    assert the(o.TaskEnded, done).outcome == "finished"
    assert open_orders(d.state) == []
    assert d.state.deadlines == {}


def test_publication_after_the_last_exit(d: Driver) -> None:
    task = d.running()
    saved = d.tell(d.source("n1"), r.CheckpointSaved(
        task=task, generation=1, step_version=50, path="/tmp/out/gen-1/iter-50", ckpt_bytes=9,
        final=True))
    assert the(o.PublishCheckpoint, saved).path == "gen-1/iter-50"
    assert kinds(finish(d, task, save=False)) == []
    assert kinds(d.obey(saved)) == ["TaskEnded"]


def test_another_node_publishes_when_the_first_is_gone(d: Driver) -> None:
    task = d.running()
    saved = d.tell(d.source("n1"), r.CheckpointSaved(
        task=task, generation=1, step_version=50, path="gen-1/iter-50", ckpt_bytes=9, final=True))
    assert the(o.PublishCheckpoint, saved).nodes == ("n1",)
    finish(d, task, save=False)
    left = d.tell("n1/1", r.NodeLeft(node="n1", incarnation=1, reason="stopped"))
    assert the(o.PublishCheckpoint, left).nodes == ("n2",)
    assert the(o.TaskEnded, d.obey(left)).outcome == "finished"


def test_all_exits_without_a_final_checkpoint_are_a_fault(d: Driver) -> None:
    task = d.running()
    done = finish(d, task, save=False)
    assert kinds(done)[:1] == ["IncidentOpened"]
    assert kinds(done).count("StartRank") == 4
    assert task_of(d, task).phase == "starting"


def test_a_stale_generation_publishes_nothing(d: Driver) -> None:
    task = d.running()
    d.obey(d.exit(task, 2))
    told = d.tell(d.source("n1"), r.CheckpointSaved(
        task=task, generation=1, step_version=50, path="gen-1/iter-50", ckpt_bytes=9, final=True))
    assert kinds(told) == []
    d.progress(task)


def test_cancel(d: Driver) -> None:
    task = d.running()
    new = d.tell("operator/x", r.TaskCancelRequested(task=task, reason="enough"))
    assert kinds(new) == ["StopRank"] * 4
    assert the(o.TaskEnded, d.obey(new)).why == "cancelled: enough"
    assert task_of(d, task).outcome == "cancelled"
    assert kinds(d.tell("operator/y", r.TaskCancelRequested(task=task))) == []


def test_cancel_in_the_middle_of_healing(d: Driver) -> None:
    task = d.running()
    d.exit(task, 2)
    new = d.tell("operator/x", r.TaskCancelRequested(task=task))
    done = d.obey(new)
    assert the(o.IncidentClosed, done).outcome == "ended"
    assert the(o.TaskEnded, done).outcome == "cancelled"


# --- the command tier ---------------------------------------------------------------------------
@pytest.fixture
def command(d: Driver) -> int:
    task = d.submit(spec(train=None, command=["true"], slots={"min": 2, "max": 2}))
    d.obey(d.log[-2:])
    assert task_of(d, task).phase == "training"
    return task


def test_command_start(d: Driver, command: int) -> None:
    starts = [x.body for x in d.log if isinstance(x.body, o.StartRank)]
    assert [(x.rank, x.num_seats, x.host) for x in starts] == [
        (0, 2, "127.0.0.1"), (1, 2, "127.0.0.1")]
    assert starts[0].port == starts[1].port > 0


def test_command_finishes(d: Driver, command: int) -> None:
    assert kinds(d.exit(command, 0, code=0)) == []
    assert kinds(d.exit(command, 1, code=0)) == ["TaskEnded"]
    assert task_of(d, command).outcome == "finished"


def test_command_one_fails_all_start_again(d: Driver, command: int) -> None:
    new = d.exit(command, 0, code=1)
    assert kinds(new) == ["IncidentOpened", "StopRank"]
    again = d.obey(new)
    assert kinds(again) == ["StartRank", "StartRank", "IncidentClosed"]
    assert {x.body.port for x in again if isinstance(x.body, o.StartRank)} != {
        x.body.port for x in d.log[:12] if isinstance(x.body, o.StartRank)}


def test_command_fails_for_good(d: Driver, command: int) -> None:
    for _ in range(3):
        d.obey(d.exit(command, 0, code=3))
    last = d.exit(command, 0, code=3)
    assert kinds(last) == ["IncidentOpened", "IncidentEscalated", "IncidentClosed", "StopRank"]
    assert the(o.TaskEnded, d.obey(last)).outcome == "failed"
