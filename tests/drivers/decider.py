"""A synchronous cluster for tests of the decider: agents and ranks that follow orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from state_check import check
from unicron.control_plane.api.view import view
from unicron.control_plane.decide.advance import accepts, advance
from unicron.control_plane.decide.decide import Decide, decide
from unicron.control_plane.decide.replay import verify
from unicron.control_plane.decide.transition import next_decisions
from unicron.control_plane.planner import pending
from unicron.control_plane.planner.pending import WaitExplanation
from unicron.control_plane.state.cluster import DECIDER_VERSION, ClusterState, state_hash
from unicron.control_plane.state.task import Task
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records import types as t
from unicron.events.records.envelope import Record, Report
from unicron.events.records.order_format import ORDER_FORMAT_VERSION
from unicron.events.spec.job import API_VERSION, JobSpec, parse

T = TypeVar("T", bound=t.Body)
NO_LABELS = t.Labels()


def spec(**changes: Any) -> JobSpec:
    """A training task of four ranks, with changes."""
    plain: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "name": "alpha",
        "slots": {"min": 1, "max": 4},
        "train": {"iterations": 50, "output": "/tmp/out", "batch": {"global": 24, "micro": 2}},
    }
    plain.update(changes)
    return parse({key: value for key, value in plain.items() if value is not None})


def sound(state: ClusterState) -> None:
    """Assert that each redundant field of the state equals its recomputed value."""
    wrong = check(state)
    assert not wrong, wrong


def checked(state: ClusterState, record: Record) -> Iterator[t.Body]:
    """`decide`, with a check of the state after the fold of every record."""
    sound(state)
    for body in decide(state, record):
        yield body
        sound(state)


class Driver:
    """Sends reports to the decider, one at a time. On request, plays nodes that follow orders."""

    decide: Decide = staticmethod(checked)

    def __init__(self, *, nodes: int = 2, slots: int = 2, now_s: float = 1000.0) -> None:
        self.state = ClusterState()
        self.log: list[Record] = []
        self.seqs: dict[str, int] = {}
        self.now_s = now_s
        self.pid = 4000
        self.rounding_why = ""
        self.protocol = 0
        """How the processes that it starts speak with each other."""
        """What ranks report from now on: why their sums are not exact."""
        self.steps: dict[int, int] = {}
        self.tell(
            "leader/abc", r.EpochStarted(nonce="abc", code="1", heart=DECIDER_VERSION), epoch=1
        )
        self.epoch = 1
        for number in range(1, nodes + 1):
            self.join(f"n{number}", slots=slots)

    epoch = 1

    def tell(self, source: str, body: t.Body, *, epoch: int = 0) -> list[Record]:
        self.now_s += 0.01
        seq = self.seqs.get(source, 0) + 1
        self.seqs[source] = seq
        report = Report(source=source, source_seq=seq, occurred_s=self.now_s, body=body)
        assert accepts(self.state, report) == "next"
        records = advance(
            self.state, report, epoch=epoch or self.epoch, at_s=self.now_s, decide=self.decide
        )
        self.log += records
        return records

    def bodies(self, source: str, body: t.Body) -> list[t.Body]:
        """The decisions that a report causes."""
        return [record.body for record in self.tell(source, body)[1:]]

    def join(
        self,
        node: str,
        *,
        incarnation: int = 1,
        slots: int = 2,
        labels: t.Labels = NO_LABELS,
        copies_bytes_max: int = 0,
        boot_id: str = "",
        host: str = "127.0.0.1",
        probe_port: int = 0,
        order_format: int = ORDER_FORMAT_VERSION,
    ) -> list[Record]:
        return self.tell(
            f"{node}/{incarnation}",
            r.NodeJoined(
                node=node,
                incarnation=incarnation,
                host=host,
                pid=1,
                num_slots=slots,
                keeper=f"{node}:1",
                labels=labels,
                copies_bytes_max=copies_bytes_max,
                boot_id=boot_id,
                order_format=order_format,
                probe_port=probe_port,
            ),
        )

    def submit(self, job: JobSpec) -> int:
        name = f"operator/{len(self.seqs)}"
        return self.tell(name, r.TaskSubmitted(spec=job))[0].seq

    def due(self, deadline: str) -> list[Record]:
        """Advance the clock to a deadline of the state, and report it."""
        self.now_s = max(self.now_s, self.state.deadlines[deadline].due_s)
        return self.tell(f"leader/{self.state.nonce}", r.DeadlineReached(deadline=deadline))

    def source(self, node: str) -> str:
        return f"{node}/{self.state.nodes[node].incarnation}"

    def exit(
        self, task: int, rank: int, *, signal: int | None = 9, code: int | None = None
    ) -> list[Record]:
        process = self.state.tasks[task].ranks[rank]
        return self.tell(
            self.source(process.slot.node),
            r.RankExited(
                task=task,
                rank=rank,
                attempt=process.attempt,
                pid=process.pid,
                exit_code=code,
                signal=None if code is not None else signal,
            ),
        )

    # --- obedience ------------------------------------------------------------------------------
    def obey(self, records: list[Record], *, start: bool = True) -> list[Record]:
        """Carry out the orders in `records` and all orders that follow from them. Pauses before
        restarts pass."""
        todo: list[Record] = list(records)
        done: list[Record] = []
        while todo or (start and (pauses := self.pauses())):
            if not todo:
                todo = self.due(pauses[0])
                done += todo
                continue
            record = todo.pop(0)
            if isinstance(record.body, o.StartRank) and not start:
                continue
            new = self.do(record.body)
            done += new
            todo += new
        return done

    def pauses(self) -> list[str]:
        """The pauses before restarts, the next to end first."""
        due = self.state.deadlines
        return sorted(
            (name for name in due if name.startswith("restart/")), key=lambda name: due[name].due_s
        )

    def do(self, order: t.Body) -> list[Record]:
        match order:
            case o.StartRank():
                return self._start(order)
            case o.StopRank():
                process = self._process(order.task, order.rank, order.attempt)
                if process is None:
                    return []
                return self.tell(
                    self.source(order.nodes[0]),
                    r.RankExited(
                        task=order.task,
                        rank=order.rank,
                        attempt=order.attempt,
                        pid=1,
                        exit_code=None,
                        signal=15,
                    ),
                )
            case o.Quiesce():
                new = self.save(order.task, order.ranks[0]) if order.save else []
                return new + [x for rank in order.ranks for x in self.quiesced(order.task, rank)]
            case o.Reconfigure():
                return [x for m in order.members for x in self.reconfigured(order, m.rank)]
            case o.PublishCheckpoint():
                open_ = self.state.tasks[order.task].publishing
                if not open_:
                    return []
                seq = max(open_)
                return self.tell(
                    self.source(order.nodes[0]),
                    r.CheckpointPublished(task=order.task, order=seq, path=order.path),
                )
            case o.DropMemoryCheckpoints():
                seq = self.state.tasks[order.task].drop_order
                return [
                    x
                    for node in order.nodes
                    for x in self.tell(
                        self.source(node),
                        r.MemoryCheckpointsLost(
                            node=node,
                            incarnation=self.state.nodes[node].incarnation,
                            task=order.task,
                            why="the task has ended",
                            order=seq,
                        ),
                    )
                ]
            case _:
                return []

    def do_any(self, order: t.Body) -> None:
        """Carry out an order, as far as its processes still exist."""
        try:
            self.do(order)
        except KeyError:
            pass

    def _process(self, task: int, rank: int, attempt: int) -> Any:
        found = self.state.tasks[task].ranks.get(rank)
        ghosts = [x for x in self.state.tasks[task].orphans if x.attempt == attempt]
        return (
            found
            if found is not None and found.attempt == attempt
            else (ghosts[0] if ghosts else None)
        )

    def _start(self, order: o.StartRank) -> list[Record]:
        self.pid += 1
        node = order.slot.node
        new = self.tell(
            self.source(node),
            r.RankStarted(
                task=order.task,
                rank=order.rank,
                attempt=order.attempt,
                node=node,
                pid=self.pid,
                log_path=f"/tmp/{order.rank}.log",
            ),
        )
        if order.spec.training is None or order.declined:
            return new
        return new + self.tell(
            self.source(node),
            r.RankReady(
                task=order.task,
                rank=order.rank,
                attempt=order.attempt,
                endpoint=f"127.0.0.1:{self.pid}",
                num_params=1,
                state_bytes=12,
                iteration_flops=1e9,
                data_digest="d",
                rounding_why=self.rounding_why,
                protocol=self.protocol,
            ),
        )

    def save(self, task: int, rank: int) -> list[Record]:
        """The rank writes a checkpoint of its state; it is not published yet."""
        it, step = self.state.tasks[task], self.steps.get(task, 0)
        return self.tell(
            self.source(it.ranks[rank].slot.node),
            r.CheckpointSaved(
                task=task,
                generation=it.generation,
                step_version=step,
                path=f"gen-{it.generation}/iter-{step}",
                ckpt_bytes=9,
                final=False,
            ),
        )

    def quiesced(self, task: int, rank: int) -> list[Record]:
        it = self.state.tasks[task]
        process = it.ranks[rank]
        return self.tell(
            self.source(process.slot.node),
            r.Quiesced(
                task=task,
                rank=rank,
                attempt=process.attempt,
                generation=it.generation,
                step_version=self.steps.get(task, 0),
                micro_batches=(0, 1),
                buckets_reduced=0,
                num_buckets=1,
            ),
        )

    def reconfigured(self, order: o.Reconfigure, rank: int) -> list[Record]:
        process = self.state.tasks[order.task].ranks[rank]
        return self.tell(
            self.source(process.slot.node),
            r.Reconfigured(
                task=order.task,
                rank=rank,
                attempt=process.attempt,
                generation=order.generation,
                step_version=self.steps.get(order.task, 0),
                kept_micro_batches=(0, 1),
                remaining_micro_batches=(2,),
                reassigned_micro_batches=(2,),
                source=rank,
                received_bytes=0,
                down_s=0.01,
                up_s=0.01,
                settle_s=0.01,
            ),
        )

    def progress(self, task: int, num: int = 1, *, times_s: Sequence[float] = ()) -> list[Record]:
        """Report the progress of `num` iterations, or of one iteration for each time."""
        it, times_s = self.state.tasks[task], tuple(times_s) or (0.2,) * num
        first, num = self.steps.get(task, 0), len(times_s)
        self.steps[task] = first + num
        return self.tell(
            self.source(it.members[0].node),
            r.TaskProgressed(
                task=task,
                generation=it.generation,
                first_iteration=first,
                losses=(2.5,) * num,
                step_s=times_s,
                rate_flops=1e9,
                micro_batches=12,
            ),
        )

    def heal(self, task: int) -> list[Record]:
        """Report progress until the task's last fault counts as passed."""
        it = self.state.tasks[task]
        behind = max(it.max_iteration - self.steps.get(task, 0), 0)
        return self.progress(task, behind + self.state.policy.restart_iterations)

    def running(self, job: JobSpec | None = None) -> int:
        """Submit a task and bring it to training."""
        task = self.submit(job or spec())
        self.obey(self.log[-20:])
        self.progress(task)
        return task


