"""In-memory checkpoints of one layout, restored by ranks of another, or by fewer."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoint_stores import LocalKeeper, named, whole_steps
from rank_driver import Drive, Twins
from unicron.events.records import reports as r
from unicron.events.records.types import NodeStores
from unicron.events.spec.model import Axes

NUM_ITERATIONS = 6
EVERY = 3
RELATIVE_MAX = 1e-5


def trained(drive: Drive, axes: Axes, optimizer: str) -> Any:
    """A driver whose ranks have stored step EVERY in this layout and have all died."""
    driver = drive(
        iterations=NUM_ITERATIONS,
        copy_every=EVERY,
        parallel={"tensor": [1, 2], "pipeline": [1, 2], "optimizer": optimizer},
    )
    driver.keepers = [LocalKeeper("n1"), LocalKeeper("n2")]
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.start(*ranks)
    holds = [driver.hold(rank, "backward", EVERY + 1) for rank in ranks]
    driver.form(ranks, axes=axes)
    driver.until(lambda: EVERY in whole_steps(driver.keepers), "all have stored their shares")
    driver.until(
        lambda: (
            len({(told.rank, told.node) for told in driver.told(r.MemoryCheckpointStored)})
            == len(ranks) * len(driver.keepers)
        ),
        "all stores are reported",
    )
    for rank in ranks:
        driver.kill(rank)
    for hold in holds:
        hold.unlink(missing_ok=True)
    return driver


def restore(driver: Any, twin: Twins, axes: Axes) -> list[Any]:
    """Start anew in this layout and finish; the reports of the ranks."""
    copies = tuple(named(driver.keepers, told) for told in driver.told(r.MemoryCheckpointStored))
    ranks = list(range(axes.tp * axes.pp * axes.dp))
    driver.start(*ranks, attempt=2)
    came = list(driver.form(ranks, axes=axes, copies=copies).values())
    assert [(one.origin, one.step_version, one.source) for one in came] == [
        ("copy", EVERY, -1)
    ] * len(ranks), driver.story()
    driver.finish(ranks)
    gap = twin(iterations=NUM_ITERATIONS).difference(driver.final_checkpoint())
    assert gap.num_losses == NUM_ITERATIONS
    assert gap.loss_rel < RELATIVE_MAX
    assert gap.param_rel < RELATIVE_MAX
    return came


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        (Axes(tp=2, dp=2), Axes(dp=2), "whole"),
        (Axes(dp=3), Axes(dp=2), "sharded"),
        (Axes(dp=2), Axes(tp=2), "whole"),
        (Axes(tp=2, dp=2), Axes(tp=2, dp=2), "sharded"),
        pytest.param(Axes(pp=2, dp=2), Axes(tp=2), "mirrored", marks=pytest.mark.thorough),
        pytest.param(Axes(tp=2, pp=2), Axes(dp=3), "whole", marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_is_restored_into_any_layout(
    drive: Drive, twin: Twins, before: Axes, after: Axes, optimizer: str
) -> None:
    driver = trained(drive, before, optimizer)
    num = before.tp * before.pp * before.dp
    shares = {one.offer.share: one.offer for one in driver.keepers[0].stored(7)}
    assert sorted(shares) == list(range(num))
    sizes = [one.copy_bytes - one.manifest_bytes for one in shares.values()]
    print(f"shares of {sizes} bytes")
    assert max(sizes) < 1.5 * sum(sizes) / num, "the state is dealt evenly"
    restore(driver, twin, after)


def test_a_rank_uses_the_stores_of_its_node_and_a_lost_store_is_no_loss(
    drive: Drive, twin: Twins
) -> None:
    driver = trained(drive, Axes(dp=2), "whole")
    gone, there = driver.keepers
    gone.close()
    came = restore(driver, twin, Axes(dp=2))
    assert {one.origin_node for one in came} == {there.keeper.node}


def test_the_order_says_which_stores_a_node_uses(drive: Drive) -> None:
    driver = drive(iterations=NUM_ITERATIONS, copy_every=EVERY)
    driver.keepers = [LocalKeeper("n1"), LocalKeeper("n2"), LocalKeeper("n3")]
    driver.stores = (NodeStores("n1", ("n2", "n3")), NodeStores("n2", ("n1",)))
    driver.start(0, 1)
    driver.form([0, 1])
    driver.finish([0, 1])
    assert [len(keeper.stored(7)) for keeper in driver.keepers] == [0, 2, 2]
