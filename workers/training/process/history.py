"""Loss and step time of finished iterations, kept by every member."""

import math
from collections.abc import Iterator

from ....events.records.reports import LossFiniteAgain, LossNotFinite, TaskProgressed
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
        """By iteration: the digest of the state with which it began (step/checks.py)."""
        self.spoilt_by = ""
        """The loss of the step that made the state NaN or infinite, in words; empty: none did."""
        self.saved_at = -1
        """The step version that was saved because the next step would spoil the state."""

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
            self.first, self.losses, self.step_s = iteration, [], []
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
        self.spoilt_by = ""

    def is_finite(self, iteration: int) -> bool:
        """Whether the loss of `iteration` is finite; True if it is not recorded."""
        return not self.first <= iteration < self.end or math.isfinite(
            self.losses[iteration - self.first]
        )

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
        """The reports of all iterations from `begin` on. Each TaskProgressed is of iterations whose
        loss is finite, or of others, whose losses it does not have; LossNotFinite and
        LossFiniteAgain tell of a change. `flops` is per iteration; `skipped` is the number of
        iterations without an optimizer step since the start of training."""
        of = {"task": task, "generation": generation}
        begin = max(begin, self.first)
        while begin < self.end:
            is_finite = self.is_finite(begin)
            if not is_finite and self.is_finite(begin - 1):
                yield LossNotFinite(
                    **of,
                    iteration=begin,
                    text=repr(self.losses[begin - self.first]),
                    is_saving=begin == self.saved_at,
                )
            elif is_finite and not self.is_finite(begin - 1):
                yield LossFiniteAgain(**of, iteration=begin, num=self._num_not_finite(begin))
            end = begin
            while (
                end < self.end
                and end - begin < REPORT_ITERATIONS_MAX
                and self.is_finite(end) == is_finite
            ):
                end += 1
            step_s = tuple(self.step_s[begin - self.first : end - self.first])
            losses = tuple(self.losses[begin - self.first : end - self.first])
            yield TaskProgressed(
                **of,
                first_iteration=begin,
                losses=losses if is_finite else (),
                step_s=step_s,
                rate_flops=flops * len(step_s) / max(math.fsum(step_s), 1e-9),
                micro_batches=micro_batches,
                skipped=skipped,
                digests={
                    at: self.digests[at] for at in range(begin, end + 1) if at in self.digests
                },
            )
            begin = end

    def _num_not_finite(self, end: int) -> int:
        """The length of the series of losses before `end` that are not finite."""
        begin = end
        while not self.is_finite(begin - 1):
            begin -= 1
        return end - begin
