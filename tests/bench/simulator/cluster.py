"""The clusters of `make bench-sim`: nodes of 8 GPUs, with the fault rate of Llama 3."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

POLICIES = ("unicron", "shrink", "spares", "requeue", "megatron")
GPUS_PER_NODE = 8
MTBF_GPU_H = 50_678.4
"""54 days x 16,384 GPUs / 419 unexpected interruptions (Llama 3, arXiv 2407.21783, table 5)."""
DAY_S = 86400.0
SEED = 7


class Case(NamedTuple):
    """Number of GPUs, number of tasks, duration."""

    num_gpus: int
    num_tasks: int
    days: float


CASES = {
    "128": Case(128, 4, 365.0),
    "1280": Case(1280, 20, 365.0),
    "10000": Case(10_000, 60, 365.0),
    "100000": Case(100_000, 60, 14.0),
}


def scenario(name: str, policies: Sequence[str]) -> dict[str, Any]:
    """A scenario as in a file. A task's maximum is 0.4 to 2 times its fair share, its minimum a
    quarter of that. Throughput is 4e14 FLOP/s times the number of GPUs to the power 0.95."""
    case, random = CASES[name], Random(SEED)
    fair = case.num_gpus / case.num_tasks / GPUS_PER_NODE
    return {
        "apiVersion": "unicron/v1",
        "name": f"{name} GPUs",
        "cluster": {"nodes": case.num_gpus // GPUS_PER_NODE, "slots": GPUS_PER_NODE},
        "tasks": [
            _task(
                number,
                max(round(random.uniform(0.4, 2.0) * fair), 2),
                random.choice([0.5, 1.0, 2.0]),
            )
            for number in range(case.num_tasks)
        ],
        "policies": {policy: {} for policy in policies},
        "horizon_s": case.days * DAY_S,
        "trace": {
            "drawn": {
                "seed": SEED,
                "mtbf_gpu_h": MTBF_GPU_H,
                "causes": "llama3",
                "repair": "superbench",
            }
        },
    }


def _task(number: int, most: int, weight: float) -> dict[str, Any]:
    """A task on at most `most` nodes."""
    sizes = [GPUS_PER_NODE * nodes for nodes in range(max(most // 4, 2), most + 1)]
    return {
        "name": f"t{number}",
        "weight": weight,
        "slots": {"min": sizes[0], "max": sizes[-1], "multiple_of": GPUS_PER_NODE},
        "throughput": {size: 4e14 * size**0.95 for size in sizes},
    }
