"""What the commands of a node print is read as it grows, and their iterations are told.

One look reads all logs, from one thread: at most LOOK_BYTES_MAX of them together, or
RANK_BYTES_MIN of each where they are many. A log that grows faster is read at its end alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import structlog

from ....events.records.orders import StartRank
from ....events.records.reports import IterationsLogged
from ....events.records.types import Body
from .megatron_output import Lines, Stretch, Stretches
from .output_monitor import USUAL, Limits, LineWatch

LOOK_S = 1.0
"""Between two looks, and two reports of one process."""
LOOK_BYTES_MAX = 1 << 20
"""Most of it is passed over in 4 ms; nothing but lines of progress takes 40 ms (measured)."""
RANK_BYTES_MIN = 64 << 10
LATE_S = 0.5
"""A look that comes so much later has missed something: that time counts for nobody."""
_log = structlog.get_logger("agent")


class Readers:
    """All commands of a node. Of each task whoever prints progress first tells, and nobody else."""

    def __init__(self, report: Callable[[Body, float | None], None],
                 limits: Limits | None = USUAL) -> None:
        """`limits` None: whoever prints no more is not told of."""
        self._report = report
        self._limits = limits
        self._logs: dict[tuple[int, int, int], Progress] = {}
        self._watched: dict[tuple[int, int, int], LineWatch] = {}
        self._looked_s: float | None = None

    def begin(self, order: StartRank, log_path: Path, log_start: int, pid: int) -> None:
        """A command was started; what it prints is behind `log_start`."""
        self._logs[_key(order)] = Progress(order, log_path, log_start)
        if self._limits is not None:
            self._watched[_key(order)] = LineWatch(order, pid, self._limits)

    def look(self, now_s: float) -> None:
        """Tell what was printed since the last look, one report of a task at most, and of whom
        nothing has come for too long. `now_s` is the monotonic clock."""
        late_s = now_s - self._looked_s - LOOK_S if self._looked_s is not None else 0.0
        self._looked_s = now_s
        if late_s > LATE_S:
            for watched in self._watched.values():
                watched.forgive(late_s, now_s)
        tell = {key[0]: key for key, one in self._logs.items() if one.has_told}
        reading = [one for key, one in self._logs.items() if tell.get(key[0], key) == key]
        told: set[int] = set()
        for one in reading:
            if one.task not in told and (report := one.look(share(len(reading)))) is not None:
                told.add(one.task)
                self._pass(one, report, now_s)
        for key in tell.values():
            if key in self._watched:
                stalled = self._watched[key].look(now_s, partial(self._is_aside, self._logs[key]))
                if stalled is not None:
                    self._report(stalled, None)

    def _pass(self, one: Progress, report: IterationsLogged, now_s: float) -> None:
        watched = self._watched.get(one.key)
        if watched is not None:
            for body in watched.passed(report, now_s):
                self._report(body, None)
            for other in self._others(one):
                other.pass_over()
        self._report(report, None)

    def _is_aside(self, one: Progress) -> bool:
        """Whether one of the task's processes here has said so since the last line of progress:
        Megatron's last rank prints the lines, its first one of checkpoints."""
        return one.is_aside or any(other.says_aside() for other in self._others(one))

    def _others(self, one: Progress) -> list[Progress]:
        return [other for other in self._logs.values()
                if other.task == one.task and other is not one]

    def end(self, order: StartRank) -> None:
        """The command has ended: tell what it printed last."""
        one = self._logs.get(_key(order))
        if one is not None and not any(
                other.has_told and other is not one and other.task == one.task
                for other in self._logs.values()):
            for report in one.end():
                self._report(report, None)
        self.drop(order)

    def drop(self, order: StartRank) -> None:
        """Read no more of it; twice is harmless."""
        self._watched.pop(_key(order), None)
        one = self._logs.pop(_key(order), None)
        if one is not None:
            one.close()


class Progress:
    """The log of one process from `log_start` on. It stays open, also where it is renamed."""

    def __init__(self, order: StartRank, log_path: Path, log_start: int) -> None:
        self._order = order
        self.key, self.task = _key(order), order.task
        self.has_told = False
        self._at = log_start
        self._lines = Lines()
        self._stretches = Stretches()
        self._is_behind = False
        self._is_other_batch = False
        self._fd = -1
        try:
            self._fd = os.open(log_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._give_up(error)

    def look(self, bytes_max: int = LOOK_BYTES_MAX) -> IterationsLogged | None:
        """Read what is new, at most `bytes_max`; what is to be told, one report at most."""
        if self._fd >= 0:
            try:
                for line in self._lines.feed(self._read(bytes_max)):
                    self._stretches.add(line)
            except OSError as error:
                self._give_up(error)
        told = self._stretches.take()
        return self._report(told) if told is not None else None

    @property
    def is_aside(self) -> bool:
        """Whether a checkpoint or an evaluation was printed since the last line of progress."""
        return self._lines.is_aside

    def pass_over(self) -> None:
        """Another of its task tells of progress: what this one has printed so far is not read."""
        if self._fd >= 0:
            self._lines = Lines()
            self._at = os.fstat(self._fd).st_size

    def says_aside(self) -> bool:
        """Whether it has printed of a checkpoint or an evaluation since it was passed over."""
        if self._fd >= 0:
            try:
                end = os.fstat(self._fd).st_size - RANK_BYTES_MIN
                if end > self._at:
                    self._lines.skip()
                    self._at = end
                self._lines.feed(self._read(RANK_BYTES_MIN))
            except OSError as error:
                self._give_up(error)
        return self._lines.is_aside

    def end(self) -> Iterable[IterationsLogged]:
        """All that is left to tell, of one look; then the log is closed: who writes on is not
        followed."""
        told = self.look()
        self.close()
        while told is not None:
            yield told
            told = self.look()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, bytes_max: int) -> bytes:
        size = os.fstat(self._fd).st_size
        if size < self._at:  # somebody emptied it: all that is in it is new
            self._lines.skip()
            self._at = 0
        if size - self._at > bytes_max:
            self._lines.skip()
            self._at = size - bytes_max
            if not self._is_behind:
                self._is_behind = True
                _log.warning("a command prints faster than it is read; lines of progress may be "
                             "missed", task=self._order.task, rank=self._order.rank)
        data = os.pread(self._fd, min(size - self._at, bytes_max), self._at)
        self._at += len(data)
        return data

    def _report(self, told: Stretch) -> IterationsLogged:
        self.has_told = True
        order = self._order
        model = order.spec.model
        if (model is not None and told.global_batch not in (0, model.global_batch)
                and not self._is_other_batch):
            self._is_other_batch = True
            _log.warning("a command's global batch is not its model's: its iterations calibrate "
                         "nothing", task=order.task, printed=told.global_batch,
                         model=model.global_batch)
        return IterationsLogged(
            task=order.task, rank=order.rank, attempt=order.attempt, iteration=told.iteration,
            iterations=told.iterations, num_iterations=told.num, step_s=told.step_s,
            loss=told.loss, global_batch=told.global_batch, skipped=told.skipped, nan=told.nan)

    def _give_up(self, error: OSError) -> None:
        """The command goes on all the same; so does the agent."""
        self.close()
        _log.warning("a command's log cannot be read; its iterations are not told",
                     task=self._order.task, rank=self._order.rank, why=str(error))


def _key(order: StartRank) -> tuple[int, int, int]:
    return order.task, order.rank, order.attempt


def share(num_logs: int) -> int:
    """Bytes that one look may read of each of so many logs."""
    return max(LOOK_BYTES_MAX // max(num_logs, 1), RANK_BYTES_MIN)
