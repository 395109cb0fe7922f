"""The control thread: the agent's orders come in while the main thread trains, or hangs.

The thread does four things only: it queues orders, it has the generation's connections closed
(again and again, until that helped) when an order to stop at once finds the main thread waiting
for other members, it has the flight recorder written (recorder.py), and it ends the process when
the agent is gone.

An agent that does not read (it is stopped, or its machine swaps) holds nobody up: what the socket
does not take at once waits in memory, and a thread that lives only as long hands it over.
"""

from __future__ import annotations

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
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

from ....events.process_io import Talk
from ....events.records.orders import Quiesce, Reconfigure, Resume, SetCheckpointStores
from ....events.records.types import Body, QuiesceMode
from ...ipc.pipe_protocol import Frame, Unpacker, WriteDump, pack

# --- A thread to wait in for others, which may have to be left behind. ---
#
# An executor's would do, but that the interpreter waits for those before it ends: a script that has
# trained all it had to would stand for as long as a collective of long ago.

T = TypeVar("T")


class Apart:
    """Does one call after the other."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The future has what `call` returns, or raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._asked,), name="collective",
                                            daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._asked.put((call, future))
        return future

    def leave(self) -> None:
        """Nobody asks any more: the thread ends with what it does now."""
        self._asked.put(None)


def _serve(asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (found := asked.get()) is not None:
        _do(*found)
        del found  # or what it returned, or raised, would be kept until the next


def _do(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it is raised where the call is waited for
        future.set_exception(error)
        del future  # whose error has this frame
    else:
        future.set_result(result)

RECEIVE_BYTES = 1 << 16
SEND_BYTES = 1 << 16
WAKE_S = 0.02
"""Between two attempts to wake the main thread."""
STUCK_S_MAX = 1.0
"""A wait that cannot be ended in this time never will be: see `_insist`."""
BUILDING_S_MAX = 10.0
"""How much longer it may take where the building of a generation itself is to be ended."""
FINISH_S_MAX = 30.0
"""For so long a replica of several members that all live may go on with what it is in, after an
order to stop at once: less than the control plane waits for an answer (policy: quiesce_s_max)."""
EXIT_AGENT_GONE = 3
"""Exit code of a rank whose agent is gone."""
WORN_NUM = 5
"""A rank with so many collectives left behind at one time is worn: each keeps its sums in memory
until it ends, by its own limit (communicators.COLLECTIVE_S_MAX) where nothing else ends it."""
LEFT_NUM_MAX = 12
"""With more than these it ends at once, whatever its peers hold: no memory lasts for ever."""
EXIT_STUCK = 4
"""Exit code of a rank that could not leave a generation's building, or has left too many behind."""


class Interrupted(Exception):
    """An order to stop came before the collective was entered."""


class Abandoned(Exception):
    """The collective could not be ended; it waits on in a thread that nobody waits for."""


