"""A disk that is full when a task ends: the task holds its final state, and its neighbour is left
alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_driver import EXAMPLE
from small_disk import fill, small_disk
from source_changes import changed
from twins import small

ROOM_BYTES = 64 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    with small_disk(tmp_path / "disk", ROOM_BYTES) as folder:
        yield folder


def fill_before_its_end(cluster: Any, disk: Path, task: int, iteration: int) -> Path:
    """Fill the disk while the task is held at this iteration; it fails to save its last state."""
    begun_s = time.time()
    hold = cluster.hold(task, 0, event="forward", iteration=iteration)
    cluster.wait_held(task, 0, begun_s)
    taken = fill(disk)
    assert os.statvfs(disk).f_bavail == 0
    hold.unlink()
    failed = cluster.wait_told(task, "CheckpointFailed", task=task, final=True).body
    assert (failed.errno, failed.why) == ("ENOSPC", "No space left on device")
    assert cluster.task(task)["state"] == "saving"
    return taken


def needs_of(cluster: Any, task: int) -> list[dict[str, Any]]:
    return [one for one in cluster.client().get("/v1/state")["needs"] if one["task"] == task]


def test_a_full_disk_costs_no_state_and_no_neighbour(
    cluster: Any, disk: Path, tmp_path: Path
) -> None:
    healthy = cluster.submit(small("healthy", tmp_path, slots=(2, 2)))
    cluster.wait_whole(healthy, 2)
    pids, seats = cluster.pids(healthy), cluster.on(healthy, "n1")
    task = cluster.submit(
        small("full", disk, slots=(2, 2), iterations=40, checkpoint_every=10, copy_every=0)
    )
    taken = fill_before_its_end(cluster, disk, task, 35)
    own = cluster.pids(task)
    (need,) = needs_of(cluster, task)
    assert need["what"] == "not saved"
    assert "full is done and holds its final state: disk full since " in need["why"]
    status = cluster.unicron("status", "full")
    assert status.stdout.startswith("full  SAVING, disk full since "), status.stderr
    cluster.wait_told(cluster.seq(), "CheckpointFailed", task=task, final=True)
    assert cluster.kept(task, own) == set(own), "it holds the state, and tries again"

    other = tmp_path / "other"
    moved = cluster.unicron("checkpoint", "full", "--to", str(other))
    assert moved.returncode == 0, moved.stderr
    assert cluster.wait_ended(task)["state"] == "finished"
    assert (other / "latest").resolve().name == "iter-40"
    assert (disk / "full" / "latest").exists(), "what was published stays"
    assert needs_of(cluster, task) == []

    taken.unlink()
    again = cluster.submit(small("again", disk, slots=(2, 2), iterations=20, copy_every=0))
    taken = fill_before_its_end(cluster, disk, again, 15)
    taken.unlink()
    assert cluster.wait_ended(again)["state"] == "finished"
    assert (disk / "again" / "latest").resolve().name == "iter-20"

    for kind in ("IncidentOpened", "RankErrored"):
        assert not cluster.told(healthy, kind), cluster.tail(healthy)
    nodes = cluster.client().get("/v1/state")["nodes"]
    assert not any(slot["out"] for node in nodes for slot in node["slots"])
    assert cluster.kept(healthy, pids) == set(pids)
    assert cluster.on(healthy, "n1") == seats
    assert cluster.task(healthy)["iterations_lost"] == 0
    cluster.wait_steps(healthy)
    assert cluster.losses(healthy), "each iteration was reported once, with one loss"
    cluster.verify()


@pytest.mark.thorough
def test_a_loop_that_restarts_as_a_whole_holds_its_final_state_too(
    cluster: Any, tmp_path: Path
) -> None:
    """Its first process alone saves; the other one waits with it."""
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(
        changed(
            EXAMPLE.read_text(),
            (("calculate_per_token_loss=True", "calculate_per_token_loss=False"),),
        )
    )
    output.mkdir()
    task = cluster.submit(
        {
            "apiVersion": "unicron/v1",
            "name": "scaled",
            "slots": {"min": 2, "max": 2},
            "command": [sys.executable, str(script), "--iterations", "8", "--micro-batches", "4"],
            "heal": "in-memory",
            "loop": {"micro_batches": 4, "iterations": 8, "output": str(output)},
        }
    )
    blocked = output / f"task-{task}"
    blocked.write_text("no folder can be made here")
    failed = cluster.wait_told(task, "CheckpointFailed", task=task, final=True).body
    assert (failed.what, failed.rank, failed.step_version) == ("export", 0, 8)
    assert cluster.task(task)["state"] == "saving"
    pids = cluster.pids(task)
    refused = cluster.unicron("checkpoint", "scaled", "--to", str(tmp_path / "other"))
    assert refused.returncode == 2
    assert "the processes of scaled save by themselves" in refused.stderr
    cluster.wait_told(cluster.seq(), "CheckpointFailed", task=task, final=True)
    assert cluster.kept(task, pids) == set(pids)
    blocked.unlink()
    assert cluster.wait_ended(task)["state"] == "finished", cluster.endings(task)
    assert [one.name for one in output.glob("task-*/iter-*")] == ["iter-8"]
    assert not cluster.told(task, "IncidentOpened", task=task)
