"""Places in a layout are a numbering: each coordinate once, replicas and holders in step."""

from __future__ import annotations

import pytest
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import (
    coordinates,
    holders,
    is_plain,
    num_positions,
    position_of,
    replica,
)

LAYOUTS = [Axes(tp=tp, pp=pp, dp=dp) for tp in (1, 2, 3) for pp in (1, 2, 4) for dp in (1, 2, 3)]


@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: f"tp{axes.tp}pp{axes.pp}dp{axes.dp}")
def test_every_place_has_coordinates_of_its_own(axes: Axes) -> None:
    found = [coordinates(axes, place) for place in range(num_positions(axes))]
    assert [position_of(axes, at) for at in found] == list(range(num_positions(axes)))
    assert len(set(found)) == axes.tp * axes.pp * axes.dp
    assert is_plain(axes) == (num_positions(axes) == axes.dp)


@pytest.mark.parametrize("axes", LAYOUTS, ids=lambda axes: f"tp{axes.tp}pp{axes.pp}dp{axes.dp}")
def test_replicas_part_the_places_and_so_do_holders(axes: Axes) -> None:
    everybody = list(range(num_positions(axes)))
    replicas = [replica(axes, dp) for dp in range(axes.dp)]
    assert sorted(place for members in replicas for place in members) == everybody
    parts = [holders(axes, tp, pp) for tp in range(axes.tp) for pp in range(axes.pp)]
    assert sorted(place for members in parts for place in members) == everybody
    assert all(len(set(members) & set(part)) == 1 for members in replicas for part in parts)


def test_the_order_is_megatrons() -> None:
    axes = Axes(tp=2, pp=2, dp=2)  # Megatron's own docstring of initialize_model_parallel
    assert [replica(axes, dp) for dp in range(2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert holders(axes, 0, 0) == (0, 2)


def test_beside_the_layout_there_are_no_coordinates() -> None:
    with pytest.raises(AssertionError, match="not a position"):
        coordinates(Axes(tp=2), 2)
