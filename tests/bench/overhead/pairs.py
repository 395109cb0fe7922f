"""In a rank: an iteration of Unicron and one of Megatron's own loop by turns, in CPU time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import host_reads
from unicron.workers.training.model import cpu_device


def measure(folder: str, rank: int, num_iterations: int) -> None:
    """Let each iteration of this rank's loop be followed or preceded by one of stock, in turns.

    Writes `folder`/<rank>: a pair of CPU seconds, Unicron's and stock's, for each iteration.
    Unicron's are all that the process used in the pair but stock's: its other threads and the work
    between two iterations are in it.
    """
    with cpu_device.uncompiled():
        from unicron.workers.training import adopt as package
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
