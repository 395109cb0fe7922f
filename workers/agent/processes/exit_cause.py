"""Finds why a process ended, from the most certain evidence available."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ....events.records import statuses
from ....events.records.reports import RankErrored
from ...diagnosis.classifier import NOTHING, Verdict, classify
from . import torch_files
from .process import Exit
from .torch_files import RootCause, TorchError

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
_CARRIED = ("The above exception was the direct cause of the following exception:",
            "During handling of the above exception, another exception occurred:")
_IN_GROUP = re.compile(r"\| +(?:\+ )?(?:Exception Group )?$")
"""The margin before the traceback of a member of an exception group."""
_WEAK = (statuses.CONNECTION_REFUSED, statuses.CONNECTION_RESET, statuses.NCCL_TIMEOUT,
         statuses.LINK_FLAPPING, statuses.OTHER_NETWORK)
"""Errors that a program also prints before a successful retry."""
_KILLED_CHILD = re.compile(r"killed by signal: Killed|signal SIGKILL|\(SIGKILL\)|^Killed\s*$",
                           re.MULTILINE)


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
    for pid, is_killed in ((end.pid, number == signal.SIGKILL),
                           (root.pid if root is not None else 0,
                            root is not None and root.exit_code == -signal.SIGKILL),
                           (0, how.signal is None and bool(_KILLED_CHILD.search(end.text)))):
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
    return Verdict(report.status, report.rule, report.second_hand,
                   clipped(line or (lines[-1] if lines else report.error)))


def deciding_verdict(text: str) -> Verdict:
    """Classify the last traceback with its chained exceptions. If that is only OTHER_SOFTWARE, the
    whole output decides, unless it is indirect evidence, or is also printed before a successful
    retry."""
    at = text.rfind(_TRACEBACK)
    if at < 0:
        return classify(text)
    while (above := text.rfind(_TRACEBACK, 0, at)) >= 0 and (
            _IN_GROUP.search(text, text.rfind("\n", 0, at) + 1, at)
            or any(words in text[above:at] for words in _CARRIED)):
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
    how = (_signal_in_words(-root.exit_code) if root.exit_code < 0
           else f"exit code {root.exit_code}")
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
