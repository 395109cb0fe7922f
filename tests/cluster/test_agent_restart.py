"""Agents restart under a training task, planned and killed: same ranks, same losses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from twins import Twins, small


@pytest.mark.thorough
def test_agents_restart_under_a_training_task(cluster: Any, tmp_path: Path, twins: Twins) -> None:
    begun = cluster.seq()
    wanted = small("upgraded", tmp_path / "out", checkpoint_every=20)
    task = cluster.submit(wanted)
    cluster.wait_whole(task, 4)
    before = cluster.pids(task)

    pid = cluster.agent("n1").pid
    upgraded = cluster.unicron("agent", "--restart", "--node", "n1")
    assert (upgraded.returncode, upgraded.stderr) == (
        0,
        f"agent n1, pid {pid}, restarts; its ranks run on\n",
    ), upgraded
    cluster.wait_told(begun, "AgentRestarting", node="n1")
    assert cluster.wait_told(begun, "AgentRestarted", node="n1").body.pid == pid
    cluster.wait_steps(task)

    cluster.kill_agent("n2")
    cluster.start_agent("n2")
    killed = cluster.wait_told(begun, "AgentRestarted", node="n2")
    assert killed.body.pid == cluster.agent("n2").pid
    cluster.wait_steps(task)
    assert cluster.pids(task) == before
    assert cluster.task(task)["generation"] == 1
    for kind in ("IncidentOpened", "NodeJoined", "RankStalled", "ReportsLost", "RankExited"):
        assert not cluster.told(begun, kind), cluster.tail(begun)

    # The adopted ranks heal as before: one is killed, the other nodes' ranks stay.
    cluster.unicron("agent", "--restart", "--node", "n2")
    victim = cluster.on(task, "n2")[0]
    after = cluster.seq()
    os.kill(before[victim], signal.SIGKILL)
    cluster.wait_told(after, "RankExited", rank=victim, signal=9)
    cluster.wait_whole(task, 4)
    assert cluster.kept(task, before) == set(before) - {victim}
    cluster.wait_healed(after)
    twins.compare_and_cancel(cluster, task, wanted)


@pytest.mark.thorough
def test_a_node_whose_agent_stays_away_is_lost_and_heals(
    three: Any, tmp_path: Path, twins: Twins
) -> None:
    """The policy of the cluster lets ranks run without an agent for a few seconds only."""
    wanted = small("left", tmp_path / "out", checkpoint_every=20)
    task = three.submit(wanted)
    three.wait_whole(task, 4)
    view, after = three.task(task), three.seq()
    node = sorted({rank["node"] for rank in view["ranks"]})[0]
    gone = three.on(task, node)
    three.kill_agent(node)
    three.wait_told(after, "NodeUnreachable", node=node)
    lost = three.wait_told(after, "IncidentOpened").body
    assert (lost.severity, lost.node, sorted(lost.ranks)) == ("SEV1", node, sorted(gone))
    three.wait_healed(after)
    three.start_agent(node)
    three.wait_told(after, "NodeJoined", node=node)
    three.wait_whole(task, 4)
    twins.compare_and_cancel(three, task, wanted)
