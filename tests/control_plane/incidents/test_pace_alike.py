"""Who stands out: a rank that is slow as all the others are holds up nobody."""

from __future__ import annotations

import pytest
from decider import Driver, kinds, spec, task_of
from stragglers import known, paced
from unicron.control_plane.api.view import view


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_the_one_that_stands_out_is_slow(d: Driver, first: int) -> None:
    task = d.running(spec(slots={"sizes": [2]}))
    known(d, task)
    paced(d, task, first, 1.5, iteration_s=1.6)
    assert list(task_of(d, task).slow) == [first]
    assert view(d.state)["tasks"][0]["slower_alike"] == 1.0
    paced(d, task, 1 - first, 1.45, iteration_s=1.6)
    told = view(d.state)["tasks"][0]
    assert (told["slow"], told["state"], d.state.degraded) == ([], "running", {})
    assert told["slower_alike"] == pytest.approx(1.6 / 1.1)
    paced(d, task, first, 1.0, iteration_s=1.6)
    assert list(task_of(d, task).slow) == [1 - first]
    paced(d, task, 1 - first, 1.0, iteration_s=1.1)
    told = view(d.state)["tasks"][0]
    assert (told["slow"], told["slower_alike"], d.state.degraded) == ([], 1.0, {})


def test_what_the_others_are_slower_by_too_is_not_counted(d: Driver) -> None:
    """A busy machine: both work longer, one of them by half of that again."""
    task = d.running(spec(slots={"sizes": [2]}))
    known(d, task)
    paced(d, task, 0, 2.0, iteration_s=3.1)
    paced(d, task, 1, 3.0, iteration_s=3.1)
    (slow,) = task_of(d, task).slow.values()
    assert (slow.ratio, slow.holds_up) == (pytest.approx(3.0), pytest.approx(3.1 / 2.1))


def test_where_most_are_slow_alike_nobody_holds_up_anybody(d: Driver, task: int) -> None:
    known(d, task)
    for rank in (0, 1, 2):
        paced(d, task, rank, 1.4 + rank / 100, iteration_s=1.54)
    told = view(d.state)["tasks"][0]
    assert (told["slow"], told["slowdown"], d.state.degraded) == ([], 1.0, {})
    assert told["slower_alike"] == pytest.approx(1.4)
    paced(d, task, 0)
    paced(d, task, 1)
    told = view(d.state)["tasks"][0]
    assert [x["rank"] for x in told["slow"]] == [2]
    assert told["slower_alike"] == 1.0


def test_all_beyond_measure_alike_are_left_alone(d: Driver) -> None:
    task = d.running(spec(slots={"sizes": [2]}))
    known(d, task)
    assert kinds(paced(d, task, 1, 4.0, iteration_s=4.1)) == ["StragglerCostEstimated"]
    assert kinds(paced(d, task, 0, 4.0, iteration_s=4.1)) == []
    assert kinds(d.progress(task, times_s=[4.1])) == []
    assert not d.state.incidents
