"""The count of changes of what a plan follows from: up with each, and not with every record."""

from __future__ import annotations

from decider import Driver, spec
from msgspec.structs import replace
from unicron.control_plane.planner.problem_of_state import plan_input
from unicron.events.records import reports as r
from unicron.events.records import types as t


def trained() -> tuple[Driver, int]:
    d = Driver()
    task = d.submit(spec())
    d.obey(d.log[-20:])
    d.progress(task, 3)
    return d, task


def test_it_goes_up_when_what_a_plan_follows_from_changes() -> None:
    d, task = trained()
    changes: list[tuple[str, t.Body]] = [
        ("operator/1", r.TaskWeightSet(task=task, weight=2.0)),
        ("operator/2", r.NodeDrained(node="n2")),
        ("operator/3", r.NodeUndrained(node="n2")),
        ("operator/4", r.TaskSubmitted(spec=spec(name="beta"))),
        (f"leader/{d.state.nonce}", r.PolicySet(policy=replace(d.state.policy, gain_min=0.1))),
        (f"leader/{d.state.nonce}", r.NodeUnreachable(node="n1", incarnation=1, silence_s=6.0)),
    ]
    for source, body in changes:
        count, ground = d.state.num_inputs, plan_input(d.state)
        d.tell(source, body)
        assert d.state.num_inputs > count, body
        assert plan_input(d.state) != ground, body


def test_it_stands_still_where_nothing_of_it_changes() -> None:
    d, task = trained()
    count, ground = d.state.num_inputs, plan_input(d.state)
    d.progress(task, 2)
    for number, body in enumerate((
            r.TaskWeightSet(task=task, weight=1.0), r.NodeUndrained(node="n2"),
            r.HealingFrozen(reason="a test"), r.HealingResumed(),
            r.TaskWeightSet(task=99, weight=3.0))):
        d.tell(f"operator/again-{number}", body)
    assert len(d.log) > d.state.num_inputs
    assert (d.state.num_inputs, plan_input(d.state)) == (count, ground)


def test_a_change_that_is_taken_back_counts_twice() -> None:
    """The number tells of changes: a dry run of before them is to be made anew."""
    d, task = trained()
    count, ground = d.state.num_inputs, plan_input(d.state)
    d.tell("operator/1", r.TaskWeightSet(task=task, weight=2.0))
    d.tell("operator/2", r.TaskWeightSet(task=task, weight=1.0))
    assert plan_input(d.state) == ground
    assert d.state.num_inputs == count + 2


def test_starts_change_nothing_however_many() -> None:
    counts: list[int] = []
    for slots in (2, 16):
        for job in (spec(slots={"min": slots, "max": slots},
                         train={"iterations": 9, "output": "/tmp/o",
                                "batch": {"global": 32, "micro": 2}}),
                    spec(train=None, command=["true"], slots={"min": slots, "max": slots})):
            d = Driver(nodes=4, slots=4)
            d.submit(job)
            counts.append(d.state.num_inputs)
    assert counts[:2] == counts[2:]
