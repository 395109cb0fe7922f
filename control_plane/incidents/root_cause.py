"""The root cause of a task's faults, from all evidence."""

from msgspec import Struct

from ...events.network_address import split_endpoint
from ...events.records.types import Seat, Severity
from ..state.cluster import ClusterState
from ..state.incident import FailureLocation
from ..state.node import DeviceError, Node
from ..state.task import Task
from .severity import severity_of, worst


class Cause(Struct, frozen=True, kw_only=True):
    """The cause of an incident; direct evidence takes precedence over indirect evidence."""

    severity: Severity
    status: str
    node: str
    ranks: tuple[int, ...]
    why: str
    evidence: tuple[int, ...]
    root: bool
    """This cause replaces the assumed cause of an open incident."""
    is_indirect: bool
    """All evidence is indirect: processes ended because others did. No slot is blamed for it."""
    where: tuple[Seat, ...]
    """Each rank that failed, with the slot on which it did."""
    is_proved: bool
    """A device error explains it. Otherwise only processes blame their slots."""


def root_cause(state: ClusterState, task: Task) -> Cause:
    """The root cause of the task's faults (at least one) and of device errors near them. Indirect
    evidence counts only without direct evidence. A device error overrides what it explains."""
    first = [fault for fault in task.faults if not fault.second_hand]
    direct = first or task.faults
    severities: list[Severity] = [
        severity_of(fault.status, process_ended=fault.ended) for fault in direct
    ]
    severity = worst(*severities)
    main = direct[severities.index(severity)]
    # If a process died or hangs, failed collectives of others are consequences.
    causes = [
        fault
        for fault, own in zip(direct, severities, strict=True)
        if own != "SEV3" or severity == "SEV3"
    ]
    status, node = main.status, main.node
    ranks = sorted({number for fault in causes for number in fault.ranks})
    whys = [fault.why for fault in direct]
    pairs = [
        (erred, strike)
        for fault in causes
        for strike in fault.strikes
        for erred in _near(state, task, strike)
    ]
    if pairs:
        of_pairs: list[Severity] = [severity_of(one.status) for one, _ in pairs]
        gravest = worst(*of_pairs)
        erred, strike = pairs[of_pairs.index(gravest)]
        if worst(gravest, severity) == gravest:
            struck = sorted({x.rank for one, x in pairs if severity_of(one.status) == gravest})
            ranks = struck if gravest != severity else ranks
            severity, status, node = gravest, erred.status, strike.slot.node
        whys = [in_words(strike.slot.node, erred), *whys]
    accused, blamed = accused_peer(task) if severity == "SEV3" and not first else ("", ())
    if blamed:
        node, ranks = accused, list(blamed)
        whys.append(f"several nodes name {accused} as the peer")
    rest = [fault for fault in task.faults if fault not in direct]
    evidence = [erred.seq for erred, _ in pairs]
    evidence += [seq for fault in (*direct, *rest) for seq in fault.evidence]
    evidence += [
        rank.failed_seq
        for rank in task.living_members()  # seen by others
        if rank.failed == task.generation and rank.failed_seq and task.failed_s >= 0
    ]
    incident = state.incidents.get(task.incident)
    known = incident is not None and not incident.outcome
    return Cause(
        severity=severity,
        status=status,
        node=node,
        ranks=tuple(ranks) if first or not known else (),
        why="; ".join(dict.fromkeys(whys)),
        evidence=tuple(dict.fromkeys(evidence)),
        is_indirect=not first and all(fault.ended for fault in direct),
        where=tuple(
            dict.fromkeys(Seat(one.rank, one.slot) for fault in causes for one in fault.strikes)
        ),
        is_proved=bool(pairs),
        root=known and incident is not None and incident.second_hand and bool(first),
    )


def accused_peer(task: Task) -> tuple[str, tuple[int, ...]]:
    """The node that failed collectives name as the peer, and its ranks, if reporters on at least
    two other nodes do and no rank on it names a peer elsewhere; ("", ()): none, or more than one.
    One report alone is thin evidence: the reporter's own network may be the cause."""
    living = task.living_members()
    failed = [rank for rank in living if rank.failed == task.generation and rank.failed_peer]
    nodes = nodes_by_host(task)
    accusers: dict[str, set[str]] = {}
    excused: set[str] = set()
    for rank in failed:
        node = nodes.get(host_of(rank.failed_peer), "")
        if node != rank.slot.node:
            accusers.setdefault(node, set()).add(rank.slot.node)
            excused.add(rank.slot.node)
    agreed = [node for node, by in accusers.items() if node and len(by) > 1 and node not in excused]
    if len(agreed) != 1:
        return "", ()
    return agreed[0], tuple(rank.rank for rank in living if rank.slot.node == agreed[0])


def in_words(node: str, erred: DeviceError) -> str:
    """For example `n87/3 GPU driver errors (xid-79): GPU has fallen off the bus`."""
    slots = "/" + " ".join(map(str, erred.devices)) if erred.devices else ""
    return f"{node}{slots} {erred.status} ({erred.rule}): {erred.text}"


def matches(node: Node, erred: DeviceError, strike: FailureLocation) -> bool:
    """Whether a device error may concern this rank's slot."""
    if strike.slot.node != node.name:
        return False
    return strike.slot.index in erred.devices if erred.devices else True


def is_near(state: ClusterState, erred: DeviceError, at_s: float) -> bool:
    """Whether the error occurred within evidence_s_max of a fault at `at_s`."""
    return abs(erred.at_s - at_s) <= state.policy.evidence_s_max


def nodes_by_host(task: Task) -> dict[str, str]:
    """The node of each host that a rank may name: the name of the node, or the address of the
    ranks' stores. A host of several nodes names none."""
    nodes: dict[str, set[str]] = {}
    for rank in task.ranks.values():
        for host in {rank.slot.node, host_of(rank.endpoint)} - {""}:
            nodes.setdefault(host, set()).add(rank.slot.node)
    return {host: of_host.pop() for host, of_host in nodes.items() if len(of_host) == 1}


def host_of(peer: str) -> str:
    try:
        return split_endpoint(peer)[0]
    except ValueError:  # without a port
        return peer


def _near(state: ClusterState, task: Task, strike: FailureLocation) -> list[DeviceError]:
    """Device errors near the failure, or errors for which its slot is already disabled."""
    node = state.nodes.get(strike.slot.node)
    return (
        [
            erred
            for erred in node.erred
            if matches(node, erred, strike)
            and (
                is_near(state, erred, strike.at_s)
                or (erred.incident > 0 and erred.devices and node.is_disabled(strike.slot.index))
            )
        ]
        if node is not None
        else []
    )
