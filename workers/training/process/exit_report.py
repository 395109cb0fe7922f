"""The last words of a rank: what ends it is classified and told before it dies."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import TracebackType
from typing import NoReturn

from ....events.errors import UsageError
from ....events.process_io import Talk
from ....events.records.orders import StartRank
from ....events.records.reports import RankErrored
from ....events.records.statuses import OTHER_SOFTWARE, WRONG_INPUT
from ...diagnosis.classifier import NOTHING, Verdict, classify
from .control_thread import Control

# --- An exception read whole: of all that it was raised from, the innermost cause decides. ---

WALK_NUM_MAX = 10_000
"""So many exceptions are walked to find the innermost ones, of which READ_NUM_MAX are read."""
READ_NUM_MAX = 64
READ_CHARS_MAX = 16_384
"""Characters of one exception that are read: of a longer one its two ends."""
LINE_CHARS_MAX = 500


def verdict_of(error: BaseException) -> Verdict:
    """What `error` comes down to; NOTHING where none of what it carries means anything.

    An exception that was raised from another, or while another was handled, is its wrapper. What
    names a row of its own comes before what is only software (a KeyError within the error that
    matters). The members of a group stand each alone, with what they carry: there what tells of
    oneself comes before what tells of a peer, even where it is only software.
    """
    if isinstance(error, UsageError):
        return Verdict(WRONG_INPUT, "usage-error", line=f"{error} ({error.hint})")
    chains: dict[int, Verdict] = {}
    for chain, one in _walked(error):
        verdict, before = classify(_words(one)), chains.get(chain, NOTHING)
        if verdict.status and before.status in ("", OTHER_SOFTWARE) and (
                not before.status or verdict.status != OTHER_SOFTWARE):
            chains[chain] = verdict
    return min(chains.values(), default=NOTHING, key=lambda verdict: (
        verdict.second_hand, verdict.status == OTHER_SOFTWARE))


def innermost_first(error: BaseException) -> list[BaseException]:
    """The exception and all that it carries, causes before what was raised from them.

    `raise X from None` hides what it was raised within, as in a traceback.
    """
    return [one for _, one in _walked(error)]


def _walked(error: BaseException) -> list[tuple[int, BaseException]]:
    """(the number of its chain, exception), in the order in which a traceback prints them.

    Each member of a group begins a chain.
    """
    found: list[tuple[int, BaseException]] = []
    seen: set[int] = set()
    left, num_chains = [(0, error)], 1
    while left and len(found) < WALK_NUM_MAX:
        chain, one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found.append((chain, one))
        if one.__cause__ is not None:
            left.append((chain, one.__cause__))
        elif one.__context__ is not None and not one.__suppress_context__:
            left.append((chain, one.__context__))
        if isinstance(one, BaseExceptionGroup):
            left.extend(enumerate(one.exceptions, num_chains))
            num_chains += len(one.exceptions)
    return found[::-1][:READ_NUM_MAX]


def bounded(text: str, line: str, chars_max: int, *, end: bool) -> str:
    """The end or the beginning of `text`, and `line` before it where it is not in there."""
    kept = text[-chars_max:] if end else text[:chars_max]
    if len(text) <= chars_max or not line or line in kept:
        return kept
    head = line[:LINE_CHARS_MAX] + "\n[...]\n"
    num_left = chars_max - len(head)
    return head + (text[-num_left:] if end else text[:num_left])


def _words(error: BaseException) -> str:
    """What this one says, without what it carries; of a very long text both ends."""
    text = "".join(traceback.format_exception_only(error))
    if len(text) > READ_CHARS_MAX:
        text = text[:READ_CHARS_MAX // 2] + "\n" + text[-READ_CHARS_MAX // 2:]
    return text

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
