"""One iteration that does not end, though its rank passes marks: it is told by name, and ended."""

from __future__ import annotations

import pytest
from decider import Driver, kinds, only, task_of, the
from hangs import VICTIM, deadline, stalled, went_on
from slow_iterations import OTHERS, crawls, waited_for
from unicron.control_plane.api.view import view
from unicron.control_plane.incidents.hangs import locate_hang
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r


def test_it_is_told_by_name_before_anything_is_done(d: Driver, task: int) -> None:
    waited_for(d, task)
    assert locate_hang(d.state, task_of(d, task)) is None, "nobody has said why"
    assert kinds(crawls(d, task, VICTIM, 1.6)) == []
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert (hang.kind, hang.ranks, hang.is_actionable) == ("slow", (VICTIM,), False)
    why = ("rank 2 on n2 works on and on in iteration 1, for 1.6 s, usual is 0.4 s; "
           "3 others wait")
    assert hang.why == why
    assert view(d.state)["tasks"][0]["stands"] == why
    assert deadline(d, task) not in d.state.deadlines


@pytest.mark.parametrize("last", ["slow", "waits"])
def test_beyond_ten_times_it_starts_again_and_the_others_finish(
        d: Driver, task: int, last: str) -> None:
    waits = waited_for(d, task) if last == "slow" else []
    crawls(d, task, VICTIM, 1.6)
    slow = crawls(d, task, VICTIM, 6.4)[0].seq
    waits = waits or waited_for(d, task)
    due = d.state.deadlines[deadline(d, task)]
    assert due.length_s == pytest.approx(0.5, abs=0.01), "one more iteration, should it end"
    late = d.due(deadline(d, task))
    opened = the(decisions.IncidentOpened, late)
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "task hang", (VICTIM,))
    assert opened.evidence == (*sorted((*waits, slow)), late[0].seq)
    assert the(o.StopRank, late).rank == VICTIM
    d.obey(late)
    closed = the(decisions.IncidentClosed, d.progress(task))
    assert (closed.outcome, closed.iterations_lost) == ("healed", 0)
    assert not task_of(d, task).slow_iterations


def test_thin_evidence_does_nothing(d: Driver, task: int) -> None:
    crawls(d, task, VICTIM, 50.0)
    for rank in OTHERS[:2]:
        stalled(d, task, rank)
    assert locate_hang(d.state, task_of(d, task)) is None, "one may still go on"
    stalled(d, task, 3, "own", collective=0)
    assert locate_hang(d.state, task_of(d, task)) is None, "another stands, and does not wait"
    stalled(d, task, 3, iteration=2)
    assert locate_hang(d.state, task_of(d, task)) is None, "it waits in another iteration"
    stalled(d, task, 3)
    assert locate_hang(d.state, task_of(d, task)) is not None
    went_on(d, task, 0)
    assert locate_hang(d.state, task_of(d, task)) is None
    assert not [name for name in d.state.deadlines if name.startswith("hang")]
    d.progress(task)
    assert not only(decisions.IncidentOpened, d.log)


def test_where_most_work_on_nobody_is_to_blame(d: Driver, task: int) -> None:
    for rank in (1, 2, 3):
        crawls(d, task, rank, 50.0)
    stalled(d, task, 0)
    assert locate_hang(d.state, task_of(d, task)) is None


def test_who_came_to_the_collective_since_is_not_to_blame(d: Driver, task: int) -> None:
    """It was slow; then the network hung."""
    waited_for(d, task)
    crawls(d, task, VICTIM, 6.4)
    stalled(d, task, VICTIM)
    assert not task_of(d, task).slow_iterations
    hang = locate_hang(d.state, task_of(d, task))
    assert hang is not None
    assert hang.kind == "network"


def test_what_is_stale_is_nothing(d: Driver, task: int) -> None:
    d.progress(task, 5)
    for wrong in ({"attempt": 7}, {"generation": 9}, {"task": 99}, {"rank": 8}, {"iteration": 3},
                  {"own_s": -1.0}, {"num_iterations": 10}):
        crawls(d, task, VICTIM, 50.0, **({"iteration": 6} | wrong))
    assert not task_of(d, task).slow_iterations
    crawls(d, task, VICTIM, 50.0, iteration=6)
    assert list(task_of(d, task).slow_iterations) == [VICTIM]
    d.progress(task, 3)
    assert not task_of(d, task).slow_iterations, "the iteration is done"


def test_held_it_is_told_alone_and_forgiven_when_it_ends(d: Driver, task: int) -> None:
    d.tell("operator/freeze", r.HealingFrozen(reason="a test"))
    waited_for(d, task)
    crawls(d, task, VICTIM, 6.4)
    assert kinds(d.due(deadline(d, task))) == ["IncidentOpened", "OrderSuppressed"]
    for rank in OTHERS:
        went_on(d, task, rank)
    d.progress(task, 2)
    d.tell("operator/unfreeze", r.HealingResumed())
    assert not only(o.StopRank, d.log)


def test_one_that_does_so_again_and_again_loses_its_slot(d: Driver, task: int) -> None:
    for _ in range(d.state.policy.restarts_max + 1):
        waited_for(d, task)
        crawls(d, task, VICTIM, 6.4)
        d.obey(d.due(deadline(d, task)))
    assert only(decisions.IncidentEscalated, d.log)[-1].body.severity == "SEV1"
    assert [node.slots_disabled for node in d.state.nodes.values()] == [[], [0]]
