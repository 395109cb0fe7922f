"""State recovery: where a member's state comes from when it joins a generation.

Each shard comes from the nearest member that holds it. A new part of the model is built beside the
old one, which is kept until the new one is complete. If no member holds a state, each reads its
part of an in-memory checkpoint or of the checkpoint on disk, or begins from the seed.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import megatron.core
import structlog
import torch
from msgspec.structs import replace

from ...events.errors import UsageError
from ...events.log.identity import StoreKeys
from ...events.records.orders import Reconfigure, StartRank
from ...events.records.types import Origin, ReceivedState
from ...events.spec.job import Train
from ...events.spec.model import Axes
from ...events.spec.parallelism import num_positions
from ..checkpoint_store.protocol import TransferError
from ..ipc.work_row import WorkCount
from .checkpoint import checkpoint, memory_restore
from .checkpoint.memory_restore import Fetched, Stores
from .communicators.communicators import Communicators
from .model import training_state
from .model.megatron_engine import MegatronEngine
from .model.trainee import TrainingModel
from .model.workload import Beginning, BuildPart, Workload
from .process.trace import Event
from .recovery import state_shards
from .recovery.peers import World, is_so_on_all
from .recovery.regions import State
from .recovery.resharding import Missing
from .recovery.settlement import Settlement, find_receivers
from .recovery.state_exchange import exchange
from .recovery.state_sources import NO_STATE, WHOLE, Claim, HeldState
from .step.own_part import OwnPart, held_by

VERSIONS = f"torch {torch.__version__}, megatron-core {megatron.core.__version__}"
DAMAGED_CHARS_MAX = 1_000
AGAIN_S = 1.0
"""After this pause a damaged checkpoint is read again: another client of a network file system may
see a file late."""
log = structlog.get_logger()


class Recovered(NamedTuple):
    """Where a member's state came from, as reported in Reconfigured."""

    step_version: int
    origin: Origin
    node: str
    received_bytes: int
    source: int
    taken: tuple[ReceivedState, ...] = ()
    damaged: str = ""
    """Why newer checkpoints were not read."""


SEED = Recovered(0, "seed", "", 0, NO_STATE)


def _beginning_of(start: StartRank, work: Workload) -> Beginning | None:
    """Where training begins, if not at the initial weights. Raises UsageError."""
    training = start.spec.training
    folder = training.begin_from if training is not None else ""
    if folder and work.beginning is not None:
        raise UsageError(
            f"the job begins from {folder}, and its program from a checkpoint of its own",
            "leave begin_from or --load out",
        )
    return checkpoint.StoredBeginning(folder) if folder else work.beginning


