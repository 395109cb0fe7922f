"""In-memory checkpoints: each member's share of the state, sent in the background to two stores.

docs/ARCHITECTURE.md, "In-memory checkpoints", has the rules. Checksums, sends and waits release the
interpreter lock. Training never fails because of a store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, contextmanager
from time import monotonic as clock
from typing import NamedTuple

import msgspec
import structlog
import torch

from ....events.log.identity import StoreKeys
from ....events.records.orders import Reconfigure, SetCheckpointStores, StartRank
from ....events.records.reports import CheckpointFailed, MemoryCheckpointStored
from ....events.records.types import Body, StoreEndpoint
from ....events.spec.parallelism import num_positions
from ...checkpoint_store import protocol
from ...checkpoint_store.protocol import Manifest, Offer, Piece, ShareSender, TransferError
from ..model import training_state
from ..model.trainee import TrainingModel
from ..process.exit_report import is_cuda_error
from ..process.history import History
from ..process.trace import Event
from ..recovery.regions import torch_dtype
from ..recovery.state_sources import HeldState
from ..step.own_part import held_by
from .save_reports import WHY_CHARS_MAX
from .share import own_share
from .snapshot import Snapshot, SnapshotLost, buffer_bytes

REPORT_S = 60.0
"""Minimum interval between two reports about the same store process in a generation. They may be
rare, because stores return newer checkpoints of a generation than the log names."""
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 60.0
"""Pause after a share that no store accepted; it doubles each time."""
EVERY = "*"
SEND_ERRORS = (OSError, TransferError, RuntimeError, ValueError, MemoryError)

log = structlog.get_logger()


class StoreOrder(NamedTuple):
    """Where a member's shares go. `bytes_max`: memory that each store may use; 0: its own limit."""

    stores: tuple[StoreEndpoint, ...] = ()
    bytes_max: int = 0

    @classmethod
    def of(cls, order: Reconfigure | SetCheckpointStores, node: str) -> StoreOrder:
        names = next((one.stores for one in order.stores if one.node == node), None)
        return cls(
            tuple(store for store in order.keepers if names is None or store.node in names),
            order.copies_bytes_max,
        )


class Content(NamedTuple):
    """A share: its tensors, the state that is not tensors (`numbers`), and fields of its Offer."""

    snapshot: Snapshot
    numbers: bytes
    share: int
    num_shares: int
    shape: tuple[int, ...] = ()
    part: tuple[int, ...] = ()


class _Share(NamedTuple):
    snapshot: Snapshot
    offer: Offer
    manifest: bytes


