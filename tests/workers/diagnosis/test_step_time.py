"""Verdicts on iteration times: no alarm on healthy real jobs, and an alarm if a job slows down.

tests/data/iteration_times.jsonl is real: two Megatron logs of bigscience-workshop/bigscience
(Apache-2.0) and two shared-cluster jobs of alibaba/clusterdata (cluster-trace-gpu-v2020). Each line
names its source. The first value of each is its first iteration, which does not count.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.workers.diagnosis.step_time import (
    LENIENT_S,
    WARM_UP_NUM,
    WINDOW_NUM,
    WINDOW_NUM_MAX,
    Kind,
    Level,
    StepTimeMonitor,
    Window,
)

FILE = Path(__file__).parents[2] / "data" / "iteration_times.jsonl"
SERIES = {
    Path(line["source"]).stem: line["values"]
    for line in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
}
LONG, SHORT = "meg_ds_3d_gpt2_perf_n16-ds-off", "meg_gpt2_base_n16_dp1_tp4_pp16-1809577"
SHARED = ("job_1_norm", "job_2_norm")
HEALTHY_NUM = 100_000
times = st.floats(min_value=1e-6, max_value=1e6)


def verdict_after(monitor: StepTimeMonitor, in_s: float, kind: Kind = "usual") -> str:
    """The agent's verdict after `in_s` seconds without a progress mark."""
    return "stalled" if 0 < monitor.limit_s(kind) < in_s else "well"


def judged(monitor: StepTimeMonitor, value: float, kind: Kind = "usual") -> str:
    """Adds an iteration; whether it was above its limit, and else whether the job is degraded."""
    limit_s = monitor.limit_s(kind)
    monitor.add(value, kind=kind)
    if 0 < limit_s < value:
        return "slow"
    return "degraded" if monitor.own.is_degraded else "well"


def fed(values: list[float], monitor: StepTimeMonitor | None = None) -> Counter[str]:
    monitor = monitor or StepTimeMonitor()
    return Counter(judged(monitor, value) for value in values)


def drawn(values: list[float], num: int, block: int, seed: int) -> list[float]:
    """A bootstrap sample of `num` values, from random blocks of consecutive values."""
    chance, made = random.Random(seed), list[float]()
    while len(made) < num:
        at = chance.randrange(max(1, len(values) - block + 1))
        made += values[at : at + block]
    return made[:num]


@pytest.mark.parametrize("name", sorted(SERIES))
def test_each_real_series_is_healthy(name: str) -> None:
    assert set(fed(SERIES[name][1:])) == {"well"}
    first = StepTimeMonitor()
    assert judged(first, SERIES[name][0], "first") == "well"
    assert set(fed(SERIES[name][1:], first)) == {"well"}


@pytest.mark.parametrize("name", sorted(SERIES))
@pytest.mark.parametrize("block", [1, 10, 100, 1000])
def test_no_alarm_in_many_healthy_iterations(name: str, block: int) -> None:
    values = SERIES[name][1:]
    num = HEALTHY_NUM // 16  # 16 combinations of parameters: 100,000 iterations together
    monitor, lasting = StepTimeMonitor(), Counter[str]()
    for value in drawn(values, num, min(block, len(values)), seed=block):
        lasting[verdict_after(monitor, value)] += 1
        lasting[judged(monitor, value)] += 1
    assert set(lasting) == {"well"}


