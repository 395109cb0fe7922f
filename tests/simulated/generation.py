"""One simulated generation of a task. If it breaks, it breaks for all its members."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulated.checkpoint_store import COPY_BYTES
from unicron.events.records.orders import Reconfigure
from unicron.events.records.reports import Reconfigured
from unicron.events.records.types import Member, Origin, ReceivedState
from unicron.events.spec.job import Loop, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates, num_positions, replica
from unicron.workers.training.recovery.settlement import assign_micro_batches, settle
from unicron.workers.training.recovery.state_sources import NO_STATE, HeldState

if TYPE_CHECKING:
    from simulated.environment import Environment
    from simulated.rank import SimulatedRank


def first_digest(train: Train | Loop) -> int:
    """Digest of the parameters before the first step."""
    return zlib.crc32(f"seed {getattr(train, 'seed', 0)}".encode())


def next_digest(digest: int, iteration: int, batch: tuple[int, ...]) -> int:
    """Digest of the parameters after a step over these micro-batches."""
    return zlib.crc32(f"{digest} {iteration} {batch}".encode())


class SimulatedGeneration:
    """One set of communicators. It is complete once all members have joined; a break is for all."""

    def __init__(self, net: Environment, order: Reconfigure) -> None:
        self.net, self.task, self.number = net, order.task, order.generation
        self.members: tuple[Member, ...] = order.members
        self.checkpoint, self.copies = order.checkpoint, order.copies
        self.axes = order.axes
        self.layout = order.axes or Axes(dp=len(order.members))
        self.step_version = NO_STATE
        """The step version on which the members settled."""
        self.ranks: list[SimulatedRank] = []
        self.broken = self.stop = self._jammed = False
        self._entered: list[SimulatedRank] = []
        self._timeout: asyncio.TimerHandle | None = None
        """Of the collective that some members have entered."""
        self._pending: dict[tuple[int, int], asyncio.TimerHandle] = {}
        net.later(net.tempo.meet_s_max, self._give_up)

    def arrive(self, rank: SimulatedRank) -> None:
        self.ranks.append(rank)
        if self.broken:
            self._notice(rank)
        elif len(self.ranks) == len(self.members):
            place = {(m.rank, m.attempt): i for i, m in enumerate(self.members)}
            self.ranks.sort(key=lambda r: place[r.key])
            self.net.later(self.net.draw(self.net.tempo.meet_s), self._settle)

    def place(self, rank: SimulatedRank) -> int | None:
        """The member's position in the layout; None: it is a standby member."""
        place = self.ranks.index(rank)
        return place if place < num_positions(self.layout) else None

    def assigned(self, rank: SimulatedRank) -> tuple[int, ...]:
        """The micro-batches of the rank's replica in a new iteration."""
        place = self.place(rank)
        if place is None:
            return ()
        return assign_micro_batches(
            rank.train.num_micro_batches, self.layout.dp, coordinates(self.layout, place).dp
        )

    def enter(self, rank: SimulatedRank) -> None:
        """The rank enters the iteration's reduction, which completes when all ranks are in it."""
        if self.broken:
            self._notice(rank)
            return
        self._entered.append(rank)
        if self._timeout is None:
            self._timeout = self.net.later(self.net.tempo.collective_s_max, self.hiccup)
        if len(self._entered) == len(self.ranks) and not self._jammed:
            self._complete()

    def jam(self, jam_s: float) -> None:
        """Complete no collective for `jam_s` seconds. The members wait and get no error."""
        self._jammed = True
        self.net.later(jam_s, self._flow)

    def _flow(self) -> None:
        self._jammed = False
        if len(self._entered) == len(self.ranks) and not self.broken:
            self._complete()

    def _complete(self) -> None:
        assert self._timeout is not None
        self._timeout.cancel()
        self._entered, self._timeout = [], None
        first = self.ranks[0]
        replicas = [
            [self.ranks[place] for place in replica(self.layout, dp)]
            for dp in range(self.layout.dp)
        ]
        batch = tuple(sorted(i for members in replicas for i in members[0].kept))
        if any(len({rank.kept for rank in members}) > 1 for members in replicas):
            self.net.never(f"task {self.task} generation {self.number}: replica members differ")
        if first.step_version < first.train.iterations:  # no step follows the last collective
            self._check(batch)
            for rank in self.ranks[: num_positions(self.layout)] if self.axes is not None else ():
                rank.ready = True
        for each in self.ranks:
            self._pending[each.key] = self.net.later(
                self.net.draw(self.net.tempo.reduce_s), self._stepper(each, batch, self.stop)
            )

    def close(self, rank: SimulatedRank) -> None:
        """Break the generation. What `rank` sent for its finished step still reaches the others."""
        self.broken = True
        for each in self.ranks:
            if each.phase == "reducing" and each.group is self and each.key not in self._pending:
                self._notice(each)

    def lose(self, rank: SimulatedRank) -> None:
        """A member died or left: members that wait for it fail."""
        self._forget(rank)
        self.hiccup()

    def hiccup(self) -> None:
        """Break the connections: a member in a collective fails now, the others in their next."""
        self.broken = True
        for each in self.ranks:
            if each.phase in ("reducing", "meeting") and each.group is self:
                self._forget(each)
                self._notice(each)

    def _forget(self, rank: SimulatedRank) -> None:
        """Cancel the rank's pending step."""
        pending = self._pending.pop(rank.key, None)
        if pending:
            pending.cancel()

    def _stepper(
        self, rank: SimulatedRank, batch: tuple[int, ...], stop: bool
    ) -> Callable[[], None]:
        def step() -> None:
            if rank.stopped_s:
                self._pending[rank.key] = self.net.later(rank.stopped_s, step)
                return
            del self._pending[rank.key]
            rank.step(batch, stop)

        return step

    def _notice(self, rank: SimulatedRank) -> None:
        def fail() -> None:
            if rank.stopped_s:
                self.net.later(rank.stopped_s, fail)
            elif rank.alive and rank.group is self:
                rank.fail()

        self.net.later(self.net.draw(self.net.tempo.notice_s), fail)

    def _give_up(self) -> None:
        if len(self.ranks) < len(self.members) and not self.broken:
            self.broken = True
            for rank in self.ranks:
                self._notice(rank)

    def _check(self, batch: tuple[int, ...]) -> None:
        first = self.ranks[0]
        where = f"task {self.task} generation {self.number} iteration {first.step_version}"
        if batch != tuple(range(first.train.num_micro_batches)):
            self.net.never(f"{where}: stepped on micro-batches {batch}")
        for rank in self.ranks:
            if not rank.alive:
                self.net.never(f"{where}: stepped with rank {rank.rank}, which is dead")
            if not rank.beside and (
                (rank.step_version, rank.digest) != (first.step_version, first.digest)
            ):
                self.net.never(f"{where}: rank {rank.rank} has another state than the first")
        if len({r.rank for r in self.ranks}) != len(self.ranks):
            self.net.never(f"{where}: two members are the same rank")

    def _settle(self) -> None:
        """Settle the members by the rules that real ranks use."""
        if self.broken:
            return
        stopped_s = max(rank.stopped_s for rank in self.ranks)
        if stopped_s:
            self.net.later(stopped_s, self._settle)
            return
        first = self.ranks[0]
        settlement = settle(
            [r.claim() for r in self.ranks], first.train.num_micro_batches, self.axes
        )
        states: list[tuple[int, int]] = []
        for place in settlement.holders:
            giver = self.ranks[place]
            if settlement.shares[place].steps:
                giver.take_step(tuple(range(giver.train.num_micro_batches)))
            states.append((giver.step_version, giver.digest))
        if len(set(states)) > 1:
            self.net.never(f"task {self.task} generation {self.number}: states differ: {states}")
        nobody = not states
        (self.step_version, digest), origin, origin_node = (
            self._restored() if nobody else (states[0], "", "")
        )
        finished = self.step_version >= first.train.iterations
        for place, (rank, share) in enumerate(zip(self.ranks, settlement.shares, strict=True)):
            givers = self._givers(place, settlement.holders)
            if nobody:
                givers = [0] if place and self.step_version else []
            is_restored = nobody and not givers
            whence: Origin = origin if is_restored else "peer" if givers else "own"
            if self.place(rank) is not None:
                rank.step_version, rank.digest, rank.beside = self.step_version, digest, False
                rank.ready, rank.barrier = False, ()
                rank.held = (
                    None
                    if self.axes is None
                    else HeldState(
                        axes=self.axes, optimizer=rank.train.parallel.optimizer, place=place
                    )
                )
            rank.hold(
                () if finished else share.kept,
                () if finished else share.todo,
                settlement.begun and not finished,
            )
            rank.assigned_in = self.number
            at = origin_node if is_restored else (self.ranks[givers[0]] if givers else rank).node
            rank.say(
                Reconfigured(
                    task=self.task,
                    rank=rank.rank,
                    attempt=rank.attempt,
                    generation=self.number,
                    step_version=self.step_version,
                    kept_micro_batches=rank.kept,
                    remaining_micro_batches=rank.todo,
                    reassigned_micro_batches=() if finished else share.reassigned,
                    source=-1 if is_restored else (self.ranks[givers[0]] if givers else rank).rank,
                    received_bytes=(
                        COPY_BYTES if givers or whence in ("copy", "checkpoint") else 0
                    ),
                    down_s=0.02,
                    up_s=0.05,
                    settle_s=0.01,
                    origin=whence,
                    origin_node=at,
                    received_from=tuple(
                        ReceivedState(
                            rank=self.ranks[giver].rank,
                            node=self.ranks[giver].node,
                            taken_bytes=COPY_BYTES // len(givers),
                        )
                        for giver in givers
                    ),
                )
            )

    def _givers(self, place: int, holders: dict[int, HeldState]) -> list[int]:
        """The members from which the one at `place` takes its state: none if it has it, the nearest
        that has the same shards, or else all holders."""
        if place >= num_positions(self.layout):
            return []
        seat = HeldState(
            axes=self.layout, place=place, optimizer=self.ranks[place].train.parallel.optimizer
        )
        same = [other for other, held in holders.items() if held.shards == seat.shards]
        if place in same:
            return []
        near = [other for other in same if self.ranks[other].node == self.ranks[place].node]
        return (near or same)[:1] or list(holders)

    def _restored(self) -> tuple[tuple[int, int], Origin, str]:
        """If no member has a state: the restored (step version, digest), its origin and node."""
        found = self.net.keepers.find(self.task, self.copies)
        if found is not None:
            copy, node = found
            if any(
                number > copy.generation and step < copy.step_version
                for number, step in self.net.gone_on.get(self.task, [])
            ):
                self.net.never(
                    f"task {self.task} restores step {copy.step_version} of "
                    f"generation {copy.generation}, which was discarded"
                )
            return (copy.step_version, copy.digest), "copy", node
        train = self.ranks[0].train
        if self.checkpoint:
            output, _, path = self.checkpoint.rpartition("gen-")
            where = output.rstrip("/") or train.output
            return self.net.files[where, f"gen-{path}"], "checkpoint", ""
        return (0, first_digest(train)), "seed", ""
