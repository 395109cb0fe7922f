"""How the ranks of a node ended: RankExited, with its cause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial

import structlog

from ....events.records.orders import StartRank
from ....events.records.reports import RankErrored, RankExited
from . import torch_files
from .exit_cause import Cause, End, cause_of, clipped, in_words, of_errored
from .oom_kills import Group, Kills
from .process import Exit, Process

TAIL_BYTES = 4096
READ_BYTES = 64 << 10
"""Of a command's output, from the end, in which its cause is looked for."""
RANK_READ_BYTES = 16 << 10
"""Of a training rank's, for whose end others wait: it prints little, and says what it can."""
LOOK_S_MAX = 0.5
"""Until its end is told without a cause: others wait for that word, and a disk may not answer."""
_log = structlog.get_logger("agent")
Killed = Callable[[int], str | None]
"""The kernel's own line on the OOM killer's kill of a process, if it wrote one."""


class Ends:
    """Finds out why processes ended. `killed` is asked where the kernel's messages can be read."""

    def __init__(self, killed: Killed | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._kills = Kills()
        self._killed = killed

    def watch(self, pid: int) -> Group | None:
        """From the process's start: its memory group, to be kept while it lives."""
        return self._kills.group(pid)

    def look(self) -> None:
        """Now and then: when the OOM killer killed."""
        self._kills.look(self._loop.time())

    async def exited(self, order: StartRank, process: Process, how: Exit, group: Group | None, *,
                     said: RankErrored | None, known: str | None) -> RankExited:
        """What is to be told of its end. The disk is read in a thread, for LOOK_S_MAX at most.

        `said` is what the rank said last itself; `known` why the agent has ended it, empty where
        it was told to: then there is nothing to find out.
        """
        found = partial(self._found, process, how, group, said, is_known=known is not None,
                        bytes_max=READ_BYTES if order.spec.command else RANK_READ_BYTES)
        try:
            async with asyncio.timeout(LOOK_S_MAX):
                cause, tail = await asyncio.to_thread(found)
        except TimeoutError:
            _log.warning("why a process ended takes too long to find out", pid=process.pid)
            cause, tail = Cause(line=in_words(how)), "(no output: it takes too long to read)"
        if known is not None:
            cause = Cause(line=clipped(known))
        return RankExited(
            task=order.task, rank=order.rank, attempt=order.attempt, pid=process.pid,
            exit_code=how.exit_code, signal=how.signal, tail=tail, status=cause.status,
            rule=cause.rule, cause=cause.line, second_hand=cause.second_hand)

    def _found(self, process: Process, how: Exit, group: Group | None, said: RankErrored | None, *,
               bytes_max: int, is_known: bool) -> tuple[Cause, str]:
        try:
            output = process.output(TAIL_BYTES if is_known or said is not None else bytes_max)
            tail = output[-TAIL_BYTES:].decode("utf-8", errors="replace")
        except OSError as error:
            output, tail = b"", f"(no output: {error.strerror})"
        if is_known:
            return Cause(), tail

        def killed(pid: int) -> str:
            line = self._said_by_kernel(pid) if pid else None
            claimed = group.claim(self._loop.time()) if group is not None else ""
            return line or claimed

        if said is not None:
            return of_errored(said), tail
        return cause_of(End(
            how=how, text=output.decode("utf-8", errors="replace"),
            path=torch_files.beside(process.log_path), killed=killed, pid=process.pid)), tail

    def _said_by_kernel(self, pid: int) -> str | None:
        """Asked on the agent's loop, whose the kernel's messages are; this is another thread."""
        killed = self._killed
        if killed is None:
            return None

        async def ask() -> str | None:
            return killed(pid)

        try:
            return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(LOOK_S_MAX)
        except (TimeoutError, CancelledError):
            return None
