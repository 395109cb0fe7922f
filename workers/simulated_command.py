"""A command on paper: it prints how far it is, and goes on from a checkpoint of its own."""

from __future__ import annotations

import random
from collections.abc import Callable

from ..events.logged import IterationsLogged
from ..events.orders import StartRank
from ..events.reports import Body
from .simulated_net import PaperNet

STEP_S = (0.1, 0.15)
"""An iteration on one slot; on more it takes that much less."""
ITERATIONS_NUM = 100_000
SAVE_ITERATIONS = 10


class PaperLines:
    """The last rank's output, as its agent tells of it, until `end`."""

    def __init__(self, net: PaperNet, order: StartRank, say: Callable[[Body], None]) -> None:
        self._net, self._order, self._say = net, order, say
        self._rng = random.Random(f"lines {order.task} {order.attempt}")
        self._iteration = self._first = net.printed.get(order.task, 0)
        self._timer = net.later(self._rng.uniform(*net.tempo.load_s), self._print)

    def end(self) -> None:
        """It prints no more."""
        self._timer.cancel()

    def _print(self) -> None:
        """What it did since it printed last; the first line does not say of how many it is."""
        order, net = self._order, self._net
        step_s = self._rng.uniform(*STEP_S) / order.num_seats
        num = max(int(net.tempo.progress_s / step_s), 1)
        first = self._iteration == self._first
        self._iteration += num
        net.printed[order.task] = self._iteration // SAVE_ITERATIONS * SAVE_ITERATIONS
        model = order.spec.model
        self._say(IterationsLogged(
            task=order.task, rank=order.rank, attempt=order.attempt, iteration=self._iteration,
            iterations=ITERATIONS_NUM, num_iterations=0 if first else num,
            step_s=4 * step_s if first else step_s, loss=10.0 / self._iteration,
            global_batch=model.global_batch if model is not None else 0))
        self._timer = net.later(num * step_s, self._print)
