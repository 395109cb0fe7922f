"""Who moves where some of the healthy must: as few as can be, those with whom a slot is dearest."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from .core import LOSS_NUM_MAX, Ints
from .rows import Rows

Bools = NDArray[np.bool_]
_PRICE_BITS = 58
"""Price times size fits into 64 bits beside a gain."""
_FINE_BITS = 8
"""To so many is the price known in the end."""


class _Rest(Struct, frozen=True):
    """By row, at a price of a slot: the most that is left of any gain, and the size of that."""

    left: Ints
    sizes: Ints


def kept(rows: Rows, moves: Bools, num_slots: int) -> Bools:
    """By candidate: whether it is left, if as few rows as can be have one of `moves`.

    Which rows they are follows from a price of a slot, the least at which what each row would
    choose fits: those that then gain most by a move. All must fit with the smallest candidates.
    """
    row_of, firsts = rows.row_of, rows.starts[:-1]
    moves = moves & np.logical_or.reduceat(~moves, firsts)[row_of]  # else it has no choice
    num = _fewest(rows, moves, num_slots)
    may = np.logical_or.reduceat(moves, firsts)
    least = _size_least(rows, ~moves) - _size_least(rows, moves)
    found = _first(np.where(may, least, -LOSS_NUM_MAX), num)

    def at(price: int) -> Bools | None:
        stay, move = (_rest(rows, some, price, num_slots) for some in (~moves, moves))
        some = _first(np.where(may, move.left - stay.left, -LOSS_NUM_MAX), num)
        taken = int(np.where(some, move.sizes, stay.sizes).sum())
        return some if taken <= num_slots else None

    low, high = 0, ((1 << _PRICE_BITS) // max(num_slots, 1)).bit_length() - 1
    while low < high:
        bits = (low + high) // 2
        fits = at(1 << bits)
        low, high, found = (bits + 1, high, found) if fits is None else (low, bits, fits)
    price = 1 << low
    for bit in range(low - 1, max(low - _FINE_BITS, 0) - 1, -1):
        fits = at(price - (1 << bit))
        if fits is not None:
            price, found = price - (1 << bit), fits
    return ~moves | found[row_of]


def _fewest(rows: Rows, moves: Bools, num_slots: int) -> int:
    """Rows that must move: those first that then take fewest slots."""
    least, stays = _size_least(rows, np.ones_like(moves)), _size_least(rows, ~moves)
    saved = np.sort(stays - least)[::-1]
    over = int(stays.sum()) - num_slots
    return int(np.searchsorted(np.cumsum(saved), over)) + 1 if over > 0 else 0


def _size_least(rows: Rows, some: Bools) -> Ints:
    """By row: the smallest of these candidates, LOSS_NUM_MAX // rows where it has none."""
    none = LOSS_NUM_MAX // max(rows.num, 1)
    return np.minimum.reduceat(np.where(some, rows.sizes, none), rows.starts[:-1])


def _rest(rows: Rows, some: Bools, price: int, num_slots: int) -> _Rest:
    """Of these candidates that fit at all."""
    some = some & (rows.sizes <= num_slots)
    left = np.where(some, rows.gains - price * np.minimum(rows.sizes, num_slots), -LOSS_NUM_MAX)
    most = np.maximum.reduceat(left, rows.starts[:-1])
    own = some & (left == most[rows.row_of])
    return _Rest(most, _size_least(rows, own))


def _first(values: Ints, num: int) -> Bools:
    """By row: whether it is among those of the largest values, of equal ones the first."""
    found = np.zeros(len(values), dtype=np.bool_)
    found[np.argsort(-values, kind="stable")[:num]] = True
    return found
