"""The knapsack is exact: brute force agrees on values, vectors, runners-up and ties."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.control_plane import knapsack, tables
from unicron.control_plane.knapsack import Solved, rows_of

Row = list[tuple[int, int]]
Plan = tuple[tuple[int, ...], int]


@st.composite
def row(draw: st.DrawFn, most: int = 10) -> Row:
    """Equal gains are frequent, and some rows have no 0."""
    sizes = sorted(draw(st.sets(st.integers(0, most), min_size=1, max_size=5)))
    if draw(st.integers(0, 4)):
        sizes = sorted({0, *sizes})
    large = draw(st.sampled_from([2, 10, 10**12]))
    return [(size, draw(st.integers(-large, large))) for size in sizes]


rows = st.lists(row(), max_size=5)
capacities = st.integers(0, 20)


def all_plans(found: list[Row], capacity: int) -> list[Plan]:
    """Best first; of equal ones the one in which the first row takes most."""
    every = [(tuple(size for size, _ in plan), sum(gain for _, gain in plan))
             for plan in itertools.product(*found)]
    return sorted((plan for plan in every if sum(plan[0]) <= capacity),
                  key=lambda plan: (plan[1], plan[0]), reverse=True)


@given(rows, capacities)
@settings(max_examples=500, deadline=None)
def test_the_optimum_is_that_of_brute_force(found: list[Row], capacity: int) -> None:
    plans = all_plans(found, capacity)
    assert knapsack.best(rows_of(found), capacity) == (plans[0] if plans else None)


@given(rows, capacities, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_runners_up_are_told_best_first(found: list[Row], capacity: int, num: int,
                                        random: Random) -> None:
    plans = all_plans(found, capacity)
    solved = Solved.of(rows_of(found), capacity)
    if solved is None:
        assert not plans
        return
    chosen = random.choice(plans)[0]
    best: dict[tuple[int, int], int] = {}
    for slots, gain in plans:
        for i, size in enumerate(slots):
            if size != chosen[i]:
                best.setdefault((i, size), gain)
    told = list(solved.runners_up(chosen, num))
    assert {(i, size): plan[1] for i, size, plan in told} == best
    assert [plan[1] for _, _, plan in told] == sorted(best.values(), reverse=True)
    assert all(plan in plans and plan[0][i] == size for i, size, plan in told)


@given(rows, capacities)
@settings(max_examples=200, deadline=None)
def test_the_tables_have_every_optimum(found: list[Row], capacity: int) -> None:
    flat = rows_of(found)
    before, after = tables.prefixes(flat, capacity), tables.suffixes(flat, capacity)
    for r, j in itertools.product(range(len(found) + 1), range(capacity + 1)):
        for table, part in ((before, found[:r]), (after, found[r:])):
            plans = all_plans(part, j)
            assert (int(table[r, j]) == plans[0][1]) if plans else (
                table[r, j] <= tables.IMPOSSIBLE // 2)
    if plans := all_plans(found, capacity):
        assert tuple(tables.followed(flat, after, capacity)) == plans[0][0]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_larger_ones_agree_with_plain_dynamic_programming(seed: int) -> None:
    """Concave, convex and linear rows: the bound is tight, loose, and tied everywhere."""
    random = np.random.default_rng(seed)
    num, capacity = 20, 400
    found: list[Row] = []
    for _ in range(num):
        power = random.choice([0.7, 1.0, 1.4])
        step, scale = int(random.choice([1, 4, 8])), float(random.choice([100.0, 1e6]))
        found.append([(size, round(scale * size**power)) for size in range(0, 80, step)])
    flat = rows_of(found)
    after = tables.suffixes(flat, capacity)
    assert knapsack.best(flat, capacity) == (
        tuple(tables.followed(flat, after, capacity)), int(after[0, capacity]))


def test_no_row_is_no_plan_to_make() -> None:
    assert knapsack.best(rows_of([]), 5) == ((), 0)
    assert knapsack.best(rows_of([[(6, 1)]]), 5) is None
