"""Who may report what: an agent speaks of its own node, its processes, the tasks that it trains."""

from typing import Any

from ...events.log.identity import AGENT_REPORTS, About
from ...events.records.codec import decode_record
from ...events.records.envelope import Report, incarnation_of, order_nodes
from ...events.records.reports import NodeJoined
from ..fold.edits import find_orphan, find_rank
from ..state.cluster import ClusterState


def stranger(state: ClusterState, report: Report) -> str:
    """Why the source of an agent's report is none that the state knows; "": it knows it. A node, or
    a new incarnation of it, is known from its NodeJoined on."""
    name, incarnation = report.source.rpartition("/")[0], incarnation_of(report.source)
    if isinstance(report.body, NodeJoined):
        return ""
    node = state.nodes.get(name)
    if node is None:
        return f"node {name} has not joined"
    if incarnation is None or incarnation > node.incarnation:
        return f"incarnation {incarnation} of node {name} has not joined"
    return ""


def foreign(state: ClusterState, report: Report) -> str:
    """Why an agent may not report this, by what the report is about (AGENT_REPORTS); "": it may.

    What the state does not know any more may be reported: it changes nothing, and an agent that is
    late speaks of a process that was replaced, or of an earlier generation.
    """
    node, body = report.source.rpartition("/")[0], report.body
    about: About = AGENT_REPORTS.get(type(body), "nothing")
    if about == "process":
        return _of_process(state, node, body)
    if about == "share":
        return _of_share(state, node, body)
    if about == "member":
        return _of_member(state, node, body)
    if about == "order":
        return _of_order(state, node, body)
    if about == "probe":
        return _of_probe(state, node, body)
    return ""


def _of_process(state: ClusterState, node: str, body: Any) -> str:
    task = state.tasks.get(body.task)
    if task is None:
        return ""
    rank = find_rank(task, body.rank, body.attempt) or find_orphan(task, body.rank, body.attempt)
    if rank is None or rank.slot.node == node:
        return ""
    return f"process {body.attempt} of rank {body.rank} of task {task.id} is on {rank.slot.node}"


def _of_share(state: ClusterState, node: str, body: Any) -> str:
    """A share counts also when its process is gone, so a process or member has to be known."""
    task = state.tasks.get(body.task)
    if task is None or task.phase == "ended":
        return ""
    if body.generation != task.generation and not task.restarts_from_memory:
        return ""
    store = state.nodes.get(body.node)
    if store is not None and body.keeper_start > store.keeper_start:
        # Copies are forgotten when a store has ended: only its own node says so.
        return f"{body.node} has not reported that its store {store.keeper_start} has ended"
    if find_rank(task, body.rank, body.attempt) or find_orphan(task, body.rank, body.attempt):
        return _of_process(state, node, body)
    process = (body.rank, body.attempt, node)
    if any((member.rank, member.attempt, member.node) == process for member in task.members):
        return ""
    return f"process {body.attempt} of rank {body.rank} of task {task.id} is not on {node}"


def _of_member(state: ClusterState, node: str, body: Any) -> str:
    task = state.tasks.get(body.task)
    if task is None or body.generation != task.generation:
        return ""
    if node in task.member_nodes:
        return ""
    return f"no member of generation {task.generation} of task {task.id} is on {node}"


def _of_order(state: ClusterState, node: str, body: Any) -> str:
    if body.order not in state.orders or node in order_nodes(
        decode_record(state.orders[body.order])
    ):
        return ""
    return f"order {body.order} is not to {node}"


def _of_probe(state: ClusterState, node: str, body: Any) -> str:
    target = state.nodes.get(body.target)
    probe = target.probe if target is not None else None
    if probe is None or (probe.order, probe.epoch) != (body.order, body.epoch):
        return ""
    return "" if node in probe.probers else f"order {body.order} is not to {node}"
