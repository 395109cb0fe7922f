"""Attacks over HTTP: readers, sessions, names of hosts; and what a client sends where."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import rmtree
from typing import Any
from urllib.parse import urlsplit

from bench.attack.nodes import with_ratio
from bench.attack.stage import (
    Outcome,
    Victim,
    cannot,
    cluster_for,
    command,
    healing_pair,
    judged,
)
from real_cluster import RealCluster
from unicron.cli.cluster.client import Client

READERS_NUM, TASKS_NUM, RATIO_MAX, WARM_S = 30, 210, 2.0, 3.0
READS = ("/v1/state?explain=1", "/v1/log", "/v1/state")
ASKS_S_MAX, ANSWER_S_MAX = 30.0, 60.0
CODES_NUM = 1_001
SECRET = "unicron_" + "s" * 43
Answer = tuple[int, bytes]


def ask(
    client: Client, method: str, path: str, body: Any = None, token: str = "", **headers: str
) -> Answer:
    """One request over TCP. Raises OSError, HTTPException."""
    link = http.client.HTTPConnection(client.host, client.port, timeout=ANSWER_S_MAX)
    given = {"Authorization": f"Bearer {token or client.token}"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body)
    if data is not None:
        given["Content-Type"] = "application/json"
    try:
        link.request(method, path, data, given)
        answer = link.getresponse()
        return answer.status, answer.read()
    finally:
        link.close()


def readers(num_pairs: int) -> Outcome:
    """S8: thirty readers with one `view` token, and 210 tasks in the state."""
    pairs_s = list[tuple[float, float]]()
    with cluster_for() as cluster:
        client, victim = cluster.client(), Victim(cluster)
        for number in range(TASKS_NUM):
            waits = {"min": 3, "max": 3}  # all slots, of which the victim has one
            client.post("/v1/tasks", command(f"task-{number}", ["true"], slots=waits))
        token = client.post("/v1/tokens", {"name": "reader", "role": "view"})["token"]
        counts = [0, 0]
        for path in [path for path in READS for _ in range(num_pairs)]:
            with _reading(client, path, token, counts) as go:
                pairs_s.append(healing_pair(victim, go.set, go.clear, WARM_S))
    how = f"{READERS_NUM} readers, {counts[0]:,} answers, {counts[1]:,} of them 429"
    return with_ratio([], how, pairs_s, RATIO_MAX)


@contextmanager
def _reading(client: Client, path: str, token: str, counts: list[int]) -> Iterator[threading.Event]:
    """READERS_NUM threads that read while the event is set."""
    go, ended = threading.Event(), threading.Event()

    def read() -> None:
        while not ended.is_set():
            if not go.wait(0.1):
                continue
            with suppress(OSError, http.client.HTTPException):
                status, _ = ask(client, "GET", path, token=token)
                counts[0] += 1
                counts[1] += status == 429

    threads = [threading.Thread(target=read, daemon=True) for _ in range(READERS_NUM)]
    for one in threads:
        one.start()
    try:
        yield go
    finally:
        ended.set()
        go.set()
        for one in threads:
            one.join(ANSWER_S_MAX)


# --- tokens ---------------------------------------------------------------------------------------
class Listener:
    """A server that notes the authorization of each request, and answers `{}`."""

    def __init__(self, host: str) -> None:
        heard = self.heard = list[str]()

        class Notes(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                heard.append(str(self.headers.get("Authorization")))
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Notes)
        self.url = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def _listening(host: str) -> Iterator[Listener]:
    made = Listener(host)
    try:
        yield made
    finally:
        made.close()


def unicron(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of the CLI without a cluster of its own. Raises TimeoutExpired."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
    return subprocess.run(
        [*RealCluster.PROGRAM, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=ASKS_S_MAX,
        env=clean | environment,
    )


def _own_address() -> str:
    """An address of this machine that is not loopback; "": it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        address = str(probe.getsockname()[0])
    return "" if address.startswith("127.") else address


def tokens(num_pairs: int) -> Outcome:
    """S9: a token for a plain URL of another host; one from the environment for a folder's URL."""
    broken, address = list[str](), _own_address()
    if not address:
        return cannot("this machine has no address but loopback")
    with _listening(address) as far:
        unicron("status", "--url", far.url, UNICRON_TOKEN=SECRET)
        broken += ["sent by plain http to another host"] * any(SECRET in one for one in far.heard)
    with _listening("127.0.0.1") as near, tempfile.TemporaryDirectory() as folder:
        note = {"url": near.url, "token": "", "cluster": "default", "pid": 1}
        (Path(folder) / "control_plane.json").write_text(json.dumps(note))
        (Path(folder) / "control_plane.json").chmod(0o600)
        unicron("status", "--state", folder, UNICRON_TOKEN=SECRET)
        broken += ["sent to the URL of a folder"] * any(SECRET in one for one in near.heard)
    return judged(broken, f"listeners at {address} and in a state folder heard no token")


