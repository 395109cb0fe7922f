"""Servers on TCP ports, as primary, replica and Sentinels, whose disks can fail."""

from __future__ import annotations

import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from certificates import Pair
from unicron.cli.cluster.local_cluster import free_port
from unicron.events.log import embedded_server

LIMIT_S = 30.0
Redis: Any = redis.Redis
ResponseError = redis.ResponseError
NAME = "unicron-log"
"""The primary, as Sentinels know it."""
DOWN_S = 1.0
"""How long a primary must be away until Sentinels promote the replica."""
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class TcpServer:
    """A running server. `client` is a connection to it, with this user and password."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        port: int,
        folder: Path,
        pair: Pair | None,
        login: tuple[str | None, str | None],
    ) -> None:
        self.process, self.port, self.folder = process, port, folder
        self.url = f"redis{'s' * bool(pair)}://127.0.0.1:{port}/0"
        self.client = Redis(
            host="127.0.0.1",
            port=port,
            username=login[0],
            password=login[1],
            **({"ssl": True, "ssl_ca_certs": str(pair.ca)} if pair else {}),
        )

    @property
    def role(self) -> str:
        return str(self.client.info("replication")["role"])

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
def serving(
    folder: Path,
    *options: str,
    appendfsync: str = "always",
    program: str = "",
    port: int = 0,
    pair: Pair | None = None,
) -> Iterator[TcpServer]:
    """A server with an append-only file in `folder`; `program` "": the embedded one's binary. With
    a certificate, over TLS only."""
    port = port or free_port()
    data = (
        "--save",
        "",
        "--appendonly",
        "yes",
        "--appendfsync",
        appendfsync,
        "--repl-diskless-sync-delay",
        "0",
    )
    with _running(
        folder, (*_listening(port, pair), *data, *options), program, port, pair
    ) as server:
        yield server


def _listening(port: int, pair: Pair | None) -> tuple[str, ...]:
    if pair is None:
        return "--port", str(port)
    return (
        "--port",
        "0",
        "--tls-port",
        str(port),
        "--tls-cert-file",
        str(pair.certificate),
        "--tls-key-file",
        str(pair.key),
        "--tls-ca-cert-file",
        str(pair.ca),
        "--tls-auth-clients",
        "no",
        "--tls-replication",
        "yes",
    )


@contextmanager
def _running(
    folder: Path,
    options: tuple[str, ...],
    program: str,
    port: int,
    pair: Pair | None,
    login: tuple[str | None, str | None] = (None, None),
) -> Iterator[TcpServer]:
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [
            program or str(embedded_server.find_binary()),
            *options,
            "--bind",
            "127.0.0.1",
            "--dir",
            str(folder),
            "--logfile",
            str(folder / "log"),
        ],
        # SIGXFSZ stays ignored: a write beyond the limit is an error. A session has its own share
        # of the CPUs: a Sentinel that is late by 2 s does nothing for 30 s.
        restore_signals=False,
        start_new_session=True,
    )
    server = TcpServer(process, port, folder, pair, login)
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
def replicated(
    folder: Path, program: str = "", pair: Pair | None = None
) -> Iterator[tuple[TcpServer, TcpServer]]:
    """A primary and its replica, which follows."""
    with (
        serving(folder / "primary", program=program, pair=pair) as primary,
        serving(
            folder / "replica",
            "--replicaof",
            "127.0.0.1",
            str(primary.port),
            program=program,
            pair=pair,
        ) as replica,
    ):
        primary.wait_replica()
        yield primary, replica


@contextmanager
def watched(
    folder: Path, primary: TcpServer, program: str = "", pair: Pair | None = None
) -> Iterator[tuple[str, list[TcpServer]]]:
    """Three Sentinels of a primary and its replica; yields the URL of the log, and them. Clients
    may ask them where the primary is, and nothing else."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(_sentinel(folder / f"sentinel-{number}", primary, program, pair))
            for number in range(3)
        ]
        deadline_s = time.monotonic() + LIMIT_S
        for one in found:
            while (seen := one.client.sentinel_master(NAME))["num-other-sentinels"] < 2 or not (
                seen["num-slaves"]
            ):
                assert time.monotonic() < deadline_s, "the Sentinels do not find each other"
                time.sleep(0.05)
        ports = ",".join(f"127.0.0.1:{one.port}" for one in found)
        yield f"redis{'s' * bool(pair)}+sentinel://{ports}/{NAME}", found


@contextmanager
def _sentinel(
    folder: Path, primary: TcpServer, program: str, pair: Pair | None
) -> Iterator[TcpServer]:
    folder.mkdir(parents=True)
    path = folder / "sentinel.conf"
    path.write_text(f"""user default on nopass +ping +sentinel|get-master-addr-by-name
user peer on >peers ~* &* +@all
sentinel sentinel-user peer
sentinel sentinel-pass peers
sentinel monitor {NAME} 127.0.0.1 {primary.port} 2
sentinel down-after-milliseconds {NAME} {DOWN_S * 1e3:.0f}
sentinel failover-timeout {NAME} 4000
""")
    port = free_port()
    with _running(
        folder,
        (str(path), "--sentinel", *_listening(port, pair)),
        program,
        port,
        pair,
        ("peer", "peers"),
    ) as server:
        yield server


def why_no_failing_sync() -> str:
    """Why `failing_sync` cannot run here, or ""."""
    return "" if shutil.which("strace") else "there is no strace"


@contextmanager
def failing_sync(server: TcpServer) -> Iterator[None]:
    """Every fsync of the server fails with an I/O error."""
    tracer = subprocess.Popen(
        [
            "strace",
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            "-p",
            str(server.process.pid),
            "-e",
            "trace=fdatasync,fsync",
            "-e",
            "inject=fdatasync,fsync:error=EIO",
        ]
    )
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
