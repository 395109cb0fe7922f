"""A simulated cluster with all that goes wrong in it: its log, leaders, nodes and users."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from unicron.control_plane.coordinator import Coordinator
from unicron.control_plane.state import state_hash
from unicron.events import spec
from unicron.events.errors import Ambiguous, Conflict, Fenced, Unavailable
from unicron.events.log import AgentPort
from unicron.events.memory_log import MemoryLog
from unicron.events.records import Record
from unicron.events.reports import Policy, TaskCancelRequested, TaskSubmitted
from unicron.workers.simulated import PaperCluster
from unicron.workers.simulated_link import CALM, PaperLink, Weather

START_S = 1_700_000_000.0
PEACE_S_MAX = 1_500.0
POLICY = Policy(start_s_max=20.0, quiesce_s_max=10.0, boundary_s_max=30.0, reconfigure_s_max=30.0,
                stop_s_max=5.0, restarts_max=100_000, replace_after_s=15.0)
STORM = Weather(lost=0.1, doubled=0.1, delayed=0.2, unanswered=0.1, repeated=0.2)
LEADER_CALLS = ("start_epoch", "append", "cursor", "take", "beats", "rebuild_orders",
                "trim_reports", "read")


class LeaderLog:
    """The log as one leader sees it: it may lose calls, replies, and the leader itself."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.doom, self.doom_seq = "", 0
        """Die before or after an append: the next one, or the one that holds this seq."""

    def __getattr__(self, call: str) -> Callable[..., Awaitable[object]]:
        assert call in LEADER_CALLS, call

        async def passed(*args: object, **named: object) -> object:
            world = self.world
            await asyncio.sleep(0.0005)
            fate = world.rng.random() if world.trouble else 1.0
            if fate < 0.05:
                raise Unavailable("out of reach")
            if fate < 0.08:
                raise Ambiguous("the request was lost")
            doom = self.doom if call == "append" and self._holds(args[0]) else ""
            if doom == "before":
                await world.die_here(self.name)
            reply = await getattr(world.log, call)(*args, **named)
            if doom == "after":
                await world.die_here(self.name)
            if fate < 0.11 and call != "take":
                raise Ambiguous("the reply was lost")
            await asyncio.sleep(0.0005)
            return reply

        return passed

    def _holds(self, records: object) -> bool:
        assert isinstance(records, list)
        return not self.doom_seq or any(record.seq == self.doom_seq for record in records)


