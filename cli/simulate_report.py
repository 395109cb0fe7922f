"""The report of `unicron simulate paper`: one page with all figures, and each as SVG and PNG."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from .. import __version__
from ..control_plane.simulation import cases, evaluation
from ..control_plane.simulation.earnings import LOST
from ..control_plane.simulation.evaluation import OURS, REPORTED, RULES, THEIRS
from ..control_plane.simulation.policies import POLICIES
from . import paper_pictures as pictures
from . import report_page as html
from .figures import number_of, scaled, span
from .simulate_paper import Evaluation, Row, ratios

BASELINES = tuple(name for name in POLICIES if name not in (OURS, *RULES))


def write(folder: Path, found: Evaluation, rows: list[Row]) -> None:
    """report.html, rows.json, and the figures. What is there of these is written anew."""
    (folder / "rows.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(_page(folder, found, rows), encoding="utf-8")


def _page(folder: Path, found: Evaluation, rows: list[Row]) -> str:
    value = {(one["case"], one["system"], one["metric"]): one for one in rows}
    traces = [html.table(*_trace_rows(case, value), ours=OURS) for case in cases.TRACES]
    return html.page(
        "What a cluster earns while it fails", _lead(found), [
            html.figures([(f"{value[case, THEIRS, 'waf_ratio']['value']:.2f} x",
                           f"Megatron's accumulated WAF on {case}; the paper has "
                           f"{REPORTED[case, THEIRS]:g} x") for case in cases.TRACES]
                         + [_nearest(case, value) for case in cases.TRACES]),
            f"<p>{_verdict(value, found.seeds)}</p>",
            html.pictured(pictures.of_ratios(found, value), folder, *traces),
            html.pictured(pictures.of_time(found), folder),
            html.pictured(pictures.of_losses(value), folder),
            html.pictured(pictures.of_cases(value), folder, html.table(*_case_rows(value))),
            html.pictured(pictures.of_growth(found), folder, html.table(*_growth_rows(found))),
            html.pictured(pictures.of_changes(found, value), folder,
                          html.table(*_change_rows(found, value))),
            html.section("The constants", "Seconds. Unicron's are measured by this project's "
                         "benches, but for start_s; the others' are published. Where each is from "
                         "stands in control_plane/simulation/policies/ and docs/guides/paper.md.",
                         html.table(*_constants(), ours=OURS)),
        ], f"unicron {__version__}, unicron simulate paper --seeds {found.seeds}; our reading of "
        "arXiv 2401.00134, whose text says less than a simulation needs (docs/guides/paper.md).")


def _lead(found: Evaluation) -> str:
    return (f"The evaluation of the paper, played again: 16 nodes of 8 A800, six GPT-3 tasks, two "
            f"traces of faults, drawn with {number_of(found.seeds, 'seed')}, under {len(POLICIES)} "
            "policies. Every one goes through Unicron's own fold, planner and transitions; it "
            "replaces what is decided, and what each step takes.")


def _nearest(case: str, value: dict[tuple[str, str, str], Row]) -> tuple[str, str]:
    ratio, name = min((value[case, name, "waf_ratio"]["value"], name) for name in BASELINES)
    return f"{ratio:.3f} x", f"the best of the others on {case}: {name}"


def _verdict(value: dict[tuple[str, str, str], Row], num_seeds: int) -> str:
    behind = [f"{name} on {case} ({value[case, name, 'waf_ratio']['least']:.3f} x)"
              for case in cases.TRACES for name in POLICIES
              if name != OURS and value[case, name, "waf_ratio"]["least"] < 1]
    short = [f"{name} on {case} ({value[case, name, 'waf_ratio']['value']:.2f} x for {told:g} x)"
             for (case, name), told in REPORTED.items()
             if value[case, name, "waf_ratio"]["value"] < told]
    some, each = (", with some seed,", ", with every seed") if num_seeds > 1 else ("", "")
    return ((f"Unicron earned less{some} than {', '.join(behind)}. " if behind else
             f"Unicron earned more than every other policy, on both traces{each}. ")
            + (f"Below the paper's ratio: {', '.join(short)}. " if short else "")
            + ("What is behind that, and what it is worth: docs/guides/paper.md."
               if behind or short else ""))


def _trace_rows(case: str, value: dict[tuple[str, str, str], Row]
                ) -> tuple[list[str], list[list[str]]]:
    rows: list[list[str]] = []
    for name in POLICIES:
        ratio, told = value[case, name, "waf_ratio"], REPORTED.get((case, name))
        rows.append([name, scaled(value[case, name, "accumulated_waf"]["value"], "FLOP"),
                     f"{100 * value[case, name, 'share_of_full']['value']:.1f} %",
                     "" if name == OURS else
                     f"{ratio['value']:.3f} [{ratio['least']:.3f}, {ratio['most']:.3f}]",
                     f"{told:g}" if told else "",
                     *(f"{100 * value[case, name, f'lost_{what}']['value']:.2f} %"
                       for what in LOST)])
    return [case, "earned", "of full", "Unicron over it", "paper", *LOST], rows


def _case_rows(value: dict[tuple[str, str, str], Row]) -> tuple[list[str], list[list[str]]]:
    rows = [[f"{case}: {', '.join(cases.CASES[number][0])}; w {_weights(number)}",
             scaled(value[case, OURS, "waf"]["value"], "FLOP/s"),
             *(f"{value[case, rule, 'waf_ratio']['value']:.3f} x" for rule in RULES)]
            for number in cases.CASES for case in [f"case-{number}"]]
    return ["case", "Unicron's plan", *(f"over {rule}" for rule in RULES)], rows


def _weights(number: int) -> str:
    weights = cases.CASES[number][1]
    return "1" if len({*weights}) == 1 else ", ".join(f"{one:g}" for one in weights)


def _growth_rows(found: Evaluation) -> tuple[list[str], list[list[str]]]:
    return ["GPUs", "detection", "plan (here, now)", "change (gloo, four ranks)",
            "NCCL (published)", "pause"], [
        [f"{one.gpus:,}", span(one.detect_s), span(plan_s), span(one.change_s), span(one.nccl_s),
         span(one.pause_s + plan_s)] for one, plan_s in found.growth]


def _change_rows(found: Evaluation, value: dict[tuple[str, str, str], Row]
                 ) -> tuple[list[str], list[list[str]]]:
    usual = ["all is as it is", THEIRS, *(
        f"{ratios(found, case, THEIRS)[0]:.3f} x" for case in cases.TRACES)]
    return ["if", "Unicron is, over", *cases.TRACES], [usual, *(
        [change.what, name, *(
            f"{value[f'{case}: {change.what}', name, 'waf_ratio']['value']:.3f} x"
            for case in cases.TRACES)]
        for change in evaluation.SENSITIVITY for name in change.systems[1:])]


def _constants() -> tuple[list[str], list[list[str]]]:
    shown = ("detect_other_s", "start_s", "quiesce_s", "regroup_s", "checkpoint_s", "copy_s",
             "speed", "num_spares")
    rows: list[list[str]] = []
    for name, policy in POLICIES.items():
        plain = msgspec.to_builtins(policy.costs)
        rows.append([name, policy.what, *(f"{plain[key]:g}" for key in shown)])
    return ["policy", "after a fault", *shown], rows
