"""Free slots by node, rack and switch, during a placement."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush

from ...events.records.types import Labels, Slot

NOWHERE = Labels()
ANYWHERE = ""


def domain(node: str, where: Mapping[str, Labels]) -> str:
    """The failure domain of a node: its rack, or the node itself if it has no rack label."""
    rack = where.get(node, NOWHERE).rack
    return f"rack {rack}" if rack else f"node {node}"


def neighbours(
    nodes: Iterable[str], where: Mapping[str, Labels]
) -> tuple[dict[str, None], dict[str, None]]:
    """(the switches, the racks) of those nodes that have these labels."""
    labels = [where.get(node, NOWHERE) for node in nodes]
    return (
        dict.fromkeys(f"switch {one.switch}" for one in labels if one.switch),
        dict.fromkeys(f"rack {one.rack}" for one in labels if one.rack),
    )


class FreeSlots:
    """The slots among `slots` that are not assigned. A query is logarithmic in the nodes."""

    def __init__(
        self, slots: Sequence[Slot], given: Collection[Slot], where: Mapping[str, Labels]
    ) -> None:
        self._where, self.allocatable = where, set(slots)
        self._free: dict[str, list[Slot]] = {}
        """By node: its free slots, the first one last. Full nodes may be absent."""
        for slot in sorted(self.allocatable.difference(given), reverse=True):
            self._free.setdefault(slot.node, []).append(slot)
        self._heaps: dict[str, list[tuple[int, str]]] = {}
        """By group: a heap of its nodes. An entry is outdated if the node's free slots changed."""
        for node in self._free:
            self._push(node)

    def _push(self, node: str) -> None:
        """Enter the node into the heaps of its groups: all nodes, its rack, its switch."""
        switches, racks = neighbours([node], self._where)
        for group in (ANYWHERE, *racks, *switches):
            heappush(self._heaps.setdefault(group, []), (-self.on(node), node))

    def on(self, node: str) -> int:
        return len(self._free.get(node, ()))

    def most_free(
        self, group: str = ANYWHERE, but: Callable[[str], bool] | None = None
    ) -> str | None:
        """The node of a group with the most free slots, on a tie the first by name; None if no slot
        is free. `but` excludes nodes. Each excluded node with more free slots costs one step."""
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
        """The node with the most free slots, at least `least`. The first item of `groups` that has
        such a node comes first, then the other items, then all nodes. None: no such node."""
        for keys in (*groups, (ANYWHERE,)):
            found = [
                node
                for key in keys
                if (node := self.most_free(key)) is not None and self.on(node) >= least
            ]
            if found:
                return min(found, key=lambda node: (-self.on(node), node))
        return None

    def take(self, node: str, num: int, wanted: Collection[Slot] = ()) -> list[Slot]:
        """Take `num` free slots of a node, slots in `wanted` first. The node must have as many."""
        free = self._free[node]
        if wanted:
            free.sort(key=lambda slot: (slot not in wanted, slot), reverse=True)
        taken = free[: -num - 1 : -1]
        del free[-num:]
        if wanted:
            free.sort(reverse=True)
        self._push(node)
        return taken

    def slots(self, node: str) -> list[Slot]:
        return self._free.get(node, [])

    def exchange(self, taken: Slot, given: Slot) -> None:
        self._free[taken.node].remove(taken)
        self._free[given.node] = sorted([*self.slots(given.node), given], reverse=True)
        for node in (taken.node, given.node):
            self._push(node)
