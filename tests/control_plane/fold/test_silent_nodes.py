"""Several unreachable nodes, some with new ranks: the reachable members continue."""

from __future__ import annotations

import msgspec
import pytest
from decider import Driver, failed, kinds, only, spec, task_of, the
from two_tasks import seen
from unicron.cli.screens import cluster
from unicron.control_plane.api.needs import AWAY_S_MIN
from unicron.control_plane.fold import edits
from unicron.events.records import decisions, in_words
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record

pytestmark = pytest.mark.nodes(3, slots=1)


@pytest.fixture
def task(d: Driver) -> int:
    """A task with one rank on each of three nodes, after some iterations."""
    task = d.running(spec(slots={"min": 1, "max": 3}))
    d.progress(task, 5)
    return task


def lose_contact(d: Driver, node: str) -> list[Record]:
    incarnation = d.state.nodes[node].incarnation
    return d.tell(
        f"leader/{d.state.nonce}",
        r.NodeUnreachable(node=node, incarnation=incarnation, silence_s=5.0),
    )


def regain_contact(d: Driver, node: str) -> list[Record]:
    incarnation = d.state.nodes[node].incarnation
    return d.tell(f"leader/{d.state.nonce}", r.NodeReachable(node=node, incarnation=incarnation))


def time_left_s(d: Driver, deadline: str) -> float:
    return d.state.deadlines[deadline].due_s - d.state.at_s


def test_an_unreachable_node_changes_no_plan(d: Driver, task: int) -> None:
    """New measurements cause no plan until the node is reachable again."""
    plan, seats = d.state.plan_seq, task_of(d, task).target
    lose_contact(d, "n3")
    num = len(d.log)
    for times_s in (0.2, 0.4, 0.1):
        d.progress(task, times_s=(times_s,) * 25)
    d.tell("operator/w", r.TaskWeightSet(task=task, weight=3.0))
    assert len(only(decisions.ThroughputSet, d.log[num:])) == 3
    assert not only(decisions.PlanChosen, d.log[num:])
    assert d.state.plan_seq == plan
    assert the(decisions.PlanChosen, regain_contact(d, "n3")).allocations[0].slots == 3
    assert task_of(d, task).target == seats


@pytest.mark.nodes(10, slots=1)
def test_a_rank_with_state_is_kept_until_all_losses_are_known(d: Driver) -> None:
    """Ten ranks, sizes 6 and 10. The first loss leaves three live ranks without a seat. The second
    loss comes before they stop and needs one of them, which continues with its state."""
    task = d.running(spec(slots={"min": 2, "max": 10}, throughput={2: 2e12, 6: 6e12, 10: 1e13}))
    d.progress(task, 5)
    failed(d, task, 0)
    lose_contact(d, "n2")
    second = task_of(d, task).target[2].slot.node
    lose_contact(d, second)
    assert len(task_of(d, task).target) == 6
    for rank in task_of(d, task).living_members():
        if rank.slot.node != second:
            d.quiesced(task, rank.rank)
    late = d.due(f"silent/{task}/1")
    decided = [kind for kind in kinds(late) if kind != "IncidentEscalated"]
    assert decided == ["PlanChosen", "TaskPlaced", "Reconfigure", "StopRank", "StopRank"]
    assert len(the(o.Reconfigure, late).members) == 6
    d.obey(late)
    d.progress(task)


@pytest.mark.nodes(4, slots=1)
def test_a_plan_names_tasks_kept_on_unreachable_nodes(d: Driver, task: int) -> None:
    lose_contact(d, "n3")
    other = d.submit(spec(name="beta", slots={"min": 1, "max": 1}))
    plan = the(decisions.PlanChosen, d.log[-6:])
    assert [x.task for x in plan.allocations] == [other]
    (kept,) = plan.kept
    assert (kept.task, kept.slots, kept.waf) == (task, 3, 3 * plan.allocations[0].waf)
    assert plan.ideal_waf == plan.waf + kept.waf
    line = in_words.essentials("PlanChosen", msgspec.to_builtins(plan))
    assert f"1 slots, task:slots {other}:1, left alone {task}:3, WAF 4 TFLOP/s, 100 % of" in line
    lines = cluster.status(seen(d, AWAY_S_MIN), cluster="test", now_s=d.now_s + AWAY_S_MIN)
    text = " ".join(" ".join(lines).split())
    assert "plan 4 TFLOP/s of 4 TFLOP/s with every slot (100.0 %)" in text
    assert "slots 4 train (1 of them on an unreachable node), 0 idle, 0 out" in text
    assert ", its ranks go on: look at its machine and network" in text


