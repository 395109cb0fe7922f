"""`make bench-paper`: the paper's evaluation (arXiv 2401.00134), simulated with our constants.

The printed results are also written to build/bench/paper.json, and with --report FOLDER as a page
with charts, beside its traces as scenarios. docs/guides/paper.md describes the assumptions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.paper.report import write
from bench.paper.tables import evaluate, rows_of, screen
from bench.recovery.rows import stamp

ROOT = Path(__file__).resolve().parents[3]


def main() -> None:
    """Simulate every policy on both traces; print the tables, write the rows and the stamp."""
    parser = argparse.ArgumentParser(prog="make bench-paper")
    parser.add_argument("-n", type=int, default=5, help="seeds")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "paper.json")
    parser.add_argument("--report", type=Path, help="a folder for report.html and its charts")
    options = parser.parse_args()
    found = evaluate(options.n)
    rows = rows_of(found)
    print("\n".join(screen(found, rows)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    stamp(options.out)
    if options.report is not None:
        write(options.report, found, rows)


if __name__ == "__main__":
    main()
