"""The cluster of the scale bench: a real server and control plane, processes full of agents."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import redis.asyncio
from bench.scale.agents import Options
from unicron.cli.cluster import local_cluster
from unicron.cli.cluster.local_cluster import ClusterOptions, LocalCluster
from unicron.cli.cluster.state_dir import StateDir
from unicron.events.records import codec
from unicron.events.records import decisions as d
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.timing import BEAT_S

PROCESS_AGENTS_MAX = 256
WAIT_S_MAX = 900.0
POLL_S = 0.05
CLUSTER = "default"


class NotReached(Exception):
    """The cluster did not reach a state in time."""


class Watch:
    """Reads the log from the server as it grows. `seen_s` has the time at which each record was
    seen: after its publication, by the clock of the agents."""

    def __init__(self, url: str) -> None:
        self._server = redis.asyncio.from_url(url, socket_timeout=None)
        self.records: list[Record] = []
        self.seen_s: list[float] = []
        self.kinds = Counter[str]()
        self.latest: dict[int, o.Reconfigure] = {}
        """By task: its newest generation."""
        self.training: set[int] = set()
        """Tasks that have made progress in their newest generation."""
        self.open_incidents: dict[int, int] = {}
        """Incident -> its task. Of a recovering one the task is whole."""
        self.tasks: dict[int, int] = {}
        """Incident -> its task, of all incidents."""
        self.unreachable: set[str] = set()

    @property
    def whole(self) -> dict[int, o.Reconfigure]:
        """The newest generation of each task that trains without an open incident."""
        return {
            task: latest
            for task, latest in self.latest.items()
            if task in self.training and task not in self.open_incidents.values()
        }

    async def run(self) -> None:
        last, key = b"0-0", f"{{unicron:{CLUSTER}}}:log".encode()
        while True:
            found = await self._server.xread({key: last}, count=1000, block=1000)
            now_s = time.time()
            for last, fields in found[0][1] if found else ():  # noqa: B007
                record = codec.decode_record(fields[b"r"])
                self.records.append(record)
                self.seen_s.append(now_s)
                self.kinds[record.kind] += 1
                self._note(record)

    def _note(self, record: Record) -> None:
        match record.body:
            case o.Reconfigure(task=task):
                self.latest[task] = record.body
                self.training.discard(task)
            case o.Quiesce(task=task):
                self.training.discard(task)
            case r.TaskProgressed(task=task, generation=number):
                if (latest := self.latest.get(task)) and latest.generation == number:
                    self.training.add(task)
            case d.IncidentOpened(task=task):
                self.open_incidents[record.seq] = self.tasks[record.seq] = task
            case d.IncidentEscalated(of=incident, num_times=num) if num:
                self.open_incidents[incident] = self.tasks[incident]
            case d.IncidentRecovering(of=incident) | d.IncidentClosed(of=incident):
                self.open_incidents.pop(incident, None)
            case r.NodeUnreachable(node=node):
                self.unreachable.add(node)
            case r.NodeReachable(node=node):
                self.unreachable.discard(node)
            case _:
                pass

    async def close(self) -> None:
        await self._server.aclose()


class Cluster:
    """`num_agents` agents of `num_slots` slots."""

    def __init__(
        self, folder: Path, num_agents: int, num_slots: int, beat_s: float = BEAT_S
    ) -> None:
        self._beat_s = beat_s
        self._state = StateDir(folder / "state")
        self._state.create()
        self._local = LocalCluster(self._state, ClusterOptions(num_agents=0))
        self._made = (num_agents, num_slots)
        self._drivers: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Start all processes; no agent joins yet."""
        server = self._local.ensure_server()
        assert server is not None
        self._local.choose_port()
        control_plane = self._local.start(local_cluster.CONTROL_PLANE)
        self.client = self._local.wait_control_plane()
        self.pids = {"control_plane": control_plane.pid, "server": server.pid}
        self.watch = Watch(server.url)
        self._watching = asyncio.create_task(self.watch.run())
        num, num_slots = self._made
        for first in range(0, num, PROCESS_AGENTS_MAX):
            driver = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                str(Path(__file__).with_name("agents.py")),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            self._drivers.append(driver)
            self._write(
                driver,
                msgspec.json.encode(
                    Options(
                        url=self.client.url,
                        token=self.client.token,
                        first=first,
                        num=min(PROCESS_AGENTS_MAX, num - first),
                        num_slots=num_slots,
                        origin_s=time.time(),
                        beat_s=self._beat_s,
                    )
                ).decode(),
            )
        for driver in self._drivers:
            assert await self._line(driver) == "ready"

    async def stop(self) -> None:
        """Stop all processes."""
        for driver in self._drivers:
            if driver.returncode is None:
                driver.kill()
            await driver.wait()
        if hasattr(self, "watch"):
            self._watching.cancel()
            await self.watch.close()
        local_cluster.stop_all(self._state)

    def tell(self, command: str) -> None:
        """Give all processes of agents a command."""
        for driver in self._drivers:
            self._write(driver, command)

    async def num_beats(self) -> int:
        """The heartbeats that all agents have sent."""
        self.tell("count")
        return sum([int(await self._line(driver)) for driver in self._drivers])

    def _write(self, driver: asyncio.subprocess.Process, line: str) -> None:
        assert driver.stdin is not None
        driver.stdin.write(line.encode() + b"\n")

    async def _line(self, driver: asyncio.subprocess.Process) -> str:
        assert driver.stdout is not None
        line = await driver.stdout.readline()
        if not line:
            raise NotReached("a process of agents has ended")
        return line.decode().strip()

    async def until(self, holds: Callable[[], bool], what: str, s_max: float = WAIT_S_MAX) -> None:
        """Wait until `holds`. Raises NotReached."""
        deadline_s = time.monotonic() + s_max
        while not holds():
            if time.monotonic() > deadline_s:
                raise NotReached(f"{what}: not within {s_max:g} s")
            if self._watching.done():
                self._watching.result()
            await asyncio.sleep(POLL_S)

    # --- what it costs ----------------------------------------------------------------------------
    def cpu_s(self, name: str = "") -> float:
        """CPU seconds of the control plane or of the server so far; "": of both."""
        ticks = 0
        for pid in [self.pids[name]] if name else self.pids.values():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory_mb(self, name: str) -> float:
        """Resident memory of the control plane or the server, in MB."""
        pages = int(Path(f"/proc/{self.pids[name]}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
