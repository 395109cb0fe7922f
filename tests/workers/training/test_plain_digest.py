"""A final checkpoint, read by torch alone, has the state and the digest that ranks have told."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import step_trace
import torch
import torch.distributed.checkpoint as dcp
from rank_driver import Drive
from unicron.events.records import reports as r
from unicron.events.spec.model import Axes

TINY: dict[str, Any] = {
    "iterations": 3,
    "reproducible": "bitwise",
    "digest_every": 1,
    "model": {"num_layers": 2, "hidden": 8, "num_heads": 2, "sequence": 8},
}
SPREAD, MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
"""The constants of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
WORD = 1 << 64
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int32: "int32"}
BITS = {4: torch.int32, 2: torch.int16}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by torch's own reader."""
    reader = dcp.FileSystemReader(folder)
    described = reader.read_metadata().state_dict_metadata
    found = {
        key: torch.empty(tuple(of.size), dtype=of.properties.dtype)
        for key, of in described.items()
        if hasattr(of, "size")
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def weight(place: int, dim: int, salt: int) -> int:
    """The odd factor of a place in one dimension, as model/digest.py describes it."""
    mixed = ((place + (dim << 48)) * SPREAD + salt) % WORD
    high = mixed >> 32
    if mixed >> 63:  # of a signed number, the sign is shifted in
        high |= 0xFFFFFFFF << 32
    return ((mixed ^ high) * MIX % WORD) | 1


def digest(key: str, tensor: torch.Tensor) -> int:
    """The digest of one tensor in plain integers."""
    shape = tuple(tensor.shape)
    name = f"{key} {DTYPES[tensor.dtype]} {'x'.join(map(str, shape))}"
    salt = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
    factors = [[weight(at, dim, salt) for at in range(size)] for dim, size in enumerate(shape)]
    total = 0
    elements = tensor.view(BITS[tensor.element_size()]).view(-1).tolist()
    for element, of in zip(elements, product(*factors), strict=True):
        for factor in of:
            element = element * factor % WORD
        total += element
    return total * (salt | 1) % WORD


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("axes", [Axes(dp=2), Axes(pp=2)], ids=["dp2", "pp2"])
def test_the_state_is_what_torch_reads(drive: Drive, precision: str, axes: Axes) -> None:
    driver = drive(**TINY, precision=precision, parallel={"pipeline": [1, 2]})
    step_trace.install(driver.trace_dir)
    driver.start(0, 1, axes=axes)
    driver.form([0, 1], axes=axes)
    driver.finish([0, 1])
    found = read(driver.final_checkpoint())
    last = step_trace.steps(driver.trace_dir)[-1].of
    kinds = {"exp_avg": "optimizer.exp_avg.", "exp_avg_sq": "optimizer.exp_avg_sq."}
    kinds["value"] = "model." if precision == "fp32" else "master."
    for kind, prefix in kinds.items():
        for name, tensor in last[kind].items():
            assert found[f"{prefix}{name}"].equal(tensor), f"{prefix}{name}"
    told = {
        at: digest_ for one in driver.told(r.TaskProgressed) for at, digest_ in one.digests.items()
    }
    total = sum(digest(key, tensor) for key, tensor in found.items()) % WORD
    assert told[TINY["iterations"]] == f"{total:016x}"
