"""Plans the transfer of tensor regions between members when a layout changes.

Pure: every member computes the same plan from the same shards, without a coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from operator import add
from typing import NamedTuple

Dims = tuple[int, ...]
KEYS_NUM = 3
"""The number of missing keys that an error names."""


class Region(NamedTuple):
    """A rectangular block of a tensor: its first element, and its size along each dim."""

    offset: Dims
    shape: Dims

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class Shard(NamedTuple):
    """A region of the tensor `key`. `kind` is the tensor's dtype and shape.

    Tensors with the same key and different kinds are unrelated.
    """

    key: str
    kind: str
    region: Region


class Move(NamedTuple):
    """The transfer of a tensor region from place `source` to `target`, possibly the same place.

    `given` is an index into the shards that `source` has, `wanted` an index into the shards that
    `target` wants.
    """

    region: Region
    source: int
    given: int
    target: int
    wanted: int


class Missing(Exception):
    """No member has some of the wanted regions. `keys` are the tensors of the regions, sorted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        more = len(self.keys) - KEYS_NUM
        super().__init__(f"no holder is left of {', '.join(self.keys[:KEYS_NUM])}"
                         + (f" and {more} more" if more > 0 else ""))


class _Atom(NamedTuple):
    """A region to transfer, and its nearest senders. A sender is a place and a shard's index."""

    region: Region
    target: int
    wanted: int
    senders: list[tuple[int, int]]


Holders = dict[Region, list[tuple[int, int]]]
"""The holders of each region of one tensor. A holder is a place and the index of a shard."""


def intersection(one: Region, other: Region) -> Region | None:
    """The region that both contain, if any."""
    begins = tuple(map(max, one.offset, other.offset))
    shape = tuple(min(a + n, b + m) - begin for a, n, b, m, begin
                  in zip(one.offset, one.shape, other.offset, other.shape, begins, strict=True))
    return Region(begins, shape) if all(size > 0 for size in shape) else None


def without(whole: Region, part: Region) -> list[Region]:
    """`whole` without the region `part` inside it, as at most two regions per dim."""
    rest: list[Region] = []
    offset, shape = list(whole.offset), list(whole.shape)
    for dim, (begin, size) in enumerate(zip(*part, strict=True)):
        before, after = begin - offset[dim], offset[dim] + shape[dim] - begin - size
        if before:
            rest.append(Region(tuple(offset), (*shape[:dim], before, *shape[dim + 1:])))
        if after:
            rest.append(Region((*offset[:dim], begin + size, *offset[dim + 1:]),
                               (*shape[:dim], after, *shape[dim + 1:])))
        offset[dim], shape[dim] = begin, size
    return rest


def flat_range(shape: Dims, begin: int, end: int) -> list[Region]:
    """The elements `begin` to `end` of a tensor in row-major order, as regions in that order.

    At most 2n - 1 regions for n dims; each is contiguous if the tensor is.
    """
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
    return [Region((row, *inner.offset), (1, *inner.shape))
            for inner in flat_range(shape[1:], begin, end)]


def parts(region: Region, largest: int) -> list[Region]:
    """The region split into regions of at most `largest` elements, in row-major order."""
    size = region.num_elements
    if size <= largest:
        return [region]
    num = -(-size // largest)
    return [Region(tuple(map(add, region.offset, inner.offset)), inner.shape)
            for part in range(num)
            for inner in flat_range(region.shape, size * part // num, size * (part + 1) // num)]


def plan_moves(have: Sequence[Sequence[Shard]], want: Sequence[Sequence[Shard]],
               nodes: Sequence[str], largest: int) -> list[Move]:
    """The moves after which each place has each wanted element exactly once.

    `have`, `want` and `nodes` (empty: unknown) are by place. Each element comes from the nearest
    holder: the place itself, then the same node, then any. The load is balanced among equally near
    holders. A move between places has at most `largest` elements. All members get the same order.
    Raises Missing. O(wanted shards x distinct regions of their tensors, and moves).
    """
    holders: dict[tuple[str, str], Holders] = {}
    for place, shards in enumerate(have):
        for index, (key, kind, region) in enumerate(shards):
            holders.setdefault((key, kind), {}).setdefault(region, []).append((place, index))
    atoms: list[_Atom] = []
    missing: set[str] = set()
    for target, shards in enumerate(want):
        for wanted, (key, kind, region) in enumerate(shards):
            found, rest = _nearest(region, holders.get((key, kind), {}), target, nodes)
            atoms += [_Atom(part, target, wanted, senders) for whole, senders in found
                      for part in ([whole] if senders[0][0] == target else parts(whole, largest))]
            if rest:
                missing.add(key)
    if missing:
        raise Missing(sorted(missing))
    return [Move(atom.region, *sender, atom.target, atom.wanted)
            for atom, sender in zip(atoms, _choose_senders(atoms, len(have)), strict=True)]


def _nearest(region: Region, holders: Holders, target: int, nodes: Sequence[str]
             ) -> tuple[list[tuple[Region, list[tuple[int, int]]]], list[Region]]:
    """Parts of `region`, each with its holders nearest to `target`; and parts without a holder."""
    near: list[list[tuple[Region, list[tuple[int, int]]]]] = [[], [], []]
    for held, everywhere in holders.items():
        senders: list[list[tuple[int, int]]] = [[], [], []]
        for sender in everywhere:
            senders[_distance(sender[0], target, nodes)].append(sender)
        for distance, equally_near in enumerate(senders):
            if equally_near:
                near[distance].append((held, equally_near))
    found: list[tuple[Region, list[tuple[int, int]]]] = []
    rest = [region] if region.num_elements else []
    for held, equally_near in chain(*near):
        left: list[Region] = []
        for wanted in rest:
            part = intersection(wanted, held)
            if part is None:
                left.append(wanted)
                continue
            found.append((part, equally_near))
            if part != wanted:
                left += without(wanted, part)
        rest = left
        if not rest:
            break
    return found, rest


def _distance(source: int, target: int, nodes: Sequence[str]) -> int:
    if source == target:
        return 0
    return 1 if nodes[source] and nodes[source] == nodes[target] else 2


def _choose_senders(atoms: Sequence[_Atom], num_places: int) -> list[tuple[int, int]]:
    """The least loaded sender of each atom, chosen for the largest first. Local moves are free."""
    chosen: list[tuple[int, int]] = [atom.senders[0] for atom in atoms]
    sent = [0] * num_places
    for index in sorted(range(len(atoms)), key=lambda index: -atoms[index].region.num_elements):
        region, target, _, senders = atoms[index]
        if senders[0][0] == target:
            continue
        chosen[index] = min(senders, key=lambda sender: (sent[sender[0]], sender))
        sent[chosen[index][0]] += region.num_elements
    return chosen
