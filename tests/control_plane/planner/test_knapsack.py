"""The knapsack solver against brute force: values, vectors, runners-up and ties."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import plain_program
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import FAMILIES, candidates_of, degenerate
from unicron.control_plane.planner import planner
from unicron.control_plane.planner.planner import choose_plan
from unicron.control_plane.planner.solver import candidates, core, knapsack
from unicron.control_plane.planner.solver.knapsack import Solution

Row = list[tuple[int, int]]
Plan = tuple[tuple[int, ...], int]


@st.composite
def row(draw: st.DrawFn, most: int = 10) -> Row:
    """(size, gain) pairs. Equal gains are frequent, and some rows lack size 0."""
    sizes = sorted(draw(st.sets(st.integers(0, most), min_size=1, max_size=5)))
    if draw(st.integers(0, 4)):
        sizes = sorted({0, *sizes})
    large = draw(st.sampled_from([2, 10, 10**12]))
    return [(size, draw(st.integers(-large, large))) for size in sizes]


rows = st.lists(row(), max_size=5)
capacities = st.integers(0, 20)


def all_plans(found: list[Row], capacity: int) -> list[Plan]:
    """All plans that fit, best first; on a tie, more slots for the first row come first."""
    every = [
        (tuple(size for size, _ in plan), sum(gain for _, gain in plan))
        for plan in itertools.product(*found)
    ]
    return sorted(
        (plan for plan in every if sum(plan[0]) <= capacity),
        key=lambda plan: (plan[1], plan[0]),
        reverse=True,
    )


@given(rows, capacities)
@settings(max_examples=500, deadline=None)
def test_the_optimum_equals_brute_force(found: list[Row], capacity: int) -> None:
    plans = all_plans(found, capacity)
    assert knapsack.best(candidates_of(found), capacity) == (plans[0] if plans else None)


@given(rows, capacities)
@settings(max_examples=300, deadline=None)
def test_the_next_best_equals_brute_force(found: list[Row], capacity: int) -> None:
    plans = all_plans(found, capacity)
    solved = Solution.of(candidates_of(found), capacity)
    if solved is None:
        assert not plans
        return
    runner_up = solved.next_best()
    assert (runner_up is None) == (len(plans) == 1)
    if runner_up is not None:
        assert runner_up in plans[1:]
        assert runner_up[1] == plans[1][1]


@given(rows, capacities)
@settings(max_examples=200, deadline=None)
def test_the_tables_have_every_optimum(found: list[Row], capacity: int) -> None:
    flat = candidates_of(found)
    before, after = (
        plain_program.tables(flat, capacity, range(flat.num)),
        plain_program.suffixes(flat, capacity),
    )
    for r, j in itertools.product(range(len(found) + 1), range(capacity + 1)):
        for table, part in ((before, found[:r]), (after, found[r:])):
            plans = all_plans(part, j)
            assert (
                (int(table[r, j]) == plans[0][1])
                if plans
                else (table[r, j] <= candidates.IMPOSSIBLE // 2)
            )
    if plans := all_plans(found, capacity):
        assert tuple(plain_program.backtrack(flat, after, capacity)) == plans[0][0]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_larger_problems_agree_with_plain_dynamic_programming(seed: int) -> None:
    """Rows are concave, convex or linear, so that the bound is tight, loose or tied."""
    random = np.random.default_rng(seed)
    num, capacity = 20, 400
    found: list[Row] = []
    for _ in range(num):
        power = random.choice([0.7, 1.0, 1.4])
        step, scale = int(random.choice([1, 4, 8])), float(random.choice([100.0, 1e6]))
        found.append([(size, round(scale * size**power)) for size in range(0, 80, step)])
    flat = candidates_of(found)
    after = plain_program.suffixes(flat, capacity)
    assert knapsack.best(flat, capacity) == (
        tuple(plain_program.backtrack(flat, after, capacity)),
        int(after[0, capacity]),
    )


@st.composite
def similar_rows(draw: st.DrawFn) -> list[Row]:
    """Similar rows of a few kinds: linear, constant or stepped. Some have a cost of change."""
    unit = draw(st.sampled_from([1, 1, 3, 8]))
    rates = draw(st.sampled_from([[0], [7], [7, 7, 9], [3, 10**9], [-1, 0, 1]]))
    shift = draw(st.sampled_from([0, 0, 1, 5]))
    found: list[Row] = []
    for _ in range(draw(st.integers(1, 7))):
        sizes = draw(
            st.sampled_from(
                [
                    range(8),
                    range(0, 13, 3),
                    range(2),
                    [0, 5],
                    [0, 2, 5, 11],
                    [2, 3, 4],
                    range(40),
                    [0, 1, 2, 3, 10, 11, 12],
                ]
            )
        )
        rate, stays = draw(st.sampled_from(rates)), draw(st.sampled_from(list(sizes)))
        cost, bent = draw(st.sampled_from([0, 0, shift])), draw(st.sampled_from([0, 0, 0, 1]))
        found.append(
            [
                (unit * size, rate * unit * size - cost * (size != stays) - bent * (size % 3))
                for size in sizes
            ]
        )
    return found


@given(similar_rows(), st.integers(0, 300))
@settings(max_examples=600, deadline=None)
def test_among_ties_plain_dynamic_programming_agrees(found: list[Row], capacity: int) -> None:
    """The values are equal. On a tie, both give the first row the most slots."""
    flat = candidates_of(found)
    after = plain_program.suffixes(flat, capacity)
    if after[0, capacity] <= candidates.IMPOSSIBLE // 2:
        assert knapsack.best(flat, capacity) is None
        return
    slots = tuple(plain_program.backtrack(flat, after, capacity))
    assert knapsack.best(flat, capacity) == (slots, int(after[0, capacity]))


@given(similar_rows(), st.integers(0, 120))
@settings(max_examples=300, deadline=None)
def test_among_ties_the_next_best_differs_in_a_size(found: list[Row], capacity: int) -> None:
    solved = Solution.of(flat := candidates_of(found), capacity)
    if solved is None:
        return
    chosen = flat.slots(solved.vector)
    others = plain_program.LeaveOneOut(flat, capacity)
    best = [
        value + gain
        for i, row in enumerate(found)
        for size, gain in row
        if size != chosen[i]
        and size <= capacity
        and (value := others.without(i, capacity - size)) > candidates.IMPOSSIBLE // 2
    ]
    runner_up = solved.next_best()
    assert (runner_up is None) == (not best)
    if runner_up is not None:
        slots, gain = runner_up
        assert slots != chosen
        assert sum(slots) <= capacity
        assert gain == flat.sums(flat.vector(slots))[0] == max(best)


@pytest.mark.parametrize("family", FAMILIES)
def test_degenerate_families_agree_with_plain_dynamic_programming(family: str) -> None:
    for seed in range(3):
        problem = degenerate(family, 24, 768, seed)
        flat = planner.allowed_candidates(problem)
        after = plain_program.suffixes(flat, problem.num_slots)
        assert knapsack.best(flat, problem.num_slots) == (
            tuple(plain_program.backtrack(flat, after, problem.num_slots)),
            int(after[0, problem.num_slots]),
        )


def test_no_rows_and_rows_that_do_not_fit() -> None:
    assert knapsack.best(candidates_of([]), 5) == ((), 0)
    assert knapsack.best(candidates_of([[(6, 1)]]), 5) is None


@pytest.mark.parametrize("size", [5, 1 << 40, 1 << 62])
def test_a_size_that_does_not_fit_has_no_effect(size: int) -> None:
    """A size above the capacity changes neither the result nor the unit of all sizes."""
    pairs = [(0, 0), (2, 4), (4, 6), (size, 100)]
    solved = Solution.of(candidates_of([pairs] * 3), 4)
    assert solved is not None
    assert (solved.gain, solved.rows.slots(solved.vector), solved.units_num) == (8, (2, 2, 0), 2)
    assert solved.next_best() in (((2, 0, 2), 8), ((0, 2, 2), 8))


def test_the_next_best_skips_infeasible_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floors leave three spare slots. Only states up to these three slots are searched."""
    found = [
        [(floor, 5 * floor), *((floor + x, 5 * floor + 3 * x + (x + i) % 7) for x in range(1, 60))]
        for i, floor in enumerate([40] * 60)
    ]
    rows = candidates_of(found)
    sizes: list[int] = []
    step = core.Core._step

    def counted(*args: Any) -> core.LossTable:
        table = step(*args)
        sizes.append(len(table.losses))
        return table

    monkeypatch.setattr(core.Core, "_step", counted)
    solved = Solution.of(rows, 40 * 60 + 3)
    assert solved is not None
    runner_up = solved.next_best()
    assert runner_up is not None
    assert runner_up[0] != rows.slots(solved.vector)
    assert sizes
    assert max(sizes) <= 4 + 2  # and an entry at each end


def test_the_first_plan_imports_no_module() -> None:
    """The first call of some numpy functions imports numpy.ma, which takes longer than any plan."""
    found = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            textwrap.dedent(f"""
        import sys
        from planner_cases import case
        from unicron.control_plane.planner import planner
        problem = case(100, 4096)
        before = set(sys.modules)
        planner.{choose_plan.__name__}(problem)
        print(*sorted(set(sys.modules) - before))
        """),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "drivers")},
    )
    assert found.stdout.split() == []
