"""Decisions about nodes that join and leave, several tasks, the end of tasks, and commands."""

from __future__ import annotations

import pytest
from decider import Driver, failed, finish, kinds, only, spec, task_of, the, waits_of
from unicron.control_plane.api.incident_facts import facts_of
from unicron.control_plane.api.view import view
from unicron.control_plane.decide.replay import replay, verify
from unicron.control_plane.fold.edits import EXPIRED, PLAN
from unicron.control_plane.fold.operator_requests import PLAN_WAIT_S_MAX
from unicron.control_plane.history.history import history
from unicron.control_plane.history.incident_records import incident_records
from unicron.control_plane.planner import pending
from unicron.control_plane.planner.pending import WaitExplanation
from unicron.control_plane.state.cluster import DECIDER_VERSION, open_orders, state_hash
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.spec.job import API_VERSION, JobSpec, parse


# --- nodes --------------------------------------------------------------------------------------
def test_an_unreachable_node_is_not_lost(d: Driver, task: int) -> None:
    leader = f"leader/{d.state.nonce}"
    unreachable = d.tell(leader, r.NodeUnreachable(node="n2", incarnation=1, silence_s=5.0))
    assert kinds(unreachable) == []
    assert kinds(d.progress(task)) == []
    assert kinds(d.due("replace/n2")) == [], "the task has ranks elsewhere"
    reachable = d.tell(leader, r.NodeReachable(node="n2", incarnation=1))
    assert [x for x in kinds(reachable) if x not in ("PlanChosen",)] == []
    assert d.state.nodes["n2"].health == "healthy"


@pytest.mark.parametrize("first", ["silence", "collective"])
def test_two_sources_make_a_node_lost(d: Driver, task: int, first: str) -> None:
    leader = f"leader/{d.state.nonce}"

    def lose_contact() -> list[Record]:
        return d.tell(leader, r.NodeUnreachable(node="n2", incarnation=1, silence_s=5.0))

    records = lose_contact() if first == "silence" else failed(d, task, 0)
    records += failed(d, task, 0) if first == "silence" else lose_contact()
    opened = the(decisions.IncidentOpened, records)
    assert (opened.severity, opened.status, opened.node) == ("SEV1", "lost connection", "n2")
    assert opened.ranks == (2, 3)
    assert [x for x in kinds(records) if x != "Reconfigure"] == [
        "IncidentOpened",
        "Quiesce",
        "PlanChosen",
        "TaskPlaced",
    ]
    assert d.state.nodes["n2"].health == "lost"
    d.quiesced(task, 0)
    more = d.quiesced(task, 1)
    assert [x.rank for x in the(o.Reconfigure, more).members] == [0, 1]
    d.obey(more)
    assert the(decisions.IncidentClosed, d.heal(task)).outcome == "healed"
    # reachable again: its orphaned ranks are stopped before its slots are used
    reachable = d.tell(leader, r.NodeReachable(node="n2", incarnation=1))
    assert kinds(reachable) == [
        "StopRank",
        "StopRank",
        "SetCheckpointStores",
        "PlanChosen",
        "TaskPlaced",
    ]
    records = d.obey(reachable)
    d.progress(task)
    assert len(task_of(d, task).living_members()) == 4


def test_a_task_wholly_on_a_silent_node_is_replaced_in_time(d: Driver) -> None:
    task = d.submit(spec(slots={"min": 1, "max": 1}))
    d.obey(d.log[-1:])
    d.progress(task)
    home = task_of(d, task).target[0].slot.node
    d.tell(f"leader/{d.state.nonce}", r.NodeUnreachable(node=home, incarnation=1, silence_s=5.0))
    new = d.due(f"replace/{home}")
    assert kinds(new) == ["IncidentOpened", "PlanChosen", "TaskPlaced", "StartRank"]
    assert the(o.StartRank, new).slot.node != home


