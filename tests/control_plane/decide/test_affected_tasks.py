"""Which tasks a record affects, and the redundant fields of the state that decide this.

Seeded simulations check that no decision is missed: tests/simulated/witness.py checks all tasks
before each report and recomputes every redundant field.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from decider import Driver, drain, failed, only, spec
from scenarios import EXAMPLE
from state_check import check
from unicron.cli.simulate import compare as command
from unicron.control_plane.decide import transition
from unicron.control_plane.decide.decide import affected_tasks
from unicron.control_plane.fold.fold import HANDLERS
from unicron.control_plane.simulation.policies.policy import Policy
from unicron.control_plane.simulation.run import Run, RunInput
from unicron.control_plane.state.cluster import ClusterState
from unicron.control_plane.state.task import Task
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records import types as t
from unicron.events.records.codec import UnknownBody
from unicron.events.records.envelope import KINDS, Record

CHECK_NUM = 20
"""Number of records between two checks of a simulation's state."""


def affected(d: Driver, records: list[Record]) -> list[int]:
    """The tasks that the last report of these records affects, in the state after all of them."""
    report = [record for record in records if not record.cause][-1]
    return [task.id for task in affected_tasks(d.state, report)]


def two_tasks() -> tuple[Driver, int, int]:
    d = Driver(nodes=2, slots=3)
    return (
        d,
        d.running(spec(slots={"min": 1, "max": 4})),
        d.running(spec(name="beta", slots={"min": 1, "max": 2})),
    )


def test_every_kind_of_record_has_a_handler() -> None:
    assert set(HANDLERS) == {*KINDS.values(), UnknownBody}


def test_a_report_affects_its_task() -> None:
    d, alpha, beta = two_tasks()
    assert affected(d, failed(d, beta, min(d.state.tasks[beta].ranks))[:1]) == [beta]
    assert affected(d, drain(d, "n2")) == []  # the new plan covers all tasks
    assert affected(d, d.tell("operator/x", r.HealingFrozen(reason="a test"))) == [alpha, beta]


def test_progress_affects_a_task_only_in_an_incident() -> None:
    d, alpha, _ = two_tasks()
    assert affected(d, d.progress(alpha)) == []
    d.state.tasks[alpha].incident = 1
    assert [task.id for task in affected_tasks(d.state, d.log[-1])] == [alpha]


def test_only_the_last_outstanding_answer_affects_a_task(d: Driver, task: int) -> None:
    lost = d.exit(task, 2)
    for kind in (o.Quiesce, o.Reconfigure):
        [order] = only(kind, lost)
        ranks = (
            order.body.ranks
            if kind is o.Quiesce
            else [member.rank for member in order.body.members]
        )
        assert d.state.tasks[task].num_outstanding == len(ranks) == 3
        for left, rank in reversed(list(enumerate(reversed(ranks)))):
            lost = d.quiesced(task, rank) if kind is o.Quiesce else d.reconfigured(order.body, rank)
            if left:
                assert d.state.tasks[task].num_outstanding == left
                assert affected(d, lost) == []
                assert len(lost) == 1
        assert len(lost) > 1, "the last answer leads to the next order"


def test_one_more_failed_collective_of_members_that_leave_affects_no_task(
    d: Driver, task: int
) -> None:
    d.exit(task, 2)
    ranks = [rank for rank in d.state.tasks[task].ranks if rank != 2]
    for rank in ranks[:-1]:
        told = failed(d, task, rank)
        assert affected(d, told[:1]) == affected(d, told) == []
    assert only(o.Reconfigure, failed(d, task, ranks[-1]))


def test_a_failed_collective_beside_a_silent_node_affects_its_task(d: Driver, task: int) -> None:
    d.exit(task, 2)
    told = failed(d, task, next(rank for rank in d.state.tasks[task].ranks if rank != 2))
    d.state.unreachable.append("n1")
    assert affected(d, told[:1]) == [task]


def test_starting_processes_are_outstanding_too(d: Driver) -> None:
    task = d.submit(spec())
    starts = only(o.StartRank, d.log)
    assert d.state.tasks[task].num_outstanding == len(starts) == 4
    for left, start in reversed(list(enumerate(reversed(starts)))):
        records = d.do(start.body)
        assert d.state.tasks[task].num_outstanding == (left or 4), "now those of its generation"
        assert bool(only(o.Reconfigure, records)) == (not left)


def test_a_process_with_an_order_to_stop_is_not_outstanding(d: Driver) -> None:
    task = d.submit(spec())
    d.tell("operator/c", r.TaskCancelRequested(task=task, reason=""))
    assert d.state.tasks[task].num_outstanding == 0


def test_no_task_is_missed_in_simulations() -> None:
    for stage in command.load(EXAMPLE)[1].values():
        assert simulate(stage.run_input, stage.policy) > 10 * CHECK_NUM


def simulate(run_input: RunInput, policy: Policy) -> int:
    """Simulate one policy and check the state on the way. Returns the number of records."""
    log: list[Record] = []

    def keep(record: Record) -> None:
        log.append(record)
        if len(log) % CHECK_NUM == 0:
            state = run.engine.state
            assert check(state) == []
            for task in state.tasks.values():
                assert next(transition.next_decisions(state, task), None) is None, record

    run = Run(run_input, policy, keep)
    run.play()
    return len(log)


# --- redundant fields ----------------------------------------------------------------------------
def first(state: ClusterState) -> Task:
    return next(iter(state.tasks.values()))


def on_one_slot(state: ClusterState) -> None:
    target = first(state).target
    first(state).target = (*target, t.Seat(9, target[0].slot))


@pytest.mark.parametrize(
    ("breaks", "text"),
    [
        (lambda state: setattr(first(state), "num_outstanding", 77), "num_outstanding is"),
        (lambda state: setattr(state, "num_running", 77), "num_running is"),
        (lambda state: setattr(state, "unreachable", ["n1"]), "unreachable is"),
        (lambda state: setattr(state, "undecided", ["n2"]), "undecided is"),
        (lambda state: state.nodes["n1"].occupants.pop(0), "runs on"),
        (lambda state: first(state).ranks.pop(0), "that its task does not have"),
        (lambda state: setattr(first(state), "incident", 99), "is of another task"),
        (on_one_slot, "two ranks have one slot"),
        (
            lambda state: state.deadlines.update(
                {"quiesce/77/1": next(iter(state.deadlines.values()))}
            ),
            "has no task",
        ),
    ],
)
def test_check_finds_errors(d: Driver, breaks: Callable[[ClusterState], object], text: str) -> None:
    task = d.submit(spec())
    assert d.state.tasks[task].ranks
    assert d.state.deadlines
    assert check(d.state) == []
    breaks(d.state)
    assert text in "; ".join(check(d.state))
