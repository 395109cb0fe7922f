"""The agent's watch over a command's lines of progress: whether they have stopped coming.

What a command does between two lines nobody sees, so evidence is thin: a limit is never below a
minute, follows the intervals between its own lines, and is long while it has said that it writes a
checkpoint or evaluates. Time in which the agent did not look counts for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ....events.records.orders import StartRank
from ....events.records.reports import IterationsLogged, RankStalled, RankUnstalled
from ....events.records.types import Body
from ...diagnosis.step_time import LENIENT_S, LENIENT_TIMES, STALLED_TIMES, Monitor, Window
from ...host import linux
from . import process_state

INTERVALS_NUM_MIN = 5
"""Between lines, before anything is told: the first ones are of a process that warms up."""
INTERVALS_NUM = 50
"""Remembered: a checkpoint that is written every so many lines is usual."""
ASIDE_S = 1800.0
"""While it writes a checkpoint or evaluates, by its own words: as long as a collective's timeout
would give it (NCCL's)."""
PAUSE_S = 1.0
"""An agent that looks so much too late gives everybody a full span again."""
WHAT = "no line of progress"


class Limits(NamedTuple):
    """How patient the watch is at least, in the usual and after words of an `aside`."""

    least_s: float = LENIENT_S
    aside_s: float = ASIDE_S


USUAL = Limits()


class LineWatch:
    """One process that prints lines of progress. `now_s` is the monotonic clock everywhere."""

    def __init__(self, order: StartRank, pid: int, limits: Limits) -> None:
        self._ids = {"task": order.task, "rank": order.rank, "attempt": order.attempt}
        self._pid = pid
        self._limits = limits
        self._monitor = Monitor()
        self._intervals = Window(INTERVALS_NUM)
        self._line: IterationsLogged | None = None
        self._line_s = 0.0
        """When it was read: what lies before counts no more."""
        self._missed_s = 0.0
        """Since then: so long nobody looked."""
        self._is_cut = False
        """Nobody knows how long it is since then."""
        self._before: process_state.Look | None = None
        self._busy_pid = pid
        self._stalled_s = -1.0
        """For so long it had stood when that was told; below 0: it was not."""

    def forgive(self, late_s: float, now_s: float) -> None:
        """Nobody looked for `late_s`."""
        self._before = None
        if late_s > PAUSE_S:
            self._missed_s, self._is_cut = now_s - self._line_s, True
        else:
            self._missed_s += late_s

    def passed(self, line: IterationsLogged, now_s: float) -> list[Body]:
        """A line of progress was read; what is to be told before it."""
        told: list[Body] = []
        in_s = now_s - self._line_s - self._missed_s
        if self._line is not None and not self._is_cut:
            self._intervals.add(in_s)
        if self._stalled_s >= 0:
            told.append(RankUnstalled(**self._ids, generation=0, iteration=line.iteration,
                                      stalled_s=max(in_s, 0.0)))
        if line.num_iterations:
            self._monitor.add(line.step_s)
        self._line, self._line_s, self._missed_s = line, now_s, 0.0
        self._before, self._stalled_s, self._is_cut = None, -1.0, False
        return told

    def limit_s(self, *, is_aside: bool = False) -> float:
        """How long may pass without a line; 0: nobody knows."""
        if len(self._intervals) < INTERVALS_NUM_MIN:
            return 0.0
        limit_s = max(STALLED_TIMES * self._intervals.largest(1),
                      LENIENT_TIMES * self._intervals.quantile(0.5), self._limits.least_s)
        return max(limit_s, self._limits.aside_s) if is_aside else limit_s

    def look(self, now_s: float, is_aside: Callable[[], bool]) -> RankStalled | None:
        """What is to be told now. `is_aside` is asked last, for it may have to read."""
        line, limit_s = self._line, self.limit_s()
        if line is None or not limit_s or self._stalled_s >= 0 or self._has_printed_all(line):
            return None
        in_s = now_s - self._line_s - self._missed_s
        if in_s > limit_s / 3 and self._before is None:
            self._busy_pid = _innermost(self._pid)
            self._before = process_state.look(self._busy_pid)
        if in_s - self._starved_s() <= limit_s:
            return None
        if is_aside() and in_s <= self.limit_s(is_aside=True):
            return None
        self._stalled_s = in_s
        return RankStalled(
            **self._ids, generation=0, iteration=line.iteration, where="own", what=WHAT,
            collective=0, in_s=in_s, normal_s=self._monitor.average_s or line.step_s,
            stack=process_state.words(self._busy_pid, self._before))

    def _has_printed_all(self, line: IterationsLogged) -> bool:
        """After its last iteration comes a last checkpoint, a test: no line any more."""
        return 0 < line.iterations <= line.iteration

    def _starved_s(self) -> float:
        """How long it waited for a core since it began to be late."""
        now = process_state.look(self._busy_pid) if self._before is not None else None
        return now.starved_s - self._before.starved_s if now and self._before else 0.0


def _innermost(pid: int) -> int:
    """Whom a process waits for that has one child alone: a shell's program, a launcher's."""
    procs = linux.table() if pid else []
    while True:
        children = [proc.pid for proc in procs if proc.ppid == pid and proc.state != "Z"]
        if len(children) != 1:
            return pid
        pid = children[0]
