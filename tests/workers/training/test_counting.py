"""Real members count what Megatron's schedules enter, and one of them that sleeps is located.

The members are processes with gloo. What their pages tell is read by the locator of the control
plane, as if their agents had reported it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import hung_world
import pytest
import worlds
from hung_world import Where
from msgspec.structs import replace
from unicron.control_plane.incidents.group_evidence import Located, locate_stalls
from unicron.control_plane.state.task import Stall
from unicron.events.spec.job import Batch, Model, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import Parallel
from unicron.workers.agent.monitoring.rank_monitor import group_progress
from unicron.workers.ipc.group_rows import Progress

TRAIN = Train(
    model=Model(num_layers=4, hidden=32, num_heads=2, sequence=16),
    batch=Batch(global_=8, micro=1),
    iterations=10,
    output="unused",
)


class Case(NamedTuple):
    axes: Axes
    where: Where
    is_sharded: bool = False


CASES = {
    "tensor": Case(Axes(tp=2, dp=2), Where(1, "forward", 2)),
    "pipeline": Case(Axes(pp=2, dp=2), Where(2, "backward", 1)),
    "pipeline-first": Case(Axes(pp=2, dp=2), Where(0, "forward", 3)),
    "interleaved": Case(Axes(pp=2, dp=2, chunks=2), Where(3, "forward", 3)),
    "sharded": Case(Axes(tp=2, dp=2), Where(3, "backward", 4), is_sharded=True),
}
THOROUGH = {"pipeline-first", "sharded"}


def located(told: Sequence[Progress]) -> Located | None:
    return locate_stalls({place: stall(place, one) for place, one in enumerate(told)}, range(4))


def stall(place: int, told: Progress) -> Stall:
    return Stall(
        iteration=1,
        where="collective",
        what="forward",
        collective=0,
        since_s=10.0,
        normal_s=1.0,
        told_s=15.0,
        seq=place + 1,
        groups=tuple(group_progress(entry, entry.at_s + 5.0) for entry in told.entries),
        are_groups_complete=told.is_complete,
        waits=told.waits,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.thorough] * (one in THOROUGH)) for one in CASES]
)
def test_the_member_that_sleeps_is_located(name: str, tmp_path: Path) -> None:
    axes, where, is_sharded = CASES[name]
    train = replace(TRAIN, parallel=Parallel(optimizer="sharded")) if is_sharded else TRAIN
    answers = worlds.run(4, hung_world.hung, train, axes, where, str(tmp_path))
    told, ended = zip(*answers, strict=True)
    assert all(one.is_complete for one in told)
    assert [one.waits for one in told] == [place != where.place for place in range(4)], told
    found = located(told)
    assert found is not None, told
    assert (found.kind, found.ranks) == ("rank", (where.place,)), found

    # the schedule is counted alike by all: at its end nobody waits for anybody
    assert not any(one.waits for one in ended)
    assert located(ended) is None, ended
    sizes = {entry.role: entry.members for one in ended for entry in one.entries}
    assert set(sizes) >= {"world", "dp_cp", "tp" if axes.tp > 1 else "pp"}, sizes
