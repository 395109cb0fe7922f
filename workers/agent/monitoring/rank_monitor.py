"""Monitors the training ranks by their progress pages: stalls and step times.

The monitor itself causes no false alarm: time in which it did not run, or a rank waited for a core,
does not count. After PAUSE_S of such time every rank gets its full limit again.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from ....events.records.orders import StartRank
from ....events.records.reports import RankStalled, RankUnstalled, StepTimeChanged
from ....events.records.types import Body, GroupProgress
from ...diagnosis.step_time import (
    LENIENT_S,
    SHOWN_TIMES,
    STALLED_TIMES,
    WARM_UP_NUM,
    StepTimeChange,
    StepTimeMonitor,
)
from ...ipc.group_rows import Entry, Progress
from ...ipc.progress_page import (
    BETWEEN,
    COLLECTIVE_CODE,
    EVALUATE,
    OUTSIDE_CODE,
    OWN_CODE,
    FinishedIteration,
    Mark,
    ProgressPage,
)
from ...ipc.work_row import COMPILES
from ..processes.rank_guard import Guard, Key
from . import process_state
from .process_state import DataFlow, silent_peers
from .work_monitor import ADOPTED_TELL_S, WorkMonitor

WATCH_S = 0.05
"""Time between two looks."""
STALL_S_MIN = 1.0
"""The limit is at least this long, even if iterations are short: a shorter pause is noise."""
LATE_S = 0.25
"""If a look is later than this, the missed time does not count."""
PAUSE_S = 1.0
"""After this much missed time every rank gets its full limit again."""
SLOW_AGAIN_TIMES = 2.0
"""A slow iteration that still runs is reported again when its work took this many times longer."""
REPORT_S = 10.0
"""Minimum time between two step-time reports of one rank in the same generation."""

START_S = 0.01
"""The kernel rounds down when a process was started, to a hundredth of a second."""
LOADS_IN = ("begin", "micro_batch")
"""The marks after which an iteration reads its samples."""

NO_GROUPS = Progress((), is_complete=False, waits=False)
"""Of a rank that does not tell of its groups."""


class Limit(NamedTuple):
    """How long a rank may pass no mark. `normal_s`: how long that usually takes; 0: unknown."""

    s: float
    normal_s: float
    is_untimed: bool = False
    """No time of this process says it."""
    may_load: bool = False
    """Whether what it reads and writes is progress."""


class Limits:
    """The limits of one rank. `first_s_max`: of the policy."""

    def __init__(self, first_s_max: float) -> None:
        self._first_s_max = first_s_max
        self._untimed_s = min(LENIENT_S, first_s_max)
        """Of what has no usual time yet."""
        self._evaluation_s = 0.0
        """The longest evaluation so far."""
        self._first_s = 0.0
        """The longest first iteration so far: it may have compiled, and may do so again."""
        self.loaded_s = 0.0
        """When the rank was last seen to load its samples: an iteration is not slow by that."""
        self._last: Mark | None = None

    def passed(self, mark: Mark) -> None:
        """A new mark: the time of an evaluation that has ended limits the next one."""
        last, self._last = self._last, mark
        if last is not None and last.what == EVALUATE:
            self._evaluation_s = max(self._evaluation_s, mark.at_s - last.at_s)

    def finished(self, done: FinishedIteration) -> None:
        """A first iteration limits the first ones of later generations."""
        if done.kind == "first":
            self._first_s = max(self._first_s, done.iteration_s)

    def untimed(self, normal_s: float) -> Limit:
        """The limit of what has no usual time."""
        return Limit(self._untimed_s, normal_s, is_untimed=True, may_load=True)

    def of(self, mark: Mark, monitor: StepTimeMonitor, num_done: int) -> Limit | None:
        """The limit after this mark. `num_done`: the iterations that the process has finished.
        None: what it does has no limit here: it joins, recovers or waits for orders."""
        average_s = monitor.average_s
        untimed = self.untimed(average_s)
        if mark.phase == OUTSIDE_CODE:
            if mark.what not in BETWEEN:
                return None
            if mark.what == EVALUATE and self._evaluation_s:
                limit_s = max(STALLED_TIMES * self._evaluation_s, self._untimed_s)
                return Limit(limit_s, self._evaluation_s, may_load=True)
            return untimed
        if not average_s or num_done < WARM_UP_NUM:
            return untimed
        limit_s = max(monitor.limit_s(mark.kind, self._untimed_s), STALL_S_MIN)
        if mark.kind == "first":
            limit_s = max(limit_s, SHOWN_TIMES * min(self._first_s, self._first_s_max))
        return Limit(limit_s, average_s, may_load=mark.what in LOADS_IN)


class RankMonitors:
    """The monitors of a node's training ranks. `report` spools a body. All that is read of a rank's
    page is read in its `guard`."""

    def __init__(
        self, report: Callable[[Body, float | None], None], guard: Guard, *, is_on: bool = True
    ) -> None:
        self._report = report
        self._guard = guard
        self._is_on = is_on
        self._watched: dict[Key, RankMonitor] = {}
        self._works: dict[Key, WorkMonitor] = {}
        self._turns: dict[int, float] = {}
        """By task: when the work of one of its ranks was last told."""
        self._looked_s: float | None = None

    def open(self, order: StartRank) -> ProgressPage | None:
        """A progress page for a training rank about to start; None if it is not monitored."""
        return ProgressPage() if self._is_on and order.spec.training is not None else None

    def begin(
        self,
        order: StartRank,
        page: ProgressPage | None,
        pid: int,
        *,
        is_stalled: bool = False,
        is_adopted: bool = False,
    ) -> None:
        """Monitor a rank with its page. `is_stalled`: as a former agent has reported. `is_adopted`:
        a former agent has started it, and which order waits for it now is not known."""
        if page is None:
            return
        key = _key(order)
        self._watched[key] = monitor = RankMonitor(order, page, pid)
        tell_s = min(order.tell_s, ADOPTED_TELL_S) if is_adopted else order.tell_s
        self._works[key] = WorkMonitor(order, tell_s)
        if is_stalled:
            with self._guard(key, "page"):
                monitor.continue_stall()

    def adopted(self, order: StartRank, pid: int) -> None:
        """Monitor `pid`, the process that trains."""
        if (watched := self._watched.get(_key(order))) is not None:
            watched.pid = pid

    def expect(self, key: Key, tell_s: float) -> None:
        """An order waits for the rank: tell of its progress so often (`tell_s` of the order)."""
        if (work := self._works.get(key)) is not None:
            work.expect(tell_s)

    def drop(self, order: StartRank) -> None:
        """Stop monitoring a rank that has ended. A second call does nothing."""
        watched = self._watched.pop(_key(order), None)
        self._works.pop(_key(order), None)
        if watched is not None:
            watched.page.close()

    def mark_in_words(self, key: Key) -> str:
        """What a rank does by its page, for how long, and the last operation of each of its groups;
        "": it has no page, or is not watched."""
        watched = self._watched.get(key)
        with self._guard(key, "page"):
            mark = watched.page.mark() if watched is not None else None
            if watched is None or mark is None:
                return ""
            groups = (watched.page.groups() or NO_GROUPS).in_words()
            return "; ".join(filter(None, (mark.in_words(time.monotonic()), groups)))
        return ""

    def look(self, now_s: float) -> None:
        """Report all changes. `now_s` is the monotonic clock."""
        before_s = self._looked_s
        late_s = now_s - before_s - WATCH_S if before_s is not None else 0.0
        self._looked_s = now_s
        for key, watched in list(self._watched.items()):
            if late_s > LATE_S:
                watched.exclude(now_s if late_s > PAUSE_S else None, late_s)
            with self._guard(key, "page"):
                for body in watched.look(now_s, before_s or 0.0):
                    self._report(body, None)
        for key, work in sorted(self._works.items(), key=lambda item: item[1].told_s):
            watched = self._watched[key]
            with self._guard(key, "page"):
                worked = work.look(now_s, watched.pid, watched.page, self._turns)
                if worked is not None:
                    self._report(worked, None)


class SlowReport(NamedTuple):
    """A report of a slow iteration that still runs."""

    generation: int
    iteration: int
    own_s: float
    """The rank's own work in it by then."""
    look: process_state.ProcessState | None
    """The process state when this iteration was first reported."""

    def of(self, mark: Mark) -> bool:
        return (self.generation, self.iteration) == (mark.generation, mark.iteration)


