"""The last words of a rank: what ends it is classified and told before it dies."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import TracebackType
from typing import NoReturn

from ...events.errors import UsageError
from ...events.orders import StartRank
from ...events.reports import RankErrored
from ...events.talk import Talk
from .control import Control
from .innermost import bounded, verdict_of

OURS = ("control", "wake", "reports", "collective", "left behind", "checkpoint", "copies")
"""How the names of the threads begin that a rank starts: without one of them it is not whole."""
EXPENDABLE = ("flight recorder",)
"""Those without which it is whole all the same: their error is a line in the log."""
TEXT_CHARS_MAX = 4000
"""Characters of an error that are told: its end, and the line that decided."""


class LastWords:
    """Says RankErrored for whatever ends the process, and ends it."""

    def __init__(self, control: Control, order: StartRank) -> None:
        self._control = control
        self._order = order
        self.member: object | None = None

    def say(self, kind: type[BaseException], error: BaseException,
            trace: TracebackType | None) -> None:
        """As sys.excepthook."""
        if isinstance(error, UsageError):
            text = f"{error} ({error.hint})"
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
        Talk(sys.stderr).write(text if text.endswith("\n") else text + "\n")
        verdict = verdict_of(error)
        self._control.tell(RankErrored(
            task=self._order.task, rank=self._order.rank, attempt=self._order.attempt,
            generation=getattr(self.member, "generation", 0),
            iteration=max(getattr(self.member, "step_version", 0), 0),
            error=kind.__name__, text=bounded(text, verdict.line, TEXT_CHARS_MAX, end=True),
            status=verdict.status, rule=verdict.rule, second_hand=verdict.second_hand,
        ))
        end(self._control, 1)

    def say_of_thread(self, args: threading.ExceptHookArgs) -> None:
        """As threading.excepthook: what one of OURS did not expect is no smaller a fault.

        A thread of a library's is none of the training: its error is a line in the log.
        """
        if args.exc_type is SystemExit:
            return
        name = args.thread.name if args.thread is not None else ""
        error = args.exc_value or args.exc_type()
        if name.startswith(OURS):
            self.say(args.exc_type, error, args.exc_traceback)
        trace = "".join(traceback.format_exception(args.exc_type, error, args.exc_traceback))
        Talk(sys.stderr).write(f"thread {name} has ended, training goes on: {trace}")


def end(control: Control, code: int) -> NoReturn:
    """End, all told, without torch's own tidying, which waits for peers."""
    control.flush()
    Talk(sys.stdout).flush()
    Talk(sys.stderr).flush()
    os._exit(code)
