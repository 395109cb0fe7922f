"""`make bench-recovery`: the same fault under Unicron and its peers, in one run on this machine.

The systems take turns, so that other load affects all of them. The printed results are also written
to build/bench/recovery.json. docs/guides/bench-recovery.md describes what is measured and how.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from bench.recovery import environment
from bench.recovery.environment import LAUNCHER
from bench.recovery.rows import Row, finish
from bench.recovery.trial import NotStarted

ROOT = Path(__file__).resolve().parents[3]
SYSTEMS = (
    "unicron",
    "bare_torch",
    "torchrun",
    "torchrun_workaround",
    "torchft_stable",
    "torchft_fast",
    "nvrx",
    LAUNCHER,
)
NOT_ASKED = "not asked"
"""The note of a system that only runs with a path that was not given."""
STRIKES = ("dp4_sigkill", "dp4_sigstop")
LAYOUTS = ("tp2dp2_sigkill", "pp2dp2_sigkill", "zero1_sigkill", "megatron_default_sigkill")
CASES = (
    *STRIKES,
    "breakdown",
    *LAYOUTS,
    "overhead",
    "overhead_copies",
    "zero1_overhead",
    "restart",
    "growth_ranks",
    "growth_params",
)


def main() -> None:
    """Lay the environments, measure; exit code 1 if a system that was asked for cannot run."""
    parser = argparse.ArgumentParser(prog="make bench-recovery")
    parser.add_argument("-n", type=int, default=5, help="strikes of each system in each case")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks for overhead")
    parser.add_argument("--minutes", type=float, default=40.0, help="nothing begins after them")
    parser.add_argument("--cases", type=words(CASES), default=CASES)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "recovery.json")
    options = asked_for(parser)
    # Also Unicron's processes take their settings from here, such as one thread each.
    os.environ.update(environment.environment(""))
    signal.signal(signal.SIGTERM, interrupt)
    try:
        rows = _measure(options)
    except KeyboardInterrupt:
        sys.exit("interrupted: what was measured by then is told above")
    except NotStarted as error:
        sys.exit(f"cannot run: {error}")
    if whys := cannot_run(rows):
        sys.exit("\n".join(whys))


def asked_for(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with those that say which systems: `systems` and `nvrx`."""
    parser.add_argument("--systems", type=words(SYSTEMS), default=None)
    parser.add_argument("--nvrx", type=Path, help=f"NVRx's source tree, for {LAUNCHER}")
    options = parser.parse_args()
    if getattr(options, "n", 1) < 1:
        parser.error("-n must be at least 1")
    if options.nvrx is not None and not environment.is_tree(options.nvrx):
        parser.error(
            f"{options.nvrx} is no source tree of NVRx: it has no {environment.PACKAGE}/"
            "fault_tolerance/launcher.py. hint: NVRX=/path/to/nvidia-resiliency-ext"
        )
    if options.nvrx is None and LAUNCHER in (options.systems or ()):
        parser.error(f"{LAUNCHER} needs NVRx's source tree. hint: NVRX=/path/to/it")
    options.systems = options.systems or SYSTEMS
    return options


def cannot_run(rows: Sequence[Row]) -> list[str]:
    """A line for each system that was asked for and of which no trial could begin."""
    return [
        f"{row.case}: {row.system} cannot run: {row.note}"
        for row in rows
        if row.metric == "recovered" and row.value is None and row.note != NOT_ASKED
    ]


def words(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option: words separated by commas, each one of `known`."""

    def parsed(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if wrong := [word for word in found if word not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]} is none of {', '.join(known)}")
        return found

    return parsed


def interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM handler: end as Ctrl-C does, with the results so far."""
    raise KeyboardInterrupt


def _measure(options: argparse.Namespace) -> list[Row]:
    from bench.recovery import goals, layouts

    began_s = time.monotonic()
    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="unicron-bench-"))
    try:
        for some in _all(folder, options, began_s):
            rows += some
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        rows += [*layouts.reshaped(rows), *goals.ratios(rows)]
        peers = {name: environment.told(name, options.nvrx) for name in options.systems}
        rows = [_aged(row, peers.get(row.system, "")) for row in rows]
        finish(
            rows,
            options.out,
            began_s,
            goals.held_to(rows),
            versions=environment.versions(),
            peers=peers,
        )
    return rows


def _aged(row: Row, told: str) -> Row:
    """The row with the version and the age of its peer, in the first note of a system."""
    return row._replace(note=f"{told}; {row.note}") if told and row.metric == "recovered" else row


def _all(folder: Path, options: argparse.Namespace, began_s: float) -> Iterator[list[Row]]:
    from bench.recovery import bare_torch, growth, layouts, overhead, shards
    from bench.recovery.rounds import Rounds

    num, systems, cases = options.n, options.systems, options.cases

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:6.0f} s  {text}", flush=True)

    def has_time(what: str) -> bool:
        late = time.monotonic() - began_s > options.minutes * 60.0
        if late:
            say(f"{what} is left out: {options.minutes:g} minutes are over")
        return not late

    if any(case in cases for case in (*STRIKES, "breakdown")):
        struck = [case for case in STRIKES if case in cases]
        if not struck:
            # The breakdown analyses Unicron's own recoveries from a kill, beside the floor.
            systems, struck = ("unicron", bare_torch.NAME), [*STRIKES[:1]]
        absent = environment.ensure(systems, options.nvrx)
        if options.nvrx is None:
            absent[LAUNCHER] = NOT_ASKED
        rounds = Rounds(folder, systems, struck, absent, say)
        try:
            rounds.run(num, has_time)
        finally:
            yield rounds.rows("breakdown" in cases)
    twins: dict[str, list[float]] = {}
    for case in LAYOUTS:
        if case in cases and has_time(case):
            floored = bare_torch.NAME in options.systems
            yield layouts.measure(folder / case, case, num, twins, say, floored=floored)
    if ("overhead" in cases or "overhead_copies" in cases) and has_time("overhead"):
        yield overhead.measure(folder / "overhead", cases, options.pairs, say)
    if "zero1_overhead" in cases and has_time("zero1_overhead"):
        yield shards.measure(folder / "zero1_overhead", options.pairs, say)
    if "restart" in cases and has_time("restart"):
        yield growth.measure_restart(folder / "restart", num, say)
    for case in ("growth_ranks", "growth_params"):
        if case in cases and has_time(case):
            yield growth.measure(folder / case, case, say)


if __name__ == "__main__":
    main()
