"""Exchanges state between the members of a generation, from live memory into live memory.

All members call `exchange`. Each member publishes the shards that it has and wants, all compute the
same plan (resharding.py), and each receives the missing shards from the nearest holder. If the data
of a sender fails a checksum, or is of another step or model, all members exclude this sender and
plan again. The active state changes only in `activate`, so never if the exchange fails.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import structlog
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from ..model import training_state
from .resharding import Missing, Move, Region, Shard, plan_moves
from .state_shards import State, cut
from .state_sources import NO_STATE

# --- Transfer of tensors in chunks of bytes, each with a checksum ---
#
# Small tensors share a chunk, because messages are expensive. While a chunk is in transit, the next
# one is packed and its checksum computed.

CHUNK_BYTES = 4 << 20
"""Size of a message; two are in memory at a time. A larger tensor is sent in one message."""
ALIGN_BYTES = 8
"""Alignment of a tensor in its chunk; the checksum follows the last tensor."""


class _InTransit(NamedTuple):
    """Chunks in transit: the messages, their memory, and the received chunks by place."""

    works: list[dist.Work]
    memory: list[Tensor]
    received: list[tuple[int, Tensor, list[Tensor]]]


def comm_device() -> torch.device:
    """The device of the message buffers."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def transfer(give: Mapping[int, Sequence[Tensor]], take: Mapping[int, Sequence[Tensor]],
             goes_on: Callable[[], bool]) -> set[int]:
    """Send (`give`) and receive (`take`) tensors by place, in the same order on both sides.

    Returns the places that sent a wrong checksum; such a chunk is not written. `goes_on` is called
    after each wait. If it returns False, `transfer` raises RuntimeError and writes no more.
    """
    device = comm_device()
    sending = {place: list(_chunks(tensors)) for place, tensors in give.items()}
    receiving = {place: list(_chunks(tensors)) for place, tensors in take.items()}
    num_rounds = max(map(len, [*sending.values(), *receiving.values()]), default=0)
    bad: set[int] = set()
    in_transit = _InTransit([], [], [])
    for number in range(num_rounds + 1):
        started = _start(number, sending, receiving, device)
        for work in in_transit.works:
            work.wait()
        if not goes_on():
            raise RuntimeError("interrupted during the state exchange")
        for place, chunk, tensors in in_transit.received:
            if not _unpack(chunk, tensors):
                bad.add(place)
        in_transit = started
    return bad


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


def _start(number: int, sending: Mapping[int, list[list[Tensor]]],
           receiving: Mapping[int, list[list[Tensor]]], device: torch.device) -> _InTransit:
    messages: list[dist.P2POp] = []
    received: list[tuple[int, Tensor, list[Tensor]]] = []
    for place, chunks in receiving.items():
        if number < len(chunks):
            buffer = torch.empty(_size(chunks[number]), dtype=torch.uint8, device=device)
            messages.append(dist.P2POp(dist.irecv, buffer, place))
            received.append((place, buffer, chunks[number]))
    for place, chunks in sending.items():
        if number < len(chunks):
            messages.append(dist.P2POp(dist.isend, _pack(chunks[number], device), place))
    works = dist.batch_isend_irecv(messages) if messages else []
    return _InTransit(works, [message.tensor for message in messages], received)


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
    # Filled with zeros, because the checksum covers the padding too.
    chunk = torch.zeros(_size(tensors), dtype=torch.uint8, device=device)
    for view, tensor in _views(chunk, tensors):
        view.copy_(tensor)
    chunk[-ALIGN_BYTES:].view(torch.int64).fill_(_sum(chunk))
    return chunk


def _unpack(chunk: Tensor, tensors: Sequence[Tensor]) -> bool:
    """If the checksum is right, write the chunk to the tensors and return True."""
    if chunk[-ALIGN_BYTES:].view(torch.int64).item() != _sum(chunk):
        return False
    for view, tensor in _views(chunk, tensors):
        tensor.copy_(view)
    return True


def _sum(chunk: Tensor) -> int:
    return zlib.crc32(chunk[:-ALIGN_BYTES].cpu().numpy().data)

