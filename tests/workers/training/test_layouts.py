"""Layouts: groups, initial weights and undisturbed training agree with those of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import world_work
import worlds
from msgspec.structs import replace
from unicron.events.spec.job import Batch, DynamicLossScale, Model, Optimizer, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel, coordinates, holders, num_positions, replica
from unicron.workers.training.recovery.settlement import assign_micro_batches

NUM_ITERATIONS = 4
TRAIN = Train(
    model=Model(num_layers=4, hidden=32, num_heads=4, sequence=16),
    batch=Batch(global_=10, micro=2),
    iterations=20,
    output="unused",
    optimizer=Optimizer(lr=1e-3, clip_grad=0.5),
)
UNTIED = replace(TRAIN, model=replace(TRAIN.model, tie_embeddings=False))
DROPOUT = replace(TRAIN, model=replace(TRAIN.model, dropout=0.2))
BF16 = replace(TRAIN, precision="bf16")
FP16 = replace(
    TRAIN, precision="fp16", dynamic_loss_scale=DynamicLossScale(initial=2.0**13, hysteresis=1)
)
PER_MICRO_BATCH = replace(TRAIN, loss="per_micro_batch")
TP2, PP2, PP2_CHUNKS = Axes(tp=2), Axes(pp=2), Axes(pp=2, chunks=2)
TP2_DP2, PP2_DP2, TP2_PP2 = Axes(tp=2, dp=2), Axes(pp=2, dp=2), Axes(tp=2, pp=2)
EXACT, BIT, ROUNDED = 1e-5, 5e-4, 2e-3
"""Relative tolerances. In 16 bits a value may round the other way (BIT), and tensor-parallel
members round their partial sums separately (ROUNDED)."""
CASES: dict[str, tuple[Train, Axes, float]] = {
    "tp2": (TRAIN, TP2, EXACT),
    "pp2": (TRAIN, PP2, EXACT),
    "pp2-chunks": (TRAIN, PP2_CHUNKS, EXACT),
    "tp2dp2": (TRAIN, TP2_DP2, EXACT),
    "pp2dp2": (TRAIN, PP2_DP2, EXACT),
    "tp2pp2": (TRAIN, TP2_PP2, EXACT),
    "tp2-untied": (UNTIED, TP2, EXACT),
    "pp2dp2-untied": (UNTIED, PP2_DP2, EXACT),
    "tp2pp2-dropout": (DROPOUT, TP2_PP2, EXACT),
    "pp2-chunks-dropout": (DROPOUT, PP2_CHUNKS, EXACT),
    "pp2dp2-per-micro-batch": (PER_MICRO_BATCH, PP2_DP2, EXACT),
    "pp2dp2-bf16": (BF16, PP2_DP2, BIT),
    "tp2dp2-bf16": (BF16, TP2_DP2, ROUNDED),
    "pp2-chunks-fp16": (FP16, PP2_CHUNKS, BIT),
    "tp2dp2-fp16": (FP16, TP2_DP2, ROUNDED),
}
SHARDED: dict[str, tuple[Train, Axes, float]] = {
    "dp2": (TRAIN, Axes(dp=2), EXACT),
    "dp4-bf16": (BF16, Axes(dp=4), BIT),
    "dp2-fp16": (FP16, Axes(dp=2), BIT),
    "tp2dp2": (TRAIN, TP2_DP2, EXACT),
    "pp2dp2": (TRAIN, PP2_DP2, EXACT),
}
NEIGHBOURED = {"tp2", "pp2", "tp2-untied", "pp2-chunks-dropout", "pp2dp2-bf16", "tp2dp2-fp16"}
SHARDED_NEIGHBOURED = {"dp2-fp16", "pp2dp2"}
"""Cases that only `make test-thorough` runs: the others have each layout and each option."""
Twin = tuple[list[float], list[float], dict[str, Any]]
WIDE = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def twins() -> dict[int, Twin]:
    return {}


def twin_of(train: Train, twins: dict[int, Twin]) -> Twin:
    if id(train) not in twins:
        twins[id(train)] = worlds.run(1, world_work.twin, train, NUM_ITERATIONS)[0]
    return twins[id(train)]


def gap(parts: dict[str, Any], end: dict[str, Any], num_tp: int, tp: int) -> float:
    """Relative distance of a position's parameters from the same parameters of the whole model."""
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
    ends = worlds.run(axes.tp * axes.pp * axes.dp, world_work.trained, train, axes, NUM_ITERATIONS)
    losses, norms, end = twin
    for place, (mine, own_norms, parts, _) in enumerate(ends):
        assert mine == pytest.approx(losses, rel=rel)
        assert own_norms == pytest.approx(norms, rel=10 * rel)
        assert gap(parts, end, axes.tp, place % axes.tp) <= rel
    return [noted for *_, noted in ends]


def but(thorough: set[str], cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(case, marks=[pytest.mark.thorough] * (case in thorough)) for case in cases]


@pytest.mark.parametrize("case", but(NEIGHBOURED, CASES))
def test_a_layout_ends_where_one_process_ends(case: str, twins: dict[int, Twin]) -> None:
    train, axes, rel = CASES[case]
    noted = check(train, axes, rel, twin_of(train, twins))
    norms = twin_of(train, twins)[1]
    assert min(norms) > 0.5 or train.precision == "fp16", "a gradient is not clipped"
    assert (world_work.SKIPPED in norms) == (train.precision == "fp16")
    for place, events in enumerate(noted):
        passed = [item for event, item in events if event == "forward"]
        assert sorted(passed) == sorted(item for event, item in events if event == "backward")
        mine = assign_micro_batches(train.num_micro_batches, axes.dp, coordinates(axes, place).dp)
        assert sorted(passed) == sorted(mine * axes.chunks * NUM_ITERATIONS)


