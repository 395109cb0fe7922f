"""Nodes that are lost or reboot: one event for the operator, whatever the number of tasks."""

from __future__ import annotations

import past_screens
from decider import Driver, spec
from two_tasks import carry_out, gives
from unicron.cli.screens import cluster, incident
from unicron.cli.terminal import format as fmt
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import history
from unicron.events.records import reports as r

LEADER = "leader/abc"


def cluster_of(num: int, *, nodes: int, slots: int) -> Driver:
    """`num` training tasks of one slot each, on nodes that have told their boot id."""
    d = Driver(nodes=0)
    for number in range(1, nodes + 1):
        d.join(f"n{number}", slots=slots, boot_id=f"boot-{number}")
    for number in range(num):
        task = d.submit(spec(name=f"task-{number}", throughput={1: 1e12}, slots={"max": 1}))
        carry_out(d, d.log[-20:])
        d.progress(task)
    return d


def silent(d: Driver, node: str) -> None:
    d.now_s += 6
    d.tell(
        LEADER,
        r.NodeUnreachable(node=node, incarnation=d.state.nodes[node].incarnation, silence_s=6.0),
    )


def back(d: Driver, node: str, boot_id: str, slots: int) -> None:
    d.now_s += 50
    carry_out(
        d,
        d.join(node, incarnation=d.state.nodes[node].incarnation + 1, slots=slots, boot_id=boot_id),
    )


def shown(d: Driver) -> list[str]:
    """The list of incidents, without head and foot; of an incident, the id alone."""
    lines = past_screens.every(history(d.log), now_s=d.now_s)
    assert max(map(len, lines)) <= 100
    return [line.partition("-")[0] if line.startswith("  ") else line for line in lines[1:-2]]


def at(d: Driver, later_s: float) -> str:
    return fmt.rfc3339(d.log[-1].at_s + later_s)[:19] + "Z"


def found(d: Driver) -> list[tuple[str, list[str], int]]:
    return [(x.what, x.nodes, len(x.incidents)) for x in history(d.log).node_losses]


def test_a_node_that_reboots_is_one_event_with_its_tasks_below() -> None:
    d = cluster_of(4, nodes=1, slots=4)
    silent(d, "n1")
    back(d, "n1", "boot-1b", 4)
    assert shown(d) == [
        f"NODES      rebooted: n1, away for 56 s since {at(d, -56)}; 4 incidents",
        *["  inc"] * 4,
    ]
    assert found(d) == [("rebooted", ["n1"], 4)]


def test_an_agent_that_starts_again_on_the_same_boot_is_no_reboot() -> None:
    for boot_id in ("boot-1", ""):
        d = cluster_of(2, nodes=1, slots=2)
        back(d, "n1", boot_id, 2)
        assert found(d) == [("agent started again", ["n1"], 2)]
        for task in list(d.state.tasks):
            d.heal(task)
        back(d, "n1", "boot-1", 2)
        assert [what for what, _, _ in found(d)] == ["agent started again"] * 2


def test_a_lost_node_is_one_event_and_a_short_silence_is_none() -> None:
    d, _, _ = gives()
    assert found(d) == [("lost", ["n2"], 1)]
    d = cluster_of(1, nodes=2, slots=1)
    silent(d, "n2")  # it has no task
    assert found(d) == [("lost", ["n2"], 0)]
    assert past_screens.every(history(d.log), now_s=d.now_s) == [
        incident.NONE,
        f"NODES      lost: n2, away since {at(d, -6)}; 0 incidents",
    ]
    d.tell(LEADER, r.NodeReachable(node="n2", incarnation=1))
    assert found(d) == []


def test_a_node_that_left_on_request_and_reboots_is_named() -> None:
    d = cluster_of(1, nodes=1, slots=1)
    d.tell("n1/1", r.NodeLeft(node="n1", incarnation=1, reason="stopped"))
    assert found(d) == []
    back(d, "n1", "boot-1b", 1)
    assert [x[:2] for x in found(d)] == [("rebooted", ["n1"])]


def epoch(d: Driver) -> None:
    d.now_s += 100
    d.epoch += 1
    d.tell("leader/def", r.EpochStarted(nonce="def", code="1", heart=d.state.heart))


def test_the_whole_cluster_rebooted_as_seen_by_a_control_plane_that_ran_on() -> None:
    d = cluster_of(3, nodes=3, slots=1)
    for node in ("n1", "n2", "n3"):
        silent(d, node)
    for node in ("n2", "n1"):
        back(d, node, f"{node} again", 1)
    assert sorted(x[:2] for x in found(d)) == [
        ("lost", ["n3"]),
        ("whole cluster rebooted", ["n2", "n1"]),
    ]
    back(d, "n3", "n3 again", 1)
    assert found(d) == [("whole cluster rebooted", ["n2", "n1", "n3"], 3)]
    assert "NODES      whole cluster rebooted: n2 n1 n3, away for 3 min since " in shown(d)[0]


def test_the_whole_cluster_rebooted_and_the_control_plane_too() -> None:
    d = cluster_of(2, nodes=2, slots=1)
    since_s = d.now_s
    epoch(d)
    for node in ("n1", "n2"):
        carry_out(d, d.join(node, incarnation=2, slots=1, boot_id=f"{node} again"))
    (event,) = history(d.log).node_losses
    assert (event.what, event.nodes, event.since_s) == (
        "whole cluster rebooted",
        ["n1", "n2"],
        since_s,
    )


def test_a_reboot_of_some_nodes_is_not_one_of_the_whole_cluster() -> None:
    d = cluster_of(3, nodes=3, slots=1)
    epoch(d)
    for node in ("n1", "n2"):
        carry_out(d, d.join(node, incarnation=2, slots=1, boot_id=f"{node} again"))
    assert [x[:2] for x in found(d)] == [("rebooted", ["n1", "n2"])]
    d = cluster_of(2, nodes=2, slots=1)
    for node in ("n1", "n2"):  # one after the other
        silent(d, node)
        back(d, node, f"{node} again", 1)
    assert [x[:2] for x in found(d)] == [("rebooted", ["n1"]), ("rebooted", ["n2"])]


def test_status_shows_the_incidents_of_one_node_as_one() -> None:
    d = cluster_of(4, nodes=1, slots=4)
    d.join("n1", incarnation=2, slots=4, boot_id="boot-1b")

    text = cluster.status(view(d.state), cluster="c", now_s=d.now_s)
    assert max(map(len, text)) <= 100
    assert len([line for line in text if line.startswith("HEALING")]) == 1
    words = " ".join(" ".join(text).split())
    assert f"HEALING inc-{max(history(d.log).incidents)} " in words
    assert "; with it 3 other tasks: unicron incident --all" in words
