"""Stragglers: each is reported with its cost; only a confirmed, very slow rank restarts."""

from __future__ import annotations

from typing import Any

import pytest
from decider import Driver, at_rest, kinds, only, spec, task_of, the
from stragglers import VICTIM, known, paced
from two_tasks import carry_out, train, two_tasks
from unicron.control_plane.api.dry_run import Change, run_dry
from unicron.control_plane.api.view import view
from unicron.control_plane.fold.edits import PRICE_S
from unicron.control_plane.incidents.stragglers import LASTS_S
from unicron.control_plane.state.cluster import encode_state
from unicron.events.records import decisions
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.decisions import StragglerCostEstimated


def test_a_slow_rank_is_reported_with_its_cost(d: Driver, task: int) -> None:
    known(d, task)
    records = paced(d, task, VICTIM, 1.3, iteration_s=1.4)
    assert kinds(records) == ["StragglerCostEstimated"]
    priced = the(StragglerCostEstimated, records)
    slowdown = 1.4 / 1.1
    assert (priced.node, priced.tasks) == ("n2", (task,))
    assert priced.ratios == (pytest.approx(slowdown),)
    assert priced.why == "rank 2 of alpha (n2/0) holds up 3 others, 1.27 x, its own work 1.3 x"
    waf = view(d.state)["plan"]["waf"]
    assert priced.cost_waf == pytest.approx(waf * (1 - 1 / slowdown))
    shown = view(d.state)["tasks"][0]
    assert (shown["state"], shown["slowdown"]) == ("degraded", pytest.approx(slowdown))
    assert [(x["rank"], x["node"], x["slot"]) for x in shown["slow"]] == [(VICTIM, "n2", 0)]
    assert not d.state.incidents
    assert not only(o.StopRank, d.log)


def test_the_gain_of_draining_equals_a_dry_run(d: Driver, task: int) -> None:
    known(d, task)
    priced = the(StragglerCostEstimated, paced(d, task, VICTIM, 2.8, iteration_s=2.9))
    tried = run_dry(encode_state(d.state), Change(without=("n2",)))
    assert tried.plan is not None
    assert tried.degraded == (priced,)
    assert run_dry(encode_state(d.state), Change(without=("n1",))).degraded == ()
    now = view(d.state)["plan"]["waf"] / priced.ratios[0]
    assert priced.drain_waf == pytest.approx(tried.plan.waf - now)
    node = view(d.state)["nodes"][1]
    assert node["degraded"]["drain_share"] == pytest.approx(priced.drain_waf / now)
    assert view(d.state)["nodes"][0]["degraded"] is None


def test_draining_can_cost_more_than_the_straggler(d: Driver, task: int) -> None:
    known(d, task)
    priced = the(StragglerCostEstimated, paced(d, task, VICTIM, 1.15, iteration_s=1.25))
    assert priced.cost_waf > 0
    assert priced.drain_waf < 0


def test_below_a_tenth_nothing_is_reported(d: Driver, task: int) -> None:
    known(d, task)
    assert kinds(paced(d, task, VICTIM, 1.09)) == []
    assert view(d.state)["tasks"][0]["state"] == "running"


def eight() -> tuple[Driver, int]:
    """A task of eight ranks, with one micro-batch each."""
    d = Driver(nodes=4)
    return d, d.running(
        spec(
            slots={"sizes": [8]},
            train={"iterations": 50, "output": "/tmp/out", "batch": {"global": 16, "micro": 2}},
        )
    )


@pytest.mark.parametrize("own_s", [1.2, 1.6])
def test_a_rank_slower_than_its_peers_from_the_start(own_s: float) -> None:
    d, task = eight()
    for rank in (0, 1, 3, 4, 5, 6, 7):
        assert kinds(paced(d, task, rank, 1 + rank / 100, iteration_s=own_s + 0.1)) == []
    priced = the(StragglerCostEstimated, paced(d, task, VICTIM, own_s, normal_s=own_s))
    assert priced.node == "n2"
    assert priced.ratios[0] == pytest.approx((own_s + 0.1) / 1.17)
    at_rest(d)


def test_peers_that_differ_give_no_reference() -> None:
    d, task = eight()
    for rank, own_s in enumerate((1.0, 0.4, 1.6, 0.7, 1.1, 1.3, 0.5, 0.9)):
        assert kinds(paced(d, task, rank, own_s, normal_s=own_s, iteration_s=1.7)) == []
    at_rest(d)


