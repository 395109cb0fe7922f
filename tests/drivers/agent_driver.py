"""A leader without decisions, and agents whose ranks are real processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from unicron.events.errors import Ambiguous, Unavailable
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records.envelope import Record, Report
from unicron.events.records.orders import StartRank, StopRank
from unicron.events.records.reports import NodeJoined, RankStarted, ReportsLost
from unicron.events.records.types import Body, Slot
from unicron.events.spec.job import JobSpec, parse
from unicron.events.spec.policy import OUTPUT_BYTES_MAX
from unicron.workers.agent.agent import Agent
from unicron.workers.agent.delivery.spool import Spool
from unicron.workers.agent.processes.launcher import NodeConfig, marker_prefix
from unicron.workers.agent.processes.process import Output, Process
from unicron.workers.agent.processes.shim import Shim
from unicron.workers.host import linux, rank_cgroups
from unicron.workers.host.rank_cgroups import Limits, RankCgroups

LIMIT_S = 75.0
T = TypeVar("T")
B = TypeVar("B", bound=Body)

TOKEN = "a-token"
AGENT = """
import os, sys
from pathlib import Path
from unicron.events.errors import UsageError
from unicron.workers.agent.health.custom_checks import CheckOptions
from unicron.workers.agent.main import AgentOptions, run
url, state, token = sys.argv[1:]
folder = os.environ.get("CHECKS")
changes = {"num_slots": int(os.environ.get("SLOTS", "2"))}
if "RANK" in os.environ:
    changes["rank_argv"] = (sys.executable, os.environ["RANK"])
if "KUBERNETES" in os.environ:
    changes["kubernetes"] = os.environ["KUBERNETES"]
checks = CheckOptions(folder=Path(folder), every_s=0.2, s_max=60.0) if folder else None
try:
    sys.exit(run(AgentOptions(node="n1", url=url, token=token, state_dir=Path(state),
                              enrols="ENROLS" in os.environ, checks=checks, **changes)))
except UsageError as error:
    sys.exit(f"error: {error}; hint: {error.hint}")
"""
CHILD_OF_ITS_OWN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"],
                         start_new_session=True)
open(sys.argv[1], "w").write(f"{child.pid} ")
time.sleep(120)
"""
"""A rank whose child leaves its process group. The rank writes the child's pid to a file."""
WAITS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""
"""A rank that ends when a file exists."""
_numbers = itertools.count(1)

RANK = '''
"""A rank that speaks the real wire: answers what it is told, and acts on its spec's seed."""
import os, signal, socket, sys, time
from unicron.events.records.orders import Quiesce, Reconfigure, Resume, StartRank
from unicron.events.records.reports import (
    NodeLeft,
    Quiesced,
    RankErrored,
    RankReady,
    TaskProgressed,
)
from unicron.workers.ipc.pipe_protocol import Frame, Unpacker, pack

link = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
unpacker = Unpacker()
order = None
def say(body):
    link.sendall(pack(Frame(body=body, at_s=time.time() - 5)))
while data := link.recv(65536):
    for frame in unpacker.feed(data):
        body = frame.body
        print(type(body).__name__, frame.seq, frame.epoch, flush=True)
        if isinstance(body, StartRank):
            order = body
            ids = dict(task=order.task, rank=order.rank, attempt=order.attempt)
            say(RankReady(**ids, endpoint=os.environ["UNICRON_HOST"] + ":1", num_params=1,
                          state_bytes=1, iteration_flops=1.0,
                          data_digest=os.environ["OMP_NUM_THREADS"]))
        elif isinstance(body, Quiesce):
            say(Quiesced(**ids, generation=body.generation, step_version=0, micro_batches=(),
                         buckets_reduced=0, num_buckets=1))
        elif isinstance(body, Resume):
            seed = order.spec.train.seed
            if seed == 1:      # says much, then dies at once
                for i in range(50):
                    say(TaskProgressed(task=order.task, generation=1, first_iteration=i,
                                       losses=(1.0,), step_s=(1.0,), rate_flops=1.0,
                                       micro_batches=1))
                say(RankErrored(**ids, generation=1, iteration=50, error="E", text="last words"))
                os.kill(os.getpid(), signal.SIGKILL)
            elif seed == 2:    # says what is not a rank's to say
                say(NodeLeft(node="n1", incarnation=1, reason="no"))
                time.sleep(60)
            elif seed == 3:
                link.sendall(b"\\xff" * 100)
                time.sleep(60)
'''


