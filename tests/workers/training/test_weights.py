"""What stands at a place of a layout before the first iteration: its part of one whole model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import world_work
import worlds
from msgspec.structs import replace
from unicron.events.spec.job import Model, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel

TRAIN = Train(model=Model(num_layers=4, hidden=32, num_heads=4, sequence=16), iterations=10,
              output="unused")
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def train(request: pytest.FixtureRequest) -> Train:
    return replace(TRAIN, model=replace(TRAIN.model, tie_embeddings=request.param))


@pytest.fixture(scope="module")
def whole(train: Train) -> dict[str, Any]:
    found: dict[str, Any] = worlds.run(1, world_work.built, train, Axes())[0]
    assert found[f"model.{EMBEDDING}"].std() == pytest.approx(0.02, rel=0.05)
    inner = found["model.decoder.layers.2.mlp.linear_fc2.weight"]
    assert inner.std() == pytest.approx(0.02 / np.sqrt(2 * 4), rel=0.05), "as Megatron draws it"
    drawn = [array.tobytes() for name, array in found.items()
             if array.ndim > 1 and name.startswith("model.")]
    assert len(set(drawn)) == len(drawn), "each weight has draws of its own"
    return found


def part(whole: Any, shape: tuple[int, ...], tp: int) -> Any:
    """The part of a tensor that the place `tp` has: a slice along what is smaller there."""
    for dim, (mine, all_of_it) in enumerate(zip(shape, whole.shape, strict=True)):
        if mine != all_of_it:
            return np.take(whole, range(tp * mine, (tp + 1) * mine), axis=dim)
    return whole


@pytest.mark.parametrize("axes", [Axes(tp=2), Axes(pp=2), Axes(pp=2, chunks=2), Axes(tp=2, pp=2)],
                         ids=["tp2", "pp2", "pp2 in chunks", "tp2pp2"])
def test_every_layout_starts_from_the_same_weights(train: Train, whole: dict[str, Any], axes: Axes
                                                   ) -> None:
    places = worlds.run(axes.tp * axes.pp, world_work.built, train, axes)
    for place, mine in enumerate(places):
        for name, array in mine.items():
            assert np.array_equal(array, part(whole[name], array.shape, place % axes.tp)), name
    assert set().union(*places) == set(whole)
    num_elements = sum(array.size for mine in places[::axes.tp] for array in mine.values())
    twice = 3 * whole[f"model.{EMBEDDING}"].size if train.model.tie_embeddings else 0
    if axes.tp == 1:
        assert num_elements == sum(array.size for array in whole.values()) + twice
    if axes.chunks > 1:
        assert {name.split(".")[3] for name in places[0] if name.startswith("model.decoder.lay")
                } == {"0", "2"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sharded_optimizer_has_its_part_of_every_moment(whole: dict[str, Any], precision: str,
                                                          train: Train) -> None:
    train = replace(train, precision=precision, parallel=Parallel(optimizer="sharded"))
    places = worlds.run(2, world_work.built, train, Axes(dp=2))
    for kind in ("optimizer.exp_avg.", *(["master."] if precision == "bf16" else [])):
        each = [sum(array.size for name, array in mine.items() if name.startswith(kind))
                for mine in places]
        assert sum(each) == sum(array.size for name, array in whole.items()
                                if name.startswith("model."))
        assert min(each) > 0.4 * sum(each)
