"""Servers on TCP ports, as primary and replica, whose disks can fail."""

from __future__ import annotations

import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from unicron.cli.cluster.local_cluster import free_port
from unicron.events.log import embedded_server

LIMIT_S = 30.0
Redis: Any = redis.Redis
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class TcpServer:
    """A running server. `client` is a connection to it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
        self.process, self.port, self.folder = process, port, folder
        self.url = f"redis://127.0.0.1:{port}/0"
        self.client = Redis(port=port)

    def fill_disk(self) -> None:
        """From now on its files cannot grow."""
        sizes = [path.stat().st_size for path in self.folder.rglob("*.aof")]
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (max(sizes), NO_LIMIT[1]))

    def free_disk(self) -> None:
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, NO_LIMIT)

    def wait_replica(self) -> None:
        """Wait until a replica has the whole data, and follows."""
        deadline_s = time.monotonic() + LIMIT_S
        while self.client.info("replication").get("slave0", {}).get("state") != "online":
            assert time.monotonic() < deadline_s, "no replica is online"
            time.sleep(0.02)


@contextmanager
def serving(folder: Path, *options: str, appendfsync: str = "always", program: str = ""
            ) -> Iterator[TcpServer]:
    """A server with an append-only file in `folder`; `program` "": the embedded one's binary."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    process = subprocess.Popen(
        [program or str(embedded_server.find_binary()), "--port", str(port), "--dir", str(folder),
         "--logfile", str(folder / "log"), "--save", "", "--appendonly", "yes", "--appendfsync",
         appendfsync, "--repl-diskless-sync-delay", "0", *options],
        restore_signals=False)  # SIGXFSZ stays ignored: a write beyond the limit is an error
    server = TcpServer(process, port, folder)
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while True:
            try:
                server.client.ping()
                break
            except redis.ConnectionError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline_s, "it does not answer"
                time.sleep(0.02)
        yield server
    finally:
        server.client.close()
        process.kill()
        process.wait(LIMIT_S)


@contextmanager
def replicated(folder: Path, program: str = "") -> Iterator[tuple[TcpServer, TcpServer]]:
    """A primary and its replica, which follows."""
    with (serving(folder / "primary", program=program) as primary,
          serving(folder / "replica", "--replicaof", "127.0.0.1", str(primary.port),
                  program=program) as replica):
        primary.wait_replica()
        yield primary, replica


def why_no_failing_sync() -> str:
    """Why `failing_sync` cannot run here, or ""."""
    return "" if shutil.which("strace") else "there is no strace"


@contextmanager
def failing_sync(server: TcpServer) -> Iterator[None]:
    """Every fsync of the server fails with an I/O error."""
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(server.process.pid), "-e",
         "trace=fdatasync,fsync", "-e", "inject=fdatasync,fsync:error=EIO"])
    status = Path(f"/proc/{server.process.pid}/status")
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while f"TracerPid:\t{tracer.pid}\n" not in status.read_text():
            assert tracer.poll() is None, "strace may not attach here"
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        yield
    finally:
        tracer.terminate()
        tracer.wait(LIMIT_S)
