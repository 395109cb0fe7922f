"""Commands that describe their model: throughput is modelled, then scaled to declared points."""

from __future__ import annotations

from typing import Any

from unicron.control_plane.api import requests
from unicron.control_plane.state.cluster import ClusterState
from unicron.events.records import reports as r
from unicron.events.spec.job import parse
from unicron.events.spec.model import Modelled

MODEL: dict[str, Any] = {
    "gpu": "A100-80",
    "num_layers": 24,
    "hidden": 2048,
    "num_heads": 16,
    "sequence": 2048,
    "vocabulary": 51200,
    "global_batch": 24,
}
KNOWN = Modelled(
    sizes=(1, 2, 4), rates_flops=(1e14, 1.9e14, 3.5e14), layouts=("one", "two", "four")
)


def job(model: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "unicron/v1",
        "name": "gpt",
        "slots": {"min": 1, "max": 6},
        "command": ["true"],
        "model": {**MODEL, **(model or {})},
        **more,
    }


def submitted(data: dict[str, Any]) -> r.TaskSubmitted:
    body = requests.submit(ClusterState(), parse(data), "")
    assert isinstance(body, r.TaskSubmitted)
    return body
