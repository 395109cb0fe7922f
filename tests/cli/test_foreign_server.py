"""What answers at a URL may be anything: each command says so in one line."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cli_process import in_process
from unicron.cli.cluster import answers, client
from unicron.events.errors import UnicronError

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


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that answers each request so, until the client closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    link, _ = listener.accept()
                    threading.Thread(target=one, args=(link,), daemon=True).start()

        def one(link: socket.socket) -> None:
            with link, suppress(OSError):
                link.recv(1 << 16)
                answer(link)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def endless(begin: bytes, again: bytes, pause_s: float = 0.0) -> Callable[[socket.socket], None]:
    def answer(link: socket.socket) -> None:
        link.sendall(begin)
        while True:
            link.sendall(again)
            time.sleep(pause_s)

    return answer


@pytest.mark.parametrize(
    ("answer", "code", "why"),
    [
        (endless(HEAD + b"Content-Length: 99999999\r\n\r\n", b" ", 0.1), 3, "less than 1024 bytes"),
        (endless(HEAD + b"X: ", b"a", 0.1), 3, "the head of the answer did not come within 1 s"),
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000), 3, "head of the answer did not"),
        (
            endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 10_000),
            2,
            "chunks of a few bytes",
        ),
    ],
    ids=["body", "head", "continue", "chunks"],
)
def test_an_answer_that_makes_no_progress_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[socket.socket], None],
    code: int,
    why: str,
) -> None:
    monkeypatch.setattr(answers, "PIECE_BYTES", 1 << 16)
    with answering(answer) as url:
        asker = client.Client(url, "secret")
        for ask in (
            lambda: asker.get("/v1/health", 1.0),
            lambda: list(records(asker)),
        ):
            began_s = time.monotonic()
            with pytest.raises(UnicronError, match=why) as raised:
                ask()
            assert raised.value.exit_code == code
            assert time.monotonic() - began_s < 10.0


def records(asker: client.Client) -> Iterator[bytes]:
    opened = asker._open_here("GET", "/v1/log", limit_s=1.0)
    return answers.lines(opened, asker.url)


def test_whoever_rests_between_reads_is_not_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in which nobody waits for the answer does not count."""
    monkeypatch.setattr(answers, "BODY_S_MAX", 0.5)
    lines = [b"%d" % number for number in range(5)]

    def answer(link: socket.socket) -> None:
        link.sendall(HEAD + b"\r\n")
        for line in lines:
            link.sendall(line + b"\n")
            time.sleep(0.05)

    with answering(answer) as url:
        found = list[bytes]()
        for line in records(client.Client(url, "secret")):
            found.append(line)
            time.sleep(0.3)
    assert found == lines


def test_a_busy_control_plane_is_waited_for_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "BUSY_S_MAX", 1.0)
    said = b"HTTP/1.1 429 x\r\nRetry-After: 9999\r\nContent-Length: 2\r\n\r\n{}"
    began_s = time.monotonic()
    with answering(lambda link: link.sendall(said)) as url:
        done = ask(url, "status", tmp_path)
    assert time.monotonic() - began_s < 5.0
    assert done.returncode == 1, done
    assert done.stderr.splitlines()[0] == f"{client.BUSY}: waiting for 1 s at most"


@pytest.mark.parametrize(
    ("pointer", "code", "why"),
    [
        (b"", 2, "it points nowhere (307)"),
        (b"Unicron-Follows: http://[::1\r\n", 2, "is not a control plane's address"),
    ],
)
def test_a_pointer_to_nowhere_is_told(tmp_path: Path, pointer: bytes, code: int, why: str) -> None:
    said = b"HTTP/1.1 307 x\r\n" + pointer + b"Content-Length: 0\r\n\r\n"
    with answering(lambda link: link.sendall(said)) as url:
        done = ask(url, "status", tmp_path)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert why in done.stderr
    assert "Traceback" not in done.stderr
