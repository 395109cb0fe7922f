"""The patch for Megatron-LM's pretrain_gpt.py, on a stand-in for it: it applies, and heals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_cluster import RealCluster

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "deploy" / "megatron" / "pretrain_gpt.patch"
STANDIN = ROOT / "tests" / "megatron_standin"
LAID_AS = {"exports.py": "__init__.py", "batches.py": "utils.py"}
CHANGED_LINES_MAX = 60
ITERATIONS, MICRO_BATCHES, VICTIM, STRUCK = 12, 6, 1, 3


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The stand-in's script in Megatron-LM's folder, with the patch applied as the guide says."""
    found = tmp_path / "megatron-lm" / "pretrain_gpt.py"
    training = found.parent / "megatron" / "training"
    training.mkdir(parents=True)
    for file in STANDIN.glob("*.py"):
        folder = found.parent if file.name == found.name else training
        shutil.copy(file, folder / LAID_AS.get(file.name, file.name))
    subprocess.run(["git", "apply", str(PATCH)], cwd=found.parent, check=True,
                   env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)})
    changed = [line for line in PATCH.read_text().splitlines()
               if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))]
    assert len(changed) <= CHANGED_LINES_MAX
    return found


def job(name: str, script: Path, slots: int, *words: str) -> dict[str, Any]:
    return {"apiVersion": "unicron/v1", "name": name, "slots": {"min": slots, "max": slots},
            "command": ["env", f"PYTHONPATH={script.parent}", sys.executable, str(script), *words],
            "heal": "in-memory",
            "loop": {"micro_batches": MICRO_BATCHES, "iterations": ITERATIONS,
                     "output": str(script.parent / name)}}


def test_the_patched_script_heals(cluster: RealCluster, script: Path) -> None:
    after = cluster.seq()
    struck = cluster.submit(job("struck", script, 3))
    twin = cluster.submit(job("twin", script, 1))
    cluster.hold(struck, VICTIM, event="backward", iteration=STRUCK)
    line = cluster.wait_held(struck, VICTIM, 0.0)
    cluster.hold(struck, VICTIM, event="forward", iteration=-1)
    os.kill(line["pid"], signal.SIGKILL)
    for task in (struck, twin):
        ended = cluster.wait_ended(task)
        assert ended["state"] == "finished", (ended, cluster.endings(task))
    # "ended" where the task was done before a newcomer had loaded
    (closed,) = [record.body for record in cluster.told(after, "IncidentClosed")]
    assert closed.outcome in ("healed", "ended")  # type: ignore[attr-defined]
    assert (closed.iterations_lost, closed.ckpt_read) == (0, False)  # type: ignore[attr-defined]
    attempts = {line["attempt"] for line in cluster.traced(struck) if line["rank"] != VICTIM}
    assert attempts == {1}
    losses = cluster.losses(struck)
    assert len(losses) == ITERATIONS
    assert losses == pytest.approx(cluster.losses(twin), rel=1e-6)
    said = "".join(log.read_text() for log in cluster.state.logs.glob(f"{struck}-*/*.log"))
    for iteration in range(1, ITERATIONS + 1):  # by the last rank, whichever that was
        assert said.count(f"iteration {iteration:8d}/{ITERATIONS:8d} |") == 1, said
    assert said.count(" validation loss at iteration ") == 2


def test_what_cannot_heal_says_so_and_trains_as_any_command(cluster: RealCluster, script: Path
                                                            ) -> None:
    after = cluster.seq()
    task = cluster.submit(job("declined", script, 2, "--use-torch-fsdp2"))
    told: Any = cluster.wait_told(after, "InMemoryRecoveryDeclined", task=task).body
    assert told.why == "FSDP (--use-torch-fsdp2)"
    assert cluster.wait_ended(task)["state"] == "finished", cluster.endings(task)
    said = "".join(log.read_text() for log in cluster.state.logs.glob(f"{task}-*/*.log"))
    assert "this loop cannot heal in memory: FSDP (--use-torch-fsdp2)" in said
    assert "stock pretrain, rank 0 of 2" in said
