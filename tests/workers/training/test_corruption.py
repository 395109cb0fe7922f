"""Digests of the state, and silent data corruption: a flipped bit is found and healed."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import reference
import torch
from rank_driver import Drive, Driver
from unicron.events.records import reports as r
from unicron.events.spec.model import Axes

EVERY, STRUCK = 2, 4
CHECKED: dict[str, Any] = {
    "iterations": 7, "reproducible": "bitwise", "digest_every": EVERY,
    "model": {"num_layers": 2, "hidden": 32, "num_heads": 4, "sequence": 32}}
DUE = [2, 4, 6, 7]
"""The iterations with a digest: every second one, and the end."""
FLIPS = """
from unicron.workers.training.step import iteration, corruption
right = iteration.Iteration.{method}
num = 0
def flipping(self, *args, **options):
    global num
    found = right(self, *args, **options) if {after} else None
    if self.step_version == {at} and num < {times}:
        num += 1
        trainee = self.trainee
        flip({where})
    return found if {after} else right(self, *args, **options)
def flip(tensor):
    import torch
    bits = tensor.reshape(-1)[-1:].view({{4: torch.int32, 8: torch.int64}}[tensor.element_size()])
    bits.bitwise_xor_(1 << 20)
iteration.Iteration.{method} = flipping
"""
PARAMETER = "[value for key, value in trainee.shards.items() if 'model.' in key.key][3]"
MOMENT = "[value for key, value in trainee.shards.items() if 'exp_avg_sq.' in key.key][3]"


def digests(driver: Driver) -> dict[int, str]:
    return {at: digest for told in driver.told(r.TaskProgressed)
            for at, digest in told.digests.items()}


def trained(drive: Drive, axes: Axes, **changes: Any) -> tuple[dict[int, str], dict[str, Any]]:
    driver = drive(**CHECKED | changes)
    ranks = list(range(axes.dp * axes.pp * axes.tp))
    driver.start(*ranks, axes=axes)
    driver.form(ranks, axes=axes)
    driver.finish(ranks)
    return digests(driver), reference.read(driver.final_checkpoint())


def test_x(drive):
    one = trained(drive, Axes(dp=3))
    print(one[0])
    assert list(one[0]) == DUE
    assert one[0] == trained(drive, Axes())[0]
    assert one[0] == trained(drive, Axes(pp=2), parallel={"pipeline": [1,2]})[0]
