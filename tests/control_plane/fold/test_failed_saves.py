"""Saves, publications and in-memory checkpoints that fail: they are told, nothing is given up."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, at_rest, drain, finish, kinds, only, spec, task_of, the
from failing import fail, obey
from failing import processes as processes_of
from memory_checkpoints import kept
from unicron.cli.screens import cluster
from unicron.cli.screens.task import UNREAD, task_status
from unicron.control_plane.api import needs, requests
from unicron.control_plane.api.needs import AWAY_S_MIN
from unicron.control_plane.api.requests import Refusal
from unicron.control_plane.api.view import view
from unicron.events.errors import SpecError
from unicron.events.records import codec, decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.records.in_words import line

FULL = "No space left on device"
HOUR_S = 3600.0


def fails(
    d: Driver,
    task: int,
    rank: int = 0,
    *,
    step: int = 0,
    what: Any = "checkpoint",
    why: str = FULL,
    errno: str = "ENOSPC",
    final: bool = False,
) -> list[Record]:
    """The rank reports that it could not save."""
    it = task_of(d, task)
    process = it.ranks[rank]
    return d.tell(
        d.source(process.slot.node),
        r.CheckpointFailed(
            task=task,
            rank=rank,
            attempt=process.attempt,
            generation=it.generation,
            step_version=step or d.steps.get(task, 0),
            what=what,
            path="/tmp/out/gen-1/iter-8" if what != "copy" else "n2",
            why=why,
            errno=errno if why else "",
            final=final,
        ),
    )


def saved(
    d: Driver, task: int, step: int, *, final: bool = False, output: str = ""
) -> list[Record]:
    it = task_of(d, task)
    return d.tell(
        d.source(it.members[0].node),
        r.CheckpointSaved(
            task=task,
            generation=it.generation,
            step_version=step,
            path=f"gen-{it.generation}/iter-{step}",
            ckpt_bytes=9,
            final=final,
            output=output,
        ),
    )


def refuse(
    d: Driver, records: list[Record], why: str = f"checkpoint not published: {FULL}"
) -> None:
    """The agent refuses the publication that was just ordered."""
    (record,) = only(o.PublishCheckpoint, records)
    node = record.body.nodes[0]
    refusal = r.OrderRefused(
        node=node, order=record.seq, why=why, errno="ENOSPC", task=record.body.task
    )
    d.tell(d.source(node), refusal)


def told(d: Driver, after_s: float = 0.0) -> list[needs.Need]:
    return [
        one
        for one in needs.needs(view(d.state), d.now_s + after_s)
        if one.what in ("not saved", "no copies")
    ]


def shown(d: Driver, task: int) -> str:
    """`unicron status TASK`, on one line."""
    found = view(d.state)
    (one,) = [one for one in found["tasks"] if one["id"] == task]
    past = {**UNREAD, "read_seq": 0, "last_seq": 0}
    return " ".join(" ".join(task_status(found, one, past, now_s=d.now_s)).split())


def processes(d: Driver) -> dict[int, Any]:
    """By task: its target, and its processes."""
    return {
        key: (
            it.target,
            [
                (one.rank, one.attempt, one.pid, one.state, one.stopping)
                for one in it.ranks.values()
            ],
        )
        for key, it in d.state.tasks.items()
    }


def state_of(d: Driver, task: int) -> str:
    (one,) = [one for one in view(d.state)["tasks"] if one["id"] == task]
    return str(one["state"])


@pytest.fixture
def neighbour(d: Driver) -> int:
    """A healthy task on the other slots."""
    return d.running(spec(name="beta", slots={"min": 2, "max": 2}))


@pytest.mark.nodes(2, slots=2)
def test_a_disk_that_is_full_for_an_hour_costs_nothing(d: Driver, neighbour: int) -> None:
    """The last state does not fit. Its processes keep it, and try again each minute."""
    task = d.running(spec(slots={"min": 2, "max": 2}))
    d.progress(task, 49)
    before = processes(d)
    begin = len(d.log)
    since_s = d.now_s
    for rank in (0, 1):
        fails(d, task, rank, final=True)
    (one,) = told(d)
    assert (one.what, one.task) == ("not saved", task)
    assert one.why.startswith("alpha is done and holds its final state: disk full since ")
    node = task_of(d, task).ranks[0].slot.node
    assert f"/tmp/out/gen-1/iter-8 on {node}: No space left on device" in one.why
    assert "free room there: it is tried again" in one.do
    assert "`unicron checkpoint alpha --to FOLDER`" in one.do
    assert "`unicron cancel alpha`" in one.do
    assert state_of(d, task) == "saving"
    assert shown(d, task).startswith("alpha SAVING, disk full since ")
    assert "NEEDS YOU alpha is done and holds its final state" in " ".join(
        " ".join(cluster.status(view(d.state), cluster="c", now_s=d.now_s)).split()
    )
    while d.now_s < since_s + HOUR_S:
        d.now_s += 60.0
        assert kinds(fails(d, task, final=True)) == []
    (one,) = told(d)
    assert one.since_s == pytest.approx(since_s, abs=1.0), "since the first time"
    assert processes(d) == before
    assert not [record for record in d.log[begin:] if record.cause], "nothing was decided"
    assert d.state.incidents == {}
    done = finish(d, task)
    assert the(decisions.TaskEnded, done).outcome == "finished"
    assert told(d) == []
    assert processes(d)[neighbour] == before[neighbour]
    at_rest(d)


@pytest.mark.nodes(2, slots=2)
def test_a_publication_that_is_refused_for_an_hour_fails_no_task(d: Driver, neighbour: int) -> None:
    """The files are complete, and the processes have ended. It was FAILED at the first refusal."""
    task = d.running(spec(slots={"min": 2, "max": 2}))
    d.progress(task, 49)
    target = task_of(d, neighbour).target
    records = saved(d, task, 50, final=True)
    finish(d, task, save=False)
    assert task_of(d, task).ranks == {}
    begin_s, pauses, nodes = d.now_s, [], []
    while d.now_s < begin_s + HOUR_S:
        nodes.append(the(o.PublishCheckpoint, records).nodes[0])
        refuse(d, records)
        assert (state_of(d, task), task_of(d, task).outcome) == ("saving", "")
        pauses.append(d.state.deadlines[f"publish/{task}"].length_s)
        records = d.due(f"publish/{task}")
    assert pauses[:5] == [1.0, 4.0, 16.0, 60.0, 60.0]
    assert set(pauses[5:]) == {60.0}
    assert set(nodes) == {"n1", "n2"}, "the fault may be the writer's"
    (one,) = told(d)
    assert one.why.startswith("alpha is done, its files are complete: disk full since ")
    assert one.since_s < begin_s + 1.0
    assert "tried again" in one.do
    assert "checkpoint alpha --to" not in one.do, "the files lie there already"
    assert the(decisions.TaskEnded, d.obey(records)).outcome == "finished"
    assert told(d) == []
    assert f"publish/{task}" not in d.state.deadlines
    assert task_of(d, neighbour).target == target
    at_rest(d)


@pytest.mark.nodes(1, slots=2)
def test_a_task_that_waits_has_the_slots_while_a_publication_is_refused(d: Driver) -> None:
    task = d.running(spec(slots={"min": 2, "max": 2}))
    waiting = d.submit(spec(name="gamma", slots={"min": 2, "max": 2}))
    d.progress(task, 49)
    records = saved(d, task, 50, final=True)
    finish(d, task, save=False)
    begin = len(d.log)
    refuse(d, records)
    assert (the(decisions.PlanChosen, d.log[begin:]).trigger) == (
        "task alpha needs no slots any more"
    )
    d.obey(d.log[begin:])
    assert task_of(d, waiting).phase == "training"
    done = d.obey(d.due(f"publish/{task}"))
    assert the(decisions.TaskEnded, done).outcome == "finished"
    at_rest(d)


def test_a_refused_publication_waits_for_a_node(d: Driver, task: int) -> None:
    records = saved(d, task, 50, final=True)
    finish(d, task, save=False)
    refuse(d, records)
    for node in ("n1", "n2"):
        d.tell(f"{node}/1", r.NodeLeft(node=node, incarnation=1, reason="stopped"))
    assert kinds(d.due(f"publish/{task}")) == []
    back = d.join("n2", incarnation=2)
    assert the(o.PublishCheckpoint, back).nodes == ("n2",)
    assert the(decisions.TaskEnded, d.obey(back)).outcome == "finished"


def test_a_later_checkpoint_is_published_in_place_of_a_refused_one(d: Driver, task: int) -> None:
    refuse(d, saved(d, task, 10))
    assert task_of(d, task).refused is not None
    later = saved(d, task, 20)
    assert the(o.PublishCheckpoint, later).path == "gen-1/iter-20"
    assert f"publish/{task}" not in d.state.deadlines
    d.obey(later)
    assert task_of(d, task).refused is None
    assert task_of(d, task).saved_iteration == 20
    assert told(d) == []
    at_rest(d)


def test_a_cancelled_task_tries_nothing_more(d: Driver, task: int) -> None:
    records = saved(d, task, 50, final=True)
    finish(d, task, save=False)
    refuse(d, records)
    done = d.tell("operator/x", r.TaskCancelRequested(task=task))
    assert the(decisions.TaskEnded, done).outcome == "cancelled"
    assert f"publish/{task}" not in d.state.deadlines
    assert told(d) == []


def test_a_periodic_save_that_fails_needs_a_person_until_a_later_one_is_published(
    d: Driver, task: int
) -> None:
    d.progress(task, 9)
    older = saved(d, task, 5)
    fails(d, task)
    (one,) = told(d)
    assert one.why.startswith("alpha: disk full since ")
    assert one.why.endswith("; nothing is published yet")
    assert one.do.startswith("free room there: saves go on; or move them: ")
    assert state_of(d, task) == "running"
    d.obey(older)
    (one,) = told(d)
    assert one.why.endswith("; the newest published has iteration 5"), "it was saved before"
    d.progress(task, 5)
    fails(d, task, 1, why="the member at 1 did not write its share", errno="")
    (one,) = told(d)
    assert "did not write its share" in one.why
    d.obey(saved(d, task, 15))
    assert told(d) == []
    assert d.state.incidents == {}


def test_what_a_member_saw_itself_comes_before_what_another_waited_for(
    d: Driver, task: int
) -> None:
    fails(d, task, 1)
    fails(d, task, 0, why="the member at 1 did not write its share", errno="")
    (one,) = told(d)
    assert FULL in one.why


def test_an_export_says_itself_that_it_works_again(d: Driver, task: int) -> None:
    fails(d, task, what="export")
    d.obey(saved(d, task, 20))
    (one,) = told(d)
    assert one.do == "free room there: saves go on"
    record = fails(d, task, what="export", why="")[0]
    assert told(d) == []
    assert line(codec.to_plain(record)).endswith("export /tmp/out/gen-1/iter-8 works again")


@pytest.mark.nodes(3, slots=1)
def test_a_state_that_no_store_takes_needs_a_person_after_a_while(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 1}))
    d.progress(task, 9)
    fails(d, task, what="copy", why="connection refused", errno="")
    assert told(d, AWAY_S_MIN - 1.0) == [], "a store that has gone is replaced within seconds"
    (one,) = told(d, AWAY_S_MIN)
    assert one.what == "no copies"
    assert "no checkpoint store takes its state" in one.why
    kept(d, task, "n2", 9)
    assert told(d, AWAY_S_MIN), "an older one"
    kept(d, task, "n2", 10)
    assert told(d, AWAY_S_MIN) == []


# --- a task that loses its slots ------------------------------------------------------------------
def _leaves(d: Driver) -> tuple[int, list[Record]]:
    """A task of six ranks must leave, and its save fails."""
    task = d.running(spec(slots={"min": 6, "max": 6}))
    d.progress(task, 7)
    drain(d, "n2")
    records = fails(d, task)
    for rank in range(6):
        records += d.quiesced(task, rank)
    return task, records


@pytest.mark.nodes(2, slots=3)
def test_a_task_that_cannot_save_keeps_its_slots_until_it_can(d: Driver) -> None:
    task, records = _leaves(d)
    assert kinds(records) == []
    assert kinds(d.due(f"quiesce/{task}/1")) == [], "its state is in these processes alone"
    for pause_s in (1.0, 4.0, 16.0, 60.0, 60.0):
        assert d.state.deadlines[f"save/{task}"].length_s == pause_s
        again = d.due(f"save/{task}")
        assert the(o.Quiesce, again).save
        fails(d, task)
        assert kinds(d.quiesced(task, 0)) == []
    assert len(task_of(d, task).ranks) == 6
    again = d.due(f"save/{task}")
    done = d.obey(again)
    assert kinds(done).count("StopRank") == 6
    it = task_of(d, task)
    assert (it.phase, it.ranks, it.saved_iteration) == ("idle", {}, 8)
    assert told(d) == []
    at_rest(d)


@pytest.mark.nodes(2, slots=3)
def test_a_state_that_is_not_finite_is_not_waited_for(d: Driver) -> None:
    task = d.running(spec(slots={"min": 6, "max": 6}))
    d.progress(task, 7)
    source = d.source(task_of(d, task).members[0].node)
    d.tell(source, r.LossNotFinite(task=task, generation=1, iteration=7, text="nan"))
    d.steps[task] = 8
    drain(d, "n2")
    records = fails(d, task)
    for rank in range(6):
        records += d.quiesced(task, rank)
    assert kinds(records).count("StopRank") == 6


@pytest.mark.nodes(3, slots=3)
def test_a_task_that_cannot_save_leaves_if_its_state_is_in_memory(d: Driver) -> None:
    task = d.running(spec(slots={"min": 9, "max": 9}))
    d.progress(task, 7)
    drain(d, "n3")
    for share in range(9):
        kept(d, task, "n2", 8, share=share, num_shares=9)
    fails(d, task)
    last: list[Record] = []
    for rank in range(9):
        last = d.quiesced(task, rank)
    stops = only(o.StopRank, last)
    assert len(stops) == 9
    assert {record.body.why for record in stops} == {"the plan has no seat for it"}, "nothing lost"
    d.obey(last)
    assert told(d), "it is not on disk"
    d.obey(d.tell("operator/undrain", r.NodeUndrained(node="n3")))
    order = only(o.Reconfigure, d.log)[-1].body
    assert {copy.step_version for copy in order.copies} == {8}


@pytest.mark.nodes(2, slots=2)
def test_a_task_that_waits_has_the_slots_once_the_final_state_is_in_memory(d: Driver) -> None:
    task = d.running(spec(slots={"min": 2, "max": 4}, priority=5))
    waiting = d.submit(spec(name="gamma", slots={"min": 3, "max": 4}))
    d.progress(task, 49)
    for rank in range(4):
        fails(d, task, rank, step=50, final=True)
    assert not task_of(d, waiting).target
    for node in ("n1", "n2"):
        kept(d, task, node, 50)
    plan = only(decisions.PlanChosen, d.log)[-1].body
    assert plan.trigger == "the final state of alpha is in memory"
    fails(d, task, step=50)
    for rank in range(4):
        last = d.quiesced(task, rank)
    d.obey(last)
    assert len(task_of(d, waiting).target) == 4
    assert state_of(d, task) == "saving"
    (one,) = told(d)
    assert "is done, its final state is in the memory of n1, n2 alone: disk full" in one.why
    d.obey(d.tell("operator/x", r.TaskCancelRequested(task=waiting)))
    assert len(task_of(d, task).target) == 4
    (copies,) = {order.body.copies for order in only(o.Reconfigure, d.log)[-1:]}
    assert {copy.step_version for copy in copies} == {50}


@pytest.mark.nodes(2, slots=2)
def test_the_incident_of_a_task_that_is_done_recovers(d: Driver) -> None:
    task = d.running(spec(slots={"min": 2, "max": 2}))
    d.progress(task, 49)
    for rank in (0, 1):
        fails(d, task, rank, step=50, final=True)
    obey(d, fail(d, task, processes_of(d, task)[:1]))
    (incident,) = d.state.incidents.values()
    assert (incident.recovering_s > 0, incident.iterations_lost) == (True, 0)
    assert state_of(d, task) == "saving"


@pytest.mark.nodes(2, slots=2)
def test_a_final_state_that_is_lost_is_not_said_to_be_held(d: Driver) -> None:
    task = d.running(spec(slots={"min": 2, "max": 2}))
    d.progress(task, 49)
    for rank in (0, 1):
        fails(d, task, rank, step=50, final=True)
    fail(d, task, processes_of(d, task))
    assert state_of(d, task) == "healing"
    (one,) = told(d)
    assert "its last state is lost, it trains again" in one.why


# --- another folder -------------------------------------------------------------------------------
def move(d: Driver, task: int, output: str = "/new/out") -> list[Record]:
    body = requests.set_output(d.state, requests.Destination(output=output), str(task))
    return d.tell(f"operator/move{d.state.seq}", body)


def test_another_folder_is_for_the_next_generation(d: Driver, task: int) -> None:
    d.progress(task, 9)
    d.obey(saved(d, task, 10))
    fails(d, task, step=11, final=False)
    moved = move(d, task)
    assert [(x.mode, x.output) for x in only_bodies(o.Quiesce, moved)] == [("boundary", "/new/out")]
    late = saved(d, task, 12, output="/tmp/out")
    assert the(o.PublishCheckpoint, late).output == "/tmp/out", "it was begun before"
    d.obey(late)
    d.obey(moved)
    order = only(o.Reconfigure, d.log)[-1].body
    assert (order.output, order.checkpoint) == ("/new/out", "/tmp/out/gen-1/iter-12")
    d.progress(task)
    published = saved(d, task, 20, output="/new/out")
    assert the(o.PublishCheckpoint, published).output == "/new/out"
    d.obey(published)
    assert told(d) == []
    assert task_of(d, task).checkpoint_path == "gen-2/iter-20"
    d.obey(d.exit(task, 2))
    start = only(o.StartRank, d.log)[-1].body
    assert (start.spec.train.output, start.checkpoint) == ("/new/out", "gen-2/iter-20")
    assert only(o.Reconfigure, d.log)[-1].body.output == "/new/out", "the others began before"
    at_rest(d)


def only_bodies(kind: type[Any], records: list[Record]) -> list[Any]:
    return [record.body for record in only(kind, records)]


def test_the_final_state_is_moved(d: Driver, task: int) -> None:
    d.progress(task, 49)
    fails(d, task, final=True)
    d.obey(move(d, task))
    assert task_of(d, task).phase == "training"
    done = finish(d, task)
    assert the(decisions.TaskEnded, done).outcome == "finished"
    assert only(o.PublishCheckpoint, done)[-1].body.output == "/new/out"
    assert told(d) == []


@pytest.mark.nodes(2, slots=3)
def test_a_task_that_leaves_saves_to_the_other_folder_at_once(d: Driver) -> None:
    task, _ = _leaves(d)
    again = move(d, task)
    order = the(o.Quiesce, again)
    assert (order.save, order.output) == (True, "/new/out")
    assert kinds(d.obey(again)).count("StopRank") == 6


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("", "must name a folder"),
        ("out", "out is not a whole path"),
        ("/tmp/out/", "alpha saves to /tmp/out/ already"),
        ("/tmp/beta", "/tmp/beta is being written, by task"),
        ("/a\nb", "is not a plain path or URL"),
        ("s3://", "names no folder"),
        ("s3://user:pass@host/b", "contains a password"),
    ],
)
@pytest.mark.nodes(2, slots=4)
def test_folders_that_are_refused(d: Driver, task: int, output: str, why: str) -> None:
    d.running(
        spec(
            name="beta",
            train={"iterations": 5, "output": "/tmp/beta", "batch": {"global": 24, "micro": 2}},
        )
    )
    with pytest.raises((Refusal, SpecError), match=why):
        requests.set_output(d.state, requests.Destination(output=output), str(task))


def test_tasks_whose_folder_cannot_be_moved(d: Driver, task: int) -> None:
    command = d.submit(spec(name="plain", train=None, command=["true"]))
    with pytest.raises(Refusal, match="plain is a command: it saves by itself"):
        requests.set_output(d.state, requests.Destination(output="/new"), str(command))
    records = saved(d, task, 50, final=True)
    finish(d, task, save=False)
    refuse(d, records)
    with pytest.raises(Refusal, match="only their publication is left"):
        requests.set_output(d.state, requests.Destination(output="/new"), str(task))
