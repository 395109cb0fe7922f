"""Every row of the transition table, each fault of a rank, and a second fault at every row."""

from __future__ import annotations

from collections import Counter

import pytest
from decider import Driver, failed, kinds, only, spec, task_of, the
from simulated.script import SecondFault
from simulated.seeds import simulate
from simulated.witness import FAULTS, ROWS, UNSCRIPTED
from unicron.control_plane.api.view import view
from unicron.control_plane.decide.transition import TABLE
from unicron.control_plane.state.cluster import open_orders
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records import types as t


# --- the table and the first start --------------------------------------------------------------
def test_the_table_is_closed() -> None:
    """Every phase that a row leads to is also left by a row."""
    left = {row.phase for row in TABLE}
    assert {row.to for row in TABLE} <= left
    assert [(row.phase, row.on.__name__, row.to) for row in TABLE] == [
        ("starting", "every_seat_ready", "reconfiguring"),
        ("training", "member_gone", "quiescing"),
        ("training", "no_root_cause", "quiescing"),
        ("training", "no_slots", "quiescing"),
        ("training", "seats_differ", "quiescing"),
        ("training", "output_moved", "quiescing"),
        ("quiescing", "boundary_disturbed", "quiescing"),
        ("quiescing", "save_not_ordered", "quiescing"),
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
        (0, 1, "n1", 0, 1),
        (1, 1, "n1", 1, 1),
        (2, 1, "n2", 0, 1),
        (3, 1, "n2", 1, 1),
    ]
    assert task_of(d, task).phase == "starting"
    assert {record.cause for record in batch[1:]} == {task}
    assert [record.seq for record in open_orders(d.state)] == [x.seq for x in batch[4:]]


def test_a_task_trains_when_all_ranks_are_ready(d: Driver) -> None:
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
    assert kinds(d.exit(task, 1, code=1)) == ["IncidentOpened"]
    new = d.due(f"restart/{task}/1")
    assert the(o.StartRank, new).attempt == 2
    records = d.obey(d.log[-9:])
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
        d.exit(task, 0, code=1)
        assert "StartRank" in kinds(d.due(f"restart/{task}/0"))
    first = task_of(d, task).target[0].slot
    assert "ExperimentBegun" in kinds(d.exit(task, 0, code=1))
    assert task_of(d, task).ranks[0].slot.node != first.node
    new = d.exit(task, 0, code=1)
    assert kinds(new) == [
        "IncidentEscalated",
        "SlotsJudged",
        "IncidentEscalated",
        "IncidentClosed",
        "TaskEnded",
    ]
    ended = the(decisions.TaskEnded, new)
    assert ended.outcome == "failed"
    assert "exit code 1" in ended.why
    assert "4 times" in ended.why


# --- a member is lost ---------------------------------------------------------------------------
def test_a_killed_rank(d: Driver, task: int) -> None:
    lost = d.exit(task, 2)
    assert kinds(lost) == ["IncidentOpened", "Quiesce", "StartRank"]
    opened = the(decisions.IncidentOpened, lost)
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "exited abnormally", (2,))
    assert opened.evidence == (lost[0].seq,)
    quiesce = the(o.Quiesce, lost)
    assert (quiesce.mode, quiesce.generation, quiesce.ranks) == ("now", 1, (0, 1, 3))
    start = the(o.StartRank, lost)
    assert (start.rank, start.attempt, start.slot) == (2, 2, t.Slot("n2", 0))
    assert {record.incident for record in lost[1:]} == {lost[1].seq}

    healed = d.obey(lost, start=False)
    assert [x.rank for x in the(o.Reconfigure, healed).members] == [0, 1, 3]
    assert kinds(d.progress(task)) == [], "one rank is still missing"
    stepped_s = d.state.at_s
    joined = d.obey([lost[-1]])
    assert kinds(joined) == ["Quiesce", "Reconfigure", "Resume"]
    assert the(o.Quiesce, joined).mode == "boundary"
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert closed.outcome == "healed"
    assert closed.pause_s == pytest.approx(stepped_s - lost[0].at_s)
    assert (closed.kept, closed.dealt, closed.iterations_lost, closed.ckpt_read) == (6, 3, 0, False)
    assert (task_of(d, task).healed, task_of(d, task).incident) == (1, 0)


