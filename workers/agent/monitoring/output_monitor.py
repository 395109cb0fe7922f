"""Detects a hang of a command: its progress lines have stopped.

The evidence is weak, so the limit is at least a minute, follows the intervals between the command's
own lines, and is longer after an announced pause (a checkpoint or an evaluation).
"""

from __future__ import annotations

from collections.abc import Callable

from ....events.records.orders import StartRank
from ....events.records.reports import IterationsLogged, RankStalled, RankUnstalled
from ....events.records.types import Body
from ...diagnosis.step_time import LENIENT_S, LENIENT_TIMES, STALLED_TIMES, StepTimeMonitor, Window
from ...host import linux
from . import process_state

INTERVALS_NUM_MIN = 5
"""Intervals between lines before a hang can be reported: the first ones include the warm-up."""
INTERVALS_NUM = 50
"""Remembered intervals: enough to include a periodic checkpoint."""
ANNOUNCED_PAUSE_S = 1800.0
"""Limit after an announced checkpoint or evaluation: as long as NCCL's collective timeout."""
PAUSE_S = 1.0
"""If a check of the agent is late by more than this, every command gets its full limit again."""
WHAT = "no line of progress"


class OutputMonitor:
    """Monitors one process that prints progress lines. `now_s` is always the monotonic clock."""

    def __init__(self, order: StartRank, pid: int, *, is_stalled: bool = False) -> None:
        self._ids = {"task": order.task, "rank": order.rank, "attempt": order.attempt}
        self._pid = pid
        self._monitor = StepTimeMonitor()
        self._intervals = Window(INTERVALS_NUM)
        self._line: IterationsLogged | None = None
        self._line_s = 0.0
        """When the last line was read."""
        self._missed_s = 0.0
        """How long the agent did not look since the last line."""
        self._is_cut = False
        """The time since the last line is unknown."""
        self._before: process_state.ProcessState | None = None
        self._busy_pid = pid
        self._stalled_s = 0.0 if is_stalled else -1.0
        """Time without a line when the stall was reported; below 0: no stall is reported."""

    def exclude(self, late_s: float, now_s: float) -> None:
        """Do not count the last `late_s`: the agent did not look."""
        self._before = None
        if late_s > PAUSE_S:
            self._missed_s, self._is_cut = now_s - self._line_s, True
        else:
            self._missed_s += late_s

    def add_line(self, line: IterationsLogged, now_s: float) -> list[Body]:
        """Record a progress line. Return the reports that must be sent before it."""
        reports: list[Body] = []
        in_s = now_s - self._line_s - self._missed_s
        if self._line is not None and not self._is_cut:
            self._intervals.add(in_s)
        if self._stalled_s >= 0:
            reports.append(RankUnstalled(**self._ids, generation=0, iteration=line.iteration,
                                         stalled_s=max(in_s, 0.0)))
        if line.num_iterations:
            self._monitor.add(line.step_s)
        self._line, self._line_s, self._missed_s = line, now_s, 0.0
        self._before, self._stalled_s, self._is_cut = None, -1.0, False
        return reports

    def limit_s(self, *, is_paused: bool = False) -> float:
        """Longest normal time without a line; 0: unknown. `is_paused`: a pause was announced."""
        if len(self._intervals) < INTERVALS_NUM_MIN:
            return 0.0
        limit_s = max(STALLED_TIMES * self._intervals.largest(1),
                      LENIENT_TIMES * self._intervals.quantile(0.5), LENIENT_S)
        return max(limit_s, ANNOUNCED_PAUSE_S) if is_paused else limit_s

    def look(self, now_s: float, is_paused: Callable[[], bool]) -> RankStalled | None:
        """Return a new stall. `is_paused` is called last because it may read a file."""
        line, limit_s = self._line, self.limit_s()
        if line is None or not limit_s or self._stalled_s >= 0:
            return None
        if 0 < line.iterations <= line.iteration:
            return None  # all is done: a checkpoint and a test follow, but no more lines
        in_s = now_s - self._line_s - self._missed_s
        if in_s > limit_s / 3 and self._before is None:
            self._busy_pid = _innermost(self._pid)
            self._before = process_state.look(self._busy_pid)
        if in_s - process_state.starved_s(self._busy_pid, self._before) <= limit_s:
            return None
        if is_paused() and in_s <= self.limit_s(is_paused=True):
            return None
        self._stalled_s = in_s
        return RankStalled(
            **self._ids, generation=0, iteration=line.iteration, where="own", what=WHAT,
            collective=0, in_s=in_s, normal_s=self._monitor.average_s or line.step_s,
            stack=process_state.describe(self._busy_pid, self._before), silent_peers=())


def _innermost(pid: int) -> int:
    """The program that a shell or launcher runs: follow single children down."""
    procs = linux.table() if pid else []
    while True:
        children = [proc.pid for proc in procs if proc.ppid == pid and proc.state != "Z"]
        if len(children) != 1:
            return pid
        pid = children[0]
