"""A generation's layout, as a Reconfigure names it, in words."""

from __future__ import annotations

from typing import Any

from msgspec import convert

from ..events.model_spec import Axes
from ..events.places import briefly, in_words, num_places, speaks

Plain = dict[str, Any]


def layout(order: Plain) -> str:
    """For example `TP 2 x DP 1, 1 beside`."""
    axes = _axes(order)
    num = len(order["members"]) - num_places(axes)
    return in_words(axes) + (f", {num} beside" if num else "")


def layout_briefly(order: Plain) -> str:
    """For example `TP2xDP1 +1`."""
    axes = _axes(order)
    num = len(order["members"]) - num_places(axes)
    return briefly(axes) + (f" +{num}" if num else "")


def speakers(order: Plain) -> set[int]:
    """Ranks that tell of micro-batches: the first of each replica; the others tell the same."""
    axes = _axes(order)
    return {member["rank"] for place, member in enumerate(order["members"])
            if speaks(axes, place)}


def _axes(order: Plain) -> Axes:
    """None is data-parallel, with all of them."""
    if order.get("axes"):
        return convert(order["axes"], Axes)
    return Axes(dp=len(order["members"]))