def test_processes_of_two_versions_do_not_wait_for_each_other(d: Driver, task: int) -> None:
    lost = d.exit(task, 2)
    d.obey(lost, start=False)
    d.progress(task)
    d.protocol = 1
    joined = d.obey([lost[-1]])
    stops = [record.body for record in joined if isinstance(record.body, o.StopRank)]
    assert [stop.rank for stop in stops] == [0, 1, 3]
    assert "a former version, which cannot train with that of rank 2" in stops[0].why
    formed = [record.body for record in joined if isinstance(record.body, o.Reconfigure)]
    assert {member.attempt for order in formed for member in order.members} == {2}
    assert len(formed[-1].members) == 4
    assert {rank.protocol for rank in task_of(d, task).ranks.values()} == {1}
    the(decisions.IncidentClosed, d.heal(task))


def test_a_step_on_the_way_to_a_boundary_ends_the_pause(d: Driver, task: int) -> None:
    lost = d.exit(task, 2)
    d.obey(lost, start=False)
    ready = d.do(lost[-1].body)
    assert the(o.Quiesce, ready).mode == "boundary", "the new rank was ready before that step"
    d.progress(task)
    stepped_s = d.state.at_s
    d.obey(ready)
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert closed.pause_s == pytest.approx(stepped_s - lost[0].at_s)
    assert (closed.kept, closed.dealt) == (6, 3)


def test_late_progress_from_before_a_fault_does_not_end_its_pause(d: Driver, task: int) -> None:
    lost = d.exit(task, 2)
    assert kinds(d.progress(task, 2)) == []
    assert task_of(d, task).iteration == 3
    assert d.state.incidents[lost[1].seq].down_since_s == lost[0].at_s
    d.obey(lost, start=False)
    d.heal(task)
    assert d.state.incidents[lost[1].seq].pause_s == pytest.approx(d.state.at_s - lost[0].at_s)


def test_an_iteration_without_a_finite_loss_counts(d: Driver, task: int) -> None:
    d.obey(d.exit(task, 2))
    it = task_of(d, task)
    records = d.tell(
        d.source("n1"),
        r.LossNotFinite(task=task, generation=it.generation, iteration=1, text="nan"),
    )
    assert kinds(records) == ["IncidentRecovering"]
    assert (it.iteration, it.loss) == (2, None)


def test_survivors_that_have_quiesced_are_not_waited_for(d: Driver, task: int) -> None:
    for rank in (0, 1, 3):
        assert kinds(failed(d, task, rank)) == []
    assert kinds(d.exit(task, 2)) == ["IncidentOpened", "Quiesce", "Reconfigure", "StartRank"]
    assert not [x for x in d.state.deadlines if x.startswith("evidence/")]


def test_a_second_fault_while_quiescing(d: Driver, task: int) -> None:
    d.exit(task, 2)
    d.quiesced(task, 0)
    d.quiesced(task, 1)
    second = d.exit(task, 3)
    assert kinds(second) == ["IncidentEscalated", "Reconfigure", "StartRank"]
    assert [x.rank for x in the(o.Reconfigure, second).members] == [0, 1]


def test_a_second_fault_while_reconfiguring(d: Driver, task: int) -> None:
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


def test_a_generation_that_does_not_come_up(d: Driver, task: int) -> None:
    d.exit(task, 2)
    for rank in (0, 1, 3):
        d.quiesced(task, rank)
    new = d.tell(
        d.source("n1"),
        r.ReconfigureFailed(task=task, rank=0, attempt=1, generation=2, error="no store"),
    )
    assert kinds(new) == ["IncidentEscalated", "Quiesce"]
    d.obey(new)
    assert (task_of(d, task).phase, task_of(d, task).generation) == ("training", 3)


def test_reconfiguring_for_too_long(d: Driver, task: int) -> None:
    d.exit(task, 2)
    for rank in (0, 1, 3):
        d.quiesced(task, rank)
    assert kinds(d.due(f"reconfigure/{task}/2")) == ["IncidentEscalated", "Quiesce"]


def test_quiescing_for_too_long(d: Driver, task: int) -> None:
    d.exit(task, 2)
    d.quiesced(task, 0)
    d.quiesced(task, 1)
    late = d.due(f"quiesce/{task}/1")
    assert kinds(late) == ["IncidentEscalated", "StopRank"]
    assert (the(o.StopRank, late).rank, the(o.StopRank, late).grace_s) == (3, 0.0)
    gone = d.exit(task, 3)
    assert kinds(gone) == ["Reconfigure", "StartRank"]


