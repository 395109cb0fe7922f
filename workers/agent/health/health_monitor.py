"""Reads the node's health periodically and reports changes."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import structlog
from msgspec import Struct, msgpack

from ....events.decoding import from_msgpack
from ....events.detached_thread import BlockingCalls, Late
from ....events.records.reports import DeviceErred, HealthChanged
from ....events.records.types import Body
from ..delivery.spool import Spool
from ..processes.launcher import MARKER, NodeConfig
from ..processes.shim import Shim
from . import kubernetes, limits
from .custom_checks import CheckOptions, CheckRunner, CheckSchedule
from .debounce import BurstFilter, Debouncer
from .finding import DeviceError, Finding, Reader, Reading
from .gpu import Gpus
from .kernel_log import KMSG, KernelLog
from .machine import BlockedProcesses, Disk, Memory
from .network import Network

_KEY = "health:"
"""Of notes in the journal."""
_log = structlog.get_logger("agent")


class HealthSources(Struct, frozen=True, kw_only=True):
    """The sources of health readings. The defaults are the machine's own."""

    checks: CheckOptions | None = None
    kubernetes: str = ""
    """The node's name there; empty: its object is not followed."""
    kmsg: Path = KMSG
    readers: Sequence[Reader] | None = None
    """None: the readers of GPUs (if the node has any), network, disk, memory and processes."""