def test_a_silent_node_is_lost_when_the_scheduler_says_that_it_is_down(d: Driver) -> None:
    task = d.submit(spec(slots={"min": 1, "max": 1}))
    d.obey(d.log[-1:])
    d.progress(task)
    home = task_of(d, task).target[0].slot.node
    d.now_s += 3.0
    d.tell(f"leader/{d.state.nonce}", r.NodeUnreachable(node=home, incarnation=1, silence_s=5.0))
    silent_s = d.state.nodes[home].since_s
    d.now_s += 20.0
    drained = d.tell("operator/drain", r.NodeDrained(node=home, reason="slurm: drained"))
    assert kinds(drained) == [], "a drain is no second source"
    new = d.tell("operator/down", r.NodeDrained(node=home, reason="slurm: down", down=True))
    assert kinds(new) == ["IncidentOpened", "PlanChosen", "TaskPlaced", "StartRank"]
    opened = the(decisions.IncidentOpened, new)
    assert opened.evidence[-1] == d.state.nodes[home].down_seq
    d.obey(new)
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert closed.pause_s == d.state.at_s - silent_s > 20.0, "from the silence to the next step"


def test_a_down_node_of_a_task_with_ranks_elsewhere_needs_their_word(d: Driver, task: int) -> None:
    d.tell(f"leader/{d.state.nonce}", r.NodeUnreachable(node="n2", incarnation=1, silence_s=5.0))
    assert "IncidentOpened" not in kinds(
        d.tell("operator/down", r.NodeDrained(node="n2", reason="slurm: down", down=True))
    )
    d.tell(f"leader/{d.state.nonce}", r.NodeReachable(node="n2", incarnation=1))
    assert not d.state.nodes["n2"].down_seq


def test_an_agent_that_starts_again_has_lost_its_ranks(d: Driver, task: int) -> None:
    new = d.join("n2", incarnation=2)
    assert kinds(new) == ["IncidentOpened", "Quiesce", "StartRank", "StartRank", "PlanChosen"]
    opened = the(decisions.IncidentOpened, new)
    assert (opened.severity, opened.ranks) == ("SEV2", (2, 3))
    assert {x.body.incarnation for x in only(o.StartRank, new)} == {2}
    d.obey(new)
    assert the(decisions.IncidentClosed, d.heal(task)).outcome == "healed"


def test_a_node_that_leaves_is_no_incident(d: Driver, task: int) -> None:
    new = d.tell("n2/1", r.NodeLeft(node="n2", incarnation=1, reason="stopped"))
    assert kinds(new) == ["Quiesce", "PlanChosen", "TaskPlaced"]
    d.obey(new)
    d.progress(task)
    assert d.state.incidents == {}
    assert len(task_of(d, task).members) == 2
    back = d.join("n2", incarnation=2)
    assert kinds(back) == [
        "SetCheckpointStores",
        "PlanChosen",
        "TaskPlaced",
        "StartRank",
        "StartRank",
    ]
    d.obey(back)
    assert len(task_of(d, task).members) == 4


def test_a_waiting_task_names_the_missing_slots(d: Driver) -> None:
    task = d.submit(spec(slots={"min": 9, "max": 9}))
    assert the(decisions.TaskWaiting, d.log[-3:]).why == "too large"
    assert waits_of(d, task).needs == "9 slots; the cluster has had at most 4"
    assert view(d.state)["tasks"][0]["state"] == "waiting"
    d.join("n3", slots=5)
    assert len(task_of(d, task).target) == 9


def test_a_waiting_task_needs_a_size_with_a_waf(d: Driver) -> None:
    d.tell("operator/drain", r.NodeDrained(node="n2", reason=""))
    task = d.submit(spec(throughput={4: 30.0}))
    assert the(decisions.TaskWaiting, d.log[-3:]).why == "not enough slots"
    assert waits_of(d, task).needs == ("4 slots; there are 2 (n2 drained: unicron status nodes)")
    d.tell("operator/more", r.NodeDrained(node="n1", reason=""))
    beta = d.submit(spec(name="beta", slots={"min": 1, "max": 1}))
    assert waits_of(d, beta).needs.startswith("1 slot; there are 0 (n1 n2 ")


