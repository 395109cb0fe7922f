"""Requests flight recorder dumps from the ranks of a task that seems to hang."""

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
"""Rank -> path of its dump."""
DUMP_INTERVAL_S = 60.0
"""Minimum time between dumps of a task: its ranks stall together but are reported one by one."""
_log = structlog.get_logger("agent")


def dump_path(folder: Path, rank: int) -> Path:
    """The file in that folder to which a rank writes its dump."""
    return folder / f"flight-rank-{rank}.json"


def request_dumps(ranks: Iterable[tuple[int, Process | None, Pipe | None]]) -> Dumps:
    """Request a dump from each rank, without waiting; return the paths, for `unicron locate`. A
    rank that is stopped or holds its GIL writes none until it continues: that is evidence too."""
    paths: Dumps = {}
    for rank, process, pipe in ranks:
        if process is None or pipe is None:  # a command without a pipe, or not started yet
            continue
        path = dump_path(process.folder, rank)
        path.unlink(missing_ok=True)  # the dump of an earlier hang
        if pipe.send(Frame(body=WriteDump(path=str(path)))):
            paths[rank] = path
    return paths


class DumpTrigger:
    """Requests dumps from a task's ranks on this node when the first of them stalls."""

    def __init__(
        self, dump: Callable[[int], Dumps], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dump = dump
        self._clock = clock
        self._requested_s: dict[int, float] = {}

    def on_report(self, body: Body) -> None:
        """Request dumps if `body` is the first RankStalled of a task. Does not wait."""
        if not isinstance(body, RankStalled):
            return
        now_s = self._clock()
        self._requested_s = {
            task: requested_s
            for task, requested_s in self._requested_s.items()
            if now_s - requested_s < DUMP_INTERVAL_S
        }
        if body.task in self._requested_s:
            return
        self._requested_s[body.task] = now_s
        try:
            paths = self._dump(body.task)
        except OSError as error:
            _log.warning("no dumps of a stalled task", task=body.task, why=str(error))
            return
        for folder in sorted({str(path.parent) for path in paths.values()}):
            _log.info(
                "a task stalls: its ranks write flight recorder dumps",
                task=body.task,
                ranks=sorted(paths),
                look=f"unicron locate {folder}",
            )
