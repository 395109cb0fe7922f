"""A generation's layout, as a Reconfigure names it, in words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec import convert

from ..events.model_spec import Axes
from ..events.parallel import Kept
from ..events.places import briefly, in_words, lacking, num_places, part_in_words, speaks
from .figures import ranks

Plain = dict[str, Any]
PARTS_NUM_MAX = 3
"""Lost parts of the state that are named."""


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


def optimizer_of(spec: Plain) -> Kept:
    """What a job spec says of it, normalised as it is in the log."""
    training: Plain = spec.get("train") or spec.get("loop") or {}
    kept: Kept = training.get("parallel", {}).get("optimizer", "whole")
    return kept


def lost_in_words(order: Plain, optimizer: Kept, alive: Collection[tuple[int, int]]) -> str:
    """What of the state was lost with the others of a generation; `alive`: rank and attempt."""
    axes, members = _axes(order), order["members"]
    there = [place for place, member in enumerate(members[:num_places(axes)])
             if (member["rank"], member["attempt"]) in alive]
    told: list[str] = []
    for places in lacking(axes, optimizer, there):
        part = part_in_words(axes, places[0], sharded=optimizer != "whole")
        if not part:
            return ""  # all had all of it, and all are gone
        held = ranks(sorted({members[place]["rank"] for place in places}))
        told.append(f"{part} (only {held} had it)")
    more = f" and {len(told) - PARTS_NUM_MAX} parts more" if len(told) > PARTS_NUM_MAX else ""
    return "; ".join(told[:PARTS_NUM_MAX]) + more


def _axes(order: Plain) -> Axes:
    """None is data-parallel, with all of them."""
    if order.get("axes"):
        return convert(order["axes"], Axes)
    return Axes(dp=len(order["members"]))
