"""Writes measured figures into README and the guides: `make figures`.

A block begins with `<!-- figures: NAME -->` and ends with `<!-- end -->`. Its last line says at
which commit and when it was measured, from the stamp beside the rows in build/bench (`make bench-…`
writes both). A block whose rows are not all there stays as it is. Disasters are played here. With
names, only those blocks are written.
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.attack import main as attack
from bench.detection import faults, hangs, silent_host
from bench.detection import main as detection
from bench.log import main as log
from bench.memory import main as memory
from bench.overhead import main as overhead
from bench.paper.evaluation import SENSITIVITY
from bench.planner import main as planner
from bench.recovery.rows import Row, describe, table
from bench.restore import main as restore
from bench.scale import main as scale
from bench.settlement import main as settlement
from bench.web import main as web
from fuzz import counts as fuzz_counts
from fuzz import main as fuzz
from hosts import demo as hosts
from matrix.cells import cells, loop_cells
from matrix.hang_cells import hang_cells
from matrix.table import markdown, markdown_of_hangs, markdown_of_loops
from mutants import table as mutants
from slurm import demo as slurm

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "build" / "bench"
COLUMNS = 100
NAMED_NUM_MAX = 8
"""Missing cases that are named; the others are counted."""
LOAD_MAX = 2.0
"""The load of a core above which a page says it: other work ran beside the bench, and longer trials
lose more by it than short ones, so that ratios are wrong too."""
LAYOUTS = {
    "TP 2 x DP 2 to TP 2 and back": ("tp2dp2_sigkill", "unicron"),
    "PP 2 x DP 2 to PP 3 and back": ("pp2dp2_sigkill", "unicron"),
    "DP 4 to DP 3 and back, mirrored": ("zero1_sigkill", "unicron_mirrored"),
    "the same, sharded: set back to its copy": ("zero1_sigkill", "unicron_sharded"),
}
TRACES = ("trace-a", "trace-b")
SCALES = ("agents_64", "agents_256", "agents_1024")
LAYOUT_CASES = ("tp2dp2_sigkill", "pp2dp2_sigkill", "zero1_sigkill")
POLICIES = {
    "megatron": "megatron",
    "megatron-spares": "megatron-spares",
    "requeue": "requeue (Slurm)",
    "kubernetes": "kubernetes",
    "spares": "spares, in-process restart",
    "shrink": "shrink (torchft)",
    "oobleck": "oobleck",
    "bamboo": "bamboo (paper: remembered)",
    "varuna": "varuna",
    "equally": "equally",
    "by-weight": "by weight",
    "by-size": "by size",
}
About = dict[str, Any]


class Block(NamedTuple):
    """`rows`: the file of its rows in build/bench, empty if it is computed here. `cases`: those it
    needs. `metric`: whose number of trials the stamp tells. `text` may return an empty text:
    nothing to write."""

    page: str
    rows: str
    cases: tuple[str, ...]
    metric: str
    text: Callable[[Sequence[Row], About], str]


def rewritten(page: str, name: str, text: str, commit: str, at: str, num: str) -> str:
    """The page with this text and stamp in the block. Raises ValueError if there is none. A block
    that was written by hand becomes one of this tool."""
    mark = f"<!-- figures(?: by hand)?: {re.escape(name)} -->\n"
    body = f"{text.strip()}\n\nMeasured at commit {commit} on {at[:10]}, n={num}.\n"
    fresh, found = re.subn(
        f"{mark}.*?<!-- end -->",
        lambda _: f"<!-- figures: {name} -->\n{body}<!-- end -->",
        page,
        flags=re.DOTALL,
    )
    if found != 1:
        raise ValueError(f"{found} blocks {name}")
    return fresh


def read(file: Path) -> list[Row]:
    """The rows of a bench, a simulation's `least` and `most` among them."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    return [
        Row(
            one["case"],
            one["system"],
            one["metric"],
            one["value"],
            one["unit"],
            one["n"],
            one.get("note", ""),
            one.get("low", one.get("least")),
            one.get("high", one.get("most")),
        )
        for one in rows
    ]


def unshown(name: str, block: Block, root: Path = ROOT) -> str:
    """In words, the cases of the bench that the page does not have: they are newer than it."""
    page = (root / block.page).read_text(encoding="utf-8").replace(",", "")
    text = page.partition(f": {name} -->")[2].partition("<!-- end -->")[0]
    absent = [case for case in block.cases if case not in text]
    return f"; not on the page: {_some(absent)}" if 0 < len(absent) < len(block.cases) else ""


