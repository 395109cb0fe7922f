"""One simulated run: one policy over a scenario, from the first node to the horizon."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ...events.records import reports
from ...events.records import types as t
from ...events.records.envelope import Record
from ...events.records.statuses import LOST_CONNECTION
from ...events.spec import policy as r
from ...events.spec.job import JobSpec
from ..incidents.severity import TABLE
from ..state.cluster import DECIDER_VERSION
from ..state.task import Task
from .accounting import Accounting, Key, WafAccount
from .cluster import SimulatedCluster, SimulatedNode
from .engine import LEADER, Engine
from .policies.policy import Policy
from .task_progress import SavedState, TaskProgress
from .trace.external_event import (
    AnyEvent,
    CostChange,
    ExternalEvent,
    NodeReport,
    OperatorRequest,
    causes_loss,
)

SITE = "operator/site"
"""The source of node repairs and requests."""
WARM_TRIES_NUM = 12


class RunInput(NamedTuple):
    """The input of a run, besides the policy. `slots`: by node. `iterations_s`: by task name, the
    iteration time at the largest size, if another."""

    slots: dict[str, int]
    tasks: tuple[JobSpec, ...]
    iteration_s: float
    events: Sequence[AnyEvent]
    horizon_s: float
    limits: r.Policy
    iterations_s: Mapping[str, float] = {}


class Outcome(NamedTuple):
    earnings: WafAccount
    began_s: float
    """Start of the horizon on the log's clock. By then every task with slots trains."""
    transitions: int
    counts: Counter[str]
    """Number of records by kind."""
    ignored: int
    """Events without a target: the node or process was absent, or the node needed no repair."""
    late: int = 0
    """External events that can cause a loss, but came after the horizon."""


