"""Calm tasks: whoever is passed over would have decided nothing, in seeded lives and on paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import structlog
from scenarios import EXAMPLE
from simulated.seeds import quiet, simulate
from simulated.world import World
from unicron.cli.simulate import compare as command
from unicron.control_plane.decide import calm, decide, transition
from unicron.control_plane.simulation.run import Run
from unicron.control_plane.state.cluster import ClusterState
from unicron.control_plane.state.task import Task
from unicron.events.records import reports as r
from unicron.events.records import types as t

SEEDS = (*range(8), 372)
"""One in which members leave while others have finished, and eight more."""


@pytest.fixture
def passed_over(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which shortcuts were taken; each is asked whether it was one."""
    taken: list[str] = []
    steps, is_one_of_many = decide.steps, calm.is_one_of_many

    def checked_steps(state: ClusterState, tasks: Iterable[Task]) -> Iterator[t.Body]:
        for task in tasks:
            if calm.rests(state, task):
                taken.append("calm" if task.id in state.calm else "resting")
                assert next(transition.step(state, task), None) is None, f"task {task.id}"
            yield from steps(state, [task])

    def checked_one_of_many(state: ClusterState, body: t.Body) -> bool:
        found = is_one_of_many(state, body)
        if found:
            taken.append("one of many")
            others = state.tasks.values() if isinstance(body, r.RankExited) else [
                state.tasks[getattr(body, "task")]]  # noqa: B009
            for task in others if calm.is_quiet(state, body) else ():
                assert next(transition.step(state, task), None) is None, f"task {task.id}"
        return found

    monkeypatch.setattr(decide, "steps", checked_steps)
    monkeypatch.setattr(calm, "is_one_of_many", checked_one_of_many)
    yield taken
    structlog.reset_defaults()


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_follows_of_whoever_is_passed_over(seed: int, passed_over: list[str]) -> None:
    quiet()
    simulate(lambda: World(seed))
    assert passed_over


def test_nor_on_paper(passed_over: list[str]) -> None:
    for stage in command.load(EXAMPLE)[1].values():
        Run(stage.ground, stage.policy).play()
    assert passed_over.count("calm") > 40
    assert passed_over.count("resting") > 40
    assert passed_over.count("one of many") > 100
