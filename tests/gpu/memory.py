"""The memory of a training rank on the GPU, beside what the memory model predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rank_driver
from bench.recovery.rows import Row
from gpu.result import of
from nursery import Nursery
from rank_driver import Driver, small_spec
from unicron.control_plane.throughput.memory import RESERVED_BYTES
from unicron.control_plane.throughput.training_layouts import memory_on
from unicron.events.spec.model import Axes

WAIT_S_MAX = 300.0
TRAIN: dict[str, Any] = {
    "model": {"num_layers": 24, "hidden": 1024, "num_heads": 16, "sequence": 1024},
    "batch": {"global": 16, "micro": 4},
    "iterations": 4,
    "precision": "bf16",
}
"""303 million parameters; 4,096 tokens in a micro-batch."""
PEAK = """
import json, torch
from unicron.workers.training.member import Member
finish = Member._finish
def told(self):
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    open({file!r}, "w").write(json.dumps({{
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "used": total_bytes - free_bytes}}))
    finish(self)
Member._finish = told
"""
"""Writes the peaks of a rank at its end."""


def check(folder: Path, device: str) -> list[Row]:
    """Train one rank to its end, and compare its peak."""
    nursery = Nursery(folder / "zygote.log")
    rank_driver.WAIT_S = WAIT_S_MAX
    file = folder / "peak.json"
    driver = Driver(small_spec(folder / "out", **TRAIN), folder, nursery)
    driver.patch = PEAK.format(file=str(file))
    try:
        driver.start(0)
        driver.form([0])
        driver.finish([0])
    finally:
        driver.close()
        nursery.close()
    peak: dict[str, float] = json.loads(file.read_text())
    assert driver.spec.train is not None
    model = memory_on(driver.spec.train, Axes())
    assert model is not None
    return rows(peak, model.total + RESERVED_BYTES)


def rows(peak: dict[str, float], predicted_bytes: float) -> list[Row]:
    """The peaks, and their ratio to the prediction, which counts `reserved` and what is outside of
    torch's allocator as RESERVED_BYTES."""
    tensors_bytes = predicted_bytes - RESERVED_BYTES
    return [
        of("memory", "allocated_bytes", [peak["allocated"]], "bytes"),
        of("memory", "reserved_bytes", [peak["reserved"]], "bytes"),
        of("memory", "used_bytes", [peak["used"]], "bytes", "of the whole GPU, at the end"),
        of("memory", "predicted_bytes", [predicted_bytes], "bytes"),
        of(
            "memory",
            "allocated_over_predicted",
            [peak["allocated"] / tensors_bytes],
            "ratio",
            "without the constant for CUDA, NCCL and libraries",
        ),
        of("memory", "used_over_predicted", [peak["used"] / predicted_bytes], "ratio"),
    ]
