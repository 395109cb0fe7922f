"""The plan that is known by a bound alone is the plan that is searched for, to the last slot."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from unicron.control_plane.planner import planner, steady
from unicron.control_plane.planner.problem import PlanInput
from wished import asking, rising, wish


@st.composite
def inputs(draw: st.DrawFn) -> PlanInput:
    tables = [rising(draw) for _ in range(draw(st.integers(0, 5)))]
    wishes = [wish(number + 1, draw(st.sampled_from([0, *table, 3])), table,
                   hurt=draw(st.booleans()), transition_s=draw(st.sampled_from([0.0, 10.0, 1e6])))
              for number, table in enumerate(tables)]
    return asking(wishes, draw(st.integers(0, 14)),
                  gain_min=draw(st.sampled_from([0.0, 0.005, 0.5])))


@settings(deadline=None, max_examples=1500)
@given(inputs())
@example(asking([], 4))
@example(asking([wish(1, 2, {1: 1.0, 2: 1.0}, hurt=True)], 2))
@example(asking([wish(1, 1, {1: 1e-300, 2: 5e300})], 2))
def test_what_is_sure_is_what_is_found(asked: PlanInput) -> None:
    found = planner.choose(asked)
    assert planner.planned(asked) == found.plan


def test_most_faults_of_a_large_cluster_are_sure() -> None:
    """A node of each task in turn, where tasks earn by size as most do: the bound is enough."""
    tables = [{size: (1 + number % 3) * size ** 0.95 for size in range(2, 32)}
              for number in range(60)]
    asked = asking([wish(number + 1, 0, table) for number, table in enumerate(tables)], 1500,
                   gain_min=0.005)
    best = planner.choose(asked).plan.slots
    wishes = [replace(one, now=x) for one, x in zip(asked.wishes, best, strict=True)]
    num_sure = 0
    for i, one in enumerate(wishes):
        then = replace(asked, num_slots=sum(best) - 1, wishes=(
            *wishes[:i], replace(one, hurt=True), *wishes[i + 1:]))
        rows, earned = planner.all_rows(then)
        found = steady.surely(then.wishes, rows, earned, then.num_slots, then.gain_min)
        if found is not None:
            num_sure += 1
            assert found[0] == planner.choose(then).plan.slots
    assert num_sure > 50
