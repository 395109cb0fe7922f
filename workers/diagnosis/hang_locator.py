"""Where a hang is: from all ranks' flight-recorder dumps to those on whom everybody waits.

A rank waits for another where it has entered a collective that the other has not, and has not come
out of it; or where its send or receive has no counterpart. In a program whose ranks all enter
collectives in one order of the whole, such waits never form a circle: at their ends are the ranks
that wait for nobody. Those are named, and what else shows a rank that stands still by itself:

- its kernel has not started where those of its peers have;
- it does not see the end of what its peers have finished with it: its device no longer answers;
- it left no dump, and others wait for it;
- it called another collective than its peers, or with another size or data type;
- it waits for nothing while all others wait.

Where all have entered what does not end, no rank is named: that is the network's, or a device's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .flight_recorder import Dump, Op
from .wait_graph import Waits, ends_of

WAIT_S_MIN = 1.0
"""A wait shorter than this is no hang, where the dumps say when they were written."""
TENSORS_CHARS_MAX = 80


class Suspect(NamedTuple):
    """A rank that stands still by itself, with the wait that shows it best."""

    rank: int
    why: str
    state: str
    """not entered, not started, not completed, mismatched, no dump, idle."""
    confidence: str
    """high, medium, low."""
    group: str = ""
    collective: str = ""
    seq: int = -1
    behind: int = 0
    """How many collectives of the group it is behind the foremost."""
    waited_by: tuple[int, ...] = ()
    """Who waits for it in that collective."""


class Waiting(NamedTuple):
    """A rank that only waits, and in what."""

    rank: int
    ranks: tuple[int, ...]
    """For whom; none: all have entered, and one of them is held elsewhere."""
    group: str
    collective: str
    seq: int


class Stuck(NamedTuple):
    """A collective that all have entered, that nobody holds elsewhere, and that does not end."""

    group: str
    collective: str
    seq: int
    ranks: tuple[int, ...]


class Located(NamedTuple):
    """What the dumps say. `verdict` is hang, network or none."""

    verdict: str
    suspects: tuple[Suspect, ...]
    waiting: tuple[Waiting, ...]
    stuck: tuple[Stuck, ...]
    missing: tuple[int, ...]
    """Ranks that left no dump."""
    num_ranks: int


def locate(dumps: Iterable[Dump]) -> Located:
    """Name the ranks that the others wait for; of equal explanations the smallest.

    Linear in the entries and in the waits between ranks.
    """
    waits = Waits({dump.rank: dump for dump in dumps})
    ranks = waits.ranks
    if waits.longest_s is not None and waits.longest_s < WAIT_S_MIN:
        return Located("none", (), (), (), waits.missing, len(ranks))
    found: dict[int, Suspect] = {}
    for rank in waits.mismatched:
        found[rank] = _mismatched(waits, rank)
    for rank in waits.stale:
        found.setdefault(rank, _stale(waits, rank))
    stuck: dict[tuple[str, int, int, int], Stuck] = {}
    for end in ends_of({rank: waits.edges(rank) for rank in ranks}):
        _judge(waits, end, found, stuck)
    _judge_missing(waits, found)
    if found or waits.has_waits:
        for rank in ranks:
            if rank not in found and waits.is_idle(rank) and not waits.waiters(rank):
                found[rank] = Suspect(
                    rank, "waits for nothing, while the others wait", "idle", "medium")
    blind = bool(waits.has_waits and waits.missing)
    verdict = "hang" if found or blind else "network" if stuck else "none"
    return Located(
        verdict, tuple(found[rank] for rank in sorted(found)),
        tuple(_waiting(waits, rank) for rank in ranks if rank not in found
              and waits.pending(rank)) if verdict != "none" else (),
        tuple(stuck[key] for key in sorted(stuck)) if not found else (),
        waits.missing, len(ranks))


def _judge(waits: Waits, end: Sequence[int], found: dict[int, Suspect],
           stuck: dict[tuple[str, int, int, int], Stuck]) -> None:
    """What stands at an end of the waits: a rank, or several that wait for each other."""
    if len(end) > 1:
        _judge_circle(waits, end, found)
        return
    (rank,) = end
    if rank in found or rank in waits.missing:
        return
    pending = waits.pending(rank)
    if pending and not waits.late(rank) and not _is_passed(waits, rank):
        op = pending[0]
        stuck[op.key] = Stuck(op.group, op.name, op.seq, waits.parts(op))
    elif waits.waiters(rank):
        found[rank] = _absent(waits, rank)


def _is_passed(waits: Waits, rank: int) -> bool:
    """Whether a peer went on past what this rank is in, and waits for it in something later."""
    key = waits.pending(rank)[0].key
    return any(op.key == key for one in waits.waiters(rank) for op in waits.pending(one)
               if op.order < waits.edges(one)[rank].order)


def _judge_circle(waits: Waits, end: Sequence[int], found: dict[int, Suspect]) -> None:
    """Ranks that wait for each other: collectives in another order, or several faults at once.

    Whoever the oldest of the waits is for is named, and nobody is sure.
    """
    if any(rank in found for rank in end):
        return
    inside = frozenset(end)
    oldest = min(((op.at_ns, rank, other) for rank in end for other, op in
                  waits.edges(rank).items() if other in inside), default=None)
    if oldest is None:
        return
    op = waits.edges(oldest[1])[oldest[2]]
    for rank in sorted(inside.intersection(waits.absent(oldest[1], op) or (oldest[2],))):
        why = (f"waits in a circle with ranks {listed(end)}: {_did_not(waits, rank, op)}; "
               f"the ranks may enter their collectives in different orders")
        found[rank] = _absent(waits, rank)._replace(why=why, confidence="low")


def _judge_missing(waits: Waits, found: dict[int, Suspect]) -> None:
    """Ranks without a dump: named where others wait for them, unless most left none."""
    if 2 * len(waits.missing) > len(waits.ranks):
        return
    for rank in (one for one in waits.missing if waits.waiters(one)):
        waiter, op = waits.first_waiter(rank)
        found[rank] = Suspect(
            rank, f"left no dump, and rank {waiter} waits for it in {_words(op, waits)}",
            "no dump", "medium", op.group, op.name, op.seq, 0, waits.waiters(rank))


def _absent(waits: Waits, rank: int) -> Suspect:
    """Others have entered, and this rank has not, or its kernel has not started."""
    waiter, op = waits.first_waiter(rank)
    late = op.key in waits.late(rank)
    if late:
        why = (f"entered {_words(op, waits)}, but its kernel has not started; those of "
               f"{listed(waits.started(op))} have")
    else:
        why = _did_not(waits, rank, op)
    mine = [one for one in waits.waiters(rank) if op.key in {o.key for o in waits.pending(one)}]
    return Suspect(rank, why, "not started" if late else "not entered", "high", op.group, op.name,
                   op.seq, waits.behind(rank, op.group), tuple(mine) or (waiter,))


def _did_not(waits: Waits, rank: int, op: Op) -> str:
    if op.is_p2p:
        return (f"has not entered its side of {_words(op, waits)}, in which rank "
                f"{op.target if rank == op.source else op.source} waits")
    entered = [one for one in waits.parts(op) if waits.has_entered(one, op)]
    behind = waits.behind(rank, op.group)
    return (f"did not enter {_words(op, waits)}, which {listed(entered)} entered; it is {behind} "
            f"behind there, its last is {waits.entered(rank, op.group)}")


def _stale(waits: Waits, rank: int) -> Suspect:
    op, num, peers = waits.stale[rank]
    why = (f"does not see the end of {_words(op, waits)}, "
           + (f"nor of {num - 1} after it, " if num > 1 else "")
           + f"which {listed(peers)} finished with it: its device no longer answers")
    behind = waits.behind(rank, op.group)
    if behind:
        why += f"; it is {behind} behind there"
    return Suspect(rank, why, "not completed", "high" if num > 1 else "medium", op.group, op.name,
                   op.seq, behind, waits.waiters(rank))


def _mismatched(waits: Waits, rank: int) -> Suspect:
    op, theirs, peers, is_sure = waits.mismatched[rank]
    mine, other = op.name, theirs.name
    if mine == other:
        mine, other = (f"{one.name} of {_clipped(one.tensors)}" for one in (op, theirs))
    return Suspect(
        rank, f"called {mine} as number {op.seq} of {op.group}, where {listed(peers)} called "
        f"{other}", "mismatched", "high" if is_sure else "low", op.group, op.name, op.seq,
        waits.behind(rank, op.group), tuple(peers))


def _clipped(text: str) -> str:
    return text if len(text) <= TENSORS_CHARS_MAX else text[:TENSORS_CHARS_MAX] + " ..."


def _waiting(waits: Waits, rank: int) -> Waiting:
    edges = waits.edges(rank)
    if not edges:
        op = waits.pending(rank)[0]
        return Waiting(rank, (), op.group, op.name, op.seq)
    first = min(edges.values(), key=lambda op: op.order)
    for_whom = tuple(sorted(other for other, op in edges.items() if op.key == first.key))
    return Waiting(rank, for_whom, first.group, first.name, first.seq)


def _words(op: Op, waits: Waits) -> str:
    if op.is_p2p:
        return f"{op.name} {op.source}->{op.target} of {op.group}"
    return f"{op.name} {op.seq} of {op.group} (ranks {listed(waits.parts(op), bare=True)})"


def listed(ranks: Sequence[int], *, bare: bool = False) -> str:
    """1, 2, 3, 5 as `ranks 1-3, 5`, or without the word; cut after a few runs."""
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
