"""A stopped rank (SIGSTOP): its process is killed at a deadline, and the others continue."""

from __future__ import annotations

import pytest
from decider import Driver, finish, kinds, only, spec, task_of, the
from unicron.control_plane.api.view import view
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.spec import policy

VICTIM = 2
WHY = "rank 2 on n2 is stopped (SIGSTOP) (stopped_s_max: 2 s)"


def suspended(d: Driver, task: int, rank: int = VICTIM) -> list[Record]:
    it = task_of(d, task).ranks[rank]
    return d.tell(
        d.source(it.slot.node),
        r.RankSuspended(task=task, rank=rank, attempt=it.attempt, pid=it.pid),
    )


def continued(d: Driver, task: int, rank: int = VICTIM) -> list[Record]:
    it = task_of(d, task).ranks[rank]
    return d.tell(
        d.source(it.slot.node),
        r.RankContinued(task=task, rank=rank, attempt=it.attempt, pid=it.pid),
    )


def deadline(task: int, rank: int = VICTIM, attempt: int = 1) -> str:
    return f"stopped/{task}/{rank}/{attempt}"


def test_a_stopped_rank_is_ended(d: Driver, task: int) -> None:
    records = suspended(d, task)
    assert kinds(records) == []
    (stopped,) = records
    assert d.state.deadlines[deadline(task)].length_s == d.state.policy.stopped_s_max == 2.0
    late = d.due(deadline(task))
    opened = the(decisions.IncidentOpened, late)
    assert (opened.severity, opened.status, opened.why) == ("SEV2", "task hang", WHY)
    assert opened.evidence == (stopped.seq, late[0].seq)
    assert (opened.node, opened.ranks) == ("n2", (VICTIM,))
    assert the(o.Quiesce, late).mode == "now"
    stop = the(o.StopRank, late)
    assert (stop.rank, stop.attempt, stop.grace_s, stop.why) == (
        VICTIM,
        1,
        0.0,
        "it is stopped (SIGSTOP)",
    )
    new = d.obey(late)
    assert [[m.rank for m in x.body.members] for x in only(o.Reconfigure, new)] == [
        [0, 1, 3],
        [0, 1, 3, VICTIM],
    ]
    assert task_of(d, task).ranks[VICTIM].attempt == 2
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert (closed.outcome, closed.iterations_lost, closed.ckpt_read) == ("healed", 0, False)
    assert closed.pause_s == pytest.approx(d.now_s - stopped.at_s), "the pause begins at the stop"


def test_a_rank_that_continues_in_time_changes_nothing(d: Driver, task: int) -> None:
    suspended(d, task)
    d.now_s += 1.9
    assert kinds(continued(d, task)) == []
    assert not d.state.deadlines
    assert kinds(d.progress(task, 3)) == []
    assert not d.state.incidents
    assert suspended(d, task), "it may be stopped again"
    assert deadline(task) in d.state.deadlines
    continued(d, task)


def test_repeated_and_stale_stops_change_nothing(d: Driver, task: int) -> None:
    assert kinds(continued(d, task)) == []
    suspended(d, task)
    due_s = d.state.deadlines[deadline(task)].due_s
    assert kinds(suspended(d, task)) == []
    assert d.state.deadlines[deadline(task)].due_s == due_s
    for attempt, rank in ((7, VICTIM), (1, 9)):
        for kind in (r.RankSuspended, r.RankContinued):
            records = d.tell("n2/1", kind(task=task, rank=rank, attempt=attempt, pid=1))
            assert kinds(records) == []
    assert list(d.state.deadlines) == [deadline(task)]
    d.obey(d.due(deadline(task)))
    assert task_of(d, task).ranks[VICTIM].attempt == 2
    assert not task_of(d, task).ranks[VICTIM].is_stopped


def test_a_stopped_rank_that_is_killed_has_exited(d: Driver, task: int) -> None:
    suspended(d, task)
    opened = the(decisions.IncidentOpened, d.exit(task, VICTIM))
    assert opened.status == "exited abnormally"
    assert deadline(task) not in d.state.deadlines


