"""Quarantine: a node that fails again and again gets no tasks for a time."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from ...events.records.decisions import NodeQuarantined
from ...events.records.statuses import LOST_CONNECTION, TASK_HANG
from ...events.records.types import Body
from ..state.cluster import ClusterState
from ..state.node import NUM_OFFENCES_MAX, Node, Offence
from .severity import TABLE

OFFENCES = frozenset((*(status for status, own in TABLE.items() if own == "SEV1"), TASK_HANG))
"""Statuses that count against a node, where they were SEV1: of a device, a lost connection, and a
process that nothing could end."""
UNUSUAL_SHARE_MAX = 0.05
"""Some node has so many faults by chance alone in fewer cases than this: Poisson's tail by the mean
of the others, as often as there are nodes."""


def offend(state: ClusterState, *, incident: int, node: str, status: str, why: str) -> bool:
    """Fold: an incident names the node. Once for what one fault did to several tasks.

    Not what was asked for, nor on a node that an operator has drained to work on it. An agent that
    was started again and is lost once more is lost anew, however soon; what a device tells may be
    told anew by the next agent. True: the node is to be quarantined for it.
    """
    found = state.nodes.get(node)
    if found is None or status not in OFFENCES or found.drained:
        return False
    at_s, lost = state.at_s, status == LOST_CONNECTION
    known = [x for x in found.offences if not lost or x.incarnation == found.incarnation]
    if any(other.incident == incident or (
            other.status == status and at_s - other.at_s <= state.policy.replace_after_s)
            for other in known):
        return False
    found.offences = [*found.offences, Offence(
        at_s=at_s, incident=incident, status=status, why=why,
        incarnation=found.incarnation)][-NUM_OFFENCES_MAX:]
    return is_due(state, found)


def is_due(state: ClusterState, node: Node) -> bool:
    """Whether it has failed so often that it is to be quarantined, the last time since it was."""
    if node.quarantine is not None or not any(one.fresh for one in node.offences):
        return False
    if len(node.offences) < state.policy.quarantine_faults:
        return False  # whatever counts of these
    num = len(counting(state, node))
    return num >= state.policy.quarantine_faults and _is_unusual(state, node, num)


def _is_unusual(state: ClusterState, node: Node, num: int) -> bool:
    """Whether, all failing alike, hardly ever one of the nodes would have so many faults.

    Where all fail often, to be without those that did would cost more than their next fault.
    """
    mean = max(sum(_shown(state)) - num, 0) / max(len(state.nodes) - 1, 1)
    fewer = math.fsum(math.exp(-mean) * mean ** k / math.factorial(k) for k in range(num))
    return len(state.nodes) * (1 - fewer) < UNUSUAL_SHARE_MAX


def counting(state: ClusterState, node: Node) -> list[Offence]:
    """What counts against it now. Many nodes that are silent at once are the network's fault."""
    since_s = state.at_s - state.policy.quarantine_window_s
    return [one for one in node.offences if one.at_s >= since_s
            and not (one.status == LOST_CONNECTION and _is_shared(state, one))]


def _shown(state: ClusterState) -> Iterator[int]:
    """Of each node what counts against it, in one look at them all."""
    since_s, near_s = (state.at_s - state.policy.quarantine_window_s,
                       state.policy.replace_after_s)
    most = num_unconfirmed_max(state)
    lost_s = sorted(one.at_s for node in state.nodes.values() for one in node.offences
                    if one.status == LOST_CONNECTION)
    for node in state.nodes.values():
        yield len([one for one in node.offences if one.at_s >= since_s and not (
            one.status == LOST_CONNECTION and bisect_right(lost_s, one.at_s + near_s)
            - bisect_left(lost_s, one.at_s - near_s) > most)])


def _is_shared(state: ClusterState, offence: Offence) -> bool:
    near_s = state.policy.replace_after_s
    alike = [node.name for node in state.nodes.values() if any(
        one.status == offence.status and abs(one.at_s - offence.at_s) <= near_s
        for one in node.offences)]
    return len(alike) > num_unconfirmed_max(state)


def num_unconfirmed_max(state: ClusterState) -> int:
    """Nodes that may be taken out by what no second source says."""
    num = sum(node.health != "left" for node in state.nodes.values())
    return max(int(state.policy.unconfirmed_share_max * num), 1)


def judge(state: ClusterState, node: Node) -> Iterator[Body]:
    """The decision, where it is due."""
    if not is_due(state, node):
        return
    found = counting(state, node)
    incidents = tuple(one.incident for one in found)
    days = state.policy.quarantine_window_s / 86400
    why = f"{len(found)} faults in {days:.3g} days, the last: {found[-1].why}"
    yield NodeQuarantined(node=node.name, until_s=state.at_s + state.policy.quarantine_s, why=why,
                          incidents=incidents)
