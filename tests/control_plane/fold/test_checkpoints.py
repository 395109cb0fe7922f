"""In-memory checkpoints: where they are stored, which ones count, what a task restores from."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from decider import Driver, at_rest, finish, only, spec, task_of, the
from memory_checkpoints import FIRST, came, kept, ordered_anew
from unicron.cli.screens import cluster
from unicron.control_plane.api.view import view
from unicron.control_plane.decide import memory_checkpoints
from unicron.control_plane.decide.memory_checkpoints import node_bytes
from unicron.control_plane.state.memory_checkpoints import whole_checkpoints
from unicron.control_plane.throughput.memory import in_gib
from unicron.control_plane.throughput.state_size import share_bytes
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records import types as t
from unicron.events.records.in_words import essentials
from unicron.events.records.types import STORES_NUM_MAX

pytestmark = pytest.mark.nodes(3, slots=1)

ONE_SLOT: dict[str, Any] = {"slots": {"min": 1, "max": 1}}


def copies(d: Driver, task: int) -> list[tuple[str, int]]:
    return [(copy.node, copy.step_version) for copy in task_of(d, task).copies]


def stores(d: Driver, task: int) -> list[str]:
    return [store.node for store in task_of(d, task).keepers]


def kill_all(d: Driver, task: int) -> list[o.Reconfigure]:
    """All processes die at once. Returns the Reconfigure orders until the task trains again."""
    begin = len(d.log)
    for rank in sorted(task_of(d, task).ranks):
        d.exit(task, rank)
    d.obey(d.log[begin:])
    return [record.body for record in d.log[begin:] if isinstance(record.body, o.Reconfigure)]


@pytest.mark.nodes(4)
def test_each_node_of_members_has_two_stores_on_other_nodes(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 4}))
    order = only(o.Reconfigure, d.log)[-1].body
    assert [member.node for member in order.members] == ["n1", "n1", "n2", "n2"]
    assert order.stores == (t.NodeStores("n1", ("n3", "n4")), t.NodeStores("n2", ("n1", "n3")))
    assert order.keepers == tuple(t.StoreEndpoint(name, f"{name}:1") for name in ("n1", "n3", "n4"))
    assert assigned(d, task) == {"n1": ("n3", "n4"), "n2": ("n1", "n3")}


def test_the_stores_are_balanced_and_in_two_racks() -> None:
    d = Driver(nodes=0)
    for number in range(8):
        d.join(f"n{number}", slots=1, labels=t.Labels(rack=f"r{number // 4}"))
    task = d.running(spec(slots={"min": 8, "max": 8}))
    found = assigned(d, task)
    assert sorted(found) == [f"n{number}" for number in range(8)]
    for node, (one, other) in found.items():
        assert node not in (one, other)
        assert {int(one[1:]) // 4, int(other[1:]) // 4} == {0, 1}, "one store in each rack"
    load = Counter(name for pair in found.values() for name in pair)
    assert set(load.values()) == {2}, "each store has the shares of two nodes"


def assigned(d: Driver, task: int) -> dict[str, tuple[str, ...]]:
    return {one.node: one.stores for one in task_of(d, task).stores}


def test_stores_without_copy_every_or_a_second_node() -> None:
    d = Driver(nodes=2)
    train = {
        "iterations": 50,
        "output": "/tmp/out",
        "copy_every": 0,
        "batch": {"global": 24, "micro": 2},
    }
    assert stores(d, d.running(spec(train=train))) == []
    alone = Driver(nodes=1)
    assert stores(alone, alone.running(spec())) == ["n1"]
    two = Driver(nodes=2)
    assert assigned(two, two.running(spec())) == {"n1": ("n2", "n1"), "n2": ("n1", "n2")}


@pytest.mark.nodes(4, slots=1)
def test_an_unreachable_or_drained_store_is_replaced(d: Driver) -> None:
    task = d.running(spec(**ONE_SLOT))
    assert stores(d, task) == ["n2", "n3"]
    records = d.tell("leader/abc", r.NodeUnreachable(node="n2", incarnation=1, silence_s=5.0))
    order = the(o.SetCheckpointStores, records)
    assert (order.nodes, order.generation) == (("n1",), 1)
    assert [store.node for store in order.keepers] == ["n3", "n4"] == stores(d, task)
    d.tell("leader/abc", r.NodeReachable(node="n2", incarnation=1))
    assert stores(d, task) == ["n3", "n4"], "a store is not moved back"
    d.tell("operator/1", r.NodeDrained(node="n3"))
    assert stores(d, task) == ["n2", "n4"]
    assert len([x for x in d.state.orders.values() if b"SetCheckpointStores" in x]) == 1, "one open"


@pytest.mark.nodes(2)
def test_another_node_replaces_the_own_one(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 4}))
    assert assigned(d, task) == {"n1": ("n2", "n1"), "n2": ("n1", "n2")}
    kept(d, task, "n2", 10)
    records = d.join("n3", slots=2)
    the(o.SetCheckpointStores, records)
    assert assigned(d, task) == {"n1": ("n2", "n3"), "n2": ("n1", "n3")}
    assert copies(d, task) == [("n2", 10)], "its checkpoints still count"
    d.join("n0", slots=2)
    assert assigned(d, task) == {"n1": ("n2", "n3"), "n2": ("n1", "n3")}, "no store moves"


def test_checkpoints_that_do_not_fit_are_not_made_and_the_task_says_so() -> None:
    d = Driver(nodes=0)
    for number in range(3):
        d.join(f"n{number}", slots=2, copies_bytes_max=20_000_000)
    task = d.running(spec(slots={"min": 6, "max": 6}))
    it = task_of(d, task)
    each = share_bytes(it, 6)
    assert each > 0
    assert node_bytes(it) == dict.fromkeys(("n0", "n1", "n2"), 2 * 4 * each), (
        "two versions of the two shares of two other nodes"
    )
    d.state.policy = msgspec.structs.replace(d.state.policy, copies_bytes_max=8 * each)
    members = [member.node for member in it.members]
    assert memory_checkpoints.assign_stores(d.state, it, members).stores == it.stores, "it fits"
    d.state.policy = msgspec.structs.replace(d.state.policy, copies_bytes_max=4 * each)
    found = memory_checkpoints.assign_stores(d.state, it, members)
    assert all(len(one.stores) == 1 for one in found.stores), "one store each fits"
    d.state.policy = msgspec.structs.replace(d.state.policy, copies_bytes_max=3 * each)
    found = memory_checkpoints.assign_stores(d.state, it, members)
    assert found.stores == ()
    assert found.why == (
        f"they do not fit: {in_gib(4 * each)} for the 2 ranks of n0, and no node "
        f"has more than {in_gib(3 * each)} left for them"
    )
    it.keepers, it.stores = (), ()
    shown = next(x for x in view(d.state)["tasks"] if x["id"] == task)
    assert shown["no_copies"] == found.why
    lines = cluster.status(view(d.state), cluster="demo", now_s=d.now_s)
    assert any(
        text.startswith("NEEDS YOU") and "keeps no in-memory checkpoints: they do not fit" in text
        for text in lines
    )


@pytest.mark.nodes(4, slots=1)
def test_shares_count_only_when_all_are_there(d: Driver) -> None:
    task = d.running(spec(slots={"min": 2, "max": 2}))
    d.progress(task, 40)
    it = task_of(d, task)

    def whole() -> list[tuple[int, int, tuple[str, ...]]]:
        return [
            (one.generation, one.step_version, one.nodes) for one in whole_checkpoints(it.copies)
        ]

    kept(d, task, "n3", 10, share=0, num_shares=2)
    kept(d, task, "n4", 20, share=0, num_shares=2)
    assert whole() == []
    assert it.lost_with() == it.iteration
    kept(d, task, "n1", 20, share=1, num_shares=2)
    assert whole() == [(1, 20, ("n1", "n4"))]
    kept(d, task, "n3", 30, share=1, num_shares=2)
    assert whole() == [(1, 20, ("n1", "n3", "n4"))], "the first share is of step 20"
    assert it.lost_with("n4") == it.iteration - 10
    d.steps[task] = 20
    (order,) = kill_all(d, task)
    assert [(x.node, x.step_version) for x in order.copies] == [("n1", 10), ("n3", 10), ("n4", 10)]
    assert whole() == [(1, 20, ("n1", "n4"))], "step 30 is obsolete: the task continued from 20"
    d.tell(
        "n1/1",
        r.MemoryCheckpointsLost(
            node="n1", incarnation=1, task=0, why="it ended", keeper_start=FIRST
        ),
    )
    assert whole() == []
    (order,) = kill_all(d, task)
    assert order.copies == (), "a checkpoint with a missing share is not named"


@pytest.mark.nodes(4, slots=1)
def test_shares_of_an_older_layout_are_forgotten_once_a_newer_one_is_whole(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 2}))
    d.progress(task, 40)
    for share in (0, 1):
        kept(d, task, "n3", 10, share=share, num_shares=2)
    d.steps[task] = 10
    kill_all(d, task)
    assert task_of(d, task).generation == 2
    assert [x.num_shares for x in task_of(d, task).copies] == [2, 2]
    kept(d, task, "n3", 20, share=0, num_shares=1)
    assert [(x.share, x.num_shares) for x in task_of(d, task).copies] == [(0, 1)]


def test_two_checkpoints_of_each_node_are_kept(d: Driver) -> None:
    task = d.running(spec(**ONE_SLOT))
    for step in (10, 20, 30):
        kept(d, task, "n1", step)
    kept(d, task, "n2", 30)
    kept(d, task, "n9", 30)
    assert copies(d, task) == [("n1", 20), ("n1", 30), ("n2", 30)]
    kept(d, task, "n2", 40, generation=9)
    assert copies(d, task)[-1] == ("n2", 30)
    shown = next(x for x in view(d.state)["tasks"] if x["id"] == task)
    assert [(copy["step_version"], copy["nodes"]) for copy in shown["copies"]] == [
        (30, ["n1", "n2"])
    ]


def test_checkpoints_go_with_their_node_or_store(d: Driver) -> None:
    task = d.running(spec(**ONE_SLOT))
    for node in ("n1", "n2"):
        kept(d, task, node, 10)
    d.tell(
        "n1/1",
        r.MemoryCheckpointsLost(
            node="n1", incarnation=1, task=task, why="no room", keeper_start=FIRST
        ),
    )
    assert copies(d, task) == [("n2", 10)]
    kept(d, task, "n1", 20)
    d.tell(
        "n1/1",
        r.MemoryCheckpointsLost(
            node="n1", incarnation=7, task=0, why="another one's", keeper_start=9
        ),
    )
    assert copies(d, task) == [("n2", 10), ("n1", 20)]
    d.join("n2", incarnation=2, slots=1)
    assert copies(d, task) == [("n1", 20)]
    d.tell(
        "n1/1",
        r.MemoryCheckpointsLost(
            node="n1", incarnation=1, task=0, why="it ended", keeper_start=FIRST
        ),
    )
    assert copies(d, task) == []


def test_late_reports_of_an_ended_store_do_not_count(d: Driver) -> None:
    """Rank and store report through different agents, in any order."""
    task = d.running(spec(**ONE_SLOT))
    ended = r.MemoryCheckpointsLost(
        node="n2", incarnation=1, task=0, why="it ended", keeper_start=FIRST
    )
    d.tell("n2/1", ended)
    kept(d, task, "n2", 10, start=FIRST)
    assert copies(d, task) == [], "the store's checkpoints ended with it"
    kept(d, task, "n2", 20, start=FIRST + 1)
    kept(d, task, "n1", 20)
    assert copies(d, task) == [("n2", 20), ("n1", 20)]
    kept(d, task, "n2", 30, start=FIRST + 2)
    assert copies(d, task) == [("n1", 20), ("n2", 30)], "a new store is empty"
    d.tell("n2/1", msgspec.structs.replace(ended, keeper_start=FIRST + 1))
    assert copies(d, task) == [("n1", 20), ("n2", 30)], "only the ended store loses them"
    d.join("n2", incarnation=2, slots=1)
    kept(d, task, "n2", 40, start=FIRST + 1)
    kept(d, task, "n2", 40, start=FIRST + STORES_NUM_MAX - 1)
    assert copies(d, task) == [("n1", 20)], "reports of the previous agent's stores are stale"


def test_the_possible_loss_counts_checkpoints_elsewhere(d: Driver) -> None:
    task = d.running(spec(**ONE_SLOT))
    d.progress(task, 30)
    it = task_of(d, task)
    assert (it.iteration, it.lost_with()) == (31, 31)
    kept(d, task, "n1", 30)
    kept(d, task, "n2", 20)
    assert (it.lost_with(), it.lost_with("n1"), it.lost_with("n2")) == (1, 11, 1)


@pytest.mark.nodes(3)
def test_the_order_names_each_store_of_a_generation(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 2}))
    d.progress(task, 30)
    kept(d, task, "n2", 10)
    kept(d, task, "n1", 20)
    kept(d, task, "n2", 20)
    d.steps[task] = 20  # the version that the members will report
    (order,) = kill_all(d, task)
    assert [(x.node, x.step_version, x.generation, x.endpoint) for x in order.copies] == [
        ("n1", 10, 1, "n1:1"),
        ("n2", 10, 1, "n2:1"),
    ], "the stores may have step 10 or newer"
    d.heal(task)
    closed = the(decisions.IncidentClosed, d.log[-10:])
    assert closed.iterations_lost == 11
    assert copies(d, task) == [("n1", 20), ("n2", 10), ("n2", 20)], "the checkpoints still count"


def test_checkpoints_of_unreachable_nodes_are_named_and_those_of_lost_ones_not() -> None:
    d = Driver(nodes=4)
    task = d.running(spec(slots={"min": 1, "max": 2}))
    d.progress(task, 30)
    kept(d, task, "n3", 30)
    d.tell("leader/abc", r.NodeUnreachable(node="n3", incarnation=1, silence_s=5.0))
    d.steps[task] = 30
    (order,) = kill_all(d, task)
    assert [(x.node, x.step_version) for x in order.copies] == [("n3", 30)], "it is the only one"
    kept(d, task, "n2", 30)
    kept(d, task, "n3", 31)
    (order,) = kill_all(d, task)
    assert [(x.node, x.generation) for x in order.copies] == [("n2", 2), ("n3", 2), ("n3", 1)]
    kept(d, task, "n3", 30)
    d.state.nodes["n3"].health = "lost"
    (order,) = kill_all(d, task)
    assert [x.node for x in order.copies] == ["n2"]


def test_the_line_of_a_reconfigure_names_the_sources() -> None:
    d = Driver(nodes=3)
    task = d.running(spec(slots={"min": 1, "max": 2}))
    for node in ("n1", "n2"):
        kept(d, task, node, 1)
    (order,) = kill_all(d, task)
    line = essentials("Reconfigure", msgspec.to_builtins(order))
    assert line.endswith("generation 2: ranks 0 1, DP2, tries copies on n1 n2, then the seed")


def test_checkpoints_that_were_not_usable_do_not_count() -> None:
    d = Driver(nodes=3)
    task = d.running(spec(slots={"min": 1, "max": 2}))
    d.progress(task, 30)
    kept(d, task, "n1", 30)
    kept(d, task, "n2", 10)
    d.steps[task] = 10
    kill_all(d, task)
    assert copies(d, task) == [("n2", 10)]


@pytest.mark.nodes(3)
def test_checkpoints_of_abandoned_iterations_are_not_used(d: Driver) -> None:
    """n2 reported step 10 and may have step 20 by now. The task continued from step 12 of n1."""
    task = d.running(spec(slots={"min": 1, "max": 2}))
    d.progress(task, 30)
    kept(d, task, "n1", 12)
    kept(d, task, "n2", 10)
    d.steps[task] = 12
    (order,) = kill_all(d, task)
    assert [copy.step_version_max for copy in order.copies] == [-1, -1], "no upper limit"
    assert [(x.step_version, x.step_version_max) for x in task_of(d, task).copies] == [
        (12, 12),
        (10, 12),
    ]
    d.progress(task, 12)
    d.steps[task] = 11
    (order,) = kill_all(d, task)
    assert [(x.step_version, x.step_version_max) for x in order.copies] == [(10, 12), (10, 12)]
    assert [(x.node, x.step_version_max) for x in task_of(d, task).copies] == [("n2", 11)]
    d.progress(task, 12)
    d.steps[task] = 13
    kill_all(d, task)
    assert [x.step_version_max for x in task_of(d, task).copies] == [11], "limit unchanged"


def test_a_generation_without_a_step_keeps_the_checkpoints() -> None:
    d = Driver(nodes=3)
    task = d.running(spec(slots={"min": 1, "max": 2}))
    d.progress(task, 30)
    kept(d, task, "n1", 20)
    first, again = ordered_anew(d, task), ordered_anew(d, task)
    assert (again.generation, again.copies) == (first.generation + 1, first.copies)
    assert first.copies


def test_checkpoints_older_than_the_published_one_are_left_out() -> None:
    d = Driver(nodes=3)
    task = d.running(spec(slots={"min": 1, "max": 2}))
    kept(d, task, "n1", 10)
    d.progress(task, 19)
    d.obey(d.save(task, 0))
    assert task_of(d, task).saved_iteration == 20
    (order,) = kill_all(d, task)
    assert order.checkpoint == "gen-1/iter-20"
    assert [copy.step_version for copy in order.copies] == [20], (
        "the store may have a newer version of that generation than was reported, but none older"
    )
    d.progress(task, 19)
    d.obey(d.save(task, 0))
    (order,) = kill_all(d, task)
    assert task_of(d, task).saved_iteration == 39
    assert order.copies == (), "a later generation has published a newer state"
    kept(d, task, "n1", 39)
    (order,) = kill_all(d, task)
    assert [copy.step_version for copy in order.copies] == [39], "memory comes before disk"


def test_no_checkpoint_is_named_while_a_member_has_state() -> None:
    d = Driver(nodes=2)
    task = d.running(spec())
    kept(d, task, "n1", 1)
    begin = len(d.log)
    d.obey(d.exit(task, 3))
    orders = [record.body for record in d.log[begin:] if isinstance(record.body, o.Reconfigure)]
    assert orders
    assert all(order.copies == () for order in orders)


def test_an_incident_has_the_farthest_origin_and_all_bytes() -> None:
    d = Driver(nodes=2)
    task = d.running(spec(slots={"min": 1, "max": 2}))
    d.progress(task, 5)
    order = ordered_anew(d, task)
    came(d, order, 0, "copy", "n2", 12)
    came(d, order, 1, "peer", "n2", 10)
    d.steps[task] = 4
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert (closed.origin, closed.origin_node, closed.received_bytes) == ("copy", "n2", 22)
    assert (closed.iterations_lost, closed.ckpt_read) == (2, False)


def test_the_origin_is_that_of_the_last_attempt() -> None:
    d = Driver(nodes=2)
    task = d.running(spec(slots={"min": 1, "max": 2}))
    d.progress(task, 5)
    came(d, ordered_anew(d, task), 0, "checkpoint", "", 12)
    order = ordered_anew(d, task)
    assert d.state.incidents[task_of(d, task).incident].ckpt_read
    came(d, order, 1, "peer", "n1", 10)
    came(d, order, 0, "copy", "n2", 12)
    d.steps[task] = 4
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert (closed.origin, closed.origin_node, closed.ckpt_read) == ("copy", "n2", False)
    assert closed.received_bytes == 34


def test_checkpoints_of_an_ended_task_are_dropped_once(d: Driver) -> None:
    task = d.running(spec(**ONE_SLOT))
    kept(d, task, "n1", 10)
    done = finish(d, task)
    assert the(o.DropMemoryCheckpoints, done).nodes == ("n2", "n3")
    it = task_of(d, task)
    assert (copies(d, task), it.store_nodes) == ([], ["n2", "n3"])
    assert it.drop_order in d.state.orders, "a new leader sends the order again"
    at_rest(d)
    first = d.do(the(o.DropMemoryCheckpoints, done))
    assert (it.store_nodes, it.drop_order, d.state.orders) == ([], 0, {})
    assert only(o.DropMemoryCheckpoints, first) == []


def test_late_checkpoints_of_an_ended_task_are_dropped(d: Driver) -> None:
    task = d.running(spec(**ONE_SLOT))
    it, first = task_of(d, task), task_of(d, task).members[0]
    done = the(o.DropMemoryCheckpoints, finish(d, task))
    lost = r.MemoryCheckpointsLost(
        node="n2", incarnation=1, task=task, why="x", order=it.drop_order
    )
    late = r.MemoryCheckpointStored(
        task=task,
        rank=0,
        attempt=first.attempt,
        generation=1,
        step_version=40,
        node="n2",
        copy_bytes=12,
        checksum="crc32:00000001",
        keeper_start=FIRST,
    )
    again = the(o.DropMemoryCheckpoints, d.tell("n1/1", late))
    assert again.nodes == ("n2", "n3") == done.nodes
    d.tell("n2/1", lost)
    assert it.store_nodes == ["n2", "n3"], "a reply to the previous order does not count"
    d.do(again)
    late = msgspec.structs.replace(late, node="n3")
    assert the(o.DropMemoryCheckpoints, d.tell("n1/1", late)).nodes == ("n3",)
    d.join("n3", incarnation=2, slots=1)
    assert (it.store_nodes, it.drop_order, d.state.orders) == ([], 0, {}), "its store ended"
