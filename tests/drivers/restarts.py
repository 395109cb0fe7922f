"""A task whose processes start again together: one of them is killed, and the losses are compared.

`struck` runs it under agents, `undisturbed` runs the same script as a launcher starts it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launcher import launch
from real_cluster import RealCluster
from source_changes import changed

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
NUM, VICTIM, ITERATIONS, MICRO_BATCHES, EVERY = 2, 1, 12, 6, 2
STEP_S = 0.3
"""Each iteration waits as long, so that a checkpoint is complete before the last one."""
STAMP = '"at": __import__("time").time(), "pid": __import__("os").getpid()'
STAMPED = (
    ('"ranks": job.num_members}', f'"ranks": job.num_members, {STAMP}}}'),
    ('"loss": loss}', f'"loss": loss, {STAMP}}}'),
)
STEPPED = ("iteration = job.step()\n", "loss = train(iteration)\n")
Line = dict[str, Any]


class Case(NamedTuple):
    """`example` with `changes`. `row`: the row of the support table that applies."""

    row: str
    example: str
    changes: Sequence[tuple[str, str]] = ()


CASES = (
    Case("an optimizer other than Adam", "loop.py", [('optimizer="adam"', 'optimizer="sgd"')]),
    Case(
        "torch.compile",
        "loop.py",
        [("module.to(", 'module.compile(backend="aot_eager")\n        module.to(')],
    ),
    Case(
        "gradients scaled by the number of replicas",
        "loop.py",
        [("calculate_per_token_loss=True", "calculate_per_token_loss=False")],
    ),
    Case("FSDP", "fsdp.py"),
)


class Restart(NamedTuple):
    """`fault_to_step_s`: from the kill to the end of the first iteration after it.
    `iterations_lost`: iterations that were complete, and were trained again."""

    task: int
    declined: Any
    starts: list[Any]
    lines: list[Line]
    fault_to_step_s: float
    iterations_lost: int


def script_of(folder: Path, case: Case) -> Path:
    """The changed example. Each of its lines says when and by which process it was written."""
    text = changed((EXAMPLES / case.example).read_text(), case.changes)
    for old, new in STAMPED:
        text = text.replace(old, new)
    for step in STEPPED:
        text = text.replace(step, f"{step}        __import__('time').sleep({STEP_S})\n")
    script = folder / case.example
    script.write_text(text)
    return script


def undisturbed(script: Path, losses: Path) -> list[float]:
    """The losses without a fault."""
    found = launch(script, _words(script, losses), NUM)
    assert [code for code, _ in found] == [0] * NUM, found
    lines = _lines(losses)
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    return [line["loss"] for line in lines]


def struck(cluster: RealCluster, script: Path, folder: Path, loop: Mapping[str, Any]) -> Restart:
    """Kill a process two iterations after the first checkpoint. `loop`: the checkpoints of the job
    file, in memory or on disk."""
    losses, after = folder / "losses", cluster.seq()
    task = cluster.submit(
        {
            "apiVersion": "unicron/v1",
            "name": "struck",
            "slots": {"min": NUM, "max": NUM},
            "command": [sys.executable, str(script), *_words(script, losses)],
            "heal": "in-memory",
            "loop": {
                "micro_batches": MICRO_BATCHES,
                "iterations": ITERATIONS,
                "output": str(folder / "out"),
                **loop,
            },
        }
    )
    declined = cluster.wait_told(after, "InMemoryRecoveryDeclined", task=task).body
    stored = EVERY
    if loop.get("copy_every"):
        told: Any = cluster.wait_told(after, "MemoryCheckpointStored", task=task).body
        stored = told.step_version
    cluster.wait(lambda: len(_lines(losses)) > stored + 1 or None, "the loop trains")
    started: Any = cluster.wait_told(after, "RankStarted", task=task, rank=VICTIM).body
    os.kill(started.pid, signal.SIGKILL)
    killed_s = time.time()
    ended = cluster.wait_ended(task)
    assert ended["state"] == "finished", (ended, cluster.endings(task))
    lines = _lines(losses)
    before = [line for line in lines if line["pid"] == lines[0]["pid"]]
    again = lines[len(before) :]
    starts = [one.body for one in cluster.told(after, "StartRank", task=task)]
    return Restart(
        task,
        declined,
        starts,
        lines,
        again[0]["at"] - killed_s,
        before[-1]["iteration"] + 1 - again[0]["iteration"],
    )


def _words(script: Path, losses: Path) -> list[str]:
    words = ["--iterations", str(ITERATIONS), "--losses", str(losses)]
    return [*words, "--micro-batches", str(MICRO_BATCHES)] if script.name == "loop.py" else words


def _lines(losses: Path) -> list[Line]:
    text = losses.read_text() if losses.exists() else ""
    return [json.loads(line) for line in text.splitlines()]
