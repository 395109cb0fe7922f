"""The fold of decisions and orders."""

from collections.abc import Sequence

from msgspec.structs import replace

from ...events.records import decisions as d
from ...events.records import orders as o
from ...events.records.codec import encode_record
from ...events.records.envelope import Record
from ...events.records.statuses import TASK_HANG
from ...events.records.types import Seat
from ...events.timing import STACKS_S_MAX
from ..incidents import blame, unnamed
from ..incidents.hangs import WAITED_FOR
from ..incidents.node_incidents import update_undecided
from ..incidents.recovery import deadline_name
from ..incidents.severity import worst
from ..state import limits
from ..state.cluster import NUM_INCIDENTS_MAX, ClusterState
from ..state.incident import NUM_FAILURES_MAX, Incident, Suspect
from ..state.members import (
    awaited,
    count_outstanding,
    is_complete,
    is_pinned,
    is_standby,
    is_starting,
    only_publication_left,
)
from ..state.node import Occupant
from ..state.task import Rank, Task
from ..throughput.calibration import learn_slot
from ..throughput.transition_cost import (
    is_fault,
    transition_began,
    transition_completed,
    transition_stepped,
    update_mtbf,
    was_injected,
)
from . import edits
from .node_health import (
    assign_evidence,
    count_sev1_fault,
    count_slot_fault,
    disable_slots,
    enable_slot,
    is_proved,
    suspect_slot,
)
from .pauses import end_pauses


# --- incidents ---
def incident_opened(state: ClusterState, record: Record, body: d.IncidentOpened) -> None:
    task = state.tasks.get(body.task)
    state.incidents[record.seq] = incident = Incident(
        id=record.seq,
        task=body.task,
        node=body.node,
        severity=body.severity,
        status=body.status,
        ranks=sorted(body.ranks),
        why=body.why,
        evidence=list(body.evidence),
        opened_s=record.at_s,
        iterations_lost=None if task is not None and not task.heals_in_memory else 0,
        begun_iteration=task.max_iteration if task is not None else 0,
        on_purpose=_was_injected(state, task, body.node),
    )
    count_sev1_fault(state, incident, body, on_purpose=incident.on_purpose)
    assign_evidence(state, incident, body)
    if task is not None:
        task.incident = record.seq
        state.num_faults += is_fault(state, task, incident)
        update_mtbf(state)
        _update_evidence(incident, task, opened=True)
        _remember(state, task, incident, body)
        _settle_faults(state, task, incident, body)


def _was_injected(state: ClusterState, task: Task | None, name: str) -> bool:
    """Whether the fault that is decided upon was injected."""
    node = state.nodes.get(name)
    ranks = task.ranks.values() if task is not None else ()
    harmed = [rank.fault_injected_s for rank in ranks]
    harmed += [node.fault_injected_s] if node is not None else []
    return any(was_injected(harmed_s, state.at_s) for harmed_s in harmed) or (
        task is not None and any(fault.on_purpose for fault in task.faults)
    )


def _update_evidence(incident: Incident, task: Task, *, opened: bool) -> None:
    """Update the incident's failure locations, and whether all of its evidence is indirect."""
    indirect = bool(task.faults) and all(fault.second_hand for fault in task.faults)
    incident.second_hand = indirect and (opened or incident.second_hand)
    strikes = [strike for fault in task.faults for strike in fault.strikes]
    incident.strikes = [*incident.strikes, *strikes][-NUM_FAILURES_MAX:]


def incident_escalated(state: ClusterState, record: Record, body: d.IncidentEscalated) -> None:
    incident = state.incidents.get(body.of)
    task = state.tasks.get(incident.task) if incident is not None else None
    if incident is None:
        return
    count_sev1_fault(state, incident, body, on_purpose=_was_injected(state, task, body.node))
    assign_evidence(state, incident, body)
    known = incident.ranks
    if body.root or worst(incident.severity, body.severity) != incident.severity:
        if (body.root or incident.severity == "SEV3") and body.ranks:
            known = []  # the known ranks reported only consequences
        incident.severity, incident.why = body.severity, body.why
        incident.status = body.status or incident.status
        incident.node = body.node or incident.node
    incident.ranks = sorted({*known, *body.ranks})
    incident.evidence += [x for x in body.evidence if x not in incident.evidence]
    if task is not None:
        if body.num_times:
            _returned(state, task, incident, body.num_times)
        _update_evidence(incident, task, opened=False)
        _remember(state, task, incident, body)
        _settle_faults(state, task, incident, body)


