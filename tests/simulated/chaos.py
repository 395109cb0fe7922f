"""Random faults and operator actions in a simulated cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from simulated.agent import SimulatedAgent, SimulatedProcess
from simulated.log_link import NO_FAULTS, LinkFaults
from simulated.noise import Noise
from unicron.control_plane.service.room import Room
from unicron.events import file_space
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

if TYPE_CHECKING:
    from simulated.world import World

HEAVY_FAULTS = LinkFaults(lost=0.1, doubled=0.1, delayed=0.2, unanswered=0.1, repeated=0.2)
AIMED_AT = (
    "Quiesce",
    "Quiesced",
    "Reconfigure",
    "Reconfigured",
    "Resume",
    "StartRank",
    "RankReady",
    "PublishCheckpoint",
    "CheckpointSaved",
    "TaskPlaced",
    "StopRank",
)
"""Record kinds at which an aimed fault can strike: in the instant in which one is appended."""
Fault = Callable[[], Awaitable[None]]
DISK_SEED_MIN = 60
"""Other tests know what happens in the worlds before."""


class SimulatedRoom(Room):
    """Of the log's disk; nothing is measured."""

    def __init__(self) -> None:
        super().__init__(Path("/log"))
        self.is_full = False

    async def look(self) -> None:
        self.see(file_space.Room(0 if self.is_full else 1 << 40))


