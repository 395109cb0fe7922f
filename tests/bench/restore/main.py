"""`make bench-restore`: how fast ranks move a large state, beside a plain copy of the same bytes.

Not `make bench-restart`, which times a task whose processes start again, from memory and from disk.
A case is a phase and the size of a rank's state, such as `restore_1gb`. The printed results are
also written to build/bench/restore.json. docs/guides/bench-restore.md describes the phases.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.recovery.main import interrupt
from bench.recovery.rows import Row, finish, row
from bench.restore import trial
from bench.restore.trial import RESHARDS, TWO_RANKS, Measured, setting

ROOT = Path(__file__).resolve().parents[3]
SYSTEM, PLAIN = "unicron", "plain copy"
GOAL_RATIO = 0.5
GIB_BYTES = 1 << 30
GIB_MAX = 18
Say = Callable[[str], None]


class Case(NamedTuple):
    """`gb`: the state of a rank, in GB (1e9 bytes)."""

    name: str
    phase: str
    gb: float


def case_of(name: str) -> Case:
    """The case with this name. Raises argparse.ArgumentTypeError."""
    phases = "|".join((*TWO_RANKS, *RESHARDS))
    found = re.fullmatch(rf"({phases})_([0-9.]+)gb", name)
    try:
        return Case(name, found[1], float(found[2])) if found else _no_case(name)
    except ValueError:
        return _no_case(name)


def _no_case(name: str) -> Case:
    raise argparse.ArgumentTypeError(f"{name}: a case is a phase and a size, as restore_1gb")


CASES = tuple(
    case_of(f"{phase}_{gb}gb")
    for gb, phases in (
        ("0.25", (*TWO_RANKS, *RESHARDS)),
        ("1", (*TWO_RANKS, *RESHARDS)),
        ("4", TWO_RANKS),
    )
    for phase in phases
)


def main() -> None:
    """Measure, compare with the goal."""
    parser = argparse.ArgumentParser(prog="make bench-restore")
    parser.add_argument("-n", type=int, default=1, help="trials of each case")
    parser.add_argument(
        "--cases", type=lambda text: [case_of(name) for name in text.split(",")], default=CASES
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "restore.json")
    options = parser.parse_args()
    if options.n < 1:
        parser.error("-n must be at least 1")
    if why := why_not(options.cases, _available_bytes()):
        sys.exit(why)
    signal.signal(signal.SIGTERM, interrupt)
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:6.0f} s  {text}", flush=True)

    found: dict[str, list[Measured]] = {case.name: [] for case in options.cases}
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="unicron-bench-", dir=ROOT / "build"))
    try:
        for number in range(options.n):
            _measure(folder / str(number), options.cases, found, say)
    except KeyboardInterrupt:
        say("interrupted: what was measured by then is told below")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        rows = [one for name, all_found in found.items() for one in rows_of(name, all_found)]
        finish(rows, options.out, began_s, held_to(rows))


def why_not(cases: Sequence[Case], available_bytes: int) -> str:
    """Why these cases cannot run here, in a line; "" if they can."""
    most = max(cases, key=lambda case: setting(case.phase, case.gb).peak_bytes)
    needed = setting(most.phase, most.gb).peak_bytes / GIB_BYTES
    if needed > GIB_MAX:
        return f"{most.name} needs {needed:.1f} GiB of memory: more than {GIB_MAX} are not taken"
    if needed * GIB_BYTES > available_bytes:
        have = available_bytes / GIB_BYTES
        return f"{most.name} needs {needed:.1f} GiB of memory, and {have:.1f} are available"
    return ""


def _available_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def _measure(
    folder: Path, cases: Sequence[Case], found: dict[str, list[Measured]], say: Say
) -> None:
    for gb in sorted({case.gb for case in cases}):
        here = {case.phase: case.name for case in cases if case.gb == gb}
        if phases := [phase for phase in TWO_RANKS if phase in here]:
            measured = trial.two_ranks(folder / f"{gb}", gb, phases)
            for phase, each in measured.items():
                found[here[phase]].append(each)
                say(_line(here[phase], each))
        for phase in RESHARDS:
            if phase in here:
                each = trial.reshard(folder / f"{gb}-{phase}", gb, phase)
                found[here[phase]].append(each)
                say(_line(here[phase], each))
        shutil.rmtree(folder)


def _line(name: str, each: Measured) -> str:
    return (
        f"{name}: {each.moved.num_bytes / 1e9:.2f} GB in {each.moved.took_s:.2f} s, "
        f"plain in {each.bare_s:.2f} s"
    )


def rows_of(name: str, all_found: Sequence[Measured]) -> list[Row]:
    """The rows of a case."""
    note = "; ".join(dict.fromkeys(each.how for each in all_found))
    why = "; ".join(dict.fromkeys(each.moved.why for each in all_found if each.moved.why))
    beside = [each.moved.beside_s for each in all_found if each.moved.beside_s is not None]
    return [
        row(
            name,
            SYSTEM,
            "mb_per_s",
            [_mb_per_s(each, each.moved.took_s) for each in all_found],
            "MB/s",
            note,
        ),
        row(name, PLAIN, "mb_per_s", [_mb_per_s(each, each.bare_s) for each in all_found], "MB/s"),
        row(
            name,
            SYSTEM,
            "share_of_copy",
            [each.bare_s / each.moved.took_s for each in all_found],
            "1",
            note,
        ),
        *([row(name, SYSTEM, "beside_s", beside, "s", why)] if beside else []),
    ]


def _mb_per_s(each: Measured, seconds: float) -> float:
    return each.moved.num_bytes / 1e6 / seconds


def held_to(rows: Sequence[Row]) -> list[str]:
    """Each share beside its goal."""
    return [
        f"{'holds ' if one.value >= GOAL_RATIO else 'misses'}  {one.case} share_of_copy: "
        f"{one.value:.2f}, goal at least {GOAL_RATIO:g}"
        for one in rows
        if one.metric == "share_of_copy" and one.value is not None
    ]


if __name__ == "__main__":
    main()
