"""The control thread: receives the agent's orders while the main thread trains, or hangs.

At an immediate order to stop, it has the generation's connections closed until the main thread no
longer waits for other members. It ends the process if the agent is gone. An agent that does not
read never blocks the rank: what the socket does not take, a temporary thread sends.
"""

import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from ....events.detached_thread import DetachedThread
from ....events.log.identity import StoreKeys
from ....events.process_io import LogStream
from ....events.records.orders import Quiesce, Reconfigure, Resume, SetCheckpointStores
from ....events.records.types import Body, QuiesceMode
from ....events.timing import FINISH_S_MAX
from ...ipc.pipe_protocol import Frame, MayAbort, Unpacker, WillAbort, WriteDump, pack
from .orders import result_of

T = TypeVar("T")
RECEIVE_BYTES = 1 << 16
SEND_BYTES = 1 << 16
WAKE_S = 0.02
"""Interval between two attempts to interrupt the main thread."""
STUCK_S_MAX = 1.0
"""A wait that does not end within this time after an interrupt counts as stuck for ever."""
BUILDING_S_MAX = 10.0
"""Additional time for a wait outside a detached thread, such as the building of a generation."""
EXIT_AGENT_GONE = 3
"""Exit code of a rank whose agent is gone."""
REPLACE_ABANDONED_NUM = 5
"""With this many abandoned collectives, a new process should replace the rank. Each keeps its
buffers until its own timeout (communicators.COLLECTIVE_S_MAX)."""
ABANDONED_NUM_MAX = 12
"""If a rank has more abandoned collectives, it exits in any case, to bound its memory."""
EXIT_STUCK = 4
"""Exit code of a rank with a wait that does not end, or with too many abandoned collectives."""


class Interrupted(Exception):
    """An order to stop arrived before the collective was entered."""


class Abandoned(Exception):
    """The collective could not be interrupted. Its call still waits in a detached thread."""


