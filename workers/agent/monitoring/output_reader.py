"""Reads the output of the node's commands as it grows; reports their iterations, and hangs.

One look reads all logs in one thread: at most LOOK_BYTES_MAX together, or RANK_BYTES_MIN of each if
there are many. Of a log that grows faster only the end is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import structlog

from ....events.records.orders import StartRank
from ....events.records.reports import IterationsLogged, RankStalled, RankUnstalled
from ....events.records.types import Body
from ...diagnosis.step_time import LENIENT_S, LENIENT_TIMES, STALLED_TIMES, StepTimeMonitor, Window
from ...host import linux
from ..processes.rank_guard import Guard, Key
from . import process_state
from .megatron_output import IterationRanges, ProgressLine, ProgressLines

# --- A hang of a command: its progress lines have stopped ---
#
# The evidence is weak, so the limit is at least a minute, follows the intervals between the
# command's own lines, and is longer after an announced pause (a checkpoint or an evaluation).

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
            reports.append(
                RankUnstalled(
                    **self._ids, generation=0, iteration=line.iteration, stalled_s=max(in_s, 0.0)
                )
            )
        if line.num_iterations:
            self._monitor.add(line.step_s)
        self._line, self._line_s, self._missed_s = line, now_s, 0.0
        self._before, self._stalled_s, self._is_cut = None, -1.0, False
        return reports

    def limit_s(self, *, is_paused: bool = False) -> float:
        """Longest normal time without a line; 0: unknown. `is_paused`: a pause was announced."""
        if len(self._intervals) < INTERVALS_NUM_MIN:
            return 0.0
        limit_s = max(
            STALLED_TIMES * self._intervals.largest(1),
            LENIENT_TIMES * self._intervals.quantile(0.5),
            LENIENT_S,
        )
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
            task=self._ids["task"],
            rank=self._ids["rank"],
            attempt=self._ids["attempt"],
            generation=0,
            iteration=line.iteration,
            where="own",
            what=WHAT,
            collective=0,
            in_s=in_s,
            normal_s=self._monitor.average_s or line.step_s,
            stack=process_state.describe(self._busy_pid, self._before),
            silent_peers=(),
            groups=(),
            are_groups_complete=False,
            waits=False,
        )


def _innermost(pid: int) -> int:
    """The program that a shell or launcher runs: follow single children down."""
    procs = linux.table() if pid else []
    while True:
        children = [proc.pid for proc in procs if proc.ppid == pid and proc.state != "Z"]
        if len(children) != 1:
            return pid
        pid = children[0]


LOOK_S = 1.0
"""Time between two looks, and between two reports of one process."""
LOOK_BYTES_MAX = 1 << 20
"""Ordinary output takes 4 ms, output of progress lines only 40 ms (measured)."""
RANK_BYTES_MIN = 64 << 10
LATE_S = 0.5
"""If a look is later than this, the missed time does not count."""
_log = structlog.get_logger("agent")


class OutputReaders:
    """Reads all commands of a node. Of each task only the first process with progress reports."""

    def __init__(
        self, report: Callable[[Body, float | None], None], guard: Guard, *, is_on: bool = True
    ) -> None:
        """All that is read of a rank's output is read in its `guard`. `is_on`: whether hangs are
        detected."""
        self._report = report
        self._guard = guard
        self._is_on = is_on
        self._logs: dict[Key, OutputReader] = {}
        self._watched: dict[Key, OutputMonitor] = {}
        self._looked_s: float | None = None

    def begin(
        self,
        order: StartRank,
        log_path: Path,
        log_start: int,
        pid: int,
        *,
        log_at: int = 0,
        is_stalled: bool = False,
    ) -> None:
        """Read a command's output from `log_start`, or from where a former agent was (`log_at`)."""
        self._logs[_key(order)] = one = OutputReader(order, log_path, log_at or log_start)
        one.has_reported = log_at > 0
        if self._is_on:
            self._watched[_key(order)] = OutputMonitor(order, pid, is_stalled=is_stalled)

    def reported_at(self, key: Key) -> int:
        """Up to where the output of a process is reported; 0: it is not known."""
        return self._logs[key].reported_at if key in self._logs else 0

    def look(self, now_s: float) -> None:
        """Report commands that stall, and new progress, one report a task. `now_s`: monotonic."""
        late_s = now_s - self._looked_s - LOOK_S if self._looked_s is not None else 0.0
        self._looked_s = now_s
        if late_s > LATE_S:
            for watched in self._watched.values():
                watched.exclude(late_s, now_s)
        reporting = {key[0]: key for key, one in self._logs.items() if one.has_reported}
        reading = [one for key, one in self._logs.items() if reporting.get(key[0], key) == key]
        bytes_max = read_bytes_max(len(reading))
        reported: set[int] = set()
        for one in reading:
            with self._guard(one.key, "output"):
                if one.task not in reported and (report := one.look(bytes_max)) is not None:
                    reported.add(one.task)
                    self._report_progress(one, report, now_s)
        for key in reporting.values():
            if key in self._watched:
                with self._guard(key, "output"):
                    self._look_for_stall(key, now_s)

    def _look_for_stall(self, key: Key, now_s: float) -> None:
        stalled = self._watched[key].look(now_s, partial(self._is_paused, self._logs[key]))
        if stalled is not None:
            self._report(stalled, None)

    def _report_progress(self, one: OutputReader, report: IterationsLogged, now_s: float) -> None:
        watched = self._watched.get(one.key)
        if watched is not None:
            for body in watched.add_line(report, now_s):
                self._report(body, None)
            for other in self._others(one):
                other.skip_to_end()
        self._report(report, None)

    def _is_paused(self, one: OutputReader) -> bool:
        """Whether a process of the task on this node announced a pause after the last progress
        line. Megatron's last rank prints progress, its first rank prints checkpoints."""
        return one.is_pause_announced or any(other.announces_pause() for other in self._others(one))

    def _others(self, one: OutputReader) -> list[OutputReader]:
        return [
            other for other in self._logs.values() if other.task == one.task and other is not one
        ]

    def end(self, order: StartRank) -> None:
        """Report the last output of a command that has ended."""
        one = self._logs.get(_key(order))
        if one is not None and not any(other.has_reported for other in self._others(one)):
            for report in one.end():
                self._report(report, None)
        self.drop(order)

    def drop(self, order: StartRank) -> None:
        """Stop reading the command. A second call does nothing."""
        self._watched.pop(_key(order), None)
        one = self._logs.pop(_key(order), None)
        if one is not None:
            one.close()


