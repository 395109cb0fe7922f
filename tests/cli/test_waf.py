"""The demo's WAF over time from a log (tests/drivers/waf.py) agrees with the sums of the state."""

from __future__ import annotations

import math

import pytest
from decider import Driver, finish, spec
from unicron.events.records import decisions
from unicron.events.records import reports as r
from waf import waf


def earned(d: Driver, num_buckets: int = 10) -> float:
    told = waf(d.log, num_buckets)
    return math.fsum(told.achieved) * told.bucket_s


def train(d: Driver, task: int, num_seconds: int) -> None:
    """Train for `num_seconds` seconds, at the five iterations per second of `Driver.progress`."""
    for _ in range(num_seconds):
        d.now_s += 0.99
        d.progress(task, 5)


@pytest.mark.parametrize("num_buckets", [1, 7, 1000])
def test_buckets_add_up_to_the_states_sum(d: Driver, num_buckets) -> None:
    train(d, d.running(), 9)
    assert earned(d, num_buckets) == pytest.approx(math.fsum(d.state.earned.values()))
    assert earned(d, num_buckets) == pytest.approx(46e9)


def test_a_pause_lowers_the_waf_of_its_buckets(d: Driver, task: int) -> None:
    train(d, task, 10)
    d.now_s += 10
    train(d, task, 10)
    rates = waf(d.log, 30).achieved
    assert min(rates[:9]) > 4e9
    assert max(rates[11:19]) == 0
    assert min(rates[21:]) > 4e9


def test_repeated_iterations_earn_nothing(d: Driver, task: int) -> None:
    train(d, task, 4)
    before = earned(d)
    d.steps[task] = 0
    train(d, task, 4)
    assert earned(d) == pytest.approx(before)
    train(d, task, 1)
    assert earned(d) == pytest.approx(before + 4e9), "one of the five is a repetition"


def test_the_weight_counts_from_when_it_is_set(d: Driver, task: int) -> None:
    train(d, task, 5)
    before = earned(d)
    d.tell("operator/w", r.TaskWeightSet(task=task, weight=3.0))
    train(d, task, 5)
    assert earned(d) == pytest.approx(before + 3 * 25e9)
    assert earned(d) == pytest.approx(math.fsum(d.state.earned.values()))


def test_an_iteration_with_a_non_finite_loss_counts(d: Driver, task: int) -> None:
    train(d, task, 2)
    before = earned(d)
    members = d.state.tasks[task].members
    d.tell(
        d.source(members[0].node),
        r.LossNotFinite(
            task=task,
            generation=d.state.tasks[task].generation,
            iteration=d.steps[task],
            text="nan",
        ),
    )
    assert earned(d) == pytest.approx(before + 1e9)


def test_plans_are_steps_and_end_with_the_last_task(d: Driver) -> None:
    task = d.running(spec(throughput={1: 4.0, 2: 7.0, 4: 9.0}))
    train(d, task, 10)
    d.obey(d.tell("operator/drain", r.NodeDrained(node="n2")))
    train(d, task, 10)
    plans = [x.body.waf for x in d.log if isinstance(x.body, decisions.PlanChosen)]
    assert plans == [9.0, 7.0]
    told = waf(d.log, 20)
    assert told.origins == ("declared",)
    assert told.planned[1:9] == pytest.approx((9.0,) * 8)
    assert told.planned[11:] == pytest.approx((7.0,) * 9)
    finish(d, task)
    d.now_s += 20
    d.join("n3")
    assert waf(d.log, 40).planned[-10:] == pytest.approx((0.0,) * 10)


def test_an_empty_log_earns_nothing():
    told = waf((), 3)
    assert (told.achieved, told.planned, told.origins) == ((0, 0, 0), (0, 0, 0), ())
