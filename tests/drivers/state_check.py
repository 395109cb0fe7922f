"""Invariants of the state: derived fields equal a fresh count, references resolve.

Tests and seeded simulations check the state after every record, long runs after every thousandth.
Timed runs never check it, because the cost is linear in the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator

from unicron.control_plane.fold.edits import task_of_deadline
from unicron.control_plane.incidents.node_incidents import is_open
from unicron.control_plane.state.cluster import (
    NUM_INCIDENTS_MAX,
    NUM_WORK_SPANS_MAX,
    WORK_SPAN_S,
    ClusterState,
    open_orders,
)
from unicron.control_plane.state.members import outstanding
from unicron.control_plane.state.node import Node, Occupant
from unicron.control_plane.state.task import Task


def check(state: ClusterState) -> list[str]:
    """Describe each violated invariant; empty if the state is consistent."""
    wrong = [*_counts(state), *_limits(state)]
    for task in state.tasks.values():
        wrong += [f"task {task.id}: {what}" for what in _task(state, task)]
    for node in state.nodes.values():
        wrong += [f"node {node.name}: {what}" for what in _node(state, node)]
    return wrong


def _counts(state: ClusterState) -> Iterator[str]:
    running = sum(len(task.ranks) for task in state.tasks.values())
    if state.num_running != running:
        yield f"num_running is {state.num_running}, {running} processes run"
    unreachable = sorted(node.name for node in state.nodes.values() if node.unreachable)
    if state.unreachable != unreachable:
        yield f"unreachable is {state.unreachable}, {unreachable} are unreachable"
    open_ = [name for name in sorted(set(state.undecided)) if is_open(state, state.nodes[name])]
    if state.undecided != open_:
        yield f"undecided is {state.undecided}, decisions are pending on {open_}"
    slots = sum(node.num_slots for node in state.nodes.values() if node.health == "healthy")
    if state.num_slots_max < slots:
        yield f"num_slots_max is {state.num_slots_max}, {slots} are there"


def _limits(state: ClusterState) -> Iterator[str]:
    if len(state.earned) > NUM_WORK_SPANS_MAX or any(
        span > state.at_s // WORK_SPAN_S for span in state.earned
    ):
        yield f"earned has the spans {list(state.earned)} at {state.at_s}"
    closed = [one.id for one in state.incidents.values() if one.outcome]
    if len(closed) > NUM_INCIDENTS_MAX:
        yield f"{len(closed)} closed incidents are kept"
    for record in open_orders(state):
        if getattr(record.body, "task", 0) and getattr(record.body, "task", 0) not in state.tasks:
            yield f"order {record.seq} has no task"
    for name in state.deadlines:
        if (number := task_of_deadline(name)) and number not in state.tasks:
            yield f"deadline {name} has no task"
    for one in state.incidents.values():
        if (
            one.task
            and not one.outcome
            and (
                (task := state.tasks.get(one.task)) is None
                or [task.incident, *task.recovering].count(one.id) != 1
                or (one.id in task.recovering) != bool(one.recovering_s)
            )
        ):
            yield f"incident {one.id} is open, and its task {one.task} has another"


def _task(state: ClusterState, task: Task) -> Iterator[str]:
    expected = outstanding(task)
    if task.num_outstanding != expected:
        yield f"num_outstanding is {task.num_outstanding}, {expected} answers are awaited"
    if task.positions != {member.rank: place for place, member in enumerate(task.members)}:
        yield f"positions are {task.positions}, the members are {task.members}"
    incident = state.incidents.get(task.incident)
    if task.incident and (incident is None or incident.task != task.id):
        yield f"its incident {task.incident} is of another task"
    for number, rank in task.ranks.items():
        if number != rank.rank or task.attempts.get(number, 0) < rank.attempt:
            yield f"rank {number} is {rank.rank}, attempt {rank.attempt} of {task.attempts}"
        node = state.nodes.get(rank.slot.node)
        there = node.occupants.get(rank.slot.index) if node is not None else None
        if there != Occupant(task.id, rank.rank, rank.attempt):
            yield f"rank {rank.rank} runs on {rank.slot}, where {there} is"
    for slot in task.blamed_slots:
        node = state.nodes.get(slot.node)
        if node is not None and task.phase == "ended":
            yield f"ended, and {slot} is out for it"
    if task.phase == "ended" and (task.suspects or task.failures):
        yield f"ended, and it suspects {task.suspects} for {task.failures}"
    if len(set(task.seats_at.values())) < len(task.target):
        yield f"two ranks have one slot: {task.target}"
    if (
        task.heals_in_memory
        and task.phase in ("training", "quiescing", "reconfiguring")
        and not (task.members)
    ):
        yield f"{task.phase} without members"
    if task.phase == "ended" and (task.ranks or task.target or task.members or not task.outcome):
        yield f"ended ({task.outcome}), and it has {task.ranks or task.target or task.members}"


def _node(state: ClusterState, node: Node) -> Iterator[str]:
    for index, one in node.occupants.items():
        task = state.tasks.get(one.task)
        orphans = task.orphans if task is not None else []
        rank = task.ranks.get(one.rank) if task is not None else None
        if (rank is None or rank.attempt != one.attempt) and not any(
            (orphan.rank, orphan.attempt) == (one.rank, one.attempt) for orphan in orphans
        ):
            yield f"slot {index} is occupied by {one}, a process that its task does not have"
    if not set(node.slots_disabled) <= node.disabled_why.keys():
        yield f"slots {node.slots_disabled} are disabled, with the reasons {node.disabled_why}"
    incident = state.incidents.get(node.incident)
    if node.incident and (incident is None or incident.outcome):
        yield f"its incident {node.incident} is closed"