class Control:
    """Receives orders and sends reports over the socket to the agent, as rank `rank`."""

    def __init__(self, connection: socket.socket, rank: int, unpacker: Unpacker) -> None:
        self._connection = connection
        self._unpacker = unpacker
        self._rank = rank
        self._orders: deque[Body] = deque()
        self._changed = threading.Condition()
        self._sending = threading.Condition()
        self._unsent = bytearray()
        self._num_told = 0
        self._last_order = 0, 0
        """Epoch and seq of the last order. A restarted agent may send an order again."""
        self._waiting: tuple[int, frozenset[int]] = 0, frozenset()
        """The generation and replica of `waiting_for_others`."""
        self._num_waits = 0
        self._wake: Callable[[], None] | None = None
        self._is_interrupting = False
        self._is_detached = False
        self._abandoned = False
        self._abandoned_waits: list[Callable[[], bool]] = []
        self._detached = DetachedThread("collective")
        self.keep: SetCheckpointStores | None = None
        """The newest SetCheckpointStores order; it names the stores for in-memory checkpoints."""
        self.store_keys: StoreKeys = {}
        """The newest key of each checkpoint store that an order has named."""
        self.write_dump: Callable[[str], None] | None = None
        """Writes the flight recorder to a path, without blocking."""
        self._may_abort = 0
        """The last generation whose communicators all ranks of this node are about to abort."""

    def start(self, early: list[Frame]) -> None:
        """Start the control thread. `early`: StartRank, and orders that arrived with it."""
        for frame in early:
            self._take_frame(frame)
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def tell(self, body: Body) -> None:
        """Send a report; never blocks. Ends the process when the agent is gone. The calling thread
        writes to the socket: the agent has the report even if this process dies. A thread for
        sending would have to wait some 10 ms for a busy main thread."""
        with self._sending:
            self._num_told += 1
            data = pack(Frame(body=body, seq=self._num_told, at_s=time.time()))
            if self._unsent:
                self._unsent += data
                return
            self._unsent += data[self._send(data, socket.MSG_DONTWAIT) :]
            if self._unsent:
                threading.Thread(target=self._send_rest, name="reports", daemon=True).start()

    @property
    def is_behind(self) -> bool:
        """Whether unsent reports wait."""
        return bool(self._unsent)

    def tell_unless_behind(self, body: Body) -> bool:
        """Send an optional report, unless others wait. Returns whether it was sent."""
        if self.is_behind:
            return False
        self.tell(body)
        return True

    def flush(self) -> None:
        """Wait until the agent has taken all reports, or is gone."""
        with self._sending:
            self._sending.wait_for(lambda: not self._unsent)

    def next_order(self) -> Body:
        """The next order. Blocks without limit, because a waiting rank ends only with its agent."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders)
            return self._orders.popleft()

    def run_detached(
        self,
        generation: int,
        wake: Callable[[], None],
        call: Callable[[], T],
        replica: frozenset[int] = frozenset(),
    ) -> T:
        """Run `call` as in `waiting_for_others`, but in a detached thread: a wait that cannot be
        interrupted then costs STUCK_S_MAX and a sleeping thread, not the process. An abandoned
        `call` may still continue later, so its later effects must not matter. Raises Interrupted,
        Abandoned, and what `call` raises."""
        with self.waiting_for_others(generation, wake, replica):
            with self._changed:
                self._is_detached = True
            future = self._detached.submit(call)
            future.add_done_callback(self._wait_ended)
            with self._changed:
                self._changed.wait_for(lambda: future.done() or self._abandoned)
                self._is_detached = False
            if not future.done():
                self._detached = DetachedThread("collective")
                self.abandon(_is_running(future))
                raise Abandoned
            return result_of(future)

    def abandon(self, waits: Callable[[], bool]) -> None:
        """Count an abandoned collective while `waits` returns True. All survivors abandon the same
        one: if all exited at REPLACE_ABANDONED_NUM, the state would be lost. Therefore the member
        decides which one exits (member.py)."""
        self._abandoned_waits.append(waits)
        if self._num_abandoned() > ABANDONED_NUM_MAX:
            self.exit_too_many_abandoned()

    @property
    def has_too_many_abandoned(self) -> bool:
        """Whether a new process should replace this one."""
        return self._num_abandoned() >= REPLACE_ABANDONED_NUM

    def exit_too_many_abandoned(self) -> NoReturn:
        """End the process. Call this only if other members hold the state of this rank."""
        _exit_stuck(f"{self._num_abandoned()} abandoned collectives still wait")

    def meet_before_abort(self, generation: int, s_max: float) -> bool:
        """Wait until all ranks of this node that live in the generation call this, by their agent,
        but no longer than `s_max`. Returns whether they do. For any thread."""
        self.tell(WillAbort(generation=generation))
        with self._changed:
            return self._changed.wait_for(lambda: self._may_abort >= generation, s_max)

    def _num_abandoned(self) -> int:
        self._abandoned_waits = [waits for waits in self._abandoned_waits if waits()]
        return len(self._abandoned_waits)

    def _wait_ended(self, future: Future[T]) -> None:
        with self._changed:
            self._changed.notify_all()

    def pending_quiesce(self, generation: int) -> QuiesceMode | None:
        """The mode in which queued orders end this generation; None if none does."""
        with self._changed:
            return self._pending_quiesce(generation)

    def wait_for_quiesce(self, generation: int, length_s: float) -> None:
        """Wait for an order that ends this generation, but no longer than `length_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending_quiesce(generation) is not None, length_s)

    def discard_orders(self, generation: int) -> Quiesce | None:
        """Discard orders of the left generations, up to `generation`. Returns the last Quiesce."""
        with self._changed:
            last = next(
                (
                    order
                    for order in reversed(self._orders)
                    if isinstance(order, Quiesce) and order.generation <= generation
                ),
                None,
            )
            self._orders = deque(
                order
                for order in self._orders
                if not (isinstance(order, (Quiesce, Resume)) and order.generation <= generation)
            )
            return last

    @contextmanager
    def waiting_for_others(
        self, generation: int, wake: Callable[[], None], replica: frozenset[int] = frozenset()
    ) -> Generator[None]:
        """In this context the main thread may wait for other members of `generation`. At an
        immediate order to stop, another thread calls `wake`. Raises Interrupted if such an order is
        already queued. `replica`: the thread waits for these ranks only. An order that names them
        all, because they all live, interrupts the wait only after FINISH_S_MAX."""
        with self._changed:
            if self._pending_quiesce(generation, replica) == "now":
                raise Interrupted
            self._waiting, self._wake, self._abandoned = (generation, replica), wake, False
            self._num_waits += 1
            if self._pending_quiesce(generation) == "now":
                self._start_grace_period()
        try:
            yield
        finally:
            with self._changed:
                self._wake = None
                self._changed.notify_all()
                # The thread that interrupts this wait must not interrupt the next one.
                self._changed.wait_for(lambda: not self._is_interrupting)

    def _pending_quiesce(
        self, generation: int, replica: frozenset[int] = frozenset()
    ) -> QuiesceMode | None:
        found: QuiesceMode | None = None
        for order in self._orders:
            if isinstance(order, Reconfigure) and order.generation > generation:
                return "now"
            if isinstance(order, Quiesce) and order.generation >= generation:
                if order.mode == "now" and not (replica and replica <= set(order.ranks)):
                    return "now"
                found = "boundary"
        return found

    def _take_frame(self, frame: Frame) -> None:
        if frame.seq and (frame.epoch, frame.seq) <= self._last_order:
            return
        self._last_order = max(self._last_order, (frame.epoch, frame.seq))
        order = frame.body
        self.store_keys.update(frame.store_keys)  # before the order that needs them
        if isinstance(order, SetCheckpointStores):
            self.keep = order
        if isinstance(order, MayAbort):
            with self._changed:
                self._may_abort = max(self._may_abort, order.generation)
                self._changed.notify_all()
        if isinstance(order, WriteDump) and self.write_dump is not None:
            self.write_dump(order.path)
        if not isinstance(order, (Quiesce, Reconfigure, Resume)):
            return
        if isinstance(order, Quiesce) and order.ranks and self._rank not in order.ranks:
            return
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()
            self._interrupt_if_ordered()

    def _interrupt_if_ordered(self) -> None:
        if self._wake is None or self._is_interrupting:
            return
        if self._pending_quiesce(*self._waiting) == "now":
            self._is_interrupting = True
            threading.Thread(target=self._interrupt_until_done, name="wake", daemon=True).start()
        elif self._pending_quiesce(self._waiting[0]) == "now":
            self._start_grace_period()

    def _start_grace_period(self) -> None:
        """Let the replica finish, for a limited time: its own connections may be cut."""
        timer = threading.Timer(FINISH_S_MAX, self._end_grace_period, (self._num_waits,))
        timer.daemon = True
        timer.start()

    def _end_grace_period(self, wait: int) -> None:
        with self._changed:
            if self._num_waits == wait:
                self._waiting = self._waiting[0], frozenset()
                self._interrupt_if_ordered()

    def _interrupt_until_done(self) -> None:
        """Interrupt the main thread until its wait ends: the thread may open more connections. When
        a connection is closed, gloo fails the sends and receives that have not begun, but not those
        that are half done (Pair::signalException skips them): they wait for the full timeout. Such
        a wait is abandoned if it runs in a detached thread. Otherwise the process ends, and a new
        one receives the state from its peers."""
        deadline_s = time.monotonic() + STUCK_S_MAX
        with self._changed:
            while self._wake is not None and not self._abandoned:
                if time.monotonic() > deadline_s:
                    if self._is_detached:
                        LogStream(sys.stderr).write("abandoned: a collective that does not end\n")
                        self._abandoned = True
                        break
                    if time.monotonic() > deadline_s + BUILDING_S_MAX:
                        _exit_stuck("stuck in a generation that was closed")
                self._wake()
                self._changed.wait(WAKE_S)
            self._is_interrupting = False
            self._changed.notify_all()

    def _send(self, data: bytes, flags: int = 0) -> int:
        """Returns the number of bytes that the socket took."""
        try:
            return self._connection.send(data, flags)
        except BlockingIOError:
            return 0
        except OSError:
            os._exit(EXIT_AGENT_GONE)

    def _send_rest(self) -> None:
        with self._sending:
            data = bytes(self._unsent[:SEND_BYTES])
        while data:
            num_bytes = self._send(data)
            with self._sending:
                del self._unsent[:num_bytes]
                data = bytes(self._unsent[:SEND_BYTES])
                self._sending.notify_all()

    def _listen(self) -> None:
        while True:
            try:
                data = self._connection.recv(RECEIVE_BYTES)
            except OSError:
                data = b""
            if not data:
                os._exit(EXIT_AGENT_GONE)
            for frame in self._unpacker.feed(data):
                self._take_frame(frame)


def _is_running(future: Future[T]) -> Callable[[], bool]:
    """A function that tells whether `future` still runs. It holds only a weak reference: a failed
    future holds its exception, and the frames of the traceback hold gradients."""
    alive = weakref.ref(future)

    def waits() -> bool:
        found = alive()
        return found is not None and not found.done()

    return waits


def _exit_stuck(why: str) -> NoReturn:
    LogStream(sys.stderr).write(f"{why}: this process ends\n")
    LogStream(sys.stderr).flush()
    os._exit(EXIT_STUCK)
