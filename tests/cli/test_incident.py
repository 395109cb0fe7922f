"""The page of an incident: facts, evidence, and what an operator still has to do."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import hung_commands
import past_screens
import pytest
from decider import Driver, failed, spec
from device_errors import alone, erred, four, health
from hangs import deadline, hung
from msgspec.structs import replace
from slow_iterations import crawls, waited_for
from snapshots import RECORDS, check
from stragglers import VICTIM, known, paced
from two_tasks import carry_out, facts, gives, lose, two_tasks, waits
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import replay
from unicron.cli.screens import nodes
from unicron.cli.screens.incident import bar, page
from unicron.control_plane.api import incident_facts
from unicron.control_plane.api.needs import node_trouble
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import History, history
from unicron.control_plane.history.incident_records import incident_records
from unicron.control_plane.state.cluster import DECIDER_VERSION
from unicron.control_plane.state.incident import NUM_EVIDENCE_MAX
from unicron.events.errors import UsageError
from unicron.events.log import archive
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.codec import from_plain, to_plain
from unicron.events.records.in_words import line
from unicron.events.spec import policy

Plain = dict[str, Any]


# --- the page -----------------------------------------------------------------------------------
def test_a_killed_rank() -> None:
    told = facts(RECORDS)
    check("incident-rank", page(told), columns_max=100)
    assert told["left"] == []
    assert [x["name"] for x in told["phases"]] == ["detect", "decide", "rebuild", "step", "full"]


def test_a_lost_node_and_the_task_that_yielded_a_slot() -> None:
    d, _, _ = gives()
    told = facts(d.log)
    check("incident-node", page(told), columns_max=100)
    hurt, other = told["effects"]
    assert (hurt["task"], hurt["slots_before"], hurt["slots"]) == ("alpha", 4, 3)
    assert (other["task"], other["slots_before"], other["slots"]) == ("beta", 2, 1)
    assert other["iterations_lost"] == 0
    assert 0 < other["pause_s"] < 1
    assert told["left"] == ["n2 lost: repair it and start its agent, it is given tasks at once"]
    (plan,) = told["plans"]
    assert max(x["waf"] for x in plan["beaten"]) <= plan["waf"]


def test_an_unreachable_node_as_second_evidence_counts_once() -> None:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    lose(d, "n2", alpha, silent_last=True)
    incident_facts = facts(d.log)
    assert "NodeUnreachable" in [x["kind"] for x in incident_facts["evidence"]]
    assert [x["name"] for x in incident_facts["phases"]][:2] == ["detect", "decide"]
    spans = [(x["from_s"], x["from_s"] + x["length_s"]) for x in incident_facts["phases"]]
    assert all(after[0] == pytest.approx(before[1]) for before, after in pairwise(spans))


def test_a_plan_names_the_origin_of_its_throughput_tables() -> None:
    d, alpha, beta = waits()
    at = next(
        x.seq
        for x in d.log
        if isinstance(x.body, decisions.PlanChosen)
        and [one.slots for one in x.body.allocations] == [4, 0]
    )
    past = History()
    for record in d.log:
        if record.seq in (at, at + 1):  # beta's is measured before the plan, alpha's after it
            past.add(
                replace(
                    record,
                    seq=record.seq - 1,
                    body=decisions.ThroughputSet(
                        task=beta if record.seq == at else alpha,
                        sizes=(),
                        rates_flops=(),
                        origin="measured",
                    ),
                )
            )
        past.add(record)
    one = replay.pick(past, "")
    assert one is not None
    found = incident_records(one, d.log)
    (plan,) = incident_facts.facts_of(past, found, view(d.state), now_s=d.now_s)["plans"]
    assert plan["origins"] == ["declared"]


def test_the_timeline_ends_when_the_healthy_task_steps_again() -> None:
    d, _, beta = gives()
    before = [x["seq"] for x in facts(d.log)["timeline"]]
    (last,) = [x for x in d.log[-3:] if isinstance(x.body, r.TaskProgressed)]
    later = [
        replace(last, seq=d.log[-1].seq + n, incident=0, body=replace(last.body, task=beta))
        for n in range(1, 4)
    ]
    one = replay.pick(history(d.log), "")
    assert one is not None
    assert [x.seq for x in incident_records(one, [*d.log, *later]).records] == before


def test_the_timeline_ends_with_the_end_of_the_incident(d: Driver, task: int) -> None:
    """It recovers first, and is healed iterations later."""
    carry_out(d, d.exit(task, 2))
    d.progress(task, 20)
    d.progress(task, 20)
    kinds = [event["kind"] for event in facts(d.log)["timeline"]]
    assert kinds.index("IncidentRecovering") < kinds.index("IncidentClosed") == len(kinds) - 1
    one = replay.pick(history(d.log), "")
    assert one is not None
    (recovering,) = [x for x in d.log if isinstance(x.body, decisions.IncidentRecovering)]
    assert one.closed_seq == recovering.seq, "what it cost ends there"


def test_a_healthy_tasks_pause_is_from_its_own_records() -> None:
    d, _, beta = gives()
    plan = max(x.seq for x in d.log if isinstance(x.body, decisions.PlanChosen))
    own = [x for x in d.log if x.seq > plan and getattr(x.body, "task", 0) == beta]
    left = max(
        x.occurred_s for x in own if isinstance(x.body, r.Quiesced) and x.body.generation == 1
    )
    again = next(x.at_s for x in own if isinstance(x.body, o.Resume))
    assert facts(d.log)["effects"][1]["pause_s"] == pytest.approx(again - left)


def test_a_task_that_yielded_all_its_slots_waits() -> None:
    d, _, _ = waits()
    incident_facts = facts(d.log)
    check("incident-waits", page(incident_facts), columns_max=100)
    assert incident_facts["effects"][1]["pause_s"] is None


def test_lost_slot_time_counts_until_the_incident_closes(d: Driver, task: int) -> None:
    told = d.exit(task, 2)  # 4 slots stop here
    struck_s = d.now_s
    d.obey(told, start=False)
    d.progress(task)  # 3 step
    stepped_s = d.now_s
    d.now_s += 10
    carry_out(d, [x for x in told if isinstance(x.body, o.StartRank)])
    (one,) = history(d.log).incidents.values()
    assert (one.outcome, one.pause_s) == ("recovering", pytest.approx(stepped_s - struck_s))
    at_one_less_s = (
        next(x.at_s for x in d.log if isinstance(x.body, r.Quiesced) and x.at_s > stepped_s)
        - stepped_s
    )
    again_s = (one.closed_s or 0.0) - stepped_s - at_one_less_s
    assert one.slot_s == pytest.approx(4 * (stepped_s - struck_s) + at_one_less_s + 4 * again_s)


def fault_while_frozen() -> Driver:
    """A task of four ranks that lost rank 2 while healing is frozen, so it is paused."""
    d = Driver()
    task = d.running()
    d.tell("operator/freeze", r.HealingFrozen(reason="a change of switches"))
    d.exit(task, 2)
    return d


def test_slot_time_of_an_open_incident_counts_until_now() -> None:
    d = fault_while_frozen()
    past = history(d.log)
    one = replay.pick(past, "")
    assert one is not None
    before = past.slot_s(one, past.at_s)
    now_s = past.at_s + 100.0
    facts_ = incident_facts.facts_of(past, incident_records(one, d.log), view(d.state), now_s=now_s)
    assert facts_["cost"]["slot_s"] == facts_["effects"][0]["slot_s"] == pytest.approx(before + 400)
    figure = f"{before + 400:.1f}"
    seen = view(d.state)
    for screen in (
        past_screens.every(past, now_s=now_s),
        past_screens.task_status(seen, seen["tasks"][0], past, now_s=now_s),
    ):
        (row,) = [line for line in screen if line.startswith(f"inc-{one.id}")]
        assert row.endswith(f" {figure}")
    assert past.slot_s(one, past.at_s) == before, "the screens must not change the history"


def test_a_collective_that_failed_before_the_evidence_is_part_of_it(d: Driver, task: int) -> None:
    told = failed(d, task, 0)
    sign = told[0]
    d.now_s += 0.5
    carry_out(d, d.exit(task, 2))
    page_ = facts(d.log)
    assert page_["timeline"][0]["seq"] == sign.seq
    assert page_["timeline"][0]["after_s"] == pytest.approx(-0.52)
    (one,) = history(d.log).incidents.values()
    assert one.slot_s >= 4 * 0.52
    assert one.detected_s - one.fault_s == pytest.approx(0.52)


def test_a_long_error_takes_two_lines_of_the_page(d: Driver, task: int) -> None:
    why = f"RuntimeError: Connection closed by peer [::1]:4122. {'Check it. ' * 40}\nadvice\n"
    member = d.state.tasks[task].members[0]
    d.tell(
        d.source(member.node),
        r.CollectiveFailed(
            task=task, rank=0, attempt=member.attempt, generation=1, iteration=1, error=why
        ),
    )
    d.now_s += 2.0
    d.tell("leader/abc", r.DeadlineReached(deadline=f"evidence/{task}/1"))
    lines = page(facts(d.log))
    at = next(index for index, line in enumerate(lines) if line.startswith("evidence"))
    assert "iteration 1: Connection closed by peer [::1]:4122." in lines[at]
    assert "..." in lines[at + 1]
    assert lines[at + 2].startswith("evidence   leader: DeadlineReached")
    assert "advice" not in " ".join(lines)


def test_an_escalated_incident_shows_its_new_severity(d: Driver, task: int) -> None:
    failed(d, task, 0)
    d.now_s += 2.0
    d.tell("leader/abc", r.DeadlineReached(deadline=f"evidence/{task}/1"))
    node = d.state.nodes["n2"]
    d.tell(
        "n2/8",
        r.NodeJoined(
            node="n2",
            incarnation=node.incarnation + 1,
            host=node.host,
            num_slots=node.num_slots,
            pid=9,
            accelerator="cpu",
        ),
    )
    lines = page(facts(d.log))
    assert "SEV2 exited abnormally  n2  alpha" in lines[0]
    assert any("SEV2: the agent of n2 started again" in line for line in lines)


def test_an_open_incident_while_frozen() -> None:
    d = fault_while_frozen()
    told = facts(d.log)
    check("incident-frozen", page(told), columns_max=100)
    assert told["left"] == ["healing is frozen: a change of switches: unicron unfreeze"]
    option = " --state /srv/clusters/the one of the third floor"
    told = facts(d.log, option=option)
    assert told["left"] == [f"healing is frozen: a change of switches: unicron unfreeze{option}"]
    assert any(line.endswith(f" unicron unfreeze{option}") for line in page(told))
    d.now_s += 8.0
    carry_out(d, d.tell("operator/unfreeze", r.HealingResumed(reason="done")))
    lengths = {x["name"]: x["length_s"] for x in facts(d.log)["phases"]}
    assert lengths["held"] >= 8.0 > lengths["rebuild"]


def test_a_disabled_slot_needs_an_operator(d: Driver, task: int) -> None:
    erred(d, text="fallen off the bus")
    carry_out(d, d.exit(task, 2, code=1))
    out = [node.slots_disabled for node in d.state.nodes.values()]
    assert out == [[], [0]]
    words = node_trouble(view(d.state)["nodes"][1])
    assert words.startswith("slot 0 out (GPU driver errors (xid-79): fallen off the bus)")
    assert facts(d.log)["left"] == [f"n2 {words}"]
    told = nodes.nodes(view(d.state), now_s=d.now_s)
    assert " ".join(f"n2 {words}".split()) in " ".join(" ".join(told).split())


@pytest.mark.nodes(2)
def test_the_incidents_of_a_failed_task_say_why_and_what_to_do(d: Driver) -> None:
    task = d.submit(spec(train=None, command=["true"]))
    d.obey(d.log[-20:])
    while not d.state.tasks[task].outcome:
        d.obey(d.exit(task, 0, code=3))
    why = d.state.tasks[task].why
    assert "failed 4 times without 10 new iterations in between, and before that on n" in why
    *earlier, last = history(d.log).incidents
    assert not earlier, "the same fault is one incident"
    told = facts(d.log, f"inc-{last}", option=" --state /srv")
    assert told["left"] == [
        f"alpha failed ({why}): unicron logs {task} --state /srv, mend it, submit it again"
    ]
    text = " ".join(" ".join(page(told, option=" --state /srv")).split())
    assert f"unicron logs {task} --state /srv, mend it, submit it again" in text
    assert "nothing is left to do" not in text


# --- on purpose ---------------------------------------------------------------------------------
def request_fault(d: Driver, **what: Any) -> int:
    """Request a fault that is then ordered; returns the seq of the request."""
    d.tell("leader/abc", r.PolicySet(policy=policy.Policy(allow_inject=True)))
    told = d.tell("operator/c", r.FaultRequested(reason="by ops", **what))
    assert any(isinstance(x.body, o.InjectFault) for x in told)
    return told[0].seq


def on_purpose(d: Driver, which: str = "") -> list[str]:
    return [line for line in page(facts(d.log, which)) if line.startswith("on purpose")]


def test_a_rank_that_was_killed_on_purpose(d: Driver, task: int) -> None:
    seq = request_fault(d, what="rank", task=task, rank=2)
    carry_out(d, d.exit(task, 2))
    told = [f"on purpose kill task {task} rank 2: by ops (seq {seq})"]
    assert on_purpose(d) == told
    first = max(history(d.log).incidents)
    d.now_s += 60
    carry_out(d, d.exit(task, 2))
    assert on_purpose(d) == [], "the second exit was not requested"
    assert on_purpose(d, str(first)) == told


@pytest.mark.parametrize("asked_for", [True, False])
def test_a_rank_that_was_stopped(d: Driver, task: int, asked_for: bool) -> None:
    """The time until the rank may continue is a phase of its own, and counts as downtime."""
    seq = request_fault(d, what="stop", task=task, rank=2, stop_s=0.0) if asked_for else 0
    (sign,) = d.tell("n2/1", r.RankSuspended(task=task, rank=2, attempt=1, pid=d.pid - 1))
    d.progress(task)  # a late report of the iteration before
    carry_out(d, d.due(f"stopped/{task}/2/1"))
    incident_facts = facts(d.log)
    assert (
        on_purpose(d)
        == [f"on purpose stop task {task} rank 2 for good: by ops (seq {seq})"] * asked_for
    )
    names = [x["name"] for x in incident_facts["phases"]]
    assert names == ["detect", "stopped", "decide", "rebuild", "step", "full"]
    lengths_s = {x["name"]: x["length_s"] for x in incident_facts["phases"]}
    assert lengths_s["stopped"] == pytest.approx(2.0, abs=0.05)
    assert lengths_s["decide"] == pytest.approx(0.0, abs=1e-6)
    assert incident_facts["timeline"][0]["seq"] == sign.seq
    (one,) = history(d.log).incidents.values()
    # The survivors step before the task is complete, and pause once more to add the newcomer.
    assert one.pause_s == pytest.approx(one.closed_s - sign.at_s - lengths_s["full"])
    assert one.slot_s == pytest.approx(4 * (one.closed_s - sign.at_s), abs=0.1)
    if not asked_for:
        check("incident-stopped", page(incident_facts), columns_max=100)


def test_a_stopped_rank_that_continues_while_frozen(d: Driver, task: int) -> None:
    d.tell("operator/freeze", r.HealingFrozen(reason="a change of switches"))
    d.tell("n2/1", r.RankSuspended(task=task, rank=2, attempt=1, pid=d.pid - 1))
    d.due(f"stopped/{task}/2/1")
    d.now_s += 30
    d.tell("n2/1", r.RankContinued(task=task, rank=2, attempt=1, pid=d.pid - 1))
    d.progress(task)
    d.now_s += 50
    d.progress(task, 10)
    incident_facts = facts(d.log)
    assert incident_facts["outcome"] == "healed"
    assert incident_facts["cost"]["pause_s"] == pytest.approx(32.0, abs=0.2)
    assert incident_facts["cost"]["slot_s"] == pytest.approx(4 * incident_facts["cost"]["pause_s"])


def test_an_earlier_stop_does_not_explain_a_later_exit(d: Driver, task: int) -> None:
    request_fault(d, what="stop", task=task, rank=2, stop_s=2.0)
    d.now_s += 5
    d.progress(task)
    carry_out(d, d.exit(task, 2))
    assert on_purpose(d) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_node_that_was_broken_on_purpose(again: bool) -> None:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    seq = request_fault(d, what="node", node="n2")
    if again:
        carry_out(d, d.join("n2", incarnation=2))
    else:
        lose(d, "n2", alpha)
    assert on_purpose(d) == [f"on purpose kill the agent of n2 and its ranks: by ops (seq {seq})"]


# --- other pages --------------------------------------------------------------------------------
def test_the_bar_is_in_proportion() -> None:
    (line,) = bar(
        [
            {"name": "detect", "length_s": 0.1, "bound": ""},
            {"name": "step", "length_s": 0.2, "bound": ""},
        ]
    )
    assert line == f"detect 100 ms {'█' * 10}▏step 200 ms {'█' * 20}"
    assert bar([]) == []


# --- the commands -------------------------------------------------------------------------------
@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    archive.write(path, gives()[0].log, cluster="test", code="1")
    return path


def ask(path: Path, which: str, *, as_json: bool = False, verify: bool = False) -> None:
    replay.replay(
        StateDir(path.parent),
        None,
        path,
        live=False,
        until=None,
        verify=verify,
        as_json=as_json,
        incident=which,
    )


def test_the_page_from_an_exported_log(exported: Path, capsys: Any) -> None:
    (number,) = [
        x.seq for x in archive.read(exported) if isinstance(x.body, decisions.IncidentOpened)
    ]
    ask(exported, f"inc-{number}")
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"inc-{number}  RECOVERING  SEV1 lost connection  n2  alpha ranks 2 3"
    )
    assert f"unicron replay {exported} --until " in printed
    ask(exported, str(number), as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["id"] == number
    assert data["phases"][0]["name"] == "silent"


def test_the_needs_of_a_waiting_task_are_computed_from_the_log(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "log.jsonl"
    archive.write(path, waits()[0].log, cluster="test", code="1")
    ask(path, "", as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert [one["task"] for one in data["waits"]] == ["beta"]
    assert "; needs more slots, or weight " in data["waits"][0]["waits"]
    assert data["computed_by"] == DECIDER_VERSION
    last = max(x.seq for x in archive.read(path) if x.kind == "TaskWaiting")
    for until in (last, None):
        replay.replay(
            StateDir(tmp_path), None, path, live=False, until=until, verify=False, as_json=False
        )
        printed = capsys.readouterr().out.splitlines()
        assert printed[-2].startswith("beta       alpha earns more with the slots; needs ")
        assert printed[-1] == f"computed   now, by decider version {DECIDER_VERSION}"


def test_an_old_log_contains_the_needs_of_a_waiting_task() -> None:
    records = [to_plain(record) for record in waits()[0].log]
    (record,) = [x for x in records if x["kind"] == "TaskWaiting"]
    record["body"] |= {"needs": "more slots, or weight 3", "cost_waf": 1e12, "weight_from": 3.0}
    incident_facts = facts([from_plain(x) for x in records])
    assert incident_facts["waits"] == [
        {"task": "beta", "waits": "the plan gives it no slots; needs more slots, or weight 3"}
    ]
    assert incident_facts["computed_by"] == 0
    assert "the plan gives it no slots; needs more slots, or weight 3" in line(record)
    assert from_plain(record).body.weight_from == 3.0


def test_an_unknown_incident_gets_the_newest_as_hint(exported: Path) -> None:
    (number,) = history(archive.read(exported)).incidents
    with pytest.raises(UsageError, match="no incident '7'") as error:
        ask(exported, "7")
    assert error.value.hint == f"the newest: inc-{number}"
    with pytest.raises(UsageError, match="is not an incident"):
        ask(exported, "big")
    with pytest.raises(UsageError, match="do not go together"):
        ask(exported, "7", verify=True)


def test_a_log_without_incidents() -> None:
    assert replay.pick(History(), "") is None
    assert past_screens.every(History(), now_s=0.0) == ["no incidents: nothing has failed so far"]
    with pytest.raises(UsageError, match="no incident '3'"):
        replay.pick(History(), "3")


def test_the_list() -> None:
    d, _, _ = gives()
    past = history(d.log)
    check("incident-all", past_screens.every(past, now_s=d.now_s), columns_max=100)
    for task in past.state.tasks.values():
        task.spec = replace(task.spec, name="alpha")
    (one,) = past.incidents.values()
    assert f"  alpha ({one.task})  " in past_screens.every(past, now_s=d.now_s)[2]


# --- evidence ------------------------------------------------------------------------------------
def evidence(told: Plain) -> list[str]:
    """The page's entries of evidence, each joined into one line."""
    found: list[str] = []
    for row in page(told)[3:]:
        if row.startswith(("evidence", "began")) or (found and row.startswith(" " * 11)):
            text = row.strip()
            found = (
                [*found[:-1], f"{found[-1]} {text}"]
                if row.startswith(" ")
                else [*found, " ".join(text.split())]
            )
        elif found:
            break
    return found


