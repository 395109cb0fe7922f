"""When what a check says is told: on a change that lasts, never on a value at its limit."""

from __future__ import annotations

from ....events.detected import CheckHealth
from .finding import RANKED, Finding
from .limits import BACK_RATIO, LOOKS_BETTER_NUM, LOOKS_WORSE_NUM


class Steady:
    """One check: what was told of it, and how many looks in a row say something else.

    The first "healthy" is not told. A fact is told at the first look, unless it is an improvement.
    """

    def __init__(self, num_worse: int = LOOKS_WORSE_NUM,
                 num_better: int = LOOKS_BETTER_NUM) -> None:
        self._num_worse, self._num_better = num_worse, num_better
        self.told = Finding("", "healthy")
        self._leaning: object = None
        self._num_looks = 0

    def see(self, finding: Finding) -> Finding | None:
        """What is to be told now, None if nothing."""
        step = RANKED.index(finding.health) - RANKED.index(self.told.health)
        if step == 0 and _sense(finding) == _sense(self.told):
            self._leaning, self._num_looks = None, 0
            return None
        # Worse in whatever way is one direction; another reason for the same is its own.
        leaning: object = _sense(finding) if step == 0 else step > 0
        self._num_looks = self._num_looks + 1 if leaning == self._leaning else 1
        self._leaning = leaning
        needed = self._num_better if step < 0 else 1 if finding.is_fact else self._num_worse
        if self._num_looks < needed:
            return None
        self._leaning, self._num_looks = None, 0
        self.told = finding
        return finding

    @property
    def is_worsening(self) -> bool:
        """Whether the last look said something that is not told yet, and is no improvement."""
        return self._num_looks > 0 and self._leaning is not False


def _sense(finding: Finding) -> object:
    """What makes two findings say the same: their figures do not."""
    if finding.health == "healthy":
        return finding.health
    return finding.health, finding.devices, finding.status, finding.rule


class Ladder:
    """A value, where lower is worse, to a level; it climbs back only well above a limit."""

    def __init__(self, degraded: float, unhealthy: float = float("-inf"),
                 back_ratio: float = BACK_RATIO) -> None:
        self._degraded, self._unhealthy, self._back_ratio = degraded, unhealthy, back_ratio
        self._level: CheckHealth = "healthy"

    def level(self, value: float) -> CheckHealth:
        """The level now; it depends on the one before."""
        low = self._unhealthy * (self._back_ratio if self._level == "unhealthy" else 1.0)
        high = self._degraded * (self._back_ratio if self._level != "healthy" else 1.0)
        self._level = "unhealthy" if value < low else "degraded" if value < high else "healthy"
        return self._level
