"""The count of changes of what a plan follows from: two moments with one count have one input.

Making the input itself (plan_input.py) after every record would cost too much: of the state, only
what a record can have changed is compared.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ...events.records import decisions as d
from ...events.records import orders as o
from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.decisions import NodeQuarantined, StragglerCostEstimated
from ...events.records.envelope import incident_of
from ...events.records.reports import IterationsLogged
from ..state.cluster import ClusterState
from ..state.members import is_pinned, is_whole
from ..state.slots import Roll
from ..state.task import Task

_NEVER = frozenset((
    r.TaskProgressed, IterationsLogged, r.LossNotFinite, r.MemoryCheckpointStored,
    r.MemoryCheckpointsLost, r.RankStarted, r.RankReady, r.CollectiveFailed, r.Quiesced,
    r.Reconfigured, r.CheckpointSaved, r.CheckpointPublished, r.RankErrored, r.RankSuspended,
    r.RankContinued, o.Quiesce, o.Resume, o.SetCheckpointStores, o.DropMemoryCheckpoints,
    o.PublishCheckpoint, o.InjectFault, d.PlanChosen, d.TaskWaiting, o.StopRank, d.OrderSuppressed,
    r.RankStalled, r.RankUnstalled, r.StepTimeChanged, r.DeviceErred, StragglerCostEstimated))
"""Kinds that change nothing a plan follows from, among them all that come in great numbers."""
_OF_ONE_NODE = frozenset((r.NodeJoined, r.NodeLeft, r.NodeUnreachable, r.NodeReachable,
                          r.NodeDrained, r.NodeUndrained, r.QuarantineLifted, NodeQuarantined))
"""Kinds that change one node, and any task that is not calm. What a check says may change others,
too: whether it is believed."""
_OF_INCIDENTS = frozenset((d.IncidentOpened, d.IncidentEscalated, d.IncidentClosed))
"""Kinds that change the task of an incident, and the nodes that it is about."""

_OF_TASKS = frozenset((r.TaskSubmitted, d.IncidentClosed))
"""Kinds that name no task, and change no node."""
_DUE_OF_SLOTS = ("recovered/", "quarantine/")
"""Deadlines after which other slots may be given."""


def named(state: ClusterState, body: t.Body) -> Collection[str]:
    """Before the fold of this body: the nodes that it may change."""
    kind = type(body)
    if kind in _NEVER or kind in _OF_TASKS:
        return ()
    if isinstance(body, r.DeadlineReached) and not body.deadline.startswith(_DUE_OF_SLOTS):
        return ()
    if kind in _OF_ONE_NODE:
        return (getattr(body, "node", ""),)
    if isinstance(body, (d.IncidentOpened, d.IncidentEscalated)):
        task = _task_of(state, body)
        ranks, seats = (task.ranks, task.seats_at) if task is not None else ({}, {})
        slots = [*(ranks[number].slot for number in body.ranks if number in ranks),
                 *(seats[number] for number in body.ranks if number in seats)]
        return {body.node: None} | {slot.node: None for slot in slots}
    return () if getattr(body, "task", 0) and kind is not d.TaskEnded else state.nodes


def part(state: ClusterState, body: t.Body, names: Collection[str]) -> tuple[Any, ...]:
    """What a plan follows from, as far as a record of this body may change it; to compare.

    `names`: of nodes, `named` of it. A calm task is left out: nothing of it is changed.
    """
    kind = type(body)
    if kind in _NEVER:
        return ()
    if kind in _OF_INCIDENTS or getattr(body, "task", 0) != 0:
        task = _task_of(state, body)
        if task is not None and isinstance(body, o.StartRank):
            return _begun(state, task, body.rank)
        return (_task(state, task) if task is not None else (), _nodes(state, names))
    return (state.policy, _nodes(state, names),
            *(_task(state, task) for task in state.tasks.values() if task.id not in state.calm))


def call_roll(state: ClusterState, names: Collection[str]) -> None:
    """After the fold, `names` as before it: what of these nodes a plan may give now."""
    known: Roll | None = state.__dict__.get("roll")
    if known is None or not names:
        return
    if names is state.nodes:
        del state.roll
        return
    for name in names:
        if name in state.nodes:
            known.mark(state.nodes[name])


def _task_of(state: ClusterState, body: t.Body) -> Task | None:
    """That it names, or the incident that it names."""
    incident = state.incidents.get(incident_of(body))
    number: int = getattr(body, "task", 0)
    return state.tasks.get(number if incident is None else incident.task)


def _begun(state: ClusterState, task: Task, number: int) -> tuple[Any, ...]:
    """What a start can change: thousands come at once, so no other process is looked at.

    Its slot is one of the target. The first process makes a command whole; one in place of another
    that has gone farther, or on a silent node, may change what the task is held to be.
    """
    rank = task.ranks.get(number)
    node = state.nodes.get(rank.slot.node) if rank is not None else None
    return (bool(task.ranks) or task.heals_in_memory, rank is not None and rank.state != "ordered",
            node is not None and node.silent)


def _nodes(state: ClusterState, names: Collection[str]) -> tuple[Any, ...]:
    return tuple((node.name, node.health, node.takes_tasks, node.num_slots, tuple(node.slots_out),
                  tuple(node.slots_sick)) for name in names
                 if (node := state.nodes.get(name)) is not None)


def _task(state: ClusterState, task: Task) -> tuple[Any, ...]:
    if task.phase == "ended":
        return ()
    kept = bool(task.ending) or is_pinned(state, task)
    return (task.id, bool(task.ending), task.weight, task.throughput, task.target,
            bool(task.incident) and not is_whole(task),
            tuple(rank.slot for rank in task.ranks.values()) if kept else kept)
