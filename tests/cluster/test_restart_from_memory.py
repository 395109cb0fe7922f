"""Tasks that cannot be healed in place start again together, from their state in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import restarts
from real_cluster import RealCluster
from unicron.events.spec.support import ROWS

USUAL = ("FSDP",)
"""`make test` runs this; the others differ only in why the loop declines."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.row, marks=() if case.row in USUAL else pytest.mark.thorough)
        for case in restarts.CASES
    ],
)
def test_the_processes_continue_from_memory(
    cluster: RealCluster, tmp_path: Path, case: restarts.Case
) -> None:
    """Nothing is on disk, so a process without its state would begin at the first iteration. At
    most the iterations since the last in-memory checkpoint are trained again."""
    assert [row.loop.grade for row in ROWS if row.what == case.row] == ["restart from memory"]
    script, after = restarts.script_of(tmp_path, case), cluster.seq()
    found = restarts.struck(cluster, script, tmp_path, {"copy_every": restarts.EVERY})
    print(
        f"{case.row}: {found.fault_to_step_s:.1f} s from the fault to the end of the next "
        f"iteration, {found.iterations_lost} iterations trained again"
    )
    assert found.declined.from_memory
    assert sorted((one.rank, one.attempt) for one in found.starts) == [
        (rank, attempt) for rank in range(restarts.NUM) for attempt in (1, 2)
    ]
    assert [bool(one.copies) for one in found.starts] == [False, False, True, True]
    assert found.iterations_lost <= 2 * restarts.EVERY
    assert [line["iteration"] for line in found.lines].count(0) == 1
    losses = restarts.undisturbed(script, tmp_path / "alone")
    for line in found.lines:
        assert line["loss"] == pytest.approx(losses[line["iteration"]], rel=1e-6)
    if case.example == "fsdp.py":  # its progress is what it prints
        view = cluster.task(found.task)
        assert (view["iteration"], view["iterations"]) == (restarts.ITERATIONS,) * 2
        assert view["loss"] == pytest.approx(losses[-1], rel=1e-6)
        printed = cluster.unicron("logs", str(found.task)).stdout
        assert f" iteration {restarts.ITERATIONS}/{restarts.ITERATIONS} | elapsed" in printed
    lost: Any = cluster.wait_told(after, "MemoryCheckpointsLost", task=found.task).body
    assert lost.why == "the task has ended"
