"""Where the state of a member comes from when it joins a generation, and how the whole gets to one.

Every piece comes from the nearest of those who hold it (boxes.py). A member whose part of the model
becomes another one builds it anew beside what it has, which stays as it is until all of the new is
there. Where nobody holds a state, the first member finds one, a copy, the checkpoint or the seed,
and the others take theirs from it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

from ...events.records.orders import Reconfigure, StartRank
from ...events.records.types import Origin, Taken
from ...events.spec.model import Axes
from ...events.spec.parallelism import num_places, whole_on_each
from .checkpoint import checkpoint, memory_checkpoint
from .communicators.communicators import Communicators
from .model import training_state
from .model.trainee import Trainee
from .model.workload import Work
from .process.history import History
from .process.trace import Event
from .recovery import state_shards
from .recovery.resharding import Missing
from .recovery.settlement import Settlement
from .recovery.state_exchange import Exchanged, exchange
from .recovery.state_sources import NO_STATE, Claim, Held
from .step.iteration import Iteration, held_by


class Found(NamedTuple):
    """Where a member's state came from: Reconfigured tells it so."""

    step_version: int
    origin: Origin
    node: str
    received_bytes: int
    source: int
    taken: tuple[Taken, ...] = ()


SEED = Found(0, "seed", "", 0, NO_STATE)