@pytest.mark.parametrize("first", ["failed", "silent"])
def test_two_nodes_lost_together_are_both_lost_in_time(d: Driver, task: int, first: str) -> None:
    if first == "failed":
        failed(d, task, 0)
        records = lose_contact(d, "n2")
        assert lose_contact(d, "n3") == d.log[-1:]
    else:
        lose_contact(d, "n2")
        lose_contact(d, "n3")
        records = failed(d, task, 0)
    assert the(decisions.IncidentOpened, records).node == "n2"
    assert time_left_s(d, f"silent/{task}/1") <= d.state.policy.evidence_s_max
    late = d.due(f"silent/{task}/1")
    assert kinds(late)[:2] == ["IncidentEscalated"] * 2
    assert [x.body.why for x in only(decisions.IncidentEscalated, late)][1] == (
        "node n3 is silent; rank 2 did not quiesce in time"
    )
    d.obey(late)
    assert [x.rank for x in task_of(d, task).members] == [0]
    assert the(decisions.IncidentClosed, d.heal(task)).iterations_lost == 0
    assert {d.state.nodes[name].health for name in ("n2", "n3")} == {"lost"}
    assert len(d.state.incidents) == 1
    assert not [x for x in d.state.deadlines if not x.startswith("replace/")]
    for node in ("n2", "n3"):
        d.obey(regain_contact(d, node))
    d.progress(task)
    assert len(task_of(d, task).members) == 3
    assert task_of(d, task).iterations_lost == 0


def test_two_nodes_lost_together_while_healing_is_paused(d: Driver, task: int) -> None:
    failed(d, task, 0)
    lose_contact(d, "n2")
    d.tell("operator/freeze", r.HealingFrozen(reason="a change of switches"))
    lose_contact(d, "n3")
    d.obey(d.due(f"silent/{task}/1"))
    d.heal(task)
    assert [x.rank for x in task_of(d, task).members] == [0]
    d.obey(d.tell("operator/unfreeze", r.HealingResumed()))
    assert the(decisions.IncidentClosed, d.log[-20:]).iterations_lost == 0


def test_a_reachable_slow_member_keeps_its_deadline(d: Driver, task: int) -> None:
    lost = d.exit(task, 0)
    assert kinds(lost)[:2] == ["IncidentOpened", "Quiesce"]
    lose_contact(d, "n3")
    assert f"silent/{task}/1" not in d.state.deadlines, "rank 1 is slow, but its node is reachable"
    assert time_left_s(d, f"quiesce/{task}/1") > 59
    d.quiesced(task, 1)
    assert time_left_s(d, f"silent/{task}/1") == d.state.policy.evidence_s_max
    assert time_left_s(d, f"quiesce/{task}/1") > 59
    d.obey(d.due(f"silent/{task}/1"))
    assert [x.rank for x in task_of(d, task).members] == [1]
    d.obey(only(o.StartRank, lost))
    d.progress(task)
    assert [x.rank for x in task_of(d, task).members] == [1, 0]
    assert task_of(d, task).iterations_lost == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_a_node_lost_while_a_generation_is_built(d: Driver, task: int, is_known: bool) -> None:
    """The other members cannot build it alone. `is_known`: one of them has reported a failure."""
    d.exit(task, 0)
    d.quiesced(task, 1)
    built = d.quiesced(task, 2)
    assert the(o.Reconfigure, built).generation == 2
    records = lose_contact(d, "n3")
    assert time_left_s(d, f"reconfigure/{task}/2") > 20
    if is_known:
        records = d.tell(
            d.source("n2"),
            r.ReconfigureFailed(task=task, rank=1, attempt=1, generation=2, error="closed by peer"),
        )
    else:
        assert records == d.log[-1:]
        assert time_left_s(d, f"silent/{task}/2") == d.state.policy.evidence_s_max
        records = d.due(f"silent/{task}/2")
    lost = [x.body for x in only(decisions.IncidentEscalated, records) if x.body.severity == "SEV1"]
    assert [(x.node, x.ranks) for x in lost] == [("n3", (2,))]
    d.obey(records)
    d.progress(task)
    assert [x.rank for x in task_of(d, task).members][:1] == [1]
    assert d.state.nodes["n3"].health == "lost"
    assert task_of(d, task).iterations_lost == 0