def test_longer_work_without_a_delay_is_not_slow(d: Driver, task: int) -> None:
    """Measured with four ranks on two busy cores: a rank that computes longer waits less."""
    for rank, own_s in enumerate((0.056, 0.048, 0.055, 0.018)):
        assert kinds(paced(d, task, rank, own_s, normal_s=own_s, iteration_s=0.115)) == []
    assert kinds(paced(d, task, 1, 0.020, normal_s=0.020, iteration_s=0.065)) == []
    assert kinds(paced(d, task, 2, 0.0125, normal_s=0.0125, iteration_s=0.081)) == []
    assert kinds(paced(d, task, 1, 0.0615, normal_s=0.020, iteration_s=0.082)) == []
    assert kinds(paced(d, task, 2, 0.057, normal_s=0.0125, iteration_s=0.0755)) == []
    assert kinds(d.progress(task, times_s=[0.12])) == []
    assert not task_of(d, task).slow


def test_one_long_iteration_is_no_straggler(d: Driver, task: int) -> None:
    known(d, task)
    for rank in (1, 3):
        paced(d, task, rank, iteration_s=9.1)
    assert kinds(paced(d, task, VICTIM, 9.0, iteration_s=9.1, num_iterations=1)) == []
    assert kinds(d.progress(task, times_s=[9.1])) == []
    assert not task_of(d, task).slow


def test_a_new_generation_keeps_the_usual_step_time(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, VICTIM, 1.5, iteration_s=1.6)
    d.obey(d.exit(task, 0))
    d.progress(task)
    assert view(d.state)["tasks"][0]["state"] == "degraded"
    paced(d, task, VICTIM, 1.5, normal_s=1.5, iteration_s=1.6)
    assert not task_of(d, task).slow, "no peer has reported its step time"
    paced(d, task, 1, iteration_s=1.6)
    assert list(task_of(d, task).slow) == [VICTIM]
    paced(d, task, VICTIM, 1.0, iteration_s=1.1)
    assert not task_of(d, task).slow


def test_two_ranks_do_not_show_which_is_slow(d: Driver) -> None:
    task = d.running(spec(slots={"sizes": [2]}))
    assert kinds(paced(d, task, 0)) == []
    assert kinds(paced(d, task, 1, 2.0, normal_s=2.0)) == []


def test_more_micro_batches_are_not_slow(d: Driver) -> None:
    """Ten micro-batches on four members: two members have three, two have two."""
    task = d.running(
        spec(train={"iterations": 50, "output": "/tmp/out", "batch": {"global": 20, "micro": 2}})
    )
    for rank, own_s in enumerate((3.0, 3.0, 2.0, 2.0)):
        assert kinds(paced(d, task, rank, own_s, normal_s=own_s, iteration_s=3.1)) == []
    assert not task_of(d, task).slow
    assert kinds(paced(d, task, 3, 2.6, normal_s=2.0, iteration_s=3.1)) == [], "ranks 0, 1 take 3 s"
    assert kinds(paced(d, task, 3, 3.6, normal_s=2.0, iteration_s=3.7)) == [
        "StragglerCostEstimated"
    ]


def test_a_rank_that_recovers_is_no_longer_reported(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, VICTIM, 1.5)
    assert kinds(paced(d, task, VICTIM, 1.02)) == []
    assert not d.state.degraded
    assert view(d.state)["tasks"][0]["state"] == "running"


def test_a_cost_is_estimated_at_most_once_a_minute(d: Driver, task: int) -> None:
    known(d, task)
    first = the(StragglerCostEstimated, paced(d, task, VICTIM, 1.5))
    assert kinds(paced(d, task, VICTIM, 1.5)) == [], "the cost is unchanged"
    assert "price/n2" not in d.state.deadlines
    assert kinds(paced(d, task, VICTIM, 2.0)) == []
    assert d.state.deadlines["price/n2"].length_s == pytest.approx(PRICE_S, abs=1.0)
    second = the(StragglerCostEstimated, d.due("price/n2"))
    assert second.cost_waf > first.cost_waf
    assert kinds(paced(d, task, VICTIM, 1.2)) == []
    assert "price/n2" in d.state.deadlines
    assert kinds(paced(d, task, VICTIM, 1.0)) == []
    assert "price/n2" not in d.state.deadlines, "no straggler is left"


