"""The checks of `make gpu-check` that need no GPU, on the CPU; and that the others are skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bench.recovery.rows import Row
from gpu import main, memory
from gpu.main import CHECKS, MARK, NO_CUDA, ON_CPU, run
from gpu.result import CPU
from megatron.core.tensor_parallel import random
from unicron.events.spec.model import Axes
from unicron.workers.host import linux
from unicron.workers.training.communicators.communicators import BACKEND, Communicators
from unicron.workers.training.model.random_draws import Draw

ROOT = Path(__file__).parents[3]
MAKE_S = 120.0
SLOW = (
    *("overhead", "killed", "groups", "te_layers"),
    *("devices", "usual_job", "hang", "link_cut", "connections"),
)
ABSENT = {
    "te_layers": "Transformer Engine is not installed",
    "megatron_lm": "UNICRON_MEGATRON_LM names no clone of Megatron-LM",
}
"""The checks that are not possible here, and why."""
SLEEPS = "import subprocess, sys, time; subprocess.Popen(['sleep', '600'], start_new_session=True)"


def make(*words: str, hides: str = "-1") -> subprocess.CompletedProcess[str]:
    """Run gpu-check with this Python and no visible GPU."""
    return subprocess.run(
        ["make", "-s", "gpu-check", f"PYTHON={sys.executable}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=MAKE_S,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": hides},
    )


def test_without_cuda_every_check_is_skipped_with_a_word() -> None:
    done = make()
    assert done.returncode == 0, done.stderr
    for name in CHECKS:
        assert f"{name:18}  skipped: {NO_CUDA}\n" in done.stdout
    for name in (
        "Python",
        "torch",
        "CUDA",
        "NCCL",
        "driver",
        "megatron-core",
        "Transformer Engine",
        "Apex",
    ):
        assert f"\n{name:18}  " in f"\n{done.stdout}"


def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this is no torch')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gpu.main"],
        capture_output=True,
        text=True,
        check=False,
        timeout=MAKE_S,
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}:{ROOT / 'tests' / 'drivers'}",
        },
    )
    assert done.returncode == 2
    assert "cannot load torch: ImportError: this is no torch" in done.stderr
    assert "PYTHON=/path/to/python" in done.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in SLOW)) for name in ON_CPU]
)
def test_the_same_check_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNICRON_MEGATRON_LM", raising=False)
    outcome = run(name, CPU)
    if name in ABSENT:
        assert (outcome.word, outcome.why) == ("not possible", ABSENT[name])
        return
    assert outcome.word == "ok", outcome.why
    assert {one.case for one in outcome.rows} == {name}
    assert all(one.value is not None for one in outcome.rows)


def test_what_a_check_leaves_is_killed(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SLEEPS], env={**os.environ, MARK: str(tmp_path)}
    )
    assert child.wait(30) == 0
    mark = f"{MARK}={tmp_path}".encode()

    def left() -> list[int]:
        return [
            proc.pid
            for proc in linux.table()
            if mark in linux.environ(proc.pid) and proc.state != "Z"
        ]

    assert len(left()) == 1
    main.end(child, tmp_path)
    last_s = time.monotonic() + 10
    while left():
        assert time.monotonic() < last_s
        time.sleep(0.01)


@pytest.mark.thorough
def test_a_failed_check_says_why() -> None:
    outcome = run("groups", "no-device")
    assert outcome.word == "failed"
    assert "no-device" in outcome.why
    assert outcome.rows == []


def test_the_ratio_of_memory_is_without_the_constant() -> None:
    peak = {"allocated": 3.0e9, "reserved": 3.5e9, "used": 5.0e9}
    found = {one.metric: one.value for one in memory.rows(peak, 6.0e9 + memory.RESERVED_BYTES)}
    assert found["allocated_over_predicted"] == 0.5
    assert json.loads(json.dumps(found)) == found


def test_two_ranks_on_one_gpu_may_use_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BACKEND, raising=False)
    assert Communicators("127.0.0.1", torch.device("cuda")).backend == "nccl"
    monkeypatch.setenv(BACKEND, "gloo")
    assert Communicators("127.0.0.1", torch.device("cuda")).backend == "gloo"


def test_a_gpus_generators_are_seeded_without_groups_of_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H200 the start of a `train:` task failed here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seeds = list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
        monkeypatch.setattr(random, name, getattr(random, name))  # restored at the end
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *given, **options: None)
    ours = Communicators("127.0.0.1", torch.device(CPU))
    found = list[dict[str, object]]()
    for place in range(2):
        with ours.without_peers(Axes(tp=2), place):
            Draw(7).at(3, 5)
        found.append(dict(random.get_cuda_rng_tracker().get_states()))
    assert found[0].keys() == found[1].keys()
    assert len(set(seeds)) == 6, "two of each iteration and micro-batch, two of each rank"


def test_the_rows_are_those_of_a_bench(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "gpu.main",
            "--device",
            CPU,
            "--out",
            str(out),
            "--checks",
            "optimizer_state,nvml",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=MAKE_S,
        env=main.environment(CUDA_VISIBLE_DEVICES="-1"),
    )
    rows = [Row(**one) for one in json.loads(out.read_text())]
    assert {(one.case, one.metric, one.unit) for one in rows} >= {
        ("optimizer_state", "loss_gap", "relative")
    }
    stamp = json.loads(out.with_suffix(".stamp").read_text())
    assert stamp["versions"]["torch"] == torch.__version__
    assert stamp["outcomes"]["optimizer_state"] == "ok"
    # No GPU is visible, or the library is not installed.
    assert stamp["outcomes"]["nvml"].startswith(("failed", "not possible"))
    assert done.returncode == stamp["outcomes"]["nvml"].startswith("failed")