def phases(told: Plain) -> dict[str, tuple[str, float]]:
    return {x["name"]: (x["bound"], x["length_s"]) for x in told["phases"]}


# --- late and repeated evidence -------------------------------------------------------------------
def test_a_collective_that_fails_later_is_counted() -> None:
    told = facts(gives()[0].log)
    assert [x["later"] for x in told["evidence"]] == [False, False, True]
    assert evidence(told)[1].startswith(
        "evidence n1: 2 x CollectiveFailed ranks 0 1, the first: rank 0.1 iteration 1:"
    )
    assert evidence(told)[1].endswith("; 1 later)")


def test_device_errors_after_the_incident_are_counted() -> None:
    d = Driver(nodes=3, slots=2)
    task = four(d)
    first = erred(d)
    nvml = erred(d, origin="nvml", rule="nvml-xid", text="XID 79")
    d.obey(alone(d, first))
    d.progress(task)
    more = [erred(d, text=f"again, {at}")[0].seq for at in range(5)]
    told = facts(d.log)
    assert told["outcome"] == "healed"
    assert [x["seq"] for x in told["evidence"]] == [first[0].seq, nvml[0].seq, *more]
    (kernel, driver) = evidence(told)
    assert kernel.startswith("evidence n2: 6 x DeviceErred n2/0 GPU driver errors (xid-79): ")
    assert kernel.endswith(f"(seq {first[0].seq} to {more[-1]}; 5 later)")
    assert driver.endswith(f"(seq {nvml[0].seq})")
    rows = [line for line in page(told) if " DeviceErred " in line and "evidence" not in line]
    assert len(rows) == 3, "adjacent errors share one line of the timeline"
    assert " 5 x DeviceErred " in rows[-1]


