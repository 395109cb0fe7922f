"""All knapsacks that differ from one in a single row, in a few passes of one.

The best of all other rows comes from the tables before and after the row. Of the vectors that make
an optimum, the one in which the first row takes most is followed, as by planning each anew: the
states that optima pass through are ranked by the vectors that lead to them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .knapsack import Ints, Rows
from .tables import IMPOSSIBLE, added, prefixes, suffixes

_CELLS_NUM_MAX = 1 << 22
"""Of a matrix of states by candidates that is made at once."""


def each_replaced(rows: Rows, replaced: Rows, capacity: int) -> Ints:
    """[i]: the sizes of the optimum with row i of `replaced` for row i; -1 where nothing fits.

    Besides the result it takes two tables of rows by slots, 8 bytes each.
    """
    before, after = prefixes(rows, capacity), suffixes(rows, capacity)
    wanted = np.zeros(rows.num, np.int64)
    joints: list[Ints] = []
    """By row: how many slots an optimum may leave to the rows before it."""
    for row in range(rows.num):
        total = before[row] + added(replaced, row, after[row + 1])[::-1]
        wanted[row] = total.max()
        states = np.flatnonzero(total == wanted[row])
        joints.append(_most_of_each(before[row], states))
    events = np.flatnonzero(wanted > IMPOSSIBLE // 2)
    found = np.full((rows.num, rows.num), -1, np.int64)
    found[events] = 0
    gained = _befores(rows, before, joints, events, found)
    _afters(rows, replaced, after, capacity, events, found, wanted - gained)
    return found


def _most_of_each(sums: Ints, states: Ints) -> Ints:
    """Of the states with the same sum the largest: what fits in less fits in it."""
    ours = sums[states]
    most: Ints = states[np.append(ours[1:] != ours[:-1], True)]
    return most


def _befores(rows: Rows, before: Ints, joints: list[Ints], events: Ints, found: Ints) -> Ints:
    """Fill in the rows before row i of each event i; what they gain, by event."""
    possible = set(events.tolist())
    states = _passed(rows, before, [joint if row in possible else joint[:0]
                                    for row, joint in enumerate(joints)])
    choices: list[Ints] = []
    """By row and by state after it: the candidate of the row in the vector that is followed."""
    gained, state = np.zeros(rows.num, np.int64), np.zeros(rows.num, np.int64)
    ranks = np.zeros(len(states[0]), np.int64)
    for row in range(rows.num):
        if row in possible:
            at = np.searchsorted(states[row], joints[row])
            state[row] = joints[row][int(np.argmax(ranks[at]))]
            gained[row] = before[row, state[row]]
        if row + 1 < rows.num:
            num = int(rows.starts[row + 1] - rows.starts[row])
            keys = [np.zeros(0, np.int64)]
            for prior, ties in _ways(rows, row, before, states[row + 1]):
                at = np.searchsorted(states[row], np.where(ties, prior, states[row][0]))
                keys.append(np.where(ties, ranks[at] * num + np.arange(num), -1).max(axis=1))
            key = np.concatenate(keys)
            choices.append(int(rows.starts[row]) + key % num)
            ranks = np.unique(key, return_inverse=True)[1]
    for row in range(rows.num - 2, -1, -1):
        later = events[events > row]
        option = choices[row][np.searchsorted(states[row + 1], state[later])]
        found[later, row] = rows.sizes[option]
        state[later] -= rows.sizes[option]
    return gained


def _passed(rows: Rows, before: Ints, joints: list[Ints]) -> list[Ints]:
    """By row: the states before it, ascending, that are on the way to a joint."""
    states: list[Ints] = [np.zeros(0, np.int64)] * rows.num
    for row in range(rows.num - 1, -1, -1):
        found = [joints[row]]
        if row + 1 < rows.num:
            found += [prior[ties] for prior, ties in _ways(rows, row, before, states[row + 1])]
        states[row] = np.unique(np.concatenate(found))
    return states


def _ways(rows: Rows, row: int, before: Ints, states: Ints) -> Iterator[tuple[Ints, Ints]]:
    """For states after a row, some at a time: (states before it, which of them make the optimum);
    states x candidates."""
    begin, end = int(rows.starts[row]), int(rows.starts[row + 1])
    sizes, gains = rows.sizes[begin:end], rows.gains[begin:end]
    step = max(_CELLS_NUM_MAX // len(sizes), 1)
    for first in range(0, len(states), step):
        some = states[first:first + step]
        prior = some[:, None] - sizes[None, :]
        sums = before[row, np.maximum(prior, 0)] + gains[None, :]
        yield prior, (prior >= 0) & (sums == before[row + 1, some][:, None])


def _afters(rows: Rows, replaced: Rows, after: Ints, capacity: int, events: Ints, found: Ints,
            wanted: Ints) -> None:
    """Fill in, from what is left, row i of `replaced` for event i, then the rows after it."""
    left = capacity - found.sum(axis=1)
    for row in range(rows.num):
        _take(replaced, row, after[row + 1], events[events == row], left, found, wanted)
        earlier = events[events < row]
        wanted[earlier] = after[row, left[earlier]]
        _take(rows, row, after[row + 1], earlier, left, found, wanted)


def _take(rows: Rows, row: int, rest: Ints, events: Ints, left: Ints, found: Ints,
          wanted: Ints) -> None:
    """For these events: the largest size of the row with which it and the rest make what is wanted.
    """
    begin, end = int(rows.starts[row]), int(rows.starts[row + 1])
    sizes, gains = rows.sizes[begin:end], rows.gains[begin:end]
    step = max(_CELLS_NUM_MAX // len(sizes), 1)
    for first in range(0, len(events), step):
        some = events[first:first + step]
        then = left[some][:, None] - sizes[None, :]
        sums = rest[np.maximum(then, 0)] + gains[None, :]
        ties = (then >= 0) & (sums == wanted[some][:, None])
        size = sizes[len(sizes) - 1 - np.argmax(ties[:, ::-1], axis=1)]
        found[some, row] = size
        left[some] -= size
