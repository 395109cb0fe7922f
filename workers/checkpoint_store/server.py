"""The keeper: `python -m unicron.workers.checkpoint_store.server --fd N --listen M --start NUMBER`.

It serves the listening socket M, which its agent holds too, so that a keeper that is started anew
is found where the last one was. Socket N is the agent's: a task's number comes when the task has
ended, and goes back when nothing is left of one that has not; FIRST_CODE goes back with the first
copy. Ends with its agent.

Environment: UNICRON_COPIES_SECRET (keeping.py); UNICRON_COPIES_BYTES_MAX, the memory that copies
may take (default: a quarter of what is available when it starts, to its container where it is in
one).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import NoReturn

from ...events.errors import UsageError
from ...events.process_io import Talk
from ..host import linux
from . import protocol
from .protocol import Failed, Kept, Offer, Refused, Sum, Wish
from .store import NoRoom, Shelf, Stored, available_bytes

BYTES_MAX = "UNICRON_COPIES_BYTES_MAX"
AVAILABLE_SHARE = 0.25
TALKS_NUM_MAX = 64
"""Conversations at once; who comes beyond that waits in the socket's queue."""
ACCEPT_PAUSE_S = 0.1
"""Between two tries where nobody can be let in."""
NICE_NUM = 5
"""Training comes first where both want the same core."""


def main() -> None:
    """Serve until the agent's end of the socket is closed."""
    parser = argparse.ArgumentParser(prog="unicron.workers.checkpoint_store.server")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--listen", type=int, required=True)
    parser.add_argument("--start", type=int, required=True)
    asked = parser.parse_args()
    agent, listener = socket.socket(fileno=asked.fd), socket.socket(fileno=asked.listen)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.call_oneself("keeper")
    os.nice(NICE_NUM)
    with contextlib.suppress(OSError):
        linux.be_first_to_go()
    secret = os.environ[protocol.SECRET]

    def tell(task: int) -> None:
        agent.send(task.to_bytes(protocol.TASK_BYTES, "big"))

    shelf = Shelf(bytes_max(os.environ), tell, lambda: tell(protocol.FIRST_CODE), start=asked.start)
    say(f"copies may take {shelf.bytes_max} bytes")
    threading.Thread(target=_serve_for_ever, args=(listener, shelf, secret), daemon=True).start()
    while data := agent.recv(protocol.TASK_BYTES):
        shelf.forget(int.from_bytes(data, "big"))
    os._exit(0)


def bytes_max(environment: Mapping[str, str]) -> int:
    """How much memory copies may take, in bytes. Raises UsageError."""
    if BYTES_MAX in environment:
        told = environment[BYTES_MAX]
        if not (told.isascii() and told.isdigit()):
            raise UsageError(f"{BYTES_MAX} is {told!r}", "a number of bytes, as in 4000000000")
        return int(told)
    return int(AVAILABLE_SHARE * available_bytes())


def say(what: str) -> None:
    """One line for whoever reads the keeper's log."""
    Talk(sys.stderr).write(f"{what}\n")


class Said:
    """What does not work, told when that begins and when it is over."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    def fails(self, who: str, why: str) -> None:
        if who not in self._failing:
            self._failing.add(who)
            say(f"{who}: {why}")

    def works(self, who: str) -> None:
        if who in self._failing:
            self._failing.discard(who)
            say(f"{who}: all is well again")


def _serve_for_ever(listener: socket.socket, shelf: Shelf, secret: str) -> NoReturn:
    """A keeper that serves nobody ends, so that its agent starts another."""
    try:
        serve(listener, shelf, secret)
        say("the socket is closed")
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(1)


def serve(listener: socket.socket, shelf: Shelf, secret: str) -> None:
    """Talk to whoever connects, each in a thread of its own, until the listener is closed."""
    free, said = threading.Semaphore(TALKS_NUM_MAX), Said()
    while True:
        free.acquire()
        try:
            connection, (host, *_) = listener.accept()
            try:
                threading.Thread(target=_talk, args=(connection, host, shelf, secret, free, said),
                                 daemon=True).start()
            except RuntimeError:
                connection.close()
                raise
        except (OSError, RuntimeError) as error:  # no descriptor is left, or no thread
            free.release()
            if isinstance(error, OSError) and error.errno in (errno.EBADF, errno.EINVAL):
                return
            said.fails("accept", str(error))
            time.sleep(ACCEPT_PAUSE_S)
        else:
            said.works("accept")


def _talk(connection: socket.socket, host: str, shelf: Shelf, secret: str,
          free: threading.Semaphore, said: Said) -> None:
    try:
        with connection:
            converse(connection, shelf, secret, said)
    except (OSError, Failed) as error:
        said.fails(host, f"a conversation ended: {error or type(error).__name__}")
    else:
        said.works(host)
    finally:
        free.release()


def converse(connection: socket.socket, shelf: Shelf, secret: str, said: Said) -> None:
    """One conversation, from the greeting on. Raises OSError, Failed."""
    if not protocol.let_in(connection, secret):
        raise Failed("somebody without the cluster's secret")
    message = protocol.receive(connection, Offer, Wish)
    if isinstance(message, Offer):
        _take_in(connection, shelf, message, said)
    elif isinstance(message, Wish):
        _hand_out(connection, shelf, message)


def _take_in(connection: socket.socket, shelf: Shelf, offer: Offer, said: Said) -> None:
    task = f"task {offer.task}"
    try:
        memory = shelf.reserve(offer)
    except NoRoom as error:
        said.fails(task, f"refused: {error}")
        protocol.send(connection, Refused(why=str(error)))
        return
    answer: Kept | Refused = Kept(start=shelf.start)
    try:
        protocol.send(connection, protocol.Go())
        checksum = protocol.take(connection, memoryview(memory))
        told = protocol.receive(connection, Sum)
        assert isinstance(told, Sum)
        if told.checksum != checksum:
            raise NoRoom(f"what came comes to {checksum}, what was sent to {told.checksum}")
        shelf.add(Stored(offer=offer, checksum=checksum, memory=memory))
    except NoRoom as error:
        said.fails(task, f"refused: {error}")
        answer = Refused(why=str(error))
    else:
        said.works(task)
    finally:
        shelf.give_up(offer, memory)
    protocol.send(connection, answer)


def _hand_out(connection: socket.socket, shelf: Shelf, wish: Wish) -> None:
    stored = shelf.find(wish)
    if stored is None:
        protocol.send(connection, Refused(why=f"no copy of task {wish.task} generation "
                                             f"{wish.generation} step {wish.step_version}"))
        return
    protocol.send(connection, stored.offer)
    protocol.pour(connection, [memoryview(stored.memory)])
    protocol.send(connection, Sum(checksum=stored.checksum))


if __name__ == "__main__":
    main()
