"""State changes that several record handlers share."""

from msgspec.structs import replace

from ...events.records.envelope import Record
from ...events.records.order_format import needed_format
from ...events.records.reports import Reconfigured
from ...events.records.statuses import EXITED_ABNORMALLY
from ...events.records.types import Member, NodeStores, ReceivedState, StoreEndpoint
from ..incidents.hangs import locate_hang
from ..incidents.severity import severity_of
from ..incidents.stragglers import slow_on
from ..state.cluster import NUM_WORK_SPANS_MAX, WORK_SPAN_S, ClusterState, Deadline
from ..state.incident import (
    NUM_EVIDENCE_MAX,
    ORIGINS,
    FailureLocation,
    Fault,
    Incident,
    Source,
)
from ..state.members import count_outstanding, has_settled, is_complete, is_unreachable, unanswered
from ..state.node import Health, Node, Occupant
from ..state.task import Phase, Rank, Task
from ..throughput.transition_cost import (
    command_stopped,
    transition_began,
    transition_to_idle,
    was_injected,
)
from .failures import add_failure

STOPPED = "is stopped (SIGSTOP)"
"""Timeout reason of a rank whose process has been stopped for too long."""
EARLY_S = 1e-3
"""Tolerance of deadlines: float sums of seconds since 1970 are not exact."""
PLAN = "plan"
"""The deadline at which tasks that were submitted soon after a plan are planned."""
LOSSES = "losses"
"""The deadline, due at once, until which nodes that are lost in one moment share a plan: many
verdicts have the same time."""
_NODE_DEADLINES = frozenset(("replace", "price", "device", "recovered", "quarantine", "probe"))
EXPIRED = "expired"
"""The deadline of ended tasks. It is none of the state's: `expired_tasks` tells when it is due."""
PRICE_S = 60.0
"""Minimum time between two cost estimates of a degraded node."""


def task_of_deadline(name: str) -> int:
    """The task of a deadline; 0: the deadline is a node's, or its name is unknown."""
    what, _, rest = name.partition("/")
    number = rest.partition("/")[0]
    return int(number) if what not in _NODE_DEADLINES and number.isdecimal() else 0


def expired_tasks(state: ClusterState, now_s: float) -> list[Task]:
    """Ended tasks that leave the state: after `ended_keep_s`, when no node has anything of them."""
    until_s = now_s - state.policy.ended_keep_s
    return [
        task
        for task in state.tasks.values()
        if task.phase == "ended"
        and task.since_s <= until_s
        and not (task.ranks or task.orphans or task.store_nodes)
    ]


def forget_tasks(state: ClusterState) -> None:
    """Remove the expired tasks, with all that is about them."""
    for task in expired_tasks(state, state.at_s):
        for one in [one for one in state.incidents.values() if one.task == task.id]:
            del state.incidents[one.id]
        del state.tasks[task.id]


def set_deadline(state: ClusterState, deadline: str, length_s: float) -> None:
    """Set a deadline, due `length_s` from now."""
    state.deadlines[deadline] = Deadline(state.at_s + length_s, length_s)


def running_deadlines(state: ClusterState) -> dict[str, Deadline]:
    """The deadlines that may pass now. While no node is heard, those of tasks and of silent nodes
    wait: training may go on, and answers cannot come."""
    if not state.hears_no_node:
        return state.deadlines
    return {
        name: deadline
        for name, deadline in state.deadlines.items()
        if not task_of_deadline(name) and not name.startswith(("replace/", "probe/"))
    }


def restart_deadlines(state: ClusterState) -> None:
    """Start all deadlines anew: nothing was heard, or nobody led, until now."""
    for name, deadline in list(state.deadlines.items()):
        if not name.startswith("quarantine/"):  # a quarantine also runs without a leader
            set_deadline(state, name, deadline.length_s)
    for node in state.nodes.values():
        if node.probe is not None:  # its answers are old, or were not heard
            node.probe = None
            set_deadline(state, f"probe/{node.name}", state.policy.silence_s_max)


def clear_deadline(state: ClusterState, deadline: str) -> None:
    state.deadlines.pop(deadline, None)


