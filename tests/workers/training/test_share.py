"""Shares of the state: each element is in exactly one member's share, and the shares are equal."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import share_work
import worlds
from msgspec.structs import replace
from reshard_work import TRAIN, Layout
from unicron.events.spec.job import Train
from unicron.events.spec.model import Axes
from unicron.workers.training.recovery.regions import shape_of

BF16 = replace(TRAIN, precision="bf16")
UNTIED = replace(TRAIN, model=replace(TRAIN.model, tie_embeddings=False))
ALL = None
CASES = [
    (TRAIN, Layout(Axes(dp=3)), [ALL, (1,), (0, 2)]),
    (TRAIN, Layout(Axes(tp=2, dp=2)), [ALL, (0, 3), (1, 2, 3)]),
    (BF16, Layout(Axes(pp=2, dp=2)), [ALL, (1, 2)]),
    (UNTIED, Layout(Axes(tp=2, pp=2)), [ALL]),
    (TRAIN, Layout(Axes(pp=3, chunks=2)), [ALL]),
    (TRAIN, Layout(Axes(dp=3), "sharded"), [ALL]),
    (BF16, Layout(Axes(tp=2, dp=2), "sharded"), [ALL]),
    (TRAIN, Layout(Axes(pp=2, dp=2), "sharded"), [ALL]),
    (BF16, Layout(Axes(dp=3), "mirrored"), [ALL, (0, 1), (1, 2)]),
    (TRAIN, Layout(Axes(tp=2, dp=2), "mirrored"), [ALL, (0, 1), (1, 2)]),
    (TRAIN, Layout(Axes(dp=4), "mirrored"), [ALL, (0, 2), (1, 2, 3)]),
]


@pytest.mark.parametrize(("train", "layout", "lives"), CASES)
def test_each_element_is_in_one_share(
    train: Train, layout: Layout, lives: Sequence[tuple[int, ...] | None]
) -> None:
    num = layout.axes.tp * layout.axes.pp * layout.axes.dp
    found = worlds.run(num, share_work.shares, train, layout, lives)
    whole: dict[str, Any] = {}
    for index, saving in enumerate(lives):
        seen: dict[tuple[str, str], Any] = {}
        values: dict[str, Any] = {}
        sizes: list[int] = []
        for place in range(num):
            _, share = found[place][index]
            assert not share or saving is None or place in saving
            if share:
                sizes.append(sum(len(data) for _, data in share))
            for (key, kind, region), data in share:
                shape = shape_of(kind)
                item = len(data) // max(prod(region.shape), 1)
                count = seen.setdefault((key, kind), np.zeros(shape, dtype=int))
                value = values.setdefault(key, np.zeros((*shape, item), dtype=np.uint8))
                inside = tuple(slice(b, b + n) for b, n in zip(*region, strict=True))
                count[inside] += 1
                value[inside] = np.frombuffer(data, dtype=np.uint8).reshape(*region.shape, item)
        odd = [key for (key, _), count in seen.items() if not (count == 1).all()]
        assert not odd, f"not saved exactly once by {saving}: {odd[:5]}"
        assert sum(sizes) == sum(value.size for value in values.values())
        assert set(values) == set(whole or values)
        assert all((value == whole.get(key, value)).all() for key, value in values.items())
        whole = values
        assert {key.partition(".")[0] for key in values} >= {"model", "optimizer"}
        if saving is None and layout.axes.pp == 1:
            assert max(sizes) <= 1.2 * min(sizes) + 4096, sizes
