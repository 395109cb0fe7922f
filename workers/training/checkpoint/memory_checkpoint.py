"""Copies of the whole state in the memory of keepers, taken at a boundary and sent beside training.

The main thread copies the state into a buffer of its own, once, and goes on; a thread that lives
only as long sends it to one keeper after the other (workers/checkpoint_store/protocol.py). It holds
the interpreter for no longer than it takes to name the next bytes: sums, sends and waits are made
without it. A copy is skipped while the last one is on its way, and one that a keeper does not take
is a line in the rank's log: training never waits for a copy and is never hurt by one.

The bytes are the tensors of state.py, one behind the other, each at a multiple of ALIGN_BYTES, then
its numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import structlog
import torch
from msgspec import MsgspecError
from torch import Tensor

from ....events.records.orders import StartRank
from ....events.records.reports import MemoryCheckpointStored
from ....events.records.types import Body, Copy, Keeper
from ...checkpoint_store import protocol
from ...checkpoint_store.protocol import Failed, Offer, Wish
from ..model import training_state
from ..model.trainee import Trainee
from ..process.history import History
from ..process.trace import Event
from ..step.gradient_reduction import poisoned
from ..step.iteration import clock

ALIGN_BYTES = 64
TELL_S = 10.0
"""How often it is told that a keeper has a copy: the newest one; and at once in each generation, of
each process of a keeper. A keeper gives the newest of a generation, also if the log knows of an
older one alone."""
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 60.0
"""How long no copy is taken after one that no keeper took: doubled each time."""
RESTORE_S_MAX = 15.0
"""For so long keepers may keep a generation waiting that has no state, all of them together: below
reconfigure_s_max, so that there is time for the checkpoint. Bytes that flow are not cut short."""

log = structlog.get_logger()


class Snapshot:
    """The whole state as it was after `step_version` steps, in host memory.

    The buffer is made once and used again: its first filling takes longer than all others.
    """

    def __init__(self) -> None:
        self.step_version = 0
        self.layout = ""
        self.told: training_state.Numbers | None = None
        self.numbers = b""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: dict[str, Tensor] = {}

    def take(self, trainee: Trainee, step_version: int, history: History) -> None:
        """Copy the state as it is now. One pass over its bytes."""
        live = training_state.tensors(trainee)
        layout = layout_of(live)
        if layout != self.layout:
            self._buffer = torch.empty(flat_bytes(live), dtype=torch.uint8,
                                       pin_memory=trainee.device.type == "cuda")
            self._views = views(self._buffer, live)
            self.layout = layout
        for name, tensor in live.items():
            self._views[name].copy_(tensor)
        self.step_version = step_version
        self.told = training_state.numbers(trainee, step_version, history)
        self.numbers = training_state.encode(self.told)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self._views

    @property
    def num_bytes(self) -> int:
        """Of the copy as it is sent."""
        return self._buffer.numel() + len(self.numbers)

    def parts(self) -> list[memoryview]:
        """What is sent, one behind the other."""
        return [self._buffer.numpy().data, memoryview(self.numbers)]


class Copier:
    """Sends copies of one rank's state. `spare` keeps a connection from being shut with others'.

    `tell` takes reports, from any thread, and False from it says that this one is not taken now;
    `note` is the trace's.
    """

    def __init__(self, start: StartRank, secret: str, *,
                 spare: Callable[[int], AbstractContextManager[None]],
                 tell: Callable[[Body], bool],
                 note: Callable[[Event, int, int], None]) -> None:
        self._start = start
        self._secret = secret
        self._spare, self._tell, self._note = spare, tell, note
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._generation = 0
        self._told: dict[str, tuple[int, float]] = {}
        """By node: the start of its keeper when it was told of last, and when that was."""
        self._failing: set[str] = set()
        """Nodes whose keeper did not take the last copy; "": it was not even taken here."""
        self._keepers: tuple[Keeper, ...] = ()
        self._pause_s = 0.0
        self._again_s = 0.0
        """When the next copy is worth its while: none was of use for `_pause_s`."""

    def copy(self, trainee: Trainee, step_version: int, history: History, generation: int,
             keepers: tuple[Keeper, ...]) -> None:
        """Take a snapshot now and have it sent; nothing while the last one is on its way, and for a
        while after one that no keeper took.
        """
        if not keepers or (self._thread is not None and self._thread.is_alive()):
            return
        if generation != self._generation:
            self._generation, self._told = generation, {}
        if keepers != self._keepers:
            self._keepers, self._pause_s, self._again_s = keepers, 0.0, 0.0
        if clock() < self._again_s:
            return
        self._note("copy", generation, step_version)
        try:
            self._snapshot.take(trainee, step_version, history)
            self._thread = threading.Thread(target=self._send, args=(generation, keepers),
                                            name="copies", daemon=True)
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # no memory for it, or no thread
            if poisoned(error):
                raise
            self._thread = None
            self._pause()
            self._say("", step_version, str(error) or type(error).__name__)
        else:
            self._say("", step_version, "")

    def _send(self, generation: int, keepers: tuple[Keeper, ...]) -> None:
        snapshot, start = self._snapshot, self._start
        offer = Offer(task=start.task, rank=start.rank, attempt=start.attempt,
                      generation=generation, step_version=snapshot.step_version,
                      layout=snapshot.layout, copy_bytes=snapshot.num_bytes,
                      numbers_bytes=len(snapshot.numbers))
        num_kept = 0
        for keeper in keepers:
            why = ""
            try:
                checksum, keeper_start = self._put(keeper, offer)
                num_kept += 1
                self._say_kept(keeper, offer, checksum, keeper_start)
            except (OSError, Failed, RuntimeError, ValueError, MemoryError) as error:
                if poisoned(error):
                    raise
                why = str(error) or type(error).__name__
            self._say(keeper.node, snapshot.step_version, why)
        if num_kept:
            self._pause_s = 0.0
        else:
            self._pause()
        self._note("copied", generation, snapshot.step_version)

    def _pause(self) -> None:
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, 2 * self._pause_s))
        self._again_s = clock() + self._pause_s

    def _say(self, node: str, step_version: int, why: str) -> None:
        """On change from well to failing and back, whatever the words."""
        if bool(why) == (node in self._failing):
            return
        at = {"node": node} if node else {}
        if why:
            self._failing.add(node)
            log.warning("copy not kept" if node else "copy not taken", iteration=step_version,
                        why=why, **at)
        else:
            self._failing.discard(node)
            log.info("copy kept again" if node else "copy taken again", iteration=step_version,
                     **at)

    def _put(self, keeper: Keeper, offer: Offer) -> tuple[str, int]:
        halfway = iter(range(offer.copy_bytes // protocol.CHUNK_BYTES // 2, -1, -1))

        def goes_on() -> None:
            if next(halfway, -1) == 0:
                self._note("copy_mid", offer.generation, offer.step_version)

        with (protocol.knock(keeper.endpoint, self._secret) as connection,
              self._spare(connection.fileno())):
            return protocol.put(connection, offer, self._snapshot.parts(), goes_on)

    def _say_kept(self, keeper: Keeper, offer: Offer, checksum: str,
                  keeper_start: int) -> None:
        now_s = clock()
        told_start, told_s = self._told.get(keeper.node, (-1, 0.0))
        if told_start == keeper_start and now_s - told_s < TELL_S:
            return
        if self._tell(MemoryCheckpointStored(
                task=offer.task, rank=offer.rank, attempt=offer.attempt,
                generation=offer.generation, step_version=offer.step_version, node=keeper.node,
                copy_bytes=offer.copy_bytes, checksum=checksum, keeper_start=keeper_start)):
            self._told[keeper.node] = keeper_start, now_s


# --- the layout of the bytes --------------------------------------------------------------------
def layout_of(tensors: dict[str, Tensor]) -> str:
    """16 hex digits of the names, kinds and shapes, in their order."""
    told = "".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n"
                   for name, tensor in tensors.items())
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def flat_bytes(tensors: dict[str, Tensor]) -> int:
    """How many bytes the tensors take, one behind the other."""
    return sum(_padded(tensor) for tensor in tensors.values())


def views(buffer: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where in `buffer` (bytes) each of them lies, as a tensor of the same kind and shape."""
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


