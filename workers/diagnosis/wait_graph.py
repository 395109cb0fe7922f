"""The wait-for graph between ranks, built from their flight-recorder dumps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from .flight_recorder import Dump, Op

Key = tuple[str, int, int, int]
_ALL_TAKE_PART = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter",
                  "all_to_all", "alltoall", "barrier")
"""Collectives that complete on no rank before all ranks have entered them."""


class WaitGraph:
    """All dumps of one job, and the waits between ranks that they show."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self._dumps = dumps
        self._mixed = frozenset[str]().union(*(dump.mixed for dump in dumps.values()))
        self._members = _members(dumps)
        self.ranks = tuple(sorted({*dumps, *(
            rank for group in self._members.values() for rank in group)}))
        self.missing = tuple(rank for rank in self.ranks if rank not in dumps)
        self._edges: dict[int, dict[int, Op]] = {}
        self._not_entered: dict[Key, tuple[int, ...]] = {}
        self._started: dict[Key, list[int]] = defaultdict(list)
        for rank in sorted(dumps):
            for op in dumps[rank].pending:
                if op.has_started:
                    self._started[op.key].append(rank)

    @property
    def longest_s(self) -> float | None:
        """Duration of the longest wait in seconds; None if the dumps have no time."""
        waits = [(dump.dumped_ns, op.at_ns) for dump in self._dumps.values()
                 for op in dump.pending[:1]]
        if not waits or not all(dumped_ns for dumped_ns, _ in waits):
            return None
        return max(dumped_ns - at_ns for dumped_ns, at_ns in waits) / 1e9

    # --- one rank in one group ---------------------------------------------------------------
    def entered(self, rank: int, group: str) -> int:
        """The last collective of the group that the rank entered; 0: none known."""
        return self._last(rank, group, 0)

    def completed(self, rank: int, group: str) -> int:
        """The last collective of the group that completed on this rank."""
        return self._last(rank, group, 1)

    def _last(self, rank: int, group: str, which: int) -> int:
        dump = self._dumps.get(rank)
        if dump is None:
            return 0
        last = 0 if group in self._mixed else dump.status.get(group, (0, 0))[which]
        return max(last, (dump.entered, dump.completed)[which].get(group, 0))

    def behind(self, rank: int, group: str) -> int:
        """How many collectives the rank is behind the foremost member of the group; 0: unknown."""
        dump = self._dumps.get(rank)
        if dump is None or (group in self._mixed and group not in dump.entered):
            return 0
        foremost = max((self.entered(one, group) for one in self._members.get(group, ())),
                       default=0)
        return max(foremost - self.entered(rank, group), 0)

    def participants(self, op: Op) -> tuple[int, ...]:
        return (op.source, op.target) if op.is_p2p else self._members.get(op.group, ())

    def has_entered(self, rank: int, op: Op) -> bool:
        return self.entered(rank, op.group) >= op.seq

    def pending(self, rank: int) -> tuple[Op, ...]:
        """The incomplete operations of the rank, oldest first."""
        return self._pending[rank] if rank in self._dumps else ()

    def is_idle(self, rank: int) -> bool:
        """Whether the dump of the rank shows earlier communication and no pending operation."""
        dump = self._dumps.get(rank)
        return (dump is not None and not dump.pending and rank not in self._contradicted
                and bool(dump.entered or any(last for last, _ in dump.status.values())))

    # --- all together --------------------------------------------------------------------------
    @cached_property
    def _contradicted(self) -> frozenset[int]:
        """Ranks that report the completion of a collective that others have not entered. Such a
        rank gave up, or was the source of a broadcast."""
        return frozenset(
            rank for group, members in self._members.items()
            if (dumped := [one for one in members if one in self._dumps])
            for least in [min(self.entered(one, group) for one in dumped)]
            for rank in dumped if self.completed(rank, group) > least)

    @cached_property
    def stale(self) -> dict[int, tuple[Op, int, tuple[int, ...]]]:
        """Rank -> the first collective that completed only on others, the number of such
        collectives, and these others. If it completed only on a minority, these members gave up,
        and nothing is reported."""
        found: dict[int, tuple[Op, int, tuple[int, ...]]] = {}
        for rank in sorted(self._dumps):
            unseen = [(op, by) for op in self._own_pending(rank) if (by := self._completed_by(op))]
            if unseen:
                op, by = unseen[0]
                found[rank] = op, len(unseen), by
        return found

    def _completed_by(self, op: Op) -> tuple[int, ...]:
        """The ranks on which `op` completed; () if their reports are not reliable."""
        if op.is_p2p or not any(word in op.name for word in _ALL_TAKE_PART):
            return ()
        members = [one for one in self.participants(op) if one in self._dumps]
        by = [one for one in members if self.completed(one, op.group) >= op.seq
              and one not in self._contradicted]
        return tuple(by) if 2 * len(by) >= len(members) else ()

    def _own_pending(self, rank: int) -> list[Op]:
        return [op for op in self._dumps[rank].pending
                if op.is_p2p or op.seq > self.completed(rank, op.group)]

    @cached_property
    def _pending(self) -> dict[int, tuple[Op, ...]]:
        return {rank: tuple(op for op in self._own_pending(rank)
                            if rank not in self.stale or not self._completed_by(op))
                for rank in self._dumps}

    @cached_property
    def mismatched(self) -> dict[int, tuple[Op, Op, tuple[int, ...], bool]]:
        """Rank -> its call, the different call of others in its group, these others, and whether
        one call is more frequent than all other calls. If none is, all the ranks are named."""
        found: dict[int, tuple[Op, Op, tuple[int, ...], bool]] = {}
        for ops in self._called.values():
            by_call: dict[tuple[str, str], list[int]] = defaultdict(list)
            unsized = {op.name for op in ops.values() if not op.tensors}
            for rank, op in ops.items():
                by_call[op.name, "" if op.name in unsized else op.tensors].append(rank)
            if len(by_call) == 1:
                continue
            most, second, *_ = sorted(by_call.values(), key=len, reverse=True)
            has_majority = len(second) < len(most)
            for ranks in by_call.values():
                peers = second if ranks is most else most
                for rank in ranks if ranks is not most or not has_majority else ():
                    found.setdefault(rank, (ops[rank], ops[peers[0]], tuple(peers), has_majority))
        return found

    @cached_property
    def _called(self) -> dict[Key, dict[int, Op]]:
        """Each incomplete collective -> the call of each rank at that position in the group. Ranks
        on which it completed count too: if sizes differ, the smaller call may complete."""
        called: dict[Key, dict[int, Op]] = defaultdict(dict)
        for rank in sorted(self._dumps):
            for op in self.pending(rank):
                if not op.is_p2p:
                    called[op.key].setdefault(rank, op)
        for rank in sorted(self._dumps):
            for op in self._dumps[rank].ended:
                if op.key in called:
                    called[op.key].setdefault(rank, op)
        return called

    # --- the graph -----------------------------------------------------------------------------
    def edges(self, rank: int) -> dict[int, Op]:
        """The ranks that this rank waits for -> the first operation of each wait; {}: none."""
        if rank not in self._edges:
            self._edges[rank] = self._find_edges(rank)
        return self._edges[rank]

    def _find_edges(self, rank: int) -> dict[int, Op]:
        found: dict[int, Op] = {}
        if rank in self.stale:
            return found
        for op in self.pending(rank):
            for other in (*self.not_entered(rank, op), *self._unstarted_peers(rank, op)):
                found.setdefault(other, op)
        for op in self.pending(rank)[:1]:
            for other in self.participants(op):
                if other != rank and self._is_blocked(other, op):
                    found.setdefault(other, op)
        return found

    def not_entered(self, rank: int, op: Op) -> tuple[int, ...]:
        """The ranks that have not entered `op`. Ranks without a dump are named only if all ranks
        with a dump have entered it."""
        if op.is_p2p:
            other = op.target if rank == op.source else op.source
            return () if self._is_matched(rank, other, op) else (other,)
        if op.key not in self._not_entered:
            others = [one for one in self.participants(op) if not self.has_entered(one, op)]
            dumped = tuple(one for one in others if one in self._dumps)
            self._not_entered[op.key] = dumped or tuple(others)
        return self._not_entered[op.key]

    def _is_matched(self, rank: int, other: int, op: Op) -> bool:
        """Whether the other side has posted the counterpart. Sends match receives in order."""
        mine = [one.order for one in self._dumps[rank].pending if one.key == op.key]
        theirs = self._dumps[other].pending if other in self._dumps else ()
        return mine.index(op.order) < sum(one.key == op.key for one in theirs)

    def _unstarted_peers(self, rank: int, op: Op) -> tuple[int, ...]:
        """The peers that entered `op` but have not started its kernel, if this rank has."""
        return tuple(other for other in self.participants(op) if op.key in self.unstarted(other)
                     ) if op.has_started else ()

    def unstarted(self, rank: int) -> frozenset[Key]:
        """The operations that only others have started; empty if this rank records no starts."""
        if rank not in self._dumps or not self._dumps[rank].records_starts:
            return frozenset()
        return frozenset(op.key for op in self.pending(rank)
                         if not op.has_started and self._started.get(op.key))

    def started(self, op: Op) -> tuple[int, ...]:
        """The ranks on which the kernel of `op` has started."""
        return tuple(self._started.get(op.key, ()))

    def _is_blocked(self, other: int, op: Op) -> bool:
        """Whether a rank that has entered `op` is blocked by an earlier operation."""
        if other in self.stale:
            return True
        pending = self.pending(other)
        return bool(pending) and pending[0].key != op.key and any(
            one.key == op.key for one in pending)

    @cached_property
    def _waiters(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for rank in self.ranks:
            for other in self.edges(rank):
                found[other].append(rank)
        return found

    @property
    def has_waits(self) -> bool:
        return bool(self._waiters)

    def waiters(self, rank: int) -> tuple[int, ...]:
        return tuple(self._waiters.get(rank, ()))

    def first_waiter(self, rank: int) -> tuple[int, Op]:
        """The rank that waits longest for `rank`, and its operation; collectives before sends."""
        waits = {one: self.edges(one)[rank] for one in self._waiters[rank]}
        waiter = min(waits, key=lambda one: (waits[one].is_p2p, waits[one].at_ns, one))
        return waiter, waits[waiter]


def _members(dumps: Mapping[int, Dump]) -> dict[str, tuple[int, ...]]:
    """Group -> its ranks; if no dump lists them, the ranks that entered its collectives."""
    found: dict[str, set[int]] = defaultdict(set)
    listed: dict[str, tuple[int, ...]] = {}
    for rank in sorted(dumps):
        for group, members in dumps[rank].members.items():
            listed[group] = members
        for group in dumps[rank].entered:
            found[group].add(rank)
    return {group: listed.get(group) or tuple(sorted(found.get(group, ())))
            for group in sorted({*listed, *found})}


def sink_components(edges: Mapping[int, Mapping[int, Op]]) -> list[Sequence[int]]:
    """The strongly connected components without edges to other components, by Tarjan's algorithm
    without recursion: linear in nodes and edges."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    component: dict[int, int] = {}
    parts: list[list[int]] = []
    for start in sorted(edges):
        if start in index:
            continue
        index[start] = low[start] = len(index)
        stack.append(start)
        path = [(start, iter(sorted(edges[start])))]
        while path:
            node, rest = path[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    path.append((other, iter(sorted(edges.get(other, ())))))
                    break
                if other not in component:
                    low[node] = min(low[node], index[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    part, stack[at:] = stack[at:], []
                    component.update((one, len(parts)) for one in part)
                    parts.append(sorted(part))
    return [part for number, part in enumerate(parts)
            if all(component[other] == number for one in part for other in edges.get(one, ()))]
