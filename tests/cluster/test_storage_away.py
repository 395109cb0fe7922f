"""A mount that vanishes under a task's output and comes back, and a checkpoint that is larger than
its disk: nothing is written elsewhere, nothing begins anew, and it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_disk import small_disk
from twins import small

ROOM_BYTES = 64 << 20


class Mount:
    """A file system that is mounted at `path`, or not."""

    def __init__(self, disk: Path, path: Path) -> None:
        self._disk, self.path = disk, path
        path.mkdir()
        self.is_there = False

    def come(self) -> None:
        _run("mount", "--bind", str(self._disk), str(self.path))
        self.is_there = True

    def go(self) -> None:
        _run("umount", "--lazy", str(self.path))
        self.is_there = False


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=20)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    with small_disk(tmp_path / "disk", ROOM_BYTES) as disk:
        made = Mount(disk, tmp_path / "mounted")
        made.come()
        yield made
        if made.is_there:
            made.go()


def test_a_mount_that_vanishes_and_comes_back(cluster: Any, mount: Mount) -> None:
    task = cluster.submit(
        small("mounted", mount.path, slots=(2, 2), checkpoint_every=20, copy_every=0)
    )
    cluster.wait_told(0, "CheckpointPublished", task=task)
    after = cluster.seq()
    mount.go()
    failed = cluster.wait_told(after, "CheckpointFailed", task=task).body
    assert failed.why == "its file system is not mounted any more"
    assert not list(mount.path.rglob("*.distcp")), "nothing is written below the mount"
    cluster.wait_steps(task)
    mount.come()
    published = cluster.wait_told(cluster.seq(), "CheckpointPublished", task=task).body

    after = cluster.seq()
    mount.go()
    for pid in cluster.pids(task).values():
        os.kill(pid, signal.SIGKILL)
    error = cluster.wait_told(after, "ReconfigureFailed", task=task).body.error
    assert "nothing of the task is there: is its storage mounted?" in error
    mount.come()
    came = cluster.wait_told(cluster.seq(), "Reconfigured", task=task).body
    assert came.origin == "checkpoint"
    assert came.step_version >= int(published.path.rpartition("-")[2])
    cluster.wait_steps(task)
    cluster.cancel(task)


def test_a_checkpoint_that_is_larger_than_its_disk(cluster: Any, tmp_path: Path) -> None:
    """It is told with what fails, its files are removed, and the task trains on."""
    model = {"num_layers": 2, "hidden": 128, "num_heads": 2, "sequence": 64}
    with small_disk(tmp_path / "disk", 3 << 20) as disk:
        task = cluster.submit(
            small("large", disk, slots=(2, 2), checkpoint_every=10, copy_every=0, model=model)
        )
        failed = cluster.wait_told(0, "CheckpointFailed", task=task).body
        assert (failed.errno, failed.why) == ("ENOSPC", "No space left on device")
        cluster.wait_steps(task, 15)
        cluster.wait(lambda: not list(disk.rglob("*.distcp")) or None, "its files are removed")
        assert not cluster.told(task, "IncidentOpened", task=task), cluster.tail(task)
        cluster.cancel(task)
