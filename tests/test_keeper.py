"""The keeper: two whole copies of each task in bounded memory, for whoever knows the secret."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from keepers import SECRET, TASK, LocalKeeper, alter, offer, steps
from unicron.events.errors import UsageError
from unicron.workers import keeping, linux
from unicron.workers.agent.keeper import Keeper
from unicron.workers.keeper import memory
from unicron.workers.keeper.process import BYTES_MAX, bytes_max
from unicron.workers.keeping import Failed, Go, Offer, Sum, Wish

WAIT_S = 30.0


def test_how_much_memory_copies_take_may_be_told() -> None:
    assert bytes_max({BYTES_MAX: "123"}) == 123
    with pytest.raises(UsageError, match="UNICRON_COPIES_BYTES_MAX is '4GB'"):
        bytes_max({BYTES_MAX: "4GB"})
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    total = re.search(r"MemTotal: +(\d+)", text)
    assert total is not None
    assert 0 < bytes_max({}) < int(total[1]) * 1024 / 2


@pytest.mark.parametrize(("line", "files", "expected"), [
    ("0::/", {}, 8_000_000 * 1024),
    ("0::/a/b", {"a/b/memory.max": "max", "a/b/memory.current": "10",
                 "a/memory.max": "9000", "a/memory.current": "8000"}, 1000),
    ("0::/of/the/host", {"memory.max": "9000", "memory.current": "8000",
                         "memory.stat": "anon 500\ninactive_file 100\nactive_file 20"}, 1120),
    ("0::/a", {"a/memory.max": "7000", "a/memory.current": "7100"}, 0),
    ("4:cpu,memory:/a", {"memory/a/memory.limit_in_bytes": "9000",
                         "memory/a/memory.usage_in_bytes": "8000",
                         "memory/a/memory.stat": "total_inactive_file 5\ninactive_file 1"}, 1005),
    ("4:memory:/a\n0::/", {"memory/memory.limit_in_bytes": str((1 << 63) - 4096),
                           "memory/memory.usage_in_bytes": "8000"}, 8_000_000 * 1024),
])
def test_what_is_available_is_what_the_container_has_left(
        tmp_path: Path, line: str, files: dict[str, str], expected: int) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    told = {proc / "self" / "cgroup": f"{line}\n",
            proc / "meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n"}
    for name, text in files.items():
        told.setdefault((cgroups / name).with_name("memory.stat"), "anon 1")
        told[cgroups / name] = text
    for path, text in told.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.available_bytes(proc, cgroups) == expected


# --- the conversation ---------------------------------------------------------------------------
@pytest.fixture
def keeper() -> Iterator[LocalKeeper]:
    made = LocalKeeper("n1")
    yield made
    made.close()


def data(size: int = 3_000_001) -> bytes:
    """Longer than a chunk and than what a socket takes at once."""
    return bytes(range(256)) * (size // 256) + bytes(size % 256)


def put(endpoint: str, one: Offer, sent: bytes, secret: str = SECRET) -> str:
    with keeping.knock(endpoint, secret) as connection:
        return keeping.put(connection, one, [memoryview(sent)])


def get(endpoint: str, wish: Wish) -> tuple[Offer, bytes]:
    target = bytearray()

    def room(one: Offer) -> memoryview:
        target.extend(bytes(one.copy_bytes))
        return memoryview(target)

    with keeping.knock(endpoint, SECRET) as connection:
        found, _ = keeping.get(connection, wish, room)
    return found, bytes(target)


WISH = Wish(task=TASK, generation=1, step_version=1)


def test_a_copy_comes_back_as_it_was_sent(keeper: LocalKeeper) -> None:
    sent = data()
    one = offer(10, size=len(sent))
    checksum = put(keeper.keeper.endpoint, one, sent)
    assert checksum == f"crc32:{zlib.crc32(sent):08x}" == keeper.stored(TASK)[0].checksum
    assert get(keeper.keeper.endpoint, WISH) == (one, sent)


def test_what_was_altered_while_it_was_kept_is_noticed(keeper: LocalKeeper) -> None:
    sent = data()
    put(keeper.keeper.endpoint, offer(10, size=len(sent)), sent)
    alter(keeper.stored(TASK)[0])
    with pytest.raises(Failed, match="the copy was altered"):
        get(keeper.keeper.endpoint, WISH)


def test_what_was_altered_on_the_way_is_refused_and_the_last_one_stays(
        keeper: LocalKeeper) -> None:
    sent = data()
    put(keeper.keeper.endpoint, offer(10, size=len(sent)), sent)
    with keeping.knock(keeper.keeper.endpoint, SECRET) as connection:
        keeping.send(connection, offer(20, size=len(sent)))
        keeping.receive(connection, Go)
        checksum = keeping.pour(connection, [memoryview(sent[:-1] + b"x")])
        keeping.send(connection, Sum(checksum=f"crc32:{zlib.crc32(sent):08x}"))
        with pytest.raises(Failed, match=f"what came comes to {checksum}"):
            keeping.receive(connection, keeping.Kept)
    assert steps(keeper.shelf) == [10]
    assert keeper.shelf.used_bytes == len(sent)


def test_who_sends_a_copy_that_comes_too_late_hears_so(keeper: LocalKeeper) -> None:
    with keeping.knock(keeper.keeper.endpoint, SECRET) as connection:
        keeping.send(connection, offer(10))
        keeping.receive(connection, Go)
        put(keeper.keeper.endpoint, offer(8, generation=2), bytes(100))
        keeping.send(connection, Sum(checksum=keeping.pour(connection, [memoryview(bytes(100))])))
        with pytest.raises(Failed, match="generation 1 of task 7 is over"):
            keeping.receive(connection, keeping.Kept)
    assert steps(keeper.shelf) == [8]


def test_a_sender_that_breaks_off_leaves_nothing(keeper: LocalKeeper) -> None:
    sent = data()
    with keeping.knock(keeper.keeper.endpoint, SECRET) as connection:
        keeping.send(connection, offer(10, size=len(sent)))
        keeping.receive(connection, Go)
        connection.sendall(sent[: len(sent) // 2])
        assert keeper.shelf.used_bytes == len(sent)
    wait(lambda: keeper.shelf.used_bytes == 0, "the half is gone")
    with pytest.raises(Failed, match="no copy of task 7"):
        get(keeper.keeper.endpoint, WISH)


def test_who_does_not_know_the_secret_is_not_let_in(keeper: LocalKeeper) -> None:
    with pytest.raises(Failed, match="of another cluster, or its token has changed"):
        put(keeper.keeper.endpoint, offer(10), bytes(100), secret="guessed")
    with socket.create_connection(("127.0.0.1", keeper.listener.getsockname()[1])) as connection:
        keeping.receive(connection, keeping.Greeting)
        keeping.send(connection, offer(10))  # without a proof
        connection.settimeout(WAIT_S)
        assert connection.recv(1) == b""
    assert steps(keeper.shelf) == []


def test_a_keeper_that_does_not_know_the_secret_gets_no_state() -> None:
    """It plays along, and says any answer."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[keeping.Message] = []

    def play() -> None:
        connection, _ = listener.accept()
        with connection:
            keeping.send(connection, keeping.Greeting(nonce=bytes(32)))
            heard.append(keeping.receive(connection, keeping.Proof))
            keeping.send(connection, keeping.Proof(answer=bytes(32)))
            connection.settimeout(WAIT_S)
            assert connection.recv(1) == b"", "nothing else was said to it"

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    with listener, pytest.raises(Failed, match="does not know this cluster's secret"):
        put(f"127.0.0.1:{listener.getsockname()[1]}", offer(10), bytes(100))
    thread.join(WAIT_S)
    assert SECRET.encode() not in heard[0].answer  # type: ignore[attr-defined]