def test_a_waiting_task_has_a_price(d: Driver) -> None:
    first = d.running(spec(throughput={2: 20.0, 4: 30.0}))
    beta = spec(name="beta", throughput={2: 8.0}, slots={"min": 2, "max": 2})
    second = d.submit(beta)
    logged = the(decisions.TaskWaiting, d.log[-1:])
    assert (logged.why, logged.needs) == (pending.NOT_CHOSEN, ""), "the rest is computed on request"
    waits = waits_of(d, second)
    assert (waits.why, waits.needs) == (
        "alpha earns more with the slots",
        "more slots, or weight 1.27",
    )
    assert waits.cost_waf == 2.0
    assert waits.weight_from == pytest.approx((30.15 - 20) / 8, rel=1e-4)
    shown = view(d.state, explain=True)
    assert shown["tasks"][1]["weight_from"] == waits.weight_from
    assert shown["cluster"]["computed_by"] == DECIDER_VERSION
    below = d.tell("operator/below", r.TaskWeightSet(task=second, weight=waits.weight_from * 0.999))
    assert "TaskPlaced" not in kinds(below)
    above = d.tell("operator/above", r.TaskWeightSet(task=second, weight=waits.weight_from * 1.001))
    assert len(task_of(d, second).target) == len(task_of(d, first).target) == 2
    d.obey(above)
    assert task_of(d, second).phase == "training"


