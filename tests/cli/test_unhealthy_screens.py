"""Screens of nodes with unhealthy or disabled slots, until the slots are used again."""

from __future__ import annotations

import pytest
from decider import Driver, spec, task_of
from device_errors import health
from two_tasks import lose, seen, two_tasks
from unicron.cli.screens import cluster
from unicron.cli.screens import nodes as nodes_screen
from unicron.control_plane.api import requests
from unicron.control_plane.api.needs import AWAY_S_MIN
from unicron.control_plane.api.requests import Refusal
from unicron.control_plane.state.node import Quarantine
from unicron.events.records import reports as r

pytestmark = pytest.mark.nodes(3)


def needs_you(d: Driver) -> str:
    """The status screen above its totals, joined into one line."""
    lines = cluster.status(seen(d), cluster="test", now_s=d.now_s)[1:]
    return " ".join(" ".join(lines[: lines.index("")]).split())


def nodes(d: Driver) -> tuple[str, str]:
    """The row of n2, and the text below the table."""
    lines = nodes_screen.nodes(seen(d), now_s=d.now_s)
    (row,) = [x for x in lines if x.startswith("n2 ") and "/2" in x]
    below = lines[max(at for at, line in enumerate(lines) if "/2" in line) + 1 :]
    return row, " ".join(" ".join(below).split())


def report_fans(d: Driver, said: str, why: str = "psu failed") -> None:
    d.obey(health(d, "n2", said, check="check/fans", why=why))


def test_a_nodes_health_has_the_time_of_its_last_change(d: Driver) -> None:
    d.now_s += 600
    report_fans(d, "degraded")
    d.now_s += 100
    report_fans(d, "unhealthy")
    d.now_s += 30
    report_fans(d, "degraded")
    d.now_s += 20
    assert " degraded  20 s " in nodes(d)[0].replace("   ", "  ")
    report_fans(d, "healthy", "")
    d.now_s += 40
    assert " healthy  40 s " in nodes(d)[0].replace("   ", "  ")
    d.join("n2", incarnation=2)
    d.now_s += 7
    assert " 7.0 s " in nodes(d)[0] or " 7 s " in nodes(d)[0]


def test_an_unconfirmed_node_names_the_nodes_that_are_out(d: Driver) -> None:
    report_fans(d, "unhealthy")
    d.obey(health(d, "n3", "unhealthy", check="check/fans", why="psu failed"))
    assert "n3 is unhealthy, not acted upon, 2 of 3 nodes say so and at most 1 is" in needs_you(d)
    d.now_s += 5
    report_fans(d, "healthy", "")
    assert (
        "n3 is unhealthy, not acted upon, 1 of 3 nodes say so, slots of n2 are still out (used "
        "again 60 s after it says healthy) and at most 1 is believed"
    ) in needs_you(d)
    assert "HEALING n2 healthy again, its slots are used from" in needs_you(d)
    d.obey(d.due("recovered/n2"))
    assert "n3 is unhealthy, check/fans: psu failed: repair it" in needs_you(d)


def test_a_disabled_slot_shows_its_reason_and_the_remedy(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 4}))
    while not task_of(d, task).suspects:
        d.obey(d.exit(task, 3))
        d.progress(task)
    while not any(node.slots_disabled for node in d.state.nodes.values()):
        d.obey(d.progress(task))
    told = needs_you(d)
    assert (
        "NEEDS YOU n2 slot 1 out (alpha, exited abnormally there, and progress of rank 3 on n3/0): "
        "repair, then unicron lift n2/1; unicron status nodes"
    ) in told
    d.submit(spec(name="beta", slots={"min": 6, "max": 6}))
    assert "; beta waits for slots" in needs_you(d)


def test_faults_of_tasks_that_have_ended_are_one_line() -> None:
    d, one, other = two_tasks({1: 1e12, 2: 2e12})
    for task in (one, other, other):
        d.obey(d.exit(task, 0))
        d.progress(task, 12)
    assert needs_you(d).count("HEALED inc-") == 3
    d.obey(d.tell("operator/c", r.TaskCancelRequested(task=other, reason="enough")))
    last = max(x.id for x in d.state.incidents.values() if x.task == other)
    told = needs_you(d)
    assert told.count("HEALED inc-") == 1
    assert f"OVER 2 incidents of tasks that have ended, the last: unicron incident {last}" in told


