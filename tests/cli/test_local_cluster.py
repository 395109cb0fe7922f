"""`up` and `down` with real processes: locking, adoption after SIGKILL, restarts, shutdown.

Every process that a test starts has a pid file in the test's own state folder. The fixture ends
the processes of these files after a failed test.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis
from unicron.cli.cluster import processes
from unicron.cli.cluster.client import Client, Unreachable
from unicron.cli.cluster.local_cluster import (
    CONTROL_PLANE,
    UP,
    ClusterOptions,
    LocalCluster,
    agent_name,
)
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import up as command
from unicron.events.bounded_file import LOG_BYTES_MAX
from unicron.events.log import embedded_server
from up_cluster import ALL, LIMIT_S, Cluster, cluster, until

__all__ = ["cluster"]
Redis: Any = redis.Redis


@pytest.mark.thorough
def test_up_locks_its_folder_and_adopts_what_runs(cluster):
    first = cluster.up()
    assert first.returncode == 0, first.stderr
    pids = cluster.pids()
    assert set(pids) == {*ALL, "server"}
    assert all(str(pid) in first.stdout for name, pid in pids.items() if name != UP)

    for second in (cluster.up(), cluster("up")):
        assert second.returncode == 2
        assert f"is locked by unicron up, pid {pids[UP]}" in second.stderr
        assert second.stderr.splitlines()[1].startswith("hint: ")
    twice = subprocess.run(
        cluster.argv("control-plane"),
        text=True,
        capture_output=True,
        check=False,
        timeout=LIMIT_S,
        env=cluster.environment(),
    )
    assert (twice.returncode, twice.stderr.splitlines()[0]) == (
        2,
        f"error: control-plane runs already on {cluster.state.path}, pid {pids[CONTROL_PLANE]}",
    )
    assert cluster.pids() == pids

    cluster.kill(UP)
    assert cluster("status", "-o", "json").returncode == 0  # the other processes continue
    num_records = len(cluster.records())
    for other in (("--slots", "2"), ("--redis", "redis://127.0.0.1:1"), ("--cluster", "other")):
        refused = cluster("up", "--detach", *other)
        assert refused.returncode == 2
        assert "differs from the cluster on" in refused.stderr
    again = cluster("up", "--detach")  # without options: the same as before
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("adopted") == 3
    adopted = cluster.pids()
    assert adopted.pop(UP) != pids.pop(UP)
    assert adopted == pids
    assert len(cluster.records()) == num_records  # no process joined or took the lead again

    down = cluster("down")
    assert down.returncode == 0
    assert cluster.pids() == {}
    assert not any(embedded_server.start_time(pid) for pid in adopted.values())
    assert "nothing runs on" in cluster("down").stdout


@pytest.mark.parametrize("by_signal", [False, True])
@pytest.mark.thorough
def test_down_names_unfinished_tasks_first(tmp_path, monkeypatch, capsys, by_signal):
    state = StateDir(tmp_path / "state")
    state.create()
    agent = processes.start(state, agent_name("n1"), ["sleep", "60"])
    task = {
        "state": "running",
        "tier": "train",
        "iterations": 60,
        "checkpoint": "",
        "iteration": 40,
        "unpublished": 40,
    }
    tasks = [
        {**task, "name": "alpha"},
        {**task, "name": "beta", "state": "finished"},
        {**task, "name": "gamma", "tier": "command"},
        {**task, "name": "delta", "checkpoint": "gen-1/iter-20"},
    ]

    class Asked:
        def get(self, path: str, **query: object) -> dict[str, Any]:
            assert agent.is_alive, f"down requested {path} after the agent had ended"
            return {"tasks": tasks}

    monkeypatch.setattr(command, "connect", lambda state: Asked())
    if by_signal:
        stop = mock.Mock(asked=1)
        command._Watch(LocalCluster(state, ClusterOptions(num_agents=1))).run(stop)
    else:
        command.down(state)
    assert not agent.is_alive
    printed = capsys.readouterr()
    lines = (printed.err if by_signal else printed.out).splitlines()
    assert lines[:4] == [
        "unfinished alpha, 40 of 60 iterations; the next up starts it again from iteration 0",
        "unfinished delta, 40 of 60 iterations; the next up starts it again from gen-1/iter-20 or "
        "newer",
        "unfinished gamma: the next up starts a command again from its beginning, or from what it "
        "has saved itself",
        "to lose nothing: unicron drain '*' first, then down; unicron undrain '*' after the "
        "next up",
    ]
    assert lines[4].startswith("stopp")
    many = [{**tasks[2], "name": f"nap-{number}"} for number in range(200)]
    tasks[:] = [{**tasks[0], "unpublished": 0}, *many]
    agent = processes.start(state, agent_name("n1"), ["sleep", "60"])
    command.down(state)
    printed = capsys.readouterr().out
    assert "to lose nothing" not in printed
    assert len(printed.splitlines()) < 30
    assert all(
        task["name"] in printed.split("stopped")[0].replace(":", " ").split() for task in many
    )


def test_up_restarts_dead_processes_and_down_works_without_up(cluster):
    assert cluster.up().returncode == 0
    before = cluster.pids()
    url = json.loads(cluster.state.control_planes()[0].read_text())["url"]
    cluster.kill(CONTROL_PLANE)
    until(lambda: cluster("status").returncode == 0)
    cluster.kill(agent_name("n1"))
    until(lambda: processes.find(cluster.state, agent_name("n1")) is not None)
    after = cluster.pids()
    assert after[CONTROL_PLANE] != before[CONTROL_PLANE]
    assert after[agent_name("n1")] != before[agent_name("n1")]
    assert after["server"] == before["server"]
    assert json.loads(cluster.state.control_planes()[0].read_text())["url"] == url
    until(lambda: [record["kind"] for record in cluster.records()].count("AgentRestarted") == 1)
    assert [record["kind"] for record in cluster.records()].count("EpochStarted") == 2

    cluster.kill(UP)
    down = cluster("down")
    assert down.returncode == 0
    assert "agent-n1, control-plane, server" in down.stdout
    assert cluster.pids() == {}


class Stranger:
    """Listens on a port and notes what clients send: they would send their secrets."""

    def __init__(self, port: int) -> None:
        self.heard = b""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        until(lambda: self._binds(port))
        self._socket.listen()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _binds(self, port: int) -> bool:
        """A killed process is a zombie before its last thread has closed the port."""
        try:
            self._socket.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

    def _listen(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            with link:
                link.settimeout(1.0)
                try:
                    self.heard += link.recv(4096)
                except TimeoutError:
                    pass

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10.0)
        assert not self._thread.is_alive()


def test_a_stranger_on_the_port_hears_no_secret_and_the_cluster_recovers(cluster, tmp_path):
    """Server, control plane and agent are killed while another process has the HTTP port."""

    def at() -> dict[str, Any]:
        return json.loads(cluster.state.control_planes()[0].read_text())

    assert cluster.up().returncode == 0
    before, first = cluster.pids(), at()
    port = int(first["url"].rpartition(":")[2])
    with Redis.from_url(
        f"unix://:{cluster.state.server.joinpath('password').read_text()}@"
        f"{cluster.state.server / 'server.sock'}"
    ) as server:
        assert server.config_get("port") == {"port": "0"}
    watching = cluster.process(UP)
    os.kill(watching.pid, signal.SIGSTOP)  # else it starts a new one before the stranger listens
    try:
        cluster.kill(CONTROL_PLANE)
        stranger = Stranger(port)
    finally:
        os.kill(watching.pid, signal.SIGCONT)
    try:
        os.kill(before["server"], signal.SIGKILL)
        cluster.kill(agent_name("n1"))
        until(lambda: cluster("status").returncode == 0, LIMIT_S)
        until(lambda: agent_name("n1") in cluster.pids(), LIMIT_S)
        agent = cluster.pids()[agent_name("n1")]
        until(
            lambda: (
                [
                    node["pid"]
                    for node in json.loads(cluster("status", "-o", "json").stdout)["nodes"]
                ]
                == [agent]
            ),
            LIMIT_S,
        )
        second = at()
        assert second["socket"] == first["socket"]
        assert second["url"] != first["url"]
        (tmp_path / "job.yaml").write_text("apiVersion: unicron/v1\nname: runs\ncommand: ['true']")
        assert cluster("submit", str(tmp_path / "job.yaml")).returncode == 0
        until(lambda: "runs  FINISHED" in cluster("status", "runs").stdout)
        assert stranger.heard == b""
        cluster("status", "--url", first["url"])  # whoever names the port talks to the stranger
        assert b"Bearer " in stranger.heard
        assert (
            f"port {port} is in use by another process"
            in (cluster.state.logs / "up.log").read_text()
        )
        with urllib.request.urlopen(f"{second['url']}/v1/health", timeout=10) as reply:
            assert json.load(reply)["ok"]
    finally:
        stranger.close()
    cluster.kill(CONTROL_PLANE)
    until(lambda: cluster("status").returncode == 0, LIMIT_S)
    assert at()["url"] == first["url"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in cluster.state.path.iterdir()}
    assert modes["control_plane.sock"] == 0o600


def test_a_port_in_use_is_refused_and_nothing_runs(cluster):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        result = cluster.up("--port", str(port))
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"error: port {port} is in use",
        "hint: give another --port, or none",
    ]
    assert cluster.pids() == {}


def test_ctrl_c_stops_all_that_a_foreground_up_started(cluster):
    child = subprocess.Popen(
        cluster.argv("up", "--agents", "1", "--slots", "1"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=cluster.environment(),
    )
    try:
        assert child.stdout is not None
        lines = [
            line
            for line in iter(child.stdout.readline, "")
            if not line.startswith("stop ") or child.send_signal(signal.SIGINT)
        ]
        assert child.wait(LIMIT_S) == 0
    finally:
        child.kill()
        child.wait()
    assert lines[0].startswith("cluster  default on ")
    assert cluster.pids() == {}


def test_the_commands_of_a_second_terminal(cluster, tmp_path):
    cluster.state.path.mkdir()
    cluster.state.path.chmod(0o755)
    assert cluster.up().returncode == 0
    assert "1 node, 1 slot" in cluster("status", "nodes").stdout
    assert "no tasks yet" in cluster("status").stdout
    (tmp_path / "job.yaml").write_text(
        "apiVersion: unicron/v1\nname: waits\ncommand: [sleep, '600']\n"
    )
    submitted = cluster("submit", str(tmp_path / "job.yaml"), "-o", "json")
    assert submitted.returncode == 0, submitted.stderr
    task = json.loads(submitted.stdout)["task"]
    until(lambda: "RankStarted" in cluster("tail", "--task", "waits").stdout)
    assert "waits  RUNNING" in cluster("status", "waits").stdout
    assert [record["kind"] for record in cluster.records() if record["seq"] == task] == [
        "TaskSubmitted"
    ]
    unknown = cluster("status", "nobody")
    assert unknown.returncode == 2
    assert "hint: there is waits" in unknown.stderr
    assert cluster("logs", "waits").returncode == 0

    cancelled = cluster("cancel", "waits", "--reason", "enough")
    assert cancelled.stdout.startswith(f"task {task}  waits cancelled (seq ")
    until(lambda: "waits  CANCELLED" in cluster("status", "waits").stdout)
    assert "has ended" in cluster("cancel", "waits").stderr
    assert cluster("logs", "waits", "-f").returncode == 0  # it ends: no more output can come
    log = tmp_path / "log.jsonl"
    assert cluster("export", str(log)).returncode == 0
    assert "exists" in cluster("export", str(log)).stderr
    assert cluster("replay", str(log), "--verify").stdout.startswith("VERIFIED")
    assert cluster("replay", "--live").returncode == 0
    tail = cluster("tail", "--kind", "taskended", "-o", "jsonl")
    assert json.loads(tail.stdout)["body"]["outcome"] == "cancelled"

    modes = {path.name: path.stat().st_mode & 0o777 for path in cluster.state.path.iterdir()}
    assert cluster.state.path.stat().st_mode & 0o777 == 0o755  # the test made it, not unicron
    assert {name for name, mode in modes.items() if mode & 0o077} == set(), modes


@pytest.mark.thorough
def test_many_tasks_of_a_second_terminal(cluster, tmp_path):
    job = "apiVersion: unicron/v1\nname: {}\ncommand: [sleep, '600']\n"
    for name in ("nap-1", "nap-2"):
        (tmp_path / f"{name}.yaml").write_text(job.format(name))
    (tmp_path / "quick.yaml").write_text(job.format("quick").replace("sleep, '600'", "'true'"))
    early = subprocess.Popen(
        cluster.argv(
            "submit", str(tmp_path / "nap-1.yaml"), "-", str(tmp_path / "nap-2.yaml"), "-o", "json"
        ),
        text=True,
        env=cluster.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with subprocess.Popen(
        cluster.argv("up", "--detach", "--agents", "1", "--slots", "1"),
        env=cluster.environment(),
        stdout=subprocess.DEVNULL,
    ) as up:
        deadline_s = time.monotonic() + LIMIT_S
        while not cluster.state.is_held() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        out, err = early.communicate(job.format("nap-3"), timeout=LIMIT_S)
        assert up.wait(LIMIT_S) == 0
    assert early.returncode == 0, err  # it has waited for `up`
    assert len([json.loads(line)["task"] for line in out.splitlines()]) == 3

    begun = cluster("wait", "nap-1", "--for", "running", "--timeout", "30")
    assert (begun.returncode, begun.stdout) == (0, "nap-1 running\n"), begun.stderr
    late = cluster("wait", "nap-*", "--for", "running", "--timeout", "0")
    assert late.returncode == 1
    assert "and 1 more not running after 0 ms, but waiting" in late.stderr
    listed = cluster("status", "nap-*", "--only", "waiting").stdout
    assert listed.splitlines()[-1] == "2 waiting"

    for line, names in (
        ("unicron cancel n", {"nap-1", "nap-2", "nap-3"}),
        ("unicron drain ", {"n1"}),
    ):
        completed = subprocess.run(
            cluster.argv(),
            text=True,
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
            env={
                **cluster.environment(),
                "_UNICRON_COMPLETE": "complete_bash",
                "COMP_WORDS": line,
                "COMP_CWORD": "2",
            },
        )
        assert (set(completed.stdout.split()), completed.stderr) == (names, "")

    screen = terminal(cluster, "status", "-w", rows=12, columns=70)
    frame = screen.split("\x1b[H\x1b[J")[1].split("\r\n")
    assert frame[0].startswith("unicron status")
    assert len(frame) <= 12
    assert max(map(len, frame)) <= 70

    assert cluster("submit", str(tmp_path / "quick.yaml")).returncode == 0
    cancelled = cluster("cancel", "nap-*")
    assert cancelled.stdout.count("cancelled (seq ") == 3
    done = cluster("wait", "quick", "--timeout", "60")
    assert (done.returncode, done.stdout) == (0, "quick finished\n"), done.stderr
    over = cluster("wait", "nap-1", "--timeout", "60")
    assert (over.returncode, over.stderr.splitlines()[0]) == (1, "error: nap-1 cancelled")
    assert "TaskEnded" in cluster("tail", "--since", "1h").stdout
    assert cluster("tail", "--since", "1s", "--kind", "EpochStarted").stdout == ""
    assert cluster("incident", "--all", "--since", "1h").returncode == 0

    assert cluster("submit", str(tmp_path / "nap-1.yaml")).returncode == 0
    down = cluster("down")
    assert down.stdout.startswith("unfinished nap-1: the next up ")
    for words in (("tail",), ("cancel", "x"), ("drain", "n1"), ("wait", "x")):
        assert cluster(*words, "--url", "http://127.0.0.1:1").returncode == 3
    gone = subprocess.run(
        cluster.argv(),
        text=True,
        capture_output=True,
        check=False,
        timeout=LIMIT_S,
        env={
            **cluster.environment(),
            "_UNICRON_COMPLETE": "complete_bash",
            "COMP_WORDS": "unicron cancel ",
            "COMP_CWORD": "2",
        },
    )
    assert (gone.stdout.strip(), gone.stderr) == ("", "")


def terminal(cluster: Cluster, *arguments: str, rows: int, columns: int) -> str:
    """What the command prints on a terminal of that size in three seconds."""
    command, own = pty.openpty()
    termios.tcsetwinsize(own, (rows, columns))
    with subprocess.Popen(
        cluster.argv(*arguments), stdin=own, stdout=own, stderr=own, env=cluster.environment()
    ) as running:
        time.sleep(3.0)
        running.send_signal(signal.SIGINT)
        running.wait(LIMIT_S)
    os.close(own)
    found = b""
    with contextlib.suppress(OSError):  # its other side is closed
        while part := os.read(command, 1 << 16):
            found += part
    os.close(command)
    return found.decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide a folder from one process")
@pytest.mark.thorough
def test_output_on_another_host_is_read_by_its_agent(cluster, tmp_path):
    """The command line runs in a mount namespace in which the state folder is empty."""
    assert cluster.up().returncode == 0
    (tmp_path / "job.yaml").write_text(
        "apiVersion: unicron/v1\nname: prints\ncommand: [sh, -c, 'seq 1 30000; sleep 600']\n"
    )
    assert cluster("submit", str(tmp_path / "job.yaml")).returncode == 0
    whole = "".join(f"0.1 {number}\n" for number in range(1, 30_001))
    until(lambda: cluster("logs", "prints").stdout == whole)
    there = json.loads(cluster.state.control_planes()[0].read_text())
    arguments = ("logs", "prints", "--url", there["url"], "--state", str(tmp_path / "none"))

    def elsewhere() -> subprocess.CompletedProcess[str]:
        hidden = f'mount -t tmpfs none {cluster.state.path} && exec "$@"'
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", hidden, "sh", *cluster.argv(*arguments)],
            text=True,
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
            env={**cluster.environment(), "UNICRON_TOKEN": there["token"]},
        )

    found = elsewhere()
    assert (found.stdout, found.stderr, found.returncode) == (whole, "", 0)
    cluster.kill(UP)
    agent = cluster.process(agent_name("n1"))
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        silent = elsewhere()
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    assert (silent.stdout, silent.returncode) == ("", 0)
    (line,) = silent.stderr.splitlines()
    assert line.startswith("note: rank 0.1 printed on n1, in /")
    assert line.endswith("the agent of n1 does not answer")


@pytest.mark.thorough
def test_a_folder_with_checkpoints_of_another_task_is_not_overwritten(cluster, tmp_path):
    assert cluster.up().returncode == 0
    output, job = tmp_path / "out", str(tmp_path / "job.yaml")

    def write(command: str) -> None:
        (tmp_path / "job.yaml").write_text(
            "apiVersion: unicron/v1\nname: again\nheal: in-memory\n"
            f"command: {command}\nloop: {{micro_batches: 2, iterations: 9, output: {output}}}\n"
        )

    write("[sleep, '600']")
    (output / "gen-1" / "iter-20.0a1b2c3d.partial").mkdir(parents=True)
    first = cluster("submit", job, "-o", "json")
    assert first.returncode == 0, first.stderr
    task = json.loads(first.stdout)["task"]
    (output / "gen-1" / "iter-20").mkdir(parents=True)
    assert f"is live, by task {task}" in cluster("submit", job).stderr
    assert cluster("cancel", "again").returncode == 0
    until(lambda: "again  CANCELLED" in cluster("status", "again").stdout)

    for words in (("submit", job), ("submit", job, "--dry-run")):
        refused = cluster(*words)
        assert refused.returncode == 2
        assert refused.stderr.splitlines() == [
            f"error: {job}: loop.output: {output} has checkpoints of task {task} (again), which "
            "this one would overwrite",
            f"hint: name another output, or move them away: mv {output} {output}.before",
        ]
    write("[sleep, '600', --load, here]")
    assert cluster("submit", job, "--dry-run").returncode == 0
    write("[sleep, '600']")
    output.rename(f"{output}.before")
    assert cluster("submit", job).returncode == 0


@pytest.mark.thorough
def test_policy_and_options_of_a_state_folder(cluster, tmp_path):
    def policy() -> dict[str, Any]:
        told = [record["body"] for record in cluster.records() if record["kind"] == "PolicySet"]
        return told[-1]["policy"]

    def refused(*options: str) -> str:
        told = cluster("up", "--detach", *options)
        assert told.returncode == 2, told.stdout
        error, hint = told.stderr.splitlines()
        assert "unicron down" in hint
        return error

    file = tmp_path / "mine.yaml"
    file.write_text("silence_s_max: 7")
    first = cluster.up("--observe", "--policy", str(file))
    assert first.returncode == 0, first.stderr
    assert "healing  OBSERVING" in first.stdout
    assert (policy()["observe"], policy()["silence_s_max"]) == (True, 7)
    file.write_text("silence_s_max: 8")
    cluster.kill(CONTROL_PLANE)  # `up` restarts it with the same policy
    until(lambda: [one["kind"] for one in cluster.records()].count("EpochStarted") == 2)
    cluster.kill(UP)
    assert "--act" in refused("--act")
    assert "--allow-inject" in refused("--allow-inject")
    assert "--policy" in refused("--policy", str(file))
    file.write_text("silence_s_max: 7.0  # the same\n")
    again = cluster("up", "--detach", "--policy", str(file))
    assert again.stdout.count("adopted") == 3, again.stderr
    assert "healing  OBSERVING" in again.stdout
    assert cluster("down").returncode == 0

    file.unlink()
    second = cluster.up("--act", "--allow-inject")
    assert "healing  on\nfaults   allowed" in second.stdout, second.stderr
    assert (policy()["observe"], policy()["allow_inject"], policy()["silence_s_max"]) == (
        False,
        True,
        7,
    )
    cluster.kill(UP)
    assert "--allow-inject" in refused()
    assert "--observe" in refused("--observe", "--allow-inject")
    assert cluster("down").returncode == 0
    third = cluster.up("--policy", os.devnull)
    assert "healing  on\nagent" in third.stdout, third.stderr
    assert (policy()["allow_inject"], policy()["silence_s_max"]) == (False, 5)
    assert cluster("freeze", "--reason", "switches").returncode == 0
    cluster.kill(UP)
    assert "healing  FROZEN: switches; unicron unfreeze\n" in cluster("up", "--detach").stdout


def test_operator_commands_on_a_running_cluster(cluster, tmp_path):
    assert (
        cluster(
            "up",
            "--detach",
            "--agents",
            "2",
            "--slots",
            "1",
            "--allow-inject",
            "--label",
            "n2:rack=r2",
            "--label",
            "rack=r1",
        ).returncode
        == 0
    )
    nodes = json.loads(cluster("status", "-o", "json").stdout)["nodes"]
    assert [node["labels"]["rack"] for node in nodes] == ["r1", "r2"]
    for name, weight in (("alpha", 2), ("beta", 1)):
        (tmp_path / "job.yaml").write_text(
            f"apiVersion: unicron/v1\nname: {name}\nweight: {weight}\n"
            "throughput: {1: 1.0e9}\ncommand: [sleep, '600']\n"
        )
        assert cluster("submit", str(tmp_path / "job.yaml")).returncode == 0
    until(lambda: cluster("tail", "--kind", "RankStarted").stdout.count("RankStarted") == 2)
    until(lambda: "0 idle" in cluster("status").stdout)
    home = {
        task["name"]: task["ranks"][0]["node"]
        for task in json.loads(cluster("status", "-o", "json").stdout)["tasks"]
    }

    drained = cluster("drain", home["alpha"], "--reason", "thermal")
    assert drained.returncode == 0, drained.stderr
    lines, left = drained.stdout.splitlines(), home["alpha"]
    assert lines[0].startswith(f"{home['alpha']}  drained; alpha shall leave it (seq ")
    assert lines[1] == "plan     1 slot, WAF 3 GFLOP/s -> 2 GFLOP/s, declared"
    assert f"alpha    1 -> 1 slot: {home['beta']}/0, leaves {left}; it starts again" in lines
    assert "\nbeta     1 -> 0 slots: stopped; then it waits, needs " in drained.stdout
    assert lines[-2:] == ["look     unicron status -w", f"undo     unicron undrain {left}"]
    twice = cluster("drain", home["alpha"])
    assert (twice.returncode, "already: thermal" in twice.stderr) == (2, True)
    assert "hint: there is n1, n2" in cluster("drain", "n9").stderr

    heavy = cluster("set-weight", "beta", "9", "-o", "json", "--reason", "deadline")
    output = json.loads(heavy.stdout)
    assert output["plan"]["waf"] == 9e9
    assert [len(one["seats"]) for one in output["placed"]] == [0, 1]
    assert "frozen: " in cluster("freeze").stdout
    held = cluster("undrain", home["alpha"]).stdout
    assert "paused   frozen: by " in held
    assert "alpha    0 -> 1 slot\n" in held, "a frozen cluster plans the slot but does not place it"
    on = cluster("unfreeze", "--reason", "done").stdout
    assert on.startswith("healing is on (seq ")
    assert f"alpha    0 -> 1 slot: {home['alpha']}/0" in on

    until(lambda: "2 train, 0 idle" in cluster("status").stdout)
    assert "runs no rank 5" in cluster("inject", "stop", "beta", "5").stderr
    broken = cluster("inject", "rank", "beta", "--reason", "to see")
    assert "rank 0 on " in broken.stdout, broken.stderr
    assert "will be killed on purpose (seq " in broken.stdout
    asked = [one for one in cluster.records() if one["kind"] == "FaultRequested"]
    assert [(one["body"]["what"], one["body"]["reason"]) for one in asked] == [("rank", "to see")]


def test_the_password_of_an_external_redis_is_in_no_argv(cluster, tmp_path):
    server = embedded_server.ensure(tmp_path / "own")
    try:
        where = server.socket
        for wrong in (f"unix://{where}", f"unix://:wrong@{where}"):
            result = cluster.up("--redis", wrong)
            assert (result.returncode, result.stdout) == (2, "")
            assert where in result.stderr
            assert result.stderr.splitlines()[1].startswith("hint: ")
        assert not cluster.state.cluster.exists()  # a later `up` does not repeat the mistake

        assert cluster.up("--redis", server.url).returncode == 0
        password = server.url.partition("@")[0].rpartition(":")[2].encode()
        for name, pid in cluster.pids().items():
            assert password not in Path(f"/proc/{pid}/cmdline").read_bytes(), name
        agent = cluster.pids()[agent_name("n1")]
        assert password not in Path(f"/proc/{agent}/environ").read_bytes()  # the ranks inherit it
        assert "server" not in cluster("down").stdout
    finally:
        server.stop()


# --- how long a command waits for a reply --------------------------------------------------------
class _Slow(BaseHTTPRequestHandler):
    """Replies when `released` is set."""

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


def test_a_reply_is_awaited_for_the_given_time(url: str) -> None:
    with pytest.raises(Unreachable):
        Client(url, "token").post("/v1/plan/dry-run", {}, 0.05)
    _Slow.released.set()
    assert Client(url, "token").post("/v1/plan/dry-run", {}, 60.0) == {}


def test_a_process_that_ended_before_its_pid_file_is_not_alive():
    assert not processes.Process(name="n1", pid=2**22 + 1, started="").is_alive


def test_the_last_line_of_a_long_log_is_read(tmp_path):
    state = StateDir(tmp_path / "state")
    state.create()
    with (state.logs / "up.log").open("wb") as log:
        log.truncate(1 << 40)
        log.seek(0, os.SEEK_END)
        log.write("\nerror: é\n".encode())
    assert processes.last_output(state, "up") == "é"


def test_the_logs_of_a_running_cluster_are_bounded(cluster):
    assert cluster.up().returncode == 0
    logs = [cluster.state.server / "server.log"]
    logs += [cluster.state.logs / f"{name}.log" for name in (*ALL, "shim-n1")]
    for path in logs:
        assert path.exists()
        with path.open("ab") as log:
            log.write(b"x" * (LOG_BYTES_MAX + (1 << 20)))
    until(lambda: all(path.stat().st_blocks * 512 < LOG_BYTES_MAX for path in logs))


def test_up_starts_and_watches_two_control_planes(cluster):
    names = (CONTROL_PLANE, f"{CONTROL_PLANE}-2")
    started = cluster.up("--control-planes", "2")
    assert started.returncode == 0, started.stderr
    before = {name: cluster.process(name).pid for name in names}
    lines = [line.split() for line in started.stdout.splitlines() if line.startswith("control ")]
    assert sorted(int(line[-1]) for line in lines) == sorted(before.values())
    assert sorted(line[1].startswith("http") for line in lines) == [False, True]

    def leads() -> dict[str, Any]:
        return json.loads(cluster("status", "-o", "json").stdout)["cluster"]

    until(lambda: len(leads()["followers"]) == 1)
    for epoch in (2, 3):
        moved = cluster("handover", "-o", "json")
        assert moved.returncode == 0, moved.stderr
        assert json.loads(moved.stdout)["epoch"] == epoch
        until(lambda: len(leads()["followers"]) == 1)
    assert f"followed by {leads()['followers'][0]}," in cluster("status").stdout

    first = next(
        name
        for name in names
        if json.loads((cluster.state.path / f"{name.replace('-', '_', 1)}.json").read_text())["url"]
        not in leads()["followers"]
    )
    cluster.kill(first)
    frozen = cluster("freeze", "--reason", "a takeover")  # waits for the other one
    assert frozen.returncode == 0, frozen.stderr
    assert leads()["epoch"] == 4
    until(lambda: processes.find(cluster.state, first) is not None)
    until(lambda: len(leads()["followers"]) == 1)
    assert {name: cluster.process(name).pid != pid for name, pid in before.items()} == {
        name: name == first for name in names
    }

    down = cluster("down")
    assert set(names) < set(down.stdout.removeprefix("stopped ").strip().split(", "))
    again = cluster.up("--control-planes", "1")
    assert "follows" not in again.stdout
    alone = cluster("handover")
    assert alone.returncode == 2
    assert alone.stderr.splitlines() == [
        "error: no other control plane follows this one",
        "hint: unicron up --control-planes 2",
    ]
