"""The agent's watch over the pulse of its training ranks: who stands still, and how fast each is.

One look reads a page of memory for each rank, and nothing of the ranks themselves; a process is
looked at only when it begins to be late. What was told of a rank is told once: that it stalled,
that it went on, and its pace when that has changed for good.

No false alarm by the watch itself: for as long as it did not run (the agent was stopped, its
machine paused or overloaded), nobody could be seen to pass anything, so that time counts for
nobody; after PAUSE_S of it everybody has a full span anew. Nor does time count in which a rank
waited for a core.
"""

from __future__ import annotations

from collections.abc import Callable

from ....events.records.orders import StartRank
from ....events.records.reports import RankStalled, RankUnstalled, StepTimeChanged
from ....events.records.types import Body
from ...diagnosis.step_time import WARM_UP_NUM, Monitor, Paced
from ...ipc.progress_page import COLLECTIVE_CODE, OUTSIDE_CODE, Mark, Page
from . import process_state

WATCH_S = 0.05
"""Between two looks."""
STALL_S_MIN = 1.0
"""However short iterations are: less is the machine's own business."""
LATE_S = 0.25
"""A look that comes so late has missed something: that time counts for nobody."""
PAUSE_S = 1.0
"""After so much of it everybody has a full span again."""
SLOW_AGAIN_TIMES = 2.0
"""What was told of an iteration while it lasted is told again when it has lasted so much longer."""
TELL_S = 10.0
"""Between two reports of one rank's pace in the same generation."""

Key = tuple[int, int, int]


class Watch:
    """All pulses of a node. `report` spools a body."""

    def __init__(self, report: Callable[[Body, float | None], None], *, is_on: bool = True) -> None:
        self._report = report
        self._is_on = is_on
        self._watched: dict[Key, Watched] = {}
        self._looked_s: float | None = None

    def open(self, order: StartRank) -> Page | None:
        """A page for a training rank that is about to start; None where it is not watched."""
        return Page() if self._is_on and order.spec.training is not None else None

    def begin(self, order: StartRank, page: Page | None, pid: int) -> None:
        """The rank runs, and has its end of the page."""
        if page is not None:
            page.handed_over()
            self._watched[_key(order)] = Watched(order, page, pid)

    def adopted(self, order: StartRank, pid: int) -> None:
        """This is the process that trains."""
        if (watched := self._watched.get(_key(order))) is not None:
            watched.pid = pid

    def drop(self, order: StartRank) -> None:
        """The rank has ended; twice is harmless."""
        watched = self._watched.pop(_key(order), None)
        if watched is not None:
            watched.page.close()

    def look(self, now_s: float) -> None:
        """Tell what is new. `now_s` is the monotonic clock."""
        late_s = now_s - self._looked_s - WATCH_S if self._looked_s is not None else 0.0
        self._looked_s = now_s
        for watched in self._watched.values():
            if late_s > LATE_S:
                watched.forgive(now_s if late_s > PAUSE_S else None, late_s)
            for body in watched.look(now_s):
                self._report(body, None)


