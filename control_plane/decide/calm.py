"""Calm: tasks of which no decision follows, whatever befalls others, so that nobody looks at them.

A task rests when its step yielded nothing after all that concerns it: its own records, and those
of the nodes where it sits. It would yield nothing again. It is calm while it trains on all that it
was given, on healthy nodes, and nothing is wrong with it: then it rests whatever else is planned,
and what a plan follows from of it stays the same. A task in a transition waits for one after the
other to answer, and nothing follows until the last has.

All of this is found out from the state, and forgotten with it: it is no part of it.
"""

from __future__ import annotations

from collections.abc import Collection

from ...events.records import decisions as d
from ...events.records import orders as o
from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.decisions import NodeQuarantined, StragglerCostEstimated
from ...events.records.envelope import incident_of
from ...events.records.reports import IterationsLogged
from ..state.cluster import ClusterState
from ..state.members import last_first
from ..state.node import Node
from ..state.task import Rank, Task

_OF_ONE_NODE = (r.NodeJoined, r.NodeLeft, r.NodeUnreachable, r.NodeReachable, r.NodeDrained,
                r.NodeUndrained, r.QuarantineLifted, NodeQuarantined)
"""Kinds that change one node, and of the tasks those that sit there."""
_OF_ITSELF = frozenset((
    r.TaskProgressed, IterationsLogged, r.RankStarted, r.RankReady, r.Quiesced, r.Reconfigured,
    o.Quiesce, o.Reconfigure, o.Resume, o.StopRank, d.IncidentClosed, d.TaskWaiting))
"""Kinds after which nothing is another for any other task than their own."""
_OF_PLANS = (d.PlanChosen, StragglerCostEstimated)
"""Kinds that change nothing of a task that is calm, nor of a command; others may have waited for
the plan."""
_ANSWERS = (r.Quiesced, r.Reconfigured, r.RankStarted, r.RankReady)
_OF_MANY = (*_ANSWERS, r.RankExited)
"""Kinds that many tell, one after the other."""
_DUE_OF_NODES = ("replace", "price", "device", "recovered", "quarantine")


def disturb(state: ClusterState, body: t.Body) -> None:
    """Before the fold of this body: whom it may concern is not known to rest any more."""
    kind, number = type(body), _task_of(state, body)
    if number is not None:
        state.calm.discard(number)
    if number and (kind in _OF_ITSELF or kind is r.DeadlineReached):
        if not isinstance(body, _ANSWERS):
            state.resting.discard(number)
        return
    if kind in _OF_PLANS:
        state.resting.difference_update(
            [one for one in sorted(state.resting) if state.tasks[one].heals_in_memory])
        return
    by_name = _nodes_of(state, body, number)
    if by_name and not state.is_checked:  # else others are believed, or not any more
        there = [one.task for node in by_name.values() for one in node.occupants.values()]
        if not isinstance(body, o.StartRank | r.RankExited):
            state.calm.difference_update(there)
        answers = isinstance(body, r.RankExited) and number in state.resting
        is_taken = isinstance(body, o.StartRank)  # a slot, for which commands wait as before
        seated = {one: None for name in by_name for one in state.seated.tasks(name)}
        state.resting.difference_update(there, [
            one for one in sorted(state.resting - state.calm)
            if (one in seated and (state.tasks[one].heals_in_memory or not is_taken))
            or roams(state.tasks[one], by_name)])
        (state.resting.add if answers else state.resting.discard)(number or 0)
        return
    state.resting.clear()
    if number is None or isinstance(body, d.TaskEnded):  # which gives slots back
        state.calm.clear()


def settle(state: ClusterState, task: Task, *, is_last: bool) -> None:
    """After a step of the task to its end. `is_last`: it yielded nothing; else there may be more.
    """
    (state.resting.add if is_last else state.resting.discard)(task.id)
    if _is_calm(state, task):
        state.wishes.pop(task.id, None)
        state.calm.add(task.id)


def rests(state: ClusterState, task: Task) -> bool:
    """Whether its step would yield nothing."""
    return task.id in state.calm or task.id in state.resting