def _some(cases: Sequence[str]) -> str:
    more = f" and {len(cases) - NAMED_NUM_MAX} more" * (len(cases) > NAMED_NUM_MAX)
    return f"{', '.join(cases[:NAMED_NUM_MAX])}{more}"


def write(name: str, block: Block, root: Path = ROOT, measured: Path = MEASURED) -> str:
    """Rewrite the block if it was measured; what was done, in words."""
    rows: list[Row] = []
    about: About = describe()
    if block.rows:
        file = measured / f"{block.rows}.json"
        stamp = file.with_suffix(".stamp")
        if not file.exists() or not stamp.exists():
            return f"not measured: no {file.name} with a stamp"
        rows, about = read(file), json.loads(stamp.read_text(encoding="utf-8"))
        if not re.fullmatch(r"[0-9a-f]{7,40}", about["commit"]):
            return (
                f"not written: {stamp.name} is of commit {about['commit']}; "
                "commit the code, then measure again"
            )
        missing = [case for case in block.cases if all(one.case != case for one in rows)]
        if missing:
            return f"not measured: {file.name} has no {_some(missing)}"
        rows = [one for one in rows if not block.cases or one.case in block.cases]
    text = block.text(rows, about)
    if not text:
        return f"not measured: {block.rows}.stamp has no text for it"
    page = root / block.page
    nums = sorted({one.n for one in rows if one.n and one.metric == block.metric} or {1})
    num = f"{nums[0]}" if len(nums) == 1 else f"{nums[0]} to {nums[-1]}"
    if took_s := about.get("took_s"):
        num += f", in {max(1, round(took_s / 60))} min"
    load, cores = about.get("load_1min", 0.0), about.get("cores", 1)
    if load > LOAD_MAX * cores:
        num += f", under a load of {load:.0f} on {cores} cores"
    page.write_text(
        rewritten(page.read_text(encoding="utf-8"), name, text, about["commit"], about["at"], num),
        encoding="utf-8",
    )
    return f"written: {block.page}"


# --- the blocks ---------------------------------------------------------------------------------
def _lines(head: str, lines: Iterable[Iterable[str]]) -> str:
    rule = "|" + "---|" * (head.count("|") - 1)
    return "\n".join([head, rule, *(f"| {' | '.join(cells)} |" for cells in lines)])


def _by_key(rows: Sequence[Row]) -> dict[tuple[str, str, str], Row]:
    return {(one.case, one.system, one.metric): one for one in rows}


def _spread(one: Row | None, form: str = ".2g") -> str:
    if one is None or one.value is None:
        return "nothing reported"
    spread = (
        "" if one.low is None or one.high is None else f" [{one.low:{form}}, {one.high:{form}}]"
    )
    return f"{one.value:{form}}{spread}"


def _detection(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)
    lines = [
        (
            f"`{case}`",
            _spread(found.get((case, "unicron", "detect_s"))),
            f"{detection.GOALS_S.get(case, '')}",
            f"{detection.PAPER_S.get(case, '')}",
            _spread(found.get((case, "torchrun", "detect_s"))),
        )
        for case in faults.CASES
    ]
    return _lines("| case | Unicron | goal | the paper's | torchrun |", lines)


def _silent(rows: Sequence[Row], about: About) -> str:
    """The cases of a hang, or those of a host that falls silent: a line for each system."""
    found = _by_key(rows)

    def shown(case: str, system: str, metric: str) -> str:
        one = found.get((case, system, metric))
        return "" if one is None or one.value is None else f"{one.value:.2g}"

    metrics = dict.fromkeys(one.metric for one in rows if one.metric in detection.UNITS)
    lines: list[list[str]] = []
    for one in rows:
        if one.metric == "detect_s":
            goal = detection.goal(one, rows) if one.system == "unicron" else None
            wanted = "" if goal is None else f"{goal:.2g}"
            cells = [shown(one.case, one.system, metric) for metric in metrics]
            lines.append([f"`{one.case}`", one.system, _told(one), wanted, *cells])
    columns = " | ".join(f"`{metric}`" for metric in ("detect_s", "goal", *metrics))
    return f"{about['cores']} cores.\n\n" + _lines(f"| case | system | {columns} |", lines)


