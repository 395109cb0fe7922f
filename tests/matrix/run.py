"""Runs the fault matrix: `make fault-matrix`, or a part with POINTS, FAULTS and VARIANTS.

Each of these is a comma-separated list of prefixes. One cell runs at a time, with at most nine
ranks; its reference run is trained before. The exit code is 1 if a cell is not equal. The rows of
runs at one commit add up: so the matrix may be run in parts, and a cell again. FAULTS=hang selects
the hang rows (hang_cells.py), whose figures have a file of their own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.recovery.rows import describe, stamp
from matrix.cells import FAULTS, Cell, cells, exact_cells, loop_cells
from matrix.hang_cells import HANGS, HangCell, hang_cells
from matrix.hang_trial import HangTrials, HangVerdict, hang_cluster
from matrix.table import hang_table, table
from matrix.trial import Trials, Verdict
from nursery import Nursery
from twins import Twins

FOLDER = Path("build/fault-matrix")
FIGURES = Path("build/bench/fault-matrix.json")
EXACT_FIGURES = FIGURES.with_stem("fault-matrix-bitwise")
HANG_FIGURES = FIGURES.with_stem("fault-matrix-hangs")
T = TypeVar("T", Verdict, HangVerdict)


def main() -> None:
    """Run the selected cells, print the result, write the numbers."""
    options = _asked()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    FOLDER.mkdir(parents=True, exist_ok=True)
    struck = [cell for cell in options if isinstance(cell, Cell)]
    hung = [cell for cell in options if isinstance(cell, HangCell)]
    are_equal = True
    if struck:
        figures = EXACT_FIGURES if "bitwise" in struck[0].variant.name else FIGURES
        nursery = Nursery(FOLDER / "zygote.log")
        try:
            trials = Trials(FOLDER, nursery)
            are_equal &= _run(struck, trials.run, table, figures)
        finally:
            nursery.close()
    if hung:
        are_equal &= _run_hangs(hung)
    sys.exit(0 if are_equal else 1)


def _run_hangs(asked: Sequence[HangCell]) -> bool:
    folder = FOLDER / "hangs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    twins = Twins(folder)
    try:
        with hang_cluster(folder / "cluster") as cluster:
            trials = HangTrials(folder, cluster, twins)
            return _run(asked, trials.run, hang_table, HANG_FIGURES)
    finally:
        twins.stop()


def _run(
    asked: Sequence[Any],
    run: Callable[[Any], T],
    shown: Callable[[Sequence[T]], list[str]],
    figures: Path,
) -> bool:
    """Run these cells; returns whether all are equal."""
    began_s, commit = time.monotonic(), describe()["commit"]
    verdicts: list[T] = []
    try:
        for number, cell in enumerate(asked, 1):
            verdicts.append(run(cell))
            print(f"{number:4}/{len(asked)}  {_line(verdicts[-1])}", flush=True)
    except (KeyboardInterrupt, SystemExit):
        _write(figures, verdicts, commit)
        raise
    print("", *shown(verdicts), sep="\n")
    counts = Counter(verdict.outcome for verdict in verdicts)
    print(
        f"\n{len(verdicts)} cells in {time.monotonic() - began_s:.0f} s: "
        + ", ".join(f"{counts[word]} {word}" for word in ("equal", "not equal", "not run"))
    )
    print(f"figures: {figures}, {_write(figures, verdicts, commit)} cells at this commit")
    return not counts["not equal"]


def _write(figures: Path, verdicts: Sequence[Verdict | HangVerdict], commit: str) -> int:
    """Write the rows, with those of other cells that were run at the same commit; the number of
    cells. A run of a commit with changes counts for itself only."""
    kept: list[dict[str, object]] = []
    stamped = figures.with_suffix(".stamp")
    if figures.exists() and stamped.exists() and not commit.endswith("-dirty"):
        fresh = {verdict.cell.name for verdict in verdicts}
        if json.loads(stamped.read_text(encoding="utf-8"))["commit"] == commit:
            kept = [
                row
                for row in json.loads(figures.read_text(encoding="utf-8"))
                if row["case"] not in fresh
            ]
    rows = kept + [row for verdict in verdicts for row in _figures(verdict)]
    figures.parent.mkdir(parents=True, exist_ok=True)
    figures.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    stamp(figures, {"commit": commit})
    return len({row["case"] for row in rows})


def _asked() -> list[Cell | HangCell]:
    parser = argparse.ArgumentParser(prog="make fault-matrix")
    for name in ("points", "faults", "variants"):
        parser.add_argument(f"--{name}", default="", help="beginnings, with commas between")
    parser.add_argument(
        "--exact", action="store_true", help="with reproducible: bitwise, where no bit may differ"
    )
    args = parser.parse_args()
    every: list[Cell | HangCell] = (
        [*exact_cells()] if args.exact else [*cells(), *loop_cells(), *hang_cells()]
    )
    there = {
        "points": [cell.point.name for cell in every],
        "faults": [*FAULTS, *HANGS],
        "variants": [cell.variant.name for cell in every],
    }
    chosen = {key: _chosen(parser, key, getattr(args, key), names) for key, names in there.items()}
    found = [
        cell
        for cell in every
        if cell.point.name in chosen["points"]
        and cell.fault in chosen["faults"]
        and cell.variant.name in chosen["variants"]
    ]
    if not found:
        parser.error("no point of these meets such a fault under such a variant")
    return found


def _chosen(
    parser: argparse.ArgumentParser, key: str, asked: str, names: Sequence[str]
) -> set[str]:
    """The names with one of these prefixes. A prefix without a match is an error."""
    found: set[str] = set()
    for beginning in asked.split(","):
        fits = {name for name in names if name.lower().startswith(beginning.strip().lower())}
        if not fits:
            parser.error(
                f"{key.upper()}: none begins with {beginning.strip()!r}; there are "
                f"{', '.join(dict.fromkeys(names))}"
            )
        found |= fits
    return found


def _line(verdict: Verdict | HangVerdict) -> str:
    if isinstance(verdict, HangVerdict):
        acted = f"  acted upon after {verdict.acted_s:.1f} s" if verdict.acted_s else ""
        return (
            f"{verdict.outcome:9}  {verdict.lasted_s:4.1f} s  {verdict.cell.name}{acted}"
            f"{'  ' if verdict.why else ''}{verdict.why}"
        )
    gaps = "".join(
        f"  {name} {gap:.1e} of {3 * noise:.1e}"
        for name, gap, noise in zip(
            ("losses", "parameters"), verdict.gaps, verdict.noise, strict=False
        )
    )
    return (
        f"{verdict.outcome:9}  {verdict.lasted_s:4.1f} s  {verdict.cell.name}{gaps}"
        f"{'  ' if verdict.why else ''}{verdict.why}"
    )


def _figures(verdict: Verdict | HangVerdict) -> list[dict[str, object]]:
    """One row for the outcome and one for each gap, in units of the summation noise; of a hang, one
    for the time until it was acted upon."""
    row = {"case": verdict.cell.name, "system": "unicron", "n": 1}
    rows = [row | {"metric": "outcome", "value": verdict.outcome, "unit": ""}]
    if isinstance(verdict, HangVerdict):
        acted = {"metric": "acted_s", "value": verdict.acted_s, "unit": "s"}
        return rows + [row | acted] * bool(verdict.acted_s)
    for name, gap, noise in zip(
        ("loss_gap", "parameter_gap"), verdict.gaps, verdict.noise, strict=False
    ):
        rows.append(
            row
            | {
                "metric": name,
                "value": gap / noise if noise else gap,
                "unit": "noise" if noise else "relative",
            }
        )
    return rows


if __name__ == "__main__":
    main()
