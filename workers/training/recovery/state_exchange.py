"""The exchange of state between the members of a generation, out of live memory into live memory.

All members call it. Each says which pieces of the state it has and which it wants, all make the
same plan of it (boxes.py), and each takes what it lacks from the nearest who has it. Who gives what
does not come to its checksum, or is of another step or another model, gives nothing: the plan is
made without it, by all alike. Nothing that is in force is changed before `put_in_force`, nor by an
exchange that fails.
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
from .resharding import Box, Missing, Move, Piece, plan
from .state_shards import State, cut
from .state_sources import NO_STATE

# --- Tensors from member to member in chunks of bytes, each with its checksum. ---
#
# Small tensors share a chunk: a message costs as much as many of them. A chunk is packed and summed
# up while the one before it is on its way.

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

LARGEST_NUM = CHUNK_BYTES // 4
"""Elements that move as one, at most: what is larger comes from several, where several have it."""
NUMBERS = Piece("numbers", "", Box((0,), (1,)))
"""Stands for what is no tensor, and is as long as its giver says."""
Note = Callable[[Literal["give", "receive"]], None]

log = structlog.get_logger()


class Exchanged(NamedTuple):
    """What came: the numbers, and how many bytes from each place.

    `put_in_force` writes what was staged.
    """

    told: training_state.Numbers
    put_in_force: Callable[[], None]
    taken: dict[int, int]


class Offer(Struct, frozen=True, array_like=True):
    """What a member has, of which step, and what it wants: pieces, encoded."""

    step_version: int
    have: bytes
    want: bytes
    numbers_bytes: int


class _Memory(NamedTuple):
    """Pieces, and the tensor of each."""

    pieces: Sequence[Piece]
    tensors: Sequence[Tensor]

    def part(self, index: int, box: Box) -> Tensor:
        """`box` of the piece at this index, live."""
        return cut(self.tensors[index], self.pieces[index].box, box)


class _Side(NamedTuple):
    """What one member gives and takes, by place, and what waits to be in force: where, and what."""

    give: dict[int, list[Tensor]]
    take: dict[int, list[Tensor]]
    staged: list[tuple[Tensor, Tensor]]


def exchange(have: State, want: State, told: training_state.Numbers | None, *, step_version: int,
             holders: Collection[int], nodes: Sequence[str], staged: bool,
             note: Note = lambda event: None, goes_on: Callable[[], bool] = lambda: True
             ) -> Exchanged:
    """Fill `want` with the state after `step_version` steps, which those at `holders` have.

    Every member of the world calls it, with the pieces that it has and its own numbers (`told`;
    None: none of its state counts). `nodes` by place. `staged`: `want` is in force, and stays what
    it is until `put_in_force`, at the cost of as much memory as comes; else it is written at once.
    `goes_on` says whether this exchange still matters: it is asked after each wait, before anything
    is written. Raises boxes.Missing, on all members, where the holders have not all of it, and
    RuntimeError.
    """
    me = dist.get_rank()
    numbers = b"" if told is None else training_state.encode(told)
    offers = _meet(Offer(
        step_version=NO_STATE if told is None else told.step_version, have=_encoded(have),
        want=_encoded(() if want is have else want),
        numbers_bytes=len(numbers)))
    held = [_decoded(offer.have) for offer in offers]
    wanted = [_decoded(offer.want) for offer in offers]
    targets = [] if want is have else list(want.values())
    givers = _givers(offers, held, wanted, step_version, holders)
    wanted = [pieces if offer.step_version == step_version else (*pieces, NUMBERS)
              for offer, pieces in zip(offers, wanted, strict=True)]
    refused: set[int] = set()
    while True:
        has = [(*pieces, NUMBERS) if place in givers - refused else ()
               for place, pieces in enumerate(held)]
        moves = _plan(has, wanted, nodes, refused)
        letter = _room(moves, offers, wanted, me)
        side = _side(me, moves, _Memory(has[me], [*have.values(), _tensor(numbers)]),
                     _Memory(wanted[me], [*targets, letter]), staged=staged)
        if side.give:
            note("give")
        if side.take:
            note("receive")
        bad = _agree(transfer(side.give, side.take, goes_on), len(offers))
        if not bad:
            break
        log.warning("what members gave is refused", places=sorted(bad),
                    why="it does not come to its checksum")
        refused |= bad

    def put_in_force() -> None:
        for live, new in side.staged:
            live.copy_(new)

    if told is None or told.step_version != step_version:
        told = _read(letter)
    return Exchanged(told, put_in_force, {
        place: sum(tensor.nbytes for tensor in tensors if tensor is not letter)
        for place, tensors in sorted(side.take.items())})


def _meet(mine: Offer) -> list[Offer]:
    """What every member brings, by place."""
    data = _tensor(msgspec.msgpack.encode(mine)).to(wire())
    sizes = [torch.zeros(1, dtype=torch.int64, device=wire()) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=wire()))
    largest = max(int(size.item()) for size in sizes)
    rooms = [torch.empty(largest, dtype=torch.uint8, device=wire()) for _ in sizes]
    dist.all_gather(rooms, torch.cat([data, data.new_zeros(largest - data.numel())]))
    return [msgspec.msgpack.decode(room[:int(size.item())].cpu().numpy().data, type=Offer)
            for room, size in zip(rooms, sizes, strict=True)]


def _agree(bad: Collection[int], num_members: int) -> set[int]:
    """The places that any member refuses. Whoever has this answer knows that all have theirs."""
    flags = torch.tensor([int(place in bad) for place in range(num_members)], device=wire())
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return {place for place, flag in enumerate(flags.tolist()) if flag}


def _givers(offers: Sequence[Offer], held: Sequence[Sequence[Piece]],
            wanted: Sequence[Sequence[Piece]], step_version: int, holders: Collection[int]
            ) -> set[int]:
    """Those of the holders that are of this step, and of the model that is wanted."""
    kinds = {piece.key: piece.kind for pieces in reversed(wanted) for piece in pieces}
    found: set[int] = set()
    for place in sorted(holders):
        odd = next((piece for piece in held[place]
                    if kinds.get(piece.key, piece.kind) != piece.kind), None)
        if offers[place].step_version != step_version:
            why = f"it is of step {offers[place].step_version}, not {step_version}"
        elif odd is not None:
            why = f"its {odd.key} is {odd.kind}, not {kinds[odd.key]}"
        else:
            found.add(place)
            continue
        log.warning("what a member has is refused", place=place, why=why)
    return found


def _plan(has: Sequence[Sequence[Piece]], wanted: Sequence[Sequence[Piece]], nodes: Sequence[str],
          refused: Collection[int]) -> list[Move]:
    try:
        return plan(has, wanted, nodes, LARGEST_NUM)
    except Missing as missing:
        if not refused:
            raise
        # What is altered on its way is not lost: the next meeting asks for it again.
        why = f"{missing}, without those at {sorted(refused)}"
    raise RuntimeError(why)


def _room(moves: Sequence[Move], offers: Sequence[Offer], wanted: Sequence[Sequence[Piece]],
          me: int) -> Tensor:
    """Where this member takes the numbers, if it lacks them."""
    return torch.empty(sum(offers[move.source].numbers_bytes for move in moves
                           if move.target == me and wanted[me][move.wanted] == NUMBERS),
                       dtype=torch.uint8)


def _side(me: int, moves: Sequence[Move], mine: _Memory, theirs: _Memory, *, staged: bool) -> _Side:
    """The part of the plan that is this member's; what it has itself is in its place at once."""
    side = _Side({}, {}, [])
    for box, source, given, target, wanted in moves:
        if source == me != target:
            side.give.setdefault(target, []).append(mine.part(given, box))
        if target != me:
            continue
        place = theirs.part(wanted, box)
        new = place
        if staged and theirs.pieces[wanted] != NUMBERS:
            new = torch.empty_like(place)
            side.staged.append((place, new))
        if source == me:
            new.copy_(mine.part(given, box))
        else:
            side.take.setdefault(source, []).append(new)
    return side


def _read(letter: Tensor) -> training_state.Numbers:
    try:
        return training_state.decode(letter.numpy().tobytes())
    except msgspec.MsgspecError as error:
        raise RuntimeError(f"numbers are not understood: {error}") from None


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[:len(data)]


def _encoded(pieces: Iterable[Piece]) -> bytes:
    return msgspec.msgpack.encode(tuple(pieces))


@lru_cache(maxsize=64)
def _decoded(data: bytes) -> tuple[Piece, ...]:
    """Many members have the same pieces, and the same as last time."""
    return msgspec.msgpack.decode(data, type=tuple[Piece, ...])
