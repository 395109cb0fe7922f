"""Quarantine: a node with repeated faults gets no tasks for a time."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from ...events.records.decisions import NodeQuarantined
from ...events.records.statuses import LOST_CONNECTION, TASK_HANG
from ...events.records.types import Body
from ..state.cluster import ClusterState
from ..state.node import NUM_NODE_FAULTS_MAX, Node, NodeFault
from .severity import TABLE

COUNTING_STATUSES = frozenset(
    (*(status for status, own in TABLE.items() if own == "SEV1"), TASK_HANG)
)
"""SEV1 statuses that count: device errors, lost connection, a process that cannot be stopped."""
UNUSUAL_SHARE_MAX = 0.05
"""Significance level. A node's faults are unusual if the probability that any node has so many by
chance is smaller (Poisson tail at the mean of the other nodes, times the number of nodes)."""


def count_fault(state: ClusterState, *, incident: int, node: str, status: str, why: str) -> bool:
    """Fold: count a fault against the node, and return whether a quarantine is due. A fault of
    several tasks counts once. Faults on a drained node do not count. Each loss of a restarted agent
    counts, however soon. A device error that the next agent repeats counts once."""
    found = state.nodes.get(node)
    if found is None or status not in COUNTING_STATUSES or found.drained:
        return False
    at_s, lost = state.at_s, status == LOST_CONNECTION
    known = [x for x in found.node_faults if not lost or x.incarnation == found.incarnation]
    if any(
        other.incident == incident
        or (other.status == status and at_s - other.at_s <= state.policy.replace_after_s)
        for other in known
    ):
        return False
    found.node_faults = [
        *found.node_faults,
        NodeFault(
            at_s=at_s, incident=incident, status=status, why=why, incarnation=found.incarnation
        ),
    ][-NUM_NODE_FAULTS_MAX:]
    return is_due(state, found)


def is_due(state: ClusterState, node: Node) -> bool:
    """Whether the node has enough faults for a quarantine, and one since the last quarantine."""
    if node.quarantine is not None or not any(one.fresh for one in node.node_faults):
        return False
    if len(node.node_faults) < state.policy.quarantine_faults:
        return False  # a cheap upper bound
    num = len(counting(state, node))
    return num >= state.policy.quarantine_faults and _is_unusual(state, node, num)


def _is_unusual(state: ClusterState, node: Node, num: int) -> bool:
    """Whether the count is unlikely if all nodes fail equally often. If all of them fail often, to
    remove one costs more than its next fault."""
    mean = max(sum(_num_counting(state)) - num, 0) / max(len(state.nodes) - 1, 1)
    fewer = math.fsum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(num))
    return len(state.nodes) * (1 - fewer) < UNUSUAL_SHARE_MAX


def counting(state: ClusterState, node: Node) -> list[NodeFault]:
    """Faults that count now. If many nodes are lost at the same time, the network is at fault."""
    since_s = state.at_s - state.policy.quarantine_window_s
    return [
        one
        for one in node.node_faults
        if one.at_s >= since_s and not (one.status == LOST_CONNECTION and _is_shared(state, one))
    ]


def _num_counting(state: ClusterState) -> Iterator[int]:
    """The number of counting faults of each node, in one pass."""
    since_s, near_s = (state.at_s - state.policy.quarantine_window_s, state.policy.replace_after_s)
    most = num_unconfirmed_max(state)
    lost_s = sorted(
        one.at_s
        for node in state.nodes.values()
        for one in node.node_faults
        if one.status == LOST_CONNECTION
    )
    for node in state.nodes.values():
        yield len(
            [
                one
                for one in node.node_faults
                if one.at_s >= since_s
                and not (
                    one.status == LOST_CONNECTION
                    and bisect_right(lost_s, one.at_s + near_s)
                    - bisect_left(lost_s, one.at_s - near_s)
                    > most
                )
            ]
        )


def _is_shared(state: ClusterState, offence: NodeFault) -> bool:
    near_s = state.policy.replace_after_s
    similar = [
        node.name
        for node in state.nodes.values()
        if any(
            one.status == offence.status and abs(one.at_s - offence.at_s) <= near_s
            for one in node.node_faults
        )
    ]
    return len(similar) > num_unconfirmed_max(state)


def num_unconfirmed_max(state: ClusterState) -> int:
    """Number of nodes that may be disabled without a second source."""
    num = sum(node.health != "left" for node in state.nodes.values())
    return max(int(state.policy.unconfirmed_share_max * num), 1)


def quarantine_if_due(state: ClusterState, node: Node) -> Iterator[Body]:
    if not is_due(state, node):
        return
    found = counting(state, node)
    incidents = tuple(one.incident for one in found)
    days = state.policy.quarantine_window_s / 86400
    why = f"{len(found)} faults in {days:.3g} days, the last: {found[-1].why}"
    yield NodeQuarantined(
        node=node.name, until_s=state.at_s + state.policy.quarantine_s, why=why, incidents=incidents
    )
