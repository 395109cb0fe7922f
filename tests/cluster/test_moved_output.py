"""Outputs that are moved, or gone: no checkpoint is torn, no process with the state ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from reference import read
from torch import Tensor
from twins import small

TRAINS: dict[str, Any] = {"copy_every": 0, "checkpoint_every": 20, "checkpoint_keep": "all"}


def tensors(folder: Path) -> dict[str, Tensor]:
    """Those of a checkpoint, read by torch alone."""
    return {key: value for key, value in read(folder).items() if isinstance(value, Tensor)}


def test_a_save_under_way_is_not_torn_by_a_move(cluster: Any, tmp_path: Path) -> None:
    """The task trains on while the old folder's checkpoint is half written: it has the state of its
    iteration, as the twin's that was not moved."""
    options = {**TRAINS, "slots": (2, 2), "iterations": 400}
    twin = cluster.submit(small("twin", tmp_path, **options))
    cluster.wait_told(twin, "CheckpointPublished", task=twin, path="gen-1/iter-40")
    cluster.cancel(twin)
    task = cluster.submit(small("moved", tmp_path, **options))
    cluster.wait_whole(task, 2)
    begun_s = time.time()
    hold = cluster.hold(task, 0, event="forward", iteration=39)
    cluster.wait_held(task, 0, begun_s)
    said = cluster.unicron("checkpoint", "moved", "--to", str(tmp_path / "new"))
    assert said.returncode == 0, said.stderr
    cluster.wait_told(task, "Quiesce", task=task)
    begun_s = time.time()
    hold = cluster.hold(task, 0, event="save_mid")
    cluster.wait_held(task, 0, begun_s)
    cluster.wait(
        lambda: (
            (cluster.task(task)["generation"] == 2 and cluster.task(task)["iteration"] > 50) or None
        ),
        "it trains on",
    )
    hold.unlink()
    cluster.wait_told(task, "CheckpointSaved", task=task, path="gen-1/iter-40")
    mine, twins = (tensors(tmp_path / name / "gen-1/iter-40") for name in ("moved", "twin"))
    assert len(mine) == len(twins) > 10
    assert all(mine[key].equal(value) for key, value in twins.items())
    cluster.cancel(task)
    cluster.verify()


def test_ranks_that_live_read_where_the_checkpoints_are_now(cluster: Any, tmp_path: Path) -> None:
    """A part of the model is lost after a move: the newest checkpoint is in the new folder."""
    parallel = {"tensor": [2]}
    options = {**TRAINS, "slots": (2, 2), "iterations": 4000, "parallel": parallel}
    task = cluster.submit(small("parts", tmp_path, **options))
    cluster.wait_told(task, "CheckpointPublished", task=task)
    said = cluster.unicron("checkpoint", "parts", "--to", str(tmp_path / "new"))
    assert said.returncode == 0, said.stderr
    moved = cluster.wait_told(task, "CheckpointSaved", task=task, generation=2)
    cluster.wait_told(moved.seq, "CheckpointPublished", task=task)
    pids = cluster.pids(task)
    os.kill(pids[1], signal.SIGKILL)
    again = cluster.wait_told(moved.seq, "Reconfigured", task=task, generation=3).body
    assert again.step_version >= moved.body.step_version
    assert again.damaged == ""
    assert cluster.kept(task, pids) == {0}
    cluster.cancel(task)
    cluster.verify()


def test_an_output_that_is_gone_ends_no_process(cluster: Any, tmp_path: Path) -> None:
    """The folder is a file when the task is done, and a rank is killed. The other has the state,
    and the new process waits with it until the folder is there again."""
    output, away = tmp_path / "gone", tmp_path / "away"
    options = {**TRAINS, "slots": (2, 2), "iterations": 40}
    task = cluster.submit(small("gone", tmp_path, **options))
    begun_s = time.time()
    hold = cluster.hold(task, 0, event="forward", iteration=35)
    cluster.wait_held(task, 0, begun_s)
    output.rename(away)
    output.write_text("not a folder")
    hold.unlink()
    cluster.wait_told(task, "CheckpointFailed", task=task, final=True)
    os.kill(cluster.pids(task)[0], signal.SIGKILL)
    cluster.wait_told(task, "IncidentRecovering", iterations_lost=0)
    assert cluster.task(task)["state"] == "saving"
    output.unlink()
    away.rename(output)
    assert cluster.wait_ended(task)["state"] == "finished"
    closed = cluster.wait_told(task, "IncidentClosed").body
    assert (closed.outcome, closed.iterations_lost) == ("healed", 0)
    assert (output / "latest").resolve().name == "iter-40"
    cluster.verify()
