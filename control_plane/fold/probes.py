"""The fold of probes: ordered, answered, late; who is probed next."""

from ...events.node_probe import PROBED_S_MAX
from ...events.records.envelope import Record
from ...events.records.orders import ProbeNode
from ...events.records.reports import NodeProbed
from ...events.timing import pause_after_s
from ..incidents.probes import PROBERS_NUM_MIN, TRIALS_NUM_MAX, are_many_silent
from ..state.cluster import ClusterState
from ..state.node import Node, Probe
from . import edits


def probe_ordered(state: ClusterState, record: Record, node: Node, body: ProbeNode) -> None:
    state.to_probe = [name for name in state.to_probe if name != node.name]
    node.probe = Probe(order=record.seq, epoch=record.epoch, probers=body.nodes)
    node.num_probes += 1
    edits.set_deadline(state, f"probe/{node.name}", PROBED_S_MAX)


def node_probed(state: ClusterState, record: Record, body: NodeProbed) -> None:
    """An answer counts once, from who was asked, and until the limit: an older one tells nothing of
    a node that may have come back."""
    node = state.nodes.get(body.target)
    if node is None or (probe := node.probe) is None:
        return
    due = state.deadlines.get(f"probe/{node.name}")
    is_asked = (body.order, body.epoch) == (probe.order, probe.epoch) and body.node in probe.probers
    if not is_asked or body.node in probe.answers or due is None or record.at_s > due.due_s:
        return
    if not body.error:
        probe.answers[body.node] = body.reached
    if body.reached or len(probe.answers) == len(probe.probers):
        _end(state, record, node, probe)


def probe_due(state: ClusterState, record: Record, node: Node) -> None:
    """The limit of the probe that is under way, or the end of the pause before the next one."""
    if node.probe is not None:
        _end(state, record, node, node.probe)
    elif node.probe_port and node.health in ("healthy", "unreachable"):
        state.to_probe = sorted({*state.to_probe, node.name})


def probe_in(state: ClusterState, node: Node, pause_s: float) -> None:
    """Have the node probed after a pause; 0: now. What was under way ends without a result."""
    forget_probe(state, node)
    if not node.probe_port:
        return
    if pause_s > 0:
        edits.set_deadline(state, f"probe/{node.name}", pause_s)
    else:
        state.to_probe = sorted({*state.to_probe, node.name})


def forget_probe(state: ClusterState, node: Node) -> None:
    """End what is under way, and what is due."""
    node.probe = None
    edits.clear_deadline(state, f"probe/{node.name}")
    state.to_probe = [name for name in state.to_probe if name != node.name]


def probe_silent(state: ClusterState, node: Node, silence_s: float) -> None:
    """The node is unreachable: it is probed when it has been silent for `silence_s_max`; one that
    its peers suspect is unreachable earlier."""
    node.num_probes = 0
    forget_probe(state, node)
    if node.is_probed:
        probe_in(state, node, state.policy.silence_s_max - silence_s)


def probe_heard(state: ClusterState, node: Node) -> None:
    """The node has joined, or is heard again: whatever probes have said is over."""
    node.num_probes, node.reached_by, node.unreached_by, node.unreached_seq = 0, (), (), 0
    forget_probe(state, node)
    if not node.is_probed:
        probe_in(state, node, 0.0)


def _end(state: ClusterState, record: Record, node: Node, probe: Probe) -> None:
    forget_probe(state, node)
    reached_by = tuple(sorted(name for name, reached in probe.answers.items() if reached))
    if node.health == "healthy":
        node.is_probed = node.is_probed or bool(reached_by)
        if not node.is_probed and node.num_probes < TRIALS_NUM_MAX:
            probe_in(state, node, pause_after_s(node.num_probes))
        return
    if node.health != "unreachable":
        return
    node.reached_by = reached_by
    is_known = len(probe.answers) >= PROBERS_NUM_MIN and not are_many_silent(state)
    if is_known and not reached_by:
        node.unreached_by, node.unreached_seq = tuple(sorted(probe.answers)), record.seq
    else:
        probe_in(state, node, pause_after_s(node.num_probes))
