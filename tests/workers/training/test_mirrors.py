"""A mirrored shard is its owner's, bit by bit, after each step, while both live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loop_driver import drive_loop, flagged_example
from nursery import Nursery
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates, mirror, num_positions

ITERATIONS, MICRO_BATCHES = 4, 8
USUAL = ("bf16", "overlapped gather", "sequence parallel", "recompute")
DIGEST = """
import hashlib, json, os
from pathlib import Path
from unicron.workers.training.step.iteration import Iteration

def digests(engine):
    from unicron.workers.training.model.optimizers import parts
    own = {{
        tensor.untyped_storage().data_ptr()
        for part in parts(engine.trainee.optimizer)
        for main, state in part.state.items()
        for tensor in (main, state["exp_avg"], state["exp_avg_sq"])
    }}
    found = {{True: [], False: []}}
    for shard, tensor in sorted(engine.shards.items(), key=lambda item: item[0]):
        if shard.key.startswith(("master.", "optimizer.")):
            is_own = tensor.untyped_storage().data_ptr() in own
            found[is_own] += [repr(shard).encode(), tensor.contiguous().numpy().tobytes()]
    return [hashlib.sha256(b"".join(found[is_own])).hexdigest() for is_own in (True, False)]

run = Iteration.run

def noted(self):
    outcome = run(self)
    with Path({folder!r}, os.environ["UNICRON_RANK"]).open("a") as file:
        file.write(json.dumps(digests(self.engine)) + "\\n")
    return outcome

Iteration.run = noted
"""
AT_ONCE = """
from unicron.workers.training.model.megatron_mirrors import MirrorSends

def follow(self, works):
    for work in works:
        work.wait()
    return True

def finish(self, *given, **options):
    for part in self._late_parts(self._at - 1):
        part.add_(1.0)
    original(self, *given, **options)

MirrorSends.follow = follow
original, MirrorSends.finish = MirrorSends.finish, finish
"""
"""Shards leave during the backward, as on a GPU: there the stream waits, here the host does. Then
the replica of the mirror adds up otherwise than that of the owner, as NCCL may round otherwise."""
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], Axes]] = {
    "one reduction": (("clipping",), {}, Axes(dp=3)),
    "both overlaps": (("bf16", "overlapped gather"), {}, Axes(dp=3)),
    "fp16": (("fp16", "overlapped gather"), {}, Axes(dp=2)),
    "tensor parallel": (USUAL, {"tensor": [2]}, Axes(tp=2, dp=2)),
    "tensor parallel, at once": (USUAL, {"tensor": [2]}, Axes(tp=2, dp=2)),
    "tied embeddings": (
        ("tied embeddings", "overlapped gather"),
        {"pipeline": [2]},
        Axes(pp=2, dp=2),
    ),
    "tied embeddings, at once": (
        ("tied embeddings", "overlapped gather"),
        {"pipeline": [2]},
        Axes(pp=2, dp=2),
    ),
    "both overlaps, at once": (("bf16", "overlapped gather"), {}, Axes(dp=3)),
    "experts": (("overlapped gather",), {}, Axes(dp=2)),
    "bitwise": (("overlapped gather",), {"reproducible": "bitwise"}, Axes(dp=2)),
}
QUICK = ("tensor parallel", "tensor parallel, at once")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (case not in QUICK)) for case in CASES],
)
def test_a_mirror_is_its_owner_bit_by_bit(tmp_path: Path, nursery: Nursery, case: str) -> None:
    flags, options, axes = CASES[case]
    driver = drive_loop(
        tmp_path,
        nursery,
        ["--experts"] if case == "experts" else [],
        iterations=ITERATIONS,
        micro_batches=MICRO_BATCHES,
        script=flagged_example(tmp_path, flags),
        optimizer="mirrored",
        **options,
    )
    folder = tmp_path / "digests"
    folder.mkdir()
    at_once = AT_ONCE if case.endswith("at once") else ""
    driver.patch = DIGEST.format(folder=str(folder)) + at_once + driver.patch
    ranks = list(range(num_positions(axes)))
    try:
        driver.start(*ranks, axes=axes)
        reports = driver.form(ranks, axes=axes)
        driver.finish(ranks)
    finally:
        driver.close()
    told = [
        [json.loads(line) for line in (folder / str(rank)).read_text().splitlines()]
        for rank in ranks
    ]
    each = 12 if {"bf16", "fp16"} & {*flags} else 8
    for rank in ranks:
        owner, mirrored = told[rank], told[mirror(axes, rank)]
        assert len(owner) >= ITERATIONS
        assert [own for own, _ in owner] == [kept for _, kept in mirrored], coordinates(axes, rank)
        assert len({own for own, _ in owner}) > 1, "its shard changes"
        assert reports[rank].mirrored_bytes == each * reports[rank].mirrored_params > 0
