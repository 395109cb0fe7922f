"""`make bench-overhead`: the cost of an undisturbed iteration under Unicron, over Megatron's loop.

The printed results are also written to build/bench/overhead.json. docs/guides/bench-overhead.md
says why the method is valid.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.overhead.pairs import Baseline
from bench.recovery.rows import Row, finish, interval
from loop_driver import changed_example, drive_loop
from nursery import Nursery
from unicron.events.records.reports import RankFinished
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions

ROOT = Path(__file__).resolve().parents[3]
SYSTEM = "unicron"
RATIO_MAX, WIDTH_MAX = 1.01, 0.01
FOLDERS = [str(ROOT / "tests"), str(ROOT / "tests" / "drivers")]
MICRO_BATCHES = 8
LIMIT_S = 3600.0
LAUNCHES_NUM, WARM_UP = 24, 3
"""WARM_UP: iterations of each that are not counted: the first ones create states and buffers."""
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""The ranks' memory is of huge pages, where the machine has them: with small ones, two launches of
the same processes differ by several per cent."""
EXACT = {"reproducible": "bitwise"}
SHARDED = {"optimizer": "sharded", "mirror": "never"}


class Case(NamedTuple):
    """Micro-batches of `rows` sequences of `length` tokens, options of the loop, the goal, and the
    pairs of iterations in a launch. Micro-batches of real jobs have 2,048 tokens or more. Most of
    the cost depends on the size of the model, not on the tokens."""

    rows: int
    length: int
    loop: dict[str, Any] = {}  # noqa: RUF012
    ratio_max: float = math.inf
    num_pairs: int = 8
    axes: Axes = Axes(dp=2)
    against: Baseline = "stock"


COUNTED_MAX = 1.005
"""Goal for the counts of what a rank has entered in each group."""
CASES = {
    "overhead": Case(2, 512, ratio_max=RATIO_MAX),
    "overhead_128_tokens": Case(2, 64),
    "bitwise_int64": Case(8, 512, EXACT, 1.05, 4),
    "bitwise_int32": Case(8, 512, EXACT | {"reproducible_bits": 32}, 1.02, 4),
    "sharded": Case(2, 512, SHARDED, axes=Axes(dp=4)),
    "sharded_kept": Case(2, 512, {"optimizer": "mirrored"}, axes=Axes(dp=4)),
    "counted_dp4": Case(2, 64, {}, COUNTED_MAX, 48, Axes(dp=4), "uncounted"),
    "counted_tp2dp2": Case(2, 64, {"tensor": [2]}, COUNTED_MAX, 48, Axes(tp=2, dp=2), "uncounted"),
}
WHY = """\
Why this is valid: each rank runs an iteration of Unicron's loop and one of Megatron's own schedule
and optimizer by turns, in one process, with the same model, batches, groups and memory; which of
both comes first changes from pair to pair, so a drift of the machine cancels. CPU time, of all
threads of all ranks, has no waits for other programs in it. What other programs still do to it
(caches, clock) comes and goes in both halves of a pair. Where the memory of each half lies does
not: it stays as long as the processes. So a value is the median of one launch of the processes.
The interval of the median of all launches is exact for any distribution of noise (sign test,
95 %). Not in it: time that a GPU would idle, for which tests/workers/training/test_host_reads.py
counts the waits of the host.
In `sharded` both halves have Megatron's distributed optimizer; in `sharded_kept` each rank of
Unicron also keeps the shard of another.
In the cases `counted_...` both halves of a pair are iterations of Unicron's loop; in the second one
nothing counts what the rank enters in its groups. Megatron's loop is never counted."""
MEASURE = """
import sys
sys.path[:0] = {folders!r}
import os
os.environ["UNICRON_TRACE_DIR"] = ""
from bench.overhead import pairs
pairs.measure({folder!r}, int(os.environ["UNICRON_RANK"]), {num}, {against!r})
"""