@pytest.mark.parametrize("case", but(SHARDED_NEIGHBOURED, SHARDED))
def test_a_sharded_optimizer_ends_where_a_whole_one_ends(case: str, twins: dict[int, Twin]) -> None:
    train, axes, rel = SHARDED[case]
    check(replace(train, parallel=Parallel(optimizer="sharded")), axes, rel, twin_of(train, twins))


# --- groups --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("axes", "num_groups"),
    [
        (Axes(dp=4), 2),
        (Axes(tp=2, dp=2), 3),
        (Axes(pp=2, dp=2), 3),
        (Axes(tp=2, pp=2), 5),
        (Axes(pp=4), 4),
        (Axes(dp=3), 2),
        (Axes(pp=3), 4),
    ],
    ids=["dp4", "tp2dp2", "pp2dp2", "tp2pp2", "pp4", "dp3 and a standby", "pp3 and a standby"],
)
def test_each_group_has_the_members_of_its_position(axes: Axes, num_groups: int) -> None:
    results = worlds.run(4, world_work.members_by_role, axes)
    for place, (met, num) in enumerate(results):
        if place >= num_positions(axes):
            assert {tuple(members) for members in met.values()} == {(place,)}, "standby member"
            assert num == 1
            continue
        at = coordinates(axes, place)
        whole = list(replica(axes, at.dp))
        stages = whole[at.tp :: axes.tp]
        assert met["dp"] == list(holders(axes, at.tp, at.pp))
        assert met["tp"] == whole[at.pp * axes.tp : (at.pp + 1) * axes.tp]
        assert met["pp"] == stages
        assert met["mp"] == whole
        assert met["embd"] == (
            [place] if 0 < at.pp < axes.pp - 1 else sorted({stages[0], stages[-1]})
        )
        assert met["intra_dist_opt"] == met["pos_embd"] == met["cp"] == [place]
        assert all(met[role] == met["dp"] for role in WIDE)
        assert num <= num_groups


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_the_roles_of_a_group_do_not_depend_on_dp(tp: int, pp: int) -> None:
    """Handles are restored by role, so the same roles must share a group in every generation."""
    results = [
        worlds.run(4, world_work.roles_of_one_group, Axes(tp=tp, pp=pp, dp=dp))[0] for dp in (1, 2)
    ]
    assert results[0] == results[1]


# --- initial weights -----------------------------------------------------------------------------
@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def train(request: pytest.FixtureRequest) -> Train:
    return replace(TRAIN, model=replace(TRAIN.model, tie_embeddings=request.param))


@pytest.fixture(scope="module")
def whole(train: Train) -> dict[str, Any]:
    found: dict[str, Any] = worlds.run(1, world_work.built, train, Axes())[0]
    assert found[f"model.{EMBEDDING}"].std() == pytest.approx(0.02, rel=0.05)
    inner = found["model.decoder.layers.2.mlp.linear_fc2.weight"]
    assert inner.std() == pytest.approx(0.02 / np.sqrt(2 * 4), rel=0.05), "Megatron's scaled init"
    drawn = [
        array.tobytes()
        for name, array in found.items()
        if array.ndim > 1 and name.startswith("model.")
    ]
    assert len(set(drawn)) == len(drawn), "two weights have equal values"
    return found


def part(whole: Any, shape: tuple[int, ...], tp: int) -> Any:
    """The shard of a tensor at tensor-parallel position `tp`: a slice along the split dimension."""
    for dim, (mine, all_of_it) in enumerate(zip(shape, whole.shape, strict=True)):
        if mine != all_of_it:
            return np.take(whole, range(tp * mine, (tp + 1) * mine), axis=dim)
    return whole


@pytest.mark.parametrize(
    "axes",
    [Axes(tp=2), Axes(pp=2), Axes(pp=2, chunks=2), Axes(tp=2, pp=2)],
    ids=["tp2", "pp2", "pp2 in chunks", "tp2pp2"],
)
def test_every_layout_starts_from_the_same_weights(
    train: Train, whole: dict[str, Any], axes: Axes
) -> None:
    places = worlds.run(axes.tp * axes.pp, world_work.built, train, axes)
    for place, mine in enumerate(places):
        for name, array in mine.items():
            assert np.array_equal(array, part(whole[name], array.shape, place % axes.tp)), name
    assert set().union(*places) == set(whole)
    num_elements = sum(array.size for mine in places[:: axes.tp] for array in mine.values())
    twice = 3 * whole[f"model.{EMBEDDING}"].size if train.model.tie_embeddings else 0
    if axes.tp == 1:
        assert num_elements == sum(array.size for array in whole.values()) + twice
    if axes.chunks > 1:
        assert {
            name.split(".")[3] for name in places[0] if name.startswith("model.decoder.lay")
        } == {"0", "2"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sharded_optimizer_has_its_part_of_every_moment(
    whole: dict[str, Any], precision: str, train: Train
) -> None:
    train = replace(train, precision=precision, parallel=Parallel(optimizer="sharded"))
    places = worlds.run(2, world_work.built, train, Axes(dp=2))
    for kind in ("optimizer.exp_avg.", *(["master."] if precision == "bf16" else [])):
        each = [
            sum(array.size for name, array in mine.items() if name.startswith(kind))
            for mine in places
        ]
        assert sum(each) == sum(
            array.size for name, array in whole.items() if name.startswith("model.")
        )
        assert min(each) > 0.4 * sum(each)
