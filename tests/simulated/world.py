"""A simulated cluster with its log, leaders, nodes and users, from start to end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from simulated.chaos import Chaos
from simulated.cluster import SimulatedCluster
from simulated.failing_log import AgentLog, LeaderLog, Server, WitnessedLog
from simulated.log_link import NO_FAULTS, SimulatedLogLink
from simulated.witness import Witness
from unicron.control_plane.incidents.hangs import STALLED
from unicron.control_plane.service.coordinator import Coordinator
from unicron.control_plane.service.dead_letters import DeadLetters
from unicron.control_plane.state.cluster import ClusterState, state_hash
from unicron.control_plane.state.task import Task
from unicron.control_plane.throughput.layout_search import modelled
from unicron.events.errors import Ambiguous, Conflict, Fenced, SpecError, Unavailable
from unicron.events.log.port import Rejected
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records import reports as r
from unicron.events.records.decisions import IncidentEscalated, IncidentOpened
from unicron.events.records.envelope import Record
from unicron.events.records.orders import StopRank
from unicron.events.records.types import Body
from unicron.events.spec import job
from unicron.events.spec.policy import Policy

MODEL = {
    "gpu": "A100-80",
    "num_layers": 2,
    "hidden": 64,
    "num_heads": 2,
    "sequence": 64,
    "vocabulary": 128,
    "global_batch": 8,
}
"""The model that some commands declare."""

START_S = 1_700_000_000.0
PEACE_S_MAX = 6_000.0
"""A hanging task of one rank ends only after a collective's timeout."""
NEWS_S = 1.0
"""How long after a rank continues its agent may not have reported that yet."""
REST_S = 20.0
"""Seconds after the last task in which late messages still arrive."""
POLICY = Policy(
    start_s_max=20.0,
    quiesce_s_max=10.0,
    boundary_s_max=30.0,
    reconfigure_s_max=30.0,
    stop_s_max=5.0,
    restarts_max=100_000,
    replace_after_s=15.0,
    allow_inject=True,
    quarantine_s=20.0,
)


class NoLetters(DeadLetters):
    """Whatever happens to them, no simulated agent says what it may not say."""

    def keep(self, rejected: Sequence[Rejected]) -> None:
        assert not rejected, rejected


