"""The rows of `make mutants`, and their table: which tier sees each mutant, by how many tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bench.recovery.rows import Row, describe

SYSTEM = "unicron"
IN_TEST, IN_REAL, TOOK = "tests_of_make_test", "tests_of_make_test_real", "took_s"
PATCHES = tuple(path.stem for path in sorted(Path(__file__).parent.glob("*.patch")))


def rows_of_this_commit(figures: Path, fresh: Sequence[Row]) -> list[Row]:
    """The rows of other mutants than `fresh`, if `figures` is of the checked-out commit."""
    stamp, commit = figures.with_suffix(".stamp"), describe()["commit"]
    if not figures.exists() or not stamp.exists() or commit.endswith("-dirty"):
        return []
    if json.loads(stamp.read_text(encoding="utf-8"))["commit"] != commit:
        return []
    cases = {row.case for row in fresh}
    rows = [Row(**fields) for fields in json.loads(figures.read_text(encoding="utf-8"))]
    return [row for row in rows if row.case not in cases]


def num_unseen(rows: Sequence[Row]) -> int:
    """The mutants that no test saw."""
    seen = {row.case for row in rows if row.metric in (IN_TEST, IN_REAL) and row.value}
    return len({row.case for row in rows} - seen)


def markdown(rows: Sequence[Row]) -> str:
    """A line for each mutant."""
    value = {(row.case, row.metric): row.value or 0.0 for row in rows}
    what = {row.case: row.note for row in rows if row.metric == IN_TEST}
    lines = [
        "| mutant | what it breaks | seen in | tests of `make test` | of `make test-real` | s |",
        "|---|---|---|---|---|---|",
    ]
    for case in sorted(what):
        in_test, in_real = value[case, IN_TEST], value[case, IN_REAL]
        tier = "test" if in_test else "real" if in_real else "**not seen**"
        took_s = value[case, TOOK]
        lines.append(
            f"| `{case}` | {what[case]} | {tier} | {in_test:.0f} | {in_real:.0f} | {took_s:.0f} |"
        )
    num_seen = len(what) - num_unseen(rows)
    took_s = sum(value[case, TOOK] for case in what)
    return f"{num_seen} of {len(what)} mutants are seen, in {took_s:.0f} s.\n\n" + "\n".join(lines)