def _returned(state: ClusterState, task: Task, incident: Incident, num_times: int) -> None:
    """The fault of a recovering incident has come back. It counts as a fault of its own."""
    edits.clear_deadline(state, deadline_name(incident))
    task.recovering = [number for number in task.recovering if number != incident.id]
    task.incident = incident.id
    incident.num_times, incident.recovering_s = num_times, 0.0
    incident.begun_iteration = task.max_iteration
    state.num_faults += is_fault(state, task, incident)
    update_mtbf(state)


def incident_recovering(state: ClusterState, record: Record, body: d.IncidentRecovering) -> None:
    incident = state.incidents.get(body.of)
    task = state.tasks.get(incident.task) if incident is not None else None
    if incident is None or task is None or task.incident != incident.id:
        return
    incident.recovering_s, incident.until_iteration = record.at_s, body.until_iteration
    task.incident = 0
    task.recovering.append(incident.id)
    edits.set_deadline(state, deadline_name(incident), state.policy.passing_s_max)


def _remember(
    state: ClusterState,
    task: Task,
    incident: Incident,
    body: d.IncidentOpened | d.IncidentEscalated,
) -> None:
    """Keep what adds up over incidents: faults without a name, and hung ranks."""
    has_ended = any(fault.ended for fault in task.faults)
    is_unnamed = body.status in blame.UNNAMED and body.severity != "SEV1" and not has_ended
    if is_unnamed and not _was_injected(state, task, body.node):
        unnamed.remember(state, task, incident.id, body.status)
    elif task.faults:  # the incident has a name, or was made on purpose
        unnamed.forget(state, incident.id)
        blame.remember_hangs(state, task)


def _down_since_s(state: ClusterState, task: Task, ranks: tuple[int, ...]) -> float:
    """When the downtime began: now, or when ranks began to wait for an unreachable node. If all
    nodes of the task are unreachable: since the first is, or since the last progress."""
    if any(
        rank.rank in ranks and rank.timeout_reason == WAITED_FOR for rank in task.ranks.values()
    ):
        return min((stall.since_s for stall in task.stalls.values()), default=state.at_s)
    nodes = [
        state.nodes.get(rank.slot.node) for rank in task.living_members() or task.ranks.values()
    ]
    silent_s = [node.since_s for node in nodes if node is not None and node.unreachable]
    if silent_s and len(silent_s) == len(nodes):
        return max(min(silent_s), task.progressed_s)
    return state.at_s


def _settle_faults(
    state: ClusterState,
    task: Task,
    incident: Incident,
    body: d.IncidentOpened | d.IncidentEscalated,
) -> None:
    """Clear the faults that this decision handles. SEV1 disables the slots of its ranks."""
    severity, ranks = body.severity, body.ranks
    down_s = [fault.at_s for fault in task.faults if fault.hurts]
    if task.failed_s >= 0:
        down_s.append(task.failed_s)
    needs = task.member if task.heals_in_memory else task.ranks.get  # a command needs all processes
    if severity == "SEV1" and any(needs(number) is not None for number in ranks):
        down_s.append(_down_since_s(state, task, ranks))
    if down_s and incident.down_since_s < 0:
        incident.down_since_s = min(down_s)
    task.faults = []
    if not task.heals_in_memory and any(
        not node.takes_tasks or node.is_disabled(seat.slot.index)
        for seat in task.target
        if (node := state.nodes.get(seat.slot.node)) is not None
    ):
        state.replan = f"task {task.spec.name} is to start elsewhere"
    if task.reattempts > state.policy.restarts_max:  # reattempts in place did not help
        task.reattempts = 0
        for number in ranks:
            rank = task.member(number)
            if rank is not None and not rank.timeout_reason and not rank.error_seq:
                rank.timeout_reason = "was reattempted in place too often"
                task.restarts[number] = task.restarts.get(number, 0) + 1
    if severity == "SEV1" and not body.keeps_slots:
        for number in ranks:
            _disable(state, task, number, f"{task.spec.name}, {body.why}")


