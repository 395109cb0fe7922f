"""Faults without a name: what comes back is put on what its members share, and tried elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from decider import Driver, only, spec, task_of, the
from failing import experiments, out
from hangs import stalled
from sick_network import WEEK_S, Bad, SickNetwork
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.state.cluster import ClusterState, state_hash
from unicron.events.records import decisions
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.records.in_words import essentials

TRAIN = {"iterations": 10**6, "output": "/tmp/out", "batch": {"global": 24, "micro": 2}}


@pytest.fixture
def d() -> Driver:
    return Driver(nodes=6, slots=1)


@pytest.fixture
def task(d: Driver) -> int:
    task = d.running(spec(slots={"min": 3, "max": 3}, train=TRAIN))
    d.progress(task, 20)
    return task


def fails(d: Driver, task: int, peer: str = "", *, after: int = 3) -> list[Record]:
    """A collective fails under all members; those elsewhere name `peer`. It trains `after` more."""
    it, told = task_of(d, task), list[Record]()
    for rank in list(it.living_members()):
        told += d.tell(
            d.source(rank.slot.node),
            r.CollectiveFailed(
                task=task,
                rank=rank.rank,
                attempt=rank.attempt,
                generation=it.generation,
                iteration=it.iteration,
                error="connection closed by peer",
                peer=f"{peer}:1" if peer and peer != rank.slot.node else "",
            ),
        )
    told += d.due(f"evidence/{task}/{it.generation}")
    told += d.obey(told)
    d.now_s += 30.0
    return told + (d.progress(task, after) if after and it.phase == "training" else [])


def nodes(d: Driver, task: int) -> set[str]:
    return {seat.slot.node for seat in task_of(d, task).target}


def test_the_first_fault_is_reattempted_in_place(d: Driver, task: int) -> None:
    fails(d, task, "n2")
    assert experiments(d) == []
    assert nodes(d, task) == {"n1", "n2", "n3"}


def test_what_comes_back_moves_the_rank_of_whom_its_peers_name(d: Driver, task: int) -> None:
    fails(d, task, "n2")
    begun = the(decisions.ExperimentBegun, fails(d, task, "n2"))
    assert [seat.slot.node for seat in begun.suspects] == ["n2"]
    assert begun.considered[0] == decisions.Suspicion(kind="host", name="n2", num=2)
    assert {one.name for one in begun.considered} == {"n2", "n1 - n2", "n2 - n3"}
    assert "n2" not in nodes(d, task)
    assert len(task_of(d, task).members) == 3
    judged = the(decisions.SlotsJudged, d.progress(task, 20))
    assert judged.verdict == "open", "what is bad for minutes ends by itself"
    assert not out(d)
    other = d.running(spec(name="beta", slots={"min": 2, "max": 2}, train=TRAIN))
    assert "n2" not in nodes(d, other), "the next placement avoids it"
    third = d.running(spec(name="gamma", slots={"min": 1, "max": 1}, train=TRAIN))
    assert nodes(d, third) == {"n2"}, "no task waits while it is free"


def test_a_host_without_which_the_fault_comes_back_is_cleared(d: Driver, task: int) -> None:
    for _ in range(4):
        fails(d, task)
    assert experiments(d) == ["tried", "cleared", "tried", "cleared", "tried"]
    assert nodes(d, task).isdisjoint({"n3"})
    d.progress(task, 20)
    assert experiments(d)[-1] == "open"
    assert not out(d)


def sick_for_a_day(d: Driver, task: int) -> None:
    for _ in range(2):
        fails(d, task, "n2")
        d.progress(task, 20)
        d.now_s += 3 * 3600.0
    fails(d, task, "n2")
    d.progress(task, 20)


def test_three_incidents_of_a_sick_link_take_the_host_out(d: Driver, task: int) -> None:
    sick_for_a_day(d, task)
    assert len(only(decisions.IncidentOpened, d.log)) == 3
    assert experiments(d) == ["tried", "slot"]
    assert out(d) == ["n2/0"]
    assert nodes(d, task).isdisjoint({"n2"})


def test_it_returns_if_the_fault_comes_back_elsewhere(d: Driver, task: int) -> None:
    sick_for_a_day(d, task)
    fails(d, task)
    assert "cleared" in experiments(d)
    assert out(d) == []


def test_suspicion_adds_up_over_tasks(d: Driver, task: int) -> None:
    fails(d, task, "n2")
    d.obey(d.tell("operator/1", r.TaskCancelRequested(task=task)))
    for name in ("beta", "gamma"):
        again = d.running(spec(name=name, slots={"min": 3, "max": 3}, train=TRAIN))
        d.progress(again, 20)
        told = fails(d, again, "n2")
        d.progress(again, 20)
        if name == "beta":
            assert not only(decisions.ExperimentBegun, told)
            d.obey(d.tell("operator/2", r.TaskCancelRequested(task=again)))
    assert the(decisions.ExperimentBegun, told).considered[0].num == 3


def test_a_switch_is_suspected_if_no_host_alone_explains_it() -> None:
    d = SickNetwork(1, num_nodes=12, sizes=(6,))
    (task,) = d.jobs
    d.progress(task, 20)
    switch = {name: d.state.nodes[name].labels.switch for name in sorted(nodes(d, task))}
    label = max(switch.values(), key=lambda one: sum(one == x for x in switch.values()))
    first, second, *_ = [name for name, one in switch.items() if one == label]
    fails(d, task, first)
    d.progress(task, 20)
    d.now_s += 600.0
    fails(d, task, second)
    fails(d, task, second)
    (begun,) = [one.body for one in d.log if isinstance(one.body, decisions.ExperimentBegun)]
    assert f"of switch {label}" in begun.why
    assert {switch[seat.slot.node] for seat in begun.suspects} == {label}
    assert not out(d)


def test_a_fault_that_is_everywhere_ends_the_task_with_its_own_line(d: Driver, task: int) -> None:
    for _ in range(100):
        if task_of(d, task).outcome or task_of(d, task).ending:
            break
        fails(d, task, after=0)
    why = task_of(d, task).why
    assert task_of(d, task).outcome == "failed"
    assert "again and again at iteration 21" in why
    assert "whatever nodes it has" in why
    assert "connection reset" in why
    assert not out(d)


def test_while_a_network_is_bad_for_minutes_no_task_fails(d: Driver, task: int) -> None:
    for _ in range(20):
        fails(d, task, after=0)
    assert not task_of(d, task).outcome
    d.progress(task, 20)
    assert task_of(d, task).phase == "training"


def test_no_experiment_while_healing_is_frozen(d: Driver, task: int) -> None:
    fails(d, task, "n2")
    d.tell("operator/9", r.HealingFrozen(reason="a person looks"))
    fails(d, task, "n2", after=0)
    assert experiments(d) == []


# --- ranks that hang in their own work -----------------------------------------------------------
def hangs(d: Driver, task: int, number: int) -> list[Record]:
    it = task_of(d, task)
    told = list[Record]()
    for rank in it.living_members():
        where = "own" if rank.rank == number else "collective"
        told += stalled(d, task, rank.rank, where, iteration=it.iteration)
    told = d.due(f"hang/{task}/{it.generation}")
    return told + d.obey(told)


def test_a_rank_that_hangs_twice_moves_and_no_slot_is_out(d: Driver, task: int) -> None:
    assert not only(decisions.ExperimentBegun, hangs(d, task, 1))
    d.progress(task, 20)
    begun = the(decisions.ExperimentBegun, hangs(d, task, 1))
    assert "has hung there twice in 24 h" in begun.why
    d.progress(task, 20)
    assert experiments(d) == ["tried", "open"]
    assert out(d) == []
    hangs(d, task, 1)
    d.progress(task, 20)
    hangs(d, task, 1)
    assert not task_of(d, task).outcome, "it goes on, and moves again"
    assert out(d) == []


def test_a_slot_on_which_ranks_of_two_tasks_hang_is_out(d: Driver, task: int) -> None:
    slot = task_of(d, task).seats_at[1]
    for _ in range(2):
        hangs(d, task, 1)
        d.progress(task, 20)
    assert out(d) == []
    other = d.running(spec(name="beta", slots={"min": 3, "max": 3}, train=TRAIN))
    d.progress(other, 20)
    (number,) = [rank for rank, at in task_of(d, other).seats_at.items() if at == slot]
    d.obey(d.tell("operator/1", r.TaskCancelRequested(task=task)))
    for _ in range(2):
        hangs(d, other, number)
        d.progress(other, 20)
    assert out(d) == [f"{slot.node}/{slot.index}"]


def test_a_rank_that_hangs_wherever_it_is_ends_the_task(d: Driver, task: int) -> None:
    for _ in range(3):
        hangs(d, task, 1)
    assert task_of(d, task).outcome == "failed"
    assert "rank 1 hangs in iteration 21 wherever it is" in task_of(d, task).why
    assert out(d) == []


# --- weeks of a cluster ---
def played(seeds: range) -> Iterator[SickNetwork]:
    for seed in seeds:
        d = SickNetwork(seed)
        d.draw(4)
        d.week()
        yield d


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_weeks_with_bad_links_hosts_and_switches(first: int) -> None:
    num_innocent = num_experiments = 0
    for d in played(range(first, first + 10)):
        assert all(not it.outcome for it in d.state.tasks.values())
        assert all(it.phase == "training" for it in d.state.tasks.values())
        num_innocent += len(d.innocent())
        num_experiments += d.num_experiments
    assert num_innocent == 0
    assert num_experiments > 0


@pytest.mark.parametrize("seed", [2379, 4703])
def test_a_task_leaves_a_switch_that_is_bad_longer_than_a_network_may_be(seed: int) -> None:
    """Host after host was exchanged for another behind the same switch, for 15 minutes."""
    (d,) = played(range(seed, seed + 1))
    assert all(not it.outcome and it.phase == "training" for it in d.state.tasks.values())
    (begun, *_) = [
        one.body
        for one in d.log
        if isinstance(one.body, decisions.ExperimentBegun) and len(one.body.suspects) > 1
    ]
    assert begun.why.startswith(f"ranks {begun.suspects[0].rank} {begun.suspects[1].rank} of ")
    assert d.innocent() == []


def test_a_host_that_is_bad_every_day_is_taken_out() -> None:
    d = SickNetwork(5, num_nodes=8, sizes=(4,))
    sick = task_of(d, d.jobs[0]).target[1].slot.node
    d.bad = [
        Bad("host", (sick,), d.now_s + hour * 3600.0, d.now_s + hour * 3600.0 + 30.0, 1.0)
        for hour in range(1, 24, 3)
    ]
    d.week()
    assert sick not in nodes(d, d.jobs[0])
    assert d.innocent() == []
    assert d.now_s > WEEK_S


def test_a_replay_folds_the_same_suspicion() -> None:
    d = SickNetwork(3)
    d.draw(25)
    d.week()
    state = ClusterState()
    for record in d.log:
        fold(state, record)
    assert state_hash(state) == state_hash(d.state)
    begun = next(one for one in d.log if isinstance(one.body, decisions.ExperimentBegun))
    assert "faults without a name" in essentials("ExperimentBegun", msgspec.to_builtins(begun.body))
