"""Contains what the input of one rank raises in the agent: the rank has violated the protocol."""

import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Literal

import structlog

from ....events.process_io import Seldom
from ....events.shortage import is_shortage
from ...ipc.violation import Violation
from .shim import ShimLost

Key = tuple[int, int, int]
"""Task, rank and attempt."""
Part = Literal["pipe", "page", "output", "exit"]
"""By which a rank speaks to its agent."""
TRACE_S = 10.0
"""Time between two traces in the agent's log."""
TRACE_LINES_NUM = 10
_traces = Seldom(TRACE_S)
_log = structlog.get_logger("agent")


class RankGuard:
    """The body of its `with` handles what a rank says. An exception there ends neither the agent
    nor another rank: the rank has violated the protocol, and `end` ends it, with why; then the code
    behind the `with` goes on. A fault of the machine (OSError, or a shortage) is no violation: only
    the rest of the body is left out. ShimLost is raised."""

    def __init__(self, end: Callable[[Key, str], None], key: Key, part: Part) -> None:
        self._end, self._key, self._part = end, key, part

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, ShimLost):
            return False
        if not isinstance(error, Violation):
            self._log(error)
        if not isinstance(error, OSError) and not is_shortage(error):
            is_said = isinstance(error, Violation)
            why = str(error) if is_said else f"{type(error).__name__}: {error}"
            self._end(self._key, f"it violated the {self._part} protocol: {why}")
        return True

    def _log(self, error: Exception) -> None:
        """Log what may be a bug of ours."""
        if num := _traces.due():
            _log.error(
                "what a rank says raises",
                task=self._key[0],
                rank=self._key[1],
                part=self._part,
                num=num,
                trace="".join(traceback.format_exception(error, limit=-TRACE_LINES_NUM)),
            )


Guard = Callable[[Key, Part], RankGuard]
