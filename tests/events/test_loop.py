"""Commands with `heal: in-memory` in the decider: loops that adopt Unicron, decline, or neither."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from decider import Driver, at_rest, kinds, only, spec, task_of
from unicron.control_plane.api.needs import needs
from unicron.control_plane.api.view import view
from unicron.control_plane.state.cluster import DECIDER_VERSION
from unicron.control_plane.throughput.training_layouts import layout_of, speed
from unicron.events.errors import SpecError
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.records.reports import InMemoryRecoveryDeclined
from unicron.events.spec.model import Axes

LATE = "no process has adopted Unicron within 180 s (start_s_max)"
LOOP = {"micro_batches": 4, "iterations": 9, "output": "/tmp/loop"}


@pytest.fixture
def d() -> Iterator[Driver]:
    made = Driver()
    yield made
    at_rest(made)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"loop": None}, "loop: is missing"),
        ({"heal": None}, "heal: is missing"),
        ({"heal": "on-disk"}, "heal: invalid enum value 'on-disk'"),
        ({"command": None, "train": {"iterations": 1, "output": "x"}}, "heal: is for a command"),
        ({"command": None}, "command: is missing; loop: needs it"),
        ({"command": None, "loop": None}, "command: is missing; heal: needs it"),
        ({"loop": LOOP | {"micro_batches": 3}}, "slots.max: 4 ranks, but an iteration has 3"),
        ({"loop": LOOP | {"iterations": 0}}, "loop.iterations: must be at least 1"),
        ({"loop": LOOP | {"output": ""}}, "loop.output: must name a folder"),
        (
            {"loop": LOOP | {"parallel": {"optimizer": "mirrored", "mirror": "never"}}},
            "loop.parallel.mirror: never contradicts loop.parallel.optimizer, which is mirrored",
        ),
        (
            {"loop": LOOP | {"parallel": {"tensor": [2, 2]}}},
            "loop.parallel.tensor: names a size twice",
        ),
        ({"hang_after_s": 60}, "hang_after_s: is for a command that is only restarted"),
    ],
)
def test_invalid_loop_specs_are_refused(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec(**{"train": None, "command": ["x"], "heal": "in-memory", "loop": LOOP} | changes)
    assert str(refused.value).startswith(path)


def test_a_replica_of_several_ranks_needs_one_micro_batch() -> None:
    wide = LOOP | {"micro_batches": 2, "parallel": {"tensor": [2]}}
    made = spec(train=None, command=["x"], heal="in-memory", loop=wide)
    assert made.training is not None
    assert [speed(made.training, num) for num in range(1, 5)] == [0.0, 2.0, 0.0, 4.0]
    assert layout_of(made.training, 4) == Axes(tp=2, dp=2)


def test_a_loop_that_adopts_recovers_like_a_training_task(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["x"], heal="in-memory", loop=LOOP))
    d.obey(d.log[-4:])
    start = next(x.body for x in d.log if isinstance(x.body, o.StartRank))
    assert (start.host, start.num_seats, start.port > 0) == ("127.0.0.1", 4, True)
    assert (task_of(d, task).phase, task_of(d, task).generation) == ("training", 1)
    assert "Quiesce" in kinds(d.exit(task, 2))


def _not_adopted(d: Driver, said: bool, *, from_memory: bool = False) -> int:
    """A task of four ranks whose processes run but are no members; with `said` they decline."""
    task = d.submit(spec(train=None, command=["x"], heal="in-memory", loop=LOOP))
    for start in [x.body for x in d.log if isinstance(x.body, o.StartRank)]:
        source = d.source(start.slot.node)
        ids = {"task": task, "rank": start.rank, "attempt": start.attempt}
        d.tell(source, r.RankStarted(**ids, node=start.slot.node, pid=1, log_path=""))
        if said:
            d.tell(
                source,
                InMemoryRecoveryDeclined(
                    **ids, why="FSDP cannot be healed", from_memory=from_memory
                ),
            )
    return task


def test_a_loop_that_declines_is_a_command(d: Driver) -> None:
    task = _not_adopted(d, said=True)
    assert (task_of(d, task).phase, task_of(d, task).declined) == (
        "training",
        "FSDP cannot be healed",
    )
    new = d.exit(task, 0, code=1)
    assert kinds(new) == ["IncidentOpened", "StopRank", "StopRank", "StopRank"]
    starts = only(o.StartRank, d.obey(new))
    assert [x.body.spec.training for x in starts] == [None] * 4
    assert view(d.state)["tasks"][0]["tier"] == "command"


def test_a_loop_that_declines_may_restart_from_memory(d: Driver) -> None:
    task = _not_adopted(d, said=True, from_memory=True)
    stores = only(o.SetCheckpointStores, d.log)[-1].body
    assert [store.node for store in stores.keepers] == ["n1", "n2"]
    for attempt, told in ((1, "IncidentOpened"), (2, "IncidentEscalated")):
        for rank in task_of(d, task).ranks.values():
            d.tell(
                d.source(rank.slot.node),
                r.MemoryCheckpointStored(
                    task=task,
                    rank=rank.rank,
                    attempt=attempt,
                    generation=attempt,
                    step_version=5,
                    node="n2" if rank.slot.node == "n1" else "n1",
                    copy_bytes=8,
                    checksum="",
                    share=rank.rank,
                    num_shares=4,
                ),
            )
        new = d.exit(task, 0, code=1)
        assert kinds(new) == [told, "StopRank", "StopRank", "StopRank"]
        starts = only(o.StartRank, done := d.obey(new))
        for start in (record.body for record in starts):
            assert start.spec.heal == "in-memory"
            assert start.declined == "FSDP cannot be healed"
            assert {copy.generation for copy in start.copies} == set(range(1, attempt + 1))
        # The new processes do not know the stores.
        assert len(only(o.SetCheckpointStores, done)) == 1
    assert view(d.state)["tasks"][0]["from_memory"]


def test_a_script_without_unicron_is_a_command_after_the_deadline(d: Driver) -> None:
    task = _not_adopted(d, said=False)
    assert task_of(d, task).phase == "starting"
    d.due(f"start/{task}/0/1")
    assert task_of(d, task).phase == "training"
    assert task_of(d, task).declined == LATE
    assert not any(name.startswith("start/") for name in d.state.deadlines)
    new = d.exit(task, 0, code=1)
    assert kinds(new) == ["IncidentOpened", "StopRank", "StopRank", "StopRank"]
    for number in (1, 2, 3):
        d.exit(task, number, signal=15)
    last = d.due(f"restart/{task}/0")
    # The new processes get a pipe, too: they may adopt Unicron.
    starts = [x.body for x in only(o.StartRank, last)]
    assert [start.spec.heal for start in starts] == ["in-memory"] * 4
    for start in starts:
        last = _started(d, start)
    assert kinds(last) == ["IncidentRecovering"]
    assert (task_of(d, task).phase, task_of(d, task).declined) == ("training", LATE)


def _started(d: Driver, start: o.StartRank) -> list[Record]:
    return d.tell(
        d.source(start.slot.node),
        r.RankStarted(
            task=start.task,
            rank=start.rank,
            attempt=start.attempt,
            node=start.slot.node,
            pid=1,
            log_path="",
        ),
    )


def _adopted(d: Driver, task: int, rank: int) -> list[Record]:
    process = task_of(d, task).ranks[rank]
    return d.tell(
        d.source(process.slot.node), r.RankAdopted(task=task, rank=rank, attempt=process.attempt)
    )


def _ready(d: Driver, task: int, *ranks: int) -> list[Record]:
    """The decisions after the last of these ranks is ready."""
    new: list[Record] = []
    for rank in ranks:
        process = task_of(d, task).ranks[rank]
        new = d.tell(
            d.source(process.slot.node),
            r.RankReady(
                task=task,
                rank=rank,
                attempt=process.attempt,
                endpoint=f"h:{rank}",
                num_params=1,
                state_bytes=1,
                iteration_flops=1.0,
                data_digest="",
            ),
        )
    return new


def _trains_and_heals(d: Driver, task: int, ready: list[Record]) -> None:
    """All ranks are ready: they form a generation, and a fault is healed in memory."""
    assert kinds(ready) == ["Reconfigure"]
    d.obey(ready)
    assert (task_of(d, task).phase, task_of(d, task).generation) == ("training", 1)
    d.progress(task)
    assert not only(o.StopRank, d.log)
    assert "Quiesce" in kinds(d.exit(task, 2))


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("takeover", [False, True])
def test_a_script_that_adopts_late_is_taken(d: Driver, says: bool, takeover: bool) -> None:
    """`says`: its agent reports the adoption. That of an older version reports RankReady only."""
    task = _not_adopted(d, said=False)
    d.due(f"start/{task}/0/1")
    assert view(d.state)["tasks"][0]["tier"] == "command"
    if takeover:
        d.epoch += 1
        d.tell(
            "leader/def",
            r.EpochStarted(nonce="def", code="1", heart=DECIDER_VERSION),
            epoch=d.epoch,
        )
    if says:
        assert not kinds(_adopted(d, task, 1))
    assert not kinds(_ready(d, task, 0))
    assert (task_of(d, task).phase, task_of(d, task).declined) == ("starting", "")
    assert view(d.state)["tasks"][0]["tier"] == "train"
    _trains_and_heals(d, task, _ready(d, task, 1, 2, 3))


def test_a_script_that_has_adopted_prepares_without_limit(d: Driver) -> None:
    task = _not_adopted(d, said=False)
    assert not kinds(_adopted(d, task, 1))
    for rank in range(4):
        assert not kinds(d.due(f"start/{task}/{rank}/1"))
    assert (task_of(d, task).phase, task_of(d, task).declined) == ("starting", "")
    assert not kinds(_ready(d, task, 0, 3))
    (need,) = needs(view(d.state), d.now_s + 300.0)
    assert need.what == "not ready"
    assert need.why.startswith("alpha has adopted Unicron, but ranks 1 2 not ready after ")
    assert need.why.endswith(" (start_s_max: 180 s); nothing is ended for that")
    assert need.do == "`unicron logs alpha`"
    _trains_and_heals(d, task, _ready(d, task, 1, 2))


def test_a_rank_that_is_lost_while_others_prepare_is_started_again_alone(d: Driver) -> None:
    task = _not_adopted(d, said=False)
    _adopted(d, task, 0)
    d.due(f"start/{task}/0/1")
    _ready(d, task, 0, 1)
    new = d.exit(task, 2)
    assert kinds(new) == ["IncidentOpened", "StartRank"]
    _started(d, only(o.StartRank, new)[0].body)
    assert not kinds(d.due(f"start/{task}/2/2"))
    assert task_of(d, task).declined == ""
    _trains_and_heals(d, task, _ready(d, task, 3, 2))


def test_a_process_of_the_second_round_that_adopts_is_taken(d: Driver) -> None:
    """In the first round none adopts in time, and one fails: an incident is open meanwhile."""
    task = _not_adopted(d, said=False)
    d.due(f"start/{task}/0/1")
    d.exit(task, 0, code=1)
    for number in (1, 2, 3):
        d.exit(task, number, signal=15)
    for start in only(o.StartRank, d.due(f"restart/{task}/0")):
        _started(d, start.body)
    _adopted(d, task, 2)
    d.obey(_ready(d, task, 0, 1, 2, 3))
    d.progress(task)
    assert (task_of(d, task).phase, task_of(d, task).generation) == ("training", 1)
    assert task_of(d, task).incident == 0 or d.state.incidents[task_of(d, task).incident].outcome
    assert "Quiesce" in kinds(d.exit(task, 2))


def test_a_newcomer_of_a_script_prepares_without_limit(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["x"], heal="in-memory", loop=LOOP))
    d.obey(d.log[-4:])
    d.progress(task)
    healed = d.exit(task, 2)
    start = next(x.body for x in healed if isinstance(x.body, o.StartRank))
    _started(d, start)
    d.obey([x for x in healed if not isinstance(x.body, o.StartRank)])
    assert not kinds(d.due(f"start/{task}/2/2"))
    assert (task_of(d, task).phase, task_of(d, task).declined) == ("training", "")
    assert "Quiesce" in kinds(_ready(d, task, 2))


def test_a_process_that_never_starts_is_given_up_but_not_on_a_silent_node(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["x"], heal="in-memory", loop=LOOP))
    on = {rank.rank: rank.slot.node for rank in task_of(d, task).ranks.values()}
    first, other = (next(rank for rank in on if on[rank] == node) for node in ("n1", "n2"))
    d.tell("leader/abc", r.NodeUnreachable(node="n1", incarnation=1, silence_s=9.0))
    assert not kinds(d.due(f"start/{task}/{first}/1"))
    assert f"start/{task}/{first}/1" in d.state.deadlines  # it may run
    stops = only(o.StopRank, d.due(f"start/{task}/{other}/1"))
    assert [stop.body.rank for stop in stops] == [other]


def test_a_process_that_adopts_beside_one_that_has_ended_without_is_ended(d: Driver) -> None:
    task = _not_adopted(d, said=False)
    d.exit(task, 0, code=0)
    new = _ready(d, task, 1)
    assert "it adopted Unicron, but another process of the task did not" in [
        stop.body.why for stop in only(o.StopRank, new)
    ]


def test_a_script_without_unicron_that_ends_is_a_command(d: Driver) -> None:
    task = _not_adopted(d, said=False)
    for number in range(4):
        last = d.exit(task, number, code=0)
    assert kinds(last) == ["TaskEnded"]
    assert task_of(d, task).outcome == "finished"
    assert task_of(d, task).declined == "rank 0 ended without having adopted Unicron"
