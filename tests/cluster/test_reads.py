"""Reads are answered beside the leader, so many at a time a token, and show what was written."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import readers
from real_cluster import RealCluster
from unicron.cli.cluster import local_cluster
from unicron.cli.cluster.client import Busy, Client
from unicron.control_plane.api.reads import READS_NUM_MAX

STATE = "/v1/state?explain=1"


def read_process(cluster: RealCluster) -> int:
    """The pid of the process that answers reads; a read has started it."""
    cluster.client().state()
    control_plane = cluster.local.find(local_cluster.CONTROL_PLANE)
    assert control_plane is not None
    threads = Path(f"/proc/{control_plane.pid}/task").iterdir()
    children = " ".join((thread / "children").read_text() for thread in threads).split()
    (found,) = [
        int(pid) for pid in children if b"read_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A read that takes long: the process does not run meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def token(cluster: RealCluster, name: str) -> str:
    made = cluster.client().post("/v1/tokens", {"name": name, "role": "view", "reason": "a test"})
    return str(made["token"])


def asked(cluster: RealCluster, secret: str, path: str) -> tuple[int, str | None, bytes]:
    """Status, Retry-After and body of one request, which is not tried again."""
    at = urlsplit(cluster.client().url)
    link = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60.0)
    try:
        link.request("GET", path, headers={"Authorization": f"Bearer {secret}"})
        answer = link.getresponse()
        return answer.status, answer.headers["Retry-After"], answer.read()
    finally:
        link.close()


def test_a_read_shows_what_its_client_has_written(cluster: RealCluster) -> None:
    client = cluster.client()
    for number in range(10):
        task = client.submit(
            {"apiVersion": "unicron/v1", "name": f"own-{number}", "command": ["sleep", "100"]}
        )
        assert client.task(task)["name"] == f"own-{number}"
        assert any(record["seq"] == task for record in client.records(task - 1, follow=False))
        client.cancel(task)
        assert client.state()["cluster"]["seq"] > task


def test_reads_that_take_long_hold_up_nobody_else(cluster: RealCluster) -> None:
    """A write is acknowledged, a rank is healed, and a program that waits for its place is answered
    in the end; further reads of the token are refused for a moment."""
    secret, other = token(cluster, "many"), token(cluster, "one")
    victim, answers = readers.Victim(cluster, "victim"), list[tuple[int, str | None, bytes]]()
    busy = Client(cluster.client().url, secret)
    shown = list[Any]()
    threads = [
        threading.Thread(target=lambda: answers.append(asked(cluster, secret, STATE)))
        for _ in range(READS_NUM_MAX)
    ]
    with stopped(read_process(cluster)):
        for thread in threads:
            thread.start()
        time.sleep(0.5)  # they have their places
        threads.append(threading.Thread(target=lambda: shown.append(busy.state())))
        threads[-1].start()
        victim.heal()
        assert cluster.client().cancel(victim.task, "a write")
        status, again, body = asked(cluster, secret, STATE)
        assert (status, again) == (429, "1")
        assert b"the token many has 8 reads in progress" in body
        threads.append(threading.Thread(target=lambda: asked(cluster, other, STATE)))
        threads[-1].start()
        time.sleep(1.2)  # longer than a place is waited for: another token has its own
        assert threads[-1].is_alive()
        assert not answers
        assert not shown
    for thread in threads:
        thread.join(60.0)
    assert [status for status, _, _ in answers] == [200] * READS_NUM_MAX
    assert shown[0]["cluster"]["num_tasks"]


def test_a_client_that_never_gets_a_place_says_so(
    cluster: RealCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unicron.cli.cluster.client.BUSY_S_MAX", 0.0)
    secret = token(cluster, "busy")
    with stopped(read_process(cluster)):
        for _ in range(READS_NUM_MAX):
            threading.Thread(target=asked, args=(cluster, secret, STATE), daemon=True).start()
        time.sleep(0.5)
        with pytest.raises(Busy, match="the token busy has 8 reads in progress") as raised:
            Client(cluster.client().url, secret).state()
    assert "a token for each program" in raised.value.hint


def test_a_read_process_that_ends_is_started_again(cluster: RealCluster) -> None:
    first = read_process(cluster)
    os.kill(first, signal.SIGKILL)
    cluster.wait(lambda: not Path(f"/proc/{first}").exists() or None, "it has ended")
    task = cluster.submit(
        {"apiVersion": "unicron/v1", "name": "after", "command": ["sleep", "100"]}
    )
    assert cluster.client().task(task)["name"] == "after"
    assert read_process(cluster) != first


def test_a_stream_ends_when_its_token_does(cluster: RealCluster) -> None:
    secret = token(cluster, "gone")
    found = list[Any]()
    thread = threading.Thread(
        target=lambda: found.append(asked(cluster, secret, "/v1/log?follow=1"))
    )
    thread.start()
    time.sleep(0.5)
    cluster.client().post("/v1/tokens/gone/revoke", {"reason": "a test"})
    thread.join(10.0)
    ((status, _, body),) = found
    assert status == 200
    *records, last = body.splitlines()
    assert all(b'"seq"' in line for line in records)
    assert b'"status":401' in last


def test_metrics_are_those_of_the_state(cluster: RealCluster) -> None:
    status, _, body = asked(cluster, token(cluster, "prometheus"), "/metrics")
    assert status == 200
    assert b'unicron_nodes{state="healthy"} 2.0' in body
    assert b"unicron_log_reachable 1.0" in body
    assert b"unicron_log_lag_records 0.0" in body