class Chaos:
    """Seeded faults and operator actions. Each async method runs one of them from start to end."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self._tasks: list[asyncio.Task[None]] = []
        self._aims: list[tuple[str, Callable[[int], None]]] = []
        self.left: set[str] = set()
        self.noise = Noise(world)
        self.room = SimulatedRoom()

    def kinds(self, *, only_leaders: bool) -> list[Fault]:
        """The faults to choose from; a fault that is listed twice is twice as likely."""
        leaders: list[Fault] = [self.kill_leader, self.doom_leader, self.rival, self.trouble]
        if only_leaders:
            return leaders
        nodes: list[Fault] = [
            self.crash,
            self.cut,
            self.storm,
            self.leave,
            self.stop_agent,
            self.stop_server,
            self.lose_copies,
        ]
        ranks: list[Fault] = [
            self.kill_rank,
            self.kill_rank,
            self.raise_in,
            self.blip,
            self.stop_rank,
            self.aim,
            self.aim,
            self.aim,
            self.wipe,
            self.hang,
            self.hang,
            self.jam,
            self.slow,
        ]
        if random.Random(f"stalls {self.world.seed}").random() < 0.25:  # mostly stalls
            return [
                self.hang,
                self.hang,
                self.hang,
                self.jam,
                self.slow,
                self.slow,
                self.kill_leader,
                self.cut,
                self.storm,
                self.stop_agent,
                self.kill_rank,
            ]
        people: list[Fault] = [
            self.weigh,
            self.drain,
            self.freeze,
            self.observe,
            self.cancel,
            self.inject,
        ]
        return [*leaders, *nodes, *ranks, *ranks, *people, *self.noise.kinds()]

    async def run(self, until_s: float, *, only_leaders: bool) -> None:
        """Start one fault after the other; in one of ten cases two at the same instant."""
        rate_s = self.rng.choice([1.0, 3.0, 8.0])
        kinds = self.kinds(only_leaders=only_leaders)
        disk = random.Random(f"disk {self.world.seed}")
        if self.world.seed >= DISK_SEED_MIN and disk.random() < 0.25:
            self._tasks.append(asyncio.create_task(self._fill_disk(disk, until_s), name="disk"))
        while self.world.loop.time() < until_s:
            await asyncio.sleep(self.rng.expovariate(1 / rate_s))
            for _ in range(2 if self.rng.random() < 0.1 else 1):
                self.begin(self.rng.choice(kinds))

    async def _fill_disk(self, rng: random.Random, until_s: float) -> None:
        """In some worlds the disk of the log is nearly full from time to time."""
        while self.world.loop.time() < until_s:
            await asyncio.sleep(rng.expovariate(1 / 30.0))
            self.world.tell("fill_disk")
            self.room.is_full = True
            await asyncio.sleep(rng.uniform(0, 40))
            self.room.is_full = False

    def begin(self, fault: Fault, *, aimed: str = "") -> None:
        """Start the fault now, concurrently with everything else."""
        self.world.tell(aimed or fault.__name__)  # type: ignore[attr-defined]
        self._tasks.append(asyncio.create_task(fault(), name=f"fault {len(self._tasks)}"))

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._aims = []

    def see(self, record: Record) -> None:
        """Strike with the faults that are aimed at the kind of this appended record."""
        task = getattr(record.body, "task", 0)
        for aim in [aim for aim in self._aims if aim[0] == record.kind]:
            self._aims.remove(aim)
            self.world.loop.call_soon(aim[1], task)

    # --- leaders and the log -------------------------------------------------------------------
    async def kill_leader(self) -> None:
        self.world.lose_leaders()
        await asyncio.sleep(self.rng.uniform(0, 10))
        self.world.start_leader()

    async def doom_leader(self) -> None:
        for port in self.world.leader_ports():
            port.doom = self.rng.choice(["before", "after"])
        await asyncio.sleep(self.rng.uniform(2, 8))
        self.world.start_leader()

    async def rival(self) -> None:
        self.world.start_leader()

    async def trouble(self) -> None:
        self.world.trouble(True)
        await asyncio.sleep(self.rng.uniform(1, 10))
        self.world.trouble(False)

    async def stop_server(self) -> None:
        await self.world.server.stop(self.rng.uniform(1, 60), refuses=self.rng.random() < 0.5)

    # --- ranks -----------------------------------------------------------------------------------
    async def kill_rank(self) -> None:
        running = self.world.cluster.running()
        if running:
            agent, process = self.rng.choice(running)
            self.world.witness.hit(process.order.task, "rank killed")
            agent.kill(process)

    async def wipe(self) -> None:
        """Kill every process of a task at once: no surviving rank has its state."""
        running = self.world.cluster.running()
        if running:
            task = self.rng.choice(running)[1].order.task
            self.world.witness.hit(task, "rank killed")
            for agent, process in running:
                if process.order.task == task:
                    agent.kill(process)

    async def raise_in(self) -> None:
        running = self.world.cluster.running()
        if running:
            agent, process = self.rng.choice(running)
            agent.raise_in(process, "RuntimeError")

    async def stop_rank(self) -> None:
        self._stop_one([x for x in self.world.cluster.running() if x[1].rank])

    def _stop_one(self, running: list[tuple[SimulatedAgent, SimulatedProcess]]) -> None:
        if running:
            agent, process = self.rng.choice(running)
            agent.halt(process, self.rng.choice([0.5, 5.0, 20.0, 0.0]))

    async def hang(self) -> None:
        """Stall a rank inside an iteration, without SIGSTOP: for seconds, or for ever."""
        running = [x for x in self.world.cluster.running() if x[1].rank and x[1].rank.iterates]
        if running:
            rank = self.rng.choice(running)[1].rank
            assert rank is not None
            rank.freeze(self.rng.choice([0.4, 1.5, 6.0, 0.0, 0.0]))

    async def jam(self) -> None:
        """A task's collectives do not end and report no error."""
        for task in self.world.tasks_running():
            self.world.cluster.jam(task, self.rng.choice([1.0, 8.0, 1e6]))

    async def slow(self) -> None:
        """Slow down one process's own work from now on."""
        running = [x[1].rank for x in self.world.cluster.running() if x[1].rank]
        if running:
            self.rng.choice(running).marks.slow = self.rng.choice([1.2, 1.6, 5.0, 40.0])

    async def blip(self) -> None:
        for task in self.world.tasks_running():
            self.world.cluster.cut(task)

    async def aim(self) -> None:
        """Aim a fault at a record kind: strike when a record of that kind is appended next."""
        kind = self.rng.choice(AIMED_AT)
        strike = self.rng.choice(
            [
                self._strike_rank,
                self._strike_rank,
                self._strike_node,
                self._strike_network,
                self._strike_leader,
                self._strike_stop,
            ]
        )
        self._aims.append((kind, strike))

    def _strike_rank(self, task: int) -> None:
        if not self.strike_rank(task):
            self.begin(self.kill_rank)
        else:
            self.world.tell("aimed: kill_rank")

    def strike_rank(self, task: int, *, rank: int = -1) -> bool:
        """Kill a process of the task (of this rank, if given). True if there was one."""
        running = [
            x
            for x in self.world.cluster.running()
            if x[1].order.task == task and rank in (-1, x[1].order.rank)
        ]
        if not running:
            return False
        agent, process = self.rng.choice(running)
        self.world.witness.hit(task, "rank killed")
        agent.kill(process)
        return True

    def _strike_stop(self, task: int) -> None:
        self.world.tell("aimed: stop_rank")
        self._stop_one([x for x in self.world.cluster.running() if x[1].order.task == task])

    def _strike_node(self, task: int) -> None:
        self.begin(lambda: self.crash(task), aimed="aimed: crash")

    def _strike_network(self, task: int) -> None:
        if self.world.cluster.cut(task):
            self.world.tell("aimed: network")

    def _strike_leader(self, task: int) -> None:
        self.world.witness.hit(task, "leader died")
        self.begin(self.kill_leader, aimed="aimed: kill_leader")

    # --- nodes -----------------------------------------------------------------------------------
    async def crash(self, task: int = 0) -> None:
        """Lose a machine with all its processes; a machine of this task, if the task has any."""
        world = self.world
        there = sorted(
            {x.node for x, process in world.cluster.running() if process.order.task == task}
        )
        node = self.rng.choice(there or sorted(world.nodes))
        if world.cluster.is_up(node):
            for number in world.tasks_running(node):
                world.witness.hit(number, "node lost")
            world.cluster.crash(node)
            await asyncio.sleep(self.rng.uniform(0.5, 40))
            self._boot(node)

    def _boot(self, node: str) -> None:
        if not self.world.cluster.is_up(node):
            self.world.cluster.boot(node, self.world.nodes[node])

    async def leave(self) -> None:
        node, cluster = self.rng.choice(sorted(self.world.nodes)), self.world.cluster
        if cluster.is_up(node):
            cluster.agents[node].leave()
            self.left.add(node)
            await asyncio.sleep(self.rng.uniform(1.5, 3))
            if cluster.is_up(node):
                cluster.crash(node)
            self.left.discard(node)
            await asyncio.sleep(self.rng.uniform(0.5, 10))
            self._boot(node)

    async def cut(self) -> None:
        link = self.world.links[self.rng.choice(sorted(self.world.links))]
        link.cut = True
        await asyncio.sleep(self.rng.uniform(0.5, 30))
        link.cut = False

    async def stop_agent(self) -> None:
        node = self.rng.choice(sorted(self.world.nodes))
        if self.world.cluster.is_up(node):
            await self.world.cluster.agents[node].stop(self.rng.uniform(0.5, 40))

    async def lose_copies(self) -> None:
        """A node's checkpoint store ends, and a new one starts."""
        node = self.rng.choice(sorted(self.world.nodes))
        if self.world.cluster.is_up(node):
            self.world.cluster.agents[node].lose_copies()

    async def storm(self) -> None:
        for link in self.world.links.values():
            link.link_faults = HEAVY_FAULTS
        await asyncio.sleep(self.rng.uniform(2, 20))
        for link in self.world.links.values():
            link.link_faults = NO_FAULTS

    # --- people ----------------------------------------------------------------------------------
    async def weigh(self) -> None:
        task = self._some_task()
        if task:
            weight = self.rng.choice([0.1, 0.5, 1.0, 2.0, 10.0])
            await self.world.ask("weigh", r.TaskWeightSet(task=task, weight=weight))

    async def drain(self) -> None:
        node = self.rng.choice(sorted(self.world.nodes))
        await self.world.ask("drain", r.NodeDrained(node=node, reason="a test"))
        await asyncio.sleep(self.rng.uniform(0, 40))
        await self.world.ask("undrain", r.NodeUndrained(node=node))

    async def freeze(self) -> None:
        await self.world.ask("freeze", r.HealingFrozen(reason="a test"))
        await asyncio.sleep(self.rng.uniform(0, 40))
        await self.world.ask("unfreeze", r.HealingResumed())

    async def observe(self) -> None:
        """Run a control plane that only observes, then one that acts."""
        world = self.world
        world.policy = replace(world.policy, observe=True)
        await self.kill_leader()
        await asyncio.sleep(self.rng.uniform(0, 30))
        world.policy = replace(world.policy, observe=False)
        await self.kill_leader()

    async def cancel(self) -> None:
        task = self._some_task()
        if task and self.rng.random() < 0.3:
            await self.world.ask("cancel", r.TaskCancelRequested(task=task, reason="a test"))

    async def inject(self) -> None:
        """As `unicron inject`: the control plane orders the fault, an agent executes the order."""
        running = self.world.cluster.running()
        if running:
            agent, process = self.rng.choice(running)
            order = process.order
            what = self.rng.choice(["rank", "stop", "node"])
            if what == "node":
                request = r.FaultRequested(what="node", node=agent.node, reason="a test")
            else:
                request = r.FaultRequested(
                    what=what, task=order.task, rank=order.rank, stop_s=3.0, reason="a test"
                )
            await self.world.ask("inject", request)
            await asyncio.sleep(self.rng.uniform(2, 20))
            self._boot(agent.node)

    def _some_task(self) -> int:
        live = [
            task.id for task in self.world.witness.state.tasks.values() if task.phase != "ended"
        ]
        return self.rng.choice(live) if live else 0
