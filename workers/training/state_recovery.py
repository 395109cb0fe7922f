"""State recovery: where a member's state comes from when it joins a generation.

Each shard comes from the nearest member that holds it (resharding.py). If a member's part of the
model changes, the member builds the new part beside the old part, and keeps the old part until the
new one is complete. If no member holds a state, the member at position 0 loads an in-memory
checkpoint, the checkpoint on disk, or the seed. The others receive their shards from this member.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import msgspec
import structlog
import torch
import torch.distributed as dist
from msgspec.structs import replace

from ...events.records.orders import Reconfigure, StartRank
from ...events.records.types import Origin, ReceivedState
from ...events.spec.model import Axes
from ...events.spec.parallelism import is_fully_replicated, num_positions
from ..checkpoint_store.protocol import TransferError
from .checkpoint import checkpoint
from .checkpoint.memory_restore import (
    Fetched,
    StoredShare,
    Stores,
    Version,
    gather_bytes,
)
from .communicators.communicators import Communicators
from .model import training_state
from .model.trainee import TrainingModel
from .model.workload import Workload
from .process.history import History
from .process.trace import Event
from .recovery import state_shards
from .recovery.resharding import Missing
from .recovery.settlement import Settlement
from .recovery.state_exchange import ExchangeResult, comm_device, exchange
from .recovery.state_sources import NO_STATE, Claim, HeldState
from .step.iteration import Iteration, held_by

log = structlog.get_logger()


class Recovered(NamedTuple):
    """Where a member's state came from, as reported in Reconfigured."""

    step_version: int
    origin: Origin
    node: str
    received_bytes: int
    source: int
    taken: tuple[ReceivedState, ...] = ()


SEED = Recovered(0, "seed", "", 0, NO_STATE)


