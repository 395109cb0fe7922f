"""Recovering incidents: a crash loop is one incident, and is not told as healed."""

from __future__ import annotations

import pytest
from decider import Driver, finish, kinds, only, spec, task_of, the
from failing import fail, obey
from two_tasks import facts, seen
from unicron.cli.screens import cluster
from unicron.cli.screens.incident import page
from unicron.control_plane.api import needs
from unicron.control_plane.history.history import history
from unicron.control_plane.history.usage import num_stepping
from unicron.events.records import decisions
from unicron.events.records import reports as r
from unicron.events.records.statuses import ECC_ERRORS
from unicron.events.spec.policy import Policy


def outcomes(d: Driver) -> list[str]:
    return [one.body.outcome for one in only(decisions.IncidentClosed, d.log)]


def test_an_incident_closes_as_healed_when_the_fault_has_stayed_away(d: Driver, task: int) -> None:
    d.obey(d.exit(task, 2))
    recovers = the(decisions.IncidentRecovering, d.progress(task))
    assert recovers.until_iteration == task_of(d, task).max_iteration - 1 + 10
    assert (task_of(d, task).incident, num_stepping(d.state, task_of(d, task))) == (0, 4)
    assert kinds(d.progress(task, 8)) == []
    closed = the(decisions.IncidentClosed, d.progress(task))
    assert (closed.outcome, closed.pause_s) == ("healed", recovers.pause_s)
    assert closed.why == "10 iterations beyond the fault"


def test_the_same_fault_again_is_the_same_incident_with_a_count(d: Driver, task: int) -> None:
    for _ in range(3):
        d.obey(d.exit(task, 2))
        d.progress(task, 3)
    assert len(only(decisions.IncidentOpened, d.log)) == 1
    assert outcomes(d) == []
    (incident,) = d.state.incidents.values()
    assert incident.num_times == d.state.num_faults == 3
    pauses_s = [one.body.pause_s for one in only(decisions.IncidentRecovering, d.log)]
    assert pauses_s == sorted(pauses_s), "they add up"
    d.progress(task, 10)
    assert outcomes(d) == ["healed"]


def test_another_fault_is_another_incident_and_both_close(d: Driver, task: int) -> None:
    d.obey(d.exit(task, 2))
    d.progress(task, 3)
    d.obey(d.exit(task, 0))
    assert len(task_of(d, task).recovering) == 1
    assert task_of(d, task).incident
    d.progress(task, 7)
    assert outcomes(d) == ["healed"]
    d.progress(task, 3)
    assert outcomes(d) == ["healed", "healed"]
    assert [one.num_times for one in d.state.incidents.values()] == [1, 1]


def test_the_same_error_of_another_node_is_another_incident(d: Driver, task: int) -> None:
    for name in ("n1", "n2"):
        rank = next(x for x in task_of(d, task).ranks.values() if x.slot.node == name)
        obey(d, fail(d, task, [rank], ECC_ERRORS))
        d.progress(task)
    assert len(d.state.incidents) > 1
    assert all(one.num_times == 1 for one in d.state.incidents.values())


def test_a_command_that_prints_nothing_is_healed_after_a_time(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["sleep", "9"], slots={"min": 1, "max": 1}))
    d.obey(d.log[-8:])
    for num in range(1, 4):
        d.obey(d.exit(task, 0, code=1))
        (number,) = task_of(d, task).recovering
        assert d.state.incidents[number].num_times == num
        d.now_s += 40.0
    assert outcomes(d) == [], "a crash loop is not healed"
    closed = the(decisions.IncidentClosed, d.due(f"recovering/{task}/{number}"))
    assert closed.outcome == "healed"
    assert closed.why == "the fault has not come back for 900 s (passing_s_max)"


def test_a_task_that_trains_to_its_end_is_healed(d: Driver, task: int) -> None:
    d.progress(task, 45)
    d.obey(d.exit(task, 2))
    d.progress(task, 2)
    d.steps[task] = 50
    d.obey(finish(d, task))
    assert outcomes(d) == ["healed"]


def test_with_one_iteration_to_prove_it_the_first_step_closes(d: Driver, task: int) -> None:
    d.tell("leader/abc", r.PolicySet(policy=Policy(restart_iterations=1)))
    d.obey(d.exit(task, 2))
    assert kinds(d.progress(task)) == ["IncidentClosed"]


def test_lost_slot_time_is_that_of_the_pauses_alone(d: Driver, task: int) -> None:
    for _ in range(2):
        d.obey(d.exit(task, 2))
        d.progress(task)
        d.now_s += 100.0
        d.progress(task, 3)
    it = history(d.log)
    (one,) = it.incidents.values()
    assert one.outcome == "recovering"
    assert one.pause_s is not None
    assert it.slot_s(one, d.now_s + 50.0) == pytest.approx(4 * one.pause_s, rel=0.2)
    assert one.pause_s < 5.0


def test_the_screens_tell_a_recovering_incident(d: Driver, task: int) -> None:
    d.obey(d.exit(task, 2))
    d.progress(task)
    words = " ".join(" ".join(cluster.status(seen(d), cluster="c", now_s=d.now_s)).split())
    assert "RECOVERING inc-" in words
    assert "until iteration 11" in words
    late = needs.needs(seen(d), d.now_s + 600.0)
    assert [one.what for one in late if one.what == "incident"] == [], "it needs nobody"
    assert "recovers   it trains again, and is healed at iteration 11" in "\n".join(
        page(facts(d.log))
    )
    d.obey(d.exit(task, 2))
    d.progress(task)
    words = " ".join(" ".join(cluster.status(seen(d), cluster="c", now_s=d.now_s)).split())
    assert ", 2 times" in words
    assert "again      its fault came 2 times" in "\n".join(page(facts(d.log)))
    late = needs.needs(seen(d), d.now_s + 600.0)
    (need,) = [one for one in late if one.what == "incident"]
    assert need.why.endswith("its fault came 2 times"), "a crash loop needs a person"