CANARY = f"canary-{os.getpid()}-7e3a"
SECRETS = {
    "UNICRON_TOKEN": f"{CANARY}-token",
    "UNICRON_URL": f"http://u:{CANARY}-url@host:1",
    "UNICRON_REDIS_URL": f"redis://:{CANARY}-redis@host:1/0",
}
"""Secrets that an agent finds in its environment."""


def processes_with(text: str) -> list[str]:
    """The names of all processes whose environment, as the kernel shows it, has `text`."""
    return [
        Path(f"/proc/{proc.pid}/comm").read_text()
        for proc in linux.table()
        if any(text.encode() in entry for entry in linux.environ(proc.pid))
    ]


class Leader:
    """Appends reports to the log in source order, and issues orders. Decides nothing."""

    def __init__(self, log: RedisLog) -> None:
        self.log = log
        self.records: list[Record] = []
        self.epoch = 0
        self._last: dict[str, int] = {}
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Run for ever. After a failed or ambiguous call, read the log again in a new epoch."""
        cursor = "0-0"
        while True:
            try:
                if not self.epoch:
                    epoch = await self.log.start_epoch("test")
                    self.records = await self.log.read(after=0, num_max=100_000)
                    self._last = {r.source: r.source_seq for r in self.records}
                    cursor, self.epoch = await self.log.cursor(), epoch
                batch = await self.log.take(after=cursor, num_max=100, wait_s=0.2)
                for sent in batch.entries:
                    report = self.log.read_report(sent)
                    if isinstance(report, Report):
                        await self._take(report)
                    cursor = sent.cursor
            except (Unavailable, Ambiguous):
                self.epoch = 0
                await asyncio.sleep(0.05)

    async def _take(self, report: Report) -> None:
        last = self._last.get(report.source, 0)
        lost = isinstance(report.body, ReportsLost) and report.source_seq > last
        if report.source_seq == last + 1 or lost:
            await self._append(report.body, report.source, report.source_seq, report.occurred_s)
            self._last[report.source] = report.source_seq

    async def _append(self, body: Body, source: str, source_seq: int, occurred_s: float) -> Record:
        async with self._writing:
            record = Record(
                seq=len(self.records) + 1,
                epoch=self.epoch,
                at_s=0.0,
                occurred_s=occurred_s,
                source=source,
                source_seq=source_seq,
                cause=0,
                incident=0,
                body=body,
            )
            await self.log.append(
                [record],
                epoch=self.epoch,
                expect=record.seq - 1,
                cursor="",
                acked={source: source_seq} if source_seq else {},
            )
            self.records.append(record)
            return record

    async def order(self, order: Body) -> int:
        return (await self._append(order, "heart", 0, 0.0)).seq

    def all(self, kind: type[B]) -> list[B]:
        return [record.body for record in self.records if isinstance(record.body, kind)]

    async def wait(self, kind: type[B], num: int = 1) -> list[B]:
        """Wait until the log holds `num` records of a kind."""
        return await until(lambda: found if len(found := self.all(kind)) >= num else None)


async def until(look: Callable[[], T | None]) -> T:
    """Poll `look`; return its first result that is not None."""
    deadline = time.monotonic() + LIMIT_S
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"no result within {LIMIT_S} s"
        await asyncio.sleep(0.005)
    return found


async def until_gone(pid: int) -> None:
    """Wait until the process has ended; a zombie has ended."""
    await until(lambda: None if alive(pid) else True)


async def until_text(path: str | Path) -> str:
    """The text of a file, once it is not empty."""
    file = Path(path)
    return await until(lambda: (file.read_text() if file.exists() else "") or None)


def new_shim(folder: Path) -> Shim:
    return Shim.open(
        folder / "n1.shim", os.environ, ("UNICRON_PROCESS", "shim"), folder / "shim.log"
    )


def start(shim: Shim, argv: Sequence[str], log_path: Path, marker: tuple[str, str]) -> Process:
    """A process as of a rank."""
    return Process.start(
        shim,
        "1.0.1",
        lambda at: b"",
        argv,
        env=os.environ,
        marker=marker,
        output=Output(log_path, OUTPUT_BYTES_MAX),
    )


class LocalNode:
    """A leader and an agent in this process, on one log. The agent's ranks are real processes."""

    def __init__(self, log: RedisLog, state_dir: Path, **changes: Any) -> None:
        script = state_dir / "rank.py"
        script.write_text(RANK)
        self.leader = Leader(log)
        self.node = msgspec.structs.replace(
            NodeConfig(
                name="n1",
                incarnation=7,
                cluster="c",
                host="127.0.0.9",
                num_slots=2,
                state_dir=state_dir,
                rank_argv=(sys.executable, str(script)),
            ),
            **changes,
        )
        self.stop = asyncio.Event()
        shim = new_shim(state_dir)
        self.agent = Agent(
            self.node,
            log,
            time.time,
            os.getpid(),
            spool=Spool(self.node.source, self.node.name, time.time),
            left=[],
            shim=shim,
        )
        self.serving: asyncio.Task[None] | None = None

    async def start(self, spec: JobSpec, rank: int = 0, **changes: Any) -> int:
        order = StartRank(
            nodes=("n1",),
            task=1,
            rank=rank,
            attempt=1,
            slot=Slot(node="n1", index=rank),
            spec=spec,
            num_seats=2,
            host="127.0.0.1",
            port=4242,
            checkpoint="",
            incarnation=7,
        )
        return await self.leader.order(msgspec.structs.replace(order, **changes))

    async def stop_rank(self, rank: int = 0, attempt: int = 1, grace_s: float = 5.0) -> int:
        return await self.leader.order(
            StopRank(nodes=("n1",), task=1, rank=rank, attempt=attempt, grace_s=grace_s, why="test")
        )


