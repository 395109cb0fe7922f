"""Calm: tasks of which no decision follows, whatever befalls others, so that nobody looks at them.

A task is calm while it trains on all that it was given, on healthy nodes, and nothing is wrong with
it. Its step depends on itself and on its nodes alone then, and yields nothing: it is asked again
once a record names the task or one of its nodes, or names neither. A task in a transition waits
for one after the other to answer, and nothing follows until the last has.

Both are found out from the state, and forgotten with it: they are no part of it.
"""

from __future__ import annotations

from ..events import detected as d
from ..events import orders as o
from ..events import reports as r
from ..events.decided import DegradedPriced, NodeQuarantined
from ..events.logged import IterationsLogged
from ..events.records import incident_of
from .answers import last_first
from .state import ClusterState, Node, Task

_OF_ONE_NODE = (r.NodeJoined, r.NodeLeft, r.NodeSilenced, r.NodeHeard, r.NodeDrained,
                r.NodeUndrained, d.QuarantineLifted, NodeQuarantined)
"""Kinds that change one node, and of the tasks those that have ranks there."""
_OF_SLOTS = (o.IncidentOpened, o.IncidentEscalated)
"""Kinds that may take slots of their node out."""
_OF_ITSELF = frozenset((
    r.TaskProgressed, IterationsLogged, r.RankStarted, r.RankReady, r.Quiesced, r.Reconfigured,
    o.Quiesce, o.Reconfigure, o.Resume))
"""Kinds after which nothing is another for any other task than the one that they name."""
_OF_NOBODY = (o.PlanChosen, DegradedPriced)
_DEADLINES_OF_NODES = ("replace", "price", "device", "recovered", "quarantine")
_ANSWERS = (r.Quiesced, r.Reconfigured)


def disturb(state: ClusterState, body: r.Body) -> None:
    """Before the fold of this body: whom it may concern is not known to be calm any more."""
    number = _task_of(state, body)
    if number and type(body) in _OF_ITSELF:
        state.calm.discard(number)
        if not isinstance(body, _ANSWERS):
            state.resting.discard(number)
        return
    state.resting.clear()
    if number is not None and not isinstance(body, o.TaskEnded):  # which gives slots back
        state.calm.discard(number)
    elif not isinstance(body, (*_OF_ONE_NODE, *_OF_NOBODY)):
        state.calm.clear()
    node = state.nodes.get(body.node) if isinstance(body, _OF_ONE_NODE + _OF_SLOTS) else None
    if node is not None:
        state.calm.difference_update([one.task for one in node.occupants.values()])


def _task_of(state: ClusterState, body: r.Body) -> int | None:
    """The task that it is about, 0: an incident of a node alone; None where it may be about others,
    too."""
    number: int = getattr(body, "task", 0)
    if number:
        return number
    incident = state.incidents.get(incident_of(body))
    if incident is not None:
        return incident.task
    if isinstance(body, r.DeadlineReached) and body.deadline in state.deadlines:
        what, _, rest = body.deadline.partition("/")
        return None if what in _DEADLINES_OF_NODES else int(rest.partition("/")[0])
    return None


def settle(state: ClusterState, task: Task) -> None:
    """After a step of the task to its end."""
    state.resting.add(task.id)
    if _is_calm(state, task):
        state.wishes.pop(task.id, None)
        state.calm.add(task.id)


def is_one_of_many(state: ClusterState, body: r.Body) -> bool:
    """Whether it is an answer that others are still to give, of a task that waits for all.

    Where it rested before, it still does: of who has answered, nothing but the last row's condition
    is a matter, as long as the task is not to leave.
    """
    if not isinstance(body, _ANSWERS) or body.task not in state.resting:
        return False
    task = state.tasks[body.task]
    if not any(seat.rank in task.ranks for seat in task.target):
        return False
    if isinstance(body, r.Quiesced):
        return task.phase == "quiescing" and any(
            rank.quiesced != task.generation for rank in last_first(task))
    return task.phase == "reconfiguring" and any(
        rank.reconfigured != task.generation for rank in last_first(task))


def _is_calm(state: ClusterState, task: Task) -> bool:
    if (task.phase != "training" or task.incident or task.faults or task.ghosts or task.ending
            or task.outcome or task.saved is not None or task.publishing or state.held
            or not task.target or len(task.ranks) != len(task.target)):
        return False
    train = task.spec.training
    if task.heals_in_memory and (
            (train is not None and train.copy_every) or task.finished or task.failed_s >= 0
            or task.evidence_over == task.generation or len(task.members) != len(task.target)):
        return False
    members = {member.rank: member.attempt for member in task.members}
    for seat in task.target:
        rank = task.ranks.get(seat.rank)
        if (rank is None or rank.slot != seat.slot or not rank.sound
                or not _is_healthy(state.nodes.get(seat.slot.node))):
            return False
        if task.heals_in_memory and (
                rank.state != "member" or members.get(seat.rank) != rank.attempt):
            return False
    return True


def _is_healthy(node: Node | None) -> bool:
    return node is not None and node.health == "healthy"