def test_slots_disabled_by_a_check_return_and_the_screens_say_when(d: Driver) -> None:
    d.running(spec(slots={"min": 1, "max": 4}))
    d.now_s += 600
    report_fans(d, "unhealthy")
    d.now_s += 5
    report_fans(d, "unhealthy", "psu failed, both")
    d.now_s += 25
    assert (
        "NEEDS YOU n2 is unhealthy, check/fans: psu failed, both: repair it; its slots are "
        "used again 60 s after the check says healthy; unicron status nodes"
    ) in needs_you(d)
    row, _ = nodes(d)
    for word in ("unhealthy", " 30 s ", "slots 0 1 out"):
        assert word in row
    for ask in (requests.lift, requests.undrain):
        with pytest.raises(Refusal) as refused:
            ask(d.state, requests.Reason(), "n2")
        assert "60 s after it says healthy" in refused.value.hint
    report_fans(d, "healthy", "")
    again = "healthy again, its slots are used from "
    assert "NEEDS YOU n2" not in needs_you(d)
    assert "HEALING n2 " + again in needs_you(d)
    assert "(60 s without a complaint)" in needs_you(d)
    row, below = nodes(d)
    assert " healthy " in row
    assert again in below
    assert "psu" not in below
    d.obey(d.due("recovered/n2"))
    assert "HEALING" not in needs_you(d)
    assert " eligible " in nodes(d)[0]


def test_a_node_has_one_line_and_the_same_health_in_json(d: Driver) -> None:
    d.running(spec(slots={"min": 1, "max": 6}))
    d.obey(health(d, "n2", "degraded", check="check/disk", why="slow"))
    one = next(x for x in seen(d)["nodes"] if x["id"] == "n2")
    assert (one["health"], one["contact"], one["since_s"]) == ("degraded", "heard", d.state.at_s)
    assert "n2" not in needs_you(d), "a degraded node without cost needs no operator"
    assert "slow; draining it would " in nodes(d)[1]
    report_fans(d, "unhealthy")
    assert needs_you(d).count("n2 is ") == 1
    assert "n2 is unhealthy" in needs_you(d)
    report_fans(d, "healthy", "")
    assert "HEALING n2 no longer unhealthy" in needs_you(d)
    assert "n2 is degraded" not in needs_you(d)


def test_the_map_marks_the_slots_that_are_degraded(d: Driver) -> None:
    def signs() -> tuple[str, str]:
        lines = nodes_screen.nodes(seen(d), now_s=d.now_s)
        (key,) = [line for line in lines if ". idle" in line]
        return lines[1], key

    d.running(spec(slots={"min": 1, "max": 4}))
    assert signs()[0] == "n1 AA   n2 AA   n3 .."
    assert "degraded" not in signs()[1]
    d.obey(health(d, "n2", "degraded", devices=(1,), check="gpu", why="GPU 1 is slow"))
    d.obey(health(d, "n3", "degraded", check="check/disk", why="91 % full"))
    assert signs() == ("n1 AA   n2 A!   n3 !!", "A alpha  . idle  ! degraded  ? unreachable  x out")
    d.obey(health(d, "n2", "unhealthy", devices=(1,), check="gpu", why="GPU 1 is slow"))
    d.obey(health(d, "n3", "healthy", check="check/disk", why=""))
    row, key = signs()
    assert "!" not in row + key
    assert "n2 Ax" in row, "the unhealthy slot is marked x, not !"


def test_a_lost_node_that_is_quarantined_has_one_way_back() -> None:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    lose(d, "n2", alpha)
    d.state.nodes["n2"].quarantine = Quarantine(
        since_s=d.now_s,
        until_s=d.now_s + 86400,
        why="2 faults in 30 days, the last: n2/0 XID 79",
        incidents=(3, 9),
    )
    way = (
        "repair it and start its agent, quarantined to 1970-01-02 00:16Z: 2 faults in 30 days, "
        "the last: n2/0 XID 79 (inc-3 inc-9). It is given tasks when that ends, or after "
        "unicron lift n2"
    )
    row, below = nodes(d)
    assert below == f"n2 lost: {way}"
    assert " -/2 " in row
    assert "alpha" not in row
    d.now_s += AWAY_S_MIN
    assert needs_you(d).count("quarantined") == 1
    assert "at once" not in needs_you(d)
