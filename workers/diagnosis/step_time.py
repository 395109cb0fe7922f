"""Iteration times in, verdicts out: what is slow, what stands still, what has changed for good.

The paper's rule: over 3 x the running average is a fault, between 1.1 x and 3 x is degraded. What
keeps it from crying on a cluster that is shared:

- The running average is a median. One slow iteration does not move it.
- What this job itself has shown several times is no fault of it (`SHOWN_NUM`), up to a bound.
- Degraded is told on persistence only: three quarters of a window lie beyond 1.1 x the level known
  so far, and beyond three times the noise of single iterations around it. The noisier a job, the
  longer the window, but for a change that is plain; it doubles with each change that was told, so
  nobody is told again and again.
- That it is over is told at once: when a shortest window lies below 1.1 x the usual level again, or
  iterations take less by a tenth than was told.

Memory and time are bounded, whatever is fed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

Verdict = Literal["well", "degraded", "slow", "stalled"]
Kind = Literal["usual", "boundary", "first"]
"""Of an iteration. Only a usual one counts. One that a checkpoint or a copy of the state is taken
before has a limit of its own, learnt from those of its kind; the first one after a reconfiguration,
or one that evaluates, has hardly any."""

STALLED_TIMES = 3.0
DEGRADED_TIMES = 1.1
WARM_UP_NUM = 5
"""Before so many iterations that count nothing is slow, and nothing stalls but by LENIENT_S."""
AVERAGE_NUM = 500
"""The running average is the median of so many."""
SHOWN_NUM = 3
SHOWN_TIMES, SHOWN_TIMES_MAX = 1.25, 10.0
"""What lasted long at least SHOWN_NUM times among those is usual, up to 1.25 x that."""
LENIENT_TIMES, LENIENT_S = 10.0, 60.0
"""Where evidence is thin (a first iteration, a warm-up), the larger of the two."""
BOUNDARIES_NUM = 50
WINDOW_NUM, WINDOW_NUM_MAX = 20, 800
PLAIN_TIMES, PLAIN_SHARE = 1.5, 0.98
"""A shortest window is enough for what is slower by so much, and than this share ever was."""
REFERENCE_NUM = 400
"""So many at most make up the level that a window is compared with."""
NOISE_TIMES = 3.0
QUIET_SHARE = 0.03
"""A job whose single iterations differ by less, as one standard deviation, is quiet."""
DOUBLINGS_NUM_MAX = 4
DEVIATION_TIMES = 2.563
"""Between the first and the last tenth of a normal distribution."""


class Paced(NamedTuple):
    """How fast it goes: medians of the last `num_iterations`; `normal_s` is the usual own time."""

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
        """The value below which this share lies; 0.5 is the (upper) median. Needs one value."""
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]

    def largest(self, nth: int) -> float:
        """The nth largest, 0 where there are fewer."""
        return self._sorted[-nth] if len(self._sorted) >= nth else 0.0


class Level:
    """One series, and whether its level has changed for good."""

    def __init__(self) -> None:
        self.normal = 0.0
        """Its usual level; 0 while unknown."""
        self.now = 0.0
        """The level as last told; 0 while unknown."""
        self._num_changes = 0
        self._begin()

    @property
    def is_degraded(self) -> bool:
        return self.now >= DEGRADED_TIMES * self.normal > 0

    @property
    def noise(self) -> float:
        """Of single values around the level, as a share of it: one robust standard deviation."""
        spread = self._reference.quantile(0.9) - self._reference.quantile(0.1)
        return spread / DEVIATION_TIMES / self._reference.quantile(0.5)

    def add(self, value: float) -> bool:
        """Whether the level is known since now, or has changed."""
        if len(self._reference) < WINDOW_NUM:
            self._reference.add(value)
            if len(self._reference) < WINDOW_NUM or self.now:
                return False
            self.normal = self.now = self._reference.quantile(0.5)
            return True
        self._waiting.append(value)
        if self._is_back():
            return True
        again = 1 << min(self._num_changes, DOUBLINGS_NUM_MAX)
        noisier = max(1.0, (self.noise / QUIET_SHARE) ** 2)
        num = int(min(WINDOW_NUM_MAX, WINDOW_NUM * noisier * again))
        while len(self._waiting) > num:  # what is older than the window is how it was before
            older = self._waiting.popleft()
            if len(self._reference) < REFERENCE_NUM:
                self._reference.add(older)
        level, plain = self._reference.quantile(0.5), self._reference.quantile(PLAIN_SHARE)
        if self._has_left(WINDOW_NUM * again, level,
                          max(PLAIN_TIMES, DEGRADED_TIMES * plain / level)):
            return True
        return (len(self._reference) >= min(num // again, REFERENCE_NUM)
                and self._has_left(num, level, max(DEGRADED_TIMES, 1 + NOISE_TIMES * self.noise)))

    def _is_back(self) -> bool:
        """Whether three of four of the last few are as usual, where it was degraded."""
        if not self.is_degraded or len(self._waiting) < WINDOW_NUM:
            return False
        there = sorted(value for value in list(self._waiting)[-WINDOW_NUM:]
                       if value < DEGRADED_TIMES * self.normal)
        if 4 * len(there) < 3 * WINDOW_NUM:
            return False
        self.now = there[len(there) // 2]
        self._begin(there)
        return True

    def _has_left(self, num: int, level: float, far: float) -> bool:
        """Whether three of four of the last `num` lie beyond `far` x the level: now their own."""
        if len(self._waiting) < num:
            return False
        last = list(self._waiting)[-num:]
        slower = [value for value in last if value >= far * level]
        faster = [value for value in last if value <= level / far]
        there = sorted(slower if len(slower) > len(faster) else faster)
        if 4 * len(there) < 3 * num:
            return False
        self.now = there[len(there) // 2]
        self.normal = min(self.normal, self.now)
        self._num_changes += 1
        self._begin(there)
        return True

    def _begin(self, known: Iterable[float] = ()) -> None:
        """A level begins, of which this much is known."""
        self._reference = Window(REFERENCE_NUM)
        self._waiting: deque[float] = deque()
        for value in known:
            self._reference.add(value)


class Monitor:
    """The iterations of one rank, or of one job: fed one by one, asked at any time.

    `before_s` is the average of an earlier configuration: good for a lenient limit, for no more.
    """

    def __init__(self, before_s: float = 0.0) -> None:
        self._before_s = before_s
        self._times = Window(AVERAGE_NUM)
        self._boundaries = Window(BOUNDARIES_NUM)
        self._last: deque[tuple[float, float]] = deque(maxlen=WINDOW_NUM)
        self.own = Level()
        self._paced: Paced | None = None
        self._told_s = 0.0
        """How long an iteration took when it was told last."""

    @property
    def average_s(self) -> float:
        """The running average of an iteration; before the first that counts that of before."""
        return self._times.quantile(0.5) if len(self._times) else self._before_s

    def limit_s(self, kind: Kind = "usual") -> float:
        """How long may pass without a mark, or an iteration last; 0: nobody knows."""
        average_s = self.average_s
        if not average_s:
            return 0.0
        before_s = self._boundaries.largest(2)
        if (kind == "first" or len(self._times) < WARM_UP_NUM
                or (kind == "boundary" and not before_s)):
            return max(LENIENT_TIMES * average_s, LENIENT_S)
        shown_s = min(self._times.largest(SHOWN_NUM), SHOWN_TIMES_MAX * average_s)
        if kind == "boundary":
            shown_s = max(shown_s, before_s)
        return max(STALLED_TIMES * average_s, SHOWN_TIMES * shown_s)

    def lasts(self, in_s: float, kind: Kind = "usual") -> Verdict:
        """What it means that nothing was passed for `in_s`."""
        limit_s = self.limit_s(kind)
        return "stalled" if 0 < limit_s < in_s else "well"

    def add(self, iteration_s: float, own_s: float | None = None, kind: Kind = "usual"
            ) -> Verdict:
        """Take note of a finished iteration. `own_s`: without waiting for others; None: all."""
        if iteration_s <= 0:
            return "well"
        if kind == "boundary":
            self._boundaries.add(iteration_s)
        if kind != "usual":
            return "well"
        own_s = iteration_s if own_s is None else own_s
        is_slow = len(self._times) >= WARM_UP_NUM and iteration_s > self.limit_s()
        self._times.add(iteration_s)
        self._last.append((iteration_s, own_s))
        if self.own.add(own_s) or self._is_relieved():
            self._paced = self.recent()
            self._told_s = self._paced.iteration_s
        if is_slow:
            return "slow"
        return "degraded" if self.own.is_degraded else "well"

    def _is_relieved(self) -> bool:
        """Whether it is told as degraded, and iterations take less by now: they say so too."""
        return (self.own.is_degraded and self._told_s > 0
                and self.recent().iteration_s * DEGRADED_TIMES <= self._told_s)

    def recent(self) -> Paced:
        """Its pace over the last iterations that counted. Needs one."""
        num = len(self._last)
        iteration_s, own_s = (sorted(times)[num // 2] for times in zip(*self._last, strict=True))
        return Paced(num, iteration_s, own_s, self.own.normal or own_s)

    def paced(self) -> Paced | None:
        """What is to be told of its pace since this was asked last: once for each change."""
        paced, self._paced = self._paced, None
        return paced
