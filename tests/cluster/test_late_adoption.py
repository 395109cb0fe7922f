"""Scripts that adopt Unicron, or get ready, after `start_s_max`: they are taken, not killed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_driver import changed_example
from real_cluster import RealCluster, running

ITERATIONS, MICRO_BATCHES = 8, 4
VICTIM, STRUCK, GROWN = 1, 2, 6
START_S_MAX = 3.0
STANDIN = Path(__file__).parents[1] / "megatron_standin"
INSTALLED_AS = {"exports.py": "__init__.py", "batches.py": "utils.py"}
WAIT = """import pathlib, time
{indent}while not pathlib.Path({gate!r}).exists():
{indent}    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """A cluster whose limit no start on this machine keeps."""
    with running(tmp_path_factory.mktemp("hasty"), policy={"start_s_max": START_S_MAX}) as made:
        yield made


def _late_script(case: str, folder: Path, gate: Path) -> list[str]:
    """The words that run a script which waits for the gate: before it adopts, or in `build`; or a
    script of Megatron-LM that waits before it calls `pretrain`."""
    words = [
        str(folder / "train.py"),
        "--iterations",
        str(ITERATIONS),
        "--micro-batches",
        str(MICRO_BATCHES),
    ]
    if case == "before it adopts":
        head = "import argparse\n"
        script = changed_example(folder, [(head, WAIT.format(gate=str(gate), indent="") + head)])
        return [sys.executable, str(script), *words[1:]]
    if case == "before it is ready":
        head = "    many = axes.chunks > 1\n"
        wait = "    " + WAIT.format(gate=str(gate), indent="    ")
        script = changed_example(folder, [(head, wait + head)])
        return [sys.executable, str(script), *words[1:]]
    script = folder / "megatron-lm" / "pretrain_gpt.py"
    training = script.parent / "megatron" / "training"
    training.mkdir(parents=True)
    for file in STANDIN.glob("*.py"):
        shutil.copy(
            file,
            (script.parent if file.name == script.name else training)
            / INSTALLED_AS.get(file.name, file.name),
        )
    script.write_text(WAIT.format(gate=str(gate), indent="") + script.read_text())
    return [sys.executable, "-P", "-m", "unicron.cli.main", "megatron", str(script)]


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ("before it adopts", "no process has adopted Unicron within 3 s (start_s_max)"),
        ("before it is ready", "not ready after"),
        ("of Megatron-LM", "not ready after"),
    ],
)
def test_a_late_script_is_taken_and_heals_in_place(
    hasty: RealCluster, tmp_path: Path, case: str, shown: str
) -> None:
    gate = tmp_path / "gate"
    after = hasty.seq()
    iterations = ITERATIONS if "Megatron" not in case else 12
    micro_batches = MICRO_BATCHES if "Megatron" not in case else 6
    task = hasty.submit(
        {
            "apiVersion": "unicron/v1",
            "name": "late",
            "slots": {"min": 2, "max": 2},
            "command": _late_script(case, tmp_path, gate),
            "heal": "in-memory",
            "loop": {
                "micro_batches": micro_batches,
                "iterations": iterations,
                "output": str(tmp_path / "out"),
            },
        }
    )
    hasty.hold(task, VICTIM, event="backward", iteration=STRUCK)
    held = hasty.hold(task, 0, event="forward", iteration=GROWN)

    def told() -> Any:
        return next(
            (
                one
                for one in hasty.client().get("/v1/state")["needs"]
                if one["task"] == task and shown in one["why"]
            ),
            None,
        )

    need = hasty.wait(told, "status tells that the start is late")
    assert "start_s_max" in need["why"], need
    assert "unicron logs late" in need["do"], need
    if case == "before it adopts":
        assert not hasty.told(after, "RankAdopted")
    else:
        for rank in (0, 1):
            hasty.wait_told(after, "RankAdopted", task=task, rank=rank)
    if case == "before it is ready":  # a new agent and a new leader know that it has adopted
        hasty.kill_agent("n2")
        hasty.kill_control_plane()
        hasty.start_agent("n2")
        hasty.start_control_plane()
        assert hasty.wait(told, "the new leader tells it, too")
    gate.touch()

    line = hasty.wait_held(task, VICTIM, 0.0)
    assert hasty.task(task)["declined"] == ""
    hasty.hold(task, VICTIM, event="forward", iteration=-1)
    os.kill(line["pid"], signal.SIGKILL)
    hasty.wait_told(after, "Quiesce", task=task, mode="boundary")  # the newcomer is ready
    held.unlink()
    ended = hasty.wait_ended(task)
    assert ended["state"] == "finished", (ended, hasty.endings(task))
    starts = [
        (one.body.rank, one.body.attempt)  # type: ignore[attr-defined]
        for one in hasty.told(after, "RankStarted")
    ]
    assert sorted(starts) == [(0, 1), (1, 1), (1, 2)], "only the killed rank was started again"
    assert not [one for one in hasty.told(after, "StopRank") if "done" not in one.body.why]  # type: ignore[attr-defined]
    assert len(hasty.losses(task)) == iterations
    hasty.wait_healed(after)
