"""Faults and requests of a recorded log, without their consequences."""

from collections.abc import Iterator
from typing import NamedTuple

from ....events.records import decisions as d
from ....events.records import orders as o
from ....events.records import reports as r
from ....events.records.envelope import Record
from ....events.records.statuses import LOST_CONNECTION, OTHER_NETWORK
from ....events.spec import policy
from ...incidents.severity import TABLE
from ...state.cluster import ClusterState
from ...state.incident import Fault
from ..accounting import Key
from ..trace.external_event import ExternalEvent, NodeReport, OperatorRequest

HARM_S = 10.0
"""A fault that is reported within this time after an injection is the injected fault."""
REQUESTS = (
    r.TaskCancelRequested,
    r.TaskWeightSet,
    r.HealingFrozen,
    r.HealingResumed,
    r.NodeDrained,
    r.NodeUndrained,
    r.QuarantineLifted,
)


class ProcessLoss(NamedTuple):
    """Processes that ended or stalled at `at_s`: all of `node`, or the one with `key`. Record `seq`
    reports the loss. `generation`: if only a collective of the process failed, its generation."""

    at_s: float
    seq: int
    node: str
    key: Key = (0, -1, 0)
    generation: int = 0


class SilentNode(NamedTuple):
    """A node that was unreachable until it was reachable again, joined again, or the log ended."""

    from_s: float
    reported_s: float
    seq: int
    tasks: tuple[int, ...]
    body: r.NodeUnreachable


class RecordedFaults(NamedTuple):
    """Times are those of the log. `num_indirect`: faults that only other processes reported.
    `behind_s`: how far each node's clock is behind the leader's, at most."""

    losses: list[ProcessLoss]
    events: list[ExternalEvent | OperatorRequest | NodeReport]
    num_indirect: int
    behind_s: dict[str, float]


