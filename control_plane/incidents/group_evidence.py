"""What stalled ranks have entered in their groups, as evidence of which of them is the cause.

Each rank tells how many operations it has entered in each group, and which was the last one
(`Stall.groups`). That is less than a dump of the flight recorder, but a running rank always has it.
So it is made into dumps, and the locator of `unicron locate` reads them.

With NCCL a rank enters operations ahead of its device. So a rank whose count is ahead of a peer's
waits for that peer, or will wait, wherever its host is now. With gloo it also tells whether it is
in a wait. Where ranks seem to wait in a circle, that decides: who works is the cause.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from ...events.collectives import Dump, Group, Job, Op
from ...events.records.types import GroupProgress
from ..state.task import Stall
from .hang_locator import NOT_ENTERED, HangLocation, Suspect, locate

SEND, RECEIVE = "send", "receive"
SAME_SIZE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
"""Collectives whose first tensor has one size on all members."""
COUNTED_BY_MARKS = ("world", "dp_cp")
"""Groups in which the step alone starts operations: a mark says that it enters each of them."""
Channel = tuple[int, int, int]
"""The messages of one direction between two ranks: key of their group, sender, receiver."""


class Located(NamedTuple):
    """What the groups show: `rank`: these hang; `mismatch`: these called something else than their
    peers, or in another order; `network`: operations that all have entered do not end."""

    kind: Literal["rank", "mismatch", "network"]
    ranks: tuple[int, ...]
    """() if no rank is to blame."""
    why: str
    waited_since_s: float = 0.0
    """When the first peer began to wait for one of them."""
    stuck: tuple[int, ...] = ()
    """`network`: the ranks that have entered the operations which do not end."""


def has_groups(stall: Stall) -> bool:
    """Whether the rank tells of its groups. An agent or a rank of an older release does not."""
    return stall.are_groups_complete or bool(stall.groups)


def locate_stalls(stalls: Mapping[int, Stall], members: Sequence[int]) -> Located | None:
    """Who of these ranks is the cause. `stalls`: of all members, by rank; `members`: the ranks by
    place. None: the groups do not show it, or contradict each other.

    Takes 1.4 s for 1,024 ranks. A stalled task is located anew by each record and each view, so the
    last results are kept.
    """
    return _locate_stalls(tuple(stalls.items()), tuple(members))


@lru_cache(maxsize=8)
def _locate_stalls(told: tuple[tuple[int, Stall], ...], members: tuple[int, ...]) -> Located | None:
    stalls = dict(told)
    evidence = _Evidence(stalls, members)
    location = locate(evidence.dumps(with_blocked=False).values())
    if len(location.suspects) > 1 and not any(stall.waits for stall in stalls.values()):
        location = locate(evidence.dumps(with_blocked=True).values())
    located = _judged(location)
    if located is None:
        return None
    if located.kind == "rank" and any(stalls[rank].waits for rank in located.ranks):
        return None  # who waits is not the cause: another rank has told what is not so
    if located.kind != "network":
        return located
    is_complete = all(stall.are_groups_complete for stall in stalls.values())
    return evidence.miscounted() or (located if is_complete else None)


def _judged(location: HangLocation) -> Located | None:
    mismatched = [suspect for suspect in location.suspects if suspect.state == "mismatched"]
    if mismatched:
        is_sure = all(suspect.confidence == "high" for suspect in mismatched)
        return Located("mismatch", _ranks(mismatched if is_sure else ()), _whys(mismatched))
    hung = [
        suspect
        for suspect in location.suspects
        if (suspect.state, suspect.confidence) == (NOT_ENTERED, "high")
    ]
    is_stuck = any(not waiting.ranks for waiting in location.waiting)
    if hung and not is_stuck:
        since_ns = min(suspect.waited_since_ns for suspect in hung)
        return Located("rank", _ranks(hung), _whys(hung), since_ns / 1e9)
    in_circle = [suspect for suspect in location.suspects if suspect.confidence == "low"]
    if in_circle:
        return Located("mismatch", (), _whys(in_circle))
    if location.stuck:
        stuck = location.stuck[0]
        ranks = ", ".join(map(str, stuck.ranks))
        return Located(
            "network",
            (),
            f"{stuck.collective} {stuck.seq} of {stuck.group} (ranks {ranks}) was entered by all "
            "of them and does not end",
            stuck=tuple(sorted({rank for each in location.stuck for rank in each.ranks})),
        )
    return None


def _ranks(suspects: Iterable[Suspect]) -> tuple[int, ...]:
    return tuple(suspect.rank for suspect in suspects)


def _whys(suspects: Sequence[Suspect]) -> str:
    if len(suspects) == 1:
        return suspects[0].why
    return "; ".join(f"rank {suspect.rank} {suspect.why}" for suspect in suspects)


class _Evidence:
    """The operations that stalled ranks have entered, as far as they have not ended for sure."""

    def __init__(self, stalls: Mapping[int, Stall], members: Sequence[int]) -> None:
        self._stalls = stalls
        self._groups: dict[Group, dict[int, GroupProgress]] = defaultdict(dict)
        self._members: dict[Group, tuple[int, ...]] = {}
        self._sent: dict[Channel, GroupProgress] = {}
        self._received: dict[Channel, GroupProgress] = {}
        self._channels: dict[Channel, Group] = {}
        known: dict[tuple[int, ...], tuple[tuple[int, ...], str]] = {}
        for rank, stall in stalls.items():
            for told in stall.groups:
                if told.members not in known:  # all members of a group tell the same
                    ranks = tuple(members[place] for place in _places(told, len(members)))
                    known[told.members] = ranks, " ".join(map(str, sorted(ranks)))
                self._add(rank, told, *known[told.members])
        self._least = {group: self._least_entered(group) for group in self._groups}

    def _add(self, rank: int, told: GroupProgress, ranks: tuple[int, ...], text: str) -> None:
        name = told.role or f"group {told.key:08x}"
        if told.kind in (SEND, RECEIVE):
            if not ranks or ranks[0] == rank:
                return
            ends = (rank, ranks[0]) if told.kind == SEND else (ranks[0], rank)
            channel = (told.key, *ends)
            (self._sent if told.kind == SEND else self._received)[channel] = told
            self._channels[channel] = Group(name)
            return
        group = Group(name, text or f"{told.key:x}")
        self._groups[group][rank] = told
        self._members[group] = ranks

    def _listed(self, group: Group) -> Iterable[int]:
        return self._members[group] or self._groups[group]

    def _least_entered(self, group: Group) -> int:
        """What all members have entered. A rank that cannot tell of all its groups may have."""
        told = self._groups[group]
        return min(
            (
                told[rank].entered if rank in told else 0
                for rank in self._listed(group)
                if rank in told or (rank in self._stalls and self._is_complete(rank))
            ),
            default=0,
        )

    def _is_complete(self, rank: int) -> bool:
        return self._stalls[rank].are_groups_complete

    def dumps(self, *, with_blocked: bool) -> dict[int, Dump]:
        """By rank. `with_blocked`: an operation that all have entered may not end on the device of
        a rank that has entered it behind another that does not end."""
        pending: dict[int, list[Op]] = {rank: [] for rank in self._stalls}
        for group, told in self._groups.items():
            differ = self._differ(group)
            for rank, progress in told.items():
                if progress.order and (differ or progress.entered > self._least[group]):
                    pending[rank].append(self._op(rank, group, progress))
        for channel in {**self._sent, **self._received}:
            self._add_message(channel, pending)
        if with_blocked:
            self._add_blocked(pending)
        for rank, stall in self._stalls.items():
            if stall.waits and not pending[rank]:
                self._add_wait(rank, pending)
        return {
            rank: self._dump(rank, sorted(ops, key=lambda op: op.order))
            for rank, ops in pending.items()
        }

    def miscounted(self) -> Located | None:
        """The one rank that has entered more or fewer operations of a group than all its peers,
        with which it waits at the same point of the step: it has skipped one, or entered one alone.
        """
        for group, told in self._groups.items():
            stalls = [self._stalls[rank] for rank in told]
            num_ranks = Counter(progress.entered for progress in told.values())
            if (
                group.name in COUNTED_BY_MARKS
                and len(told) == len(self._members[group]) > 2
                and all(stall.waits and stall.where == "collective" for stall in stalls)
                and len({stall.position for stall in stalls}) == 1
                and sorted(num_ranks.values()) == [1, len(told) - 1]
            ):
                (usual, _), (_, _) = num_ranks.most_common()
                (rank,) = [rank for rank, progress in told.items() if progress.entered != usual]
                return Located(
                    "mismatch",
                    (rank,),
                    f"has entered {told[rank].entered} operations of {group}, where the other "
                    f"ranks have entered {usual} at the same point of the iteration",
                )
        return None

    def _differ(self, group: Group) -> bool:
        """Whether members that have entered as many operations have not entered the same last."""
        calls: dict[int, set[tuple[str, str]]] = defaultdict(set)
        for progress in self._groups[group].values():
            if progress.order:
                calls[progress.entered].add((progress.kind, _size(progress)))
        return any(len(each) > 1 for each in calls.values())

    def _add_message(self, channel: Channel, pending: Mapping[int, list[Op]]) -> None:
        _, source, target = channel
        sent, received = self._sent.get(channel), self._received.get(channel)
        if source not in self._stalls or target not in self._stalls:
            return
        if sent is None or received is None:
            # A rank that does not tell of all its groups may have its side.
            missing = source if sent is None else target
            if not self._is_complete(missing):
                return
        num_sent = sent.entered if sent is not None else 0
        num_received = received.entered if received is not None else 0
        if sent is not None and num_sent > num_received and sent.order:
            pending[source].append(self._message(source, channel, sent))
        if received is not None and num_received > num_sent and received.order:
            pending[target].append(self._message(target, channel, received))

    def _add_wait(self, rank: int, pending: Mapping[int, list[Op]]) -> None:
        """The rank waits, though all have entered what it has: its last operation does not end."""
        newest = max(
            (
                (progress.order, group)
                for group, told in self._groups.items()
                if (progress := told.get(rank)) is not None and progress.entered != progress.left
            ),
            default=None,
        )
        if newest is None or not newest[0]:
            return
        group = newest[1]
        for other, progress in self._groups[group].items():
            if progress.entered == self._groups[group][rank].entered and (
                other == rank or not any(op.group == group for op in pending[other])
            ):
                pending[other].append(self._op(other, group, progress))

    def _add_blocked(self, pending: Mapping[int, list[Op]]) -> None:
        blocked_from = {rank: self._blocked_from(rank) for rank, ops in pending.items() if ops}
        for group, told in self._groups.items():
            least = self._least[group]
            ended = {
                rank: progress
                for rank, progress in told.items()
                if progress.order and progress.entered == least
            }
            if not any(
                rank in blocked_from and progress.order > blocked_from[rank]
                for rank, progress in ended.items()
            ):
                continue
            for rank, progress in ended.items():
                pending[rank].append(self._op(rank, group, progress))

    def _blocked_from(self, rank: int) -> int:
        """The first operation of this rank that does not end; 0: perhaps all of this iteration."""
        orders: list[int] = []
        for group, told in self._groups.items():
            progress = told.get(rank)
            if progress is not None and progress.entered > self._least[group]:
                orders.append(progress.order if progress.entered == self._least[group] + 1 else 0)
        return min(orders, default=0)

    def _op(self, rank: int, group: Group, progress: GroupProgress) -> Op:
        order = progress.order
        if progress.entered > self._least[group] + 1:
            order = 0  # an earlier one does not end either
        return Op(
            group,
            progress.entered,
            progress.kind,
            self._at_ns(rank, progress),
            order,
            tensors=_size(progress),
        )

    def _message(self, rank: int, channel: Channel, progress: GroupProgress) -> Op:
        return Op(
            self._channels[channel],
            progress.entered,
            "send" if progress.kind == SEND else "recv",
            self._at_ns(rank, progress),
            progress.order,
            source=channel[1],
            target=channel[2],
        )

    def _at_ns(self, rank: int, progress: GroupProgress) -> int:
        return int(max(self._stalls[rank].told_s - progress.in_s, 0.0) * 1e9)

    def _dump(self, rank: int, ops: Sequence[Op]) -> Dump:
        entered = {
            group: told[rank].entered for group, told in self._groups.items() if rank in told
        }
        if not self._is_complete(rank):
            for group, told in self._groups.items():
                if rank not in told and rank in self._listed(group):
                    entered[group] = max(each.entered for each in told.values())
        return Dump(
            rank=rank,
            members={group: ranks for group, ranks in self._members.items() if rank in ranks},
            entered=entered,
            completed={},
            status={},
            pending=tuple(ops),
            ended=(),
            mixed=frozenset(),
            records_starts=False,
            dumped_ns=0,
            job=Job(),
            waits=self._stalls[rank].waits,
        )


def _places(told: GroupProgress, num: int) -> list[int]:
    """The places of the group's members; []: unknown, or no places of this generation."""
    if len(told.members) != 5 or min(told.members) < 0:
        return []
    start, n1, s1, n2, s2 = told.members
    if not 0 < n1 * n2 <= num:
        return []
    places = [start + i * s1 + j * s2 for j in range(n2) for i in range(n1)]
    return places if max(places, default=num) < num and len(set(places)) == len(places) else []


def _size(progress: GroupProgress) -> str:
    return f"{progress.num_bytes} bytes" if progress.kind in SAME_SIZE else ""
