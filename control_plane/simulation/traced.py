"""Earnings traced to what befell the cluster: each loss belongs to the last thing that deepened it.

What befalls while something else is still felt is charged with what is lost beyond that. It is over
when no more is lost than before it struck. What did not hurt has no part in the end of what did.
"""

from __future__ import annotations

from msgspec import Struct

from .earnings import Earnings, Lost

MARGIN_SHARE = 1e-9
"""Of full strength: sums of floats are not exact."""
Level = tuple[float, float, float]
"""What is lost each second: weighted FLOP, slot-seconds, task-seconds."""


class Felt(Struct, kw_only=True):
    """What one thing cost until all was as before it; below 0 it brought something."""

    at_s: float
    before: Level
    lost_flop: float = 0.0
    lost_slot_s: float = 0.0
    down_s: float = 0.0
    over_s: float | None = None
    """None: never until the end, or nothing was felt of it."""
    has_hurt: bool = False
    again_flop: float = 0.0
    """Of what was lost: what was done again."""


class Traced(Earnings):
    """`felt` has one for each call of `befalls`, in order; `loose` what nothing is charged with."""

    def __init__(self) -> None:
        super().__init__()
        self.felt: list[Felt] = []
        self.loose = Felt(at_s=0.0, before=(0.0, 0.0, 0.0))
        self.by_task: dict[int, float] = {}
        """FLOP, weighted."""
        self._open: list[Felt] = []
        self._level: Level = (0.0, 0.0, 0.0)
        self._at_s = 0.0

    def begin(self, at_s: float) -> None:
        super().begin(at_s)
        self.felt, self._open, self._level, self._at_s = [], [], (0.0, 0.0, 0.0), at_s
        self.by_task = dict.fromkeys(self.waf, 0.0)

    def befalls(self, at_s: float) -> None:
        self._charge(at_s)
        self.felt.append(Felt(at_s=at_s, before=self._level))
        self._open.append(self.felt[-1])

    def earns(self, at_s: float, task: int, waf: float, slots: int, why: Lost) -> None:
        super().earns(at_s, task, waf, slots, why)
        self._look(at_s)

    def fills(self, at_s: float, task: int, waf: float, slots: int) -> None:
        super().fills(at_s, task, waf, slots)
        self._look(at_s)

    def leaves(self, at_s: float, task: int) -> None:
        super().leaves(at_s, task)
        self._look(at_s)

    def settle(self, at_s: float, task: int) -> None:
        past_s = at_s - self._since_s.get(task, at_s)
        self.by_task[task] = self.by_task.get(task, 0.0) + self.waf.get(task, 0.0) * past_s
        super().settle(at_s, task)

    def undo(self, task: int, flop: float, slot_s: float) -> None:
        super().undo(task, flop, slot_s)
        self.by_task[task] -= flop
        felt = self._open[-1] if self._open else self.loose
        felt.lost_flop += flop
        felt.again_flop += flop
        felt.lost_slot_s += slot_s

    def end(self, at_s: float) -> None:
        super().end(at_s)
        self._charge(at_s)

    def _look(self, at_s: float) -> None:
        """What is lost from now on."""
        self._charge(at_s)
        flop = slots = down = 0.0
        for task, full in self.full.items():
            waf = self.waf.get(task, 0.0)
            flop += full - waf
            slots += self.full_slots[task] - self.slots.get(task, 0)
            down += bool(full) and not waf
        self._level = (flop, slots, down)
        margin = MARGIN_SHARE * sum(self.full.values())
        for older, felt in zip([None, *self._open], self._open, strict=False):
            if older is not None and not felt.has_hurt and flop < felt.before[0]:
                felt.before = self._level  # what is over is an older one's
            felt.has_hurt = felt.has_hurt or flop > felt.before[0] + margin
            if felt.has_hurt and flop <= felt.before[0] + margin:
                felt.over_s = at_s
        self._open = [felt for felt in self._open if felt.over_s is None]

    def _charge(self, at_s: float) -> None:
        """What was lost since the last look: from the newest downwards, each beyond its own."""
        past_s, self._at_s = at_s - self._at_s, at_s
        if not past_s:
            return
        rest = self._level
        for felt in reversed(self._open):
            _add(felt, (rest[0] - felt.before[0], rest[1] - felt.before[1],
                        rest[2] - felt.before[2]), past_s)
            rest = felt.before
        _add(self.loose, rest, past_s)


def _add(felt: Felt, level: Level, past_s: float) -> None:
    felt.lost_flop += level[0] * past_s
    felt.lost_slot_s += level[1] * past_s
    felt.down_s += level[2] * past_s
