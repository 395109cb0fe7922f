"""The count of changes of what a plan follows from: two moments with one count have one input.

Making the input itself (plan_input.py) after every record would cost too much: of the state, only
what a record can have changed is compared.
"""

from __future__ import annotations

from typing import Any

from ..events import detected as d
from ..events import orders as o
from ..events import reports as r
from ..events.decided import DegradedPriced, NodeQuarantined
from ..events.logged import IterationsLogged
from .plan_input import is_pinned, is_whole
from .state import ClusterState, Task

_NEVER = frozenset((
    r.TaskProgressed, IterationsLogged, r.LossNotFinite, r.CopyKept, r.CopiesLost, r.RankStarted,
    r.RankReady, r.CollectiveFailed, r.Quiesced, r.Reconfigured, r.CheckpointSaved,
    r.CheckpointPublished, r.RankErrored, r.RankSuspended, r.RankContinued, o.Quiesce, o.Resume,
    o.KeepCopies, o.DropCopies, o.PublishCheckpoint, o.InjectFault, o.PlanChosen, o.TaskWaiting,
    o.OrderWithheld, d.RankStalled, d.RankWentOn, d.RankPaced, d.DeviceErred, DegradedPriced))
"""Kinds that change nothing a plan follows from, among them all that come in great numbers."""
_OF_NODES = frozenset((o.IncidentOpened, o.TaskEnded))
"""Kinds that name a task, and may change nodes."""
_OF_ONE_NODE = frozenset((r.NodeJoined, r.NodeLeft, r.NodeSilenced, r.NodeHeard, r.NodeDrained,
                          r.NodeUndrained, d.QuarantineLifted, NodeQuarantined))
"""Kinds that change one node, and any task. What a check says may change others, too: whether it is
believed."""


def part(state: ClusterState, body: r.Body) -> tuple[Any, ...]:
    """What a plan follows from, as far as a record of this body may change it; to compare."""
    kind = type(body)
    if kind in _NEVER:
        return ()
    number = getattr(body, "task", 0)
    if not number:
        name = getattr(body, "node", "") if kind in _OF_ONE_NODE else ""
        return (state.policy, _nodes(state, name),
                *(_task(state, task) for task in state.tasks.values()))
    task = state.tasks.get(number)
    if task is not None and isinstance(body, o.StartRank):
        return _begun(state, task, body.rank)
    found = _task(state, task) if task is not None else ()
    return (found, _nodes(state)) if kind in _OF_NODES else (found,)


def _begun(state: ClusterState, task: Task, number: int) -> tuple[Any, ...]:
    """What a start can change: thousands come at once, so no other process is looked at.

    Its slot is one of the target. The first process makes a command whole; one in place of another
    that has gone farther, or on a silent node, may change what the task is held to be.
    """
    rank = task.ranks.get(number)
    node = state.nodes.get(rank.slot.node) if rank is not None else None
    return (bool(task.ranks) or task.heals_in_memory, rank is not None and rank.state != "ordered",
            node is not None and node.silent)


def _nodes(state: ClusterState, name: str = "") -> tuple[Any, ...]:
    """Of the named node alone, or of all."""
    found = [state.nodes[name]] if name in state.nodes else state.nodes.values() if not name else ()
    return tuple((node.name, node.health, node.takes_tasks, node.num_slots, tuple(node.slots_out),
                  tuple(node.slots_sick)) for node in found)


def _task(state: ClusterState, task: Task) -> tuple[Any, ...]:
    if task.phase == "ended":
        return ()
    kept = bool(task.ending) or is_pinned(state, task)
    return (task.id, bool(task.ending), task.weight, task.throughput, task.target,
            bool(task.incident) and not is_whole(task),
            tuple(rank.slot for rank in task.ranks.values()) if kept else kept)
