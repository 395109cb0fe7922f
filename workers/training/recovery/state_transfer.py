"""Sends and receives tensors between members, in streams of chunks, each with a checksum.

Small tensors share a chunk, because messages are expensive. Threads compute the checksums.
"""

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ipc.work_row import WorkCount

CHUNK_BYTES = 4 << 20
"""Size of a message. A larger tensor is sent in one message."""
BUFFER_BYTES = 64 << 20
"""Memory for chunks in transit. One chunk for each peer is in transit even if they exceed it."""
ROUNDS_NUM_MAX = 6
"""Maximum chunks in transit with one peer, each way."""
NUM_CHECKSUM_THREADS = 2
ROW_NUM = 2048
"""Words of 8 bytes in a row of a chunk, as its checksum sees it."""
ALIGN_BYTES = 8
"""Alignment of a tensor in its chunk; the checksum follows the last tensor."""


class _Buffers:
    """Memory for chunks, used again: on the CPU new memory for each costs more than its copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """A chunk of so many bytes, with any content."""
        memory = self._free.pop() if self._free else None
        if memory is None or memory.nbytes < size:
            memory = torch.empty(
                max(size, CHUNK_BYTES + ALIGN_BYTES), dtype=torch.uint8, device=self._device
            )
        return memory[:size]

    def give_back(self, chunk: Tensor) -> None:
        """Nothing uses this chunk any more."""
        self._free.append(chunk.as_strided((chunk.untyped_storage().nbytes(),), (1,), 0))


class _Received(NamedTuple):
    """A received chunk, and the tensors that it is for."""

    place: int
    chunk: Tensor
    tensors: list[Tensor]


class _Round(NamedTuple):
    """One chunk for each peer, in transit. `sent` keeps the sent chunks until they have left."""

    works: list[dist.Work]
    sent: list[Tensor]
    received: list[_Received]


def comm_device() -> torch.device:
    """The device of the message buffers."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def transfer(
    give: Mapping[int, Sequence[Tensor]],
    take: Mapping[int, Sequence[Tensor]],
    count: WorkCount,
) -> set[int]:
    """Send (`give`) and receive (`take`) tensors by place, in the same order on both sides. Returns
    the places that sent a wrong checksum; such a chunk is not written. `count`: of the bytes
    received, or sent if none are, after each wait. If it raises RuntimeError, no more is written.
    """
    what = take or give
    total = sum(tensor.nbytes for tensors in what.values() for tensor in tensors)
    with (
        ThreadPoolExecutor(NUM_CHECKSUM_THREADS, "checksum") as pool,
        count.of("receives its state" if take else "sends its state", total),
    ):
        return _Transfer(give, take, pool, count).run()


