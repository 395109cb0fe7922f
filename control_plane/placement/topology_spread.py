"""The topology spread constraint: a task's state on two nodes, and on two racks if labelled.

It is a flow from tasks through racks to nodes, with one seat less than the task has as the bound of
each edge. Each task that violates it needs one cheapest augmenting path, if there is any.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush

from msgspec import Struct

from ...events.records.types import Labels, Seat, Slot
from ..state.task import Task
from ..throughput.state_size import seat_bytes
from ..throughput.training_layouts import layout_within
from .free_slots import NOWHERE, FreeSlots, domain

Taken = dict[int, list[Slot]]
"""Slots by task."""
Move = tuple[int, str, str]
"""A move of one seat: (task, from node, to node)."""
SAME_NODE, SAME_SWITCH, SAME_RACK, ANYWHERE = range(4)
"""The additional cost of a moved process, by its distance to the nearest seat of its task."""
BYTE, MOVED, BROKEN, FAR = 1 << 20, 1 << 90, 1 << 120, 1 << 150
"""Weights of a moved byte, of a moved process, of a task brought onto one rack, each above the sum
of all smaller terms of a path. FAR: unreachable."""


def num_elsewhere(task: Task, count: int) -> int:
    """The number of seats that belong on another node than the task's other seats: one replica, so
    that each part of the model is on two nodes. 0: only one replica, or no training task."""
    train = task.spec.training
    axes = layout_within(train, count) if train is not None else None
    if train is None or count < 2:
        return 0
    if axes is None:
        return 1
    return axes.tp * axes.pp if axes.dp > 1 else 0


def spread(
    movable: Sequence[Task],
    taken: Taken,
    room: FreeSlots,
    where: Mapping[str, Labels],
    groups: Mapping[int, int],
) -> None:
    """Change `taken`, with few moves, until the constraint holds for as many tasks as possible.
    `groups`: by task, the size of its groups. The seats of a group that is on one node stay."""
    one_rack = [
        task.id
        for task in movable
        if num_elsewhere(task, len(taken[task.id])) == 1
        and len({domain(slot.node, where) for slot in taken[task.id]}) == 1
    ]
    if not one_rack:
        return
    board = SeatMoves(movable, taken, room, where, groups)
    for key in one_rack:
        if len(board.on[key]) == 1:
            board.mend(key, own=BROKEN)
    for key in one_rack:
        if len(board.racks[key]) == 1:
            board.mend(key, own=0)


LOOK_NUM_MAX = 1024
"""After so many nodes, a search that has found a path stops looking for a cheaper path."""


class _Step(Struct, frozen=True, order=True):
    """A step of a path: the cost so far, the task that moves, the node it leaves ("": first)."""

    cost: int
    task: int
    node: str


class SeatMoves:
    """The seats by node and by rack while seats are moved."""

    def __init__(
        self,
        movable: Sequence[Task],
        taken: Taken,
        room: FreeSlots,
        where: Mapping[str, Labels],
        groups: Mapping[int, int],
    ) -> None:
        self.taken, self.room, self.where, self.groups = taken, room, where, groups
        self.ruled = {task.id: num_elsewhere(task, len(taken[task.id])) == 1 for task in movable}
        self.at = {task.id: room.allocatable.intersection(_kept(task)) for task in movable}
        self.mine = {key: Counter(slot.node for slot in at) for key, at in self.at.items()}
        self.moved = {
            task.id: MOVED + BYTE * seat_bytes(task, len(taken[task.id])) for task in movable
        }
        self.on = {task.id: Counter(slot.node for slot in taken[task.id]) for task in movable}
        self.nodes = sorted({slot.node for slot in room.allocatable})
        self.rack = {node: domain(node, where) for node in self.nodes}
        self.near: dict[str, list[str]] = {}
        """The nodes of each rack and of each switch."""
        for node in self.nodes:
            for group in self._groups(node):
                self.near.setdefault(group, []).append(node)
        self.racks: dict[int, Counter[str]] = {}
        self.guests: dict[str, dict[int, None]] = {node: {} for node in self.nodes}
        for key, on in self.on.items():
            self.racks[key] = Counter()
            for node, num in on.items():
                self.racks[key][self.rack[node]] += num
                self.guests[node][key] = None

    def _groups(self, node: str) -> list[str]:
        switch = self.where.get(node, NOWHERE).switch
        return [self.rack[node], f"switch {switch}"] if switch else [self.rack[node]]

    def mend(self, key: int, *, own: int) -> None:
        """Spread a task. `own`: the cost of staying on one rack; 0: staying is forbidden."""
        path = self._direct(key) or Search(self, key, own).path()
        if path is not None:
            self._follow(path)

    # --- costs ----------------------------------------------------------------------------------
    def leaves(self, key: int, node: str) -> int:
        """The cost if a seat leaves: negative if a seat here has no process, else 0."""
        return -self.moved[key] if self.on[key][node] > self.mine[key][node] else 0

    def leaving(self, key: int) -> str:
        """The node to give up a seat on: where a seat has no process, else the emptiest node."""
        on = self.on[key]
        return min(sorted(on), key=lambda node: (self.leaves(key, node), on[node]))

    def comes(self, key: int, node: str) -> int:
        """The cost of a new seat: 0 if the task has a process without a seat there, else a move."""
        if self.on[key][node] < self.mine[key][node]:
            return 0
        return self.moved[key] + self.distance(key, node)

    def distance(self, key: int, node: str) -> int:
        """The distance of a node from the task's nearest seat."""
        if self.on[key][node]:
            return SAME_NODE
        switch = self.where.get(node, NOWHERE).switch
        if switch and any(self.where.get(own, NOWHERE).switch == switch for own in self.on[key]):
            return SAME_SWITCH
        return SAME_RACK if self.racks[key][self.rack[node]] else ANYWHERE

    def one_rack(self, key: int, rack: str) -> int:
        """BROKEN if one more seat on this rack brings the whole task onto the rack, else 0."""
        alone = self.ruled[key] and self.racks[key][rack] >= len(self.taken[key]) - 1
        return BROKEN if alone else 0

    def special(self, key: int) -> dict[str, None]:
        """The nodes where a seat of the task may cost less than on most nodes."""
        found = dict.fromkeys([*self.on[key], *self.mine[key]])
        for node in self.on[key]:
            for group in self._groups(node):
                found |= dict.fromkeys(self.near[group])
        return found

    # --- moves ----------------------------------------------------------------------------------
    def _direct(self, key: int) -> list[Move] | None:
        """A single move into a free slot on another rack, if no longer path can be cheaper."""
        home, old = self.racks[key], self.leaving(key)
        spare = [
            node for node in self.mine[key] if self.rack[node] not in home and self.mine[key][node]
        ]
        near = spare or [
            node
            for own in self.on[key]
            for node in self.near[self._groups(own)[-1]]
            if self.rack[node] not in home
        ]
        found = [node for node in near if self.room.on(node)]
        new: str | None = None
        if found:
            new = min(found, key=lambda node: (-self.room.on(node), node))
        elif not spare:
            new = self.room.most_free(but=lambda node: self.rack[node] in home)
        return [(key, old, new)] if new is not None else None

    def _follow(self, path: Sequence[Move]) -> None:
        """Execute the moves. Each takes the slot that the next one frees, the last a free slot."""
        left = [
            max(
                (slot not in self.at[key], slot in self.at[into], slot)
                for slot in self.taken[key]
                if slot.node == node
            )[2]
            for (key, node, _), (into, _, _) in zip(path, [path[-1], *path], strict=False)
        ]
        last, _, end = path[-1]
        ends = [*self.room.slots(end), *(slot for slot in left[:1] if slot.node == end)]
        final = min((slot not in self.at[last], slot) for slot in ends)[1]
        if final != left[0]:
            self.room.exchange(final, left[0])
        for (key, old_node, new_node), old, new in zip(path, left, [*left[1:], final], strict=True):
            self.taken[key].remove(old)
            self.taken[key].append(new)
            self._count(key, old_node, -1)
            self._count(key, new_node, 1)
        for key, _, node in path:
            self._settle(key, node)

    def _settle(self, key: int, node: str) -> None:
        """Exchange slots on a node, so that the task gets the slots of its own processes."""
        own = self.taken[key]
        for want in sorted(slot for slot in self.at[key] if slot.node == node and slot not in own):
            spare = sorted(slot for slot in own if slot.node == node and slot not in self.at[key])
            holder = next(
                (other for other in sorted(self.guests[node]) if want in self.taken[other]), None
            )
            if not spare or holder is None or want in self.at[holder]:
                continue
            for of, old, new in ((key, spare[0], want), (holder, want, spare[0])):
                self.taken[of].remove(old)
                self.taken[of].append(new)

    def _count(self, key: int, node: str, change: int) -> None:
        on, racks, rack = self.on[key], self.racks[key], self.rack[node]
        on[node] += change
        racks[rack] += change
        if not on[node]:
            del on[node]
            del self.guests[node][key]
        else:
            self.guests[node][key] = None
        if not racks[rack]:
            del racks[rack]