def _told(one: Row) -> str:
    """A time of detection, and in how many trials there was one, if not in all; or why not."""
    how_many, _, why = one.note.partition(" told: ")
    if not one.n:
        return why.partition(":")[0]
    in_all = len({*how_many.split(" of ")}) == 1
    return _spread(one) if not why or in_all else f"{_spread(one)}, {how_many}"


def _recovery(rows: Sequence[Row], about: About) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"{about['cores']} cores; {versions}.\n\n```\n{table(rows)}\n```"


def _layouts(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)

    def cell(place: tuple[str, str], metric: str, over: float = 1.0) -> str:
        value = found[(*place, metric)].value
        return "-" if value is None else f"{value / over:.3g}"

    lines = [
        (
            label,
            *(
                cell(place, metric)
                for metric in (
                    "fault_to_step_s",
                    "fault_to_resume_s",
                    "iterations_lost",
                    "grow_pause_s",
                )
            ),
            *(
                f"{cell(place, f'{what}_moved_bytes', 1e6)} "
                f"({cell(place, f'{what}_least_bytes', 1e6)})"
                for what in ("fault", "grow")
            ),
        )
        for label, place in LAYOUTS.items()
    ]
    return _lines(
        "| | to the next step, s | of that until the new layout trains, s | iterations "
        "lost | growing back, s | moved at the fault, MB (least) | moved growing back, "
        "MB (least) |",
        lines,
    )


def _overhead(rows: Sequence[Row], about: About) -> str:
    by_key = _by_key(rows)

    def cell(case: str, metric: str) -> str:
        return f"{by_key[case, overhead.SYSTEM, metric].value:.4f}"

    return _lines(
        "| case | `iteration_ratio` | interval | goal at most |",
        [
            (
                f"`{case}`",
                cell(case, "iteration_ratio"),
                f"{cell(case, 'iteration_ratio_low')} to {cell(case, 'iteration_ratio_high')}",
                f"{goal:g}" if math.isfinite(goal := overhead.CASES[case].ratio_max) else "",
            )
            for case in dict.fromkeys(row.case for row in rows)
        ],
    )


def _planner(rows: Sequence[Row], about: About) -> str:
    shown = [one for one in rows if one.metric != "objective"]
    return "\n".join(["```", table(shown), "", *planner.held_to(rows), "```"])


def _sim(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)
    places = dict.fromkeys((one.case, one.system) for one in rows if one.metric == "cpu_s")

    def cell(place: tuple[str, str], metric: str) -> str:
        value = found[(*place, metric)].value
        return "-" if value is None else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"

    return _lines(
        "| GPUs | faults | policy | events | CPU seconds | events/s | MiB |",
        [
            (
                f"{int(case):,}",
                cell((case, system), "faults"),
                f"`{system}`",
                *(
                    cell((case, system), metric)
                    for metric in ("events", "cpu_s", "events_per_s", "peak_mib")
                ),
            )
            for case, system in places
        ],
    )


def _web(rows: Sequence[Row], about: About) -> str:
    lines = [
        (f"`{one.metric}`", f"{_spread(one, '.3g')} {one.unit}", f"{web.GOALS[one.metric]:g}")
        for one in rows
        if one.metric in web.GOALS
    ]
    return f"{about['cores']} cores.\n\n" + _lines("| metric | measured | goal at most |", lines)


def _settlement(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)
    goals = settlement.GOALS
    return _lines(
        "| metric | goal at 1,024 | 64 ranks | 256 ranks | 1,024 ranks | 4,096 ranks |",
        [
            (
                f"`{metric}`",
                f"{goals[metric]:,g}" if metric in goals else "",
                *(
                    f"{found[case, settlement.SYSTEM, metric].value:,.3g}"
                    if unit != "B"
                    else f"{found[case, settlement.SYSTEM, metric].value:,.0f}"
                    for case in settlement.CASES
                ),
            )
            for metric, unit in settlement.UNITS.items()
        ],
    )


def _restore(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)
    return _lines(
        "| case | MB/s | a plain copy, MB/s | share | |",
        [
            (
                f"`{case.name}`",
                f"{found[case.name, restore.SYSTEM, 'mb_per_s'].value:,.0f}",
                f"{found[case.name, restore.PLAIN, 'mb_per_s'].value:,.0f}",
                f"{found[case.name, restore.SYSTEM, 'share_of_copy'].value:.2f}",
                found[case.name, restore.SYSTEM, "mb_per_s"].note,
            )
            for case in restore.CASES
            if (case.name, restore.SYSTEM, "mb_per_s") in found
        ],
    )