class StateRecovery:
    """Recovers the state of one member into the model of its `iteration`."""

    def __init__(self, start: StartRank, work: Workload, communicators: Communicators,
                 iteration: Iteration, secret: str,
                 sparing: Callable[[], AbstractContextManager[None]],
                 note: Callable[[Event], None]) -> None:
        self._start, self._work, self._train = start, work, work.train
        self._communicators, self._iteration = communicators, iteration
        self._secret, self._sparing, self._note = secret, sparing, note
        self._full_state: TrainingModel | None = None
        self._staged: TrainingModel | None = None
        self._staged_numbers: training_state.Numbers | None = None
        self._staged_in = 0
        self.is_staged_next = False
        """Whether `activate` will replace the model by the staged one."""
        self._gathered = NO_STATE
        self._is_overwritten = False
        """Whether the state that this process built from the seed has been overwritten."""

    # --- recovery into this member ---
    def recover(self, order: Reconfigure, place: int, claims: Sequence[Claim],
                settlement: Settlement) -> Recovered:
        """Recover this member's part of the settled state, in the layout of the order.

        If the member has the same step of another part of the model, it keeps both until
        `activate`. If this raises RuntimeError, the state is still of the step that is reported.
        """
        axes = order.axes or Axes(dp=len(order.members))
        restored, step_version, holders = SEED, settlement.step_version, settlement.holders
        if step_version == NO_STATE and order.copies:
            recovered = self._restore_from_memory(order, axes, place)
            if recovered is not None:
                return recovered
        if step_version == NO_STATE:
            restored = self._restore(order) if place == 0 else SEED
            step_version = self._broadcast(restored.step_version)
            # If position 0 trains a whole replica, it already has the restored state.
            begin = int(is_fully_replicated(axes, self._train.parallel))
            receivers = list(range(begin, num_positions(axes)))
            source, holders = self.full_state() if place == 0 else None, (0,)
        else:
            receivers = self._receivers(axes, settlement, claims)
            source = self._held(settlement, place)
        is_overwritten = self._is_overwritten or self._iteration.step_version > 0
        trainee = self._model_for(axes, place, begins=step_version == 0,
                                  is_overwritten=is_overwritten)
        if step_version == 0 and trainee is not self._iteration.trainee:
            mine = self._iteration.trainee
            self._work.begin(trainee, lambda: mine if mine.is_plain and not is_overwritten
                             else self._build_full_state())
        numbers, taken = None, tuple[ReceivedState, ...]()
        try:
            if receivers and step_version:
                numbers, taken = self._exchange(order, step_version, holders, source,
                                                trainee if place in receivers else None)
            if numbers is None and step_version and trainee is not self._iteration.trainee:
                # Copy the restored state, or this member's if an abandoned pass holds its model.
                numbers = self._copy_state(
                    trainee, source if restored is not SEED else None, step_version)
            if not self._communicators.woken:
                self._set_state(trainee, numbers, step_version)
        finally:
            if trainee not in (self._iteration.trainee, self._staged):
                self._communicators.unbind(trainee.roots)
        return self._result(order, place, step_version, restored, taken)

    def claim(self) -> Claim:
        """This member's claim to a settlement: the state that it trains, and its staged state."""
        claim = self._iteration.claim()
        if self._staged is None:
            return claim
        return replace(claim, staged=held_by(self._staged), staged_in=self._staged_in)

    def become_standby(self) -> None:
        """Train nothing from now on. The state that this member provided becomes outdated."""
        self._is_overwritten = True
        self._iteration.reset_to(NO_STATE)

    def leave(self) -> None:
        """Leave the generation: remove its process groups from the staged model."""
        if self._staged is not None:
            self._communicators.unbind(self._staged.roots)

    def activate(self) -> None:
        """Train the staged model, or discard it. Called when all members have their parts."""
        if self._staged is not None and self.is_staged_next:
            self._note("commit")
            self._replace_model(self._staged, self._staged_numbers)
        self._drop_staged()

    def _held(self, settlement: Settlement, place: int) -> TrainingModel | None:
        """The model that holds this member's part of the settled state; None if it has none."""
        if place not in settlement.holders:
            return None
        staged = self._staged if settlement.shares[place].staged else None
        return staged or self._iteration.trainee

    def _receivers(self, axes: Axes, settlement: Settlement, claims: Sequence[Claim]) -> list[int]:
        """Positions of the members that lack some of their own part of the settled state."""
        optimizer = self._train.parallel.optimizer

        def has(place: int) -> bool:
            share, claim = settlement.shares[place], claims[place]
            # A member that steps during the settlement then has only its own optimizer shard.
            is_gathered = not (claim.stale or (share.steps and optimizer != "whole"))
            return is_gathered and place in settlement.holders and _same_part(
                claim.held, HeldState(axes=axes, optimizer=optimizer, place=place))

        return [place for place in range(num_positions(axes)) if not has(place)]

    def _model_for(self, axes: Axes, place: int, *, begins: bool,
                   is_overwritten: bool) -> TrainingModel:
        """The model to train: the current model if it is for the same part and can be used, else a
        new one. A standby member keeps its model and trains nothing."""
        mine = self._iteration.trainee
        if place >= num_positions(axes):
            return mine
        optimizer = self._train.parallel.optimizer
        part = HeldState(axes=axes, optimizer=optimizer, place=place)
        if (not (begins and is_overwritten) and not self._iteration.is_stuck
                and _same_part(held_by(mine), part)):
            self._communicators.bind()
            mine.axes, mine.place = axes, place
            return mine
        return with_shards(self._work.build(mine.device, self._communicators.groups, axes, place,
                                            begins=begins))

    def _exchange(self, order: Reconfigure, step_version: int, holders: Sequence[int],
                  source: TrainingModel | None, target: TrainingModel | None
                  ) -> tuple[training_state.Numbers | None, tuple[ReceivedState, ...]]:
        """Exchange shards. When this returns numbers, `target` has the received state."""
        mine = self._iteration
        # Write directly if the overwritten data is worthless or is the source itself.
        in_place = (target is not mine.trainee or target is source or mine.step_version == NO_STATE)
        self._is_overwritten = self._is_overwritten or (in_place and target is mine.trainee)
        numbers = training_state.numbers(source, step_version, mine.history) if source else None
        found = self._run(source, target, numbers, [member.node for member in order.members],
                          step_version, holders, staged=not in_place)
        if target is None or self._communicators.woken:
            return None, ()
        found.activate()
        target.is_gathered = True
        return found.numbers, tuple(
            ReceivedState(order.members[sender].rank, order.members[sender].node, taken_bytes)
            for sender, taken_bytes in found.taken.items())

    def _run(self, source: TrainingModel | None, target: TrainingModel | None,
             numbers: training_state.Numbers | None, nodes: Sequence[str], step_version: int,
             holders: Sequence[int], *, staged: bool) -> ExchangeResult:
        have: state_shards.State = {}
        if source is not None:
            source = with_shards(source)
            have = source.shards if source.is_gathered else state_shards.stepped(source)
        try:
            return exchange(
                have, with_shards(target).shards if target is not None else have, numbers,
                step_version=step_version, holders=holders, nodes=nodes, staged=staged,
                note=self._note, goes_on=lambda: not self._communicators.woken)
        except Missing as missing:
            # Every member raises this: its peers have excluded the last holder of some part.
            raise RuntimeError(str(missing)) from None

    def _copy_state(self, trainee: TrainingModel, restored: TrainingModel | None, step_version: int
              ) -> training_state.Numbers:
        """Copy `restored`, or else this member's own state, into `trainee` of the same part."""
        iteration = self._iteration
        source = restored or iteration.trainee
        live = training_state.tensors(source)
        for name, tensor in training_state.tensors(trainee).items():
            tensor.copy_(live[name])
        return training_state.numbers(source, step_version, iteration.history)

    def _set_state(self, trainee: TrainingModel, numbers: training_state.Numbers | None,
                   step_version: int) -> None:
        """Make `trainee` this member's state, even if the rest of the join fails, because the step
        version that the member reports must always be that of its tensors."""
        iteration = self._iteration
        self.is_staged_next = False
        if trainee is iteration.trainee:
            if numbers is not None:
                iteration.reset_to(training_state.load(trainee, numbers, iteration.history))
        elif iteration.step_version == step_version != 0:
            self._drop_staged()
            self._staged, self._staged_numbers, self.is_staged_next = trainee, numbers, True
            self._staged_in = self._communicators.generation
            self._note("staged")
        else:
            self._replace_model(trainee, numbers)

    def _replace_model(self, trainee: TrainingModel,
                       numbers: training_state.Numbers | None) -> None:
        iteration = self._iteration
        mine, history = iteration.trainee, iteration.history
        step_version = training_state.load(trainee, numbers, history) if numbers is not None else 0
        if trainee is self._staged:
            self._staged = None
        if iteration.step_version == step_version:
            iteration.replace_model(trainee)
        else:
            iteration.set_model(trainee)
            iteration.reset_to(step_version)
        self._drop_staged()
        self._communicators.discard_handles()
        mine.release()
        gc.freeze()  # as member.py does after building

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.release()
            self._staged = None

    def _result(self, order: Reconfigure, place: int, step_version: int, restored: Recovered,
                taken: tuple[ReceivedState, ...]) -> Recovered:
        mine = order.members[place]
        if step_version == 0 or restored is not SEED:
            return restored._replace(taken=taken)
        others = [one for one in taken if one.rank != mine.rank]
        if not others:
            return Recovered(step_version, "own", mine.node, 0, mine.rank)
        most = max(others, key=lambda one: one.taken_bytes)
        received_bytes = sum(one.taken_bytes for one in others)
        return Recovered(step_version, "peer", most.node, received_bytes, most.rank, tuple(others))

    # --- no member has a state ---
    def _restore_from_memory(self, order: Reconfigure, axes: Axes, place: int) -> Recovered | None:
        """Restore the newest in-memory checkpoint that every member can read. None if there is
        none. All members call this. Raises RuntimeError."""
        stores = Stores(self._start.task, order.copies, self._secret,
                        lambda: self._communicators.woken)
        mine = msgspec.msgpack.encode(stores.shares(place, len(order.members)))
        shares = [share for data in gather_bytes(mine)
                  for share in msgspec.msgpack.decode(data, type=list[StoredShare])]
        for version in stores.versions(shares):
            trainee = self._model_for(axes, place, begins=False, is_overwritten=False)
            try:
                fetched = self._fetch_together(stores, version, trainee, place)
                if fetched is not None:
                    self._set_state(trainee, fetched.numbers, version.step_version)
                    return Recovered(version.step_version, "copy", fetched.node,
                                     fetched.received_bytes, NO_STATE)
            finally:
                if trainee not in (self._iteration.trainee, self._staged):
                    self._communicators.unbind(trainee.roots)
                    trainee.release()
        return None

    def _fetch_together(self, stores: Stores, version: Version, trainee: TrainingModel, place: int
                        ) -> Fetched | None:
        """Each member reads its part of a version. None if one of them could not."""
        fetched, why = None, ""
        try:
            fetched = self._fetch(stores, version, trainee, place)
        except (OSError, TransferError, ValueError) as error:
            why = str(error) or type(error).__name__
            log.warning("in-memory checkpoint not restored", iteration=version.step_version,
                        why=why)
        if self._communicators.woken:
            raise RuntimeError("interrupted while it restored its state")
        succeeded = torch.tensor([float(not why)], device=comm_device())
        dist.all_reduce(succeeded, dist.ReduceOp.MIN)
        return fetched if succeeded.item() else None

    def _fetch(self, stores: Stores, version: Version, trainee: TrainingModel, place: int
               ) -> Fetched:
        """Read this member's part into `trainee`; a standby member reads nothing. If `trainee` has
        a state that counts, it is overwritten only when all is there."""
        if place >= num_positions(self._communicators.axes):
            return Fetched(None, 0, "")
        mine, shards = self._iteration, with_shards(trainee).shards
        in_place = trainee is not mine.trainee or mine.step_version == NO_STATE
        self._is_overwritten = self._is_overwritten or trainee is mine.trainee
        wanted = shards if in_place else {shard: torch.empty_like(tensor)
                                          for shard, tensor in shards.items()}
        fetched = stores.fetch(version, wanted, held_by(trainee), place)
        assert fetched.numbers is not None
        training_state.check_numbers(trainee, fetched.numbers)
        if not in_place:
            for shard, tensor in wanted.items():
                shards[shard].copy_(tensor)
        trainee.is_gathered = True
        return fetched

    def _broadcast(self, step_version: int) -> int:
        """Broadcast the step version that position 0 restored."""
        restored = torch.tensor([step_version], device=self._iteration.trainee.device)
        dist.broadcast(restored, 0)
        return int(restored.item())

    def _restore(self, order: Reconfigure) -> Recovered:
        """Restore the order's checkpoint, or the seed (step 0)."""
        whole, history = self.full_state(), self._iteration.history
        is_mine = whole is self._iteration.trainee
        if not order.checkpoint:
            return SEED
        self._is_overwritten = self._is_overwritten or is_mine
        folder = checkpoint.folder_of(self._train.output, order.checkpoint)
        with self._sparing():
            step_version = checkpoint.load(folder, whole, history)
        return Recovered(step_version, "checkpoint", "", training_state.num_bytes(whole), NO_STATE)

    # --- the full state ---
    def full_state(self) -> TrainingModel:
        """This member's whole replica: the model that it trains, or one for storage only."""
        mine = self._iteration.trainee
        if mine.is_plain:
            return mine
        if self._full_state is None:
            self._full_state = self._build_full_state()
        return self._full_state

    def _build_full_state(self) -> TrainingModel:
        """A whole replica with its initial weights."""
        built = with_shards(self._work.build_replica(self._iteration.trainee.device,
                                                     self._communicators.alone()))
        self._communicators.unbind(built.roots)
        built.release_gradients()
        return built

    def gather(self, step_version: int, nodes: Sequence[str], to: int) -> None:
        """Gather the full state at position `to`. Raises RuntimeError.

        All members call this. A standby member contributes nothing.
        """
        iteration, place = self._iteration, self._communicators.place
        sources = range(num_positions(self._communicators.axes))
        is_source = place in sources
        numbers = (training_state.numbers(iteration.trainee, step_version, iteration.history)
                   if is_source else None)
        self._gathered = NO_STATE
        found = self._run(iteration.trainee if is_source else None,
                          self.full_state() if place == to else None, numbers, nodes,
                          step_version, sources, staged=False)
        if place == to:
            self._gathered = training_state.load(self.full_state(), found.numbers, History())

    @property
    def has_full_state(self) -> bool:
        """Whether `full_state` has this member's step version."""
        step_version = self._iteration.step_version
        return step_version != NO_STATE and (
            self._iteration.trainee.is_plain or self._gathered == step_version)


def with_shards(trainee: TrainingModel) -> TrainingModel:
    """List the shards of the model, and return the model. Needs communicators."""
    if trainee.shards is None:
        trainee.shards = state_shards.list_shards(trainee)
    return trainee


def _same_part(one: HeldState | None, other: HeldState) -> bool:
    """Whether both hold the same shards of the state."""
    return one is not None and one.shards == other.shards
