"""A loss that becomes NaN under real agents: told at once, and never what a restart would read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from loop_driver import changed_example
from real_cluster import RealCluster

FIRST, ITERATIONS, MICRO_BATCHES, SLOW_S = 5, 60, 4, 0.05


def test_a_loss_of_nan_is_told_and_its_state_never_published(
    cluster: RealCluster, tmp_path: Path
) -> None:
    changes = [
        ("    return tokens(iteration", "    asked.now = iteration\n    return tokens(iteration"),
        ("losses.float().sum()", f"losses.float().sum() * (1, torch.nan)[asked.now >= {FIRST}]"),
    ]
    script, output = changed_example(tmp_path, changes), tmp_path / "out"
    after = cluster.seq()
    loop = {"micro_batches": MICRO_BATCHES, "iterations": ITERATIONS, "output": str(output)}
    sizes = ["--iterations", str(ITERATIONS), "--micro-batches", str(MICRO_BATCHES)]
    task = cluster.submit(
        {
            "apiVersion": "unicron/v1",
            "name": "nan",
            "slots": {"min": 1, "max": 2},
            "command": [sys.executable, str(script), *sizes],
            "heal": "in-memory",
            "loop": loop | {"checkpoint_every": 10},
        }
    )
    slow = cluster.hold(task, 0, event="forward", then="slow", slow_s=SLOW_S)

    def needed() -> dict[str, Any] | None:
        view = cluster.client().get("/v1/state")
        (row,) = (row for row in view["tasks"] if row["id"] == task)
        told = [need for need in view["needs"] if (need["what"], need["task"]) == ("loss", task)]
        is_kept = row["checkpoint_iteration"] and row["copies"]
        return {"row": row, "why": told[0]["why"]} if told and is_kept else None

    shown = cluster.wait(needed, lambda: f"a need\n{cluster.tail(after)}")
    assert f"loss nan since iteration {FIRST}, " in shown["why"]
    assert f"latest stays at iteration {FIRST} (gen-1/iter-{FIRST})" in shown["why"]
    assert shown["row"]["not_finite"]["text"] == "nan"
    assert [one["step_version"] for one in shown["row"]["copies"]] == [FIRST]
    slow.unlink()
    ended = cluster.wait_ended(task)
    assert ended["state"] == "finished", (ended, cluster.endings(task))
    assert ended["why"] == (
        f"{ITERATIONS} iterations, loss nan since iteration {FIRST}; latest stays at "
        f"gen-1/iter-{FIRST}, not gen-1/iter-{ITERATIONS}"
    )
    assert (output / "latest").readlink() == Path(f"gen-1/iter-{FIRST}")
    assert [record.body.iteration for record in cluster.told(after, "LossNotFinite")] == [FIRST]
    stored = cluster.told(after, "MemoryCheckpointStored")
    assert {record.body.step_version for record in stored} == {FIRST}
    saved = cluster.told(after, "CheckpointSaved")
    assert [(record.body.step_version, record.body.loss) for record in saved] == [
        (FIRST, ""),
        (ITERATIONS, "nan"),
    ]
