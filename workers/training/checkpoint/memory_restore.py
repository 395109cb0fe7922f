"""Restores a member's part of the state from the shares in checkpoint stores, into any layout.

The members exchange the lists of shares, so that all try the newest whole version first. A member
reads only what it lacks; the shares of its own part of the model come first.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import inf
from threading import Lock
from time import monotonic as clock
from typing import NamedTuple, TypeVar

import msgspec
import structlog
import torch
from msgspec import Struct
from torch import Tensor

from ....events.decoding import from_msgpack
from ....events.log.identity import StoreKeys
from ....events.records.types import MemoryCheckpoint
from ...checkpoint_store import protocol
from ...checkpoint_store.protocol import Offer, Piece, ShareReader, ShareRequest, TransferError
from ...ipc.work_row import UNCOUNTED, WorkCount
from ..communicators.rounds import Rounds
from ..model import training_state
from ..process.exit_report import is_cuda_error
from ..recovery.regions import State, cut, shape_of, torch_dtype
from ..recovery.resharding import Region, Shard, intersection
from ..recovery.state_sources import HeldState

T = TypeVar("T")
RESTORE_S_MAX = 15.0
"""The default of `restore_s_max`, as in the orders."""
LISTS_NUM = 16
"""Stores that a member asks at once."""
READERS_NUM = 4
"""Shares that a member reads at once."""

log = structlog.get_logger()


class StoredShare(Struct, frozen=True, array_like=True):
    """A share in a store; `store` is an index into the endpoints of `Stores`."""

    store: int
    offer: Offer


class Version(NamedTuple):
    """A whole in-memory checkpoint: of each share, the stores that have it."""

    generation: int
    step_version: int
    shares: tuple[tuple[StoredShare, ...], ...]


class Fetched(NamedTuple):
    """What a member has read; a standby member nothing. `node`: whose store sent most bytes."""

    numbers: training_state.Numbers | None
    received_bytes: int
    node: str


class Stores:
    """The checkpoint stores that an order names (`copies`), as seen by one member of a task."""

    def __init__(
        self,
        task: int,
        copies: Sequence[MemoryCheckpoint],
        store_keys: StoreKeys,
        is_interrupted: Callable[[], bool],
        ending: Callable[[socket.socket], AbstractContextManager[None]] = lambda _: nullcontext(),
        *,
        silent_s_max: float = RESTORE_S_MAX,
        count: WorkCount = UNCOUNTED,
    ) -> None:
        """`ending`: a context in which an interrupt ends this connection. `silent_s_max`: once no
        store has sent anything for so long, no other one is tried. `count`: of the bytes of the
        state that are read."""
        self._task, self._store_keys, self._is_interrupted = task, store_keys, is_interrupted
        self._ending = ending
        self._copies, self._count = copies, count
        self._nodes = {copy.endpoint: copy.node for copy in copies}
        self.endpoints = list(self._nodes)
        self._silent_s_max, self._moved_s = silent_s_max, clock()

    def shares(self, place: int, num_members: int) -> list[StoredShare]:
        """The shares in those stores that this member asks: each is asked by one member. One that
        does not answer counts as empty; a warning says why."""
        mine = range(place, len(self.endpoints), num_members)
        if not mine:
            return []
        with ThreadPoolExecutor(min(len(mine), LISTS_NUM), "copies") as pool:
            return [share for found in pool.map(self._list, mine) for share in found]

    def _list(self, store: int) -> list[StoredShare]:
        try:
            with self._connect(store) as connection:
                offers = protocol.list_shares(connection, self._task)
        except (OSError, TransferError) as error:
            self._warn(store, error)
            return []
        return [StoredShare(store, offer) for offer in offers]

    @contextmanager
    def _connect(self, store: int) -> Generator[socket.socket]:
        endpoint = self.endpoints[store]
        key = self._store_keys.get(self._nodes[endpoint])
        with (
            protocol.connect(endpoint, key, self._wait_s(), self._ending) as connection,
            self._ending(connection),
        ):
            yield connection

    def versions(self, shares: Sequence[StoredShare]) -> list[Version]:
        """The whole versions that may be used, the newest first. The same on every member."""
        groups: dict[tuple[int, int, int], dict[int, list[StoredShare]]] = {}
        for share in sorted(shares, key=lambda one: one.store):
            offer = share.offer
            if any(_fits(copy, offer) for copy in self._copies):
                group = (offer.step_version, offer.generation, offer.num_shares)
                groups.setdefault(group, {}).setdefault(offer.share, []).append(share)
        return [
            Version(
                generation, step_version, tuple(tuple(found[share]) for share in range(num_shares))
            )
            for (step_version, generation, num_shares), found in sorted(
                groups.items(), reverse=True
            )
            if all(share in found for share in range(num_shares))
        ]

    def fetch(self, version: Version, wanted: State, held: HeldState, place: int) -> Fetched:
        """Read `wanted` into its tensors, which are undefined after a TransferError."""
        reading = _Reading(wanted)
        # Share 0 has the numbers.
        order = sorted(
            range(len(version.shares)),
            key=lambda share: (share != 0, _distance(version.shares[share][0].offer, held)),
        )
        total = sum(tensor.nbytes for tensor in wanted.values())
        with (
            ThreadPoolExecutor(READERS_NUM, "copies") as pool,
            self._count.of("reads its state from memory", total),
        ):
            for first in range(0, len(order), READERS_NUM):
                some = order[first : first + READERS_NUM]
                if reading.is_complete:
                    break
                waiting = [
                    pool.submit(self._read, version.shares[share], reading, place) for share in some
                ]
                for each in waiting:
                    each.result()
        return self._fetched(version, reading)

    def read_share(self, version: Version, share: int) -> tuple[bytes, dict[str, Tensor]]:
        """The numbers of one share, and its flat tensors by key. Raises TransferError."""
        stored = version.shares[share]
        total = max((share.offer.copy_bytes for share in stored), default=0)
        with self._count.of("reads its state from memory", total):
            return self._from_any(stored, self._read_all)

    def _read_all(self, stored: StoredShare) -> tuple[bytes, dict[str, Tensor]]:
        with self._connect(stored.store) as connection:
            reader = ShareReader(connection, _request(stored.offer))
            found: dict[str, Tensor] = {}

            def target(piece: Piece) -> memoryview:
                if piece.key not in found:
                    found[piece.key] = torch.empty(
                        shape_of(piece.kind), dtype=torch_dtype(piece.kind)
                    )
                begin = piece.offset[0]
                return _memory(found[piece.key][begin : begin + piece.shape[0]], piece)

            for piece, _ in reader.read(range(len(reader.manifest.pieces)), target):
                self._moved(piece.num_bytes)
            return reader.manifest.numbers, found

    def _fetched(self, version: Version, reading: _Reading) -> Fetched:
        if reading.missing:
            more = f" and {len(reading.missing) - 1} more" if len(reading.missing) > 1 else ""
            raise TransferError(f"it is of another model: it lacks {reading.missing[0]}{more}")
        try:
            numbers = from_msgpack(reading.numbers, training_state.Numbers)
        except msgspec.MsgspecError as error:
            raise TransferError(f"its numbers cannot be decoded: {error}") from None
        if numbers.step_version != version.step_version:
            raise TransferError(f"it is of step {numbers.step_version}, not {version.step_version}")
        most = max(sorted(reading.received), key=lambda store: reading.received[store], default=0)
        return Fetched(numbers, sum(reading.received.values()), self._nodes[self.endpoints[most]])

    def _read(self, stored: Sequence[StoredShare], reading: _Reading, place: int) -> None:
        """Read the missing pieces of one share. The members begin with different stores."""
        first = place % len(stored)
        self._from_any((*stored[first:], *stored[:first]), partial(self._read_from, reading))

    def _from_any(self, stored: Sequence[StoredShare], read: Callable[[StoredShare], T]) -> T:
        """What `read` returns for the first of the stores from which it can read."""
        errors: list[str] = []
        for share in stored:
            try:
                return read(share)
            except (OSError, TransferError) as error:
                self._warn(
                    share.store, error, iteration=share.offer.step_version, share=share.offer.share
                )
                errors.append(str(error) or type(error).__name__)
        raise TransferError("; ".join(errors))

    def _read_from(self, reading: _Reading, share: StoredShare) -> None:
        with self._connect(share.store) as connection:
            reader = ShareReader(connection, _request(share.offer))
            if share.offer.share == 0:
                reading.numbers = reader.manifest.numbers
            useful = reading.useful(reader.manifest.pieces)
            for piece, data in reader.read(useful, reading.target):
                self._moved(reading.take(piece, data))
                reading.received[share.store] += piece.num_bytes

    def _moved(self, num_bytes: int) -> None:
        """A store has sent a piece. Raises RuntimeError as WorkCount."""
        self._moved_s = clock()
        self._count.add(num_bytes)

    def _wait_s(self) -> float:
        left_s = self._moved_s + self._silent_s_max - clock()
        if self._is_interrupted():
            raise TransferError("interrupted")
        if left_s <= 0:
            raise TransferError(
                "no more stores are tried: none has sent anything for "
                f"{self._silent_s_max:g} s (restore_s_max)"
            )
        return left_s

    def _warn(self, store: int, error: Exception, **where: int) -> None:
        log.warning(
            "in-memory checkpoint not usable",
            node=self._nodes[self.endpoints[store]],
            why=str(error) or type(error).__name__,
            **where,
        )


class _Reading:
    """The regions that a member wants, and those that are still missing. Thread-safe."""

    def __init__(self, wanted: State) -> None:
        self._wanted: dict[tuple[str, str], list[Shard]] = {}
        self._state = wanted
        self._num_missing = {shard: shard.region.num_elements for shard in wanted}
        self._taken: set[Piece] = set()
        self._lock = Lock()
        self.numbers = b""
        self.received = Counter[int]()
        for shard in wanted:
            self._wanted.setdefault((shard.key, shard.kind), []).append(shard)

    @property
    def missing(self) -> list[str]:
        return [shard.key for shard, num in self._num_missing.items() if num]

    @property
    def is_complete(self) -> bool:
        return bool(self.numbers) and not any(self._num_missing.values())

    def useful(self, pieces: Sequence[Piece]) -> list[int]:
        return [
            index
            for index, piece in enumerate(pieces)
            if piece not in self._taken and any(True for _ in self._overlaps(piece))
        ]

    def target(self, piece: Piece) -> memoryview | None:
        """The live memory for a piece that is wanted as a whole, in one place. Raises
        TransferError."""
        overlaps = list(self._overlaps(piece))
        if len(overlaps) != 1 or overlaps[0][1] != Region(piece.offset, piece.shape):
            return None
        shard, part = overlaps[0]
        live = cut(self._state[shard], shard.region, part)
        if live.device.type != "cpu" or not live.is_contiguous():
            return None
        return _memory(live, piece)

    def take(self, piece: Piece, data: memoryview) -> int:
        """Copy a piece into the tensors, unless it is received there; returns the bytes that were
        wanted of it. Raises TransferError."""
        region = Region(piece.offset, piece.shape)
        dtype = torch_dtype(piece.kind)
        try:
            tensor = torch.frombuffer(data, dtype=dtype).view(piece.shape)
        except (ValueError, RuntimeError) as error:
            raise TransferError(f"invalid piece: {error}") from None
        num_bytes = 0
        with self._lock:
            self._taken.add(piece)
        for shard, part in self._overlaps(piece):
            live, sent = cut(self._state[shard], shard.region, part), cut(tensor, region, part)
            try:
                if live.data_ptr() != sent.data_ptr():
                    live.copy_(sent)
            except RuntimeError as error:
                if is_cuda_error(error):
                    raise
                raise TransferError(f"{piece.key}: {error}") from None
            num_bytes += part.num_elements * dtype.itemsize
            with self._lock:
                self._num_missing[shard] -= part.num_elements
        return num_bytes

    def _overlaps(self, piece: Piece) -> Iterator[tuple[Shard, Region]]:
        region = Region(piece.offset, piece.shape)
        for shard in self._wanted.get((piece.key, piece.kind), ()):
            if (part := intersection(shard.region, region)) is not None:
                yield shard, part


def _memory(live: Tensor, piece: Piece) -> memoryview:
    """The bytes of a contiguous tensor in host memory. Raises TransferError."""
    if live.nbytes != piece.num_bytes:
        raise TransferError(f"invalid piece: {piece.key} has {piece.num_bytes} bytes")
    return live.view(-1).view(torch.uint8).numpy().data


def gather_shares(rounds: Rounds, mine: Sequence[StoredShare]) -> list[StoredShare]:
    """A round: the shares that all members have found."""
    return [
        share
        for found in rounds.gather(msgspec.msgpack.encode(mine))
        for share in from_msgpack(found, list[StoredShare])
    ]


def _request(offer: Offer) -> ShareRequest:
    return ShareRequest(
        task=offer.task,
        generation=offer.generation,
        step_version=offer.step_version,
        share=offer.share,
        num_shares=offer.num_shares,
    )


def _fits(copy: MemoryCheckpoint, share: Offer) -> bool:
    most = copy.step_version_max if copy.step_version_max >= 0 else inf
    return copy.generation == share.generation and copy.step_version <= share.step_version <= most


def _distance(share: Offer, held: HeldState) -> tuple[bool, ...]:
    """Shares of the member's own part of the model come first; then those of its pipeline stage,
    which have what all tensor-parallel ranks hold, and those of the first stage."""
    if share.shape != held.shape:
        return (True,)
    return (False, share.part != held.part, share.part[1:] != held.part[1:], any(share.part[1:]))
