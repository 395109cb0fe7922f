"""A dry run predicts the later decision, and applies only while the plan's input is unchanged."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from decider import Driver
from dry_run_jobs import Plain, job
from http_site import JOB, Site, real
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from two_tasks import carry_out, gives, two_tasks
from unicron.cli.screens import plan as plan_screen
from unicron.control_plane.api import dry_run
from unicron.control_plane.api.dry_run import Change, DryRunResult
from unicron.control_plane.api.requests import Refusal, input_unchanged
from unicron.control_plane.planner.problem_of_state import input_digest
from unicron.control_plane.state.cluster import ClusterState, encode_state, state_hash
from unicron.events.errors import SpecError
from unicron.events.records import reports as r
from unicron.events.records import types as t
from unicron.events.records.decisions import PlanChosen, TaskPlaced, TaskWaiting
from unicron.events.records.envelope import Record, Report
from unicron.events.spec.job import parse

RATES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def jobs(name: str, low_max: int) -> st.SearchStrategy[Plain]:
    return st.builds(
        job,
        st.just(name),
        st.sampled_from([0.5, 1.0, 2.0, 7.0]),
        st.integers(1, low_max),
        RATES,
        command=st.sampled_from([False, False, True]),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Driver:
    """A small cluster: some tasks train, some are degraded by a fault, some wait to start."""
    d = Driver(nodes=draw(st.integers(1, 4)), slots=draw(st.integers(1, 3)))
    for number in range(draw(st.integers(1, 3))):
        begin = len(d.log)
        d.submit(parse(draw(jobs(f"t{number}", 3))))
        if draw(st.booleans()):
            carry_out(d, d.log[begin:])
    if draw(st.integers(0, 3)) == 0:
        node = draw(st.sampled_from(sorted(d.state.nodes)))
        d.tell("operator/before", r.NodeDrained(node=node))
    running = [
        (task.id, rank)
        for task in d.state.tasks.values()
        for rank in task.ranks
        if task.phase != "ended"
    ]
    if running and draw(st.integers(0, 2)) == 0:
        d.exit(*draw(st.sampled_from(running)))  # not healed yet
    if draw(st.integers(0, 3)) == 0:
        d.tell("operator/frozen", r.HealingFrozen(reason="a test"))
    return d


@st.composite
def changes(draw: st.DrawFn, d: Driver) -> tuple[Change, list[t.Body]]:
    """A change, and the reports that would make the same change."""
    kind = draw(st.sampled_from(["without", "slots", "weights", "submit", "all"]))
    reports: list[t.Body] = []
    fields: Plain = {}
    if kind in ("slots", "all"):
        each = max(node.num_slots for node in d.state.nodes.values())
        fields["slots"] = num = draw(st.integers(1, each))
        reports.append(r.NodeJoined(node="new-1", incarnation=1, host="", pid=0, num_slots=num))
    if kind in ("without", "all"):
        free = sorted(name for name, node in d.state.nodes.items() if not node.drained)
        drained = draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []
        fields["without"] = tuple(drained)
        reports += [r.NodeDrained(node=name) for name in drained]
    if kind in ("weights", "all"):
        task = draw(st.sampled_from(sorted(d.state.tasks)))
        weight = draw(st.sampled_from([0.01, 1.0, 3.0, 100.0]))
        fields["weights"] = {str(task): weight}
        reports.append(r.TaskWeightSet(task=task, weight=weight))
    if kind in ("submit", "all"):
        fields["submit"] = plain = draw(jobs("later", min(d.state.num_slots_max, 3)))
        reports.append(r.TaskSubmitted(spec=parse(plain)))
    return Change(**fields), reports


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_dry_run_equals_the_later_decision(data: st.DataObject) -> None:
    d = data.draw(clusters())
    change, reports = data.draw(changes(d))
    before = state_hash(d.state)
    tried = dry_run.run_dry(encode_state(d.state), change)
    assert state_hash(d.state) == before
    assert tried.input == input_digest(d.state)
    if not change.slots:
        bodies = dry_run.operator_requests(encode_state(d.state), change, "") if reports else []
        assert bodies == reports
    records: list[Record] = []
    for number, body in enumerate(reports):
        joins = isinstance(body, r.NodeJoined)
        records += d.tell("new-1/1" if joins else f"operator/asked-{number}", body)
    _check_agrees(tried, records, d.state)


def _check_agrees(tried: DryRunResult, records: list[Record], state: ClusterState) -> None:
    """Compare the result of a dry run with the later decisions."""
    plans = [record.body for record in records if isinstance(record.body, PlanChosen)]
    assert tried.planned == bool(plans)
    recorded = plans[-1] if plans else state.plan
    if recorded is not None and tried.plan is not None:
        num = len(recorded.alternatives)
        assert tried.plan.alternatives[:num] == recorded.alternatives
        assert recorded == replace(
            tried.plan, alternatives=recorded.alternatives, paid_back_s=recorded.paid_back_s
        ), "other fields are equal"
    else:
        assert tried.plan == recorded
    assert tried.num_plans == len(plans)
    if len(plans) < 2:
        assert tried.transition_flop == pytest.approx(sum(x.transition_flop for x in plans))
        paid = {x.task: x.transition_s for plan in plans for x in plan.allocations}
        assert [x.pause_s for x in tried.tasks] == [
            paid.get(x.task or max(state.tasks), 0.0) for x in tried.tasks
        ]
    assert not any(one.pause_s for one in tried.tasks if not one.slots_before)
    seats = {task.id: task.target for task in state.tasks.values()}
    placed = [record.body for record in records if isinstance(record.body, TaskPlaced)]
    waiting = {record.body.task for record in records if isinstance(record.body, TaskWaiting)}
    new = max(state.tasks)
    for one in tried.tasks:
        assert one.seats == seats[one.task or new]
        assert (one.seats != one.seats_before) <= any(
            body.task == (one.task or new) for body in placed
        )
        assert one.weight == state.tasks[one.task or new].weight
        if not one.slots and (one.task or new) in waiting:
            assert one.waits
    if not state.held and plans:
        assert {one.task or new: one.slots for one in tried.tasks} == {
            task.id: len(task.target) for task in state.tasks.values()
        }
        assert sum(one.waf for one in tried.tasks) == pytest.approx(plans[-1].waf)


def test_the_present_plan_is_the_last_one() -> None:
    d, alpha, beta = gives()
    result = dry_run.explain_present_plan(encode_state(d.state))
    assert (result.tried, result.planned, result.plan) == (False, False, d.state.plan)
    assert (result.plan_seq, result.input) == (d.state.plan_seq, input_digest(d.state))
    assert [(one.task, one.slots) for one in result.tasks] == [(alpha, 3), (beta, 1)]
    assert (result.more_slots, result.more_waf) == (2, pytest.approx(2.0 * 0.1e12 + 0.9e12))


def test_a_wrong_change_is_refused_like_the_request() -> None:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    data = encode_state(d.state)
    for change, message in [
        (Change(without=("n9",)), "there is no node 'n9'"),
        (Change(without=("n1", "n1")), "node n1 is drained already"),
        (Change(weights={"99": 2.0}), "there is no task 99"),
        (Change(weights={str(alpha): 0.0}), "weight: 0 is not between 1e-06 and 1e+06"),
        (Change(slots=-1), "slots: -1 is not from 1 to 100,000"),
        (Change(submit=job("alpha", 1.0, 1, [1])), "name: alpha is live, by task"),
    ]:
        with pytest.raises(Refusal) as refused:
            dry_run.run_dry(data, change)
        assert str(refused.value).startswith(message)
    with pytest.raises(SpecError):
        dry_run.run_dry(data, Change(submit={"name": "x"}))
    with pytest.raises(Refusal, match="slots that are not there"):
        dry_run.operator_requests(data, Change(slots=2), "")
    with pytest.raises(Refusal, match="nothing to apply"):
        dry_run.operator_requests(data, Change(), "")


def test_new_slots_come_in_nodes_of_the_usual_size() -> None:
    d, _, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    tried = dry_run.run_dry(
        encode_state(d.state), Change(slots=5, submit=job("wide", 1.0, 1, [1] * 5))
    )
    assert tried.plan is not None
    assert tried.plan.num_slots == 11
    new_nodes = {seat.slot.node for one in tried.tasks for seat in one.seats} - set(d.state.nodes)
    assert new_nodes <= {"new-1", "new-2", "new-3"}
    assert new_nodes


def test_each_change_of_several_steps_counts_once() -> None:
    """One append makes three plans. alpha goes 4 -> 3 -> 2 -> 0 and pauses once. beta goes
    2 -> 1 -> 0 -> 2: it ends with as many slots as before, but it also pauses once."""
    d, alpha, beta = two_tasks({1: 1.5e12, 2: 2.4e12})
    change = Change(without=("n1", "n2"), weights={str(beta): 100.0})
    tried = dry_run.run_dry(encode_state(d.state), change)
    assert tried.num_plans == 3
    stop_s = d.state.policy.transition_s
    assert [(x.task, x.slots_before, x.slots, x.pause_s) for x in tried.tasks] == [
        (alpha, 4, 0, stop_s),
        (beta, 2, 2, stop_s),
    ]
    assert tried.transition_flop == pytest.approx((2.0 * 2.7e12 + 100.0 * 2.4e12) * stop_s)
    plain = msgspec.to_builtins(tried, str_keys=True) | {"took_s": 0.1}
    why = plan_screen.dry_run(plain, "x")[1:3]
    assert why[0].split()[:5] == ["why", "alpha", "4", "->", "0,"]
    assert "by 3 plans, one for each step; the last one: " in " ".join(why)


# --- over HTTP, with the check at the moment of the write ---------------------------------------
async def _two_nodes(site: Site) -> int:
    """n1 and n2 with two slots each, and a task. Returns the task's id."""
    for node in ("n1", "n2"):
        joined = r.NodeJoined(node=node, incarnation=9, host="", pid=1, num_slots=2)
        await site.log.send([Report(source=f"{node}/9", source_seq=1, occurred_s=1.0, body=joined)])
    while len((await site.coordinator.settled()).nodes) < 2:
        await asyncio.sleep(0.01)
    _, answer = await site.ask("POST", "/v1/tasks", JOB | {"slots": {"min": 1, "max": 4}})
    return int(answer["task"])


