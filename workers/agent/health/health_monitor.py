"""The node's health: each reader looks by the clock, and what changes is told."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import structlog
from msgspec import Struct

from ....events.records.reports import DeviceErred, HealthChanged
from ....events.records.types import Body
from ..processes.launcher import MARK, Node
from .blocking_call import Aside, Late
from .custom_checks import Checks, Rounds, Run
from .debounce import Bursts, Steady
from .finding import KERNEL_EVERY_S, Erred, Finding, Look, Reader
from .gpu_inventory import Gpus
from .kernel_log import KMSG, KernelLog
from .machine import Blocked, Disk, Memory
from .network import Network

_log = structlog.get_logger("agent")


class Sources(Struct, frozen=True, kw_only=True):
    """What is looked at. The defaults are the machine's own."""

    checks: Checks | None = None
    kmsg: Path = KMSG
    readers: Sequence[Reader] | None = None
    """None: GPUs where the node has any, network, disk, memory, processes."""


class Health:
    """One node's readers. A reader that hangs is itself a finding, and holds up no other."""

    def __init__(self, node: Node, sources: Sources, report: Callable[[Body], None]) -> None:
        self._node = node
        self._report = report
        self._gpus = Gpus(node.devices)
        if sources.readers is not None:
            self._readers = sources.readers
        else:
            self._readers = [
                *([self._gpus] if node.devices else []), Network(), Disk(node.state_dir), Memory(),
                Blocked(f"{MARK}={node.mark}".encode())]
        self._kernel = KernelLog(self._gpus.slots, sources.kmsg)
        self._bursts = Bursts()
        self._steady: dict[str, Steady] = {}
        self._blamed: dict[str, tuple[int, ...]] = {}
        """The slots that each check was last said to be about."""
        self._checks = sources.checks
        self._run = Run({**os.environ, "UNICRON_NODE": node.name,
                         "UNICRON_SLOTS": str(node.num_slots),
                         "UNICRON_DEVICES": ",".join(node.devices),
                         "UNICRON_STATE": str(node.state_dir)},
                        (MARK, f"{node.mark}{node.incarnation}:"))

    @property
    def pids(self) -> set[int]:
        """The processes that this room reaps itself."""
        return self._run.pids

    def killed(self, pid: int) -> str | None:
        """What the kernel said when it ended a process for want of memory; None: nothing."""
        return self._kernel.killed(pid)

    async def run(self) -> None:
        """For ever: one loop for each reader, the kernel's log, and the site's checks.

        Cancelled, it ends the checks that run; a thread that hangs in a driver is left to itself.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_kernel(), name="kernel")
                for reader in self._readers:
                    group.create_task(self._follow(reader), name=reader.name)
                if self._checks is not None:
                    rounds = Rounds(self._checks, self._run, self._node.num_slots,
                                    self._tell_check)
                    group.create_task(rounds.run(), name="checks")
        finally:
            self._kernel.close()

    async def _follow(self, reader: Reader) -> None:
        aside: Aside[Look] = Aside(f"health-{reader.name}")
        while True:
            try:
                look = await aside.call(reader.read, reader.s_max)
            except Late:
                found: list[Finding] = [Finding(
                    reader.name, "unknown", f"no answer within {reader.s_max:g} s", rule="late")]
                look = Look(found)
            except (OSError, ValueError, LookupError) as error:
                look = Look([Finding(reader.name, "unknown", f"cannot be read: {error}",
                                     rule="unreadable")])
            else:
                if all(finding.check != reader.name for finding in look.findings):
                    look = Look([*look.findings, Finding(reader.name, "healthy")], look.erred)
            self._take(look.findings, look.erred)
            await asyncio.sleep(reader.every_s)

    async def _follow_kernel(self) -> None:
        while True:
            self._take((), (*self._kernel.look(), *self._gpus.take_heard()))
            await asyncio.sleep(KERNEL_EVERY_S)

    def _take(self, findings: Iterable[Finding], erred: Iterable[Erred]) -> None:
        node = self._node
        for error in erred:
            told = self._bursts.take(error, time.monotonic())
            if told is not None:
                self._report(DeviceErred(
                    node=node.name, incarnation=node.incarnation, origin=told.origin,
                    status=told.status, rule=told.rule, text=told.text, devices=told.devices,
                    code=told.code, pid=told.pid))
        for finding in findings:
            steady = self._steady.setdefault(finding.check, Steady())
            changed = steady.see(finding)
            if changed is not None:
                self._tell(changed)

    def _tell_check(self, finding: Finding) -> None:
        """A site's check is confirmed by its rounds; what is said of the folder is not."""
        if "/" in finding.check:
            self._tell(finding)
        else:
            self._take((finding,), ())

    def _tell(self, finding: Finding) -> None:
        """Slots that it no longer names are well again: the heart keeps what a check says by slot.
        """
        gone = tuple(slot for slot in self._blamed.get(finding.check, ())
                     if slot not in finding.devices)
        self._blamed[finding.check] = () if finding.health == "healthy" else finding.devices
        if gone and finding.devices and finding.health != "healthy":
            self._say(Finding(finding.check, "healthy", "it names other slots now", gone))
        self._say(finding)

    def _say(self, finding: Finding) -> None:
        node = self._node
        _log.info("health", check=finding.check, health=finding.health, why=finding.why)
        self._report(HealthChanged(
            node=node.name, incarnation=node.incarnation, check=finding.check,
            health=finding.health, why=finding.why, devices=finding.devices,
            status=finding.status, rule=finding.rule))