def test_two_stopped_ranks_are_one_incident(d: Driver, task: int) -> None:
    suspended(d, task)
    suspended(d, task, 3)
    first = d.due(deadline(task))
    second = d.due(deadline(task, 3))
    assert the(decisions.IncidentOpened, first).ranks == (VICTIM,)
    assert the(decisions.IncidentEscalated, second).ranks == (3,)
    d.obey(first + second)
    d.heal(task)
    assert [x.body.outcome for x in only(decisions.IncidentClosed, d.log)] == ["healed"]
    assert task_of(d, task).iterations_lost == 0


def test_a_stopped_rank_that_is_not_ready_yet(d: Driver) -> None:
    task = d.submit(spec())
    orders = only(o.StartRank, d.log)
    d.obey([x for x in orders if x.body.rank != VICTIM])
    d.tell(
        "n2/1",
        r.RankStarted(task=task, rank=VICTIM, attempt=1, node="n2", pid=77, log_path="/tmp/2.log"),
    )
    suspended(d, task)
    late = d.due(deadline(task))
    assert the(decisions.IncidentOpened, late).why == WHY
    d.obey(late)
    d.progress(task)
    assert [m.attempt for m in task_of(d, task).members] == [1, 1, 2, 1]


def test_a_stopped_rank_that_a_transition_waits_for(d: Driver, task: int) -> None:
    records = d.exit(task, 3)
    for rank in (0, 1):
        d.quiesced(task, rank)
    suspended(d, task)
    late = d.due(deadline(task))
    assert the(decisions.IncidentEscalated, late).why == WHY
    d.obey([x for x in records if isinstance(x.body, o.StartRank)] + late)
    d.heal(task)
    assert the(decisions.IncidentClosed, d.log[-1:]).iterations_lost == 0
    assert {m.rank: m.attempt for m in task_of(d, task).members} == {0: 1, 1: 1, 2: 2, 3: 2}


def test_a_stopped_member_of_a_generation_that_is_built(d: Driver, task: int) -> None:
    """The generation needs the stopped rank. At the deadline a new generation begins."""
    d.exit(task, 3)
    for rank in (0, 1, VICTIM):
        d.quiesced(task, rank)
    order = the(o.Reconfigure, d.log[-2:])
    suspended(d, task, 0)
    for rank in (1, VICTIM):
        d.reconfigured(order, rank)
    late = d.due(deadline(task, 0))
    assert the(o.Quiesce, late).generation == order.generation
    d.obey(late)
    assert [m.rank for m in task_of(d, task).members][:2] == [1, VICTIM]


def test_a_task_that_is_cancelled_is_only_ended(d: Driver, task: int) -> None:
    suspended(d, task)
    records = d.tell("operator/c", r.TaskCancelRequested(task=task))
    assert deadline(task) not in d.state.deadlines
    assert {x.body.grace_s for x in only(o.StopRank, records)} == {d.state.policy.stop_s_max}
    d.obey(records)
    assert task_of(d, task).outcome == "cancelled"
    assert not only(decisions.IncidentOpened, d.log)


