"""A checkpoint store in a thread of the test process, so that tests can read and change it."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from unicron.events.log.identity import StoreKey, store_key, store_secret
from unicron.events.records.reports import MemoryCheckpointStored
from unicron.events.records.types import MemoryCheckpoint, StoreEndpoint
from unicron.workers.checkpoint_store import protocol
from unicron.workers.checkpoint_store.protocol import Manifest, Offer, Piece, ShareRequest
from unicron.workers.checkpoint_store.server import serve
from unicron.workers.checkpoint_store.store import CheckpointStore, StoredCheckpoint

NODE_KEY = b"5ec3e7"
SECRET = store_secret(NODE_KEY)
BYTES_MAX = 1 << 30
WAIT_S = 60.0
TASK = 7
KEY = store_key(SECRET, TASK, 1)


def offer(
    step: int,
    *,
    task: int = TASK,
    generation: int = 1,
    size: int = 100,
    share: int = 0,
    num_shares: int = 1,
    whole: tuple[int, int] = (0, 0),
    manifest_bytes: int = 1,
) -> Offer:
    return Offer(
        task=task,
        rank=share,
        attempt=1,
        generation=generation,
        step_version=step,
        share=share,
        num_shares=num_shares,
        copy_bytes=size,
        manifest_bytes=manifest_bytes,
        whole=whole,
    )


def keep(shelf: CheckpointStore, one: Offer) -> None:
    shelf.add(stored(one, shelf.reserve(one)))


def stored(one: Offer, memory: mmap.mmap) -> StoredCheckpoint:
    return StoredCheckpoint(
        offer=one, manifest=Manifest(pieces=()), sums=b"", checksum="", memory=memory
    )


def steps(shelf: CheckpointStore, task: int = TASK, share: int = 0) -> list[int]:
    return [one.offer.step_version for one in shelf.of(task) if one.offer.share == share]


class LocalKeeper:
    """A checkpoint store that listens on loopback, as the store of node `node`."""

    def __init__(self, node: str, *, bytes_max: int = BYTES_MAX, secret: bytes = SECRET) -> None:
        self.lost: list[int] = []
        self.shelf = CheckpointStore(bytes_max, self.lost.append)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.keeper = StoreEndpoint(node, f"127.0.0.1:{self.listener.getsockname()[1]}")
        self._thread = threading.Thread(
            target=serve, daemon=True, args=(self.listener, self.shelf, secret)
        )
        self._thread.start()

    def stored(self, task: int) -> list[StoredCheckpoint]:
        """Its complete copies of a task, the newest last."""
        return self.shelf.of(task)

    def wait(
        self, task: int, where: Callable[[StoredCheckpoint], bool] = lambda stored: True
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
    """Flip one bit of a stored share."""
    begin = stored.offer.manifest_bytes
    stored.memory[(begin + len(stored.memory)) // 2] ^= 1


def named(keepers: Iterable[LocalKeeper], told: MemoryCheckpointStored) -> MemoryCheckpoint:
    """The checkpoint as an order refers to it."""
    endpoint = next(one.keeper.endpoint for one in keepers if one.keeper.node == told.node)
    return MemoryCheckpoint(
        node=told.node,
        endpoint=endpoint,
        rank=told.rank,
        generation=told.generation,
        step_version=told.step_version,
        copy_bytes=told.copy_bytes,
        checksum=told.checksum,
        share=told.share,
        num_shares=told.num_shares,
    )


def whole_steps(keepers: Iterable[LocalKeeper], task: int = TASK) -> list[int]:
    """The steps of which the stores together have every share, ascending."""
    found: dict[tuple[int, int], set[int]] = {}
    for keeper in keepers:
        for one in keeper.stored(task):
            found.setdefault((one.offer.step_version, one.offer.num_shares), set()).add(
                one.offer.share
            )
    return sorted(step for (step, num), shares in found.items() if len(shares) == num)


def pieces_of(sent: Sequence[bytes]) -> tuple[Piece, ...]:
    """Pieces with these bytes."""
    return tuple(
        Piece(f"t{index}", f"uint8 {len(data)}", (0,), (len(data),), len(data))
        for index, data in enumerate(sent)
    )


def offered(step: int, sent: Sequence[bytes], **changes: Any) -> tuple[Offer, bytes]:
    """The offer and the manifest of a share with these pieces."""
    manifest = msgspec.msgpack.encode(Manifest(pieces=pieces_of(sent)))
    size = len(manifest) + sum(map(len, sent))
    return offer(step, size=size, manifest_bytes=len(manifest), **changes), manifest


def put(
    endpoint: str, step: int, sent: Sequence[bytes], key: StoreKey | None = None, **changes: Any
) -> tuple[str, int]:
    """Store a share with these pieces."""
    one, manifest = offered(step, sent, **changes)
    with protocol.connect(endpoint, key or key_for(one)) as connection:
        sender = protocol.ShareSender(connection, one, manifest)
        for data in sent:
            sender.send(memoryview(data))
        return sender.finish()


def key_for(one: Offer) -> StoreKey:
    """The key that a rank needs for this offer."""
    return store_key(SECRET, one.task, one.generation)


def request(step: int, *, generation: int = 1, share: int = 0, num_shares: int = 1) -> ShareRequest:
    return ShareRequest(
        task=TASK, generation=generation, step_version=step, share=share, num_shares=num_shares
    )


def get(endpoint: str, wish: ShareRequest, indices: Sequence[int] | None = None) -> list[bytes]:
    """The bytes of these pieces of a share, or of all."""
    with protocol.connect(endpoint, KEY) as connection:
        reader = protocol.ShareReader(connection, wish)
        every = range(len(reader.manifest.pieces))
        return [bytes(data) for _, data in reader.read(every if indices is None else indices)]


def wait(look: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)