@pytest.mark.parametrize(
    ("name", "times_slower", "num_max"),
    [
        (LONG, 1.15, 16),
        (LONG, 1.3, 16),
        (SHORT, 1.15, 16),
        (SHORT, 1.3, 16),
        (SHORT, 2.9, 16),
        ("job_1_norm", 1.3, 90),
        ("job_1_norm", 2.0, 16),
        ("job_2_norm", 2.0, 16),
    ],
)
def test_a_lasting_slowdown_is_found(name: str, times_slower: float, num_max: int) -> None:
    values = SERIES[name][1:]
    monitor = StepTimeMonitor()
    assert set(fed(drawn(values, 800, 1, seed=1), monitor)) == {"well"}
    known = monitor.take_change()
    assert known is not None
    assert known.own_s == known.normal_s
    slower = [times_slower * value for value in drawn(values, num_max, 1, seed=2)]
    found = [judged(monitor, value) for value in slower]
    assert found[-1] == "degraded"
    change = monitor.take_change()
    assert change is not None
    assert change.normal_s == known.normal_s
    assert monitor.own.now == pytest.approx(times_slower * known.normal_s, rel=0.1)
    assert monitor.take_change() is None, "the change is reported once"
    assert set(fed(slower, monitor)) == {"degraded"}
    again = fed(drawn(values, 8 * num_max, 1, seed=3), monitor)
    assert again["well"] > 0
    change = monitor.take_change()
    assert change is not None
    assert not monitor.own.is_degraded


def test_a_return_to_normal_is_reported_within_a_window() -> None:
    monitor = StepTimeMonitor()
    for times in range(3):
        fed([1.0] * 400, monitor)
        monitor.take_change()
        num = 0
        while not monitor.own.is_degraded:
            monitor.add(1.3)
            num += 1
        assert num <= WINDOW_NUM << times
        assert monitor.take_change() is not None
        fed([1.0] * 2 * WINDOW_NUM, monitor)
        change = monitor.take_change()
        assert change is not None
        assert (change.own_s, monitor.own.is_degraded) == (1.0, False)


def test_a_normal_iteration_time_is_reported_despite_slower_own_work() -> None:
    monitor = StepTimeMonitor()
    fed_own(monitor, WINDOW_NUM, 1.0, 0.5)
    assert monitor.take_change() is not None
    fed_own(monitor, WINDOW_NUM, 1.4, 0.8)
    slow = monitor.take_change()
    assert slow is not None
    assert (slow.iteration_s, slow.own_s) == (1.4, 0.8)
    fed_own(monitor, WINDOW_NUM, 1.0, 0.8)
    change = monitor.take_change()
    assert change is not None, "the rank no longer delays the others"
    assert (change.iteration_s, change.own_s, change.normal_s) == (1.0, 0.8, 0.5)
    fed_own(monitor, 4 * WINDOW_NUM, 1.0, 0.8)
    assert monitor.take_change() is None, "the change is reported once"


def fed_own(monitor: StepTimeMonitor, num: int, iteration_s: float, own_s: float) -> None:
    for _ in range(num):
        monitor.add(iteration_s, own_s)


def test_a_short_slowdown_is_not_reported() -> None:
    values = SERIES[LONG][1:]
    monitor = StepTimeMonitor()
    for seed in range(40):
        assert set(fed(drawn(values, 40, 1, seed), monitor)) == {"well"}
        assert set(fed([1.5 * value for value in drawn(values, 8, 1, seed)], monitor)) == {"well"}
    assert monitor.take_change() is not None, "the first normal time is reported"
    assert monitor.take_change() is None


@pytest.mark.parametrize("name", sorted(SERIES))
def test_one_iteration_of_over_three_times_the_average_is_found(name: str) -> None:
    values = SERIES[name][1:]
    monitor = StepTimeMonitor()
    fed(values[:-1], monitor)
    three_s = 3.01 * monitor.average_s
    assert verdict_after(monitor, three_s) == "stalled"
    assert verdict_after(monitor, three_s, "first") == "well"
    assert judged(monitor, three_s, "first") == "well"
    assert judged(monitor, three_s) == "slow"
    assert judged(monitor, values[-1]) == "well"