def _kept(task: Task) -> Iterator[Slot]:
    """The slots of processes that may stay: they have a seat, or they are healthy."""
    seats = set(task.target)
    for rank in task.ranks.values():
        if rank.is_healthy or Seat(rank.rank, rank.slot) in seats:
            yield rank.slot


class Search:
    """The cheapest path for one task, by Dijkstra's algorithm. A seat that has left its node is
    offered to all nodes at once, at one cost for most. Nodes with a cheaper offer are skipped."""

    def __init__(self, board: SeatMoves, first: int, own: int) -> None:
        self._board, self._first, self._own = board, first, own
        self._home = sorted(board.on[first])
        self._found: dict[str, _Step] = {}
        self._hand: dict[tuple[int, str], int] = {}
        """The least cost of an offered seat, by task and by the rack it must stay on ("": any)."""
        self._todo: list[tuple[int, str]] = []
        self._open: dict[int, list[str]] = {0: board.nodes}
        """By cost of an offer to all nodes: the nodes that were still more expensive after it."""
        self._leaving = board.leaving(first)
        self._best: tuple[int, str, str] | None = None
        """The cheapest path's end so far: (cost, node, the node that the first seat leaves)."""
        self._done: dict[str, None] = {}

    def path(self) -> list[Move] | None:
        """The moves of the cheapest path; None if the constraint cannot hold for one more task."""
        board, first = self._board, self._first
        self._offer(first, "", 0)
        for other in board.near[board.rack[self._home[0]]] if self._own else ():
            self._reach(other, first, "", self._own)
        while self._todo:
            cost, node = heappop(self._todo)
            if node in self._done:
                continue
            self._done[node] = None
            best = self._best
            if best is not None and (
                cost + board.leaves(first, self._leaving) >= best[0]
                or (len(self._done) > LOOK_NUM_MAX and best[0] < BROKEN // 2)
            ):
                break
            self._expand(node, cost)
        best = self._best
        if best is None or (not self._own and best[0] >= BROKEN // 2):
            return None
        return self._moves(best[1], best[2])

    def _find(self, node: str, step: _Step) -> None:
        """Record that a step reaches the node at a lower cost. The path may end at this node."""
        board, home = self._board, node in self._home
        self._found[node] = step
        heappush(self._todo, (step.cost, node))
        if home or board.room.on(node):
            leaving = node if home else self._leaving
            end = (step.cost + board.leaves(self._first, leaving), node, leaving)
            if self._best is None or end < self._best:
                self._best = end

    def _expand(self, node: str, cost: int) -> None:
        """Offer other tasks' seats on this node, in exchange for the seat that comes to it."""
        board, rack = self._board, self._board.rack[node]
        for key in sorted(board.guests[node]):
            if key == self._first or (  # no group may be split
                key in board.groups and not board.on[key][node] % board.groups[key]
            ):
                continue
            hand = cost + board.leaves(key, node)
            for held in ("", rack):
                if hand < self._hand.get((key, held), FAR):
                    self._hand[key, held] = hand
                    if not held:
                        self._offer(key, node, hand)
                    for other in board.near[held] if held else ():
                        self._reach(other, key, node, hand)

    def _offer(self, key: int, node: str, hand: int) -> None:
        """Offer to all nodes a seat that has left `node`; it may leave its rack."""
        board, special = self._board, self._board.special(key)
        for other in special:
            self._reach(other, key, node, hand + board.one_rack(key, board.rack[other]))
        most = hand + board.moved[key] + ANYWHERE
        rest: list[str] = []
        step = _Step(most, key, node)
        pool = min((nodes for low, nodes in self._open.items() if low <= most), key=len)
        for other in pool:
            if other in self._found and self._found[other].cost <= most:
                continue
            if other in special:
                rest.append(other)
            else:
                self._find(other, step)
        self._open[most] = rest

    def _reach(self, node: str, key: int, old: str, hand: int) -> None:
        board = self._board
        if node in self._done or (  # the task must stay on two nodes
            board.ruled[key] and board.on[key][node] >= len(board.taken[key]) - 1
        ):
            return
        cost = hand + board.comes(key, node)
        if node not in self._found or cost < self._found[node].cost:
            self._find(node, _Step(cost, key, old))

    def _moves(self, end: str, leaving: str) -> list[Move]:
        moves: list[Move] = []
        node = end
        while node:
            step = self._found[node]
            moves.append((step.task, step.node or leaving, node))
            node = step.node
        return moves[::-1]
