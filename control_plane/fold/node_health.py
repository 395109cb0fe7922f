"""The fold of node health: checks, device errors, quarantine."""

from msgspec.structs import replace

from ...events.records.decisions import IncidentEscalated, IncidentOpened, NodeQuarantined
from ...events.records.envelope import Record
from ...events.records.reports import DeviceErred, HealthChanged, QuarantineLifted
from ...events.records.statuses import TASK_HANG
from ...events.records.types import Slot
from ..incidents.node_incidents import mark_undecided, update_undecided
from ..incidents.quarantine import count_fault, num_unconfirmed_max
from ..incidents.severity import TABLE, severity_of
from ..state.cluster import ClusterState
from ..state.incident import Incident
from ..state.node import (
    NUM_CHECKS_MAX,
    NUM_DEVICE_ERRORS_MAX,
    TEXT_CHARS_MAX,
    Check,
    DeviceError,
    Node,
    Quarantine,
)
from ..state.task import Task
from .edits import EARLY_S, add_evidence, clear_deadline, schedule_estimate, set_deadline

NUM_NAMED_MAX = 3
RECOVERED_S = 60.0
"""Time without an unhealthy check before a slot is used again: flapping moves a task only once."""
ROOM_RULES = frozenset({"disk-full", "disk-inodes"})
"""Of checks of room, which have a hysteresis of their own: what lacked is there again, so the slots
are used at once, unless that has happened within FLAPPING_S before."""
FLAPPING_S = 600.0
UNSURE = "; now it cannot say: "


# --- reports of agents ---
def device_erred(state: ClusterState, record: Record, node: Node, body: DeviceErred) -> None:
    devices = _devices(state, node, body.devices, body.pid)
    _evidence(
        state,
        record,
        node,
        DeviceError(
            seq=record.seq,
            at_s=record.at_s,
            origin=body.origin,
            status=body.status,
            rule=body.rule,
            text=" ".join(body.text.split())[:TEXT_CHARS_MAX],
            devices=devices,
            code=body.code,
            pid=body.pid,
        ),
    )


def health_changed(state: ClusterState, record: Record, node: Node, body: HealthChanged) -> None:
    """Store the check's result. A confirmed unhealthy result is also evidence of a device error."""
    devices = _devices(state, node, body.devices, 0)
    if body.health == "unknown" and _cannot_say(node, body, devices):
        update_unhealthy_slots(state)
        return
    was = [(one.check, one.why) for one in node.checks if one.health == "degraded"]
    before = node.checks
    node.checks = [one for one in node.checks if not _is_of(one, body, devices)]
    if body.health != "healthy":
        said_s = [
            one.at_s for one in before if one not in node.checks and one.health == body.health
        ]
        check = Check(
            check=body.check,
            health=body.health,
            why=body.why[:TEXT_CHARS_MAX],
            devices=devices,
            status=body.status,
            rule=body.rule,
            seq=record.seq,
            at_s=min(said_s, default=record.at_s),
        )
        node.checks = [*node.checks, check][-NUM_CHECKS_MAX:]
        if _is_confirmed(check):
            _evidence(
                state,
                record,
                node,
                DeviceError(
                    seq=record.seq,
                    at_s=record.at_s,
                    origin="check",
                    status=body.status,
                    rule=body.rule,
                    text=check.why,
                    devices=devices,
                    code=0,
                    pid=0,
                ),
            )
    well = ""
    if any(one.health == "unhealthy" for one in before) and not any(
        one.health == "unhealthy" for one in node.checks
    ):
        if not recovery_s(state, node, before):
            well, node.room_back_s = node.name, state.at_s
        node.improved_s = state.at_s
    if was != [(one.check, one.why) for one in node.checks if one.health == "degraded"]:
        schedule_estimate(state, node.name)
    update_unhealthy_slots(state, well)


def recovery_s(state: ClusterState, node: Node, checks: list[Check]) -> float:
    """How long the node's slots stay out when the unhealthy ones of `checks` have recovered."""
    is_room = all(check.rule in ROOM_RULES for check in checks if check.health == "unhealthy")
    is_flapping = node.room_back_s > 0 and state.at_s - node.room_back_s < FLAPPING_S
    return RECOVERED_S if node.slots_recovering or is_flapping or not is_room else 0.0


def _is_of(one: Check, body: HealthChanged, devices: tuple[int, ...]) -> bool:
    """Whether the new result replaces `one`: the same check, and overlapping devices."""
    return one.check == body.check and not (
        devices and one.devices and not set(devices) & set(one.devices)
    )


