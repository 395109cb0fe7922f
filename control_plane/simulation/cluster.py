"""A cluster on paper: nodes carry out what is ordered, each thing in the time that it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ...events.records import orders as o
from ...events.records import reports as r
from ...events.records.envelope import Record
from ...events.records.statuses import CONNECTION_RESET
from ...events.records.types import Body
from ..state.task import Rank, Task
from .accounting import Account, Key
from .engine import LEADER, Engine
from .policies.policy import Costs

# --- What becomes of a cluster's slots, second by second: together it is all the time that they
# had. ---
#
# trained: on them a task did. detection, transition, waiting: they hold processes of a task that
# does not train, for that reason; or, in transition, a newcomer of one that does. idle: nothing
# runs there, whoever may wait for other slots. away: their node is not there.

KINDS: tuple[str, ...] = ("trained", "detection", "transition", "waiting", "idle", "away")


class SlotTime:
    """Counted by processes, each on a slot: nothing here is what the heart believes."""

    def __init__(self) -> None:
        self.slot_s = dict.fromkeys(KINDS, 0.0)
        self.now = dict.fromkeys(KINDS, 0)
        """Slots, by what becomes of them now."""
        self._since_s = 0.0
        self._tasks: dict[int, tuple[int, int, str]] = {}
        """Processes that live, of these how many train, and why the others do not."""

    def begin(self, at_s: float) -> None:
        """From here on it counts."""
        self.slot_s, self._since_s = dict.fromkeys(KINDS, 0.0), at_s

    def end(self, at_s: float) -> None:
        """Add up all."""
        past_s, self._since_s = at_s - self._since_s, at_s
        if past_s:
            for kind, num in self.now.items():
                self.slot_s[kind] += num * past_s

    def moves(self, at_s: float, num: int, kind: str, to: str) -> None:
        """So many slots; of none a node is new."""
        self.end(at_s)
        if kind:
            self.now[kind] -= num
        self.now[to] += num

    def lives(self, at_s: float, task: int, num: int) -> None:
        """So many processes of the task more, or fewer."""
        living, trains, why = self._tasks.get(task, (0, 0, "transition"))
        self._becomes(at_s, task, (living + num, trains, why))
        self.now["idle"] -= num

    def does(self, at_s: float, task: int, trains: int, why: str) -> None:
        """On so many slots the task trains from now; on none, for this reason."""
        known = self._tasks.get(task, (0, 0, "transition"))
        if known[1:] != (trains, why):
            self._becomes(at_s, task, (known[0], trains, why))

    def _becomes(self, at_s: float, task: int, new: tuple[int, int, str]) -> None:
        self.end(at_s)
        old = self._tasks.get(task, (0, 0, "transition"))
        for sign, (living, trains, why) in ((-1, old), (1, new)):
            self.now["trained"] += sign * trains
            self.now["transition" if trains else why] += sign * (living - trains)
        self._tasks[task] = new

Said = TypeVar("Said", bound=Body)
SLACK_RATIO = 1 + 1e-9
"""An iteration is done when it is: sums of seconds are not exact."""


@dataclass
class PaperNode:
    """A node, in its newest incarnation."""

    name: str
    num_slots: int
    incarnation: int = 0
    up: bool = False
    processes: dict[Key, bool] = field(default_factory=dict[Key, bool])
    """Those that live, and whether they have the state of their task."""
    ended: set[Key] = field(default_factory=set[Key])
    """Those that do not, of which nobody was told."""

    @property
    def source(self) -> str:
        return f"{self.name}/{self.incarnation}"

    def runs(self, incarnation: int, key: Key) -> bool:
        """Whether it is still in this incarnation, and the process lives."""
        return self.up and self.incarnation == incarnation and key in self.processes

    def owes(self, _: int, key: Key) -> bool:
        """Whether nobody was told that the process has ended, and somebody is to be."""
        return key in self.ended


Saying = tuple[Key, PaperNode, Callable[[], Body]]
"""A process of a task, on its node, and what it will say together with others."""


class Paper:
    """Nodes by name; `account` is told what becomes of the tasks that run on them."""

    def __init__(self, engine: Engine, costs: Costs, account: Account) -> None:
        self.engine, self.costs, self.account = engine, costs, account
        self.jobs = account.jobs
        self.slot_time = SlotTime()
        self.nodes: dict[str, PaperNode] = {}
        self._pid = 0

    # --- nodes --------------------------------------------------------------------------------
    def join(self, name: str, num_slots: int) -> None:
        """Its agent starts; what an older one ran is gone."""
        if name not in self.nodes:
            self.nodes[name] = PaperNode(name, num_slots)
            self.slot_time.moves(self.engine.now_s, num_slots, "", "away")
        node = self.nodes[name]
        self._empty(node)
        node.incarnation, node.up = node.incarnation + 1, True
        self.slot_time.moves(self.engine.now_s, node.num_slots, "away", "idle")
        self.engine.tell(node.source, r.NodeJoined(
            node=name, incarnation=node.incarnation, host=f"{name}.paper", pid=1,
            num_slots=node.num_slots))

    def leave(self, name: str) -> None:
        """Its agent stops on purpose, and its processes with it."""
        node = self.nodes[name]
        self._empty(node)
        self.engine.tell(node.source, r.NodeLeft(node=name, incarnation=node.incarnation,
                                                 reason="it leaves"))

    def fall(self, name: str, silence_s: float, hurt: Collection[int]) -> None:
        """The node is gone, and says nothing of it: in so many seconds that is told. `hurt`: tasks
        whose peers will tell; of a command that was to start there since, they do at once."""
        node = self.nodes[name]
        self._empty(node)
        incarnation = node.incarnation

        def silent() -> None:
            if not node.up and node.incarnation == incarnation:
                self._is_silent(node, silence_s)
                there = self.engine.state.nodes[name].occupants.values()
                for number in sorted({one.task for one in there}):
                    if number not in hurt and not self._task(number).heals_in_memory:
                        self._peer_sees(number, self.engine.now_s)

        self.engine.later(silence_s, silent)

    def _is_silent(self, node: PaperNode, silence_s: float) -> None:
        if self.engine.state.nodes[node.name].health == "healthy":  # it was not told yet
            self.engine.tell(LEADER, r.NodeUnreachable(
                node=node.name, incarnation=node.incarnation, silence_s=silence_s))

    def _empty(self, node: PaperNode) -> None:
        """All is gone that it had in memory."""
        for key in [*node.processes]:
            self._ends(node, key)
        if node.up:
            self.slot_time.moves(self.engine.now_s, node.num_slots, "idle", "away")
        node.up = False
        node.ended.clear()
        for job in self.jobs.values():
            job.lose(node.source)

    def _ends(self, node: PaperNode, key: Key) -> None:
        if node.processes.pop(key, None) is not None:
            self.slot_time.lives(self.engine.now_s, key[0], -1)

    def say(self, name: str, in_s: float, body: Body) -> None:
        """What occurs now the node says then, if it is still up, and in the same incarnation."""
        node = self.nodes[name]
        incarnation, now_s = node.incarnation, self.engine.now_s

        def tell() -> None:
            if node.up and node.incarnation == incarnation:
                self.engine.tell(node.source, body, now_s)

        self.engine.later(in_s, tell)

    # --- orders -------------------------------------------------------------------------------
    def carry_out(self, records: Sequence[Record]) -> None:
        """What the orders among these ask for."""
        starting, ending = dict[int, list[Saying]](), dict[int, list[Saying]]()
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
                case o.PublishCheckpoint() as order:
                    self.say(order.nodes[0], 0.0, r.CheckpointPublished(
                        task=order.task, order=record.seq, path=order.path))
                case _:
                    pass
        for said in starting.values():
            self._all(self.costs.start_s, said)
        for said in ending.values():
            self._all(0.0, said, PaperNode.owes)

    def _start(self, order: o.StartRank, starting: dict[int, list[Saying]]) -> None:
        """`starting`: by task, what processes of commands will say, which all start together."""
        node, key = self.nodes[order.slot.node], (order.task, order.rank, order.attempt)
        if not node.up:
            return
        self._pid += 1
        node.processes[key] = False
        self.slot_time.lives(self.engine.now_s, order.task, 1)
        started = r.RankStarted(task=order.task, rank=order.rank, attempt=order.attempt,
                                node=node.name, pid=self._pid, log_path="/paper")
        if order.spec.training is None:
            self.jobs[order.task].holders.add(node.source)
            starting.setdefault(order.task, []).append((key, node, partial(_said, started)))
            return
        ready = r.RankReady(
            task=order.task, rank=order.rank, attempt=order.attempt,
            endpoint=f"{node.name}.paper:{self._pid}", num_params=0, state_bytes=0,
            iteration_flops=0.0, data_digest="paper")
        self._of(key, node, 0.0, partial(_said, started))
        self._of(key, node, self.costs.start_s, partial(_said, ready))

    def _of(self, key: Key, node: PaperNode, in_s: float, made: Callable[[], Body],
            occurred_s: float | None = None) -> None:
        """Said of a process, if it still lives then."""
        incarnation = node.incarnation

        def tell() -> None:
            if node.runs(incarnation, key):
                self.engine.tell(node.source, made(), occurred_s)

        self.engine.later(in_s, tell)

    def _all(self, in_s: float, said: Sequence[Saying],
             may: Callable[[PaperNode, int, Key], bool] = PaperNode.runs) -> None:
        """What each of these processes says, if it still lives then, in this order."""
        held = [(node, node.incarnation, key, made) for key, node, made in said]

        def tell() -> None:
            for node, incarnation, key, made in held:
                if may(node, incarnation, key):
                    node.ended.discard(key)
                    self.engine.tell(node.source, made())

        self.engine.later(in_s, tell)

    def end(self, node: PaperNode, key: Key, in_s: float, *, status: str = "") -> None:
        """A process ends now, and that is told in so many seconds."""
        self._ends(node, key)
        node.ended.add(key)
        now_s = self.engine.now_s

        def tell() -> None:
            if key in node.ended:  # it was not told when another asked
                node.ended.remove(key)
                self.engine.tell(node.source, _exited(key, status), now_s)

        self.engine.later(in_s, tell)

    def fails(self, node: PaperNode, key: Key, in_s: float, status: str) -> None:
        """A collective fails under this process, and it says so in so many seconds."""
        self._of(key, node, in_s, partial(
            self._failed, key, self._task(key[0]).generation, status), self.engine.now_s)

    def _failed(self, key: Key, generation: int, status: str) -> Body:
        return r.CollectiveFailed(
            task=key[0], rank=key[1], attempt=key[2], generation=generation,
            iteration=self.jobs[key[0]].iteration, error=status or "closed by peer", status=status)

    def peer_tells(self, number: int, in_s: float) -> None:
        """One that lives in so many seconds sees then that a peer is gone now: a member holds, a
        command's process ends."""
        task, now_s = self._task(number), self.engine.now_s
        began = task.rounds, task.generation

        def tell() -> None:
            if (task.rounds, task.generation) == began:
                self._peer_sees(number, now_s)

        self.engine.later(in_s, tell)

    def _peer_sees(self, number: int, occurred_s: float) -> None:
        task = self._task(number)
        lives = next((one for one in self._ranks(task) if one[1] in one[0].processes), None)
        # Where none does, one that ended before is looked at.
        found = lives or next((one for one in self._ranks(task) if one[1] in one[0].ended), None)
        if found is None:  # nor is there a node that would obey
            for node in [one[0] for one in self._ranks(task)] if not task.heals_in_memory else ():
                if not node.up:
                    self._is_silent(node, 0.0)
            return
        node, key = found
        if lives and task.heals_in_memory:
            self.engine.tell(node.source, self._failed(key, task.generation, ""), occurred_s)
            return
        self._ends(node, key)
        node.ended.discard(key)
        self.engine.tell(node.source, _exited(key, CONNECTION_RESET), occurred_s)

    def _ranks(self, task: Task) -> Iterator[tuple[PaperNode, Key]]:
        for number in sorted(task.ranks):
            rank = task.ranks[number]
            yield self.nodes[rank.slot.node], (task.id, number, rank.attempt)

    def _stop(self, order: o.StopRank, ending: dict[int, list[Saying]]) -> None:
        """An agent knows at once of a process that ended before, too. `ending`: by task, what is
        said of those that end together."""
        node, key = self.nodes[order.nodes[0]], (order.task, order.rank, order.attempt)
        if node.up:
            self._ends(node, key)
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
                task=task.id, rank=rank.rank, attempt=rank.attempt, generation=order.generation,
                step_version=job.iteration, micro_batches=(), buckets_reduced=0, num_buckets=1)

        self.engine.later(in_s, lambda: self._halt(order))
        leaving = [task.ranks[number] for number in order.ranks]
        self._all(in_s, [((task.id, rank.rank, rank.attempt), self.nodes[rank.slot.node],
                          quiesced(rank)) for rank in leaving])

    def _halt(self, order: o.Quiesce) -> None:
        """Its members have come to where they leave their generation."""
        if self._task(order.task).generation == order.generation:
            self.catch_up(order.task)
            self.account.stands(self.engine.now_s, order.task)

    def catch_up(self, number: int) -> None:
        """Its last iteration is told, as it was when it was done: nothing stood until then."""
        task, job, now_s = self._task(number), self.jobs[number], self.engine.now_s
        job.settle(now_s)
        speaker = next((member for member in task.members if (
            number, member.rank, member.attempt) in self.nodes[member.node].processes), None)
        if job.rate_flops and job.iteration and speaker is not None:
            self.engine.tell(self.nodes[speaker.node].source, r.TaskProgressed(
                task=number, generation=task.generation, first_iteration=job.iteration - 1,
                losses=(0.0,), step_s=(job.iteration_s,), rate_flops=job.rate_flops,
                micro_batches=1), now_s - job.since_boundary_s)

    def _reconfigure(self, order: o.Reconfigure) -> None:
        job = self.jobs[order.task]
        has = {member.rank: self.nodes[member.node].processes.get(
            (order.task, member.rank, member.attempt), False) for member in order.members}
        giver = next((rank for rank, state in has.items() if state), -1)
        if giver < 0:
            self.account.undo(order.task, job.fall_back(self.engine.now_s))
        said = list[Saying]()
        for member in order.members:
            origin = "own" if has[member.rank] else "peer" if giver >= 0 else job.origin
            told = r.Reconfigured(
                task=order.task, rank=member.rank, attempt=member.attempt,
                generation=order.generation, step_version=job.iteration, kept_micro_batches=(),
                remaining_micro_batches=(), reassigned_micro_batches=(),
                source=member.rank if has[member.rank] else giver, received_bytes=0, down_s=0.0,
                up_s=0.0, settle_s=self.costs.regroup_s, origin=origin)
            said.append(((order.task, member.rank, member.attempt), self.nodes[member.node],
                         partial(_said, told)))
        self._all(self.costs.regroup_s, said)

    def _resume(self, order: o.Resume) -> None:
        task, job = self._task(order.task), self.jobs[order.task]
        for member in task.members:
            key = (order.task, member.rank, member.attempt)
            processes = self.nodes[member.node].processes
            if key in processes:
                processes[key] = True
            else:
                return  # it is gone since, and nobody was told
        job.holders = {self.nodes[member.node].source for member in task.members}
        self.account.goes_on(order.task)
        self.account.look(self.engine.now_s, order.task)
        first = task.members[0]
        key, node = (task.id, first.rank, first.attempt), self.nodes[first.node]
        if not job.rate_flops:
            return  # so few slots earn nothing
        first_s = job.until_boundary_s(self.engine.now_s)
        forgiven = 1 + self.engine.state.policy.restart_iterations
        for begin, end in ((0, 1), (1, forgiven)):
            self._of(key, node, (first_s + (end - 1) * job.iteration_s) * SLACK_RATIO,
                     self._progress(order, begin, end))

    def _progress(self, order: o.Resume, begin: int, end: int) -> Callable[[], Body]:
        """Of the iterations of this generation from `begin` to `end`."""
        job = self.jobs[order.task]
        first, rate_flops, num = job.iteration + begin, job.rate_flops, end - begin
        return lambda: r.TaskProgressed(
            task=order.task, generation=order.generation, first_iteration=first,
            losses=(0.0,) * num, step_s=(job.iteration_s,) * num, rate_flops=rate_flops,
            micro_batches=1)


def _said(body: Said) -> Said:
    return body


def _exited(key: Key, status: str) -> r.RankExited:
    return r.RankExited(
        task=key[0], rank=key[1], attempt=key[2], pid=1, exit_code=1, signal=None, status=status,
        rule="on paper" if status else "")
