"""Equal errors come in bursts: each burst is told of once, and all of them at a bounded rate."""

from __future__ import annotations

from collections import deque

from .finding import Erred
from .limits import (
    BURST_QUIET_S,
    BURST_S_MAX,
    ERRED_NUM_MAX,
    ERRED_WITHIN_S,
    LINE_CHARS_MAX,
)

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
