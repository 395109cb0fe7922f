"""Screens of a task that has layouts: the current layout, and changes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import past_screens
import pytest
from decider import Driver
from membership_jobs import job
from plan_pages import plain_of
from snapshots import check
from two_tasks import facts, plain, seen
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import tasks
from unicron.cli.screens import cluster, plan
from unicron.cli.screens.incident import page
from unicron.control_plane.api import dry_run
from unicron.control_plane.api.dry_run import Change
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import history
from unicron.control_plane.state.cluster import encode_state
from unicron.events.errors import UsageError
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.records.in_words import essentials
from unicron.events.records.types import ReceivedState
from unicron.events.spec.job import parse


class SendingDriver(Driver):
    """Ranks without state receive it from the first two members, half from each."""

    def reconfigured(self, order: o.Reconfigure, rank: int) -> list[Record]:
        process = self.state.tasks[order.task].ranks[rank]
        taken = (
            ()
            if process.has_state or order.generation == 1
            else tuple(ReceivedState(one.rank, one.node, 2_000_000) for one in order.members[:2])
        )
        return self.tell(
            self.source(process.slot.node),
            r.Reconfigured(
                task=order.task,
                rank=rank,
                attempt=process.attempt,
                generation=order.generation,
                step_version=self.steps.get(order.task, 0),
                kept_micro_batches=(0, 1),
                remaining_micro_batches=(2,),
                reassigned_micro_batches=(2,),
                source=taken[0].rank if taken else rank,
                received_bytes=2_000_000 * len(taken),
                down_s=0.01,
                up_s=0.01,
                settle_s=0.01,
                origin="peer" if taken else "own",
                origin_node=taken[0].node if taken else process.slot.node,
                received_from=taken,
            ),
        )


def test_submit_prints_the_layout(
    d: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        tasks,
        "connect",
        lambda state, url: mock.Mock(
            get=lambda path: seen(d),
            post=lambda path, body: {"task": d.submit(parse(body)), "seq": len(d.log)},
            records=lambda after, follow: [],
        ),
    )
    path = tmp_path / "job.yaml"
    path.write_text(
        "{apiVersion: unicron/v1, name: wide, slots: {min: 2, max: 2}, "
        "train: {iterations: 9, output: out, parallel: {tensor: [2]}}}"
    )
    tasks.submit(StateDir(tmp_path), None, [path], as_json=False)
    assert "layout   wide TP 2 x DP 1" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("hosts", "url", "words"),
    [
        (["127.0.0.1", "127.0.0.1"], None, ""),
        (["127.0.0.1", "10.0.0.2"], None, "note: "),
        (["127.0.0.1"], "http://127.0.0.1:1", "note: "),
        ([], None, "note: "),
    ],
)
def test_a_missing_data_file_is_refused_where_the_ranks_run_on_this_host(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    hosts: list[str],
    url: str | None,
    words: str,
) -> None:
    client = mock.Mock(
        get=lambda path: {"nodes": [{"host": host, "contact": "heard"} for host in hosts]}
    )
    client.post.return_value = {"task": 7}
    monkeypatch.setattr(tasks, "connect", lambda state, url: client)
    monkeypatch.delenv("UNICRON_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    path = Path("job.yaml")
    path.write_text(
        "{apiVersion: unicron/v1, name: a, train: {iterations: 9, output: out, "
        "data: [job.yaml, absent.txt]}}"
    )
    missing = f"train.data[1]: {tmp_path}/absent.txt is not a readable file"
    if words:
        tasks.submit(StateDir(tmp_path), url, [path], as_json=True)
        assert capsys.readouterr().err == (
            f"{words}{missing} on this host; each node needs it at the same path\n"
        )
    else:
        with pytest.raises(UsageError) as refused:
            tasks.submit(StateDir(tmp_path), url, [path], as_json=True)
        assert (str(refused.value), refused.value.hint) == (
            f"job.yaml: {missing}",
            f"correct the path; a relative one begins at {tmp_path}",
        )
        client.post.assert_not_called()
    Path("absent.txt").write_text("now it is there")
    tasks.submit(StateDir(tmp_path), url, [path], as_json=True)
    client.post.assert_called()


def test_a_layout_that_lost_a_rank_and_grew_again() -> None:
    d = SendingDriver()
    task = d.running(job(tensor=[2]))
    lost = d.exit(task, 1)
    d.obey(lost, start=False)
    d.progress(task)
    state_view = view(d.state)["tasks"][0]
    check(
        "task-layout",
        past_screens.task_status(seen(d), state_view, history(d.log), now_s=d.now_s + 0.5),
    )
    check(
        "status-layout",
        cluster.status(seen(d), cluster="test", now_s=d.now_s + 0.5),
        columns_max=100,
    )
    d.obey([lost[-1]])
    d.progress(task)
    found = facts(d.log)
    assert found["layouts"] == ["TP 2 x DP 2", "TP 2 x DP 1, 1 beside", "TP 2 x DP 2"]
    cost = found["cost"]
    # The newcomer is on n1 and the intact replica on n2; the standby member received state too.
    assert (cost["peer_bytes"], cost["near_bytes"]) == (8_000_000, 0)
    # The two members of a replica report the same micro-batches, which count once.
    assert (cost["kept"], cost["dealt"]) == (2, 1)
    check("incident-layout", page(found))
    orders = [
        essentials("Reconfigure", record["body"])
        for record in plain(d)
        if record["kind"] == "Reconfigure"
    ]
    assert [one.rpartition(", ")[2] for one in orders] == ["TP2xDP2", "TP2xDP1 +1", "TP2xDP2"]


def test_bytes_from_the_same_node_are_counted_apart() -> None:
    d = SendingDriver(nodes=1, slots=4)
    task = d.running(job(tensor=[2]))
    d.obey(d.exit(task, 1))
    d.progress(task)
    cost = facts(d.log)["cost"]
    assert cost["near_bytes"] == cost["peer_bytes"] > 0


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("whole", ""),
        ("sharded", "up to 10 iterations; each rank has a shard of its own"),
        ("mirrored", "nothing; kept on a peer"),
    ],
)
def test_the_screen_says_what_a_lost_rank_costs(d: Driver, optimizer: str, words: str) -> None:
    task = d.running(job(optimizer=optimizer))
    d.progress(task)
    lines = past_screens.task_status(
        seen(d), view(d.state)["tasks"][0], history(d.log), now_s=d.now_s + 0.5
    )
    told = [line for line in lines if line.startswith("if lost")]
    assert told == [f"if lost    a lost rank costs: {words}"] * bool(words)


class RestoringDriver(Driver):
    """Members of each generation after the first restore iteration 1 from a copy."""

    def reconfigured(self, order: o.Reconfigure, rank: int) -> list[Record]:
        if order.generation == 1:
            return super().reconfigured(order, rank)
        process = self.state.tasks[order.task].ranks[rank]
        self.steps[order.task] = 1
        return self.tell(
            self.source(process.slot.node),
            r.Reconfigured(
                task=order.task,
                rank=rank,
                attempt=process.attempt,
                generation=order.generation,
                step_version=1,
                kept_micro_batches=(),
                remaining_micro_batches=(0,),
                reassigned_micro_batches=(),
                source=rank,
                received_bytes=12,
                down_s=0.01,
                up_s=0.01,
                settle_s=0.01,
                origin="copy",
                origin_node="n2",
            ),
        )


@pytest.mark.parametrize(
    ("parallel", "killed", "words"),
    [
        (
            {"optimizer": "sharded"},
            [1],
            "lost       shard 1 (only rank 1 had it); with "
            "train.parallel.optimizer: mirrored, the loss of one rank loses none",
        ),
        ({"tensor": [2]}, [1, 3], "lost       TP 1 (only ranks 1 3 had it)"),
        (
            {"tensor": [2], "optimizer": "mirrored"},
            [0, 2],
            "lost       TP 0, shard 0 (only ranks 0 2 had it); "
            "TP 0, shard 1 (only ranks 0 2 had it)",
        ),
    ],
)
def test_a_set_back_names_the_lost_state_and_its_ranks(
    parallel: Any, killed: list[int], words: str
) -> None:
    d = RestoringDriver()
    task = d.running(job(**parallel))
    d.progress(task, 2)
    d.obey([order for rank in killed for order in d.exit(task, rank)])
    d.progress(task)
    text = " ".join(line.strip() for line in page(facts(d.log)))
    assert words in text


def test_a_dry_run_shows_the_new_layout(d: Driver) -> None:
    d.running(job(tensor=[2], pipeline=[1, 2]))
    before = encode_state(d.state)
    found = plain_of(dry_run.run_dry(before, Change(without=("n2",)))) | {"took_s": 1.2e-3}
    check("plan-layout", plan.dry_run(found, "--without n2"), columns_max=100)
    found = plain_of(dry_run.explain_present_plan(before))
    check("plan-layout-now", plan.present(found, now_s=found["plan_s"] + 90), columns_max=100)