def test_a_node_that_is_reachable_again_has_its_full_deadline(d: Driver, task: int) -> None:
    failed(d, task, 0)
    lose_contact(d, "n2")
    lose_contact(d, "n3")
    regain_contact(d, "n3")
    assert f"silent/{task}/1" not in d.state.deadlines
    assert time_left_s(d, f"quiesce/{task}/1") > 59
    d.obey(d.quiesced(task, 2))
    d.progress(task)
    assert [x.rank for x in task_of(d, task).members] == [0, 2]
    assert d.state.nodes["n3"].health == "healthy"
    assert not task_of(d, task).restarts


def test_unreachable_ranks_that_alone_have_the_state(d: Driver, task: int) -> None:
    """A restart without these ranks would lose iterations, and their nodes may return."""
    lose_contact(d, "n2")
    lose_contact(d, "n3")
    lost = d.exit(task, 0)
    assert kinds(lost) == ["IncidentOpened", "Quiesce", "StartRank"]
    assert f"silent/{task}/1" not in d.state.deadlines
    for node in ("n2", "n3"):
        regain_contact(d, node)
    d.obey(lost)
    d.progress(task)
    assert len(task_of(d, task).members) == 3
    assert task_of(d, task).iterations_lost == 0


def test_at_a_boundary_an_unreachable_node_is_not_waited_for(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 2}))
    d.tell("operator/drain", r.NodeDrained(node="n2"))
    ready = d.do(next(x.body for x in d.log[::-1] if isinstance(x.body, o.StartRank)))
    assert the(o.Quiesce, ready).mode == "boundary"
    d.quiesced(task, 0)
    assert kinds(lose_contact(d, "n2")) == []
    d.obey(d.due(f"silent/{task}/1"))
    assert [x.rank for x in task_of(d, task).members] == [0, 2]
    d.progress(task)
    assert task_of(d, task).iterations_lost == 0


def test_an_unreachable_node_does_not_interrupt_a_save(d: Driver) -> None:
    task = d.running(spec(slots={"min": 3, "max": 3}))
    d.tell("operator/drain", r.NodeDrained(node="n3"))
    saved = d.save(task, 0)
    for rank in (0, 1):
        d.quiesced(task, rank)
    lose_contact(d, "n3")
    late = d.due(f"silent/{task}/1")
    assert "StopRank" not in kinds(late), "no checkpoint is published yet"
    d.obey([*late, *saved])
    assert task_of(d, task).checkpoint is not None
    assert task_of(d, task).phase == "idle"


def test_a_new_rank_does_not_keep_a_task_on_a_lost_node(d: Driver) -> None:
    """The task's only node is lost during a move. The task is still replaced at the deadline."""
    task = d.running(spec(slots={"min": 1, "max": 1}))
    home = task_of(d, task).target[0].slot.node
    moved = d.tell("operator/drain", r.NodeDrained(node=home))
    lose_contact(d, home)
    assert kinds(d.obey(only(o.StartRank, moved))) == []
    new = d.due(f"replace/{home}")
    assert kinds(new) == ["IncidentOpened", "PlanChosen", "Reconfigure"]
    d.steps[task] = 0
    d.obey(new)
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert (closed.outcome, closed.iterations_lost) == ("set back", 1), "its state was lost"


