"""A cluster's worst days in virtual time: seeded faults first, then peace, and what must hold."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator

import pytest
import structlog
from simulated_world import World
from unicron.control_plane.replay import verify
from unicron.events import codec
from unicron.events.orders import IncidentClosed, Reconfigure, Resume, StartRank, StopRank
from unicron.events.records import Record
from unicron.events.reports import Reconfigured, TaskCancelRequested, TaskProgressed
from unicron.workers import virtual_time
from unicron.workers.simulated_generation import first_digest, next_digest

NUM_SEEDS = int(os.environ.get("UNICRON_SIM_SEEDS", "200"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hundreds of leaders need not say that they lead."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def check(world: World, records: list[Record]) -> None:
    """All invariants over one finished world."""
    assert not world.cluster.net.violations, world.cluster.net.violations[:5]
    assert [r.seq for r in records] == list(range(1, len(records) + 1)), "the log has a hole"
    assert all(a.epoch <= b.epoch and a.at_s <= b.at_s
               for a, b in itertools.pairwise(records)), "epoch or time went back"
    copies = [codec.decode_record(codec.encode_record(record)) for record in records]
    verdict = verify(copies)
    assert verdict.ok, f"{verdict.words}\n{verdict.expected}\n{verdict.recorded}"
    assert verdict.state_hash == world.last_hash, "folding the log again gives another state"
    _check_sources(world, records)
    _check_progress(records)
    for task in world.last_state.tasks.values():
        cancelled = any(isinstance(r.body, TaskCancelRequested) and r.body.task == task.id
                        for r in records)
        assert task.outcome == "finished" or cancelled, f"task {task.id} {task.outcome} {task.why}"
        train = task.spec.train
        if train is not None and task.outcome == "finished":
            digest, batch = first_digest(train.seed), tuple(range(train.num_micro_batches))
            for iteration in range(train.iterations):
                digest = next_digest(digest, iteration, batch)
            _, path = world.cluster.net.latest[train.output]
            published = world.cluster.net.files[train.output, path]
            assert published == (train.iterations, digest), f"task {task.id}: another model"


def _check_sources(world: World, records: list[Record]) -> None:
    told: dict[str, list[int]] = {}
    for record in records:
        if record.source != "heart":
            told.setdefault(record.source, []).append(record.source_seq)
    for source, numbers in told.items():
        assert numbers == list(range(1, len(numbers) + 1)), f"{source}: lost or doubled"
    for source, last in world.log._acked.items():
        assert len(told.get(source, ())) >= last, f"{source}: {last} acknowledged, not in the log"
    for key, seq in world.answered.items():
        assert records[seq - 1].source == f"operator/{key}", f"{key} was answered, not written"


def _check_progress(records: list[Record]) -> None:
    generation: dict[int, int] = {}
    expected: dict[int, int] = {}
    version: dict[int, int] = {}
    for record in records:
        match record.body:
            case Reconfigure() as body:
                assert body.generation > generation.get(body.task, 0), f"seq {record.seq}"
                generation[body.task] = body.generation
            case Reconfigured() as body if body.generation == generation.get(body.task):
                before = version.get(body.task, 0)
                assert body.step_version >= before or body.source == -1, (
                    f"seq {record.seq}: an iteration is lost")
                version[body.task] = body.step_version
            case Resume() as body:
                known = max(expected.get(body.task, 0), version[body.task])
                assert body.progress_from <= known, f"seq {record.seq}: skips iterations"
                expected[body.task] = body.progress_from
            case TaskProgressed() as body if body.generation == generation.get(body.task):
                assert body.first_iteration == expected[body.task], (
                    f"seq {record.seq}: an iteration is skipped, or counted twice")
                expected[body.task] += len(body.losses)
            case _:
                pass


def simulate(seed: int, *, only_leaders: bool = False) -> tuple[World, list[Record]]:
    """One world's life and its log; its seed and its faults are printed when it ends badly."""

    async def live() -> tuple[World, list[Record]]:
        world = World(seed, only_leaders=only_leaders)
        try:
            return world, await world.live()
        except BaseException:
            print(f"seed {seed}:", *world.faults, sep="\n  ")
            raise

    return virtual_time.run(live())


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_faults_then_peace(seed: int) -> None:
    world, records = simulate(seed)
    check(world, records)


def lose_a_rank(doom: str = "", doom_seq: int = 0) -> tuple[World, list[Record]]:
    """The one world in which a rank dies, with a leader that dies around append `doom_seq`."""

    async def live() -> tuple[World, list[Record]]:
        world = World(7, only_leaders=True)
        return world, await world.lose_a_rank(doom, doom_seq)

    return virtual_time.run(live())


@pytest.mark.parametrize("doom", ["before", "after"])
def test_a_leader_may_die_around_any_append(doom: str) -> None:
    """Around every record of a first start and of a whole recovery, one world for each."""
    _, undisturbed = lose_a_rank()
    for seq in range(1, len(undisturbed) + 1):
        where = f"{doom} seq {seq} {undisturbed[seq - 1].kind}"
        world, records = lose_a_rank(doom, seq)
        check(world, records)
        assert world.num_leaders == 2, where
        assert world.cluster.net.num_stopped == 0, where
        starts = [r.body.rank for r in records if isinstance(r.body, StartRank)]
        assert sorted(starts) == [0, 1, 2, 2, 3], f"{where}: a healthy rank was started again"
        healed = [r.body for r in records if isinstance(r.body, IncidentClosed)]
        assert [(b.outcome, b.iterations_lost, b.ckpt_read) for b in healed] == [
            ("healed", 0, False)], where


@pytest.mark.parametrize("seed", range(10))
def test_a_dead_control_plane_hurts_nobody(seed: int) -> None:
    """Only leaders die here, are cut off, or fight: no rank is stopped, none starts again."""
    world, records = simulate(seed, only_leaders=True)
    check(world, records)
    assert world.num_leaders > 2
    assert world.cluster.net.num_stopped == 0
    assert not [r for r in records if isinstance(r.body, StopRank) or r.kind == "IncidentOpened"]
    starts = [(r.body.task, r.body.rank) for r in records if isinstance(r.body, StartRank)]
    assert len(starts) == len(set(starts)), "a healthy rank was started again"


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_writes_the_same_log(seed: int) -> None:
    first, second = simulate(seed)[1], simulate(seed)[1]
    assert [codec.encode_record(r) for r in first] == [codec.encode_record(r) for r in second]