def kinds(records: list[Record]) -> list[str]:
    """The kinds of the decisions among these records."""
    return [record.kind for record in records if record.cause]


def the(kind: type[T], records: list[Record]) -> T:
    """The one decision of this kind."""
    found = [record.body for record in records if isinstance(record.body, kind)]
    assert len(found) == 1, kinds(records)
    return found[0]


def only(kind: type[t.Body], records: list[Record]) -> list[Any]:
    """The records of this kind."""
    return [record for record in records if isinstance(record.body, kind)]


def failed(
    d: Driver, task: int, rank: int, error: str = "closed by peer", *, peer: str = ""
) -> list[Record]:
    """A member's collective failed: it reports the failure, then that it is quiesced."""
    it = d.state.tasks[task]
    process = it.ranks[rank]
    told = d.tell(
        d.source(process.slot.node),
        r.CollectiveFailed(
            task=task,
            rank=rank,
            attempt=process.attempt,
            generation=it.generation,
            iteration=1,
            error=error,
            peer=peer,
        ),
    )
    return told + d.quiesced(task, rank)


def finish(d: Driver, task: int, *, save: bool = True) -> list[Record]:
    """The last iteration is done: the final checkpoint, RankFinished of all members, exit 0."""
    it = d.state.tasks[task]
    done: list[Record] = []
    if save:
        done = d.tell(
            d.source(it.members[0].node),
            r.CheckpointSaved(
                task=task,
                generation=it.generation,
                step_version=50,
                path=f"gen-{it.generation}/iter-50",
                ckpt_bytes=9,
                final=True,
            ),
        )
        done += d.obey(done)
    for member in it.members:
        done += d.tell(
            d.source(member.node),
            r.RankFinished(
                task=task,
                rank=member.rank,
                attempt=member.attempt,
                generation=it.generation,
                step_version=50,
                forward_calls=150,
            ),
        )
    for member in list(it.members):
        done += d.exit(task, member.rank, code=0)
    return done


def drain(d: Driver, node: str) -> list[Record]:
    return d.tell(f"operator/drain-{node}-{d.state.seq}", r.NodeDrained(node=node, reason="fan"))


def task_of(d: Driver, task: int) -> Task:
    return d.state.tasks[task]


def waits_of(d: Driver, task: int) -> WaitExplanation:
    """Why the task has no slots, as computed on request."""
    return pending.explain_waiting(d.state)[task]


def at_rest(d: Driver) -> None:
    """The log verifies, and a second decision in the same state orders nothing."""
    verdict = verify(d.log)
    assert verdict.ok, verdict.words
    before = state_hash(d.state)
    for task in d.state.tasks.values():
        assert list(next_decisions(d.state, task)) == []
    assert state_hash(d.state) == before
    view(d.state)
