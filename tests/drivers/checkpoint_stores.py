"""A checkpoint store in a thread of the test process, so that tests can read and change it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from unicron.events.records.reports import MemoryCheckpointStored
from unicron.events.records.types import MemoryCheckpoint, StoreEndpoint
from unicron.workers.checkpoint_store import protocol
from unicron.workers.checkpoint_store.protocol import CheckpointRequest, Offer
from unicron.workers.checkpoint_store.server import serve
from unicron.workers.checkpoint_store.store import CheckpointStore, StoredCheckpoint

SECRET = "5ec3e7"
BYTES_MAX = 1 << 30
WAIT_S = 60.0
TASK = 7
WISH = CheckpointRequest(task=TASK, generation=1, step_version=1)
"""Requests any copy of the task."""


def offer(step: int, *, task: int = TASK, generation: int = 1, size: int = 100) -> Offer:
    return Offer(task=task, rank=0, attempt=1, generation=generation, step_version=step,
                 layout="abc", copy_bytes=size, numbers_bytes=0)


def keep(shelf: CheckpointStore, one: Offer) -> None:
    shelf.add(StoredCheckpoint(offer=one, checksum="", memory=shelf.reserve(one)))


def steps(shelf: CheckpointStore, task: int = TASK) -> list[int]:
    return [one.offer.step_version for one in shelf.of(task)]


class LocalKeeper:
    """A checkpoint store that listens on loopback, as the store of node `node`."""

    def __init__(self, node: str, *, bytes_max: int = BYTES_MAX, secret: str = SECRET) -> None:
        self.lost: list[int] = []
        self.shelf = CheckpointStore(bytes_max, self.lost.append)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.keeper = StoreEndpoint(node, f"127.0.0.1:{self.listener.getsockname()[1]}")
        self._thread = threading.Thread(target=serve, daemon=True,
                                        args=(self.listener, self.shelf, secret))
        self._thread.start()

    def stored(self, task: int) -> list[StoredCheckpoint]:
        """Its complete copies of a task, the newest last."""
        return self.shelf.of(task)

    def wait(self, task: int, where: Callable[[StoredCheckpoint], bool] = lambda stored: True
             ) -> StoredCheckpoint:
        """Wait until it has a matching copy; return the newest."""
        last_s = time.monotonic() + WAIT_S
        while time.monotonic() < last_s:
            found = [one for one in self.stored(task) if where(one)]
            if found:
                return found[-1]
            time.sleep(0.005)
        raise AssertionError(f"the store of {self.keeper.node} got no matching copy")

    def close(self) -> None:
        """Stop listening."""
        try:
            self.listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.listener.close()
        self._thread.join(10)


def alter(stored: StoredCheckpoint) -> None:
    """Flip one bit of a stored copy."""
    stored.memory[len(stored.memory) // 2] ^= 1


def named(keeper: LocalKeeper, told: MemoryCheckpointStored) -> MemoryCheckpoint:
    """The copy as an order refers to it."""
    return MemoryCheckpoint(node=told.node, endpoint=keeper.keeper.endpoint, rank=told.rank,
                generation=told.generation, step_version=told.step_version,
                copy_bytes=told.copy_bytes, checksum=told.checksum)


def put(endpoint: str, one: Offer, sent: bytes, secret: str = SECRET) -> tuple[str, int]:
    with protocol.connect(endpoint, secret) as connection:
        return protocol.put(connection, one, [memoryview(sent)])


def get(endpoint: str, wish: CheckpointRequest) -> tuple[Offer, bytes]:
    target = bytearray()

    def room(one: Offer) -> memoryview:
        target.extend(bytes(one.copy_bytes))
        return memoryview(target)

    with protocol.connect(endpoint, SECRET) as connection:
        found, _ = protocol.get(connection, wish, room)
    return found, bytes(target)


def wait(look: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)