def clear_phase_deadlines(state: ClusterState, task: Task) -> None:
    for what in ("quiesce", "silent", "reconfigure", "evidence", "hang", "finish"):
        clear_deadline(state, f"{what}/{task.id}/{task.generation}")


def set_phase(state: ClusterState, task: Task, phase: Phase) -> None:
    if task.phase != phase:
        task.phase, task.since_s = phase, state.at_s
        count_outstanding(task)


def set_health(state: ClusterState, node: Node, health: Health) -> None:
    """Set the node's health, and update the list of unreachable nodes."""
    node.health, node.since_s = health, state.at_s
    update_unreachable(state, node)


def update_unreachable(state: ClusterState, node: Node) -> None:
    """Update the list of unreachable nodes after a change of the node's health."""
    if node.unreachable != (node.name in state.unreachable):
        others = [name for name in state.unreachable if name != node.name]
        state.unreachable = sorted([*others, node.name]) if node.unreachable else others


def find_rank(task: Task | None, number: int, attempt: int) -> Rank | None:
    """The process of this attempt, if the task has it."""
    rank = task.ranks.get(number) if task is not None else None
    return rank if rank is not None and rank.attempt == attempt else None


def find_orphan(task: Task, number: int, attempt: int) -> Rank | None:
    """The orphaned process of this attempt, if there is one."""
    return next(
        (orphan for orphan in task.orphans if (orphan.rank, orphan.attempt) == (number, attempt)),
        None,
    )


def close_orders(state: ClusterState, orders: list[int]) -> None:
    """Remove the orders: agents need not execute them any more."""
    for order in orders:
        state.orders.pop(order, None)


def forget_rank(state: ClusterState, task: Task, rank: Rank) -> None:
    """Clear the process's deadlines and orders, but keep its slot."""
    for what in ("start", "stop", "error", "stopped", "printed"):
        clear_deadline(state, f"{what}/{task.id}/{rank.rank}/{rank.attempt}")
    close_orders(state, [rank.start_order, *rank.stop_orders])


def forget_step_time(state: ClusterState, task: Task, rank: Rank) -> None:
    """Remove the process from stall and straggler detection, but keep its step time."""
    task.stalls.pop(rank.rank, None)
    task.slow_iterations.pop(rank.rank, None)
    pace = task.step_times.get(rank.rank)
    if pace is not None:
        task.step_times[rank.rank] = replace(pace, generation=0)
    if task.slow.pop(rank.rank, None) is not None:
        schedule_estimate(state, rank.slot.node)


def schedule_estimate(state: ClusterState, name: str) -> None:
    """Schedule a cost estimate of the node after its health changed, at most one in PRICE_S. If the
    node is not degraded any more, drop its estimate."""
    priced = state.degraded.get(name)
    was = priced is not None or name in state.to_price
    state.to_price = [other for other in state.to_price if other != name]
    clear_deadline(state, f"price/{name}")
    if not is_degraded(state, name):
        state.degraded.pop(name, None)
        if was and name in state.nodes:
            state.nodes[name].improved_s = state.at_s
    elif priced is not None and state.at_s - priced.at_s < PRICE_S:
        set_deadline(state, f"price/{name}", priced.at_s + PRICE_S - state.at_s)
    else:
        state.to_price.append(name)


def is_degraded(state: ClusterState, name: str) -> bool:
    """Whether a check reports the node as degraded, or a straggler runs on it."""
    node = state.nodes.get(name)
    if node is not None and any(check.health == "degraded" for check in node.checks):
        return True
    return any(slow_on(task, name) for task in state.tasks.values())


def remove_process(state: ClusterState, task: Task, rank: Rank) -> None:
    """Remove a process that has exited, and free its slot."""
    forget_rank(state, task, rank)
    node = state.nodes.get(rank.slot.node)
    own = Occupant(task.id, rank.rank, rank.attempt)
    if node is not None and node.occupants.get(rank.slot.index) == own:
        del node.occupants[rank.slot.index]
    if find_rank(task, rank.rank, rank.attempt) is not None:
        del task.ranks[rank.rank]
        state.num_running -= 1
        forget_step_time(state, task, rank)
    else:
        task.orphans = [x for x in task.orphans if (x.rank, x.attempt) != (rank.rank, rank.attempt)]
    if node is not None and node.order_format < needed_format(task.spec):
        state.replan = f"no process of {task.spec.name} can start again on {node.name}"
    count_outstanding(task)
    settle_phase(state, task)
    update_unreachable_deadline(state, task)