LARGEST_NUM = CHUNK_BYTES // 4
"""Maximum elements of a move. A larger region is split, so that several holders can send it."""
NUMBERS = Shard("numbers", "", Region((0,), (1,)))
"""Stands for the numbers of the state in a plan. The sender's offer has their size."""
Note = Callable[[Literal["give", "receive"]], None]

log = structlog.get_logger()


class ExchangeResult(NamedTuple):
    """The numbers of the state, and the bytes received from each place (`taken`). `activate` copies
    the staged tensors into the active state."""

    numbers: training_state.Numbers
    activate: Callable[[], None]
    taken: dict[int, int]


class MemberOffer(Struct, frozen=True, array_like=True):
    """A member's step version, and the encoded shards that it has and wants."""

    step_version: int
    have: bytes
    want: bytes
    numbers_bytes: int


class _Memory(NamedTuple):
    """Shards, and the tensor of each."""

    shards: Sequence[Shard]
    tensors: Sequence[Tensor]

    def part(self, index: int, region: Region) -> Tensor:
        """The live view of `region` in the shard at this index."""
        return cut(self.tensors[index], self.shards[index].region, region)


class _Side(NamedTuple):
    """What one member sends and receives, by place; `staged` are pairs of active and new tensor."""

    give: dict[int, list[Tensor]]
    take: dict[int, list[Tensor]]
    staged: list[tuple[Tensor, Tensor]]


def exchange(have: State, want: State, numbers: training_state.Numbers | None, *,
             step_version: int, holders: Collection[int], nodes: Sequence[str], staged: bool,
             note: Note = lambda event: None, goes_on: Callable[[], bool] = lambda: True
             ) -> ExchangeResult:
    """Fill `want` with the state after `step_version` steps from the members at `holders`.

    All members call it, each with its shards and its `numbers` (None: it has no valid state).
    `nodes` is by place. With `staged`, `want` is the active state: it changes only in `activate`,
    and the received data needs additional memory. Otherwise `want` is written directly. `goes_on`
    is called after each wait, before a write: it returns False if the exchange is obsolete. Raises
    RuntimeError. If the holders lack a part, all members raise resharding.Missing.
    """
    me = dist.get_rank()
    encoded = b"" if numbers is None else msgspec.msgpack.encode(numbers)
    offers = _gather_offers(MemberOffer(
        step_version=NO_STATE if numbers is None else numbers.step_version, have=_encoded(have),
        want=_encoded(() if want is have else want), numbers_bytes=len(encoded)))
    held = [_decoded(offer.have) for offer in offers]
    wanted = [_decoded(offer.want) for offer in offers]
    targets = [] if want is have else list(want.values())
    senders = _senders(offers, held, wanted, step_version, holders)
    wanted = [shards if offer.step_version == step_version else (*shards, NUMBERS)
              for offer, shards in zip(offers, wanted, strict=True)]
    excluded: set[int] = set()
    while True:
        has = [(*shards, NUMBERS) if place in senders - excluded else ()
               for place, shards in enumerate(held)]
        moves = _plan(has, wanted, nodes, excluded)
        new_numbers = _numbers_buffer(moves, offers, wanted, me)
        side = _side(me, moves, _Memory(has[me], [*have.values(), _tensor(encoded)]),
                     _Memory(wanted[me], [*targets, new_numbers]), staged=staged)
        if side.give:
            note("give")
        if side.take:
            note("receive")
        bad = _agree(transfer(side.give, side.take, goes_on), len(offers))
        if not bad:
            break
        log.warning("senders of state are excluded", places=sorted(bad), why="wrong checksum")
        excluded |= bad

    def activate() -> None:
        for live, new in side.staged:
            live.copy_(new)

    if numbers is None or numbers.step_version != step_version:
        numbers = _read(new_numbers)
    return ExchangeResult(numbers, activate, {
        place: sum(tensor.nbytes for tensor in tensors if tensor is not new_numbers)
        for place, tensors in sorted(side.take.items())})


