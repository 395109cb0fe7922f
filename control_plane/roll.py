"""The roll of slots that a plan may give, by node: called once, then kept up with what changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from ..events.orders import Seat, Slot
from .nodes import Node


class Roll:
    """Slots of nodes that take tasks, and not out; by node, by name."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.by_node = {name: _usable(nodes[name]) for name in sorted(nodes)}
        self.lacking = {name for name, slots in self.by_node.items()
                        if len(slots) < nodes[name].num_slots}
        """Nodes not all of whose slots may be given."""
        self._every: tuple[Slot, ...] | None = None

    @property
    def every(self) -> tuple[Slot, ...]:
        """All of them."""
        if self._every is None:
            self._every = tuple(chain.from_iterable(self.by_node.values()))
        return self._every

    def mark(self, node: Node) -> None:
        """What of this node, which was there before, may be given now."""
        slots = _usable(node)
        if self.by_node[node.name] != slots:
            self.by_node[node.name], self._every = slots, None
        if len(slots) < node.num_slots:
            self.lacking.add(node.name)
        else:
            self.lacking.discard(node.name)

    def has(self, seats: Iterable[Seat]) -> bool:
        """Whether all of these seats are on slots that may be given."""
        return all(seat.slot.node not in self.lacking or seat.slot in self.by_node[seat.slot.node]
                   for seat in seats)


def _usable(node: Node) -> tuple[Slot, ...]:
    if not node.takes_tasks:
        return ()
    return tuple(Slot(node.name, index) for index in range(node.num_slots)
                 if not node.is_out(index))
