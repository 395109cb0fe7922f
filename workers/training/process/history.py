"""What every member remembers of finished iterations, and what of it has been told."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ....events.records.reports import LossNotFinite, TaskProgressed
from ....events.records.types import Body

TOLD_ITERATIONS_MAX = 4096
"""Iterations in one TaskProgressed."""


class History:
    """Losses and step times from iteration `first` on.

    Every member keeps all of them, so that any can become the one that tells.
    """

    def __init__(self) -> None:
        self.first = 0
        self.losses: list[float] = []
        self.step_s: list[float] = []

    @property
    def end(self) -> int:
        """The first iteration that is not in it."""
        return self.first + len(self.losses)

    @property
    def last(self) -> tuple[float, float]:
        """The loss and the seconds of the newest iteration in it; zeros where there is none."""
        return (self.losses[-1], self.step_s[-1]) if self.losses else (0.0, 0.0)

    def add(self, iteration: int, loss: float, step_s: float) -> None:
        """Iteration `iteration` is done; whatever was known of it and later ones is void."""
        if not self.first <= iteration <= self.end:
            self.replace(iteration, [], [])
        del self.losses[iteration - self.first :], self.step_s[iteration - self.first :]
        self.losses.append(loss)
        self.step_s.append(step_s)

    def replace(self, first: int, losses: list[float], step_s: list[float]) -> None:
        self.first, self.losses, self.step_s = first, losses, step_s

    def tell(self, begin: int, *, task: int, generation: int, micro_batches: int,
             flops: float, skipped: int) -> Iterator[Body]:
        """Reports of all iterations from `begin` on; `flops` are those of one iteration, `skipped`
        the iterations until now, of all, that took no step.

        A loss that is no finite number ends a run of losses and is a report of its own.
        """
        begin = max(begin, self.first)
        while begin < self.end:
            end = begin
            while (end < self.end and end - begin < TOLD_ITERATIONS_MAX
                   and math.isfinite(self.losses[end - self.first])):
                end += 1
            if end > begin:
                losses = tuple(self.losses[begin - self.first : end - self.first])
                step_s = tuple(self.step_s[begin - self.first : end - self.first])
                yield TaskProgressed(
                    task=task, generation=generation, first_iteration=begin, losses=losses,
                    step_s=step_s, rate_flops=flops * len(losses) / max(math.fsum(step_s), 1e-9),
                    micro_batches=micro_batches, skipped=skipped,
                )
            else:
                text = repr(self.losses[end - self.first])
                end += 1
                yield LossNotFinite(task=task, generation=generation, iteration=begin, text=text)
            begin = end
