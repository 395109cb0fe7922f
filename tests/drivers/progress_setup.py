"""What commands print becomes reports: read as it grows, bounded, at no cost of the command."""

from __future__ import annotations

from pathlib import Path

from unicron.events.records.orders import StartRank
from unicron.events.records.types import Slot
from unicron.events.spec.job import parse


def order(rank: int = 0, *, task: int = 7) -> StartRank:
    spec = parse({"apiVersion": "unicron/v1", "name": "gpt", "command": ["true"], "model": {
        "gpu": "A100-80", "num_layers": 2, "hidden": 64, "num_heads": 2, "sequence": 64,
        "vocabulary": 128, "global_batch": 8}})
    return StartRank(nodes=("n1",), task=task, rank=rank, attempt=1, incarnation=1,
                     slot=Slot("n1", rank), spec=spec, num_seats=2, host="x", port=1,
                     checkpoint="")


def line(iteration: int, ms: float = 200.0, batch: int = 8) -> bytes:
    return (f" iteration {iteration:8d}/     100 | elapsed time per iteration (ms): {ms:.1f} |"
            f" global batch size: {batch:5d} | lm loss: 2.5E+00 |\n").encode()


def write(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