def test_a_degraded_check_has_a_cost_too(d: Driver, task: int) -> None:
    known(d, task)
    check: dict[str, Any] = {"node": "n2", "incarnation": 1, "check": "gpu"}
    first = the(
        StragglerCostEstimated,
        d.tell(
            "n2/1",
            r.HealthChanged(**check, health="degraded", why="gpu0 thermal slowdown", devices=(0,)),
        ),
    )
    assert (first.tasks, first.cost_waf, first.why) == ((), 0.0, "gpu0 thermal slowdown")
    assert first.drain_waf < 0
    assert view(d.state)["tasks"][0]["state"] == "running", "no task is slower"
    assert kinds(paced(d, task, VICTIM, 1.3, iteration_s=1.4)) == []
    second = the(StragglerCostEstimated, d.due("price/n2"))
    assert second.why.startswith("gpu0 thermal slowdown; rank 2 of alpha")
    d.tell("n2/1", r.HealthChanged(**check, health="healthy", why=""))
    assert "n2" in d.state.degraded
    paced(d, task, VICTIM, 1.0)
    assert not d.state.degraded


def test_a_straggler_ends_with_its_process(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, VICTIM, 1.5)
    d.obey(d.exit(task, VICTIM))
    assert not d.state.degraded
    assert not task_of(d, task).slow
    d.progress(task)


def test_stale_or_absurd_step_times_change_nothing(d: Driver, task: int) -> None:
    known(d, task)
    for wrong in ({"attempt": 7}, {"generation": 9}, {"task": 99}, {"rank": 8}, {"own_s": -1.0}):
        records = paced(d, task, VICTIM, **({"own_s": 9.0} | wrong))
        assert kinds(records) == []
    assert not task_of(d, task).slow


# --- restarts of very slow ranks -----------------------------------------------------------------
def test_a_very_slow_rank_restarts_when_another_confirms_it(d: Driver, task: int) -> None:
    known(d, task)
    records = paced(d, task, VICTIM, 4.0, iteration_s=4.1)
    assert kinds(records) == ["StragglerCostEstimated"], "no other rank has confirmed it"
    late = paced(d, task, 1, 1.0, iteration_s=4.1)
    opened = the(decisions.IncidentOpened, late)
    assert (opened.severity, opened.status, opened.ranks) == ("SEV2", "task hang", (VICTIM,))
    assert opened.why == ("rank 2 on n2 works 4 x as long as is usual, iterations take 3.73 x")
    assert opened.evidence == (records[0].seq, late[0].seq)
    assert the(o.StopRank, late).rank == VICTIM
    d.obey(late)
    closed = the(decisions.IncidentClosed, d.heal(task))
    assert (closed.outcome, closed.iterations_lost) == ("healed", 0)
    assert not d.state.degraded


def test_progress_of_the_first_member_confirms_a_slow_rank(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, VICTIM, 4.0, iteration_s=4.1)
    assert kinds(d.progress(task, times_s=[1.1])) == [], "iteration times have not grown"
    late = d.progress(task, times_s=[4.1])
    assert the(decisions.IncidentOpened, late).ranks == (VICTIM,)
    d.obey(late)
    d.progress(task)


def test_a_slow_ranks_own_report_is_not_enough(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, 0, 4.0, iteration_s=4.1)
    assert kinds(d.progress(task, times_s=[4.1])) == [], "rank 0 itself reports the progress"


def test_a_rank_that_is_slow_after_restarts_is_left_out(d: Driver, task: int) -> None:
    for count in range(1, d.state.policy.restarts_max + 2):
        others = [rank for rank in sorted(task_of(d, task).ranks) if rank != VICTIM]
        for rank in others:
            paced(d, task, rank, iteration_s=4.1)
        if count == 1:
            paced(d, task, VICTIM, 1.0, iteration_s=1.1)
        late = paced(d, task, VICTIM, 4.0, normal_s=4.0, iteration_s=4.1)
        assert "StopRank" in kinds(late), count
        d.obey(late)
        d.progress(task, 30)
    assert the(decisions.ExperimentBegun, d.log).suspects[0].rank == VICTIM
    assert [list(node.slots_suspected) for node in d.state.nodes.values()] == [[], [0]]
    assert not any(node.slots_disabled for node in d.state.nodes.values())


def test_a_slot_at_usual_speed_in_between_is_not_disabled(d: Driver, task: int) -> None:
    for _ in range(d.state.policy.restarts_max + 2):
        known(d, task)
        paced(d, task, 1, iteration_s=4.1)
        d.obey(paced(d, task, VICTIM, 4.0, iteration_s=4.1))
        d.progress(task, 30)
    assert not only(decisions.IncidentEscalated, d.log)
    assert [node.slots_disabled for node in d.state.nodes.values()] == [[], []]


