"""Drawn traces: reproducible by seed, with the requested rates, causes and repair times.

Bounds are five standard deviations wide, and the seeds are fixed.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from unicron.cli.files.job_file import read_yaml
from unicron.cli.simulate import compare
from unicron.control_plane.incidents.severity import TABLE
from unicron.control_plane.simulation import scenario
from unicron.control_plane.simulation.run import Run
from unicron.control_plane.simulation.trace import generator, trace_file
from unicron.control_plane.simulation.trace.external_event import ExternalEvent
from unicron.control_plane.simulation.trace.generator import (
    DAY_S,
    HOUR_S,
    OFFENDERS,
    STUDIES,
    Bursts,
    Drawn,
    Lognormal,
    Repair,
    draw,
)
from unicron.events.errors import SpecError

NODES = [f"n{number}" for number in range(64)]
YEAR_S = 365 * DAY_S
NONE = Repair(constant_s=0.0)
STUDY_OF = {"Unicron (Alibaba, 1 month trace)": "unicron", "Llama-3 405B": "llama3",
            "ByteRobust (ByteDance)": "byterobust", "Acme (Shanghai AI Lab Seren+Kalos)": "acme"}


def faults(drawn: Drawn, nodes: list[str] | None = None, horizon_s: float = YEAR_S
           ) -> list[ExternalEvent]:
    return [one for one in draw(drawn, nodes or NODES, 8, horizon_s) if one.event == "fault"]


def is_near(found: float, mean: float, deviation: float) -> bool:
    return abs(found - mean) <= 5 * deviation


# --- the same by seed ---------------------------------------------------------------------------
EVERY_OPTION = Drawn(seed=7, mtbf_gpu_h=7200.0, causes="llama3", repair="superbench",
                  repeat="superbench", bursts=Bursts(every_h=200.0, sizes={2: 3.0, 6: 1.0}))


def test_the_same_seed_draws_the_same_bytes_everywhere() -> None:
    """The digest is of one machine; other mathematics libraries must give the same digest."""
    text = "\n".join(trace_file.written(draw(EVERY_OPTION, NODES, 8, YEAR_S)))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "1306d3c99d70c81f"
    counted = replace(EVERY_OPTION, mtbf_gpu_h=None, count={"SEV1": 50, "other": 70})
    text = "\n".join(trace_file.written(draw(counted, NODES, 8, YEAR_S)))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "d59ea0835c3f63dd"


def test_another_seed_draws_another_trace() -> None:
    assert faults(EVERY_OPTION) != faults(replace(EVERY_OPTION, seed=8))


def test_other_causes_or_repairs_keep_the_fault_times() -> None:
    plain = Drawn(mtbf_gpu_h=7200.0, repair=NONE, causes={"task hang": 1.0})
    times = [(one.at_s, one.node) for one in faults(plain)]
    assert [(one.at_s, one.node) for one in faults(replace(plain, causes="acme"))] == times
    away = faults(replace(plain, causes="acme", repair=Repair(constant_s=10 * DAY_S)))
    assert frozenset((one.at_s, one.node) for one in away) < frozenset(times)
    assert frozenset(away) < frozenset(faults(replace(plain, causes="acme")))
    more = faults(replace(plain, bursts=Bursts(count=3, sizes={2: 1})))
    assert frozenset(times) < frozenset((one.at_s, one.node) for one in more)


def test_a_larger_cluster_keeps_the_faults_of_its_first_nodes() -> None:
    drawn = Drawn(mtbf_node_h=500.0)
    small, large = faults(drawn, NODES[:8]), faults(drawn, NODES)
    assert [one for one in large if one.node in NODES[:8]] == small


# --- how many, and of what kind ------------------------------------------------------------------
@pytest.mark.parametrize("rate", [
    {"mtbf_gpu_h": 7200.0}, {"mtbf_node_h": 900.0}])
def test_faults_are_poisson_at_the_requested_rate(rate: dict[str, float]) -> None:
    found = faults(Drawn(**rate, repair=NONE))
    mean = len(NODES) * YEAR_S / (900.0 * HOUR_S)
    assert is_near(len(found), mean, math.sqrt(mean))
    gaps_s = [after.at_s - before.at_s for before, after in pairwise(found)]
    mean_s = math.fsum(gaps_s) / len(gaps_s)
    longer = sum(gap_s > mean_s for gap_s in gaps_s) / len(gaps_s)
    assert is_near(longer, math.exp(-1), math.sqrt(0.25 / len(gaps_s)))  # exponential gaps
    by_node = Counter(one.node for one in found)
    assert all(is_near(by_node[node], mean / 64, math.sqrt(mean / 64)) for node in NODES)


@pytest.mark.parametrize("study", STUDIES)
def test_causes_have_their_shares(study: str) -> None:
    found = Counter(one.cause for one in faults(Drawn(count=20_000, causes=study, repair=NONE)))
    whole = math.fsum(STUDIES[study].values())
    assert frozenset(found) <= frozenset(STUDIES[study])
    for cause, share in STUDIES[study].items():
        mean = 20_000 * share / whole
        assert is_near(found[cause], mean, math.sqrt(mean))


def test_a_count_is_exact() -> None:
    """Trace-a of the paper: 10 SEV1 and 33 other faults in 8 weeks, repaired after 1 to 7 days."""
    drawn = Drawn(count={"SEV1": 10, "other": 33}, repair=Repair(uniform_s=(DAY_S, 7 * DAY_S)))
    found = draw(drawn, NODES[:16], 8, 56 * DAY_S)
    kinds = Counter(TABLE[one.cause] for one in found if one.event == "fault")
    assert kinds["SEV1"] == 10
    assert sum(kinds.values()) == 43
    assert len(faults(Drawn(count=43), NODES[:16], 56 * DAY_S)) == 43
    assert faults(Drawn(count=0)) == []
    with pytest.raises(SpecError, match="all nodes are away"):
        draw(Drawn(count=9, causes={"ECC errors": 1}, repair=Repair(constant_s=1e9)),
             NODES[:8], 8, YEAR_S)


def test_bursts_hit_neighbours_at_the_same_time() -> None:
    sizes = {1: 39.0, 2: 13.0, 3: 15.0, 4: 7.0, 5: 1.0, 6: 4.0}
    found = faults(Drawn(bursts=Bursts(every_h=10.0, sizes=sizes), repair=NONE))
    at_once: dict[float, list[int]] = defaultdict(list)
    for one in found:
        assert one.cause == "lost connection"
        at_once[one.at_s].append(int(one.node[1:]))
    mean = YEAR_S / (10 * HOUR_S)
    assert is_near(len(at_once), mean, math.sqrt(mean))
    for numbers in at_once.values():
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    num = Counter(map(len, at_once.values()))
    for size, weight in sizes.items():
        share = weight / 79
        assert is_near(num[size], len(at_once) * share, math.sqrt(len(at_once) * share))


def test_repeat_offenders_fail_sooner_each_time() -> None:
    nodes = [f"n{number}" for number in range(400)]
    found = faults(Drawn(mtbf_node_h=719.4, repeat="superbench", repair=NONE), nodes, 10 * YEAR_S)
    at_s: dict[str, list[float]] = defaultdict(lambda: [0.0])
    for one in found:
        at_s[one.node].append(one.at_s)
    for number, mean_h in ((1, 719.4), (20, 151.7), (40, 151.7)):
        gaps_h = [(times[number] - times[number - 1]) / HOUR_S for times in at_s.values()]
        assert is_near(math.fsum(gaps_h) / len(gaps_h), mean_h, mean_h / math.sqrt(len(gaps_h)))
    again = Counter(one.node for one in faults(Drawn(count=500, repeat="superbench", repair=NONE)))
    once = Counter(one.node for one in faults(Drawn(count=500, repair=NONE)))
    assert max(again.values()) > max(once.values())
    assert OFFENDERS["superbench"].shrunk(0) == 1.0


# --- repairs ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("repair", "median_s", "mean_s"), [
    (generator.REPAIRS["lanl"], 54 * 60.0, 355 * 60.0),
    (Repair(constant_s=60.0), 60.0, 60.0),
    (Repair(uniform_s=(10.0, 20.0)), 15.0, 15.0),
    (Repair(exponential_s=100.0), 100 * math.log(2), 100.0),
    (Repair(lognormal_s=Lognormal(median=5.0, mean=5.0)), 5.0, 5.0)])
def test_repair_times_have_the_requested_mean(repair: Repair, median_s: float, mean_s: float
                                             ) -> None:
    num = 1_000_000
    assert repair.at_s(0.5) == pytest.approx(median_s)
    found_s = math.fsum(repair.at_s((step + 0.5) / num) for step in range(num)) / num
    assert found_s == pytest.approx(mean_s, rel=0.02)
    assert repair.at_s(0.0) >= 0
    assert repair.at_s(1 - 2.0**-53) < math.inf


def test_superbench_repairs_have_the_published_shares() -> None:
    repair = generator.REPAIRS["superbench"]
    assert repair.at_s(0.6189) < DAY_S <= repair.at_s(0.6191)
    assert repair.at_s(0.8969) < 14 * DAY_S <= repair.at_s(0.8971)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 99), st.sampled_from([
    {"mtbf_node_h": 800.0}, {"count": 60}, {"count": {"SEV1": 5, "SEV3": 20}}, {}]),
    st.sampled_from(["lanl", "superbench", NONE]), st.sampled_from([*STUDIES]),
    st.sampled_from([None, "superbench"]), st.booleans())
def test_only_present_nodes_have_faults_and_all_return(
        seed: int, rate: dict[str, Any], repair: str | Repair, causes: str, repeat: str | None,
        bursts: bool) -> None:
    horizon_s = 20 * DAY_S
    drawn = Drawn(seed=seed, **rate, repair=repair, causes=causes, repeat=repeat,
                  bursts=Bursts(every_h=40.0, sizes={1: 1, 3: 1}) if bursts or not rate else None)
    nodes = [f"n{number}" for number in range(200)]  # more than can be away at the same time
    found = draw(drawn, nodes, 8, horizon_s)
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    away: dict[str, bool] = {}
    for one in found:
        assert 0 <= one.at_s <= horizon_s
        assert one.node in nodes
        assert away.get(one.node, False) == (one.event == "repaired")
        if one.event == "repaired" or TABLE[one.cause] == "SEV1":
            away[one.node] = one.event == "fault"
    assert draw(drawn, nodes, 8, horizon_s) == found


def test_a_simulated_cluster_ignores_no_drawn_event() -> None:
    given = scenario.parse(read_yaml("""
        apiVersion: unicron/v1
        name: drawn
        cluster: {nodes: 12, slots: 1}
        tasks: [{name: one, slots: {min: 1, max: 12}, throughput: {1: 1.0e15, 12: 1.2e16}}]
        policies: {unicron: {}, megatron: {}}
        trace: {drawn: {mtbf_node_h: 300, causes: llama3, repair: {exponential_s: 7200}}}
        horizon_s: 2.0e+6
        """))
    assert not isinstance(given.trace, str)
    happenings = draw(given.trace.drawn, given.cluster.names, 1, given.horizon_s)
    assert sum(one.event == "fault" for one in happenings) > 10
    for name in given.policies:
        chosen = scenario.policy(given, name)
        assert Run(scenario.run_input(given, chosen, happenings), chosen).play().ignored == 0


def test_the_printed_trace_is_the_simulated_one(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "deploy" / "scenarios" / "disasters"
    name = path / "opt-2021-11-17-forty-restarts.yaml"
    compare.print_trace(name)
    printed = trace_file.read(capsys.readouterr().out, "printed")
    assert printed == compare.read(name)[1]
    assert sum(one.event == "fault" for one in printed) == 40


def test_studies_equal_the_data_file() -> None:
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    text = (Path(__file__).parents[2] / "data" / "failure_categories.csv").read_text(
        encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        if row["unicron_status"] in TABLE:
            found[STUDY_OF[row["study"]]][row["unicron_status"]] += float(
                row["count"] or row["share_pct"])
    assert found == STUDIES