# --- back from a copy ---------------------------------------------------------------------------
def restore(trainee: Trainee, history: History, task: int, copies: tuple[Copy, ...],
            secret: str, is_woken: Callable[[], bool]) -> tuple[int, Copy, int] | None:
    """Take the state from the first of `copies` that serves: its step version, which, its bytes.

    None, and nothing is touched, where none of them does: each time a line in the log says why.
    A keeper that cannot be reached, or does not answer, is asked once; none is asked when
    RESTORE_S_MAX are over, or when the next order has come.
    """
    last_s = clock() + RESTORE_S_MAX
    deaf = set[str]()
    for copy in copies:
        wait_s = last_s - clock()
        if wait_s <= 0:
            log.warning("copies are asked for no longer", after_s=RESTORE_S_MAX)
        if wait_s <= 0 or is_woken():
            break
        if copy.endpoint in deaf:
            continue
        try:
            offer, told, memory = _fetch(trainee, task, copy, secret, wait_s)
        except (OSError, Failed) as error:
            if isinstance(error, OSError):
                deaf.add(copy.endpoint)
            log.warning("a copy does not serve", node=copy.node, iteration=copy.step_version,
                        why=str(error) or type(error).__name__)
            continue
        live = training_state.tensors(trainee)
        for name, tensor in views(memory, live).items():
            live[name].copy_(tensor)
        return training_state.adopt(trainee, told, history), copy, offer.copy_bytes
    return None


def _fetch(trainee: Trainee, task: int, copy: Copy, secret: str, wait_s: float
           ) -> tuple[Offer, training_state.Numbers, Tensor]:
    """A copy, whole and checked; no wait is longer than `wait_s`. Raises OSError, Failed."""
    live = training_state.tensors(trainee)
    layout, num_bytes = layout_of(live), flat_bytes(live)
    memory = torch.empty(0, dtype=torch.uint8)

    def room(offer: Offer) -> memoryview:
        nonlocal memory
        if offer.layout != layout or offer.copy_bytes != num_bytes + offer.numbers_bytes:
            raise Failed(f"the copy is of another model: layout {offer.layout}, not {layout}")
        try:
            memory = torch.empty(offer.copy_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise Failed(f"no room for {offer.copy_bytes} bytes: {error}") from None
        return memory.numpy().data

    wish = Wish(task=task, generation=copy.generation, step_version=copy.step_version,
                step_version_max=copy.step_version_max)
    with protocol.knock(copy.endpoint, secret, wait_s) as connection:
        offer, checksum = protocol.get(connection, wish, room)
    if offer.step_version == copy.step_version and checksum != copy.checksum:
        raise Failed(f"the copy was altered: it comes to {checksum}, and was {copy.checksum}")
    try:
        told = training_state.decode(memory[num_bytes:].numpy().tobytes())
    except MsgspecError as error:
        raise Failed(f"its numbers are not understood: {error}") from None
    try:
        training_state.check(trainee, told)
    except ValueError as error:
        raise Failed(f"it does not fit: {error}") from None
    if told.step_version != offer.step_version:
        raise Failed(f"it is of step {told.step_version}, and says {offer.step_version}")
    return offer, told, memory
