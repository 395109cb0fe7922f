"""Step-time monitoring: detects slow and stalled iterations, and lasting changes.

The rule of the Unicron paper: more than 3 x the running average is a fault, 1.1 x to 3 x is
degraded. docs/guides/detection.md says how false alarms on a shared cluster are avoided. The
window doubles with each reported change. Memory and time per iteration are bounded.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["usual", "boundary", "first"]
"""Kind of an iteration. Only usual iterations enter the average. A boundary iteration follows a
checkpoint on disk or in memory; its limit is learnt from earlier boundary iterations. A first
iteration follows a reconfiguration, or includes an evaluation; its limit is lenient."""

STALLED_TIMES = 3.0
DEGRADED_TIMES = 1.1
WARM_UP_NUM = 5
"""Before this many usual iterations the limit is lenient."""
AVERAGE_NUM = 500
"""The running average is the median of this many iterations."""
SHOWN_NUM = 3
SHOWN_TIMES, SHOWN_TIMES_MAX = 1.25, 10.0
"""A duration up to 1.25 x the SHOWN_NUM-th longest of these iterations is usual. The SHOWN_NUM-th
longest counts as at most 10 x the average."""
LENIENT_TIMES, LENIENT_S = 10.0, 60.0
"""The lenient limit (first iterations, warm-up) is the larger of 10 averages and 60 s."""
BOUNDARIES_NUM = 50
WINDOW_NUM, WINDOW_NUM_MAX = 20, 800
PLAIN_TIMES, PLAIN_SHARE = 1.5, 0.98
"""A change is obvious if it is 1.5 x the level and 1.1 x slower than 98 % of the reference."""
REFERENCE_NUM = 400
"""Maximum number of values in the reference level."""
NOISE_TIMES = 3.0
QUIET_SHARE = 0.03
"""Below this relative standard deviation of single iterations a job has the shortest window."""
DOUBLINGS_NUM_MAX = 4
DEVIATION_TIMES = 2.563
"""Standard deviations between the 10 % and 90 % quantiles of a normal distribution."""


class StepTimeChange(NamedTuple):
    """Medians of the last `num_iterations`. `own_s`: without waits; `normal_s`: its usual value."""

    num_iterations: int
    iteration_s: float
    own_s: float
    normal_s: float


class Window:
    """The last `num` values, with their quantiles."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > self._num:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    def quantile(self, share: float) -> float:
        """The quantile `share`; 0.5 is the (upper) median. Needs one value."""
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]

    def largest(self, nth: int) -> float:
        """The nth largest value, 0 if there are fewer."""
        return self._sorted[-nth] if len(self._sorted) >= nth else 0.0