def _cannot_say(node: Node, body: HealthChanged, devices: tuple[int, ...]) -> bool:
    """Keep an unhealthy result while the check cannot run: the fault may last. False: none kept."""
    held = [one for one in node.checks if one.health == "unhealthy" and _is_of(one, body, devices)]
    for one in held:
        why = f"{one.why.partition(UNSURE)[0]}{UNSURE}{body.why}"[:TEXT_CHARS_MAX]
        node.checks[node.checks.index(one)] = replace(one, why=why)
    return bool(held)


def _devices(state: ClusterState, node: Node, named: tuple[int, ...], pid: int) -> tuple[int, ...]:
    """The affected slots: the named slots; without any, the slot of the process `pid`."""
    devices = tuple(sorted({index for index in named if 0 <= index < node.num_slots}))
    if devices or not pid:
        return devices
    for index, occupant in sorted(node.occupants.items()):
        task = state.tasks.get(occupant.task)
        rank = task.ranks.get(occupant.rank) if task is not None else None
        if rank is not None and rank.pid == pid and rank.slot.node == node.name:
            return (index,)
    return ()


def _evidence(state: ClusterState, record: Record, node: Node, erred: DeviceError) -> None:
    """Store the error. A repetition, or an error of disabled slots, joins the earlier incident."""
    for other in reversed(node.erred):
        incident = state.incidents.get(other.incident)
        is_open = incident is not None and not incident.outcome
        if other.incident and (
            (is_open and other.is_like(erred)) or _is_out_for(node, other, erred)
        ):
            erred.incident = other.incident
            add_evidence(incident, record)
            break
    node.erred = [*node.erred, erred][-NUM_DEVICE_ERRORS_MAX:]
    update_undecided(state)
    if not erred.incident and severity_of(erred.status) == "SEV1":
        mark_undecided(state, node.name)
        set_deadline(state, f"device/{node.name}/{erred.seq}", state.policy.evidence_s_max)


def _is_out_for(node: Node, other: DeviceError, erred: DeviceError) -> bool:
    """Whether all slots that `erred` can affect are already disabled for a related error."""
    slots = erred.devices or tuple(range(node.num_slots))
    return all(index in node.slots_disabled for index in slots) and (
        not other.devices or bool(set(slots) & set(other.devices))
    )


# --- slots that a check disables ---
def _is_confirmed(check: Check) -> bool:
    """Whether a driver reports the result, with a SEV1 status. A site's own check may be wrong."""
    return (
        check.health == "unhealthy"
        and not check.check.startswith("check/")
        and TABLE.get(check.status) == "SEV1"
    )


def update_unhealthy_slots(state: ClusterState, well: str = "") -> None:
    """Fold: update the slots that checks disable; the node `well` uses its own at once. Of nodes
    with only unconfirmed checks the first few are believed: if many fail, the check is suspect. A
    node stays believed until its slots are used again, or a check that recovers on one node after
    the other would disable all in turn."""
    if not any(
        node.checks or node.slots_unhealthy or node.slots_recovering or node.unhealthy_why
        for node in state.nodes.values()
    ):
        return
    unhealthy = {
        node.name: [x for x in node.checks if x.health == "unhealthy"]
        for node in state.nodes.values()
        if node.health != "left"
    }
    doubtful = sorted(
        (min(x.seq for x in found), name)
        for name, found in unhealthy.items()
        if found and not any(_is_confirmed(x) for x in found)
    )
    most = num_unconfirmed_max(state)
    believed = {
        node.name
        for node in state.nodes.values()
        if node.health != "left"
        and node.slots_unhealthy
        and not any(map(_is_confirmed, unhealthy[node.name]))
    }
    believed.update(
        [name for _, name in doubtful if name not in believed][: max(most - len(believed), 0)]
    )
    for node in state.nodes.values():
        found = unhealthy.get(node.name, [])
        taken = [x for x in found if _is_confirmed(x) or node.name in believed]
        slots = sorted({index for x in taken for index in x.devices or range(node.num_slots)})
        why = "; ".join(f"{x.check}: {x.why}" for x in taken)
        if found and not taken:
            why = (
                f"not acted upon, {len(doubtful)} of {len(unhealthy)} nodes say so"
                f"{_still_out(believed, unhealthy)} and at most {most} is believed unconfirmed: "
                + "; ".join(f"{x.check}: {x.why}" for x in found)
            )
        _set_sick(state, node, slots, why, is_well=node.name == well)