class StateRecovery:
    """Recovers the state of one member into its `part` of the iteration."""

    def __init__(
        self,
        start: StartRank,
        work: Workload,
        communicators: Communicators,
        part: OwnPart[MegatronEngine],
        store_keys: StoreKeys,
        *,
        begins: bool,
        note: Callable[[Event], None],
        count: WorkCount,
    ) -> None:
        """`count`: of what it moves and builds, until the generation is interrupted."""
        self._count = count
        self._start, self._work = start, work
        self._beginning = _beginning_of(start, work)
        self._communicators, self._part = communicators, part
        self._store_keys, self._note = store_keys, note
        self._staged: TrainingModel | None = None
        self._staged_numbers: training_state.Numbers | None = None
        self._staged_in = 0
        self.is_staged_next = False
        """Whether `activate` will replace the model by the staged one."""
        self._is_overwritten = not begins
        """Whether the model no longer has the initial state from the seed, or never had it."""
        self._begun: TrainingModel | None = None
        """The model that the workload has set to the state of the first iteration."""

    @property
    def _train(self) -> Train:
        return self._work.train

    @property
    def _trainee(self) -> TrainingModel:
        """The model that this member trains."""
        return self._part.engine.trainee

    @property
    def next_model(self) -> TrainingModel:
        """The model that this member trains once all members have their parts."""
        staged = self._staged if self.is_staged_next else None
        return staged or self._trainee

    # --- recovery into this member ---
    def recover(
        self, order: Reconfigure, place: int, claims: Sequence[Claim], settlement: Settlement
    ) -> Recovered:
        """Recover this member's part of the settled state, in the layout of the order. A member
        with the same step of another part keeps both until `activate`. If this raises RuntimeError,
        the state is still of the step that is reported."""
        axes = order.axes or Axes(dp=len(order.members))
        step_version = settlement.step_version
        if step_version == NO_STATE:
            return self._recover_stored(order, axes, place)
        receivers = find_receivers(settlement, claims, axes, self._train.parallel.optimizer)
        source = self._held(settlement, place)
        if place in receivers and not settlement.shares[place].kept:
            self._part.free_gradients()
        mine = self._trainee
        trainee, is_new = self._model_for(
            axes,
            place,
            begins=step_version == 0,
            is_worthless=self._part.state.step_version == NO_STATE and source is not mine,
        )
        if step_version == 0:
            self._begin(trainee, axes, place)
        numbers, taken = None, tuple[ReceivedState, ...]()
        try:
            if receivers and step_version:
                numbers, taken = self._exchange(
                    order,
                    place,
                    step_version,
                    settlement.holders,
                    source,
                    trainee if place in receivers else None,
                )
            if numbers is None and step_version and is_new:
                # An abandoned pass holds this member's model.
                numbers = self._copy_state(trainee, step_version)
            # What was received may be in the model already, which then has another step version.
            if numbers is not None or not self._communicators.woken:
                self._set_state(trainee, numbers, step_version)
        finally:
            if trainee not in (self._trainee, self._staged):
                self._communicators.unbind(trainee.roots)
        return self._result(order, place, step_version, taken)

    def claim(self) -> Claim:
        """The state that this member trains, and its staged state."""
        claim = replace(self._part.claim(), versions=_versions(self._trainee))
        if self._staged is None:
            return claim
        return replace(claim, staged=held_by(self._staged), staged_in=self._staged_in)

    def become_standby(self) -> None:
        """Train nothing from now on. The state that this member provided becomes outdated."""
        self._is_overwritten = True
        self._part.reset_to(NO_STATE)

    def leave(self) -> None:
        """Remove the generation's process groups from the staged model."""
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
        return staged or self._trainee

    def _model_for(
        self, axes: Axes, place: int, *, begins: bool, is_worthless: bool
    ) -> tuple[TrainingModel, bool]:
        """The model to train, and whether it is new: the current one if it is for the same part and
        can be used, or of a standby member. If its content is worthless, it is released first, and
        a new one takes its place at once."""
        part = self._part
        mine = self._trainee
        if place >= num_positions(axes):
            return mine, False
        is_overwritten = self._is_overwritten or part.state.step_version > 0
        optimizer = self._train.parallel.optimizer
        wanted = HeldState(axes=axes, optimizer=optimizer, place=place)
        if (
            not (begins and is_overwritten)
            and not part.is_stuck
            and not mine.is_released
            and held_by(mine).shards == wanted.shards
        ):
            self._communicators.bind()
            mine.axes, mine.place = axes, place
            return mine, False
        if is_worthless:
            self._communicators.discard_handles()
            mine.release()
        self._note("build")
        with self._count.of("builds its model", unit=""):
            trainee = with_shards(
                self._work.build(
                    mine.device, self._communicators.groups, axes, place, begins=begins
                )
            )
        trainee.release_gradients()
        if is_worthless:
            part.set_model(MegatronEngine(trainee))
            part.reset_to(NO_STATE)
            self._is_overwritten = not begins
            gc.freeze()  # as member.py does after building
        return trainee, True

    def _exchange(
        self,
        order: Reconfigure,
        place: int,
        step_version: int,
        holders: Mapping[int, HeldState],
        source: TrainingModel | None,
        target: TrainingModel | None,
    ) -> tuple[training_state.Numbers | None, tuple[ReceivedState, ...]]:
        """Exchange shards. When this returns numbers, `target` has the received state."""
        mine = self._part
        # Write directly if the overwritten data is worthless or is the source itself.
        in_place = (
            target is not self._trainee or target is source or mine.state.step_version == NO_STATE
        )
        self._is_overwritten = self._is_overwritten or (in_place and target is self._trainee)
        if target is self._trainee:
            mine.checkpoints.before_change()
        numbers = None
        if source is not None:  # a staged model gets its numbers only when it is activated
            numbers = (
                self._staged_numbers
                if source is self._staged
                else training_state.numbers(source, step_version, mine.history)
            )
        seat = HeldState(
            axes=order.axes or Axes(dp=len(order.members)),
            optimizer=self._train.parallel.optimizer,
            place=place,
        )
        have: State = {}
        if source is not None:
            source = with_shards(source)
            have = source.shards if source.is_gathered else state_shards.stepped(source)
        try:
            found = exchange(
                World(self._communicators.rounds),
                have,
                with_shards(target).shards if target is not None else have,
                numbers,
                step_version=step_version,
                held=holders,
                seat=seat if target is not None else WHOLE,
                nodes=[member.node for member in order.members],
                staged=not in_place,
                note=self._note,
                count=self._count,
            )
        except Missing as missing:
            # Every member raises this: its peers have excluded the last holder of some part.
            raise RuntimeError(str(missing)) from None
        if target is None or self._communicators.woken:
            return None, ()
        found.activate()
        target.is_gathered = True
        return found.numbers, tuple(
            ReceivedState(order.members[sender].rank, order.members[sender].node, taken_bytes)
            for sender, taken_bytes in found.taken.items()
        )

    def _copy_state(self, trainee: TrainingModel, step_version: int) -> training_state.Numbers:
        """Copy this member's own state into `trainee` of the same part."""
        part = self._part
        live = with_shards(self._trainee).shards
        for shard, tensor in trainee.shards.items():
            tensor.copy_(live[shard])
        return training_state.numbers(self._trainee, step_version, part.history)

    def _set_state(
        self, trainee: TrainingModel, numbers: training_state.Numbers | None, step_version: int
    ) -> None:
        """Make `trainee` this member's state, even if the rest of the join fails: the step version
        that the member reports must always be that of its tensors."""
        part = self._part
        self.is_staged_next = False
        if trainee is self._trainee:
            if numbers is not None:
                part.reset_to(training_state.load(trainee, numbers, part.history))
        elif part.state.step_version == step_version != 0:
            self._drop_staged()
            self._staged, self._staged_numbers, self.is_staged_next = trainee, numbers, True
            self._staged_in = self._communicators.generation
            self._note("staged")
        else:
            self._replace_model(trainee, numbers)

    def _replace_model(
        self, trainee: TrainingModel, numbers: training_state.Numbers | None
    ) -> None:
        part = self._part
        history = part.history
        step_version = training_state.load(trainee, numbers, history) if numbers is not None else 0
        if trainee is self._staged:
            self._staged = None
        if part.state.step_version == step_version:
            part.replace_model(MegatronEngine(trainee))
        else:
            part.set_model(MegatronEngine(trainee))
            part.reset_to(step_version)
        self._drop_staged()
        self._communicators.discard_handles()
        gc.freeze()  # as member.py does after building

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.release()
            self._staged = None

    def _result(
        self, order: Reconfigure, place: int, step_version: int, taken: tuple[ReceivedState, ...]
    ) -> Recovered:
        mine = order.members[place]
        if step_version == 0:
            return SEED._replace(taken=taken)
        others = [one for one in taken if one.rank != mine.rank]
        if not others:
            return Recovered(step_version, "own", mine.node, 0, mine.rank)
        most = max(others, key=lambda one: one.taken_bytes)
        received_bytes = sum(one.taken_bytes for one in others)
        return Recovered(step_version, "peer", most.node, received_bytes, most.rank, tuple(others))

    # --- no member has a state ---
    def _recover_stored(self, order: Reconfigure, axes: Axes, place: int) -> Recovered:
        """Read a stored state, or begin from the seed. Raises RuntimeError, UsageError."""
        part = self._part
        if part.state.step_version != NO_STATE:
            # Without the lost parts its state is of no use. It is overwritten in place, so from now
            # on this member reports that it has none.
            self._is_overwritten = self._is_overwritten or part.state.step_version > 0
            part.reset_to(NO_STATE)
        part.checkpoints.before_change()
        part.free_gradients()
        self._drop_staged()
        self.is_staged_next = False
        has_place = place < num_positions(axes)
        stored = self._newest_stored(is_needed=not order.copies)
        trainee, _ = self._model_for(
            axes,
            place,
            is_worthless=True,
            begins=not (order.copies or order.checkpoint or stored > 0),
        )
        restored = self._restore(order, trainee, place, stored, has_place=has_place)
        if restored is SEED:
            trainee, _ = self._model_for(axes, place, is_worthless=True, begins=True)
            self._begin(trainee, axes, place)
        elif has_place and not self._communicators.woken:
            trainee.is_gathered = True
            part.reset_to(restored.step_version)
        return restored

    def _newest_stored(self, *, is_needed: bool) -> int:
        """A collective: the step version of the workload's stored state, as the first member sees
        it; 0 if there is none, or if it cannot be read and is not needed. Raises as `_together`."""
        beginning = self._beginning
        if beginning is None:
            return 0

        def newest() -> bytes:
            try:
                return str(beginning.newest()).encode()
            except UsageError as error:
                if is_needed:
                    raise
                log.warning("stored state not read", why=str(error))
                return b"0"

        return int(self._together(newest)[0])

    def _together(self, call: Callable[[], bytes]) -> list[bytes]:
        """A collective: the result of `call` on each member. If it fails on some (RuntimeError,
        UsageError), it raises RuntimeError on all others, with the reason."""
        failed: Exception | None = None
        result = b""
        try:
            result = b"+" + call()
        except (RuntimeError, UsageError) as error:
            failed, result = error, str(error).encode()
        results = self._communicators.rounds.gather(result)
        if failed is not None:
            raise failed
        for each in results:
            if not each.startswith(b"+"):
                raise RuntimeError(each.decode())
        return [each[1:] for each in results]

    def _restore(
        self,
        order: Reconfigure,
        trainee: TrainingModel,
        place: int,
        stored: int,
        *,
        has_place: bool,
    ) -> Recovered:
        """Read the newest state: a checkpoint, in memory or not, or the workload's `stored` one."""
        if order.copies:
            restored = self._restore_from_memory(order, trainee, place, stored, has_place=has_place)
            if restored is not None:
                return restored
            stored = self._newest_stored(is_needed=True)
        damaged = ""
        if order.checkpoint and checkpoint.step_version_of(order.checkpoint) >= stored:
            read_state, damaged = self._restore_from_disk(
                order, trainee, stored, has_place=has_place
            )
            if read_state is not None:
                return read_state
            if not stored:
                raise UsageError(damaged, checkpoint.FROM_ANOTHER)
        if not stored:
            return SEED

        def read() -> bytes:
            if has_place:
                assert self._beginning is not None
                self._is_overwritten = True
                self._beginning.read(trainee, stored, self._part.history, self._count)
            return b""

        self._together(read)
        return _from_disk(trainee, stored, damaged, has_place=has_place)

    def _restore_from_disk(
        self, order: Reconfigure, trainee: TrainingModel, stored: int, *, has_place: bool
    ) -> tuple[Recovered | None, str]:
        """A collective: read the order's checkpoint. If it is damaged, also for a second look, the
        one before, from step version `stored` on. Returns what was recovered, or None, and why
        newer ones were not read. Raises RuntimeError, UsageError."""

        def read(path: str) -> bytes:
            if not has_place:
                return b""
            self._is_overwritten = True
            folder = checkpoint.folder_of(order.output or self._train.output, path)
            self._note("read")
            try:
                version = checkpoint.load(folder, trainee, self._part.history, self._count)
                self._note("moved")
            except checkpoint.DamagedCheckpoint as error:
                return b"!" + str(error).encode()
            return str(version).encode()

        whys: dict[str, str] = {}
        for path in (order.checkpoint, order.checkpoint, *order.earlier):
            if checkpoint.step_version_of(path) < stored:
                continue
            answers = [each for each in self._together(partial(read, path)) if each]
            bad = [each[1:].decode() for each in answers if each.startswith(b"!")]
            if not bad:
                versions = {int(each) for each in answers}
                if len(versions) > 1:
                    raise RuntimeError(
                        f"some members read the checkpoint of step {min(versions)}, others "
                        f"that of step {max(versions)}: they do not see the same {path}"
                    )
                whys.pop(path, None)
                why = "; ".join(whys.values())
                return _from_disk(trainee, versions.pop(), why, has_place=has_place), why
            if path not in whys:
                log.warning("a checkpoint cannot be used", why=bad[0])
                time.sleep(AGAIN_S)
            whys[path] = bad[0]
        return None, next(iter(whys.values()))

    def _restore_from_memory(
        self,
        order: Reconfigure,
        trainee: TrainingModel,
        place: int,
        stored: int,
        *,
        has_place: bool,
    ) -> Recovered | None:
        """A collective: read the newest in-memory checkpoint that every member can read, from step
        version `stored` on. None if there is none. Raises RuntimeError."""
        stores = Stores(
            self._start.task,
            order.copies,
            self._store_keys,
            lambda: self._communicators.woken,
            self._communicators.ending,
            silent_s_max=order.restore_s_max,
            count=self._count,
        )
        shares = memory_restore.gather_shares(
            self._communicators.rounds, stores.shares(place, len(order.members))
        )
        for version in stores.versions(shares):
            if version.step_version < stored:
                continue
            fetched, why = Fetched(None, 0, ""), ""
            try:
                if has_place:
                    self._is_overwritten = True
                    self._note("read")
                    fetched = stores.fetch(version, trainee.shards, held_by(trainee), place)
                    self._note("moved")
                    assert fetched.numbers is not None, "share 0 has the numbers"
                    training_state.load(trainee, fetched.numbers, self._part.history)
            except (OSError, TransferError, ValueError) as error:
                why = str(error) or type(error).__name__
                log.warning(
                    "in-memory checkpoint not restored", iteration=version.step_version, why=why
                )
            if self._communicators.woken:
                raise RuntimeError("interrupted while it restored its state")
            if is_so_on_all(not why):
                return Recovered(
                    version.step_version, "copy", fetched.node, fetched.received_bytes, NO_STATE
                )
        return None

    def _begin(self, trainee: TrainingModel, axes: Axes, place: int) -> None:
        if trainee is not self._begun and place < num_positions(axes):
            build_part = part_builder(self._work, self._communicators, trainee.device)
            self._work.begin(trainee, build_part, self._count)
            self._begun = trainee


