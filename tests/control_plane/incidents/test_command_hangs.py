"""A command that stops printing progress is reported, and restarts if its spec says so."""

from __future__ import annotations

from typing import Any

import past_screens
import pytest
from command_logs import printed
from decider import Driver, kinds, only, task_of, the
from hung_commands import AFTER_S, TELLER, deadlines, running, stalled
from snapshots import check
from unicron.cli.screens import cluster
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import history
from unicron.events.errors import SpecError
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.spec.job import parse

pytestmark = pytest.mark.nodes(3)


@pytest.fixture
def task(d: Driver) -> int:
    return running(d)


def unstalled(d: Driver, task: int) -> list[Record]:
    process = task_of(d, task).ranks[TELLER]
    return d.tell(
        d.source(process.slot.node),
        r.RankUnstalled(
            task=task,
            rank=TELLER,
            attempt=process.attempt,
            generation=0,
            iteration=40,
            stalled_s=70.0,
        ),
    )


def shown(d: Driver, task: int) -> dict[str, Any]:
    return next(one for one in view(d.state)["tasks"] if one["id"] == task)


def test_by_default_a_silent_command_is_only_reported(d: Driver) -> None:
    task = running(d, hang_after_s=None, model=None, throughput={4: 1e12})
    assert kinds(stalled(d, task)) == []
    assert deadlines(d) == []
    d.now_s += 660
    seen = view(d.state, now_s=d.now_s)
    lines = cluster.status(seen, cluster="test", now_s=d.now_s)
    check("status-unprinted", lines, columns_max=100)
    (notice,) = [line for line in lines if line.startswith("NEEDS YOU")]
    assert "has printed no line of progress for 12 min, an iteration took 1.0 s" in notice
    lines = past_screens.task_status(seen, shown(d, task), history(d.log), now_s=d.now_s)
    check("task-unprinted", lines)
    unstalled(d, task)
    assert not shown(d, task)["stands"]


def test_with_hang_after_s_the_command_restarts(d: Driver, task: int) -> None:
    (stall,) = stalled(d, task)
    (name,) = deadlines(d)
    assert d.state.deadlines[name].due_s - d.now_s == pytest.approx(AFTER_S - 61)
    late = d.due(name)
    opened = the(decisions.IncidentOpened, late)
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "task hang", (TELLER,))
    assert opened.why == (
        "rank 3 on n2 has printed no line of progress since iteration 30 and "
        "sleeps in futex, an iteration took 1 s, 600 s ago (hang_after_s: 600 s)"
    )
    assert opened.evidence == (stall.seq, late[0].seq)
    stops = {x.body.rank: x.body.grace_s for x in only(o.StopRank, late)}
    assert stops.pop(TELLER) == 0.0
    assert set(stops) == {0, 1, 2}
    assert all(x.body.keeps_stacks for x in only(o.StopRank, late)), "any of them may be waited for"
    new = d.obey(late)
    assert sorted(x.body.rank for x in only(o.StartRank, new)) == [0, 1, 2, 3]
    recovers = the(decisions.IncidentRecovering, new)
    assert recovers.pause_s >= AFTER_S, "the pause begins at the stall"
    assert not task_of(d, task).stalls
    assert deadlines(d) == []


@pytest.mark.parametrize("how", ["unstalled", "printed"])
def test_a_printed_line_ends_the_hang(d: Driver, task: int, how: str) -> None:
    stalled(d, task)
    (name,) = deadlines(d)
    records = unstalled(d, task) if how == "unstalled" else printed(d, task, 40)
    assert not only(o.StopRank, records)
    assert deadlines(d) == []
    assert not task_of(d, task).stalls
    d.tell("leader/abc", r.DeadlineReached(deadline=name))
    assert not d.state.incidents


def test_while_paused_a_printed_line_clears_the_timeout(d: Driver, task: int) -> None:
    d.tell("operator/freeze", r.HealingFrozen(reason="look"))
    stalled(d, task)
    assert not only(o.StopRank, d.due(deadlines(d)[0]))
    assert task_of(d, task).ranks[TELLER].timeout_reason
    unstalled(d, task)
    assert not task_of(d, task).ranks[TELLER].timeout_reason


def test_output_of_another_process_does_not_count(d: Driver, task: int) -> None:
    assert kinds(stalled(d, task, rank=0)) == []
    assert not task_of(d, task).stalls
    assert deadlines(d) == []


def test_no_restart_while_its_node_is_unreachable_or_a_rank_stopped(d: Driver, task: int) -> None:
    stalled(d, task)
    process = task_of(d, task).ranks[0]
    source = d.source(process.slot.node)
    d.tell(source, r.RankSuspended(task=task, rank=0, attempt=1, pid=process.pid))
    assert kinds(d.due(deadlines(d)[0])) == []
    assert len(deadlines(d)) == 1
    d.tell(source, r.RankContinued(task=task, rank=0, attempt=1, pid=process.pid))
    node = task_of(d, task).ranks[TELLER].slot.node
    d.tell("leader/abc", r.NodeUnreachable(node=node, incarnation=1, silence_s=6.0))
    assert not only(o.StopRank, d.due(deadlines(d)[0]))
    d.now_s = d.state.deadlines[deadlines(d)[0]].due_s
    d.tell("leader/abc", r.NodeReachable(node=node, incarnation=1))
    assert not only(o.StopRank, d.due(deadlines(d)[0])), "spooled reports may still come"
    assert only(o.StopRank, d.due(deadlines(d)[0]))
    d.obey(d.log[-30:])


def test_hangs_of_a_command_use_the_restart_budget(d: Driver, task: int) -> None:
    for _ in range(d.state.policy.restarts_max + 1):
        stalled(d, task)
        last = d.due(deadlines(d)[0])
        d.obey(last)
        if task_of(d, task).phase != "ended":
            printed(d, task, 10, 0)
    assert task_of(d, task).outcome == "failed"
    assert not any(node.slots_disabled or node.node_faults for node in d.state.nodes.values()), (
        "a hang of a command is no fault of a node or slot"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"hang_after_s": 0}, "must be above 0"),
        ({"hang_after_s": -1.0}, "must be above 0"),
        ({"hang_after_s": 1e7}, "at most"),
        ({"hang_after_s": float("nan")}, "must be above 0"),
        ({"hang_after_s": "1h"}, "a number"),
        (
            {"hang_after_s": 60, "command": (), "train": {"iterations": 5, "output": "/tmp/x"}},
            "is for a command",
        ),
    ],
)
def test_the_spec_is_strict(more: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as refused:
        parse({"apiVersion": "unicron/v1", "name": "beta", "command": ["true"], **more})
    assert refused.value.path == "hang_after_s"