class HealthMonitor:
    """Runs the readers of one node. A reader that hangs is a finding, and blocks no other one."""

    def __init__(
        self,
        node: NodeConfig,
        sources: HealthSources,
        report: Callable[[Body], None],
        journal: Spool | None = None,
        shim: Shim | None = None,
    ) -> None:
        """`journal` has what a former agent has reported, and gets what this one reports. `shim`:
        the parent of checks."""
        self._node = node
        self._journal = journal
        self._report = report
        self._gpus = Gpus(node.devices)
        self._readers: Sequence[Reader] = (
            sources.readers
            if sources.readers is not None
            else [
                *([self._gpus] if node.devices else []),
                Network(),
                Disk(node.state_dir),
                Memory(),
                BlockedProcesses(f"{MARKER}={node.mark}".encode()),
            ]
        )
        self._kernel = KernelLog(self._gpus.slots, sources.kmsg)
        self._bursts = BurstFilter()
        self._steady: dict[str, Debouncer] = {}
        self._named_slots: dict[str, tuple[int, ...]] = {}
        """The slots in the last report of each check."""
        self._checks = sources.checks
        self._kubernetes = sources.kubernetes
        self._shim = shim

    def killed(self, pid: int) -> str | None:
        """The kernel's line on the OOM kill of a process; None: there is none."""
        return self._kernel.killed(pid)

    def lost_slots(self) -> frozenset[int]:
        """The slots whose GPUs the driver does not find any more."""
        return self._gpus.lost

    async def run(self) -> None:
        """Run until cancelled: a loop for each reader, the kernel log, and the site's checks. Then
        it kills running checks and abandons a thread that hangs in a driver."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_kernel(), name="kernel")
                for reader in self._readers:
                    group.create_task(self._follow(reader), name=reader.name)
                if self._checks is not None:
                    group.create_task(self._follow_checks(self._checks), name="checks")
                if self._kubernetes:
                    group.create_task(self._follow_kubernetes(), name="kubernetes")
        finally:
            self._kernel.close()

    async def _follow_checks(self, checks: CheckOptions) -> None:
        node = self._node
        assert self._shim is not None, "it is the parent of checks"
        run = CheckRunner(
            self._shim,
            {
                **os.environ,
                "UNICRON_NODE": node.name,
                "UNICRON_SLOTS": str(node.num_slots),
                "UNICRON_DEVICES": ",".join(node.devices),
                "UNICRON_STATE": str(node.state_dir),
            },
            (MARKER, f"{node.mark}{node.incarnation}:"),
        )
        await CheckSchedule(checks, run, node.num_slots, self._report_check, self._reported).run()

    async def _follow(self, reader: Reader) -> None:
        calls = BlockingCalls[Reading](f"health-{reader.name}")
        while True:
            try:
                look = await calls.call(reader.read, reader.s_max)
            except Late:
                look = Reading(
                    [
                        Finding(
                            reader.name,
                            "unknown",
                            f"no answer within {reader.s_max:g} s",
                            rule="late",
                        )
                    ]
                )
            except (OSError, ValueError, LookupError) as error:
                look = Reading(
                    [Finding(reader.name, "unknown", f"cannot be read: {error}", rule="unreadable")]
                )
            else:
                if all(finding.check != reader.name for finding in look.findings):
                    look = Reading([*look.findings, Finding(reader.name, "healthy")], look.erred)
            self._take(look.findings, look.erred)
            await asyncio.sleep(reader.every_s)

    async def _follow_kernel(self) -> None:
        while True:
            self._take((), (*self._kernel.look(), *self._gpus.take_xids()))
            await asyncio.sleep(limits.KERNEL_EVERY_S)

    async def _follow_kubernetes(self) -> None:
        notes = self._journal.notes if self._journal is not None else ()
        last = {
            name: one.health
            for key in notes
            if (name := key.removeprefix(_KEY)).startswith(kubernetes.PREFIX)
            and (one := self._reported(name)) is not None
        }
        async for found in kubernetes.follow(self._kubernetes):
            names = [kubernetes.API] if kubernetes.API in found else {**last, **found}
            for name in names:
                now = found.get(name) or Finding(name, "healthy", rule="kubernetes")
                if now.health != last.get(name, "healthy"):
                    self._report_change(now)
                last[name] = now.health

    def _take(self, findings: Iterable[Finding], erred: Iterable[DeviceError]) -> None:
        node = self._node
        for error in erred:
            new = self._bursts.take(error, time.monotonic())
            if new is not None:
                self._report(
                    DeviceErred(
                        node=node.name,
                        incarnation=node.incarnation,
                        origin=new.origin,
                        status=new.status,
                        rule=new.rule,
                        text=new.text,
                        devices=new.devices,
                        code=new.code,
                        pid=new.pid,
                    )
                )
        for finding in findings:
            steady = self._steady.setdefault(
                finding.check, Debouncer(reported=self._reported(finding.check))
            )
            changed = steady.see(finding)
            if changed is not None:
                self._report_change(changed)

    def _reported(self, check: str) -> Finding | None:
        note = self._journal.notes.get(_KEY + check) if self._journal is not None else None
        if note is None:
            return None
        finding = from_msgpack(note, Finding)
        self._named_slots.setdefault(check, finding.devices)
        return finding

    def _report_check(self, finding: Finding) -> None:
        """Report a site's check, which is already debounced; debounce a finding on the folder."""
        if "/" in finding.check:
            self._report_change(finding)
        else:
            self._take((finding,), ())

    def _report_change(self, finding: Finding) -> None:
        """Report a finding, and first "healthy" for slots that it no longer names: the decider
        stores the result of a check by slot."""
        gone = tuple(
            slot for slot in self._named_slots.get(finding.check, ()) if slot not in finding.devices
        )
        self._named_slots[finding.check] = () if finding.health == "healthy" else finding.devices
        if gone and finding.devices and finding.health != "healthy":
            self._send(Finding(finding.check, "healthy", "it names other slots now", gone))
        self._send(finding)

    def _send(self, finding: Finding) -> None:
        node = self._node
        _log.info("health", check=finding.check, health=finding.health, why=finding.why)
        self._report(
            HealthChanged(
                node=node.name,
                incarnation=node.incarnation,
                check=finding.check,
                health=finding.health,
                why=finding.why,
                devices=finding.devices,
                status=finding.status,
                rule=finding.rule,
            )
        )
        if self._journal is not None:
            self._journal.note(_KEY + finding.check, msgpack.encode(finding))
