"""Locates a hang: finds the ranks that all others wait for, in what each rank tells of its groups.

That is a dump of torch's flight recorder (`unicron locate`), or the rows of the progress page of a
rank that runs (group_evidence.py).

docs/guides/detection.md has the rules, and lists the signs of a stalled rank. If all ranks have
entered a collective that does not complete, no rank is named: it is the network or a device.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf
from typing import NamedTuple

from ...events.collectives import Dump, Group, Op
from ...events.words import clipped
from ...events.words import ranks as in_words

# --- The wait-for graph between ranks, built from their dumps ---
Key = tuple[Group, int, int, int]
_ALL_TAKE_PART = (
    "all_reduce",
    "allreduce",
    "all_gather",
    "allgather",
    "reduce_scatter",
    "all_to_all",
    "alltoall",
    "barrier",
)
"""Collectives that complete on no rank before all ranks have entered them."""


class WaitGraph:
    """All dumps of one job, and the waits between ranks that they show."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self._dumps = _with_known_ranks({rank: dumps[rank] for rank in sorted(dumps)})
        self._mixed = frozenset[Group]().union(*(dump.mixed for dump in self._dumps.values()))
        self._members = _members(self._dumps)
        self.ranks = tuple(
            sorted({*dumps, *(rank for group in self._members.values() for rank in group)})
        )
        self.missing = tuple(rank for rank in self.ranks if rank not in dumps)
        self._contradicted = self._find_contradicted()
        self._completed: dict[tuple[Key, str], list[int]] = {}
        self.pending: dict[int, list[Op]] = defaultdict(list)
        """The incomplete operations of each rank, oldest first."""
        self.stale: dict[int, tuple[Op, int, list[int]]] = {}
        """Rank -> the first collective that completed only on others, the number of such
        collectives, and these others. If it completed only on a minority, these members gave up,
        and nothing is reported."""
        for rank, dump in self._dumps.items():
            own = [
                op for op in dump.pending if op.is_p2p or op.seq > self.completed(rank, op.group)
            ]
            unseen = {op: by for op in own if (by := self._completed_by(op.key, op.name))}
            for op, by in list(unseen.items())[:1]:
                self.stale[rank] = op, len(unseen), by
            self.pending[rank] = [op for op in own if op not in unseen]
        self.started: dict[Key, list[int]] = defaultdict(list)
        """Operation -> the ranks on which its kernel has started."""
        for rank, dump in self._dumps.items():
            for op in dump.pending:
                if op.has_started:
                    self.started[op.key].append(rank)
        self.unstarted: dict[Key, set[int]] = defaultdict(set)
        """Operation that others have started -> the ranks on which it has not started."""
        self._blocked: dict[Key, set[int]] = defaultdict(set)
        """Operation -> the ranks that have entered it and are blocked by an earlier one."""
        for rank, dump in self._dumps.items():
            for op in self.pending[rank]:
                if dump.records_starts and not op.has_started and op.key in self.started:
                    self.unstarted[op.key].add(rank)
                if op.key != self.pending[rank][0].key:
                    self._blocked[op.key].add(rank)
        self._not_entered: dict[Key, list[int]] = {}
        self.edges = {rank: self._find_edges(rank) for rank in self.ranks}
        """The ranks that each rank waits for -> the first operation of each wait."""
        self.waiters: dict[int, list[int]] = defaultdict(list)
        """The ranks that wait for each rank."""
        for rank in self.ranks:
            for other in self.edges[rank]:
                self.waiters[other].append(rank)
        self.has_waits = bool(self.waiters)

    @property
    def longest_s(self) -> float:
        """Duration of the longest wait in seconds; infinite if the dumps have no time."""
        waiting = [dump for dump in self._dumps.values() if dump.pending]
        if not all(dump.dumped_ns for dump in waiting):
            return inf
        return max(
            ((dump.dumped_ns - dump.pending[0].at_ns) / 1e9 for dump in waiting), default=inf
        )

    # --- one rank in one group ---------------------------------------------------------------
    def entered(self, rank: int, group: Group) -> int:
        """The last collective of the group that the rank entered; 0: none known."""
        return self._last(rank, group, 0)

    def completed(self, rank: int, group: Group) -> int:
        """The last collective of the group that completed on this rank."""
        return self._last(rank, group, 1)

    def _last(self, rank: int, group: Group, which: int) -> int:
        dump = self._dumps.get(rank)
        if dump is None:
            return 0
        last = 0 if group in self._mixed else dump.status.get(group, (0, 0))[which]
        return max(last, (dump.entered, dump.completed)[which].get(group, 0))

    def behind(self, rank: int, group: Group) -> int:
        """How many collectives the rank is behind the foremost member of the group; 0: unknown."""
        dump = self._dumps.get(rank)
        if dump is None or (group in self._mixed and group not in dump.entered):
            return 0
        foremost = max(
            (self.entered(one, group) for one in self._members.get(group, ())), default=0
        )
        return max(foremost - self.entered(rank, group), 0)

    def participants(self, op: Op) -> tuple[int, ...]:
        return (op.source, op.target) if op.is_p2p else self._members.get(op.group, ())

    def has_entered(self, rank: int, op: Op) -> bool:
        return self.entered(rank, op.group) >= op.seq

    def is_idle(self, rank: int) -> bool:
        """Whether the dump of the rank shows earlier communication and no pending operation, and
        no rank waits for it."""
        dump = self._dumps.get(rank)
        return (
            dump is not None
            and not dump.pending
            and rank not in self._contradicted
            and bool(dump.entered or any(last for last, _ in dump.status.values()))
            and not self.waiters[rank]
        )

    # --- all together --------------------------------------------------------------------------
    def _find_contradicted(self) -> frozenset[int]:
        """Ranks that report the completion of a collective that others have not entered. Such a
        rank gave up, or was the source of a broadcast."""
        return frozenset(
            rank
            for group, members in self._members.items()
            if (dumped := [one for one in members if one in self._dumps])
            for least in [min(self.entered(one, group) for one in dumped)]
            for rank in dumped
            if self.completed(rank, group) > least
        )

    def _completed_by(self, key: Key, name: str) -> list[int]:
        """The ranks on which a collective completed; none if their reports are not reliable."""
        if (key, name) not in self._completed:
            group, seq, source, _ = key
            takes_all = source < 0 and any(word in name for word in _ALL_TAKE_PART)
            members = [one for one in self._members.get(group, ()) if one in self._dumps]
            by = [
                one
                for one in members
                if takes_all and self.completed(one, group) >= seq and one not in self._contradicted
            ]
            self._completed[key, name] = by if 2 * len(by) >= len(members) else []
        return self._completed[key, name]

    def calls(self) -> Iterable[dict[int, Op]]:
        """For each incomplete collective the call of each rank at that position in the group. Ranks
        on which it completed count too: if sizes differ, the smaller call may complete."""
        calls: dict[Key, dict[int, Op]] = defaultdict(dict)
        for rank in self._dumps:
            for op in self.pending[rank]:
                if not op.is_p2p:
                    calls[op.key].setdefault(rank, op)
        for rank, dump in self._dumps.items():
            for op in dump.ended:
                if op.key in calls:
                    calls[op.key].setdefault(rank, op)
        return calls.values()

    # --- the graph -----------------------------------------------------------------------------
    def _find_edges(self, rank: int) -> dict[int, Op]:
        found: dict[int, Op] = {}
        if rank in self.stale:
            return found
        for op in self.pending[rank]:
            late = self.unstarted[op.key] if op.has_started else ()
            found = {**dict.fromkeys([*self.not_entered(rank, op), *late], op), **found}
        for op in self.pending[rank][:1]:
            stale = [one for one in self.stale if one in self.participants(op)]
            found = {**dict.fromkeys([*self._blocked[op.key], *stale], op), **found}
        return found

    def not_entered(self, rank: int, op: Op) -> list[int]:
        """The ranks that have not entered `op`. Ranks without a dump are named only if all ranks
        with a dump have entered it."""
        if op.is_p2p:
            other = op.target if rank == op.source else op.source
            return [] if self._is_matched(rank, other, op) else [other]
        if op.key not in self._not_entered:
            others = [one for one in self.participants(op) if not self.has_entered(one, op)]
            self._not_entered[op.key] = [one for one in others if one in self._dumps] or others
        return self._not_entered[op.key]

    def _is_matched(self, rank: int, other: int, op: Op) -> bool:
        """Whether the other side has posted the counterpart. Sends match receives in order."""
        mine = [one.order for one in self._dumps[rank].pending if one.key == op.key]
        theirs = self._dumps[other].pending if other in self._dumps else ()
        return mine.index(op.order) < sum(one.key == op.key for one in theirs)

    def first_waiter(self, rank: int) -> tuple[int, Op]:
        """The rank that waits longest for `rank`, and its operation; collectives before sends."""
        waits = {one: self.edges[one][rank] for one in self.waiters[rank]}
        waiter = min(waits, key=lambda one: (waits[one].is_p2p, waits[one].at_ns, one))
        return waiter, waits[waiter]

    def only_in_all_circles(self, ranks: set[int]) -> int | None:
        """Of ranks that all say that they wait: the only one without which they would not wait in
        a circle. It has entered what its peers have not, or left out what they have entered."""
        if any(rank not in self._dumps or not self._dumps[rank].waits for rank in ranks):
            return None
        circle = self._circle(ranks)
        candidates = [rank for rank in circle if not self._circle(ranks - {rank})]
        return candidates[0] if len(candidates) == 1 else None

    def _circle(self, ranks: set[int]) -> list[int]:
        """Some of these ranks, each of which waits for the next, and the last for the first; []:
        there are none such."""
        num_waits = {rank: len(ranks.intersection(self.edges[rank])) for rank in sorted(ranks)}
        ended = [rank for rank, num in num_waits.items() if not num]
        while ended:
            last = ended.pop()
            del num_waits[last]
            for rank in self.waiters.get(last, ()):
                if rank in num_waits:
                    num_waits[rank] -= 1
                    if not num_waits[rank]:
                        ended.append(rank)
        if not num_waits:
            return []
        path = [min(num_waits)]
        while (after := min(num_waits.keys() & self.edges[path[-1]].keys())) not in path:
            path.append(after)
        return path[path.index(after) :]

    def working_in(self, circle: set[int]) -> int | None:
        """Of ranks that wait for each other: the only one that is in no call that waits, if the
        ranks tell it. An operation that it has started without a wait makes it part of the circle.
        """
        told = {rank: self._dumps[rank].waits for rank in sorted(circle) if rank in self._dumps}
        working = [rank for rank, waits in told.items() if waits is False]
        return working[0] if len(working) == 1 and any(told.values()) else None

    def sinks(self) -> list[set[int]]:
        """The strongly connected components without edges to other components: each rank that
        waits for no rank, and ranks that wait only for each other."""
        ends = [rank for rank in sorted({*self.edges, *self.waiters}) if not self.edges.get(rank)]
        found = [{rank} for rank in ends]
        left = set(self.edges) - _reachable(self.waiters, ends)
        while left:
            rank = min(left)
            while beyond := _reachable(self.edges, [rank]) - _reachable(self.waiters, [rank]):
                rank = min(beyond)
            found.append(_reachable(self.edges, [rank]))
            left -= _reachable(self.waiters, [rank])
        return found


