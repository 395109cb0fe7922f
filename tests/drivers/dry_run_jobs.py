"""A dry run is what the heart then decides, and an operator's write may be held to its input."""

from __future__ import annotations

from typing import Any

Plain = dict[str, Any]


def job(name: str, weight: float, low: int, rates: list[int], *, command: bool = False) -> Plain:
    """A job spec as a user writes it: from `low` slots on, each size earns so much more."""
    table = {low + at: 1e12 * sum(rates[:at + 1]) for at in range(len(rates))}
    made: Plain = {"apiVersion": "unicron/v1", "name": name, "weight": weight, "throughput": table,
                   "slots": {"min": low, "max": low + len(rates)}}
    tier: Plain = {"command": ["true"]} if command else {"train": {
        "iterations": 50, "output": f"/srv/{name}", "batch": {"global": 24, "micro": 2}}}
    return made | tier
