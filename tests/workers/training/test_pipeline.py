"""A pipeline that is told to stop keeps exactly the micro-batches that it had begun."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import world_work
import worlds
from msgspec.structs import replace
from unicron.events.spec.job import Batch, DynamicLossScale, Model, Train
from unicron.events.spec.model import Axes

TRAIN = Train(
    model=Model(num_layers=4, hidden=32, num_heads=4, sequence=16, dropout=0.2),
    batch=Batch(global_=14, micro=2),
    iterations=20,
    output="unused",
)
FP16 = replace(TRAIN, precision="fp16", dynamic_loss_scale=DynamicLossScale(initial=2.0**8))
NUM_ITEMS = 7
PP2, PP4, CHUNKS = Axes(pp=2), Axes(pp=4), Axes(pp=2, chunks=2)
CASES: dict[str, tuple[Train, Axes, int, int]] = {
    "pp2, before the first": (TRAIN, PP2, 0, 0),
    "pp2, before the second": (TRAIN, PP2, 1, 1),
    "pp2, in the middle": (TRAIN, PP2, 4, 4),
    "pp2, before the last": (TRAIN, PP2, 6, 6),
    "pp2, after the last": (TRAIN, PP2, 7, 7),
    "pp4, in the warm-up": (TRAIN, PP4, 2, 2),
    "pp4, in the middle": (TRAIN, PP4, 5, 5),
    "chunks, before the first group": (TRAIN, CHUNKS, 0, 0),
    "chunks, before the second group": (TRAIN, CHUNKS, 1, 2),
    "chunks, in the middle": (TRAIN, CHUNKS, 2, 4),
    "chunks, before the padded group": (TRAIN, CHUNKS, 3, 6),
    "chunks, after the last group": (TRAIN, CHUNKS, 4, 7),
    "tp2pp2, which agrees one group later": (TRAIN, Axes(tp=2, pp=2), 3, 4),
    "fp16": (FP16, PP2, 3, 3),
}
"""What is trained, and where; the group before which it stops, and the micro-batches before it."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[pytest.mark.thorough]
            * (case.split(",")[0] in ("pp2", "chunks") and "middle" not in case),
        )
        for case in CASES
    ],
)
def test_a_stopped_pipeline_has_the_sum_of_what_it_began(case: str) -> None:
    train, axes, num_groups, num_done = CASES[case]
    ends: list[Any] = worlds.run(
        axes.tp * axes.pp, world_work.stopped, train, axes, NUM_ITEMS, num_groups
    )
    for end in ends:
        assert end.first.num_done == num_done
        assert end.first == end.alone[0]._replace(num_done=num_done)
        done = sorted(item for event, item in end.passes if event == "backward")
        assert done == sorted(list(range(num_done)) * axes.chunks)
        assert done == sorted(item for event, item in end.passes if event == "forward")
        for mine, wanted in zip(end.partial, end.alone[1], strict=True):
            assert np.array_equal(mine, wanted)
        for mine, wanted in zip(end.total, end.whole[1], strict=True):
            assert np.allclose(mine, wanted, rtol=1e-4, atol=1e-5)
    assert any(end.whole[0].num_tokens for end in ends)
