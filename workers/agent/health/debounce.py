"""Debounces health checks, and limits the rate of equal errors."""

from collections import deque

from ....events.records.reports import CheckHealth
from . import limits
from .finding import RANKED, DeviceError, Finding


class Debouncer:
    """Debounces one check: reports a change after several equal readings, a definite failure
    (`is_fact`) at once, an initial "healthy" never."""

    def __init__(
        self, num_better: int = limits.LOOKS_BETTER_NUM, reported: Finding | None = None
    ) -> None:
        """`reported`: the last report of a former agent."""
        self._num_better = num_better
        self.reported = reported or Finding("", "healthy")
        self._direction: object = None
        self._num_looks = 0

    def see(self, finding: Finding) -> Finding | None:
        """Take a reading; return the finding to report, None if there is no change."""
        step = RANKED.index(finding.health) - RANKED.index(self.reported.health)
        if step == 0 and _key(finding) == _key(self.reported):
            self._direction, self._num_looks = None, 0
            return None
        # All worse findings are one direction; at the same level each new reason is a direction.
        direction: object = _key(finding) if step == 0 else step > 0
        self._num_looks = self._num_looks + 1 if direction == self._direction else 1
        self._direction = direction
        needed = self._num_better if step < 0 else 1 if finding.is_fact else limits.LOOKS_WORSE_NUM
        if self._num_looks < needed:
            return None
        self._direction, self._num_looks = None, 0
        self.reported = finding
        return finding

    @property
    def is_worsening(self) -> bool:
        """Whether the last reading was an unreported change that is not an improvement."""
        return self._num_looks > 0 and self._direction is not False


def _key(finding: Finding) -> object:
    """The fields in which equal findings agree. Their reasons may have different numbers."""
    if finding.health == "healthy":
        return finding.health
    return finding.health, finding.devices, finding.status, finding.rule


class Thresholds:
    """Maps a value (lower is worse) to a health level, with hysteresis on the way up."""

    def __init__(
        self,
        degraded: float,
        unhealthy: float = float("-inf"),
        back_ratio: float = limits.BACK_RATIO,
    ) -> None:
        self._degraded, self._unhealthy, self._back_ratio = degraded, unhealthy, back_ratio
        self._level: CheckHealth = "healthy"

    def level(self, value: float) -> CheckHealth:
        """The new level; it depends on the previous one."""
        low = self._unhealthy * (self._back_ratio if self._level == "unhealthy" else 1.0)
        high = self._degraded * (self._back_ratio if self._level != "healthy" else 1.0)
        self._level = "unhealthy" if value < low else "degraded" if value < high else "healthy"
        return self._level


# --- Bursts of equal errors: each burst is reported once, and the rate of reports is bounded. ---

_KEYS_NUM_MAX = 256


class _Burst:
    def __init__(self, at_s: float) -> None:
        self.began_s = self.last_s = at_s
        self.num_unreported = 0


class BurstFilter:
    """Filters errors. An XID that both the kernel and NVML report is one error."""

    def __init__(self) -> None:
        self._bursts: dict[object, _Burst] = {}
        self._reported_s: deque[float] = deque()
        self._num_dropped = 0

    def take(self, erred: DeviceError, at_s: float) -> DeviceError | None:
        """Take an error seen at `at_s` (any monotonic clock); None if it is not reported."""
        key = (
            (erred.code, erred.devices)
            if erred.code
            else (erred.status, erred.rule, erred.devices, erred.pid)
        )
        burst = self._bursts.get(key)
        before = 0
        if burst is not None:
            goes_on = at_s - burst.last_s < limits.BURST_QUIET_S
            burst.last_s = at_s
            if goes_on and at_s - burst.began_s < limits.BURST_S_MAX:
                burst.num_unreported += 1
                return None
            before = burst.num_unreported
        while self._reported_s and at_s - self._reported_s[0] > limits.ERRED_WITHIN_S:
            self._reported_s.popleft()
        if len(self._reported_s) >= limits.ERRED_NUM_MAX:
            self._num_dropped += 1
            return None
        self._reported_s.append(at_s)
        if len(self._bursts) >= _KEYS_NUM_MAX:
            del self._bursts[min(self._bursts, key=lambda key: self._bursts[key].last_s)]
        self._bursts[key] = _Burst(at_s)
        text = erred.text[: limits.LINE_CHARS_MAX]
        if before:
            text += f" (and {before} equal errors before)"
        if self._num_dropped:
            text += f" ({self._num_dropped} other errors were not reported)"
            self._num_dropped = 0
        return erred._replace(text=text)
