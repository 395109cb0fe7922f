"""Calibration: measured iteration times correct the model, and noise moves no task."""

from __future__ import annotations

import random

import pytest
from decider import Driver, finish, kinds, spec, task_of, the
from unicron.control_plane.api.view import view
from unicron.control_plane.throughput import calibration
from unicron.control_plane.throughput import table as throughput
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.spec import policy

pytestmark = pytest.mark.nodes(3)


def rates(d: Driver, task: int) -> dict[int, float]:
    table = task_of(d, task).throughput
    assert table is not None
    return dict(zip(table.sizes, table.rates_flops, strict=True))


def set_calibration(d: Driver, num: int) -> None:
    d.tell(f"leader/{d.state.nonce}", r.PolicySet(policy=policy.Policy(calibrate_iterations=num)))


def test_enough_undisturbed_iterations_are_a_measurement(d: Driver, task: int) -> None:
    assert kinds(d.progress(task, times_s=[9.0, *[0.25] * 19])) == []
    new = d.progress(task, times_s=[0.25])
    assert kinds(new) == ["ThroughputSet", "PlanChosen"]
    table = the(decisions.ThroughputSet, new)
    assert (table.origin, table.sizes) == ("measured", (1, 2, 3, 4))
    assert table.rates_flops == (1e9, 2e9, 3e9, 4e9), "the modelled shape for 12 micro-batches"
    assert the(decisions.PlanChosen, new).waf == the(decisions.PlanChosen, new).ideal_waf == 4e9
    assert view(d.state)["tasks"][0]["throughput"]["origin"] == "measured"
    assert kinds(d.progress(task, times_s=[0.26] * 40)) == [], "4 % is below the threshold"
    assert kinds(d.progress(task, times_s=[0.5] * 9)) == [], "the median ignores nine outliers"
    slower = d.progress(task, times_s=[0.5] * 2)
    assert the(decisions.ThroughputSet, slower).rates_flops[3] == 2e9


def test_iterations_during_an_incident_do_not_count(d: Driver, task: int) -> None:
    d.progress(task, times_s=[0.2] * 11)
    assert len(task_of(d, task).times_s[4]) == 10
    d.obey(d.exit(task, 2))
    assert len(task_of(d, task).members) == 4
    d.progress(task, times_s=[7.0, 0.3, 0.2])  # these close the incident
    assert len(task_of(d, task).times_s[4]) == 10
    d.progress(task, times_s=[0.2])
    assert task_of(d, task).times_s == {4: [*[0.2] * 10, 0.2]}
    late = d.exit(task, 2)
    d.progress(task, times_s=[0.2])  # reported while the survivors quiesce
    assert len(task_of(d, task).times_s[4]) == 11
    d.obey(late)


def test_a_temporary_size_does_not_count(d: Driver, task: int) -> None:
    """On two cores three ranks may be faster than four. The lost rank still restarts."""
    d.progress(task, times_s=[0.25] * 21)
    lost = d.exit(task, 2)
    d.obey(lost, start=False)
    assert len(task_of(d, task).members) == 3
    assert kinds(d.progress(task, times_s=[0.1] * 40)) == []
    assert set(rates(d, task)) == {1, 2, 3, 4}
    assert rates(d, task)[3] == 3e9
    d.obey([x for x in lost if isinstance(x.body, o.StartRank)])
    d.progress(task)
    assert len(task_of(d, task).members) == 4


def test_measured_sizes_keep_their_rates(d: Driver, task: int) -> None:
    d.progress(task, times_s=[0.25] * 21)
    for node in ("n2", "n3"):
        d.obey(d.tell(f"operator/{node}", r.NodeDrained(node=node)))
    assert len(task_of(d, task).members) == 2
    d.progress(task, times_s=[0.25] * 22)
    assert rates(d, task) == {1: 2e9, 2: 4e9, 3: 4e9, 4: 4e9}, "3 slots have the rate of 4"
    assert d.state.slot_flops == 2e9, "from the smallest measured size"


def test_a_declared_table_is_never_overridden(d: Driver) -> None:
    task = d.running(spec(throughput={2: 2e9, 4: 3e9}))
    assert kinds(d.progress(task, times_s=[0.7] * 100)) == []
    assert task_of(d, task).times_s == {}


def test_calibration_can_be_off(d: Driver) -> None:
    set_calibration(d, 0)
    task = d.running()
    assert kinds(d.progress(task, times_s=[0.7] * 100)) == []
    table = task_of(d, task).throughput
    assert table is not None
    assert table.origin == "modelled"


