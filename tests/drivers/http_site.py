"""A control plane's HTTP API on a real socket, with a client for tests."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import structlog
from memory_log import MemoryLog
from unicron.control_plane.api.address import Address
from unicron.control_plane.api.connections import ConnectionLimits, Listener
from unicron.control_plane.api.http import HttpApi
from unicron.control_plane.api.metrics import Metrics
from unicron.control_plane.api.routes import ROUTES
from unicron.control_plane.api.tokens import Tokens
from unicron.control_plane.service.coordinator import Coordinator
from unicron.control_plane.service.limits import Limits
from unicron.events.log.identity import AGENT_REPORTS, SECRET_BYTES, Identities
from unicron.events.records.envelope import Report
from unicron.events.records.types import Body
from unicron.events.spec import job
from unicron.events.spec.policy import Policy

POLICY = Policy()
JOB: dict[str, Any] = {
    "apiVersion": job.API_VERSION,
    "name": "job",
    "train": {"iterations": 3, "output": "/out"},
}
IDENTITIES = Identities(bytes(SECRET_BYTES), "test")


class Site:
    """One control plane and an HTTP client of it."""

    def __init__(
        self,
        log: MemoryLog,
        coordinator: Coordinator,
        client: aiohttp.ClientSession,
        url: str,
        tokens: Tokens,
        tokens_file: Path,
    ) -> None:
        self.log, self.coordinator, self.client, self.url = log, coordinator, client, url
        self.tokens, self.tokens_file = tokens, tokens_file
        self.told = Counter[str]()

    async def ask(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, Any]:
        data = (
            body
            if isinstance(body, bytes)
            else (None if body is None else json.dumps(body).encode())
        )
        named = {"Authorization": "Bearer secret", "Content-Type": "application/json"} | {
            k.replace("_", "-"): v for k, v in headers.items()
        }
        async with self.client.request(method, self.url + path, data=data, headers=named) as reply:
            assert reply.content_type == (
                "application/json"
                if reply.status < 300 or path[:7] == "/readyz"
                else "application/problem+json"
            )
            return reply.status, json.loads(await reply.read())

    async def refused(
        self, status: int, method: str, path: str, body: object = None, **headers: str
    ) -> str:
        return (await self.refusal(status, method, path, body, **headers))[0]

    async def refusal(
        self, status: int, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[str, str]:
        """The problem's detail and hint."""
        got, answer = await self.ask(method, path, body, **headers)
        assert got == status, answer
        assert set(answer) == {"type", "title", "status", "detail", "hint"}
        assert answer["status"] == status
        assert "\n" not in answer["detail"]
        assert answer["detail"]
        return str(answer["detail"]), str(answer["hint"])

    async def written_once(self, kind: str, path: str, body: object) -> Any:
        """Two requests with one key get the same answer and write one record. Returns its body."""
        _, first = await self.ask("POST", path, body, Idempotency_Key=kind)
        status, again = await self.ask("POST", path, body, Idempotency_Key=kind)
        assert (status, first) == (200, again)
        found = [r for r in await self.log.read(after=0, num_max=999) if r.kind == kind]
        assert [r.seq for r in found] == [first["seq"]]
        assert found[0].source.startswith(f"operator/{kind}.")
        return found[0].body

    async def tell(self, *bodies: Body) -> None:
        """Send reports as the agents of their nodes, or of n1; what no agent reports is written as
        an operator's request is. Return when they are in the log."""
        for body in bodies:
            if type(body) not in AGENT_REPORTS:
                self.told["operator"] += 1
                await self.coordinator.write(f"told-{self.told['operator']}", body)
                continue
            of_other = AGENT_REPORTS[type(body)] == "share"
            node = "n1" if of_other else getattr(body, "node", "n1")
            source = f"{node}/{getattr(body, 'incarnation', 9)}"
            self.told[source] += 1
            number = self.told[source]
            await self.log.send(
                [Report(source=source, source_seq=number, occurred_s=1.0, body=body)]
            )
            while await self.log.acked(source) < number:
                await asyncio.sleep(0.01)
        await self.coordinator.settled()


@asynccontextmanager
async def serving(
    policy: Policy = POLICY, limits: ConnectionLimits | None = None
) -> AsyncIterator[Site]:
    # Not to stdout: a command in this process may have redirected that.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
    log = MemoryLog(time.monotonic)
    metrics = Metrics()
    coordinator = Coordinator(
        log,
        clock=time.time,
        nonce="a",
        code="test",
        policy=policy,
        limits=Limits(call_s_max=0.5),
        observe=metrics.observe,
    )
    leading = asyncio.create_task(coordinator.run())
    folder = TemporaryDirectory()
    tokens_file = Path(folder.name) / "tokens.json"
    tokens = Tokens(tokens_file, owner="secret")
    http = HttpApi(
        ROUTES,
        coordinator,
        log,
        tokens=tokens,
        address=Address(redis_url="unix:///run/x", cluster="test"),
        identities=IDENTITIES,
        metrics=metrics,
    )
    listener = Listener(http.app(), stop_s_max=1.0, limits=limits)
    port = await listener.start("127.0.0.1", 0)
    await coordinator.settled()
    try:
        async with aiohttp.ClientSession() as client:
            yield Site(log, coordinator, client, f"http://127.0.0.1:{port}", tokens, tokens_file)
    finally:
        coordinator.stop()
        await asyncio.wait_for(leading, 60)
        await listener.stop()
        folder.cleanup()
        structlog.reset_defaults()


Test = Callable[[Site], Coroutine[Any, Any, None]]


def real(test: Test, policy: Policy = POLICY) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            async with asyncio.timeout(120), serving(policy) as site:
                await test(site)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
