"""A training task without progress: which ranks the others wait for, and what is decided."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, kinds, only, spec, task_of, the
from hangs import IN, NORMAL_S, VICTIM, deadline, hung, stacks_kept, stalled, went_on
from msgspec.structs import replace
from slow_iterations import OTHERS, crawls, waited_for
from unicron.cli.screens import incident as screen
from unicron.cli.screens import task as task_screen
from unicron.control_plane.api.incident_facts import kept_stacks
from unicron.control_plane.api.view import view
from unicron.control_plane.incidents.hangs import FIRST_MORE_S, locate_hang
from unicron.control_plane.state.incident import NUM_STACKS_MAX, STACK_CHARS_MAX
from unicron.events.records import decisions, statuses
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.types import GroupProgress
from unicron.events.spec.policy import Policy
from unicron.events.timing import STACKS_S_MAX


def test_a_rank_that_did_not_enter_restarts(d: Driver, task: int) -> None:
    seqs = hung(d, task, VICTIM)
    timeout = d.state.deadlines[deadline(d, task)]
    assert timeout.due_s - d.now_s == pytest.approx(NORMAL_S, abs=0.05), "one more iteration"
    late = d.due(deadline(d, task))
    opened = the(decisions.IncidentOpened, late)
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "task hang", (VICTIM,))
    assert opened.why == (
        "rank 2 on n2 is stalled after backward in iteration 1, collective 1 "
        "not entered; 3 others wait (hang_s_min: 2 s)"
    )
    assert opened.evidence == (*seqs, late[0].seq), "the stall of every rank, then the deadline"
    assert the(o.Quiesce, late).mode == "now"
    stop = the(o.StopRank, late)
    assert (stop.rank, stop.grace_s, stop.why) == (VICTIM, 0.0, "it is stalled")
    new = d.obey(late)
    assert [[m.rank for m in x.body.members] for x in only(o.Reconfigure, new)] == [
        [0, 1, 3],
        [0, 1, 3, VICTIM],
    ]
    assert not task_of(d, task).stalls
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert (closed.outcome, closed.iterations_lost, closed.ckpt_read) == ("healed", 0, False)
    assert closed.pause_s > 1.6, "from the stall on"


def test_what_a_hung_rank_did_is_kept_before_it_is_ended(d: Driver, task: int) -> None:
    hung(d, task, VICTIM)
    stop = the(o.StopRank, d.due(deadline(d, task)))
    assert stop.keeps_stacks, "its agent keeps its stacks first"
    name = f"stop/{task}/{VICTIM}/1"
    assert d.state.deadlines[name].length_s == STACKS_S_MAX + d.state.policy.stop_s_max
    (kept,) = stacks_kept(d, task, VICTIM)
    (incident,) = d.state.incidents.values()
    assert kept.seq in incident.evidence
    (shown,) = incident.stacks
    assert (shown.rank, shown.node, shown.path) == (VICTIM, "n2", "/logs/rank-2.attempt-1.stacks")
    assert len(shown.stack) == STACK_CHARS_MAX, "no agent fills the state"
    again = the(o.StopRank, d.due(name))
    assert not again.keeps_stacks, "once is enough"


def test_what_it_did_is_told_to_people(d: Driver, task: int) -> None:
    hung(d, task, VICTIM)
    d.due(deadline(d, task))
    stacks_kept(d, task, VICTIM)
    (incident,) = d.state.incidents.values()
    shown = view(d.state, now_s=d.now_s)
    found = kept_stacks(incident, shown["nodes"])
    host = d.state.nodes["n2"].host
    assert found[0]["host"] == host
    lines = screen.stacks(found)
    assert " ".join(" ".join(lines[:-1]).split()) == (
        "stack rank 2 on n2, iteration 1, backward; was in sleep (train.py:9) "
        "< sleep (train.py:9) < sleep (train.py:9) < sleep (train.py:9) < ..."
    )
    assert lines[-1] == f"           all threads: {host}:/logs/rank-2.attempt-1.stacks"
    past = {**task_screen.UNREAD, "read_seq": 0, "last_seq": 0}
    page = task_screen.task_status(shown, shown["tasks"][0], past, now_s=d.now_s)
    assert set(lines) <= set(page), "while the incident is open"


def test_a_hostile_agent_does_not_fill_an_incident_with_stacks(d: Driver, task: int) -> None:
    hung(d, task, VICTIM)
    d.due(deadline(d, task))
    for _ in range(2 * NUM_STACKS_MAX):
        stacks_kept(d, task, VICTIM)
    (incident,) = d.state.incidents.values()
    assert len(incident.stacks) == NUM_STACKS_MAX


def test_a_rank_that_leaves_by_plan_is_ended_at_once(d: Driver, task: int) -> None:
    records = d.tell("operator/cancel", r.TaskCancelRequested(task=task))
    assert not any(x.body.keeps_stacks for x in only(o.StopRank, records))


def test_nothing_is_decided_before_all_ranks_have_reported(d: Driver, task: int) -> None:
    for rank in (0, 1, VICTIM):
        stalled(d, task, rank, "own" if rank == VICTIM else IN, in_s=60.0)
    assert not d.state.deadlines
    assert locate_hang(d.state, task_of(d, task)) is None
    stalled(d, task, 3, in_s=60.0)
    assert deadline(d, task) in d.state.deadlines
    d.obey(d.due(deadline(d, task)))
    assert task_of(d, task).ranks[VICTIM].attempt == 2


@pytest.mark.parametrize("rank", [VICTIM, 0])
def test_a_rank_that_continues_ends_the_hang(d: Driver, task: int, rank: int) -> None:
    hung(d, task, VICTIM)
    assert kinds(went_on(d, task, rank)) == []
    assert not d.state.deadlines
    assert kinds(went_on(d, task, rank)) == [], "a repeated report changes nothing"
    assert not d.state.incidents


def test_progress_ends_a_hang_of_earlier_iterations(d: Driver, task: int) -> None:
    hung(d, task, VICTIM)
    for rank in range(4):
        stalled(
            d,
            task,
            rank,
            "own" if rank == VICTIM else IN,
            iteration=3,
            collective=int(rank != VICTIM),
        )
    d.progress(task, 3)
    assert deadline(d, task) in d.state.deadlines, "some ranks may still be in iteration 3"
    d.progress(task)
    assert not task_of(d, task).stalls


def test_a_hang_in_an_iteration_that_others_finished(d: Driver, task: int) -> None:
    """The hung rank reports its stall once. A rank whose collective ended reports the progress."""
    stalled(d, task, VICTIM, "own", iteration=d.steps[task], collective=3)
    d.progress(task)
    for rank in (0, 1, 3):
        stalled(d, task, rank, iteration=d.steps[task])
    d.obey(d.due(deadline(d, task)))
    assert the(decisions.IncidentOpened, d.log).ranks == (VICTIM,)


def test_a_hang_on_the_way_to_a_boundary(d: Driver, task: int) -> None:
    """The task must leave its slots at the end of the iteration, but the iteration does not end."""
    records = d.tell("operator/drain", r.NodeDrained(node="n2", reason="fans"))
    assert the(o.Quiesce, records).mode == "boundary"
    hung(d, task, VICTIM)
    late = d.due(deadline(d, task))
    assert the(decisions.IncidentOpened, late).ranks == (VICTIM,)
    assert the(o.Quiesce, late).mode == "now"
    d.obey(late)
    d.heal(task)
    assert [x.body.iterations_lost for x in only(decisions.IncidentClosed, d.log)] == [0]


def test_a_drain_during_a_hang(d: Driver, task: int) -> None:
    hung(d, task, VICTIM)
    d.tell("operator/drain", r.NodeDrained(node="n2", reason="fans"))
    assert deadline(d, task) in d.state.deadlines
    d.obey(d.due(deadline(d, task)))
    d.progress(task)


def test_two_ranks_behind_both_restart(d: Driver, task: int) -> None:
    hung(d, task, 1, VICTIM)
    late = d.due(deadline(d, task))
    assert the(decisions.IncidentOpened, late).ranks == (1, VICTIM)
    d.obey(late)
    d.heal(task)
    assert {m.rank: m.attempt for m in task_of(d, task).members} == {0: 1, 1: 2, 2: 2, 3: 1}
    assert task_of(d, task).healed == 1


def test_a_rank_that_is_an_iteration_behind_restarts(d: Driver, task: int) -> None:
    for rank in (0, 1, 3):
        stalled(d, task, rank, iteration=2)
    stalled(d, task, VICTIM, "own", iteration=1, collective=3)
    d.obey(d.due(deadline(d, task)))
    assert the(decisions.IncidentOpened, d.log).ranks == (VICTIM,)


def test_the_deadline_is_three_times_the_own_iteration(d: Driver, task: int) -> None:
    for rank in range(4):
        stalled(
            d,
            task,
            rank,
            "own" if rank == VICTIM else IN,
            collective=int(rank != VICTIM),
            normal_s=10.0,
            in_s=5.0,
        )
    assert d.state.deadlines[deadline(d, task)].due_s - d.now_s == pytest.approx(25.0, abs=0.1)
    d.obey(d.due(deadline(d, task)))


def test_a_rank_paused_with_its_agent_gets_one_iteration(d: Driver, task: int) -> None:
    """The whole machine was paused, so the first report of the agent is out of date."""
    for rank in range(4):
        stalled(
            d,
            task,
            rank,
            "own" if rank == VICTIM else IN,
            collective=int(rank != VICTIM),
            in_s=900.0,
        )
    assert d.state.deadlines[deadline(d, task)].due_s - d.now_s == pytest.approx(NORMAL_S)
    went_on(d, task, 0)
    assert not d.state.deadlines


def test_a_network_hang_is_retried_in_place(d: Driver, task: int) -> None:
    hung(d, task)
    assert d.state.deadlines[deadline(d, task)].due_s - d.now_s == pytest.approx(2.4, abs=0.05)
    late = d.due(deadline(d, task))
    opened = the(decisions.IncidentOpened, late)
    assert (opened.severity, opened.status) == ("SEV3", "NCCL timeout")
    assert opened.why == (
        "all 4 members entered collective 1 of iteration 1, and it does not end (2 hang_s_min: 4 s)"
    )
    assert len(opened.evidence) == 5
    assert not only(o.StopRank, late)
    d.obey(late)
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert (closed.outcome, closed.iterations_lost) == ("healed", 0)
    assert all(m.attempt == 1 for m in task_of(d, task).members)


def test_a_stalled_network_names_the_links_that_lose_what_is_sent(d: Driver, task: int) -> None:
    for rank in sorted(task_of(d, task).ranks):
        there = task_of(d, task).ranks[rank].slot.node
        stalled(d, task, rank, silent_peers=("10.9.9.8", "10.9.9.9") if there == "n1" else ())
    opened = the(decisions.IncidentOpened, d.due(deadline(d, task)))
    assert "; not acknowledged is n1 -> 10.9.9.8, n1 -> 10.9.9.9 (" in opened.why


def test_a_network_hang_at_a_boundary(d: Driver, task: int) -> None:
    d.tell("operator/drain", r.NodeDrained(node="n2", reason="fans"))
    hung(d, task)
    late = d.due(deadline(d, task))
    assert the(o.Quiesce, late).mode == "now"
    d.obey(late)
    d.progress(task)
    assert len(task_of(d, task).members) == 2


def test_failed_retries_of_the_network_end_in_a_restart(d: Driver, task: int) -> None:
    for _ in range(d.state.policy.restarts_max + 1):
        hung(d, task)
        d.obey(d.due(deadline(d, task)))
    assert the(decisions.IncidentOpened, d.log).severity == "SEV3"
    assert [x.body.severity for x in only(decisions.IncidentEscalated, d.log)][-1] == "SEV2"
    d.progress(task)


def test_ranks_all_in_their_own_work_are_not_restarted(d: Driver, task: int) -> None:
    """For example, a file system hangs: a restart of all ranks would lose the state for nothing."""
    hung(d, task, 0, 1, 2, 3)
    assert d.state.deadlines[deadline(d, task)].length_s == pytest.approx(1800.0, abs=2.0)
    shown = view(d.state)["tasks"][0]
    assert (shown["state"], shown["stands"]) == (
        "running",
        (
            "all 4 members are stalled outside collectives in iteration 1: "
            "a file system, a machine, "
            "or what all of them read"
        ),
    )
    went_on(d, task, 1)
    assert not d.state.deadlines
    stalled(d, task, 1, "own", collective=0)
    late = d.due(deadline(d, task))
    assert the(decisions.IncidentOpened, late).ranks == (0, 1, 2, 3), "all of them restart"
    d.obey(late)


def test_most_ranks_in_their_own_work_have_a_shared_reason(d: Driver, task: int) -> None:
    hung(d, task, 0, 1, 2)
    assert d.state.deadlines[deadline(d, task)].length_s == pytest.approx(1800.0, abs=2.0)
    assert view(d.state)["tasks"][0]["stands"].startswith("3 of 4 members are stalled outside")
    assert not d.state.incidents


def test_a_rank_that_left_the_others_collective_restarts(d: Driver, task: int) -> None:
    for rank in range(4):
        stalled(d, task, rank, "own" if rank == VICTIM else IN)
    d.obey(d.due(deadline(d, task)))
    assert the(decisions.IncidentOpened, d.log).ranks == (VICTIM,)


def test_a_task_of_one_has_no_second_source(d: Driver) -> None:
    task = d.running(spec(slots={"sizes": [1]}))
    hung(d, task, 0)
    assert d.state.deadlines[deadline(d, task)].length_s == pytest.approx(1800.0, abs=2.0)


def test_ranks_on_an_unreachable_node_are_unknown(d: Driver, task: int) -> None:
    node = task_of(d, task).ranks[VICTIM].slot.node
    d.tell("leader/abc", r.NodeUnreachable(node=node, incarnation=1, silence_s=6.0))
    reachable = [x for x in range(4) if task_of(d, task).ranks[x].slot.node != node]
    for rank in reachable:
        stalled(d, task, rank, in_s=60.0)
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.ranks) == ("silent", (2, 3)), "the reachable ranks wait for them"
    stalled(d, task, reachable[0], "own", collective=0, in_s=60.0)
    late = d.due(deadline(d, task))
    assert the(decisions.IncidentOpened, late).ranks == (reachable[0],), "it stalls in its own work"
    d.obey(late)


def test_a_node_that_is_reachable_again_clears_the_deadline(d: Driver, task: int) -> None:
    for rank in (0, 1):
        stalled(d, task, rank, "own" if rank else IN, collective=1 - rank, in_s=60.0)
    d.tell("leader/abc", r.NodeUnreachable(node="n2", incarnation=1, silence_s=6.0))
    assert deadline(d, task) in d.state.deadlines
    d.tell("leader/abc", r.NodeReachable(node="n2", incarnation=1))
    assert deadline(d, task) not in d.state.deadlines, "its ranks may continue"


def test_a_stopped_rank_has_its_own_deadline(d: Driver, task: int) -> None:
    it = task_of(d, task).ranks[VICTIM]
    hung(d, task, VICTIM)
    d.tell(d.source(it.slot.node), r.RankSuspended(task=task, rank=VICTIM, attempt=1, pid=it.pid))
    assert [name.partition("/")[0] for name in d.state.deadlines] == ["stopped"]
    late = d.due(f"stopped/{task}/{VICTIM}/1")
    assert the(decisions.IncidentOpened, late).why == (
        "rank 2 on n2 is stopped (SIGSTOP) (stopped_s_max: 2 s)"
    )
    assert not [name for name in d.state.deadlines if name.startswith("hang")]
    d.obey(late)
    d.progress(task)
    assert len(only(decisions.IncidentOpened, d.log)) == 1


def test_a_stopped_rank_that_continues_may_still_hang(d: Driver, task: int) -> None:
    it = task_of(d, task).ranks[VICTIM]
    hung(d, task, VICTIM)
    d.tell(d.source(it.slot.node), r.RankSuspended(task=task, rank=VICTIM, attempt=1, pid=it.pid))
    d.tell(d.source(it.slot.node), r.RankContinued(task=task, rank=VICTIM, attempt=1, pid=it.pid))
    d.obey(d.due(deadline(d, task)))
    assert the(decisions.IncidentOpened, d.log).status == "task hang"


def test_a_rank_that_dies_during_a_hang_is_the_fault(d: Driver, task: int) -> None:
    hung(d, task, VICTIM)
    opened = the(decisions.IncidentOpened, records := d.exit(task, VICTIM))
    assert opened.status == "exited abnormally"
    assert not [name for name in d.state.deadlines if name.startswith("hang")]
    d.obey(records)
    d.heal(task)
    assert task_of(d, task).healed == 1


def test_while_paused_ranks_that_continue_are_left_alone(d: Driver, task: int) -> None:
    d.tell("operator/freeze", r.HealingFrozen(reason="a test"))
    hung(d, task, VICTIM)
    late = d.due(deadline(d, task))
    assert kinds(late) == ["IncidentOpened", "OrderSuppressed"]
    for rank in range(4):
        went_on(d, task, rank)
    assert kinds(d.heal(task))[0] == "IncidentClosed"
    d.tell("operator/unfreeze", r.HealingResumed())
    assert not only(o.StopRank, d.log)
    assert not only(o.Quiesce, d.log)


def test_a_hung_rank_is_ended_when_healing_resumes(d: Driver, task: int) -> None:
    d.tell("operator/freeze", r.HealingFrozen(reason="a test"))
    hung(d, task, VICTIM)
    d.due(deadline(d, task))
    records = d.tell("operator/unfreeze", r.HealingResumed())
    assert the(o.StopRank, records).rank == VICTIM
    d.obey(records)
    d.progress(task)
    assert len(only(decisions.IncidentOpened, d.log)) == 1


def test_a_network_that_recovers_while_paused_is_not_retried(d: Driver, task: int) -> None:
    d.tell("operator/freeze", r.HealingFrozen(reason="a test"))
    hung(d, task)
    assert "IncidentOpened" in kinds(d.due(deadline(d, task)))
    for rank in range(4):
        went_on(d, task, rank)
    d.progress(task)
    d.tell("operator/unfreeze", r.HealingResumed())
    assert not only(o.Quiesce, d.log)
    assert task_of(d, task).failed_s < 0


def test_stale_reports_change_nothing_of_a_hang(d: Driver, task: int) -> None:
    for wrong in ({"attempt": 7}, {"generation": 9}, {"task": 99}, {"rank": 8}):
        assert kinds(stalled(d, task, 0, **wrong)) == []
    assert not task_of(d, task).stalls
    hung(d, task, VICTIM)
    d.obey(d.exit(task, 3))
    assert not task_of(d, task).stalls, "the stalls were of the previous generation"


def test_after_repeated_hangs_the_others_go_on_without_the_rank(d: Driver, task: int) -> None:
    for _ in range(d.state.policy.restarts_max + 1):
        hung(d, task, VICTIM)
        late = d.due(deadline(d, task))
        d.obey(late)
    begun = the(decisions.ExperimentBegun, d.log)
    assert (begun.status, begun.seats) == (statuses.TASK_HANG, ()), "no slot is free"
    assert [list(node.slots_suspected) for node in d.state.nodes.values()] == [[], [0]]
    assert not any(node.slots_disabled for node in d.state.nodes.values())
    assert tuple(seat.rank for seat in task_of(d, task).target) == OTHERS


def test_a_new_leader_restarts_the_deadline(d: Driver, task: int) -> None:
    hung(d, task, VICTIM)
    length_s = d.state.deadlines[deadline(d, task)].length_s
    d.now_s += 60.0
    d.epoch = 2
    d.tell("leader/def", r.EpochStarted(nonce="def", code="1", heart=8), epoch=2)
    assert d.state.deadlines[deadline(d, task)].due_s == pytest.approx(d.now_s + length_s)
    d.obey(d.due(deadline(d, task)))
    assert task_of(d, task).ranks[VICTIM].attempt == 2


# --- slow iterations: the rank works, but its iteration does not end -----------------------------
def test_a_slow_iteration_is_shown_before_any_action(d: Driver, task: int) -> None:
    waited_for(d, task)
    assert locate_hang(d.state, task_of(d, task)) is None, "rank 2 has not reported yet"
    assert kinds(crawls(d, task, VICTIM, 1.6)) == []
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.ranks, hang.is_actionable) == ("slow", (VICTIM,), False)
    why = "rank 2 on n2 is still working in iteration 1, for 1.6 s, usual is 0.4 s; 3 others wait"
    assert hang.why == why
    assert view(d.state)["tasks"][0]["stands"] == why
    assert deadline(d, task) not in d.state.deadlines


@pytest.mark.parametrize("last", ["slow", "waits"])
def test_a_rank_in_a_very_slow_iteration_restarts(d: Driver, task: int, last: str) -> None:
    waits = waited_for(d, task) if last == "slow" else []
    crawls(d, task, VICTIM, 1.6)
    slow = crawls(d, task, VICTIM, 6.4)[0].seq
    waits = waits or waited_for(d, task)
    due = d.state.deadlines[deadline(d, task)]
    assert due.length_s == pytest.approx(0.5, abs=0.01), "time for one more iteration"
    late = d.due(deadline(d, task))
    opened = the(decisions.IncidentOpened, late)
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "task hang", (VICTIM,))
    assert opened.evidence == (*sorted((*waits, slow)), late[0].seq)
    assert the(o.StopRank, late).rank == VICTIM
    d.obey(late)
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert (closed.outcome, closed.iterations_lost) == ("healed", 0)
    assert not task_of(d, task).slow_iterations


def test_too_little_evidence_of_a_slow_iteration(d: Driver, task: int) -> None:
    crawls(d, task, VICTIM, 50.0)
    for rank in OTHERS[:2]:
        stalled(d, task, rank)
    assert locate_hang(d.state, task_of(d, task)) is None, "rank 3 may still progress"
    stalled(d, task, 3, "own", collective=0)
    assert locate_hang(d.state, task_of(d, task)) is None, "rank 3 stalls in its own work"
    stalled(d, task, 3, iteration=2)
    assert locate_hang(d.state, task_of(d, task)) is None, "rank 3 waits in another iteration"
    stalled(d, task, 3)
    assert locate_hang(d.state, task_of(d, task)) is not None
    went_on(d, task, 0)
    assert locate_hang(d.state, task_of(d, task)) is None
    assert not [name for name in d.state.deadlines if name.startswith("hang")]
    d.progress(task)
    assert not only(decisions.IncidentOpened, d.log)


def test_no_hang_is_located_if_most_ranks_still_work(d: Driver, task: int) -> None:
    for rank in (1, 2, 3):
        crawls(d, task, rank, 50.0)
    stalled(d, task, 0)
    assert locate_hang(d.state, task_of(d, task)) is None


def test_a_slow_rank_that_enters_later_is_not_the_cause(d: Driver, task: int) -> None:
    waited_for(d, task)
    crawls(d, task, VICTIM, 6.4)
    stalled(d, task, VICTIM)
    assert not task_of(d, task).slow_iterations
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert hang.kind == "network"


def test_stale_reports_of_a_slow_iteration_change_nothing(d: Driver, task: int) -> None:
    d.progress(task, 5)
    for wrong in (
        {"attempt": 7},
        {"generation": 9},
        {"task": 99},
        {"rank": 8},
        {"iteration": 3},
        {"own_s": -1.0},
        {"num_iterations": 10},
    ):
        crawls(d, task, VICTIM, 50.0, **({"iteration": 6} | wrong))
    assert not task_of(d, task).slow_iterations
    crawls(d, task, VICTIM, 50.0, iteration=6)
    assert list(task_of(d, task).slow_iterations) == [VICTIM]
    d.progress(task, 3)
    assert not task_of(d, task).slow_iterations, "the iteration is complete"


def test_while_paused_a_slow_iteration_that_ends_restarts_no_rank(d: Driver, task: int) -> None:
    d.tell("operator/freeze", r.HealingFrozen(reason="a test"))
    waited_for(d, task)
    crawls(d, task, VICTIM, 6.4)
    assert kinds(d.due(deadline(d, task))) == ["IncidentOpened", "OrderSuppressed"]
    for rank in OTHERS:
        went_on(d, task, rank)
    d.progress(task, 2)
    d.tell("operator/unfreeze", r.HealingResumed())
    assert not only(o.StopRank, d.log)


def test_after_repeated_slow_iterations_the_rank_is_left_out(d: Driver, task: int) -> None:
    for _ in range(2):
        waited_for(d, task)
        crawls(d, task, VICTIM, 6.4)
        d.obey(d.due(deadline(d, task)))
    assert the(decisions.ExperimentBegun, d.log).status == statuses.TASK_HANG
    assert [list(node.slots_suspected) for node in d.state.nodes.values()] == [[], [0]]
    assert not any(node.slots_disabled for node in d.state.nodes.values())


# --- a replica of several ranks: only their groups show who is the cause ---
def told(
    d: Driver,
    task: int,
    counts: dict[int, tuple[int, int, int]],
    *,
    stuck_in: dict[int, str] | None = None,
) -> None:
    """All ranks of TP 2 x DP 2 stall in their passes. By rank: what it has entered in its tensor
    group, in its data-parallel group and among all. `stuck_in`: all wait, each in this group."""
    for rank, (tp, dp, world) in counts.items():
        first = rank // 2 * 2
        groups = (("tp", (first, 2, 1, 1, 0), tp), ("dp_cp", (rank % 2, 2, 2, 1, 0), dp))
        stalled(
            d,
            task,
            rank,
            collective=0,
            groups=tuple(
                GroupProgress(
                    key=100 + number,
                    role=role,
                    members=members,
                    entered=entered,
                    left=entered - (stuck_in is None or stuck_in[rank] == role),
                    kind="all_reduce",
                    num_bytes=64,
                    order=number + 1,
                    in_s=1.6,
                )
                for number, (role, members, entered) in enumerate(
                    (*groups, ("world", (0, 4, 1, 1, 0), world))
                )
            ),
            are_groups_complete=True,
            waits=rank != 1 or stuck_in is not None,
        )


def test_in_a_replica_the_rank_that_waits_for_nobody_restarts(d: Driver, task: int) -> None:
    told(d, task, {0: (8, 3, 5), 1: (7, 3, 5), 2: (9, 4, 5), 3: (9, 4, 5)})
    late = d.due(deadline(d, task))
    opened = the(decisions.IncidentOpened, late)
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "task hang", (1,))
    assert opened.why == (
        "rank 1 on n1 is stalled after backward in iteration 1: did not enter all_reduce 8 of tp "
        "(ranks 0 1), which rank 0 entered; it is 1 behind there, its last is 7; 3 others wait "
        "(hang_s_min: 2 s)"
    )
    assert the(o.StopRank, late).rank == 1
    d.obey(late)
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert (closed.outcome, closed.iterations_lost) == ("healed", 0)


def test_what_all_have_entered_is_named_in_a_fault_of_the_network(d: Driver, task: int) -> None:
    told(d, task, dict.fromkeys(range(4), (8, 3, 5)))
    for rank in range(4):
        replace_stall(d, task, rank, waits=True)
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.ranks) == ("network", (0, 1, 2, 3))
    assert hang.why.endswith(
        "; all_reduce 5 of world (ranks 0, 1, 2, 3) was entered by all of them and does not end"
    )


def test_the_place_of_a_fault_is_that_of_the_group_that_is_stuck(d: Driver, task: int) -> None:
    """Ranks 0 and 1 on n1 are in an all-reduce of their tensor group; 2 and 3 wait for them."""
    counts = {0: (8, 3, 5), 1: (8, 3, 5), 2: (9, 4, 5), 3: (9, 4, 5)}
    told(d, task, counts, stuck_in={0: "tp", 1: "tp", 2: "dp_cp", 3: "dp_cp"})
    opened = the(decisions.IncidentOpened, d.due(deadline(d, task)))
    assert (opened.status, opened.ranks) == (statuses.NCCL_TIMEOUT, (0, 1, 2, 3))
    assert "all_reduce 8 of tp (ranks 0, 1) was entered by all" in opened.why
    (fault,) = d.state.unnamed
    assert fault.nodes == ("n1",)


def test_no_place_explains_that_ranks_call_different_operations(d: Driver, task: int) -> None:
    """Rank 1 has skipped one of all, and waits in another with rank 0, which waits for it."""
    counts = {0: (8, 3, 5), 1: (9, 3, 4), 2: (8, 3, 5), 3: (8, 3, 5)}
    told(d, task, counts, stuck_in={0: "world", 1: "tp", 2: "world", 3: "world"})
    opened = the(decisions.IncidentOpened, d.due(deadline(d, task)))
    assert (opened.severity, opened.ranks) == ("SEV3", (0, 1, 2, 3))
    assert "waits in a circle" in opened.why
    (fault,) = d.state.unnamed
    assert (fault.nodes, fault.links) == ((), ())


def test_groups_that_contradict_the_marks_are_not_believed(d: Driver, task: int) -> None:
    """Rank 3 says that it works; by the groups it would be rank 1."""
    told(d, task, {0: (8, 3, 5), 1: (7, 3, 5), 2: (9, 4, 5), 3: (9, 4, 5)})
    replace_stall(d, task, 3, where="own", waits=False)
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert hang.ranks == (3,)


def test_ranks_that_wait_in_their_own_work_do_not_contradict_the_groups(
    d: Driver, task: int
) -> None:
    """With overlapped gathers, ranks wait in their forward passes. Rank 1 is at a barrier."""
    told(d, task, dict.fromkeys(range(4), (8, 3, 5)))
    for rank in range(4):
        replace_stall(d, task, rank, waits=True, where="collective" if rank == 1 else "own")
    *before, last = task_of(d, task).stalls[1].groups
    replace_stall(d, task, 1, groups=(*before, replace(last, kind="barrier")))
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.ranks) == ("mismatch", (1,))


def test_a_circle_of_waits_in_an_evaluation_is_one_of_the_network(d: Driver, task: int) -> None:
    counts = {0: (8, 3, 5), 1: (9, 3, 4), 2: (8, 3, 5), 3: (8, 3, 5)}
    told(d, task, counts, stuck_in={0: "world", 1: "tp", 2: "world", 3: "world"})
    for rank in range(4):
        replace_stall(d, task, rank, where="own", is_untimed=True)
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.ranks) == ("network", (0, 1, 2, 3))
    assert "waits in a circle" in hang.why
    replace_stall(d, task, 2, waits=False)  # it computes
    assert locate_hang(d.state, task_of(d, task)) is None


def test_a_rank_that_waits_where_its_step_does_not_is_a_mismatch(d: Driver, task: int) -> None:
    """Its peers have launched more since, so that its last call is compared with none of theirs."""
    told(d, task, dict.fromkeys(range(4), (0, 0, 7)))
    replace_stall(d, task, 1, where="own", waits=True)
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.ranks) == ("mismatch", (1,))
    assert hang.why == (
        "rank 1 on n1 is stalled after backward in iteration 1 in all_reduce 7 of world, none of "
        "its step, collective 1 not entered; 3 others wait"
    )


def test_without_the_groups_of_all_the_marks_decide(d: Driver, task: int) -> None:
    told(d, task, {0: (8, 3, 5), 1: (7, 3, 5), 2: (9, 4, 5), 3: (9, 4, 5)})
    replace_stall(d, task, 2, groups=(), are_groups_complete=False)
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.ranks) == ("network", (0, 1, 2, 3))


LIMIT_S = Policy().first_iteration_s_max + FIRST_MORE_S


def test_a_first_iteration_has_the_limit_of_the_policy(d: Driver, task: int) -> None:
    """It counts from when a peer waits, however long the rank has compiled by then."""
    began_s = d.now_s
    for rank in range(4):
        where = "own" if rank == VICTIM else IN
        changes = {"is_untimed": True, "normal_s": 0.0, "iteration": 0}
        d.now_s = began_s + (0.0 if rank == VICTIM else 600.0) + 60.0 + 0.01 * rank
        stalled(d, task, rank, where, in_s=60.0, collective=int(rank != VICTIM), **changes)
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.ranks, hang.is_actionable) == ("rank", (VICTIM,), True)
    assert hang.due_s == pytest.approx(began_s + 600.0 + LIMIT_S, abs=0.1)
    opened = the(decisions.IncidentOpened, d.due(deadline(d, task)))
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "task hang", (VICTIM,))


def test_a_lower_limit_holds_for_a_hang_that_stands(d: Driver, task: int) -> None:
    for rank in range(4):
        where = "own" if rank == VICTIM else IN
        stalled(d, task, rank, where, in_s=60.0, is_untimed=True, normal_s=0.0, iteration=0)
    assert d.state.deadlines[deadline(d, task)].due_s - d.now_s > 1000.0
    policy = replace(d.state.policy, first_iteration_s_max=60.0)
    d.tell("operator/policy", r.PolicySet(policy=policy))
    assert d.state.deadlines[deadline(d, task)].due_s - d.now_s <= FIRST_MORE_S


def test_a_wrong_usual_time_of_one_rank_delays_nothing(d: Driver, task: int) -> None:
    hung(d, task, VICTIM)
    due_s = d.state.deadlines[deadline(d, task)].due_s
    went_on(d, task, 0)
    stalled(d, task, 0, normal_s=1e300)
    assert d.state.deadlines[deadline(d, task)].due_s - due_s < 1.0


def test_who_compiles_as_all_others_do_is_never_suspected(d: Driver, task: int) -> None:
    for rank in range(4):
        stalled(d, task, rank, "own", collective=0, is_untimed=True, normal_s=0.0, iteration=0)
    assert locate_hang(d.state, task_of(d, task)) is None
    assert deadline(d, task) not in d.state.deadlines


def test_in_a_first_iteration_the_network_is_named_with_the_addresses(d: Driver, task: int) -> None:
    for rank in range(4):
        stalled(d, task, rank, is_untimed=True, normal_s=0.0, iteration=0)
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.ranks) == ("network", (0, 1, 2, 3))
    assert hang.due_s == pytest.approx(hang.since_s + LIMIT_S, abs=0.1)
    assert hang.why.endswith("; hosts: n1 127.0.0.1, n2 127.0.0.1")


def test_a_new_process_that_waits_does_not_delay_what_its_peers_show(d: Driver, task: int) -> None:
    for rank in range(4):
        new = {"is_untimed": True, "normal_s": 0.0} if rank == VICTIM else {}
        stalled(d, task, rank, **new)
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.due_s - hang.since_s) == (
        "network",
        pytest.approx(2 * Policy().hang_s_min, abs=0.1),
    )


def replace_stall(d: Driver, task: int, rank: int, **changes: Any) -> None:
    stalls = task_of(d, task).stalls
    stalls[rank] = replace(stalls[rank], **changes)
