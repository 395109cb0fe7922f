"""Locates a hang: finds the ranks that all others wait for in the flight-recorder dumps.

docs/guides/detection.md has the rules, and lists the signs of a stalled rank. If all ranks have
entered a collective that does not complete, no rank is named: it is the network or a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .flight_recorder import Dump, Op
from .wait_graph import WaitGraph, sink_components

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
