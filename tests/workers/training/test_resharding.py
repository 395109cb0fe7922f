"""Resharding: each shard is moved once, from the nearest holder, between any two layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import reshard_work
import torch
import worlds
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from reshard_work import TRAIN, Layout, Stop
from unicron.events.spec.model import Axes
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model import training_state
from unicron.workers.training.recovery.resharding import (
    SENDERS_NUM_MAX,
    Holding,
    Missing,
    Move,
    Region,
    Shard,
    ShardList,
    flat_range,
    intersection,
    nearest_first,
    parts,
    plan_moves,
    without,
)

SHAPES = {"a": (5, 4), "b": (3, 2, 3), "c": (7,), "d": ()}
LARGEST = 5
NODES = ("red", "", "red", "", "red")
WHOLE = [
    Layout(Axes(dp=4)),
    Layout(Axes(dp=3)),
    Layout(Axes(tp=2)),
    Layout(Axes(tp=2, dp=2)),
    Layout(Axes(pp=2, dp=2)),
    Layout(Axes(pp=3)),
    Layout(Axes(tp=2, pp=2)),
    Layout(Axes(pp=2, chunks=3)),
]
SHARDED = [
    Layout(Axes(dp=2), "sharded"),
    Layout(Axes(dp=3), "sharded"),
    Layout(Axes(tp=2, dp=2), "sharded"),
    Layout(Axes(dp=4)),
    Layout(Axes(pp=2, dp=2), "sharded"),
    Layout(Axes(tp=2, pp=2)),
    Layout(Axes(dp=4), "sharded"),
]
MIRRORED = [
    Layout(Axes(dp=4), "mirrored"),
    Layout(Axes(dp=3), "mirrored"),
    Layout(Axes(tp=2, dp=2), "mirrored"),
    Layout(Axes(dp=3), "sharded"),
    Layout(Axes(dp=4), "mirrored"),
]


def piece(key: str, box: Region) -> Shard:
    return Shard(key, f"float32 {SHAPES[key]}", box)


def elements(shape: tuple[int, ...], box: Region) -> set[int]:
    """The flat indices of a box, by brute force."""
    inside = tuple(slice(begin, begin + size) for begin, size in zip(*box, strict=True))
    return set(np.arange(np.prod(shape, dtype=int)).reshape(shape)[inside].ravel().tolist())


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Region(
        offset,
        tuple(
            draw(st.integers(1, size - begin)) for size, begin in zip(shape, offset, strict=True)
        ),
    )


@st.composite
def pieces(draw: st.DrawFn) -> list[Shard]:
    """Arbitrary shards: whole tensors, blocks and flat ranges, some overlapping or repeated."""
    found: list[Shard] = []
    for key in draw(st.lists(st.sampled_from(sorted(SHAPES)), max_size=4)):
        shape = SHAPES[key]
        size = int(np.prod(shape, dtype=int))
        match draw(st.sampled_from(["whole", "block", "flat"])):
            case "whole":
                found.append(piece(key, Region(tuple(0 for _ in shape), shape)))
            case "block":
                found.append(piece(key, draw(boxes(shape))))
            case _:
                begin = draw(st.integers(0, size))
                found += [
                    piece(key, box)
                    for box in flat_range(shape, begin, draw(st.integers(begin, size)))
                ]
    return found


def by_element(have: Sequence[Sequence[Shard]]) -> dict[tuple[str, int], set[int]]:
    """The holders of each element, by brute force."""
    found: dict[tuple[str, int], set[int]] = {}
    for place, mine in enumerate(have):
        for key, _, box in mine:
            for element in elements(SHAPES[key], box):
                found.setdefault((key, element), set()).add(place)
    return found


def distance(source: int, target: int) -> int:
    return 0 if source == target else 1 if NODES[source] == NODES[target] == "red" else 2


def plan(
    target: int,
    have: Sequence[Sequence[Shard]],
    want: Sequence[Shard],
    nodes: Sequence[str] = NODES,
    largest: int = LARGEST,
    turn: int = 0,
) -> list[Move]:
    """The plan of one receiver, which reads the lists of the holders as needed."""
    lists = [ShardList(shards) for shards in have]
    by_digest = {each.digest: each for each in lists}
    order = nearest_first(target, {place: each.digest for place, each in enumerate(lists)}, nodes)
    return plan_moves(
        target,
        ShardList(want),
        (Holding(by_digest[digest], places) for digest, places in order),
        largest,
        turn,
    )


@given(st.lists(pieces(), min_size=5, max_size=5), st.integers(0, 4), pieces(), st.integers(0, 3))
@settings(max_examples=500, deadline=None)
def test_each_wanted_element_comes_once_from_the_nearest_holder(
    have: list[list[Shard]], target: int, want: list[Shard], turn: int
) -> None:
    have[4] = have[1]
    holders = by_element(have)
    lost = {
        key
        for key, _, box in want
        for element in elements(SHAPES[key], box)
        if (key, element) not in holders
    }
    if lost:
        with pytest.raises(Missing) as raised:
            plan(target, have, want, turn=turn)
        assert set(raised.value.keys) == lost
        return
    came: dict[int, list[int]] = {}
    for move in plan(target, have, want, turn=turn):
        wanted, held = want[move.wanted], have[move.source][move.given]
        assert wanted.key == held.key
        assert move.source == target or move.region.num_elements <= LARGEST
        assert intersection(wanted.region, move.region) == move.region
        assert intersection(held.region, move.region) == move.region
        for element in elements(SHAPES[wanted.key], move.region):
            near = min(distance(place, target) for place in holders[wanted.key, element])
            assert distance(move.source, target) == near
            came.setdefault(move.wanted, []).append(element)
    for index, (key, _, box) in enumerate(want):
        assert sorted(came.get(index, [])) == sorted(elements(SHAPES[key], box))


@given(pieces())
def test_a_list_of_shards_is_the_same_for_its_reader(mine: list[Shard]) -> None:
    held = ShardList(mine)
    read = ShardList.decode(held.encoded)
    assert (read.shards, read.digest) == (held.shards, held.digest)
    assert ShardList([*mine, whole("a")]).digest != held.digest
    with pytest.raises(ValueError, match="cannot be decoded"):
        ShardList.decode(held.encoded[:-3])


@given(st.sampled_from(sorted(SHAPES.values())), st.data())
@settings(max_examples=300, deadline=None)
def test_a_flat_range_is_few_contiguous_boxes_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = int(np.prod(shape, dtype=int))
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    found = flat_range(shape, begin, end)
    assert [element for box in found for element in sorted(elements(shape, box))] == list(
        range(begin, end)
    )
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(boxes((4, 5, 3)), boxes((4, 5, 3)))
def test_intersection_and_remainder_make_the_whole(whole: Region, other: Region) -> None:
    part = intersection(whole, other)
    mine, theirs = elements((4, 5, 3), whole), elements((4, 5, 3), other)
    assert (part is None) == (not mine & theirs)
    if part is not None:
        rest = [elements((4, 5, 3), box) for box in without(whole, part)]
        assert elements((4, 5, 3), part) == mine & theirs
        assert sum(map(len, rest)) == len(mine - theirs)
        assert set().union(*rest) == mine - theirs


@given(boxes((4, 5, 3)), st.integers(1, 60))
def test_a_large_box_is_split_into_parts_of_bounded_size(whole: Region, largest: int) -> None:
    found = [elements((4, 5, 3), part) for part in parts(whole, largest)]
    assert [element for part in found for element in sorted(part)] == sorted(
        elements((4, 5, 3), whole)
    )
    assert max(map(len, found)) <= largest
    assert len(found) <= 5 * -(-whole.num_elements // largest)


def test_a_large_tensor_comes_from_all_its_holders() -> None:
    large = Shard("large", "float32 (300,)", Region((0,), (300,)))
    assert given_by(plan(3, [[large], [large], [large], []], [large], ["a"] * 4, 10)) == sorted(
        [0, 1, 2] * 10
    )


def whole(key: str) -> Shard:
    return piece(key, Region(tuple(0 for _ in SHAPES[key]), SHAPES[key]))


def given_by(moves: list[Move]) -> list[int]:
    return sorted(move.source for move in moves)


def test_equally_near_holders_give_equal_amounts() -> None:
    replica = [Shard(f"layer{index}", "float32 (8,)", Region((0,), (8,))) for index in range(30)]
    moves = plan(3, [replica, replica, replica, []], replica, ["a"] * 4, 100)
    assert given_by(moves) == sorted([0, 1, 2] * 10)


def test_receivers_take_turns_at_many_holders() -> None:
    replica = [Shard(f"layer{index}", "float32 (8,)", Region((0,), (8,))) for index in range(16)]
    num = 3 * SENDERS_NUM_MAX
    given_in_all = [
        source
        for turn in range(3)
        for source in given_by(
            plan(num, [replica] * num + [[]], replica, [""] * (num + 1), 100, turn)
        )
    ]
    assert sorted(given_in_all) == sorted([*range(num)] * 2)


def test_a_member_keeps_what_it_has() -> None:
    large, small = whole("a"), whole("c")
    moves = plan(0, [[small], [large, small]], [large, small], ["a"] * 2, 100)
    assert [(move.source, move.wanted) for move in moves] == [(0, 1), (1, 0)]


def test_a_member_reads_no_more_lists_than_it_needs() -> None:
    def lists() -> Iterator[Holding]:
        yield Holding(ShardList([whole("a"), whole("c")]), [1])
        raise AssertionError("one list was enough")

    assert len(plan_moves(0, ShardList([whole("a")]), lists(), 100)) == 1


def test_a_shard_of_another_dtype_is_another_tensor() -> None:
    other = whole("a")._replace(kind="bfloat16 (5, 4)")
    with pytest.raises(Missing, match=r"no holder is left of a$"):
        plan(1, [[other], []], [whole("a")], ["a", "b"])


def test_lost_tensors_are_named_in_the_error() -> None:
    with pytest.raises(Missing, match="left of a, b, c and 1 more"):
        plan(0, [[]], [whole(key) for key in "dcba"], ["a"])


# --- real members, layout after layout -----------------------------------------------------------
def all_pairs(layouts: list[Layout]) -> list[Layout]:
    """A path in which each layout follows every other layout exactly once."""
    left = {
        index: [other for other in range(len(layouts)) if other != index]
        for index in range(len(layouts))
    }
    path, stack = [], [0]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            path.append(layouts[stack.pop()])
    return path[::-1]


def stops(path: list[Layout]) -> list[Stop]:
    """The stops of a path. Some stops reorder the members, and a replica may lose its state."""
    return [(path[0], 0, ())] + [
        (
            layout,
            int(number % 3 == 0),
            (number % last.axes.dp * last.axes.tp,)
            if last.axes.dp > 1 and last.optimizer != "sharded"
            else (),
        )
        for number, (last, layout) in enumerate(pairwise(path))
    ]


PATH = all_pairs(WHOLE)


@pytest.mark.parametrize(
    "path",
    [PATH[: len(PATH) // 2 + 1], pytest.param(PATH[len(PATH) // 2 :], marks=pytest.mark.thorough)],
    ids=["first half", "second half"],
)
@pytest.mark.thorough
def test_every_layout_takes_over_from_every_other(path: list[Layout]) -> None:
    assert len(set(pairwise(PATH))) == len(WHOLE) * (len(WHOLE) - 1)
    worlds.run(4, reshard_work.walk, TRAIN, stops(path))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.thorough)])
def test_optimizer_shards_move_between_layouts(precision: Any) -> None:
    worlds.run(4, reshard_work.walk, replace(TRAIN, precision=precision), stops(SHARDED))


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.thorough), "bf16"])
def test_a_mirror_equals_its_owner_bit_by_bit(precision: Any) -> None:
    worlds.run(4, reshard_work.walk, replace(TRAIN, precision=precision), stops(MIRRORED))


def test_a_gated_linear_unit_keeps_its_halves_apart() -> None:
    path = [
        Layout(Axes()),
        Layout(Axes(tp=2)),
        Layout(Axes(pp=2)),
        Layout(Axes(tp=2), "sharded"),
        Layout(Axes(dp=2), "sharded"),
    ]
    worlds.run(2, reshard_work.gated, TRAIN, stops(path))


def test_the_whole_state_comes_to_one_member_and_goes_back(alone: Any) -> None:
    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    for keys in worlds.run(4, reshard_work.gather, TRAIN, Layout(Axes(tp=2, pp=2)))[:1]:
        assert keys == sorted(training_state.tensors(trainee))


@pytest.mark.parametrize(
    ("layout", "lost", "gone", "there"),
    [
        (
            Layout(Axes(tp=2)),
            1,
            "model.decoder.layers.0.mlp.linear_fc1.weight",
            "model.decoder.layers.0.input_layernorm.weight",
        ),
        (
            Layout(Axes(pp=2)),
            0,
            "model.decoder.layers.2.mlp.linear_fc1.weight",
            "model.embedding.word_embeddings.weight",
        ),
        (
            Layout(Axes(dp=2), "sharded"),
            1,
            "optimizer.exp_avg.embedding.word_embeddings.weight",
            "model.embedding.word_embeddings.weight",
        ),
    ],
    ids=["tp", "pp", "sharded"],
)
def test_tensors_lost_with_a_rank_are_named(
    layout: Layout, lost: int, gone: str, there: str
) -> None:
    results = worlds.run(2, reshard_work.lose, TRAIN, layout, lost)
    assert results[0] == results[1]
    assert gone in results[0]
    assert there not in results[0]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("checksum", "wrong checksum"),
        ("step", "it is of step 0, not 1"),
        (
            "layout",
            "its model.embedding.word_embeddings.weight is float32 256x16x1, not float32 256x16",
        ),
    ],
)
def test_a_refused_source_is_replaced_by_the_next(what: str, why: str) -> None:
    results = worlds.run(4, reshard_work.refuse, TRAIN, what)
    assert set(results[3][0]) == {1, 2}, "the first source was refused"
    assert all(logged == {why} for _, logged in results)


def test_a_giver_that_dies_changes_nothing() -> None:
    worlds.run(2, reshard_work.die, TRAIN)