class Control:
    """Orders in, reports out, over the socket to the agent. `rank` is this process's own."""

    def __init__(self, connection: socket.socket, rank: int, unpacker: Unpacker) -> None:
        self._connection = connection
        self._unpacker = unpacker
        self._rank = rank
        self._orders: deque[Body] = deque()
        self._changed = threading.Condition()
        self._sending = threading.Condition()
        self._unsent = bytearray()
        self._generation = 0
        self._replica: frozenset[int] = frozenset()
        self._num_waits = 0
        self._wake: Callable[[], None] | None = None
        self._insisting = False
        self._apart = False
        self._abandoned = False
        self._left: list[Callable[[], bool]] = []
        self._others = Apart()
        self.keep: SetCheckpointStores | None = None
        """Who is to get copies from now on, as told last."""
        self.write_dump: Callable[[str], None] | None = None
        """Writes the flight recorder to this path, and does not wait until it has."""

    def start(self, early: list[Frame]) -> None:
        """Listen from now on; `early` are orders that came together with the first frame."""
        for frame in early:
            self._take(frame.body)
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def tell(self, body: Body) -> None:
        """Report; never waits. Ends the process when the agent is gone.

        What the socket takes is the agent's at once, whatever becomes of this process: a thread
        that always hands over would come second to a busy main thread, by some 10 ms.
        """
        data = pack(Frame(body=body, at_s=time.time()))
        with self._sending:
            if self._unsent:
                self._unsent += data
                return
            self._unsent += data[self._send(data, socket.MSG_DONTWAIT):]
            if self._unsent:
                threading.Thread(target=self._send_rest, name="reports", daemon=True).start()

    @property
    def is_behind(self) -> bool:
        """Whether the agent has not taken all that was told: what can wait should."""
        return bool(self._unsent)

    def tell_unless_behind(self, body: Body) -> bool:
        """Report what can wait, if the agent takes it now; whether it was told."""
        if self.is_behind:
            return False
        self.tell(body)
        return True

    def flush(self) -> None:
        """Wait until the agent has taken all that was told, or is gone."""
        with self._sending:
            self._sending.wait_for(lambda: not self._unsent)

    def next_order(self) -> Body:
        """The next order; waits for ever: a rank that holds ends only with its agent."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders)
            return self._orders.popleft()

    def apart(self, generation: int, wake: Callable[[], None], call: Callable[[], T],
              replica: frozenset[int] = frozenset()) -> T:
        """Do `call` as in `waiting_for_others`, but in a thread of its own.

        So a wait that nothing can end costs STUCK_S_MAX and a sleeping thread, not the process.
        What `call` does after its wait must not matter once it was abandoned. Raises Interrupted,
        Abandoned, and whatever `call` raises.
        """
        with self.waiting_for_others(generation, wake, replica):
            with self._changed:
                self._apart = True
            future = self._others.submit(call)
            future.add_done_callback(self._wait_ended)
            with self._changed:
                self._changed.wait_for(lambda: future.done() or self._abandoned)
                self._apart = False
            if not future.done():
                self._others.leave()
                self._others = Apart()
                self.leave_behind(_not_done(future))
                raise Abandoned
            error = future.exception()
            if isinstance(error, RuntimeError):
                # Without its traceback, whose frames would keep the generation's groups alive.
                raise error.with_traceback(None)
            return future.result()

    def leave_behind(self, waits: Callable[[], bool]) -> None:
        """A collective waits on, in a thread that nobody waits for, while `waits` says so.

        One order has all survivors leave one behind, so their numbers go in step: to end here, at
        the same number, they would all end at once, and the state with them. See `end_worn`.
        """
        self._left.append(waits)
        if self._num_left() > LEFT_NUM_MAX:
            self.end_worn()

    @property
    def is_worn(self) -> bool:
        """Whether so much was left behind that a new process should take this one's place."""
        return self._num_left() >= WORN_NUM

    def end_worn(self) -> NoReturn:
        """End the process; for when others hold the state that it has."""
        _end_stuck(f"{self._num_left()} collectives were left behind and wait on")

    def _num_left(self) -> int:
        self._left = [waits for waits in self._left if waits()]
        return len(self._left)

    def _wait_ended(self, future: Future[T]) -> None:
        with self._changed:
            self._changed.notify_all()

    def asked(self, generation: int) -> QuiesceMode | None:
        """Whether an order waits that ends this generation, and how soon."""
        with self._changed:
            return self._asked(generation)

    def saves(self, generation: int) -> bool:
        """Whether an order waits that ends this generation, and has this rank save."""
        with self._changed:
            return any(isinstance(order, Quiesce) and order.generation >= generation and order.save
                       and order.ranks[:1] == (self._rank,) for order in self._orders)

    def settle(self, generation: int) -> Quiesce | None:
        """Forget the orders to leave `generation`: it has been left. The last of them, if any."""
        with self._changed:
            last = next((order for order in reversed(self._orders) if isinstance(order, Quiesce)
                         and order.generation <= generation), None)
            self._orders = deque(
                order for order in self._orders
                if not (isinstance(order, (Quiesce, Resume)) and order.generation <= generation)
            )
            return last

    @contextmanager
    def waiting_for_others(self, generation: int, wake: Callable[[], None],
                           replica: frozenset[int] = frozenset()) -> Generator[None]:
        """While in here, the main thread may wait for other members of `generation`.

        An order to stop at once calls `wake` from a thread of its own. Raises Interrupted when
        such an order is here already. With `replica` the ranks that it waits for are these alone:
        an order that has all of them live on is left for later, by FINISH_S_MAX.
        """
        with self._changed:
            if self._asked(generation, replica) == "now":
                raise Interrupted
            self._generation, self._wake, self._abandoned = generation, wake, False
            self._replica = replica
            self._num_waits += 1
            if self._asked(generation) == "now":
                self._be_patient()
        try:
            yield
        finally:
            with self._changed:
                self._wake = None
                self._changed.notify_all()
                # The next wait is not to be disturbed by who still insists on the end of this one.
                self._changed.wait_for(lambda: not self._insisting)

    def _asked(self, generation: int, replica: frozenset[int] = frozenset()
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

    def _take(self, order: Body) -> None:
        if isinstance(order, SetCheckpointStores):
            self.keep = order
        if isinstance(order, WriteDump) and self.write_dump is not None:
            self.write_dump(order.path)
        if not isinstance(order, (Quiesce, Reconfigure, Resume)):
            return
        if isinstance(order, Quiesce) and order.ranks and self._rank not in order.ranks:
            return
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()
            self._insist_if_asked()

    def _insist_if_asked(self) -> None:
        if self._wake is None or self._insisting:
            return
        if self._asked(self._generation, self._replica) == "now":
            self._insisting = True
            threading.Thread(target=self._insist, name="wake", daemon=True).start()
        elif self._asked(self._generation) == "now":
            self._be_patient()

    def _be_patient(self) -> None:
        """The replica may finish what it is in; not for ever: its own connections may be cut."""
        patience = threading.Timer(FINISH_S_MAX, self._lose_patience, (self._num_waits,))
        patience.daemon = True
        patience.start()

    def _lose_patience(self, wait: int) -> None:
        with self._changed:
            if self._num_waits == wait:
                self._replica = frozenset()
                self._insist_if_asked()

    def _insist(self) -> None:
        """Wake whoever waits until it is awake: it may be about to open another connection.

        gloo tells a closed connection to the sends and receives that have not begun, but to none
        that is half done (its Pair::signalException passes over them): those wait for the full
        timeout. Such a wait is abandoned; where it is not apart from the main thread, the process
        ends: its peers hold the same state, and a new one takes it from them.
        """
        last_s = time.monotonic() + STUCK_S_MAX
        with self._changed:
            while self._wake is not None and not self._abandoned:
                if time.monotonic() > last_s:
                    if self._apart:
                        Talk(sys.stderr).write("a collective cannot be ended: it is left behind\n")
                        self._abandoned = True
                        break
                    if time.monotonic() > last_s + BUILDING_S_MAX:
                        _end_stuck("stuck in a generation that was closed")
                self._wake()
                self._changed.wait(WAKE_S)
            self._insisting = False
            self._changed.notify_all()

    def _send(self, data: bytes, flags: int = 0) -> int:
        """How many bytes of `data` the socket took."""
        try:
            return self._connection.send(data, flags)
        except BlockingIOError:
            return 0
        except OSError:
            os._exit(EXIT_AGENT_GONE)

    def _send_rest(self) -> None:
        """Hand over what waits, at the agent's pace."""
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
                self._take(frame.body)


def _not_done(future: Future[T]) -> Callable[[], bool]:
    """Whether it still runs, asked without keeping what its end leaves in memory.

    The thread that runs it keeps the future for so long. A failed one holds its error, whose
    traceback holds every frame, and the gradients in them.
    """
    alive = weakref.ref(future)

    def waits() -> bool:
        found = alive()
        return found is not None and not found.done()

    return waits


def _end_stuck(why: str) -> NoReturn:
    Talk(sys.stderr).write(f"{why}: this process ends\n")
    Talk(sys.stderr).flush()
    os._exit(EXIT_STUCK)
