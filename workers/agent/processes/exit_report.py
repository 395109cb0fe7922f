"""Finds why a process ended, and builds RankExited, the report of it."""

import asyncio
import re
import signal
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from ....events.records import statuses
from ....events.records.orders import StartRank
from ....events.records.reports import RankErrored, RankExited
from ...diagnosis.classifier import NOTHING, Verdict, classify
from . import torch_files
from .oom_kills import Kills, MemoryCgroup
from .process import Exit, Process
from .torch_files import RootCause, TorchError

# --- Why a process ended, from the most certain evidence available ---
CAUSE_CHARS_MAX = 500
SHELL_EXIT = 128
"""A shell exits with this plus the number of the signal that ended its program."""
SIGNALS = {
    signal.SIGKILL: "killed from outside",
    signal.SIGTERM: "another process requested its end",
    signal.SIGINT: "interrupted from outside",
    signal.SIGHUP: "its terminal or its launcher went away",
    signal.SIGSEGV: "it accessed invalid memory (segmentation fault)",
    signal.SIGBUS: "memory behind a mapping is missing: a full /dev/shm, a truncated file",
    signal.SIGABRT: "it aborted itself: a check in native code failed",
    signal.SIGFPE: "an invalid integer operation",
    signal.SIGILL: "an instruction that this processor does not support",
}
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TRACEBACK = "Traceback (most recent call last):"
_CARRIED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_IN_GROUP = re.compile(r"\| +(?:\+ )?(?:Exception Group )?$")
"""The margin before the traceback of a member of an exception group."""
_WEAK = (
    statuses.CONNECTION_REFUSED,
    statuses.CONNECTION_RESET,
    statuses.NCCL_TIMEOUT,
    statuses.LINK_FLAPPING,
    statuses.OTHER_NETWORK,
)
"""Errors that a program also prints before a successful retry."""
_KILLED_CHILD = re.compile(
    r"killed by signal: Killed|signal SIGKILL|\(SIGKILL\)|^Killed\s*$", re.MULTILINE
)


class ExitEvidence(NamedTuple):
    """The evidence about a process that has ended."""

    how: Exit
    text: str
    """The end of its output."""
    path: Path
    """Its error file."""
    killed: Callable[[int], str]
    """Takes a pid (0: unknown) and returns the kernel's line on the OOM kill of this process or "".
    Called only if a process was killed."""
    pid: int
    uid: int
    """The user that it ran as."""


def cause_of(end: ExitEvidence) -> Verdict:
    """Find the cause: OOM killer, error file, printed output, signal or exit code, in this order.
    NOTHING: it is unknown, or the exit code is 0. Printed output does not explain a signal from
    outside, as SIGKILL or SIGTERM."""
    how = end.how
    if how.exit_code == 0:
        return NOTHING
    root = torch_files.root_cause(end.text)
    number = how.signal or _signal_of(how.exit_code)
    for pid, is_killed in (
        (end.pid, number == signal.SIGKILL),
        (
            root.pid if root is not None else 0,
            root is not None and root.exit_code == -signal.SIGKILL,
        ),
        (0, how.signal is None and bool(_KILLED_CHILD.search(end.text))),
    ):
        if is_killed and (line := end.killed(pid)):
            return Verdict(statuses.EXITED_ABNORMALLY, "oom-killer", line=clipped(line))
    recorded = torch_files.read(end.path, end.uid)
    if recorded is None and root is not None and root.error_file:
        recorded = torch_files.read(Path(root.error_file), end.uid)
    if recorded is not None:
        return _cause_of_torch_error(recorded)
    if root is not None:
        return _cause_under_torchrun(root)
    if number not in _FROM_OUTSIDE:
        verdict = deciding_verdict(end.text)
        if verdict.status:
            return _clipped(verdict)
    return NOTHING._replace(line=describe_exit(how))


def cause_of_error(report: RankErrored) -> Verdict:
    """The cause that the rank itself has reported."""
    lines = [line for line in report.text.splitlines() if line.strip()]
    line = classify(report.text).line if report.status else ""
    return Verdict(
        report.status,
        report.rule,
        report.second_hand,
        clipped(line or (lines[-1] if lines else report.error)),
        peer=report.peer,
        can_pass=report.can_pass,
    )


def deciding_verdict(text: str) -> Verdict:
    """Classify the last traceback with its chained exceptions. If that is only OTHER_SOFTWARE, the
    whole output decides, unless it is indirect evidence, or is also printed before a successful
    retry."""
    at = text.rfind(_TRACEBACK)
    if at < 0:
        return classify(text)
    while (above := text.rfind(_TRACEBACK, 0, at)) >= 0 and (
        _IN_GROUP.search(text, text.rfind("\n", 0, at) + 1, at)
        or any(words in text[above:at] for words in _CARRIED)
    ):
        at = above
    verdict = classify(text[at:])
    if verdict.status not in ("", statuses.OTHER_SOFTWARE):
        return verdict
    whole = classify(text)
    if verdict.status and (whole.second_hand or whole.status in _WEAK):
        return verdict
    return whole if whole.status else verdict


