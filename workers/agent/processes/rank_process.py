"""The agent's state of one attempt of a rank, without the secrets in what the rank prints."""

import asyncio
import re
import signal
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from msgspec import Struct, structs

from ....events.records.orders import StartRank
from ....events.records.reports import RankErrored
from ....events.records.types import Body
from ...ipc.pipe_protocol import Frame
from .oom_kills import MemoryCgroup
from .pipe import Pipe
from .process import Exit, Process
from .rank_guard import Key
from .report_limits import ReportLimits

WORD = "[redacted]"
SECRET_CHARS_MIN = 6
"""A shorter value is no secret: TOKENIZERS_PARALLELISM=false must not hide every "false"."""
TEXTS = ("error", "text", "why")
"""The fields of a rank's reports that hold free text."""
B = TypeVar("B", bound=Body)


class Redactor:
    """Replaces the values of those variables of `environment` whose names match one of `patterns`,
    in any case, by WORD. It finds a value as it is and as Python's repr writes it."""

    def __init__(self, environment: Mapping[str, str], patterns: Iterable[str]) -> None:
        upper = [pattern.upper() for pattern in patterns]
        values = {
            value
            for name, value in environment.items()
            if len(value) >= SECRET_CHARS_MIN
            and any(fnmatchcase(name.upper(), pattern) for pattern in upper)
        }
        values |= {repr(value)[1:-1] for value in values}
        # The longest first: one value may begin with another.
        found = sorted(values, key=lambda value: (-len(value), value))
        self._secret = re.compile("|".join(map(re.escape, found))) if found else None

    def text(self, text: str) -> str:
        return self._secret.sub(WORD, text) if self._secret is not None else text

    def body(self, body: B) -> B:
        """The body with its free text redacted."""
        changes = {
            name: new
            for name in TEXTS
            if (old := getattr(body, name, "")) and (new := self.text(old)) != old
        }
        return structs.replace(body, **changes) if changes else body


class RankNote(Struct, kw_only=True):
    """What the journal has of an attempt, for the next agent."""

    frames: int = 0
    """The number of the last frame that was taken."""
    generation: int = 0
    followed: int = 0
    """The process that trains, if it is not the command's own; 0: none."""
    log_at: int = 0
    """Where the output of a command begins that is not reported yet; 0: nothing is reported."""
    is_suspended: bool = False
    """Whether the last report says that the process is stopped."""
    is_stalled: bool = False
    """The same for stalls."""
    has_adopted: bool = False
    """Whether it is reported that the process has adopted Unicron."""
    is_ready: bool = False
    is_exit_reported: bool = False
    error: RankErrored | None = None
    """The rank's own report of its error."""
    fault: str = ""
    """Why the agent has killed the process without an order: it violated the protocol."""


class RankAttempt:
    """One attempt: waits for its slot, runs, is stopped and reaped."""

    def __init__(
        self, order: StartRank, frame: Frame, limits: ReportLimits, redactor: Redactor
    ) -> None:
        self.order = order
        self.frame = frame
        """The order as the rank gets it."""
        self.limits = limits
        self.redactor = redactor
        self.process: Process | None = None
        self.pipe: Pipe | None = None
        self.note = RankNote()
        self.is_adopted = False
        """Started by a former agent."""
        self.is_withdrawn = False
        """Stopped before its process started."""
        self.stop_at: float | None = None
        """Loop time at which the grace period ends; None: no stop was ordered."""
        self.is_kept = False
        """What it does before it is ended is being kept, or was."""
        self.stop = asyncio.Event()
        self.continue_timer: asyncio.TimerHandle | None = None
        """Set while an injected fault of limited duration keeps the process stopped."""
        self.memory: MemoryCgroup | None = None
        self.will_abort = 0
        """The last generation whose communicators it is about to abort, as it says."""

    @property
    def key(self) -> Key:
        return self.order.task, self.order.rank, self.order.attempt

    @property
    def why_ended(self) -> str | None:
        """Why the agent has ended the process; "": by order; None: it has not."""
        return self.note.fault or ("" if self.stop_at is not None else None)

    async def until_end(self) -> Exit:
        """Wait until the process has ended. Kill it at the end of the grace period."""
        process, loop = self.process, asyncio.get_running_loop()
        assert process is not None
        ending = asyncio.ensure_future(process.wait())
        try:
            while not ending.done():
                left_s = None
                if self.stop_at is not None:
                    left_s = self.stop_at - loop.time()
                    if left_s <= 0:
                        process.signal_group(signal.SIGKILL)
                        left_s = None
                self.stop.clear()
                stopping = asyncio.ensure_future(self.stop.wait())
                await asyncio.wait(
                    (ending, stopping), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                stopping.cancel()
            return ending.result()
        finally:
            ending.cancel()