@asynccontextmanager
async def local_node(log: RedisLog, state_dir: Path, **changes: Any) -> AsyncGenerator[LocalNode]:
    one = LocalNode(log, state_dir, **changes)
    leading = asyncio.create_task(one.leader.run())
    one.serving = asyncio.create_task(one.agent.run(one.stop))
    try:
        await one.leader.wait(NodeJoined)
        yield one
        one.stop.set()
        await asyncio.wait_for(one.serving, LIMIT_S)
    finally:
        for task in (one.serving, leading):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for started in one.leader.all(RankStarted):
            await until_gone(started.pid)


def alive(pid: int) -> bool:
    proc = linux.read(pid)
    return proc is not None and proc.state not in "ZX"


def dies(pid: int, within_s: float = 60.0) -> bool:
    """Whether the process ends within this time. After SIGKILL the kernel needs a moment too."""
    last_s = time.monotonic() + within_s
    while alive(pid):
        if time.monotonic() > last_s:
            return False
        time.sleep(0.02)
    return True


def command(*argv: str) -> JobSpec:
    return parse(
        {"apiVersion": "unicron/v1", "name": "job", "slots": {"max": 2}, "command": list(argv)}
    )


def python(code: str, *argv: str) -> JobSpec:
    return command(sys.executable, "-c", code, *argv)


def train(seed: int) -> JobSpec:
    return parse(
        {
            "apiVersion": "unicron/v1",
            "name": "gpt",
            "train": {"iterations": 9, "output": "out", "seed": seed},
        }
    )


def go(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 2 * LIMIT_S)

    asyncio.run(limited())


