"""What Unicron's iteration costs a micro-batch, beside Megatron's own schedule and step.

Both train the same loop in this process, in turn. So clocks, caches and the load of the machine are
the same for both, and the ratio of each pair counts. Unicron's side is the iteration of a member,
with the copy of the local sum that recovery keeps, but without peers, reports and copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from bench.recovery.rows import Row, interval
from gpu.result import CUDA, SYSTEM, of
from loop_driver import changed_example
from loop_twin import StockLoop, given_by
from unicron.events.spec.job import Loop
from unicron.workers.training.adopt.custom_loop import LoopWorkload
from unicron.workers.training.adopt.drivers import RestartOnlyDriver

PAIRS_NUM, BLOCK_ITERATIONS_NUM, WARM_NUM = 60, 1, 5
MICRO_BATCHES = 8
ITERATIONS = WARM_NUM + PAIRS_NUM * BLOCK_ITERATIONS_NUM
LARGE = [
    ("hidden_size=32, num_attention_heads=4", "hidden_size=1024, num_attention_heads=16"),
    ("SEQUENCE, ROWS = 64, 16, 2", "SEQUENCE, ROWS = 64, 1024, 2"),
]
"""On a GPU: 50 million parameters, 2,048 tokens in a micro-batch."""


def check(folder: Path, device: str) -> list[Row]:
    """Pairs of blocks; the rows."""
    script = changed_example(folder, LARGE if device == CUDA else [])
    given = given_by(
        [str(script), "--iterations", str(ITERATIONS), "--micro-batches", str(MICRO_BATCHES)]
    )
    loop = Loop(iterations=ITERATIONS, micro_batches=MICRO_BATCHES, output="")
    work = LoopWorkload(
        loop,
        given["build"],
        given["sample"],
        given["forward"],
        samples_num=given["samples"],
        sequence=given["sequence"],
    )
    driver = RestartOnlyDriver(work, {})
    stock = StockLoop(loop, driver.iteration.engine.trainee.device, driver.communicators, given)
    at = iter(range(ITERATIONS))

    def run_ours() -> None:
        driver.iteration.run()

    def run_stock() -> None:
        stock.run(next(at), range(MICRO_BATCHES))

    for _ in range(WARM_NUM):
        run_ours()
        run_stock()
    pairs = []
    for number in range(PAIRS_NUM):
        turn = {"unicron": run_ours, "stock": run_stock}
        names = list(turn)[:: 1 if number % 2 else -1]  # no side always comes second
        pairs.append({name: _block_s(turn[name]) for name in names})
    assert driver.iteration.step_version == ITERATIONS
    gap = abs(driver.iteration.history.last[0] - stock.history.last[0])
    assert gap < 1e-3 * stock.history.last[0], f"the losses differ by {gap}"
    driver.communicators.down([*driver.iteration.engine.trainee.roots, *stock.trainee.roots])
    return _rows(pairs)


def _block_s(run: Callable[[], None]) -> float:
    """Seconds for each micro-batch of a block."""
    _finish()
    began_s = time.perf_counter()
    for _ in range(BLOCK_ITERATIONS_NUM):
        run()
    _finish()
    return (time.perf_counter() - began_s) / (BLOCK_ITERATIONS_NUM * MICRO_BATCHES)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rows(pairs: list[dict[str, float]]) -> list[Row]:
    ratios = [pair["unicron"] / pair["stock"] for pair in pairs]
    low, high = interval(ratios)
    added_us = [1e6 * (pair["unicron"] - pair["stock"]) for pair in pairs]
    note = f"{PAIRS_NUM} pairs of {BLOCK_ITERATIONS_NUM} iterations in one process"
    return [
        of("overhead", "micro_batch_ratio", ratios, "ratio", note),
        Row("overhead", SYSTEM, "micro_batch_ratio_low", low, "ratio", len(ratios)),
        Row("overhead", SYSTEM, "micro_batch_ratio_high", high, "ratio", len(ratios)),
        of("overhead", "stock_us", [median(1e6 * pair["stock"] for pair in pairs)], "us"),
        of("overhead", "added_us", added_us, "us"),
    ]