class MemorySaver:
    """Sends in-memory checkpoints of one member. Each new order may change `store_keys`. `tell`
    sends a report, from any thread; it returns False if it is not accepted now."""

    def __init__(
        self,
        start: StartRank,
        store_keys: StoreKeys,
        *,
        tell: Callable[[Body], bool],
        note: Callable[[Event, int, int], None],
    ) -> None:
        self._start = start
        self._store_keys = store_keys
        self._tell, self._note = tell, note
        self._share: _Share | None = None
        self._thread: threading.Thread | None = None
        self._generation = 0
        self._last: tuple[int, int] | None = None
        """Generation and step version of the last share that was due."""
        self._is_stored = True
        """Whether a store has the last share."""
        self._whole = (0, 0)
        """The newest version of which all members have stored their shares."""
        self._reported: dict[str, tuple[int, float]] = {}
        """By node: the start number of the store in the last report, and the report's time."""
        self._failing: set[str] = set()
        """Nodes whose store rejected the last share; "": the snapshot failed on this rank; EVERY:
        it is reported that no store has the last share."""
        self._order = StoreOrder()
        self._pause_s = 0.0
        self._next_s = 0.0
        """Earliest time of the next share."""

    def has_begun(self, generation: int, step_version: int) -> bool:
        """Whether the last share that was due was of this state."""
        return self._last == (generation, step_version)

    def has_sent(self, generation: int, step_version: int, order: StoreOrder) -> bool:
        """Whether these stores, if there are any, have this state."""
        is_last = (self._last, self._order) == ((generation, step_version), order)
        return not order.stores or (is_last and self._is_stored)

    def status(self, order: StoreOrder) -> tuple[float, float]:
        """(1 if this member cannot take a checkpoint now, 1 if its last share is in no store)."""
        if order != self._order:
            self._order, self._pause_s, self._next_s = order, 0.0, 0.0
        sending = self._thread is not None and self._thread.is_alive()
        return float(sending or clock() < self._next_s), float(not self._is_stored)

    def begin(
        self,
        content: Callable[[], Content],
        step_version: int,
        generation: int,
        order: StoreOrder,
        *,
        is_whole: bool,
    ) -> None:
        """Begin to send this member's share, `content`. All members call it after the same
        iteration, when none is sending. `is_whole`: all have stored their last shares."""
        if generation != self._generation:
            self._generation, self._reported, self._last = generation, {}, None
            self._failing.discard(EVERY)
        if is_whole and self._last is not None:
            self._whole = self._last
        self._order = order
        self._last, self._is_stored = (generation, step_version), False
        if not order.stores:
            return
        self._note("copy", generation, step_version)
        try:
            self._share = self._offered(content(), step_version, generation)
            self._thread = threading.Thread(
                target=self._send, args=(self._share, order.stores), name="copies", daemon=True
            )
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # no memory for the snapshot, or no thread
            if is_cuda_error(error):
                raise
            self._thread = self._share = None
            self._pause()
            self._no_snapshot(generation, step_version, error)
        else:
            self._log_change("", step_version, "")

    def copy_now(
        self,
        trainee: TrainingModel,
        step_version: int,
        history: History,
        generation: int,
        order: StoreOrder,
        saving: Collection[int] | None,
    ) -> None:
        """Send the share of a member that leaves, and report it, before returning. `saving`: the
        positions of the members that do the same; None: all."""
        if not order.stores:
            return
        self.wait()
        self._note("copy", generation, step_version)
        if generation != self._generation:
            self._generation = generation
            self._failing.discard(EVERY)
        self._order, self._reported = order, {}
        self._last, self._is_stored = (generation, step_version), False
        try:
            self._send(
                self._offered(
                    content_of(trainee, step_version, history, saving), step_version, generation
                ),
                order.stores,
            )
        except (RuntimeError, MemoryError) as error:
            if is_cuda_error(error):
                raise
            self._no_snapshot(generation, step_version, error)

    def detach(self) -> None:
        """Call it before the state changes: a share being sent no longer needs live memory."""
        if self._share is not None:
            self._share.snapshot.detach()

    def wait(self) -> None:
        """Wait until the last share is sent or given up."""
        if self._thread is not None:
            self._thread.join()

    def _offered(self, content: Content, step_version: int, generation: int) -> _Share:
        snapshot = content.snapshot
        pieces = tuple(
            Piece(
                key,
                kind,
                region.offset,
                region.shape,
                region.num_elements * torch_dtype(kind).itemsize,
            )
            for key, kind, region in snapshot.pieces
        )
        manifest = msgspec.msgpack.encode(Manifest(pieces=pieces, numbers=content.numbers))
        return _Share(
            snapshot,
            Offer(
                task=self._start.task,
                rank=self._start.rank,
                attempt=self._start.attempt,
                generation=generation,
                step_version=step_version,
                share=content.share,
                num_shares=content.num_shares,
                manifest_bytes=len(manifest),
                copy_bytes=len(manifest) + snapshot.num_bytes,
                shape=content.shape,
                part=content.part,
                whole=self._whole,
                bytes_max=self._order.bytes_max,
            ),
            manifest,
        )

    def _send(self, share: _Share, stores: tuple[StoreEndpoint, ...]) -> None:
        offer, num_stored = share.offer, 0
        failed: dict[str, str] = {}
        with ExitStack() as stack:
            stack.callback(share.snapshot.release)
            senders: dict[StoreEndpoint, ShareSender] = {}
            for store in stores:
                with _failures(store, failed):
                    connection = stack.enter_context(
                        protocol.connect(store.endpoint, self._store_keys.get(store.node))
                    )
                    senders[store] = ShareSender(connection, offer, share.manifest)
            self._send_pieces(share, senders, failed)
            for store, sender in senders.items():
                with _failures(store, failed):
                    checksum, store_start = sender.finish()
                    num_stored += 1
                    self._report_stored(store, offer, checksum, store_start)
        for store in stores:
            self._log_change(store.node, offer.step_version, failed.get(store.node, ""))
        self._is_stored = num_stored > 0
        if num_stored:
            self._pause_s = 0.0
            self._failing.discard(EVERY)
        else:
            self._pause()
            self._tell_failed(offer.generation, offer.step_version, failed)
        self._note("copied", offer.generation, offer.step_version)

    def _send_pieces(
        self, share: _Share, senders: dict[StoreEndpoint, ShareSender], failed: dict[str, str]
    ) -> None:
        """Send each piece to all of `senders`; remove those that fail."""
        half = len(share.snapshot.pieces) // 2
        pieces = share.snapshot.read()
        try:
            for index, (_, tensor) in enumerate(pieces):
                if index == half:
                    self._note("copy_mid", share.offer.generation, share.offer.step_version)
                data = tensor.reshape(-1).view(torch.uint8).numpy().data
                for store, sender in list(senders.items()):
                    with _failures(store, failed):
                        sender.send(data)
                    if store.node in failed:
                        del senders[store]
                if not senders:
                    return
        except SnapshotLost as error:
            failed |= dict.fromkeys((store.node for store in senders), str(error))
            senders.clear()
        finally:
            pieces.close()

    def _pause(self) -> None:
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, 2 * self._pause_s))
        self._next_s = clock() + self._pause_s

    def _no_snapshot(self, generation: int, step_version: int, error: BaseException) -> None:
        why = str(error) or type(error).__name__
        self._log_change("", step_version, why)
        self._tell_failed(generation, step_version, {"": why})

    def _tell_failed(self, generation: int, step_version: int, failed: dict[str, str]) -> None:
        """Report that no store has the share; once, until one has a later share."""
        node, why = next(iter(failed.items()), ("", "no store took it"))
        self._reported = {}  # then the next share is reported at once
        if EVERY not in self._failing and self._tell(
            CheckpointFailed(
                task=self._start.task,
                rank=self._start.rank,
                attempt=self._start.attempt,
                generation=generation,
                step_version=step_version,
                what="copy",
                path=node,
                why=why[:WHY_CHARS_MAX],
            )
        ):
            self._failing.add(EVERY)

    def _log_change(self, node: str, step_version: int, why: str) -> None:
        if bool(why) == (node in self._failing):
            return
        at = {"node": node} if node else {}
        done = "stored" if node else "taken"
        if why:
            self._failing.add(node)
            log.warning(f"in-memory checkpoint not {done}", iteration=step_version, why=why, **at)
        else:
            self._failing.discard(node)
            log.info(f"in-memory checkpoint {done} again", iteration=step_version, **at)

    def _report_stored(
        self, store: StoreEndpoint, offer: Offer, checksum: str, store_start: int
    ) -> None:
        now_s = clock()
        last_start, last_s = self._reported.get(store.node, (-1, 0.0))
        if last_start == store_start and now_s - last_s < REPORT_S:
            return
        if self._tell(
            MemoryCheckpointStored(
                task=offer.task,
                rank=offer.rank,
                attempt=offer.attempt,
                generation=offer.generation,
                step_version=offer.step_version,
                node=store.node,
                copy_bytes=offer.copy_bytes,
                checksum=checksum,
                keeper_start=store_start,
                share=offer.share,
                num_shares=offer.num_shares,
            )
        ):
            self._reported[store.node] = store_start, now_s


@contextmanager
def _failures(store: StoreEndpoint, failed: dict[str, str]) -> Generator[None]:
    try:
        yield
    except SEND_ERRORS as error:
        if is_cuda_error(error):
            raise
        failed[store.node] = str(error) or type(error).__name__


def content_of(
    trainee: TrainingModel,
    step_version: int,
    history: History,
    saving: Collection[int] | None = None,
) -> Content:
    """This member's share; `saving` as in `copy_now`."""
    positions = sorted(range(num_positions(trainee.axes)) if saving is None else saving)
    share = positions.index(trainee.place)
    numbers = (
        msgspec.msgpack.encode(training_state.numbers(trainee, step_version, history))
        if share == 0
        else b""
    )
    held: HeldState = held_by(trainee)
    return Content(
        Snapshot(own_share(trainee, saving), buffer_bytes(trainee.shards)),
        numbers,
        share,
        len(positions),
        held.shape,
        held.part,
    )