class PlaneStub:
    """The interface of a control plane without decisions: join by HTTP, reports in, orders out."""

    def __init__(self, url: str, state_dir: Path) -> None:
        self.cluster = f"agent-{os.getpid()}-{next(_numbers)}"
        self.identities = Identities(bytes(SECRET_BYTES), self.cluster)
        self.log = RedisLog(url, self.cluster, self.identities.key)
        self.leader = Leader(self.log)
        self.state_dir = state_dir
        self.url = ""
        self.agents: list[subprocess.Popen[bytes]] = []
        self.gone_s = 60.0
        self.output_bytes_max = OUTPUT_BYTES_MAX
        self._redis_url = url
        self.refusal = 0
        """If not 0, the status of the answers to joins."""
        self.joined: list[tuple[str, str]] = []
        """The token and the identity of each join."""

    async def joins(self, request: web.Request) -> web.Response:
        request_body = await request.json()
        token = request.headers["Authorization"].removeprefix("Bearer ")
        self.joined.append((token, request_body.get("identity", "")))
        if self.refusal:
            return web.json_response({"error": "no", "hint": ""}, status=self.refusal)
        if token != TOKEN and (TOKEN, token) not in self.joined:
            return web.json_response({"error": "wrong token", "hint": ""}, status=401)
        await self.log.admit({request_body["node"]: request_body["incarnation"]})
        return web.json_response(
            {
                "redis_url": self._redis_url,
                "cluster": self.cluster,
                "node": request_body["node"],
                "epoch": self.leader.epoch,
                "key": self.identities.key(request_body["node"]).hex(),
                "agent_gone_s_max": self.gone_s,
                "has_lists": True,
                "output_bytes_max": self.output_bytes_max,
            }
        )

    async def move(self, url: str) -> None:
        """The log is at another server from now on, and the control plane has another secret."""
        self._redis_url = url
        self.identities = Identities(os.urandom(SECRET_BYTES), self.cluster)
        await self.log.move(url, self.identities.key)

    async def start(self, code: str, *argv: str, rank: int = 0, attempt: int = 1) -> None:
        await self.start_rank(python(code, *argv), rank=rank, attempt=attempt)

    async def start_rank(self, spec: JobSpec, *, rank: int = 0, attempt: int = 1) -> None:
        (*_, joined) = self.leader.all(NodeJoined)
        await self.leader.order(
            StartRank(
                nodes=("n1",),
                task=1,
                rank=rank,
                attempt=attempt,
                slot=Slot(node="n1", index=rank),
                spec=spec,
                num_seats=2,
                host="127.0.0.1",
                port=1,
                checkpoint="",
                incarnation=joined.incarnation,
            )
        )

    def agent(self, token: str = TOKEN, **env: str) -> subprocess.Popen[bytes]:
        with (self.state_dir / "agent.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", AGENT, self.url, str(self.state_dir), token],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **env},
            )
        self.agents.append(process)
        return process

    def shims(self) -> list[int]:
        """The shim of the node, which is the parent of its ranks."""
        mark = f"UNICRON_PROCESS={self.state_dir}:n1/:shim".encode()
        return [
            proc.pid
            for proc in linux.table()
            if proc.state != "Z" and mark in linux.environ(proc.pid)
        ]

    def kill_shim(self) -> None:
        """Kill the shim. Its ranks die with it."""
        (shim,) = self.shims()
        os.kill(shim, signal.SIGKILL)

    def said(self) -> str:
        return (self.state_dir / "agent.log").read_text()

    async def wait(self, kind: type[B], num: int = 1) -> list[B]:
        return await self.leader.wait(kind, num)

    def all(self, kind: type[B]) -> list[B]:
        return self.leader.all(kind)

    def kinds(self) -> list[str]:
        """The kinds of the agents' reports, as logged."""
        return [r.kind for r in self.leader.records if r.source != "heart"]


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await until(process.poll)


@asynccontextmanager
async def plane(url: str, state_dir: Path) -> AsyncGenerator[PlaneStub]:
    state_dir.mkdir()
    one = PlaneStub(url, state_dir)
    app = web.Application()
    app.router.add_post("/v1/join", one.joins)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    leading = asyncio.create_task(one.leader.run())
    try:
        yield one
    finally:
        leading.cancel()
        with suppress(asyncio.CancelledError):
            await leading
        for process in one.agents:
            if process.poll() is None:
                process.kill()
            process.wait(LIMIT_S)
        linux.kill_marked(f"UNICRON_PROCESS={state_dir}:".encode())
        if (base := rank_cgroups.find()) is not None:  # those of a killed agent
            RankCgroups(base, marker_prefix(state_dir, "n1"), Limits()).clear(())
        await one.log.close()
        await runner.cleanup()
