"""The plan table of next events: each possible event once, with the plan for it."""

from __future__ import annotations

from hypothesis import given, settings
from msgspec.structs import replace
from next_event_inputs import inputs
from planner_cases import case
from unicron.control_plane.planner import planner
from unicron.control_plane.planner.next_event import Event, plan_next_events, problem_after
from unicron.control_plane.planner.problem import PlanProblem


@given(inputs())
@settings(max_examples=100, deadline=None)
def test_each_plan_of_the_table_equals_a_new_plan(case_: tuple[PlanProblem, int]) -> None:
    problem, gpus_per_node = case_
    table = plan_next_events(problem, gpus_per_node)
    assert table.num_left == 0
    for event, plan in table.plans.items():
        assert plan == planner.choose_plan(problem_after(problem, event, gpus_per_node)).plan, event


def test_the_table_has_every_event_once() -> None:
    problem = case(12, 256, 1)
    table = plan_next_events(problem, 8)
    running = [demand.task for demand in problem.demands if demand.now]
    assert len(running) < 12, "some tasks must wait"
    assert set(table.plans) == {
        *(Event(what="gpu lost", task=task) for task in running),
        *(Event(what="node lost", task=task) for task in running),
        *(Event(what="task ended", task=demand.task) for demand in problem.demands),
        Event(what="node joined")}


def test_the_problem_after_each_kind_of_event() -> None:
    problem = case(12, 256, 1)
    task = next(demand.task for demand in problem.demands if demand.now and not demand.faulted)
    for what, num in (("gpu lost", 255), ("node lost", 248)):
        then = problem_after(problem, Event(what=what, task=task), 8)
        assert then.num_slots == num
        assert [new.task for new, old in zip(then.demands, problem.demands, strict=True)
                if new != old and new == replace(old, faulted=True)] == [task]
    ended = problem_after(problem, Event(what="task ended", task=task), 8)
    assert ended == replace(problem, demands=tuple(x for x in problem.demands if x.task != task))
    assert problem_after(problem, Event(what="node joined"), 8) == replace(problem, num_slots=264)


def test_events_beyond_the_time_limit_are_left_out_and_counted() -> None:
    problem, late = case(12, 256, 1), iter([False, False, True])
    every, table = plan_next_events(problem, 8), plan_next_events(problem, 8, lambda: next(late))
    assert list(table.plans.items()) == list(every.plans.items())[:2]
    assert table.num_left == len(every.plans) - 2
    assert 0 < table.num_bytes < every.num_bytes