def _disable(state: ClusterState, task: Task, number: int, why: str) -> None:
    """Remove the node if it is unreachable, else disable the slot."""
    rank = task.ranks.get(number)
    slots = [seat.slot for seat in task.target if seat.rank == number]
    slot = rank.slot if rank is not None else (slots[0] if slots else None)
    node = state.nodes.get(slot.node) if slot is not None else None
    if node is None or slot is None:
        return
    if node.unreachable:
        if node.health == "unreachable":
            edits.set_health(state, node, "lost")
        state.replan = "nodes lost" if edits.LOSSES in state.deadlines else f"node {node.name} lost"
        if state.plan_s == state.at_s:
            edits.set_deadline(state, edits.LOSSES, 0.0)
    else:
        disable_slots(node, (slot.index,), why)
        task.restarts.pop(number, None)
        proved = any(slot.index in erred.devices and erred.incident for erred in node.erred)
        if not proved and (rank is None or not rank.stopping):  # else a stuck process occupies it
            task.blamed_slots.append(slot)
        state.replan = f"slot {slot.node}/{slot.index} is out"
    if rank is not None and (node.health == "lost" or rank.stopping):
        edits.orphan_process(state, task, rank, "given up")


def incident_closed(state: ClusterState, record: Record, body: d.IncidentClosed) -> None:
    incident = state.incidents.get(body.of)
    if incident is None:
        return
    incident.outcome = body.outcome
    incident.closed_s = record.at_s
    incident.pause_s = body.pause_s
    node = state.nodes.get(incident.node)
    if node is not None and node.incident == incident.id:
        node.incident = 0
        update_undecided(state)
    task = state.tasks.get(incident.task)
    if task is not None and incident.recovering_s:
        edits.clear_deadline(state, deadline_name(incident))
        task.recovering = [number for number in task.recovering if number != incident.id]
        task.healed += body.outcome == "healed"
    incident.recovering_s = 0.0
    if task is not None and task.incident == incident.id:
        if body.outcome == "failed":
            task.ending, task.why = task.ending or "failed", body.why
        else:
            task.incident = 0
            task.healed += body.outcome == "healed"
    closed = [key for key, value in state.incidents.items() if value.outcome]
    for key in closed[: max(len(closed) - NUM_INCIDENTS_MAX, 0)]:
        del state.incidents[key]


# --- experiments ---
def experiment_begun(
    state: ClusterState, record: Record, task: Task, body: d.ExperimentBegun
) -> None:
    seats = {seat.slot: seat.rank for seat in body.seats}
    for seat in body.suspects:
        number, slot = seat.rank, seat.slot
        task.suspects[number] = Suspect(
            slot=slot,
            status=body.status,
            why=body.why,
            is_exchanged=slot in seats,
            iteration=task.max_iteration,
            is_unnamed=bool(body.considered),
        )
        if (node := state.nodes.get(slot.node)) is not None:
            suspect_slot(node, slot.index, f"{task.spec.name}, {body.why}")
        task.restarts.pop(number, None)
        # Who gets its slot leaves its own: else the two would wait for each other.
        task.restarts.pop(seats.get(slot, -1), None)
        other = task.ranks.get(seats.get(slot, -1))
        if other is not None and not other.timeout_reason and task.heals_in_memory:
            other.timeout_reason = f"exchanges its slot with rank {number}"
            count_outstanding(task)
    if body.considered:
        _leave(task, body.suspects)
    end_pauses(state, task, [seat.rank for seat in body.suspects])
    task.target = body.seats or _seats_without(task, body.suspects) or task.target
    if not body.seats:
        names = " ".join(f"{seat.slot.node}/{seat.slot.index}" for seat in body.suspects)
        state.replan = f"{task.spec.name} is tried without {names}"


