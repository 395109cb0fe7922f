"""Undisturbed training in every layout ends where one process alone ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import world_work
import worlds
from msgspec.structs import replace
from unicron.events.spec.job import Batch, DynamicLossScale, Model, Optimizer, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel, coordinates
from unicron.workers.training.recovery.settlement import assign_micro_batches

NUM_ITERATIONS = 4
TRAIN = Train(model=Model(num_layers=4, hidden=32, num_heads=4, sequence=16),
              batch=Batch(global_=10, micro=2), iterations=20, output="unused",
              optimizer=Optimizer(lr=1e-3, clip_grad=0.5))
UNTIED = replace(TRAIN, model=replace(TRAIN.model, tie_embeddings=False))
DROPOUT = replace(TRAIN, model=replace(TRAIN.model, dropout=0.2))
BF16 = replace(TRAIN, precision="bf16")
FP16 = replace(TRAIN, precision="fp16",
               dynamic_loss_scale=DynamicLossScale(initial=2.0**13, hysteresis=1))
PER_MICRO_BATCH = replace(TRAIN, loss="per_micro_batch")
TP2, PP2, PP2_CHUNKS = Axes(tp=2), Axes(pp=2), Axes(pp=2, chunks=2)
TP2_DP2, PP2_DP2, TP2_PP2 = Axes(tp=2, dp=2), Axes(pp=2, dp=2), Axes(tp=2, pp=2)
EXACT, BIT, ROUNDED = 1e-5, 5e-4, 2e-3
"""Relative. With 16 bits, a rounding may fall otherwise, and tensor-parallel members that add up
parts of one sum round each."""
CASES: dict[str, tuple[Train, Axes, float]] = {
    "tp2": (TRAIN, TP2, EXACT), "pp2": (TRAIN, PP2, EXACT),
    "pp2-chunks": (TRAIN, PP2_CHUNKS, EXACT),
    "tp2dp2": (TRAIN, TP2_DP2, EXACT), "pp2dp2": (TRAIN, PP2_DP2, EXACT),
    "tp2pp2": (TRAIN, TP2_PP2, EXACT),
    "tp2-untied": (UNTIED, TP2, EXACT), "pp2dp2-untied": (UNTIED, PP2_DP2, EXACT),
    "tp2pp2-dropout": (DROPOUT, TP2_PP2, EXACT), "pp2-chunks-dropout": (DROPOUT, PP2_CHUNKS, EXACT),
    "pp2dp2-per-micro-batch": (PER_MICRO_BATCH, PP2_DP2, EXACT),
    "pp2dp2-bf16": (BF16, PP2_DP2, BIT), "tp2dp2-bf16": (BF16, TP2_DP2, ROUNDED),
    "pp2-chunks-fp16": (FP16, PP2_CHUNKS, BIT), "tp2dp2-fp16": (FP16, TP2_DP2, ROUNDED),
}
SHARDED: dict[str, tuple[Train, Axes, float]] = {
    "dp2": (TRAIN, Axes(dp=2), EXACT), "dp4-bf16": (BF16, Axes(dp=4), BIT),
    "dp2-fp16": (FP16, Axes(dp=2), BIT), "tp2dp2": (TRAIN, TP2_DP2, EXACT),
    "pp2dp2": (TRAIN, PP2_DP2, EXACT),
}
Twin = tuple[list[float], list[float], dict[str, Any]]


@pytest.fixture(scope="module")
def twins() -> dict[int, Twin]:
    return {}


def twin_of(train: Train, twins: dict[int, Twin]) -> Twin:
    if id(train) not in twins:
        twins[id(train)] = worlds.run(1, world_work.twin, train, NUM_ITERATIONS)[0]
    return twins[id(train)]


def gap(parts: dict[str, Any], end: dict[str, Any], num_tp: int, tp: int) -> float:
    """Between a place's parameters and the same of the whole model, each as one vector."""
    gaps, norms = [], []
    for name, array in parts.items():
        if name.startswith("model."):
            whole = end[name]
            for dim, size in enumerate(array.shape):
                if size != whole.shape[dim]:
                    whole = np.split(whole, num_tp, dim)[tp]
            gaps.append(np.linalg.norm(array - whole))
            norms.append(np.linalg.norm(whole))
    return float(np.linalg.norm(gaps) / np.linalg.norm(norms))


def check(train: Train, axes: Axes, rel: float, twin: Twin) -> list[list[tuple[str, int]]]:
    told = worlds.run(axes.tp * axes.pp * axes.dp, world_work.trained, train, axes, NUM_ITERATIONS)
    losses, norms, end = twin
    for place, (mine, own_norms, parts, _) in enumerate(told):
        assert mine == pytest.approx(losses, rel=rel)
        assert own_norms == pytest.approx(norms, rel=10 * rel), "the same gradient, and clipping"
        assert gap(parts, end, axes.tp, place % axes.tp) <= rel
    return [noted for *_, noted in told]


@pytest.mark.parametrize("case", CASES)
def test_a_layout_ends_where_one_process_ends(case: str, twins: dict[int, Twin]) -> None:
    train, axes, rel = CASES[case]
    noted = check(train, axes, rel, twin_of(train, twins))
    norms = twin_of(train, twins)[1]
    assert min(norms) > 0.5 or train.precision == "fp16", "all are clipped"
    assert (world_work.SKIPPED in norms) == (train.precision == "fp16")
    for place, events in enumerate(noted):
        passed = [item for event, item in events if event == "forward"]
        assert sorted(passed) == sorted(item for event, item in events if event == "backward")
        mine = assign_micro_batches(train.num_micro_batches, axes.dp, coordinates(axes, place).dp)
        assert sorted(passed) == sorted(mine * axes.chunks * NUM_ITERATIONS)


@pytest.mark.parametrize("case", SHARDED)
def test_a_sharded_optimizer_ends_where_a_whole_one_ends(case: str, twins: dict[int, Twin]) -> None:
    train, axes, rel = SHARDED[case]
    check(replace(train, parallel=Parallel(optimizer="sharded")), axes, rel, twin_of(train, twins))
