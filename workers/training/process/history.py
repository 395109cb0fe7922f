"""Loss and step time of finished iterations, kept by every member."""

import math
from collections.abc import Iterator

from ....events.records.reports import LossNotFinite, TaskProgressed
from ....events.records.types import Body

REPORT_ITERATIONS_MAX = 2048
"""Iterations in one TaskProgressed: 18 bytes each, of the 64 kB that the agent takes."""


class History:
    """Losses and step times of iterations from `first` on. Any member can take over the reports."""

    def __init__(self) -> None:
        self.first = 0
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self.digests: dict[int, str] = {}
        """By iteration: the digest of the state with which it began (step/corruption.py)."""

    @property
    def end(self) -> int:
        """The first iteration after the recorded ones."""
        return self.first + len(self.losses)

    @property
    def last(self) -> tuple[float, float]:
        """Loss and step time of the newest iteration; zeros if there is none."""
        return (self.losses[-1], self.step_s[-1]) if self.losses else (0.0, 0.0)

    def add(self, iteration: int, loss: float, step_s: float) -> None:
        """Record `iteration`; discard earlier records of it and of later iterations."""
        if iteration < self.end:
            self.digests = {at: one for at, one in self.digests.items() if at <= iteration}
        if not self.first <= iteration <= self.end:
            self.replace(iteration, [], [], self.digests)
        del self.losses[iteration - self.first :], self.step_s[iteration - self.first :]
        self.losses.append(loss)
        self.step_s.append(step_s)

    def replace(
        self,
        first: int,
        losses: list[float],
        step_s: list[float],
        digests: dict[int, str] | None = None,
    ) -> None:
        self.first, self.losses, self.step_s, self.digests = first, losses, step_s, digests or {}

    def tell(
        self,
        begin: int,
        *,
        task: int,
        generation: int,
        micro_batches: int,
        flops: float,
        skipped: int,
    ) -> Iterator[Body]:
        """The reports of all iterations from `begin` on. A TaskProgressed ends before a loss that
        is not finite, which gets a LossNotFinite. `flops` is per iteration; `skipped` is the number
        of iterations without an optimizer step since the start of training."""
        begin = max(begin, self.first)
        while begin < self.end:
            end = begin
            while (
                end < self.end
                and end - begin < REPORT_ITERATIONS_MAX
                and math.isfinite(self.losses[end - self.first])
            ):
                end += 1
            if end > begin:
                losses = tuple(self.losses[begin - self.first : end - self.first])
                step_s = tuple(self.step_s[begin - self.first : end - self.first])
                yield TaskProgressed(
                    task=task,
                    generation=generation,
                    first_iteration=begin,
                    losses=losses,
                    step_s=step_s,
                    rate_flops=flops * len(losses) / max(math.fsum(step_s), 1e-9),
                    micro_batches=micro_batches,
                    skipped=skipped,
                    digests={
                        at: self.digests[at] for at in range(begin, end + 1) if at in self.digests
                    },
                )
            else:
                text = repr(self.losses[end - self.first])
                end += 1
                yield LossNotFinite(task=task, generation=generation, iteration=begin, text=text)
            begin = end