def test_prices_that_would_take_too_long_are_left_out(
    d: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    d.running(spec(throughput={2: 20.0, 4: 30.0}))
    task = d.submit(spec(name="beta", throughput={2: 8.0}, slots={"min": 2, "max": 2}))
    monkeypatch.setattr(pending, "SOLVES_WORK_NUM_MAX", 0)
    assert waits_of(d, task) == WaitExplanation(
        why="the plan has better use for the slots", needs="more slots" + pending.NOT_PRICED
    )


def test_slots_that_others_would_get_first_are_not_named(d: Driver) -> None:
    d.tell("operator/quiet", r.NodeDrained(node="n2", reason=""))
    d.join("n3", slots=4)
    first = d.running(spec(slots={"min": 3, "max": 4}, throughput={3: 30.0, 4: 31.0}, weight=9.0))
    d.submit(spec(name="beta", slots={"min": 3, "max": 3}, throughput={3: 90.0}))
    waiting = d.submit(spec(name="hold", slots={"sizes": [4]}, throughput={4: 1.0}))
    assert waits_of(d, waiting).needs.startswith("more slots, or weight ")
    d.join("n4", slots=4)
    assert len(task_of(d, first).target) == 4
    assert not task_of(d, waiting).target


def test_a_cancelled_waiting_task_has_no_price(d: Driver) -> None:
    d.running(spec(throughput={2: 20.0, 4: 30.0}))
    task = d.submit(spec(name="beta", throughput={2: 8.0}, slots={"min": 2, "max": 2}))
    assert waits_of(d, task).cost_waf == 2.0
    d.tell("operator/cancel", r.TaskCancelRequested(task=task))
    assert task_of(d, task).outcome == "cancelled"
    assert pending.explain_waiting(d.state) == {}


def test_the_ideal_waf_counts_drained_nodes_until_they_leave(d: Driver) -> None:
    task = d.running(spec(throughput={2: 20.0, 4: 30.0}))
    drained = d.tell("operator/drain", r.NodeDrained(node="n2"))
    plan = the(decisions.PlanChosen, drained)
    assert (plan.num_slots, plan.waf, plan.ideal_waf) == (2, 20.0, 30.0)
    d.obey(drained)
    d.progress(task)
    left = d.tell("n2/1", r.NodeLeft(node="n2", incarnation=1, reason="stopped"))
    assert the(decisions.PlanChosen, left).ideal_waf == 20.0


# --- several tasks ------------------------------------------------------------------------------
def test_a_healthy_task_gives_slots_to_a_new_one(d: Driver) -> None:
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


# --- the end of a task --------------------------------------------------------------------------
def test_a_task_finishes(d: Driver, task: int) -> None:
    done = finish(d, task)
    assert kinds(done) == ["PublishCheckpoint", "TaskEnded", "DropMemoryCheckpoints"]
    assert the(o.PublishCheckpoint, done).path == "gen-1/iter-50"
    assert the(decisions.TaskEnded, done).outcome == "finished"
    assert [order.kind for order in open_orders(d.state)] == ["DropMemoryCheckpoints"]
    d.obey(done)
    assert open_orders(d.state) == []
    assert d.state.deadlines == {}


def test_an_ended_task_leaves_the_state_with_all_that_is_about_it(d: Driver, task: int) -> None:
    d.obey(d.exit(task, 2))
    d.progress(task)
    assert [one.task for one in d.state.incidents.values()] == [task]
    late = r.RankExited(task=task, rank=0, attempt=1, pid=1, exit_code=0, signal=None)
    done = finish(d, task)

    def expire() -> bool:
        d.now_s += d.state.policy.ended_keep_s
        assert kinds(d.tell(f"leader/{d.state.nonce}", r.DeadlineReached(deadline=EXPIRED))) == []
        return task not in d.state.tasks

    early = r.DeadlineReached(deadline=EXPIRED)
    assert kinds(d.tell(f"leader/{d.state.nonce}", early)) == []
    assert task in d.state.tasks
    assert not expire(), "nodes still have its in-memory checkpoints"
    d.obey(done)
    assert expire()
    assert (d.state.tasks, d.state.incidents, d.state.deadlines) == ({}, {}, {})
    assert open_orders(d.state) == []
    assert kinds(d.tell(d.source("n1"), late)) == []
    second = d.submit(spec(name="beta"))
    assert task_of(d, second).target
    assert verify(d.log).state_hash == state_hash(d.state) == state_hash(replay(d.log))
    past = history(d.log)
    assert (past.tasks[task].task.outcome, len(past.incidents)) == ("finished", 1)
    facts = facts_of(
        past,
        incident_records(next(iter(past.incidents.values())), d.log),
        view(d.state),
        now_s=d.now_s,
    )
    assert (facts["name"], facts["over"]) == ("alpha", True)


def test_an_incident_is_told_from_a_pruned_log_as_from_the_whole(d: Driver, task: int) -> None:
    """But for the layout: a Reconfigure before the beginning told it."""
    cut = len(d.log)
    d.obey(d.exit(task, 2))
    d.progress(task)
    told = []
    for begin in (0, cut):
        past = history(d.log[begin:], replay(d.log[:begin]))
        (one,) = past.incidents.values()
        found = incident_records(one, d.log[begin:], replay(d.log[:begin]))
        told.append(facts_of(past, found, view(d.state), now_s=d.now_s))
    whole, pruned = told
    assert {key for key in whole if whole[key] != pruned[key]} <= {"layouts", "effects", "lost"}
    assert pruned["timeline"]


def test_a_rank_that_missed_the_end_is_stopped(d: Driver, task: int) -> None:
    d.obey(
        d.tell(
            d.source("n1"),
            r.CheckpointSaved(
                task=task,
                generation=1,
                step_version=50,
                path="gen-1/iter-50",
                ckpt_bytes=9,
                final=True,
            ),
        )
    )
    for rank in (0, 1, 2):
        d.tell(
            d.source(task_of(d, task).ranks[rank].slot.node),
            r.RankFinished(
                task=task, rank=rank, attempt=1, generation=1, step_version=50, forward_calls=1
            ),
        )
    d.tell(
        d.source("n2"),
        r.CollectiveFailed(
            task=task, rank=3, attempt=1, generation=1, iteration=50, error="connection reset"
        ),
    )
    held = d.quiesced(task, 3)
    assert [x.body.rank for x in only(o.StopRank, held)] == [3]
    d.obey(held)
    for rank in (0, 1, 2):
        last = d.exit(task, rank, code=0)
    assert the(decisions.TaskEnded, last).outcome == "finished"


def test_publication_after_the_last_exit(d: Driver, task: int) -> None:
    saved = d.tell(
        d.source("n1"),
        r.CheckpointSaved(
            task=task,
            generation=1,
            step_version=50,
            path="/tmp/out/gen-1/iter-50",
            ckpt_bytes=9,
            final=True,
        ),
    )
    assert the(o.PublishCheckpoint, saved).path == "gen-1/iter-50"
    assert kinds(finish(d, task, save=False)) == []
    assert kinds(d.obey(saved)) == ["TaskEnded", "DropMemoryCheckpoints"]


def test_another_node_publishes_when_the_first_is_gone(d: Driver, task: int) -> None:
    saved = d.tell(
        d.source("n1"),
        r.CheckpointSaved(
            task=task, generation=1, step_version=50, path="gen-1/iter-50", ckpt_bytes=9, final=True
        ),
    )
    assert the(o.PublishCheckpoint, saved).nodes == ("n1",)
    finish(d, task, save=False)
    left = d.tell("n1/1", r.NodeLeft(node="n1", incarnation=1, reason="stopped"))
    assert the(o.PublishCheckpoint, left).nodes == ("n2",)
    assert the(decisions.TaskEnded, d.obey(left)).outcome == "finished"


def test_a_superseded_final_checkpoint_fails_no_task(d: Driver, task: int) -> None:
    """n1 is slow to publish. After a fault, the next generation saves a final checkpoint too."""

    def save(node: str) -> int:
        generation = task_of(d, task).generation
        records = d.tell(
            d.source(node),
            r.CheckpointSaved(
                task=task,
                generation=generation,
                step_version=50,
                path=f"gen-{generation}/iter-50",
                ckpt_bytes=9,
                final=True,
            ),
        )
        return next(x.seq for x in records if isinstance(x.body, o.PublishCheckpoint))

    first = save("n1")
    d.obey(d.exit(task, 2))
    second = save("n1")
    assert second > first
    d.tell("n1/1", r.OrderRefused(node="n1", order=first, why="published another since"))
    assert task_of(d, task).ending == ""
    assert f"publish/{task}" not in d.state.deadlines
    d.tell("n1/1", r.OrderRefused(node="n1", order=second, why="the disk is full"))
    assert task_of(d, task).ending == ""
    assert f"publish/{task}" in d.state.deadlines, "it is tried again"


def test_all_exits_without_a_final_checkpoint_are_a_fault(d: Driver, task: int) -> None:
    done = finish(d, task, save=False)
    assert kinds(done)[:1] == ["IncidentOpened"]
    assert kinds(done).count("StartRank") == 4
    assert task_of(d, task).phase == "starting"


def test_a_stale_generation_publishes_nothing(d: Driver, task: int) -> None:
    d.obey(d.exit(task, 2))
    records = d.tell(
        d.source("n1"),
        r.CheckpointSaved(
            task=task, generation=1, step_version=50, path="gen-1/iter-50", ckpt_bytes=9, final=True
        ),
    )
    assert kinds(records) == []
    d.progress(task)


def test_cancel(d: Driver, task: int) -> None:
    new = d.tell("operator/x", r.TaskCancelRequested(task=task, reason="enough"))
    assert kinds(new) == ["StopRank"] * 4
    assert the(decisions.TaskEnded, d.obey(new)).why == "cancelled: enough"
    assert task_of(d, task).outcome == "cancelled"
    assert kinds(d.tell("operator/y", r.TaskCancelRequested(task=task))) == []


def test_cancel_in_the_middle_of_healing(d: Driver, task: int) -> None:
    d.exit(task, 2)
    new = d.tell("operator/x", r.TaskCancelRequested(task=task))
    done = d.obey(new)
    assert the(decisions.IncidentClosed, done).outcome == "ended"
    assert the(decisions.TaskEnded, done).outcome == "cancelled"


# --- commands -----------------------------------------------------------------------------------
@pytest.fixture
def command(d: Driver) -> int:
    task = d.submit(spec(train=None, command=["true"], slots={"min": 2, "max": 2}))
    d.obey(d.log[-2:])
    assert task_of(d, task).phase == "training"
    return task


def test_command_start(d: Driver, command: int) -> None:
    starts = [x.body for x in only(o.StartRank, d.log)]
    assert [(x.rank, x.num_seats, x.host) for x in starts] == [
        (0, 2, "127.0.0.1"),
        (1, 2, "127.0.0.1"),
    ]
    assert starts[0].port == starts[1].port > 0


def test_command_finishes(d: Driver, command: int) -> None:
    assert kinds(d.exit(command, 0, code=0)) == []
    assert kinds(d.exit(command, 1, code=0)) == ["TaskEnded"]
    assert task_of(d, command).outcome == "finished"


def test_a_failed_process_restarts_the_whole_command(d: Driver, command: int) -> None:
    new = d.exit(command, 0, code=1)
    assert kinds(new) == ["IncidentOpened", "StopRank"]
    assert the(o.StopRank, new).why == "another process of the task failed"
    again = d.obey(new)
    assert kinds(again) == ["StartRank", "StartRank", "IncidentRecovering"], "after a pause"
    assert {x.body.port for x in only(o.StartRank, again)} != {
        x.body.port for x in only(o.StartRank, d.log[:12])
    }


def test_a_command_that_grows_reports_no_failure(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["true"], slots={"min": 1, "max": 6}))
    d.obey(d.log[-4:])
    stops = [x.body for x in only(o.StopRank, d.join("n3"))]
    assert {x.why for x in stops} == {"the plan has other seats"}
    assert len(stops) == len(task_of(d, task).ranks) == 4


