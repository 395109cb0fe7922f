"""The runs of the paper's evaluation, as rows and as tables beside the paper's own results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

from bench.paper import evaluation
from bench.paper.evaluation import OURS, REPORTED, RULES, THEIRS, EvaluationRun, PauseEstimate
from unicron.cli.simulate.compare import HEADS, RunResult, RunSpec, play
from unicron.cli.terminal.format import count, labelled, number_of, scaled, span, table
from unicron.control_plane.planner import planner
from unicron.control_plane.simulation.accounting import LOSSES

PLAN_ROUNDS_NUM = 5
Row = dict[str, Any]
Key = tuple[str, str, int, str]
"""Case, system, seed, changed constant (or "")."""
Values = dict[tuple[str, str, str], Row]
"""Each row by its case, system and metric."""


class Evaluation(NamedTuple):
    """All runs with their results. `growth`: by cluster size, the pause and the time of a plan."""

    parts: dict[Key, EvaluationRun]
    played: dict[Key, RunResult]
    growth: list[tuple[PauseEstimate, float]]
    seeds: int
    took_s: float


def evaluate(seeds: int) -> Evaluation:
    """Run the whole evaluation."""
    began_s = time.perf_counter()
    parts = [
        *evaluation.all_policies(seeds),
        *evaluation.sensitivity(),
        *evaluation.allocation_cases(),
    ]
    keys = [(part.case, part.system, part.seed, part.changed) for part in parts]
    played = play([RunSpec(part.policy, part.run_input) for part in parts])
    growth = [(evaluation.growth(gpus), _plan_s(gpus)) for gpus in evaluation.GPUS_NUMS]
    return Evaluation(
        dict(zip(keys, parts, strict=True)),
        dict(zip(keys, played, strict=True)),
        growth,
        seeds,
        time.perf_counter() - began_s,
    )


def _plan_s(gpus: int) -> float:
    """The median time to plan after a node loss, on this machine."""
    problem, lengths_s = evaluation.planning_problem(gpus), list[float]()
    for _ in range(PLAN_ROUNDS_NUM):
        began_s = time.perf_counter()
        planner.choose_plan(problem)
        lengths_s.append(time.perf_counter() - began_s)
    return median(lengths_s)


# --- as data ------------------------------------------------------------------------------------
def rows_of(found: Evaluation) -> list[Row]:
    """Rows in the format of benchmark results: the median, the least and the most."""
    return [*_of_traces(found), *_of_cases(found), *_of_changes(found), *_of_growth(found)]


def row(case: str, system: str, metric: str, unit: str, values: Iterable[float]) -> Row:
    ordered = sorted(values)
    return {
        "case": case,
        "system": system,
        "metric": metric,
        "value": median(ordered),
        "unit": unit,
        "n": len(ordered),
        "least": ordered[0],
        "most": ordered[-1],
    }


def _flop(found: Evaluation, case: str, system: str, seed: int, changed: str = "") -> float:
    return found.played[case, system, seed, changed].outcome.earnings.flop


def ratios(found: Evaluation, case: str, system: str) -> list[float]:
    """Accumulated WAF of Unicron over that of the system, by seed."""
    return [
        _flop(found, case, OURS, seed) / _flop(found, case, system, seed)
        for seed in range(1, found.seeds + 1)
    ]


def _of_traces(found: Evaluation) -> Iterator[Row]:
    for case in evaluation.TRACES:
        for system in evaluation.SYSTEMS:
            every = [
                found.played[case, system, seed, ""].outcome.earnings
                for seed in range(1, found.seeds + 1)
            ]
            yield row(case, system, "waf_ratio", "Unicron over it", ratios(found, case, system))
            if (case, system) in REPORTED:
                yield row(
                    case, system, "waf_ratio_paper", "Unicron over it", [REPORTED[case, system]]
                )
            yield row(case, system, "accumulated_waf", "FLOP", [one.flop for one in every])
            yield row(case, system, "share_of_full", "1", [one.share for one in every])
            for what in LOSSES:
                yield row(
                    case,
                    system,
                    f"lost_{what}",
                    "share of full",
                    [one.lost_flop[what] / one.full_flop for one in every],
                )


def _of_cases(found: Evaluation) -> Iterator[Row]:
    for number in evaluation.CASES:
        case = f"case-{number}"
        for system in (OURS, *RULES):
            mine = found.played[case, system, 0, ""].outcome.earnings
            yield row(case, system, "waf", "FLOP/s", [mine.total])
            yield row(
                case,
                system,
                "waf_ratio",
                "Unicron over it",
                [found.played[case, OURS, 0, ""].outcome.earnings.total / mine.total],
            )


def _of_changes(found: Evaluation) -> Iterator[Row]:
    for change in evaluation.SENSITIVITY:
        for case in evaluation.TRACES:
            for system in change.systems[1:]:
                yield row(
                    f"{case}: {change.what}",
                    system,
                    "waf_ratio",
                    "Unicron over it",
                    [
                        _flop(found, case, OURS, 1, change.what)
                        / _flop(found, case, system, 1, change.what)
                    ],
                )


def _of_growth(found: Evaluation) -> Iterator[Row]:
    for one, plan_s in found.growth:
        case = f"{one.gpus}-gpus"
        for metric, value in (
            ("detect_s", one.detect_s),
            ("plan_s", plan_s),
            ("change_s", one.change_s),
            ("nccl_s", one.nccl_s),
            ("transition_s", one.pause_s + plan_s),
        ):
            yield row(case, OURS, metric, "s", [value])


# --- as text ----------------------------------------------------------------------------------
def screen(found: Evaluation, rows: list[Row]) -> list[str]:
    """All tables, as text."""
    value = {(one["case"], one["system"], one["metric"]): one for one in rows}
    lines = [
        f"the paper's evaluation: 16 nodes of 8 A800, six GPT-3 tasks (case 5); "
        f"{number_of(found.seeds, 'seed')}; computed in {span(found.took_s)}",
        "",
    ]
    for case in evaluation.TRACES:
        lines += [*_trace_table(found, case, value), ""]
    lines += [*_cases_table(value), "", *_change_table(found, value), "", *_growth_table(found), ""]
    return [
        *lines,
        *labelled(
            "unknown",
            "the paper does not say which nodes fail when, how long "
            "the repairs of trace-b take, and the batch sizes. The speeds of "
            "Oobleck, Bamboo and Varuna are derived from the paper's ratios "
            "(docs/guides/paper.md)",
        ),
    ]


def _trace_table(found: Evaluation, case: str, value: Values) -> list[str]:
    trace = evaluation.TRACES[case]
    head = (
        case.upper(),
        "EARNED",
        "OF FULL",
        "UNICRON IS",
        "PAPER",
        *(HEADS[what] for what in LOSSES),
    )
    faults = f"{trace.num_sev1} SEV1 and {trace.num_others} other faults in {span(trace.horizon_s)}"
    return [
        *table(head, trace_rows(case, value), right=range(1, 10)),
        f"{case}: {faults}",
        "DETECT to AGAIN: lost, in % of full; medians over the seeds, with [least, most]",
    ]


def trace_rows(case: str, value: Values) -> list[list[str]]:
    """What each policy earned on a trace, Unicron's ratio over it, and its losses in per cent."""
    rows: list[list[str]] = []
    for system in evaluation.SYSTEMS:
        ratio, reported = value[case, system, "waf_ratio"], REPORTED.get((case, system))
        over = f"{ratio['value']:.3f} x [{ratio['least']:.2f}, {ratio['most']:.2f}]"
        rows.append(
            [
                system,
                scaled(value[case, system, "accumulated_waf"]["value"], "FLOP"),
                f"{100 * value[case, system, 'share_of_full']['value']:.1f} %",
                "-" if system == OURS else over,
                f"{reported:g} x" if reported else "",
                *(f"{100 * value[case, system, f'lost_{what}']['value']:.2f}" for what in LOSSES),
            ]
        )
    return rows


