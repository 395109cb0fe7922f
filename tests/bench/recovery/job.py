"""The job that every system trains: one small GPT, one text, one batch, one time of the fault."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_RANKS = 4
NUM_MICRO_BATCHES = 24
ROWS_NUM = 1
"""Sequences of one micro-batch of the 1M model; the other models have 1."""
ITERATIONS_NUM = 100_000
"""More than any run needs: the bench ends the task after the measurement."""
SAVE_EVERY_NUM = 6
"""Iterations between two checkpoints, for systems that recover from a checkpoint."""
STRUCK_NUM = 3
"""The fault strikes this iteration after a checkpoint."""
VICTIM_NUM = 2
"""The rank that the fault strikes. Not rank 0, which may host a store."""
COLLECTIVE_S_MAX = 2.0
"""Collective timeout of the peers; equal to Unicron's limit for a stopped rank."""
BUILD_S_MAX = 30.0
"""Timeout for building a group: the processes do not start at the same time."""
SIZES = {
    "1M": (5, 128, 4, 128),
    "10M": (13, 256, 8, 64),
    "100M": (32, 512, 8, 16),
    "1M_even": (6, 128, 4, 128),
}
"""Layers, hidden, heads and sequence of the models. 1M_even is for pipelines of 2 and 3 stages."""
Spec = dict[str, Any]
Parallel = Mapping[str, Any]
"""A spec's `train.parallel`."""


def spec(
    name: str,
    output: Path,
    *,
    num_ranks: int = NUM_RANKS,
    size: str = "1M",
    copy_every: int | None = None,
    parallel: Parallel | None = None,
) -> Spec:
    """The job spec for Unicron; the peers build the same model from it."""
    num_layers, hidden, num_heads, sequence = SIZES[size]
    more = {"copy_every": copy_every, "parallel": parallel}
    rows = ROWS_NUM if size == "1M" else 1
    return {
        "apiVersion": "unicron/v1",
        "name": name,
        "slots": {"min": 1, "max": num_ranks},
        "train": {
            "model": {
                "num_layers": num_layers,
                "hidden": hidden,
                "num_heads": num_heads,
                "sequence": sequence,
            },
            "batch": {"global": NUM_MICRO_BATCHES * rows, "micro": rows},
            "optimizer": {"lr": 1e-3, "min_lr": 1e-3, "decay": "constant"},
            "iterations": ITERATIONS_NUM,
            "seed": 7,
            "output": str(output),
            **{key: value for key, value in more.items() if value is not None},
        },
    }
