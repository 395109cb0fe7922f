"""How long a command waits for an answer: longer for a dry run, which may be a large one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from unicron.cli.cluster.client import Client, Unreachable


class _Slow(BaseHTTPRequestHandler):
    """Answers once it is released."""

    released = threading.Event()

    def do_POST(self) -> None:
        self.released.wait(60)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Slow) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        _Slow.released.set()
        server.shutdown()
        thread.join()


def test_an_answer_is_waited_for_as_long_as_is_said(url: str) -> None:
    with pytest.raises(Unreachable):
        Client(url, "token").post("/v1/plan/dry-run", {}, 0.05)
    _Slow.released.set()
    assert Client(url, "token").post("/v1/plan/dry-run", {}, 60.0) == {}
