"""Reads when nothing answers, and the sealed log's own commands, on a real cluster's files."""

from __future__ import annotations

import json
import os
import shutil
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from unicron.events.log import embedded_server, segments
from unicron.events.log.segments import Folder, Segment

from .test_local_cluster import Cluster, until

JOB = "apiVersion: unicron/v1\nname: NAME\ncommand: ['true']\n"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cluster that has ended; its log is in segments, and a few records are not."""
    path = tmp_path_factory.mktemp("offline")
    (path / "policy.yaml").write_text("seal_records: 10\nseal_s: 3600\n")
    cluster = Cluster(path / "state")
    assert cluster.up("--policy", str(path / "policy.yaml")).returncode == 0
    for number in range(4):
        (path / "job.yaml").write_text(JOB.replace("NAME", f"j{number}"))
        assert cluster("submit", str(path / "job.yaml")).returncode == 0
    until(
        lambda: (
            [task["state"] for task in json.loads(cluster("status", "-o", "json").stdout)["tasks"]]
            == ["finished"] * 4
        )
    )
    until(lambda: bool(list((path / "state" / "log").glob("*.state"))))
    until(lambda: json.loads(cluster("log", "status", "-o", "json").stdout)["unsealed"] < 10)
    assert cluster("down").returncode == 0
    return path / "state"


def unicron(state: Path, *words: str) -> Any:
    return Cluster(state)(*words)


def test_reads_go_on_from_the_files(state: Path, tmp_path: Path) -> None:
    tail = unicron(state, "tail", "-o", "jsonl")
    records = [json.loads(line) for line in tail.stdout.splitlines()]
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    assert tail.stderr.startswith(
        f"no cluster runs on {state}. This is the log up to seq {len(records)} of "
    )
    now = unicron(state, "status", "-o", "json")
    assert (json.loads(now.stdout)["cluster"]["seq"], now.returncode) == (len(records), 3)
    then = json.loads(unicron(state, "status", "--at", "12", "-o", "json").stdout)
    assert then["cluster"]["seq"] == 12
    assert "nothing has failed so far" in unicron(state, "incident").stdout
    exported = tmp_path / "log.jsonl"
    assert unicron(state, "export", str(exported)).returncode == 0
    assert "VERIFIED" in unicron(state, "replay", str(exported), "--verify").stdout


def test_a_moment_is_a_seq_or_a_time(state: Path) -> None:
    lines = unicron(state, "tail", "-o", "jsonl").stdout.splitlines()
    times = [json.loads(line)["at_s"] for line in lines]
    moment = datetime.fromtimestamp(times[4] + 1e-5, UTC).isoformat()
    then = json.loads(unicron(state, "status", "--at", moment, "-o", "json").stdout)
    assert then["cluster"]["seq"] == sum(at_s <= times[4] + 1e-5 for at_s in times)
    for wrong, why in (
        ("0", "is not in the log"),
        ("99999", "is not in the log"),
        ("2999-01-01T00:00:00Z", "is in the future"),
        ("soon", "is neither a seq nor a time"),
        ("2001-01-01T00:00:00Z", "is before the log"),
    ):
        refused = unicron(state, "status", "--at", wrong)
        assert (refused.returncode, why in refused.stderr) == (2, True), refused


def test_the_history_goes_on_from_the_files(state: Path) -> None:
    found = unicron(state, "history", "-o", "json")
    assert (found.returncode, "This is the log up to seq" in found.stderr) == (0, True), found
    answer = json.loads(found.stdout)
    records = len(unicron(state, "tail", "-o", "jsonl").stdout.splitlines())
    assert answer["total"]["records"] == records
    day = answer["days"][-1]["day"]
    shown = unicron(state, "history", "--since", "30d").stdout.splitlines()
    assert shown[0].split()[:5] == ["DAY", "SLOT-H", "USED", "IDLE", "LOST"]
    assert any(line.startswith(day) for line in shown)
    for wrong, why in (("2999-01-01", "is in the future"), ("soon", "neither a length of time")):
        refused = unicron(state, "history", "--since", wrong)
        assert (refused.returncode, why in refused.stderr) == (2, True), refused
        assert "Traceback" not in refused.stderr


def test_the_log_is_whole_or_says_what_is_gone(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    assert unicron(copy, "log", "verify").stdout.startswith("WHOLE    records 1 to ")
    shown = json.loads(unicron(copy, "log", "status", "-o", "json").stdout)
    assert shown["last"] - shown["sealed"] == shown["unsealed"] < 10
    files = sorted((copy / "log").glob("*.segment"))
    assert len(files) == shown["segments"] >= 3
    damaged, missing = files[0], Segment.parse(files[1].name)
    assert missing is not None
    damaged.write_bytes(damaged.read_bytes()[:-1])
    verdict = unicron(copy, "log", "verify")
    assert verdict.returncode == 1
    assert f": {damaged.name} in " in verdict.stdout
    files[1].unlink()
    verdict = unicron(copy, "log", "verify")
    assert verdict.returncode == 1
    assert f"records {missing.first} to {missing.last} are missing" in verdict.stderr


def test_a_pruned_log_is_read_from_its_beginning_on(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    records = unicron(copy, "tail", "-o", "jsonl").stdout.splitlines()
    whole = json.loads(unicron(copy, "status", "-o", "json").stdout)
    young = unicron(copy, "log", "prune", "--keep", "1")
    assert (young.returncode, young.stdout) == (
        0,
        "nothing  is older than 1 days, but for what must stay\nleft     records from 1 on\n",
    )
    pruned = unicron(copy, "log", "prune", "--keep", "0")
    segments = sorted((copy / "log").glob("*.segment"))
    assert (pruned.returncode, len(segments)) == (0, 1), pruned
    begin = Segment.parse(segments[0].name)
    assert begin is not None
    first = begin.first
    assert first > 12
    assert f"left     records from {first} on" in pruned.stdout
    assert f"the records before {first} were pruned" in unicron(copy, "log", "verify").stdout
    assert f"pruned     records 1 to {first - 1}" in unicron(copy, "log", "status").stdout
    # Every reader begins there, with the state of that moment.
    note = f"note: the log begins at seq {first}: records 1 to {first - 1} were pruned"
    tail = unicron(copy, "tail", "-o", "jsonl")
    assert (tail.stdout.splitlines(), note in tail.stderr) == (records[first - 1 :], True)
    assert json.loads(unicron(copy, "status", "-o", "json").stdout) == whole
    assert "FINISHED" in unicron(copy, "status", "j0").stdout
    for words, why in (
        (("status", "--at", "12"), "older ones were pruned"),
        (("tail", "--after", "3"), f"records 1 to {first - 1} were pruned"),
        (("replay", "--live", "--until", "3"), "record 3 was pruned"),
    ):
        refused = unicron(copy, *words)
        assert (refused.returncode, why in refused.stderr) == (2, True), refused
    assert (
        json.loads(unicron(copy, "replay", "--live", "-o", "json").stdout)["cluster"]["hash"]
        == whole["cluster"]["hash"]
    )
    exported = tmp_path / "log.jsonl"
    assert unicron(copy, "export", str(exported)).returncode == 0
    verdict = json.loads(unicron(copy, "replay", str(exported), "--verify", "-o", "json").stdout)
    assert (verdict["ok"], verdict["state_hash"]) == (True, whole["cluster"]["hash"])
    assert "nothing has failed so far" in unicron(copy, "incident").stdout
    # A missing file is not taken for a pruned one, and a start needs what was left alone.
    cluster = Cluster(copy)
    try:
        assert cluster.up().returncode == 0
        kept = cluster("tail", "-o", "jsonl").stdout.splitlines()
        assert kept[: len(records) - first + 1] == records[first - 1 :]
        refused = cluster("tail", "--after", "3")
        assert (refused.returncode, f"records 1 to {first - 1} were pruned" in refused.stderr) == (
            2,
            True,
        ), refused
        assert "VERIFIED" in cluster("replay", "--live", "--verify").stdout
        assert cluster("status", "j0").returncode == 0
    finally:
        cluster("down")
    for one in (copy / "log").glob(f"{first - 1:016}-*.state"):
        one.unlink()
    verdict = unicron(copy, "log", "verify")
    assert f"the snapshot after record {first - 1} is missing" in verdict.stdout
    segments[0].unlink()
    assert unicron(copy, "log", "verify").returncode != 0


@pytest.mark.thorough
def test_a_pruned_log_is_restored(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    assert unicron(copy, "log", "prune", "--keep", "0").returncode == 0
    shutil.rmtree(copy / "server")
    cluster = Cluster(copy)
    restored = cluster("log", "restore")
    assert restored.returncode == 0, restored
    try:
        assert cluster.up().returncode == 0
        assert "VERIFIED" in cluster("replay", "--live", "--verify").stdout
    finally:
        cluster("down")


def test_no_server_is_started_on_a_snapshot_to_restore_a_log(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    files = copy / "server" / "appendonlydir"
    (files / "a.base.rdb").write_bytes(b"REDIS0011\xfe\0")
    (files / "appendonly.aof.manifest").write_text("file a.base.rdb seq 1 type b\n")
    refused = unicron(copy, "log", "restore")
    assert (refused.returncode, refused.stdout) == (2, ""), refused
    assert "has a.base.rdb, and a log is restored into an empty server" in refused.stderr


def test_a_folder_without_a_log_is_not_whole(tmp_path: Path) -> None:
    for words in (("log", "verify"), ("log", "restore")):
        refused = unicron(tmp_path / "none", *words)
        assert (refused.returncode, "has no segment" in refused.stderr) == (2, True), refused


def test_a_lost_server_is_refused_and_restored(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    sealed = json.loads(unicron(copy, "log", "status", "-o", "json").stdout)["sealed"]
    before = unicron(copy, "tail", "-o", "jsonl").stdout.splitlines()[:sealed]
    shutil.rmtree(copy / "server")
    cluster = Cluster(copy)
    refused = cluster.up()
    assert refused.returncode == 1
    assert "the server has lost records 1 to " in refused.stderr
    cluster("down")
    restored = cluster("log", "restore")
    assert restored.stdout.startswith(f"restored  records 1 to {sealed}, of "), restored
    again = cluster("log", "restore")
    assert (again.returncode, "the server has a log" in again.stderr) == (2, True)
    try:
        assert cluster.up().returncode == 0
        assert cluster("tail", "-o", "jsonl").stdout.splitlines()[:sealed] == before
        assert "VERIFIED" in cluster("replay", "--live", "--verify").stdout
    finally:
        cluster("down")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("edited", "is damaged: it has other bytes than were written"),
        ("cut", "is damaged"),
        ("swapped", "is damaged"),
        ("of another cluster", "is of cluster other, not "),
        ("of a later version", "has format version 99, this reads "),
    ],
)
def test_a_wrong_segment_is_one_line_in_every_reader(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, words: str
) -> None:
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    cluster = json.loads((copy / "cluster.json").read_text())["cluster"]
    folder = Folder(copy / "log", cluster)
    chain = folder.chain()
    first, last = (copy / "log" / one.name for one in (chain[0], chain[-1]))
    if damage.startswith("of "):  # the newest segment has another head
        records = folder.read(chain[-1])
        last.unlink()
        with monkeypatch.context() as patch:
            if damage == "of a later version":
                patch.setattr(segments, "FORMAT_VERSION", 99)
            Folder(copy / "log", cluster if "version" in damage else "other").write(
                records, chain[-2]
            )
    else:
        data = first.read_bytes()
        first.write_bytes(
            {
                "edited": data[:-1] + bytes([data[-1] ^ 1]),
                "cut": data[:-1],
                "swapped": last.read_bytes(),
            }[damage]
        )
    for command in (
        ("tail",),
        ("export", str(tmp_path / "log.jsonl")),
        ("incident", "--all"),
        ("log", "verify"),
    ):
        refused = unicron(copy, *command)
        assert refused.returncode in (1, 2), refused
        assert words in refused.stdout + refused.stderr, refused
        lines = [line for line in refused.stderr.splitlines() if words in line]
        assert len(lines) == (command != ("log", "verify") or damage.startswith("of ")), refused
        assert "Traceback" not in refused.stderr


@pytest.mark.thorough
def test_a_server_that_comes_back_empty_is_refused_while_ranks_run_on(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("seal_records: 10\nseal_s: 1\n")
    (tmp_path / "job.yaml").write_text(
        JOB.replace("NAME", "long").replace("'true'", "'sleep', '600'")
    )
    cluster = Cluster(tmp_path / "state")

    def rank() -> int:
        (task,) = json.loads(cluster("status", "-o", "json").stdout)["tasks"]
        return task["ranks"][0]["pid"] if task["state"] == "running" else 0

    try:
        assert cluster.up("--policy", str(tmp_path / "policy.yaml")).returncode == 0
        assert cluster("submit", str(tmp_path / "job.yaml")).returncode == 0
        until(lambda: rank() > 0)
        pid, agent = rank(), cluster.pids()["agent-n1"]
        until(lambda: json.loads(cluster("log", "status", "-o", "json").stdout)["unsealed"] == 0)
        before = cluster.records()
        cluster.kill("up")
        os.kill(cluster.pids()["server"], signal.SIGKILL)
        shutil.rmtree(cluster.state.server / "appendonlydir")
        embedded_server.ensure(cluster.state.server)
        until(lambda: "control-plane" not in cluster.pids())
        output = (cluster.state.logs / "control-plane.log").read_text()
        assert "the server has lost records 1 to " in output.splitlines()[-2], output
        assert "Traceback" not in output
        refused = cluster.up()
        assert refused.returncode == 1, refused
        assert f"the server has lost records 1 to {len(before)}, " in refused.stderr
        assert "Traceback" not in refused.stderr
        restored = cluster("log", "restore")
        assert restored.stdout.startswith(f"restored  records 1 to {len(before)}, of "), restored
        again = cluster.up()
        assert again.returncode == 0, again
        until(lambda: rank() > 0)
        assert (rank(), cluster.pids()["agent-n1"]) == (pid, agent)
        after = cluster.records()
        assert after[: len(before)] == before
        assert not {"IncidentOpened", "RankExited", "NodeJoined"} & {
            record["kind"] for record in after[len(before) :]
        }
    finally:
        cluster("down")
