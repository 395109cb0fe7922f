"""Invariants of a simulated cluster, checked when its life is over."""

from __future__ import annotations

import itertools
from math import inf

from simulated.generation import first_digest, next_digest
from simulated.rank import adoption_s
from simulated.world import World
from unicron.control_plane.decide.replay import verify
from unicron.events.records import codec
from unicron.events.records.decisions import IncidentClosed, IncidentOpened
from unicron.events.records.envelope import Record
from unicron.events.records.orders import Reconfigure, Resume
from unicron.events.records.reports import Reconfigured, TaskCancelRequested, TaskProgressed


def check(world: World, records: list[Record]) -> None:
    """Check all invariants of one finished world."""
    assert not world.witness.violations, world.witness.violations[:5]
    assert not world.cluster.net.violations, world.cluster.net.violations[:5]
    assert [r.seq for r in records] == list(range(1, len(records) + 1)), "the log lacks a seq"
    assert all(a.epoch <= b.epoch and a.at_s <= b.at_s for a, b in itertools.pairwise(records)), (
        "an epoch or a time decreased"
    )
    copies = [codec.decode_record(codec.encode_record(record)) for record in records]
    verdict = verify(copies)
    assert verdict.ok, f"{verdict.words}\n{verdict.expected}\n{verdict.recorded}"
    assert verdict.state_hash == world.last_hash, "a replay gives another state hash"
    world.counts["decisions verified"] += sum(verdict.recomputed.values())
    world.counts["records"] += len(records)
    _check_economics(world, records)
    _check_sources(world, records)
    _check_progress(records)
    _check_incidents(world, records)
    _check_models(world, records)


def _check_models(world: World, records: list[Record]) -> None:
    """Every task that was not cancelled finished with the model of an undisturbed run."""
    for task in world.last_state.tasks.values():
        cancelled = any(
            isinstance(r.body, TaskCancelRequested) and r.body.task == task.id for r in records
        )
        assert task.outcome == "finished" or cancelled, f"task {task.id} {task.outcome} {task.why}"
        train = task.spec.training
        if task.spec.loop is not None and task.outcome == "finished":
            never = adoption_s(task.spec, world.rng) == inf
            assert never or task.heals_in_memory, f"task {task.id} does not heal: {task.declined}"
        if train is not None and task.heals_in_memory and task.outcome == "finished":
            digest, batch = first_digest(train), tuple(range(train.num_micro_batches))
            for iteration in range(train.iterations):
                digest = next_digest(digest, iteration, batch)
            _, path = world.cluster.net.latest[train.output]
            published = world.cluster.net.files[train.output, path]
            assert published == (train.iterations, digest), f"task {task.id}: wrong model"
            world.counts["models exact"] += 1


def _check_economics(world: World, records: list[Record]) -> None:
    """Slots and slot seconds add up, and there are no more faults than incidents."""
    state = world.last_state
    assert state.num_running == sum(len(task.ranks) for task in state.tasks.values())
    num = sum(
        isinstance(record.body, IncidentOpened) or getattr(record.body, "num_times", 0) > 1
        for record in records
    )
    assert state.num_faults <= num, "more faults than incidents"
    most_s = sum(world.nodes.values()) * (records[-1].at_s - records[0].at_s)
    assert 0 <= state.observed_slot_s <= most_s, "more slot time than elapsed"
    world.counts["faults counted"] += state.num_faults


def _check_sources(world: World, records: list[Record]) -> None:
    told: dict[str, list[int]] = {}
    for record in records:
        if record.source != "heart":
            told.setdefault(record.source, []).append(record.source_seq)
    for source, numbers in told.items():
        assert numbers == list(range(1, len(numbers) + 1)), f"{source}: a report is lost or doubled"
    for source, last in world.log._acked.items():
        assert len(told.get(source, ())) >= last, f"{source}: {last} is acknowledged but not logged"
    for key, seq in world.answered.items():
        assert records[seq - 1].source == f"operator/{key}", f"{key} was answered but not logged"


def _check_progress(records: list[Record]) -> None:
    generation: dict[int, int] = {}
    expected: dict[int, int] = {}
    version: dict[int, int] = {}
    origins: dict[int, list[Reconfigured]] = {}
    """Task -> the members' reports since the last Resume, also of generations without one."""
    for record in records:
        match record.body:
            case Reconfigure() as body:
                assert body.generation > generation.get(body.task, 0), f"seq {record.seq}: stale"
                generation[body.task] = body.generation
            case Reconfigured() as body if body.generation == generation.get(body.task):
                origins.setdefault(body.task, []).append(body)
            case Resume() as body:
                told = origins.pop(body.task)
                before, version[body.task] = version.get(body.task, 0), told[-1].step_version
                assert version[body.task] >= before or any(x.source == -1 for x in told), (
                    f"seq {record.seq}: an iteration is lost"
                )
                known = max(expected.get(body.task, 0), version[body.task])
                assert body.progress_from <= known, f"seq {record.seq}: iterations skipped"
                expected[body.task] = body.progress_from
            case TaskProgressed() as body if body.generation == generation.get(body.task):
                assert body.first_iteration == expected[body.task], (
                    f"seq {record.seq}: an iteration is skipped or counted twice"
                )
                expected[body.task] += len(body.losses)
            case _:
                pass


def _check_incidents(world: World, records: list[Record]) -> None:
    """Every incident is closed once, and the tasks' counters agree with their incidents."""
    opened = {r.seq: r.body.task for r in records if isinstance(r.body, IncidentOpened)}
    closed = [r.body for r in records if isinstance(r.body, IncidentClosed)]
    assert sorted(body.of for body in closed) == sorted(opened), "an incident is left open"
    for task in world.last_state.tasks.values():
        own = [body for body in closed if opened[body.of] == task.id]
        healed = sum(body.outcome == "healed" for body in own)
        assert task.healed == healed or (not task.heals_in_memory and 0 <= task.healed <= healed), (
            f"task {task.id}: {task.healed} healed incidents, closed: {healed}"
        )
        lost = sum(body.iterations_lost or 0 for body in own)
        assert task.iterations_lost == lost or not task.heals_in_memory, (
            f"task {task.id} lost {task.iterations_lost} iterations, its incidents {lost}"
        )
