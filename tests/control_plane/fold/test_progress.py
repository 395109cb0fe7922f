"""Progress that a command prints calibrates its throughput and shows what a restart costs."""

from __future__ import annotations

from typing import Any

import msgspec
import past_screens
import pytest
from command_logs import begin, printed
from decider import Driver, kinds, task_of, the
from described_jobs import job
from msgspec.structs import replace
from unicron.cli.commands import replay
from unicron.cli.commands.offline import Log
from unicron.cli.screens.cluster import status
from unicron.cli.terminal.format import lost_in_words
from unicron.control_plane.api.view import view
from unicron.control_plane.fold.progress import ITERATIONS_MAX
from unicron.control_plane.history.history import History, history
from unicron.control_plane.history.incident_records import IncidentRecords, incident_records
from unicron.control_plane.planner.problem_of_state import input_digest
from unicron.control_plane.throughput import transition_cost
from unicron.control_plane.throughput.flops import iteration_flops
from unicron.events.records import decisions, in_words
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.codec import to_plain
from unicron.events.records.envelope import Record
from unicron.events.records.reports import IterationsLogged
from unicron.events.spec import policy
from unicron.events.spec.job import parse
from waf import waf

pytestmark = pytest.mark.nodes(3)

MODEL = parse(job()).model
assert MODEL is not None
FLOPS = iteration_flops(MODEL)


@pytest.fixture
def task(d: Driver) -> int:
    return begin(d)


def times(d: Driver, task: int) -> dict[int, list[float]]:
    return task_of(d, task).times_s


def measured(d: Driver, task: int, step_s: float = 1.0) -> list[Record]:
    """Print lines until the task has a measured table. Returns the records of the last line."""
    printed(d, task, 10, 0, 9.0)
    for iteration in (20, 30):
        assert kinds(printed(d, task, iteration, step_s=step_s)) == []
    return printed(d, task, 40, step_s=step_s)


def test_printed_times_become_the_measured_table(d: Driver, task: int) -> None:
    """At least three reports are needed: each is a mean, and one outlier must not decide."""
    before = input_digest(d.state)
    new = measured(d, task)
    table = the(decisions.ThroughputSet, new)
    assert table.origin == "measured"
    assert dict(zip(table.sizes, table.rates_flops, strict=True)) == pytest.approx(
        {1: FLOPS / 3.5, 2: FLOPS * 1.9 / 3.5, 4: FLOPS}
    )
    assert "PlanChosen" in kinds(new)
    assert input_digest(d.state) != before, "earlier dry runs are stale"
    assert times(d, task) == {4: [1.0] * 20}, "the first line is warm-up"
    assert d.state.slot_flops == 0, "not set by a task with a model"
    assert kinds(printed(d, task, 50, step_s=1.04)) == [], "4 % is below the threshold"


def test_single_iterations_count_each(d: Driver, task: int) -> None:
    printed(d, task, 1, 0, 9.0)
    for iteration in range(2, 22):
        assert kinds(printed(d, task, iteration, 1)) == []
    assert times(d, task) == {4: [1.0] * 19}, "the second iteration is warm-up too"
    assert "ThroughputSet" in kinds(printed(d, task, 22, 1))


def test_disturbed_iterations_do_not_count(d: Driver, task: int) -> None:
    printed(d, task, 10, 0)
    printed(d, task, 20, skipped=1)
    process = task_of(d, task).ranks[0]
    for kind in (r.RankSuspended, r.RankContinued):
        d.tell(d.source(process.slot.node), kind(task=task, rank=0, attempt=1, pid=process.pid))
    printed(d, task, 30, step_s=5.0)
    assert times(d, task) == {}
    printed(d, task, 40)
    assert times(d, task) == {4: [1.0] * 7}
    printed(d, task, 50, step_s=0.0)
    assert times(d, task) == {4: [1.0] * 7}


def test_another_global_batch_does_not_calibrate(d: Driver, task: int) -> None:
    for iteration in range(10, 100, 10):
        assert kinds(printed(d, task, iteration, global_batch=12)) == []
    assert times(d, task) == {}
    assert task_of(d, task).rate_flops == 0
    assert sum(d.state.earned.values()) == 0
    shown = next(one for one in view(d.state)["tasks"] if one["id"] == task)
    lines = past_screens.task_status(view(d.state), shown, History(), now_s=d.now_s)
    assert "measures   nothing: it prints a global batch of 12, its model has 24" in lines
    for iteration in (100, 110, 120):  # now it prints the model's global batch
        new = printed(d, task, iteration)
    assert "ThroughputSet" in kinds(new)


