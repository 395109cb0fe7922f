"""A cluster whose log is sealed to an object store: restarts, and reads when nothing answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import object_store
import pytest
from real_cluster import RealCluster
from unicron.cli.cluster import local_cluster
from unicron.events.log.segments import Folder, SealedLog

URL = "bucket://logs/default"
COMMAND = {"apiVersion": "unicron/v1", "command": ["true"]}
LONG = {**COMMAND, "name": "long", "command": ["sh", "-c", "echo begun; exec sleep 600"]}


def program(*words: str) -> list[str]:
    """`unicron`, whose control plane seals there."""
    at = ("--segments", URL) if words[0] == local_cluster.CONTROL_PLANE else ()
    return [sys.executable, "-P", "-m", "unicron.cli.main", *words, *at]


@pytest.fixture
def cluster(tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealCluster]:
    # Every process has the driver of bucket://, as if it was installed.
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(object_store.KNOWN)
    monkeypatch.setenv("PYTHONPATH", str(site))
    with mock.patch.object(local_cluster, "program", program):
        made = RealCluster(
            tmp_path,
            num_agents=1,
            policy={"seal_records": 15, "seal_s": 3600.0, "ended_keep_s": 3.0},
        )
        try:
            made.start()
            yield made
        finally:
            local_cluster.stop_all(made.state, grace=False)


@pytest.mark.thorough
def test_a_log_in_an_object_store(cluster: RealCluster, bucket: Path) -> None:
    def unicron(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*program(*words), "--state", str(cluster.state.path)],
            text=True,
            capture_output=True,
            check=False,
            timeout=100.0,
            env={**os.environ, "UNICRON_SEGMENTS": URL},
        )

    def run(name: str) -> None:
        assert cluster.wait_ended(cluster.submit({**COMMAND, "name": name}))["state"] == "finished"

    def names() -> list[str]:
        return [task["name"] for task in cluster.client().get("/v1/state")["tasks"]]

    folder = Folder(URL, "default")
    long = cluster.submit(LONG)
    for number in range(4):
        run(f"a{number}")
    cluster.wait(lambda: folder.snapshots() or None, "a snapshot is in the store")
    assert not (cluster.state.path / "log").exists()

    # A restart, also while the store does not answer for a moment: it waits, and leads then.
    (bucket / "down").touch()
    cluster.kill_control_plane()
    cluster.local.start(local_cluster.CONTROL_PLANE)
    log = cluster.state.logs / "control-plane.log"
    cluster.wait(
        lambda: "bucket://logs/default: Denied: 403: not now" in log.read_text() or None,
        "it says that the store does not answer",
    )
    (bucket / "down").unlink()
    run("b")

    # Ended tasks have left the state, also that of the next leader; commands find them in the log.
    cluster.wait(lambda: names() == ["long"] or None, "all have left")
    shown = unicron("status", "a1")
    assert (shown.returncode, "FINISHED" in shown.stdout) == (0, True), shown
    assert unicron("logs", "a1").returncode == 0
    assert '"TaskEnded"' in unicron("tail", "--task", "a1", "-o", "jsonl").stdout
    refused = unicron("status", "c")
    assert (refused.returncode, "no task 'c'" in refused.stderr) == (2, True), refused
    cluster.kill_control_plane()
    cluster.local.start(local_cluster.CONTROL_PLANE)
    assert names() == ["long"]
    cluster.verify()

    # Nothing answers: the state folder knows where the segments are.
    records = cluster.records()
    local_cluster.stop_all(cluster.state, grace=True)
    tail = unicron("tail", "-o", "jsonl")
    seqs = [json.loads(line)["seq"] for line in tail.stdout.splitlines()]
    assert (tail.returncode, seqs) == (0, list(range(1, len(seqs) + 1))), tail.stderr
    assert len(seqs) >= len(records) > SealedLog(folder).last
    assert unicron("log", "verify").stdout.startswith("WHOLE    records 1 to ")
    assert "FINISHED" in unicron("status", "a1").stdout
    then = json.loads(unicron("status", "--at", "12", "-o", "json").stdout)
    assert then["cluster"]["seq"] == 12

    # Pruned, and without the server's folder: restored from the store, and it leads on.
    assert "pruned" in unicron("log", "prune", "--keep", "0").stdout
    first = SealedLog(folder).first
    assert first > 12
    assert unicron("logs", "long").stdout == "0.1 begun\n"
    gone = unicron("logs", "a0")
    assert (gone.returncode, "of task a0 were pruned" in gone.stderr) == (2, True), gone
    assert f"seq {first} to " in unicron("status", "--at", "12").stderr
    shutil.rmtree(cluster.state.server)
    restored = unicron("log", "restore")
    assert restored.returncode == 0, restored
    cluster.start()
    assert cluster.task(long)["state"] in ("starting", "running", "waiting", "healing")
    assert cluster.submit({**COMMAND, "name": "after"}) > first
    verdict = unicron("replay", "--live", "--verify")
    assert (verdict.returncode, "VERIFIED" in verdict.stdout) == (0, True), verdict