def test_nonsense_is_answered_by_hanging_up(keeper: LocalKeeper) -> None:
    for nonsense in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", keeper.listener.getsockname()[1])) as one:
            keeping.receive(one, keeping.Greeting)
            one.settimeout(WAIT_S)
            try:
                one.sendall(nonsense)
                one.shutdown(socket.SHUT_WR)
                assert one.recv(100) == b""
            except TimeoutError:
                raise
            except OSError:  # it has hung up already, and nobody is connected any more
                pass
    put(keeper.keeper.endpoint, offer(10), bytes(100))
    assert steps(keeper.shelf) == [10]


def test_a_secret_is_of_one_cluster_and_one_token() -> None:
    secrets = {keeping.secret_of(token, cluster) for token in ("a", "b") for cluster in ("c", "d")}
    assert len(secrets) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)


# --- the process, as an agent has it ------------------------------------------------------------
class Told(list[tuple[int, str]]):
    """What the agent heard of its keeper."""

    def hear(self, task: int, why: str) -> None:
        self.append((task, why))


@asynccontextmanager
async def agents(tmp_path: Path, told: Told, **env: str) -> AsyncIterator[Keeper]:
    keeper = Keeper("127.0.0.1", SECRET, {**os.environ, **env},
                    ("UNICRON_PROCESS", "test:n1/1:keeper"), tmp_path / "keeper.log", told.hear)
    try:
        yield keeper
    finally:
        keeper.close()


