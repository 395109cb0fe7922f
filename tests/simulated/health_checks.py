"""Invariants of node health at every record: no task moves or ends because of noise alone."""

from __future__ import annotations

from unicron.control_plane.fold.edits import EARLY_S
from unicron.control_plane.fold.node_health import RECOVERED_S
from unicron.control_plane.incidents.severity import TABLE
from unicron.control_plane.state.cluster import ClusterState
from unicron.events.records import decisions as d
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.records.reports import DeviceErred, HealthChanged


class HealthWitness:
    """The nodes' health reports, kept independently of the fold."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[DeviceErred, float]] = {}
        """seq -> a device error report, and its time."""
        self._noise: set[int] = set()
        self._unhealthy: dict[tuple[str, int], dict[str, int]] = {}
        """(node, incarnation) -> check -> seq since which the check reports unhealthy."""
        self._ill_s: dict[tuple[str, int], float] = {}
        """(node, incarnation) -> time at which a check last stopped being unhealthy."""
        self._was: dict[str, tuple[int, set[int], set[int]]] = {}

    def before(self, state: ClusterState, record: Record) -> str:
        """What is wrong with a decision, given the state in which it was made; empty: nothing."""
        match record.body:
            case DeviceErred() as body:
                self._told[record.seq] = body, record.at_s
                self._noise.add(record.seq)
            case HealthChanged() as body:
                self._noise.add(record.seq)
                told = self._unhealthy.setdefault((body.node, body.incarnation), {})
                if body.health == "unknown":
                    return ""  # "unknown" keeps the earlier verdict
                if told.pop(body.check, 0):
                    self._ill_s[body.node, body.incarnation] = record.at_s
                if body.health == "unhealthy":
                    told[body.check] = record.seq
            case o.StartRank(slot=slot):
                node = state.nodes[slot.node]
                if node.quarantine is not None:
                    return f"on {node.name}, which is quarantined"
                if slot.index in node.slots_disabled or slot.index in node.slots_unhealthy:
                    return f"on {slot}, which is disabled"
            case o.Quiesce(mode="now", task=task, save=False):  # save=True is a preemption
                it = state.tasks[task]
                incident = state.incidents.get(it.incident)
                # A failed collective is reason enough; its cause may be found later.
                if (incident is None or incident.outcome) and it.failed_s < 0:
                    return "stops a task without a fault"
            case d.IncidentOpened(task=0) as body:
                return self._of_node(state, body)
            case d.IncidentOpened() as body if set(body.evidence) <= self._noise:
                return "has only noise as evidence"
            case d.IncidentClosed(of=of) if state.incidents[of].task == 0:
                node = state.nodes[state.incidents[of].node]
                if any(node.is_disabled(index) for index in node.occupants):
                    return f"while a process runs on a disabled slot of {node.name}"
            case _:
                pass
        return ""

    def _of_node(self, state: ClusterState, body: d.IncidentOpened) -> str:
        if state.nodes[body.node].incident:
            return f"although an incident of {body.node} is open"
        told = [self._told[seq][0] for seq in body.evidence if seq in self._told]
        if any(one.node != body.node for one in told):
            return "has evidence of another node"
        if not _is_enough(told):
            return "has no confirmed evidence"
        return ""

    def after(self, state: ClusterState, record: Record) -> str:
        """What is wrong with the slots that this record disabled or enabled; empty: nothing."""
        wrong = ""
        for node in state.nodes.values():
            out, sick = set(node.slots_disabled), set(node.slots_unhealthy)
            told, was_out, was_sick = self._was.get(node.name, (0, set[int](), set[int]()))
            if told != node.incarnation:
                was_out, was_sick = set(), set()
            self._was[node.name] = node.incarnation, out, sick
            if out - was_out and isinstance(record.body, (d.IncidentOpened, d.IncidentEscalated)):
                wrong = wrong or self._out(state, record.body, node.name, out - was_out)
            elif out - was_out and not isinstance(record.body, r.NodeJoined):
                wrong = wrong or f"disables {node.name}/{out - was_out}"
            ill_s = self._ill_s.get((node.name, node.incarnation), record.at_s)
            if was_sick - sick and (
                record.at_s < ill_s + RECOVERED_S - EARLY_S
                or self._unhealthy.get((node.name, node.incarnation))
            ):
                wrong = wrong or f"uses {node.name}/{was_sick - sick} too early"
            if sick - was_sick and not self._is_believed(state, node.name):
                wrong = wrong or f"disables {node.name}/{sick - was_sick} for an unconfirmed check"
        return wrong

    def _out(
        self,
        state: ClusterState,
        body: d.IncidentOpened | d.IncidentEscalated,
        node: str,
        slots: set[int],
    ) -> str:
        of = body.of if isinstance(body, d.IncidentEscalated) else 0
        task = state.incidents[of].task if of else getattr(body, "task", 0)
        if task:  # a rank failed too: a second source
            return "" if body.severity == "SEV1" else f"disables {node}/{slots} at {body.severity}"
        told = [self._told[seq][0] for seq in body.evidence if seq in self._told]
        named = {index for one in told for index in one.devices if TABLE[one.status] == "SEV1"}
        whole = _is_enough([one for one in told if not one.devices])
        return "" if slots <= named or whole else f"disables {node}/{slots}, reported: {named}"

    def _is_believed(self, state: ClusterState, name: str) -> bool:
        """True if a check reports the node unhealthy and the share of such nodes is allowed."""
        there = [node for node in state.nodes.values() if node.health != "left"]
        most = max(int(state.policy.unconfirmed_share_max * len(there)), 1)
        return (
            bool(self._unhealthy.get((name, state.nodes[name].incarnation)))
            and sum(bool(node.slots_unhealthy) for node in there) <= most
        )


def _is_enough(told: list[DeviceErred]) -> bool:
    """True for a SEV1 that names a device, or two sources that report the whole node."""
    grave = [one for one in told if TABLE[one.status] == "SEV1"]
    whole = {(one.origin, one.rule) for one in grave if not one.devices}
    return any(one.devices for one in grave) or len(whole) > 1
