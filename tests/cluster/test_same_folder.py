"""Two tasks with one output folder by two names: the second is refused, the first is untouched."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from real_cluster import RealCluster
from twins import small


def test_a_task_does_not_write_into_the_folder_of_another_by_a_link(
    cluster: RealCluster, tmp_path: Path
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").symlink_to("first")
    spec = small("first", tmp_path, slots=(1, 1), checkpoint_every=5)
    first = cluster.submit(spec)
    cluster.wait_told(0, "CheckpointPublished", task=first)
    before = cluster.pids(first)
    other = small("second", tmp_path, slots=(1, 1), checkpoint_every=5)
    line = (
        f"train.output: {tmp_path}/second is being written, by task {first} (first), which names "
        f"it {tmp_path}/first"
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(other))
    said = cluster.unicron("submit", str(tmp_path / "job.yaml"))
    assert said.returncode == 2
    assert said.stderr.splitlines()[0] == f"error: {tmp_path}/job.yaml: {line}"
    # A control plane that does not see the folder takes it; the rank is refused at its start.
    second = cluster.submit(other)
    ended = cluster.wait_ended(second)
    assert ended["state"] == "failed"
    assert (
        f"train.output: {tmp_path}/second is the folder of task {first} (first), which names it "
        f"{tmp_path}/first" in ended["why"]
    )
    starts = cluster.told(0, "StartRank", task=second)
    assert len(starts) <= 2, "no loop of restarts"
    cluster.wait_steps(first, 10)
    assert cluster.pids(first) == before
    assert not cluster.told(0, "RankExited", task=first)
    assert not cluster.told(0, "CheckpointPublished", task=second)
    _loses_its_folder(cluster, first, tmp_path / "first/.owner.json")
    # Its end makes the folder free for a task of the same name for it, and for no other.
    cluster.cancel(first)
    _is_refused(cluster, tmp_path)
    third = cluster.submit(small("first", tmp_path, slots=(1, 1), checkpoint_every=5))
    cluster.wait_told(0, "CheckpointPublished", task=third)
    cluster.cancel(third)


def _is_refused(cluster: RealCluster, tmp_path: Path) -> None:
    """No task may move its checkpoints there, and none that names the folder by a URL begins."""
    mover = cluster.submit(small("mover", tmp_path, slots=(1, 1)))
    cluster.wait_steps(mover, 2)
    for to in (str(tmp_path / "first"), ""):
        assert cluster.unicron("checkpoint", "mover", "--to", to).returncode == 2
    cluster.cancel(mover)
    spec = small("by-url", tmp_path, slots=(1, 1))
    spec["train"]["output"] = f"file://{tmp_path}/first"
    (tmp_path / "url.yaml").write_text(yaml.safe_dump(spec))
    said = cluster.unicron("submit", str(tmp_path / "url.yaml"))
    assert said.returncode == 2
    assert f"{tmp_path}/first" in said.stderr


def _loses_its_folder(cluster: RealCluster, task: int, file: Path) -> None:
    """A person gives the folder away while the task trains: it trains on, and writes no more."""
    own, before = file.read_bytes(), cluster.pids(task)
    other = json.loads(own) | {"cluster_id": "another", "task": 99}
    file.write_text(json.dumps(other))
    cluster.wait_steps(task, 12)  # a save that had begun is complete
    num = len(cluster.told(0, "CheckpointSaved", task=task))
    cluster.wait_steps(task, 12)
    assert len(cluster.told(0, "CheckpointSaved", task=task)) == num
    assert cluster.pids(task) == before
    file.write_bytes(own)
    cluster.wait(
        lambda: len(cluster.told(0, "CheckpointPublished", task=task)) > num or None,
        "it saves again",
    )
