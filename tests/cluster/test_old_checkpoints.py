"""Old checkpoints go, a damaged one gives way to the one before, a job may begin from one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from real_cluster import RealCluster
from twins import small

KEEP = 2


def test_old_checkpoints_go_while_the_task_trains(cluster: RealCluster, tmp_path: Path) -> None:
    task = cluster.submit(
        small(
            "kept", tmp_path, slots=(2, 2), checkpoint_every=4, copy_every=0, checkpoint_keep=KEEP
        )
    )
    output = tmp_path / "kept"
    cluster.rest(task)

    def whole() -> list[str]:
        return [
            str(path.relative_to(output))
            for path in output.glob("gen-*/iter-*")
            if path.name[5:].isdecimal()
        ]

    def published(num: int) -> list[str] | None:
        told = cluster.told(0, "CheckpointPublished", task=task)
        return [record.body.path for record in told] if len(told) >= num else None  # type: ignore[attr-defined]

    paths = cluster.wait(lambda: published(6), "six publications")
    cluster.wait(lambda: paths[0] not in whole() or None, "the first one is gone")
    # Beside those that stay: one being saved, and one whose successor is being read back.
    assert len(whole()) <= KEEP + 2
    before = cluster.pids(task)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    num = len(published(0) or ())
    after = cluster.wait(lambda: published(num + KEEP + 2), "it trains and saves again")
    order = cluster.told(0, "Reconfigure", task=task)[-1].body
    assert order.checkpoint, "it came back from the disk"  # type: ignore[attr-defined]
    cluster.wait(
        lambda: not any(path in whole() for path in after[:num]) or None, "the old ones are gone"
    )
    assert os.readlink(output / "latest") in whole()
    cluster.cancel(task)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    cluster: RealCluster, tmp_path: Path
) -> None:
    """Only one of the ranks sees the damage; all read the same."""
    task = cluster.submit(
        small(
            "fallen",
            tmp_path,
            slots=(2, 2),
            checkpoint_every=5,
            copy_every=0,
            parallel={"tensor": [2]},
        )
    )
    output = tmp_path / "fallen"
    hold = cluster.hold(task, 0, event="forward", iteration=16)
    cluster.wait_told(0, "CheckpointPublished", task=task, path="gen-1/iter-15")
    pids = cluster.pids(task)
    (file, *_) = sorted((output / "latest").glob("__*.distcp"))
    with file.open("r+b") as data:
        data.truncate(file.stat().st_size // 2)
    after = cluster.seq()
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    hold.unlink()
    order: Any = cluster.wait_told(after, "Reconfigure", task=task).body
    assert (order.checkpoint, order.earlier) == ("gen-1/iter-15", ("gen-1/iter-10", "gen-1/iter-5"))
    cluster.wait_told(after, "CheckpointPublished", task=task)
    came: Any = [record.body for record in cluster.told(after, "Reconfigured", task=task)]
    assert {(one.step_version, one.origin) for one in came} == {(10, "checkpoint")}
    (said,) = {one.damaged for one in came} - {""}
    assert said == (
        f"{output}/gen-1/iter-15: the checkpoint is damaged: its file {file.name} is cut"
    )
    assert not cluster.told(after, "RankErrored", task=task)
    cluster.cancel(task)


def test_a_job_says_from_which_checkpoint_it_begins(cluster: RealCluster, tmp_path: Path) -> None:
    whole = {"slots": (1, 1), "iterations": 20, "checkpoint_every": 10, "checkpoint_keep": "all"}
    first = cluster.submit(small("first", tmp_path, **whole))
    assert cluster.wait_ended(first)["state"] == "finished"
    begin_from = str(tmp_path / "first/gen-1/iter-10")
    second = cluster.submit(small("second", tmp_path, **whole, begin_from=begin_from))
    assert cluster.wait_ended(second)["state"] == "finished", cluster.task(second)["why"]
    came: Any = cluster.told(0, "Reconfigured", task=second)[0].body
    assert (came.step_version, came.origin) == (10, "checkpoint")
    # The losses up to there are in the checkpoint.
    assert cluster.losses(second) == cluster.losses(first)
    wrong = cluster.submit(small("third", tmp_path, **whole, begin_from=f"{begin_from}0"))
    ended = cluster.wait_ended(wrong)
    assert ended["state"] == "failed"
    assert f"begin_from: {begin_from}0: the checkpoint is missing" in ended["why"]
