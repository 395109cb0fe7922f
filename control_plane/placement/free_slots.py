"""Free slots by node, rack and switch, during a placement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from ...events.records.types import Labels, Slot

NOWHERE = Labels()
ANYWHERE = ""


def domain(node: str, where: Mapping[str, Labels]) -> str:
    """The failure domain of a node: its rack; without that label, the node itself."""
    rack = where.get(node, NOWHERE).rack
    return f"rack {rack}" if rack else f"node {node}"


def switch(node: str, where: Mapping[str, Labels]) -> str:
    """The node's switch; without that label, the node itself."""
    found = where.get(node, NOWHERE).switch
    return f"switch {found}" if found else f"node {node}"


def neighbours(nodes: Iterable[str], where: Mapping[str, Labels]) -> tuple[
        dict[str, None], dict[str, None]]:
    """The switches and racks of the nodes, for nodes with these labels."""
    return (dict.fromkeys(switch(node, where) for node in nodes if where.get(node, NOWHERE).switch),
            dict.fromkeys(domain(node, where) for node in nodes if where.get(node, NOWHERE).rack))


class FreeSlots:
    """The unassigned ones of `slots`. A query is logarithmic in the nodes."""

    def __init__(self, slots: Sequence[Slot], given: Collection[Slot],
                 where: Mapping[str, Labels]) -> None:
        self._free: dict[str, list[Slot]] = {}
        for slot in sorted(slots, reverse=True):
            free = self._free.setdefault(slot.node, [])
            if slot not in given:
                free.append(slot)
        self.allocatable, self.nodes = set(slots), sorted(self._free)
        self._groups: dict[str, list[str]] = {}
        """By node: its groups (all nodes, its rack, its switch)."""
        self._heaps: dict[str, list[tuple[int, str]]] = {ANYWHERE: []}
        """Heaps by group. An entry is out of date if the node's free slots changed."""
        for node, free in self._free.items():
            labels = where.get(node, NOWHERE)
            self._groups[node] = [
                ANYWHERE, *([domain(node, where)] if labels.rack else []),
                *([switch(node, where)] if labels.switch else [])]
            for group in self._groups[node]:
                self._heaps.setdefault(group, []).append((-len(free), node))
        for heap in self._heaps.values():
            heapify(heap)

    def on(self, node: str) -> int:
        return len(self._free.get(node, ()))

    def most_free(self, group: str = ANYWHERE,
                 but: Callable[[str], bool] | None = None) -> str | None:
        """The node of a group with most free slots, by name among equals; `but` excludes nodes.
        None: no free slot. Excluded nodes with more free slots each cost one more step."""
        heap = self._heaps.get(group, [])
        passed: list[tuple[int, str]] = []
        found = None
        while heap and found is None:
            entry = heap[0]
            if -entry[0] != self.on(entry[1]) or not entry[0]:
                heappop(heap)
            elif but is not None and but(entry[1]):
                passed.append(heappop(heap))
            else:
                found = entry[1]
        for entry in passed:
            heappush(heap, entry)
        return found

    def nearest(self, groups: Iterable[Iterable[str]], least: int = 1) -> str | None:
        """The node with most free slots in the first groups with `least` on one, else of all."""
        for keys in (*groups, (ANYWHERE,)):
            found = [node for key in keys if (node := self.most_free(key)) is not None
                     and self.on(node) >= least]
            if found:
                return min(found, key=lambda node: (-self.on(node), node))
        return None

    def take(self, node: str, num: int, wanted: Collection[Slot] = ()) -> list[Slot]:
        """Take `num` free slots of a node that has them, `wanted` ones first."""
        free = self._free[node]
        if wanted:
            free.sort(key=lambda slot: (slot not in wanted, slot), reverse=True)
        taken = free[: -num - 1 : -1]
        del free[-num:]
        if wanted:
            free.sort(reverse=True)
        for group in self._groups[node]:
            heappush(self._heaps[group], (-len(free), node))
        return taken

    def slots(self, node: str) -> list[Slot]:
        return self._free.get(node, [])

    def exchange(self, taken: Slot, given: Slot) -> None:
        """Take one slot and free another."""
        self._free[taken.node].remove(taken)
        self._free[given.node] = sorted([*self._free[given.node], given], reverse=True)
        for node in (taken.node, given.node):
            for group in self._groups[node]:
                heappush(self._heaps[group], (-self.on(node), node))
