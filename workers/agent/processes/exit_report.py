"""Builds RankExited, the report that a rank has ended, with its cause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial

import structlog

from ....events.records.orders import StartRank
from ....events.records.reports import RankErrored, RankExited
from ...diagnosis.classifier import NOTHING, Verdict
from . import torch_files
from .exit_cause import ExitEvidence, cause_of, cause_of_error, clipped, describe_exit
from .oom_kills import Kills, MemoryCgroup
from .process import Exit, Process

TAIL_BYTES = 4096
READ_BYTES = 64 << 10
"""The end of a command's output that is searched for its cause."""
RANK_READ_BYTES = 16 << 10
"""The same for a training rank: it prints little, and other ranks wait for the report."""
SEARCH_S_MAX = 0.5
"""Time limit for the search: other ranks wait for the report, and a disk may hang."""
_log = structlog.get_logger("agent")
OomLookup = Callable[[int], str | None]
"""Takes a pid; returns the kernel's line on its OOM kill, if there is one."""


class ExitReporter:
    """Finds why processes ended. `killed` is set if the kernel's messages can be read."""

    def __init__(self, killed: OomLookup | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._kills = Kills()
        self._killed = killed

    def watch(self, pid: int) -> MemoryCgroup | None:
        """The memory cgroup of a new process. Keep the reference while the process runs."""
        return self._kills.group(pid)

    def look(self) -> None:
        """Record the time of new OOM kills. Call this regularly."""
        self._kills.look(self._loop.time())

    async def report(self, order: StartRank, process: Process, how: Exit,
                     group: MemoryCgroup | None, *, error: RankErrored | None,
                     known: str | None, redact: Callable[[str], str]) -> RankExited:
        """Build the report. `error` is the rank's own. `known` is why the agent has ended the rank
        ("": by order); only if it is None, the cause is searched, for at most SEARCH_S_MAX.

        The output leaves the node only where it explains the end: not after exit code 0, nor after
        the signal that was ordered.
        """
        is_explained = how.exit_code == 0 or (known == "" and how.signal is not None)
        find = partial(self._find_cause, process, how, group, error, is_known=known is not None,
                       bytes_max=READ_BYTES if order.spec.command else RANK_READ_BYTES)
        try:
            async with asyncio.timeout(SEARCH_S_MAX):
                cause, output = await asyncio.to_thread(find)
        except TimeoutError:
            _log.warning("the search for the cause of an exit took too long", pid=process.pid)
            cause = NOTHING._replace(line=describe_exit(how))
            output = "(no output: reading it took too long)"
        if known is not None:
            cause = NOTHING._replace(line=clipped(known))
        # Redacted before it is cut, so that no part of a secret is left at its beginning.
        tail = "" if is_explained else redact(output).encode()[-TAIL_BYTES:].decode(
            errors="replace")
        return RankExited(
            task=order.task, rank=order.rank, attempt=order.attempt, pid=process.pid,
            exit_code=how.exit_code, signal=how.signal, tail=tail, status=cause.status,
            rule=cause.rule, cause=redact(cause.line), second_hand=cause.second_hand)

    def _find_cause(self, process: Process, how: Exit, group: MemoryCgroup | None,
                    reported: RankErrored | None, *, bytes_max: int,
                    is_known: bool) -> tuple[Verdict, str]:
        try:
            output = text = process.output(bytes_max).decode("utf-8", errors="replace")
        except OSError as error:
            output, text = f"(no output: {error.strerror})", ""
        if is_known:
            return NOTHING, output

        def killed(pid: int) -> str:
            line = self._kernel_line(pid) if pid else None
            claimed = group.claim(self._loop.time()) if group is not None else ""
            return line or claimed

        if reported is not None:
            return cause_of_error(reported), output
        return cause_of(ExitEvidence(
            how=how, text=text, killed=killed, pid=process.pid, uid=process.uid,
            path=torch_files.error_file_of(process.log_path, process.folder))), output

    def _kernel_line(self, pid: int) -> str | None:
        """Call `killed` on the agent's event loop, which owns the kernel log, from this thread."""
        killed = self._killed
        if killed is None:
            return None

        async def call() -> str | None:
            return killed(pid)

        try:
            return asyncio.run_coroutine_threadsafe(call(), self._loop).result(SEARCH_S_MAX)
        except (TimeoutError, CancelledError):
            return None
