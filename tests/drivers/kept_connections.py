"""A user's own connections in a training script, and the servers of this machine behind them.

Each is opened once and then used again and again: HTTP with the standard library, an object store
by fsspec's driver over aiohttp (as s3fs is), Redis with its client, and a socket that C opens. The
servers note which connections a process has used, so that a silent second connection is seen.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import object_store
import replicated_servers

SERVICES = ("http", "objects", "redis", "C")
SCRIPT = """
import ctypes, http.client, os, socket, struct

class Kept:
    def __init__(self, http_port, redis_port, echo_port):
        import fsspec, redis
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.http_port = http_port
        self.http = http.client.HTTPConnection("127.0.0.1", http_port, timeout=20)
        self.objects = fsspec.filesystem("http")
        self.redis = redis.Redis(port=redis_port, single_connection_client=True)
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self.libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
        address = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", echo_port,
            socket.inet_aton("127.0.0.1"))
        assert self.libc.connect(self.fd, address, len(address)) == 0

    def use(self):
        who = os.getpid()
        self.http.request("GET", f"/http?process={who}")
        assert self.http.getresponse().read() == b"here"
        url = f"http://127.0.0.1:{self.http_port}/objects/one?process={who}"
        assert self.objects.cat_file(url) == b"here"
        self.redis.sadd(f"connections-{who}", self.redis.client_id())
        got = ctypes.create_string_buffer(1)
        assert self.libc.send(self.fd, b"x", 1, 0) == 1
        assert self.libc.recv(self.fd, got, 1, 0) == 1 and got.raw == b"x"
        try:
            self.listener.accept()
        except BlockingIOError:
            return
        raise AssertionError("somebody has connected to the listener")

KEPT = []
def use():
    if not KEPT:  # the communicators are there already
        KEPT.append(Kept(*PORTS))
    KEPT[0].use()
"""
"""Defines `use`, which uses each connection. PORTS comes before it."""


class Services(NamedTuple):
    """The running servers."""

    ports: tuple[int, int, int]
    seen: dict[tuple[str, int], set[int]]
    """By service and process: the client's port of each connection over HTTP."""
    redis: Any

    @property
    def script(self) -> str:
        """What a training script has to begin with."""
        return f"PORTS = {self.ports}\n{SCRIPT}"

    def num_connections(self, pid: int) -> dict[str, int]:
        """How many connections a process has used, by service; of the socket in C this is not
        known, but it has no second one."""
        return {
            "http": len(self.seen["http", pid]),
            "objects": len(self.seen["objects", pid]),
            "redis": self.redis.scard(f"connections-{pid}"),
        }


@contextmanager
def services(folder: Path) -> Iterator[Services]:
    """All servers, on loopback."""
    seen: dict[tuple[str, int], set[int]] = defaultdict(set)

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps the connection

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            (pid,) = parse_qs(asked.query)["process"]
            seen[asked.path.split("/")[1], int(pid)].add(self.client_address[1])
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"here")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    echo = object_store.Door()
    folder.mkdir()
    try:
        with replicated_servers.serving(folder, appendfsync="no") as redis:
            ports = server.server_address[1], redis.port, echo.port
            yield Services(ports, seen, redis.client)
    finally:
        echo.close()
        server.shutdown()
        server.server_close()