class Level:
    """Detects lasting changes of the level of one series."""

    def __init__(self) -> None:
        self.normal = 0.0
        """The usual level; 0 while unknown."""
        self.now = 0.0
        """The last reported level; 0 while unknown."""
        self._num_changes = 0
        self._restart()

    @property
    def is_degraded(self) -> bool:
        return self.now >= DEGRADED_TIMES * self.normal > 0

    @property
    def noise(self) -> float:
        """Robust standard deviation of single values, as a share of the level."""
        spread = self._reference.quantile(0.9) - self._reference.quantile(0.1)
        return spread / DEVIATION_TIMES / self._reference.quantile(0.5)

    def add(self, value: float) -> bool:
        """Add a value; return whether the level became known or has changed."""
        if len(self._reference) < WINDOW_NUM:
            self._reference.add(value)
            if len(self._reference) < WINDOW_NUM or self.now:
                return False
            self.normal = self.now = self._reference.quantile(0.5)
            return True
        self._recent.append(value)
        if self._has_recovered():
            return True
        again = 1 << min(self._num_changes, DOUBLINGS_NUM_MAX)
        noisier = max(1.0, (self.noise / QUIET_SHARE) ** 2)
        num = int(min(WINDOW_NUM_MAX, WINDOW_NUM * noisier * again))
        while len(self._recent) > num:  # values older than the window enter the reference
            older = self._recent.popleft()
            if len(self._reference) < REFERENCE_NUM:
                self._reference.add(older)
        level, plain = self._reference.quantile(0.5), self._reference.quantile(PLAIN_SHARE)
        if self._has_changed(
            WINDOW_NUM * again, level, max(PLAIN_TIMES, DEGRADED_TIMES * plain / level)
        ):
            return True
        return len(self._reference) >= min(num // again, REFERENCE_NUM) and self._has_changed(
            num, level, max(DEGRADED_TIMES, 1 + NOISE_TIMES * self.noise)
        )

    def _has_recovered(self) -> bool:
        """Whether three quarters of the last values are usual again; adopt their level."""
        if not self.is_degraded or len(self._recent) < WINDOW_NUM:
            return False
        usual = sorted(
            value
            for value in list(self._recent)[-WINDOW_NUM:]
            if value < DEGRADED_TIMES * self.normal
        )
        if 4 * len(usual) < 3 * WINDOW_NUM:
            return False
        self.now = usual[len(usual) // 2]
        self._restart(usual)
        return True

    def _has_changed(self, num: int, level: float, factor: float) -> bool:
        """Whether 3/4 of the last `num` values differ by `factor`; if so, adopt their level."""
        if len(self._recent) < num:
            return False
        last = list(self._recent)[-num:]
        slower = [value for value in last if value >= factor * level]
        faster = [value for value in last if value <= level / factor]
        changed = sorted(slower if len(slower) > len(faster) else faster)
        if 4 * len(changed) < 3 * num:
            return False
        self.now = changed[len(changed) // 2]
        self.normal = min(self.normal, self.now)
        self._num_changes += 1
        self._restart(changed)
        return True

    def _restart(self, known: Iterable[float] = ()) -> None:
        """Start a new reference level with the values `known`."""
        self._reference = Window(REFERENCE_NUM)
        self._recent: deque[float] = deque()
        for value in known:
            self._reference.add(value)


class StepTimeMonitor:
    """Monitors one rank or job. `before_s`: the average before, until the first usual iteration."""

    def __init__(self, before_s: float = 0.0) -> None:
        self._before_s = before_s
        self._times = Window(AVERAGE_NUM)
        self._boundaries = Window(BOUNDARIES_NUM)
        self._last: deque[tuple[float, float]] = deque(maxlen=WINDOW_NUM)
        self.own = Level()
        self._change: StepTimeChange | None = None
        self._reported_s = 0.0
        """Iteration time in the last report."""

    @property
    def average_s(self) -> float:
        """The running average of an iteration; `before_s` until the first usual iteration."""
        return self._times.quantile(0.5) if len(self._times) else self._before_s

    def limit_s(self, kind: Kind = "usual", lenient_s: float = LENIENT_S) -> float:
        """Time limit of an iteration, or between progress marks; 0: unknown. `lenient_s`: the least
        limit where no usual time is known."""
        average_s = self.average_s
        if not average_s:
            return 0.0
        before_s = self._boundaries.largest(2)
        if (
            kind == "first"
            or len(self._times) < WARM_UP_NUM
            or (kind == "boundary" and not before_s)
        ):
            return max(LENIENT_TIMES * average_s, lenient_s)
        shown_s = min(self._times.largest(SHOWN_NUM), SHOWN_TIMES_MAX * average_s)
        if kind == "boundary":
            shown_s = max(shown_s, before_s)
        return max(STALLED_TIMES * average_s, SHOWN_TIMES * shown_s)

    def add(self, iteration_s: float, own_s: float | None = None, kind: Kind = "usual") -> None:
        """Add an iteration. `own_s` is its time without waiting for others; None: all its time."""
        if iteration_s <= 0:
            return
        if kind == "boundary":
            self._boundaries.add(iteration_s)
        if kind != "usual":
            return
        own_s = iteration_s if own_s is None else own_s
        self._times.add(iteration_s)
        self._last.append((iteration_s, own_s))
        if self.own.add(own_s) or self._has_improved():
            self._change = self.recent()
            self._reported_s = self._change.iteration_s

    def _has_improved(self) -> bool:
        """Whether a degradation was reported, and iterations are 1.1 x faster now."""
        return (
            self.own.is_degraded
            and self._reported_s > 0
            and self.recent().iteration_s * DEGRADED_TIMES <= self._reported_s
        )

    def recent(self) -> StepTimeChange:
        """The step time of the last usual iterations. Needs one."""
        num = len(self._last)
        iteration_s, own_s = (sorted(times)[num // 2] for times in zip(*self._last, strict=True))
        return StepTimeChange(num, iteration_s, own_s, self.own.normal or own_s)

    def take_change(self) -> StepTimeChange | None:
        """The change of step time since the last call, or None; each change is returned once."""
        change, self._change = self._change, None
        return change