class World:
    """One simulated cluster. `faults` lists what happened in it, to explain a failed seed."""

    def __init__(self, seed: int, *, only_leaders: bool = False) -> None:
        self.seed, self.only_leaders = seed, only_leaders
        self.rng = random.Random(f"world {seed}")
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._broken)
        self.server, self.witness, self.policy = Server(), Witness(), POLICY
        self.log = WitnessedLog(self.clock, self._appended)
        self.links: dict[str, SimulatedLogLink] = {}
        self.cluster = SimulatedCluster(seed, port_of=self._port_of, clock=self.clock)
        self.leaders: dict[str, tuple[Coordinator, LeaderLog, asyncio.Task[None]]] = {}
        self._life: asyncio.Task[list[Record]] | None = None
        self._found: BaseExceptionGroup[BaseException] | None = None
        self._trouble = False
        self.num_leaders = 0
        self.answered: dict[str, int] = {}
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.chaos = Chaos(self)
        self.nodes = {f"n{i}": self.rng.randint(1, 3) for i in range(self.rng.randint(2, 5))}
        if only_leaders:
            self.nodes = {"n0": 2, "n1": 2}
        self._limit(random.Random(f"limits {seed}"))
        self._spare(random.Random(f"spares {seed}"))

    def _limit(self, rng: random.Random) -> None:
        """In some worlds plans are limited; each task alone fits into its team's quota."""
        self._teams = ["", "red", "blue"] if rng.random() < 0.3 else [""]
        self._priorities = [0, 1, 2] if rng.random() < 0.2 else [0]
        most = max(6, sum(self.nodes.values()) // 2)
        self.policy = replace(
            self.policy,
            moves_max=rng.choice([0, 1]) if rng.random() < 0.3 else None,
            quotas={"red": most} if len(self._teams) > 1 else {},
            floor=rng.random() < 0.2,
            alpha=rng.choice([0.5, 1.0, 2.0]) if rng.random() < 0.25 else 0.0,
        )

    def _spare(self, rng: random.Random) -> None:
        """In some worlds hot spares pay: faults are frequent, and transitions expensive."""
        if rng.random() < 0.3:
            self.policy = replace(
                self.policy,
                hot_spare=True,
                repair_s=rng.choice([5.0, 300.0, 21_300.0]),
                transition_s=rng.choice([10.0, 60.0, 600.0]),
                mtbf_faults=1e3,
                mtbf_gpu_s=sum(self.nodes.values()) * rng.choice([10.0, 100.0, 1e4]),
            )

    def _broken(self, loop: object, context: dict[str, object]) -> None:
        self.cluster.net.never(f"{context.get('message')}: {context.get('exception')!r}")

    def clock(self) -> float:
        return START_S + self.loop.time()

    def tell(self, fault: str) -> None:
        """Count and log a fault."""
        self.counts[fault] += 1
        self.faults.append(f"{self.loop.time():.3f} {fault}")

    def _appended(self, records: list[Record]) -> None:
        for record in records:
            if isinstance(record.body, r.RankAdopted):
                task = self.witness.state.tasks.get(record.body.task)
                self.counts["late scripts taken"] += task is not None and task.may_adopt
            self._is_gone(record)
            self.saw(record, self.witness.see(record))

    def _is_gone(self, record: Record) -> None:
        """Check that a node that is lost because no other reaches it has died: neither a cut link
        nor a stopped agent is enough."""
        body, state = record.body, self.witness.state
        if not isinstance(body, IncidentOpened | IncidentEscalated) or not body.node:
            return
        node = state.nodes.get(body.node)
        if node is not None and node.unreached_seq in body.evidence and node.unreached_seq:
            self.counts["nodes lost by probes"] += 1
            if self.cluster.net.answers.get(node.name) == node.incarnation:
                self.cluster.net.never(f"{node.name} is lost, but lives: seq {record.seq}")

    def saw(self, record: Record, row: str) -> None:
        """Called for each appended record, with its row of the transition table (or "")."""
        self.chaos.see(record)
        if not isinstance(record.body, StopRank):
            return
        if record.body.why == f"it {STALLED}":
            self._stands(record.body)
        elif record.body.why == "it did not get ready in time":
            self._prepares(record.body)

    def _stands(self, order: StopRank) -> None:
        """Check a rank that is ended as hung: it is stalled, or its agent cannot have reported yet
        that it continues."""
        for agent, process in self.cluster.running():
            rank, told = process.rank, process.order
            if rank is None or (told.task, told.rank, told.attempt) != (
                order.task,
                order.rank,
                order.attempt,
            ):
                continue
            news = any(
                isinstance(report.body, r.RankUnstalled)
                and report.body.task == order.task
                and report.body.rank == order.rank
                for report in agent.spool
            )
            late = self.loop.time() - rank.goes_on_s < NEWS_S or not agent.sees
            self.counts["hung ranks ended"] += 1
            if not (rank.stopped_s or news or late):
                self.cluster.net.never(f"{order} ends a rank that has continued")

    def _prepares(self, order: StopRank) -> None:
        """Check a rank that is ended because it was not ready: its process is no script's, unless
        its agent cannot have reported its start."""
        for agent, process in self.cluster.running():
            told = process.order
            if (told.task, told.rank, told.attempt) == (order.task, order.rank, order.attempt):
                self.counts["late starts ended"] += 1
                if told.spec.loop is not None and not any(
                    isinstance(report.body, r.RankStarted)
                    and report.body.task == order.task
                    and report.body.rank == order.rank
                    for report in agent.spool
                ):
                    self.cluster.net.never(f"{order} ends a script that prepares")

    def _port_of(self, node: str) -> RedisLog:
        if node not in self.links:
            self.links[node] = SimulatedLogLink(
                AgentLog(self.log, self.server), random.Random(f"{self.seed} {node}")
            )
        return self.links[node]

    def tasks_running(self, node: str = "") -> list[int]:
        """Tasks that have a process (on this node, if given)."""
        return sorted(
            {
                process.order.task
                for agent, process in self.cluster.running()
                if node in ("", agent.node)
            }
        )

    # --- leaders ---------------------------------------------------------------------------------
    def start_leader(self) -> None:
        self.num_leaders += 1
        name = f"leader-{self.num_leaders}"
        port = LeaderLog(self.log, self.server, self.rng, lambda: self._die_here(name))
        port.trouble = self._trouble
        coordinator = Coordinator(
            port,
            clock=self.clock,
            nonce=name,
            code="paper",  # type: ignore[arg-type]
            policy=self.policy,
            jitter=random.Random(f"{self.seed} {name}"),
            dead_letters=NoLetters(),
            room=self.chaos.room,
        )
        task = asyncio.create_task(self._lead(name, coordinator), name=name)
        self.leaders[name] = coordinator, port, task

    async def _lead(self, name: str, coordinator: Coordinator) -> None:
        try:
            await coordinator.run()
        except (Fenced, Conflict, Ambiguous):
            self.leaders.pop(name, None)
        except BaseExceptionGroup as group:
            self._found = group
            if self._life is not None:
                self._life.cancel()
            raise

    def kill_leader(self, name: str) -> None:
        found = self.leaders.pop(name, None)
        if found:
            found[2].cancel()

    def lose_leaders(self) -> None:
        """Kill every leader."""
        for name in list(self.leaders):
            self.kill_leader(name)

    async def _die_here(self, name: str) -> None:
        self.kill_leader(name)
        await asyncio.sleep(1e9)

    def leader_ports(self) -> list[LeaderLog]:
        return [port for _, port, _ in self.leaders.values()]

    def trouble(self, on: bool) -> None:
        """Set whether leaders lose calls and replies."""
        self._trouble = on
        for port in self.leader_ports():
            port.trouble = on

    def coordinator(self) -> Coordinator | None:
        return next((c for c, _, _ in reversed(self.leaders.values()) if c.leading), None)

    def _spread(self, data: dict[str, Any], rng: random.Random) -> None:
        """Give some tasks layouts, if one of their sizes allows a layout."""
        if rng.random() > 0.4:
            return
        layouts = {
            "tensor": rng.choice([[1], [2], [1, 2]]),
            "pipeline": rng.choice([[1], [1], [2], [1, 2, 3]]),
            "optimizer": rng.choice(["whole", "whole", "sharded", "mirrored"]),
        }
        train = {**data["train"], "parallel": layouts, "model": {"num_layers": 6}}
        try:
            job.parse({**data, "train": train})
        except SpecError:
            return
        data["train"] = train
        self.counts["tasks with layouts"] += 1

    def _in_a_script(self, data: dict[str, Any], rng: random.Random) -> None:
        """In some worlds scripts train half of the tasks: they adopt soon, late or never."""
        has_scripts = random.Random(f"late {self.seed}").random() > 0.6
        if not has_scripts or rng.random() > 0.5 or self.only_leaders:
            return
        train = data["train"]
        loop = {
            "micro_batches": train["batch"]["global"] // train["batch"]["micro"],
            **{
                name: train[name]
                for name in ("iterations", "output", "checkpoint_every", "copy_every", "parallel")
                if name in train
            },
        }
        made = {key: value for key, value in data.items() if key != "train"} | {
            "command": ["python", "train.py"],
            "heal": "in-memory",
            "loop": loop,
        }
        try:
            job.parse(made)
        except SpecError:
            return
        del data["train"]
        data.update(made)
        self.counts["tasks in scripts"] += 1

    # --- operators -------------------------------------------------------------------------------
    async def write(self, key: str, body: Body) -> int:
        """Write as a client does: repeat the request with the same key until it is answered."""
        while True:
            leader = self.coordinator()
            if leader:
                try:
                    async with asyncio.timeout(5.0):
                        self.answered[key] = await leader.write(key, body)
                        return self.answered[key]
                except (TimeoutError, Unavailable):
                    pass
            await asyncio.sleep(0.5)

    async def ask(self, what: str, body: Body) -> int:
        """Write a request under a new key."""
        self.counts["requests"] += 1
        return await self.write(f"{what}-{self.counts['requests']}", body)

    def job(self, number: int) -> r.TaskSubmitted:
        """A task of a random kind; one in twenty is larger than the cluster."""
        rng, total = self.rng, sum(self.nodes.values())
        high = rng.randint(1, min(6, total))
        low = rng.randint(1, high)
        if rng.random() < 0.05 and not self.only_leaders:
            low = high = total + 1
        data: dict[str, Any] = {
            "apiVersion": job.API_VERSION,
            "name": f"task-{number}",
            "weight": rng.choice([0.3, 0.5, 1.0, 1.0, 2.0, 5.0]),
            "slots": {"min": low, "max": high},
            "team": rng.choice(self._teams),
            "priority": rng.choice(self._priorities),
        }
        if (kind := rng.random()) < 0.15 and low < high:
            data["slots"] = {"sizes": sorted({low, high, rng.randint(low, high)})}
        elif kind < 0.3 and high >= 2:
            data["slots"] = {"multiple_of": 2, "max": high - high % 2}
        if (floors := random.Random(f"{self.seed} floor {number}")).random() < 0.2:
            slots = data["slots"]
            sizes = slots.get("sizes") or [slots.get("min", 2), slots["max"]]
            slots["floor"] = floors.choice([sizes[0], sizes[-1]])
        if rng.random() < 0.3:
            data["throughput"] = {
                x: 1e9 * x ** rng.choice([0.3, 0.8, 1.0])
                for x in range(min(low, high - high % 2) or 1, high + 1)
            }
        if rng.random() < 0.12 and not self.only_leaders:
            data["command"] = ["sleep", "10"]
            if random.Random(f"{self.seed} model {number}").random() < 0.6:
                data["model"] = MODEL
        else:
            micro = rng.randint(1, 2)
            data["train"] = {
                "batch": {"global": micro * rng.randint(high, max(high, 12)), "micro": micro},
                "iterations": rng.randint(5, 100),
                "output": f"/out/{number}",
                "seed": rng.randint(1, 99),
                "checkpoint_every": rng.choice([0, 0, 3, 7]),
                "copy_every": rng.choice([0, 1, 2, 5]),
            }
            self._spread(data, random.Random(f"{self.seed} layouts {number}"))
            self._in_a_script(data, random.Random(f"{self.seed} scripts {number}"))
        parsed = job.parse(data)
        return r.TaskSubmitted(
            spec=parsed, modelled=modelled(parsed.model, 8) if parsed.model is not None else None
        )

    # --- a whole life ----------------------------------------------------------------------------
    async def live(self) -> list[Record]:
        """Run faults, then none until all tasks have ended; returns the log.

        The witness raises inside the leader that appends. That error cancels this task, because
        a client would otherwise wait for its answer for ever.
        """
        self._life = asyncio.current_task()
        try:
            return await self._live()
        except asyncio.CancelledError:
            if self._found is not None:
                raise self._found from None
            raise

    async def _live(self) -> list[Record]:
        self.begin()
        num_jobs = 1 if self.only_leaders else self.rng.choice([1, 2, 3, 4, 6])
        writers = [asyncio.create_task(self._submit(i)) for i in range(num_jobs)]
        await self.chaos.run(self.rng.uniform(20, 120), only_leaders=self.only_leaders)
        await self.make_peace()
        for writer in writers:
            await writer
        return await self.finish()

    def begin(self) -> None:
        """Start a leader and all nodes."""
        self.start_leader()
        for node, num_slots in self.nodes.items():
            self.cluster.boot(node, num_slots)

    async def _submit(self, number: int) -> None:
        await asyncio.sleep(self.rng.uniform(0, 60) if number else 0)
        await self.write(f"submit-{number}", self.job(number))

    async def make_peace(self) -> None:
        """End all faults, pauses, drains and quarantines."""
        self.chaos.end()
        self.server.start()
        self.trouble(False)
        for node, num_slots in self.nodes.items():
            self.links[node].cut, self.links[node].link_faults = False, NO_FAULTS
            if self.cluster.is_up(node) and node in self.chaos.left:
                self.cluster.crash(node)
            if not self.cluster.is_up(node):
                self.cluster.boot(node, num_slots)
            self.cluster.agents[node].go_on()
        self.chaos.noise.end()
        self.lose_leaders()
        self.policy = replace(self.policy, observe=False)
        self.chaos.room.is_full = False
        self.start_leader()
        if not self.only_leaders:
            await self.ask("unfreeze", r.HealingResumed())
            for node in self.nodes:
                await self.ask("undrain", r.NodeUndrained(node=node))
                await self.ask("lift", r.QuarantineLifted(node=node))

    async def finish(self) -> list[Record]:
        """Wait until all tasks have ended, then stop the cluster; returns the log."""
        peace_s = self.loop.time()
        while self._unfinished(await self._settled()):
            state = await self._settled()
            unfinished = "; ".join(
                f"task {t.id} is {t.phase} in generation {t.generation} {t.why}"
                for t in self._unfinished(state)
            )
            assert self.loop.time() - peace_s < PEACE_S_MAX, f"without new faults, {unfinished}"
            for _ in range(30):
                await asyncio.sleep(1.0)
                if not self._unfinished(await self._settled()):
                    break
            else:
                await self._repair()
        for task in list((await self._settled()).tasks.values()):
            if task.phase != "ended":
                self.counts["tasks too large"] += 1
                await self.ask("cancel", r.TaskCancelRequested(task=task.id, reason="too large"))
        await asyncio.sleep(REST_S)
        self.last_state = await self._settled()
        self.last_hash = state_hash(self.last_state)
        records = await self.log.read(after=0, num_max=1_000_000)
        self.counts["virtual s"] += round(self.loop.time())
        self.cluster.stop()
        self.lose_leaders()
        await asyncio.sleep(0)
        return records

    async def _settled(self) -> ClusterState:
        while (leader := self.coordinator()) is None:
            await asyncio.sleep(0.1)
        return await leader.settled()

    def _unfinished(self, state: ClusterState) -> list[Task]:
        """Tasks that must still end: all but those that never fit."""
        total = sum(self.nodes.values())
        return [
            task
            for task in state.tasks.values()
            if task.phase != "ended"
            and task.throughput is not None
            and any(
                rate > 0 and size <= total
                for size, rate in zip(
                    task.throughput.sizes, task.throughput.rates_flops, strict=True
                )
            )
        ]

    async def _repair(self) -> None:
        """Restart the agents of nodes with disabled slots, as an operator does after a repair, and
        boot nodes that are down: an agent may carry out an InjectFault after the last fault."""
        state = await self._settled()
        if all(task.phase in ("idle", "ended") for task in state.tasks.values()):
            for node, num_slots in self.nodes.items():
                if self.cluster.is_up(node) and state.nodes[node].slots_disabled:
                    self.cluster.crash(node)
                if not self.cluster.is_up(node):
                    self.cluster.boot(node, num_slots)
