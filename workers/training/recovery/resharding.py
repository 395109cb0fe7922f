"""Plans the transfer of tensor regions to one member, from the members that hold them.

Pure. Each member plans only what it receives, and reads only the lists of shards that it needs.
"""

from __future__ import annotations

import hashlib
import heapq
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from operator import add
from typing import NamedTuple

import msgspec

from ....events.decoding import from_msgpack
from ....events.words import listed

Dims = tuple[int, ...]
DIGEST_BYTES = 16
SENDERS_NUM_MAX = 8
"""The most members from which one receiver takes shards of one list. More need more connections,
and do not make it faster: the receiver's own link is the limit."""
NO_PLACE = -1


class Region(NamedTuple):
    """A rectangular block of a tensor: its first element, and its size along each dim."""

    offset: Dims
    shape: Dims

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class Shard(NamedTuple):
    """A region of the tensor `key`. `kind` is the tensor's dtype and shape: tensors with the same
    key and different kinds are unrelated."""

    key: str
    kind: str
    region: Region


class ShardList:
    """A member's shards in a fixed order. Equal lists have equal digests."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = tuple(shards)
        self._plain = msgspec.msgpack.encode(self.shards)
        self.digest = hashlib.blake2b(self._plain, digest_size=DIGEST_BYTES).digest()

    @property
    def encoded(self) -> bytes:
        """The list for other members."""
        return zlib.compress(self._plain, level=1)

    @classmethod
    def decode(cls, data: bytes) -> ShardList:
        """The list that was `encoded`. Raises ValueError."""
        try:
            return cls(from_msgpack(zlib.decompress(data), tuple[Shard, ...]))
        except (zlib.error, msgspec.MsgspecError) as error:
            raise ValueError(f"the list of shards cannot be decoded: {error}") from None

    @cached_property
    def by_tensor(self) -> dict[tuple[str, str], list[tuple[int, Region]]]:
        """The index and region of each shard, by the key and kind of its tensor."""
        found: dict[tuple[str, str], list[tuple[int, Region]]] = {}
        for index, (key, kind, region) in enumerate(self.shards):
            found.setdefault((key, kind), []).append((index, region))
        return found

    @cached_property
    def kinds(self) -> dict[str, str]:
        return {shard.key: shard.kind for shard in self.shards}


class Holding(NamedTuple):
    """A list of shards, and the places that have it, equally near to the receiver."""

    held: ShardList
    places: Sequence[int]


class Move(NamedTuple):
    """The transfer of a tensor region from place `source` to the receiver, which may be the same.
    `given` and `wanted` are indices of the shards that `source` has and the receiver wants."""

    region: Region
    source: int
    given: int
    wanted: int


class Missing(Exception):
    """No member has some of the wanted regions. `keys` are the tensors of the regions, sorted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        super().__init__(f"no holder is left of {listed(self.keys)}")


def intersection(one: Region, other: Region) -> Region | None:
    begins = tuple(map(max, one.offset, other.offset))
    shape = tuple(
        min(a + n, b + m) - begin
        for a, n, b, m, begin in zip(
            one.offset, one.shape, other.offset, other.shape, begins, strict=True
        )
    )
    return Region(begins, shape) if all(size > 0 for size in shape) else None


def without(whole: Region, part: Region) -> list[Region]:
    """`whole` without the region `part` inside it, as at most two regions per dim."""
    rest: list[Region] = []
    offset, shape = list(whole.offset), list(whole.shape)
    for dim, (begin, size) in enumerate(zip(*part, strict=True)):
        before, after = begin - offset[dim], offset[dim] + shape[dim] - begin - size
        if before:
            rest.append(Region(tuple(offset), (*shape[:dim], before, *shape[dim + 1 :])))
        if after:
            rest.append(
                Region(
                    (*offset[:dim], begin + size, *offset[dim + 1 :]),
                    (*shape[:dim], after, *shape[dim + 1 :]),
                )
            )
        offset[dim], shape[dim] = begin, size
    return rest


