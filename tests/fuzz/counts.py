"""The counts of `make fuzz`, by area and seed: runs at one commit add up in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bench.recovery.rows import Row, describe, write

FIGURES = Path("build/bench/fuzz.json")
METRICS = ("cases", "uncaught", "answers_5xx", "hangs")


def add_up(rows: Sequence[Row], figures: Path = FIGURES) -> int:
    """Write the rows, with those of other areas and seeds at the same commit; the number of their
    cases. A run of a tree with changes counts for itself only."""
    stamp, commit = figures.with_suffix(".stamp"), describe()["commit"]
    kept = list[Row]()
    if figures.exists() and stamp.exists() and not commit.endswith("-dirty"):
        fresh = {(one.case, one.system) for one in rows}
        if json.loads(stamp.read_text())["commit"] == commit:
            every = [Row(**one) for one in json.loads(figures.read_text())]
            kept = [one for one in every if (one.case, one.system) not in fresh]
    kept += rows
    write(kept, figures, {"commit": commit})
    return int(sum(one.value or 0 for one in kept if one.metric == "cases"))


def markdown(rows: Sequence[Row]) -> str:
    """A table: for each area its seeds, cases, and what went wrong."""
    lines = ["| area | seeds | cases | uncaught | 5xx | hangs |", "|---|---|---|---|---|---|"]
    for area in dict.fromkeys(one.case for one in rows):
        own = [one for one in rows if one.case == area]
        seeds = dict.fromkeys(one.system.removeprefix("seed ") for one in own)
        lines.append(_line(area, ", ".join(seeds), own))
    return "\n".join([*lines, _line("all", "", rows)])


def _line(area: str, seeds: str, rows: Sequence[Row]) -> str:
    sums = (sum(one.value or 0 for one in rows if one.metric == metric) for metric in METRICS)
    return f"| {area} | {seeds} | {' | '.join(f'{num:,.0f}' for num in sums)} |"