def test_while_paused_a_very_slow_rank_is_only_reported(d: Driver, task: int) -> None:
    known(d, task)
    d.tell("operator/freeze", r.HealingFrozen(reason="a test"))
    paced(d, task, 1, iteration_s=4.1)
    late = paced(d, task, VICTIM, 4.0, iteration_s=4.1)
    assert sorted(kinds(late)) == ["IncidentOpened", "OrderSuppressed", "StragglerCostEstimated"]
    paced(d, task, VICTIM, 1.0)
    d.progress(task)
    assert "StopRank" not in kinds(d.tell("operator/unfreeze", r.HealingResumed()))


# --- calibration and draining --------------------------------------------------------------------
def test_slow_iterations_are_not_used_for_calibration(d: Driver, task: int) -> None:
    known(d, task)
    d.progress(task, times_s=[1.1] * 8)
    size = len(task_of(d, task).members)
    num = len(task_of(d, task).times_s[size])
    d.progress(task, times_s=[1.6] * 10)
    paced(d, task, VICTIM, 1.5, iteration_s=1.6)
    assert task_of(d, task).times_s[size] == [1.1] * num, "times while it was slow are dropped"
    d.progress(task, times_s=[1.6] * 10)
    assert len(task_of(d, task).times_s[size]) == num
    paced(d, task, VICTIM, 1.0)
    d.progress(task, times_s=[1.1])
    assert len(task_of(d, task).times_s[size]) == num + 1


def test_draining_may_give_slots_to_another_task(d: Driver) -> None:
    """The plan without the node gives the remaining slots where they have the most WAF."""
    first = d.submit(train("alpha", 2.0, {2: 2e12, 4: 3e12}))
    d.join("n3")
    carry_out(d, d.log[-30:])
    second = d.submit(train("beta", 1.0, {2: 1e12}))
    carry_out(d, d.log[-30:])
    assert {len(task_of(d, x).members) for x in (first, second)} == {4, 2}
    d.progress(first, 4)
    d.progress(second, 4)
    known(d, first)
    rank = next(x for x, it in task_of(d, first).ranks.items() if it.slot.node == "n2")
    priced = the(StragglerCostEstimated, paced(d, first, rank, 2.0, iteration_s=2.1))
    slowdown = 2.1 / 1.1
    assert priced.cost_waf == pytest.approx(6e12 * (1 - 1 / slowdown))
    best = max(4e12 + 1e12, 6e12)
    assert priced.drain_waf == pytest.approx(best - (6e12 / slowdown + 1e12))


# --- ranks that are slower together --------------------------------------------------------------
@pytest.mark.parametrize("first", [0, 1])
def test_of_two_ranks_the_slower_one_is_the_straggler(d: Driver, first: int) -> None:
    task = d.running(spec(slots={"sizes": [2]}))
    known(d, task)
    paced(d, task, first, 1.5, iteration_s=1.6)
    assert list(task_of(d, task).slow) == [first]
    assert view(d.state)["tasks"][0]["slower_alike"] == 1.0
    paced(d, task, 1 - first, 1.45, iteration_s=1.6)
    shown = view(d.state)["tasks"][0]
    assert (shown["slow"], shown["state"], d.state.degraded) == ([], "running", {})
    assert shown["slower_alike"] == pytest.approx(1.6 / 1.1)
    paced(d, task, first, 1.0, iteration_s=1.6)
    assert list(task_of(d, task).slow) == [1 - first]
    paced(d, task, 1 - first, 1.0, iteration_s=1.1)
    shown = view(d.state)["tasks"][0]
    assert (shown["slow"], shown["slower_alike"], d.state.degraded) == ([], 1.0, {})


def test_a_common_slowdown_is_not_counted(d: Driver) -> None:
    """A busy machine: both ranks work longer, and rank 1 works 50 % longer than rank 0."""
    task = d.running(spec(slots={"sizes": [2]}))
    known(d, task)
    paced(d, task, 0, 2.0, iteration_s=3.1)
    paced(d, task, 1, 3.0, iteration_s=3.1)
    (slow,) = task_of(d, task).slow.values()
    assert (slow.ratio, slow.holds_up) == (pytest.approx(3.0), pytest.approx(3.1 / 2.1))


