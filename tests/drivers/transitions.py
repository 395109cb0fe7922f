"""Transitions of the tasks of a log, with who was there and what came in. The demo tells them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field
from unicron.events.records.envelope import Record
from unicron.events.records.orders import Reconfigure, Resume
from unicron.events.records.reports import Quiesced, Reconfigured, TaskProgressed
from unicron.events.records.types import Member

Process = tuple[int, int]
"""Rank and attempt."""


class Transition(Struct, kw_only=True):
    """One transition. Times in seconds; `num_before` is 0 for a task's first generation."""

    task: int
    seq: int
    """Of the Reconfigure."""
    generation: int
    num_before: int
    """Members of the last generation that was resumed; 0: this is the task's first."""
    num_after: int
    iteration: int
    """The iteration that the new generation continues with."""
    still_s: float
    stopped_at_s: float
    """When the last member left the old generation."""
    step_s: float | None = None
    """From `stopped_at_s` to the first finished iteration; None: not reported yet."""
    lost: int
    """Iterations that a member had finished and that are repeated."""
    newcomers: tuple[Reconfigured, ...]
    """The first Reconfigured of each new member since the last Resume; none in generation 1."""


class TaskTransitions(Struct):
    """Follows the generations of one task."""

    order: Record | None = None
    """The newest Reconfigure."""
    members: tuple[Member, ...] = ()
    """Members of the last resumed generation, `generation`."""
    generation: int = 0
    left: dict[int, Quiesced] = field(default_factory=dict[int, Quiesced])
    """By rank: members that have left it."""
    left_s: float = -1.0
    up: list[Reconfigured] = field(default_factory=list[Reconfigured])
    """Members that came up in the newest generation."""
    first: dict[Process, Reconfigured] = field(default_factory=dict[Process, Reconfigured])
    """The first Reconfigured of each process since the last Resume, also of failed generations."""
    last: Transition | None = None

    def add(self, record: Record) -> Transition | None:
        """Read the task's next record. A Resume completes a transition."""
        body = record.body
        order = self.order.body if self.order is not None else None
        if isinstance(body, Reconfigure):
            self.order, self.up = record, []
        elif isinstance(body, Reconfigured):
            self.first.setdefault((body.rank, body.attempt), body)
            if isinstance(order, Reconfigure) and body.generation == order.generation:
                self.up.append(body)
        elif isinstance(body, Quiesced) and body.generation == self.generation:
            if body.rank not in self.left:  # a member that already left repeats it when ordered
                self.left_s = max(self.left_s, record.occurred_s)
            self.left[body.rank] = body
        elif isinstance(body, TaskProgressed) and self.last is not None:
            if body.generation == self.last.generation and self.last.step_s is None:
                self.last.step_s = max(record.at_s - self.last.stopped_at_s, 0.0)
        elif (
            isinstance(body, Resume)
            and self.order is not None
            and isinstance(order, Reconfigure)
            and body.generation == order.generation
            and self.up
        ):
            self.last = self._resumed(record, self.order.seq, order)
            return self.last
        return None

    def _resumed(self, record: Record, seq: int, order: Reconfigure) -> Transition:
        stopped_at_s = self.left_s if self.left else record.at_s
        settled = min(one.step_version for one in self.up)
        old = {(one.rank, one.attempt) for one in self.members}
        newcomers = [
            self.first[key] for one in self.up if (key := (one.rank, one.attempt)) not in old
        ]
        made = Transition(
            task=order.task,
            seq=seq,
            generation=order.generation,
            num_before=len(self.members),
            num_after=len(order.members),
            iteration=settled,
            still_s=max(record.at_s - stopped_at_s, 0.0),
            stopped_at_s=stopped_at_s,
            lost=max([one.step_version - settled for one in self.left.values()] + [0]),
            newcomers=tuple(newcomers) if self.members else (),
        )
        self.generation, self.members = order.generation, order.members
        self.left, self.left_s, self.first = {}, -1.0, {}
        return made


def transitions(records: Iterable[Record]) -> list[Transition]:
    """All transitions of a log."""
    tasks: dict[int, TaskTransitions] = {}
    return [
        made
        for record in records
        if (task := getattr(record.body, "task", 0))
        and (made := tasks.setdefault(task, TaskTransitions()).add(record)) is not None
    ]
