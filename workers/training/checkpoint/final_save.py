"""Saves after the last iteration: tried again until every member has saved its share.

The state stays in memory meanwhile: nothing is lost while a disk is full.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ....events.timing import pause_after_s
from ..step.beside import Beside
from ..step.own_part import E
from ..step.results import Outcome, Stepped

T = TypeVar("T")


def save_at_end(
    savers: Sequence[T],
    save: Callable[[T, int], bool],
    beside: Beside[E],
    pause: Callable[[float], None],
) -> Outcome:
    """Save with each of `savers`, and after pauses again with those of which any member's `save`
    has returned False; it also gets how often that was. All members call it together. Returns
    Stepped when all is saved, else why the generation ends. `pause` waits, but ends at an order
    to stop."""
    num_failures = 0
    while True:
        failed: list[T] = []
        for saver in savers:
            outcome = beside.meet(has_saved=save(saver, num_failures))
            if not isinstance(outcome, Stepped) or outcome.stops:
                return outcome
            if outcome.num_saving:
                failed.append(saver)
        if not failed:
            return Stepped()
        savers = failed
        num_failures += 1
        pause(pause_after_s(num_failures))
        outcome = beside.meet()
        if not outcome.goes_on:
            return outcome