class Watched:
    """One rank: what its page said, and what was told of it."""

    def __init__(self, order: StartRank, page: Page, pid: int) -> None:
        self.page = page
        self._ids = {"task": order.task, "rank": order.rank, "attempt": order.attempt}
        self.pid = pid
        self._monitor: Monitor = Monitor()
        self._generation: int = 0
        self._num_done = 0
        self._from_s = 0.0
        """What lies before counts no more."""
        self._missed_s = 0.0
        """Since the mark passed last: so long nobody watched."""
        self._mark_num: int = 0
        self._before: process_state.Look | None = None
        self._stalled: Mark | None = None
        self._told_s = -TELL_S
        self._slow: tuple[int, int] | None = None
        """The generation and iteration whose pace was told while it lasted."""
        self._slow_s = 0.0
        """How long its own work had lasted then."""
        self._slow_look: process_state.Look | None = None
        """At the process, when that was told first."""
        self._waiting: Paced | None = None
        """Of a pace that was told too shortly after another."""

    def forgive(self, from_s: float | None, late_s: float) -> None:
        """Nobody watched for `late_s`; everything begins anew at `from_s`, where that is given."""
        self._before = None
        if from_s is None:
            self._missed_s += late_s
        else:
            self._from_s, self._missed_s = from_s, 0.0

    def look(self, now_s: float) -> list[Body]:
        """What is to be told now."""
        mark = self.page.mark()
        if mark is None:
            return []
        told: list[Body] = []
        if mark.generation != self._generation:
            self._generation = mark.generation
            self._monitor = Monitor(self._monitor.average_s)
            self._slow = self._waiting = None
            self._told_s = -TELL_S
        if mark.num != self._mark_num:
            self._mark_num, self._missed_s, self._before = mark.num, 0.0, None
            if self._stalled is not None:
                told.append(RankUnstalled(
                    **self._ids, generation=mark.generation, iteration=mark.iteration,
                    stalled_s=max(0.0, mark.at_s - self._stalled.at_s)))
                self._stalled = None
        told += self._of_done(now_s, mark)
        if mark.phase != OUTSIDE_CODE:
            told += self._of_mark(now_s, mark)
        return told

    def _of_mark(self, now_s: float, mark: Mark) -> list[Body]:
        limit_s = self._limit_s(mark)
        if not limit_s:
            return []
        in_s = now_s - max(mark.at_s, self._from_s) - self._missed_s
        if self._stalled is None and in_s > limit_s / 3 and self._before is None:
            self._before = process_state.look(self.pid)
        if self._stalled is None and in_s > limit_s and (
                in_s - self._starved_s(self._before) > limit_s):
            self._stalled = mark
            return [
                RankStalled(
                    **self._ids,
                    generation=mark.generation,
                    iteration=mark.iteration,
                    where="collective" if mark.phase == COLLECTIVE_CODE else "own",
                    what=mark.what,
                    collective=mark.collective,
                    in_s=now_s - mark.at_s,
                    normal_s=self._monitor.average_s,
                    stack=process_state.words(self.pid, self._before),
                )
            ]
        return self._of_slow(now_s, mark, limit_s) if in_s < limit_s / 3 else []

    def _limit_s(self, mark: Mark) -> float:
        limit_s = self._monitor.limit_s(mark.kind)
        return max(limit_s, STALL_S_MIN) if limit_s else 0.0

    def _starved_s(self, before: process_state.Look | None) -> float:
        """How long it waited for a core since this look at it."""
        now = process_state.look(self.pid) if before is not None else None
        return now.starved_s - before.starved_s if now and before else 0.0

    def _of_slow(self, now_s: float, mark: Mark, limit_s: float) -> list[Body]:
        """An iteration that lasts too long by the rank's own work, while it passes marks.

        Who only waits for such a one is not slow.
        """
        where = (mark.generation, mark.iteration)
        if self._stalled is not None or mark.phase == COLLECTIVE_CODE:
            return []
        own_s = now_s - max(mark.began_s, self._from_s) - mark.waited_s
        again = self._slow == where
        least_s = SLOW_AGAIN_TIMES * self._slow_s if again else limit_s
        if own_s <= least_s:
            return []
        if again:
            own_s -= self._starved_s(self._slow_look)
            if own_s <= least_s:
                return []
        else:
            self._slow_look = process_state.look(self.pid)
        self._slow, self._slow_s = where, own_s
        normal_s = self._monitor.own.normal or self._monitor.average_s
        return [self._pace(mark.iteration, Paced(1, now_s - mark.began_s, own_s, normal_s), now_s)]

    def _of_done(self, now_s: float, mark: Mark) -> list[Body]:
        for done in self.page.done(self._num_done):
            self._num_done = done.num
            if done.generation == self._generation:
                self._monitor.add(done.iteration_s, done.own_s, done.kind)
                if not self._monitor.average_s:  # its first, which counts for no more than this
                    self._monitor = Monitor(done.iteration_s)
                self._waiting = self._monitor.paced() or self._waiting
                self._again(done.generation, done.iteration)
        if self._waiting is None or now_s - self._told_s < TELL_S:
            return []
        paced, self._waiting = self._waiting, None
        return [self._pace(mark.iteration, paced, now_s)]

    def _again(self, generation: int, iteration: int) -> None:
        """After an iteration that was told as slow, what its pace has been since is told too."""
        if (self._slow is not None and self._slow[0] == generation
                and iteration >= self._slow[1] + 2 * WARM_UP_NUM and self._waiting is None):
            self._slow = None
            self._waiting = self._monitor.recent()

    def _pace(self, iteration: int, paced: Paced, now_s: float) -> StepTimeChanged:
        self._told_s = now_s
        return StepTimeChanged(
            **self._ids, generation=self._generation, iteration=iteration,
            num_iterations=paced.num_iterations, iteration_s=paced.iteration_s, own_s=paced.own_s,
            normal_s=paced.normal_s)


def _key(order: StartRank) -> Key:
    return order.task, order.rank, order.attempt
