"""A second fault at every record of a transition: each row of the table is struck by each fault."""

from __future__ import annotations

from collections import Counter

import pytest
from simulated.script import SecondFault
from simulated.seeds import simulate
from simulated.witness import FAULTS, ROWS, UNSCRIPTED

NUM_SEEDS_MIN, NUM_SEEDS_MAX = 2, 10
"""Worlds for each pair: more than the least only until the fault has struck."""
pytestmark = pytest.mark.usefixtures("silence")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("row", ROWS)
def test_a_second_fault_is_healed_from_every_row(
        request: pytest.FixtureRequest, row: str, fault: str) -> None:
    """All invariants of the simulation hold, and the fault really came while the row was on."""
    hits: Counter[tuple[str, str]] = Counter()
    unscripted = (row, fault) in UNSCRIPTED
    for seed in range(NUM_SEEDS_MAX):
        again = f"pytest '{request.node.nodeid}'"
        nth = 1 + seed // 2 % 2
        world, _ = simulate(lambda seed=seed, nth=nth: SecondFault(seed, row, fault, nth), again)
        hits += world.witness.hits
        if seed + 1 >= NUM_SEEDS_MIN and (hits[row, fault] or unscripted):
            return
    raise AssertionError(f"{fault} never came at {row}")
