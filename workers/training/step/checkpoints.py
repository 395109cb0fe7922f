"""What an iteration asks of those that take checkpoints of the state."""

from typing import Protocol

from .stats import Stats


class Checkpoints(Protocol):
    """Asked by the training thread, and by the thread of a pass for which it waits. No method waits
    for other members."""

    def copy_status(self) -> tuple[float, float]:
        """This member's `num_sending` and `num_unstored` (Stats)."""
        ...

    def before_change(self) -> None:
        """The state is about to change: what still reads it must have read it."""

    def is_read_after(self, at: int) -> bool:
        """Whether the state is read after `at` iterations, for a checkpoint or at the end: a gather
        must then not wait for the next forward. The same on all members."""
        ...

    def is_saving(self) -> bool:
        """Whether this member still writes its share of a checkpoint."""
        ...

    def keep_last(self, stats: Stats) -> None:
        """The next step will make a finite state NaN or infinite, as the loss says. Called on all
        members that take it in their iteration, not on those that take it after a fault."""


class NoCheckpoints:
    """None are taken."""

    def copy_status(self) -> tuple[float, float]:
        return 0.0, 0.0

    def before_change(self) -> None:
        return

    def is_read_after(self, at: int) -> bool:
        return False

    def is_saving(self) -> bool:
        return False

    def keep_last(self, stats: Stats) -> None:
        return
