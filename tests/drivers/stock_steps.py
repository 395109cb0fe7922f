"""A `train:` task under Megatron's own loop, in one process: each of its steps, as step_trace has
them. Its sum, norm and step are Megatron's and torch's; nothing of the product adds up a gradient.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import step_trace
from nursery import PATCH, Nursery
from reference import train_undisturbed
from unicron.events.spec.job import JobSpec, parse

STOCK_S = 120.0
TRAIN = """
import os, sys
from unicron.workers.host import linux
sys.path.insert(0, drivers)
linux.die_with(os.getppid())
from stock_steps import train
train(spec, folder, sgd_rate)
sys.exit()
"""


def run(nursery: Nursery, spec: JobSpec, folder: Path, sgd_rate: float = 0.0) -> list[Any]:
    """Train `spec` by rounded sums; its steps. With `sgd_rate` Megatron's SGD takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    asked = (
        f"spec, folder, sgd_rate = {msgspec.json.encode(spec)!r}, {str(folder)!r}, {sgd_rate}\n"
        f"drivers = {str(Path(__file__).parent)!r}{TRAIN}"
    )
    with log.open("wb") as output, open(os.devnull, "rb") as nothing:
        process = nursery.fork(
            {**os.environ, "OMP_NUM_THREADS": "1", "UNICRON_RANK": "stock", PATCH: asked},
            output.fileno(),
            nothing.fileno(),
        )
    try:
        assert process.wait(STOCK_S) == 0, log.read_text()
    finally:
        process.kill()
    return step_trace.steps(folder)


def train(encoded: bytes, folder: str, sgd_rate: float) -> None:
    """In the process of its own: train, and record each step in `folder`."""
    spec = parse(json.loads(encoded))
    assert spec.train is not None
    assert spec.train.reproducible == "rounding"

    def watch(trainee: Any) -> None:
        if sgd_rate:
            # The state and the schedule of Adam stay, unused: a checkpoint has them.
            trainee.optimizer.step = _sgd(trainee.ddps, sgd_rate).step
        step_trace.record(trainee, Path(folder, "steps-0"))

    train_undisturbed(spec.train, Path(folder, "state"), watch=watch)


def _sgd(ddps: list[Any], rate: float) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="sgd", lr=rate, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0
    )
    return get_megatron_optimizer(config, ddps, use_gloo_process_groups=False)
