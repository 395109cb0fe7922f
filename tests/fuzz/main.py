"""`make fuzz`: random input to everything that reads input of others, with a seed.

Prints a row for each area: its cases, tracebacks, answers of 5xx, and hangs. The exit status is 1
if one of the last three is not 0. A case depends on the seed, its area and its number only:
`ONLY=area:number` repeats one. The rows of runs at one commit add up in build/bench/fuzz.json, by
area and seed; `make figures` writes them into the threat model.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from bench.recovery.rows import Row
from fuzz import areas, neighbours
from fuzz.areas import Area
from fuzz.counts import FIGURES, add_up
from msgspec import Struct
from simulated.seeds import quiet

AREAS = (*areas.AREAS, *neighbours.AREAS)
CASE_S_MAX = 20.0
"""A case that takes longer hangs. The slowest takes under a second."""
SHOWN_NUM_MAX, CASES_NUM_MIN = 3, 3
HEADS = ("area", "cases", "tracebacks", "5xx", "hangs", "seconds")


class Hang(BaseException):
    """A case took too long. No product code catches it."""


class Counts(Struct):
    """What came of the cases of one area."""

    area: str
    cases: int = 0
    tracebacks: int = 0
    server_errors: int = 0
    hangs: int = 0
    took_s: float = 0.0
    told: list[str] = []
    """The first of what went wrong: the case, and how to repeat it."""

    @property
    def is_clean(self) -> bool:
        return not (self.tracebacks or self.server_errors or self.hangs)

    def tell(self, what: str) -> None:
        if len(self.told) < SHOWN_NUM_MAX:
            self.told.append(what)


def fuzz(
    area: Area,
    seed: int,
    num_cases: int,
    folder: Path,
    *,
    only: int | None = None,
    s_max: float = float("inf"),
) -> Counts:
    """Run cases of one area, for at most `s_max` seconds after it is opened, but CASES_NUM_MIN."""
    counts, began_s = Counts(area.name), time.monotonic()
    try:
        with area.opened(folder) as case:
            opened_s = time.monotonic()
            for number in range(num_cases) if only is None else (only,):
                is_late = time.monotonic() - opened_s > s_max
                if is_late and counts.cases >= CASES_NUM_MIN:
                    break
                counts.cases += 1
                name = f"SEED={seed} ONLY={area.name}:{number}"
                try:
                    with _limited():
                        status = case(random.Random(f"{seed}:{area.name}:{number}"))
                    if status is not None and status >= 500:
                        counts.server_errors += 1
                        counts.tell(f"{name}: {status}")
                except (Hang, TimeoutError):
                    counts.hangs += 1
                    counts.tell(f"{name}: hangs\n{traceback.format_exc(limit=-3)}")
                except Exception:  # noqa: BLE001 (it is what is counted)
                    counts.tracebacks += 1
                    counts.tell(f"{name}:\n{traceback.format_exc(limit=-6)}")
    except Exception:  # noqa: BLE001 (what the area checks at its end)
        counts.tracebacks += 1
        counts.tell(f"SEED={seed} {area.name}, at its end:\n{traceback.format_exc(limit=-3)}")
    counts.took_s = time.monotonic() - began_s
    return counts


@contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, CASE_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    asks = argparse.ArgumentParser(description=__doc__)
    asks.add_argument("--seed", type=int, default=1)
    asks.add_argument("--cases", type=int, default=10_000, help="in all areas together")
    asks.add_argument("--areas", default="", help="names with commas between; none: all")
    asks.add_argument("--only", default="", help="AREA:NUMBER")
    asked = asks.parse_args()
    only_area, _, only = asked.only.partition(":")
    names = only_area or asked.areas
    chosen = [area for area in AREAS if not names or area.name in names.split(",")]
    quiet()  # ranks that are ended for what they say are no news here
    if not chosen:
        print(f"fuzz: no area {names!r}; there is {', '.join(area.name for area in AREAS)}")
        return 2
    one = asked.cases / sum(area.share for area in chosen)
    results: list[Counts] = []
    _row(HEADS)
    for area in chosen:
        with tempfile.TemporaryDirectory(prefix="unicron-fuzz-") as folder:
            counts = fuzz(
                area,
                asked.seed,
                max(round(one * area.share), 1),
                Path(folder),
                only=int(only) if only else None,
            )
        results.append(counts)
        _row(
            (
                area.name,
                counts.cases,
                counts.tracebacks,
                counts.server_errors,
                counts.hangs,
                round(counts.took_s),
            )
        )
    _row(
        (
            "all",
            *(
                sum(column)
                for column in zip(
                    *(
                        (r.cases, r.tracebacks, r.server_errors, r.hangs, round(r.took_s))
                        for r in results
                    ),
                    strict=True,
                )
            ),
        )
    )
    for counts in results:
        for text in counts.told:
            print(f"\n{text.rstrip()}")
    if not only:
        num = add_up([row for counts in results for row in rows_of(counts, asked.seed)])
        print(f"\n{num:,} cases at this commit: {FIGURES}")
    return 0 if all(counts.is_clean for counts in results) else 1


def rows_of(counts: Counts, seed: int) -> list[Row]:
    """The rows of one area under one seed."""
    values = {"cases": counts.cases, "uncaught": counts.tracebacks}
    values |= {"answers_5xx": counts.server_errors, "hangs": counts.hangs}
    return [
        Row(counts.area, f"seed {seed}", metric, value, "", counts.cases)
        for metric, value in values.items()
    ]


def _row(cells: tuple[object, ...]) -> None:
    first, *rest = map(str, cells)
    print(f"{first:14}" + "".join(f"{cell:>12}" for cell in rest), flush=True)


if __name__ == "__main__":
    sys.exit(main())
