"""What the loss of one rank costs, in words, by layout and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
from unicron.control_plane.throughput.layout_choices import choices
from unicron.control_plane.throughput.lost_rank import lost_rank_costs
from unicron.control_plane.throughput.training_layouts import with_mirrors
from unicron.events.spec.job import JobSpec, Loop, parse
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel

MODEL = {
    "num_layers": 32,
    "hidden": 4096,
    "num_heads": 32,
    "sequence": 2048,
    "vocabulary": 50304,
    "global_batch": 64,
    "gpu": "A100-80",
    "recompute": "selective",
}


def job(slots: int, **parallel: Any) -> JobSpec:
    return parse(
        {
            "apiVersion": "unicron/v1",
            "name": "loop",
            "slots": {"min": slots, "max": slots},
            "command": ["python", "train.py"],
            "heal": "in-memory",
            "loop": {
                "micro_batches": 64,
                "iterations": 100,
                "output": "/data/out",
                "parallel": {"optimizer": "sharded", **parallel},
                "model": MODEL,
            },
        }
    )


@pytest.mark.parametrize(
    ("optimizer", "axes", "options", "words"),
    [
        ("whole", Axes(dp=2), {}, ""),
        ("whole", Axes(tp=2), {}, "up to 10 iterations; there is no second replica"),
        ("sharded", Axes(dp=4), {}, "up to 10 iterations; each rank has a shard of its own"),
        (
            "sharded",
            Axes(dp=4),
            {"copy_every": 0, "checkpoint_every": 5},
            "all iterations since the last checkpoint; each rank has a shard of its own",
        ),
        ("mirrored", Axes(), {"copy_every": 0}, "all iterations; there is no second replica"),
        (
            "mirrored",
            Axes(tp=2, dp=2),
            {},
            "nothing; kept on a peer: 12 bytes a parameter of its shard, 816 MB a rank",
        ),
    ],
)
def test_what_a_lost_rank_costs(
    optimizer: Any, axes: Axes, options: dict[str, Any], words: str
) -> None:
    loop = Loop(
        micro_batches=8,
        iterations=100,
        output="/data/out",
        parallel=Parallel(optimizer=optimizer),
        **options,
    )
    size = {"mirrored_params": 68_000_000, "mirrored_bytes": 12 * 68_000_000}
    assert lost_rank_costs(loop, axes, **size) == words
    without = lost_rank_costs(loop, axes, **size, is_copied=False)
    assert without == words.replace("up to 10 iterations", "all iterations")


def test_a_sharded_job_is_submitted_with_mirrors_if_they_fit() -> None:
    """TP 2 x DP 4 needs 55.3 GiB with mirrors and 46.0 GiB without. DP 16 needs 76.5 GiB without
    them, and has no room for 4.6 GiB more."""
    fits = with_mirrors(job(8, tensor=[2]))
    assert fits.loop is not None
    assert fits.loop.parallel.optimizer == "mirrored"
    (row,) = choices(job(8, tensor=[2])).choices
    assert any(
        note.startswith(
            "a lost rank costs nothing; kept on a peer: 12 bytes a parameter of its shard, "
        )
        for note in row.notes
    )
    for spec in (job(8, tensor=[2], mirror="never"), job(16, tensor=[1])):
        assert with_mirrors(spec) == spec
        assert any("up to 10 iterations" in note for note in choices(spec).choices[0].notes)