def test_command_fails_for_good(d: Driver, command: int) -> None:
    for _ in range(4):  # then on another slot
        d.obey(d.exit(command, 0, code=3))
    last = d.exit(command, 0, code=3)
    assert kinds(last) == [
        "IncidentEscalated",
        "SlotsJudged",
        "IncidentEscalated",
        "IncidentClosed",
        "StopRank",
    ]
    assert the(decisions.TaskEnded, d.obey(last)).outcome == "failed"


def test_wrong_input_ends_a_task_that_never_stepped_at_once(d: Driver) -> None:
    task = d.submit(spec())
    records = d.tell(
        d.source("n1"),
        r.RankErrored(
            task=task,
            rank=0,
            attempt=1,
            generation=0,
            iteration=0,
            error="UsageError",
            text="train.data: /x: No such file or directory",
        ),
    )
    assert "IncidentClosed" in kinds(records)
    assert the(decisions.IncidentClosed, records).why.startswith(
        "it cannot start: rank 0: train.data: /x"
    )
    assert d.state.tasks[task].ending == "failed"


def test_wrong_input_of_a_new_rank_ends_no_training_task(d: Driver, task: int) -> None:
    lost = d.exit(task, 2)
    d.obey(lost, start=False)
    d.progress(task, 2)
    records = d.tell(
        d.source("n2"),
        r.RankErrored(
            task=task, rank=2, attempt=2, generation=0, iteration=0, error="UsageError", text="no"
        ),
    )
    assert "IncidentClosed" not in kinds(records)
    assert d.state.tasks[task].ending == ""