def _still_out(believed: set[str], unhealthy: dict[str, list[Check]]) -> str:
    """Name the nodes that are still believed although none of their checks fails any more."""
    names = [name for name in sorted(believed) if not unhealthy[name]]
    if not names:
        return ""
    some = " ".join(names[:NUM_NAMED_MAX]) + (
        f" and {len(names) - NUM_NAMED_MAX} more" * (len(names) > NUM_NAMED_MAX)
    )
    return f", slots of {some} are still out (used again {RECOVERED_S:g} s after it says healthy)"


def _set_sick(
    state: ClusterState, node: Node, slots: list[int], why: str, *, is_well: bool
) -> None:
    name = f"recovered/{node.name}"
    if is_well and node.slots_unhealthy:
        node.slots_unhealthy = []
        state.replan = f"{node.name} is healthy again"
    if set(slots) - set(node.slots_unhealthy):
        state.replan = f"{node.name} is unhealthy: {why}"
    node.slots_recovering = {
        index: node.slots_recovering.get(index, state.at_s)
        for index in node.slots_unhealthy
        if index not in slots
    }
    if node.slots_recovering:
        due, due_s = state.deadlines.get(name), min(node.slots_recovering.values()) + RECOVERED_S
        if due is None or due.due_s < due_s:  # a new leader may have moved it
            set_deadline(state, name, max(due_s - state.at_s, 0.0))
        why = why or node.unhealthy_why
    else:
        clear_deadline(state, name)
    node.slots_unhealthy, node.unhealthy_why = sorted({*slots, *node.slots_recovering}), why


def _recovered(state: ClusterState, node: Node) -> None:
    """Enable the slots that have been healthy for RECOVERED_S. The others keep waiting."""
    well = sorted(
        index
        for index, since_s in node.slots_recovering.items()
        if state.at_s >= since_s + RECOVERED_S - EARLY_S
    )
    node.slots_unhealthy = [index for index in node.slots_unhealthy if index not in well]
    update_unhealthy_slots(state)
    if well:
        which = (
            ""
            if not node.slots_unhealthy
            else f"slot{'s' * (len(well) > 1)} " + " ".join(map(str, well)) + " of "
        )
        state.replan = f"{which}{node.name} is healthy again"


# --- deadlines ---
def node_deadline_reached(state: ClusterState, what: str, rest: str) -> None:
    """Handle a node deadline: replace it, judge an error alone, enable slots, end a quarantine."""
    name, _, seq = rest.rpartition("/") if what == "device" else (rest, "", "0")
    node = state.nodes.get(name)
    if node is None:
        return
    if what == "replace":
        node.replace = True
    elif what == "device":
        for erred in node.erred:
            erred.due = erred.due or erred.seq == int(seq)
        update_undecided(state)
    elif what == "recovered":
        _recovered(state, node)
    elif what == "quarantine" and node.quarantine is not None:
        node.quarantine = None
        state.replan = f"the quarantine of {node.name} is over"


# --- decisions ---
def assign_evidence(
    state: ClusterState, incident: Incident, body: IncidentOpened | IncidentEscalated
) -> None:
    """Assign device errors to the incident. At SEV1, disable the slots that the errors name."""
    node = state.nodes.get(body.node)
    if node is not None:
        for erred in [one for one in node.erred if one.seq in body.evidence]:
            erred.incident = incident.id
            clear_deadline(state, f"device/{node.name}/{erred.seq}")
            if (
                body.severity == "SEV1"
                and severity_of(erred.status) == "SEV1"
                and (erred.origin != "check")
                and (erred.devices or not incident.task)
            ):
                _disable(state, node, erred)
        if not incident.task:
            node.incident = incident.id
            mark_undecided(state, node.name)
    update_undecided(state)


def disable_slots(node: Node, slots: tuple[int, ...], why: str) -> None:
    """Fold: disable the slots until the agent joins again; the first reason is kept."""
    for index in slots:
        if index not in node.slots_disabled:
            node.disabled_why[index] = why[:TEXT_CHARS_MAX]
    node.slots_disabled = sorted({*node.slots_disabled, *slots})


def is_proved(node: Node, index: int) -> bool:
    """Whether a device error of the slot takes it out, whatever processes say."""
    return any(
        index in erred.devices and severity_of(erred.status) == "SEV1" for erred in node.erred
    )