def test_the_limit_before_and_after_the_warm_up() -> None:
    monitor = StepTimeMonitor()
    assert monitor.limit_s() == 0.0
    assert verdict_after(monitor, 1e9) == "well"
    monitor.add(5.0, kind="first")
    assert verdict_after(monitor, 1e9) == "well"
    for _ in range(WARM_UP_NUM - 1):
        monitor.add(1.0)
        assert monitor.limit_s() == LENIENT_S
    monitor.add(1.0)
    assert monitor.limit_s() == 3.0
    assert monitor.limit_s("first") == LENIENT_S
    assert StepTimeMonitor(before_s=20.0).limit_s() == 200.0, (
        "a lenient limit, from the previous generation"
    )


def test_the_cost_of_a_checkpoint_is_learnt() -> None:
    monitor = StepTimeMonitor()
    for _ in range(3):
        fed([1.0] * 9, monitor)
        monitor.add(5.0, kind="boundary")
    assert verdict_after(monitor, 6.0) == "stalled"
    assert verdict_after(monitor, 6.0, "boundary") == "well"
    assert verdict_after(monitor, 6.3, "boundary") == "stalled"
    assert monitor.average_s == 1.0


def test_recurring_long_iterations_become_normal() -> None:
    """Evaluations that the job does not mark: the first three are slow, the later ones are not."""
    monitor, values = StepTimeMonitor(), ([1.0] * 50 + [4.0]) * 20
    assert fed(values, monitor) == {"well": len(values) - 3, "slow": 3}
    assert verdict_after(monitor, 5.1) == "stalled"
    fed([1000.0] * 5, monitor)
    assert monitor.limit_s() <= 12.5, "repeated faults do not become normal"


@settings(max_examples=50, deadline=None)
@given(st.lists(times, max_size=300))
def test_any_times_are_accepted(values: list[float]) -> None:
    monitor = StepTimeMonitor()
    for value in values:
        monitor.add(value, value / 2)
        assert 0 < monitor.limit_s() < float("inf")
        assert monitor.own.normal <= max(values)
    assert (monitor.take_change() is not None) == (len(values) >= WINDOW_NUM)


@settings(max_examples=50, deadline=None)
@given(
    st.floats(min_value=0.001, max_value=1000),
    st.integers(0, 2**32),
    st.floats(min_value=0.0, max_value=0.2),
)
def test_uniform_noise_is_no_slowdown(level: float, seed: int, spread: float) -> None:
    chance = random.Random(seed)
    values = [level * (1 + chance.uniform(-spread, spread)) for _ in range(1500)]
    assert set(fed(values)) == {"well"}


@settings(max_examples=25, deadline=None)
@given(
    st.floats(min_value=0.001, max_value=1000),
    st.floats(min_value=1.11, max_value=2.9),
    st.integers(0, 2**32),
)
def test_a_slowdown_of_a_steady_job_is_found_within_a_window(
    level: float, slower: float, seed: int
) -> None:
    chance, level_now = random.Random(seed), Level()
    for _ in range(100):
        level_now.add(level * chance.uniform(0.999, 1.001))
    assert any(level_now.add(level * slower) for _ in range(WINDOW_NUM))
    assert level_now.is_degraded


@given(st.lists(times, min_size=1, max_size=60), st.integers(1, 20))
def test_a_window_contains_the_last_values_sorted(values: list[float], num: int) -> None:
    window = Window(num)
    for value in values:
        window.add(value)
    last = sorted(values[-num:])
    assert len(window) == len(last)
    assert window.quantile(0.5) == last[len(last) // 2]
    assert [window.largest(nth) for nth in range(1, len(last) + 1)] == last[::-1]
    assert window.largest(len(last) + 1) == 0.0


def test_memory_is_bounded() -> None:
    chance, monitor = random.Random(4), StepTimeMonitor()
    values = iter(lambda: chance.lognormvariate(0, 1), None)

    def held() -> int:
        own = monitor.own
        kept = (monitor._times._sorted, own._recent, own._reference._sorted)
        return sum(map(sys.getsizeof, kept))

    fed(list(islice(values, 4 * WINDOW_NUM_MAX)), monitor)
    before = held()
    fed(list(islice(values, 20 * WINDOW_NUM_MAX)), monitor)
    assert held() <= 2 * before