def _leave(task: Task, left: Sequence[Seat]) -> None:
    """Processes that live leave their slots at once, if the others hold the whole state."""
    gone = {seat.rank for seat in left}
    if is_complete(task, [rank for rank in task.living_members() if rank.rank not in gone]):
        for rank in [task.ranks[number] for number in sorted(gone) if number in task.ranks]:
            rank.timeout_reason = rank.timeout_reason or "is tried on another slot"
        count_outstanding(task)


def _seats_without(task: Task, left: Sequence[Seat]) -> tuple[Seat, ...]:
    """The other seats. The ranks of a command are always numbered from 0."""
    gone = {seat.rank for seat in left}
    seats = tuple(seat for seat in task.target if seat.rank not in gone)
    if task.heals_in_memory:
        return seats
    return tuple(Seat(number, seat.slot) for number, seat in enumerate(seats))


def slots_judged(state: ClusterState, record: Record, task: Task, body: d.SlotsJudged) -> None:
    _judge_unnamed(state, task, body)
    is_passed = [_has_moved_on(task, seat.rank) for seat in body.suspects]
    for seat in body.suspects:
        slot, node = seat.slot, state.nodes.get(seat.slot.node)
        task.suspects.pop(seat.rank, None)
        if body.slots_max:
            task.restarts.pop(seat.rank, None)
        if node is None:
            continue
        node.slots_suspected.pop(slot.index, None)
        if body.verdict == "slot" and slot.index not in node.slots_disabled:
            disable_slots(node, (slot.index,), f"{task.spec.name}, {body.why}")
            task.blamed_slots.append(slot)
            count_slot_fault(state, task, slot, seat.rank)
            state.replan = f"slot {slot.node}/{slot.index} is out"
        elif body.verdict == "cleared" and slot in task.blamed_slots:
            task.blamed_slots.remove(slot)
            if not is_proved(node, slot.index):
                enable_slot(node, slot.index)
                state.replan = f"slot {slot.node}/{slot.index} is not at fault"
        elif body.verdict == "open":
            suspect_slot(node, slot.index, f"{task.spec.name}, {body.why}")
    if body.slots_max:
        task.slots_max = body.slots_max
        task.target = _seats_without(task, body.suspects)
    if body.verdict == "task":
        if task.failures is not None and not any(is_passed):
            task.failures.is_refuted = True
        state.replan = state.replan or f"no slot is at fault: {task.spec.name} fails by itself"


def _has_moved_on(task: Task, number: int) -> bool:
    """Whether the task has finished iterations since a hung rank moved: what hangs again elsewhere
    at a later iteration may move again."""
    suspect = task.suspects.get(number)
    return (
        suspect is not None
        and suspect.status == TASK_HANG
        and 0 <= suspect.iteration < task.max_iteration
    )


def _judge_unnamed(state: ClusterState, task: Task, body: d.SlotsJudged) -> None:
    """What an experiment says about the places of faults without a name."""
    places = {
        seat.slot.node
        for seat in body.suspects
        if seat.rank < 0
        or ((suspect := task.suspects.get(seat.rank)) is not None and suspect.is_unnamed)
    }
    if body.verdict == "cleared":
        unnamed.clear(state, task, places)
    elif places:
        unnamed.confine(state, task, places)
    for node in [state.nodes[name] for name in sorted(places) if name in state.nodes]:
        node.avoided_s = 0.0 if body.verdict == "cleared" else state.at_s


# --- the plan ---
def throughput_set(state: ClusterState, record: Record, task: Task, body: d.ThroughputSet) -> None:
    if task.throughput is not None and task.throughput.origin == "measured":
        task.former_throughput = task.throughput
    task.throughput = body
    if body.origin == "measured":
        learn_slot(state, task, body)
    # Replan even if no number of slots will change, because the plan's WAF does. A pinned task
    # needs no replan: a plan follows when the task is not pinned any more.
    if not is_pinned(state, task) and edits.PLAN not in state.deadlines:
        state.replan = state.replan or f"throughput of {task.spec.name} {body.origin}"


