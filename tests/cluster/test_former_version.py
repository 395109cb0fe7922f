"""A cluster that runs 0.3.0 gets a control plane of this version, while a task trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden_log import unpack
from real_cluster import RealCluster
from twins import Twins, small

COMMIT = "b0502c4"
START = """
import sys
from pathlib import Path
import unicron
from real_cluster import RealCluster
assert Path(unicron.__file__).is_relative_to(sys.argv[2]), unicron.__file__
RealCluster(Path(sys.argv[1])).start()
"""
START_S_MAX = 300.0
COPY_EVERY = 10
"""Iterations between two in-memory copies, at most."""
PAUSE_S_MAX = 30.0
"""Less than two rendezvous in vain."""


@pytest.fixture
def former(tmp_path: Path) -> Iterator[RealCluster]:
    """A running cluster: all of its processes have the code of 0.3.0."""
    try:
        environment = unpack(COMMIT, tmp_path / "code")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"this clone has no commit {COMMIT}: it is shallow, or no clone")
    path = tmp_path / "cluster"
    cluster = RealCluster(path)
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", START, str(path), str(tmp_path / "code")],
            check=True,
            env=environment,
            timeout=START_S_MAX,
        )
        cluster.local.ensure_server()
        yield cluster
    finally:
        cluster.stop()


def test_this_version_takes_over_from_the_last_release(
    former: RealCluster, tmp_path: Path, twins: Twins
) -> None:
    wanted = small("taken", tmp_path / "out", checkpoint_every=20)
    task = former.submit(wanted)
    former.wait_whole(task, 4)
    pids, begun = former.pids(task), former.seq()

    former.kill_control_plane()
    former.start_control_plane()
    began = former.told(0, "EpochStarted")
    epochs, taken_over = [record.body for record in began], began[-1].seq
    assert [getattr(one, "durability", None) for one in epochs] == ["", "always"], epochs
    former.wait_steps(task, 20)
    assert former.pids(task) == pids
    assert former.task(task)["generation"] == 1
    for kind in (
        "IncidentOpened",
        "NodeJoined",
        "NodeUnreachable",
        "Quiesce",
        "RankStalled",
        "ReportsLost",
        "RankExited",
        "StopRank",
    ):
        assert not former.told(begun, kind), former.tail(begun)

    # The former agents and ranks heal under the new control plane.
    victim, after = former.on(task, "n2")[0], former.seq()
    os.kill(pids[victim], signal.SIGKILL)
    former.wait_told(after, "RankExited", rank=victim, signal=9)
    former.wait_whole(task, 4)
    assert former.kept(task, pids) == set(pids) - {victim}
    former.wait_healed(after)

    # What a former agent would not obey waits for a newer one.
    later = former.submit(
        small("exact", tmp_path / "out", slots=(1, 1), reproducible="bitwise", weight=1e-3)
    )
    waits = former.wait_told(begun, "TaskWaiting", task=later).body
    assert getattr(waits, "why", "") == (
        "the agents of n1 n2 read order format 0, and this job needs 1"
    )
    assert "newer agents there" in former.unicron("status", "exact").stdout

    # An agent of this version continues the processes of the former one.
    for node in ("n1", "n2"):
        before = former.seq()
        former.kill_agent(node)
        former.start_agent(node)
        former.wait_told(before, "AgentRestarted", node=node)
    former.wait_steps(task)
    former.cancel(later)

    # Its next rank has this version's code. The former ranks cannot meet it: they end too, at once,
    # and all go on from their last copy.
    pids, after = former.pids(task), former.seq()
    os.kill(pids[victim], signal.SIGKILL)
    former.wait_told(after, "RankExited", rank=victim, signal=9)
    closed: Any = former.wait_told(after, "IncidentClosed").body
    assert closed.outcome in ("healed", "set back"), former.tail(after)
    assert not closed.ckpt_read
    assert closed.iterations_lost <= COPY_EVERY
    assert closed.pause_s < PAUSE_S_MAX
    assert not former.told(after, "ReconfigureFailed")
    former.wait_whole(task, 4)
    assert former.kept(task, pids) == set()
    assert former.unicron("status").returncode == 0
    twins.compare_and_cancel(former, task, wanted, since=taken_over, again_rel=1e-5)
