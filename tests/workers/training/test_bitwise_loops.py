"""`reproducible: bitwise` of scripts: the same bits in any layout, through faults, or a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_driver import drive_loop, flagged_example
from nursery import Nursery
from rank_driver import Driver
from reference import differing, read
from unicron.events.spec.model import Axes

ITERATIONS, MICRO_BATCHES, STRUCK = 5, 8, 2
Loops = Callable[..., Driver]


@pytest.fixture
def loops(tmp_path: Path, nursery: Nursery) -> Iterator[Loops]:
    """Factory of drivers: `loops("overlapped gather", optimizer="sharded")`."""
    made: list[Driver] = []

    def make(*flags: str, **options: Any) -> Driver:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(drive_loop(
            folder, nursery, [], iterations=ITERATIONS, micro_batches=MICRO_BATCHES, slots_max=8,
            script=flagged_example(folder, flags), **{"reproducible": "bitwise"} | options))
        return made[-1]

    yield make
    for driver in made:
        driver.close()


def train(driver: Driver, axes: Axes) -> dict[str, Any]:
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.start(*ranks, axes=axes)
    driver.form(ranks, axes=axes)
    driver.finish(ranks)
    return read(driver.final_checkpoint())


SHARDED = {"optimizer": "sharded"}
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], list[Axes]]] = {
    "plain": (("dropout", "tied embeddings"), {}, [Axes(), Axes(dp=3)]),
    "overlapped gather": (("overlapped gather",), SHARDED | {"pipeline": [1, 2]},
                          [Axes(), Axes(dp=3), Axes(pp=2, dp=2)]),
    "usual": (("bf16", "overlapped gather", "sequence parallel", "recompute"),
              SHARDED | {"tensor": [2]}, [Axes(tp=2), Axes(tp=2, dp=2)]),
    "fp16": (("fp16", "overlapped gather"), SHARDED, [Axes(), Axes(dp=3)]),
    "interleaved": (("overlapped reduction",), {"pipeline": [2], "chunks": 2},
                    [Axes(pp=2, chunks=2), Axes(pp=2, chunks=2, dp=2)]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loop_trains_the_same_bits_in_any_layout(loops: Loops, case: str) -> None:
    flags, options, layouts = CASES[case]
    one, *others = [train(loops(*flags, **options), axes) for axes in layouts]
    for axes, other in zip(layouts[1:], others, strict=True):
        assert differing(other, one) == [], axes
