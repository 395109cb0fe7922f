"""Tensors from member to member in chunks of bytes, each with its checksum.

Small tensors share a chunk: a message costs as much as many of them. A chunk is packed and summed
up while the one before it is on its way.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 4 << 20
"""What one member gives another at a time. Two such are in memory; a larger tensor goes whole."""
ALIGN_BYTES = 8
"""Each tensor begins at a multiple of this in its chunk, and behind all is their checksum."""


class _Flying(NamedTuple):
    """Chunks on their way: the messages, their memory, and what has to be unpacked from whom."""

    works: list[dist.Work]
    memory: list[Tensor]
    takes: list[tuple[int, Tensor, list[Tensor]]]


def wire() -> torch.device:
    """Where messages are made."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def transfer(give: Mapping[int, Sequence[Tensor]], take: Mapping[int, Sequence[Tensor]],
             goes_on: Callable[[], bool]) -> set[int]:
    """Give and take tensors, by place, in order: what one gives, the other takes.

    Returns the places from which something came that is not what its checksum says; it is not
    written to its tensor. `goes_on` is asked after each wait. Raises RuntimeError; nothing is
    written any more then.
    """
    device = wire()
    giving = {place: list(_chunks(tensors)) for place, tensors in give.items()}
    taking = {place: list(_chunks(tensors)) for place, tensors in take.items()}
    num_rounds = max(map(len, [*giving.values(), *taking.values()]), default=0)
    bad: set[int] = set()
    flying = _Flying([], [], [])
    for number in range(num_rounds + 1):
        started = _start(number, giving, taking, device)
        for work in flying.works:
            work.wait()
        if not goes_on():
            raise RuntimeError("told to stop while state was exchanged")
        for place, chunk, tensors in flying.takes:
            if not _unpack(chunk, tensors):
                bad.add(place)
        flying = started
    return bad


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in parts of about CHUNK_BYTES; alike on both sides, since sizes are."""
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


def _start(number: int, giving: Mapping[int, list[list[Tensor]]],
           taking: Mapping[int, list[list[Tensor]]], device: torch.device) -> _Flying:
    messages: list[dist.P2POp] = []
    takes: list[tuple[int, Tensor, list[Tensor]]] = []
    for place, chunks in taking.items():
        if number < len(chunks):
            room = torch.empty(_size(chunks[number]), dtype=torch.uint8, device=device)
            messages.append(dist.P2POp(dist.irecv, room, place))
            takes.append((place, room, chunks[number]))
    for place, chunks in giving.items():
        if number < len(chunks):
            messages.append(dist.P2POp(dist.isend, _pack(chunks[number], device), place))
    works = dist.batch_isend_irecv(messages) if messages else []
    return _Flying(works, [message.tensor for message in messages], takes)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(map(_padded, tensors)) + ALIGN_BYTES


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _views(chunk: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    begin = 0
    for tensor in tensors:
        yield chunk[begin:begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor
        begin += _padded(tensor)


def _pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    # Zeros, since what is between two tensors is summed up too.
    chunk = torch.zeros(_size(tensors), dtype=torch.uint8, device=device)
    for view, tensor in _views(chunk, tensors):
        view.copy_(tensor)
    chunk[-ALIGN_BYTES:].view(torch.int64).fill_(_sum(chunk))
    return chunk


def _unpack(chunk: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether it is what its checksum says; only then it is written to the tensors."""
    if chunk[-ALIGN_BYTES:].view(torch.int64).item() != _sum(chunk):
        return False
    for view, tensor in _views(chunk, tensors):
        tensor.copy_(view)
    return True


def _sum(chunk: Tensor) -> int:
    return zlib.crc32(chunk[:-ALIGN_BYTES].cpu().numpy().data)
