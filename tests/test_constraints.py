"""What operators and users bind a plan by: each constraint holds, and the plan is the best of all
that keep it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from heart_driver import Driver, at_rest, spec, task_of
from unicron.events import reports as r


@pytest.fixture
def d() -> Iterator[Driver]:
    made = Driver(nodes=3)
    yield made
    at_rest(made)


# --- which sizes --------------------------------------------------------------------------------
@pytest.mark.parametrize(("slots", "begins", "shrinks"), [
    ({"sizes": [1, 6]}, 6, 1), ({"multiple_of": 2, "max": 6}, 6, 4), ({"max": 6}, 6, 5)])
def test_a_plan_gives_what_the_spec_allows(d: Driver, slots: object, begins: int,
                                           shrinks: int) -> None:
    table = {x: 1e12 * x for x in range(1, 7)}
    task = d.running(spec(slots=slots, throughput=table))
    assert len(task_of(d, task).target) == begins
    lost = d.tell("n3/1", r.RankErrored(
        task=task, rank=task_of(d, task).target[-1].rank, attempt=1, generation=1, error="ECC",
        text="uncorrectable", iteration=0))
    d.obey(lost)
    assert len(task_of(d, task).target) == shrinks
    d.progress(task)
