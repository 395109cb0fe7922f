"""Health reports of simulated nodes: mostly noise, sometimes real faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

from unicron.events.records import statuses
from unicron.events.records.reports import CheckHealth, DeviceErred, HealthChanged, QuarantineLifted

if TYPE_CHECKING:
    from simulated.world import World

HARMLESS = (
    (statuses.ILLEGAL_MEMORY_ACCESS, 13),
    (statuses.CUDA_ERRORS, 43),
    (statuses.LINK_FLAPPING, 0),
    (statuses.OTHER_NETWORK, 0),
)
GRAVE = ((statuses.GPU_DRIVER_ERRORS, 79), (statuses.ECC_ERRORS, 48), (statuses.NVLINK_ERRORS, 74))
CHECKS = ("disk", "check/network", "check/dcgm")


class Noise:
    """Each method in `kinds` runs one sequence of health reports from start to end."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng

    def kinds(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            self.harmless,
            self.device_and_rank,
            self.device_alone,
            self.no_device,
            self.degraded,
            self.flapping,
            self.site_check,
            self.site_check_everywhere,
            self.unknown,
            self.lift,
        ]

    def end(self) -> None:
        """Report every check of every node as healthy."""
        for node in sorted(self.world.nodes):
            for check in CHECKS:
                self._check(node, check, "healthy")

    # --- devices ---------------------------------------------------------------------------------
    async def harmless(self) -> None:
        """Repeat an error whose severity is below SEV1."""
        node, (status, code) = self._node(), self.rng.choice(HARMLESS)
        for _ in range(self.rng.randint(1, 4)):
            self._err(node, status, code, self._devices(node))
            await asyncio.sleep(self.rng.uniform(0.0, 0.5))

    async def device_and_rank(self) -> None:
        """A device reports an error and its rank fails, in either order, within 0.8 s."""
        running = self.world.cluster.running()
        if not running:
            return
        agent, process = self.rng.choice(running)
        status, code = self.rng.choice(GRAVE)
        first, slot = self.rng.random() < 0.5, process.order.slot.index
        if first:
            self._err(agent.node, status, code, (slot,))
            await asyncio.sleep(self.rng.uniform(0.0, 0.8))
        if agent.alive and agent.processes.get(slot) is process:
            self.world.witness.hit(process.order.task, "rank killed")
            agent.kill(process)
        if not first:
            await asyncio.sleep(self.rng.uniform(0.0, 0.8))
            self._err(agent.node, status, code, (slot,))

    async def device_alone(self) -> None:
        """A device reports errors, from kernel or driver; its rank (if it has any) continues."""
        node, (status, code) = self._node(), self.rng.choice(GRAVE)
        devices = (self.rng.randrange(self.world.nodes[node]),)
        for _ in range(self.rng.randint(1, 3)):
            self._err(node, status, code, devices, self.rng.choice(("kernel", "nvml")))
            await asyncio.sleep(self.rng.uniform(0.0, 1.5))

    async def no_device(self) -> None:
        node, (status, code) = self._node(), self.rng.choice(GRAVE)
        self._err(node, status, code, ())

    # --- checks ----------------------------------------------------------------------------------
    async def degraded(self) -> None:
        await self._says(self._node(), "disk", "degraded", self.rng.uniform(1, 40))

    async def unknown(self) -> None:
        await self._says(self._node(), self.rng.choice(CHECKS), "unknown", self.rng.uniform(1, 40))

    async def flapping(self) -> None:
        node, check = self._node(), self.rng.choice(CHECKS)
        for _ in range(self.rng.randint(2, 6)):
            await self._says(
                node,
                check,
                self.rng.choice(("degraded", "unhealthy", "unknown")),
                self.rng.uniform(0.1, 3.0),
            )
            await asyncio.sleep(self.rng.uniform(0.1, 3.0))

    async def site_check(self) -> None:
        await self._says(self._node(), "check/network", "unhealthy", self.rng.uniform(1, 40))

    async def site_check_everywhere(self) -> None:
        """The check itself is broken: it fails on every node."""
        nodes = sorted(self.world.nodes)
        self.rng.shuffle(nodes)
        for node in nodes:
            self._check(node, "check/dcgm", "unhealthy")
            await asyncio.sleep(self.rng.uniform(0.0, 0.5))
        await asyncio.sleep(self.rng.uniform(1, 40))
        for node in nodes:
            self._check(node, "check/dcgm", "healthy")

    # --- people ----------------------------------------------------------------------------------
    async def lift(self) -> None:
        nodes = self.world.witness.state.nodes.values()
        kept = [
            QuarantineLifted(node=node.name, reason="a test") for node in nodes if node.quarantine
        ]
        kept += [
            QuarantineLifted(node=node.name, reason="a test", slots=(index,), quarantine=False)
            for node in nodes
            for index in node.slots_disabled
        ]
        if kept:
            await self.world.ask("lift", self.rng.choice(kept))

    # --- reports of an agent ---------------------------------------------------------------------
    def _node(self) -> str:
        return self.rng.choice(sorted(self.world.nodes))

    def _devices(self, node: str) -> tuple[int, ...]:
        return self.rng.choice([(), (self.rng.randrange(self.world.nodes[node]),)])

    def _err(
        self,
        node: str,
        status: str,
        code: int,
        devices: tuple[int, ...],
        origin: Literal["kernel", "nvml"] = "kernel",
    ) -> None:
        agent = self.world.cluster.agents[node]
        agent.say(
            DeviceErred(
                node=node,
                incarnation=agent.incarnation,
                origin=origin,
                status=status,
                rule=f"xid-{code}" if code else status,
                text="on paper",
                devices=devices,
                code=code,
            )
        )

    async def _says(self, node: str, check: str, health: CheckHealth, for_s: float) -> None:
        self._check(node, check, health)
        await asyncio.sleep(for_s)
        self._check(node, check, "healthy")

    def _check(self, node: str, check: str, health: CheckHealth) -> None:
        agent = self.world.cluster.agents[node]
        agent.say(
            HealthChanged(
                node=node,
                incarnation=agent.incarnation,
                check=check,
                health=health,
                why=f"{check} is {health}, on paper",
            )
        )
