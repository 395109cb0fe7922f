"""Index caches of Megatron-LM's datasets (UNICRON_MEGATRON_LM): built once, found again."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron_trial import WORDS, clones_or_skip
from nursery import Nursery
from rank_driver import Driver
from unicron.events.spec.job import parse

NUM_RANKS = 3
LAUNCH = """
import os, sys
os.environ["UNICRON_FD"] = sys.argv.pop()
sys.argv.pop()
os.environ["UNICRON_LOOP"] = '{"micro_batches": 6, "iterations": 12, "output": ""}'
from unicron.workers.training.megatron_lm.launcher import main
main()
"""
WRITE = """
import sys, numpy
from unicron.workers.training.rank import preload
preload()
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
builder = IndexedDatasetBuilder(sys.argv[1] + ".bin", dtype=numpy.int32)
for document in range(200):
    builder.add_document(torch.arange(40) % 127, [40])
builder.finalize(sys.argv[1] + ".idx")
"""
SCRIPT = """
import os, runpy, sys, time
import numpy
save = numpy.save
def slowly(path, *given, **more):
    with open({saves!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{path}}\\n")
    time.sleep(0.3)
    save(path, *given, **more)
numpy.save = slowly
runpy.run_path({script!r}, run_name="__main__")
"""
"""Says who writes which index, and gives the other processes time to miss it."""


@pytest.fixture(params=clones_or_skip(), ids=lambda folder: folder.name)
def clone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    found: Path = request.param
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: a clone of Megatron-LM needs it")
    paths = [str(found), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return found


@pytest.mark.parametrize(
    ("has_path", "weights"),
    [(True, ()), (False, ()), (True, (0.3, 0.7))],
    ids=["--data-cache-path", "beside the data", "blended, --data-cache-path"],
)
def test_index_caches_are_built_once_and_found_at_a_restart(
    clone: Path, tmp_path: Path, nursery: Nursery, *, has_path: bool, weights: tuple[float, ...]
) -> None:
    cache, saves = tmp_path / "cache", tmp_path / "saves"
    blend: list[str] = []
    for weight in weights or ("",):
        data = tmp_path / f"text{weight}_document"
        subprocess.run([sys.executable, "-P", "-c", WRITE, str(data)], check=True)
        blend += [*filter(None, [str(weight)]), str(data)]
    script = tmp_path / "pretrain.py"
    script.write_text(SCRIPT.format(saves=str(saves), script=str(clone / "pretrain_gpt.py")))
    words = [word for word in WORDS if word != "--mock-data"]
    argv = [str(script), *words, "--data-path", *blend]
    if has_path:
        argv += ["--data-cache-path", str(cache)]

    def written(name: str) -> list[list[str]]:
        folder = tmp_path / name
        folder.mkdir()
        driver = Driver(
            parse(
                {
                    "apiVersion": "unicron/v1",
                    "name": "caches",
                    "slots": {"min": 1, "max": NUM_RANKS},
                    "command": argv,
                    "heal": "in-memory",
                    "loop": {"micro_batches": 6, "iterations": 12, "output": str(folder / "out")},
                }
            ),
            folder,
            nursery,
        )
        driver.by = [sys.executable, "-P", "-c", LAUNCH, *argv]
        try:
            driver.start(*range(NUM_RANKS))
        finally:
            driver.close()
        return [line.split() for line in saves.read_text().splitlines()]

    first = written("first")
    paths = [path for _, path in first]
    assert len(paths) == len(set(paths)) >= 3, first
    assert len({pid for pid, _ in first}) == 1, first
    assert written("again") == first
    assert cache.exists() == has_path
