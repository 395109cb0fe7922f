"""What answers at a URL may be anything: each command says so in one line."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import in_process
from unicron.cli.cluster import answers

COMMANDS = (
    "status",
    "status -o json",
    "status tasks",
    "status 1",
    "plan",
    "history",
    "tail",
    "tail -o jsonl",
    "incident",
    "explain",
    "export out.jsonl",
    "replay --live",
    "logs 1",
    "needs",
    "drain n1",
    "cancel 1",
    "set-weight 1 2",
    "freeze",
    "submit job.yaml",
    "submit --dry-run job.yaml",
    "token list",
    "token create --role view",
    "open --print",
    "log status",
)
DEEP = b"[" * 100_000
ANSWERS = (
    b"{}",
    b"[]",
    b"null",
    b"1",
    b'"text"',
    b"{",
    b"",
    b"\xff\xfe",
    b"NaN",
    b"<html>a page</html>",
    DEEP,
    b'{"seq": 1}',
    b'{"seq": "x", "items": [1], "next": "", "ok": true, "cluster": [], "tasks": {"a": 1}}',
    b'{"items": [{}], "next": "", "tasks": [{}], "nodes": [{}], "cluster": {}, "after": "x"}',
    b'{"seq": 1, "kind": 5, "body": [], "at_s": "x", "code": {}, "leader": 1, "read_seq": []}',
)


class Server(http.server.BaseHTTPRequestHandler):
    said = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.said)))
        self.end_headers()
        self.wfile.write(self.said)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: a\ncommand: [sleep, '1']\nslots: 1\n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def ask(url: str, words: str, tmp_path: Path) -> Any:
    environment = {
        **os.environ,
        "UNICRON_STATE": str(tmp_path / "none"),
        "UNICRON_URL": url,
        "UNICRON_TOKEN": "secret",
        "NO_COLOR": "1",
    }
    return in_process(tuple(words.split()), None, environment)


@pytest.mark.parametrize("said", ANSWERS, ids=lambda said: repr(said[:20]))
def test_a_stranger_is_told_in_one_line(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(Server, "said", said)
    for words in COMMANDS:
        done = ask(url, words, tmp_path)
        assert "Traceback" not in done.stderr, words
        if done.returncode != 0:
            line, hint = done.stderr.strip().splitlines()[-2:]
            assert line.startswith("error: "), (words, done)
            assert hint.startswith("hint: "), (words, done)
        if words == "status":
            assert done.returncode == 2, done
            assert f"what answers at {url} is no control plane that this version knows" in line


def test_an_answer_without_an_end_is_bounded(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "ANSWER_BYTES_MAX", 1 << 16)
    monkeypatch.setattr(answers, "LINE_BYTES_MAX", 1 << 16)
    monkeypatch.setattr(Server, "said", json.dumps(["x" * (1 << 18)]).encode())
    for words in ("status", "tail"):
        done = ask(url, words, tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert "more than 65536 bytes" in done.stderr


def test_an_answer_that_breaks_off_is_interrupted(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                link, _ = listener.accept()
                with link:
                    link.recv(1 << 16)
                    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        done = ask(f"http://127.0.0.1:{listener.getsockname()[1]}", "status -o json", tmp_path)
    assert done.returncode == 3, done
    assert "response was interrupted" in done.stderr
