"""Incidents from the first sign to the close: the pause, lost iterations, origin of the state."""

from __future__ import annotations

from typing import Any

import past_screens
import pytest
from decider import Driver, at_rest, failed, only, spec, task_of, the
from hangs import stalled
from memory_checkpoints import FIRST, came, kept, ordered_anew
from two_tasks import facts, plain, seen
from unicron.cli.screens import cluster as cluster_screen
from unicron.cli.screens.incident import page
from unicron.control_plane.api.view import view
from unicron.control_plane.decide import memory_checkpoints
from unicron.control_plane.history.history import history
from unicron.events.records import decisions
from unicron.events.records import reports as r
from unicron.events.records.in_words import line

LATE_S = 2.0


def rejoin(d: Driver, node: str) -> decisions.IncidentOpened:
    """The agent and its ranks are killed. A new agent joins LATE_S later."""
    d.now_s += LATE_S
    records = d.join(node, incarnation=8)
    d.obey(records)
    return the(decisions.IncidentOpened, records)


def pause_s(d: Driver, task: int) -> float:
    d.heal(task)
    (closed,) = only(decisions.IncidentClosed, d.log)
    return float(closed.body.pause_s)


def test_without_a_sign_the_pause_begins_at_the_next_iteration(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 1}))
    name = task_of(d, task).ranks[0].slot.node
    d.progress(task)  # iterations of 0.2 s
    stalled_s = d.now_s + 0.2
    opened = rejoin(d, name)
    assert opened.why == f"the agent of {name} started again"
    (incident,) = d.state.incidents.values()
    assert incident.down_since_s == pytest.approx(stalled_s)
    assert pause_s(d, task) == pytest.approx(d.now_s - stalled_s)
    assert d.now_s - stalled_s > LATE_S - 0.2


def test_a_collective_that_failed_before_begins_the_pause(d: Driver, task: int) -> None:
    records = failed(d, task, 0)
    opened = rejoin(d, "n2")
    assert opened.evidence[0] == records[0].seq
    (incident,) = d.state.incidents.values()
    assert incident.down_since_s <= records[0].at_s


def test_silence_begins_the_pause_and_is_evidence(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["true"], slots={"min": 4, "max": 4}))
    d.obey(d.log[-20:])
    assert len(task_of(d, task).ranks) == 4
    unreachable = d.tell(
        f"leader/{d.state.nonce}", r.NodeUnreachable(node="n2", incarnation=1, silence_s=1.0)
    )[0]
    opened = rejoin(d, "n2")
    assert opened.evidence[0] == unreachable.seq
    (incident,) = d.state.incidents.values()
    assert incident.pause_s == pytest.approx(d.now_s - unreachable.at_s, abs=0.1)
    assert incident.pause_s > LATE_S


def test_a_pause_begins_no_earlier_than_the_next_iteration(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 1}))
    name = task_of(d, task).ranks[0].slot.node
    d.progress(task, times_s=(60.0,))
    records = d.join(name, incarnation=8)
    d.obey(records)
    (incident,) = d.state.incidents.values()
    assert incident.down_since_s == records[0].at_s


def test_a_lost_node_paused_the_task_since_others_waited(d: Driver, task: int) -> None:
    d.tell("leader/abc", r.NodeUnreachable(node="n2", incarnation=1, silence_s=1.3))
    waited_s = d.now_s - 1.6
    for rank in (0, 1):
        stalled(d, task, rank)
    d.now_s += LATE_S
    records = d.due(f"hang/{task}/{task_of(d, task).generation}")
    assert the(decisions.IncidentOpened, records).node == "n2"
    (incident,) = d.state.incidents.values()
    assert incident.down_since_s == pytest.approx(waited_s, abs=0.2)
    d.obey(records)
    assert pause_s(d, task) == pytest.approx(d.now_s - waited_s, abs=0.2)


# --- outcome `set back` --------------------------------------------------------------------------
TWO: dict[str, Any] = {"min": 1, "max": 2}


def restored(d: Driver, task: int, origin: str, node: str, step: int) -> decisions.IncidentClosed:
    """All processes are killed. Rank 0 restores from `origin`, rank 1 from rank 0 or the seed."""
    order = ordered_anew(d, task)
    seed = origin == "seed"
    came(d, order, 1, "seed" if seed else "peer", "" if seed else "n1", 10 * (not seed), step)
    came(d, order, 0, origin, node, 12 * (not seed), step)
    d.steps[task] = step
    closed = the(decisions.IncidentClosed, d.heal(task))
    at_rest(d)
    return closed


