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

from bench.recovery.rows import Row, finish, ratio

ROOT = Path(__file__).resolve().parents[3]
SYSTEMS = ("unicron", "torchrun", "torchrun_workaround", "torchft_stable", "torchft_fast", "nvrx")
STRIKES = ("dp4_sigkill", "dp4_sigstop")
LAYOUTS = ("tp2dp2_sigkill", "pp2dp2_sigkill", "zero1_sigkill")
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
    """Build the environment, continue in its Python, measure."""
    parser = argparse.ArgumentParser(prog="make bench-recovery")
    parser.add_argument("-n", type=int, default=5, help="strikes of each system in each case")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks for overhead")
    parser.add_argument("--minutes", type=float, default=40.0, help="nothing begins after them")
    parser.add_argument("--systems", type=words(SYSTEMS), default=SYSTEMS)
    parser.add_argument("--cases", type=words(CASES), default=CASES)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "recovery.json")
    options = parser.parse_args()
    if options.n < 1:
        parser.error("-n must be at least 1")
    from bench.recovery import environment

    environment.ensure()
    if Path(sys.prefix) != environment.PYTHON.parents[1]:
        os.execve(
            environment.PYTHON,
            [str(environment.PYTHON), "-P", "-m", "bench.recovery.main", *sys.argv[1:]],
            environment.environment(""),
        )
    signal.signal(signal.SIGTERM, interrupt)
    try:
        _measure(options)
    except KeyboardInterrupt:
        sys.exit("interrupted: what was measured by then is told above")


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


def _measure(options: argparse.Namespace) -> None:
    from bench.recovery import environment, layouts

    began_s = time.monotonic()
    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="unicron-bench-"))
    try:
        for found in _all(folder, options, began_s):
            rows += found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        rows += layouts.reshaped(rows)
        finish(rows, options.out, began_s, _held_to(rows), versions=environment.versions())


def _all(folder: Path, options: argparse.Namespace, began_s: float) -> Iterator[list[Row]]:
    from bench.recovery import growth, layouts, overhead, shards
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
        # The breakdown analyses Unicron's own recoveries from a kill.
        rounds = Rounds(folder, systems if struck else ("unicron",), struck or STRIKES[:1], say)
        try:
            rounds.run(num, has_time)
        finally:
            yield rounds.rows("breakdown" in cases, num)
    twins: dict[str, list[float]] = {}
    for case in LAYOUTS:
        if case in cases and has_time(case):
            yield layouts.measure(folder / case, case, num, twins, say)
    if ("overhead" in cases or "overhead_copies" in cases) and has_time("overhead"):
        yield overhead.measure(folder / "overhead", cases, options.pairs, say)
    if "zero1_overhead" in cases and has_time("zero1_overhead"):
        yield shards.measure(folder / "zero1_overhead", options.pairs, say)
    if "restart" in cases and has_time("restart"):
        yield growth.measure_restart(folder / "restart", num, say)
    for case in ("growth_ranks", "growth_params"):
        if case in cases and has_time(case):
            yield growth.measure(folder / case, case, say)


def _held_to(rows: Sequence[Row]) -> list[str]:
    """Each measured value beside its goal."""
    found = {(one.case, one.system, one.metric): one.value for one in rows}
    lines: list[str] = []

    def goal(text: str, value: float | None, wanted: float, *, at_least: bool = False) -> None:
        if value is not None:
            holds = value >= wanted if at_least else value <= wanted
            lines.append(
                f"{'holds ' if holds else 'BROKEN'}  {text}: {value:.4g}, goal "
                f"{'at least' if at_least else 'at most'} {wanted:g}"
            )

    goal(
        "dp4_sigkill fault_to_step_s", found.get(("dp4_sigkill", "unicron", "fault_to_step_s")), 0.3
    )
    for peer, times in (("torchrun_workaround", 12.0), ("torchft_fast", 2.0)):
        goal(
            f"{peer} over unicron",
            ratio(rows, "dp4_sigkill", "fault_to_step_s", peer, "unicron"),
            times,
            at_least=True,
        )
    goal(
        "dp4_sigstop fault_to_step_s", found.get(("dp4_sigstop", "unicron", "fault_to_step_s")), 2.3
    )
    for case, name in (
        ("tp2dp2_sigkill", "unicron"),
        ("pp2dp2_sigkill", "unicron"),
        ("zero1_sigkill", "unicron_mirrored"),
        ("zero1_sigkill", "unicron_sharded"),
    ):
        goal(f"{case} {name} fault_to_step_s", found.get((case, name, "fault_to_step_s")), 0.6)
        goal(f"{case} {name} loss_equal", found.get((case, name, "loss_equal")), 1.0, at_least=True)
        if name != "unicron_sharded":  # only a copy has the lost shard
            goal(f"{case} {name} iterations_lost", found.get((case, name, "iterations_lost")), 0.0)
    for case, most in (("overhead", 1.01), ("overhead_copies", 1.03)):
        goal(f"{case} iteration_ratio", found.get((case, "unicron", "iteration_ratio")), most)
    return lines


if __name__ == "__main__":
    main()