def _memory(rows: Sequence[Row], about: About) -> str:
    found = {one.case: one for one in rows if one.metric == memory.METRIC}
    phases = dict.fromkeys(case.rpartition("_")[2] for case in memory.CASES)
    layouts = dict.fromkeys(case.rpartition("_")[0] for case in memory.CASES)
    return _lines(
        f"| layout | {' | '.join(phases)} |",
        [
            (
                f"`{layout}`",
                *(
                    f"{found[case].value:.2f}" if (case := f"{layout}_{phase}") in found else ""
                    for phase in phases
                ),
            )
            for layout in layouts
        ],
    )


def _throughput(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)
    ways = ("in sample", "out of sample", "one point", "mean of the others")
    lines: list[list[str]] = []
    for case in dict.fromkeys(one.case for one in rows if one.metric == "mape_pct"):
        errors = [found.get((case, way, "mape_pct")) for way in ways]
        num = max(one.n for one in errors if one is not None)
        lines.append(
            [
                case,
                f"{num}",
                *(
                    ""
                    if one is None or one.value is None
                    else f"{one.value:.1f}" + (f" (n {one.n})" if one.n != num else "")
                    for one in errors
                ),
            ]
        )
    return _lines(
        "| rows | n | in sample | out of sample | one point | mean of the others |", lines
    )


def _paper(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)
    lines: list[list[str]] = []
    for system, label in POLICIES.items():
        cells = [label]
        for case in TRACES:
            paper = found.get((case, system, "waf_ratio_paper"))
            cells += [
                _spread(found[case, system, "waf_ratio"], ".3f" if system == "shrink" else ".2f"),
                "" if paper is None else f"{paper.value:g}",
            ]
        lines.append(cells)
    return _lines(
        "| Unicron's accumulated WAF, over | trace-a | the paper | trace-b | the paper |", lines
    )


def _changes(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)
    whats = dict.fromkeys((one.case.split(": ")[1], one.system) for one in rows)
    return _lines(
        "| if | Unicron is, over | trace-a | trace-b |",
        [
            (
                what,
                system,
                *(f"{found[f'{case}: {what}', system, 'waf_ratio'].value:.2f}" for case in TRACES),
            )
            for what, system in whats
        ],
    )


def _summary(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)

    def both(system: str, digits: int = 2) -> str:
        one, two = (found[case, system, "waf_ratio"].value for case in TRACES)
        return f"{one:.{digits}f} and {two:.{digits}f}"

    return textwrap.fill(
        f"Unicron earns {both('megatron')} times the weighted FLOP of Megatron that waits for its "
        "nodes (the paper: 1.2 and 1.9), "
        f"{both('megatron-spares')} times that of Megatron with a spare node, {both('spares')} "
        "times that of jobs that each have a spare node and restart in their processes, and "
        f"{both('shrink', 3)} times that of jobs that shrink.",
        COLUMNS,
    )


def _chaos(rows: Sequence[Row], about: About) -> str:
    """Written by the run whose picture is in docs."""
    return textwrap.fill(about.get("text", ""), COLUMNS)


def _fault_matrix(rows: Sequence[Row], about: About) -> str:
    outcomes = {one.case: str(one.value) for one in rows if one.metric == "outcome"}
    num, equal = len(MATRIX), sum(outcomes[name] == "equal" for name in MATRIX)
    return f"{num} runs, {equal} of them equal to their reference run.\n\n{markdown(outcomes)}"


def _loops(rows: Sequence[Row], about: About) -> str:
    outcomes = {one.case: str(one.value) for one in rows if one.metric == "outcome"}
    equal = sum(outcomes[name] == "equal" for name in LOOP_MATRIX)
    return (
        f"{len(LOOP_MATRIX)} runs, {equal} of them equal to their reference run.\n\n"
        f"{markdown_of_loops(outcomes)}"
    )


