"""Megatron's own checkpoints (torch_dist): read in every layout, and written for Megatron."""

from __future__ import annotations

from pathlib import Path

import megatron_work
import pytest
import worlds
from msgspec.structs import replace
from reshard_work import TRAIN, Layout
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions

pytest.importorskip("psutil", reason="Megatron's dist_checkpointing saves with psutil")
BF16 = replace(TRAIN, precision="bf16")
BUCKETS, WHOLE = "dp_reshardable", "fully_reshardable"


def world(layout: Layout) -> int:
    return num_positions(layout.axes)


def saved(folder: Path, layout: Layout, train: object = BF16, kind: str = "") -> str:
    path = str(folder / "iter_0000007")
    worlds.run(world(layout), megatron_work.save_as_megatron, train, layout, path, kind)
    return path


def wrong(
    path: str, layout: Layout, train: object = BF16, *, with_optimizer: bool = True
) -> list[list[str]]:
    return worlds.run(
        world(layout), megatron_work.read_as_unicron, train, layout, path, with_optimizer
    )


@pytest.mark.parametrize(
    ("train", "layout", "kind", "others"),
    [
        (BF16, Layout(Axes(tp=2, dp=2)), "", [Layout(Axes(pp=2)), Layout(Axes(dp=3), "sharded")]),
        (TRAIN, Layout(Axes(pp=2)), "", [Layout(Axes(tp=2, dp=2)), Layout(Axes(dp=2), "sharded")]),
        (BF16, Layout(Axes(tp=2, dp=2), "sharded"), WHOLE, [Layout(Axes(pp=2, dp=2), "sharded")]),
        (
            BF16,
            Layout(Axes(tp=2, pp=2, dp=2), "sharded"),
            BUCKETS,
            [Layout(Axes(tp=2, pp=2, dp=1), "sharded"), Layout(Axes(tp=2, pp=2))],
        ),
    ],
)
def test_what_megatron_saves_is_read_in_other_layouts(
    tmp_path: Path, train: object, layout: Layout, kind: str, others: list[Layout]
) -> None:
    path = saved(tmp_path, layout, train, kind)
    for other in others:
        assert not any(wrong(path, other, train))


@pytest.mark.parametrize(
    ("train", "layout", "other"),
    [
        (BF16, Layout(Axes(tp=2, dp=2), "sharded"), Layout(Axes(dp=3), "sharded")),
        (BF16, Layout(Axes(pp=2, dp=2)), Layout(Axes(tp=2, dp=2))),
        (TRAIN, Layout(Axes(dp=2), "sharded"), Layout(Axes(tp=2, pp=2), "sharded")),
        (TRAIN, Layout(Axes(tp=2, pp=2)), Layout(Axes(dp=2))),
    ],
)
def test_megatron_loads_what_is_saved_here(
    tmp_path: Path, train: object, layout: Layout, other: Layout
) -> None:
    worlds.run(world(layout), megatron_work.save_as_unicron, train, layout, str(tmp_path))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
    found = worlds.run(
        world(other),
        megatron_work.load_as_megatron,
        train,
        other,
        str(tmp_path / "iter_0000007"),
        WHOLE if other.optimizer == "sharded" else "",
    )
    assert not any(found), found
