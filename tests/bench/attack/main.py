"""`make attack`: the reproductions of the second security review, against real clusters.

Each finding is a case. `held` is 1 if the attack broke nothing, and `healing_ratio` is the time in
which another task's killed rank heals under the attack over that without, in pairs. A case that
cannot be tried on this machine says so and has no value. Rows are written to
build/bench/attack.json, with those of other cases at this commit. before.json has those of before
the mends; `make figures` writes the table of both into the threat model.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.attack import files, nodes, ranks, readers
from bench.attack.stage import Outcome
from bench.recovery.main import interrupt
from bench.recovery.rows import Row, describe, row, write

ROOT = Path(__file__).resolve().parents[3]
FIGURES = ROOT / "build" / "bench" / "attack.json"
BEFORE, BEFORE_COMMIT = Path(__file__).with_name("before.json"), "12114562"
"""The rows of the commit before the mends."""
SYSTEM, HELD, RATIO = "unicron", "held", "healing_ratio"


class Case(NamedTuple):
    """A finding of the review. `ratio_max`: the goal of its healing ratio, None if it has none."""

    what: str
    attack: Callable[[int], Outcome]
    ratio_max: float | None = None


CASES = {
    "S1": Case("a malformed report", nodes.malformed, nodes.RATIO_MAX),
    "S2": Case("a state folder of a sender", files.state_folder),
    "S3": Case("a rank's progress page", ranks.page),
    "S4": Case("a deep frame of a rank", ranks.pipe),
    "S5": Case("a task that prints a lot", ranks.output, nodes.RATIO_MAX),
    "S6": Case("reports about others' tasks", nodes.false_reports),
    "S7": Case("a flood of reports", nodes.flood, nodes.RATIO_MAX),
    "S8": Case("thirty readers", readers.readers, readers.RATIO_MAX),
    "S9": Case("where tokens go", readers.tokens),
    "S10": Case("a process that outlives its task", ranks.orphan),
    "S11": Case("strangers at the checkpoint store", files.store),
    "S12": Case("long numbers in queries", readers.long_numbers),
    "S13": Case("sessions of sessions", readers.sessions),
    "S14": Case("false names of hosts", readers.host_names),
    "S15": Case("hostile segments", files.segments),
    "S16": Case("hostile checkpoints", files.checkpoints),
    "S17": Case("a false server, a foreign folder", readers.false_servers),
    "S18": Case("rights as the guide prints them", files.rights),
    "S19": Case("hashes, digests, sandboxes", files.supply),
}


def main() -> int:
    asks = argparse.ArgumentParser(prog="make attack")
    asks.add_argument("-n", type=int, default=3, help="pairs of a healing ratio")
    asks.add_argument("--cases", default=",".join(CASES), help="S1,S7")
    asks.add_argument("--out", type=Path, default=FIGURES)
    asked = asks.parse_args()
    names = asked.cases.upper().split(",")
    if unknown := [name for name in names if name not in CASES]:
        asks.error(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    signal.signal(signal.SIGTERM, interrupt)
    began_s, rows = time.monotonic(), list[Row]()
    try:
        for name in names:
            outcome = tried(CASES[name], asked.n)
            rows += rows_of(name, outcome)
            print(line(name, outcome, time.monotonic() - began_s), flush=True)
    except KeyboardInterrupt:
        print("interrupted: what was tried by then is written")
    every = add_up(rows, asked.out)
    print(f"\n{table(every)}\n\n{len(every)} rows at this commit in {asked.out}")
    return int(any(one.metric == HELD and one.value == 0 for one in rows))


def tried(case: Case, num_pairs: int) -> Outcome:
    """The outcome of a case. What it raises is a break: the cluster did not do what it should."""
    try:
        return case.attack(num_pairs)
    except Exception as error:  # noqa: BLE001 (each case is judged, whatever became of another)
        traceback.print_exc()
        return Outcome(False, f"it went wrong: {error!r}".splitlines()[0][:160])


def rows_of(name: str, outcome: Outcome) -> list[Row]:
    """The rows of a case."""
    value = None if outcome.held is None else int(outcome.held)
    held = Row(name, SYSTEM, HELD, value, "", int(value is not None), outcome.how)
    if not outcome.pairs_s:
        return [held]
    calm_s, under_s = zip(*outcome.pairs_s, strict=True)
    return [
        held,
        row(name, SYSTEM, RATIO, outcome.ratios, "x"),
        row(name, SYSTEM, "calm_s", calm_s, "s"),
        row(name, SYSTEM, "attacked_s", under_s, "s"),
    ]


def line(name: str, outcome: Outcome, at_s: float) -> str:
    """A line of the table that is printed while it runs."""
    word = {True: "held", False: "BROKEN", None: "not tried"}[outcome.held]
    ratio = "" if outcome.ratio is None else f"x {outcome.ratio:.2f}"
    if outcome.pairs_s:
        calm_s, under_s = zip(*outcome.pairs_s, strict=True)
        ratio += f" ({median(calm_s):.2f} s, {median(under_s):.2f} s)"
    return f"{at_s:5.0f} s  {name:4} {word:9} {ratio:22} {CASES[name].what}: {outcome.how}"


def add_up(rows: Sequence[Row], file: Path) -> list[Row]:
    """Write the rows with those of other cases that were tried at this commit; all of them."""
    stamp, commit, kept = file.with_suffix(".stamp"), describe()["commit"], list[Row]()
    if file.exists() and stamp.exists() and json.loads(stamp.read_text())["commit"] == commit:
        fresh = {one.case for one in rows}
        every = [Row(**one) for one in json.loads(file.read_text())]
        kept = [one for one in every if one.case not in fresh]
    order = [*CASES]
    every = sorted([*kept, *rows], key=lambda one: order.index(one.case))
    write(every, file, {"commit": commit})
    return every


def table(after: Sequence[Row], before: Sequence[Row] | None = None) -> str:
    """The table of the threat model: each finding before the mends and after."""
    if before is None:
        before = [Row(**one) for one in json.loads(BEFORE.read_text())]
    lines = ["| finding | before | after | what was tried, or what broke |", "|---|---|---|---|"]
    for name, case in CASES.items():
        told = next((one.note for one in (*after, *before) if one.case == name and one.note), "")
        cells = (f"{name} {case.what}", _cell(before, name), _cell(after, name), told)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def _cell(rows: Sequence[Row], name: str) -> str:
    found = {one.metric: one for one in rows if one.case == name}
    if (held := found.get(HELD)) is None or held.value is None:
        return "not tried"
    word = "held" if held.value else "broken"
    ratio = found.get(RATIO)
    return word if ratio is None or ratio.value is None else f"{word}, x {ratio.value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