def flat_range(shape: Dims, begin: int, end: int) -> list[Region]:
    """The elements `begin` to `end` of a tensor in row-major order, as regions in that order, at
    most 2n - 1 for n dims; each is contiguous if the tensor is."""
    if begin >= end:
        return []
    if not shape:
        return [Region((), ())]
    row = prod(shape[1:])
    if row == 1 or not (begin % row or end % row):
        return [_rows(begin // row, end // row, shape)]
    if begin // row == (end - 1) // row:
        return _in_row(shape, begin // row, begin % row, end - begin // row * row)
    head = _in_row(shape, begin // row, begin % row, row) if begin % row else []
    tail = _in_row(shape, end // row, 0, end % row)
    first, last = -(-begin // row), end // row
    return [*head, *([_rows(first, last, shape)] if first < last else []), *tail]


def _rows(first: int, last: int, shape: Dims) -> Region:
    return Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))


def _in_row(shape: Dims, row: int, begin: int, end: int) -> list[Region]:
    return [
        Region((row, *inner.offset), (1, *inner.shape))
        for inner in flat_range(shape[1:], begin, end)
    ]


def parts(region: Region, largest: int) -> list[Region]:
    """The region split into regions of at most `largest` elements, in row-major order."""
    size = region.num_elements
    if size <= largest:
        return [region]
    num = -(-size // largest)
    return [
        Region(tuple(map(add, region.offset, inner.offset)), inner.shape)
        for part in range(num)
        for inner in flat_range(region.shape, size * part // num, size * (part + 1) // num)
    ]


def nearest_first(
    target: int,
    digests: Mapping[int, bytes],
    nodes: Sequence[str],
    likelihood: Callable[[int], tuple[float, ...]] = lambda place: (1.0,),
) -> list[tuple[bytes, list[int]]]:
    """The distinct lists of shards in the order in which the receiver `target` reads them, each
    with the nearest places that have it: the receiver, its node, others. `digests`: of the holders'
    lists, by place. Of equally near lists the likelier comes first. If the first likelihood is 0, a
    list comes last: to read it costs more than to take a small tensor from farther away."""
    found: dict[bytes, tuple[int, list[int]]] = {}
    for place, digest in digests.items():
        distance = _distance(place, target, nodes)
        nearest, places = found.get(digest, (distance, []))
        if distance < nearest:
            nearest, places = distance, []
        if distance == nearest:
            places.append(place)
        found[digest] = (nearest, places)

    def rank(digest: bytes) -> tuple[bool, int, list[float], int]:
        distance, places = found[digest]
        likely = likelihood(places[0])
        return distance > 0 and not likely[0], distance, [-each for each in likely], places[0]

    return [(digest, found[digest][1]) for digest in sorted(found, key=rank)]


def _distance(source: int, target: int, nodes: Sequence[str]) -> int:
    if source == target:
        return 0
    return 1 if nodes[source] and nodes[source] == nodes[target] else 2


def plan_moves(
    target: int, want: ShardList, holdings: Iterable[Holding], largest: int, turn: int = 0
) -> list[Move]:
    """The moves after which the place `target` has each wanted element exactly once, from the first
    of `holdings` that has it. The load is balanced among at most SENDERS_NUM_MAX of its places;
    receivers with different `turn` choose different ones. A move between places has at most
    `largest` elements. Raises Missing. O(wanted shards x lists read, and moves)."""
    rest = {
        index: [shard.region]
        for index, shard in enumerate(want.shards)
        if shard.region.num_elements
    }
    moves: list[Move] = []
    sent: dict[int, int] = {}
    lists = iter(holdings)
    while rest:
        holding = next(lists, None)
        if holding is None:
            raise Missing(sorted({want.shards[index].key for index in rest}))
        found = _found(want, holding.held, rest)
        if target in holding.places:
            moves += [Move(part, target, given, wanted) for part, given, wanted in found]
        else:
            moves += _share_out(found, holding.places, largest, turn, sent)
    return moves


def _found(
    want: ShardList, held: ShardList, rest: dict[int, list[Region]]
) -> list[tuple[Region, int, int]]:
    """Removes from `rest` what `held` has. Returns it, with the indices in `held` and `want`."""
    found: list[tuple[Region, int, int]] = []
    for wanted in list(rest):
        key, kind, _ = want.shards[wanted]
        regions = rest[wanted]
        for given, region in held.by_tensor.get((key, kind), ()):
            left: list[Region] = []
            for one in regions:
                part = one if one == region else intersection(one, region)
                if part is None:
                    left.append(one)
                    continue
                found.append((part, given, wanted))
                if part != one:
                    left += without(one, part)
            regions = left
            if not regions:
                break
        if regions:
            rest[wanted] = regions
        else:
            del rest[wanted]
    return found


def _share_out(
    found: Sequence[tuple[Region, int, int]],
    places: Sequence[int],
    largest: int,
    turn: int,
    sent: dict[int, int],
) -> Iterator[Move]:
    """Moves from the least loaded place, chosen for the largest first. `sent`: elements so far."""
    first = turn * SENDERS_NUM_MAX % len(places)
    senders = [*places[first:], *places[:first]][:SENDERS_NUM_MAX]
    loads = [(sent.get(place, 0), order) for order, place in enumerate(senders)]
    heapq.heapify(loads)
    moves = [
        (part.num_elements, Move(part, NO_PLACE, given, wanted))
        for region, given, wanted in found
        for part in parts(region, largest)
    ]
    for num, move in sorted(moves, key=lambda one: -one[0]):
        load, order = loads[0]
        heapq.heapreplace(loads, (load + num, order))
        yield move._replace(source=senders[order])
    sent |= {senders[order]: load for load, order in loads}
