"""A rank hangs: it alone is named and replaced, in every layout, and the state is the right one.

Rows of the fault matrix (tests/matrix/hang_cells.py): each fault, each place and each layout once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matrix.hang_cells import HangCell, once
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
