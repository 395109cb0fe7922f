"""The HTTP port: every call over a real socket, every refusal one line with a hint."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from unicron.control_plane.coordinator import Coordinator, Limits
from unicron.control_plane.http import Address, Http
from unicron.events import codec, spec
from unicron.events.memory_log import MemoryLog
from unicron.events.records import Report
from unicron.events.reports import NodeJoined

JOB: dict[str, Any] = {
    "apiVersion": spec.API_VERSION, "name": "job",
    "train": {"iterations": 3, "output": "/out"},
}
TWO: dict[str, Any] = JOB | {"name": "two", "train": {"iterations": 3, "output": "/two"}}


class Site:
    """One control plane and a client of it."""

    def __init__(self, log: MemoryLog, coordinator: Coordinator, client: aiohttp.ClientSession,
                 url: str) -> None:
        self.log, self.coordinator, self.client, self.url = log, coordinator, client, url

    async def ask(self, method: str, path: str, body: object = None,
                  **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else (
            None if body is None else json.dumps(body).encode())
        named = {"Authorization": "Bearer secret"} | {k.replace("_", "-"): v
                                                      for k, v in headers.items()}
        async with self.client.request(method, self.url + path, data=data, headers=named) as reply:
            assert reply.content_type == "application/json"
            return reply.status, await reply.json()

    async def refused(self, status: int, method: str, path: str, body: object = None,
                      **headers: str) -> str:
        got, answer = await self.ask(method, path, body, **headers)
        assert got == status, answer
        assert set(answer) == {"error", "hint"}
        assert "\n" not in answer["error"]
        assert answer["error"]
        return str(answer["error"])


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    log = MemoryLog(time.monotonic)
    coordinator = Coordinator(log, clock=time.time, nonce="a", code="test",
                              limits=Limits(call_s_max=0.5))
    leading = asyncio.create_task(coordinator.run())
    http = Http(coordinator, log, token="secret",
                address=Address(redis_url="unix:///run/x", cluster="test"))
    runner = web.AppRunner(http.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await coordinator.settled()
    try:
        async with aiohttp.ClientSession() as client:
            yield Site(log, coordinator, client, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        coordinator.stop()
        await asyncio.wait_for(leading, 5)
        await runner.cleanup()


def real(test: Callable[[Site], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            async with asyncio.timeout(20), serving() as site:
                await test(site)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@real
async def test_health_needs_no_token(site: Site) -> None:
    async with site.client.get(site.url + "/v1/health") as reply:
        answer = await reply.json()
    assert answer["ok"] is answer["leader"] is True
    assert (answer["cluster"], answer["epoch"], answer["seq"]) == ("test", 1, 2)


@real
async def test_everything_else_needs_the_token(site: Site) -> None:
    for token in ("", "Bearer wrong", "secret", "Bearer secret\x80"):
        assert "token" in await site.refused(401, "GET", "/v1/state", Authorization=token)
    await site.refused(401, "POST", "/v1/tasks", JOB, Authorization="Bearer wrong")
    assert site.coordinator.seq == 2


@real
async def test_submit_state_cancel(site: Site) -> None:
    status, answer = await site.ask("POST", "/v1/tasks", JOB, Idempotency_Key="k1")
    assert (status, answer) == (200, {"seq": 3, "task": 3})
    assert (await site.ask("POST", "/v1/tasks", JOB, Idempotency_Key="k1"))[1] == answer
    _, state = await site.ask("GET", "/v1/state")
    assert [task["id"] for task in state["tasks"]] == [3]
    cancel = "/v1/tasks/3/cancel"
    _, first = await site.ask("POST", cancel, {"reason": "why not"}, Idempotency_Key="k2")
    _, again = await site.ask("POST", cancel, {"reason": "why not"}, Idempotency_Key="k2")
    assert first == again, "repeated after the task's end, it is answered as before"
    assert "has ended" in await site.refused(409, "POST", cancel, {})
    assert "no task 99" in await site.refused(404, "POST", "/v1/tasks/99/cancel", {})
    assert "no task x" in await site.refused(404, "POST", "/v1/tasks/x/cancel", {})


@real
async def test_a_task_in_anothers_way_is_refused(site: Site) -> None:
    at_once = [site.ask("POST", "/v1/tasks", JOB) for _ in range(3)]
    assert sorted([status for status, _ in await asyncio.gather(*at_once)]) == [200, 409, 409]
    seq = site.coordinator.seq
    told = await site.refused(409, "POST", "/v1/tasks", TWO | {"name": "job"})
    assert told == "name: job is live, by task 3 (job)"
    told = await site.refused(409, "POST", "/v1/tasks",
                              TWO | {"train": {"iterations": 3, "output": "/two/../out/"}})
    assert told == "train.output: /two/../out/ is being written, by task 3 (job)"
    assert site.coordinator.seq == seq, "nothing was written"
    await site.ask("POST", "/v1/tasks/3/cancel", {})
    assert (await site.ask("POST", "/v1/tasks", JOB))[0] == 200, "an ended task is in nobody's way"


@real
async def test_a_task_that_the_cluster_cannot_hold_is_refused(site: Site) -> None:
    large = JOB | {"slots": {"min": 4, "max": 4}}
    assert (await site.ask("POST", "/v1/tasks", large))[0] == 200, "nobody has joined yet"
    await site.log.send([Report(source="n1/9", source_seq=1, occurred_s=1.0, body=NodeJoined(
        node="n1", incarnation=9, host="h", pid=1, num_slots=3))])
    while (await site.ask("GET", "/v1/state"))[1]["cluster"]["num_slots"] < 3:
        await asyncio.sleep(0.01)
    told = await site.refused(422, "POST", "/v1/tasks", TWO | {"slots": large["slots"]})
    assert told == "slots.min: 4, but the cluster has had at most 3 slots"


@pytest.mark.parametrize(("change", "status", "where"), [
    ({"name": "Not A Name"}, 422, "name"), ({"nonsense": 1}, 422, "nonsense"),
    ({"slots": {"min": 3, "max": 2}}, 422, "slots.max"), ({"apiVersion": "v9"}, 422, "apiVersion"),
    ({"train": None}, 422, "exactly one"), ({"weight": "heavy"}, 422, "weight"),
])
def test_a_bad_spec_is_refused(change: dict[str, Any], status: int, where: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), serving() as site:
            assert where in await site.refused(status, "POST", "/v1/tasks", JOB | change)
            assert site.coordinator.seq == 2, "nothing was written"

    asyncio.run(main())


@real
async def test_bad_bodies_are_refused(site: Site) -> None:
    for body in (b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"[" * 100_000):
        status, answer = await site.ask("POST", "/v1/tasks", body)
        assert status in (400, 422), body
        assert answer["error"]
        assert "\n" not in answer["error"]
    await site.refused(413, "POST", "/v1/tasks", b" " * (2 << 20))
    await site.refused(400, "POST", "/v1/tasks", JOB, Idempotency_Key="no spaces")
    await site.refused(400, "POST", "/v1/tasks/3/cancel", {"raeson": "a typo"}, )
    await site.refused(404, "GET", "/v1/nothing")
    await site.refused(405, "GET", "/v1/tasks")
    await site.refused(400, "GET", "/v1/log?after=-1")
    await site.refused(400, "GET", "/v1/log?after=x")
    await site.refused(400, "GET", "/v1/log?follow=2")
    assert site.coordinator.seq == 2


@real
async def test_the_log_is_streamed(site: Site) -> None:
    await site.ask("POST", "/v1/tasks", JOB)
    headers = {"Authorization": "Bearer secret"}
    async with site.client.get(site.url + "/v1/log?after=1", headers=headers) as reply:
        lines = [json.loads(line) async for line in reply.content]
    records = [codec.from_plain(line) for line in lines]
    assert records == await site.log.read(after=1, num_max=99)
    async with site.client.get(site.url + "/v1/log?after=0&follow=1", headers=headers) as reply:
        seqs = [json.loads(await reply.content.readline())["seq"] for _ in records]
        write = asyncio.create_task(site.ask("POST", "/v1/tasks", TWO))
        while seqs[-1] < (await site.log.last_seq()) or not write.done():
            seqs.append(json.loads(await reply.content.readline())["seq"])
            await asyncio.sleep(0.01)
        assert seqs == list(range(1, len(seqs) + 1))


@real
async def test_an_agent_joins(site: Site) -> None:
    body = {"node": "n1", "host": "127.0.0.1", "incarnation": 7}
    status, answer = await site.ask("POST", "/v1/join", body)
    assert status == 200
    assert answer == {"redis_url": "unix:///run/x", "cluster": "test", "node": "n1", "epoch": 1}
    await site.refused(400, "POST", "/v1/join", body | {"node": "No Name"})
    assert "incarnation" in await site.refused(400, "POST", "/v1/join", {"node": "n1", "host": ""})
    await site.log.send([Report(source="n1/9", source_seq=1, occurred_s=1.0, body=NodeJoined(
        node="n1", incarnation=9, host="h", pid=1, num_slots=1))])
    while site.coordinator.seq < 3:
        await asyncio.sleep(0.01)
    assert "newer agent" in await site.refused(409, "POST", "/v1/join", body)


@real
async def test_an_unreachable_log_is_503(site: Site) -> None:
    site.log.fault = lambda call: "unavailable"
    assert await site.refused(503, "POST", "/v1/tasks", JOB, Idempotency_Key="k")
    assert "cannot be reached" in await site.refused(503, "GET", "/v1/state")
    async with site.client.get(site.url + "/v1/health") as reply:
        assert reply.status == 200
    site.log.fault = lambda call: "done"
    while (await site.ask("GET", "/v1/state"))[0] != 200:
        await asyncio.sleep(0.05)
    _, answer = await site.ask("POST", "/v1/tasks", JOB, Idempotency_Key="k")
    written = [r for r in await site.log.read(after=0, num_max=99) if r.kind == "TaskSubmitted"]
    assert [r.seq for r in written] == [answer["seq"]], "asked twice, written once"
