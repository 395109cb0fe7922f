"""The state of a task that restarts from memory: each process has its own in checkpoint stores.

After a fault all processes start again, in the same number and layout, and each takes what it alone
has stored (process_state.py) of the newest whole version. Otherwise the task continues from its
checkpoint on disk.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import structlog
from msgspec import Struct

from ....events.decoding import from_msgpack
from ....events.records.orders import StartRank
from ...checkpoint_store.protocol import TransferError
from ..process.control_thread import Control
from ..recovery.peers import World, is_so_on_all
from .memory_checkpoint import Content, MemorySaver, StoreOrder
from .memory_restore import StoredShare, Stores
from .process_state import NotEncodable, decode, encode, generators, set_generators
from .snapshot import Snapshot

log = structlog.get_logger()


class Restored(NamedTuple):
    """The state of this process after `step_version` iterations."""

    step_version: int
    tree: Any


class _Found(Struct, frozen=True, array_like=True):
    """What a process tells the others at its start."""

    attempt: int
    after: int
    shares: list[StoredShare]


class RestartMemory:
    """The stored state of process `place` of `num`. All processes call each method after the same
    iteration; those of several processes use torch.distributed, which must be initialised."""

    def __init__(
        self,
        start: StartRank,
        control: Control,
        place: int,
        num: int,
    ) -> None:
        self._start, self._control, self._place, self._num = start, control, place, num
        self._generation = start.attempt
        self._saver = MemorySaver(
            start,
            control.store_keys,
            tell=control.tell_unless_behind,
            note=lambda event, generation, step_version: None,
        )
        self._why = ""

    def restore(self, meshes: Sequence[Any] = (), *, after: int = 0) -> Restored | None:
        """The newest state of which every process has its own, if it is newer than the largest
        `after`. Sets the random generators too. None: the log says why, unless this is the first
        start. `meshes`: as in `decode`."""
        stores = Stores(
            self._start.task,
            self._start.copies,
            self._control.store_keys,
            lambda: False,
            silent_s_max=self._start.restore_s_max,
        )
        mine = _Found(self._start.attempt, after, stores.shares(self._place, self._num))
        all_found = [mine]
        if self._num > 1:
            told = World.of_torch().collect(msgspec.msgpack.encode(mine))
            all_found = [from_msgpack(data, _Found) for data in told]
        self._generation = max(one.attempt for one in all_found)
        after = max(one.after for one in all_found)
        versions = stores.versions([share for one in all_found for share in one.shares])
        others = sorted({len(version.shares) for version in versions} - {self._num})
        for version in versions:
            if len(version.shares) != self._num or version.step_version <= after:
                continue
            tree = self._read(stores, version, meshes)
            if self._agreed(tree is not None):
                log.info(
                    "continues from memory",
                    iteration=version.step_version,
                    stored_by=version.generation,
                )
                set_generators(tree["generators"])
                return Restored(version.step_version, tree["state"])
        if self._start.copies or self._start.attempt > 1:
            why = (
                f"it was stored by {others[0]} processes, and these are {self._num}"
                if others
                else "no version is whole, or newer than the checkpoint"
            )
            log.warning("does not continue from memory", why=why)
        return None

    def _read(self, stores: Stores, version: Any, meshes: Sequence[Any]) -> Any:
        try:
            data, tensors = stores.read_share(version, self._place)
            return decode(data, tensors, meshes)
        except (TransferError, ValueError) as error:
            log.warning(
                "in-memory checkpoint not usable", iteration=version.step_version, why=str(error)
            )
            return None

    def _agreed(self, mine: bool) -> bool:
        return mine if self._num == 1 else is_so_on_all(mine)

    def status(self) -> tuple[float, float]:
        return self._saver.status(self._order())

    def copy(self, tree: Callable[[], Any], step_version: int, *, is_whole: bool) -> None:
        """Begin to store what `tree` returns, the state after `step_version` iterations. Before the
        state changes, call `detach`. `is_whole`: all processes have stored their last state."""
        order = self._order()
        if self._why or not order.stores:
            return
        try:
            encoded = encode({"state": tree(), "generators": generators()})
        except NotEncodable as error:
            self._why = str(error)
            log.warning("the state is not stored in memory", why=self._why)
            return
        self._saver.begin(
            lambda: Content(Snapshot(encoded[0], None), encoded[1], self._place, self._num),
            step_version,
            self._generation,
            order,
            is_whole=is_whole,
        )

    def copy_in_turn(self, tree: Callable[[], Any], step_version: int) -> None:
        """As `copy` and `detach`, for processes that agree on nothing else: skipped if one of them
        still sends its last state. A collective."""
        is_sending, is_missing = self.status()
        may_copy = self._agreed(not is_sending)
        is_whole = self._agreed(not is_missing)
        if may_copy:
            self.copy(tree, step_version, is_whole=is_whole)
            self.detach()

    def detach(self) -> None:
        """The state is about to change: end the reading of live memory."""
        self._saver.detach()

    def wait(self) -> None:
        self._saver.wait()

    def _order(self) -> StoreOrder:
        order = self._control.keep
        return StoreOrder() if order is None else StoreOrder.of(order, self._start.slot.node)
