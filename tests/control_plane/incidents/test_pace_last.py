"""Who is the last to arrive: others wait for that one, or for those that are last together."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, kinds, task_of, the
from stragglers import VICTIM, known, paced
from two_tasks import two_tasks
from unicron.control_plane.api.view import view
from unicron.control_plane.incidents.stragglers import LASTS_S
from unicron.events.records.decisions import StragglerCostEstimated


def slow_of(d: Driver, task: int) -> dict[int, float]:
    return {number: round(slow.holds_up, 3) for number, slow in task_of(d, task).slow.items()}


def test_who_is_slow_and_long_there_when_the_last_arrives_holds_up_nobody(
        d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, 0, 1.5, iteration_s=1.6)
    assert slow_of(d, task) == {0: pytest.approx(1.6 / 1.1, abs=1e-3)}
    assert kinds(paced(d, task, VICTIM, 1.2, iteration_s=1.6)) == []
    assert slow_of(d, task) == {0: pytest.approx(1.6 / 1.3, abs=1e-3)}, "beyond the next one"
    paced(d, task, 0, 1.0, iteration_s=1.3)
    assert list(slow_of(d, task)) == [VICTIM]


def test_two_that_are_last_together_hold_up_the_others_and_not_each_other(
        d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, 0, 1.5, iteration_s=1.6)
    second = the(StragglerCostEstimated, paced(d, task, VICTIM, 1.45, iteration_s=1.6))
    assert sorted(slow_of(d, task)) == [0, VICTIM]
    assert second.why == ("rank 2 of alpha (n2/0) holds up 2 others with rank 0, 1.39 x, its own "
                          "work 1.45 x")
    waf = view(d.state)["plan"]["waf"]
    assert second.cost_waf == pytest.approx(waf * (1 - 1 / second.ratios[0]))
    assert second.drain_waf < 0, "the other one stays"


@pytest.mark.parametrize("own_s", [0.060, 0.075])
def test_a_busy_machine_has_no_stragglers(d: Driver, task: int, own_s: float) -> None:
    """Waits for cores are no work: what is left grows a little, the iterations by half."""
    for rank in range(4):
        assert kinds(paced(d, task, rank, 0.060, normal_s=0.060, iteration_s=0.140)) == []
    for rank in range(4):
        busy_s = own_s * (1 + 0.01 * rank)
        assert kinds(paced(d, task, rank, busy_s, normal_s=0.060, iteration_s=0.220)) in (
            [], ["StragglerCostEstimated"])
    assert slow_of(d, task) == {}
    assert not d.state.degraded


def test_it_is_over_when_iterations_are_as_they_were(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, VICTIM, 1.5, iteration_s=1.6)
    assert slow_of(d, task)
    paced(d, task, VICTIM, 1.5, iteration_s=1.15)
    assert not slow_of(d, task)
    assert view(d.state)["tasks"][0]["state"] == "running"


def test_nobody_is_advised_to_drain_before_it_has_lasted() -> None:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    known(d, alpha)
    paced(d, alpha, VICTIM, 2.6, iteration_s=2.7)

    def told() -> dict[str, Any]:
        (node,) = [node for node in view(d.state)["nodes"] if node["degraded"]]
        found: dict[str, Any] = node["degraded"]
        return found

    assert told()["drain_share"] > d.state.policy.gain_min
    assert (told()["lasts"], told()["worth_draining"]) == (False, False)
    d.now_s += LASTS_S
    d.progress(alpha, times_s=[2.7])
    assert (told()["lasts"], told()["worth_draining"]) == (True, True)
