"""The other members of a generation, as the state exchange uses them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from ..communicators.rounds import Rounds
from ..dependencies.private_torch import world_store
from .state_transfer import comm_device

_count = count()
"""Numbers the worlds of other code: torch may name two of them alike."""


class World:
    """The members of a generation: rounds through its store for what all tell, messages between two
    members, and published data for what few read. All members call `collect`, `scatter`, `all` and
    `swap` in one order. Every method raises RuntimeError."""

    def __init__(self, rounds: Rounds) -> None:
        self.place, self.num = rounds.place, rounds.num
        self._rounds = rounds

    @classmethod
    def of_torch(cls) -> World:
        """The members of torch.distributed's world, which other code has built. All of them call it
        equally often in their lives, also those of processes that start together later."""
        name = f"unicron/{next(_count)}"
        return cls(Rounds(world_store(), dist.get_rank(), dist.get_world_size(), name))

    def collect(self, data: bytes) -> Sequence[bytes]:
        """The data of all members, by place."""
        return self._rounds.gather(data)

    def scatter(self, data: bytes, answers: Callable[[Sequence[bytes]], Sequence[bytes]]) -> bytes:
        """As Rounds.scatter: this member's answer to the data of all."""
        return self._rounds.scatter(data, answers)

    def all(self, mine: bool) -> bool:
        """As `is_so_on_all`."""
        return is_so_on_all(mine)

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
        self._rounds.store.set(name, data)

    def read(self, name: str) -> bytes:
        """Published data; waits until it is there."""
        found: bytes = self._rounds.store.get(name)
        return found


def is_so_on_all(mine: bool) -> bool:
    """A collective of torch's world: whether it is so on all members. Raises RuntimeError, at once
    if a member is gone."""
    flag = torch.tensor([mine], dtype=torch.uint8, device=comm_device())
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[: len(data)]


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
