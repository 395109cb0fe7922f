"""`make bench-paper`: the rows of `unicron simulate paper` in build/bench/paper.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.recovery.rows import stamp
from unicron.cli.simulate.paper_tables import evaluate, rows_of

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Simulate every policy on both traces; write the rows and the stamp."""
    parser = argparse.ArgumentParser(prog="make bench-paper")
    parser.add_argument("-n", type=int, default=5, help="seeds")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "paper.json")
    options = parser.parse_args()
    rows = rows_of(evaluate(options.n))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    stamp(options.out)
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