class FaultReader:
    """Collects faults. Pass each folded record to `see` before its decisions (replay.verify)."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """Names of tasks, by task number. A repeated name gets a number as suffix."""
        self._events: list[ExternalEvent | OperatorRequest | NodeReport] = []
        self._losses: list[tuple[ProcessLoss, str]] = []
        """Each with the node whose clock gave its time; empty: the leader's clock."""
        self._behind_s: dict[str, float] = {}
        """By node: the smallest difference so far between the times of a report and its event."""
        self._faults: list[tuple[ProcessLoss, str, Fault, float]] = []
        self._unreachable: dict[str, SilentNode] = {}
        self._lost: list[SilentNode] = []
        self._reported_s: dict[int, float] = {}
        """When failed collectives were reported, by the seq of their report."""
        self._up: dict[str, int] = {}
        self._injected: dict[Key | str, float] = {}
        self._failed: dict[int, ProcessLoss] = {}
        """Failed collectives, by the seq of their report."""
        self._rounds: set[tuple[int, int]] = set()
        self._stop_orders_s: dict[Key, float] = {}
        self._num_indirect = 0
        self._policy: policy.Policy | None = None

    def see(self, state: ClusterState, record: Record) -> None:
        body, node = record.body, record.source.rpartition("/")[0]
        if (
            record.source != "heart"
            and record.source_seq
            and not node.startswith(("leader", "operator"))
        ):
            behind_s = record.at_s - record.occurred_s
            self._behind_s[node] = min(self._behind_s.get(node, behind_s), behind_s)
        match body:
            case r.TaskSubmitted():
                self._events.append(
                    OperatorRequest(record.at_s, body, self._name(record.seq, body))
                )
            case r.NodeJoined():
                self._on_joined(state, record, body)
            case r.NodeLeft() if body.node in self._up:
                del self._up[body.node]
                self._events.append(ExternalEvent(record.at_s, body.node, "left"))
            case r.NodeUnreachable():
                self._on_unreachable(state, record, body)
            case r.NodeReachable() if body.node in self._unreachable:
                silence = self._unreachable.pop(body.node)
                self._events += [
                    NodeReport(silence.reported_s, body.node, silence.body),
                    NodeReport(record.at_s, body.node, body),
                ]
            case r.HealthChanged() | r.DeviceErred():
                self._events.append(NodeReport(record.at_s, body.node, body))
            case r.PolicySet():
                if self._policy not in (None, body.policy):
                    self._events.append(OperatorRequest(record.at_s, body))
                self._policy = body.policy
            case o.InjectFault():
                self._injected[
                    (body.task, body.rank, body.attempt) if body.what != "node" else body.nodes[0]
                ] = record.at_s
            case r.CollectiveFailed():
                self._on_collective_failed(state, record, body, node)
            case o.StopRank():
                self._stop_orders_s.setdefault((body.task, body.rank, body.attempt), record.at_s)
            case r.RankExited():
                key = (body.task, body.rank, body.attempt)
                at_s = record.occurred_s + self._behind_s.get(node, 0.0)
                if at_s < self._stop_orders_s.get(key, at_s) and body.task in state.tasks:
                    self._losses.append((ProcessLoss(record.occurred_s, record.seq, "", key), node))
            case d.IncidentOpened():
                self._on_incident(body)
            case d.IncidentEscalated() if body.num_times:  # the fault has come back
                self._on_incident(body)
            case d.TaskEnded() if body.outcome != "cancelled":
                self._events.append(
                    OperatorRequest(
                        record.at_s,
                        r.TaskCancelRequested(task=body.task, reason=body.outcome),
                        self.names.get(body.task, ""),
                    )
                )
            case _ if isinstance(body, REQUESTS):
                self._events.append(
                    OperatorRequest(record.at_s, body, self.names.get(getattr(body, "task", 0), ""))
                )
            case _:
                pass
        if record.source != "heart":
            self._see_faults(state, record, node)

    def _name(self, number: int, body: r.TaskSubmitted) -> str:
        name, num = body.spec.name, 1
        while name in self.names.values():
            num += 1
            name = f"{body.spec.name}.{num}"
        self.names[number] = name
        return name

    # --- nodes ----------------------------------------------------------------------------------
    def _on_joined(self, state: ClusterState, record: Record, body: r.NodeJoined) -> None:
        name, silence = body.node, self._unreachable.pop(body.node, None)
        if silence is not None:
            self._lost.append(silence)
        elif self._up.get(name, body.incarnation) < body.incarnation:  # the agent died unnoticed
            faults = [
                fault
                for task in state.tasks.values()
                for fault in task.faults
                if record.seq in fault.evidence
            ]
            at_s = min((fault.at_s for fault in faults), default=record.at_s)
            at_s = max(at_s, self._injected.get(name, at_s))
            self._losses.append((ProcessLoss(at_s, record.seq, name), ""))
            self._events.append(
                ExternalEvent(
                    at_s, name, "fault", LOST_CONNECTION, detected_in_s=record.at_s - at_s
                )
            )
        self._up[name] = body.incarnation
        self._events.append(ExternalEvent(record.at_s, name, "joined", num_slots=body.num_slots))

    def _on_unreachable(self, state: ClusterState, record: Record, body: r.NodeUnreachable) -> None:
        from_s = max(record.at_s - body.silence_s, self._injected.get(body.node, 0.0))
        tasks = tuple(
            task.id
            for task in state.tasks.values()
            if any(rank.slot.node == body.node for rank in task.ranks.values())
        )
        self._unreachable[body.node] = SilentNode(from_s, record.at_s, record.seq, tasks, body)

    def _on_incident(self, body: d.IncidentOpened | d.IncidentEscalated) -> None:
        failed = [self._failed[seq] for seq in body.evidence if seq in self._failed]
        if body.severity == "SEV3" and failed and len(failed) == len(body.evidence):
            self._network(failed, body.status, body.node)

    # --- processes ------------------------------------------------------------------------------
    def _on_collective_failed(
        self, state: ClusterState, record: Record, body: r.CollectiveFailed, node: str
    ) -> None:
        if body.task in state.tasks:
            loss = ProcessLoss(
                record.occurred_s,
                record.seq,
                "",
                (body.task, body.rank, body.attempt),
                body.generation,
            )
            self._failed[record.seq], self._reported_s[record.seq] = loss, record.at_s
            self._losses.append((loss, node))

    def _see_faults(self, state: ClusterState, record: Record, node: str) -> None:
        number = getattr(record.body, "task", 0)
        if isinstance(record.body, r.NodeJoined):
            return
        tasks = (
            [state.tasks[number]]
            if number in state.tasks
            else state.tasks.values()
            if isinstance(record.body, r.DeadlineReached)
            else ()
        )
        for task in tasks:
            for fault in task.faults:
                if fault.evidence[-1] == record.seq:
                    self._fault(state, record, task.id, fault, node)

    def _fault(
        self, state: ClusterState, record: Record, number: int, fault: Fault, node: str
    ) -> None:
        task = state.tasks[number]
        failed = [self._failed[seq] for seq in fault.evidence if seq in self._failed]
        if isinstance(record.body, r.DeadlineReached) and fault.second_hand and failed:
            self._network(failed, fault.status, fault.node)
            return
        if not task.heals_in_memory:  # the end of one process ends all others
            if (number, task.rounds) in self._rounds:
                return
            self._rounds.add((number, task.rounds))
        if fault.second_hand:
            self._num_indirect += 1
            return
        by_leader = isinstance(record.body, r.DeadlineReached)
        for rank in fault.ranks:
            attempt = getattr(record.body, "attempt", 0) or task.attempts.get(rank, 0)
            key = (number, rank, attempt)
            at_s = fault.at_s if by_leader else record.occurred_s
            injected_s = self._injected.pop(key, None)
            if injected_s is not None and record.at_s - injected_s < HARM_S:
                at_s, by_leader = injected_s, True
            loss = ProcessLoss(at_s, record.seq, "", key)
            self._losses.append((loss, "" if by_leader else node))
            if rank == fault.ranks[0] or TABLE.get(fault.status) != "SEV3":  # one network fault
                self._faults.append((loss, "" if by_leader else node, fault, record.at_s))

    def _network(self, failed: list[ProcessLoss], status: str, node: str) -> None:
        """Add a network fault: collectives have failed, and there is no other cause."""
        first = min(failed)
        for one in failed:
            self._failed.pop(one.seq, None)
        fault = Fault(
            ranks=(first.key[1],),
            node=node,
            status=status or OTHER_NETWORK,
            why="",
            evidence=(first.seq,),
            at_s=first.at_s,
            hurts=True,
            ended=False,
        )
        whose = next((node for loss, node in self._losses if loss == first), "")
        self._faults.append((first, whose, fault, -1.0))

    # --- results ----------------------------------------------------------------------------------
    def _dated(self) -> Iterator[tuple[ProcessLoss, float]]:
        """The losses, with their times on the leader's clock."""
        for loss, node in self._losses:
            yield loss, loss.at_s + self._behind_s.get(node, 0.0)

    def _node_loss(self, silence: SilentNode) -> tuple[ProcessLoss, ExternalEvent]:
        """The loss of a node, at the time of its first evidence."""
        name = silence.body.node
        evidence = sorted(
            (at_s, loss.seq)
            for loss, at_s in self._dated()
            if loss.key[0] in silence.tasks and silence.from_s <= at_s <= silence.reported_s
        )
        at_s, seq = evidence[0] if evidence else (silence.from_s, 0)
        return ProcessLoss(at_s, silence.seq, name), ExternalEvent(
            at_s,
            name,
            "fault",
            LOST_CONNECTION,
            detected_in_s=silence.reported_s - at_s,
            peers_detect_in_s=max(self._reported_s.get(seq, at_s) - at_s, 0.0) if seq else -1.0,
        )

    def all(self) -> RecordedFaults:
        """The faults and requests of the log. Call it after the last record."""
        node_losses = [self._node_loss(one) for one in (*self._lost, *self._unreachable.values())]
        events = [*self._events, *(one for _, one in node_losses)]
        for loss, node, fault, reported_s in self._faults:
            at_s = loss.at_s + self._behind_s.get(node, 0.0)
            events.append(
                ExternalEvent(
                    at_s,
                    fault.node,
                    "fault",
                    fault.status if fault.status in TABLE else OTHER_NETWORK,
                    task=self.names.get(loss.key[0], ""),
                    rank=loss.key[1],
                    detected_in_s=max(reported_s - at_s, 0.0) if reported_s >= 0 else -1.0,
                )
            )
        losses = sorted(
            [
                *(loss._replace(at_s=at_s) for loss, at_s in self._dated()),
                *(loss for loss, _ in node_losses),
            ]
        )
        return RecordedFaults(
            losses, sorted(events, key=lambda one: one.at_s), self._num_indirect, self._behind_s
        )
