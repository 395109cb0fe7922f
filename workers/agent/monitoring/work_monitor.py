"""Whether a rank that its task waits for works: what it has moved, as it counts or the kernel does.

A rank is waited for while it starts, joins a generation, recovers its state or saves it before it
leaves. How long that takes grows with the state, so its limit is a time without progress, and its
agent tells the control plane of progress a few times within the limit: of one rank in turn, so that
a thousand ranks are as many records as their nodes.
"""

from ....events.records.orders import StartRank
from ....events.records.reports import RankWorked
from ...host import linux
from ...ipc.progress_page import BETWEEN, OUTSIDE_CODE, Mark, ProgressPage
from ...ipc.work_row import WorkRow
from . import process_state
from .process_state import COMPUTES_SHARE, MOVED_BYTES_MIN

LOOKS_NUM = 3
"""Looks at the processes of a rank between two reports: they read many files of /proc."""
RATE_BYTES = 100 << 10
"""What its processes move in a second if they work, where limits are short: MOVED_BYTES_MIN in ten
seconds, a third of `reconfigure_s_max`."""
ADOPTED_TELL_S = 1.0
"""How often an agent tells that has adopted a rank, until the next order says it."""
IDLE = ("ready", "left")
"""The marks of a rank that waits for orders: what it moves beside its own count is of others."""
BYTES = "B"
NO_ROW = WorkRow(0, "", "", 0, 0, False)


class WorkMonitor:
    """Of one process. `tell_s`: as in the orders."""

    def __init__(self, order: StartRank, tell_s: float) -> None:
        self._order, self._tell_s = order, tell_s
        self._began_s = -1.0
        """When it was first seen to be waited for; below 0: it is not."""
        self._told_s = self._looked_s = self._moved_s = 0.0
        self._row = NO_ROW
        self._first_bytes = self._last_bytes = -1
        """What its processes had moved at the first look, and at `_since_s`."""
        self._since_s = 0.0
        self._cpu_s = 0.0
        self._computed_s = 0.0
        """The CPU time that they have used since the last report, by the last look."""

    @property
    def told_s(self) -> float:
        """When the rank was last told of: whoever waits longest has the next turn."""
        return self._told_s

    def expect(self, tell_s: float) -> None:
        """An order begins to wait for the rank."""
        self._tell_s, self._began_s = tell_s, -1.0

    def look(
        self, now_s: float, pid: int, page: ProgressPage, turns: dict[int, float]
    ) -> RankWorked | None:
        """The report that is due now. `turns`: by task, when a rank of this node was last told of.
        Once a rank has started, one of a node is enough: its task waits as long for the others.
        Raises Violation."""
        mark = page.mark()
        if self._tell_s <= 0 or not self._is_waited_for(mark):
            self._began_s = -1.0
            return None
        row = page.work()
        if self._began_s < 0:
            self._begin(now_s, row or NO_ROW)
        if row is not None and row.num != self._row.num:
            self._row, self._moved_s = row, now_s
        if now_s >= self._looked_s + self._tell_s / LOOKS_NUM:
            self._look(now_s, pid, counts=mark is None or mark.what not in IDLE)
        has_moved = self._moved_s > self._told_s
        if now_s < self._told_s + self._tell_s or not (has_moved or self._computes(now_s, mark)):
            return None
        if mark is not None:
            if now_s < turns.get(self._order.task, 0.0) + self._tell_s:
                return None
            turns[self._order.task] = now_s
        self._told_s, self._computed_s = now_s, 0.0
        return RankWorked(
            task=self._order.task,
            rank=self._order.rank,
            attempt=self._order.attempt,
            generation=mark.generation if mark is not None else 0,
            what=self._row.what or ("starts" if mark is None else ""),
            unit=self._row.unit,
            done=self._row.done,
            total=self._row.total,
            moved_bytes=max(self._last_bytes - self._first_bytes, 0),
            idle_s=now_s - self._moved_s,
            computes=not has_moved,
            is_storage=self._row.is_storage,
        )

    def _is_waited_for(self, mark: Mark | None) -> bool:
        if mark is None:  # a script prepares for as long as it likes
            return not self._order.spec.command
        return mark.phase == OUTSIDE_CODE and mark.what not in BETWEEN

    def _begin(self, now_s: float, row: WorkRow) -> None:
        self._began_s = self._told_s = self._looked_s = self._moved_s = now_s
        self._row = row
        self._first_bytes = self._last_bytes = -1
        self._cpu_s, self._computed_s = -1.0, 0.0

    def _look(self, now_s: float, pid: int, *, counts: bool) -> None:
        """Look at what the process and its descendants have moved and computed."""
        self._looked_s = now_s
        procs = linux.family(pid)
        moved, cpu_s = process_state.moved_bytes(procs), process_state.used_cpu_s(procs)
        if self._first_bytes < 0:
            self._first_bytes, self._last_bytes, self._cpu_s = moved, moved, cpu_s
            self._since_s = now_s
            return
        # What closed connections and ended processes have moved is no longer told.
        self._first_bytes = min(self._first_bytes, moved)
        self._last_bytes = min(self._last_bytes, moved)
        self._computed_s += max(cpu_s - self._cpu_s, 0.0)
        self._cpu_s = cpu_s
        has_moved = moved >= self._last_bytes + min(MOVED_BYTES_MIN, RATE_BYTES * self._tell_s)
        if has_moved and counts:
            self._moved_s = now_s
        if has_moved or now_s > self._since_s + self._tell_s:  # what logs moves as much in an hour
            self._last_bytes, self._since_s = moved, now_s

    def _computes(self, now_s: float, mark: Mark | None) -> bool:
        """Whether it works by itself and moves no bytes: one that waits for others may spin."""
        is_own = mark is None or (self._row.what != "" and self._row.unit != BYTES)
        return is_own and self._computed_s >= COMPUTES_SHARE * (now_s - self._told_s)
