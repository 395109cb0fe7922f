"""The keeper: two whole copies of each task in bounded memory, for whoever knows the secret."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_stores import (
    SECRET,
    TASK,
    WAIT_S,
    WISH,
    LocalKeeper,
    alter,
    get,
    offer,
    put,
    steps,
    wait,
)
from unicron.events.errors import UsageError
from unicron.workers.checkpoint_store import protocol, store
from unicron.workers.checkpoint_store.protocol import Checksum, Go, TransferError
from unicron.workers.checkpoint_store.server import BYTES_MAX, CONNECTIONS_NUM_MAX, bytes_max


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
    assert store.available_bytes(proc, cgroups) == expected


# --- the conversation ---------------------------------------------------------------------------
@pytest.fixture
def keeper() -> Iterator[LocalKeeper]:
    made = LocalKeeper("n1")
    yield made
    made.close()


def data(size: int = 3_000_001) -> bytes:
    """Longer than a chunk and than what a socket takes at once."""
    return bytes(range(256)) * (size // 256) + bytes(size % 256)


def test_a_copy_comes_back_as_it_was_sent(keeper: LocalKeeper) -> None:
    sent = data()
    one = offer(10, size=len(sent))
    checksum, _ = put(keeper.keeper.endpoint, one, sent)
    assert checksum == f"crc32:{zlib.crc32(sent):08x}" == keeper.stored(TASK)[0].checksum
    assert get(keeper.keeper.endpoint, WISH) == (one, sent)


def test_what_was_altered_while_it_was_kept_is_noticed(keeper: LocalKeeper) -> None:
    sent = data()
    put(keeper.keeper.endpoint, offer(10, size=len(sent)), sent)
    alter(keeper.stored(TASK)[0])
    with pytest.raises(TransferError, match="checkpoint altered"):
        get(keeper.keeper.endpoint, WISH)


def test_what_was_altered_on_the_way_is_refused_and_the_last_one_stays(
        keeper: LocalKeeper) -> None:
    sent = data()
    put(keeper.keeper.endpoint, offer(10, size=len(sent)), sent)
    with protocol.connect(keeper.keeper.endpoint, SECRET) as connection:
        protocol.send(connection, offer(20, size=len(sent)))
        protocol.receive(connection, Go)
        checksum = protocol.send_parts(connection, [memoryview(sent[:-1] + b"x")])
        protocol.send(connection, Checksum(checksum=f"crc32:{zlib.crc32(sent):08x}"))
        with pytest.raises(TransferError, match=f"checkpoint altered: received {checksum}"):
            protocol.receive(connection, protocol.StoredReply)
    assert steps(keeper.shelf) == [10]
    assert keeper.shelf.used_bytes == len(sent)


def test_who_sends_a_copy_that_comes_too_late_hears_so(keeper: LocalKeeper) -> None:
    with protocol.connect(keeper.keeper.endpoint, SECRET) as connection:
        protocol.send(connection, offer(10))
        protocol.receive(connection, Go)
        put(keeper.keeper.endpoint, offer(8, generation=2), bytes(100))
        checksum = protocol.send_parts(connection, [memoryview(bytes(100))])
        protocol.send(connection, Checksum(checksum=checksum))
        with pytest.raises(TransferError, match="generation 1 of task 7 is over"):
            protocol.receive(connection, protocol.StoredReply)
    assert steps(keeper.shelf) == [8]


def test_a_sender_that_breaks_off_leaves_nothing(keeper: LocalKeeper) -> None:
    sent = data()
    with protocol.connect(keeper.keeper.endpoint, SECRET) as connection:
        protocol.send(connection, offer(10, size=len(sent)))
        protocol.receive(connection, Go)
        connection.sendall(sent[: len(sent) // 2])
        assert keeper.shelf.used_bytes == len(sent)
    wait(lambda: keeper.shelf.used_bytes == 0, "the half is gone")
    with pytest.raises(TransferError, match="no checkpoint of task 7"):
        get(keeper.keeper.endpoint, WISH)


def test_who_does_not_know_the_secret_is_not_let_in(keeper: LocalKeeper) -> None:
    with pytest.raises(TransferError, match="of another cluster, or its token has changed"):
        put(keeper.keeper.endpoint, offer(10), bytes(100), secret="guessed")
    with socket.create_connection(("127.0.0.1", keeper.listener.getsockname()[1])) as connection:
        protocol.receive(connection, protocol.Greeting)
        protocol.send(connection, offer(10))  # without a proof
        connection.settimeout(WAIT_S)
        assert connection.recv(1) == b""
    assert steps(keeper.shelf) == []


def test_a_keeper_that_does_not_know_the_secret_gets_no_state() -> None:
    """It plays along, and says any answer."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[protocol.Message] = []
    more: list[bytes] = []

    def play() -> None:
        connection, _ = listener.accept()
        with connection:
            protocol.send(connection, protocol.Greeting(nonce=bytes(32)))
            heard.append(protocol.receive(connection, protocol.Proof))
            protocol.send(connection, protocol.Proof(answer=bytes(32)))
            connection.settimeout(WAIT_S)
            more.append(connection.recv(1))

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    with listener, pytest.raises(TransferError, match="does not know this cluster's secret"):
        put(f"127.0.0.1:{listener.getsockname()[1]}", offer(10), bytes(100))
    thread.join(WAIT_S)
    assert more == [b""], "nothing else was said to it"
    assert SECRET.encode() not in heard[0].answer  # type: ignore[attr-defined]


def test_nonsense_is_answered_by_hanging_up(keeper: LocalKeeper) -> None:
    for nonsense in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", keeper.listener.getsockname()[1])) as one:
            protocol.receive(one, protocol.Greeting)
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


def test_strangers_who_say_little_are_shown_out_soon(keeper: LocalKeeper) -> None:
    """As many as there are talks at once, each with a byte from time to time."""
    at = ("127.0.0.1", keeper.listener.getsockname()[1])
    strangers = [socket.create_connection(at) for _ in range(CONNECTIONS_NUM_MAX)]
    done = threading.Event()

    def drip() -> None:
        while not done.wait(0.3):
            for stranger in strangers:
                with contextlib.suppress(OSError):
                    stranger.send(b"\x00")

    for stranger in strangers:
        stranger.sendall((60_000).to_bytes(4, "big"))
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        put(keeper.keeper.endpoint, offer(10), bytes(100))
    finally:
        done.set()
        thread.join()
        for stranger in strangers:
            stranger.close()
    assert steps(keeper.shelf) == [10]


def test_a_secret_is_of_one_cluster_and_one_token() -> None:
    secrets = {protocol.secret_of(token, cluster) for token in ("a", "b") for cluster in ("c", "d")}
    assert len(secrets) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)