class OutputReader:
    """The log of one process from `log_start` on. It stays open if the file is renamed."""

    def __init__(self, order: StartRank, log_path: Path, log_start: int) -> None:
        self._order = order
        self.key, self.task = _key(order), order.task
        self.has_reported = False
        self.reported_at = 0
        self._at = log_start
        self._lines = ProgressLines()
        self._stretches = IterationRanges()
        self._is_behind = False
        self._is_other_batch = False
        self._fd = -1
        try:
            # The process may have put a pipe there.
            self._fd = os.open(log_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            self._give_up(error)

    def look(self, bytes_max: int = LOOK_BYTES_MAX) -> IterationsLogged | None:
        """Read at most `bytes_max` of new output; return at most one report."""
        if self._fd >= 0:
            try:
                for line in self._lines.feed(self._read(bytes_max)):
                    self._stretches.add(line)
            except OSError as error:
                self._give_up(error)
        merged = self._stretches.take()
        if self._stretches.is_empty:
            self.reported_at = self._at - self._lines.num_begun
        return self._report(merged) if merged is not None else None

    @property
    def is_pause_announced(self) -> bool:
        """Whether a checkpoint or an evaluation was printed since the last progress line."""
        return self._lines.is_pause_announced

    def skip_to_end(self) -> None:
        """Skip the output so far: another process of the task reports progress."""
        if self._fd >= 0:
            self._lines = ProgressLines()
            self._at = os.fstat(self._fd).st_size

    def announces_pause(self) -> bool:
        """Whether a checkpoint or an evaluation was printed since `skip_to_end`."""
        if self._fd >= 0:
            try:
                end = os.fstat(self._fd).st_size - RANK_BYTES_MIN
                if end > self._at:
                    self._lines.skip()
                    self._at = end
                self._lines.feed(self._read(RANK_BYTES_MIN))
            except OSError as error:
                self._give_up(error)
        return self._lines.is_pause_announced

    def end(self) -> Iterable[IterationsLogged]:
        """Take a last look, close the log and return all remaining reports."""
        report = self.look()
        self.close()
        while report is not None:
            yield report
            report = self.look()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, bytes_max: int) -> bytes:
        size = os.fstat(self._fd).st_size
        if size < self._at:  # the file was truncated: all its content is new
            self._lines.skip()
            self._at = 0
        if size - self._at > bytes_max:
            self._lines.skip()
            self._at = size - bytes_max
            if not self._is_behind:
                self._is_behind = True
                _log.warning(
                    "a command prints faster than the agent reads; progress lines may be missed",
                    task=self._order.task,
                    rank=self._order.rank,
                )
        data = os.pread(self._fd, min(size - self._at, bytes_max), self._at)
        self._at += len(data)
        return data

    def _report(self, merged: ProgressLine) -> IterationsLogged:
        self.has_reported = True
        order = self._order
        model = order.spec.model
        if (
            model is not None
            and merged.global_batch not in (0, model.global_batch)
            and not self._is_other_batch
        ):
            self._is_other_batch = True
            _log.warning(
                "a command's global batch differs from its model's: its iterations do not "
                "calibrate the model",
                task=order.task,
                printed=merged.global_batch,
                model=model.global_batch,
            )
        return IterationsLogged(
            task=order.task,
            rank=order.rank,
            attempt=order.attempt,
            iteration=merged.iteration,
            iterations=merged.iterations,
            num_iterations=merged.num,
            step_s=merged.step_s,
            loss=merged.loss,
            global_batch=merged.global_batch,
            skipped=merged.skipped,
            nan=merged.nan,
            loss_text=merged.loss_text,
        )

    def _give_up(self, error: OSError) -> None:
        """Stop reading; the command and the agent continue."""
        self.close()
        _log.warning(
            "a command's log cannot be read; its iterations are not reported",
            task=self._order.task,
            rank=self._order.rank,
            why=str(error),
        )


def _key(order: StartRank) -> Key:
    return order.task, order.rank, order.attempt


def read_bytes_max(num_logs: int) -> int:
    """Bytes that one look may read of each of `num_logs` logs."""
    return max(LOOK_BYTES_MAX // max(num_logs, 1), RANK_BYTES_MIN)
