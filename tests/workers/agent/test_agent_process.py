"""The agent as a process of its own, with a private server: killed, cut off, stopped, refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
from agent_driver import (
    CHILD_OF_ITS_OWN,
    LIMIT_S,
    TOKEN,
    WAITS,
    alive,
    ended,
    plane,
    until,
    until_gone,
    until_text,
)
from unicron.events.errors import UsageError
from unicron.events.log import embedded_server
from unicron.events.records.reports import NodeJoined, NodeLeft, RankExited, RankStarted
from unicron.events.records.types import Labels
from unicron.workers.agent.delivery.join import join


def test_ranks_die_with_their_agent_and_its_successor_clears_up(
        own_server: embedded_server.Server, tmp_path: Path) -> None:
    async def test() -> None:
        async with plane(own_server.url, tmp_path / "state") as one:
            first = one.agent()
            await one.wait(NodeJoined)
            note = tmp_path / "child"
            await one.start(CHILD_OF_ITS_OWN, str(note))
            (started,) = await one.wait(RankStarted)
            child = int(await until_text(note))
            first.kill()
            await ended(first)
            await until_gone(started.pid)
            second = one.agent()
            old, new = await one.wait(NodeJoined, 2)
            assert new.incarnation > old.incarnation
            assert not alive(child)
            await one.start("pass", attempt=2)  # the old StartRank is read again, not obeyed
            await one.wait(RankExited)
            assert [s.attempt for s in one.all(RankStarted)] == [1, 2]
            second.terminate()
            assert await ended(second) == 0, one.said()

    asyncio.run(asyncio.wait_for(test(), 3 * LIMIT_S))


def test_a_server_killed_and_started_again_loses_and_doubles_nothing(
        own_server: embedded_server.Server, tmp_path: Path) -> None:
    """Ranks go on meanwhile; what they did is told afterwards, once, in order."""
    async def test() -> None:
        server = own_server
        async with plane(server.url, tmp_path / "state") as one:
            agent = one.agent()
            await one.wait(NodeJoined)
            for number in range(2):
                await one.start(WAITS, str(tmp_path / f"go-{number}"), rank=number)
            await one.wait(RankStarted, 2)
            for number in range(2):
                os.kill(server.pid, signal.SIGKILL)
                await until_gone(server.pid)
                (tmp_path / f"go-{number}").touch()
                pid = one.all(RankStarted)[number].pid
                await until_gone(pid)
                await asyncio.sleep(0.3)
                assert agent.poll() is None
                server = embedded_server.start(tmp_path / "server")
                assert server.url == own_server.url
                exits = await one.wait(RankExited, number + 1)
                assert [e.exit_code for e in exits] == [0] * (number + 1)
            agent.terminate()
            assert await ended(agent) == 0, one.said()
            await one.wait(NodeLeft)
            logged = await one.log.read(after=0, num_max=1000)
            numbers = [r.source_seq for r in logged if r.source != "heart"]
            assert numbers == list(range(1, len(numbers) + 1))
            assert one.kinds() == ["NodeJoined", "RankStarted", "RankStarted", "RankExited",
                                   "RankExited", "NodeLeft"]
            assert one.said().count("the log is unreachable") == 2, one.said()

    asyncio.run(asyncio.wait_for(test(), 3 * LIMIT_S))


def test_what_a_killed_agent_had_not_delivered_its_successor_does(
        own_server: embedded_server.Server, tmp_path: Path) -> None:
    async def test() -> None:
        async with plane(own_server.url, tmp_path / "state") as one:
            first = one.agent()
            await one.wait(NodeJoined)
            await one.start(WAITS, str(tmp_path / "go"))
            (started,) = await one.wait(RankStarted)
            os.kill(own_server.pid, signal.SIGKILL)
            await until_gone(own_server.pid)
            (tmp_path / "go").touch()
            await until(lambda: not Path(f"/proc/{started.pid}").exists() or None)
            await asyncio.sleep(0.2)
            first.kill()
            await ended(first)
            second = one.agent()
            embedded_server.start(tmp_path / "server")
            await one.wait(NodeJoined, 2)
            assert one.kinds() == ["NodeJoined", "RankStarted", "RankExited", "NodeJoined"]
            sources = [r.source for r in one.leader.records if r.source != "heart"]
            assert sources[0] == sources[1] == sources[2] != sources[3]
            await until(lambda: len(list((one.state_dir / "agents").glob("*.spool"))) == 1 or None)
            second.terminate()
            assert await ended(second) == 0, one.said()
            assert list((one.state_dir / "agents").glob("*.spool")) == []

    asyncio.run(asyncio.wait_for(test(), 3 * LIMIT_S))


def test_a_second_signal_ends_at_once(server: embedded_server.Server, tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\ntime.sleep(60)"

    async def test() -> None:
        async with plane(server.url, tmp_path / "state") as one:
            agent = one.agent()
            await one.wait(NodeJoined)
            await one.start(deaf)
            (started,) = await one.wait(RankStarted)
            await until_text(started.log_path)
            agent.terminate()
            await asyncio.sleep(0.2)
            assert agent.poll() is None
            assert alive(started.pid)
            agent.terminate()
            assert await ended(agent) == 1, one.said()
            await until_gone(started.pid)
            assert len(one.all(NodeLeft)) == 1

    asyncio.run(asyncio.wait_for(test(), 3 * LIMIT_S))


def test_another_log_under_the_same_address_ends_the_agent(
        own_server: embedded_server.Server, tmp_path: Path) -> None:
    """Its ranks would be led by nobody; as a new incarnation it is welcome."""
    async def test() -> None:
        async with plane(own_server.url, tmp_path / "state") as one:
            agent = one.agent()
            await one.wait(NodeJoined)
            await one.start("import time; time.sleep(60)")
            (started,) = await one.wait(RankStarted)
            own_server.stop(grace_s=1.0)
            for path in (tmp_path / "server").glob("appendonlydir/*"):
                path.unlink()
            embedded_server.start(tmp_path / "server")
            assert await ended(agent) == 1, one.said()
            await until_gone(started.pid)
            assert "replaced by another one" in one.said()

    asyncio.run(asyncio.wait_for(test(), 3 * LIMIT_S))


def test_refusals_are_one_line(server: embedded_server.Server, tmp_path: Path) -> None:
    async def test() -> None:
        async with plane(server.url, tmp_path / "state") as one:
            wrong = one.agent(token="wrong")
            assert await ended(wrong) == 1
            assert "does not accept the token" in one.said()
            first = one.agent()
            await one.wait(NodeJoined)
            note = json.loads((one.state_dir / "agents" / "n1.json").read_text())
            assert note["pid"] == first.pid
            assert note["start_time"] == embedded_server.start_time(first.pid)
            second = one.agent()
            assert await ended(second) == 1
            assert "already runs" in one.said()
            first.terminate()
            assert await ended(first) == 0
            assert not (one.state_dir / "agents" / "n1.json").exists()
        assert "Traceback" not in one.said()

    asyncio.run(asyncio.wait_for(test(), 3 * LIMIT_S))


def test_an_unreachable_control_plane_is_tried_and_then_named() -> None:
    async def test() -> None:
        began = time.monotonic()
        with pytest.raises(UsageError, match=r"cannot join http://127\.0\.0\.1:9"):
            await join("http://127.0.0.1:9", TOKEN, node="n1", host="h", incarnation=1,
                       labels=Labels(), s_max=0.5)
        assert 0.1 < time.monotonic() - began < LIMIT_S

    asyncio.run(test())