class RankMonitor:
    """One rank: the state of its page, and what was reported."""

    def __init__(self, order: StartRank, page: ProgressPage, pid: int) -> None:
        self.page = page
        self._ids = {"task": order.task, "rank": order.rank, "attempt": order.attempt}
        self.pid = pid
        self._limits = Limits(order.first_iteration_s_max)
        self._monitor: StepTimeMonitor = StepTimeMonitor()
        self._generation: int = 0
        self._num_done = 0
        self._from_s = 0.0
        """Time before this does not count."""
        self._missed_s = 0.0
        """Time without monitoring since the last mark."""
        self._newest: tuple[int, int, float] = (0, 0, 0.0)
        """The number of the newest mark, `ProgressPage.num_entered`, and the look before these
        last changed: no mark is older than that, whatever the rank says, so that its stalls are no
        flood."""
        self._before: process_state.ProcessState | None = None
        self._flow = DataFlow(pid)
        """What it reads and writes since the last mark."""
        self._stalled: Mark | None = None
        self._reported_s = -REPORT_S
        self._slow: SlowReport | None = None
        """The last one."""
        self._waiting: StepTimeChange | None = None
        """A step-time report held back because the last one was sent less than REPORT_S ago."""

    def continue_stall(self) -> None:
        """A former agent has reported that the rank stalls. Its end is the next mark."""
        self._stalled = mark = self.page.mark()
        if mark is not None:
            self._newest = (mark.num, self.page.num_entered(), 0.0)
            self._generation = mark.generation

    def exclude(self, from_s: float | None, late_s: float) -> None:
        """Do not count the last `late_s`. If `from_s` is given, count only time after `from_s`."""
        self._before = None
        if from_s is None:
            self._missed_s += late_s
        else:
            self._from_s, self._missed_s = from_s, 0.0

    def look(self, now_s: float, before_s: float) -> list[Body]:
        """The reports due now. `before_s`: the look before; 0: none."""
        mark = self.page.mark()
        if mark is None:
            return []
        reports: list[Body] = []
        if mark.generation != self._generation:
            self._generation = mark.generation
            self._monitor = StepTimeMonitor(self._monitor.average_s)
            self._slow = self._waiting = None
            self._reported_s = -REPORT_S
        entered = self.page.num_entered()
        if (mark.num, entered) != self._newest[:2]:
            moved_s = mark.at_s if mark.num != self._newest[0] else before_s
            self._newest = (mark.num, entered, before_s)
            self._missed_s, self._before, self._flow = 0.0, None, DataFlow(self.pid)
            self._limits.passed(mark)
            reports += self._check_unstalled(mark, moved_s)
        reports += self._check_done(now_s, mark)
        limit = self._limits.of(mark, self._monitor, self._num_done)
        if limit is not None and self._compiles(mark):
            untimed = self._limits.untimed(limit.normal_s)
            limit = max(limit, untimed, key=lambda longer: longer.s)
        if limit is not None:
            reports += self._check_mark(now_s, mark, limit)
        return reports

    def _compiles(self, mark: Mark) -> bool:
        """Whether it compiles in its own work, as it says itself."""
        row = self.page.work() if mark.phase == OWN_CODE else None
        return row is not None and row.what == COMPILES

    def _check_unstalled(self, mark: Mark, moved_s: float) -> list[Body]:
        """`moved_s`: when the rank made progress."""
        if self._stalled is None:
            return []
        stalled_s = max(0.0, moved_s - self._stalled.at_s)
        self._stalled = None
        return [
            RankUnstalled(
                **self._ids,
                generation=mark.generation,
                iteration=mark.iteration,
                stalled_s=stalled_s,
            )
        ]

    def _check_mark(self, now_s: float, mark: Mark, limit: Limit) -> list[Body]:
        limit_s = limit.s
        from_s = max(mark.at_s, self._flow.moved_s)
        in_s = now_s - max(from_s, self._from_s, self._newest[2]) - self._missed_s
        if limit.may_load and in_s > limit_s / 3 and self._flow.look(now_s, within_s=limit_s / 2):
            self._before = None
            return self._check_unstalled(mark, now_s)
        starts = limit.may_load and self._flow.started_s >= mark.at_s - START_S > 0
        if starts or self._flow.moved_s:
            self._limits.loaded_s = now_s
        if starts:
            limit = self._limits.untimed(limit.normal_s)  # a DataLoader starts its workers anew
            limit_s = max(limit_s, limit.s)
            if in_s <= limit_s and self._stalled is not None:
                return self._check_unstalled(mark, now_s)
        if self._stalled is None and in_s > limit_s / 3 and self._before is None:
            self._before = process_state.look(self.pid)
        if (
            self._stalled is None
            and in_s > limit_s
            and (in_s - process_state.starved_s(self.pid, self._before) > limit_s)
        ):
            self._stalled, told = mark, self.page.groups() or NO_GROUPS
            return [
                RankStalled(
                    **self._ids,
                    generation=mark.generation,
                    iteration=mark.iteration,
                    where="collective" if mark.phase == COLLECTIVE_CODE else "own",
                    what=mark.what,
                    collective=mark.collective,
                    in_s=now_s - from_s,
                    normal_s=limit.normal_s,
                    stack=process_state.describe(self.pid, self._before),
                    silent_peers=silent_peers(self.pid),
                    groups=tuple(group_progress(entry, now_s) for entry in told.entries),
                    are_groups_complete=told.is_complete,
                    waits=told.waits,
                    is_untimed=limit.is_untimed,
                )
            ]
        if in_s >= limit_s / 3 or limit.is_untimed or mark.phase == OUTSIDE_CODE:
            return []
        return self._check_slow(now_s, mark, limit_s)

    def _check_slow(self, now_s: float, mark: Mark, limit_s: float) -> list[Body]:
        """Report an iteration whose own work takes too long although the rank passes marks. A rank
        that only waits for a slow peer is not slow."""
        if self._stalled is not None or mark.phase == COLLECTIVE_CODE:
            return []
        own_s = now_s - max(mark.began_s, self._from_s, self._limits.loaded_s) - mark.waited_s
        before = self._slow if self._slow is not None and self._slow.of(mark) else None
        least_s = SLOW_AGAIN_TIMES * before.own_s if before is not None else limit_s
        if own_s <= least_s:
            return []
        if before is not None:
            own_s -= process_state.starved_s(self.pid, before.look)
            if own_s <= least_s:
                return []
        look = before.look if before is not None else process_state.look(self.pid)
        self._slow = SlowReport(mark.generation, mark.iteration, own_s, look)
        normal_s = self._monitor.own.normal or self._monitor.average_s
        return [
            self._step_time(
                mark.iteration, StepTimeChange(1, now_s - mark.began_s, own_s, normal_s), now_s
            )
        ]

    def _check_done(self, now_s: float, mark: Mark) -> list[Body]:
        for done in self.page.done(self._num_done):
            self._num_done = done.num
            self._limits.finished(done)
            if done.generation == self._generation:
                self._monitor.add(done.iteration_s, done.own_s, done.kind)
                if not self._monitor.average_s:  # the first iteration only seeds the average
                    self._monitor = StepTimeMonitor(done.iteration_s)
                self._waiting = self._monitor.take_change() or self._waiting
                self._follow_up(done.generation, done.iteration)
        if self._waiting is None or now_s - self._reported_s < REPORT_S:
            return []
        change, self._waiting = self._waiting, None
        return [self._step_time(mark.iteration, change, now_s)]

    def _follow_up(self, generation: int, iteration: int) -> None:
        """Some iterations after a reported slow iteration, report the step time since then."""
        if (
            self._slow is not None
            and self._slow.generation == generation
            and iteration >= self._slow.iteration + 2 * WARM_UP_NUM
            and self._waiting is None
        ):
            self._slow = None
            self._waiting = self._monitor.recent()

    def _step_time(self, iteration: int, change: StepTimeChange, now_s: float) -> StepTimeChanged:
        self._reported_s = now_s
        return StepTimeChanged(
            **self._ids,
            generation=self._generation,
            iteration=iteration,
            num_iterations=change.num_iterations,
            iteration_s=change.iteration_s,
            own_s=change.own_s,
            normal_s=change.normal_s,
        )


def group_progress(entry: Entry, now_s: float) -> GroupProgress:
    """What the rank has entered in one of its groups."""
    return GroupProgress(
        key=entry.key,
        role=entry.role,
        members=entry.members,
        entered=entry.entered,
        left=entry.left,
        kind=entry.kind,
        num_bytes=entry.num_bytes,
        order=entry.order,
        in_s=max(0.0, now_s - entry.at_s),
    )


def _key(order: StartRank) -> Key:
    return order.task, order.rank, order.attempt
