"""A task with `checkpoint_keep`: its old checkpoints go, and it still recovers from the disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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
