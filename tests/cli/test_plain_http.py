"""No token crosses a network unencrypted, or goes where only a folder says; a listener notes."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import in_process, refused, unicron
from unicron.cli.cluster.state_dir import write_json
from unicron.cli.commands import serve
from unicron.events import network_address, tls
from unicron.events.errors import UsageError
from unicron.events.private_files import write_private
from unicron.events.records.types import Labels
from unicron.workers.agent.delivery.join import join

SECRET = "unicron_of-the-environment"
OWN = "of-the-folder"


class _Handler(socketserver.StreamRequestHandler):
    server: Listener

    def handle(self) -> None:
        self.connection.settimeout(5.0)
        head = b""
        while b"\r\n\r\n" not in head and (part := self.connection.recv(4096)):
            head += part
        self.server.heard.append(head)
        to = self.server.points_to
        self.wfile.write(
            (
                f"HTTP/1.1 307 Temporary Redirect\r\nUnicron-Follows: {to}\r\n"
                if to
                else "HTTP/1.1 403 Forbidden\r\n"
            ).encode()
            + b"Content-Length: 0\r\nConnection: close\r\n\r\n"
        )


class Listener(socketserver.ThreadingTCPServer):
    """Notes what it gets, and says 403, or that another control plane leads."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.heard: list[bytes] = []
        self.points_to = ""
        self.url = f"http://{host}:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


@pytest.fixture
def near() -> Iterator[Listener]:
    made = Listener("127.0.0.1")
    yield made
    made.stop()


@pytest.fixture
def far() -> Iterator[Listener]:
    """At an address that other hosts reach."""
    own = [
        address
        for _, address in network_address.interfaces()
        if ":" not in address and not network_address.is_loopback(address)
    ]
    if not own:
        pytest.skip("this machine has only its loopback")
    made = Listener(own[0])
    yield made
    made.stop()


def environment(folder: Path, **more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
    return {**clean, "UNICRON_STATE": str(folder), "UNICRON_TOKEN": SECRET, **more}


@pytest.mark.parametrize(
    "words",
    ["status", "tail", "tail -f", "logs t", "open --print", "token list", "plan", "drain n1"],
)
def test_no_command_sends_a_token_in_plain_to_another_host(
    words: str, far: Listener, tmp_path: Path
) -> None:
    here = environment(tmp_path)
    for given, more in (
        (("--url", far.url), {}),
        (("--url", far.url.removeprefix("http://")), {}),
        ((), {"UNICRON_URL": far.url}),
    ):
        refused(in_process((*words.split(), *given), None, here | more), "unencrypted")
    assert far.heard == []
    for given, more in ((("--insecure",), {}), ((), {"UNICRON_INSECURE": "1"})):
        done = in_process((*words.split(), "--url", far.url, *given), None, here | more)
        assert "answered 403" in done.stderr
        assert f"Bearer {SECRET}".encode() in far.heard.pop(), "the user accepts it"
        far.heard.clear()


def test_a_job_is_not_submitted_in_plain(far: Listener, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("apiVersion: unicron/v1\nname: a\ncommand: ['true']\n")
    words = ("submit", str(job), "--url", far.url)
    refused(in_process(words, None, environment(tmp_path)), "unencrypted")
    assert far.heard == []


def test_no_redirect_takes_a_token_to_another_host_in_plain(
    near: Listener, far: Listener, tmp_path: Path
) -> None:
    near.points_to = far.url
    words, here = ("status", "--url", near.url), environment(tmp_path)
    refused(in_process(words, None, here), "unencrypted")
    assert (len(near.heard), far.heard) == (1, [])
    assert "answered 403" in in_process((*words, "--insecure"), None, here).stderr
    assert SECRET.encode() in far.heard[0]


def test_no_agent_follows_a_redirect_to_another_host_in_plain(
    near: Listener, far: Listener
) -> None:
    near.points_to = far.url

    async def joined(**more: bool) -> None:
        await join(
            near.url,
            SECRET,
            node="n1",
            host="127.0.0.1",
            incarnation=1,
            labels=Labels(),
            s_max=0.0,
            **more,
        )

    with pytest.raises(UsageError, match="leads, without TLS, and this agent has no --insecure"):
        asyncio.run(joined())
    assert far.heard == []
    with pytest.raises(UsageError, match="does not accept the token"):
        asyncio.run(joined(insecure=True))
    assert SECRET.encode() in far.heard[0]


@pytest.mark.parametrize("host", [platform.node(), "another"])
def test_a_token_of_the_environment_does_not_go_where_a_folder_says(
    host: str, near: Listener, tmp_path: Path
) -> None:
    """A colleague's folder names his address, as if it were that of another host or of this one."""
    write_json(
        tmp_path / "control_plane.json", {"url": near.url, "socket": "", "token": OWN, "host": host}
    )
    for words in (("status", "--state", str(tmp_path)), ("status",)):
        in_process(words, None, environment(tmp_path))
    assert near.heard
    heard = b"".join(near.heard)
    assert SECRET.encode() not in heard
    assert f"Bearer {OWN}".encode() in heard
    near.heard.clear()
    in_process(("status", "--state", str(tmp_path), "--url", near.url), None, environment(tmp_path))
    assert SECRET.encode() in near.heard[0], "the user names that address"


@pytest.mark.parametrize("token", [f"{SECRET}\n\r", f" {SECRET}\n"])
def test_what_a_file_puts_around_a_token_is_left_out(
    token: str, near: Listener, tmp_path: Path
) -> None:
    words = ("status", "--state", str(tmp_path), "--url", near.url)
    in_process(words, None, {**environment(tmp_path), "UNICRON_TOKEN": token})
    assert f"Bearer {SECRET}\r\n".encode() in near.heard[0]


@pytest.mark.parametrize("middle", ["\n", "\r\nX-Other: ", " ", "é", "\x1b"])
def test_what_is_no_token_is_refused_and_not_printed(
    middle: str, near: Listener, tmp_path: Path
) -> None:
    """Python's own error has the token in it."""
    token = f"unicron_begin{middle}end"
    done = in_process(
        ("status", "--state", str(tmp_path), "--url", near.url),
        None,
        {**environment(tmp_path), "UNICRON_TOKEN": token},
    )
    refused(done, "another character that no token has")
    assert "unicron_begin" not in done.stdout + done.stderr
    with pytest.raises(UsageError, match="no token has"):
        asyncio.run(
            join(near.url, token, node="n1", host="h", incarnation=1, labels=Labels(), s_max=0.1)
        )
    assert near.heard == []


def test_a_folders_own_token_does_not_go_to_another_host_in_plain(
    far: Listener, tmp_path: Path
) -> None:
    write_json(
        tmp_path / "control_plane.json",
        {"url": far.url, "socket": "", "token": OWN, "host": "another"},
    )
    refused(unicron("status", "--state", str(tmp_path)), "unencrypted")
    assert far.heard == []


def test_a_webhook_has_a_secret_in_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hook"
    for url in ("http://hooks.example/T0/secret", "slack+http://192.0.2.9/T0/secret"):
        write_private(path, url.encode())
        monkeypatch.delenv(tls.INSECURE, raising=False)
        with pytest.raises(UsageError, match="unencrypted") as refusal:
            serve.webhook(path)
        assert "T0" not in json.dumps([str(refusal.value), refusal.value.hint])
        monkeypatch.setenv(tls.INSECURE, "1")
        assert serve.webhook(path) == url
    monkeypatch.delenv(tls.INSECURE)
    write_private(path, b"http://127.0.0.1:9093/alerts")
    assert serve.webhook(path), "it stays on this machine"
