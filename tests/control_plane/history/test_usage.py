"""Figures of slot time: they add up over any split of the log, and each loss has its cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise

import pytest
import structlog
from decider import Driver, finish, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.seeds import quiet, simulate
from simulated.world import World
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.history.history import history, usage
from unicron.control_plane.history.usage import CAUSES, USES, Usage
from unicron.control_plane.state.cluster import ClusterState, decode_state, encode_state
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

DAY_S = 86_400.0
SEEDS = (4, 5, 6, 11, 12)
"""Simulated clusters that lose slot time to every cause."""


@cache
def log_of(seed: int) -> tuple[Record, ...]:
    quiet()
    try:
        return tuple(simulate(partial(World, seed))[1])
    finally:
        structlog.reset_defaults()


def counted(records: Sequence[Record]) -> Usage:
    return usage(records, ClusterState())


def figures(found: Usage) -> dict[tuple[int, str], float]:
    return {
        (day, what): value
        for day, one in found.days.items()
        for what, value in one.items()
        if value
    }


def total(found: Usage) -> Counter[str]:
    """The sums; slot time in slot seconds."""
    sums = Counter[str]()
    for (_, what), value in figures(found).items():
        sums[what] += value / 1e6 if what in (*USES, "observed") else value
    return sums


def split(records: Sequence[Record], begins: Sequence[int]) -> Usage:
    """The sum over stretches, each read from a copy of the state at its beginning."""
    state, found = ClusterState(), Usage()
    for first, last in pairwise([0, *begins, len(records)]):
        found.add(usage(records[first:last], decode_state(encode_state(state))))
        for record in records[first:last]:
            fold(state, record)
    return found


def assert_equal(parts: Usage, whole: Usage) -> None:
    found, wanted = figures(parts), figures(whole)
    exact = {
        key: value for key, value in wanted.items() if key[1] not in ("earned", "planned", "ideal")
    }
    assert {key: found.get(key) for key in exact} == exact
    assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    "seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.thorough) for seed in SEEDS[1:])]
)
def test_a_stretch_for_each_report_adds_up_to_the_whole(seed: int) -> None:
    records = log_of(seed)
    begins = [at for at, one in enumerate(records) if at and not one.cause]
    assert_equal(split(records, begins), counted(records))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_split_adds_up_to_the_whole(data: st.DataObject) -> None:
    records = log_of(data.draw(st.sampled_from(SEEDS)))
    begins = [at for at, one in enumerate(records) if at and not one.cause]
    chosen = data.draw(st.sets(st.sampled_from(begins), max_size=12))
    assert_equal(split(records, sorted(chosen)), counted(records))


def test_simulated_clusters_lose_to_every_cause_and_never_less_than_nothing() -> None:
    seen = Counter[str]()
    for seed in SEEDS:
        found = counted(log_of(seed))
        assert min(figures(found).values()) > 0
        seen += total(found)
    assert all(seen[cause] > 0 for cause in CAUSES)


def test_all_slot_time_is_of_one_use() -> None:
    d = Driver(nodes=2, slots=2)
    joined_s = d.now_s
    d.running()
    d.now_s += 100.0
    d.submit(spec(name="beta", slots={"min": 4, "max": 4}))
    found = total(counted(d.log))
    before_s = 2 * 0.01  # the second node joined later
    assert sum(found[use] for use in USES) == pytest.approx(
        4 * (d.now_s - joined_s) + before_s, abs=1e-3
    )


def test_a_rebuild_is_what_the_incident_cost() -> None:
    d = Driver()
    task = d.running()
    d.now_s += 50.0
    d.progress(task)
    d.now_s += 0.05
    records = d.exit(task, 1)
    d.now_s += 7.0
    d.obey(records)
    d.progress(task)
    d.now_s += 5.0
    d.progress(task)
    found = counted(d.log)
    (incident,) = history(d.log).incidents.values()
    assert total(found)["rebuild"] == pytest.approx(incident.slot_s)
    assert incident.slot_s > 4 * 7.0
    assert figures(found)[0, "incident SEV2 exited abnormally"] == 1
    assert total(found)["faults"] == 1


def test_a_frozen_cluster_waits_for_a_decision() -> None:
    d = Driver()
    task = d.running()
    d.tell("operator/x", r.HealingFrozen(reason="look"))
    d.exit(task, 1)
    d.now_s += 30.0
    d.progress(task)
    assert total(counted(d.log))["decision"] == pytest.approx(4 * 30.0, abs=0.1)


def test_a_drained_node_is_unavailable_and_slots_too_few_for_a_task_wait() -> None:
    d = Driver(nodes=2, slots=2)
    d.tell("operator/a", r.NodeDrained(node="n2", reason=""))
    d.now_s += 10.0
    d.submit(spec(slots={"min": 4, "max": 4}))
    d.now_s += 20.0
    d.tell("operator/b", r.NodeUndrained(node="n2", reason=""))
    found = total(counted(d.log))
    assert found["unavailable"] == pytest.approx(2 * 30.0, abs=0.1)
    assert found["idle"] == pytest.approx(2 * 10.0, abs=0.1)
    assert found["waiting"] == pytest.approx(2 * 20.0, abs=0.1)


def test_time_is_counted_on_the_day_in_which_it_passes() -> None:
    d = Driver(now_s=2 * DAY_S - 100.0)
    task = d.running()
    for _ in range(3):
        d.now_s += 100.0
        d.progress(task)
    d.now_s += DAY_S
    d.obey(d.exit(task, 0))
    days = counted(d.log).days
    used_s = {day: one.get("used", 0) / 1e6 for day, one in days.items()}
    assert used_s[1] == pytest.approx(4 * 100.0, abs=1.0)
    assert used_s[2] == pytest.approx(4 * DAY_S)
    assert [days[day].get("records", 0) > 0 for day in (1, 2, 3)] == [True] * 3


def test_a_command_without_a_model_is_planned_to_earn_nothing() -> None:
    d = Driver()
    task = d.submit(spec(train=None, command=["sleep", "9"], slots={"min": 1, "max": 1}))
    d.now_s += 100.0
    d.tell("operator/x", r.HealingFrozen(reason="later"))
    assert d.state.plan is not None
    assert d.state.plan.waf > 0
    found = total(counted(d.log))
    assert (found["planned"], found["earned"]) == (0, 0)
    assert found["ideal"] > 0
    assert task in d.state.tasks


def test_a_task_that_has_ended_uses_nothing() -> None:
    d = Driver()
    task = d.running(
        spec(train={"iterations": 2, "output": "/tmp/out", "batch": {"global": 24, "micro": 2}})
    )
    d.progress(task)
    d.obey(finish(d, task))
    assert d.state.tasks[task].outcome == "finished"
    before = total(counted(d.log))["used"]
    d.now_s += 1000.0
    d.tell("operator/x", r.HealingFrozen(reason="later"))
    found = total(counted(d.log))
    assert found["used"] == before
    assert found["idle"] >= 4 * 1000.0
