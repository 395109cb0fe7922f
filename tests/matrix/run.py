"""Runs the fault matrix: `make fault-matrix`, or a part with POINTS, FAULTS and VARIANTS.

Each of these is a comma-separated list of prefixes. One cell runs at a time, with at most nine
ranks; its reference run is trained before. The exit code is 1 if a cell is not equal. The rows of
runs at one commit add up: so the matrix may be run in parts, and a cell again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.recovery.rows import describe, stamp
from matrix.cells import FAULTS, Cell, cells, exact_cells, loop_cells
from matrix.table import table
from matrix.trial import Trials, Verdict
from nursery import Nursery

FOLDER = Path("build/fault-matrix")
FIGURES = Path("build/bench/fault-matrix.json")
EXACT_FIGURES = FIGURES.with_stem("fault-matrix-bitwise")


def main() -> None:
    """Run the selected cells, print the result, write the numbers."""
    options = _asked()
    figures = EXACT_FIGURES if "bitwise" in options[0].variant.name else FIGURES
    began_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    FOLDER.mkdir(parents=True, exist_ok=True)
    nursery = Nursery(FOLDER / "zygote.log")
    verdicts: list[Verdict] = []
    commit = describe()["commit"]
    try:
        trials = Trials(FOLDER, nursery)
        for number, cell in enumerate(options, 1):
            verdicts.append(trials.run(cell))
            print(f"{number:4}/{len(options)}  {_line(verdicts[-1])}", flush=True)
    except (KeyboardInterrupt, SystemExit):
        _write(figures, verdicts, commit)
        raise
    finally:
        nursery.close()
    print("", *table(verdicts), sep="\n")
    counts = Counter(verdict.outcome for verdict in verdicts)
    print(
        f"\n{len(verdicts)} cells in {time.monotonic() - began_s:.0f} s: "
        + ", ".join(f"{counts[word]} {word}" for word in ("equal", "not equal", "not run"))
    )
    print(f"figures: {figures}, {_write(figures, verdicts, commit)} cells at this commit")
    sys.exit(1 if counts["not equal"] else 0)


def _write(figures: Path, verdicts: Sequence[Verdict], commit: str) -> int:
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


def _asked() -> list[Cell]:
    parser = argparse.ArgumentParser(prog="make fault-matrix")
    for name in ("points", "faults", "variants"):
        parser.add_argument(f"--{name}", default="", help="beginnings, with commas between")
    parser.add_argument(
        "--exact", action="store_true", help="with reproducible: bitwise, where no bit may differ"
    )
    args = parser.parse_args()
    every = [*exact_cells()] if args.exact else [*cells(), *loop_cells()]
    there = {
        "points": [cell.point.name for cell in every],
        "faults": list(FAULTS),
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


def _line(verdict: Verdict) -> str:
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


def _figures(verdict: Verdict) -> list[dict[str, object]]:
    """One row for the outcome and one for each gap, in units of the summation noise."""
    row = {"case": verdict.cell.name, "system": "unicron", "n": 1}
    rows = [row | {"metric": "outcome", "value": verdict.outcome, "unit": ""}]
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
