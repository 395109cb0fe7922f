"""When a finding is reported: changes that last, and each burst of equal errors once."""

from __future__ import annotations

from collections import deque

from ....events.records.reports import CheckHealth
from .finding import (
    BACK_RATIO,
    BURST_QUIET_S,
    BURST_S_MAX,
    ERRED_NUM_MAX,
    ERRED_WITHIN_S,
    LINE_CHARS_MAX,
    LOOKS_BETTER_NUM,
    LOOKS_WORSE_NUM,
    RANKED,
    Erred,
    Finding,
)


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


# --- Equal errors come in bursts: each burst is told of once, and all of them at a bounded rate.
# ---

_KEYS_NUM_MAX = 256


class _Burst:
    def __init__(self, at_s: float) -> None:
        self.began_s = self.last_s = at_s
        self.num_untold = 0


class Bursts:
    """Which errors are told. An XID that the kernel and NVML both tell of is one error."""

    def __init__(self) -> None:
        self._bursts: dict[object, _Burst] = {}
        self._told_s: deque[float] = deque()
        self._num_dropped = 0

    def take(self, erred: Erred, at_s: float) -> Erred | None:
        """What is to be told of an error seen at `at_s` (any clock that never goes back)."""
        key = ((erred.code, erred.devices) if erred.code
               else (erred.status, erred.rule, erred.devices, erred.pid))
        burst = self._bursts.get(key)
        before = 0
        if burst is not None:
            goes_on = at_s - burst.last_s < BURST_QUIET_S
            burst.last_s = at_s
            if goes_on and at_s - burst.began_s < BURST_S_MAX:
                burst.num_untold += 1
                return None
            before = burst.num_untold
        while self._told_s and at_s - self._told_s[0] > ERRED_WITHIN_S:
            self._told_s.popleft()
        if len(self._told_s) >= ERRED_NUM_MAX:
            self._num_dropped += 1
            return None
        self._told_s.append(at_s)
        self._forget(at_s)
        self._bursts[key] = _Burst(at_s)
        text = erred.text[:LINE_CHARS_MAX]
        if before:
            text += f" (and {before} equal ones before)"
        if self._num_dropped:
            text += f" ({self._num_dropped} other errors were not told)"
            self._num_dropped = 0
        return erred._replace(text=text)

    def _forget(self, at_s: float) -> None:
        if len(self._bursts) < _KEYS_NUM_MAX:
            return
        old = min(self._bursts, key=lambda key: self._bursts[key].last_s)
        del self._bursts[old]