def test_lines_of_old_attempts_and_other_ranks_are_ignored(d: Driver, task: int) -> None:
    printed(d, task, 10, 0)
    printed(d, task, 500, rank=2)
    printed(d, task, 500, attempt=7)
    process = task_of(d, task).ranks[3]
    for number in (99, 1):
        d.tell(
            d.source(process.slot.node),
            IterationsLogged(
                task=number,
                rank=3,
                attempt=1,
                iteration=500,
                iterations=0,
                num_iterations=0,
                step_s=1.0,
            ),
        )
    printed(d, task, 0)
    printed(d, task, ITERATIONS_MAX + 1)
    printed(d, task, 20, step_s=-1.0)
    assert task_of(d, task).iteration == 10
    printed(d, task, ITERATIONS_MAX, 10**18, 5e-324)
    assert task_of(d, task).iteration == ITERATIONS_MAX


def test_a_declared_table_is_never_overridden(d: Driver) -> None:
    task = begin(d, throughput={4: 1e9})
    assert "ThroughputSet" not in kinds(measured(d, task))
    assert (times(d, task), task_of(d, task).iteration) == ({}, 40)


def test_without_a_model_progress_does_not_calibrate(d: Driver) -> None:
    task = begin(d, model=None, slots={"min": 4, "max": 4})
    assert kinds(measured(d, task)) == []
    it = task_of(d, task)
    assert (it.iteration, it.step_s, it.rate_flops) == (40, 1.0, 0.0)


def test_a_total_that_is_not_printed_is_not_shown(
    d: Driver, task: int, capsys: pytest.CaptureFixture[str]
) -> None:
    printed(d, task, 1040, 0, iterations=0)
    replay._fold(Log(lambda: iter(d.log), 0, ""), as_json=False)
    rows = status(view(d.state), cluster="c", now_s=d.now_s)
    for shown in (next(row for row in rows if " gpt " in row), capsys.readouterr().out):
        assert " 1,040 " in shown
        assert "/0" not in shown


def restart(d: Driver, task: int) -> None:
    d.obey(d.exit(task, 1))
    assert task_of(d, task).phase == "training"


def test_the_downtime_includes_repeated_iterations(d: Driver, task: int) -> None:
    """Iteration 40 is printed again 45 s after the last line, so the downtime is 45 s."""
    prior_s = d.state.policy.transition_s
    measured(d, task)
    for time in range(3):
        printed_s = d.now_s
        restart(d, task)
        assert task_of(d, task).rate_flops == 0, "no report since the restart"
        inputs = input_digest(d.state)
        d.now_s = printed_s + 45.0 - 0.01
        printed(d, task, 40, 0, 8.0)
        assert task_of(d, task).downtime_s["same"][time] == pytest.approx(45.0)
        assert (input_digest(d.state) != inputs) == (time == 2), "three times make a measurement"
    assert transition_cost.transition(d.state, task_of(d, task)).same_s == pytest.approx(45.0)
    assert transition_cost.transition(d.state, task_of(d, task)).stop_s == prior_s
    printed(d, task, 50)
    printed_s = d.now_s
    restart(d, task)
    d.now_s = printed_s + 45.0 - 0.01
    printed(d, task, 60, 0, 8.0)
    assert task_of(d, task).downtime_s["same"][3] == pytest.approx(35.0), "10 new iterations of 1 s"


def test_losses_after_a_restart_replace_the_old_ones(d: Driver, task: int) -> None:
    """A restart from iteration 20 drops the later losses; repeated iterations replace old ones."""
    for iteration, loss in ((10, 5.0), (20, 4.0), (30, 3.0), (40, 2.0)):
        printed(d, task, iteration, loss=loss)
    restart(d, task)
    printed(d, task, 25, 5, loss=3.9)

    def losses() -> dict[int, float]:
        return history(d.log).tasks[task].losses

    assert losses() == {10: 5.0, 20: 4.0, 25: 3.9}
    printed(d, task, 35, loss=3.1)
    printed(d, task, 30, loss=3.5)  # a late line of the same process drops no loss
    assert losses() == {10: 5.0, 20: 4.0, 25: 3.9, 30: 3.5, 35: 3.1}


def test_new_iterations_reset_the_restart_count(d: Driver, task: int) -> None:
    measured(d, task)
    restart(d, task)
    printed(d, task, 35, 0)
    printed(d, task, 49)
    assert task_of(d, task).restarts == {1: 1}
    printed(d, task, 50)
    assert task_of(d, task).restarts == {}


