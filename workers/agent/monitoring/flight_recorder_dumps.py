"""Flight recorders of a task that seems to hang: the agent asks its ranks, and they write files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from ....events.records.reports import RankStalled
from ....events.records.types import Body
from ...ipc.pipe_protocol import Frame, WriteDump
from ..processes.pipe import Pipe
from ..processes.process import Process

Dumps = dict[int, Path]
"""Rank -> where its dump will be."""
AGAIN_S = 60.0
"""Between two dumps of one task: all its ranks stall together, and are told one by one."""
_log = structlog.get_logger("agent")


def ask(ranks: Iterable[tuple[int, Process | None, Pipe | None]]) -> Dumps:
    """Ask each; rank -> where its dump will be, beside its log.

    Waits for nothing and harms no healthy rank. A file appears within milliseconds, whole or not at
    all; a rank that is stopped or holds its GIL writes none before it goes on: no file is evidence
    too. `unicron locate` reads them, once all nodes' are in one folder.
    """
    paths: Dumps = {}
    for rank, process, pipe in ranks:
        if process is None or pipe is None:  # a command's, or one that has not started
            continue
        path = process.log_path.parent / f"flight-rank-{rank}.json"
        path.unlink(missing_ok=True)  # an earlier hang's
        if pipe.send(Frame(body=WriteDump(path=str(path)))):
            paths[rank] = path
    return paths


class Asker:
    """Has a task's ranks here dumped when the first of them is told to stall."""

    def __init__(self, dump: Callable[[int], Dumps],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._dump = dump
        self._clock = clock
        self._asked_s: dict[int, float] = {}

    def heed(self, body: Body) -> None:
        """Something is told of a rank. Waits for nothing."""
        if not isinstance(body, RankStalled):
            return
        now_s = self._clock()
        self._asked_s = {task: asked_s for task, asked_s in self._asked_s.items()
                         if now_s - asked_s < AGAIN_S}
        if body.task in self._asked_s:
            return
        self._asked_s[body.task] = now_s
        try:
            paths = self._dump(body.task)
        except OSError as error:
            _log.warning("no dumps of a task that stalls", task=body.task, why=str(error))
            return
        for folder in sorted({str(path.parent) for path in paths.values()}):
            _log.info("a task stalls: its flight recorders are written", task=body.task,
                      ranks=sorted(paths), look=f"unicron locate {folder}")
