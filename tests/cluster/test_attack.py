"""What a hostile rank finds (tests/drivers/attack.py), with and without `--run-as`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import attack
import pytest
from real_cluster import RealCluster, can_run_as, running
from twins import small

NOBODY = "nobody"
EVERY = 5
TRIES = ("files", "memory", "descriptors", "http", "local_socket", "server_user", "order", "copies")
"""What needs a secret of the agent or the operator, or their rights."""


class Attacked(NamedTuple):
    cluster: RealCluster
    found: dict[str, Any]
    victim: int
    attacker: int
    begin: int


@pytest.fixture(scope="module", params=["", NOBODY])
def attacked(request: pytest.FixtureRequest) -> Iterator[Attacked]:
    """A task of which copies exist, and the report of a hostile rank of another task."""
    if request.param and os.geteuid() != 0:
        pytest.skip("only root can start ranks as another user")
    if request.param and not can_run_as(request.param):
        pytest.skip(f"{NOBODY} may not run {sys.executable}")
    folder = Path(tempfile.mkdtemp(prefix="attack-"))  # pytest's folders are closed to others
    try:
        folder.chmod(0o755)
        for name in ("trace", "out"):
            (folder / name).mkdir(parents=True)
            (folder / name).chmod(0o777)
        with running(folder, run_as=request.param) as cluster:
            yield _attack(cluster, folder / "out")
    finally:
        rmtree(folder)


def _attack(cluster: RealCluster, out: Path) -> Attacked:
    victim = cluster.submit(small("victim", out, slots=(2, 2), copy_every=EVERY))
    cluster.wait_whole(victim, 2)
    stored = cluster.wait_told(0, "MemoryCheckpointStored", task=victim).body
    order = cluster.told(0, "Reconfigure", task=victim)[-1].body
    store = next(one for one in order.keepers if one.node == stored.node)
    begin, report = cluster.seq(), out / "found.json"
    attacker = cluster.submit(
        {
            "apiVersion": "unicron/v1",
            "name": "attacker",
            "slots": {"min": 1, "max": 1},
            "command": [
                sys.executable,
                "-P",
                attack.__file__,
                str(report),
                str(cluster.state.path),
                f"{store.node}@{store.endpoint}",
                str(victim),
            ],
            "heal": "in-memory",
            "loop": {
                "micro_batches": 1,
                "iterations": 9,
                "output": str(out / "own"),
                "copy_every": 1,
            },
        }
    )
    cluster.wait_told(begin, "RankExited", task=attacker)
    assert report.exists(), cluster.endings(attacker)
    return Attacked(cluster, json.loads(report.read_text()), victim, attacker, begin)


def secrets_of(cluster: RealCluster) -> dict[str, str]:
    """Every secret of this machine's cluster."""
    state = cluster.state.path
    return {
        "token": (state / "token").read_text().strip(),
        "password": (state / "server" / "password").read_text().strip(),
        "secret": (state / "secret").read_bytes().hex(),
    }


def test_no_environment_or_argument_has_a_secret(attacked: Attacked) -> None:
    for name, secret in secrets_of(attacked.cluster).items():
        assert secret not in attacked.found["environments"], name
    assert "UNICRON_RANK=0" in attacked.found["environments"], "it has read its own"


def test_a_rank_cannot_report_for_another_task(attacked: Attacked) -> None:
    cluster, victim = attacked.cluster, attacked.victim
    exited = cluster.told(attacked.begin, "RankExited", task=attacked.attacker)[0].body
    assert "violated the pipe protocol" in exited.cause, exited
    assert cluster.told(attacked.begin, "RankErrored", task=victim) == []
    cluster.wait_steps(victim)


def test_the_keys_of_a_rank_open_no_copies_of_another_task(attacked: Attacked) -> None:
    assert attacked.found["copies_by_own_keys"] == 0


def test_only_as_another_user_a_rank_is_kept_from_the_operators_rights(attacked: Attacked) -> None:
    """Without --run-as a rank is trusted as the operator: the documentation says so, and this."""
    cluster, found = attacked.cluster, attacked.found
    got = {name: found[name] for name in TRIES if found[name]}
    log = cluster.state.logs / "agent-n2.log"
    taken = f'"order": {attack.FORGED_SEQ}, "why": "there is no such rank"'
    if found["uid"] != os.geteuid():
        assert got == {}
        assert taken not in log.read_text()
        assert found["groups"] == [65534] or 0 not in found["groups"]
        for rank in cluster.task(attacked.victim)["ranks"]:
            assert os.stat(f"/proc/{rank['pid']}").st_uid == found["uid"], "of every kind of task"
        return
    assert {"token", "secret", "server/password"} <= set(got["files"])
    assert (got["http"], got["server_user"]) == (["n1", "n2"], "default")
    assert {"agent", "control-plane"} <= set(got["memory"])  # other tests may run an `up`
    assert got["copies"] > 0
    assert got["local_socket"] == "connected"
    cluster.wait(
        lambda: taken in log.read_text() or None,
        lambda: f"n2 takes the forged order\n{log.read_text()[-2000:]}",
    )