def test_two_restarts_without_a_line_are_one_transition(d: Driver, task: int) -> None:
    measured(d, task)
    printed_s = d.now_s
    for _ in range(2):
        restart(d, task)
    d.now_s = printed_s + 90.0 - 0.01
    printed(d, task, 30, 0)
    assert task_of(d, task).downtime_s == {"same": [pytest.approx(100.0)]}


def test_a_task_that_waited_for_slots_has_no_transition(d: Driver, task: int) -> None:
    measured(d, task)
    for node in ("n1", "n2", "n3"):
        d.obey(d.tell(f"operator/{node}", r.NodeDrained(node=node)))
    assert (task_of(d, task).phase, task_of(d, task).transition) == ("idle", None)
    d.now_s += 1000.0
    for node in ("n1", "n2"):
        d.obey(d.tell(f"operator/un{node}", r.NodeUndrained(node=node)))
    assert task_of(d, task).phase == "training"
    restart(d, task)
    printed(d, task, 40, 0)
    assert task_of(d, task).downtime_s == {}


def test_fewer_slots_are_a_shrink_transition(d: Driver, task: int) -> None:
    measured(d, task)
    printed_s = d.now_s
    for node in ("n2", "n3"):
        d.obey(d.tell(f"operator/{node}", r.NodeDrained(node=node)))
    assert len(task_of(d, task).target) == 2
    d.now_s = printed_s + 30.0 - 0.01
    printed(d, task, 40, 0, rank=1)
    assert task_of(d, task).downtime_s == {"shrink": [pytest.approx(30.0)]}
    for iteration in (50, 60, 70):
        new = printed(d, task, iteration, step_s=1.5, rank=1)
    table = the(decisions.ThroughputSet, new)
    rates = dict(zip(table.sizes, table.rates_flops, strict=True))
    assert (rates[2], rates[4]) == pytest.approx((FLOPS / 1.5, FLOPS))


def test_work_counts_once_from_the_first_line_on(d: Driver, task: int) -> None:
    printed(d, task, 400_000, 0)
    assert sum(d.state.earned.values()) == 0, "iterations of a checkpoint do not count"
    printed(d, task, 400_010)
    assert sum(d.state.earned.values()) == 10 * FLOPS
    restart(d, task)
    printed(d, task, 400_005, 0)
    printed(d, task, 400_015)
    assert sum(d.state.earned.values()) == 15 * FLOPS
    told = waf(d.log, 10)
    assert sum(told.achieved) * told.bucket_s == pytest.approx(15 * FLOPS)


def test_the_screens_show_the_progress(d: Driver, task: int) -> None:
    measured(d, task)
    seen = view(d.state)
    shown = next(one for one in seen["tasks"] if one["id"] == task)
    lines = past_screens.task_status(seen, shown, history(d.log), now_s=d.now_s)
    assert "where      n1 x2 n2 x2" in lines
    assert "progress   40 of 1,000, loss 2.5000, as it prints" in lines
    assert any(line.startswith("pace       1.0 s an iteration; ") for line in lines)
    assert any(line.startswith("finish ") for line in lines)
    assert any(line.startswith("earns ") and line.endswith("; measured") for line in lines)
    row = next(line for line in status(seen, cluster="c", now_s=d.now_s) if " gpt " in line)
    assert " 40/1,000 " in row
    assert in_words.line(to_plain(d.log[-3])).endswith(
        f"task {task} rank 3.1 iteration 40 of 1,000 loss 2.5000, 1.0 s each (of 10), "
        "global batch 24"
    )
    d.now_s += 1.0
    assert view(d.state)["tasks"][0]["waf"] == pytest.approx(FLOPS)


# --- incidents, injected faults, skipped iterations ---------------------------------------------
def test_the_page_of_an_incident_has_no_line_of_progress(d: Driver, task: int) -> None:
    """If the incident moves another task, the page shows only the first progress of that task."""
    measured(d, task)
    d.tell("operator/freeze", r.HealingFrozen(reason="a look at it"))
    d.exit(task, 1)
    for iteration in range(50, 90, 10):
        printed(d, task, iteration)
    d.obey(d.tell("operator/go", r.HealingResumed()))
    one = next(iter(history(d.log).incidents.values()))
    shown = [x.kind for x in incident_records(one, d.log).records]
    assert "StartRank" in shown
    assert "IterationsLogged" not in shown

    other = IncidentRecords(incident=one, later=frozenset())
    for record in d.log:
        other.add(record)
    other.records, other.others = [], {task: "moves"}
    one.incident.task = 99
    other.incident.closed_seq = 0
    for iteration in range(80, 110, 10):
        for record in printed(d, task, iteration):
            other.add(replace(record, incident=0))
    assert [x.kind for x in other.records] == ["IterationsLogged"]
    assert other.others == {task: "done"}


