"""Messages to a real receiver that also hangs, fails and redirects: each thing is told once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from aiohttp import web
from http_site import POLICY, Site, serving
from memory_log import MemoryLog
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import serve
from unicron.cli.commands.up import UpOptions, kept
from unicron.control_plane.api.connections import Listener
from unicron.control_plane.api.metrics import Metrics
from unicron.control_plane.api.notifications import Limits, Notifier, check_url
from unicron.control_plane.service.coordinator import Coordinator
from unicron.events.errors import UsageError
from unicron.events.private_files import write_private
from unicron.events.records import reports as r

SOON = Limits(look_s=0.05, gone_s_min=0.3, pause_s=0.1, pause_s_max=0.5, post_s_max=0.5)
WAIT_S_MAX = 60.0


class Receiver:
    """Takes messages. `mode`: what it does with the next ones."""

    def __init__(self) -> None:
        self.mode: str = "take"
        self.told: list[Any] = []
        self.asked_s: list[float] = []
        self.elsewhere = 0
        self.url = ""

    async def hook(self, request: web.Request) -> web.StreamResponse:
        self.asked_s.append(time.monotonic())
        if self.mode == "hang":
            await asyncio.sleep(WAIT_S_MAX)
        if self.mode == "redirect":
            raise web.HTTPTemporaryRedirect("/elsewhere")
        if self.mode != "take":
            return web.Response(status=int(self.mode))
        assert request.content_type == "application/json"
        self.told.append(await request.json())
        return web.Response(text="ok")

    async def other(self, request: web.Request) -> web.Response:
        self.elsewhere += 1
        return web.Response()

    @property
    def asked(self) -> int:
        return len(self.asked_s)

    async def has(self, num: int) -> Any:
        """The last of `num` messages."""
        async with asyncio.timeout(WAIT_S_MAX):
            while len(self.told) < num:
                await asyncio.sleep(0.01)
        return self.told[-1]

    async def is_asked(self, num: int) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            while self.asked < num:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hook", receiver.hook)
    app.router.add_post("/elsewhere", receiver.other)
    listener = Listener(app, stop_s_max=0.1)
    port = await listener.start("127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{port}/hook"
    try:
        yield receiver
    finally:
        await listener.stop()


@asynccontextmanager
async def notified(
    coordinator: Coordinator, url: str, limits: Limits = SOON
) -> AsyncIterator[prometheus_client.Counter]:
    metrics = Metrics()
    running = asyncio.create_task(Notifier(coordinator, url, "test", metrics, limits).run())
    try:
        yield metrics.notifications
        assert not running.done()
    finally:
        running.cancel()


def real(test: Callable[[Site, Receiver], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            async with asyncio.timeout(2 * WAIT_S_MAX), serving() as site, receiving() as receiver:
                await test(site, receiver)

        asyncio.run(main())

    return run


def value(count: prometheus_client.Counter, result: str) -> float:
    return next(
        sample.value
        for family in count.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels == {"result": result}
    )


async def told(site: Site) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    return [
        (one.body.opened, one.body.over)
        for one in await site.log.read(after=0, num_max=1_000)
        if isinstance(one.body, r.PersonNotified)
    ]


@real
async def test_one_message_when_it_begins_and_one_when_it_ends(
    site: Site, receiver: Receiver
) -> None:
    async with notified(site.coordinator, receiver.url) as count:
        await asyncio.sleep(0.3)
        assert receiver.asked == 0, "nothing needs anybody"
        await site.ask("POST", "/v1/freeze", {"reason": "the switch"})
        first = await receiver.has(1)
        assert first["cluster"] == "test"
        assert first["over"] == []
        assert first["opened"][0]["what"] == "healing"
        assert first["text"].splitlines() == [
            "Unicron, cluster test:",
            "NEEDS YOU healing is frozen: the switch: faults are "
            "reported, not healed: `unicron unfreeze`",
        ]
        await asyncio.sleep(0.6)
        assert receiver.asked == 1, "it is told once while it lasts"
        await site.ask("POST", "/v1/unfreeze", {"reason": "done"})
        last = await receiver.has(2)
        assert (last["opened"], last["over"]) == ([], ["healing"])
        assert "NO LONGER healing" in last["text"]
        await asyncio.sleep(0.6)
        assert receiver.asked == 2
        assert (value(count, "sent"), value(count, "failed")) == (2, 0)
    assert await told(site) == [(("healing",), ()), ((), ("healing",))]


@real
async def test_what_comes_back_soon_is_not_told_again(site: Site, receiver: Receiver) -> None:
    slow = Limits(look_s=0.02, gone_s_min=30.0, pause_s=0.02, pause_s_max=0.1, post_s_max=5.0)
    async with notified(site.coordinator, receiver.url, slow):
        for _ in range(5):
            await site.ask("POST", "/v1/freeze", {"reason": "again"})
            await receiver.has(1)
            await asyncio.sleep(0.1)
            await site.ask("POST", "/v1/unfreeze", {"reason": "again"})
            await asyncio.sleep(0.1)
        assert receiver.asked == 1


@pytest.mark.parametrize("mode", ["hang", "500", "404", "redirect"])
def test_a_failed_message_is_tried_again_at_growing_intervals(mode: str) -> None:
    @real
    async def test(site: Site, receiver: Receiver) -> None:
        receiver.mode = mode
        async with notified(site.coordinator, receiver.url) as count:
            await site.ask("POST", "/v1/freeze", {"reason": "x"})
            await receiver.is_asked(4)
            # 0.2, 0.4 and 0.5 s: pause_s doubled with each failure, up to pause_s_max
            assert receiver.asked_s[3] - receiver.asked_s[0] >= 1.0
            assert receiver.elsewhere == 0, "a redirect is not followed"
            assert await told(site) == []
            receiver.mode = "take"
            await receiver.has(1)
            num = receiver.asked
            await asyncio.sleep(0.8)
            assert receiver.asked == num
            assert value(count, "failed") >= 3
            assert value(count, "sent") == 1
        assert await told(site) == [(("healing",), ())]

    test()


def test_nobody_listens_at_the_url() -> None:
    @real
    async def test(site: Site, receiver: Receiver) -> None:
        async with notified(site.coordinator, "http://127.0.0.1:1/hook") as count:
            await site.ask("POST", "/v1/freeze", {"reason": "x"})
            async with asyncio.timeout(WAIT_S_MAX):
                while value(count, "failed") < 2:
                    await asyncio.sleep(0.01)

    test()


@asynccontextmanager
async def control_plane(log: MemoryLog, name: str) -> AsyncIterator[Coordinator]:
    """One that leads, or that follows another one of the log."""
    made = Coordinator(
        log, clock=lambda: asyncio.get_running_loop().time(), nonce=name, code="test", policy=POLICY
    )
    running = asyncio.create_task(made.run(f"http://{name}"))
    while not (made.leading or made.leader_url):
        await asyncio.sleep(0.01)
    yield made
    made.stop()
    await asyncio.wait_for(running, WAIT_S_MAX)


def test_the_next_leader_does_not_tell_again_and_tells_the_end() -> None:
    async def main() -> None:
        log = MemoryLog(lambda: asyncio.get_running_loop().time())
        async with (
            asyncio.timeout(2 * WAIT_S_MAX),
            receiving() as receiver,
            control_plane(log, "b1") as one,
            notified(one, receiver.url),
        ):
            await one.write("1", r.HealingFrozen(reason="x"))
            await receiver.has(1)
            while not (await one.settled()).notified:
                await asyncio.sleep(0.01)
            async with control_plane(log, "b2") as two, notified(two, receiver.url):
                assert two.leader_url == "http://b1"
                await asyncio.sleep(0.5)
                assert receiver.asked == 1, "a follower tells nothing"
                one.stop()
                while not two.leading:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)
                assert receiver.asked == 1
                await two.write("2", r.HealingResumed(reason="x"))
                assert (await receiver.has(2))["over"] == ["healing"]

    asyncio.run(main())


@real
async def test_much_at_once_is_one_message_of_bounded_length(
    site: Site, receiver: Receiver
) -> None:
    for number in range(1, 41):
        name = f"n{number}"
        await site.tell(r.NodeJoined(node=name, incarnation=9, host="h", pid=1, num_slots=1))
        await site.tell(
            r.HealthChanged(
                node=name,
                incarnation=9,
                check="disk",
                health="unhealthy",
                why="bad <!channel> & \x1b[31m\nred" * 99,
            )
        )
    async with notified(site.coordinator, f"slack+{receiver.url}"):
        message = await receiver.has(1)
        await asyncio.sleep(0.5)
        assert receiver.asked == 1
    assert list(message) == ["text"]
    lines = message["text"].splitlines()
    assert len(lines) == 12
    assert lines[-1] == "and 30 more: unicron status"
    assert "&lt;!channel&gt; &amp; [31m red" in lines[1]
    assert "<" not in message["text"]
    assert "\x1b" not in message["text"]
    assert max(map(len, lines)) < 400
    (entry,) = await told(site)
    assert len(entry[0]) == 40


@pytest.mark.parametrize(
    "text",
    [
        "",
        "https://",
        "ftp://h/x",
        "hush",
        "https://h/a https://h/b",
        "slack+",
        "https://h/a\nhttps://h/b",
    ],
)
def test_a_file_without_a_url_is_refused_without_what_it_has(text: str) -> None:
    with pytest.raises(UsageError, match="--notify has no URL") as refused:
        check_url(text)
    assert "hush" not in str(refused.value) + refused.value.hint


def test_the_file_must_be_private(tmp_path: Path) -> None:
    path = tmp_path / "hook"
    with pytest.raises(FileNotFoundError, match="hook"):
        serve.webhook(path)
    write_private(path, b"https://hooks.example/T0/secret\n")
    assert serve.webhook(path) == "https://hooks.example/T0/secret"
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others may read it"):
        serve.webhook(path)
    assert json.dumps(check_url(" slack+https://h/x ")) == '"slack+https://h/x"'


def test_up_remembers_the_file_and_forgets_it_on_request(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    path = tmp_path / "hook"
    before = UpOptions(notify=kept(path)).wanted(None, state)
    assert before.notify == str(path)
    assert UpOptions().wanted(before, state).notify == str(path)
    assert UpOptions(notify=kept(Path("none"))).wanted(before, state).notify == ""
    UpOptions(notify=kept(path)).refuse_other(before, state)
    with pytest.raises(UsageError, match="--notify differs"):
        UpOptions(notify=kept(Path("none"))).refuse_other(before, state)
