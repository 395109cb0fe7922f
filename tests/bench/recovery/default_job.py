"""The case megatron_default_sigkill: a loop with the usual flags of a Megatron job.

Distributed optimizer, both overlaps, bf16 with fp32 masters, TP 2 x DP 2. The loop is the example
with those flags and a model of about the size of the other cases.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.recovery.job import ITERATIONS_NUM, NUM_MICRO_BATCHES, Parallel, Spec
from loop_driver import FLAGS, changed_example

CASE = "megatron_default_sigkill"
LAYOUT: Parallel = {"tensor": [2], "optimizer": "sharded"}
_CHANGES = [
    ("5, 4\n", "10**9, 4\n"),  # no evaluation
    (
        "VOCABULARY, SEQUENCE, ROWS, SAMPLES = 64, 16, 2",
        "VOCABULARY, SEQUENCE, ROWS, SAMPLES = 256, 128, 1",
    ),
    ("num_layers=4", "num_layers=5"),
    ("hidden_size=32", "hidden_size=128"),
    *FLAGS["bf16"],
    *FLAGS["overlapped gather"],
]


def loop_spec(
    folder: Path, *, num_ranks: int, copy_every: int | None, parallel: Parallel | None
) -> Spec:
    """The job spec of the loop, whose script is written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    script = changed_example(folder, _CHANGES)
    more: dict[str, Any] = {} if copy_every is None else {"copy_every": copy_every}
    return {
        "apiVersion": "unicron/v1",
        "name": "bench",
        "slots": {"min": 1, "max": num_ranks},
        "command": [
            sys.executable,
            str(script),
            "--sharded",
            *("--iterations", str(ITERATIONS_NUM)),
            *("--micro-batches", str(NUM_MICRO_BATCHES)),
        ],
        "heal": "in-memory",
        "loop": {
            "micro_batches": NUM_MICRO_BATCHES,
            "iterations": ITERATIONS_NUM,
            "output": str(folder / "out"),
            "parallel": dict(parallel or {}),
            **more,
        },
    }