def test_a_process_that_cannot_be_ended_is_given_up(d: Driver, task: int) -> None:
    d.exit(task, 2)
    d.quiesced(task, 0)
    d.quiesced(task, 1)
    d.due(f"quiesce/{task}/1")
    assert kinds(d.due(f"stop/{task}/3/1")) == ["StopRank"]
    assert kinds(d.due(f"stop/{task}/3/1")) == ["StopRank"]
    given_up = d.due(f"stop/{task}/3/1")
    assert kinds(given_up) == [
        "IncidentEscalated",
        "PlanChosen",
        "TaskPlaced",
        "StopRank",
        "Reconfigure",
    ]
    assert d.state.nodes["n2"].slots_disabled == [1]
    assert [seat.rank for seat in task_of(d, task).target] == [0, 1, 2]


def test_all_members_lost_start_again_from_the_checkpoint(d: Driver, task: int) -> None:
    d.obey(
        d.tell(
            d.source("n1"),
            r.CheckpointSaved(
                task=task,
                generation=1,
                step_version=1,
                path="gen-1/iter-1",
                ckpt_bytes=9,
                final=False,
            ),
        )
    )
    d.progress(task, 5)
    records = [x for rank in range(4) for x in d.exit(task, rank)]
    assert task_of(d, task).phase == "starting"
    d.steps[task] = 1
    starts = [x for x in records if x.kind == "StartRank"]
    read = {x.body.checkpoint for x in only(o.StartRank, starts)}
    assert read == {"gen-1/iter-1"}
    order = the(o.Reconfigure, d.obey(starts))
    assert order.checkpoint == "gen-1/iter-1"
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert closed.iterations_lost == 5
    assert (task_of(d, task).iterations_lost, task_of(d, task).iteration) == (5, 16)


def test_a_rank_that_fails_repeatedly_leaves_its_slot(d: Driver, task: int) -> None:
    d.obey(d.exit(task, 2), start=False)
    d.progress(task)
    for _ in range(2):
        assert kinds(d.exit(task, 2)) == ["IncidentEscalated", "StartRank"]
    last = d.exit(task, 2)
    assert kinds(last) == [
        "IncidentEscalated",
        "ExperimentBegun",
        "IncidentRecovering",
        "PlanChosen",
    ]
    assert not d.state.nodes["n2"].slots_disabled
    assert the(decisions.PlanChosen, last).num_slots == 4, "another task may have it"
    why = the(decisions.ExperimentBegun, last).why
    assert why == (
        "rank 2 failed 4 times without 10 new iterations in between: no slot is free, the "
        "others go on"
    )
    assert d.state.nodes["n2"].slots_suspected == {0: f"alpha, {why}"}
    assert len(task_of(d, task).target) == 3


def test_progress_resets_the_restart_count(d: Driver, task: int) -> None:
    for _ in range(6):
        lost = d.exit(task, 2)
        d.obey(lost)
        d.progress(task, 12)
        assert task_of(d, task).restarts == {}
    assert task_of(d, task).healed == 6


def test_repeated_iterations_are_no_progress(d: Driver) -> None:
    """A task that always dies at the same point must not train again from 0 for ever."""
    task = d.running(spec(slots={"min": 1, "max": 1}))
    for _ in range(12):
        d.progress(task, 20 - d.steps[task])
        lost = d.exit(task, 0)
        d.steps[task] = 0  # no other rank has state, and there is no checkpoint
        d.obey(lost)
        if task_of(d, task).phase == "ended":
            break
    assert task_of(d, task).outcome == "failed"
    assert "without 10 new iterations in between" in task_of(d, task).why


def test_an_error_before_the_exit_is_one_incident(d: Driver, task: int) -> None:
    records = d.tell(
        d.source("n2"),
        r.RankErrored(
            task=task,
            rank=2,
            attempt=1,
            generation=1,
            iteration=1,
            error="illegal memory access",
            text="Traceback:\n  line 3\nCUDAError: an illegal memory access was encountered\n",
        ),
    )
    assert kinds(records) == ["IncidentOpened"]
    opened = the(decisions.IncidentOpened, records)
    assert opened.why == "rank 2: CUDAError: an illegal memory access was encountered"
    assert the(decisions.IncidentOpened, records).status == "illegal memory access"
    assert kinds(d.exit(task, 2, code=1)) == ["Quiesce", "StartRank"]
    assert len(d.state.incidents) == 1


