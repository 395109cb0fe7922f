"""The process of the control plane, with a real server, a real port and real signals."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import crashing_log
import pytest
import redis
from unicron.events.log import embedded_server
from unicron.events.log.embedded_server import Server
from unicron.events.log.identity import with_credentials
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records.envelope import Record
from unicron.events.records.reports import OutageEnded, PolicySet
from unicron.events.spec.policy import Policy
from unicron.events.timing import SETTLE_S

Redis: Any = redis.Redis
MAIN = """
import json, os, sys, pathlib
from unicron.control_plane import server
if any(name.startswith("UNICRON_CRASH_") for name in os.environ):
    import crashing_log
    crashing_log.install()
from unicron.events.errors import UsageError
from unicron.events.spec.policy import Policy
state, url, port, cluster, policy, name, *switches = sys.argv[1:]
try:
    sys.exit(server.run(server.Options(
        state=pathlib.Path(state), redis_url=url, port=int(port), cluster=cluster, name=name,
        shared_password="shared_password" in switches,
        policy=Policy(**json.loads(policy or "{}"), observe="observe" in switches,
                      allow_inject="allow_inject" in switches))))
except UsageError as error:
    print(f"USAGE {error} | {error.hint}", file=sys.stderr)
    sys.exit(2)
"""


class Running:
    """One control plane process and its state folder."""

    def __init__(self, process: subprocess.Popen[str], file: Path) -> None:
        self.process, self.file = process, file

    def note(self) -> dict[str, Any]:
        """The content of control_plane.json, once this process has written it."""
        path, deadline = self.file, time.monotonic() + 60
        while time.monotonic() < deadline:
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text())
                if found["pid"] == self.process.pid:
                    return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no control_plane.json; {self.words()}")

    def health(self) -> dict[str, Any]:
        note = self.note()
        request = urllib.request.Request(
            note["url"] + "/v1/health", headers={"Authorization": f"Bearer {note['token']}"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            found: dict[str, Any] = json.loads(reply.read())
            return found

    def wait_leading(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = self.health()
            if found["leader"]:
                return found
            time.sleep(0.02)
        raise AssertionError("the control plane does not lead after 60 s")

    def end(self, limit_s: float = 60.0) -> int:
        return self.process.wait(limit_s)

    def words(self) -> str:
        if self.process.poll() is None:
            self.process.kill()
        return self.process.communicate(timeout=60)[1]


@contextmanager
def control_plane(
    state: Path,
    url: str,
    *,
    port: int = 0,
    cluster: str = "serve",
    policy: str = "",
    switches: tuple[str, ...] = (),
    num_files: str = "",
    name: str = "control-plane",
    **environment: str,
) -> Iterator[Running]:
    limited = ["bash", "-c", f'ulimit -n {num_files} && exec "$@"', "bash"] if num_files else []
    process = subprocess.Popen(
        [
            *limited,
            sys.executable,
            "-c",
            MAIN,
            str(state),
            url,
            str(port),
            cluster,
            policy,
            name,
            *switches,
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(crashing_log.__file__).parent), **environment},
    )
    try:
        yield Running(process, state / f"{name.replace('-', '_', 1)}.json")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


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
        request = urllib.request.Request(
            note["url"] + "/v1/state", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert json.loads(reply.read())["cluster"]["seq"] == 2
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 0
        assert not (tmp_path / "control_plane.json").exists()
    with control_plane(tmp_path, server.url, cluster="serve-1") as second:
        assert second.wait_leading()["epoch"] == 2
        assert (tmp_path / "token").read_text().strip() == token
        second.process.send_signal(signal.SIGINT)
        assert second.end() == 0


def test_a_token_that_others_could_read_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("known to all\n")
    (tmp_path / "token").chmod(0o644)
    with control_plane(tmp_path, server.url, cluster="serve-token") as process:
        assert process.end() == 2
        (words,) = [line for line in process.words().splitlines() if line.startswith("USAGE")]
    assert "token has mode 0644: others may read it | chmod 600 " in words
    assert kinds(server.url, "serve-token") == []


def share_folder(of: Path, to: Path) -> None:
    """What the guide says to copy for a control plane on another host."""
    to.mkdir(mode=0o700)
    for name in ("secret", "token"):
        shutil.copy2(of / name, to / name)


def asked(
    of: Running, method: str, path: str, token: str, body: object = None
) -> tuple[int, Mapping[str, str], Any]:
    """Status, headers and body of the answer; no redirect is followed."""
    parts = urllib.parse.urlsplit(of.note()["url"])
    assert parts.hostname
    link = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    link.request(
        method,
        path,
        None if body is None else json.dumps(body),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    answer = link.getresponse()
    return answer.status, dict(answer.headers), json.loads(answer.read())


def wait(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


JOB = {"apiVersion": "unicron/v1", "name": "x", "command": ["true"]}


def test_a_stopped_leader_is_succeeded_and_fenced_when_it_wakes(
    server: Server, tmp_path: Path
) -> None:
    cluster = "serve-2"
    with control_plane(tmp_path / "a", server.url, cluster=cluster) as first:
        first.wait_leading()
        owner = (tmp_path / "a" / "token").read_text().strip()
        status, _, made = asked(first, "POST", "/v1/tokens", owner, {"name": "ana", "role": "view"})
        assert status == 200
        share_folder(tmp_path / "a", tmp_path / "b")
        with control_plane(tmp_path / "b", server.url, cluster=cluster) as second:
            follower = second.note()["url"]
            wait(lambda: asked(second, "GET", "/v1/state", made["token"])[0] == 200)
            _, headers, view = asked(second, "GET", "/v1/state", owner)
            leader = first.note()["url"]
            assert headers["Unicron-Follows"] == view["cluster"]["follows"] == leader
            assert int(headers["Unicron-Seq"]) >= view["cluster"]["seq"] > 0
            assert second.health() | {"pid": 0} == {
                "ok": False,
                "leader": False,
                "cluster": cluster,
                "epoch": 1,
                "pid": 0,
                "seq": first.health()["seq"],
                "follows": leader,
                "file": "",
            }
            status, headers, answer = asked(second, "POST", "/v1/tasks", owner, JOB)
            assert (status, headers["Location"]) == (307, f"{leader}/v1/tasks")
            assert answer["detail"] == f"this control plane follows, {leader} leads"
            assert asked(second, "GET", "/v1/tokens", owner)[0] == 307
            status, headers, page = asked(second, "GET", "/v1/tasks?limit=1", owner)
            assert (status, page["items"], headers["Unicron-Follows"]) == (200, [], leader)
            _, _, later = asked(first, "POST", "/v1/tokens", owner, {"name": "bo", "role": "view"})
            wait(
                lambda: (
                    asked(first, "GET", "/v1/state", owner)[2]["cluster"]["followers"] == [follower]
                )
            )
            assert probe(second, "/readyz") == (503, {"ok": False, "why": "it does not lead"})
            assert probe(second, "/readyz?follower=1") == (200, {"ok": True, "why": ""})

            first.process.send_signal(signal.SIGSTOP)
            begun_s = time.monotonic()
            assert second.wait_leading()["epoch"] == 2
            assert time.monotonic() - begun_s < 30.0
            for token in (made["token"], later["token"]):
                assert asked(second, "GET", "/v1/state", token)[0] == 200
            assert asked(second, "GET", "/v1/tokens", made["token"])[0] == 403
            first.process.send_signal(signal.SIGCONT)
            assert first.end() == 1
            lines = first.words().splitlines()
            assert "fenced, stopping" in lines[-1]
            assert "Traceback" not in str(lines)
            assert asked(second, "POST", "/v1/tasks", owner, JOB)[0] == 200
            assert [
                record.epoch
                for record in records(server.url, cluster)
                if record.kind == "EpochStarted"
            ] == [1, 2]


def test_a_follower_is_ready_again_when_the_server_has_come_back(tmp_path: Path) -> None:
    """The server goes three times, then the leader ends: the log has the true outages."""
    folder, away = tmp_path / "server", list[tuple[float, float]]()
    server = embedded_server.start(folder)

    def outages() -> list[OutageEnded]:
        return [
            record.body
            for record in records(server.url, "away")
            if isinstance(record.body, OutageEnded)
        ]

    with ExitStack() as stack:
        stack.callback(lambda: embedded_server.ensure(folder).stop())

        def start(name: str) -> Running:
            return stack.enter_context(
                control_plane(tmp_path / "a", server.url, cluster="away", name=name)
            )

        def are_ready() -> bool:
            for name, one in both.items():
                if one.process.poll() is not None:  # the other one was first: it is fenced
                    both[name] = start(name)
            leads = [one.health()["leader"] for one in both.values()]
            return sorted(leads) == [False, True] and all(
                probe(one, "/readyz" if its else "/readyz?follower=1")[0] == 200
                for one, its in zip(both.values(), leads, strict=True)
            )

        both = {name: start(name) for name in ("control-plane", "control-plane-2")}
        wait(are_ready)
        for number in range(1, 4):
            began_s = time.time()
            server.stop()
            time.sleep(3.0)
            server = embedded_server.start(folder)
            away.append((began_s, time.time()))
            wait(lambda number=number: len(outages()) == number and are_ready())
        leader, follower = sorted(both.values(), key=lambda one: not one.health()["leader"])
        leader.process.send_signal(signal.SIGTERM)
        assert leader.end() == 0
        follower.wait_leading()
        time.sleep(SETTLE_S + 2.0)  # when a record of its own would be due
        for one, (began_s, ended_s) in zip(found := outages(), away, strict=True):
            assert began_s - 2.5 < one.since_s < ended_s, (found, away)
            assert 2.0 < one.length_s < ended_s - began_s + 6.0, (found, away)


def test_a_follower_that_leads_after_the_server_was_away_records_the_servers_outage(
    tmp_path: Path,
) -> None:
    """The leader does not come back, or later: only the server was away first."""
    folder = tmp_path / "server"
    server = embedded_server.start(folder)
    with ExitStack() as stack:
        stack.callback(lambda: embedded_server.ensure(folder).stop())
        one, other = (
            stack.enter_context(
                control_plane(tmp_path / "a", server.url, cluster="gone", name=name)
            )
            for name in ("control-plane", "control-plane-2")
        )
        wait(lambda: one.health()["leader"] != other.health()["leader"])
        first, second = (one, other) if one.health()["leader"] else (other, one)
        wait(lambda: probe(second, "/readyz?follower=1")[0] == 200)
        with Redis.from_url(server.url) as client:
            wait(lambda: client.exists("{unicron:gone}:beat:leader"))
        time.sleep(0.5)  # the follower reads it
        began_s = time.time()
        server.stop()
        first.process.kill()
        time.sleep(3.0)
        server = embedded_server.start(folder)
        second.wait_leading()
        found = list[OutageEnded]()

        def is_recorded() -> bool:
            found[:] = [
                record.body
                for record in records(server.url, "gone")
                if isinstance(record.body, OutageEnded)
            ]
            return bool(found)

        wait(is_recorded)
        (outage,) = found
        assert outage.what == "server", outage
        assert outage.why
        assert began_s - 2.5 < outage.since_s < began_s + 1.0, (outage, began_s)


def test_a_leader_that_stops_lets_the_follower_lead_at_once(server: Server, tmp_path: Path) -> None:
    with (
        control_plane(tmp_path, server.url, cluster="serve-4") as one,
        control_plane(tmp_path, server.url, cluster="serve-4", name="control-plane-2") as other,
    ):
        assert one.note()["token"] == other.note()["token"], "both began on an empty folder"
        wait(lambda: one.health()["leader"] != other.health()["leader"])
        first, second = (one, other) if one.health()["leader"] else (other, one)
        wait(lambda: second.health()["follows"] == first.note()["url"])
        first.process.send_signal(signal.SIGTERM)
        assert second.wait_leading()["epoch"] == 2
        assert first.end() == 0
        assert not first.file.exists()
        assert second.note()["socket"] == str(second.file.with_suffix(".sock"))


@pytest.mark.thorough
def test_a_follower_with_another_secret_is_refused(server: Server, tmp_path: Path) -> None:
    with control_plane(tmp_path / "a", server.url, cluster="serve-5") as first:
        first.wait_leading()
        with control_plane(tmp_path / "b", server.url, cluster="serve-5") as second:
            assert second.end() == 2
            assert (
                f"USAGE the control plane at {first.note()['url']} leads, and has another "
                "secret | copy the files secret and token"
            ) in second.words()
        assert first.health()["leader"]


@pytest.mark.thorough
def test_a_taken_port_fences_no_leader(server: Server, tmp_path: Path) -> None:
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
    """A kill before the append leaves no record; a kill after it does. A new leader starts."""
    for number, (environment, expected) in enumerate(
        (
            ({"UNICRON_CRASH_BEFORE_KIND": "EpochStarted"}, []),
            ({"UNICRON_CRASH_AFTER_KIND": "EpochStarted:1"}, ["EpochStarted", "PolicySet"]),
            ({"UNICRON_CRASH_BEFORE_SEQ": "2"}, []),
            ({"UNICRON_CRASH_AFTER_SEQ": "2"}, ["EpochStarted", "PolicySet"]),
        )
    ):
        cluster, state = f"serve-crash-{number}", tmp_path / str(number)
        with control_plane(state, server.url, cluster=cluster, **environment) as doomed:
            assert doomed.end() == -signal.SIGKILL
        assert kinds(server.url, cluster) == expected
        with control_plane(state, server.url, cluster=cluster) as next_one:
            assert next_one.wait_leading()["seq"] >= 2
            policies = kinds(server.url, cluster).count("PolicySet")
            assert policies == 1, "the policy is in the log once"


@pytest.mark.thorough
def test_switches_apply_to_one_start_only(server: Server, tmp_path: Path) -> None:
    limits = '{"silence_s_max": 7}'
    for policy, switches in (("", ("allow_inject",)), (limits, ("observe",)), ("", ())):
        with control_plane(
            tmp_path, server.url, cluster="serve-switches", policy=policy, switches=switches
        ) as process:
            process.wait_leading()
    logged = [
        record.body.policy
        for record in records(server.url, "serve-switches")
        if isinstance(record.body, PolicySet)
    ]
    assert logged == [Policy(allow_inject=True), Policy(silence_s_max=7.0, observe=True), Policy()]


def test_a_low_limit_of_descriptors_is_told_and_held(server: Server, tmp_path: Path) -> None:
    """With too few descriptors there are fewer connections, and the server still answers."""
    with control_plane(tmp_path, server.url, cluster="serve-files", num_files="64") as low:
        low.wait_leading()
        host, port = low.note()["url"].removeprefix("http://").split(":")
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            assert low.health()["leader"]
        low.process.send_signal(signal.SIGTERM)
        assert low.end() == 0
        words = low.words().splitlines()
    assert [line for line in words if "ulimit -n is 64" in line and "1280" in line], words
    assert len(words) < 10, words
    with control_plane(tmp_path, server.url, cluster="serve-files", num_files="-S 64") as soft:
        soft.wait_leading()
        limits = Path(f"/proc/{soft.process.pid}/limits").read_text()
        found = next(line for line in limits.splitlines() if line.startswith("Max open files"))
        assert int(found.split()[3]) >= 1_280, "the soft limit is raised where that is allowed"


def join(process: Running, node: str, incarnation: int) -> dict[str, Any]:
    """The answer to an agent that joins."""
    note = process.note()
    body = {"node": node, "host": "127.0.0.1", "incarnation": incarnation}
    request = urllib.request.Request(
        note["url"] + "/v1/join",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {note['token']}"},
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        found: dict[str, Any] = json.loads(reply.read())
        return found


def test_identities_come_from_a_secret_that_stays(own_server: Server, tmp_path: Path) -> None:
    with control_plane(tmp_path, own_server.url) as first:
        first.wait_leading()
        secret = tmp_path / "secret"
        assert (len(secret.read_bytes()), stat.S_IMODE(secret.stat().st_mode)) == (32, 0o600)
        given = join(first, "n1", 7)
        assert own_server.password not in str(given)
        assert join(first, "n1", 7) == given
        for other in (join(first, "n2", 7), join(first, "n1", 8)):
            assert other["redis_url"] != given["redis_url"]
        first.process.send_signal(signal.SIGTERM)
        assert first.end() == 0
    with control_plane(tmp_path, own_server.url) as second:
        second.wait_leading()
        again = join(second, "n1", 7)
        assert (again["redis_url"], again["key"]) == (given["redis_url"], given["key"])
    for data, mode, words in (
        (b"short", 0o600, "does not hold 32 bytes"),
        (secret.read_bytes(), 0o644, "has mode 0644"),
    ):
        secret.write_bytes(data)
        secret.chmod(mode)
        with control_plane(tmp_path, own_server.url) as damaged:
            assert damaged.end() == 2
            assert words in damaged.words()


def test_a_server_without_users_needs_a_word_of_the_operator(
    own_server: Server, tmp_path: Path
) -> None:
    """A managed service may forbid ACL: the operator must agree that agents have all rights."""
    with Redis.from_url(own_server.url) as master:
        master.execute_command("ACL", "SETUSER", "managed", "on", ">x", "~*", "+@all", "-acl")
    url = with_credentials(own_server.url, "managed", "x")
    with control_plane(tmp_path, url) as refused:
        assert refused.end() == 2
        (line,) = refused.words().strip().splitlines()
    assert line.startswith("USAGE the log's server cannot give each agent its own rights:"), line
    assert "--shared-password" in line
    with control_plane(tmp_path, url, switches=("shared_password",)) as agreed:
        agreed.wait_leading()
        assert join(agreed, "n1", 7)["redis_url"] == url
        words = agreed.words().splitlines()
    assert len([line for line in words if "every agent has the server's password" in line]) == 1


def probe(process: Running, path: str) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer."""
    note = process.note()
    request = urllib.request.Request(
        note["url"] + path, headers={"Authorization": f"Bearer {note['token']}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_probes_and_status_say_that_nothing_is_acknowledged(
    own_server: Server, tmp_path: Path
) -> None:
    """A setting that changes while the control plane runs, and back: it goes on, and tells."""
    with control_plane(tmp_path, own_server.url) as process:
        process.wait_leading()
        assert probe(process, "/livez")[0] == 200
        assert probe(process, "/readyz") == (200, {"ok": True, "why": ""})
        with Redis.from_url(own_server.url) as client:
            client.config_set("appendfsync", "everysec")
            deadline = time.monotonic() + 60
            while probe(process, "/readyz")[0] == 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            status, answer = probe(process, "/readyz")
            assert (status, answer["ok"]) == (503, False)
            assert "nothing is acknowledged since" in answer["why"]
            assert "appendfsync everysec" in answer["why"]
            status, answer = probe(process, "/v1/state")
            assert status == 503
            assert "ranks train on" in answer["detail"]
            assert probe(process, "/livez")[0] == 200
            with pytest.raises(urllib.error.HTTPError) as told:
                urllib.request.urlopen(process.note()["url"] + "/readyz", timeout=30)
            assert json.loads(told.value.read()) == {"ok": False}, "without a token"
            client.config_set("appendfsync", "always")
        while probe(process, "/readyz")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while not (found := probe(process, "/v1/state")[1]["outages"]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert [one["what"] for one in found] == ["server"]
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0


def test_a_server_that_would_lose_the_log_ends_the_start(
    own_server: Server, tmp_path: Path
) -> None:
    with Redis.from_url(own_server.url) as client:
        client.config_set("appendonly", "no")
    with control_plane(tmp_path, own_server.url) as refused:
        assert refused.end() == 2
        (line,) = refused.words().strip().splitlines()
    assert line.startswith("USAGE the log's server has appendonly no")
    assert line.endswith("or in the policy durability: none")
    with control_plane(tmp_path, own_server.url, policy='{"durability": "none"}') as agreed:
        agreed.wait_leading()


def fill(make: Callable[[], Any], num_max: int = 200) -> list[Any]:
    """Clients of a server until it takes no more."""
    taken: list[Any] = []
    with suppress(redis.ConnectionError):
        while len(taken) < num_max:
            one = make()
            one.connect()
            taken.append(one)
    return taken


def clients(url: str) -> Callable[[], Any]:
    pool = Redis.from_url(url, retry=None).connection_pool
    return lambda: pool.connection_class(**pool.connection_kwargs)


def test_a_node_takes_no_places_of_others(own_server: Server, tmp_path: Path) -> None:
    """Of a full server it keeps what is its own, a node that is new comes in, and its metric tells
    of it."""
    with (
        control_plane(tmp_path, own_server.url) as process,
        Redis.from_url(own_server.url) as admin,
    ):
        process.wait_leading()
        admin.config_set("maxclients", 120)
        evil, good = (join(process, name, 7)["redis_url"] for name in ("evil", "good"))
        (honest,) = fill(clients(good), 1)
        taken = fill(clients(evil))
        assert len(taken) > 100, "the server was full"
        deadline_s, newcomers = time.monotonic() + 30, list[Any]()
        while not newcomers and time.monotonic() < deadline_s:
            newcomers = fill(clients(join(process, "new", 7)["redis_url"]), 1)
        assert newcomers, "no place for a new node"
        held = [one["user"].rpartition(":")[2] for one in admin.client_list()]
        assert held.count("evil") == 64
        assert not honest.can_read(), "nothing ended it"
        note = process.note()
        request = urllib.request.Request(
            note["url"] + "/metrics", headers={"Authorization": f"Bearer {note['token']}"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            ended = re.search(
                rb"^unicron_connections_ended_total (\S+)", reply.read(), re.MULTILINE
            )
        assert ended is not None
        assert float(ended[1]) == len(taken) - 64
        for one in (*taken, *newcomers, honest):
            one.disconnect()
        words = process.words()
    assert [
        line for line in words.splitlines() if "too many connections" in line and "evil" in line
    ]


def test_a_control_plane_waits_for_a_place_on_a_full_server(
    own_server: Server, tmp_path: Path
) -> None:
    with Redis.from_url(own_server.url) as admin:
        admin.config_set("maxclients", 20)
        taken = fill(clients(own_server.url))
        assert embedded_server.adopt(tmp_path / "server") == own_server, "it can be stopped"
        with control_plane(tmp_path, own_server.url) as process:
            assert process.process.stderr is not None
            line = process.process.stderr.readline()
            assert "no place for a further connection" in line, line
            assert process.process.poll() is None
            for one in taken:
                one.disconnect()
            process.wait_leading()
            process.process.send_signal(signal.SIGTERM)
            assert process.end() == 0