@real
async def test_a_dry_run_is_applied_if_nothing_has_changed(site: Site) -> None:
    task = await _two_nodes(site)
    change = {
        "without": ["n2"],
        "weights": {str(task): 3.0},
        "submit": JOB | {"name": "later", "train": {"iterations": 3, "output": "/later"}},
    }
    status, tried = await site.ask("POST", "/v1/plan/dry-run", change)
    assert (status, tried["tried"], tried["planned"]) == (200, True, True)
    assert tried["took_s"] > 0
    before = site.coordinator.seq
    body = {"change": change, "reason": " a\ntest "}
    check = f'"{tried["input"]}"'
    for _ in range(2):  # with the same key it is written once
        status, answer = await site.ask(
            "POST", "/v1/plan/apply", body, Idempotency_Key="apply", If_Match=check
        )
        assert (status, answer) == (200, {"seq": before + 1})
    records = await site.log.read(after=before, num_max=999)
    requested = [record for record in records if record.source.startswith("operator/apply.")]
    assert [(record.kind, record.source_seq) for record in requested] == [
        ("NodeDrained", 1),
        ("TaskWeightSet", 2),
        ("TaskSubmitted", 3),
    ]
    assert {record.body.reason for record in requested[:2]} == {"a test"}
    plans = [record.body for record in records if isinstance(record.body, PlanChosen)]
    assert plans[-1] == msgspec.convert(tried["plan"], PlanChosen)
    seqs = {record.seq for record in requested}
    assert all(record.seq in seqs or record.cause in seqs for record in records)