def is_quiet(state: ClusterState, body: t.Body) -> bool:
    """Whether nothing follows of a record of which nothing follows for its own task: none waits for
    the next one, whatever it is; nor does another task, for what frees a slot."""
    return not (state.replan or state.ailing or state.to_price) and (
        not isinstance(body, r.RankExited)
        or len(state.resting | state.calm) >= len(state.tasks))


def is_one_of_many(state: ClusterState, body: t.Body) -> bool:
    """Whether it is an answer that others are still to give, of a task that waits for all.

    Where it rested before, it still does: of who has answered, nothing but the last row's condition
    is a matter, as long as the task is not to leave; of a command that ends, that nobody is left.
    """
    if not isinstance(body, _OF_MANY):
        return False
    task = state.tasks.get(body.task)
    if task is None or task.id not in state.resting or (
            task.heals_in_memory and task.finished):  # who has left ends by itself then
        return False
    if isinstance(body, r.RankStarted | r.RankReady):
        return task.phase == "starting" and not (
            task.heals_in_memory and all(_is_ready(task, seat.rank)
                                         for seat in reversed(task.target)))
    if isinstance(body, r.RankExited):
        return (not task.heals_in_memory and bool(task.ranks) and not task.faults
                and task.phase != "ended" and all(
                    rank.stopping and not rank.overdue and not _is_replaced(state, rank)
                    for rank in task.ranks.values()))
    if not any(seat.rank in task.ranks for seat in task.target):
        return False
    if isinstance(body, r.Quiesced):
        return task.phase == "quiescing" and any(
            rank.quiesced != task.generation for rank in last_first(task))
    return task.phase == "reconfiguring" and any(
        rank.reconfigured != task.generation for rank in last_first(task))


def _is_replaced(state: ClusterState, rank: Rank) -> bool:
    """It is on a node that was silent for so long that others go on, once they are all that is
    left."""
    node = state.nodes.get(rank.slot.node)
    return node is not None and node.replace


# --- whom a record may concern ------------------------------------------------------------------
def _task_of(state: ClusterState, body: t.Body) -> int | None:
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
        return None if what in _DUE_OF_NODES else int(rest.partition("/")[0])
    return None


def _nodes_of(state: ClusterState, body: t.Body, number: int | None) -> dict[str, Node]:
    """The nodes that it changes, where they are known: that of a process, of a task."""
    task, names = state.tasks.get(number or 0), list[str]()
    if isinstance(body, _OF_ONE_NODE):
        names = [body.node]
    elif isinstance(body, o.StartRank):
        names = [body.slot.node]
    elif isinstance(body, r.RankExited):
        rank = task.ranks.get(body.rank) if task is not None else None
        names = [rank.slot.node] if rank is not None and rank.attempt == body.attempt else []
    elif isinstance(body, d.IncidentOpened | d.IncidentEscalated) and task is not None:
        seats = task.seats_at
        slots = [task.ranks[one].slot if one in task.ranks else seats.get(one)
                 for one in body.ranks]
        names = [body.node, *(slot.node for slot in slots if slot is not None)]
    elif isinstance(body, r.DeadlineReached) and body.deadline in state.deadlines:
        names = [body.deadline.partition("/")[2]]
    return {name: state.nodes[name] for name in names if name in state.nodes}


def roams(task: Task, names: Collection[str]) -> bool:
    """Whether its step may look at these nodes, where it has neither a process nor a seat."""
    if task.publishing or (task.ghosts and any(ghost.slot.node in names for ghost in task.ghosts)):
        return True
    train = task.spec.training
    return train is not None and train.copy_every > 0


# --- what a calm task is ------------------------------------------------------------------------
def _is_ready(task: Task, number: int) -> bool:
    rank = task.ranks.get(number)
    return rank is not None and rank.state == "ready"


def _is_calm(state: ClusterState, task: Task) -> bool:
    if (task.phase != "training" or task.incident or task.faults or task.ending
            or task.outcome or task.saved is not None or task.publishing or state.held
            or not task.target or len(task.ranks) != len(task.target)
            or any(_is_healthy(state.nodes.get(ghost.slot.node)) for ghost in task.ghosts)):
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
