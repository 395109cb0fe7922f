"""A failover of the log's server under load, with real servers and Sentinels: what is lost, and who
says so. Two control planes, four clients and two agents go on by themselves."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import replicated_servers
from replicated_servers import TcpServer
from structlog.testing import capture_logs
from unicron.control_plane.service.coordinator import Coordinator
from unicron.control_plane.service.limits import Limits
from unicron.events.errors import Fenced, Unavailable
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record, order_nodes
from unicron.events.spec import job as spec
from unicron.events.spec.policy import Policy
from unicron.workers.agent.delivery.log_link import LogLink
from unicron.workers.agent.delivery.outbox import Outbox
from unicron.workers.agent.delivery.spool import Spool

WAIT_S_MAX = 120.0
IDENTITIES = Identities(bytes(SECRET_BYTES), "c")
NODES = ("n1", "n2")


class Load:
    """What was answered and reported, and the parts that do it."""

    def __init__(self, url: str, policy: Policy) -> None:
        self.policy = policy
        self.logs = {
            name: RedisLog(url, "c", IDENTITIES.key, policy=policy) for name in ("a", "b", *NODES)
        }
        self.planes: dict[str, Coordinator] = {}
        self.answers: dict[str, int] = {}
        """By request id."""
        self.orders: dict[str, list[tuple[int, int]]] = {node: [] for node in NODES}
        """(epoch, seq) of the orders that each node has read."""
        self.reported: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        outboxes = {
            node: Outbox(self.logs[node], LogLink(), Spool(f"{node}/1", node, time.time))
            for node in NODES
        }
        await self.logs["a"].admit(dict.fromkeys(NODES, 1))
        for node, box in outboxes.items():
            box.put(r.NodeJoined(node=node, incarnation=1, host="h", pid=1, num_slots=500))
        tasks = [
            asyncio.create_task(work)
            for work in (
                *(self._lead(name) for name in ("a", "b")),
                *(box.run() for box in outboxes.values()),
                *(self._report(node, box) for node, box in outboxes.items()),
                *(self._follow(node) for node in NODES),
                *(self._write(one) for one in range(4)),
            )
        ]
        self._tasks = tasks
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for log in self.logs.values():
                await log.close()

    async def until(self, holds: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + WAIT_S_MAX
        while not holds():
            for task in self._tasks:
                assert not task.done(), task
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)

    async def until_more(self, num: int = 20) -> None:
        """Until so many more requests are answered."""
        until = len(self.answers) + num
        await self.until(lambda: len(self.answers) >= until)

    @property
    def leader(self) -> Coordinator | None:
        return next((one for one in self.planes.values() if one.leading), None)

    async def _lead(self, name: str) -> None:
        """A control plane that is started again when another one has fenced it, as by `up`."""
        for number in range(100):
            self.planes[name] = Coordinator(
                self.logs[name],
                clock=time.time,
                nonce=f"{name}{number}",
                code="test",
                policy=self.policy,
                limits=Limits(call_s_max=3.0),
                jitter=random.Random(1),
            )
            with suppress(Fenced):
                await self.planes[name].run(f"http://{name}")

    async def _write(self, client: int) -> None:
        for number in range(100_000):
            request = f"c{client}-{number}"
            while request not in self.answers:
                submitted = r.TaskSubmitted(
                    spec=spec.parse(
                        {
                            "apiVersion": spec.API_VERSION,
                            "name": request,
                            "command": ["true"],
                            "slots": {"min": 1, "max": 1},
                        }
                    )
                )
                with suppress(Unavailable):
                    if (leader := self.leader) is not None:
                        self.answers[request] = await leader.write(request, submitted)
                await asyncio.sleep(0.02)

    async def _report(self, node: str, box: Outbox) -> None:
        for number in range(100_000):
            box.put(r.MemoryCheckpointsLost(node=node, incarnation=1, task=0, why=str(number)))
            self.reported[node] = number + 2
            await asyncio.sleep(0.05)

    async def _follow(self, node: str) -> None:
        cursor, link = "0-0", LogLink()
        while True:
            sent = await link.retry(
                partial(self.logs[node].orders, node, after=cursor, wait_s=1.0), 12.0
            )
            cursor = sent[-1].cursor if sent else cursor
            self.orders[node] += [(one.record.epoch, one.record.seq) for one in sent]


@asynccontextmanager
async def loaded(
    folder: Path, replicas_min: int
) -> AsyncGenerator[tuple[Load, TcpServer, TcpServer]]:
    with (
        replicated_servers.replicated(folder) as (primary, replica),
        replicated_servers.watched(folder, primary) as (url, _),
    ):
        load = Load(url, Policy(replicas_min=replicas_min))
        for log in load.logs.values():
            await log.check()
        async with load.running():
            await load.until(lambda: load.leader)
            await load.until_more()
            yield load, primary, replica


async def records(load: Load) -> list[Record]:
    found: list[Record] = []
    while page := await load.logs["n1"].read(after=len(found), num_max=5_000):
        found += page
    return found


def gone(answers: dict[str, int], log: list[Record]) -> list[int]:
    """Seqs that were answered, and that do not have the request in the log."""
    of_request = {
        one.source.removeprefix("operator/"): one.seq for one in log if one.kind == "TaskSubmitted"
    }
    return sorted(seq for request, seq in answers.items() if of_request.get(request) != seq)


def losses(log: list[Record]) -> list[tuple[int, int]]:
    return [
        (one.body.lost_from, one.body.lost_to)
        for one in log
        if isinstance(one.body, r.OutageEnded) and one.body.lost_to
    ]


async def until_delivered(load: Load) -> tuple[list[Record], list[int]]:
    """The log, once it has all reports until now, each once; and the answers that it has not."""
    reported = dict(load.reported)
    await load.until(
        lambda: all(
            (leader := load.leader) and leader._leader.state.sources.get(f"{node}/1", 0) >= num
            for node, num in reported.items()
        )
    )
    answers = dict(load.answers)  # before the log is read: others are answered meanwhile
    log = await records(load)
    for node in NODES:
        numbers = [one.source_seq for one in log if one.source == f"{node}/1"]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= reported[node]
    assert not [one for one in log if one.kind == "ReportsLost"]
    return log, gone(answers, log)


@pytest.mark.parametrize("round_number", [0, pytest.param(1, marks=pytest.mark.thorough)])
async def test_with_a_replica_nothing_acknowledged_is_lost(
    tmp_path: Path, round_number: int
) -> None:
    """While the new primary has no replica nothing is acknowledged; then all goes on."""
    async with loaded(tmp_path, 1) as (load, primary, replica):
        await asyncio.sleep(random.Random(round_number).random())
        primary.process.kill()
        before = len(load.answers)
        await load.until(lambda: replica.role == "master")
        await asyncio.sleep(3.0)
        assert len(load.answers) <= before + 4, "those that were on the way"
        with replicated_servers.serving(primary.folder, port=primary.port):
            await load.until_more()
            log, missing = await until_delivered(load)
        assert missing == []
        assert losses(log) == []
        assert len(load.answers) > before + 16


async def test_without_a_replica_what_is_lost_is_said(tmp_path: Path) -> None:
    """The replica is stopped and then promoted. Requests that it did not have are lost, and named;
    agents send their reports again, and read all orders of the new epoch."""
    async with loaded(tmp_path, 0) as (load, primary, replica):
        replica.process.send_signal(signal.SIGSTOP)
        primary.client.execute_command("CLIENT", "KILL", "TYPE", "replica")
        await load.until_more()
        had = await records(load)
        epoch = had[-1].epoch
        primary.process.kill()
        with capture_logs() as logged:
            replica.process.send_signal(signal.SIGCONT)
            await load.until(lambda: (leader := load.leader) and leader.epoch > epoch)
            await load.until_more()
            log, missing = await until_delivered(load)
            ordered = {
                node: {(one.epoch, one.seq) for one in log if node in order_nodes(one)}
                for node in NODES
            }
            await load.until(
                lambda: all(  # also those that have the numbers of lost ones
                    ordered[node] <= set(load.orders[node]) for node in NODES
                )
            )
        assert len(missing) >= 16
        ((lost_from, lost_to),) = losses(log)
        assert lost_from <= missing[0] <= missing[-1] <= lost_to
        (started,) = [
            one for one in log if isinstance(one.body, r.OutageEnded) and one.body.lost_to
        ]
        assert started.seq >= lost_from, "it may be that one led first who did not know"
        assert started.epoch > epoch
        assert lost_to >= had[-1].seq
        assert log[: lost_from - 1] == had[: lost_from - 1]
        assert log[lost_from - 1] not in had
        assert any("the log has lost records" in one["event"] for one in logged)
        for node in NODES:
            assert any(
                one.get("source") == f"{node}/1"
                and one["num_not_kept"] == 0
                and "the log has lost reports" in one["event"]
                for one in logged
            )
            assert any(of_epoch == started.epoch for of_epoch, _ in ordered[node])
