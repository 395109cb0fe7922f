"""Ranks on an older megatron-core: a fault costs nothing, and the result is its own twin's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from loop_driver import drive_loop
from megatron_wheel import NotFetched, unpacked
from nursery import Nursery
from rank_driver import Driver, small_spec
from rank_twin import Twin
from unicron.events.spec.model import Axes

VERSION = "0.15.3"
ITERATIONS, MICRO_BATCHES, STRUCK = 6, 6, 2
SAYS_VERSION = "import megatron.core\nprint('megatron', megatron.core.__version__, flush=True)\n"
OVERLAPPED = {"overlap": True, "bucket_params": 20_000}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Forks ranks that have imported megatron-core 0.15."""
    try:
        wheel = unpacked(VERSION)
    except NotFetched as why:
        pytest.skip(str(why))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(wheel))
        made = Nursery(tmp_path_factory.mktemp("older") / "zygote.log")
    yield made
    made.close()


def check(
    driver: Driver,
    older: Nursery,
    num: int,
    whole: Axes,
    left: list[int],
    axes: Axes,
    event: str = "forward",
) -> None:
    """Train on `num` ranks. Rank 1 is killed at this event, and the ranks `left` finish its
    iteration and the training."""
    driver.patch = SAYS_VERSION + driver.patch
    twin = Twin(driver.spec, driver.folder / "twin", older, num_orders=2)
    ranks = list(range(num))
    driver.start(*ranks, axes=whole)
    driver.hold(1, event, STRUCK)
    driver.form(ranks, axes=whole)
    driver.held(1, STRUCK)
    driver.kill(1)
    driver.quiesce(left, "now")
    driver.form(left, axes=axes)
    driver.finish(left)
    assert list(driver.losses()) == list(range(ITERATIONS))
    assert twin.is_equal(driver.final_checkpoint())
    for rank in left:
        text = driver.processes[rank].log.read_text()
        assert f"megatron {VERSION}" in text
        assert "was never run" not in text


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        # A loop of its own loses a rank at a forward, below.
        pytest.param({}, "forward", marks=pytest.mark.thorough),
        ({}, "bucket"),
        pytest.param(OVERLAPPED, "forward", marks=pytest.mark.thorough),
        (OVERLAPPED, "bucket"),
    ],
    ids=["forward", "bucket", "overlapped-forward", "overlapped-bucket"],
)
def test_a_task_loses_a_rank(
    tmp_path: Path, older: Nursery, changes: dict[str, Any], event: str
) -> None:
    spec = small_spec(tmp_path / "out", iterations=ITERATIONS, **changes)
    with closing(Driver(spec, tmp_path, older)) as driver:
        check(driver, older, 3, Axes(dp=3), [0, 2], Axes(dp=2), event)


def test_an_order_before_the_last_backward_leaves_no_counts(tmp_path: Path, older: Nursery) -> None:
    """The last backward then launches nothing, but Megatron has counted its gradients."""
    spec = small_spec(tmp_path / "out", iterations=ITERATIONS, **OVERLAPPED)
    with closing(Driver(spec, tmp_path, older)) as driver:
        twin = Twin(spec, tmp_path / "twin", older, num_orders=2)
        driver.start(0, 1, 2, axes=Axes(dp=3))
        holds = [driver.hold(rank, "reduce", STRUCK) for rank in range(3)]
        driver.form([0, 1, 2], axes=Axes(dp=3))
        for rank in range(3):
            driver.held(rank, STRUCK)
        driver.kill(1)
        driver.ask_to_leave([0, 2], "now")
        driver.heard(0, 2)
        for hold in holds:
            hold.unlink()
        driver.quiesced([0, 2])
        driver.form([0, 2], axes=Axes(dp=2))
        driver.finish([0, 2])
        assert list(driver.losses()) == list(range(ITERATIONS))
        assert twin.is_equal(driver.final_checkpoint())


def test_with_mirrors_a_lost_shard_costs_no_iteration(tmp_path: Path, older: Nursery) -> None:
    spec = small_spec(tmp_path / "out", iterations=ITERATIONS, parallel={"optimizer": "mirrored"})
    with closing(Driver(spec, tmp_path, older)) as driver:
        twin = Twin(spec, tmp_path / "twin", older, num_orders=2)
        driver.start(0, 1, 2, axes=Axes(dp=3))
        driver.hold(1, "gate", STRUCK)
        driver.form([0, 1, 2], axes=Axes(dp=3))
        driver.held(1, STRUCK)
        driver.kill(1)
        driver.quiesce([0, 2], "now")
        reports = driver.form([0, 2], axes=Axes(dp=2))
        assert {each.step_version for each in reports.values()} == {STRUCK}
        driver.finish([0, 2])
        assert twin.is_equal(driver.final_checkpoint())


@pytest.mark.parametrize(
    "parallel",
    [{}, pytest.param({"tensor": [1], "pipeline": [1, 2]}, marks=pytest.mark.thorough)],
    ids=["plain", "pipeline"],
)
def test_an_adopted_loop_loses_a_rank(
    tmp_path: Path, older: Nursery, parallel: dict[str, Any]
) -> None:
    loop = drive_loop(
        tmp_path, older, [], iterations=ITERATIONS, micro_batches=MICRO_BATCHES, **parallel
    )
    with closing(loop) as driver:
        if parallel:
            check(driver, older, 4, Axes(pp=2, dp=2), [0, 2], Axes(pp=2))
        else:
            check(driver, older, 3, Axes(dp=3), [0, 2], Axes(dp=2))
