"""Which events of an iteration are marks of the rank's pulse, and what it is in from there on.

Without overlap a member waits in each collective that it enters. With overlap it only starts them
in its last backward, and waits for all of them together when that is over. Where its replica is
more than one member, it may wait for them anywhere in its passes: nothing there is its own alone.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from ..monitor import Kind
from ..pulse import COLLECTIVE_CODE, OWN_CODE, Phase, Pulse
from .trace import Event

_ENTERS = {"stats", "bucket", "embedding", "gate", "gather"}
_PASSES = {"micro_batch", "forward", "forward_mid", "backward", "backward_mid", "tensor", "stage"}


class Marks:
    """Marks of one member's iterations; `pulse` takes them."""

    def __init__(self, pulse: Pulse, *, overlap: bool) -> None:
        self.pulse = pulse
        self.passes: Phase = OWN_CODE
        """What it is in during its passes."""
        self._on_entry: Phase = OWN_CODE if overlap else COLLECTIVE_CODE
        self._between: Phase = COLLECTIVE_CODE if overlap else OWN_CODE
        self._mine = threading.get_ident()
        self._are_together = False

    def begin(self, generation: int, iteration: int, kind: Kind) -> None:
        self.pulse.begin(generation, iteration, kind)

    def note(self, event: Event) -> None:
        """The phase has begun."""
        if not self._is_ours():
            return
        if event in _ENTERS:
            self.pulse.enter(event, self._on_entry)
        elif event == "bucket_done":
            self.pulse.mark(event, self._between)
        elif event in _PASSES:
            self.pulse.mark(event, self.passes)
        else:
            self.pulse.mark(event, OWN_CODE)

    def told(self) -> None:
        """The stats are here: what comes next is this member's own turn."""
        if self._is_ours():
            self.pulse.mark("stats_done", OWN_CODE)

    def lands(self) -> None:
        """From now on it waits for all that it has started."""
        if self._is_ours():
            self.pulse.mark("land", COLLECTIVE_CODE)

    def _is_ours(self) -> bool:
        """A thread that was left behind in another reduction (control.py) counts nowhere."""
        return self._are_together or threading.get_ident() == self._mine

    @contextmanager
    def together(self) -> Generator[None]:
        """Within this, another thread may be the one that passes marks."""
        self._are_together = True
        try:
            yield
        finally:
            self._are_together = False