def plan_chosen(state: ClusterState, record: Record, body: d.PlanChosen) -> None:
    state.plan, state.plan_seq, state.plan_s, state.replan = body, record.seq, record.at_s, ""
    edits.clear_deadline(state, edits.PLAN)
    edits.clear_deadline(state, edits.LOSSES)


def task_placed(state: ClusterState, record: Record, task: Task, body: d.TaskPlaced) -> None:
    task.target = body.seats
    task.why = ""
    if only_publication_left(task):
        state.replan = f"task {task.spec.name} needs no slots any more"
    if body.seats and task.phase == "idle":
        transition_began(state, task)
        edits.set_phase(state, task, "starting")
    edits.settle_phase(state, task)
    transition_completed(state, task)


def task_waiting(state: ClusterState, record: Record, task: Task, body: d.TaskWaiting) -> None:
    task.why = body.why


def order_suppressed(
    state: ClusterState, record: Record, task: Task, body: d.OrderSuppressed
) -> None:
    task.withheld = body.what


def task_ended(state: ClusterState, record: Record, task: Task, body: d.TaskEnded) -> None:
    edits.clear_phase_deadlines(state, task)
    edits.close_orders(
        state,
        [
            task.quiesce_order,
            task.reconfigure_order,
            task.resume_order,
            task.keep_order,
            *task.publishing,
        ],
    )
    task.copies, task.keepers, task.stores = [], (), ()
    task.refused, task.failed_saves, task.refused_starts = None, {}, {}
    for what in ("publish", "save"):
        edits.clear_deadline(state, f"{what}/{task.id}")
    edits.set_members(task, ())
    task.target, task.incident, task.recovering, task.faults = (), 0, [], []
    for slot in task.blamed_slots:  # only its processes have blamed them
        node = state.nodes.get(slot.node)
        if node is not None and not is_proved(node, slot.index):
            enable_slot(node, slot.index)
    end_pauses(state, task, task.attempts)
    task.failures, task.suspects, task.blamed_slots = None, {}, []
    task.times_s, task.transition, task.downtime_s = {}, None, {}
    task.stalls, task.slow_iterations, task.step_times, task.slow_restarts = {}, {}, {}, {}
    task.outcome, task.ending, task.withheld = body.outcome, "", ""
    task.why = body.why
    edits.set_phase(state, task, "ended")
    state.replan = f"task {task.spec.name} {body.outcome}"


# --- orders ---
def start_ordered(state: ClusterState, record: Record, body: o.StartRank) -> None:
    task, node = state.tasks.get(body.task), state.nodes.get(body.slot.node)
    if task is None or node is None:
        return
    if not task.heals_in_memory and not task.ranks:
        task.finished, task.rounds = [], task.rounds + 1
        if task.restarts_from_memory:  # the new processes do not know the stores
            edits.close_orders(state, [task.keep_order])
            edits.set_stores(task, (), ())
    old = task.ranks.get(body.rank)
    state.num_running += old is None
    if awaited(task) == "processes":
        task.num_outstanding += 1 - (old is not None and is_starting(task, old))
    task.ranks[body.rank] = Rank(
        rank=body.rank,
        attempt=body.attempt,
        slot=body.slot,
        start_order=record.seq,
        ordered_s=record.at_s,
    )
    task.attempts[body.rank] = body.attempt
    node.occupants[body.slot.index] = Occupant(body.task, body.rank, body.attempt)
    state.orders[record.seq] = encode_record(record)
    edits.set_deadline(
        state, f"start/{task.id}/{body.rank}/{body.attempt}", state.policy.start_s_max
    )