def main() -> None:
    """Measure, compare with the goal."""
    parser = argparse.ArgumentParser(prog="make bench-overhead")
    parser.add_argument(
        "-n",
        type=int,
        default=LAUNCHES_NUM,
        help="launches of each case, of 4 or 8 pairs of iterations",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "overhead.json")
    parser.add_argument("--cases", default=",".join(CASES), help="with commas between")
    options = parser.parse_args()
    if unknown := set(options.cases.split(",")) - CASES.keys():
        parser.error(f"CASES: no {min(unknown)}; there are {', '.join(CASES)}")
    if options.n < 1:
        parser.error("-n must be at least 1")
    began_s = time.monotonic()
    rows, lines = [], []
    for case in options.cases.split(","):
        ratio_max = CASES[case].ratio_max
        ratios, stock_s = list[float](), list[float]()
        for _ in range(options.n):
            with tempfile.TemporaryDirectory(prefix="unicron-overhead-") as folder:
                pairs = measured(Path(folder), CASES[case])
            ratios.append(median(unicron / stock for unicron, stock in pairs))
            stock_s.append(median(stock for _, stock in pairs))
            print(f"{case}: launch {len(ratios)} of {options.n}: {ratios[-1]:.4f}", flush=True)
        low, high = interval(ratios)
        rows += [
            Row(case, SYSTEM, metric, value, unit, len(ratios))
            for metric, value, unit in (
                ("iteration_ratio", median(ratios), "x"),
                ("iteration_ratio_low", low, "x"),
                ("iteration_ratio_high", high, "x"),
                (f"{CASES[case].against}_cpu_s", median(stock_s), "s"),
            )
        ]
        if math.isfinite(ratio_max):
            lines += [
                f"{'holds ' if median(ratios) <= ratio_max else 'misses'}  {case}: at most "
                f"{ratio_max}",
                f"{'holds ' if high - low < WIDTH_MAX else 'misses'}  {case}: interval narrower "
                f"than {WIDTH_MAX}",
            ]
    finish(rows, options.out, began_s, [*lines, WHY], launches=options.n)


def trained(folder: Path, case: Case) -> Path:
    """The script that is measured: the example with a larger model, and without evaluations."""
    return changed_example(
        folder,
        [
            ("5, 4\n", "10**9, 4\n"),
            ("hidden_size=32", "hidden_size=256"),
            (
                "VOCABULARY, SEQUENCE, ROWS, SAMPLES = 64, 16, 2",
                f"VOCABULARY, SEQUENCE, ROWS, SAMPLES = 512, {case.length}, {case.rows}",
            ),
        ],
    )


def measured(folder: Path, case: Case) -> list[tuple[float, float]]:
    """CPU seconds of all ranks in each pair: Unicron's, those of what it is compared with."""
    total, ranks = WARM_UP + case.num_pairs, list(range(num_positions(case.axes)))
    os.environ.update(HUGE_PAGES)
    with closing(Nursery(folder / "zygote.log")) as nursery:
        driver = drive_loop(
            folder,
            nursery,
            [],
            iterations=total * (2 if case.against == "uncounted" else 1),
            micro_batches=MICRO_BATCHES,
            script=trained(folder, case),
            **case.loop,
        )
        measure = MEASURE.format(
            folders=FOLDERS, folder=str(folder), num=total, against=case.against
        )
        driver.patch = measure + driver.patch
        try:
            driver.start(*ranks)
            driver.form(ranks, axes=case.axes)
            for rank in ranks:
                driver.wait(RankFinished, rank, limit_s=LIMIT_S)
            driver.finish(ranks)
        finally:
            driver.close()
    each = [json.loads((folder / str(rank)).read_text())[WARM_UP:] for rank in ranks]
    return [
        (sum(unicron_s for unicron_s, _ in pair), sum(stock_s for _, stock_s in pair))
        for pair in zip(*each, strict=True)
    ]


if __name__ == "__main__":
    main()
