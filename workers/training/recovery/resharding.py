"""Boxes of tensors: which part of which tensor goes from whom to whom when a layout changes.

Pure: every member computes the same plan from the same pieces, so nobody has to decide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, starmap
from math import prod
from operator import add
from typing import NamedTuple

Dims = tuple[int, ...]
KEYS_NUM = 3
"""So many of the keys that nobody has are said in words."""


class Box(NamedTuple):
    """A block of a tensor: its first element, and how many along each dim."""

    offset: Dims
    shape: Dims

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class Piece(NamedTuple):
    """A box of the tensor `key`. `kind` is what that tensor is: its elements' type, its shape.

    Two tensors of one key and different kinds have nothing to do with each other.
    """

    key: str
    kind: str
    box: Box


class Move(NamedTuple):
    """`box` of a tensor goes from one place to another, which may be the same.

    `given` is the index of the piece it is in among those that `source` has, `wanted` that of the
    piece among those that `target` wants.
    """

    box: Box
    source: int
    given: int
    target: int
    wanted: int


class Missing(Exception):
    """Nobody has all of what is wanted: `keys` are the tensors that lack a part, ascending."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        more = len(self.keys) - KEYS_NUM
        super().__init__(f"no holder is left of {', '.join(self.keys[:KEYS_NUM])}"
                         + (f" and {more} more" if more > 0 else ""))


class _Atom(NamedTuple):
    """A box to be moved, and who might give it, equally near: each a place and a piece's index."""

    box: Box
    target: int
    wanted: int
    givers: list[tuple[int, int]]


Holders = dict[Box, list[tuple[int, int]]]
"""Of one tensor: who has this box, each a place and the index of the piece there."""


def intersection(one: Box, other: Box) -> Box | None:
    """What both have of the tensor, if anything."""
    begins = tuple(map(max, one.offset, other.offset))
    shape = tuple(min(a + n, b + m) - begin for a, n, b, m, begin
                  in zip(one.offset, one.shape, other.offset, other.shape, begins, strict=True))
    return Box(begins, shape) if all(size > 0 for size in shape) else None


def without(whole: Box, part: Box) -> list[Box]:
    """The rest of `whole`, as at most twice as many boxes as it has dims. `part` is inside it."""
    rest: list[Box] = []
    offset, shape = list(whole.offset), list(whole.shape)
    for dim, (begin, size) in enumerate(zip(*part, strict=True)):
        before, after = begin - offset[dim], offset[dim] + shape[dim] - begin - size
        if before:
            rest.append(Box(tuple(offset), (*shape[:dim], before, *shape[dim + 1:])))
        if after:
            rest.append(Box((*offset[:dim], begin + size, *offset[dim + 1:]),
                            (*shape[:dim], after, *shape[dim + 1:])))
        offset[dim], shape[dim] = begin, size
    return rest


def flat_range(shape: Dims, begin: int, end: int) -> list[Box]:
    """The elements `begin` to `end` of a tensor in row-major order, as boxes in that order.

    At most 2n - 1 of them for n dims; each is contiguous where the tensor is.
    """
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    if row == 1 or not (begin % row or end % row):
        return [_rows(begin // row, end // row, shape)]
    if begin // row == (end - 1) // row:
        return _in_row(shape, begin // row, begin % row, end - begin // row * row)
    head = _in_row(shape, begin // row, begin % row, row) if begin % row else []
    tail = _in_row(shape, end // row, 0, end % row)
    first, last = -(-begin // row), end // row
    return [*head, *([_rows(first, last, shape)] if first < last else []), *tail]


def _rows(first: int, last: int, shape: Dims) -> Box:
    return Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))


def _in_row(shape: Dims, row: int, begin: int, end: int) -> list[Box]:
    return [Box((row, *inner.offset), (1, *inner.shape))
            for inner in flat_range(shape[1:], begin, end)]


def parts(box: Box, largest: int) -> list[Box]:
    """The box in boxes of at most `largest` elements, in row-major order."""
    size = box.num_elements
    if size <= largest:
        return [box]
    num = -(-size // largest)
    return [Box(tuple(map(add, box.offset, inner.offset)), inner.shape)
            for part in range(num)
            for inner in flat_range(box.shape, size * part // num, size * (part + 1) // num)]


def plan(have: Sequence[Sequence[Piece]], want: Sequence[Sequence[Piece]], nodes: Sequence[str],
         largest: int) -> list[Move]:
    """Who gives what to whom, so that each place gets each element that it wants exactly once.

    `have`, `want` and `nodes` (empty: nobody knows) by place. Each element comes from the nearest
    who has it: the place itself, then one on the same node, then any; those equally near give about
    equally much. Between places no move has more than `largest` elements. The order is the same for
    whoever asks. Raises Missing. O(pieces wanted x different boxes of their tensor, and moves).
    """
    holders: dict[tuple[str, str], Holders] = {}
    for place, pieces in enumerate(have):
        for index, (key, kind, box) in enumerate(pieces):
            holders.setdefault((key, kind), {}).setdefault(box, []).append((place, index))
    atoms: list[_Atom] = []
    missing: set[str] = set()
    for target, pieces in enumerate(want):
        for wanted, (key, kind, box) in enumerate(pieces):
            found, rest = _nearest(box, holders.get((key, kind), {}), target, nodes)
            atoms += [_Atom(part, target, wanted, givers) for whole, givers in found
                      for part in ([whole] if givers[0][0] == target else parts(whole, largest))]
            if rest:
                missing.add(key)
    if missing:
        raise Missing(sorted(missing))
    return list(starmap(_move, zip(atoms, _spread(atoms, len(have)), strict=True)))


def _move(atom: _Atom, giver: tuple[int, int]) -> Move:
    return Move(atom.box, *giver, atom.target, atom.wanted)


def _nearest(box: Box, holders: Holders, target: int, nodes: Sequence[str]
             ) -> tuple[list[tuple[Box, list[tuple[int, int]]]], list[Box]]:
    """Parts of `box`, each with those who are nearest to `target` with it; and what nobody has."""
    near: list[list[tuple[Box, list[tuple[int, int]]]]] = [[], [], []]
    for held, everybody in holders.items():
        givers: list[list[tuple[int, int]]] = [[], [], []]
        for giver in everybody:
            givers[_distance(giver[0], target, nodes)].append(giver)
        for steps, those in enumerate(givers):
            if those:
                near[steps].append((held, those))
    found: list[tuple[Box, list[tuple[int, int]]]] = []
    rest = [box] if box.num_elements else []
    for held, those in chain(*near):
        left: list[Box] = []
        for wanted in rest:
            part = intersection(wanted, held)
            if part is None:
                left.append(wanted)
                continue
            found.append((part, those))
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


def _spread(atoms: Sequence[_Atom], num_places: int) -> list[tuple[int, int]]:
    """Who gives each: the largest first, by whoever has given least. What stays costs nothing."""
    chosen: list[tuple[int, int]] = [atom.givers[0] for atom in atoms]
    given = [0] * num_places
    for index in sorted(range(len(atoms)), key=lambda index: -atoms[index].box.num_elements):
        box, target, _, givers = atoms[index]
        if givers[0][0] == target:
            continue
        chosen[index] = min(givers, key=lambda giver: (given[giver[0]], giver))
        given[chosen[index][0]] += box.num_elements
    return chosen