def test_the_page_says_that_evidence_is_limited() -> None:
    d = Driver(nodes=3, slots=2)
    task = four(d)
    d.obey(alone(d, erred(d)))
    d.progress(task)
    for _ in range(NUM_EVIDENCE_MAX + 20):
        erred(d)
    incident_facts = facts(d.log)
    assert len(incident_facts["evidence"]) == NUM_EVIDENCE_MAX
    assert "there may be more: so many (256) are kept" in " ".join(evidence(incident_facts))


def test_an_incident_that_the_state_has_forgotten_has_all_its_evidence() -> None:
    d = gives()[0]
    past = history(d.log)
    (one,) = past.incidents.values()
    del past.state.incidents[one.id]
    assert len(one.incident.evidence) == len(one.evidence) + 1


# --- the time at which a fault began --------------------------------------------------------------
def test_a_hang_began_after_the_last_mark(d: Driver, task: int) -> None:
    d.now_s += 10
    hung(d, task, VICTIM)
    carry_out(d, d.due(deadline(d, task)))
    incident_facts = facts(d.log)
    found = phases(incident_facts)
    names = [x["name"] for x in incident_facts["phases"]]
    assert names[:3] == ["detect", "stood", "decide"]
    assert found["detect"][0] == "at most"
    assert 1.5 < found["detect"][1] < 1.7
    assert found["decide"] == ("", pytest.approx(0.0, abs=1e-6))
    began, waits, own, late = evidence(incident_facts)
    assert began == (
        "began after the last sign of rank 2, 1.6 s before the report; the exact time is not known"
    )
    assert waits.startswith("evidence n1 n2: 3 x RankStalled ranks 0 1 3, the first: rank 0.1 ")
    assert " RankStalled rank 2.1 " in own
    assert " x " not in own
    assert "DeadlineReached hang/" in late
    check("incident-hang", page(incident_facts), columns_max=100)