def orphan_process(state: ClusterState, task: Task, rank: Rank, why: str) -> None:
    """Orphan a process whose end is not confirmed: remove it, but keep its slot occupied."""
    forget_rank(state, task, rank)
    del task.ranks[rank.rank]
    state.num_running -= 1
    forget_step_time(state, task, rank)
    rank.timeout_reason, rank.stop_orders = why, []
    task.orphans.append(rank)
    count_outstanding(task)
    settle_phase(state, task)
    update_unreachable_deadline(state, task)


def settle_phase(state: ClusterState, task: Task) -> None:
    """If no process with the task's state is left, the task starts again, or becomes idle."""
    if task.phase == "ended":
        return
    if not task.heals_in_memory:
        if not task.ranks:
            command_stopped(state, task)
            task.rate_flops = 0.0
            set_phase(state, task, "starting" if task.target else "idle")
        return
    if task.phase in ("training", "quiescing", "reconfiguring"):
        if task.living_members() or (task.finished and task.final_known):
            return
        clear_phase_deadlines(state, task)
        close_orders(state, [task.quiesce_order, task.reconfigure_order, task.resume_order])
        transition_began(state, task)
        set_members(task, ())
        task.finished, task.failed_s = [], -1.0
        set_phase(state, task, "starting")
    if task.phase == "starting" and not task.target and not task.ranks:
        transition_to_idle(state, task)
        set_phase(state, task, "idle")


def update_unreachable_deadline(state: ClusterState, task: Task) -> None:
    """Set or clear the deadline of members on unreachable nodes: it runs while the task waits for
    them (`_silent_alone`) and the others hold the complete state. It is as long as the wait for a
    second source (`evidence_s_max`)."""
    name = f"silent/{task.id}/{task.generation}"
    if (
        not state.unreachable
        or not _silent_alone(state, task)
        or not is_complete(
            task, [rank for rank in task.living_members() if not is_unreachable(state, rank)]
        )
    ):
        clear_deadline(state, name)
    elif name not in state.deadlines:
        set_deadline(state, name, state.policy.evidence_s_max)
    update_hang_deadline(state, task)


def _silent_alone(state: ClusterState, task: Task) -> bool:
    """Whether the task waits for unreachable members. While it quiesces: only for these, as the
    others have left. While it reconfigures, the others cannot build the generation without them."""
    unreachable = [
        rank
        for name in state.unreachable
        for one in state.nodes[name].occupants.values()
        if one.task == task.id and (rank := find_rank(task, one.rank, one.attempt)) is not None
    ]
    if task.phase == "quiescing":
        if task.num_outstanding > len(unreachable):
            return False  # the usual case: avoids a scan of all members
        waits = unanswered(task)
        return bool(waits) and all(is_unreachable(state, rank) for rank in waits)
    return task.phase == "reconfiguring" and any(
        not has_settled(task, rank) and task.member(rank.rank) is rank for rank in unreachable
    )


def update_hang_deadline(state: ClusterState, task: Task, *, restart: bool = False) -> None:
    """Set or clear the hang deadline of a stalled task. `restart`: anew, as other ranks stall."""
    name = f"hang/{task.id}/{task.generation}"
    if not task.stalls and name not in state.deadlines:
        return
    hang = locate_hang(state, task)
    if hang is None or restart:
        clear_deadline(state, name)
    if hang is not None and hang.is_actionable and name not in state.deadlines:
        set_deadline(state, name, max(hang.due_s - state.at_s, 0.0))


def set_resume_deadline(state: ClusterState, task: Task, rank: Rank) -> None:
    """Set the deadline for a stopped training rank to continue, unless it is to end anyway."""
    if task.heals_in_memory and not task.ending and not rank.stopping and not rank.timeout_reason:
        set_deadline(
            state, f"stopped/{task.id}/{rank.rank}/{rank.attempt}", state.policy.stopped_s_max
        )