def _hangs(rows: Sequence[Row], about: About) -> str:
    outcomes = {one.case: str(one.value) for one in rows if one.metric == "outcome"}
    acted_s = [one.value for one in rows if one.metric == "acted_s" and one.value is not None]
    found = [outcomes[name] for name in HANG_MATRIX if outcomes[name] != "not run"]
    equal = found.count("equal")
    times = (
        f" Acted upon after {median(acted_s):.1f} s (median), {max(acted_s):.1f} s at most."
        if acted_s
        else ""
    )
    return (
        f"{len(found)} runs, {equal} of them as they must be.{times}\n\n"
        f"{markdown_of_hangs(outcomes)}"
    )


def _mutants(rows: Sequence[Row], about: About) -> str:
    return f"{about['cores']} cores. {mutants.markdown(rows)}"


def _hosts(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)
    lines: list[list[str]] = []
    for case, title in hosts.CASES.items():
        step_s, touched, equal = (
            found[case, hosts.SYSTEM, metric].value or 0 for metric in hosts.UNITS
        )
        lines.append(
            [f"`{case}`", title, f"{step_s:.2f}", f"{touched:g}", "yes" if equal else "NO"]
        )
    return f"{about['cores']} cores.\n\n" + _lines(
        "| case | what | fault to next step, s | healthy tasks touched | losses and state equal |",
        lines,
    )


def _slurm(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)
    lines: list[list[str]] = []
    for case, title in slurm.CASES.items():
        step_s, lost, equal = (
            found[case, slurm.SYSTEM, metric].value or 0 for metric in slurm.UNITS
        )
        lines.append([f"`{case}`", title, f"{step_s:.2f}", f"{lost:g}", "yes" if equal else "NO"])
    return f"{about['cores']} cores.\n\n" + _lines(
        "| case | what | to next step, s | iterations lost | losses and state equal |", lines
    )


def _scale(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)

    def shown(case: str, metric: str) -> str:
        one = found.get((case, scale.SYSTEM, metric))
        return f"{one.value:.3g}" if one is not None and one.value is not None else ""

    lines = [
        [
            f"`{metric}`, {unit}",
            *(shown(case, metric) for case in SCALES),
            " ".join(filter(None, (shown(case, f"{metric}_growth") for case in SCALES))),
        ]
        for metric, unit in scale.UNITS.items()
    ]
    return f"{about['cores']} cores.\n\n" + _lines(
        "| | 64 agents | 256 | 1,024 | growth for each doubling |", lines
    )


def _log(rows: Sequence[Row], about: About) -> str:
    found = _by_key(rows)

    def shown(one: Row | None) -> str:
        return (
            ""
            if one is None or one.value is None
            else f"{one.value:,.3g}"
            if (one.value < 1000)
            else f"{one.value:,.0f}"
        )

    lines: list[list[str]] = []
    for one in rows:
        if one.system != log.SYSTEM:
            continue
        goal = log.GOALS.get((one.case, one.metric))
        lines.append(
            [
                f"`{one.case}`",
                f"`{one.metric}`",
                f"{one.n}",
                shown(one),
                ""
                if goal is None
                else f"{'at least' if goal.at_least else 'at most'} {goal.value:,g}",
                shown(found.get((one.case, log.PEER, one.metric))),
            ]
        )
    return f"{about['cores']} cores.\n\n" + _lines(
        "| case | metric | n | Unicron | goal | eventsourcing |", lines
    )


def _attack(rows: Sequence[Row], about: About) -> str:
    return f"{attack.table(rows)}\n\nBefore: {attack.BEFORE_COMMIT}."


def _fuzz(rows: Sequence[Row], about: About) -> str:
    return fuzz_counts.markdown(rows)


def _disasters(rows: Sequence[Row], about: About) -> str:
    import disasters  # plays scenarios, which takes a minute

    return disasters.table()