def enable_slot(node: Node, index: int) -> None:
    """Fold: the slot is used again."""
    node.slots_disabled = [other for other in node.slots_disabled if other != index]
    node.disabled_why.pop(index, None)


def suspect_slot(node: Node, index: int, why: str) -> None:
    """Fold: the slot stays in use, but may be at fault."""
    node.slots_suspected[index] = why[:TEXT_CHARS_MAX]


def _disable(state: ClusterState, node: Node, erred: DeviceError) -> None:
    slots = erred.devices or tuple(range(node.num_slots))
    if set(slots) - set(node.slots_disabled):
        disable_slots(node, slots, f"{erred.status} ({erred.rule}): {erred.text}")
        named = " ".join(map(str, slots))
        state.replan = f"slot{'s' * (len(slots) > 1)} {node.name}/{named} erred"


def count_sev1_fault(
    state: ClusterState,
    incident: Incident,
    body: IncidentOpened | IncidentEscalated,
    *,
    on_purpose: bool,
) -> None:
    """Count a fault against the node that a SEV1 incident names, unless it was injected."""
    if (
        body.severity == "SEV1"
        and body.node
        and not on_purpose
        and count_fault(
            state,
            incident=incident.id,
            node=body.node,
            status=body.status,
            why=body.why[:TEXT_CHARS_MAX],
        )
    ):
        mark_undecided(state, body.node)


def count_slot_fault(state: ClusterState, task: Task, slot: Slot, rank: int) -> None:
    """Count a fault: a rank failed repeatedly on this slot and makes progress elsewhere."""
    at = [x.id for x in state.incidents.values() if x.task == task.id and rank in x.ranks]
    why = f"rank {rank} of {task.spec.name} failed on slot {slot.index} again and again"
    if count_fault(
        state,
        node=slot.node,
        incident=max(at, default=0),
        status=TASK_HANG,
        why=f"{why}, and not elsewhere",
    ):
        mark_undecided(state, slot.node)


def node_quarantined(
    state: ClusterState, record: Record, node: Node, body: NodeQuarantined
) -> None:
    node.quarantine = Quarantine(
        since_s=record.at_s, until_s=body.until_s, why=body.why, incidents=body.incidents
    )
    for offence in node.node_faults:
        offence.fresh = False
    update_undecided(state)
    set_deadline(state, f"quarantine/{node.name}", max(body.until_s - record.at_s, 0.0))
    state.replan = f"node {node.name} quarantined"


def quarantine_lifted(
    state: ClusterState, record: Record, node: Node, body: QuarantineLifted
) -> None:
    if body.quarantine:
        node.node_faults = []
        clear_deadline(state, f"quarantine/{node.name}")
        if node.quarantine is not None:
            node.quarantine = None
            state.replan = f"the quarantine of {node.name} was lifted"
    for index in body.slots:
        if index in node.slots_disabled or index in node.slots_suspected:
            _give_back(state, node, index)
    update_undecided(state)


def _give_back(state: ClusterState, node: Node, index: int) -> None:
    """Enable a disabled slot, and forget what took it out: else that would count again at once."""
    slot = Slot(node.name, index)
    known = [one.incident for one in node.erred if index in (one.devices or (index,))]
    known += [
        one.id
        for one in state.incidents.values()
        if any(strike.slot == slot for strike in one.strikes)
    ]
    node.node_faults = [one for one in node.node_faults if one.incident not in known]
    enable_slot(node, index)
    for erred in node.erred:
        erred.devices, was = tuple(x for x in erred.devices if x != index), erred.devices
        if (was and not erred.devices) or not (was or node.slots_disabled):
            clear_deadline(state, f"device/{node.name}/{erred.seq}")
            node.erred = [one for one in node.erred if one is not erred]
    node.slots_suspected.pop(index, None)
    node.avoided_s = 0.0
    for task in state.tasks.values():
        task.blamed_slots = [one for one in task.blamed_slots if one != slot]
        task.suspects = {rank: one for rank, one in task.suspects.items() if one.slot != slot}
    state.replan = f"slot {node.name}/{index} was given back"


def inherit(state: ClusterState, old: Node, new: Node) -> None:
    """Copy what a restart of the agent does not change: node faults, quarantine, incident."""
    new.quarantine = replace(old.quarantine) if old.quarantine is not None else None
    new.node_faults = old.node_faults
    new.incident = old.incident
    for erred in old.erred:
        clear_deadline(state, f"device/{old.name}/{erred.seq}")
    clear_deadline(state, f"recovered/{old.name}")