def remove_node(state: ClusterState, record: Record, node: Node, why: str) -> None:
    """Remove all processes and in-memory checkpoints of this incarnation of the node. If `why` is
    not empty, record a fault of each affected task, dated at the first sign of the loss."""
    there = {one.task for one in node.occupants.values()}
    for number in sorted(state.tasks):
        task = state.tasks[number]
        if task.copies:
            task.copies = [copy for copy in task.copies if copy.node != node.name]
        if task.outcome:
            forget_store(state, task, node.name)
        if number not in there:
            continue
        for orphan in [orphan for orphan in task.orphans if orphan.slot.node == node.name]:
            remove_process(state, task, orphan)
        gone = [
            task.ranks[key] for key in sorted(task.ranks) if task.ranks[key].slot.node == node.name
        ]
        faulty = [
            x for x in gone if x.state != "finished" and not x.stopping and not x.timeout_reason
        ]
        hurts = any(task.member(rank.rank) is not None for rank in faulty)
        since_s, signs = (
            _first_sign(state, task, node)
            if hurts or not task.heals_in_memory
            else (record.at_s, ())
        )
        for rank in gone:
            rank.fault_injected_s = max(rank.fault_injected_s, node.fault_injected_s)
            remove_process(state, task, rank)
        if faulty and why and not task.ending and not (task.finished and task.final_known):
            record_fault(
                task,
                record,
                faulty,
                EXITED_ABNORMALLY,
                why,
                hurts=hurts or None,
                evidence=signs,
                since_s=since_s,
                own=False,
            )


def _first_sign(state: ClusterState, task: Task, node: Node) -> tuple[float, tuple[int, ...]]:
    """When the task stopped because of this node: at the earliest of a failed collective, missed
    heartbeats and the due time of the next iteration. Also the seqs that show it."""
    failed = sorted(
        rank.failed_seq
        for rank in task.living_members()
        if task.failed_s >= 0 and rank.failed == task.generation and rank.failed_seq
    )
    since_s = task.failed_s if failed else state.at_s
    seqs = tuple(failed)
    if node.unreachable:
        since_s = min(since_s, node.since_s)
        seqs = tuple(sorted({*seqs, node.unreachable_seq} - {0}))
    if (
        task.heals_in_memory
        and task.phase == "training"
        and task.stepped == task.generation
        and (task.step_s > 0 and not task.finished)
    ):
        since_s = min(since_s, task.progressed_s + task.step_s)
    return since_s, seqs


def record_fault(
    task: Task,
    record: Record,
    ranks: list[Rank],
    status: str,
    why: str,
    *,
    evidence: tuple[int, ...] = (),
    hurts: bool | None = None,
    ended: bool = False,
    second_hand: bool = False,
    since_s: float = -1.0,
    own: bool = True,
    words: str = "",
    can_pass: bool = False,
) -> None:
    """Record a fault, dated `since_s` (below 0: now). With `hurts` None, it interrupts training if
    one of `ranks` is a member, or if no member runs. `own`: not from outside, as a lost node or a
    signal is; `words`: the line that tells it; `can_pass`: it may pass by itself."""
    if hurts is None:
        living = task.living_members()
        hurts = not living or any(task.member(rank.rank) is rank for rank in ranks)
    ended = ended or status == EXITED_ABNORMALLY
    severity = severity_of(status, process_ended=ended)
    if severity == "SEV3":
        task.reattempts += 1
    else:
        for rank in ranks:
            task.restarts[rank.rank] = task.restarts.get(rank.rank, 0) + 1
    injected = any(was_injected(rank.fault_injected_s, record.at_s) for rank in ranks)
    if own and ranks and not (second_hand or injected or severity == "SEV3"):
        add_failure(task, record.at_s, ranks, status, why, words, can_pass=can_pass)
    node = ranks[0].slot.node if ranks else ""
    strikes = tuple(FailureLocation(rank.rank, rank.slot, record.at_s) for rank in ranks)
    task.faults.append(
        Fault(
            ranks=tuple(rank.rank for rank in ranks),
            node=node,
            status=status,
            why=why,
            evidence=(*evidence, record.seq),
            at_s=since_s if since_s >= 0 else record.at_s,
            hurts=hurts,
            ended=ended,
            second_hand=second_hand,
            strikes=strikes,
            on_purpose=injected,
        )
    )


