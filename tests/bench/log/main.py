"""`make bench-log`: the log: appends, replay, start, moments of the past, memory, takeovers, chaos.

The printed results are also written to build/bench/log.json. docs/guides/bench-log.md describes the
cases and has the results of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.log import chaos, library, read, takeover
from bench.log.records import Year
from bench.log.sealed import SealedCluster, Written
from bench.recovery.rows import Row, finish, row

ROOT = Path(__file__).resolve().parents[3]
LOG_CASES = ("append_always", "replay_1m", "start_1m_over_10k", "at_1m", "server_memory")
"""They share one log."""
CHAOS_CASES = ("lost", "doubled")
HISTORY_CASE, TYPED_CASE = "history_year", "typed_100k"
CASES = (*LOG_CASES, HISTORY_CASE, TYPED_CASE, *takeover.CASES, *CHAOS_CASES)
SYSTEM, PEER = "unicron", library.PACKAGE
NUM_TAKEOVERS = 30
UNITS = {"s": "s", "mb": "MB", "ratio": "x"}


class Sizes(NamedTuple):
    """Records: of the long log; of the short one, also when the server's memory is measured first;
    behind the sealed ones; and those of the library."""

    long: int = 1_000_000
    short: int = 10_000
    memory: int = 100_000
    rest: int = 5_000
    library: int = library.NUM_RECORDS
    moments: int = read.NUM_MOMENTS
    year: int = 890_000
    typed: int = 100_000


class Goal(NamedTuple):
    """A limit of a metric."""

    value: float
    at_least: bool = False


GOALS = {
    ("append_always", "records_per_s"): Goal(20_000, at_least=True),
    ("append_always", "p99_ms"): Goal(20),
    ("replay_1m", "records_per_s"): Goal(100_000, at_least=True),
    ("start_1m_over_10k", "ratio"): Goal(2),
    ("at_1m", "p99_s"): Goal(2),
    ("server_memory", "ratio"): Goal(1.2),
    (HISTORY_CASE, "answer_s"): Goal(1),
    **{
        (TYPED_CASE, f"{what}_s"): Goal(2)
        for what in (
            "status",
            "status_task",
            "incident",
            "incident_all",
            "status_task_again",
            "incident_again",
        )
    },
    **{
        (case, metric): goal
        for case in takeover.CASES
        for metric, goal in (("p50_s", Goal(2)), ("worst_s", Goal(5)))
    },
    **{(case, "records"): Goal(0) for case in CHAOS_CASES},
}


def main() -> None:
    """Measure, compare with the goals."""
    parser = argparse.ArgumentParser(prog="make bench-log")
    parser.add_argument("-n", type=int, default=NUM_TAKEOVERS, help="takeovers of each case")
    parser.add_argument("--kills", type=int, default=chaos.NUM_KILLS, help="kills of chaos-log")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "log.json")
    options = parser.parse_args()
    if min(options.n, options.kills) < 1:
        parser.error("-n and --kills must be at least 1")
    library.ensure()
    began_s = time.monotonic()
    try:
        rows = measured(options.cases, Sizes(), options.n, options.kills)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finish(rows, options.out, began_s, held_to(rows), versions={PEER: library.version()})


def measured(cases: Sequence[str], sizes: Sizes, num_takeovers: int, num_kills: int) -> list[Row]:
    """The rows of these cases."""
    rows: list[Row] = []
    if set(cases) & set(LOG_CASES):
        with tempfile.TemporaryDirectory(prefix="unicron-log-") as folder:
            rows += [one for one in of_log(Path(folder), sizes) if one.case in cases]
    if HISTORY_CASE in cases:
        with tempfile.TemporaryDirectory(prefix="unicron-log-") as folder:
            rows += of_history(Path(folder), sizes)
    if TYPED_CASE in cases:
        with tempfile.TemporaryDirectory(prefix="unicron-log-") as folder:
            rows += of_typed(Path(folder), sizes)
    for case in takeover.CASES:
        if case in cases:
            with tempfile.TemporaryDirectory(prefix="unicron-log-") as folder:
                rows += of_takeovers(case, Path(folder), num_takeovers)
            print(f"{case}  done", flush=True)
    if set(cases) & set(CHAOS_CASES):
        seed = random.SystemRandom().randrange(10**6)
        with tempfile.TemporaryDirectory(prefix="unicron-chaos-") as folder:
            rows += [
                one
                for one in chaos.rows_of(num_kills, *chaos.chaos(Path(folder), num_kills, seed))
                if one.case in cases
            ]
    return rows


# --- one log --------------------------------------------------------------------------------------
def of_log(folder: Path, sizes: Sizes) -> list[Row]:
    """Write a long log and a short one, read them, and the same with the library."""
    made = library.measured(folder, sizes.library)
    print(f"{PEER}  {sizes.library} records", flush=True)
    starts_s: dict[str, float] = {}
    short = SealedCluster(folder / "short")
    try:
        asyncio.run(short.write(sizes.short, sizes.rest))
        starts_s["start_10k_s"] = read.start_s(short)
    finally:
        short.stop()
    long = SealedCluster(folder / "long")
    try:
        written = asyncio.run(long.write(sizes.long, sizes.rest, (sizes.memory, sizes.long)))
        print(f"{SYSTEM}  {written.num_records} records", flush=True)
        starts_s["start_1m_s"] = read.start_s(long)
        replayed = read.replay(long.folder)
        times_s = read.moments_s(long, sizes.long, sizes.moments)
    finally:
        long.stop()
    before_mb, after_mb = (written.memory_mb[num] for num in (sizes.memory, sizes.long))
    found = {
        "start_1m_over_10k": starts_s | {"ratio": starts_s["start_1m_s"] / starts_s["start_10k_s"]},
        "at_1m": {"p50_s": median(times_s), "p99_s": percentile(times_s, 0.99)},
        "server_memory": {"ratio": after_mb / before_mb, "100k_mb": before_mb, "1m_mb": after_mb},
    }
    return [
        *of_appends(written, made),
        *of_replay(replayed, made),
        *(
            row(case, SYSTEM, metric, [value], UNITS[metric.rpartition("_")[2]])
            for case, metrics in found.items()
            for metric, value in metrics.items()
        ),
    ]


def of_history(folder: Path, sizes: Sizes) -> list[Row]:
    """The history of a year: as the first count finds it, and as later answers do."""
    cluster = SealedCluster(folder / "year")
    try:
        written = asyncio.run(cluster.write(sizes.year, sizes.rest, life=Year()))
        print(f"{SYSTEM}  {written.num_records} records of a year", flush=True)
        found = read.history(cluster)
    finally:
        cluster.stop()
    units = {"days": "days"}
    return [
        row(
            HISTORY_CASE,
            SYSTEM,
            metric,
            [value],
            units.get(metric) or UNITS[metric.rpartition("_")[2]],
        )
        for metric, value in found.items()
    ]


def of_typed(folder: Path, sizes: Sizes) -> list[Row]:
    """The commands that a person types in an incident, on a log that no control plane has read."""
    cluster = SealedCluster(folder / "typed")
    try:
        written = asyncio.run(cluster.write(sizes.typed, sizes.rest))
        print(f"{SYSTEM}  {written.num_records} records, to be asked about", flush=True)
        found = read.typed(cluster)
    finally:
        cluster.stop()
    return [row(TYPED_CASE, SYSTEM, metric, [value], "s") for metric, value in found.items()]


def of_appends(written: Written, made: dict[str, Any]) -> list[Row]:
    """Appends of the same batches by both systems; `cpu_us` of a record, that of the server too."""
    rows: list[Row] = []
    for system, num, times_s, cpu_s in (
        (SYSTEM, written.num_records, written.append_s, written.cpu_s),
        (PEER, made["num"], made["append_s"], made["append_cpu_s"]),
    ):
        note = "" if system == SYSTEM else "SQLite with its write-ahead log; each batch is synced"
        for metric, value, unit in (
            ("records_per_s", num / sum(times_s), "records/s"),
            ("p99_ms", 1e3 * percentile(times_s, 0.99), "ms"),
            ("cpu_us", 1e6 * cpu_s / num, "us"),
        ):
            rows.append(row("append_always", system, metric, [value], unit, note))
    return rows


def of_replay(replayed: dict[str, float], made: dict[str, Any]) -> list[Row]:
    """Records folded into a state."""
    note = f"{made['num']} records; its state only counts them"
    units = {"records_per_s": "records/s", "cpu_us": "us", "read_cpu_us": "us"}
    return [
        *(
            row("replay_1m", SYSTEM, metric, [value], units[metric])
            for metric, value in replayed.items()
        ),
        row(
            "replay_1m", PEER, "records_per_s", [made["num"] / made["replay_s"]], "records/s", note
        ),
        row("replay_1m", PEER, "cpu_us", [1e6 * made["replay_cpu_s"] / made["num"]], "us", note),
    ]


def of_takeovers(case: str, folder: Path, num: int) -> list[Row]:
    """The median and the longest of `num` takeovers."""
    if why := takeover.why_not(case):
        return [row(case, SYSTEM, metric, [], "s", why) for metric in ("p50_s", "worst_s")]
    times_s = takeover.takeovers(case, folder, num)
    return [
        row(case, SYSTEM, "p50_s", times_s, "s"),
        row(case, SYSTEM, "worst_s", [max(times_s)], "s")._replace(n=num),
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def held_to(rows: Sequence[Row]) -> list[str]:
    """Each measured value beside its goal."""
    lines: list[str] = []
    for one in rows:
        goal = GOALS.get((one.case, one.metric))
        if goal is None or one.value is None or one.system != SYSTEM:
            continue
        holds = one.value >= goal.value if goal.at_least else one.value <= goal.value
        lines.append(
            f"{'holds ' if holds else 'misses'}  {one.case}, {one.metric}: "
            f"{one.value:.4g}, goal {'at least' if goal.at_least else 'at most'} "
            f"{goal.value:g}"
        )
    return lines


if __name__ == "__main__":
    main()
