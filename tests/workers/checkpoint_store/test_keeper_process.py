"""The keeper's process, as an agent has it: started when it is wanted, and ended with it."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from checkpoint_stores import SECRET, TASK, WAIT_S, WISH, get, offer, put, wait
from structlog.testing import capture_logs
from unicron.workers.agent import checkpoint_store as agents_keeper
from unicron.workers.agent.checkpoint_store import CheckpointStore
from unicron.workers.agent.delivery.log_link import BACKOFF_S_MIN
from unicron.workers.checkpoint_store import protocol
from unicron.workers.checkpoint_store.protocol import Go, TransferError
from unicron.workers.host import linux


class Told(list[tuple[int, str]]):
    """What the agent heard of its keeper."""

    def hear(self, task: int, why: str) -> None:
        self.append((task, why))


@asynccontextmanager
async def agents(tmp_path: Path, told: Told, **env: str) -> AsyncIterator[CheckpointStore]:
    keeper = CheckpointStore("127.0.0.1", SECRET, {**os.environ, **env},
                    ("UNICRON_PROCESS", "test:n1/1:keeper"), tmp_path / "keeper.log", told.hear,
                    start=5)
    try:
        yield keeper
    finally:
        keeper.close()


async def until(look: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.01)


def test_it_is_started_when_it_is_wanted_and_anew_where_it_was(tmp_path: Path) -> None:
    async def live() -> None:
        told = Told()
        async with agents(tmp_path, told, UNICRON_COPIES_BYTES_MAX="1000") as keeper:
            endpoint = keeper.endpoint
            assert keeper.pid == 0
            assert (await asyncio.to_thread(put, endpoint, offer(10), bytes(100)))[1] == 5
            first = keeper.pid
            score = Path(f"/proc/{first}/oom_score_adj").read_text(encoding="ascii")
            assert int(score) == 1000, "it goes before a rank does"
            assert (await asyncio.to_thread(get, endpoint, WISH))[0] == offer(10)
            with pytest.raises(TransferError, match="checkpoint of 1001 bytes does not fit into"):
                await asyncio.to_thread(put, endpoint, offer(20, size=1001), bytes(1001))
            os.kill(first, signal.SIGKILL)
            await until(lambda: told, "its end is heard of")
            assert told == [(0, "the checkpoint store has exited")]
            assert (await asyncio.to_thread(put, endpoint, offer(30), bytes(100)))[1] == 6
            assert keeper.pid not in (0, first)
            assert (await asyncio.to_thread(get, endpoint, WISH))[0] == offer(30)
            keeper.forget(TASK)
            await until(lambda: _nothing(endpoint), "the task is forgotten")
            last = keeper.pid
        assert linux.read(last) is None or linux.read(last).state == "Z"  # type: ignore[union-attr]
        assert told == [(0, "the checkpoint store has exited")], "close reports no loss"
        with pytest.raises(ConnectionRefusedError):
            put(endpoint, offer(40), bytes(100))
        assert "refused: checkpoint of 1001 bytes" in (tmp_path / "keeper.log").read_text()

    asyncio.run(live())


def _nothing(endpoint: str) -> bool:
    try:
        get(endpoint, WISH)
    except TransferError:
        return True
    return False


def test_one_that_ends_at_once_is_left_alone_for_longer_each_time(tmp_path: Path) -> None:
    """And nothing is told: nobody had a copy there."""
    log = tmp_path / "keeper.log"

    async def live() -> None:
        told = Told()
        with capture_logs() as said:
            async with agents(tmp_path, told, UNICRON_COPIES_BYTES_MAX="4 GB") as keeper:
                host, _, port = keeper.endpoint.rpartition(":")
                with socket.create_connection((host, int(port))):
                    await until(lambda: len(said) >= 10, "it ends five times")
        assert log.read_text().count("UsageError") >= 5
        assert told == []
        assert keeper.start == 5, "no number is spent on it"
        for num, one in enumerate([one for one in said if "again_s" in one][:5]):
            assert one["event"] == "the checkpoint store has exited before it held a checkpoint"
            assert BACKOFF_S_MIN * 2**num / 2 <= one["again_s"] <= BACKOFF_S_MIN * 2**num

    asyncio.run(live())


def test_no_keeper_has_a_number_of_the_next_agents(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_keeper, "STORES_NUM_MAX", 2)

    async def live() -> None:
        told = Told()
        async with agents(tmp_path, told) as keeper:
            for start in (5, 6):
                told.clear()
                sent = await asyncio.to_thread(put, keeper.endpoint, offer(10), bytes(100))
                assert sent[1] == start
                os.kill(keeper.pid, signal.SIGKILL)
                await until(lambda: told, "its end is heard of")
            with pytest.raises(ConnectionRefusedError):
                await asyncio.to_thread(put, keeper.endpoint, offer(20), bytes(100))
            assert keeper.pid == 0

    asyncio.run(live())


def test_an_agent_that_cannot_start_one_tries_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> None:
        pair = socket.socketpair

        def none_is_left(*asked: int) -> NoReturn:
            monkeypatch.setattr(socket, "socketpair", pair)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        async with agents(tmp_path, Told()) as keeper:
            with capture_logs() as said:
                monkeypatch.setattr(socket, "socketpair", none_is_left)
                await asyncio.to_thread(put, keeper.endpoint, offer(10), bytes(100))
        assert [one["event"] for one in said] == [
            "the checkpoint store cannot start", "started the checkpoint store"]

    asyncio.run(live())


def test_one_that_does_not_die_is_not_waited_for(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take long to end it: its memory is freed first."""
    def wait_in_vain(popen: subprocess.Popen[bytes], timeout: float | None = None) -> NoReturn:
        assert timeout is not None, "it would be waited for without end"
        raise subprocess.TimeoutExpired("keeper", timeout)

    async def live() -> None:
        async with agents(tmp_path, Told()) as keeper:
            await asyncio.to_thread(put, keeper.endpoint, offer(10), bytes(100))
            monkeypatch.setattr(subprocess.Popen, "wait", wait_in_vain)
            with capture_logs() as said:
                keeper.close()
            assert [one["event"] for one in said] == ["the checkpoint store survives SIGKILL"]

    asyncio.run(live())


