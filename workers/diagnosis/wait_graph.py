"""Who waits for whom: the graph of the waits among ranks, read off their flight-recorder dumps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from .flight_recorder import Dump, Op

Key = tuple[str, int, int, int]
_ALL_TAKE_PART = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter",
                  "all_to_all", "alltoall", "barrier")
"""Collectives out of which nobody comes before all have entered."""


class Waits:
    """All dumps of one job, and what follows of them together."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self._dumps = dumps
        self._mixed = frozenset[str]().union(*(dump.mixed for dump in dumps.values()))
        self._members = _members(dumps)
        self.ranks = tuple(sorted({*dumps, *(
            rank for group in self._members.values() for rank in group)}))
        self.missing = tuple(rank for rank in self.ranks if rank not in dumps)
        self._edges: dict[int, dict[int, Op]] = {}
        self._absent: dict[Key, tuple[int, ...]] = {}
        self._started: dict[Key, list[int]] = defaultdict(list)
        for rank in sorted(dumps):
            for op in dumps[rank].pending:
                if op.has_started:
                    self._started[op.key].append(rank)

    @property
    def longest_s(self) -> float | None:
        """How long the longest wait has lasted (seconds); None where dumps do not tell."""
        waits = [(dump.dumped_ns, op.at_ns) for dump in self._dumps.values()
                 for op in dump.pending[:1]]
        if not waits or not all(dumped_ns for dumped_ns, _ in waits):
            return None
        return max(dumped_ns - at_ns for dumped_ns, at_ns in waits) / 1e9

    # --- one rank in one group ---------------------------------------------------------------
    def entered(self, rank: int, group: str) -> int:
        """The last collective of the group that the rank entered; 0: none that is known."""
        return self._last(rank, group, 0)

    def completed(self, rank: int, group: str) -> int:
        """The last one that it saw the end of."""
        return self._last(rank, group, 1)

    def _last(self, rank: int, group: str, which: int) -> int:
        dump = self._dumps.get(rank)
        if dump is None:
            return 0
        told = 0 if group in self._mixed else dump.status.get(group, (0, 0))[which]
        return max(told, (dump.entered, dump.completed)[which].get(group, 0))

    def behind(self, rank: int, group: str) -> int:
        """By how many collectives of the group its foremost member is ahead of the rank; 0 where
        the rank's dump does not say."""
        dump = self._dumps.get(rank)
        if dump is None or (group in self._mixed and group not in dump.entered):
            return 0
        foremost = max((self.entered(one, group) for one in self._members.get(group, ())),
                       default=0)
        return max(foremost - self.entered(rank, group), 0)

    def parts(self, op: Op) -> tuple[int, ...]:
        """Who takes part in it."""
        return (op.source, op.target) if op.is_p2p else self._members.get(op.group, ())

    def has_entered(self, rank: int, op: Op) -> bool:
        """Whether the rank entered this collective."""
        return self.entered(rank, op.group) >= op.seq

    def pending(self, rank: int) -> tuple[Op, ...]:
        """What the rank entered and has not come out of, oldest first."""
        return self._pending[rank] if rank in self._dumps else ()

    def is_idle(self, rank: int) -> bool:
        """Whether it waits in nothing, by a dump that shows that it has communicated before."""
        dump = self._dumps.get(rank)
        return (dump is not None and not dump.pending and rank not in self._contradicted
                and bool(dump.entered or any(last for last, _ in dump.status.values())))

    # --- all together --------------------------------------------------------------------------
    @cached_property
    def _contradicted(self) -> frozenset[int]:
        """Ranks that claim the end of what others have not entered: they had given up, or were
        the source of a broadcast."""
        return frozenset(
            rank for group, members in self._members.items()
            if (dumped := [one for one in members if one in self._dumps])
            for least in [min(self.entered(one, group) for one in dumped)]
            for rank in dumped if self.completed(rank, group) > least)

    @cached_property
    def stale(self) -> dict[int, tuple[Op, int, tuple[int, ...]]]:
        """Rank -> the first collective whose end it does not see, how many, and who saw it.

        In a collective in which all take part, the end at one member shows that all were in it.
        Where more members do not see it than do, it is these that gave up.
        """
        found: dict[int, tuple[Op, int, tuple[int, ...]]] = {}
        for rank in sorted(self._dumps):
            unseen = [(op, saw) for op in self._own_pending(rank) if (saw := self._saw_end(op))]
            if unseen:
                op, saw = unseen[0]
                found[rank] = op, len(unseen), saw
        return found

    def _saw_end(self, op: Op) -> tuple[int, ...]:
        """Who saw the end of it, where that can be trusted."""
        if op.is_p2p or not any(word in op.name for word in _ALL_TAKE_PART):
            return ()
        members = [one for one in self.parts(op) if one in self._dumps]
        saw = [one for one in members if self.completed(one, op.group) >= op.seq
               and one not in self._contradicted]
        return tuple(saw) if 2 * len(saw) >= len(members) else ()

    def _own_pending(self, rank: int) -> list[Op]:
        return [op for op in self._dumps[rank].pending
                if op.is_p2p or op.seq > self.completed(rank, op.group)]

    @cached_property
    def _pending(self) -> dict[int, tuple[Op, ...]]:
        return {rank: tuple(op for op in self._own_pending(rank)
                            if rank not in self.stale or not self._saw_end(op))
                for rank in self._dumps}

    @cached_property
    def mismatched(self) -> dict[int, tuple[Op, Op, tuple[int, ...], bool]]:
        """Rank -> what it called, what others of its group called instead, who these are, and
        whether they are the most.

        Where as many called one as the other, all of them are named.
        """
        found: dict[int, tuple[Op, Op, tuple[int, ...], bool]] = {}
        for ops in self._called.values():
            by_call: dict[tuple[str, str], list[int]] = defaultdict(list)
            untold = {op.name for op in ops.values() if not op.tensors}
            for rank, op in ops.items():
                by_call[op.name, "" if op.name in untold else op.tensors].append(rank)
            if len(by_call) == 1:
                continue
            most, second, *_ = sorted(by_call.values(), key=len, reverse=True)
            is_sure = len(second) < len(most)
            for ranks in by_call.values():
                peers = second if ranks is most else most
                for rank in ranks if ranks is not most or not is_sure else ():
                    found.setdefault(rank, (ops[rank], ops[peers[0]], tuple(peers), is_sure))
        return found

    @cached_property
    def _called(self) -> dict[Key, dict[int, Op]]:
        """Each collective that is open at some rank -> what each rank called as that, also one
        that came out of it: the smaller of two sizes may end."""
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
        """For whom the rank waits -> the first of what it waits in; {}: it waits for nobody."""
        if rank not in self._edges:
            self._edges[rank] = self._seek(rank)
        return self._edges[rank]

    def _seek(self, rank: int) -> dict[int, Op]:
        found: dict[int, Op] = {}
        if rank in self.stale:
            return found
        for op in self.pending(rank):
            for other in (*self.absent(rank, op), *self._not_started(rank, op)):
                found.setdefault(other, op)
        for op in self.pending(rank)[:1]:
            for other in self.parts(op):
                if other != rank and self._is_held(other, op):
                    found.setdefault(other, op)
        return found

    def absent(self, rank: int, op: Op) -> tuple[int, ...]:
        """Who has not entered this op of the rank. One without a dump only where nobody else."""
        if op.is_p2p:
            other = op.target if rank == op.source else op.source
            return () if self._is_met(rank, other, op) else (other,)
        if op.key not in self._absent:
            others = [one for one in self.parts(op) if not self.has_entered(one, op)]
            dumped = tuple(one for one in others if one in self._dumps)
            self._absent[op.key] = dumped or tuple(others)
        return self._absent[op.key]

    def _is_met(self, rank: int, other: int, op: Op) -> bool:
        """Whether the other side has the counterpart: the first with the first, and so on."""
        mine = [one.order for one in self._dumps[rank].pending if one.key == op.key]
        theirs = self._dumps[other].pending if other in self._dumps else ()
        return mine.index(op.order) < sum(one.key == op.key for one in theirs)

    def _not_started(self, rank: int, op: Op) -> tuple[int, ...]:
        """Who has entered it too, but whose kernel does not run, while ours does."""
        return tuple(other for other in self.parts(op) if op.key in self.late(other)
                     ) if op.has_started else ()

    def late(self, rank: int) -> frozenset[Key]:
        """What has started at others, and not here, where this rank's recorder would know."""
        if rank not in self._dumps or not self._dumps[rank].tells_starts:
            return frozenset()
        return frozenset(op.key for op in self.pending(rank)
                         if not op.has_started and self._started.get(op.key))

    def started(self, op: Op) -> tuple[int, ...]:
        """At whom its kernel runs."""
        return tuple(self._started.get(op.key, ()))

    def _is_held(self, other: int, op: Op) -> bool:
        """Whether one that has entered `op` is held before it by something else."""
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
        """Who waits for the rank itself."""
        return tuple(self._waiters.get(rank, ()))

    def first_waiter(self, rank: int) -> tuple[int, Op]:
        """Who has waited longest for it, and in what: a collective shows more than a send."""
        waits = {one: self.edges(one)[rank] for one in self._waiters[rank]}
        waiter = min(waits, key=lambda one: (waits[one].is_p2p, waits[one].at_ns, one))
        return waiter, waits[waiter]


def _members(dumps: Mapping[int, Dump]) -> dict[str, tuple[int, ...]]:
    """Group -> its ranks; where no dump says, those that have entered something there."""
    found: dict[str, set[int]] = defaultdict(set)
    told: dict[str, tuple[int, ...]] = {}
    for rank in sorted(dumps):
        for group, members in dumps[rank].members.items():
            told[group] = members
        for group in dumps[rank].entered:
            found[group].add(rank)
    return {group: told.get(group) or tuple(sorted(found.get(group, ())))
            for group in sorted({*told, *found})}


def ends_of(edges: Mapping[int, Mapping[int, Op]]) -> list[Sequence[int]]:
    """The ends of a graph: sets of nodes that reach each other, and nothing else.

    Tarjan's, without recursion: linear in nodes and edges.
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    home: dict[int, int] = {}
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
                if other not in home:
                    low[node] = min(low[node], index[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    part, stack[at:] = stack[at:], []
                    home.update((one, len(parts)) for one in part)
                    parts.append(sorted(part))
    return [part for number, part in enumerate(parts)
            if all(home[other] == number for one in part for other in edges.get(one, ()))]