def _reachable(graph: Mapping[int, Iterable[int]], starts: Iterable[int]) -> set[int]:
    found, todo = set(starts), list(starts)
    while todo:
        new = set(graph.get(todo.pop(), ())) - found
        found |= new
        todo += new
    return found


def _with_known_ranks(dumps: Mapping[int, Dump]) -> dict[int, Dump]:
    """The dumps; a group whose ranks one of them does not know is the group of its name that the
    other dumps list with this rank, if that is one alone."""
    unknown = {
        rank: [group for group in (*dump.entered, *dump.status) if not group.ranks]
        for rank, dump in dumps.items()
    }
    listed: dict[tuple[str, int], list[Group]] = defaultdict(list)
    if any(unknown.values()):
        for group in dict.fromkeys(group for dump in dumps.values() for group in dump.members):
            for rank in map(int, group.ranks.split()):
                listed[group.name, rank].append(group)
    return {
        rank: dump.with_ranks(
            {
                group: named[0]
                for group in unknown[rank]
                if len(named := listed[group.name, rank]) == 1
            }
        )
        for rank, dump in dumps.items()
    }


def _members(dumps: Mapping[int, Dump]) -> dict[Group, tuple[int, ...]]:
    """Group -> its ranks; if no dump lists them, the ranks that entered its collectives."""
    found: dict[Group, set[int]] = defaultdict(set)
    listed: dict[Group, tuple[int, ...]] = {}
    for rank in sorted(dumps):
        for group, members in dumps[rank].members.items():
            listed[group] = members
        for group in dumps[rank].entered:
            found[group].add(rank)
    return {
        group: listed.get(group) or tuple(sorted(found.get(group, ())))
        for group in sorted({*listed, *found})
    }


