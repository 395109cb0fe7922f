"""The simulated cluster: nodes carry out orders, and each step takes its simulated time."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...events.node_probe import PORT_FIRST, PROBE_S_MAX
from ...events.records import orders as o
from ...events.records import reports as r
from ...events.records.envelope import Record
from ...events.records.order_format import ORDER_FORMAT_VERSION
from ...events.records.statuses import CONNECTION_RESET
from ...events.records.types import Body
from ..incidents.severity import TABLE
from ..state.task import Rank, Task
from .accounting import Accounting, Key
from .engine import LEADER, Engine
from .policies.policy import Costs

SLACK_RATIO = 1 + 1e-9
"""Float sums of seconds are inexact: report an iteration slightly after it is due."""


@dataclass
class SimulatedNode:
    """A node, in its latest incarnation."""

    name: str
    num_slots: int
    incarnation: int = 0
    up: bool = False
    processes: dict[Key, bool] = field(default_factory=dict[Key, bool])
    """Living processes, and whether each has the state of its task."""
    ended: set[Key] = field(default_factory=set[Key])
    """Processes that have ended, but were not reported yet."""

    @property
    def source(self) -> str:
        return f"{self.name}/{self.incarnation}"

    def is_running(self, incarnation: int, key: Key) -> bool:
        """Whether the node is still in this incarnation and the process lives."""
        return self.up and self.incarnation == incarnation and key in self.processes

    def is_unreported(self, _: int, key: Key) -> bool:
        """Whether the process has ended and was not reported yet."""
        return key in self.ended


PendingReport = tuple[Key, SimulatedNode, Callable[[], Body]]
"""A process of a task, its node, and the function that makes its report."""


class SimulatedCluster:
    """Nodes by name. `account` receives every change of the tasks that run on them."""

    def __init__(self, engine: Engine, costs: Costs, account: Accounting) -> None:
        self.engine, self.costs, self.account = engine, costs, account
        self.jobs = account.jobs
        self.nodes: dict[str, SimulatedNode] = {}
        self._pid = 0

    # --- nodes --------------------------------------------------------------------------------
    def join(self, name: str, num_slots: int) -> None:
        """Start the node's agent. All processes of an earlier incarnation are gone."""
        if name not in self.nodes:
            self.nodes[name] = SimulatedNode(name, num_slots)
        node = self.nodes[name]
        self._clear(node)
        node.incarnation, node.up = node.incarnation + 1, True
        self.engine.report(
            node.source,
            r.NodeJoined(
                node=name,
                incarnation=node.incarnation,
                host=f"{name}.paper",
                pid=1,
                num_slots=node.num_slots,
                order_format=ORDER_FORMAT_VERSION,
                probe_port=PORT_FIRST,
            ),
        )

    def leave(self, name: str) -> None:
        """Stop the agent and its processes; the agent reports that the node leaves."""
        node = self.nodes[name]
        self._clear(node)
        self.engine.report(
            node.source, r.NodeLeft(node=name, incarnation=node.incarnation, reason="it leaves")
        )

    def lose_node(self, name: str, silence_s: float, with_peers: Collection[int]) -> None:
        """Lose the node without a report. The leader notices after `silence_s`; commands ordered to
        start there meanwhile fail then. Peers report the loss for the tasks in `with_peers`."""
        node = self.nodes[name]
        self._clear(node)
        incarnation = node.incarnation

        def silent() -> None:
            if not node.up and node.incarnation == incarnation:
                self._report_unreachable(node, silence_s)
                there = self.engine.state.nodes[name].occupants.values()
                for number in sorted({one.task for one in there}):
                    if number not in with_peers and not self._task(number).heals_in_memory:
                        self._peer_sees(number, self.engine.now_s)

        self.engine.call_later(silence_s, silent)

    def _report_unreachable(self, node: SimulatedNode, silence_s: float) -> None:
        if self.engine.state.nodes[node.name].health == "healthy":  # not reported yet
            self.engine.report(
                LEADER,
                r.NodeUnreachable(
                    node=node.name, incarnation=node.incarnation, silence_s=silence_s
                ),
            )

    def _clear(self, node: SimulatedNode) -> None:
        """Remove the node's processes and everything that it held in memory."""
        node.processes.clear()
        node.up = False
        node.ended.clear()
        for job in self.jobs.values():
            job.remove_holder(node.source)

    # --- orders -------------------------------------------------------------------------------
    def carry_out(self, records: Sequence[Record]) -> None:
        starting, ending = dict[int, list[PendingReport]](), dict[int, list[PendingReport]]()
        for record in records:
            if not isinstance(record.body, o.ORDERS):
                continue
            match record.body:
                case o.StartRank() as order:
                    self._start(order, starting)
                case o.StopRank() as order:
                    self._stop(order, ending)
                case o.Quiesce() as order:
                    self._quiesce(order)
                case o.Reconfigure() as order:
                    self._reconfigure(order)
                case o.Resume() as order:
                    self._resume(order)
                case o.ProbeNode() as order:
                    self._probe(record, order)
                case _:
                    pass
        for reports in starting.values():
            self._report_all(self.costs.start_s, reports)
        for reports in ending.values():
            self._report_all(0.0, reports, SimulatedNode.is_unreported)

    def _probe(self, record: Record, order: o.ProbeNode) -> None:
        """Each agent that is asked reaches the node at once if it lives, and tells it; else it
        waits in vain."""
        target = self.nodes[order.node]
        reached = target.up and target.incarnation == order.incarnation
        for name in order.nodes:
            self.engine.call_later(
                0.0 if reached else PROBE_S_MAX,
                partial(self._tell_probe, self.nodes[name], record, order, reached=reached),
            )

    def _tell_probe(
        self, node: SimulatedNode, record: Record, order: o.ProbeNode, *, reached: bool
    ) -> None:
        asked = dict(zip(order.nodes, order.incarnations, strict=True))
        if node.up and node.incarnation == asked[node.name]:
            self.engine.report(
                node.source,
                r.NodeProbed(
                    node=node.name,
                    incarnation=node.incarnation,
                    target=order.node,
                    target_incarnation=order.incarnation,
                    order=record.seq,
                    epoch=record.epoch,
                    reached=reached,
                ),
            )

    def _start(self, order: o.StartRank, starting: dict[int, list[PendingReport]]) -> None:
        """`starting` collects, by task, the reports of a command's processes, sent together."""
        node, key = self.nodes[order.slot.node], (order.task, order.rank, order.attempt)
        if not node.up:
            return
        self._pid += 1
        node.processes[key] = False
        started = r.RankStarted(
            task=order.task,
            rank=order.rank,
            attempt=order.attempt,
            node=node.name,
            pid=self._pid,
            log_path="/paper",
        )
        if order.spec.training is None:
            self.jobs[order.task].holders.add(node.source)
            starting.setdefault(order.task, []).append((key, node, lambda: started))
            return
        ready = r.RankReady(
            task=order.task,
            rank=order.rank,
            attempt=order.attempt,
            endpoint=f"{node.name}.paper:{self._pid}",
            num_params=0,
            state_bytes=0,
            iteration_flops=0.0,
            data_digest="paper",
        )
        self._report_all(0.0, [(key, node, lambda: started)])
        self._report_all(self.costs.start_s, [(key, node, lambda: ready)])

    def _report_all(
        self,
        in_s: float,
        reports: Sequence[PendingReport],
        may: Callable[[SimulatedNode, int, Key], bool] = SimulatedNode.is_running,
        occurred_s: float | None = None,
    ) -> None:
        """After `in_s`, send these reports in order: each only if `may` is true by then."""
        pending = [(node, node.incarnation, key, made) for key, node, made in reports]

        def send() -> None:
            for node, incarnation, key, made in pending:
                if may(node, incarnation, key):
                    node.ended.discard(key)
                    self.engine.report(node.source, made(), occurred_s)

        self.engine.call_later(in_s, send)

    def end(self, node: SimulatedNode, key: Key, in_s: float, *, status: str = "") -> None:
        """The process ends, which is reported after `in_s`: of a bad device first its error."""
        node.processes.pop(key, None)
        node.ended.add(key)
        slot = self._task(key[0]).ranks[key[1]].slot.index
        if TABLE.get(status) == "SEV1":
            erred = r.DeviceErred(
                node=node.name,
                incarnation=node.incarnation,
                origin="kernel",
                status=status,
                rule="on paper",
                text=status,
                devices=(slot,),
            )
            self.engine.call_later(in_s, lambda: self._tell_error(node, key, erred))
        self._report_all(
            in_s,
            [(key, node, partial(_exited, key, status))],
            SimulatedNode.is_unreported,
            self.engine.now_s,
        )

    def _tell_error(self, node: SimulatedNode, key: Key, erred: r.DeviceErred) -> None:
        if node.is_unreported(erred.incarnation, key):
            self.engine.report(node.source, erred, self.engine.now_s)

    def fail_collective(self, node: SimulatedNode, key: Key, in_s: float, status: str) -> None:
        """Fail a collective of this process, which reports it after `in_s`."""
        failed = partial(self._failed, key, self._task(key[0]).generation, status)
        self._report_all(in_s, [(key, node, failed)], occurred_s=self.engine.now_s)

    def _failed(self, key: Key, generation: int, status: str) -> Body:
        return r.CollectiveFailed(
            task=key[0],
            rank=key[1],
            attempt=key[2],
            generation=generation,
            iteration=self.jobs[key[0]].iteration,
            error=status or "closed by peer",
            status=status,
        )

    def report_peer_loss(self, number: int, in_s: float) -> None:
        """After `in_s` a peer reports the loss: a collective fails, or a command's process ends."""
        task, now_s = self._task(number), self.engine.now_s
        began = task.rounds, task.generation

        def send() -> None:
            if (task.rounds, task.generation) == began:
                self._peer_sees(number, now_s)

        self.engine.call_later(in_s, send)

    def _peer_sees(self, number: int, occurred_s: float) -> None:
        task = self._task(number)
        lives = next((one for one in self._ranks(task) if one[1] in one[0].processes), None)
        # If no process lives, use a process that has ended and was not reported yet.
        found = lives or next((one for one in self._ranks(task) if one[1] in one[0].ended), None)
        if found is None:  # no node could carry out an order either
            for node in [one[0] for one in self._ranks(task)] if not task.heals_in_memory else ():
                if not node.up:
                    self._report_unreachable(node, 0.0)
            return
        node, key = found
        if lives and task.heals_in_memory:
            self.engine.report(node.source, self._failed(key, task.generation, ""), occurred_s)
            return
        node.processes.pop(key, None)
        node.ended.discard(key)
        self.engine.report(node.source, _exited(key, CONNECTION_RESET), occurred_s)

    def _ranks(self, task: Task) -> Iterator[tuple[SimulatedNode, Key]]:
        for number in sorted(task.ranks):
            rank = task.ranks[number]
            yield self.nodes[rank.slot.node], (task.id, number, rank.attempt)

    def _stop(self, order: o.StopRank, ending: dict[int, list[PendingReport]]) -> None:
        """Stop a process, if its node is up. `ending` collects the reports by task."""
        node, key = self.nodes[order.nodes[0]], (order.task, order.rank, order.attempt)
        if node.up:
            node.processes.pop(key, None)
            node.ended.add(key)
            ending.setdefault(order.task, []).append((key, node, partial(_exited, key, "")))

    def _task(self, number: int) -> Task:
        return self.engine.state.tasks[number]

    def _quiesce(self, order: o.Quiesce) -> None:
        task, job = self._task(order.task), self.jobs[order.task]
        in_s = self.costs.quiesce_s
        if order.mode == "boundary" and job.rate_flops:
            in_s = job.until_boundary_s(self.engine.now_s)

        def quiesced(rank: Rank) -> Callable[[], Body]:
            return lambda: r.Quiesced(
                task=task.id,
                rank=rank.rank,
                attempt=rank.attempt,
                generation=order.generation,
                step_version=job.iteration,
                micro_batches=(),
                buckets_reduced=0,
                num_buckets=1,
            )

        self.engine.call_later(in_s, lambda: self._halt(order))
        leaving = [task.ranks[number] for number in order.ranks]
        self._report_all(
            in_s,
            [
                ((task.id, rank.rank, rank.attempt), self.nodes[rank.slot.node], quiesced(rank))
                for rank in leaving
            ],
        )

    def _halt(self, order: o.Quiesce) -> None:
        if self._task(order.task).generation == order.generation:
            self.report_progress(order.task)
            self.account.reach_boundary(self.engine.now_s, order.task)

    def report_progress(self, number: int) -> None:
        """Report when the last iteration completed: a stall of the task began no earlier."""
        task, job, now_s = self._task(number), self.jobs[number], self.engine.now_s
        job.settle(now_s)
        reporter = next(
            (
                member
                for member in task.members
                if (number, member.rank, member.attempt) in self.nodes[member.node].processes
            ),
            None,
        )
        if job.rate_flops and job.iteration and reporter is not None:
            self.engine.report(
                self.nodes[reporter.node].source,
                r.TaskProgressed(
                    task=number,
                    generation=task.generation,
                    first_iteration=job.iteration - 1,
                    losses=(0.0,),
                    step_s=(job.iteration_s,),
                    rate_flops=job.rate_flops,
                    micro_batches=1,
                ),
                now_s - job.since_boundary_s,
            )

    def _reconfigure(self, order: o.Reconfigure) -> None:
        job = self.jobs[order.task]
        has = {
            member.rank: self.nodes[member.node].processes.get(
                (order.task, member.rank, member.attempt), False
            )
            for member in order.members
        }
        source_rank = next((rank for rank, state in has.items() if state), -1)
        if source_rank < 0:
            self.account.undo(order.task, job.restore(self.engine.now_s))
        reports = list[PendingReport]()
        for member in order.members:
            origin = "own" if has[member.rank] else "peer" if source_rank >= 0 else job.origin
            done = partial(
                r.Reconfigured,
                task=order.task,
                rank=member.rank,
                attempt=member.attempt,
                generation=order.generation,
                step_version=job.iteration,
                kept_micro_batches=(),
                remaining_micro_batches=(),
                reassigned_micro_batches=(),
                source=member.rank if has[member.rank] else source_rank,
                received_bytes=0,
                down_s=0.0,
                up_s=0.0,
                settle_s=self.costs.regroup_s,
                origin=origin,
            )
            reports.append(
                ((order.task, member.rank, member.attempt), self.nodes[member.node], done)
            )
        self._report_all(self.costs.regroup_s, reports)

    def _resume(self, order: o.Resume) -> None:
        task, job = self._task(order.task), self.jobs[order.task]
        for member in task.members:
            key = (order.task, member.rank, member.attempt)
            processes = self.nodes[member.node].processes
            if key in processes:
                processes[key] = True
            else:
                return  # the process has ended since, and was not reported yet
        job.holders = {self.nodes[member.node].source for member in task.members}
        self.account.resume_task(order.task)
        self.account.update(self.engine.now_s, order.task)
        first = task.members[0]
        key, node = (task.id, first.rank, first.attempt), self.nodes[first.node]
        if not job.rate_flops:
            return  # these slots yield no throughput
        first_s = job.until_boundary_s(self.engine.now_s)
        counted = 1 + self.engine.state.policy.restart_iterations
        for begin, end in ((0, 1), (1, counted)):
            self._report_all(
                (first_s + (end - 1) * job.iteration_s) * SLACK_RATIO,
                [(key, node, self._progress(order, begin, end))],
            )

    def _progress(self, order: o.Resume, begin: int, end: int) -> Callable[[], Body]:
        """The report of iterations `begin` to `end` of this generation."""
        job = self.jobs[order.task]
        first, rate_flops, num = job.iteration + begin, job.rate_flops, end - begin
        return lambda: r.TaskProgressed(
            task=order.task,
            generation=order.generation,
            first_iteration=first,
            losses=(0.0,) * num,
            step_s=(job.iteration_s,) * num,
            rate_flops=rate_flops,
            micro_batches=1,
        )


def _exited(key: Key, status: str) -> r.RankExited:
    return r.RankExited(
        task=key[0],
        rank=key[1],
        attempt=key[2],
        pid=1,
        exit_code=1,
        signal=None,
        status=status,
        rule="on paper" if status else "",
    )
