"""What is foreseen is what would be planned: every event, its optimum, its plan, what it beat."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from next_event_inputs import holds, inputs
from planner_cases import case
from unicron.control_plane.planner import next_event, planner
from unicron.control_plane.planner.next_event import Event, foresee
from unicron.control_plane.planner.problem import PlanInput, Wish
from unicron.control_plane.planner.solver import knapsack
from unicron.control_plane.throughput.transition_cost import Transition


@given(inputs())
@settings(max_examples=400, deadline=None)
def test_every_plan_looked_up_is_the_plan_made_on_demand(given_: tuple[PlanInput, int]) -> None:
    holds(*given_)


@given(inputs())
@settings(max_examples=300, deadline=None)
def test_so_it_is_where_plans_are_no_longer_small(given_: tuple[PlanInput, int]) -> None:
    """The end of a task is then solved with its worth known, from tables of all others."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(knapsack, "PLAIN_NUM_MAX", -1)
        holds(*given_)


@given(inputs())
@settings(max_examples=100, deadline=None)
def test_so_it_is_where_too_many_wait_for_a_table_of_them(given_: tuple[PlanInput, int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(next_event, "REST_NUM_MAX", 0)
        holds(*given_)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.005]))
@settings(max_examples=10, deadline=None)
def test_so_it_is_with_clusters_as_they_are(seed: int, gain_min: float) -> None:
    holds(case(12, 256, seed, gain_min=gain_min), 8)


def test_the_table_has_every_event_once() -> None:
    asked = case(12, 256, 1)
    table = foresee(asked, 8)
    running = [wish.task for wish in asked.wishes if wish.now]
    assert len(running) < 12, "who waits can lose nothing"
    assert set(table.outlooks) == {
        *(Event(what="gpu lost", task=task) for task in running),
        *(Event(what="node lost", task=task) for task in running),
        *(Event(what="task ended", task=wish.task) for wish in asked.wishes),
        Event(what="node joined")}


def test_what_is_no_single_event_is_not_looked_up() -> None:
    asked = case(12, 256, 1)
    asked = replace(asked, wishes=tuple(replace(wish, hurt=False) for wish in asked.wishes))
    table, first, second = foresee(asked, 8), *[wish for wish in asked.wishes if wish.now][:2]
    hurt = {wish.task: replace(wish, hurt=True) for wish in (first, second)}

    def wishes(*tasks: int) -> tuple[Wish, ...]:
        return tuple(hurt[wish.task] if wish.task in tasks else wish for wish in asked.wishes)

    one = replace(asked, num_slots=248, wishes=wishes(first.task))
    assert table.known(one) is not None
    for other in (asked, replace(one, num_slots=247), replace(one, num_slots=240),
                  replace(one, wishes=wishes(first.task, second.task)),
                  replace(one, gain_min=0.1), replace(one, mtbf_gpu_s=1.0),
                  replace(asked, num_slots=248), replace(one, wishes=one.wishes[1:]),
                  replace(one, wishes=(replace(first, hurt=True, wafs=first.wafs[::-1]),
                                       *one.wishes[1:])),
                  replace(asked, wishes=(*asked.wishes, replace(first, task=99)))):
        assert table.known(other) is None


def test_who_ends_and_would_have_been_stopped_takes_its_cost_along() -> None:
    """Beside a healthy task that would grow for a little, which gain_min does not let it."""
    each, none = Transition.alike(0.0), Transition.alike(1.0)
    grows = Wish(task=1, name="a", now=2, hurt=False, transition=each, sizes=(2, 3),
                 wafs=(10.0, 10.01))
    stops = Wish(task=2, name="b", now=1, hurt=True, transition=replace(none, same_s=1e6),
                 sizes=(1,), wafs=(1.0,))
    asked = PlanInput(wishes=(grows, stops), num_slots=3, mtbf_gpu_s=300.0, gain_min=0.3)
    plan = foresee(asked, 1).outlooks[Event(what="task ended", task=2)].plan
    assert plan[0] == (2,)
    holds(asked, 1)


def test_what_is_the_same_is_held_once() -> None:
    """A cluster with much to spare: whoever loses a GPU gets it back."""
    asked = replace(case(12, 256, 1), num_slots=10_000)
    now = planner.choose(asked).plan.slots
    asked = replace(asked, wishes=tuple(replace(wish, now=slots, hurt=False)
                                        for wish, slots in zip(asked.wishes, now, strict=True)))
    table = foresee(asked, 8)
    lost = [outlook for event, outlook in table.outlooks.items() if event.what == "gpu lost"]
    assert len(lost) == 12
    assert len({id(outlook.plan[0]) for outlook in lost}) == 1
    assert table.num_bytes < 12 * 12 * 12 * 8
    assert next_event.Foreseen(asked=asked, gpus_per_node=8, outlooks={}).num_bytes == 0
