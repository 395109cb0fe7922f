"""Which tasks a record affects, and the fields of the state that this rests on.

That no decision is missed is shown by every seeded simulation: its witness looks at all tasks
before each report (simulated_witness.py), and counts every redundant field anew.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from decider import Driver, drain, failed, only, spec
from scenarios import EXAMPLE
from unicron.cli.simulate import compare as command
from unicron.control_plane.decide import transition
from unicron.control_plane.decide.decide import affected_tasks
from unicron.control_plane.fold.check import check
from unicron.control_plane.fold.fold import HANDLERS
from unicron.control_plane.simulation.policies.policy import Policy
from unicron.control_plane.simulation.run import Run, RunInput
from unicron.control_plane.state.cluster import ClusterState
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records import types as t
from unicron.events.records.codec import UnknownBody
from unicron.events.records.envelope import KINDS, Record

PAPER_NUM = 20
"""On paper the state is looked at after so many records."""


def affected(d: Driver, records: list[Record]) -> list[int]:
    """By the last report of these, in the state after them."""
    told = [record for record in records if record.is_report][-1]
    return [task.id for task in affected_tasks(d.state, told)]


def two_tasks() -> tuple[Driver, int, int]:
    d = Driver(nodes=2, slots=3)
    return d, d.running(spec(slots={"min": 1, "max": 4})), d.running(
        spec(name="beta", slots={"min": 1, "max": 2}))


def test_every_kind_of_record_has_a_handler() -> None:
    assert set(HANDLERS) == {*KINDS.values(), UnknownBody}


def test_what_a_task_tells_affects_that_task() -> None:
    d, alpha, beta = two_tasks()
    assert affected(d, failed(d, beta, min(d.state.tasks[beta].ranks))[:1]) == [beta]
    assert affected(d, drain(d, "n2")) == []  # the plan that follows looks at all
    assert affected(d, d.tell("operator/x", r.HealingFrozen(reason="a test"))) == [alpha, beta]


def test_progress_affects_a_task_only_where_something_is_wrong_with_it() -> None:
    d, alpha, _ = two_tasks()
    assert affected(d, d.progress(alpha)) == []
    d.state.tasks[alpha].incident = 1
    assert [task.id for task in affected_tasks(d.state, d.log[-1])] == [alpha]


def test_an_answer_affects_its_task_when_no_other_is_outstanding() -> None:
    """Of the members that leave a generation and come up in the next one, the last alone."""
    d = Driver()
    task = d.running()
    lost = d.exit(task, 2)
    for kind in (o.Quiesce, o.Reconfigure):
        [order] = only(kind, lost)
        ranks = (order.body.ranks if kind is o.Quiesce
                 else [member.rank for member in order.body.members])
        assert d.state.tasks[task].num_outstanding == len(ranks) == 3
        for left, rank in reversed(list(enumerate(reversed(ranks)))):
            lost = d.quiesced(task, rank) if kind is o.Quiesce else d.reconfigured(
                order.body, rank)
            if left:
                assert d.state.tasks[task].num_outstanding == left
                assert affected(d, lost) == []
                assert len(lost) == 1
        assert len(lost) > 1, "the last one's next order"


def test_processes_that_start_are_waited_for_alike() -> None:
    d = Driver()
    task = d.submit(spec())
    starts = only(o.StartRank, d.log)
    assert d.state.tasks[task].num_outstanding == len(starts) == 4
    for left, start in reversed(list(enumerate(reversed(starts)))):
        told = d.do(start.body)
        assert d.state.tasks[task].num_outstanding == (left or 4), "then of its generation"
        assert bool(only(o.Reconfigure, told)) == (not left)


def test_one_that_is_told_to_stop_is_waited_for_no_more() -> None:
    d = Driver()
    task = d.submit(spec())
    d.tell("operator/c", r.TaskCancelRequested(task=task, reason=""))
    assert d.state.tasks[task].num_outstanding == 0


def test_no_task_is_passed_over_on_paper_either() -> None:
    """Two weeks under each policy: after a report nothing more follows for any task."""
    for stage in command.load(EXAMPLE)[1].values():
        assert played(stage.run_input, stage.policy) > 10 * PAPER_NUM


def played(ground: RunInput, policy: Policy) -> int:
    """One policy's life, watched; the number of its records."""
    log: list[Record] = []

    def keep(record: Record) -> None:
        log.append(record)
        if len(log) % PAPER_NUM == 0:
            state = run.engine.state
            assert check(state) == []
            for task in state.tasks.values():
                assert next(transition.next_decisions(state, task), None) is None, record

    run = Run(ground, policy, keep)
    run.play()
    return len(log)


# --- fields that repeat others -------------------------------------------------------------------
def _outstanding(state: ClusterState) -> None:
    next(iter(state.tasks.values())).num_outstanding += 1


def _running(state: ClusterState) -> None:
    state.num_running -= 1


def _silent(state: ClusterState) -> None:
    state.unreachable = ["n1"]


def _ailing(state: ClusterState) -> None:
    state.undecided = ["n2"]


def _occupant(state: ClusterState) -> None:
    del state.nodes["n1"].occupants[0]


def _ghost(state: ClusterState) -> None:
    del next(iter(state.tasks.values())).ranks[0]


def _incident(state: ClusterState) -> None:
    next(iter(state.tasks.values())).incident = 99


def _two_on_a_slot(state: ClusterState) -> None:
    task = next(iter(state.tasks.values()))
    task.target = (*task.target, t.Seat(9, task.target[0].slot))


def _deadline(state: ClusterState) -> None:
    state.deadlines["quiesce/77/1"] = state.deadlines.get("x") or next(
        iter(state.deadlines.values()))


@pytest.mark.parametrize(("breaks", "says"), [
    (_outstanding, "num_outstanding is"), (_running, "num_running is"), (_silent, "unreachable is"),
    (_ailing, "undecided is"), (_occupant, "runs on"), (_ghost, "that its task does not have"),
    (_incident, "is of another task"), (_two_on_a_slot, "two ranks have one slot"),
    (_deadline, "has no task")])
def test_the_check_finds(breaks: Callable[[ClusterState], None], says: str) -> None:
    d = Driver()
    task = d.submit(spec())
    assert d.state.tasks[task].ranks
    assert d.state.deadlines
    assert check(d.state) == []
    breaks(d.state)
    assert says in "; ".join(check(d.state))
