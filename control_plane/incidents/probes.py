"""Probes of nodes: which agents ask a silent node for a sign of life, and what their answers mean.

A silent node that other hosts cannot reach either is lost: no iteration, however long, has to end
before its ranks run elsewhere. One that somebody reaches has only lost the control plane, and
nothing is touched. This is the indirect probe of SWIM (Das, Gupta, Motivala, 2002), by order of the
leader.
"""

from collections.abc import Iterator

from ...events.records.order_format import ADDED_KINDS
from ...events.records.orders import ProbeNode
from ..state.cluster import ClusterState
from ..state.node import Node

PROBERS_NUM = 3
PROBERS_NUM_MIN = 2
"""With fewer answers that nobody reaches the node, that is not known."""
TRIALS_NUM_MAX = 5
"""Probes that try whether a healthy node can be reached, until one succeeds."""
RECENTLY_S = 10.0
"""A node that was lost so recently counts among those that are silent at once."""


def decide_probes(state: ClusterState) -> Iterator[ProbeNode]:
    """Order the probes that are due: of silent nodes by three agents, and of each node once, when
    it has joined, by one. That a port was reached before tells a firewall from a loss."""
    if state.held:
        return
    for name in list(state.to_probe):
        node = state.nodes[name]
        probers = choose_probers(state, node)
        if not probers:
            continue
        yield ProbeNode(
            nodes=tuple(prober.name for prober in probers),
            incarnations=tuple(prober.incarnation for prober in probers),
            node=name,
            incarnation=node.incarnation,
            host=node.host,
            port=node.probe_port,
        )


def choose_probers(state: ClusterState, node: Node) -> list[Node]:
    """Agents that are heard, on hosts of their own: in other racks than the node first, and each in
    another rack. None if there are fewer than two such hosts. Linear in the nodes."""
    able = [
        other
        for name in sorted(state.nodes)
        if (other := state.nodes[name]).health == "healthy"
        and other.order_format >= ADDED_KINDS[ProbeNode]
        and other.host != node.host
    ]
    begin = state.seq % len(able) if able else 0  # not always the same ones
    hosts = {other.host: other for other in reversed(able[begin:] + able[:begin])}
    if len(hosts) < PROBERS_NUM_MIN:
        return []
    there, racks = list(reversed(hosts.values())), {node.labels.rack}
    chosen: list[Node] = []
    while there and len(chosen) < (PROBERS_NUM if node.unreachable else 1):
        best = next((other for other in there if other.labels.rack not in racks), there[0])
        there.remove(best)
        racks.add(best.labels.rack)
        chosen.append(best)
    return chosen


def are_many_silent(state: ClusterState) -> bool:
    """Whether more than a third of the nodes have fallen silent at once. Then it may be the control
    plane that is cut off, or a part of the network, and no probe makes a node lost. One that nobody
    has reached is gone, also if it has no ranks that would move: it counts only recently."""
    num = num_silent = 0
    for node in state.nodes.values():
        is_gone = node.health == "lost" or node.unreached_seq > 0
        is_silent = (is_gone and state.at_s - node.since_s < RECENTLY_S) or (
            node.health == "unreachable" and not is_gone
        )
        num += is_silent or node.health == "healthy"
        num_silent += is_silent
    return 3 * num_silent > num
