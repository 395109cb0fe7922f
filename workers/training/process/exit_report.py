"""The exit report of a rank: the exception that ends it is classified and reported first."""

import os
import sys
import threading
import traceback
from types import TracebackType
from typing import NoReturn

from ....events.errors import UsageError
from ....events.process_io import LogStream
from ....events.records.orders import StartRank
from ....events.records.reports import RankErrored
from ....events.records.statuses import OTHER_SOFTWARE, WRONG_INPUT
from ...diagnosis.classifier import NOTHING, Verdict, classify
from .control_thread import Control

# --- Classification of an exception with its causes ---

WALK_NUM_MAX = 10_000
"""Limit of the search for the innermost exceptions, of which READ_NUM_MAX are classified."""
READ_NUM_MAX = 64
READ_CHARS_MAX = 16_384
LINE_CHARS_MAX = 500


def verdict_of(error: BaseException) -> Verdict:
    """Classify `error` by itself and its causes; NOTHING if no rule matches any of them. The
    innermost exception decides, because an exception that is raised from another wraps it. But a
    specific status outranks OTHER_SOFTWARE, such as that of a KeyError inside the error that
    matters. Of the members of an exception group, evidence about this rank outranks evidence about
    a peer."""
    if isinstance(error, UsageError):
        return Verdict(WRONG_INPUT, "usage-error", line=f"{error} ({error.hint})")
    chains: dict[int, Verdict] = {}
    for chain, one in _walked(error):
        verdict, previous = classify(_own_text(one)), chains.get(chain, NOTHING)
        if (
            verdict.status
            and previous.status in ("", OTHER_SOFTWARE)
            and (not previous.status or verdict.status != OTHER_SOFTWARE)
        ):
            chains[chain] = verdict
    return min(
        chains.values(),
        default=NOTHING,
        key=lambda verdict: (verdict.second_hand, verdict.status == OTHER_SOFTWARE),
    )


def _walked(error: BaseException) -> list[tuple[int, BaseException]]:
    """Pairs of chain number and exception, causes first, as a traceback prints them. Each member
    of a group starts a chain. `raise X from None` hides the context, as in a traceback."""
    found: list[tuple[int, BaseException]] = []
    seen: set[int] = set()
    remaining, num_chains = [(0, error)], 1
    while remaining and len(found) < WALK_NUM_MAX:
        chain, one = remaining.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found.append((chain, one))
        if one.__cause__ is not None:
            remaining.append((chain, one.__cause__))
        elif one.__context__ is not None and not one.__suppress_context__:
            remaining.append((chain, one.__context__))
        if isinstance(one, BaseExceptionGroup):
            remaining.extend(enumerate(one.exceptions, num_chains))
            num_chains += len(one.exceptions)
    return found[::-1][:READ_NUM_MAX]


def bounded(text: str, line: str, chars_max: int, *, end: bool) -> str:
    """The end or the beginning of `text`. If this part lacks `line`, `line` is put before it."""
    part = text[-chars_max:] if end else text[:chars_max]
    if len(text) <= chars_max or not line or line in part:
        return part
    head = line[:LINE_CHARS_MAX] + "\n[...]\n"
    num_left = chars_max - len(head)
    return head + (text[-num_left:] if end else text[:num_left])


def _own_text(error: BaseException) -> str:
    """The text of the exception without its causes. Of a very long text, both ends are returned."""
    text = "".join(traceback.format_exception_only(error))
    if len(text) > READ_CHARS_MAX:
        text = text[: READ_CHARS_MAX // 2] + "\n" + text[-READ_CHARS_MAX // 2 :]
    return text


OWN_THREADS = (
    "control",
    "wake",
    "reports",
    "collective",
    "abandoned",
    "abort",
    "checkpoint",
    "copies",
    "checksum",
)
"""Name prefixes of the rank's own threads. It cannot train without them."""
TEXT_CHARS_MAX = 4000
"""Characters of an error that are reported: its end, and the line that determined the status."""


def is_cuda_error(error: BaseException) -> bool:
    """Whether this error has ruined the CUDA context, so that only a new process helps."""
    return "CUDA error" in str(error)


class ExitReporter:
    """Reports RankErrored for the exception that ends the process, then ends the process."""

    def __init__(self, control: Control, order: StartRank) -> None:
        self._control = control
        self._order = order
        self.member: object | None = None

    def report(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """The sys.excepthook of a rank."""
        if isinstance(error, UsageError):
            text = f"{error} ({error.hint})"
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
        LogStream(sys.stderr).write(text if text.endswith("\n") else text + "\n")
        verdict = verdict_of(error)
        self._control.tell(
            RankErrored(
                task=self._order.task,
                rank=self._order.rank,
                attempt=self._order.attempt,
                generation=getattr(self.member, "generation", 0),
                iteration=max(getattr(self.member, "step_version", 0), 0),
                error=kind.__name__,
                text=bounded(text, verdict.line, TEXT_CHARS_MAX, end=True),
                status=verdict.status,
                rule=verdict.rule,
                second_hand=verdict.second_hand,
                can_pass=verdict.can_pass,
                peer=verdict.peer,
            )
        )
        exit_process(self._control, 1)

    def report_thread(self, args: threading.ExceptHookArgs) -> None:
        """The threading.excepthook: an error in OWN_THREADS ends the process. Training needs no
        other thread, such as a library's, so its error is only logged."""
        if args.exc_type is SystemExit:
            return
        name = args.thread.name if args.thread is not None else ""
        error = args.exc_value or args.exc_type()
        if name.startswith(OWN_THREADS):
            self.report(args.exc_type, error, args.exc_traceback)
        trace = "".join(traceback.format_exception(args.exc_type, error, args.exc_traceback))
        LogStream(sys.stderr).write(f"thread {name} has ended, training continues: {trace}")


def exit_process(control: Control, code: int) -> NoReturn:
    """Send all reports and exit, without torch's own shutdown, because that waits for peers."""
    control.flush()
    LogStream(sys.stdout).flush()
    LogStream(sys.stderr).flush()
    os._exit(code)
