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

import pytest
import trace_csv
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from unicron.cli.files.job_file import read_yaml
from unicron.control_plane.incidents.severity import TABLE
from unicron.control_plane.simulation import scenario
from unicron.control_plane.simulation.run import Run
from unicron.control_plane.simulation.trace import generator, trace_file
from unicron.control_plane.simulation.trace.external_event import ExternalEvent
from unicron.control_plane.simulation.trace.generator import (
    DAY_S,
    HOUR_S,
    STUDIES,
    Drawn,
    Lognormal,
    Repair,
    draw,
)

NODES = [f"n{number}" for number in range(64)]
YEAR_S = 365 * DAY_S
NONE = Repair(constant_s=0.0)
STUDY_OF = {
    "Unicron (Alibaba, 1 month trace)": "unicron",
    "Llama-3 405B": "llama3",
    "ByteRobust (ByteDance)": "byterobust",
    "Acme (Shanghai AI Lab Seren+Kalos)": "acme",
}


def faults(
    drawn: Drawn, nodes: list[str] | None = None, horizon_s: float = YEAR_S
) -> list[ExternalEvent]:
    return [one for one in draw(drawn, nodes or NODES, 8, horizon_s) if one.event == "fault"]


def is_near(found: float, mean: float, deviation: float) -> bool:
    return abs(found - mean) <= 5 * deviation


# --- the same by seed ---------------------------------------------------------------------------
EVERY_OPTION = Drawn(seed=7, mtbf_gpu_h=7200.0, causes="llama3", repair="superbench")


def test_the_same_seed_draws_the_same_bytes_everywhere() -> None:
    """The digest is of one machine; other mathematics libraries must give the same digest."""
    text = "\n".join(trace_csv.written(draw(EVERY_OPTION, NODES, 8, YEAR_S)))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "8c9ba99b4cdf1a56"


def test_another_seed_draws_another_trace() -> None:
    assert faults(EVERY_OPTION) != faults(replace(EVERY_OPTION, seed=8))


def test_other_causes_or_repairs_keep_the_fault_times() -> None:
    plain = Drawn(mtbf_gpu_h=7200.0, repair=NONE, causes={"task hang": 1.0})
    times = [(one.at_s, one.node) for one in faults(plain)]
    assert [(one.at_s, one.node) for one in faults(replace(plain, causes="acme"))] == times
    away = faults(replace(plain, causes="acme", repair=Repair(constant_s=10 * DAY_S)))
    assert frozenset((one.at_s, one.node) for one in away) < frozenset(times)
    assert frozenset(away) < frozenset(faults(replace(plain, causes="acme")))


def test_a_larger_cluster_keeps_the_faults_of_its_first_nodes() -> None:
    drawn = Drawn(mtbf_node_h=500.0)
    small, large = faults(drawn, NODES[:8]), faults(drawn, NODES)
    assert [one for one in large if one.node in NODES[:8]] == small


# --- how many, and of what kind ------------------------------------------------------------------
@pytest.mark.parametrize("rate", [{"mtbf_gpu_h": 7200.0}, {"mtbf_node_h": 900.0}])
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
    found = Counter(one.cause for one in faults(Drawn(mtbf_node_h=28.0, causes=study, repair=NONE)))
    num, whole = sum(found.values()), math.fsum(STUDIES[study].values())
    assert num > 19_000
    assert frozenset(found) <= frozenset(STUDIES[study])
    for cause, share in STUDIES[study].items():
        mean = num * share / whole
        assert is_near(found[cause], mean, math.sqrt(mean))


# --- repairs ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("repair", "median_s", "mean_s"),
    [
        (generator.REPAIRS["lanl"], 54 * 60.0, 355 * 60.0),
        (Repair(constant_s=60.0), 60.0, 60.0),
        (Repair(parts_s=((1.0, 10.0, 20.0),)), 15.0, 15.0),
        (Repair(lognormal_s=Lognormal(median=5.0, mean=5.0)), 5.0, 5.0),
    ],
)
def test_repair_times_have_the_requested_mean(
    repair: Repair, median_s: float, mean_s: float
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
@given(
    st.integers(0, 99), st.sampled_from(["lanl", "superbench", NONE]), st.sampled_from([*STUDIES])
)
def test_only_present_nodes_have_faults_and_all_return(
    seed: int, repair: str | Repair, causes: str
) -> None:
    horizon_s = 20 * DAY_S
    drawn = Drawn(seed=seed, mtbf_node_h=80.0, repair=repair, causes=causes)
    nodes = [f"n{number}" for number in range(20)]
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
    given = scenario.parse(
        read_yaml("""
        apiVersion: unicron/v1
        name: drawn
        cluster: {nodes: 12, slots: 1}
        tasks: [{name: one, slots: {min: 1, max: 12}, throughput: {1: 1.0e15, 12: 1.2e16}}]
        policies: {unicron: {}, megatron: {}}
        trace: {drawn: {mtbf_node_h: 300, causes: llama3, repair: {constant_s: 7200}}}
        horizon_s: 2.0e+6
        """)
    )
    assert not isinstance(given.trace, str)
    happenings = draw(given.trace.drawn, given.cluster.names, 1, given.horizon_s)
    assert sum(one.event == "fault" for one in happenings) > 10
    for name in given.policies:
        chosen = scenario.policy(given, name)
        assert Run(scenario.run_input(given, chosen, happenings), chosen).play().ignored == 0


def test_a_written_trace_is_read_back() -> None:
    drawn = draw(EVERY_OPTION, NODES, 8, YEAR_S)
    assert trace_file.read("\n".join(trace_csv.written(drawn)), "written") == drawn


def test_studies_equal_the_data_file() -> None:
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    text = (Path(__file__).parents[2] / "data" / "failure_categories.csv").read_text(
        encoding="utf-8"
    )
    for row in csv.DictReader(text.splitlines()):
        if row["unicron_status"] in TABLE:
            found[STUDY_OF[row["study"]]][row["unicron_status"]] += float(
                row["count"] or row["share_pct"]
            )
    assert found == STUDIES