def test_a_slow_iteration_began_within_itself(d: Driver, task: int) -> None:
    waited_for(d, task)
    d.now_s += 5
    crawls(d, task, VICTIM, 6.4)
    carry_out(d, d.due(deadline(d, task)))
    incident_facts = facts(d.log)
    bound, length_s = phases(incident_facts)["detect"]
    assert (bound, length_s) == ("at most", pytest.approx(6.5 - 5.0, abs=0.05))
    assert evidence(incident_facts)[0].startswith("began after that iteration began, 1.5 s")
    assert "stood" in phases(incident_facts)


def test_a_command_began_to_hang_after_its_last_line() -> None:
    d = Driver(nodes=3)
    task = hung_commands.running(d)
    hung_commands.stalled(d, task)
    (due,) = hung_commands.deadlines(d)
    d.due(due)
    told = facts(d.log)
    assert phases(told)["detect"] == ("at most", pytest.approx(61.0, abs=0.1))
    assert phases(told)["stood"][1] == pytest.approx(hung_commands.AFTER_S - 61.0, abs=0.1)
    assert evidence(told)[0].startswith("began after the last sign of rank 3, 61 s before")


def test_a_slow_rank_was_slow_before_the_report(d: Driver, task: int) -> None:
    known(d, task)
    for rank in (VICTIM, 0):
        paced(d, task, rank, 4.0 if rank == VICTIM else 1.0, iteration_s=4.1)
    incident_facts = facts(d.log)
    bound, length_s = phases(incident_facts)["detect"]
    assert bound == "at least"
    assert length_s >= 4.1
    assert evidence(incident_facts)[0].startswith("began not known: of the last ")


