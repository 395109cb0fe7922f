"""Which stores a task gets: the best of all nodes, found among few of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from decider import Driver, spec, task_of
from unicron.control_plane.decide import memory_checkpoints
from unicron.control_plane.decide.memory_checkpoints import (
    assign_stores,
    bytes_max_of,
    node_bytes,
)
from unicron.control_plane.state.node import Node
from unicron.control_plane.state.task import Task
from unicron.control_plane.throughput.state_size import NUM_STORES_MAX, share_bytes
from unicron.events.records.types import (
    CHECKPOINTS_NUM_MAX,
    Labels,
    Member,
    MemoryCheckpoint,
    NodeStores,
)

SPEC = spec()


def cluster(draw: random.Random) -> tuple[Driver, Task, list[str]]:
    """Nodes with and without stores, racks and memory; tasks that store on them."""
    d = Driver(nodes=0)
    names = [f"n{number}" for number in range(draw.choice([1, 2, 3, 9, 20]))]
    num_racks, most = draw.choice([0, 2, 4]), draw.choice([0, 10**6, 10**7, 10**8])
    for name in names:
        rack = f"r{draw.randrange(num_racks)}" if num_racks and draw.random() < 0.8 else ""
        d.state.nodes[name] = Node(
            name=name,
            incarnation=1,
            host="h",
            pid=1,
            num_slots=8,
            accelerator="cpu",
            keeper="" if draw.random() < 0.15 else f"{name}:1",
            labels=Labels(rack=rack),
            health=draw.choice(["healthy"] * 8 + ["unreachable", "left"]),
            copies_bytes_max=most and draw.randrange(1, most),
        )
    for number in range(1, draw.choice([2, 4, 8])):
        own = [draw.choice(names) for _ in range(draw.choice([0, 1, 4, 8]))]
        d.state.tasks[number] = Task(
            id=number,
            spec=SPEC,
            weight=1.0,
            submitted_s=0.0,
            since_s=0.0,
            outcome="finished" if draw.random() < 0.1 else "",
            members=tuple(Member(rank, 1, name, "e") for rank, name in enumerate(own)),
            stores=tuple(
                NodeStores(name, tuple(draw.sample(names, min(len(names), draw.randrange(3)))))
                for name in sorted(set(own))
                if draw.random() < 0.6
            ),
            copies=[
                MemoryCheckpoint(
                    node=draw.choice(names),
                    endpoint="e",
                    rank=0,
                    generation=1,
                    step_version=1,
                    copy_bytes=draw.randrange(1, 10**7),
                    checksum="c",
                    share=share,
                    num_shares=4,
                )
                for share in range(draw.randrange(5))
            ],
        )
    task = task_of(d, 1)
    return d, task, [member.node for member in task.members] or [names[0]]


def best_of_all(d: Driver, task: Task, nodes: list[str]) -> tuple[NodeStores, ...]:
    """The rule of `assign_stores`, with a look at every node; () if a node gets none."""
    state, names = d.state, sorted(d.state.nodes)
    free: dict[str, float] = {
        name: (bytes_max_of(state, state.nodes[name]) or float("inf"))
        - sum(
            node_bytes(other).get(name, 0)
            for other in state.tasks.values()
            if other is not task and not other.outcome
        )
        for name in names
        if state.nodes[name].takes_tasks and state.nodes[name].keeper
    }
    now, load = {one.node: one.stores for one in task.stores}, Counter[str]()
    each_bytes = CHECKPOINTS_NUM_MAX * share_bytes(task, len(nodes))
    found: list[NodeStores] = []
    for node, num in sorted(Counter(nodes).items()):
        chosen: list[str] = []
        for _ in range(NUM_STORES_MAX):
            racks = {state.nodes[name].labels.rack for name in chosen} - {""}
            ranked = sorted(
                (
                    name == node,
                    state.nodes[name].labels.rack in racks,
                    name not in now.get(node, ()),
                    load[name],
                    name in nodes,
                    (names.index(name) - names.index(node)) % len(names),
                    name,
                )
                for name in free
                if name not in chosen and free[name] >= num * each_bytes
            )
            if ranked:
                chosen.append(ranked[0][-1])
                load[chosen[-1]] += num
                free[chosen[-1]] -= num * each_bytes
        if not chosen:
            return ()
        found.append(NodeStores(node, tuple(chosen)))
    return tuple(found)


def test_a_task_gets_the_best_of_all_nodes() -> None:
    num_assigned = 0
    for seed in range(200):
        d, task, nodes = cluster(random.Random(seed))
        wanted = best_of_all(d, task, nodes)
        assert assign_stores(d.state, task, nodes).stores == wanted, seed
        num_assigned += bool(wanted)
    assert num_assigned > 50


@pytest.mark.parametrize("num_nodes", [40, 400])
def test_few_nodes_are_looked_at(num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    d = Driver(nodes=0)
    for number in range(num_nodes):
        d.join(f"n{number:03}", slots=2, copies_bytes_max=10**12)
    task = task_of(d, d.running(spec(slots={"min": 12, "max": 12})))
    looked: list[str] = []

    class Counted(dict[str, float]):
        def __getitem__(self, name: str) -> float:
            looked.append(name)
            return super().__getitem__(name)

    free_bytes = memory_checkpoints._free_bytes
    monkeypatch.setattr(
        memory_checkpoints, "_free_bytes", lambda state, task: Counted(free_bytes(state, task))
    )
    for kept in (task.stores, ()):
        task.stores, looked[:] = kept, []
        found = assign_stores(d.state, task, [member.node for member in task.members])
        assert len(found.stores) == 6
        assert len(set(looked)) <= 6 * 4, "the number of nodes of the cluster does not matter"