class _Transfer:
    """The rounds of a transfer: in each, one chunk goes to each peer and comes from each. Members
    may have different numbers of rounds in transit, because all start them in the same order."""

    def __init__(
        self,
        give: Mapping[int, Sequence[Tensor]],
        take: Mapping[int, Sequence[Tensor]],
        pool: ThreadPoolExecutor,
        count: WorkCount,
    ) -> None:
        self._sending = {place: list(_chunks(tensors)) for place, tensors in give.items()}
        self._receiving = {place: list(_chunks(tensors)) for place, tensors in take.items()}
        self._pool, self._count, self._buffers = pool, count, _Buffers(comm_device())
        round_bytes = CHUNK_BYTES * max(len(give) + len(take), 1)
        self._num_at_once = max(1, min(ROUNDS_NUM_MAX, BUFFER_BYTES // round_bytes))
        self._packed: deque[dict[int, Future[Tensor]]] = deque()
        self._in_transit: deque[_Round] = deque()
        self._checked: deque[list[tuple[_Received, Future[bool]]]] = deque()
        self._bad: set[int] = set()

    def run(self) -> set[int]:
        all_chunks = [*self._sending.values(), *self._receiving.values()]
        for number in range(num_rounds := max(map(len, all_chunks), default=0)):
            self._pack(number)
            if number:
                self._start(number - 1)
            if len(self._in_transit) > self._num_at_once:
                self._receive()
        if num_rounds:
            self._start(num_rounds - 1)
        while self._in_transit:
            self._receive()
        while self._checked:
            self._write()
        return self._bad

    def _pack(self, number: int) -> None:
        self._packed.append(
            {
                place: self._pool.submit(_seal, self._packed_chunk(chunks[number]))
                for place, chunks in self._sending.items()
                if number < len(chunks)
            }
        )

    def _packed_chunk(self, tensors: Sequence[Tensor]) -> Tensor:
        return _pack(tensors, self._buffers.take(_size(tensors)))

    def _start(self, number: int) -> None:
        messages: list[dist.P2POp] = []
        sent: list[Tensor] = []
        received: list[_Received] = []
        for place, chunks in self._receiving.items():
            if number < len(chunks):
                buffer = self._buffers.take(_size(chunks[number]))
                messages.append(dist.P2POp(dist.irecv, buffer, place))
                received.append(_Received(place, buffer, chunks[number]))
        for place, sealed in self._packed.popleft().items():
            sent.append(sealed.result())
            messages.append(dist.P2POp(dist.isend, sent[-1], place))
        works = dist.batch_isend_irecv(messages) if messages else []
        self._in_transit.append(_Round(works, sent, received))

    def _receive(self) -> None:
        arrived = self._in_transit.popleft()
        for work in arrived.works:
            work.wait()
        self._checked.append(
            [(one, self._pool.submit(_is_right, one.chunk)) for one in arrived.received]
        )
        if not self._receiving:
            self._count.add(sum(chunk.nbytes for chunk in arrived.sent))
        for chunk in arrived.sent:
            self._buffers.give_back(chunk)
        if len(self._checked) > 1:
            self._write()

    def _write(self) -> None:
        checked = [(one, is_right.result()) for one, is_right in self._checked.popleft()]
        self._count.add(sum(received.chunk.nbytes for received, _ in checked))
        for one, is_right in checked:
            if is_right:
                _unpack(one.chunk, one.tensors)
            else:
                self._bad.add(one.place)
            self._buffers.give_back(one.chunk)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in groups of about CHUNK_BYTES. Equal sizes give equal groups on both sides."""
    part: list[Tensor] = []
    part_bytes = 0
    for tensor in tensors:
        if part and part_bytes + tensor.nbytes > CHUNK_BYTES:
            yield part
            part, part_bytes = [], 0
        part.append(tensor)
        part_bytes += tensor.nbytes
    if part:
        yield part


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(map(_padded, tensors)) + ALIGN_BYTES


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _views(chunk: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    begin = 0
    for tensor in tensors:
        yield chunk[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor
        begin += _padded(tensor)


def _pack(tensors: Sequence[Tensor], chunk: Tensor) -> Tensor:
    """Copy the tensors into the chunk, with zeros between them: the checksum covers these too."""
    begin = 0
    for view, tensor in _views(chunk, tensors):
        view.copy_(tensor)
        end = begin + _padded(tensor)
        chunk[begin + tensor.nbytes : end].zero_()
        begin = end
    return chunk


def _unpack(chunk: Tensor, tensors: Sequence[Tensor]) -> None:
    for view, tensor in _views(chunk, tensors):
        tensor.copy_(view)


def _seal(chunk: Tensor) -> Tensor:
    """Write the checksum into the chunk."""
    chunk[-ALIGN_BYTES:].view(torch.int64).fill_(_sum(chunk))
    return chunk


def _is_right(chunk: Tensor) -> bool:
    return chunk[-ALIGN_BYTES:].view(torch.int64).item() == _sum(chunk)


def _sum(chunk: Tensor) -> int:
    """Over the sums of the rows and of the columns of its words, which cost a third of a CRC of all
    bytes: what alters both none must alter four words at the corners of a rectangle, or more."""
    words = chunk[:-ALIGN_BYTES].view(torch.int64)
    num_in_rows = len(words) // ROW_NUM * ROW_NUM
    grid = words[:num_in_rows].view(-1, ROW_NUM)
    sums = torch.cat((grid.sum(0), grid.sum(1), words[num_in_rows:]))
    return zlib.crc32(sums.cpu().numpy().data)