NOT_ENTERED = "not entered"
"""State of a suspect that has not entered what its peers wait for."""
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
    waited_since_ns: int = 0
    """When the first of them entered it, by its own clock (nanoseconds since 1970); 0: unknown."""


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
    """Find the ranks that others wait for; of equal waits the lowest. Linear in entries and waits,
    but for waits in a circle."""
    waits = WaitGraph({dump.rank: dump for dump in dumps})
    ranks = waits.ranks
    if waits.longest_s < WAIT_S_MIN:
        return HangLocation("none", (), (), (), waits.missing, len(ranks))
    found = _mismatched(waits)
    for rank in waits.stale:
        found.setdefault(rank, _stale(waits, rank))
    stuck: dict[Key, StuckCollective] = {}
    for sink in waits.sinks():
        if len(sink) > 1:
            _judge_cycle(waits, sink, found)
        else:
            _judge(waits, min(sink), found, stuck)
    _judge_missing(waits, found)
    if found or waits.has_waits:
        for rank in ranks:
            if rank not in found and waits.is_idle(rank):
                found[rank] = Suspect(
                    rank, "waits for nothing, while the others wait", "idle", "medium"
                )
    blind = bool(waits.has_waits and waits.missing)
    verdict = "hang" if found or blind else "network" if stuck else "none"
    return HangLocation(
        verdict,
        tuple(found[rank] for rank in sorted(found)),
        tuple(_waiting(waits, rank) for rank in ranks if rank not in found and waits.pending[rank])
        if verdict != "none"
        else (),
        tuple(stuck[key] for key in sorted(stuck)) if not found else (),
        waits.missing,
        len(ranks),
    )


