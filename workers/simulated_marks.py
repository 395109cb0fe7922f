"""The marks that a rank on paper passes: when it was where, and how long iterations took."""

from __future__ import annotations

from statistics import fmean, median

NUM_NORMAL = 20
"""Iterations of the running average."""
FIRST_S = 2.0
"""Taken for it before one was finished: the first is slow."""
NUM_PACED = 8


class Marks:
    """Of one process. Times in seconds of the loop's clock."""

    def __init__(self) -> None:
        self.slow = 1.0
        """So many times longer its own work takes than it should."""
        self.num_froze = 0
        self.frozen_until_s = 0.0
        self._frozen_s = self._began_s = self._entered_s = -1.0
        self._generation = 0
        self.took_s: list[float] = []
        """The last iterations of this generation, without its first."""

    def freeze(self, at_s: float, left_s: float) -> None:
        """It stands still; `left_s`: it did already, for so much longer."""
        self.num_froze += 1
        if left_s <= 0:
            self._frozen_s = at_s

    def begin(self, at_s: float, generation: int) -> None:
        if generation != self._generation:
            self._generation, self.took_s, self._began_s = generation, [], -1.0
        self._entered_s = -1.0
        if self._began_s < 0:
            self._began_s = 0.0  # the generation's first does not count
        else:
            self._began_s = at_s

    def enter(self, at_s: float) -> None:
        self._entered_s = at_s

    def step(self, at_s: float) -> None:
        if self._began_s > 0:
            self.took_s = [*self.took_s, at_s - self._began_s][-NUM_NORMAL:]
        self._began_s, self._entered_s = max(self._began_s, 0.0), -1.0

    @property
    def normal_s(self) -> float:
        """The running average of an iteration."""
        return fmean(self.took_s) if self.took_s else FIRST_S

    @property
    def iteration_s(self) -> float:
        """The median of the last ones; 0: there were too few."""
        return median(self.took_s[-NUM_PACED:]) if len(self.took_s) >= NUM_PACED else 0.0

    def works_s(self, now_s: float) -> float:
        """For how long it has been at its own work of this iteration; 0: it is not, or its
        generation's first."""
        return now_s - self._began_s if self._began_s > 0 and self._entered_s < 0 else 0.0

    def last_s(self, now_s: float, *, computes: bool, frozen: bool) -> float:
        """When it passed its last mark: work passes them all the time, unless it stands."""
        if not computes and self._entered_s >= 0:
            return self._entered_s
        return self._frozen_s if frozen else now_s