class World:
    """One simulated cluster: its log, its leaders, its nodes, and what goes wrong."""

    def __init__(self, seed: int, *, only_leaders: bool = False) -> None:
        self.seed, self.only_leaders = seed, only_leaders
        self.rng = random.Random(f"world {seed}")
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._broken)
        self.log = MemoryLog(self.clock)
        self.links: dict[str, PaperLink] = {}
        self.cluster = PaperCluster(seed, port_of=self._port_of, clock=self.clock)
        self.leaders: dict[str, tuple[Coordinator, LeaderLog, asyncio.Task[None]]] = {}
        self.trouble = False
        self.num_leaders = 0
        self.answered: dict[str, int] = {}
        self.faults: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.left: set[str] = set()
        self.nodes = {f"n{i}": self.rng.randint(1, 3) for i in range(self.rng.randint(2, 4))}
        if only_leaders:
            self.nodes = {"n0": 2, "n1": 2}

    def _broken(self, loop: object, context: dict[str, object]) -> None:
        self.cluster.net.never(f"{context.get('message')}: {context.get('exception')!r}")

    def clock(self) -> float:
        return START_S + self.loop.time()

    def _port_of(self, node: str) -> AgentPort:
        if node not in self.links:
            self.links[node] = PaperLink(self.log, random.Random(f"{self.seed} {node}"))
        return self.links[node]

    # --- leaders ----------------------------------------------------------------------------------
    def start_leader(self) -> None:
        self.num_leaders += 1
        name = f"leader-{self.num_leaders}"
        port = LeaderLog(self, name)
        coordinator = Coordinator(port, clock=self.clock, nonce=name, code="paper",  # type: ignore[arg-type]
                                  policy=POLICY, jitter=random.Random(f"{self.seed} {name}"))
        task = asyncio.create_task(self._lead(name, coordinator), name=name)
        self.leaders[name] = coordinator, port, task

    async def _lead(self, name: str, coordinator: Coordinator) -> None:
        try:
            await coordinator.run()
        except (Fenced, Conflict, Ambiguous):
            self.leaders.pop(name, None)

    def kill_leader(self, name: str) -> None:
        found = self.leaders.pop(name, None)
        if found:
            found[2].cancel()

    async def die_here(self, name: str) -> None:
        self.kill_leader(name)
        await asyncio.sleep(1e9)

    def coordinator(self) -> Coordinator | None:
        return next((c for c, _, _ in reversed(self.leaders.values()) if c.leading), None)

    # --- operators --------------------------------------------------------------------------------
    async def write(self, key: str, body: TaskSubmitted | TaskCancelRequested) -> int:
        """As a client does: ask with the same key until answered."""
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

    def job(self, number: int) -> TaskSubmitted:
        rng = self.rng
        high = rng.randint(1, min(4, sum(self.nodes.values())))
        data: dict[str, object] = {
            "apiVersion": spec.API_VERSION, "name": f"task-{number}",
            "weight": rng.choice([0.5, 1.0, 2.0]),
            "slots": {"min": rng.randint(1, high), "max": high},
        }
        if rng.random() < 0.15 and not self.only_leaders:
            data["command"] = ["sleep", "10"]
        else:
            micro = rng.randint(1, 2)
            data["train"] = {
                "batch": {"global": micro * rng.randint(high, 12), "micro": micro},
                "iterations": rng.randint(5, 100), "output": f"/out/{number}",
                "seed": rng.randint(1, 99), "checkpoint_every": rng.choice([0, 0, 3, 7]),
            }
        return TaskSubmitted(spec=spec.parse(data))

    # --- chaos ------------------------------------------------------------------------------------
    async def chaos(self, until_s: float) -> None:
        """One fault after the other, at random moments."""
        rate_s = self.rng.choice([1.0, 3.0, 8.0])
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._kill_leader, self._doom_leader, self._rival, self._trouble]
        if not self.only_leaders:
            kinds += [self._kill_rank, self._kill_rank, self._kill_rank, self._raise, self._crash,
                      self._cut, self._blip, self._storm, self._leave]
        while self.loop.time() < until_s:
            await asyncio.sleep(self.rng.expovariate(1 / rate_s))
            fault = self.rng.choice(kinds)
            self.faults.append(f"{self.loop.time():.3f} {fault.__name__}")
            self.tasks.append(asyncio.create_task(fault(), name=f"fault {len(self.tasks)}"))

    async def _kill_leader(self) -> None:
        for name in list(self.leaders):
            self.kill_leader(name)
        await asyncio.sleep(self.rng.uniform(0, 10))
        self.start_leader()

    async def _doom_leader(self) -> None:
        for _, port, _ in self.leaders.values():
            port.doom = self.rng.choice(["before", "after"])
        await asyncio.sleep(self.rng.uniform(2, 8))
        self.start_leader()

    async def _rival(self) -> None:
        self.start_leader()

    async def _trouble(self) -> None:
        self.trouble = True
        await asyncio.sleep(self.rng.uniform(1, 10))
        self.trouble = False

    async def _kill_rank(self) -> None:
        running = self.cluster.running()
        if running:
            agent, process = self.rng.choice(running)
            agent.kill(process)

    async def _raise(self) -> None:
        running = self.cluster.running()
        if running:
            agent, process = self.rng.choice(running)
            agent.raise_in(process, "RuntimeError")

    async def _crash(self) -> None:
        node = self.rng.choice(sorted(self.nodes))
        if self.cluster.is_up(node):
            self.cluster.crash(node)
            await asyncio.sleep(self.rng.uniform(0.5, 40))
            if not self.cluster.is_up(node):
                self.cluster.boot(node, self.nodes[node])

    async def _leave(self) -> None:
        node = self.rng.choice(sorted(self.nodes))
        if self.cluster.is_up(node):
            self.cluster.agents[node].leave()
            self.left.add(node)
            await asyncio.sleep(self.rng.uniform(1.5, 3))
            if self.cluster.is_up(node):
                self.cluster.crash(node)
            self.left.discard(node)
            await asyncio.sleep(self.rng.uniform(0.5, 10))
            if not self.cluster.is_up(node):
                self.cluster.boot(node, self.nodes[node])

    async def _cut(self) -> None:
        link = self.links[self.rng.choice(sorted(self.links))]
        link.cut = True
        await asyncio.sleep(self.rng.uniform(0.5, 30))
        link.cut = False

    async def _blip(self) -> None:
        for task in sorted({p.order.task for _, p in self.cluster.running()}):
            self.cluster.blip(task)

    async def _storm(self) -> None:
        for link in self.links.values():
            link.weather = STORM
        await asyncio.sleep(self.rng.uniform(2, 20))
        for link in self.links.values():
            link.weather = CALM

    # --- a whole life ---------------------------------------------------------------------------
    async def live(self) -> list[Record]:
        """Faults, then peace until all tasks have ended; the log."""
        self.start_leader()
        for node, num_slots in self.nodes.items():
            self.cluster.boot(node, num_slots)
        num_jobs = 1 if self.only_leaders else self.rng.randint(1, 3)
        writers = [asyncio.create_task(self._submit(i)) for i in range(num_jobs)]
        await self.chaos(self.rng.uniform(20, 120))
        for task in self.tasks:
            task.cancel()
        self.trouble = False
        for node, num_slots in self.nodes.items():
            self.links[node].cut, self.links[node].weather = False, CALM
            if self.cluster.is_up(node) and node in self.left:
                self.cluster.crash(node)
            if not self.cluster.is_up(node):
                self.cluster.boot(node, num_slots)
        for name in list(self.leaders):
            self.kill_leader(name)
        self.start_leader()
        for writer in writers:
            await writer
        return await self.finish()

    async def finish(self) -> list[Record]:
        """Peace until all tasks have ended, then the end; the log."""
        peace_s = self.loop.time()
        while not await self._is_over():
            late = self.loop.time() - peace_s > PEACE_S_MAX
            assert not late, f"in peace, {await self._unfinished()}"
            for _ in range(30):
                await asyncio.sleep(1.0)
                if await self._is_over():
                    break
            else:
                await self._repair()
        await asyncio.sleep(40.0)
        leader = self.coordinator()
        assert leader is not None
        self.last_state = await leader.settled()
        self.last_hash = state_hash(self.last_state)
        records = await self.log.read(after=0, num_max=1_000_000)
        self.cluster.stop()
        for name in list(self.leaders):
            self.kill_leader(name)
        await asyncio.sleep(0)
        return records

    async def lose_a_rank(self, doom: str, doom_seq: int) -> list[Record]:
        """One task on two nodes, one rank killed, and one leader that dies around one append."""
        self.start_leader()
        for _, port, _ in self.leaders.values():
            port.doom, port.doom_seq = doom, doom_seq
        for node, num_slots in self.nodes.items():
            self.cluster.boot(node, num_slots)
        succession = asyncio.create_task(self._succeed())
        await self.write("job", TaskSubmitted(spec=spec.parse({
            "apiVersion": spec.API_VERSION, "name": "job", "slots": {"min": 2, "max": 4},
            "train": {"iterations": 15, "output": "/out", "checkpoint_every": 6}})))
        while self.cluster.net.num_steps < 16:
            await asyncio.sleep(0.05)
        agent, process = self.cluster.running()[2]
        agent.kill(process)
        records = await self.finish()
        succession.cancel()
        return records

    async def _succeed(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if not self.leaders:
                self.start_leader()

    async def _submit(self, number: int) -> None:
        await asyncio.sleep(self.rng.uniform(0, 20) if number else 0)
        job = self.job(number)
        task = await self.write(f"submit-{number}", job)
        if number == 2 and self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.uniform(0, 20))
            await self.write(f"cancel-{number}", TaskCancelRequested(task=task, reason="a test"))

    async def _repair(self) -> None:
        """Slots that are out come back when somebody has seen to them: the agent starts again."""
        leader = self.coordinator()
        state = await leader.settled() if leader else None
        if state and all(task.phase in ("idle", "ended") for task in state.tasks.values()):
            for node in [node.name for node in state.nodes.values() if node.slots_out]:
                self.cluster.crash(node)
                self.cluster.boot(node, self.nodes[node])

    async def _is_over(self) -> bool:
        leader = self.coordinator()
        if leader is None:
            return False
        state = await leader.settled()
        return all(task.phase == "ended" for task in state.tasks.values())

    async def _unfinished(self) -> str:
        leader = self.coordinator()
        if leader is None:
            return "nobody leads"
        state = await leader.settled()
        return "; ".join(f"task {t.id} is {t.phase} in generation {t.generation} {t.why} {t.needs}"
                         for t in state.tasks.values() if t.phase != "ended")