def record_generation_failure(
    task: Task, record: Record, ranks: list[Rank], status: str, why: str
) -> None:
    """Record that the generation did not come up. Further reports of it are ignored."""
    if any(rank.failed == task.generation for rank in task.living_members()) or not ranks:
        return
    for rank in ranks:
        rank.failed, rank.failed_seq, rank.failed_status = task.generation, record.seq, status
        rank.failed_peer = ""
    record_fault(task, record, ranks, status, why, second_hand=True)


def add_evidence(incident: Incident | None, record: Record) -> None:
    """Append a record to the evidence of an incident that is already open."""
    if incident is not None and len(incident.evidence) < NUM_EVIDENCE_MAX:
        incident.evidence.append(record.seq)


def end_pause(state: ClusterState, task: Task) -> None:
    """The task steps: end the pause, and save the values that the next failed attempt restores."""
    incident = state.incidents.get(task.incident)
    if incident is not None:
        if incident.down_since_s >= 0:
            incident.pause_s += state.at_s - incident.down_since_s
            incident.down_since_s = -1.0
        incident.kept_before, incident.dealt_before = incident.kept, incident.dealt
        incident.ckpt_read_before, incident.source_before = incident.ckpt_read, incident.source


def set_members(task: Task, members: tuple[Member, ...]) -> None:
    """Set the members of the task's generation, and their positions."""
    task.members = members
    if members:
        task.member_nodes = sorted({member.node for member in members})
    task.positions = {member.rank: position for position, member in enumerate(members)}


def set_stores(
    task: Task, keepers: tuple[StoreEndpoint, ...], stores: tuple[NodeStores, ...]
) -> None:
    """Set the task's checkpoint stores. Former stores still hold in-memory checkpoints."""
    task.keepers, task.stores = keepers, stores
    task.store_nodes = sorted({*task.store_nodes, *(keeper.node for keeper in keepers)})


def forget_store(state: ClusterState, task: Task, node: str) -> None:
    """The node's store has nothing of the task any more. If no store has, close the drop order."""
    task.store_nodes = [name for name in task.store_nodes if name != node]
    if task.drop_order and not task.store_nodes:
        close_orders(state, [task.drop_order])
        task.drop_order = 0


def record_origin(incident: Incident, body: Reconfigured, checkpoint: str, node: str) -> None:
    """Update the incident's source of state: the farthest source of all members. If no member had
    the state, forget earlier attempts. `checkpoint`: the order's path; `node`: the member's."""
    origin = body.origin
    if not origin and body.source == -1 and body.step_version > 0:  # reported by an older rank
        origin = "checkpoint"
    received_bytes = max(body.received_bytes, 0)
    incident.received_bytes += received_bytes
    received_from = body.received_from or (
        (ReceivedState(body.source, body.origin_node, received_bytes),) if body.source >= 0 else ()
    )
    for one in received_from:
        incident.peer_bytes += max(one.taken_bytes, 0)
        incident.near_bytes += max(one.taken_bytes, 0) if one.node == node else 0
    if origin in ("copy", "checkpoint", "seed"):
        incident.ckpt_read, incident.source = incident.ckpt_read_before, incident.source_before
    incident.ckpt_read = incident.ckpt_read or origin == "checkpoint"
    if ORIGINS.index(origin) > ORIGINS.index(incident.source.origin):
        incident.source = Source(
            origin=origin,
            node=body.origin_node,
            step_version=body.step_version,
            path=checkpoint if origin == "checkpoint" else "",
            num_bytes=received_bytes,
        )


def add_work(state: ClusterState, task: Task, iteration: int) -> None:
    """The task reached `iteration`: add the work of iterations finished for the first time."""
    work = max(iteration - task.max_iteration, 0) * task.iteration_flops * task.weight
    span = int(state.at_s // WORK_SPAN_S)
    state.earned[span] = state.earned.get(span, 0.0) + work
    while len(state.earned) > NUM_WORK_SPANS_MAX:
        del state.earned[min(state.earned)]