class Run:
    """`keep` receives each record of the log. `earnings` replaces the plain WAF account."""

    def __init__(
        self,
        run_input: RunInput,
        policy: Policy,
        keep: Callable[[Record], None] | None = None,
        earnings: WafAccount | None = None,
    ) -> None:
        self.run_input, self.costs = run_input, policy.costs
        self.engine = Engine(policy.decides(policy.costs))
        self.account = Accounting(self.engine.state, earnings or WafAccount(), self._new_progress)
        self.cluster = SimulatedCluster(self.engine, policy.costs, self.account)
        self.counts: Counter[str] = Counter()
        self.ignored = 0
        self._keep = keep
        self._drained: set[str] = set()
        self.engine.on_records = self._on_records

    def play(self) -> Outcome:
        engine, run_input = self.engine, self.run_input
        engine.report(
            LEADER,
            reports.EpochStarted(nonce="simulated", code="simulation", heart=DECIDER_VERSION),
        )
        engine.report(LEADER, reports.PolicySet(policy=run_input.limits))
        for name, num_slots in run_input.slots.items():
            self.cluster.join(name, num_slots)
        for spec in run_input.tasks:
            self._request(reports.TaskSubmitted(spec=spec))
        self._warm_up()
        began_s = engine.now_s
        self.account.begin(began_s)
        late = 0
        for one in run_input.events:
            late += one.at_s > run_input.horizon_s and causes_loss(one)
            engine.call_later(one.at_s, partial(self._on_event, one))
        engine.run(began_s + run_input.horizon_s)
        self.account.end(engine.now_s)
        return Outcome(
            self.account.earnings,
            began_s,
            self.account.transitions,
            self.counts,
            self.ignored,
            late,
        )

    def _warm_up(self) -> None:
        """Run until every task that has slots trains; at most WARM_TRIES_NUM intervals."""
        costs = self.costs
        step_s = costs.start_s + costs.quiesce_s + costs.regroup_s + 12 * self.run_input.iteration_s
        for _ in range(WARM_TRIES_NUM):
            self.engine.run(self.engine.now_s + step_s)
            if all(
                task.phase == "training" for task in self.engine.state.tasks.values() if task.target
            ):
                return

    def _request(self, body: t.Body) -> None:
        self.engine.report(SITE, body)

    # --- external events ------------------------------------------------------------------------
    def _on_event(self, one: AnyEvent) -> None:
        if causes_loss(one):
            self.account.earnings.record_event(self.engine.now_s)
        match one:
            case CostChange():
                self.costs = self.cluster.costs = one.costs
            case OperatorRequest():
                self._on_request(one)
            case NodeReport():
                self._on_node_report(one)
            case ExternalEvent() if one.task or one.slot >= 0:
                self._on_process_fault(one)
            case ExternalEvent():
                self._on_node_event(one)

    def _on_request(self, one: OperatorRequest) -> None:
        body = one.body
        if isinstance(body, reports.PolicySet):
            self.engine.report(LEADER, body)
        elif one.task and not isinstance(body, reports.TaskSubmitted):
            number = self._number(one.task)
            self._request(replace(body, **{"task": number})) if number else self._ignore()
        else:
            self._request(body)

    def _on_node_report(self, one: NodeReport) -> None:
        node = self.cluster.nodes.get(one.node)
        if node is None or not node.up:
            self._ignore()
            return
        of_leader = isinstance(one.body, reports.NodeUnreachable | reports.NodeReachable)
        self.engine.report(
            LEADER if of_leader else node.source,
            replace(one.body, **{"incarnation": node.incarnation}),
        )

    def _on_node_event(self, one: ExternalEvent) -> None:
        node = self.cluster.nodes.get(one.node)
        up = node is not None and node.up
        if node is not None and up and one.event == "fault":
            self._fault(node, one)
        elif node is not None and up and one.event == "left":
            self._stop_node(node)
            self.cluster.leave(one.node)
        elif one.event == "repaired" and node is not None and (not up or one.node in self._drained):
            self._stop_node(node)
            self.cluster.join(one.node, node.num_slots)
            if one.node in self._drained:
                self._drained.discard(one.node)
                self._request(reports.NodeUndrained(node=one.node, reason="repaired"))
        elif one.event == "joined" and not up:
            largest = max(self.run_input.slots.values(), default=1)
            num_slots = one.num_slots or self.run_input.slots.get(one.node, largest)
            self.cluster.join(one.node, num_slots)
        else:
            self._ignore()

    def _fault(self, node: SimulatedNode, one: ExternalEvent) -> None:
        cause, detection_s = one.cause, self._detection_s(one)
        if cause == LOST_CONNECTION:
            stopped = self._stop_node(node)
            self.cluster.lose_node(node.name, detection_s, stopped)
            for number in stopped:
                self.cluster.report_peer_loss(
                    number, one.peers_detect_in_s if one.peers_detect_in_s >= 0 else detection_s
                )
            return
        victim = min(node.processes, default=None)
        if victim is not None:
            self._fail_process(node, victim, cause, detection_s)
        if TABLE[cause] == "SEV1":
            self._drained.add(node.name)
            self.engine.call_later(detection_s, lambda: self._drain(node.name, cause))

    def _on_process_fault(self, one: ExternalEvent) -> None:
        """Apply a fault to one process, if it lives. If the task lacks the rank, use its lowest."""
        state, number = self.engine.state, self._number(one.task)
        if one.slot >= 0:
            node = state.nodes.get(one.node)
            found = node.occupants.get(one.slot) if node is not None else None
            key = (found.task, found.rank, found.attempt) if found is not None else None
        else:
            task = state.tasks.get(number)
            ranks = task.ranks if task is not None else {}
            rank = ranks.get(one.rank) or ranks.get(min(ranks, default=-1))
            key = (number, rank.rank, rank.attempt) if rank is not None else None
        home = next((node for node in self.cluster.nodes.values() if key in node.processes), None)
        if key is None or home is None:
            self._ignore()
        else:
            self._fail_process(home, key, one.cause, self._detection_s(one))

    def _fail_process(self, node: SimulatedNode, key: Key, cause: str, detection_s: float) -> None:
        self._stop_processes([key])
        task = self.engine.state.tasks[key[0]]
        if TABLE[cause] == "SEV3" and task.heals_in_memory and task.member(key[1]) is not None:
            self.cluster.fail_collective(node, key, detection_s, cause)
        else:
            self.cluster.end(node, key, detection_s, status=cause)

    def _detection_s(self, one: ExternalEvent) -> float:
        if one.detected_in_s >= 0:
            return one.detected_in_s
        return self.costs.detection_s(one.cause, self._iteration_s(one.task))

    def _iteration_s(self, task: str) -> float:
        return self.run_input.iterations_s.get(task, self.run_input.iteration_s)

    def _number(self, name: str) -> int:
        """The number of the task with this name; 0 if none was submitted."""
        return next(
            (task.id for task in self.engine.state.tasks.values() if task.spec.name == name), 0
        )

    def _ignore(self) -> None:
        self.ignored += 1

    def _drain(self, name: str, cause: str) -> None:
        """Drain the node for its repair, unless it was repaired before the fault was detected."""
        if name in self._drained:
            self._request(reports.NodeDrained(node=name, reason=cause))

    def _stop_node(self, node: SimulatedNode) -> list[int]:
        """Stop all processes of the node, including those whose end was not reported yet."""
        return self._stop_processes([*node.processes, *sorted(node.ended)], node.name)

    def _stop_processes(self, keys: Collection[Key], node: str = "") -> list[int]:
        """Report the work done, then stop these processes. Returns the tasks that stop."""
        for number in sorted({key[0] for key in keys}):
            self.cluster.report_progress(number)
        return self.account.stop_processes(self.engine.now_s, keys, node)

    # --- records of the decider -----------------------------------------------------------------
    def _on_records(self, records: Sequence[Record]) -> None:
        changed: set[int] = set()
        for record in records:
            if self._keep is not None:
                self._keep(record)
            self.counts[record.kind] += 1
            changed.update(self.account.read(self.engine.now_s, record))
        self.cluster.carry_out(records)
        for number in sorted(changed):
            self.account.update(self.engine.now_s, number)

    def _new_progress(self, task: Task) -> TaskProgress:
        assert task.throughput is not None
        return TaskProgress(
            task.throughput,
            max(task.throughput.rates_flops) * self._iteration_s(task.spec.name),
            SavedState(self.costs.checkpoint_s),
            SavedState(self.costs.copy_s),
        )