def test_a_stopped_rank_that_has_finished(d: Driver, task: int) -> None:
    it = task_of(d, task)
    d.obey(
        d.tell(
            "n1/1",
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
    for member in it.members:
        d.tell(
            d.source(member.node),
            r.RankFinished(
                task=task,
                rank=member.rank,
                attempt=1,
                generation=1,
                step_version=50,
                forward_calls=12,
            ),
        )
    suspended(d, task)
    for rank in (0, 1, 3):
        d.exit(task, rank, code=0)
    late = d.due(deadline(task))
    assert the(o.StopRank, late).grace_s == 0.0
    d.obey(late)
    assert it.outcome == "finished"
    assert not only(decisions.IncidentOpened, d.log)


def test_a_stopped_rank_with_an_error(d: Driver, task: int) -> None:
    records = d.tell(
        "n2/1",
        r.RankErrored(
            task=task,
            rank=VICTIM,
            attempt=1,
            generation=1,
            iteration=1,
            error="RuntimeError",
            text="no",
        ),
    )
    suspended(d, task)
    late = d.due(deadline(task))
    assert not only(decisions.IncidentEscalated, late), "its fault is recorded already"
    assert the(o.StopRank, late).rank == VICTIM
    d.obey(records + late)
    d.heal(task)
    assert [x.body.outcome for x in only(decisions.IncidentClosed, d.log)] == ["healed"]


def test_a_command_that_is_stopped_is_left_alone(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["sleep", "9"]))
    d.obey(d.log[-20:])
    assert kinds(suspended(d, task)) == []
    assert not d.state.deadlines
    states = {x["rank"]: x["state"] for x in view(d.state)["tasks"][0]["ranks"]}
    assert states == {0: "started", 1: "started", VICTIM: "stopped", 3: "started"}
    assert kinds(continued(d, task)) == []


def test_the_view_shows_a_stopped_rank_and_a_waf_of_0(d: Driver, task: int) -> None:
    assert view(d.state)["tasks"][0]["waf"] > 0
    suspended(d, task)
    (shown,) = view(d.state)["tasks"]
    assert [x["state"] for x in shown["ranks"]] == ["member", "member", "stopped", "member"]
    assert shown["waf"] == 0
    d.due(deadline(task))
    assert [x["state"] for x in view(d.state)["tasks"][0]["ranks"]][VICTIM] == "stopping"


# --- healing paused, unreachable nodes, new leaders ---------------------------------------------
@pytest.mark.parametrize("how", ["frozen", "observing"])
def test_while_paused_a_stopped_rank_is_only_reported(d: Driver, task: int, how: str) -> None:
    pause(d, how)
    suspended(d, task)
    late = d.due(deadline(task))
    assert kinds(late) == ["IncidentOpened", "OrderSuppressed"]
    assert "stop rank 2: it is stopped (SIGSTOP)" in the(decisions.OrderSuppressed, late).what
    d.progress(task)  # a late report of an iteration before the stop
    assert not only(decisions.IncidentClosed, d.log)
    d.obey(resume(d, how))
    d.heal(task)
    assert task_of(d, task).healed == 1
    assert task_of(d, task).ranks[VICTIM].attempt == 2


@pytest.mark.parametrize("how", ["frozen", "observing"])
def test_while_paused_a_rank_may_continue(d: Driver, task: int, how: str) -> None:
    pause(d, how)
    suspended(d, task)
    d.due(deadline(task))
    d.now_s += 30
    assert the(decisions.OrderSuppressed, continued(d, task)).what == ""
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert (closed.outcome, closed.iterations_lost) == ("healed", 0)
    assert closed.pause_s > 30
    assert not only(o.StopRank, resume(d, how))
    assert task_of(d, task).ranks[VICTIM].attempt == 1


def pause(d: Driver, how: str) -> None:
    if how == "frozen":
        d.tell("operator/freeze", r.HealingFrozen(reason="a change of switches"))
    else:
        d.tell("leader/abc", r.PolicySet(policy=policy.Policy(observe=True)))


def resume(d: Driver, how: str) -> list[Record]:
    if how == "frozen":
        return d.tell("operator/thaw", r.HealingResumed())
    return d.tell("leader/abc", r.PolicySet(policy=policy.Policy()))


def test_a_stop_on_an_unreachable_node_counts_when_it_is_reachable(d: Driver, task: int) -> None:
    """The rank may have continued meanwhile without a report."""
    suspended(d, task)
    d.tell("leader/abc", r.NodeUnreachable(node="n2", incarnation=1, silence_s=5.0))
    assert kinds(d.due(deadline(task))) == []
    assert not d.state.incidents
    d.tell("leader/abc", r.NodeReachable(node="n2", incarnation=1))
    assert deadline(task) in d.state.deadlines
    d.obey(d.due(deadline(task)))
    d.heal(task)
    assert task_of(d, task).healed == 1


def test_a_new_leader_restarts_the_deadline(d: Driver, task: int) -> None:
    suspended(d, task)
    d.now_s += 1.5
    d.epoch = 2
    d.tell("leader/def", r.EpochStarted(nonce="def", code="1", heart=4))
    assert d.state.deadlines[deadline(task)].due_s == pytest.approx(d.now_s + 2.0)
    continued(d, task)
    assert not d.state.incidents


def test_a_finished_task_has_no_deadline_for_a_stop(d: Driver, task: int) -> None:
    suspended(d, task)
    continued(d, task)
    finish(d, task)
    assert task_of(d, task).outcome == "finished"
    assert not d.state.deadlines
