"""`make bench-memory`: the peak memory of a rank in each phase, over that of its training.

A case is a layout and a phase, such as `tp2_start`. Real ranks train a model of 200 million
parameters on the CPU, or one whose state has the size that stands behind the layout, as in
`dp2-4gb_start`. Their resident memory is sampled, less that of an empty rank with everything
imported. The printed results are also written to build/bench/memory.json.
docs/guides/bench-memory.md describes the phases.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.memory import trial
from bench.memory.trial import GROWN_FROM, LAYOUTS, MEASURES, Measured
from bench.recovery.main import interrupt
from bench.recovery.rows import Row, finish, row
from unicron.events.spec.parallelism import num_positions

ROOT = Path(__file__).resolve().parents[3]
CASES = (
    *(f"{name}_start" for name in ("dp2", "tp2", "pp2", "tp2pp2", "tp2dp2")),
    *(f"{name}_recovery" for name in ("dp2", "tp2pp2", "tp2dp2", "pp2dp2")),
    *(f"{name}_growth" for name in GROWN_FROM),
    *(f"{name}_saving" for name in ("dp2", "tp2", "pp2")),
    *(f"{name}_copying" for name in ("dp2", "tp2", "pp2")),
    *(f"dp2-4gb_{phase}" for phase in ("start", "recovery", "saving", "copying")),
)
SIZE = re.compile(r"-([0-9]+(?:\.[0-9]+)?)gb_")
"""Behind a layout: the state of a rank in GB (1e9 bytes), as in `dp2-1gb_start`."""
METRIC, GOAL = "peak_over_training", 1.15
GIB_BYTES = 1 << 30
Say = Callable[[str], None]


def main() -> None:
    """Measure, compare with the goal."""
    parser = argparse.ArgumentParser(prog="make bench-memory")
    parser.add_argument("-n", type=int, default=1, help="trials of each case")
    parser.add_argument(
        "--cases", type=lambda text: [case_of(name) for name in text.split(",")], default=CASES
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "memory.json")
    options = parser.parse_args()
    if options.n < 1:
        parser.error("-n must be at least 1")
    signal.signal(signal.SIGTERM, interrupt)
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:6.0f} s  {text}", flush=True)

    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(trial.MMAP_BYTES_MIN)  # for the ranks
    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="unicron-bench-"))
    try:
        for case in options.cases:
            rows.append(_row_of(folder / case, case, options.n, say))
    except KeyboardInterrupt:
        say("interrupted: what was measured by then is told below")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        finish(rows, options.out, began_s, held_to(rows), model=trial.MODEL)


def case_of(text: str) -> str:
    """The name of a case. Raises argparse.ArgumentTypeError."""
    if SIZE.sub("_", text) not in CASES:
        raise argparse.ArgumentTypeError(f"{text}: a case is one of {', '.join(CASES)}")
    return text


def _row_of(folder: Path, case: str, num: int, say: Say) -> Row:
    name, phase = SIZE.sub("_", case).rsplit("_", 1)
    size = SIZE.search(case)
    train = {"model": trial.model_of(float(size[1]))} if size else {}
    axes, found, why = LAYOUTS[name], list[Measured](), ""
    for number in range(num):
        try:
            found.append(MEASURES[phase](folder / str(number), axes, **train))
            one = found[-1]
            say(
                f"{case} {number + 1} of {num}: {one.ratio:.3f}, "
                f"{one.peak_bytes / GIB_BYTES:.2f} GiB over {one.training_bytes / GIB_BYTES:.2f}"
            )
        except AssertionError as error:
            why = str(error).splitlines()[0]
            say(f"{case}: {error}")
        finally:
            shutil.rmtree(folder / str(number), ignore_errors=True)
    note = (
        f"{num_positions(axes)} ranks"
        + (f", from {GROWN_FROM[name]}" if phase == "growth" else "")
        + (f": {why}" if why else "")
    )
    return row(case, "unicron", METRIC, [one.ratio for one in found], "1", note)


def held_to(rows: Sequence[Row]) -> list[str]:
    """Each ratio beside its goal."""
    return [
        f"{'holds ' if one.value <= GOAL else 'BROKEN'}  {one.case} {one.metric}: "
        f"{one.value:.3f}, goal at most {GOAL:g}"
        for one in rows
        if one.value is not None
    ]


if __name__ == "__main__":
    main()
