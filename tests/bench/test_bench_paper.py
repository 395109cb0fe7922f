"""The paper's evaluation: its traces and cases, the rows, and a self-contained report."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench.paper import evaluation, tables
from bench.paper.report import write
from unicron.cli.simulate import compare
from unicron.control_plane.incidents.severity import TABLE
from unicron.control_plane.simulation.policies import POLICIES
from unicron.control_plane.simulation.run import Run
from unicron.events.records.statuses import CUDA_ERRORS, EXITED_ABNORMALLY, LOST_CONNECTION

NUM_GPUS = 128
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "mtbf_gpu_h", "sev1_gpu_h"), [("trace-a", 4_001, 17_203), ("trace-b", 203, 827)]
)
def test_traces_have_the_papers_failure_rates(name: str, mtbf_gpu_h: int, sev1_gpu_h: int) -> None:
    trace = evaluation.TRACES[name]
    for seed in range(1, 6):
        faults = [one for one in evaluation.events(trace, seed) if one.event == "fault"]
        hard = [one for one in faults if TABLE[one.cause] == "SEV1"]
        assert (len(hard), len(faults) - len(hard)) == (trace.num_sev1, trace.num_others)
        gpu_h = NUM_GPUS * trace.horizon_s / 3600
        assert gpu_h / len(faults) == pytest.approx(mtbf_gpu_h, rel=0.001)
        assert gpu_h / len(hard) == pytest.approx(sev1_gpu_h, rel=0.001)
    assert evaluation.events(trace, 1) == evaluation.events(trace, 1) != evaluation.events(trace, 2)


def test_no_policy_notices_a_fault_later_than_torchrun_did_in_our_bench() -> None:
    """Except for schedulers in cases that they must detect themselves and that were not measured,
    and for torchft, whose own limit was measured."""
    page = (ROOT / "docs/guides/bench-detection.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    measured_s = {
        row[1].strip("`"): float(row[-2].split()[0])
        for row in rows
        if len(row) > 3 and re.fullmatch(r"[\d.]+ \[[\d., ]+\]", row[-2])
    }
    causes = {
        "rank_killed": EXITED_ABNORMALLY,
        "exception": CUDA_ERRORS,
        "agent_killed": LOST_CONNECTION,
    }
    assert measured_s.keys() == causes.keys()
    schedulers = {
        ("requeue", "agent_killed"),
        ("kubernetes", "agent_killed"),
        ("kubernetes", "exception"),
        ("kubernetes", "rank_killed"),
    }
    late = {
        (name, case)
        for name, policy in POLICIES.items()
        for case, at_s in measured_s.items()
        if name != "shrink" and policy.costs.detection_s(causes[case], 10.0) > at_s
    }
    assert late == schedulers


def test_absent_nodes_have_no_faults() -> None:
    for trace in evaluation.TRACES.values():
        away: set[str] = set()
        for one in evaluation.events(trace, 3):
            if one.event == "repaired":
                away.remove(one.node)
                continue
            assert one.node not in away
            if TABLE[one.cause] == "SEV1":
                away.add(one.node)


def test_the_plan_is_the_best_of_all_allocations_in_each_case() -> None:
    """Compares with brute force over whole nodes, where each task has at least one node."""
    parts = [part for part in evaluation.allocation_cases() if part.system == evaluation.OURS]
    assert len(parts) == 5
    for part in parts:
        run = Run(part.run_input, part.policy)
        earned = run.play().earnings.total
        best = [0.0] * (evaluation.NODES_NUM + 1)
        for number, spec in enumerate(part.run_input.tasks):
            wafs = [
                0.0,
                *(
                    spec.weight
                    * max(rate for size, rate in spec.throughput.items() if size <= nodes)
                    for nodes in range(1, evaluation.NODES_NUM + 1)
                ),
            ]
            best = [
                max(
                    (
                        best[nodes - mine] + wafs[mine]
                        for mine in range(1, nodes + 1)
                        if nodes - mine >= number
                    ),
                    default=0.0,
                )
                for nodes in range(evaluation.NODES_NUM + 1)
            ]
        # A plan moves healthy tasks only for a gain of at least half a per cent of the WAF.
        assert (1 - 0.005) * best[-1] <= earned <= best[-1] * (1 + 1e-12)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Run the whole bench with one seed; returns its report folder and its rows."""
    folder = tmp_path_factory.mktemp("paper") / "report"
    found = tables.evaluate(1)
    rows = tables.rows_of(found)
    write(folder, found, rows)
    page = tables.screen(found, rows)
    assert max(map(len, page)) <= 105
    assert any("1.9 x" in line for line in page)
    return folder, rows


@pytest.mark.thorough
def test_rows_have_each_policy_on_each_trace(played: tuple[Path, list[dict[str, Any]]]) -> None:
    rows = played[1]
    keys = {"case", "system", "metric", "value", "unit", "n", "least", "most"}
    assert all(set(row) == keys for row in rows)
    ratios = {
        (row["case"], row["system"]): row["value"] for row in rows if row["metric"] == "waf_ratio"
    }
    for case in evaluation.TRACES:
        assert ratios[case, "unicron"] == 1.0
        assert all((case, system) in ratios for system in evaluation.SYSTEMS)
    # The paper has 1.2 and 1.9. Drawn traces give other values with other seeds:
    # docs/guides/paper.md.
    assert ratios["trace-a", "megatron"] >= 1.2
    assert ratios["trace-b", "megatron"] >= 1.6
    assert (
        min(ratios[case, system] for case in evaluation.TRACES for system in evaluation.SYSTEMS)
        >= 1.0
    )
    assert (
        min(
            ratios[f"case-{number}", rule]
            for number in evaluation.CASES
            for rule in evaluation.RULES
        )
        >= 1.0
    )


@pytest.mark.thorough
def test_earned_and_lost_shares_add_up_to_one(played: tuple[Path, list[dict[str, Any]]]) -> None:
    told = {(row["case"], row["system"], row["metric"]): row["value"] for row in played[1]}
    for case in evaluation.TRACES:
        for system in evaluation.SYSTEMS:
            lost = sum(
                value
                for (at, who, metric), value in told.items()
                if (at, who) == (case, system) and metric.startswith("lost_")
            )
            assert told[case, system, "share_of_full"] + lost == pytest.approx(1.0)


@pytest.mark.thorough
def test_the_report_is_self_contained(played: tuple[Path, list[dict[str, Any]]]) -> None:
    folder = played[0]
    page = (folder / "report.html").read_text(encoding="utf-8")
    loaded = re.findall(r'(?:src|href|xlink:href)="([^"]*)"', page)
    assert all(one.startswith("#") for one in loaded), loaded
    assert "<link" not in page
    assert "<script" not in page
    assert "@import" not in page
    assert page.count("<svg") == 5
    twice = [name for name, num in Counter(re.findall(r' id="([^"]+)"', page)).items() if num > 1]
    assert not twice
    assert all(f'id="{one[1:]}"' in page for one in loaded)
    for name in ("ratios", "waf-over-time", "losses", "cases", "transition"):
        assert (folder / f"{name}.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_the_traces_of_the_report_play_as_any_scenario(
    played: tuple[Path, list[dict[str, Any]]],
) -> None:
    scenario, stages = compare.load(played[0] / "trace-b.yaml")
    assert [*stages] == [*POLICIES]
    assert scenario.horizon_s == 7 * 86400
    drawn = evaluation.events(evaluation.TRACES["trace-b"], 1)
    assert [one._replace(at_s=round(one.at_s, 3)) for one in drawn] == [
        *stages["unicron"].run_input.events
    ]
