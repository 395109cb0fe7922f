"""An exception read whole: of all that it was raised from, the innermost cause decides."""

from __future__ import annotations

import traceback

from ...events.errors import UsageError
from ...events.statuses import OTHER_SOFTWARE, WRONG_INPUT
from ..classify import NOTHING, Verdict, classify

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
    matters); of a group's members, what tells of oneself before what tells of a peer.
    """
    if isinstance(error, UsageError):
        return Verdict(WRONG_INPUT, "usage-error", line=f"{error} ({error.hint})")
    read = innermost_first(error)
    is_group = any(isinstance(one, BaseExceptionGroup) for one in read)
    best, best_key = NOTHING, (True, True)
    for one in read:
        verdict = classify(_words(one))
        key = (verdict.status == OTHER_SOFTWARE, is_group and verdict.second_hand)
        if verdict.status and (not best.status or key < best_key):
            best, best_key = verdict, key
    return best


def innermost_first(error: BaseException) -> list[BaseException]:
    """The exception and all that it carries, causes before what was raised from them.

    `raise X from None` hides what it was raised within, as in a traceback.
    """
    found: list[BaseException] = []
    seen: set[int] = set()
    left = [error]
    while left and len(found) < WALK_NUM_MAX:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found.append(one)
        if isinstance(one, BaseExceptionGroup):
            left.extend(one.exceptions)
        if one.__cause__ is not None:
            left.append(one.__cause__)
        elif one.__context__ is not None and not one.__suppress_context__:
            left.append(one.__context__)
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