async def until(look: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.01)


def wait(look: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def test_it_is_started_when_it_is_wanted_and_anew_where_it_was(tmp_path: Path) -> None:
    async def live() -> None:
        told = Told()
        async with agents(tmp_path, told, UNICRON_COPIES_BYTES_MAX="1000") as keeper:
            endpoint = keeper.endpoint
            assert keeper.pid == 0
            await asyncio.to_thread(put, endpoint, offer(10), bytes(100))
            first = keeper.pid
            score = Path(f"/proc/{first}/oom_score_adj").read_text(encoding="ascii")
            assert int(score) == 1000, "it goes before a rank does"
            assert (await asyncio.to_thread(get, endpoint, WISH))[0] == offer(10)
            with pytest.raises(Failed, match="a copy of 1001 bytes does not fit into 1000"):
                await asyncio.to_thread(put, endpoint, offer(20, size=1001), bytes(1001))
            os.kill(first, signal.SIGKILL)
            await until(lambda: told, "its end is heard of")
            assert told == [(0, "the keeper has ended")]
            await asyncio.to_thread(put, endpoint, offer(30), bytes(100))
            assert keeper.pid not in (0, first)
            assert (await asyncio.to_thread(get, endpoint, WISH))[0] == offer(30)
            keeper.forget(TASK)
            await until(lambda: _nothing(endpoint), "the task is forgotten")
            last = keeper.pid
        assert linux.read(last) is None or linux.read(last).state == "Z"  # type: ignore[union-attr]
        assert told == [(0, "the keeper has ended")], "its end on purpose is none to be told"
        with pytest.raises(ConnectionRefusedError):
            put(endpoint, offer(40), bytes(100))
        assert "refused: a copy of 1001 bytes" in (tmp_path / "keeper.log").read_text()

    asyncio.run(live())


def _nothing(endpoint: str) -> bool:
    try:
        get(endpoint, WISH)
    except Failed:
        return True
    return False


def test_what_it_had_to_let_go_is_told_by_the_task(tmp_path: Path) -> None:
    async def live() -> None:
        told = Told()
        async with agents(tmp_path, told, UNICRON_COPIES_BYTES_MAX="150") as keeper:
            await asyncio.to_thread(put, keeper.endpoint, offer(10), bytes(100))
            connection = await asyncio.to_thread(keeping.knock, keeper.endpoint, SECRET)
            with connection:
                keeping.send(connection, offer(20))
                await asyncio.to_thread(keeping.receive, connection, Go)
            await until(lambda: told, "it is told")
            assert [task for task, _ in told] == [TASK]

    asyncio.run(live())


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
