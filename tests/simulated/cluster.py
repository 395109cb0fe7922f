"""A simulated cluster: agents and their processes behind the agents' port, driven by a seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from simulated.agent import SimulatedAgent, SimulatedProcess
from simulated.environment import Environment, Tempo
from unicron.events.log.redis_streams import RedisLog


class SimulatedCluster:
    """All simulated nodes. `port_of` makes a node's port to the log; `clock` is in seconds."""

    def __init__(
        self,
        seed: int,
        *,
        port_of: Callable[[str], RedisLog],
        clock: Callable[[], float],
        tempo: Tempo | None = None,
    ) -> None:
        self.net = Environment(seed, tempo or Tempo())
        self._port_of, self._clock = port_of, clock
        self.agents: dict[str, SimulatedAgent] = {}
        self.kind: Callable[..., SimulatedAgent] = SimulatedAgent
        self._running: dict[str, asyncio.Task[None]] = {}

    def boot(self, node: str, num_slots: int) -> None:
        """Start the node's agent, in a new incarnation if it ran before."""
        assert node not in self._running, f"the agent of {node} already runs"
        old = self.agents.get(node)
        incarnation = max(int(self._clock() * 1000), old.incarnation + 1 if old else 1)
        agent = self.kind(
            self.net,
            self._port_of(node),
            node=node,
            incarnation=incarnation,
            num_slots=num_slots,
            clock=self._clock,
            fall=lambda: self.crash(node),
        )
        self.agents[node] = agent
        self._running[node] = asyncio.create_task(agent.run(), name=f"agent {agent.source}")

    def crash(self, node: str) -> None:
        """The node fails with all its processes."""
        self.agents[node].crash()
        self._running.pop(node).cancel()

    def is_up(self, node: str) -> bool:
        return node in self._running

    def running(self) -> list[tuple[SimulatedAgent, SimulatedProcess]]:
        """Every process of every node that is up, in a fixed order."""
        return [
            (self.agents[node], self.agents[node].processes[slot])
            for node in sorted(self._running)
            for slot in sorted(self.agents[node].processes)
        ]

    def cut(self, task: int) -> bool:
        """Break the connections of the task's generation: the running collective, or the next one,
        fails on every member. True if there was such a generation."""
        groups = {
            p.rank.group: None
            for _, p in self.running()
            if p.rank and p.rank.task == task and p.rank.group and not p.rank.group.broken
        }
        for group in groups:
            group.hiccup()
        return bool(groups)

    def jam(self, task: int, jam_s: float) -> None:
        """Let no collective of the task's generation end for `jam_s` seconds."""
        for group in {
            p.rank.group: None
            for _, p in self.running()
            if p.rank and p.rank.task == task and p.rank.iterates
        }:
            if group is not None:
                group.jam(jam_s)

    def stop(self) -> None:
        """Crash every node that is up."""
        for node in list(self._running):
            self.crash(node)
