"""`unicron up` outlasts a full disk, and a process that may open no more files."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cli_process import refused
from small_disk import fill, small_disk
from unicron.cli.cluster import processes
from unicron.cli.cluster.local_cluster import CONTROL_PLANE, UP, agent_name
from unicron.cli.cluster.state_dir import StateDir
from unicron.events.log import reserve
from up_cluster import Cluster, cluster, until

__all__ = ["cluster"]
AGENT = agent_name("n1")
SHORT_S = 2.0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose state folder is on a disk of 120 MB."""
    with small_disk(tmp_path / "disk", 120 << 20) as disk:
        made = Cluster(disk / "state")
        yield made
        made.end()


@pytest.fixture
def few(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose state folder is on a disk for 600 files."""
    with small_disk(tmp_path / "disk", 120 << 20, ",nr_inodes=600") as disk:
        made = Cluster(disk / "state")
        yield made
        made.end()


def fill_with_files(disk: Path) -> Path:
    """A folder of so many files that no more can be made."""
    taken = disk / "taken"
    taken.mkdir()
    with suppress(OSError):
        for number in itertools.count():
            (taken / str(number)).touch()
    return taken


def submit(cluster: Cluster, folder: Path, name: str) -> None:
    job = folder / f"{name}.yaml"
    job.write_text(
        f"apiVersion: unicron/v1\nname: {name}\nslots: {{min: 1, max: 1}}\n"
        "command: [sleep, '600']\n"
    )
    submitted = cluster("submit", str(job))
    assert submitted.returncode == 0, submitted.stderr


def task(cluster: Cluster, name: str) -> dict[str, Any]:
    view = json.loads(cluster("status", "-o", "json").stdout)
    (found,) = (one for one in view["tasks"] if one["name"] == name)
    return found


def pids(cluster: Cluster, name: str) -> list[int]:
    return [rank["pid"] for rank in task(cluster, name)["ranks"]]


def running(cluster: Cluster, name: str) -> bool:
    return any(pids(cluster, name))


def test_the_cluster_works_on_while_its_disk_is_full(small: Cluster, tmp_path: Path) -> None:
    assert small.up("--slots", "2").returncode == 0
    submit(small, tmp_path, "runs")
    until(lambda: running(small, "runs"))
    rank, before = pids(small, "runs"), small.pids()
    until(lambda: (small.state.path / reserve.FILE).exists())
    taken = fill(small.state.path.parent)

    until(lambda: "no room for the log" in small("status").stdout)
    submit(small, tmp_path, "waits")
    assert task(small, "waits")["why"].startswith("no room for the log")
    small.kill(AGENT)  # its successor needs the reserve
    until(lambda: any(one["kind"] == "AgentRestarted" for one in small.records()))
    assert not (small.state.path / reserve.FILE).exists()
    assert small("cancel", "waits").returncode == 0
    assert {**before, AGENT: 0} == {**small.pids(), AGENT: 0}, "nothing else has ended"
    assert pids(small, "runs") == rank

    submit(small, tmp_path, "comes")
    taken.unlink()
    until(lambda: running(small, "comes"))
    assert pids(small, "runs") == rank
    kinds = [one["kind"] for one in small.records()]
    assert kinds.count("RoomChanged") == 2
    assert "IncidentOpened" not in kinds
    until(lambda: (small.state.path / reserve.FILE).exists())


def test_a_disk_that_takes_no_more_files_fails_no_task(few: Cluster, tmp_path: Path) -> None:
    assert few.up("--slots", "2").returncode == 0
    submit(few, tmp_path, "runs")
    until(lambda: running(few, "runs"))
    (rank,) = pids(few, "runs")
    taken = fill_with_files(few.state.path.parent)
    os.kill(rank, signal.SIGKILL)
    told = "room for 0 more files (df -i)"
    until(lambda: told in json.loads(few("status", "-o", "json").stdout)["cluster"]["no_room"])
    assert told in " ".join(few("doctor").stdout.split())
    time.sleep(SHORT_S)
    assert task(few, "runs")["state"] == "healing"
    shutil.rmtree(taken)
    until(lambda: running(few, "runs"))
    kinds = [one["kind"] for one in few.records()]
    assert kinds.count("IncidentOpened") == 1
    assert not {"IncidentEscalated", "ExperimentBegun"} & {*kinds}


def test_up_says_that_a_disk_takes_no_more_files(few: Cluster) -> None:
    fill_with_files(few.state.path.parent)
    refused(few.up(), f"the disk of {few.state.path} is full: room for 0 more files (df -i)")
    assert not few.state.path.exists()


def test_all_processes_are_ended_also_on_a_read_only_disk(tmp_path: Path) -> None:
    """Their pid files stay: the first one that could not be deleted left the rest alive."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        state = StateDir(disk / "state")
        state.create()
        children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
        found = [processes.record(state, f"agent-{one.pid}", one.pid) for one in children]
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=20)
        try:
            processes.stop_together(state, found, 5.0)
            assert [one.wait(5) for one in children] == [-signal.SIGTERM] * 2
            assert [processes.find(state, one.name) for one in found] == [None, None]
        finally:
            for child in children:
                child.kill()
                child.wait()


def test_up_says_which_disk_is_full(small: Cluster) -> None:
    fill(small.state.path.parent)
    answer = small.up()
    refused(answer, f"the disk of {small.state.path} is full: 0 KiB free")
    assert "make room there, then unicron up --observe: nothing heals" in answer.stderr
    assert not small.state.path.exists()


def test_no_process_ends_that_may_open_no_more_files(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.up("--slots", "2").returncode == 0
    submit(cluster, tmp_path, "runs")
    until(lambda: running(cluster, "runs"))
    rank, before = pids(cluster, "runs"), cluster.pids()
    limited = [cluster.process(name).pid for name in (UP, CONTROL_PLANE, AGENT)]
    former = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in limited]
    for pid, (_, most) in zip(limited, former, strict=True):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, most))
    time.sleep(SHORT_S)
    for pid, limits in zip(limited, former, strict=True):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    until(lambda: cluster("status").returncode == 0)
    submit(cluster, tmp_path, "comes")
    until(lambda: running(cluster, "comes"))
    assert cluster.pids() == before
    assert pids(cluster, "runs") == rank
    said = (cluster.state.logs / f"{AGENT}.log").read_text()
    assert "a loop fails for now, and goes on after a pause" in said
