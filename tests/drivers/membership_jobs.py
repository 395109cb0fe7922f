"""Job specs with layouts, for tests of membership."""

from __future__ import annotations

from typing import Any

from decider import spec
from unicron.events.spec.job import JobSpec


def job(
    slots: dict[str, Any] | None = None, *, num_layers: int = 12, batch: int = 24, **parallel: Any
) -> JobSpec:
    """A training task with layouts."""
    return spec(
        slots=slots or {"min": 1, "max": 4},
        train={
            "iterations": 50,
            "output": "/tmp/out",
            "batch": {"global": batch, "micro": 1},
            "model": {"num_layers": num_layers},
            "parallel": parallel,
        },
    )