def test_ranks_that_are_slower_together_are_no_stragglers(d: Driver, task: int) -> None:
    known(d, task)
    for rank in (0, 1, 2):
        paced(d, task, rank, 1.4 + rank / 100, iteration_s=1.54)
    shown = view(d.state)["tasks"][0]
    assert (shown["slow"], shown["slowdown"], d.state.degraded) == ([], 1.0, {})
    assert shown["slower_alike"] == pytest.approx(1.4)
    paced(d, task, 0)
    paced(d, task, 1)
    shown = view(d.state)["tasks"][0]
    assert [x["rank"] for x in shown["slow"]] == [2]
    assert shown["slower_alike"] == 1.0


def test_very_slow_ranks_do_not_restart_if_all_are_slow(d: Driver) -> None:
    task = d.running(spec(slots={"sizes": [2]}))
    known(d, task)
    assert kinds(paced(d, task, 1, 4.0, iteration_s=4.1)) == ["StragglerCostEstimated"]
    assert kinds(paced(d, task, 0, 4.0, iteration_s=4.1)) == []
    assert kinds(d.progress(task, times_s=[4.1])) == []
    assert not d.state.incidents


# --- the rank that arrives last ------------------------------------------------------------------
def slow_of(d: Driver, task: int) -> dict[int, float]:
    return {number: round(slow.holds_up, 3) for number, slow in task_of(d, task).slow.items()}


def test_a_slow_rank_that_is_not_the_last_is_no_straggler(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, 0, 1.5, iteration_s=1.6)
    assert slow_of(d, task) == {0: pytest.approx(1.6 / 1.1, abs=1e-3)}
    assert kinds(paced(d, task, VICTIM, 1.2, iteration_s=1.6)) == []
    assert slow_of(d, task) == {0: pytest.approx(1.6 / 1.3, abs=1e-3)}, "ratio to the next rank"
    paced(d, task, 0, 1.0, iteration_s=1.3)
    assert list(slow_of(d, task)) == [VICTIM]


def test_two_ranks_that_arrive_last_are_both_stragglers(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, 0, 1.5, iteration_s=1.6)
    second = the(StragglerCostEstimated, paced(d, task, VICTIM, 1.45, iteration_s=1.6))
    assert sorted(slow_of(d, task)) == [0, VICTIM]
    assert second.why == (
        "rank 2 of alpha (n2/0) holds up 2 others with rank 0, 1.39 x, its own work 1.45 x"
    )
    waf = view(d.state)["plan"]["waf"]
    assert second.cost_waf == pytest.approx(waf * (1 - 1 / second.ratios[0]))
    assert second.drain_waf < 0, "the other straggler remains"


@pytest.mark.parametrize("own_s", [0.060, 0.075])
def test_a_busy_machine_has_no_stragglers(d: Driver, task: int, own_s: float) -> None:
    """Ranks wait for cores: own work grows by less than 30 %, but iterations by more than half."""
    for rank in range(4):
        assert kinds(paced(d, task, rank, 0.060, normal_s=0.060, iteration_s=0.140)) == []
    for rank in range(4):
        busy_s = own_s * (1 + 0.01 * rank)
        assert kinds(paced(d, task, rank, busy_s, normal_s=0.060, iteration_s=0.220)) in (
            [],
            ["StragglerCostEstimated"],
        )
    assert slow_of(d, task) == {}
    assert not d.state.degraded


def test_normal_iterations_end_a_straggler(d: Driver, task: int) -> None:
    known(d, task)
    paced(d, task, VICTIM, 1.5, iteration_s=1.6)
    assert slow_of(d, task)
    paced(d, task, VICTIM, 1.5, iteration_s=1.15)
    assert not slow_of(d, task)
    assert view(d.state)["tasks"][0]["state"] == "running"


def test_draining_is_advised_only_for_a_lasting_straggler() -> None:
    d, alpha, _ = two_tasks({1: 1.5e12, 2: 2.4e12})
    known(d, alpha)
    paced(d, alpha, VICTIM, 2.6, iteration_s=2.7)

    def degraded() -> dict[str, Any]:
        (node,) = [node for node in view(d.state)["nodes"] if node["degraded"]]
        found: dict[str, Any] = node["degraded"]
        return found

    assert degraded()["drain_share"] > d.state.policy.gain_min
    assert (degraded()["lasts"], degraded()["worth_draining"]) == (False, False)
    d.now_s += LASTS_S
    d.progress(alpha, times_s=[2.7])
    assert (degraded()["lasts"], degraded()["worth_draining"]) == (True, True)
