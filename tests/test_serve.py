"""The control plane's process: real server, real port, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from unicron.control_plane.serve import read_policy
from unicron.events.embedded import Server
from unicron.events.errors import UsageError
from unicron.events.records import Record
from unicron.events.redis_log import RedisLog
from unicron.events.reports import Policy, PolicySet

MAIN = """
import sys, pathlib
from unicron.control_plane import serve
from unicron.events.errors import UsageError
state, url, port, cluster, policy, *switches = sys.argv[1:]
try:
    sys.exit(serve.run(serve.Options(
        state=pathlib.Path(state), redis_url=url, port=int(port), cluster=cluster,
        policy=pathlib.Path(policy) if policy else None,
        observe="observe" in switches, allow_inject="allow_inject" in switches)))
except UsageError as error:
    print(f"USAGE {error} | {error.hint}", file=sys.stderr)
    sys.exit(2)
"""


class Running:
    """One control plane process and its state folder."""

    def __init__(self, process: subprocess.Popen[str], state: Path) -> None:
        self.process, self.state = process, state

    def note(self) -> dict[str, Any]:
        """control_plane.json, once this process has written it."""
        path, deadline = self.state / "control_plane.json", time.monotonic() + 20
        while time.monotonic() < deadline:
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text())
                if found["pid"] == self.process.pid:
                    return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no note; {self.words()}")

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.note()["url"] + "/v1/health", timeout=5) as reply:
            found: dict[str, Any] = json.loads(reply.read())
            return found

    def wait_leading(self) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = self.health()
            if found["leader"]:
                return found
            time.sleep(0.02)
        raise AssertionError("it does not lead")

    def end(self, limit_s: float = 20.0) -> int:
        return self.process.wait(limit_s)

    def words(self) -> str:
        if self.process.poll() is None:
            self.process.kill()
        return self.process.communicate(timeout=10)[1]


@contextmanager
def control_plane(state: Path, url: str, *, port: int = 0, cluster: str = "serve",
                  policy: str = "", switches: tuple[str, ...] = (),
                  **environment: str) -> Iterator[Running]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, str(state), url, str(port), cluster, policy, *switches],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        yield Running(process, state)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def records(url: str, cluster: str) -> list[Record]:
    async def read() -> list[Record]:
        log = RedisLog(url, cluster)
        try:
            return list(await log.read(after=0, num_max=999))
        finally:
            await log.close()

    return asyncio.run(read())


def kinds(url: str, cluster: str) -> list[str]:
    return [record.kind for record in records(url, cluster)]


def test_start_note_token_stop(server: Server, tmp_path: Path) -> None:
    with control_plane(tmp_path, server.url, cluster="serve-1") as first:
        health = first.wait_leading()
        assert (health["pid"], health["epoch"]) == (first.process.pid, 1)
        note, token = first.note(), (tmp_path / "token").read_text().strip()
        assert {"url", "pid", "start_time", "cluster"} <= set(note)
        for name in ("token", "control_plane.json"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        asked = urllib.request.Request(note["url"] + "/v1/state",
                                       headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=5) as reply:
            assert json.loads(reply.read())["cluster"]["seq"] == 2
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 0
        assert not (tmp_path / "control_plane.json").exists()
    with control_plane(tmp_path, server.url, cluster="serve-1") as second:
        assert second.wait_leading()["epoch"] == 2
        assert (tmp_path / "token").read_text().strip() == token
        second.process.send_signal(signal.SIGINT)
        assert second.end() == 0


def test_a_newer_one_fences_with_one_line(server: Server, tmp_path: Path) -> None:
    with control_plane(tmp_path / "a", server.url, cluster="serve-2") as first:
        first.wait_leading()
        with control_plane(tmp_path / "b", server.url, cluster="serve-2") as second:
            second.wait_leading()
            note = first.note()
            token = (tmp_path / "a" / "token").read_text().strip()
            body = {"apiVersion": "unicron/v1", "name": "x", "command": ["true"]}
            asked = urllib.request.Request(
                note["url"] + "/v1/tasks", data=json.dumps(body).encode(),
                headers={"Authorization": f"Bearer {token}"})
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(asked, timeout=5)
            assert first.end() == 1
            assert "fenced" in first.words()
            assert second.process.poll() is None


def test_a_taken_port_fences_nobody(server: Server, tmp_path: Path) -> None:
    with control_plane(tmp_path / "a", server.url, cluster="serve-3") as first:
        port = int(first.wait_leading() and first.note()["url"].rpartition(":")[2])
        with control_plane(tmp_path / "b", server.url, port=port, cluster="serve-3") as second:
            assert second.end() == 2
            words = second.words()
        assert f"USAGE cannot listen on 127.0.0.1:{port}: Address already in use |" in words
        assert first.health()["leader"]
        assert kinds(server.url, "serve-3").count("EpochStarted") == 1


def test_an_unreachable_server_is_wrong_input(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with control_plane(tmp_path, f"redis://127.0.0.1:{port}/0") as process:
            assert process.end() == 2
            assert "USAGE the server cannot be reached" in process.words()


def test_killed_around_an_append(server: Server, tmp_path: Path) -> None:
    """Before: the record is not there. After: it is. The next leader goes on either way."""
    for number, (environment, expected) in enumerate((
        ({"UNICRON_CRASH_BEFORE_KIND": "EpochStarted"}, []),
        ({"UNICRON_CRASH_AFTER_KIND": "EpochStarted:1"}, ["EpochStarted", "PolicySet"]),
        ({"UNICRON_CRASH_BEFORE_SEQ": "2"}, []),
        ({"UNICRON_CRASH_AFTER_SEQ": "2"}, ["EpochStarted", "PolicySet"]),
    )):
        cluster, state = f"serve-crash-{number}", tmp_path / str(number)
        with control_plane(state, server.url, cluster=cluster, **environment) as doomed:
            assert doomed.end() == -signal.SIGKILL
        assert kinds(server.url, cluster) == expected
        with control_plane(state, server.url, cluster=cluster) as next_one:
            assert next_one.wait_leading()["seq"] >= 2
            policies = kinds(server.url, cluster).count("PolicySet")
            assert policies == 1, "every limit is in the log, once"


def test_the_switches_are_the_policys_and_never_left_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("silence_s_max: 7")
    for file, switches in (("", ("allow_inject",)), ("policy.yaml", ("observe",)), ("", ())):
        with control_plane(tmp_path, server.url, cluster="serve-switches",
                           policy=str(tmp_path / file) if file else "",
                           switches=switches) as process:
            process.wait_leading()
    told = [record.body.policy for record in records(server.url, "serve-switches")
            if isinstance(record.body, PolicySet)]
    assert told == [Policy(allow_inject=True), Policy(silence_s_max=7.0, observe=True), Policy()]


def test_a_policy_file_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("silence_s_max: 3\ngain_min: 1e-3\n")
    assert (read_policy(path).silence_s_max, read_policy(path).gain_min) == (3.0, 0.001)
    path.write_text("moves_max: 0\nquotas: {red: 8, blue: 0}\n")
    assert (read_policy(path).moves_max, read_policy(path).quotas) == (0, {"red": 8, "blue": 0})
    path.write_text("floor: true\nalpha: 0.5\n")
    assert (read_policy(path).floor, read_policy(path).alpha) == (True, 0.5)
    path.write_text('{"silence_s_max": 4}')
    assert read_policy(path).silence_s_max == 4.0
    for text in ("", "# nothing", "observe: false"):
        path.write_text(text)
        assert read_policy(path) == Policy()
    path.write_text("hot_spare: true")
    assert read_policy(path) == Policy(hot_spare=True)
    for text in ("silence_s_may: 3", "silence_s_max: often", "- 1", "a: [", "silence_s_max: .nan",
                 "silence_s_max: 0", "restarts_max: -1", "moves_max: -1", "quotas: {red: -1}",
                 "quotas: 3", "quotas: {red: many}", "moves_max: 1.5", "floor: 2",
                 "hot_spare: often", "repair_s: 0",
                 "observe: true", "allow_inject: true"):
        path.write_text(text)
        with pytest.raises(UsageError) as refused:
            read_policy(path)
        assert "\n" not in str(refused.value)
        assert refused.value.hint
    with pytest.raises(UsageError):
        read_policy(tmp_path / "absent")


@pytest.mark.parametrize(("text", "told", "hint"), [
    ("silence_max: 3", "silence_max: is not a field", "did you mean silence_s_max?"),
    ("- 1", "a policy is a mapping", "Policy: its fields"),
    ("silence_s_max: often", "silence_s_max: expected a number, got text", "Policy: its fields"),
    ("silence_s_max: [1]", "silence_s_max: expected a number, got a list", "Policy: its fields"),
    ("a: 1\n b: [", "line 2, column 3: mapping values are not allowed", "Policy: its fields"),
    ("gain_min: 1990-13-01", "month must be in 1..12", "Policy: its fields"),
    ("alpha: 3", "alpha: 3 is not one of 0, 0.5, 1, 2", "1 proportional fairness"),
    ("alpha: equal", "alpha: expected a number, got text", "Policy: its fields"),
    ("alpha: 1\nhot_spare: true", "hot_spare: a spare is priced by WAF alone", "leave one"),
    ("gain_min: 5", "gain_min: 5 is not below 1", "0.05 is 5 %"),
    ("gain_min: 1", "gain_min: 1 is not below 1", "0.05 is 5 %"),
])
def test_a_slip_in_a_policy_file_is_one_line_and_a_hint(tmp_path: Path, text: str, told: str,
                                                        hint: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_policy(path)
    assert str(error.value).startswith(f"{path}: {told}")
    assert "\n" not in str(error.value)
    assert hint in error.value.hint