# --- new ranks with an error --------------------------------------------------------------------
def errored(d: Driver, task: int, rank: int) -> list[Record]:
    """The rank reports an error. Its process remains until it is reaped."""
    process = task_of(d, task).ranks[rank]
    return d.tell(
        d.source(process.slot.node),
        r.RankErrored(
            task=task,
            rank=rank,
            attempt=process.attempt,
            generation=0,
            iteration=0,
            error="RuntimeError",
            text="out of memory",
        ),
    )


def test_a_generation_waits_for_a_new_rank_with_an_error(d: Driver) -> None:
    task = d.submit(spec(slots={"min": 2, "max": 2}))
    starts = d.log[-2:]
    d.do(starts[0].body)
    errored(d, task, 0)
    assert kinds(d.do(starts[1].body)) == []
    d.exit(task, 0, code=1)
    again = d.due(f"restart/{task}/0")
    assert kinds(again) == ["StartRank"]
    d.obey(again)
    assert [x.rank for x in task_of(d, task).members] == [0, 1]
    d.progress(task)


def test_no_generation_begins_if_all_new_ranks_have_errors(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 1}))
    home = task_of(d, task).target[0].slot.node
    moved = d.tell("operator/drain", r.NodeDrained(node=home))
    lose_contact(d, home)
    d.obey(only(o.StartRank, moved))
    errored(d, task, 1)
    d.join(home, incarnation=2, slots=1)
    assert task_of(d, task).phase == "starting"
    d.steps[task] = 0
    d.obey(d.exit(task, 1, code=1))
    d.progress(task)
    assert [x.rank for x in task_of(d, task).members] == [1]


# --- no node is heard ---------------------------------------------------------------------------
def test_while_no_node_is_heard_no_task_changes(d: Driver, task: int) -> None:
    """The control plane is cut off: the ranks train on, and no silence is evidence of a loss."""
    generation, pids = task_of(d, task).generation, sorted(task_of(d, task).ranks)
    for node in ("n1", "n2", "n3"):
        assert kinds(lose_contact(d, node)) == []
    for node in ("n1", "n2", "n3"):
        assert kinds(d.due(f"replace/{node}")) == []
        assert not d.state.nodes[node].replace
    d.now_s += 10 * d.state.policy.replace_after_s
    first = regain_contact(d, "n1")
    assert "IncidentOpened" not in kinds(first)
    for node in ("n2", "n3"):  # the time of a silent node counts from now on
        assert time_left_s(d, f"replace/{node}") == d.state.policy.replace_after_s
    for node in ("n2", "n3"):
        regain_contact(d, node)
    assert task_of(d, task).generation == generation
    assert sorted(task_of(d, task).ranks) == pids


def test_a_transition_waits_while_no_node_is_heard(d: Driver, task: int) -> None:
    d.exit(task, 2)
    assert task_of(d, task).phase == "quiescing"
    for node in ("n1", "n2", "n3"):
        lose_contact(d, node)
    (deadline,) = (name for name in d.state.deadlines if name.startswith("quiesce/"))
    assert deadline not in edits.running_deadlines(d.state)
    assert kinds(d.due(deadline)) == []
    assert not any(rank.timeout_reason for rank in task_of(d, task).ranks.values())
    d.now_s += 1000.0
    regain_contact(d, "n1")
    assert deadline in edits.running_deadlines(d.state)
    assert time_left_s(d, deadline) == d.state.policy.quiesce_s_max


@pytest.mark.nodes(2, slots=1)
def test_a_node_that_joins_ends_the_wait_for_those_that_are_gone(d: Driver) -> None:
    task = d.running(spec(slots={"min": 1, "max": 2}))
    d.progress(task, 5)
    for node in ("n1", "n2"):
        lose_contact(d, node)
    d.now_s += 1000.0
    d.join("n3", slots=1)
    for node in ("n1", "n2"):
        d.due(f"replace/{node}")
    opened = [record.body.node for record in only(decisions.IncidentOpened, d.log)]
    assert opened
    assert set(opened) <= {"n1", "n2"}
    assert d.state.nodes["n1"].health == d.state.nodes["n2"].health == "lost"
