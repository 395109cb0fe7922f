"""Job specs for tests of the dry run."""

from __future__ import annotations

from typing import Any

Plain = dict[str, Any]


def job(name: str, weight: float, low: int, rates: list[int], *, command: bool = False) -> Plain:
    """A job spec as a user writes it. `rates`: TFLOP/s at `low` slots, then the gain per slot."""
    table = {low + at: 1e12 * sum(rates[: at + 1]) for at in range(len(rates))}
    made: Plain = {
        "apiVersion": "unicron/v1",
        "name": name,
        "weight": weight,
        "throughput": table,
        "slots": {"min": low, "max": low + len(rates)},
    }
    tier: Plain = (
        {"command": ["true"]}
        if command
        else {
            "train": {
                "iterations": 50,
                "output": f"/srv/{name}",
                "batch": {"global": 24, "micro": 2},
            }
        }
    )
    return made | tier