@real
async def test_apply_is_refused_if_the_input_has_changed(site: Site) -> None:
    task = await _two_nodes(site)
    _, tried = await site.ask("POST", "/v1/plan/dry-run", {"without": ["n2"]})
    await site.ask("POST", f"/v1/tasks/{task}/weight", {"weight": 5.0})
    before = site.coordinator.seq
    message, hint = await site.refusal(
        412,
        "POST",
        "/v1/plan/apply",
        {"change": {"without": ["n2"]}},
        If_Match=f'"{tried["input"]}"',
    )
    now = input_digest(await site.coordinator.settled())
    assert now != tried["input"]
    assert message == (
        f"the plan's input is {now} now, not {tried['input']}: what the "
        "plan follows from has changed since; nothing was done"
    )
    assert hint.startswith("make the dry run again")
    assert site.coordinator.seq == before


@real
async def test_the_check_is_made_at_the_moment_of_the_write(site: Site) -> None:
    """A concurrent write is appended first, and the check sees its effect."""
    task = await _two_nodes(site)
    coordinator = site.coordinator
    known = input_digest(await coordinator.settled())
    written, refused = await asyncio.gather(
        coordinator.write("other", r.TaskWeightSet(task=task, weight=9.0)),
        coordinator.write("held", r.NodeDrained(node="n1"), check=input_unchanged(known)),
        return_exceptions=True,
    )
    state = await coordinator.settled()
    assert state.tasks[task].weight == 9.0
    assert written == coordinator.answer("other")
    assert isinstance(refused, Refusal)
    assert str(refused).startswith(f"the plan's input is {input_digest(state)} now, not {known}")
    assert coordinator.answer("held") is None
    assert not state.nodes["n1"].drained
    await coordinator.write(
        "held", r.NodeDrained(node="n1"), check=input_unchanged(input_digest(state))
    )
    assert (await coordinator.settled()).nodes["n1"].drained


