"""The rows of a bench: medians, intervals, the table, and the result file with its stamp."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench import cores

CONFIDENCE_RATIO = 0.95


class Row(NamedTuple):
    """Median, minimum and maximum of `n` trials; None if no trial has a value: see `note`."""

    case: str
    system: str
    metric: str
    value: float | None
    unit: str
    n: int
    note: str = ""
    low: float | None = None
    high: float | None = None


def row(
    case: str, system: str, metric: str, values: Sequence[float | None], unit: str, note: str = ""
) -> Row:
    """The row of these trials. Trials without a value are left out."""
    there = [value for value in values if value is not None]
    return Row(
        case,
        system,
        metric,
        median(there) if there else None,
        unit,
        len(there),
        note,
        min(there, default=None),
        max(there, default=None),
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Confidence interval of the median, at least 95 %: two of the values (the sign test).

    Exact for any distribution. With fewer than six values the extremes are returned.
    """
    found = sorted(values)
    num, cut = len(found), 0
    while 2 * _at_most(cut, num) <= 1 - CONFIDENCE_RATIO and cut < (num - 1) // 2:
        cut += 1
    first = max(cut - 1, 0)
    return found[first], found[num - 1 - first]


def _at_most(num_heads: int, num: int) -> float:
    """The probability of at most `num_heads` heads in `num` throws."""
    return math.fsum(math.comb(num, heads) for heads in range(num_heads + 1)) / 2.0**num


def table(rows: Sequence[Row]) -> str:
    """One table for each case: a line for each system, a column for each metric, then the notes."""
    return "\n\n".join(
        _table_of([one for one in rows if one.case == case])
        for case in dict.fromkeys(one.case for one in rows)
    )


def _table_of(rows: Sequence[Row]) -> str:
    metrics = list(dict.fromkeys(one.metric for one in rows))
    systems = list(dict.fromkeys(one.system for one in rows))
    # With many more metrics than systems, transpose the table.
    turned = len(metrics) > 3 * len(systems)
    found = {(one.system, one.metric): one for one in rows}
    units = {one.metric: one.unit for one in rows}
    down, across = (metrics, systems) if turned else (systems, metrics)
    head = [
        name
        if turned or (units[name] in ("s", "ms") and name.endswith(f"_{units[name]}"))
        else f"{name} ({units[name]})"
        for name in across
    ]
    lines = [[rows[0].case, *head]]
    for one in down:
        label = f"{one} ({units[one]})" if turned else one
        cells = [found.get((other, one) if turned else (one, other)) for other in across]
        lines.append([label, *("" if cell is None else _shown(cell) for cell in cells)])
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    notes = dict.fromkeys(f"  {one.system}: {one.note}" for one in rows if one.note)
    return "\n".join([*text, *notes])


def _shown(cell: Row) -> str:
    if cell.value is None:
        return "-"
    if cell.n < 2 or cell.low == cell.high:
        return f"{cell.value:.4g}"
    return f"{cell.value:.4g} [{cell.low:.4g}, {cell.high:.4g}]"


def ratio(rows: Sequence[Row], case: str, metric: str, over: str, under: str) -> float | None:
    """One system's median over another's."""
    found = {one.system: one.value for one in rows if (one.case, one.metric) == (case, metric)}
    above, below = found.get(over), found.get(under)
    return above / below if above is not None and below else None


def write(rows: Sequence[Row], file: Path, about: dict[str, Any]) -> None:
    """Write the rows as a JSON list, and NAME.stamp with the conditions of the measurement."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([one._asdict() for one in rows], indent=1) + "\n")
    stamp(file, about)


def finish(
    rows: Sequence[Row], file: Path, began_s: float, lines: Sequence[str], **about: object
) -> None:
    """Write the rows and their stamp, with a row for the machine; print their table and `lines`."""
    took_s = round(time.monotonic() - began_s)
    rows = [*rows, Row("machine", "all cores", "cores_speed", cores.speed(), "pieces/s", 1)]
    write(
        rows,
        file,
        {"cores": os.cpu_count(), "load_1min": os.getloadavg()[0], "took_s": took_s, **about},
    )
    print("\n" + table(rows))
    for line in lines:
        print(line)
    print(f"{len(rows)} rows in {file}; took {took_s} s", flush=True)


def stamp(file: Path, about: dict[str, Any] | None = None) -> None:
    """Write the stamp beside the rows: commit, time and `about` (JSON; docs/reference/figures.py
    reads it)."""
    file.with_suffix(".stamp").write_text(json.dumps(describe() | (about or {}), indent=1) + "\n")


def describe() -> dict[str, Any]:
    """The commit of this checkout and the time. `-dirty` is added if files differ from the commit,
    but for pages: figures are written into those."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = commit and _git("status", "--porcelain", "-uno", "--", ":/", ":!/docs", ":!/*.md")
    return {
        "commit": (commit or "unknown") + ("-dirty" if changed else ""),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _git(*arguments: str) -> str:
    """What git prints of this checkout; nothing if it fails or is not there."""
    try:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parents[1]), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
