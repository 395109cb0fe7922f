"""The root cause: what all evidence of a task, joined, points to."""

from __future__ import annotations

from msgspec import Struct

from ...events.records.types import Severity
from ..state.cluster import ClusterState
from ..state.incident import Fault, Strike
from ..state.node import Erred, Node
from ..state.task import Task
from .severity import severity_of, worse


class Cause(Struct, frozen=True, kw_only=True):
    """What an incident is called, and by which evidence: first-hand before second-hand."""

    severity: Severity
    status: str
    node: str
    ranks: tuple[int, ...]
    why: str
    evidence: tuple[int, ...]
    root: bool
    """An open incident had no cause before."""
    is_hearsay: bool
    """Processes ended, and each by what another did: no reason to give up a slot."""


def root_cause(state: ClusterState, task: Task) -> Cause:
    """Of the task's faults, of which there is one at least, and of what their devices told.

    What tells of another's end is the cause only where there is nothing else. A device's own error
    is nearer to the cause than what a rank on it says, unless that is graver.
    """
    first = [fault for fault in task.faults if not fault.second_hand]
    told = first or task.faults
    severities: list[Severity] = [_severity(fault) for fault in told]
    severity = _worst(severities)
    worst = told[severities.index(severity)]
    # Where a process died or hangs, a collective that failed under others is what came of it.
    causes = [fault for fault, own in zip(told, severities, strict=True)
              if own != "SEV3" or severity == "SEV3"]
    status, node = worst.status, worst.node
    ranks = sorted({number for fault in causes for number in fault.ranks})
    whys = [fault.why for fault in told]
    pairs = [(erred, strike) for fault in causes for strike in fault.strikes
             for erred in _near(state, task, strike)]
    if pairs:
        gravest = _worst([severity_of(one.status) for one, _ in pairs])
        erred, strike = next(x for x in pairs if severity_of(x[0].status) == gravest)
        if worse(gravest, severity) == gravest:
            struck = sorted({x.rank for one, x in pairs if severity_of(one.status) == gravest})
            ranks = struck if gravest != severity else ranks
            severity, status, node = gravest, erred.status, strike.slot.node
        whys = [in_words(strike.slot.node, erred), *whys]
    rest = [fault for fault in task.faults if fault not in told]
    evidence = [erred.seq for erred, _ in pairs]
    evidence += [seq for fault in (*told, *rest) for seq in fault.evidence]
    evidence += _seen_by_others(task)
    incident = state.incidents.get(task.incident)
    known = incident is not None and not incident.outcome
    return Cause(severity=severity, status=status, node=node,
                 ranks=tuple(ranks) if first or not known else (),
                 why="; ".join(dict.fromkeys(whys)), evidence=tuple(dict.fromkeys(evidence)),
                 is_hearsay=not first and all(fault.ended for fault in told),
                 root=known and incident is not None and incident.second_hand and bool(first))


def in_words(node: str, erred: Erred) -> str:
    """For example `n87/3 GPU driver errors (xid-79): GPU has fallen off the bus`."""
    slots = "/" + " ".join(map(str, erred.devices)) if erred.devices else ""
    return f"{node}{slots} {erred.status} ({erred.rule}): {erred.text}"


def matches(node: Node, erred: Erred, strike: Strike) -> bool:
    """Whether what the node told of a device may be of this rank's."""
    if strike.slot.node != node.name:
        return False
    return strike.slot.index in erred.devices if erred.devices else True


def is_near(state: ClusterState, erred: Erred, at_s: float) -> bool:
    """Whether it came within the time that evidence of one fault is joined in."""
    return abs(erred.at_s - at_s) <= state.policy.evidence_s_max


def _near(state: ClusterState, task: Task, strike: Strike) -> list[Erred]:
    """What the rank's device told around then; or for what its slot is out, which it was to leave.
    """
    node = state.nodes.get(strike.slot.node)
    return [erred for erred in node.erred if matches(node, erred, strike) and (
        is_near(state, erred, strike.at_s)
        or (erred.incident > 0 and bool(erred.devices) and node.is_out(strike.slot.index)))
            ] if node is not None else []


def _seen_by_others(task: Task) -> list[int]:
    """Collectives of this generation that failed: second-hand."""
    return [rank.failed_seq for rank in task.living_members()
            if rank.failed == task.generation and rank.failed_seq and task.failed_s >= 0]


def _severity(fault: Fault) -> Severity:
    return severity_of(fault.status, process_ended=fault.ended)


def _worst(severities: list[Severity]) -> Severity:
    found: Severity = "SEV3"
    for one in severities:
        found = worse(found, one)
    return found
