"""In a rank: an iteration of Unicron and one that it is compared with by turns, in CPU time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import host_reads
from unicron.workers.ipc.pipe_protocol import PULSE
from unicron.workers.ipc.progress_page import ProgressPage
from unicron.workers.training.model import cpu_device

Baseline = Literal["stock", "uncounted"]
"""An iteration of Megatron's own loop, or one of Unicron in which no operation is counted."""


def measure(folder: str, rank: int, num_iterations: int, against: Baseline) -> None:
    """Measure `num_iterations` pairs in this rank's loop. It has a progress page, as an agent gives
    it."""
    os.environ[PULSE] = str(os.dup(ProgressPage().fd))
    (_against_stock if against == "stock" else _against_uncounted)(folder, rank, num_iterations)


def _against_uncounted(folder: str, rank: int, num_iterations: int) -> None:
    """Count the operations of every other iteration. Writes `folder`/<rank>: pairs of CPU seconds,
    counted and not."""
    with cpu_device.uncompiled():
        from unicron.workers.training.communicators import counting
        from unicron.workers.training.step.iteration import Iteration

    run, took_s, end_s = Iteration.run, list[float](), time.process_time()

    def turn(self: Any) -> Any:
        nonlocal end_s
        number = len(took_s)
        is_counted = number % 4 in (0, 3)  # the order changes from pair to pair
        with nullcontext() if is_counted else counting.paused():
            outcome = run(self)
        took_s.append(time.process_time() - end_s)
        pairs = [
            (first, second) if i % 2 == 0 else (second, first)
            for i, (first, second) in enumerate(zip(took_s[::2], took_s[1::2], strict=False))
        ]
        Path(folder, str(rank)).write_text(json.dumps(pairs))
        end_s = time.process_time()
        return outcome

    Iteration.run = turn  # type: ignore[method-assign]


def _against_stock(folder: str, rank: int, num_iterations: int) -> None:
    """Let each iteration of this rank's loop be followed or preceded by one of stock, in turns.

    Writes `folder`/<rank>: a pair of CPU seconds, Unicron's and stock's, for each iteration.
    Unicron's are all that the process used in the pair but stock's: its other threads and the work
    between two iterations are in it.
    """
    with cpu_device.uncompiled():
        from unicron.workers.training import adopt as package
        from unicron.workers.training.communicators import counting
        from unicron.workers.training.step.iteration import Iteration

    functions: dict[str, Any] = {}
    stock: list[Iterator[Any]] = []
    found: list[tuple[float, float]] = []
    run, adopt, end_s = Iteration.run, package.adopt, 0.0

    def noted_adopt(**given: Any) -> Any:
        functions.update(given)
        return adopt(**given)

    def stock_s() -> float:
        began_s = time.process_time()
        with counting.paused():
            next(stock[0])
        return time.process_time() - began_s

    def paired_run(self: Any) -> Any:
        nonlocal end_s
        communicators = self._communicators
        if not stock:
            stock.append(
                host_reads.stock_iterations(
                    functions,
                    communicators.groups,
                    communicators.axes,
                    communicators.place,
                    num_iterations,
                )
            )
            end_s = time.process_time()
        is_first = len(found) % 2 == 0
        stock_took_s = stock_s() if is_first else 0.0
        outcome = run(self)
        if not is_first:
            stock_took_s = stock_s()
        now_s = time.process_time()
        found.append((now_s - end_s - stock_took_s, stock_took_s))
        Path(folder, str(rank)).write_text(json.dumps(found))
        end_s = time.process_time()
        return outcome

    package.adopt = noted_adopt  # type: ignore[assignment]
    Iteration.run = paired_run  # type: ignore[method-assign]
