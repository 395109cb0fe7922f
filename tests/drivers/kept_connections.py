"""A user's own connections in a training script, and the servers of this machine behind them.

Each is opened once and then used again and again: HTTP with the standard library, S3 with boto3 and
moto's server, Redis with its client, and a socket that C opens. The servers note which connections
a process has used, so that a silent second connection is seen: boto3 repeats a request that failed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import boto3
import object_store
import replicated_servers
from moto.server import create_backend_app

S3 = {
    "service_name": "s3",
    "region_name": "us-east-1",
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
}
SCRIPT = """
import ctypes, http.client, os, socket, struct

class Kept:
    def __init__(self, http_port, s3_port, redis_port, echo_port):
        import boto3, redis
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.http = http.client.HTTPConnection("127.0.0.1", http_port, timeout=20)
        self.s3 = boto3.client(endpoint_url=f"http://127.0.0.1:{s3_port}", **S3)
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
        self.s3.put_object(Bucket="models", Key=f"{who}/state", Body=b"here")
        assert self.s3.get_object(Bucket="models", Key=f"{who}/state")["Body"].read() == b"here"
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
"""Defines `use`, which uses each connection. PORTS and S3 come before it."""

Seen = dict[tuple[str, int], set[int]]


class Services(NamedTuple):
    """The running servers."""

    ports: tuple[int, int, int, int]
    seen: Seen
    """By service and process: the client's port of each connection over HTTP or of S3."""
    redis: Any

    @property
    def script(self) -> str:
        """What a training script has to begin with."""
        return f"PORTS = {self.ports}\nS3 = {S3}\n{SCRIPT}"

    def num_connections(self, pid: int) -> dict[str, int]:
        """How many connections a process has used, by service; of the socket in C this is not
        known, but it has no second one."""
        return {
            "http": len(self.seen["http", pid]),
            "s3": len(self.seen["s3", pid]),
            "redis": self.redis.scard(f"connections-{pid}"),
        }


@contextmanager
def services(folder: Path) -> Iterator[Services]:
    """All servers, on loopback."""
    folder.mkdir()
    seen: Seen = defaultdict(set)
    echo = object_store.Door()
    try:
        with (
            _http_server(seen) as http_port,
            _s3_server(seen) as s3_port,
            replicated_servers.serving(folder, appendfsync="no") as redis,
        ):
            yield Services((http_port, s3_port, redis.port, echo.port), seen, redis.client)
    finally:
        echo.close()


@contextmanager
def _http_server(seen: Seen) -> Iterator[int]:
    class Answer(_KeptAlive):
        def do_GET(self) -> None:
            (pid,) = parse_qs(urlsplit(self.path).query)["process"]
            seen["http", int(pid)].add(self.client_address[1])
            self.answer(200, {}, b"here")

    with _served(Answer) as port:
        yield port


@contextmanager
def _s3_server(seen: Seen) -> Iterator[int]:
    """moto's, with a bucket `models`. The first part of a key is the process that uses it.
    werkzeug's server, which moto brings, closes each connection after a request."""
    store = create_backend_app("s3").test_client()

    class Answer(_KeptAlive):
        def do_GET(self) -> None:
            if pid := self.path.split("/")[2:3]:
                seen["s3", int(pid[0])].add(self.client_address[1])
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = store.open(
                self.path, method=self.command, headers=self.headers.items(), data=data
            )
            self.answer(answer.status_code, dict(answer.headers), answer.get_data())

        do_PUT = do_GET

    with _served(Answer) as port:
        boto3.client(**S3, endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="models")
        yield port


class _KeptAlive(BaseHTTPRequestHandler):
    """Keeps the connection after a request."""

    protocol_version = "HTTP/1.1"

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def _served(handler: type[_KeptAlive]) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
