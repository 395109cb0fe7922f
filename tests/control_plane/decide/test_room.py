"""While the disk of the log is nearly full, nothing is started or moved; all else goes on."""

from __future__ import annotations

from decider import Driver, failed, kinds, spec, task_of, the
from unicron.cli.commands.operate import paused_lines
from unicron.cli.screens.task import _reasons
from unicron.control_plane.api import incident_facts, needs
from unicron.control_plane.api.view import view
from unicron.control_plane.planner import pending
from unicron.control_plane.state.cluster import ClusterState, encode_state
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

WHY = "no room for the log: /s has 3 MiB free"


def full(d: Driver) -> list[Record]:
    body = r.RoomChanged(is_full=True, folder="/s", free_bytes=3 << 20)
    return d.tell(f"leader/{d.state.nonce}", body)


def room(d: Driver) -> list[Record]:
    body = r.RoomChanged(is_full=False, folder="/s", free_bytes=3 << 30)
    return d.tell(f"leader/{d.state.nonce}", body)


def orders(records: list[Record]) -> list[str]:
    return [record.kind for record in records if isinstance(record.body, o.ORDERS)]


def test_survivors_of_a_fault_train_on_and_the_process_comes_with_the_room(
    d: Driver, task: int
) -> None:
    assert kinds(full(d)) == [], "what runs is left alone"
    records = d.exit(task, 2)
    assert the(decisions.IncidentOpened, records).severity == "SEV2"
    assert orders(records) == ["Quiesce"]
    records = d.obey(records)
    assert [m.rank for m in the(o.Reconfigure, records).members] == [0, 1, 3]
    assert task_of(d, task).phase == "training"
    assert "StartRank" not in orders(records)
    records = room(d)
    assert the(o.StartRank, records).rank == 2
    d.obey(records)
    d.heal(task)
    assert (task_of(d, task).healed, task_of(d, task).iterations_lost) == (1, 0)


def test_who_looks_at_the_task_or_its_incident_reads_why_no_process_starts(
    d: Driver, task: int
) -> None:
    """The incident said "wait", the task nothing."""
    full(d)
    records = d.exit(task, 2)
    incident = next(x.seq for x in records if isinstance(x.body, decisions.IncidentOpened))
    d.obey(d.obey(records))
    shown = view(d.state)
    (one,) = shown["tasks"]
    lines = _reasons(one, shown["cluster"], "")
    assert lines == [f"held       {WHY}; no process is started"]
    assert paused_lines(shown, "") == [f"held     {WHY}; no process is started until there is room"]
    reading = incident_facts.Reading(incident, encode_state(ClusterState()), d.state)
    reading.add(d.log)
    assert reading.facts("", d.now_s)["left"] == [
        f"{WHY}, and no process is started: make room there"
    ]
    room(d)
    assert _reasons(view(d.state)["tasks"][0], view(d.state)["cluster"], "") == []


def test_a_new_task_waits_with_the_reason(d: Driver) -> None:
    full(d)
    records = d.tell("operator/submit", r.TaskSubmitted(spec=spec()))
    assert the(decisions.TaskWaiting, records).why == WHY
    assert orders(records) == []
    (explained,) = pending.explain_waiting(d.state).values()
    assert (explained.why, explained.needs) == (WHY, "room on the disk of the log")
    (need,) = [one for one in needs.needs(view(d.state), d.state.at_s) if one.what == "no room"]
    assert need.why == f"{WHY}; processes run on, none is started"
    assert orders(room(d)) == ["StartRank"] * 4
    assert not [one for one in needs.needs(view(d.state), d.state.at_s) if one.what == "no room"]


def test_a_limit_of_ranks_that_does_not_hold_is_told(d: Driver) -> None:
    """It was a line of the agent's log."""
    told = [one for one in needs.needs(view(d.state), d.state.at_s) if one.what == "not limited"]
    assert told == []
    node = d.state.nodes["n1"]
    again = {name: getattr(node, name) for name in ("host", "pid", "num_slots", "accelerator")}
    d.tell(
        f"n1/{node.incarnation + 1}",
        r.NodeJoined(
            node="n1", incarnation=node.incarnation + 1, unlimited=("pids", "x" * 99), **again
        ),
    )
    (need,) = [one for one in needs.needs(view(d.state), d.state.at_s) if one.what == "not limited"]
    assert need.why == (
        "rank_pids_max of the policy does not hold on n1: no cgroup there can limit a rank"
    )


def test_files_that_cannot_be_made_are_told_as_such(d: Driver) -> None:
    body = r.RoomChanged(is_full=True, folder="/s", free_bytes=3 << 30, free_files=7)
    d.tell(f"leader/{d.state.nonce}", body)
    assert d.state.no_room == "no room for the log: /s has room for 7 more files (df -i)"


def test_a_cancel_works(d: Driver, task: int) -> None:
    full(d)
    records = d.tell("operator/cancel", r.TaskCancelRequested(task=task))
    assert orders(records) == ["StopRank"] * 4
    d.obey(records)
    assert task_of(d, task).outcome == "cancelled"


def test_nothing_moves_for_which_a_start_is_needed(d: Driver, task: int) -> None:
    """A drained node keeps its ranks until their successors can be started."""
    full(d)
    assert orders(d.tell("operator/drain", r.NodeDrained(node="n2"))) == []
    assert {seat.slot.node for seat in task_of(d, task).target} == {"n1", "n2"}
    assert "Quiesce" in orders(room(d))
    assert {seat.slot.node for seat in task_of(d, task).target} == {"n1"}


def test_a_lost_node_is_left_without_a_new_place(d: Driver, task: int) -> None:
    full(d)
    node = d.state.nodes["n2"]
    d.tell("leader/abc", r.NodeUnreachable(node="n2", incarnation=node.incarnation, silence_s=6.0))
    records = failed(d, task, 0)
    assert the(decisions.IncidentOpened, records).severity == "SEV1"
    records = d.obey(records)
    assert "StartRank" not in orders(records)
    d.join("n2", incarnation=2)
    records = d.obey(room(d))
    d.progress(task)
    assert task_of(d, task).iterations_lost == 0
    assert len(task_of(d, task).members) == 4
