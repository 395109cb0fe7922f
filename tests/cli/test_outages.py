"""What commands say of outages: past ones in the log, and a present one in the first line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import past_screens
import pytest
import redis
from decider import Driver
from unicron.cli.cluster import processes
from unicron.cli.cluster.client import Unreachable, connect
from unicron.cli.cluster.local_cluster import free_port
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import doctor
from unicron.cli.screens import cluster
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import history
from unicron.control_plane.state.cluster import NUM_OUTAGES_MAX
from unicron.events.log.embedded_server import Server
from unicron.events.records import reports as r

Redis: Any = redis.Redis
SINCE_S = 1_700_000_000.0
DAY_S = 86_400.0


def ended(what: Any = "server", **more: Any) -> r.OutageEnded:
    return r.OutageEnded(what=what, since_s=SINCE_S, length_s=123.0, **more)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            ended(num_reports=14, num_iterations=1_200, why="disk full"),
            "the log's server was away for 2 min since 2023-11-14T22:13:20Z: disk full; 14 reports "
            "waited, training went on: 1200 iterations",
        ),
        (
            ended("leader", num_reports=1),
            "the leader was away for 2 min since 2023-11-14T22:13:20Z; "
            "1 report waited, no iteration was reported",
        ),
        (
            ended("control plane"),
            "the control plane was away for 2 min since 2023-11-14T22:13:20Z; 0 "
            "reports waited, no iteration was reported",
        ),
        (
            ended(lost_from=5, lost_to=9),
            "the log's server had lost records 5 to 9 by "
            "2023-11-14T22:13:20Z; others have these numbers now",
        ),
    ],
)
def test_an_outage_is_in_status_for_a_day_and_in_the_list_for_ever(
    body: r.OutageEnded, words: str
) -> None:
    d = Driver()
    d.tell("leader/abc", body)

    def shown(lines: list[str]) -> str:
        return " ".join(" ".join(lines).split())

    seen = view(d.state)
    status = cluster.status(seen, cluster="c", now_s=SINCE_S + 200.0)
    assert f"AWAY {words}" in shown(status)
    assert max(map(len, status)) <= 100
    assert "AWAY" not in shown(cluster.status(seen, cluster="c", now_s=SINCE_S + 2 * DAY_S))
    listed = past_screens.every(history(d.log), now_s=SINCE_S + 9 * DAY_S)
    assert f"AWAY {words}" in shown(listed)


def test_the_state_keeps_the_newest() -> None:
    d = Driver()
    for number in range(NUM_OUTAGES_MAX + 3):
        d.tell("leader/abc", ended(why=str(number)))
    status = cluster.status(view(d.state), cluster="c", now_s=SINCE_S + 200.0)
    assert f"AWAY       {NUM_OUTAGES_MAX - 3} times more: unicron incident --all" in status
    assert [one.why for one in d.state.outages] == [
        str(number) for number in range(3, NUM_OUTAGES_MAX + 3)
    ]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (True, "the control plane is away, training goes on: no control plane answers at"),
        (
            False,
            "the control plane is away, and no agent runs on this folder: no control plane answers "
            "at",
        ),
    ],
)
def test_the_first_line_says_what_is_away(tmp_path: Path, runs: bool, words: str) -> None:
    state = StateDir(tmp_path)
    state.create()
    with (state.logs / "agent-n1.log").open("wb") as log:
        agent = subprocess.Popen(["sleep", "600"], stdout=log)
    try:
        if runs:
            processes.record(state, "agent-n1", agent.pid)
        url = f"http://127.0.0.1:{free_port()}"
        (state.path / "control_plane.json").write_text(json.dumps({"url": url, "token": "x"}))
        with pytest.raises(Unreachable) as told:
            connect(state).get("/v1/state")
        assert str(told.value).startswith(words)
        (state.path / "control_plane.json").unlink()
        with pytest.raises(Unreachable) as told:
            connect(state)
        assert str(told.value).startswith(
            "the control plane is away, training goes on: no control plane runs on"
            if runs
            else "no cluster runs on"
        )
    finally:
        agent.kill()
        agent.wait()


def test_the_first_line_names_the_server_too(own_server: Server, tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    (state.path / "control_plane.json").write_text(
        json.dumps({"url": f"http://127.0.0.1:{free_port()}"})
    )
    own_server.stop(grace_s=0.1)
    with pytest.raises(Unreachable, match=r"^the control plane and the log.s server are away, "):
        connect(state).get("/v1/state")


def test_doctor_checks_the_logs_server(own_server: Server, tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    found = doctor.log_server(state)
    assert (found.grade, found.result) == (
        "ok",
        "appendonly yes, appendfsync always, 0 of 0 replicas",
    )
    with Redis.from_url(own_server.url) as client:
        client.config_set("appendfsync", "everysec")
        refused = doctor.log_server(state)
        assert (refused.grade, refused.hint) == (
            "missing",
            "CONFIG SET appendonly yes, and appendfsync always; or in the policy "
            "durability: everysec",
        )
        state.policy.write_text("durability: everysec\nreplicas_min: 1\n")
        short = doctor.log_server(state)
        assert short.grade == "missing"
        assert "0 of 1 replicas" in short.result
    own_server.stop(grace_s=1.0)
    assert doctor.log_server(state).grade == "note"
