"""State goes from any layout to any other in memory, and nothing of it is changed on the way."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import reshard_work
import torch
import worlds
from msgspec.structs import replace
from reshard_work import TRAIN, Layout, Stop
from unicron.events.spec.model import Axes
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model import training_state

WHOLE = [Layout(Axes(dp=4)), Layout(Axes(dp=3)), Layout(Axes(tp=2)), Layout(Axes(tp=2, dp=2)),
         Layout(Axes(pp=2, dp=2)), Layout(Axes(pp=3)), Layout(Axes(tp=2, pp=2)),
         Layout(Axes(pp=2, chunks=3))]
SHARDED = [Layout(Axes(dp=2), "sharded"), Layout(Axes(dp=3), "sharded"),
           Layout(Axes(tp=2, dp=2), "sharded"), Layout(Axes(dp=4)),
           Layout(Axes(pp=2, dp=2), "sharded"), Layout(Axes(tp=2, pp=2)),
           Layout(Axes(dp=4), "sharded")]
MIRRORED = [Layout(Axes(dp=4), "mirrored"), Layout(Axes(dp=3), "mirrored"),
            Layout(Axes(tp=2, dp=2), "mirrored"), Layout(Axes(dp=3), "sharded"),
            Layout(Axes(dp=4), "mirrored")]


def all_pairs(layouts: list[Layout]) -> list[Layout]:
    """A path on which each layout follows each other one once."""
    left = {index: [other for other in range(len(layouts)) if other != index]
            for index in range(len(layouts))}
    path, stack = [], [0]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            path.append(layouts[stack.pop()])
    return path[::-1]


def stops(path: list[Layout]) -> list[Stop]:
    """Now and then the members change places, and where there are replicas, one loses its all."""
    return [(path[0], 0, ())] + [
        (layout, int(number % 3 == 0), (number % last.axes.dp * last.axes.tp,)
         if last.axes.dp > 1 and last.optimizer != "sharded" else ())
        for number, (last, layout) in enumerate(pairwise(path))]


PATH = all_pairs(WHOLE)


@pytest.mark.parametrize("path", [PATH[:len(PATH) // 2 + 1], PATH[len(PATH) // 2:]],
                         ids=["one", "other"])
def test_every_layout_takes_over_from_every_other(path: list[Layout]) -> None:
    assert len(set(pairwise(PATH))) == len(WHOLE) * (len(WHOLE) - 1)
    worlds.run(4, reshard_work.walk, TRAIN, stops(path))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shards_of_the_optimizer_do_too(precision: Any) -> None:
    worlds.run(4, reshard_work.walk, replace(TRAIN, precision=precision), stops(SHARDED))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mirror_is_its_owner_bit_by_bit(precision: Any) -> None:
    worlds.run(4, reshard_work.walk, replace(TRAIN, precision=precision),
               stops(MIRRORED))


def test_a_gated_unit_keeps_its_halves_apart() -> None:
    path = [Layout(Axes()), Layout(Axes(tp=2)), Layout(Axes(pp=2)), Layout(Axes(tp=2), "sharded"),
            Layout(Axes(dp=2), "sharded")]
    worlds.run(2, reshard_work.gated, TRAIN, stops(path))


def test_the_whole_state_comes_to_one_member_and_goes_back(alone: Any) -> None:
    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    for keys in worlds.run(4, reshard_work.gather, TRAIN, Layout(Axes(tp=2, pp=2)))[:1]:
        assert keys == sorted(training_state.tensors(trainee))


@pytest.mark.parametrize(("layout", "lost", "gone", "there"), [
    (Layout(Axes(tp=2)), 1, "model.decoder.layers.0.mlp.linear_fc1.weight",
     "model.decoder.layers.0.input_layernorm.weight"),
    (Layout(Axes(pp=2)), 0, "model.decoder.layers.2.mlp.linear_fc1.weight",
     "model.embedding.word_embeddings.weight"),
    (Layout(Axes(dp=2), "sharded"), 1, "optimizer.exp_avg.embedding.word_embeddings.weight",
     "model.embedding.word_embeddings.weight"),
], ids=["tp", "pp", "sharded"])
def test_what_is_lost_is_named(layout: Layout, lost: int, gone: str, there: str) -> None:
    told = worlds.run(2, reshard_work.lose, TRAIN, layout, lost)
    assert told[0] == told[1]
    assert gone in told[0]
    assert there not in told[0]


@pytest.mark.parametrize(("what", "why"), [
    ("checksum", "wrong checksum"),
    ("step", "it is of step 0, not 1"),
    ("layout", "its model.embedding.word_embeddings.weight is float32 256x16x1, not "
               "float32 256x16"),
])
def test_what_is_refused_comes_from_the_next(what: str, why: str) -> None:
    told = worlds.run(4, reshard_work.refuse, TRAIN, what)
    assert set(told[3][0]) == {1, 2}, "the newcomer took nothing from the first"
    assert all(logged == {why} for _, logged in told)


def test_a_giver_that_dies_changes_nothing() -> None:
    worlds.run(2, reshard_work.die, TRAIN)
