"""A collective fails and nobody is to blame: the same processes try again, in a new generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from twins import Twins, small

STRUCK = 12
ITERATIONS = 40
VICTIM = 2


def fails(cluster: Any, task: int, **where: int) -> None:
    """As if the victim's connection were cut as it enters this; the others meet it closed."""
    cluster.hold(task, VICTIM, event="bucket", iteration=STRUCK, then="fail", **where)


@pytest.mark.parametrize(("overlap", "bucket"), [
    (False, 0), pytest.param(True, 1, marks=pytest.mark.thorough)])
def test_the_same_members_finish_the_iteration(
        two: Any, tmp_path: Path, twins: Twins, overlap: bool, bucket: int) -> None:
    spec = small("again", tmp_path, iterations=ITERATIONS)
    if overlap:
        spec["train"] |= {"overlap": True, "bucket_params": 20_000}
    after = two.seq()
    task = two.submit(spec)
    fails(two, task, bucket=bucket)
    assert two.wait_ended(task)["state"] == "finished", two.endings(task)

    told = two.told(after, "CollectiveFailed", task=task)
    assert any("injected" in record.body.error for record in told)
    # Who is starved may be told to leave before it meets it.
    ranks = {record.body.rank for record in told}
    assert VICTIM in ranks
    assert len(ranks) > 1, "others met it by themselves"
    opened = two.told(after, "IncidentOpened", task=task)
    assert [record.body.severity for record in opened] == ["SEV3"]
    (closed,) = two.told(after, "IncidentClosed")
    assert (closed.body.outcome, closed.body.iterations_lost, closed.body.ckpt_read) == (
        "healed", 0, False)
    ordered = two.told(after, "Reconfigure", task=task)
    assert [record.body.generation for record in ordered] == [1, 2]
    assert not [record for record in two.told(after, "RankExited", task=task)
                if record.seq < closed.seq], "no process ended"

    lines = two.traced(task)
    assert len({line["pid"] for line in lines}) == 4
    for iteration in range(ITERATIONS):
        assert sorted(line["micro_batch"] for line in lines if line["event"] == "forward"
                      and line["iteration"] == iteration) == [0, 1, 2, 3]
    twins.hold(*twins.start(spec), two.losses(task))
    two.verify()
