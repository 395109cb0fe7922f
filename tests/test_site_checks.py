"""Checks of the site that say unhealthy in many places: which nodes they are believed of."""

from __future__ import annotations

from typing import Any

from heart_driver import Driver, at_rest, kinds, spec
from unicron.events import detected, statuses
from unicron.events.records import Record


def health(d: Driver, node: str, said: Any, *, check: str, status: str = "") -> list[Record]:
    return d.tell(d.source(node), detected.HealthChanged(
        node=node, incarnation=d.state.nodes[node].incarnation, check=check, health=said,
        why=f"{check} is {said}", status=status, rule=status and "a rule"))


def test_a_check_that_ends_on_one_node_after_the_other_takes_none_out_in_turn() -> None:
    d = Driver(nodes=3, slots=2)
    task = d.running(spec(slots={"min": 2, "max": 4}))
    d.progress(task, 3)
    for node in ("n3", "n1", "n2"):
        d.obey(health(d, node, "unhealthy", check="check/disk"))
    d.progress(task)
    for node in ("n3", "n1", "n2"):
        count = d.state.num_inputs
        assert kinds(health(d, node, "healthy", check="check/disk")) == []
        assert d.state.num_inputs == count
    assert [bool(x.slots_sick) for x in d.state.nodes.values()] == [False, False, True]
    assert kinds(health(d, "n1", "unhealthy", check="check/disk")) == [], "n3 counts as yet"
    told = d.due("recovered/n3")
    assert [bool(x.slots_sick) for x in d.state.nodes.values()] == [True, False, False]
    d.obey(told)
    d.progress(task)
    at_rest(d)


def test_a_driver_that_confirms_one_node_makes_room_for_another() -> None:
    """Which is a new input of the plan, though the record names the first alone."""
    d = Driver(nodes=3, slots=2)
    for node in ("n3", "n1"):
        health(d, node, "unhealthy", check="check/disk")
    count = d.state.num_inputs
    health(d, "n3", "unhealthy", check="gpu", status=statuses.ECC_ERRORS)
    assert [bool(x.slots_sick) for x in d.state.nodes.values()] == [True, False, True]
    assert d.state.num_inputs == count + 1
