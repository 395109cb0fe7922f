"""What a cluster earned, and where the rest went."""

from __future__ import annotations

import math
from typing import Literal

Lost = Literal["detection", "transition", "waiting", "sub-healthy", "recomputed"]
LOST: tuple[Lost, ...] = ("detection", "transition", "waiting", "sub-healthy", "recomputed")


class Earnings:
    """Of tasks whose WAF changes by steps: weighted FLOP, whole and by what was lost to.

    detection: a fault has stopped a task and nobody was told. transition: it is on the way to train
    again. waiting: it has no slots, or those that it has are away. sub-healthy: it earns less than
    at full strength, or, below 0, more. recomputed: it was earned, and is done again. Together with
    what was earned they are what the cluster at full strength would have earned, always; and so
    for slots: seconds that they trained, and those that they did not.
    """

    def __init__(self) -> None:
        self.flop = self.slot_s = 0.0
        self.lost_flop: dict[Lost, float] = dict.fromkeys(LOST, 0.0)
        self.lost_slot_s: dict[Lost, float] = dict.fromkeys(LOST, 0.0)
        self.flop_of: dict[int, float] = {}
        """Of `flop`, by task."""
        self.full: dict[int, float] = {}
        self.full_slots: dict[int, int] = {}
        self.waf: dict[int, float] = {}
        self.slots: dict[int, int] = {}
        """That train, by task."""
        self.down_s: dict[Lost, float] = dict.fromkeys(LOST, 0.0)
        """Task-seconds without training, by why."""
        self.curve: list[tuple[float, float]] = []
        """When the WAF of all changed, and to what."""
        self._why: dict[int, Lost] = {}
        self._since_s: dict[int, float] = {}

    def begin(self, at_s: float) -> None:
        """From here on it counts: what each task earns now is its full strength."""
        self.full, self.full_slots = dict(self.waf), dict(self.slots)
        self.flop, self.lost_flop = 0.0, dict.fromkeys(LOST, 0.0)
        self.flop_of = dict.fromkeys(self.waf, 0.0)
        self.slot_s, self.lost_slot_s = 0.0, dict.fromkeys(LOST, 0.0)
        self.down_s, self.curve = dict.fromkeys(LOST, 0.0), [(at_s, self.total)]
        self._since_s = dict.fromkeys(self.waf, at_s)

    def befalls(self, at_s: float) -> None:
        """Something befalls the cluster, or is asked of it: of no interest to the sum."""

    @property
    def whole_flop(self) -> float:
        """What would have been earned without a fault."""
        return math.fsum((self.flop, *self.lost_flop.values()))

    @property
    def share(self) -> float:
        """Of that, what was."""
        return self.flop / self.whole_flop if self.whole_flop else 0.0

    @property
    def total(self) -> float:
        """WAF of all tasks now."""
        total = 0.0
        for waf in self.waf.values():
            total += waf
        return total

    def earns(self, at_s: float, task: int, waf: float, slots: int, why: Lost) -> None:
        """From now on the task earns so much, on so many slots; `why` it does not earn more."""
        if self.waf.get(task) == waf and self._why.get(task) == why:
            return
        self.settle(at_s, task)
        changed = self.waf.get(task) != waf
        self.waf[task], self.slots[task], self._why[task] = waf, slots, why
        if changed:
            self._changed(at_s)

    def fills(self, at_s: float, task: int, waf: float, slots: int) -> None:
        """From now on the task is at full strength when it earns so much, on so many slots."""
        self.settle(at_s, task)
        self.full[task], self.full_slots[task] = waf, slots

    def leaves(self, at_s: float, task: int) -> None:
        """The task is over: from now on nothing is earned by it, nor lost."""
        if task in self.waf:
            self.settle(at_s, task)
            del self.waf[task], self.slots[task]
            self.full.pop(task, None)
            self._changed(at_s)

    def settle(self, at_s: float, task: int) -> None:
        """Add up what the task earned until now."""
        past_s = at_s - self._since_s.get(task, at_s)
        self._since_s[task] = at_s
        if not past_s:
            return
        waf, why = self.waf.get(task, 0.0), self._why.get(task, "waiting")
        slots = self.slots.get(task, 0)
        self.flop += waf * past_s
        self.flop_of[task] = self.flop_of.get(task, 0.0) + waf * past_s
        self.slot_s += slots * past_s
        self.lost_flop[why] += (self.full.get(task, 0.0) - waf) * past_s
        self.lost_slot_s[why] += (self.full_slots.get(task, 0) - slots) * past_s
        if not waf:
            self.down_s[why] += past_s

    def undo(self, task: int, flop: float, slot_s: float) -> None:
        """What the task earned, and is to earn again in so many slot-seconds."""
        self.flop -= flop
        self.flop_of[task] = self.flop_of.get(task, 0.0) - flop
        self.lost_flop["recomputed"] += flop
        self.slot_s -= slot_s
        self.lost_slot_s["recomputed"] += slot_s

    def end(self, at_s: float) -> None:
        """Add up all."""
        for task in self.waf:
            self.settle(at_s, task)

    def stand_for(self, num: int) -> None:
        """Each slot was so many GPUs: their time."""
        self.slot_s *= num
        self.full_slots = {task: num * slots for task, slots in self.full_slots.items()}
        self.lost_slot_s = {why: num * one_s for why, one_s in self.lost_slot_s.items()}

    def _changed(self, at_s: float) -> None:
        if self.curve and self.curve[-1][0] == at_s:
            self.curve.pop()
        self.curve.append((at_s, self.total))
