"""What a cluster earned, and where the rest went."""

from __future__ import annotations

from typing import Literal

Lost = Literal["detection", "transition", "waiting", "sub-healthy", "recomputed"]
LOST: tuple[Lost, ...] = ("detection", "transition", "waiting", "sub-healthy", "recomputed")


class Earnings:
    """Of tasks whose WAF changes by steps: weighted FLOP, whole and by what was lost to.

    detection: a fault has stopped a task and nobody was told. transition: it is on the way to train
    again. waiting: it has no slots, or those that it has are away. sub-healthy: it earns less than
    at full strength, or, below 0, more. recomputed: it was earned, and is done again. Together with
    what was earned they are what the cluster at full strength would have earned, always.
    """

    def __init__(self) -> None:
        self.flop = 0.0
        self.lost_flop: dict[Lost, float] = dict.fromkeys(LOST, 0.0)
        self.full: dict[int, float] = {}
        self.waf: dict[int, float] = {}
        self.down_s: dict[Lost, float] = dict.fromkeys(LOST, 0.0)
        """Task-seconds without training, by why."""
        self.curve: list[tuple[float, float]] = []
        """When the WAF of all changed, and to what."""
        self._why: dict[int, Lost] = {}
        self._since_s: dict[int, float] = {}

    def begin(self, at_s: float) -> None:
        """From here on it counts: what each task earns now is its full strength."""
        self.full = dict(self.waf)
        self.flop, self.lost_flop = 0.0, dict.fromkeys(LOST, 0.0)
        self.down_s, self.curve = dict.fromkeys(LOST, 0.0), [(at_s, self.total)]
        self._since_s = dict.fromkeys(self.waf, at_s)

    @property
    def total(self) -> float:
        """WAF of all tasks now."""
        total = 0.0
        for waf in self.waf.values():
            total += waf
        return total

    def earns(self, at_s: float, task: int, waf: float, why: Lost) -> None:
        """From now on the task earns so much; `why` it does not earn more."""
        if self.waf.get(task) == waf and self._why.get(task) == why:
            return
        self.settle(at_s, task)
        changed = self.waf.get(task) != waf
        self.waf[task], self._why[task] = waf, why
        if changed:
            if self.curve and self.curve[-1][0] == at_s:
                self.curve.pop()
            self.curve.append((at_s, self.total))

    def settle(self, at_s: float, task: int) -> None:
        """Add up what the task earned until now."""
        past_s = at_s - self._since_s.get(task, at_s)
        self._since_s[task] = at_s
        waf, why = self.waf.get(task, 0.0), self._why.get(task, "waiting")
        self.flop += waf * past_s
        self.lost_flop[why] += (self.full.get(task, 0.0) - waf) * past_s
        if not waf:
            self.down_s[why] += past_s

    def undo(self, flop: float) -> None:
        """What was earned and is to be earned again."""
        self.flop -= flop
        self.lost_flop["recomputed"] += flop

    def end(self, at_s: float) -> None:
        """Add up all."""
        for task in self.waf:
            self.settle(at_s, task)
