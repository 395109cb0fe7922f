"""Why a process ended: of all that tells of it, what is most certain."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ....events.records.reports import RankErrored
from ....events.records.statuses import (
    CONNECTION_REFUSED,
    CONNECTION_RESET,
    EXITED_ABNORMALLY,
    LINK_FLAPPING,
    NCCL_TIMEOUT,
    OTHER_NETWORK,
    OTHER_SOFTWARE,
)
from ...diagnosis.classifier import Verdict, classify
from . import torch_files
from .process import Exit
from .torch_files import Recorded, Root

CAUSE_CHARS_MAX = 500
SHELL_EXIT = 128
"""A shell ends with this and the number of the signal that ended what it ran."""
SIGNALS = {
    signal.SIGKILL: "killed from outside",
    signal.SIGTERM: "another process asked it to end",
    signal.SIGINT: "interrupted from outside",
    signal.SIGHUP: "its terminal or its launcher went away",
    signal.SIGSEGV: "it used memory that is not its own (segmentation fault)",
    signal.SIGBUS: "memory behind a mapping was not there: a full /dev/shm, a file cut short",
    signal.SIGABRT: "it aborted itself: a check in native code failed",
    signal.SIGFPE: "an impossible operation on integers",
    signal.SIGILL: "an instruction that this processor does not have",
}
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TRACEBACK = "Traceback (most recent call last):"
_CARRIED = ("The above exception was the direct cause of the following exception:",
            "During handling of the above exception, another exception occurred:")
_IN_GROUP = re.compile(r"\| +(?:\+ )?(?:Exception Group )?$")
"""What stands before the traceback of a member of an exception group: the group's margin."""
_WEAK = (CONNECTION_REFUSED, CONNECTION_RESET, NCCL_TIMEOUT, LINK_FLAPPING, OTHER_NETWORK)
"""What a program also prints when it tries again, and all goes well."""
_KILLED_CHILD = re.compile(r"killed by signal: Killed|signal SIGKILL|\(SIGKILL\)|^Killed\s*$",
                           re.MULTILINE)


class Cause(NamedTuple):
    """Why it ended. All empty: nothing is known but its end."""

    status: str = ""
    rule: str = ""
    line: str = ""
    second_hand: bool = False


class End(NamedTuple):
    """What is known of a process that has ended."""

    how: Exit
    text: str
    """The end of what it printed."""
    path: Path
    """Its error file."""
    killed: Callable[[int], str]
    """What the kernel says of the kill of a process, 0 being one that nobody knows the number of;
    empty: nothing. Asked only where something was killed."""
    pid: int


def cause_of(end: End) -> Cause:
    """The OOM killer before the error file before what was printed before signal or exit code.

    What ended well has no cause. What others send (SIGKILL, SIGTERM) is not explained by what was
    printed before. Reads the error files. About 1 ms for 64 KiB of ordinary output (measured).
    """
    how = end.how
    if how.exit_code == 0:
        return Cause()
    root = torch_files.root_of(end.text)
    number = how.signal or _signal_of(how.exit_code)
    for pid, is_killed in ((end.pid, number == signal.SIGKILL),
                           (root.pid if root is not None else 0,
                            root is not None and root.exit_code == -signal.SIGKILL),
                           (0, how.signal is None and bool(_KILLED_CHILD.search(end.text)))):
        if is_killed and (line := end.killed(pid)):
            return _by_kernel(line)
    recorded = torch_files.read(end.path)
    if recorded is None and root is not None and root.error_file:
        recorded = torch_files.read(Path(root.error_file))
    if recorded is not None:
        return _recorded(recorded)
    if root is not None:
        return _under_torchrun(root)
    if number not in _FROM_OUTSIDE:
        verdict = deciding(end.text)
        if verdict.status:
            return _of(verdict)
    return Cause(line=in_words(how))


def of_errored(told: RankErrored) -> Cause:
    """The rank has said itself why it ends."""
    lines = [line for line in told.text.splitlines() if line.strip()]
    line = classify(told.text).line if told.status else ""
    return Cause(told.status, told.rule, clipped(line or (lines[-1] if lines else told.error)),
                 told.second_hand)


def deciding(text: str) -> Verdict:
    """The verdict on what was printed last: the last traceback, with all that it carries, first.

    A traceback that only says that it is software gives way to what else was printed, unless that
    is what a program prints whose next try goes well.
    """
    at = text.rfind(_TRACEBACK)
    if at < 0:
        return classify(text)
    while (above := text.rfind(_TRACEBACK, 0, at)) >= 0 and (
            _IN_GROUP.search(text, text.rfind("\n", 0, at) + 1, at)
            or any(words in text[above:at] for words in _CARRIED)):
        at = above
    verdict = classify(text[at:])
    if verdict.status not in ("", OTHER_SOFTWARE):
        return verdict
    whole = classify(text)
    if verdict.status and (whole.second_hand or whole.status in _WEAK):
        return verdict
    return whole if whole.status else verdict


def in_words(how: Exit) -> str:
    """A signal, and what it means; empty for an exit code that says nothing."""
    number = how.signal or _signal_of(how.exit_code)
    if number is None:
        return ""
    words = _signal_in_words(number) + (", core dumped" if how.dumped else "")
    return words if how.signal is not None else f"exit code {how.exit_code}, in a shell {words}"


def clipped(line: str) -> str:
    """One line that can be shown: bounded, and no character that does something to a screen."""
    return " ".join("".join(c if c.isprintable() else " " for c in line).split())[:CAUSE_CHARS_MAX]


def _of(verdict: Verdict) -> Cause:
    return Cause(verdict.status, verdict.rule, clipped(verdict.line), verdict.second_hand)


def _by_kernel(line: str) -> Cause:
    return Cause(EXITED_ABNORMALLY, "oom-killer", clipped(line))


def _recorded(told: Recorded) -> Cause:
    verdict = classify(told.trace) if told.trace.strip() else classify(told.message)
    if verdict.status:
        return _of(verdict)
    lines = [line for line in (told.message.strip() or told.trace).splitlines() if line.strip()]
    line = lines[0] if told.message.strip() else lines[-1]
    return Cause(OTHER_SOFTWARE, "torch-error-file", clipped(line))


def _under_torchrun(root: Root) -> Cause:
    """Its own summary says who failed first, and seldom why: that stands above it."""
    verdict = deciding(root.trace)
    if not verdict.status and -root.exit_code not in _FROM_OUTSIDE:
        verdict = deciding(root.before)
    if verdict.status:
        return _of(verdict)
    how = (_signal_in_words(-root.exit_code) if root.exit_code < 0
           else f"exit code {root.exit_code}")
    return Cause(line=clipped(f"rank {root.rank} under torchrun (pid {root.pid}): {how}"))


def _signal_of(exit_code: int | None) -> int | None:
    """The signal that a shell's exit code tells of, as far as it is one that ends a process."""
    number = (exit_code or 0) - SHELL_EXIT
    return number if number in SIGNALS else None


def _signal_in_words(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    words = SIGNALS.get(signal.Signals(number))
    return f"signal {number} ({name})" + (f": {words}" if words else "")
