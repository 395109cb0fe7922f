"""Scripted lives of a simulated cluster: every row of the transition table, and one more fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from msgspec.structs import replace
from simulated.agent import SimulatedAgent
from simulated.log_link import NO_FAULTS, LinkFaults
from simulated.world import World
from unicron.events.records.codec import encode_report
from unicron.events.records.envelope import Record
from unicron.events.records.reports import (
    DeviceErred,
    NodeDrained,
    NodeUndrained,
    TaskCancelRequested,
    TaskOutputSet,
    TaskSubmitted,
)
from unicron.events.records.statuses import LINK_FLAPPING
from unicron.events.records.types import Body
from unicron.events.spec import job as spec
from unicron.events.spec.parallelism import Parallel
from unicron.workers.agent.delivery.log_link import LogLink
from unicron.workers.agent.delivery.outbox import Outbox
from unicron.workers.agent.delivery.spool import Spool

SLOW = LinkFaults(latency_s=0.15)
PATIENCE_S = 60.0
"""How long a scene waits for its condition; a second fault can make the condition impossible."""


def job(name: str, low: int, high: int, iterations: int, weight: float = 1.0) -> TaskSubmitted:
    """A training task whose throughput grows by the same amount with every slot."""
    return TaskSubmitted(
        spec=spec.parse(
            {
                "apiVersion": spec.API_VERSION,
                "name": name,
                "weight": weight,
                "slots": {"min": low, "max": high},
                "train": {
                    "iterations": iterations,
                    "output": f"/out/{name}",
                    "checkpoint_every": 6,
                },
            }
        )
    )


class OneRank(World):
    """One task on two nodes: one rank is killed, and the first leader dies around one append."""

    def __init__(self, doom: str, doom_seq: int) -> None:
        super().__init__(7, only_leaders=True)
        self.doom, self.doom_seq = doom, doom_seq

    async def live(self) -> list[Record]:
        self.begin()
        for port in self.leader_ports():
            port.doom, port.doom_seq = self.doom, self.doom_seq
        succession = asyncio.create_task(self._succeed())
        await self.write("job", job("job", 2, 4, 30))
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


class LastCollective(World):
    """A task of four ranks with a layout. In the collective after its last iteration one of them
    `hangs`, so that it does not enter, or `dies` when all have entered."""

    def __init__(self, fault: str) -> None:
        super().__init__(7, only_leaders=True)
        self.fault, net = fault, self.cluster.net
        net.tempo = replace(net.tempo, collective_s_max=60.0)

    async def live(self) -> list[Record]:
        self.begin()
        submitted = job("job", 4, 4, 5)
        assert submitted.spec.train is not None
        train = replace(submitted.spec.train, parallel=Parallel(tensor=(2,)))
        await self.write("job", replace(submitted, spec=replace(submitted.spec, train=train)))
        while not self._is_there():
            await asyncio.sleep(0.001)
        agent, process = self.cluster.running()[-1]
        assert process.rank is not None
        if self.fault == "hangs":
            process.rank.freeze(0.0)
        else:
            agent.kill(process)
        return await self.finish()

    def _is_there(self) -> bool:
        """Whether the last rank (to die: all ranks) is at the place of the fault."""
        ranks = [process.rank for _, process in self.cluster.running() if process.rank is not None]
        phase = "computing" if self.fault == "hangs" else "reducing"
        return len(ranks) == 4 and all(
            rank.step_version == rank.train.iterations and rank.phase == phase
            for rank in (ranks[-1:] if self.fault == "hangs" else ranks)
        )


class SpoolingAgent(SimulatedAgent):
    """A simulated agent with the real spool and the real delivery. `said` are all its reports."""

    def __init__(self, *args: Any, bytes_max: int, **named: Any) -> None:
        super().__init__(*args, **named)
        self.bounded = Spool(self.source, self.node, named["clock"], bytes_max=bytes_max)
        self.said: list[Body] = []
        self._outbox = Outbox(self.port, LogLink(), self.bounded)

    def say(self, body: Body) -> None:
        if self.alive:
            self._outbox.put(body)
            self.said.append(body)

    async def _deliver(self) -> None:
        await self._outbox.run()

    @property
    def num_bytes(self) -> int:
        """How much of the spool is in use."""
        return sum(len(encode_report(one)) for one in self.bounded.behind(0, 1 << 30))


class OneHour(World):
    """Two tasks of two ranks. For an hour there is no control plane; meanwhile a rank of the second
    task is killed, a device errs, and the first task trains on."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(7, only_leaders=True)
        self.bytes_max = bytes_max
        self.cluster.kind = partial(SpoolingAgent, bytes_max=bytes_max)
        self.cluster.net.tempo = replace(self.cluster.net.tempo, micro_batch_s=(0.5, 1.0))
        self.tasks: list[int] = []
        self.num_waited = self.most_bytes = 0

    @property
    def spooling(self) -> list[SpoolingAgent]:
        return [one for one in self.cluster.agents.values() if isinstance(one, SpoolingAgent)]

    async def live(self) -> list[Record]:
        self.begin()
        for name in ("first", "second"):
            self.tasks.append(await self.write(name, job(name, 2, 2, 100_000)))
            await self._trains(self.tasks[-1])
        self.lose_leaders()
        await asyncio.sleep(1200.0)
        agent, process = next(x for x in self.cluster.running() if x[1].order.task == self.tasks[1])
        agent.kill(process)
        await asyncio.sleep(600.0)
        agent.say(
            DeviceErred(
                node=agent.node,
                incarnation=agent.incarnation,
                origin="kernel",
                status=LINK_FLAPPING,
                rule="link",
                text="eth0 down",
            )
        )
        await asyncio.sleep(1800.0)
        self.num_waited = sum(one.bounded.num_unacked for one in self.spooling)
        self.most_bytes = max(one.num_bytes for one in self.spooling)
        self.start_leader()
        await self._trains(self.tasks[1])
        await asyncio.sleep(60.0)
        for task in self.tasks:
            await self.ask("cancel", TaskCancelRequested(task=task))
        return await self.finish()

    async def _trains(self, number: int) -> None:
        """Wait until the task has no incident and makes another iteration."""
        while (task := self.witness.state.tasks[number]).incident or task.phase != "training":
            await asyncio.sleep(0.5)
        iteration = task.iteration
        while task.iteration <= iteration:
            await asyncio.sleep(0.5)