def test_the_first_measured_task_sets_the_scale_for_all(d: Driver) -> None:
    small = {"min": 1, "max": 2}
    alpha = d.running(spec(slots=small))
    beta = d.running(spec(name="beta", slots=small))
    other = d.submit(spec(name="gamma", train=None, command=["true"], slots=small))
    d.obey(d.log[-4:])
    first = d.progress(alpha, times_s=[0.25] * 21)
    assert kinds(first) == ["ThroughputSet"] * 3 + ["PlanChosen"]
    assert the(decisions.PlanChosen, first).trigger == "throughput of alpha measured"
    assert rates(d, alpha) == rates(d, beta) == rates(d, other) == {1: 2e9, 2: 4e9}
    assert kinds(d.progress(beta, times_s=[0.26] * 21)) == [], "4 % is below the threshold"
    second = d.progress(beta, times_s=[0.5] * 21)
    assert kinds(second) == ["ThroughputSet", "PlanChosen"]
    assert rates(d, beta) == {1: 1e9, 2: 2e9}
    assert rates(d, other) == {1: 2e9, 2: 4e9}, "alpha sets the scale until it ends"
    d.submit(spec(name="delta"))
    delta = d.state.tasks[max(d.state.tasks)]
    assert rates(d, delta.id)[4] == 8e9
    d.obey(finish(d, alpha))
    d.progress(beta)


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_no_task(d: Driver, seed: int) -> None:
    """Two equal tasks with random noise. beta could grow by the slots that alpha would give."""
    rng = random.Random(seed)
    noise = [[rng.uniform(0.95, 1.05) for _ in range(300)] for _ in range(2)]
    both = [
        d.running(spec(slots={"min": 1, "max": 3})),
        d.running(spec(name="beta", slots={"min": 1, "max": 6})),
    ]
    assert [len(task_of(d, task).members) for task in both] == [3, 3]
    start = len(d.log)
    for at in range(0, 300, 5):
        for task, times_s in zip(both, noise, strict=True):
            d.progress(task, times_s=[0.3 * x for x in times_s[at : at + 5]])
    decided = kinds(d.log[start:])
    assert "TaskPlaced" not in decided
    assert decided.count("ThroughputSet") == 2, "alpha's table, and beta's at alpha's scale"


def num_tables(d: Driver, task: int, times_s: list[float]) -> int:
    start = len(d.log)
    for at in range(0, len(times_s), 5):
        d.progress(task, times_s=times_s[at : at + 5])
    return kinds(d.log[start:]).count("ThroughputSet")


@pytest.mark.parametrize("seed", range(5))
def test_a_busy_machine_does_not_refill_the_log(d: Driver, seed: int) -> None:
    """Iterations of 0.2 s that take up to twice as long: 3 minutes of them."""
    rng, task = random.Random(seed), d.running()
    assert num_tables(d, task, [0.2 * rng.lognormvariate(0.0, 0.3) for _ in range(900)]) <= 3


def test_a_machine_that_is_busy_at_times_sets_its_noise_once(d: Driver) -> None:
    task = d.running()
    assert num_tables(d, task, ([0.2] * 40 + [0.27] * 40) * 10) <= 3


def test_a_lasting_change_is_told_within_a_window(d: Driver) -> None:
    rng, task = random.Random(1), d.running()
    d.progress(task, times_s=[0.2 * rng.lognormvariate(0.0, 0.3) for _ in range(200)])
    was = rates(d, task)[4]
    d.progress(task, times_s=[0.6 * rng.lognormvariate(0.0, 0.3) for _ in range(25)])
    assert rates(d, task)[4] < 0.5 * was


def test_a_lasting_change_leaves_no_noise_behind(d: Driver) -> None:
    task = d.running()
    d.progress(task, times_s=[0.2] * 30)
    d.progress(task, times_s=[0.4] * 11)
    assert rates(d, task)[4] == 2.5e9
    d.progress(task, times_s=[0.3] * 30)
    assert rates(d, task)[4] == pytest.approx(1e9 / 0.3)


def test_a_task_faster_than_modelled_gets_more_slots(d: Driver) -> None:
    alpha = d.running(spec(slots={"min": 1, "max": 4}))
    beta = d.running(spec(name="beta", slots={"min": 1, "max": 4}))
    assert [len(task_of(d, task).target) for task in (alpha, beta)] == [4, 2]
    d.progress(alpha, times_s=[0.25] * 21)
    assert rates(d, beta) == rates(d, alpha)
    new = d.progress(beta, times_s=[0.1] * 21)
    assert kinds(new)[:3] == ["ThroughputSet", "PlanChosen", "TaskPlaced"]
    assert [len(task_of(d, task).target) for task in (alpha, beta)] == [2, 4]
    d.obey(new)
    for task in (alpha, beta):
        d.progress(task)
    assert d.state.incidents == {}


def test_the_number_of_stored_times_is_limited(d: Driver) -> None:
    set_calibration(d, 10_000)
    task = d.running(spec(slots={"min": 1, "max": 6}))
    d.progress(task, times_s=[0.25] * 400)
    assert len(task_of(d, task).times_s[6]) == calibration.NUM_TIMES_MAX
    table = task_of(d, task).throughput
    assert table is not None
    assert table.origin == "measured"


def test_an_ended_task_has_no_times(d: Driver, task: int) -> None:
    d.progress(task, times_s=[0.25] * 9)
    d.obey(d.tell("operator/cancel", r.TaskCancelRequested(task=task)))
    assert (task_of(d, task).outcome, task_of(d, task).times_s) == ("cancelled", {})


def test_other_sizes_scale_from_the_nearest_measured_one() -> None:
    table = throughput.table_through(1, "measured", spec(), {2: 10.0, 4: 12.0})
    assert table.rates_flops == (5.0, 10.0, 12.0, 12.0)
