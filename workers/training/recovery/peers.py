"""The other members of a generation, as the state exchange uses them."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..dependencies.private_torch import world_store
from .state_transfer import comm_device


class World:
    """The members of the torch.distributed world, and the generation's store for what few members
    read. All members call the collectives `gather`, `collect`, `all` and `swap`, in one order.
    Every method raises RuntimeError."""

    def __init__(self) -> None:
        self.place, self.num = dist.get_rank(), dist.get_world_size()
        self._store: Any = world_store()

    def gather(self, record: bytes) -> Sequence[bytes]:
        """The records of all members, by place. All have the same size."""
        size = len(record)
        found = torch.empty(size * self.num, dtype=torch.uint8, device=comm_device())
        dist.all_gather(
            [found[at : at + size] for at in range(0, size * self.num, size)],
            tensor_of(record).to(comm_device()),
        )
        whole = bytes_of(found)
        return [whole[at : at + size] for at in range(0, len(whole), size)]

    def collect(self, data: bytes) -> Sequence[bytes]:
        """The data of all members, by place, of any size: the sizes, then the compressed data."""
        data = zlib.compress(data, level=1)
        sizes = [int.from_bytes(size) for size in self.gather(len(data).to_bytes(8))]
        found = self.gather(data.ljust(max(sizes), b"\0"))
        return [zlib.decompress(each[:size]) for each, size in zip(found, sizes, strict=True)]

    def all(self, mine: bool) -> bool:
        """Whether it is so on all members."""
        return all(flag == b"1" for flag in self.gather(b"1" if mine else b"0"))

    def swap(self, outgoing: Mapping[int, bytes], sources: Collection[int]) -> Mapping[int, bytes]:
        """Send data to some members, and receive that of `sources`: the sizes, then the data."""
        sizes = self._swap(
            {place: len(data).to_bytes(8) for place, data in outgoing.items()},
            dict.fromkeys(sources, 8),
        )
        return self._swap(outgoing, {place: int.from_bytes(size) for place, size in sizes.items()})

    def _swap(self, outgoing: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytes]:
        device = comm_device()
        incoming = {
            place: torch.empty(size, dtype=torch.uint8, device=device)
            for place, size in sizes.items()
        }
        messages = [dist.P2POp(dist.irecv, buffer, place) for place, buffer in incoming.items()]
        messages += [
            dist.P2POp(dist.isend, tensor_of(data).to(device), place)
            for place, data in outgoing.items()
        ]
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        return {place: bytes_of(buffer) for place, buffer in incoming.items()}

    def publish(self, name: str, data: bytes) -> None:
        self._store.set(name, data)

    def read(self, name: str) -> bytes:
        """Published data; waits until it is there."""
        found: bytes = self._store.get(name)
        return found


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[: len(data)]


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