def _versions(trainee: TrainingModel) -> str:
    """What must be equal on all members: with exact sums also what else decides the bits."""
    if trainee.exact is None:
        return VERSIONS
    kind = (
        torch.cuda.get_device_name()
        if trainee.device.type == "cuda"
        else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    )
    num = torch.get_num_threads()
    return f"{VERSIONS}, {kind}, {num} thread{'s' * (num > 1)}"


def part_builder(work: Workload, communicators: Communicators, device: torch.device) -> BuildPart:
    def build_part(axes: Axes, place: int) -> TrainingModel:
        with communicators.at_position(axes, place) as groups:
            built = with_shards(work.build(device, groups, axes, place))
        built.release_gradients()
        return built

    return build_part


def with_shards(trainee: TrainingModel) -> TrainingModel:
    """List the shards of the model, and return the model. Needs communicators."""
    if trainee.shards is None:
        trainee.shards = state_shards.list_shards(trainee)
    return trainee


def _from_disk(
    trainee: TrainingModel, step_version: int, damaged: str, *, has_place: bool
) -> Recovered:
    read_bytes = sum(tensor.nbytes for tensor in trainee.shards.values()) if has_place else 0
    return Recovered(
        step_version, "checkpoint", "", read_bytes, NO_STATE, damaged=damaged[:DAMAGED_CHARS_MAX]
    )