@real
async def test_nonsense_over_http_is_refused(site: Site) -> None:
    await _two_nodes(site)
    for path, body, status, message in [
        ("/v1/plan/dry-run", {"without": ["n9"]}, 404, "there is no node 'n9'"),
        ("/v1/plan/dry-run", {"with": 3}, 400, "Object contains unknown field `with`"),
        ("/v1/plan/dry-run", {"submit": {"name": "x"}}, 422, ""),
        ("/v1/plan/apply", {}, 400, "Object missing required field `change`"),
        ("/v1/plan/apply", {"change": {}}, 428, "If-Match is missing"),
    ]:
        assert (await site.refused(status, "POST", path, body)).startswith(message)
    status, plan = await site.ask("GET", "/v1/plan")
    assert (status, plan["tried"]) == (200, False)
    message = await site.refused(
        422, "POST", "/v1/plan/apply", {"change": {"submit": JOB | {"weight": "2"}}}, If_Match='"0"'
    )
    assert message.startswith("weight: "), "before the check"
    for check, status in (
        ('"0"', 412),
        ('"999"', 412),
        ("999", 400),
        ("*", 400),
        ('W/"1"', 400),
        ('""', 400),
    ):
        await site.refused(
            status, "POST", "/v1/plan/apply", {"change": {"slots": 2}}, If_Match=check
        )
    message = await site.refused(
        422, "POST", "/v1/plan/apply", {"change": {}}, If_Match=f'"{plan["input"]}"'
    )
    assert message == "there is nothing to apply"


@real
async def test_half_a_surrogate_pair_is_refused(site: Site) -> None:
    """Neither the log nor an answer can encode a lone surrogate."""
    half = b'"\\ud800"'
    for path, body in (
        ("/v1/freeze", b'{"reason": %s}'),
        ("/v1/plan/dry-run", b"{%s: 1}"),
        ("/v1/plan/dry-run", b'{"weights": {%s: 1}}'),
        ("/v1/plan/apply", b'{"change": %s}'),
        ("/v1/join", b"%s"),
    ):
        assert "surrogates" in await site.refused(400, "POST", path, body % half)
    assert (await site.ask("GET", "/v1/plan"))[0] == 200


@real
async def test_every_act_has_a_dry_run_and_is_applied(site: Site) -> None:
    """What is drained or frozen is undone; a cancelled task's slots are free in the dry run."""
    task = await _two_nodes(site)
    await site.ask("POST", "/v1/nodes/n2/drain", {"reason": "fans"})
    await site.ask("POST", "/v1/freeze", {"reason": "work"})
    change: Plain = {"undrain": ["n2"], "unfreeze": True}
    _, tried = await site.ask("POST", "/v1/plan/dry-run", change)
    assert tried["planned"]
    assert [(one["slots_before"], one["slots"]) for one in tried["tasks"]] == [(2, 4)]
    before = site.coordinator.seq
    await site.ask(
        "POST",
        "/v1/plan/apply",
        {"change": change, "reason": "done"},
        If_Match=f'"{tried["input"]}"',
    )
    records = await site.log.read(after=before, num_max=99)
    assert [(one.kind, one.body.reason) for one in records if hasattr(one.body, "who")] == [
        ("NodeUndrained", "done"),
        ("HealingResumed", "done"),
    ]
    other = JOB | {
        "name": "other",
        "train": {"iterations": 3, "output": "/other"},
        "slots": {"min": 4, "max": 4},
    }
    await site.ask("POST", "/v1/tasks", other)
    _, tried = await site.ask("POST", "/v1/plan/dry-run", {"cancel": [str(task)]})
    assert [(one["name"], one["slots"]) for one in tried["tasks"]] == [("other", 4)]
    await site.refused(409, "POST", "/v1/plan/dry-run", {"lift": ["n1"]})
