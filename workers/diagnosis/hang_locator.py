"""Locates a hang: finds the ranks that all others wait for in the flight-recorder dumps.

docs/guides/detection.md has the rules, and lists the signs of a stalled rank. If all ranks have
entered a collective that does not complete, no rank is named: it is the network or a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from .flight_recorder import Dump, Op

# --- The wait-for graph between ranks, built from their dumps ---
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


WAIT_S_MIN = 1.0
"""If the longest wait is shorter, there is no hang. Dumps without a time are not checked."""
TENSORS_CHARS_MAX = 80


class Suspect(NamedTuple):
    """A rank that stalled by itself, and the wait of other ranks that shows this best."""

    rank: int
    why: str
    state: str
    """One of: not entered, not started, not completed, mismatched, no dump, idle."""
    confidence: str
    """One of: high, medium, low."""
    group: str = ""
    collective: str = ""
    seq: int = -1
    behind: int = 0
    """How many collectives the rank is behind the foremost member of the group."""
    waited_by: tuple[int, ...] = ()
    """The ranks that wait for this rank in the collective."""


class WaitingRank(NamedTuple):
    """A rank that only waits for others."""

    rank: int
    ranks: tuple[int, ...]
    """The ranks that it waits for; (): all have entered, and none is known to be blocked."""
    group: str
    collective: str
    seq: int


class StuckCollective(NamedTuple):
    """A collective that hangs although all its ranks have entered and none is blocked elsewhere."""

    group: str
    collective: str
    seq: int
    ranks: tuple[int, ...]


class HangLocation(NamedTuple):
    """The result. `verdict` is hang, network or none."""

    verdict: str
    suspects: tuple[Suspect, ...]
    waiting: tuple[WaitingRank, ...]
    stuck: tuple[StuckCollective, ...]
    missing: tuple[int, ...]
    """Ranks that left no dump."""
    num_ranks: int


def locate(dumps: Iterable[Dump]) -> HangLocation:
    """Find the ranks that others wait for; of equal waits the lowest. Linear in entries, waits."""
    waits = WaitGraph({dump.rank: dump for dump in dumps})
    ranks = waits.ranks
    if waits.longest_s is not None and waits.longest_s < WAIT_S_MIN:
        return HangLocation("none", (), (), (), waits.missing, len(ranks))
    found: dict[int, Suspect] = {}
    for rank in waits.mismatched:
        found[rank] = _mismatched(waits, rank)
    for rank in waits.stale:
        found.setdefault(rank, _stale(waits, rank))
    stuck: dict[tuple[str, int, int, int], StuckCollective] = {}
    for sink in sink_components({rank: waits.edges(rank) for rank in ranks}):
        _judge(waits, sink, found, stuck)
    _judge_missing(waits, found)
    if found or waits.has_waits:
        for rank in ranks:
            if rank not in found and waits.is_idle(rank) and not waits.waiters(rank):
                found[rank] = Suspect(
                    rank, "waits for nothing, while the others wait", "idle", "medium")
    blind = bool(waits.has_waits and waits.missing)
    verdict = "hang" if found or blind else "network" if stuck else "none"
    return HangLocation(
        verdict, tuple(found[rank] for rank in sorted(found)),
        tuple(_waiting(waits, rank) for rank in ranks if rank not in found
              and waits.pending(rank)) if verdict != "none" else (),
        tuple(stuck[key] for key in sorted(stuck)) if not found else (),
        waits.missing, len(ranks))


def _judge(waits: WaitGraph, sink: Sequence[int], found: dict[int, Suspect],
           stuck: dict[tuple[str, int, int, int], StuckCollective]) -> None:
    """Judge a sink component of the wait graph: one rank, or several that wait for each other."""
    if len(sink) > 1:
        _judge_cycle(waits, sink, found)
        return
    (rank,) = sink
    if rank in found or rank in waits.missing:
        return
    pending = waits.pending(rank)
    if pending and not waits.unstarted(rank) and not _is_passed(waits, rank):
        op = pending[0]
        stuck[op.key] = StuckCollective(op.group, op.name, op.seq, waits.participants(op))
    elif waits.waiters(rank):
        found[rank] = _behind(waits, rank)


def _is_passed(waits: WaitGraph, rank: int) -> bool:
    """Whether a peer also entered this operation, and waits for this rank in a later operation."""
    key = waits.pending(rank)[0].key
    return any(op.key == key for one in waits.waiters(rank) for op in waits.pending(one)
               if op.order < waits.edges(one)[rank].order)


def _judge_cycle(waits: WaitGraph, sink: Sequence[int], found: dict[int, Suspect]) -> None:
    """Judge ranks that wait for each other: they enter collectives in different orders, or several
    ranks have a fault. Name the targets of the oldest wait, with low confidence."""
    if any(rank in found for rank in sink):
        return
    inside = frozenset(sink)
    oldest = min(((op.at_ns, rank, other) for rank in sink for other, op in
                  waits.edges(rank).items() if other in inside), default=None)
    if oldest is None:
        return
    op = waits.edges(oldest[1])[oldest[2]]
    for rank in sorted(inside.intersection(waits.not_entered(oldest[1], op) or (oldest[2],))):
        why = (f"waits in a circle with ranks {rank_ranges(sink)}: {_did_not(waits, rank, op)}; "
               f"the ranks may enter their collectives in different orders")
        found[rank] = _behind(waits, rank)._replace(why=why, confidence="low")


def _judge_missing(waits: WaitGraph, found: dict[int, Suspect]) -> None:
    """Name the ranks without a dump that others wait for, unless most ranks left no dump."""
    if 2 * len(waits.missing) > len(waits.ranks):
        return
    for rank in (one for one in waits.missing if waits.waiters(one)):
        waiter, op = waits.first_waiter(rank)
        found[rank] = Suspect(
            rank, f"left no dump, and rank {waiter} waits for it in {_op_in_words(op, waits)}",
            "no dump", "medium", op.group, op.name, op.seq, 0, waits.waiters(rank))


def _behind(waits: WaitGraph, rank: int) -> Suspect:
    """A suspect that has not entered an operation of its peers, or whose kernel has not started."""
    waiter, op = waits.first_waiter(rank)
    late = op.key in waits.unstarted(rank)
    if late:
        why = (f"entered {_op_in_words(op, waits)}, but its kernel has not started; those of "
               f"{rank_ranges(waits.started(op))} have")
    else:
        why = _did_not(waits, rank, op)
    mine = [one for one in waits.waiters(rank) if op.key in {o.key for o in waits.pending(one)}]
    return Suspect(rank, why, "not started" if late else "not entered", "high", op.group, op.name,
                   op.seq, waits.behind(rank, op.group), tuple(mine) or (waiter,))


def _did_not(waits: WaitGraph, rank: int, op: Op) -> str:
    if op.is_p2p:
        return (f"has not entered its side of {_op_in_words(op, waits)}, in which rank "
                f"{op.target if rank == op.source else op.source} waits")
    entered = [one for one in waits.participants(op) if waits.has_entered(one, op)]
    behind = waits.behind(rank, op.group)
    return (f"did not enter {_op_in_words(op, waits)}, which {rank_ranges(entered)} entered; it is "
            f"{behind} behind there, its last is {waits.entered(rank, op.group)}")


def _stale(waits: WaitGraph, rank: int) -> Suspect:
    op, num, peers = waits.stale[rank]
    why = (f"does not see the end of {_op_in_words(op, waits)}, "
           + (f"nor of {num - 1} after it, " if num > 1 else "")
           + f"which {rank_ranges(peers)} finished with it: its device no longer answers")
    behind = waits.behind(rank, op.group)
    if behind:
        why += f"; it is {behind} behind there"
    return Suspect(rank, why, "not completed", "high" if num > 1 else "medium", op.group, op.name,
                   op.seq, behind, waits.waiters(rank))


def _mismatched(waits: WaitGraph, rank: int) -> Suspect:
    op, theirs, peers, has_majority = waits.mismatched[rank]
    mine, other = op.name, theirs.name
    if mine == other:
        mine, other = (f"{one.name} of {_clipped(one.tensors)}" for one in (op, theirs))
    return Suspect(
        rank, f"called {mine} as number {op.seq} of {op.group}, where {rank_ranges(peers)} called "
        f"{other}", "mismatched", "high" if has_majority else "low", op.group, op.name, op.seq,
        waits.behind(rank, op.group), tuple(peers))


def _clipped(text: str) -> str:
    return text if len(text) <= TENSORS_CHARS_MAX else text[:TENSORS_CHARS_MAX] + " ..."


def _waiting(waits: WaitGraph, rank: int) -> WaitingRank:
    edges = waits.edges(rank)
    if not edges:
        op = waits.pending(rank)[0]
        return WaitingRank(rank, (), op.group, op.name, op.seq)
    first = min(edges.values(), key=lambda op: op.order)
    for_whom = tuple(sorted(other for other, op in edges.items() if op.key == first.key))
    return WaitingRank(rank, for_whom, first.group, first.name, first.seq)


def _op_in_words(op: Op, waits: WaitGraph) -> str:
    if op.is_p2p:
        return f"{op.name} {op.source}->{op.target} of {op.group}"
    ranks = rank_ranges(waits.participants(op), bare=True)
    return f"{op.name} {op.seq} of {op.group} (ranks {ranks})"


def rank_ranges(ranks: Sequence[int], *, bare: bool = False) -> str:
    """Write ranks 1, 2, 3, 5 as `ranks 1-3, 5`, or as `1-3, 5` if `bare`; cut after six runs."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    text = ", ".join(words[:6]) + (f" and {len(words) - 6} runs more" if len(words) > 6 else "")
    if bare:
        return text
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
