"""Transitions of a task. It is stopped from its last member's leave of a generation to Resume."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct, field

from ...events.records.envelope import Record
from ...events.records.orders import Reconfigure, Resume
from ...events.records.reports import Quiesced, Reconfigured


class Transition(NamedTuple):
    """How long the task was stopped, and the finished iterations that are repeated."""

    seq: int
    """Of the Reconfigure."""
    still_s: float
    lost: int


class TaskTransitions(Struct):
    """Follows the generations of one task."""

    order: Record | None = None
    """The newest Reconfigure."""
    generation: int = 0
    """The last one that was resumed."""
    left: dict[int, int] = field(default_factory=dict[int, int])
    """Rank -> step version of the members that have left it."""
    left_s: float = -1.0
    up: list[int] = field(default_factory=list[int])
    """Step versions of the members that came up in the newest generation."""

    def add(self, record: Record) -> Transition | None:
        """Read the task's next record. A Resume completes a transition."""
        body = record.body
        newest = getattr(self.order.body, "generation", 0) if self.order is not None else 0
        if isinstance(body, Reconfigure):
            self.order, self.up = record, []
        elif isinstance(body, Reconfigured) and body.generation == newest:
            self.up.append(body.step_version)
        elif isinstance(body, Quiesced) and body.generation == self.generation:
            if body.rank not in self.left:  # a member that already left repeats it when ordered
                self.left_s = max(self.left_s, record.occurred_s)
            self.left[body.rank] = body.step_version
        elif (isinstance(body, Resume) and self.order is not None and self.up
              and body.generation == newest):
            stopped_s = self.left_s if self.left else record.at_s
            lost = max([version - min(self.up) for version in self.left.values()] + [0])
            self.generation, self.left, self.left_s = newest, {}, -1.0
            return Transition(self.order.seq, max(record.at_s - stopped_s, 0.0), lost)
        return None