def test_a_rank_that_says_that_its_device_is_bad_leaves_its_slot(d: Driver, task: int) -> None:
    records = d.tell(
        d.source("n2"),
        r.RankErrored(
            task=task,
            rank=2,
            attempt=1,
            generation=1,
            iteration=1,
            error="ECC errors",
            text="row 7",
        ),
    )
    assert kinds(records) == [
        "IncidentOpened",
        "ExperimentBegun",
        "Quiesce",
        "PlanChosen",
    ]
    opened = the(decisions.IncidentOpened, records)
    assert (opened.severity, opened.keeps_slots) == ("SEV1", True)
    assert [seat.rank for seat in task_of(d, task).target] == [0, 1, 3]
    d.quiesced(task, 0)
    d.exit(task, 2, code=1)
    d.quiesced(task, 1)
    assert kinds(d.quiesced(task, 3)) == ["Reconfigure"]


# --- collectives without a root cause -----------------------------------------------------------
def test_a_collective_without_a_root_cause_is_retried(d: Driver, task: int) -> None:
    for rank in range(4):
        failed(d, task, rank, "timed out")
    new = d.due(f"evidence/{task}/1")
    assert kinds(new) == ["IncidentOpened", "Quiesce", "Reconfigure"]
    opened = the(decisions.IncidentOpened, new)
    assert (opened.severity, opened.status) == ("SEV3", "NCCL timeout")
    assert len(opened.evidence) == 5
    assert [x.rank for x in the(o.Reconfigure, new).members] == [0, 1, 2, 3]
    d.obey(new)
    assert the(decisions.IncidentClosed, d.heal(task)).outcome == "healed"


def test_the_root_cause_in_time_makes_one_incident(d: Driver, task: int) -> None:
    failed(d, task, 3)
    failed(d, task, 0)
    assert kinds(d.exit(task, 2)) == ["IncidentOpened", "Quiesce", "StartRank"]
    assert len(d.state.incidents) == 1


def test_a_failure_on_the_way_to_a_boundary(d: Driver, task: int) -> None:
    lost = d.exit(task, 2)
    d.obey(lost, start=False)
    d.progress(task)
    d.do(lost[-1].body)
    assert (task_of(d, task).phase, task_of(d, task).mode) == ("quiescing", "boundary")
    records = failed(d, task, 0)
    assert kinds(records) == ["Quiesce"]
    assert the(o.Quiesce, records).mode == "now"


def test_reattempts_that_do_not_help_become_restarts(d: Driver, task: int) -> None:
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


# --- a second fault ------------------------------------------------------------------------------
NUM_SEEDS_MIN, NUM_SEEDS_MAX = 2, 10
"""Simulations per row and fault. After the minimum they stop once the fault has occurred. The
minimum of `make test` is 1."""


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize(
    ("row", "fault"),
    [
        pytest.param(
            row, fault, marks=[pytest.mark.thorough] * ((place + number) % len(FAULTS) > 1)
        )
        for place, row in enumerate(ROWS)
        for number, fault in enumerate(FAULTS)
    ],
)
def test_a_second_fault_is_healed_from_every_row(
    request: pytest.FixtureRequest, row: str, fault: str
) -> None:
    """All invariants of the simulation hold, and the fault occurred at this row."""
    hits: Counter[tuple[str, str]] = Counter()
    unscripted = (row, fault) in UNSCRIPTED
    thorough = request.config.getoption("hypothesis_profile") == "thorough"
    num_seeds_min = NUM_SEEDS_MIN if thorough else 1
    for seed in range(NUM_SEEDS_MAX):
        again = f"pytest '{request.node.nodeid}'"
        nth = 1 + seed // 2 % 2
        world, _ = simulate(lambda seed=seed, nth=nth: SecondFault(seed, row, fault, nth), again)
        hits += world.witness.hits
        if seed + 1 >= num_seeds_min and (hits[row, fault] or unscripted):
            return
    raise AssertionError(f"{fault} never came at {row}")
