"""Who has seats on which nodes: found out once, then kept up with what is placed."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...events.records.types import Seat


class Seated:
    """Of tasks, by number; begun with their targets."""

    def __init__(self, targets: Iterable[tuple[int, tuple[Seat, ...]]]) -> None:
        self._nodes: dict[int, dict[str, None]] = {}
        self._tasks: dict[str, dict[int, None]] = {}
        for task, target in targets:
            self.place(task, target)

    def place(self, task: int, target: tuple[Seat, ...]) -> None:
        """The task has these seats, and no other ones."""
        for name in self._nodes.get(task, ()):
            del self._tasks[name][task]
        self._nodes[task] = dict.fromkeys(seat.slot.node for seat in target)
        for name in self._nodes[task]:
            self._tasks.setdefault(name, {})[task] = None

    def nodes(self, task: int) -> Collection[str]:
        """Where the task has seats."""
        return self._nodes.get(task, {}).keys()

    def tasks(self, node: str) -> Collection[int]:
        """Who has seats there."""
        return self._tasks.get(node, {}).keys()