def without_copies(iterations: int) -> tuple[Driver, int]:
    d = Driver()
    train = {
        "iterations": 90,
        "output": "/tmp/out",
        "copy_every": 0,
        "batch": {"global": 24, "micro": 2},
    }
    task = d.running(spec(slots=TWO, train=train))
    d.progress(task, iterations - 1)
    return d, task


def with_a_checkpoint() -> tuple[Driver, int]:
    """28 iterations are done; the checkpoint of iteration 20 is published."""
    d = Driver(nodes=3)
    task = d.running(spec(slots=TWO))
    d.progress(task, 19)
    d.obey(d.save(task, 0))
    d.progress(task, 8)
    return d, task


def test_an_incident_that_lost_iterations_is_not_healed() -> None:
    d, task = without_copies(71)
    closed = restored(d, task, "seed", "", 0)
    assert (closed.outcome, closed.iterations_lost) == ("set back", 71)
    assert task_of(d, task).healed == 0
    past, cluster = history(d.log), seen(d)
    found = page(facts(d.log))
    of_task = past_screens.task_status(cluster, cluster["tasks"][0], past, now_s=d.now_s)
    tail = [line(x) for x in plain(d) if x["kind"] == "IncidentClosed"]
    screens_ = [
        cluster_screen.status(cluster, cluster="test", now_s=d.now_s),
        of_task,
        found,
        past_screens.every(past, now_s=d.now_s),
        tail,
    ]
    for screen in screens_:
        words = "\n".join(x for x in screen if not x.startswith("ID  TASK"))
        assert "set back" in words.lower(), words
        assert "healed" not in words.lower(), words
    assert found[0].split()[1:3] == ["SET", "BACK"]
    assert "71 iterations lost" in found[1]
    assert "begun again from the seed" in tail[0]


def test_bytes_of_a_checkpoint_and_of_peers_are_separate(d: Driver) -> None:
    task = d.running(spec(slots=TWO))
    for step in (10, 20, 30):
        d.progress(task, 10)
        kept(d, task, "n1", step)
        kept(d, task, "n2", step)
    closed = restored(d, task, "copy", "n2", 30)
    assert (closed.origin, closed.origin_node, closed.origin_step_version) == ("copy", "n2", 30)
    assert (closed.origin_bytes, closed.peer_bytes, closed.received_bytes) == (12, 10, 22)
    found = facts(d.log)
    words = "12 B from a copy on n2, of iteration 30; 10 B from peers"
    assert f"state      {words}" in page(found)
    (tail,) = [line(x) for x in plain(d) if x["kind"] == "IncidentClosed"]
    assert words in tail
    copies = [x for x in found["timeline"] if x["kind"] == "MemoryCheckpointStored"]
    assert [x["what"] for x in copies] == [f"task {task} rank 0.1 step 30, 12 B in memory on n2"]
    assert found["timeline"] == sorted(found["timeline"], key=lambda x: x["seq"])


def test_checkpoints_stored_meanwhile_are_not_on_the_page(d: Driver, task: int) -> None:
    orders = d.exit(task, 3)
    kept(d, task, "n1", 1)
    d.obey(orders)
    d.progress(task)
    assert "MemoryCheckpointStored" in [x["kind"] for x in plain(d)]
    assert "MemoryCheckpointStored" not in [x["kind"] for x in facts(d.log)["timeline"]]


def test_a_restore_from_a_checkpoint_names_the_lost_copies() -> None:
    d, task = with_a_checkpoint()
    for node in ("n1", "n2"):
        kept(d, task, node, 25)
    lost = [
        d.tell(
            f"{node}/1",
            r.MemoryCheckpointsLost(
                node=node, incarnation=1, task=0, keeper_start=FIRST, why="the keeper: signal 9"
            ),
        )[0].seq
        for node in ("n1", "n2")
    ]
    closed = restored(d, task, "checkpoint", "", 20)
    assert (closed.outcome, closed.iterations_lost, closed.ckpt_read) == ("set back", 8, True)
    assert (closed.origin_path, closed.origin_step_version) == ("gen-1/iter-20", 20)
    assert (closed.origin_bytes, closed.peer_bytes) == (12, 10)
    found = facts(d.log)
    shown = page(found)
    assert (
        "state      12 B from the checkpoint gen-1/iter-20, of iteration 20; 10 B from peers"
        in shown
    )
    assert [x for x in shown if x.startswith("no copy")] == [
        f"no copy    MemoryCheckpointsLost {node} lost its in-memory checkpoints: the keeper: "
        f"signal 9 (seq {seq})"
        for node, seq in zip(("n1", "n2"), lost, strict=True)
    ]
    assert [x["seq"] for x in found["timeline"]][:2] == lost