def _gather_offers(mine: MemberOffer) -> list[MemberOffer]:
    """The offers of all members, by place."""
    data = _tensor(msgspec.msgpack.encode(mine)).to(comm_device())
    sizes = [torch.zeros(1, dtype=torch.int64, device=comm_device())
             for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=comm_device()))
    largest = max(int(size.item()) for size in sizes)
    buffers = [torch.empty(largest, dtype=torch.uint8, device=comm_device()) for _ in sizes]
    dist.all_gather(buffers, torch.cat([data, data.new_zeros(largest - data.numel())]))
    return [msgspec.msgpack.decode(buffer[:int(size.item())].cpu().numpy().data, type=MemberOffer)
            for buffer, size in zip(buffers, sizes, strict=True)]


def _agree(bad: Collection[int], num_members: int) -> set[int]:
    """The places in `bad` of any member. Returns when all members have received their data."""
    flags = torch.tensor([int(place in bad) for place in range(num_members)], device=comm_device())
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return {place for place, flag in enumerate(flags.tolist()) if flag}


def _senders(offers: Sequence[MemberOffer], held: Sequence[Sequence[Shard]],
             wanted: Sequence[Sequence[Shard]], step_version: int, holders: Collection[int]
             ) -> set[int]:
    """The holders with the right step version and the right model."""
    kinds = {shard.key: shard.kind for shards in reversed(wanted) for shard in shards}
    found: set[int] = set()
    for place in sorted(holders):
        odd = next((shard for shard in held[place]
                    if kinds.get(shard.key, shard.kind) != shard.kind), None)
        if offers[place].step_version != step_version:
            why = f"it is of step {offers[place].step_version}, not {step_version}"
        elif odd is not None:
            why = f"its {odd.key} is {odd.kind}, not {kinds[odd.key]}"
        else:
            found.add(place)
            continue
        log.warning("a holder of state is excluded", place=place, why=why)
    return found


def _plan(has: Sequence[Sequence[Shard]], wanted: Sequence[Sequence[Shard]], nodes: Sequence[str],
          excluded: Collection[int]) -> list[Move]:
    try:
        return plan_moves(has, wanted, nodes, LARGEST_NUM)
    except Missing as missing:
        if not excluded:
            raise
        # State that was altered in transit is not lost: the next generation exchanges it again.
        why = f"{missing}, without those at {sorted(excluded)}"
    raise RuntimeError(why)


def _numbers_buffer(moves: Sequence[Move], offers: Sequence[MemberOffer],
                    wanted: Sequence[Sequence[Shard]], me: int) -> Tensor:
    """The buffer for the numbers; empty if this member has them."""
    return torch.empty(sum(offers[move.source].numbers_bytes for move in moves
                           if move.target == me and wanted[me][move.wanted] == NUMBERS),
                       dtype=torch.uint8)


def _side(me: int, moves: Sequence[Move], mine: _Memory, theirs: _Memory, *, staged: bool) -> _Side:
    """This member's part of the plan. Data that the member has itself is copied immediately."""
    side = _Side({}, {}, [])
    for region, source, given, target, wanted in moves:
        if source == me != target:
            side.give.setdefault(target, []).append(mine.part(given, region))
        if target != me:
            continue
        place = theirs.part(wanted, region)
        new = place
        if staged and theirs.shards[wanted] != NUMBERS:
            new = torch.empty_like(place)
            side.staged.append((place, new))
        if source == me:
            new.copy_(mine.part(given, region))
        else:
            side.take.setdefault(source, []).append(new)
    return side


def _read(encoded: Tensor) -> training_state.Numbers:
    try:
        return msgspec.msgpack.decode(encoded.numpy().data, type=training_state.Numbers)
    except msgspec.MsgspecError as error:
        raise RuntimeError(f"the numbers cannot be decoded: {error}") from None


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[:len(data)]


def _encoded(shards: Iterable[Shard]) -> bytes:
    return msgspec.msgpack.encode(tuple(shards))


@lru_cache(maxsize=64)
def _decoded(data: bytes) -> tuple[Shard, ...]:
    """Cached, because many members have equal shards, also in later generations."""
    return msgspec.msgpack.decode(data, type=tuple[Shard, ...])
