"""In-memory checkpoints: the whole state, taken between iterations, sent in the background.

The main thread copies the state into a buffer and continues. A thread sends the buffer to one
checkpoint store after another (workers/checkpoint_store/protocol.py); checksums, sends and waits
release the interpreter lock. A checkpoint is skipped while the previous one is being sent. If a
store rejects a checkpoint, the rank logs a warning. Training never waits for the thread and never
fails because of it.

Format: the tensors of training_state.py in sequence, each aligned to ALIGN_BYTES, then `Numbers`:
the part of the state that is not tensors, in msgpack.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import structlog
import torch
from torch import Tensor

from ....events.records.orders import StartRank
from ....events.records.reports import MemoryCheckpointStored
from ....events.records.types import Body, MemoryCheckpoint, StoreEndpoint
from ...checkpoint_store import protocol
from ...checkpoint_store.protocol import CheckpointRequest, Offer, TransferError
from ..model import training_state
from ..model.trainee import TrainingModel
from ..process.history import History
from ..process.trace import Event
from ..step.gradient_reduction import is_cuda_error
from ..step.iteration import clock

ALIGN_BYTES = 64
REPORT_S = 10.0
"""Minimum interval between two reports about the same store. The first report of a generation, or
about a new store process, is sent at once. Reports may be this rare, because a store returns its
newest checkpoint of a generation even if the log names only an older one."""
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 60.0
"""Pause after a checkpoint that no store accepted; it doubles each time."""
RESTORE_S_MAX = 15.0
"""Time limit for all stores together when a generation restores its state. It is below
reconfigure_s_max, so that time is left to read the checkpoint on disk. A transfer in progress is
not interrupted."""

log = structlog.get_logger()


class Snapshot:
    """The whole state after `step_version` steps, in host memory.

    The buffer is reused, because copying into newly allocated memory is slow.
    """

    def __init__(self) -> None:
        self.step_version = 0
        self.layout = ""
        self.numbers: training_state.Numbers | None = None
        self.encoded_numbers = b""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {}

    def take(self, trainee: TrainingModel, step_version: int, history: History) -> None:
        """Copy the current state. One pass over its bytes."""
        live = training_state.tensors(trainee)
        layout = layout_of(live)
        if layout != self.layout:
            self._buffer = torch.empty(flat_bytes(live), dtype=torch.uint8,
                                       pin_memory=trainee.device.type == "cuda")
            self.tensors = views(self._buffer, live)
            self.layout = layout
        for name, tensor in live.items():
            self.tensors[name].copy_(tensor)
        self.step_version = step_version
        self.numbers = training_state.numbers(trainee, step_version, history)
        self.encoded_numbers = msgspec.msgpack.encode(self.numbers)

    @property
    def num_bytes(self) -> int:
        """The size of the checkpoint as sent."""
        return self._buffer.numel() + len(self.encoded_numbers)

    def parts(self) -> list[memoryview]:
        """The bytes to send, in order."""
        return [self._buffer.numpy().data, memoryview(self.encoded_numbers)]


class MemorySaver:
    """Sends in-memory checkpoints of one rank. `spare` excludes a connection from the sockets that
    an interrupt shuts down. `tell` sends a report and can be called from any thread; it returns
    False if the report is not accepted now. `note` writes the trace.
    """

    def __init__(self, start: StartRank, secret: str, *,
                 spare: Callable[[int], AbstractContextManager[None]], tell: Callable[[Body], bool],
                 note: Callable[[Event, int, int], None]) -> None:
        self._start = start
        self._secret = secret
        self._spare, self._tell, self._note = spare, tell, note
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._generation = 0
        self._reported: dict[str, tuple[int, float]] = {}
        """By node: the start number of the store in the last report, and the report's time."""
        self._failing: set[str] = set()
        """Nodes whose store rejected the last checkpoint; "": the snapshot failed on this rank."""
        self._stores: tuple[StoreEndpoint, ...] = ()
        self._pause_s = 0.0
        self._next_s = 0.0
        """Earliest time of the next checkpoint."""

    def copy(self, trainee: TrainingModel, step_version: int, history: History, generation: int,
             stores: tuple[StoreEndpoint, ...]) -> None:
        """Take a snapshot and send it in the background. Does nothing while the previous snapshot
        is being sent, or in the pause after a snapshot that no store accepted."""
        if not stores or (self._thread is not None and self._thread.is_alive()):
            return
        if generation != self._generation:
            self._generation, self._reported = generation, {}
        if stores != self._stores:
            self._stores, self._pause_s, self._next_s = stores, 0.0, 0.0
        if clock() < self._next_s:
            return
        self._note("copy", generation, step_version)
        try:
            self._snapshot.take(trainee, step_version, history)
            self._thread = threading.Thread(target=self._send, args=(generation, stores),
                                            name="copies", daemon=True)
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # no memory for the snapshot, or no thread
            if is_cuda_error(error):
                raise
            self._thread = None
            self._pause()
            self._log_change("", step_version, str(error) or type(error).__name__)
        else:
            self._log_change("", step_version, "")

    def _send(self, generation: int, stores: tuple[StoreEndpoint, ...]) -> None:
        snapshot, start = self._snapshot, self._start
        offer = Offer(task=start.task, rank=start.rank, attempt=start.attempt,
                      generation=generation, step_version=snapshot.step_version,
                      layout=snapshot.layout, copy_bytes=snapshot.num_bytes,
                      numbers_bytes=len(snapshot.encoded_numbers))
        num_stored = 0
        for store in stores:
            why = ""
            try:
                checksum, store_start = self._put(store, offer)
                num_stored += 1
                self._report_stored(store, offer, checksum, store_start)
            except (OSError, TransferError, RuntimeError, ValueError, MemoryError) as error:
                if is_cuda_error(error):
                    raise
                why = str(error) or type(error).__name__
            self._log_change(store.node, snapshot.step_version, why)
        if num_stored:
            self._pause_s = 0.0
        else:
            self._pause()
        self._note("copied", generation, snapshot.step_version)

    def _pause(self) -> None:
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, 2 * self._pause_s))
        self._next_s = clock() + self._pause_s

    def _log_change(self, node: str, step_version: int, why: str) -> None:
        """Log when checkpoints begin to fail and when they succeed again."""
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

    def _put(self, store: StoreEndpoint, offer: Offer) -> tuple[str, int]:
        halfway = iter(range(offer.copy_bytes // protocol.CHUNK_BYTES // 2, -1, -1))

        def on_chunk() -> None:
            if next(halfway, -1) == 0:
                self._note("copy_mid", offer.generation, offer.step_version)

        with (protocol.connect(store.endpoint, self._secret) as connection,
              self._spare(connection.fileno())):
            return protocol.put(connection, offer, self._snapshot.parts(), on_chunk)

    def _report_stored(self, store: StoreEndpoint, offer: Offer, checksum: str,
                       store_start: int) -> None:
        now_s = clock()
        last_start, last_s = self._reported.get(store.node, (-1, 0.0))
        if last_start == store_start and now_s - last_s < REPORT_S:
            return
        if self._tell(MemoryCheckpointStored(
                task=offer.task, rank=offer.rank, attempt=offer.attempt,
                generation=offer.generation, step_version=offer.step_version, node=store.node,
                copy_bytes=offer.copy_bytes, checksum=checksum, keeper_start=store_start)):
            self._reported[store.node] = store_start, now_s


# --- byte layout --------------------------------------------------------------------------------
def layout_of(tensors: dict[str, Tensor]) -> str:
    """16 hex digits: the hash of the names, dtypes and shapes, in order."""
    described = "".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n"
                        for name, tensor in tensors.items())
    return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()


def flat_bytes(tensors: dict[str, Tensor]) -> int:
    """The size of the tensors in sequence, with padding."""
    return sum(_padded(tensor) for tensor in tensors.values())


def views(buffer: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of `buffer` (bytes) at the tensors' offsets, with their dtypes and shapes."""
    found: dict[str, Tensor] = {}
    begin = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        found[name] = buffer[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        begin += _padded(tensor)
    return found


def _padded(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


# --- restore ------------------------------------------------------------------------------------
def restore(trainee: TrainingModel, history: History, task: int,
            stored: tuple[MemoryCheckpoint, ...], secret: str,
            is_interrupted: Callable[[], bool]) -> tuple[int, MemoryCheckpoint, int] | None:
    """Load the first usable checkpoint of `stored`; return its step version, entry and size.

    If none is usable, return None and leave the state unchanged; a warning gives each reason.
    A store that is unreachable or does not answer is tried once. No further store is tried after
    RESTORE_S_MAX or when the next order arrives.
    """
    last_s = clock() + RESTORE_S_MAX
    unreachable = set[str]()
    for entry in stored:
        wait_s = last_s - clock()
        if wait_s <= 0:
            log.warning("no more checkpoint stores are tried", after_s=RESTORE_S_MAX)
        if wait_s <= 0 or is_interrupted():
            break
        if entry.endpoint in unreachable:
            continue
        try:
            offer, numbers, memory = _fetch(trainee, task, entry, secret, wait_s)
        except (OSError, TransferError) as error:
            if isinstance(error, OSError):
                unreachable.add(entry.endpoint)
            log.warning("in-memory checkpoint not usable", node=entry.node,
                        iteration=entry.step_version, why=str(error) or type(error).__name__)
            continue
        live = training_state.tensors(trainee)
        for name, tensor in views(memory, live).items():
            live[name].copy_(tensor)
        return training_state.load(trainee, numbers, history), entry, offer.copy_bytes
    return None


def _fetch(trainee: TrainingModel, task: int, entry: MemoryCheckpoint, secret: str, wait_s: float
           ) -> tuple[Offer, training_state.Numbers, Tensor]:
    """Fetch and verify a checkpoint; each wait is limited to `wait_s`. Raises OSError,
    TransferError."""
    live = training_state.tensors(trainee)
    layout, num_bytes = layout_of(live), flat_bytes(live)
    memory = torch.empty(0, dtype=torch.uint8)

    def allocate(offer: Offer) -> memoryview:
        nonlocal memory
        if offer.layout != layout or offer.copy_bytes != num_bytes + offer.numbers_bytes:
            raise TransferError(f"it is of another model: layout {offer.layout}, not {layout}")
        try:
            memory = torch.empty(offer.copy_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise TransferError(f"no memory for {offer.copy_bytes} bytes: {error}") from None
        return memory.numpy().data

    request = CheckpointRequest(task=task, generation=entry.generation,
                                step_version=entry.step_version,
                                step_version_max=entry.step_version_max)
    with protocol.connect(entry.endpoint, secret, wait_s) as connection:
        offer, checksum = protocol.get(connection, request, allocate)
    if offer.step_version == entry.step_version and checksum != entry.checksum:
        raise TransferError(f"it was altered: its checksum is {checksum}, not {entry.checksum}")
    try:
        numbers = msgspec.msgpack.decode(memory[num_bytes:].numpy().data,
                                         type=training_state.Numbers)
    except msgspec.MsgspecError as error:
        raise TransferError(f"its numbers cannot be decoded: {error}") from None
    try:
        training_state.check_numbers(trainee, numbers)
    except ValueError as error:
        raise TransferError(f"it does not fit: {error}") from None
    if numbers.step_version != offer.step_version:
        raise TransferError(f"it is of step {numbers.step_version}, not {offer.step_version}")
    return offer, numbers, memory
