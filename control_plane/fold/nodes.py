"""The fold of nodes: joined, left, unreachable, reachable, lost reports, refused orders."""

from ...events.records import reports as r
from ...events.records.envelope import Record, incarnation_of
from ...events.records.order_format import needed_format
from ...events.records.statuses import EXITED_ABNORMALLY
from ...events.records.types import first_store_number
from ..incidents.node_incidents import update_undecided
from ..state.cluster import ClusterState, live_tasks
from ..state.node import NUM_SLOTS_MAX, TEXT_CHARS_MAX, Node
from ..state.task import Rank, RefusedStart, Task
from . import edits
from .checkpoints import publication_refused
from .node_health import inherit, update_unhealthy_slots
from .pauses import pause_restart, pause_start
from .probes import forget_probe, probe_heard, probe_silent

PORT_MAX = 65535


def node_unreachable(
    state: ClusterState, record: Record, node: Node, body: r.NodeUnreachable
) -> None:
    if node.health != "healthy":
        return
    edits.set_health(state, node, "unreachable")
    node.unreachable_seq = record.seq
    probe_silent(state, node, body.silence_s)
    edits.set_deadline(state, f"replace/{node.name}", state.policy.replace_after_s)
    for task in state.tasks.values():
        edits.update_unreachable_deadline(state, task)


def node_reachable(state: ClusterState, record: Record, node: Node, body: r.NodeReachable) -> None:
    if node.unreachable:
        was_deaf = state.hears_no_node
        edits.set_health(state, node, "healthy")
        node.replace, node.down_seq = False, 0
        edits.clear_deadline(state, f"replace/{node.name}")
        probe_heard(state, node)
        for task in state.tasks.values():
            edits.update_unreachable_deadline(state, task)
            for rank in task.ranks.values():
                if rank.is_stopped and rank.slot.node == node.name:
                    edits.set_resume_deadline(state, task, rank)
        if was_deaf:
            edits.restart_deadlines(state)
        state.replan = f"node {node.name} is back"


def node_joined(state: ClusterState, record: Record, body: r.NodeJoined) -> None:
    old = state.nodes.get(body.node)
    if old is not None and body.incarnation <= old.incarnation:
        return
    why, was_deaf = f"the agent of {body.node} started again", state.hears_no_node
    if old is not None:
        edits.remove_node(state, record, old, why)
    state.nodes[body.node] = node = Node(
        name=body.node,
        incarnation=body.incarnation,
        host=body.host,
        pid=body.pid,
        num_slots=min(max(body.num_slots, 0), NUM_SLOTS_MAX),
        accelerator=body.accelerator,
        since_s=record.at_s,
        keeper=body.keeper,
        keeper_start=first_store_number(body.incarnation),
        copies_bytes_max=max(body.copies_bytes_max, 0),
        labels=body.labels,
        order_format=body.order_format,
        unlimited=_limits(body.unlimited),
        probe_port=body.probe_port if 0 < body.probe_port <= PORT_MAX else 0,
        drained=old is not None and old.drained,
        drain_reason=old.drain_reason if old is not None else "",
    )
    if old is not None:
        inherit(state, old, node)
    update_unhealthy_slots(state)
    edits.clear_deadline(state, f"replace/{body.node}")
    probe_heard(state, node)
    edits.schedule_estimate(state, body.node)
    _forget_incarnations(state, body.node, old.incarnation if old is not None else 0)
    edits.update_unreachable(state, node)
    update_undecided(state)
    state.num_slots_max = max(
        state.num_slots_max,
        sum(one.num_slots for one in state.nodes.values() if one.health == "healthy"),
    )
    if was_deaf:
        edits.restart_deadlines(state)
    state.replan = f"node {body.node} joined"


def _limits(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those that an agent may name."""
    return tuple(name for name in ("pids", "memory") if name in names)


def _forget_incarnations(state: ClusterState, name: str, oldest: int) -> None:
    """Drop incarnations before `oldest`: only the previous agent may still have spooled reports."""
    own = f"{name}/"
    for source in [source for source in state.sources if source.startswith(own)] if oldest else ():
        incarnation = incarnation_of(source)
        if incarnation is not None and incarnation < oldest and source.rpartition("/")[0] == name:
            del state.sources[source]


def agent_restarting(
    state: ClusterState, record: Record, node: Node, body: r.AgentRestarting
) -> None:
    node.away_until_s = record.at_s + min(max(body.back_s, 0.0), state.policy.agent_gone_s_max)


def agent_restarted(
    state: ClusterState, record: Record, node: Node, body: r.AgentRestarted
) -> None:
    node.pid, node.away_until_s = body.pid, record.at_s
    node.unlimited = _limits(body.unlimited)
    if body.order_format != node.order_format:
        node.order_format = body.order_format
        if any(needed_format(task.spec) for task in live_tasks(state)):
            state.replan = f"the agent of {node.name} reads order format {node.order_format}"


def node_left(state: ClusterState, record: Record, node: Node, body: r.NodeLeft) -> None:
    edits.remove_node(state, record, node, "")
    edits.set_health(state, node, "left")
    forget_probe(state, node)
    update_unhealthy_slots(state)
    edits.clear_deadline(state, f"replace/{node.name}")
    state.replan = f"node {node.name} left"


def reports_lost(state: ClusterState, record: Record, body: r.ReportsLost) -> None:
    state.reports_lost += max(body.num_lost, 0)


def order_refused(state: ClusterState, record: Record, body: r.OrderRefused) -> None:
    for task in state.tasks.values():
        for rank in list(task.ranks.values()):
            if rank.start_order == body.order and rank.state == "ordered":
                edits.remove_process(state, task, rank)
                _start_refused(state, record, task, rank, body)
                return
        for rank in [*task.ranks.values(), *task.orphans]:
            if body.order in rank.stop_orders:
                # No such process: its StartRank never reached the node.
                edits.remove_process(state, task, rank)
                return
        refused = task.publishing.pop(body.order, None)
        if refused is not None:
            state.orders.pop(body.order, None)
            publication_refused(state, record, task, refused, body)
            return


def _start_refused(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.OrderRefused
) -> None:
    """Where the machine lacks something, the task is not at fault: the rank starts again after a
    pause, there or where the plan has its seat then."""
    if not body.errno:
        edits.record_fault(
            task,
            record,
            [rank],
            EXITED_ABNORMALLY,
            f"{body.node} refused to start rank {rank.rank}: {body.why}",
            words=body.why,
        )
        pause_restart(state, task, rank)
        return
    before = task.refused_starts.get(rank.rank)
    if before is not None and before.node != rank.slot.node:
        before = None
    task.refused_starts[rank.rank] = refused = RefusedStart(
        rank=rank.rank,
        node=rank.slot.node,
        since_s=before.since_s if before is not None else record.at_s,
        num=1 + (before.num if before is not None else 0),
        why=body.why[:TEXT_CHARS_MAX],
        errno=body.errno,
    )
    pause_start(state, task, rank.rank, refused.num)