def stop_ordered(state: ClusterState, record: Record, task: Task, body: o.StopRank) -> None:
    rank = edits.find_rank(task, body.rank, body.attempt) or edits.find_orphan(
        task, body.rank, body.attempt
    )
    if rank is None:
        return
    edits.close_orders(state, [rank.start_order, *rank.stop_orders])
    if awaited(task) == "processes" and task.ranks.get(rank.rank) is rank:
        task.num_outstanding -= is_starting(task, rank)
    rank.stop_orders.append(record.seq)
    state.orders[record.seq] = encode_record(record)
    name = f"{task.id}/{rank.rank}/{rank.attempt}"
    for what in ("start", "error", "stopped", "printed"):
        edits.clear_deadline(state, f"{what}/{name}")
    kept_s = STACKS_S_MAX if body.keeps_stacks else 0.0
    within_s = max(body.grace_s, 0.0) + kept_s + state.policy.stop_s_max
    edits.set_deadline(state, f"stop/{name}", within_s)


def quiesce_ordered(state: ClusterState, record: Record, task: Task, body: o.Quiesce) -> None:
    if body.generation != task.generation:
        return
    edits.clear_phase_deadlines(state, task)
    edits.close_orders(state, [task.quiesce_order, task.reconfigure_order, task.resume_order])
    task.quiesce_order, task.mode = record.seq, body.mode
    task.savers = list(body.ranks[: max(len(body.saving), 1)]) if body.save else []
    state.orders[record.seq] = encode_record(record)
    edits.set_deadline(
        state,
        f"quiesce/{task.id}/{task.generation}",
        limits.to_leave(state.policy, body.mode).s,
    )
    transition_began(state, task)
    edits.set_phase(state, task, "quiescing")
    edits.update_unreachable_deadline(state, task)


def reconfigure_ordered(
    state: ClusterState, record: Record, task: Task, body: o.Reconfigure
) -> None:
    if body.generation <= task.generation:
        return
    edits.clear_phase_deadlines(state, task)
    edits.close_orders(
        state, [task.quiesce_order, task.reconfigure_order, task.resume_order, task.keep_order]
    )
    edits.set_stores(task, body.keepers, body.stores)
    edits.set_members(task, body.members)
    task.reconfigure_order, task.generation = record.seq, body.generation
    task.reconfigure_checkpoint = body.checkpoint
    task.axes = body.axes
    task.failed_s, task.mode, task.finished, task.saved = -1.0, "", [], None
    task.savers = []
    for what in ("copy", "export"):  # the members of the generation tell anew
        task.failed_saves.pop(what, None)
    task.stalls, task.slow_iterations = {}, {}
    for rank in task.living_members():
        rank.state, rank.work = "member", None
    state.orders[record.seq] = encode_record(record)
    edits.set_deadline(
        state, f"reconfigure/{task.id}/{task.generation}", state.policy.reconfigure_s_max
    )
    edits.set_phase(state, task, "reconfiguring")
    edits.update_unreachable_deadline(state, task)
    incident = state.incidents.get(task.incident)
    if incident is not None and incident.down_since_s >= 0:
        incident.kept, incident.dealt = incident.kept_before, incident.dealt_before


def resume_ordered(state: ClusterState, record: Record, task: Task, body: o.Resume) -> None:
    if body.generation != task.generation:
        return
    edits.clear_phase_deadlines(state, task)
    edits.close_orders(state, [task.reconfigure_order])
    task.resume_order = record.seq
    state.orders[record.seq] = encode_record(record)
    # The task continues from `settled`. A store may have newer checkpoints that it did not report.
    task.copies = [
        replace(
            copy,
            step_version_max=min(
                task.settled, copy.step_version_max if copy.step_version_max >= 0 else task.settled
            ),
        )
        for copy in task.copies
        if copy.step_version <= task.settled
    ]
    for rank in task.living_members():
        if is_standby(task, rank):  # it gives up the state that it held
            rank.held, rank.has_state, rank.step_version = None, False, -1
    lost = max(task.iteration - task.settled, 0)
    task.iterations_lost += lost
    task.iteration = min(task.iteration, body.progress_from)
    incident = state.incidents.get(task.incident)
    if incident is not None:
        incident.iterations_lost = (incident.iterations_lost or 0) + lost
    edits.set_phase(state, task, "training")
    if task.holds_final_state and task.is_done:  # no step is left that would end the interruption
        task.stepped = task.generation
        edits.end_pause(state, task)
        transition_stepped(state, task, task.iteration)