class Supply:
    """Brings a member its state. What it has is the trainee of `iteration`."""

    def __init__(self, start: StartRank, work: Work, communicators: Communicators,
                 iteration: Iteration, secret: str,
                 sparing: Callable[[], AbstractContextManager[None]],
                 note: Callable[[Event], None]) -> None:
        self._start, self._work, self._train = start, work, work.train
        self._communicators, self._iteration = communicators, iteration
        self._secret, self._sparing, self._note = secret, sparing, note
        self._whole: Trainee | None = None
        self._staged: Trainee | None = None
        self._staged_told: training_state.Numbers | None = None
        self._staged_in = 0
        self._is_next = False
        """Whether what is staged is what this member is to train in the generation that is up."""
        self._gathered = NO_STATE
        self._is_spoilt = False
        """Whether what this process built from the seed has been written over."""

    # --- into this member -------------------------------------------------------------------------
    def bring(self, order: Reconfigure, place: int, claims: Sequence[Claim],
              settlement: Settlement) -> Found:
        """Have the state of the settlement, in this member's part of the order's layout.

        Where it had that state, but of another part of the model, both are kept until `commit`.
        Raises RuntimeError; then it has what it had, of the step that it says.
        """
        axes = order.axes or Axes(dp=len(order.members))
        restored, step_version, holders = SEED, settlement.step_version, settlement.holders
        if step_version == NO_STATE:
            restored = self._restore(order) if place == 0 else SEED
            step_version = self._broadcast(restored.step_version)
            # Where the first trains a whole replica, it is in that that it has found it.
            begin = int(whole_on_each(axes, self._train.parallel))
            takers = list(range(begin, num_places(axes)))
            source, holders = self.whole() if place == 0 else None, (0,)
        else:
            takers = self._takers(axes, settlement, claims)
            source = self._held(settlement, place)
        is_spoilt = self._is_spoilt or self._iteration.step_version > 0
        trainee = self._fitting(axes, place, begins=step_version == 0, is_spoilt=is_spoilt)
        if step_version == 0 and trainee is not self._iteration.trainee:
            mine = self._iteration.trainee
            self._work.begin(trainee, lambda: mine if mine.is_plain and not is_spoilt
                             else self._built())
        told, taken = None, tuple[Taken, ...]()
        try:
            if takers and step_version:
                told, taken = self._exchange(order, step_version, holders, source,
                                             trainee if place in takers else None)
            if told is None and step_version and trainee is not self._iteration.trainee:
                # What was restored, or its own: a pass that waits on holds the old one.
                told = self._copy(
                    trainee, source if restored is not SEED else None, step_version)
            if not self._communicators.woken:
                self._keep(trainee, told, step_version)
        finally:
            if trainee not in (self._iteration.trainee, self._staged):
                self._communicators.unbind(trainee.roots)
        return self._found(order, place, step_version, restored, taken)

    @property
    def waits(self) -> bool:
        """Whether something is to be put in force by `commit`."""
        return self._is_next

    def claim(self) -> Claim:
        """What this member brings into a settlement: of what it trains, and of what is staged."""
        claim = self._iteration.claim()
        if self._staged is None:
            return claim
        return replace(claim, staged=held_by(self._staged), staged_in=self._staged_in)

    def stay_beside(self) -> None:
        """The others go on, and what this member has given is of no use to anybody any more."""
        self._is_spoilt = True
        self._iteration.forget()

    def leave(self) -> None:
        """The generation is left: what is staged goes into none."""
        if self._staged is not None:
            self._communicators.unbind(self._staged.roots)

    def commit(self) -> None:
        """All members have their parts: what is staged is in force from here on, or of no use."""
        if self._staged is not None and self._is_next:
            self._note("commit")
            self._take_over(self._staged, self._staged_told)
        self._drop_staged()

    def _held(self, settlement: Settlement, place: int) -> Trainee | None:
        """What this member holds of the settlement's state."""
        if place not in settlement.holders:
            return None
        staged = self._staged if settlement.shares[place].staged else None
        return staged or self._iteration.trainee

    def _takers(self, axes: Axes, settlement: Settlement, claims: Sequence[Claim]) -> list[int]:
        """Places of those who do not have all of their own part of what was settled on."""
        optimizer = self._train.parallel.optimizer

        def has(place: int) -> bool:
            share, claim = settlement.shares[place], claims[place]
            # Who steps at a settlement has its shard alone.
            is_gathered = not (claim.stale or (share.steps and optimizer != "whole"))
            return is_gathered and place in settlement.holders and _same_part(
                claim.held, Held(axes=axes, optimizer=optimizer, place=place))

        return [place for place in range(num_places(axes)) if not has(place)]

    def _fitting(self, axes: Axes, place: int, *, begins: bool, is_spoilt: bool) -> Trainee:
        """What this member is to train: what it has, where that is the same part, else a new one.

        Beside the layout it keeps what it has, and trains nothing.
        """
        mine = self._iteration.trainee
        if place >= num_places(axes):
            return mine
        optimizer = self._train.parallel.optimizer
        wanted = Held(axes=axes, optimizer=optimizer, place=place)
        if (not (begins and is_spoilt) and not self._iteration.is_stuck
                and _same_part(held_by(mine), wanted)):
            self._communicators.bind()
            mine.axes, mine.place = axes, place
            return mine
        return seen(self._work.build(mine.device, self._communicators.groups, axes, place,
                                     begins=begins))

    def _exchange(self, order: Reconfigure, step_version: int, holders: Sequence[int],
                  source: Trainee | None, target: Trainee | None
                  ) -> tuple[training_state.Numbers | None, tuple[Taken, ...]]:
        """Give and take what is wanted; what is taken is in force in `target` with its numbers."""
        mine = self._iteration
        # What it overwrites is worth nothing, or what it has itself.
        in_place = (target is not mine.trainee or target is source
                    or mine.step_version == NO_STATE)
        self._is_spoilt = self._is_spoilt or (in_place and target is mine.trainee)
        told = training_state.numbers(source, step_version, mine.history) if source else None
        found = self._run(source, target, told, [member.node for member in order.members],
                          step_version, holders, staged=not in_place)
        if target is None or self._communicators.woken:
            return None, ()
        found.put_in_force()
        target.is_gathered = True
        return found.told, tuple(
            Taken(order.members[giver].rank, order.members[giver].node, taken_bytes)
            for giver, taken_bytes in found.taken.items())

    def _run(
        self,
        source: Trainee | None,
        target: Trainee | None,
        told: training_state.Numbers | None,
        nodes: Sequence[str],
        step_version: int,
        holders: Sequence[int],
        *,
        staged: bool,
    ) -> Exchanged:
        have: state_shards.State = {}
        if source is not None:
            have = seen(source).pieces if source.is_gathered else state_shards.stepped(seen(source))
        try:
            return exchange(
                have, seen(target).pieces if target is not None else have, told,
                step_version=step_version, holders=holders, nodes=nodes, staged=staged,
                note=self._note, goes_on=lambda: not self._communicators.woken)
        except Missing as missing:
            # All find this alike: who held it a moment ago is refused by its peers.
            raise RuntimeError(str(missing)) from None

    def _copy(self, trainee: Trainee, found: Trainee | None, step_version: int
              ) -> training_state.Numbers:
        """What it has `found`, else this member's own state, in the memory of `trainee`, which is
        for the same part."""
        iteration = self._iteration
        source = found or iteration.trainee
        live = training_state.tensors(source)
        for name, tensor in training_state.tensors(trainee).items():
            tensor.copy_(live[name])
        return training_state.numbers(source, step_version, iteration.history)

    def _keep(
        self, trainee: Trainee, told: training_state.Numbers | None, step_version: int
    ) -> None:
        """From here on it is this member's state, also if the rest of the meeting comes to nothing:
        what it says of itself must never be of another step than its tensors."""
        iteration = self._iteration
        self._is_next = False
        if trainee is iteration.trainee:
            if told is not None:
                iteration.replaced(training_state.adopt(trainee, told, iteration.history))
        elif iteration.step_version == step_version != 0:
            self._drop_staged()
            self._staged, self._staged_told, self._is_next = trainee, told, True
            self._staged_in = self._communicators.generation
            self._note("staged")
        else:
            self._take_over(trainee, told)

    def _take_over(self, trainee: Trainee, told: training_state.Numbers | None) -> None:
        iteration = self._iteration
        mine, history = iteration.trainee, iteration.history
        step_version = training_state.adopt(trainee, told, history) if told is not None else 0
        if trainee is self._staged:
            self._staged = None
        if iteration.step_version == step_version:
            iteration.carry_on_with(trainee)
        else:
            iteration.train_with(trainee)
            iteration.replaced(step_version)
        self._drop_staged()
        self._communicators.rebound()
        mine.release()
        gc.freeze()  # as member.py does after building

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.release()
            self._staged = None

    def _found(self, order: Reconfigure, place: int, step_version: int, restored: Found,
               taken: tuple[Taken, ...]) -> Found:
        mine = order.members[place]
        if step_version == 0 or restored is not SEED:
            return restored._replace(taken=taken)
        others = [one for one in taken if one.rank != mine.rank]
        if not others:
            return Found(step_version, "own", mine.node, 0, mine.rank)
        most = max(others, key=lambda one: one.taken_bytes)
        received_bytes = sum(one.taken_bytes for one in others)
        return Found(step_version, "peer", most.node, received_bytes, most.rank, tuple(others))

    # --- where nobody has any ---------------------------------------------------------------------
    def _broadcast(self, step_version: int) -> int:
        """What the first member has found, to all."""
        told = torch.tensor([step_version], device=self._iteration.trainee.device)
        dist.broadcast(told, 0)
        return int(told.item())

    def _restore(self, order: Reconfigure) -> Found:
        """A copy of the order, else its checkpoint, else what the seed gives (step version 0)."""
        whole, history = self.whole(), self._iteration.history
        is_mine = whole is self._iteration.trainee
        copied = memory_checkpoint.restore(
            whole,
            history,
            self._start.task,
            order.copies,
            self._secret,
            lambda: self._communicators.woken,
        )
        self._is_spoilt = self._is_spoilt or (copied is not None and is_mine)
        if self._communicators.woken:
            raise RuntimeError("while it looked for its state")
        if copied is not None:
            step_version, copy, copy_bytes = copied
            return Found(step_version, "copy", copy.node, copy_bytes, NO_STATE)
        if not order.checkpoint:
            return SEED
        self._is_spoilt = self._is_spoilt or is_mine
        folder = checkpoint.within(self._train.output, order.checkpoint)
        with self._sparing():
            step_version = checkpoint.load(folder, whole, history)
        return Found(step_version, "checkpoint", "", training_state.num_bytes(whole), NO_STATE)

    # --- out of all -------------------------------------------------------------------------------
    def whole(self) -> Trainee:
        """A whole replica of this member's own: what it trains, or one that never trains."""
        mine = self._iteration.trainee
        if mine.is_plain:
            return mine
        if self._whole is None:
            self._whole = self._built()
        return self._whole

    def _built(self) -> Trainee:
        """A whole replica, as it begins."""
        built = seen(self._work.build_whole(self._iteration.trainee.device,
                                            self._communicators.alone()))
        self._communicators.unbind(built.roots)
        built.release_gradients()
        return built

    def gather(self, step_version: int, nodes: Sequence[str], to: int) -> None:
        """By all members: the whole state, to the one at place `to`. Raises RuntimeError.

        Who is beside the layout only comes along.
        """
        iteration, place = self._iteration, self._communicators.place
        givers = range(num_places(self._communicators.axes))
        gives = place in givers
        told = (training_state.numbers(iteration.trainee, step_version, iteration.history)
                if gives else None)
        self._gathered = NO_STATE
        found = self._run(iteration.trainee if gives else None,
                          self.whole() if place == to else None, told, nodes,
                          step_version, givers, staged=False)
        if place == to:
            self._gathered = training_state.adopt(self.whole(), found.told, History())

    @property
    def has_whole(self) -> bool:
        """Whether `whole` is of the step that this member is at."""
        step_version = self._iteration.step_version
        return step_version != NO_STATE and (
            self._iteration.trainee.is_plain or self._gathered == step_version)


def seen(trainee: Trainee) -> Trainee:
    """Its pieces are known from here on; a generation is up."""
    if trainee.pieces is None:
        trainee.pieces = state_shards.of(trainee)
    return trainee


def _same_part(one: Held | None, other: Held) -> bool:
    """Whether these are the same pieces of the state."""
    return one is not None and one.pieces == other.pieces
