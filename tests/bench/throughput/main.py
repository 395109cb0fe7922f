"""`make bench-throughput`: the throughput and memory models against published results.

The rows go to build/bench/throughput.json. They have the MAPE of the rate on A100 and H100: in
sample, out of sample (constants fitted to the other sources), and after one measured point. They
also count published layouts that the memory model refuses, and out-of-memory failures that it
accepts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.recovery.rows import Row, table, write
from bench.throughput.fit import Fitted, fit, mape
from bench.throughput.rows import Published, fits, predicted, published
from unicron.control_plane.throughput.step_time import constants_of

ROOT = Path(__file__).parents[3]
KINDS = ("A100", "H100")
Guess = Callable[[Published], float | None]


def main() -> None:
    """Print the table, write the rows."""
    parser = argparse.ArgumentParser(prog="make bench-throughput")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/throughput.json")
    parser.add_argument("--rows", action="store_true", help="every row with its layout")
    options = parser.parse_args()
    rows = published()
    if options.rows:
        for row in rows:
            guess, layout = predicted(row, constants_of(row.model))
            print(
                f"{row.line:4} {row.name:48} {row.rate_flops / 1e12:6.1f} {guess / 1e12:6.1f} "
                f"{100 * (guess / row.rate_flops - 1):+6.1f} %  {layout.told()}"
            )
    found = [*errors(rows), *memory(rows)]
    write(found, options.out, {"rows": len(rows), "fitted": fit(sample(rows)).values})
    print(table(found))
    print(f"\n{len(found)} rows in {options.out}")


def sample(rows: Sequence[Published]) -> list[Published]:
    """The rows that the constants are fitted to: A100 and H100 in 16 bits."""
    return [row for row in rows if row.kind in KINDS and row.model.precision != "fp8"]


def errors(rows: Sequence[Published]) -> list[Row]:
    """MAPE by kind, and by kind and source."""
    fitted_to = sample(rows)
    without = {
        source: fit([row for row in fitted_to if row.source != source])
        for source in sorted({row.source for row in fitted_to})
    }
    out = _left_out(without)
    ways: dict[str, Guess] = {
        "in sample": lambda row: predicted(row, constants_of(row.model))[0],
        "out of sample": out,
        "one point": _one_point(fitted_to, out),
        "mean of the others": _mean_of_others(fitted_to),
    }
    cases = [(kind, [row for row in fitted_to if row.kind == kind]) for kind in KINDS]
    cases += [
        (f"{kind} {source}", of)
        for kind in KINDS
        for source in sorted(without)
        if (of := [row for row in fitted_to if (row.kind, row.source) == (kind, source)])
    ]
    found = [_error(case, way, guess, of) for case, of in cases for way, guess in ways.items()]
    others = [
        ("V100", [row for row in rows if row.kind == "V100"]),
        ("H100 fp8", [row for row in rows if row.model.precision == "fp8"]),
    ]
    return found + [_error(case, "out of sample", ways["in sample"], of) for case, of in others]


def _left_out(without: dict[str, Fitted]) -> Guess:
    return lambda row: without[row.source].predict(row)


def _error(case: str, way: str, guess: Guess, rows: Sequence[Published]) -> Row:
    pairs = [(found, row.rate_flops) for row in rows if (found := guess(row)) is not None]
    return Row(case, way, "mape_pct", mape(pairs) if pairs else None, "%", len(pairs))


def _task(row: Published) -> tuple[object, ...]:
    """Rows with equal keys are one task at several sizes."""
    model = row.model
    return (row.source, model.gpu, model.hidden, model.num_layers, model.sequence)


def _one_point(rows: Sequence[Published], model: Guess) -> Guess:
    """The out-of-sample model, scaled to one measured point: the task's first other row."""

    def guess(row: Published) -> float | None:
        points = [other for other in rows if _task(other) == _task(row) and other is not row]
        shape, at = model(row), model(points[0]) if points else None
        return points[0].rate_flops * shape / at if shape and at else None

    return guess


def _mean_of_others(rows: Sequence[Published]) -> Guess:
    """A prediction without a model: the mean rate of that kind in all other sources."""

    def guess(row: Published) -> float | None:
        others = [
            other.rate_flops
            for other in rows
            if other.kind == row.kind and other.source != row.source
        ]
        return math.fsum(others) / len(others) if others else None

    return guess


def memory(rows: Sequence[Published]) -> list[Row]:
    """Rows for which the memory model is certainly wrong."""
    ran = [row for row in rows if not row.oom]
    failed = [row for row in rows if row.oom]
    refused = [row for row in ran if not any(fits(row.model, x) for x in row.layouts)]
    accepted = [row for row in failed if any(fits(row.model, x) for x in row.layouts)]
    note = "; ".join(row.name for row in refused)
    return [
        Row("memory", "unicron", "refused_published", len(refused), "rows", len(ran), note),
        Row(
            "memory",
            "unicron",
            "accepted_oom",
            len(accepted) if failed else None,
            "rows",
            len(failed),
            "" if failed else "no row of the table ran out of memory",
        ),
    ]


if __name__ == "__main__":
    main()