def test_a_task_without_memory_checkpoints_says_so() -> None:
    d, task = without_copies(30)
    restored(d, task, "seed", "", 0)
    assert "no copy    none are kept: train.copy_every is 0" in page(facts(d.log))
    assert view(d.state)["incidents"][-1]["outcome"] == "set back"


# --- while the task is down ---------------------------------------------------------------------
def screen_text(d: Driver, task: int, label: str) -> str:
    """The text of one label on the task's screen."""
    cluster = seen(d)
    one = next(x for x in cluster["tasks"] if x["id"] == task)
    lines = past_screens.task_status(cluster, one, history(d.log), now_s=d.now_s)
    at = next(index for index, x in enumerate(lines) if x.startswith(f"{label} "))
    end = next(
        (index for index, x in enumerate(lines[at + 1 :], at + 1) if not x.startswith(" ")),
        len(lines),
    )
    return " ".join(" ".join(lines[at:end]).split()).removeprefix(f"{label} ")


def test_the_age_of_a_reported_copy_is_shown_and_no_number_of_lost_iterations(d: Driver) -> None:
    """A store may have a newer copy than the last report, so the loss is not known."""
    task = d.running(spec(slots=TWO))
    d.progress(task, 27)
    kept(d, task, "n2", 20)
    d.now_s += 6.0
    d.progress(task, 60)
    copies = screen_text(d, task, "copies")
    assert "in memory iteration 20 or newer (n2, as of " in copies
    assert copies.endswith(
        " s ago; one is due every 10 iterations; up to 24 B a node); nothing is published yet: "
        "what came after the newest of these would be lost if all processes went"
    )
    assert "68" not in copies
    d.tell(
        "n2/1",
        r.MemoryCheckpointsLost(
            node="n2", incarnation=1, task=0, why="signal 9", keeper_start=FIRST
        ),
    )
    assert "88 iterations would be lost if all processes went" in screen_text(d, task, "copies")


def killed(d: Driver, task: int) -> None:
    for rank in sorted(task_of(d, task).ranks):
        d.exit(task, rank)


def test_a_task_without_processes_shows_its_restore_source() -> None:
    d, task = with_a_checkpoint()
    assert "8 iterations would be lost if all processes went" in screen_text(d, task, "copies")
    killed(d, task)
    assert screen_text(d, task, "copies") == (
        "no process has its state: it comes back from gen-1/iter-20, of iteration 20, "
        "8 iterations of 28 are done again"
    )
    assert "no member left of generation 1" in screen_text(d, task, "where")
    assert "no generation yet" not in screen_text(d, task, "where")


def test_a_memory_checkpoint_is_shown_while_its_node_is_there(d: Driver) -> None:
    task = d.running(spec(slots=TWO))
    d.progress(task, 27)
    kept(d, task, "n1", 20)
    kept(d, task, "n2", 25)
    killed(d, task)
    assert screen_text(d, task, "copies") == (
        "no process has its state: it comes back from the copy of iteration 25 or newer in memory "
        "(n2), at most 3 iterations of 28 are done again"
    )
    d.tell(
        "n2/1",
        r.MemoryCheckpointsLost(
            node="n2", incarnation=1, task=0, why="signal 9", keeper_start=FIRST
        ),
    )
    assert "8 iterations of 28 are done again" in screen_text(d, task, "copies")


def test_the_shown_restore_source_is_one_that_answers() -> None:
    """An older checkpoint on a healthy node is shown, not a newer one on an unreachable node. The
    order names both: perhaps only the agent failed."""
    d = Driver(nodes=3)
    task = d.running(spec(slots=TWO))
    d.progress(task, 27)
    kept(d, task, "n2", 20)
    kept(d, task, "n3", 25)
    d.tell("leader/abc", r.NodeUnreachable(node="n3", incarnation=1, silence_s=5.0))
    killed(d, task)
    found = memory_checkpoints.recovery_sources(
        d.state, task_of(d, task), list(task_of(d, task).ranks.values())
    )
    assert [(one.node, one.step_version) for one in found] == [("n2", 20), ("n3", 20)]
    assert "the copy of iteration 20 or newer in memory (n2)" in screen_text(d, task, "copies")


def test_a_task_without_any_state_restarts_from_the_seed() -> None:
    d, task = without_copies(28)
    killed(d, task)
    assert screen_text(d, task, "copies") == (
        "no process has its state: no copy and no published checkpoint: it restarts, "
        "28 iterations of 28 are done again"
    )


def test_a_stopped_process_still_holds_its_state() -> None:
    d, task = without_copies(5)
    for rank in (0, 1):
        d.tell(
            "n1/1",
            r.RankSuspended(task=task, rank=rank, attempt=1, pid=task_of(d, task).ranks[rank].pid),
        )
    assert "2 live replicas" in screen_text(d, task, "copies")
