"""Incidents of a node alone: device errors that failed no rank."""

from collections.abc import Iterator

from ...events.records.decisions import IncidentClosed, IncidentEscalated, IncidentOpened
from ...events.records.envelope import Record
from ...events.records.reports import DeviceErred, HealthChanged
from ...events.records.types import Body
from ..state.cluster import ClusterState
from ..state.node import DeviceError, Node
from . import quarantine
from .root_cause import in_words, is_near, matches
from .severity import severity_of, worst


def decide_nodes(state: ClusterState, record: Record) -> Iterator[Body]:
    """Decide on nodes with pending decisions: join errors to incidents, open, close, quarantine."""
    for name in list(state.undecided):
        node = state.nodes[name]
        if isinstance(record.body, (DeviceErred, HealthChanged)):
            yield from _join(state, node)
        yield from _open(state, node)
        yield from _close(state, node)
        yield from quarantine.quarantine_if_due(state, node)


def mark_undecided(state: ClusterState, name: str) -> None:
    """Fold: mark the node as having a pending decision."""
    if name not in state.undecided:
        state.undecided = sorted([*state.undecided, name])


def update_undecided(state: ClusterState) -> None:
    """Fold: remove nodes that have no pending decision any more."""
    state.undecided = [name for name in state.undecided if is_open(state, state.nodes[name])]


def is_open(state: ClusterState, node: Node) -> bool:
    """Whether a decision about the node is pending."""
    return (
        bool(node.incident)
        or quarantine.is_due(state, node)
        or any(not one.incident and (not one.due or _slots(state, node, one)) for one in node.erred)
    )


def _join(state: ClusterState, node: Node) -> Iterator[Body]:
    """Escalate a task's incident if a device error that was reported later explains it."""
    for erred in [one for one in node.erred if not one.incident]:
        severity = severity_of(erred.status)
        for key in sorted(state.tasks):
            task = state.tasks[key]
            incident = state.incidents.get(task.incident)
            if incident is None or incident.outcome:
                continue
            struck = [
                x
                for x in incident.strikes
                if matches(node, erred, x) and is_near(state, erred, x.at_s)
            ]
            if struck:
                graver = worst(incident.severity, severity) != incident.severity
                there = [
                    x.rank
                    for x in struck
                    if (rank := task.ranks.get(x.rank)) is None or rank.slot == x.slot
                ]
                yield IncidentEscalated(
                    of=incident.id,
                    severity=severity,
                    status=erred.status,
                    node=node.name,
                    ranks=tuple(sorted(set(there))) if graver else (),
                    why=in_words(node.name, erred),
                    evidence=(erred.seq,),
                )


def _open(state: ClusterState, node: Node) -> Iterator[Body]:
    """Open or escalate the node's incident if no rank failed because of the error in time."""
    for erred in list(node.erred):
        if erred.incident or not erred.due or not _slots(state, node, erred):
            continue
        related = [
            erred,
            *(
                x
                for x in node.erred
                if x is not erred
                and not x.incident
                and (x.is_like(erred) or _confirms(state, erred, x))
            ),
        ]
        out = " ".join(map(str, erred.devices))
        what = f"slot{'s' * (len(erred.devices) > 1)} {out}" if erred.devices else "all its slots"
        why = f"{in_words(node.name, erred)}; no rank failed of it, {what} shall be left"
        evidence = tuple(sorted(x.seq for x in related))
        if node.incident:
            yield IncidentEscalated(
                of=node.incident,
                severity="SEV1",
                ranks=(),
                why=why,
                evidence=evidence,
                status=erred.status,
                node=node.name,
            )
        else:
            yield IncidentOpened(
                severity="SEV1",
                status=erred.status,
                task=0,
                node=node.name,
                ranks=(),
                why=why,
                evidence=evidence,
            )


def _slots(state: ClusterState, node: Node, erred: DeviceError) -> list[int]:
    """Slots that a device error disables without a failed rank: at SEV1, those that it names. If it
    names none, it disables all slots, but only if a second source confirms it."""
    if severity_of(erred.status) != "SEV1":
        return []
    if erred.devices:
        return [index for index in erred.devices if index not in node.slots_disabled]
    second = any(_confirms(state, erred, other) for other in node.erred if other is not erred)
    return (
        [index for index in range(node.num_slots) if index not in node.slots_disabled]
        if second
        else []
    )


def _confirms(state: ClusterState, erred: DeviceError, other: DeviceError) -> bool:
    """Whether `other` confirms `erred`: both of the whole node, of different source or rule."""
    return (
        not erred.devices
        and not other.devices
        and severity_of(other.status) == "SEV1"
        and is_near(state, erred, other.at_s)
        and (other.origin, other.rule) != (erred.origin, erred.rule)
    )


def _close(state: ClusterState, node: Node) -> Iterator[Body]:
    """Close the node's incident when no process runs on disabled slots."""
    if node.incident and not any(node.is_disabled(index) for index in node.occupants):
        is_out = node.slots_disabled or node.slots_unhealthy
        yield IncidentClosed(
            of=node.incident,
            outcome="healed",
            pause_s=0.0,
            iterations_lost=0,
            kept=0,
            dealt=0,
            ckpt_read=False,
            why=f"nothing runs there any more, {node.name} is to be repaired"
            if is_out
            else f"{node.name} has all its slots again",
        )