@pytest.mark.parametrize("error", ["Connection closed by peer", "Timed out waiting 600000ms"])
def test_a_collective_timeout_does_not_date_the_fault(d: Driver, task: int, error: str) -> None:
    failed(d, task, 0, error)
    d.now_s += 2
    d.obey(d.due(f"evidence/{task}/1"))
    incident_facts = facts(d.log)
    late = "Timed" in error
    assert ("detect" in phases(incident_facts)) == (not late)
    assert [x for x in evidence(incident_facts) if x.startswith("began")] == [
        "began not known: a collective waited until its timeout, for what had happened before"
    ] * late


def test_a_missed_deadline_has_no_known_begin(d: Driver) -> None:
    task = d.submit(spec())
    carry_out(d, d.due(f"start/{task}/0/1"))
    incident_facts = facts(d.log)
    assert "detect" not in phases(incident_facts)
    assert evidence(incident_facts)[0] == ("began not known: only a missed deadline shows it")


def test_a_check_result_has_no_known_begin() -> None:
    d = Driver(nodes=3, slots=2)
    four(d)
    d.obey(health(d, "n2", "unhealthy", devices=(0,), status="ECC errors"))
    d.due(next(x for x in d.state.deadlines if x.startswith("device/")))
    incident_facts = facts(d.log)
    assert "detect" not in phases(incident_facts)
    assert evidence(incident_facts)[0].startswith("began not known: before its check ran")


def test_an_exit_has_an_exact_begin(d: Driver, task: int) -> None:
    carry_out(d, d.exit(task, 2))
    incident_facts = facts(d.log)
    assert phases(incident_facts)["detect"][0] == ""
    assert incident_facts["began"]["why"] == ""
