"""A rank hangs: it alone is named and replaced, in every layout, and the state is the right one.

Rows of the fault matrix (tests/matrix/hang_cells.py): each fault, each place and each layout once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matrix.hang_cells import HANGS, LAYOUTS, PLACES, HangCell, each_once, once, pairs
from matrix.hang_trial import HangTrials, hang_cluster
from twins import Twins


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory, twins: Twins) -> Iterator[HangTrials]:
    folder = tmp_path_factory.mktemp("hang")
    with hang_cluster(folder / "cluster") as cluster:
        yield HangTrials(folder, cluster, twins)
        cluster.verify()


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in once()])
def test_the_rank_that_hangs_is_named_and_replaced_alone(
    trials: HangTrials, cell: HangCell
) -> None:
    verdict = trials.run(cell)
    assert verdict.outcome == "equal", verdict


def test_the_rows_of_train_are_all_pairs() -> None:
    cells = list(pairs())
    found = [
        {(cell.fault, cell.point.name) for cell in cells},
        {(cell.fault, cell.layout.name) for cell in cells if not cell.absent},
        {(cell.point.name, cell.layout.name) for cell in cells},
    ]
    sizes = [len(HANGS), len(PLACES), len(LAYOUTS)]
    assert [len(one) for one in found] == [
        sizes[0] * sizes[1],
        sizes[0] * sizes[2],
        sizes[1] * sizes[2],
    ]
    assert {cell.point.event for cell in cells if cell.absent} == {"evaluate"}


@pytest.mark.parametrize("rows", [each_once("loop"), once()])
def test_each_value_of_each_axis_is_in_a_row(rows: Iterator[HangCell]) -> None:
    cells = list(rows)
    assert not any(cell.absent for cell in cells)
    assert {cell.fault for cell in cells} == {*HANGS}
    assert [cell.point for cell in cells] == [*PLACES]
    assert {cell.layout.name for cell in cells} == {layout.name for layout in LAYOUTS}