# --- requests -------------------------------------------------------------------------------------
def long_numbers(num_pairs: int) -> Outcome:
    """S12: numbers of 4,301 digits and in other scripts."""
    broken = list[str]()
    with cluster_for() as cluster:
        client = cluster.client()
        task = cluster.submit(command("task", ["sleep", "1000"]))
        paths = ("/v1/state", "/v1/plan", "/v1/nodes", "/v1/tasks", f"/v1/tasks/{task}")
        for path in (*paths, "/v1/incidents/1/facts"):
            for text in ("9" * 4_301, "9" * 6_000, "%D9%A3", "%C2%B2"):
                status, _ = ask(client, "GET", f"{path}?at={text}")
                broken += [f"{path}: {status}"] * (status >= 500)
        log = (cluster.state.logs / "control-plane.log").read_text()
        broken += ["tracebacks in the log"] * ("Traceback" in log)
    return judged(list(dict.fromkeys(broken)), "6 paths, 4 numbers: each 4xx in one line")


def sessions(num_pairs: int) -> Outcome:
    """S13: a session makes a session; 1,001 codes of a `view` token end another's."""
    broken = list[str]()
    with cluster_for() as cluster:
        client = cluster.client()
        view = client.post("/v1/tokens", {"name": "reader", "role": "view"})["token"]

        def session(token: str) -> str:
            _, made = ask(client, "POST", "/v1/sessions/codes", {}, token)
            code = json.loads(made).get("code", "")
            _, found = ask(client, "POST", "/v1/sessions", {"code": code}, token)
            return str(json.loads(found).get("secret", ""))

        first = session(client.token)
        second = session(first)
        ask(client, "POST", "/v1/sessions/end", {}, first)
        if second and ask(client, "GET", "/v1/state", token=second)[0] == 200:
            broken.append("what a session made lives on after its end")
        mine = session(client.token)
        for _ in range(CODES_NUM):
            _, made = ask(client, "POST", "/v1/sessions/codes", {}, view)
            code = json.loads(made).get("code", "")
            ask(client, "POST", "/v1/sessions", {"code": code}, view)
        status, _ = ask(client, "GET", "/v1/state", token=mine)
        broken += ["sessions of a view token ended an operator's"] * (status != 200)
    return judged(broken, f"{CODES_NUM:,} codes of another token; a session of a session")


HOSTS = ("....", "1.2.3", "[a:b]", "localhost:@evil.com", "evil.com")


def host_names(num_pairs: int) -> Outcome:
    """S14: false names in Host, other schemes in Origin."""
    broken = list[str]()
    with cluster_for() as cluster:
        client = cluster.client()
        port = urlsplit(client.url).port
        for name in HOSTS:
            head = f"GET /v1/health HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n"
            with socket.create_connection((client.host, client.port), 10) as link:
                link.sendall(head.encode())
                status = link.recv(64).split()[1:2]
            broken += [f"Host: {name}"] * (status == [b"200"])
        for scheme in ("https", "file", "ftp"):
            origin = f"{scheme}://127.0.0.1:{port}"
            status_, _ = ask(client, "POST", "/v1/freeze", {"reason": "x"}, Origin=origin)
            broken += [f"Origin: {origin.rpartition(':')[0]}"] * (status_ == 200)
    return judged(broken, f"{len(HOSTS)} names in Host and 3 schemes in Origin are refused")


def false_servers(num_pairs: int) -> Outcome:
    """S17: a server that answers anything; a state folder of another user."""
    broken = list[str]()
    with _listening("127.0.0.1") as server:
        for words in (("status",), ("plan",), ("history",), ("tail",), ("incident",)):
            done = unicron(*words, "--url", server.url)
            broken += [f"{words[0]}: a traceback"] * ("Traceback" in done.stderr)
    if os.geteuid() == 0:
        folder = Path(tempfile.mkdtemp(prefix="unicron-attack-"))
        try:
            with cluster_for(folder=folder) as cluster:
                cluster.submit(command("task", ["true"]))
                time.sleep(1.0)
            for path in (folder, *folder.rglob("*")):
                os.chown(path, 65534, 65534, follow_symlinks=False)
            done = unicron("status", "--state", str(folder / "state"))
            broken += ["the folder of another user is read"] * (done.returncode == 0)
        finally:
            rmtree(folder, ignore_errors=True)
    return judged(broken, "a server that answers {}; a folder of another user: one line each")