MATRIX = tuple(cell.name for cell in cells() if not cell.absent)
LOOP_MATRIX = tuple(cell.name for cell in loop_cells())
HANG_MATRIX = tuple(cell.name for cell in hang_cells() if not cell.absent)
CHANGES = tuple(f"{case}: {change.what}" for change in SENSITIVITY for case in TRACES)
BLOCKS = {
    "attack": Block(
        "docs/guides/threat-model.md", "attack", tuple(attack.CASES), attack.HELD, _attack
    ),
    "fuzz": Block(
        "docs/guides/threat-model.md",
        "fuzz",
        tuple(area.name for area in fuzz.AREAS),
        "cases",
        _fuzz,
    ),
    "detection": Block(
        "docs/guides/bench-detection.md", "detection", faults.CASES, "detect_s", _detection
    ),
    "detection-hangs": Block(
        "docs/guides/bench-detection.md", "detection", hangs.CASES, "detect_s", _silent
    ),
    "detection-hosts": Block(
        "docs/guides/bench-detection.md", "detection", silent_host.CASES, "detect_s", _silent
    ),
    "recovery": Block(
        "docs/guides/bench-recovery.md",
        "recovery",
        (
            "dp4_sigkill",
            "dp4_sigstop",
            "breakdown",
            "overhead",
            "overhead_copies",
            "restart",
            "growth_ranks",
            "growth_params",
        ),
        "iteration_s",
        _recovery,
    ),
    "layouts": Block(
        "docs/guides/bench-recovery.md", "recovery", LAYOUT_CASES, "fault_to_resume_s", _layouts
    ),
    "planner": Block("docs/guides/bench-planner.md", "planner", planner.CASES, "plan_ms", _planner),
    "sim": Block(
        "docs/guides/simulate.md", "sim", ("128", "1280", "10000", "100000"), "cpu_s", _sim
    ),
    "settlement": Block(
        "docs/guides/bench-settlement.md",
        "settlement",
        tuple(settlement.CASES),
        "metadata_bytes",
        _settlement,
    ),
    "restore": Block(
        "docs/guides/bench-restore.md",
        "restore",
        tuple(case.name for case in restore.CASES),
        "mb_per_s",
        _restore,
    ),
    "memory": Block("docs/guides/bench-memory.md", "memory", memory.CASES, memory.METRIC, _memory),
    "overhead": Block(
        "docs/guides/bench-overhead.md",
        "overhead",
        ("overhead", "overhead_128_tokens"),
        "iteration_ratio",
        _overhead,
    ),
    "overhead-bitwise": Block(
        "docs/guides/reproducible.md",
        "overhead",
        ("bitwise_int64", "bitwise_int32"),
        "iteration_ratio",
        _overhead,
    ),
    "throughput": Block(
        "docs/guides/throughput-model.md", "throughput", (), "mape_pct", _throughput
    ),
    "paper": Block("docs/guides/paper.md", "paper", TRACES, "waf_ratio", _paper),
    "sensitivity": Block("docs/guides/paper.md", "paper", CHANGES, "waf_ratio", _changes),
    "paper-summary": Block("README.md", "paper", TRACES, "waf_ratio", _summary),
    "chaos-training": Block("docs/guides/features.md", "chaos-training", (), "iterations", _chaos),
    "fault-matrix": Block(
        "docs/reference/fault-matrix.md", "fault-matrix", MATRIX, "outcome", _fault_matrix
    ),
    "fault-matrix-loops": Block(
        "docs/reference/fault-matrix.md", "fault-matrix", LOOP_MATRIX, "outcome", _loops
    ),
    "fault-matrix-hangs": Block(
        "docs/reference/fault-matrix.md", "fault-matrix-hangs", HANG_MATRIX, "outcome", _hangs
    ),
    "mutants": Block(
        "docs/reference/mutants.md", "mutants", mutants.PATCHES, mutants.IN_TEST, _mutants
    ),
    "scale": Block("docs/guides/bench-scale.md", "scale", SCALES, "record_us", _scale),
    "log": Block("docs/guides/bench-log.md", "log", log.CASES, "worst_s", _log),
    "web": Block("docs/guides/dashboard.md", "web", (web.CASE,), "open_s", _web),
    "slurm": Block("docs/guides/slurm.md", "slurm", tuple(slurm.CASES), "loss_equal", _slurm),
    "hosts": Block("docs/guides/hosts.md", "hosts", tuple(hosts.CASES), "loss_equal", _hosts),
    "disasters": Block("docs/guides/disasters.md", "", (), "", _disasters),
}


def main() -> None:
    """Every block, or those that are named."""
    names = sys.argv[1:] or [*BLOCKS]
    if unknown := [name for name in names if name not in BLOCKS]:
        sys.exit(f"no block {unknown[0]}; there are {', '.join(BLOCKS)}")
    for name in names:
        said = write(name, BLOCKS[name])
        newer = "" if said.startswith("written") else unshown(name, BLOCKS[name])
        sys.stdout.write(f"{name:18} {said}{newer}\n")


if __name__ == "__main__":
    main()
