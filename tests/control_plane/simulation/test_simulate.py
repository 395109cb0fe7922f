"""The simulator: earned and lost FLOP compared with exact values; its logs pass verification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scenarios import DAY_S, EXAMPLE, HAPPENINGS, NODE, PROCESS, lost, plain, two_tasks
from unicron.cli.simulate import compare as command
from unicron.control_plane.decide.replay import verify
from unicron.control_plane.simulation import policies, scenario
from unicron.control_plane.simulation.run import Outcome, Run
from unicron.control_plane.simulation.trace.external_event import ExternalEvent
from unicron.events.errors import UsageError
from unicron.events.records.decisions import PlanChosen
from unicron.events.records.envelope import Record

HANG = "task hang"


def play(
    policy: str,
    happenings: list[ExternalEvent],
    data: dict[str, Any] | None = None,
    log: list[Record] | None = None,
) -> Outcome:
    given = scenario.parse(data or plain())
    chosen = scenario.policy(given, policy)
    return Run(
        scenario.run_input(given, chosen, happenings),
        chosen,
        log.append if log is not None else None,
    ).play()


def full_waf(policy: str) -> float:
    """WAF without a fault; a spare node contributes nothing."""
    costs = policies.POLICIES[policy].costs
    return (8e12 - 2e12 * costs.num_spares) * costs.speed


def test_a_run_without_faults_earns_everything() -> None:
    for policy in policies.POLICIES:
        found = play(policy, [])
        assert found.earnings.flop == pytest.approx(full_waf(policy) * 10 * DAY_S, rel=1e-12)
        assert found.earnings.share == 1.0


@pytest.mark.parametrize("num", [1, 3])
def test_waiting_for_a_node_costs_its_repair_and_a_restart(num: int) -> None:
    """One task, separate faults, constant repair time: the closed form of a restart."""
    costs = policies.POLICIES["megatron"].costs
    away_s, apart_s = 4 * 3600.0, 2 * DAY_S
    happenings = [
        one
        for number in range(num)
        for at_s in [apart_s * (number + 1) + 700]
        for one in lost("n1", at_s, at_s + away_s)
    ]
    data = plain(limits={"quarantine_faults": 100})
    found = play("megatron", happenings, data).earnings
    stood_s = num * (away_s + costs.start_s)
    assert sum(found.down_s.values()) == pytest.approx(stood_s)
    again_flop = found.lost_flop["recomputed"]
    assert 0 < again_flop < num * 8e12 * costs.checkpoint_s
    assert found.flop == pytest.approx(8e12 * (10 * DAY_S - stood_s) - again_flop, rel=1e-12)


def test_work_since_the_checkpoint_is_repeated() -> None:
    """The second fault comes half a checkpoint interval after the last checkpoint."""
    costs = policies.POLICIES["megatron"].costs
    away_s, half_s = 3600.0, costs.checkpoint_s / 2
    second_s = DAY_S + away_s + costs.start_s + 20 * costs.checkpoint_s + half_s
    first = lost("n1", DAY_S, DAY_S + away_s)
    data = plain(limits={"quarantine_faults": 100})
    one, two = (
        play("megatron", happenings, data).earnings.lost_flop["recomputed"]
        for happenings in (first, first + lost("n1", second_s, second_s + away_s))
    )
    assert two - one == pytest.approx(8e12 * half_s)


def test_continuing_without_a_node_loses_only_that_node() -> None:
    away_s = 4 * 3600.0
    found = play("unicron", lost("n1", DAY_S, DAY_S + away_s)).earnings
    assert (found.lost_flop["waiting"], found.lost_flop["recomputed"]) == (0, 0)
    # A quarter of the cluster while the node is away, and until its new ranks are members.
    costs = policies.POLICIES["unicron"].costs
    assert found.lost_flop["sub-healthy"] == pytest.approx(
        2e12 * (away_s + costs.start_s), rel=0.01
    )
    assert sum(found.down_s.values()) < 10


def test_a_spare_takes_over_and_a_shrinking_job_continues() -> None:
    away_s, costs = 4 * 3600.0, policies.POLICIES["spares"].costs
    found = play("spares", lost("n1", DAY_S, DAY_S + away_s)).earnings
    assert found.lost_flop["waiting"] == 0
    # A process elsewhere fails with the node, so the node counts as lost by two sources.
    assert sum(found.down_s.values()) == pytest.approx(
        costs.detection_s(NODE, 10.0) + costs.start_s, abs=1.0
    )
    shrunk = play("shrink", lost("n1", DAY_S, DAY_S + away_s)).earnings
    assert sum(shrunk.down_s.values()) < 15
    assert shrunk.lost_flop["sub-healthy"] == pytest.approx(2e12 * away_s, rel=0.01)


@pytest.mark.parametrize("policy", ["requeue", "kubernetes", "megatron"])
def test_without_free_nodes_the_job_waits_for_its_node(policy: str) -> None:
    away_s = 4 * 3600
    found = play(policy, lost("n1", DAY_S, DAY_S + away_s)).earnings
    assert sum(found.down_s.values()) == pytest.approx(
        away_s + policies.POLICIES[policy].costs.start_s, abs=1.0
    )


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_a_dead_process_is_restarted(policy: str) -> None:
    costs = policies.POLICIES[policy].costs
    found = play(policy, [ExternalEvent(DAY_S, "n2", "fault", PROCESS)]).earnings
    told_s = costs.detection_s(PROCESS, 10.0)
    assert found.down_s["detection"] == pytest.approx(told_s)
    if not policies.POLICIES[policy].heals:
        assert sum(found.down_s.values()) == pytest.approx(told_s + costs.start_s)


@settings(deadline=None, max_examples=40)
@given(HAPPENINGS, st.sampled_from([*policies.POLICIES]))
@example(
    [
        ExternalEvent(0.0, "n0", "left"),
        ExternalEvent(0.0, "n0", "repaired"),
        ExternalEvent(0.0, "n0", "fault", NODE),
    ],
    "requeue",
)
def test_earned_and_lost_flop_add_up(happenings: list[ExternalEvent], policy: str) -> None:
    log: list[Record] = []
    found = play(policy, sorted(happenings, key=lambda one: one.at_s), log=log)
    full = full_waf(policy) * 10 * DAY_S
    assert found.earnings.full_flop == pytest.approx(full, rel=1e-9)
    assert -1e-9 * full <= found.earnings.flop <= (1 + 1e-9) * 8e12 * 10 * DAY_S
    assert [record.seq for record in log] == list(range(1, len(log) + 1))
    if policy == "unicron":
        assert verify(log).ok


@settings(deadline=None, max_examples=20)
@given(HAPPENINGS, st.booleans())
@example([*lost("n1", DAY_S, 2 * DAY_S), *lost("n2", 3 * DAY_S, 5 * DAY_S)], False)
def test_a_run_without_a_log_earns_the_same_to_the_bit(
    happenings: list[ExternalEvent], spare: bool
) -> None:
    given = two_tasks(happenings, 2.0, limits={"hot_spare": spare})
    log: list[Record] = []
    logged, bare = (Run(*given, keep).play() for keep in (log.append, None))
    assert vars(bare.earnings) == vars(logged.earnings)
    assert bare._replace(earnings=logged.earnings) == logged
    plans = [record.body for record in log if isinstance(record.body, PlanChosen)]
    assert all(plan.why and plan.binding and plan.input for plan in plans)
    assert any(plan.alternatives and plan.ideal_waf for plan in plans)


def test_the_command_prints_each_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE.parent)  # a short relative path keeps the page narrow
    command.simulate(Path(EXAMPLE.name), log=tmp_path / "a.log", as_json=True)
    output = json.loads(capsys.readouterr().out)["policies"]
    assert [*output] == ["unicron", "shrink", "spares", "requeue", "megatron"]
    assert output["unicron"]["accumulated_waf_flop"] > output["megatron"]["accumulated_waf_flop"]
    assert output["unicron"]["waf_over_time"][0][0] == 0
    assert output["unicron"]["ignored"] == 0
    by_task = output["unicron"]["waf_flop_by_task"]
    assert [*by_task] == ["large", "middle", "small"]
    assert sum(by_task.values()) == pytest.approx(output["unicron"]["accumulated_waf_flop"])
    command.simulate(Path(EXAMPLE.name), log=None, as_json=False)
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 100
    assert "..." not in page, "a value of the page is cut off"
    assert "unicron simulate --scenario" in page
    with pytest.raises(UsageError, match="exists"):
        command.simulate(Path(EXAMPLE.name), log=tmp_path / "a.log", as_json=False)


def test_a_process_that_ended_before_its_stop_order_delays_nothing() -> None:
    """The agent notices the exit when it has to stop the process, before the 1800 s are over."""
    second = ExternalEvent(DAY_S + 1000, "n3", "fault", PROCESS)
    data = plain(policies={"megatron": {"detect_s": {PROCESS: 1800.0}}})
    found = play("megatron", [ExternalEvent(DAY_S, "n2", "fault", PROCESS), second], data).earnings
    assert sum(found.down_s.values()) == pytest.approx(
        1800.0 + policies.POLICIES["megatron"].costs.start_s
    )


def test_the_length_of_a_transition_excludes_training() -> None:
    given = scenario.parse(plain())
    chosen = scenario.policy(given, "unicron")
    run = Run(scenario.run_input(given, chosen, lost("n1", DAY_S, 2 * DAY_S)), chosen)
    run.play()
    (task,) = run.engine.state.tasks.values()
    stood_s = [one for lengths in task.downtime_s.values() for one in lengths]
    assert stood_s
    assert max(stood_s) < 60


def test_only_policies_with_quarantine_use_it() -> None:
    happenings = [
        one for number in range(1, 5) for one in lost("n1", number * DAY_S, number * DAY_S + 600)
    ]
    for policy, has in (("unicron", True), ("megatron", False)):
        log: list[Record] = []
        play(policy, happenings, log=log)
        assert any(one.kind == "NodeQuarantined" for one in log) == has


def test_memory_checkpoints_are_lost_with_their_nodes() -> None:
    costs, at_s = policies.POLICIES["unicron"].costs, DAY_S + 1000
    every = [one for name in ("n0", "n1", "n2", "n3") for one in lost(name, at_s, at_s + 600)]
    killed = [ExternalEvent(at_s, "n0", "fault", PROCESS, "one", rank) for rank in range(8)]
    data = plain(limits={"quarantine_faults": 100})
    gone = play("unicron", sorted(every, key=lambda one: one.at_s), data).earnings
    held = play("unicron", killed, data).earnings
    # The first checkpoint was written at the start of the horizon.
    assert gone.lost_flop["recomputed"] == pytest.approx(
        8e12 * (at_s % costs.checkpoint_s), abs=8e12 * 10
    )
    assert held.lost_flop["recomputed"] == pytest.approx(
        8e12 * (at_s % costs.copy_s), abs=8e12 * 10
    )


def test_a_task_without_slots_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    heavy, light = (
        {
            "name": name,
            "weight": weight,
            "slots": {"min": 1, "max": 8},
            "throughput": {size: 1e12 * size for size in range(1, 9)},
        }
        for name, weight in (("heavy", 2.0), ("light", 1.0))
    )
    (tmp_path / "trace.csv").write_text("at_s,node,event,cause\n", encoding="utf-8")
    path = tmp_path / "two.yaml"
    path.write_text(json.dumps(plain(tasks=[light, heavy], policies={"unicron": {}})))
    command.simulate(path, log=None, as_json=False)
    printed = capsys.readouterr().out
    assert "waits      under unicron, light gets no slots even without a fault" in printed
    assert "heavy gets" not in printed


def test_a_trace_after_the_horizon_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("at_s,node,event,cause\n1767225600,n1,left,\n")
    (tmp_path / "late.yaml").write_text(json.dumps(plain()))
    with pytest.raises(UsageError, match="all of it is after horizon_s"):
        command.load(tmp_path / "late.yaml")


def test_faults_after_the_horizon_are_counted(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "trace.csv").write_text(
        "at_s,node,event,cause\n5,n1,fault,lost connection\n864000,n2,left,\n"
        "864001,n3,fault,lost connection\n864002,n1,repaired,\n"
    )
    path = tmp_path / "long.yaml"
    path.write_text(json.dumps(plain(policies={"unicron": {}})))
    command.simulate(path, log=None, as_json=False)
    assert "late       1 fault of the trace, after horizon_s, 864000: not simulated" in (
        capsys.readouterr().out
    )
    (tmp_path / "trace.csv").write_text("at_s,node,event,cause\n864000,n1,left,\n")
    command.simulate(path, log=None, as_json=False)
    assert "\nlate" not in capsys.readouterr().out
