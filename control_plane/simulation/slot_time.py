"""What becomes of a cluster's slots, second by second: together it is all the time that they had.

trained: on them a task did. detection, transition, waiting: they hold processes of a task that does
not train, for that reason; or, in transition, a newcomer of one that does. idle: nothing runs
there, whoever may wait for other slots. away: their node is not there.
"""

from __future__ import annotations

KINDS: tuple[str, ...] = ("trained", "detection", "transition", "waiting", "idle", "away")


class SlotTime:
    """Counted by processes, each on a slot: nothing here is what the heart believes."""

    def __init__(self) -> None:
        self.slot_s = dict.fromkeys(KINDS, 0.0)
        self.now = dict.fromkeys(KINDS, 0)
        """Slots, by what becomes of them now."""
        self._since_s = 0.0
        self._tasks: dict[int, tuple[int, int, str]] = {}
        """Processes that live, of these how many train, and why the others do not."""

    def begin(self, at_s: float) -> None:
        """From here on it counts."""
        self.slot_s, self._since_s = dict.fromkeys(KINDS, 0.0), at_s

    def end(self, at_s: float) -> None:
        """Add up all."""
        past_s, self._since_s = at_s - self._since_s, at_s
        if past_s:
            for kind, num in self.now.items():
                self.slot_s[kind] += num * past_s

    def moves(self, at_s: float, num: int, kind: str, to: str) -> None:
        """So many slots; of none a node is new."""
        self.end(at_s)
        if kind:
            self.now[kind] -= num
        self.now[to] += num

    def lives(self, at_s: float, task: int, num: int) -> None:
        """So many processes of the task more, or fewer."""
        living, trains, why = self._tasks.get(task, (0, 0, "transition"))
        self._becomes(at_s, task, (living + num, trains, why))
        self.now["idle"] -= num

    def does(self, at_s: float, task: int, trains: int, why: str) -> None:
        """On so many slots the task trains from now; on none, for this reason."""
        known = self._tasks.get(task, (0, 0, "transition"))
        if known[1:] != (trains, why):
            self._becomes(at_s, task, (known[0], trains, why))

    def _becomes(self, at_s: float, task: int, new: tuple[int, int, str]) -> None:
        self.end(at_s)
        old = self._tasks.get(task, (0, 0, "transition"))
        for sign, (living, trains, why) in ((-1, old), (1, new)):
            self.now["trained"] += sign * trains
            self.now["transition" if trains else why] += sign * (living - trains)
        self._tasks[task] = new