def test_an_incident_has_the_status_of_its_worst_fault(d: Driver, task: int) -> None:
    failed(d, task, 0)
    d.due(f"evidence/{task}/1")
    incident = d.state.incidents[task_of(d, task).incident]
    assert incident.severity == "SEV3"
    node = d.state.nodes["n2"]
    d.tell("leader/abc", r.NodeUnreachable(node="n2", incarnation=node.incarnation, silence_s=6.0))
    assert (incident.severity, incident.status, incident.node) == ("SEV1", "lost connection", "n2")
    assert "n2 is silent" in incident.why


# --- many submissions at once -------------------------------------------------------------------
def numbered(number: int) -> JobSpec:
    return parse({"apiVersion": API_VERSION, "name": f"c-{number}", "command": ["true"]})


def test_many_submissions_share_a_plan(d: Driver) -> None:
    for number in range(40):
        d.submit(numbered(number))
    plans = [record for record in d.log if record.kind == "PlanChosen"]
    assert len(plans) < 20
    late = [task for task in d.state.tasks.values() if not task.target and not task.why]
    assert late
    assert d.state.deadlines[PLAN].length_s <= PLAN_WAIT_S_MAX
    shared = d.due(PLAN)
    assert the(decisions.PlanChosen, shared).trigger == "tasks were submitted"
    assert all(task.target or task.why for task in d.state.tasks.values())
    assert PLAN not in d.state.deadlines


def test_a_plan_for_another_reason_has_the_waiting_submissions_as_well(d: Driver) -> None:
    number = 0
    while PLAN not in d.state.deadlines:
        d.submit(numbered(number))
        number += 1
    joined = d.join("n3")
    assert the(decisions.PlanChosen, joined).trigger == "node n3 joined"
    assert all(task.target or task.why for task in d.state.tasks.values())
    assert PLAN not in d.state.deadlines


def test_a_submission_long_after_a_plan_does_not_wait(d: Driver) -> None:
    for number in range(20):
        d.submit(numbered(number))
    if PLAN in d.state.deadlines:
        d.due(PLAN)
    d.now_s += PLAN_WAIT_S_MAX
    task = d.submit(numbered(20))
    assert PLAN not in d.state.deadlines
    assert task_of(d, task).why