class SecondFault(World):
    """A life that passes every row of the transition table, with one fault after one record.

    The fault strikes once, at the instant of the `nth` append of a record that executes `row`.
    """

    def __init__(self, seed: int, row: str, fault: str, nth: int) -> None:
        super().__init__(seed)
        # Reports that arrive late must find their rank a member, and not lost already.
        self.policy = replace(self.policy, suspect_s_max=self.policy.silence_s_max)
        self.row, self.fault, self.nth = row, fault, nth
        self.nodes = {"n0": 2, "n1": 2, "n2": 1}
        self._provoked: dict[str, Callable[[int], None]] = {}
        self._struck: asyncio.Task[None] | None = None

    def saw(self, record: Record, row: str) -> None:
        super().saw(record, row)
        task: int = getattr(record.body, "task", 0)
        if row in self._provoked:
            self.loop.call_soon(self._provoked.pop(row), task)
        if row == self.row:
            self.nth -= 1
            if self.nth == 0:
                self._strike(task)

    def _strike(self, task: int) -> None:
        self.tell(f"{self.fault} at {self.row}")
        if self.fault == "collective failed":
            for link in self.links.values():
                link.link_faults = SLOW
        self._struck = asyncio.create_task(self._faults()[self.fault](task))

    def _faults(self) -> dict[str, Callable[[int], Awaitable[None]]]:
        return {
            "rank killed": self._kill,
            "node lost": self._lose,
            "leader died": self._depose,
            "collective failed": self._cut,
        }

    async def _kill(self, task: int) -> None:
        while not self.chaos.strike_rank(task):
            await asyncio.sleep(0.001)

    async def _lose(self, task: int) -> None:
        while task not in self.tasks_running():
            await asyncio.sleep(0.001)
        await self.chaos.crash(task)

    async def _depose(self, task: int) -> None:
        self.witness.hit(task, "leader died")
        await self.chaos.kill_leader()

    async def _cut(self, task: int) -> None:
        """Break the next collective. The witness counts the fault when its failure is reported.

        Orders are slow meanwhile, so that members report the failure before they read any order.
        """
        for _ in range(500):
            if self.cluster.cut(task):
                break
            await asyncio.sleep(0.001)
        await asyncio.sleep(1.0)
        for link in self.links.values():
            link.link_faults = NO_FAULTS

    # --- the scenes ------------------------------------------------------------------------------
    async def live(self) -> list[Record]:
        self.begin()
        main = await self.write("job", job("job", 2, 5, 150))
        await self._steps(main, 3)
        await self._a_rank_dies(main)
        await self._the_network_fails(main)
        await self._it_gives_way(main)
        await self._it_moves(main)
        await self.ask("output", TaskOutputSet(task=main, output="/elsewhere"))
        await self._steps(main, 3)
        if self._struck is not None:
            await self._struck
        await self.make_peace()
        return await self.finish()

    async def _a_rank_dies(self, main: int) -> None:
        """Kill a rank, another one during the recovery, and one in the generation after that."""

        def a_member_dies(task: int) -> None:
            member = self.rng.choice(self.witness.state.tasks[task].members)
            self.chaos.strike_rank(task, rank=member.rank)

        self._provoked["training/seats_differ"] = a_member_dies
        self._provoked["quiescing/boundary_disturbed"] = lambda _: self._provoked.update(
            {"quiescing/every_member_quiesced": a_member_dies}
        )
        self.chaos.strike_rank(main)
        await self._healthy(main)

    async def _the_network_fails(self, main: int) -> None:
        """Break the network; one node reports so late that its members are left out."""
        link = self.links["n1"]
        self.cluster.cut(main)
        link.cut = True
        await asyncio.sleep(self.rng.uniform(1.0, 1.5))
        link.cut = False
        await self._healthy(main)

    async def _it_gives_way(self, main: int) -> None:
        """Another task takes all slots, so this one saves and stops, and starts again later.

        With an odd seed the rank that is to save dies, and so does the rank that replaces it.
        """

        def saver_dies(task: int) -> None:
            self.chaos.strike_rank(task, rank=self.witness.state.tasks[task].saver)

        if self.seed % 2:
            self._provoked["training/no_slots"] = saver_dies
            self._provoked["quiescing/boundary_disturbed"] = saver_dies
        other = await self.write("big", job("big", 5, 5, 4, weight=100.0))
        await self._until(lambda: self.witness.state.tasks[other].outcome != "")
        await self._healthy(main)

    async def _it_moves(self, main: int) -> None:
        await self.ask("drain", NodeDrained(node="n1"))
        await self._steps(main, 3)
        await self.ask("undrain", NodeUndrained(node="n1"))
        await self._steps(main, 3)

    async def _healthy(self, main: int) -> None:
        task = self.witness.state.tasks[main]
        await self._until(lambda: task.phase == "training" and not task.incident)
        await self._steps(main, 2)

    async def _steps(self, main: int, num: int) -> None:
        while main not in self.witness.state.tasks:
            await asyncio.sleep(0.1)
        task = self.witness.state.tasks[main]
        goal = task.iteration + num
        await self._until(lambda: task.iteration >= goal)

    async def _until(self, there: Callable[[], bool]) -> None:
        until_s = self.loop.time() + PATIENCE_S
        while not there() and self.loop.time() < until_s:
            await asyncio.sleep(0.05)