def _judge(
    waits: WaitGraph, rank: int, found: dict[int, Suspect], stuck: dict[Key, StuckCollective]
) -> None:
    """Judge a rank that waits for no other rank."""
    if rank in found or rank in waits.missing:
        return
    pending = waits.pending[rank]
    is_late = any(rank in waits.unstarted[op.key] for op in pending)
    if pending and not is_late and not _is_passed(waits, rank):
        op = pending[0]
        stuck[op.key] = StuckCollective(op.group.name, op.name, op.seq, waits.participants(op))
    elif waits.waiters[rank]:
        found[rank] = _behind(waits, rank)


def _is_passed(waits: WaitGraph, rank: int) -> bool:
    """Whether a peer also entered this operation, and waits for this rank in a later operation."""
    key = waits.pending[rank][0].key
    return any(
        op.key == key
        for one in waits.waiters[rank]
        for op in waits.pending[one]
        if op.order < waits.edges[one][rank].order
    )


def _judge_cycle(waits: WaitGraph, sink: set[int], found: dict[int, Suspect]) -> None:
    """Judge ranks that wait for each other: they enter collectives in different orders, or several
    ranks have a fault. Name the targets of the oldest wait, with low confidence."""
    if not sink.isdisjoint(found):
        return
    if (rank := waits.working_in(sink)) is not None:
        found[rank] = _behind(waits, rank)
        return
    if (rank := waits.only_in_all_circles(sink)) is not None:
        _, op = waits.first_waiter(rank)
        why = f"waits in a circle with {in_words(sink)}, all of whom wait for it"
        peers = sorted(sink - {rank})
        found[rank] = _suspect(
            waits, rank, op, "mismatched", "high", f"{why}: {_did_not(waits, rank, op)}", peers
        )
        return
    _, waiter, target = min(
        (op.at_ns, rank, other) for rank in sink for other, op in waits.edges[rank].items()
    )
    op = waits.edges[waiter][target]
    for rank in sorted(sink.intersection(waits.not_entered(waiter, op) or [target])):
        why = (
            f"waits in a circle with {in_words(sink)}: {_did_not(waits, rank, op)}; "
            f"the ranks may enter their collectives in different orders"
        )
        found[rank] = _behind(waits, rank)._replace(why=why, confidence="low")