def test_what_it_had_to_let_go_is_told_by_the_task(tmp_path: Path) -> None:
    async def live() -> None:
        told = Told()
        async with agents(tmp_path, told, UNICRON_COPIES_BYTES_MAX="150") as keeper:
            await asyncio.to_thread(put, keeper.endpoint, offer(10), bytes(100))
            connection = await asyncio.to_thread(protocol.connect, keeper.endpoint, SECRET)
            with connection:
                protocol.send(connection, offer(20))
                await asyncio.to_thread(protocol.receive, connection, Go)
            await until(lambda: told, "it is told")
            assert [task for task, _ in told] == [TASK]

    asyncio.run(live())


def test_what_fails_again_and_again_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "keeper.log"

    async def live() -> None:
        async with agents(tmp_path, Told(), UNICRON_COPIES_BYTES_MAX="1000") as keeper:
            for size in (1001, 1002, 1003):
                with pytest.raises(TransferError, match=f"checkpoint of {size} bytes does not"):
                    await asyncio.to_thread(put, keeper.endpoint, offer(10, size=size), b"")
            for _ in range(3):
                with pytest.raises(TransferError, match="another cluster"):
                    await asyncio.to_thread(put, keeper.endpoint, offer(10), b"", "guessed")
            await asyncio.to_thread(put, keeper.endpoint, offer(20), bytes(100))
            await until(lambda: path.read_text().count("recovered") == 2, "all of it is said")

    asyncio.run(live())
    assert sorted(path.read_text().splitlines()) == [
        "127.0.0.1: connection failed: client without the cluster's secret",
        "127.0.0.1: recovered", "memory for checkpoints: 1000 bytes",
        "task 7: recovered",
        "task 7: refused: checkpoint of 1001 bytes does not fit into 1000"]


def test_a_keeper_that_can_let_in_nobody_waits_and_goes_on(tmp_path: Path) -> None:
    async def live() -> None:
        async with agents(tmp_path, Told()) as keeper:
            await asyncio.to_thread(put, keeper.endpoint, offer(10), bytes(100))
            limits = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
            host, _, port = keeper.endpoint.rpartition(":")
            with socket.create_connection((host, int(port))):
                await until(lambda: "accept: " in (tmp_path / "keeper.log").read_text(), "said")
                begin = _ticks(keeper.pid)
                await asyncio.sleep(1.0)
                assert _ticks(keeper.pid) - begin <= 5, "it spins"
            resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, limits)
            await asyncio.to_thread(put, keeper.endpoint, offer(20), bytes(100))
        assert (tmp_path / "keeper.log").read_text().count("accept: ") == 2, "begin and end"

    asyncio.run(live())


def _ticks(pid: int) -> int:
    """How much of a core it has used, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_keeper_that_serves_nobody_any_more_ends(tmp_path: Path) -> None:
    async def live() -> None:
        told = Told()
        async with agents(tmp_path, told) as keeper:
            await asyncio.to_thread(put, keeper.endpoint, offer(10), bytes(100))
            _shut(keeper.endpoint)
            await until(lambda: told, "its end is heard of")
        assert "the socket is closed" in (tmp_path / "keeper.log").read_text()

    asyncio.run(live())


def _shut(endpoint: str) -> None:
    """The socket that is listened on: this process has it too."""
    host, _, port = endpoint.rpartition(":")
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket
            continue
        with one:
            if one.family == socket.AF_INET and one.getsockname() == (host, int(port)):
                one.shutdown(socket.SHUT_RDWR)
                return
    raise AssertionError(f"nobody listens on {endpoint}")


def test_it_ends_with_its_agent(tmp_path: Path) -> None:
    read, write = os.pipe()
    agent = os.fork()
    if agent == 0:
        async def live() -> None:
            async with agents(tmp_path, Told()) as keeper:
                await asyncio.to_thread(put, keeper.endpoint, offer(10), bytes(100))
                os.write(write, b"%d\n" % keeper.pid)
                await asyncio.sleep(WAIT_S)

        try:
            asyncio.run(live())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        pid = int(told.readline())
    assert linux.read(pid) is not None
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    wait(lambda: (proc := linux.read(pid)) is None or proc.state == "Z", "the keeper has ended")