def describe_exit(how: Exit) -> str:
    """Describe a signal; "" for an exit code without a meaning."""
    number = how.signal or _signal_of(how.exit_code)
    if number is None:
        return ""
    words = _signal_in_words(number) + (", core dumped" if how.dumped else "")
    return words if how.signal is not None else f"exit code {how.exit_code}, in a shell {words}"


def clipped(line: str) -> str:
    """The text as one line to display: of bounded length, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in line).split())[:CAUSE_CHARS_MAX]


def _clipped(verdict: Verdict) -> Verdict:
    return verdict._replace(line=clipped(verdict.line))


def _cause_of_torch_error(error: TorchError) -> Verdict:
    verdict = classify(error.trace) if error.trace.strip() else classify(error.message)
    if verdict.status:
        return _clipped(verdict)
    lines = [line for line in (error.message.strip() or error.trace).splitlines() if line.strip()]
    line = lines[0] if error.message.strip() else lines[-1]
    return Verdict(statuses.OTHER_SOFTWARE, "torch-error-file", line=clipped(line))


def _cause_under_torchrun(root: RootCause) -> Verdict:
    """torchrun's summary names the first failure, but rarely the cause, which is printed above."""
    verdict = deciding_verdict(root.trace)
    if not verdict.status and -root.exit_code not in _FROM_OUTSIDE:
        verdict = deciding_verdict(root.before)
    if verdict.status:
        return _clipped(verdict)
    how = _signal_in_words(-root.exit_code) if root.exit_code < 0 else f"exit code {root.exit_code}"
    line = clipped(f"rank {root.rank} under torchrun (pid {root.pid}): {how}")
    return NOTHING._replace(line=line)


def _signal_of(exit_code: int | None) -> int | None:
    """The signal encoded in a shell's exit code, if it is one that ends a process."""
    number = (exit_code or 0) - SHELL_EXIT
    return number if number in SIGNALS else None


def _signal_in_words(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    words = SIGNALS.get(signal.Signals(number))
    return f"signal {number} ({name})" + (f": {words}" if words else "")


VIOLATION = "rank-protocol"
"""The rule of a rank that its agent has ended."""
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

    async def report(
        self,
        order: StartRank,
        process: Process,
        how: Exit,
        group: MemoryCgroup | None,
        *,
        error: RankErrored | None,
        known: str | None,
        redact: Callable[[str], str],
    ) -> RankExited:
        """Build the report. `error` is the rank's own. `known` is why the agent has ended the rank
        ("": by order); only if it is None, the cause is searched, for at most SEARCH_S_MAX.

        The output leaves the node only where it explains the end: not after exit code 0, nor after
        the signal that was ordered.
        """
        is_explained = how.exit_code == 0 or (known == "" and how.signal is not None)
        find = partial(
            self._find_cause,
            process,
            how,
            group,
            error,
            is_known=known is not None,
            bytes_max=READ_BYTES if order.spec.command else RANK_READ_BYTES,
        )
        try:
            async with asyncio.timeout(SEARCH_S_MAX):
                cause, output = await asyncio.to_thread(find)
        except TimeoutError:
            _log.warning("the search for the cause of an exit took too long", pid=process.pid)
            cause = NOTHING._replace(line=describe_exit(how))
            output = "(no output: reading it took too long)"
        if known is not None:
            cause = _cause_of_agent(known)
        # Redacted before it is cut, so that no part of a secret is left at its beginning.
        tail = (
            "" if is_explained else redact(output).encode()[-TAIL_BYTES:].decode(errors="replace")
        )
        return _exited(order, process, how, cause._replace(line=redact(cause.line)), tail)

    def report_without_output(
        self, order: StartRank, process: Process, how: Exit, known: str | None
    ) -> RankExited:
        """The report if the search has failed. `known` as for `report`."""
        cause = (
            _cause_of_agent(known)
            if known is not None
            else NOTHING._replace(line=describe_exit(how))
        )
        return _exited(order, process, how, cause, "")

    def _find_cause(
        self,
        process: Process,
        how: Exit,
        group: MemoryCgroup | None,
        reported: RankErrored | None,
        *,
        bytes_max: int,
        is_known: bool,
    ) -> tuple[Verdict, str]:
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
        return cause_of(
            ExitEvidence(
                how=how,
                text=text,
                killed=killed,
                pid=process.pid,
                uid=process.uid,
                path=torch_files.error_file_of(process.log_path, process.folder),
            )
        ), output

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


def _cause_of_agent(known: str) -> Verdict:
    """The cause of an end by the agent; "": by order. What a rank has said is its own doing, on
    whichever slot."""
    cause = NOTHING._replace(line=clipped(known))
    return cause._replace(status=statuses.OTHER_SOFTWARE, rule=VIOLATION) if known else cause


def _exited(order: StartRank, process: Process, how: Exit, cause: Verdict, tail: str) -> RankExited:
    return RankExited(
        task=order.task,
        rank=order.rank,
        attempt=order.attempt,
        pid=process.pid,
        exit_code=how.exit_code,
        signal=how.signal,
        tail=tail,
        status=cause.status,
        rule=cause.rule,
        cause=cause.line,
        second_hand=cause.second_hand,
        can_pass=cause.can_pass,
        peer=cause.peer,
    )