def _judge_missing(waits: WaitGraph, found: dict[int, Suspect]) -> None:
    """Name the ranks without a dump that others wait for, unless most ranks left no dump."""
    if 2 * len(waits.missing) > len(waits.ranks):
        return
    for rank in (one for one in waits.missing if waits.waiters[one]):
        waiter, op = waits.first_waiter(rank)
        why = f"left no dump, and rank {waiter} waits for it in {_op_in_words(op, waits)}"
        found[rank] = _suspect(waits, rank, op, "no dump", "medium", why)


def _suspect(
    waits: WaitGraph,
    rank: int,
    op: Op,
    state: str,
    confidence: str,
    why: str,
    waited_by: Iterable[int] | None = None,
) -> Suspect:
    return Suspect(
        rank,
        why,
        state,
        confidence,
        op.group.name,
        op.name,
        op.seq,
        waits.behind(rank, op.group),
        tuple(waits.waiters[rank] if waited_by is None else waited_by),
        op.at_ns,
    )


def _behind(waits: WaitGraph, rank: int) -> Suspect:
    """A suspect that has not entered an operation of its peers, or whose kernel has not started."""
    waiter, op = waits.first_waiter(rank)
    by = [one for one in waits.waiters[rank] if op.key in {o.key for o in waits.pending[one]}]
    if rank not in waits.unstarted[op.key]:
        return _suspect(
            waits, rank, op, NOT_ENTERED, "high", _did_not(waits, rank, op), by or [waiter]
        )
    why = (
        f"entered {_op_in_words(op, waits)}, but its kernel has not started; those of "
        f"{in_words(waits.started[op.key])} have"
    )
    return _suspect(waits, rank, op, "not started", "high", why, by or [waiter])


def _did_not(waits: WaitGraph, rank: int, op: Op) -> str:
    if op.is_p2p:
        return (
            f"has not entered its side of {_op_in_words(op, waits)}, in which rank "
            f"{op.target if rank == op.source else op.source} waits"
        )
    entered = [one for one in waits.participants(op) if waits.has_entered(one, op)]
    behind = waits.behind(rank, op.group)
    return (
        f"did not enter {_op_in_words(op, waits)}, which {in_words(entered)} entered; it is "
        f"{behind} behind there, its last is {waits.entered(rank, op.group)}"
    )


def _stale(waits: WaitGraph, rank: int) -> Suspect:
    op, num, peers = waits.stale[rank]
    why = (
        f"does not see the end of {_op_in_words(op, waits)}, "
        + (f"nor of {num - 1} after it, " if num > 1 else "")
        + f"which {in_words(peers)} finished with it: its device no longer answers"
    )
    if behind := waits.behind(rank, op.group):
        why += f"; it is {behind} behind there"
    return _suspect(waits, rank, op, "not completed", "high" if num > 1 else "medium", why)


def _mismatched(waits: WaitGraph) -> dict[int, Suspect]:
    """The ranks whose call differs from that of others at the same position in the group. If no
    call is more frequent than all other calls, all the ranks are named."""
    found: dict[int, Suspect] = {}
    for ops in waits.calls():
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
                op, theirs = ops[rank], ops[peers[0]]
                mine, other = (
                    f"{one.name} of {clipped(one.tensors, TENSORS_CHARS_MAX)}"
                    if op.name == theirs.name
                    else one.name
                    for one in (op, theirs)
                )
                why = (
                    f"called {mine} as number {op.seq} of {op.group}, where "
                    f"{in_words(peers)} called {other}"
                )
                found.setdefault(
                    rank,
                    _suspect(
                        waits, rank, op, "mismatched", "high" if has_majority else "low", why, peers
                    ),
                )
    return found


def _waiting(waits: WaitGraph, rank: int) -> WaitingRank:
    edges = waits.edges[rank]
    first = min(edges.values(), key=lambda op: op.order, default=waits.pending[rank][0])
    for_whom = tuple(sorted(other for other, op in edges.items() if op.key == first.key))
    return WaitingRank(rank, for_whom, first.group.name, first.name, first.seq)


def _op_in_words(op: Op, waits: WaitGraph) -> str:
    if op.is_p2p:
        return f"{op.name} {op.source}->{op.target} of {op.group}"
    return f"{op.name} {op.seq} of {op.group} ({in_words(waits.participants(op))})"