def test_an_injected_fault_ends_when_the_command_prints(d: Driver) -> None:
    d.tell("leader/abc", r.PolicySet(policy=policy.Policy(allow_inject=True)))
    task = begin(d)
    printed(d, task, 10, 0)
    d.tell(
        "operator/c", r.FaultRequested(what="stop", task=task, rank=2, stop_s=2.0, reason="by ops")
    )
    past = history(d.log)
    assert [one.over_seq for one in past.injected.faults] == [0]
    d.now_s += 5
    seq = printed(d, task, 20)[0].seq
    past = history(d.log)
    assert [one.over_seq for one in past.injected.faults] == [seq]


def test_skipped_iterations_count_once(d: Driver, task: int) -> None:
    printed(d, task, 10, 0, skipped=3)
    printed(d, task, 20, skipped=1)
    printed(d, task, 20, rank=2, skipped=1)
    restart(d, task)
    printed(d, task, 20, 0, skipped=1)
    printed(d, task, 30, skipped=2)
    assert history(d.log).tasks[task].skipped == 6


# --- iterations that a command repeats after a restart -------------------------------------------
def failed(d: Driver, task: int) -> decisions.IncidentClosed:
    """Rank 0 dies, and all ranks start again. No line is printed for so long that this counts."""
    new = d.exit(task, 0)
    while any(isinstance(one.body, o.StopRank | o.StartRank) for one in new):
        new = d.obey(new)
    (recovering,) = task_of(d, task).recovering
    d.due(f"recovering/{task}/{recovering}")
    return [one.body for one in d.log if isinstance(one.body, decisions.IncidentClosed)][-1]


def viewed(d: Driver, task: int) -> tuple[Any, Any]:
    """The task and the newest incident, as the view shows them."""
    seen = view(d.state)
    viewed_task = next(one for one in seen["tasks"] if one["id"] == task)
    return viewed_task, seen["incidents"][-1]


def test_iterations_repeated_after_a_restart_are_lost(d: Driver, task: int) -> None:
    printed(d, task, 370)
    printed(d, task, 380)
    assert view(d.state)["tasks"][0]["iterations_lost"] == 0
    closed = failed(d, task)
    assert (closed.outcome, closed.iterations_lost) == ("healed", None)
    assert "iterations lost: unknown until the task prints one" in in_words.essentials(
        "IncidentClosed", msgspec.to_builtins(closed)
    )
    viewed_task, incident = viewed(d, task)
    assert (viewed_task["iterations_lost"], incident["iterations_lost"]) == (None, None)
    unknown = status(view(d.state), cluster="c", now_s=d.now_s)
    printed_words = " ".join(" ".join(unknown).split())
    assert "iterations lost: unknown until the task prints one" in printed_words
    assert next(line for line in unknown if line.split()[:1] == [str(task)]).endswith("-")

    printed(d, task, 2, 1)
    printed(d, task, 3, 1)
    viewed_task, incident = viewed(d, task)
    assert (viewed_task["iterations_lost"], viewed_task["healed"]) == (379, 0)
    assert (incident["iterations_lost"], incident["outcome"]) == (379, "set back")
    known = history(d.log).incidents[incident["id"]]
    assert (known.incident.iterations_lost, known.outcome) == (379, "set back")
    lines = status(view(d.state), cluster="c", now_s=d.now_s)
    assert "379 iterations lost" in " ".join(" ".join(lines).split())
    assert lost_in_words(1) == "1 iteration lost"


def test_a_command_that_continues_has_lost_nothing(d: Driver, task: int) -> None:
    printed(d, task, 380)
    failed(d, task)
    printed(d, task, 381, 1)
    viewed_task, incident = viewed(d, task)
    assert (viewed_task["iterations_lost"], viewed_task["healed"]) == (0, 1)
    assert (incident["iterations_lost"], incident["outcome"]) == (0, "healed")


def test_iterations_repeated_after_a_move_are_lost(d: Driver, task: int) -> None:
    printed(d, task, 380, 0)
    node = task_of(d, task).ranks[0].slot.node
    new = d.tell("operator/drain", r.NodeDrained(node=node))
    while any(isinstance(one.body, o.StopRank | o.StartRank) for one in new):
        new = d.obey(new)
    assert view(d.state)["tasks"][0]["iterations_lost"] is None
    printed(d, task, 301, 1, rank=max(task_of(d, task).ranks))
    assert view(d.state)["tasks"][0]["iterations_lost"] == 80
    assert not d.state.incidents
