"""Free slots by node, and where there is most room: kept while seats are dealt out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush

from ..events.orders import Slot


class Room:
    """The slots that nobody has. Each question costs the logarithm of the number of nodes."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._free: dict[str, list[Slot]] = {}
        for slot in sorted(slots, reverse=True):
            self._free.setdefault(slot.node, []).append(slot)
        self._heap = [(-len(free), node) for node, free in self._free.items()]
        """Of a node whose room has changed the entry is out of date, and there is another."""
        heapify(self._heap)

    def on(self, node: str) -> int:
        return len(self._free.get(node, ()))

    def roomiest(self, but: Collection[str] = ()) -> str:
        """The node with most room, the first of them by name, none of `but`; empty: none has any.

        Costs as many steps more as nodes of `but` have more room.
        """
        passed: list[tuple[int, str]] = []
        found = ""
        while self._heap and not found:
            entry = self._heap[0]
            if -entry[0] != self.on(entry[1]) or not entry[0]:
                heappop(self._heap)
            elif entry[1] in but:
                passed.append(heappop(self._heap))
            else:
                found = entry[1]
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def take(self, node: str, num: int) -> list[Slot]:
        """The first `num` free slots of a node that has so many, which are free no longer."""
        free = self._free[node]
        taken = free[: -num - 1 : -1]
        del free[-num:]
        heappush(self._heap, (-len(free), node))
        return taken
