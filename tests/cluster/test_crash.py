"""The control plane is killed after each kind of record of a transition; training continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from unicron.control_plane.decide.replay import replay, verify
from unicron.control_plane.state.cluster import state_hash

ROUNDS = (
    ("RankExited", "RankReady", "IncidentClosed"),
    ("IncidentOpened", "Quiesced", "Resume"),
    ("Quiesce", "Reconfigure", "TaskProgressed"),
    ("StartRank", "RankStarted", "Reconfigured"),
)
"""The control plane exits once after a record of each kind, three times during one recovery.

The second and third kind of a round are appended after the crash before them.
"""


@pytest.mark.thorough
def test_the_control_plane_may_die_after_any_record(cluster: Any, spec: Callable[..., Any]) -> None:
    begun = cluster.seq()
    task = cluster.submit(spec("steady", iterations=2000))
    cluster.wait_traced(task, event="step", iteration=2)
    for victim, kinds in enumerate(ROUNDS):
        before, healed = cluster.pids(task), cluster.task(task)["healed"]
        cluster.kill_control_plane()
        cluster.start_control_plane(crash_after=kinds[0])
        os.kill(before[victim], signal.SIGKILL)
        for kind in kinds[1:]:
            cluster.wait_control_plane_dead()
            cluster.start_control_plane(crash_after=kind)
        cluster.wait_control_plane_dead()
        cluster.start_control_plane()

        def back(wanted: int = healed + 1) -> dict[str, Any] | None:
            view = cluster.task(task)
            members = [rank for rank in view["ranks"] if rank["state"] == "member"]
            whole = view["state"] in ("running", "degraded") and len(members) == 4
            return view if whole and view["healed"] >= wanted else None

        cluster.wait(back, f"healed after crashes at {kinds}")
        assert cluster.kept(task, before) == set(before) - {victim}, (
            f"a survivor was killed at {kinds}:\n{cluster.endings(task)}"
        )

    cluster.wait_traced(task, event="step", iteration=25)
    lost = cluster.told(begun, "IncidentClosed")
    assert len(lost) == len(ROUNDS)
    assert all(record.body.iterations_lost == 0 for record in lost)
    view = cluster.client().get("/v1/state")
    seq = view["cluster"]["seq"]
    folded = replay([record for record in cluster.records() if record.seq <= seq])
    assert state_hash(folded) == view["cluster"]["hash"]
    verdict = verify(cluster.records())
    assert verdict.ok, verdict
    cluster.cancel(task)
    losses = cluster.losses(task)
    assert len(losses) > 20
    assert losses[-1] < losses[0]