def _cases_table(value: Values) -> list[str]:
    head = ("CASES", "UNICRON", *(f"OVER {rule.upper()}" for rule in RULES))
    return table(head, case_rows(value), right=range(1, 5))


def case_rows(value: Values) -> list[list[str]]:
    """What Unicron's plan earns in each case, and its ratio over each allocation rule."""
    return [
        [
            case,
            scaled(value[case, OURS, "waf"]["value"], "FLOP/s"),
            *(f"{value[case, rule, 'waf_ratio']['value']:.3f} x" for rule in RULES),
        ]
        for case in (f"case-{number}" for number in evaluation.CASES)
    ]


def _change_table(found: Evaluation, value: Values) -> list[str]:
    head = ("IF", "UNICRON OVER", *(name.upper() for name in evaluation.TRACES))
    return [*table(head, change_rows(found, value), right=(2, 3)), "computed with the first seed"]


def change_rows(found: Evaluation, value: Values) -> list[list[str]]:
    """The ratios with the first seed: without a change, then with each change of the constants."""
    rows = [
        [
            "no change",
            THEIRS,
            *(f"{ratios(found, case, THEIRS)[0]:.3f} x" for case in evaluation.TRACES),
        ]
    ]
    for change in evaluation.SENSITIVITY:
        for system in change.systems[1:]:
            cells = [
                f"{value[f'{case}: {change.what}', system, 'waf_ratio']['value']:.3f} x"
                for case in evaluation.TRACES
            ]
            rows.append([change.what, system, *cells])
    return rows


def _growth_table(found: Evaluation) -> list[str]:
    head = ("GPUS", "DETECT", "PLAN", "CHANGE", "NCCL", "PAUSE")
    return [
        *table(head, growth_rows(found), right=range(6)),
        "DETECT and CHANGE: measured on four ranks; PLAN: measured here; NCCL: as published",
    ]


def growth_rows(found: Evaluation) -> list[list[str]]:
    """The parts of a recovery at each cluster size."""
    return [
        [
            count(one.gpus),
            span(one.detect_s),
            span(plan_s),
            span(one.change_s),
            span(one.nccl_s),
            span(one.pause_s + plan_s),
        ]
        for one, plan_s in found.growth
    ]
