"""Recorded logs: exact accounting of a log, and replays under other policies and weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from simulated.seeds import quiet, simulate
from simulated.world import World
from unicron.cli.simulate import compare as command
from unicron.cli.simulate import from_log
from unicron.control_plane.decide.replay import verify
from unicron.control_plane.incidents.severity import TABLE
from unicron.control_plane.simulation import policies as scenario
from unicron.control_plane.simulation import scenario as simulation_scenario
from unicron.control_plane.simulation.accounting import LOSSES, AttributedWaf, WafAccount
from unicron.control_plane.simulation.counterfactual import counterfactual
from unicron.control_plane.simulation.counterfactual.counterfactual import (
    Choice,
    Recording,
    RunResult,
)
from unicron.control_plane.simulation.counterfactual.recorded_earnings import LogAccounting
from unicron.control_plane.simulation.counterfactual.recorded_faults import (
    FaultReader,
    RecordedFaults,
)
from unicron.control_plane.simulation.run import Outcome, Run
from unicron.control_plane.simulation.task_progress import SavedState, TaskProgress
from unicron.control_plane.simulation.trace.external_event import (
    AnyEvent,
    ExternalEvent,
    NodeReport,
    OperatorRequest,
    causes_loss,
)
from unicron.events.errors import UsageError
from unicron.events.log import archive
from unicron.events.records import decisions as d
from unicron.events.records import reports as r
from unicron.events.records.envelope import Record
from unicron.events.records.statuses import (
    CUDA_ERRORS,
    LOST_CONNECTION,
    NCCL_TIMEOUT,
    OTHER_NETWORK,
    TASK_HANG,
)

DATA = Path(__file__).parents[2] / "data"
EXAMPLE = Path(__file__).parents[3] / "deploy" / "scenarios" / "two-weeks.yaml"
DAY_S = 86400.0


def simulated(
    happenings: list[ExternalEvent] | None = None, earnings: WafAccount | None = None
) -> tuple[Outcome, list[Record], float]:
    """The outcome of the example in the simulation, its log, and its horizon."""
    _, stages = command.load(EXAMPLE)
    stage, log = stages["unicron"], list[Record]()
    ground = (
        stage.run_input
        if happenings is None
        else stage.run_input._replace(events=happenings, horizon_s=3 * DAY_S)
    )
    outcome = Run(ground, stage.policy, log.append, earnings).play()
    return outcome, log, ground.horizon_s


def faults_and_tables(log: list[Record]) -> tuple[RecordedFaults, dict[int, d.ThroughputSet]]:
    befell, tables = FaultReader(), dict[int, d.ThroughputSet]()

    def watch(state: object, record: Record) -> None:
        befell.see(state, record)  # type: ignore[arg-type]
        if isinstance(record.body, d.ThroughputSet):
            tables[record.body.task] = record.body

    assert verify(log, watch=watch).ok
    return befell.all(), tables


def assert_same(found: Outcome, told: Outcome) -> None:
    """Earned and lost FLOP agree to 1e-9 of the whole, and downtimes to 1 ms."""
    assert found.transitions == told.transitions
    full = told.earnings.full_flop
    assert found.earnings.flop == pytest.approx(told.earnings.flop, rel=1e-9)
    for why in LOSSES:
        assert found.earnings.lost_flop[why] == pytest.approx(
            told.earnings.lost_flop[why], abs=1e-9 * full
        ), why
        assert found.earnings.down_s[why] == pytest.approx(told.earnings.down_s[why], abs=1e-3), why


class Within(LogAccounting):
    """An account of a horizon that is given, as a simulation has it."""

    def __init__(self, faults: RecordedFaults, tables: Mapping[int, Any], begin_s: float) -> None:
        super().__init__(faults, tables, WafAccount())
        self._given_s = begin_s

    def until(self, log: Sequence[Record], end_s: float) -> Outcome:
        for record in log:
            if record.at_s <= end_s:
                self.add(record)
        return self.end(end_s)

    def _advance(self, until_s: float) -> None:
        if until_s > self._given_s > self.began_s:
            super()._advance(self._given_s)
            self._begin(self._given_s)
        super()._advance(until_s)

    def _begin(self, at_s: float) -> None:
        if at_s == self._given_s:
            super()._begin(at_s)


def test_a_log_gives_the_same_account_as_its_simulation() -> None:
    told, log, horizon_s = simulated()
    read_faults, tables = faults_and_tables(log)
    found = Within(read_faults, tables, told.began_s).until(log, told.began_s + horizon_s)
    assert_same(found, told)


def test_wrong_node_clocks_change_no_account() -> None:
    """Fault times are exact although the nodes' clocks are one hour behind the leader's."""
    told, log, horizon_s = simulated()
    late = [
        replace(one, occurred_s=one.occurred_s - 3600.0) if one.source.startswith("n") else one
        for one in log
    ]
    read_faults, tables = faults_and_tables(late)
    found = Within(read_faults, tables, told.began_s).until(late, told.began_s + horizon_s)
    assert_same(found, told)


AWAY_S = st.floats(600, 2 * DAY_S)
FAULTS = st.lists(
    st.tuples(st.floats(1, 2.9 * DAY_S), st.integers(0, 15), st.sampled_from([*TABLE]), AWAY_S),
    max_size=6,
    unique_by=lambda one: one[1],
)
"""One fault per node: the log lacks faults that a dead node cannot report."""


@settings(deadline=None, max_examples=8)
@given(FAULTS)
@example(
    [(1.5, 6, CUDA_ERRORS, 600.0), (1.0, 0, LOST_CONNECTION, 600.0), (1.0, 7, OTHER_NETWORK, 600.0)]
)
def test_logs_of_random_faults_give_the_same_account(
    faults: list[tuple[float, int, str, float]],
) -> None:
    happenings = sorted(
        (
            one
            for at_s, node, cause, away_s in faults
            for one in (
                ExternalEvent(at_s, f"n{node}", "fault", cause),
                ExternalEvent(at_s + away_s, f"n{node}", "repaired"),
            )
        ),
        key=lambda one: one.at_s,
    )
    told, log, horizon_s = simulated(happenings, traced := AttributedWaf())
    read_faults, tables = faults_and_tables(log)
    found = Within(read_faults, tables, told.began_s).until(log, told.began_s + horizon_s)
    assert_same(found, told)
    lost = sum(told.earnings.lost_flop.values())
    assert sum(one.lost_flop for one in [*traced.losses, traced.unattributed]) == pytest.approx(
        lost, abs=1e-9 * told.earnings.full_flop
    )


# --- other choices ------------------------------------------------------------------------------
def plain() -> dict[str, Any]:
    """Two tasks that each want all slots of four nodes of two slots."""
    return {
        "apiVersion": "unicron/v1",
        "name": "by-hand",
        "cluster": {"nodes": 4, "slots": 2},
        "tasks": [
            {
                "name": name,
                "weight": weight,
                "slots": {"min": 1, "max": 8},
                "throughput": {size: 1e12 * size for size in range(1, 9)},
            }
            for name, weight in (("a", 2.0), ("b", 1.0))
        ],
        "policies": {name: {} for name in scenario.POLICIES},
        "trace": "trace.csv",
        "horizon_s": 10 * DAY_S,
    }


def recorded(happenings: list[AnyEvent], *, heals: bool = True) -> Recording:
    """A log of a simulated run, read again; without `heals` its tasks are commands."""
    found = simulation_scenario.parse(plain())
    chosen, log = simulation_scenario.policy(found, "unicron"), list[Record]()
    ground = simulation_scenario.run_input(found, replace(chosen, heals=heals))._replace(
        events=happenings, horizon_s=2 * DAY_S
    )
    Run(ground, chosen, log.append).play()
    return counterfactual.read(lambda: log, "a log")


def loss(at_s: float, back_s: float, node: str = "n1") -> list[AnyEvent]:
    return [
        ExternalEvent(at_s, node, "fault", LOST_CONNECTION),
        ExternalEvent(back_s, node, "joined"),
    ]


LAST = OperatorRequest(DAY_S, r.HealingFrozen(reason="the log shall end later"))


def test_a_replay_repeats_the_recorded_simulation() -> None:
    found = recorded([*loss(3600, 7200), LAST])
    again = counterfactual.play(found, Choice())
    assert again.earnings.flop == pytest.approx(found.played.earnings.flop, rel=1e-4)
    assert [one.has_lost for one in again.earnings.losses] == [True, False]
    for felt, then in zip(again.earnings.losses, found.played.earnings.losses, strict=True):
        assert felt.lost_flop == pytest.approx(then.lost_flop, rel=1e-2)
    fault = found.played.earnings.losses[0]
    assert fault.recovered_s is not None
    assert fault.recovered_s - fault.at_s == pytest.approx(3600 + 30, abs=30)
    assert fault.lost_flop == pytest.approx(2 * 2e12 * 3630, rel=0.02)


def test_a_policy_that_waits_for_its_node_loses_more() -> None:
    found = recorded([*loss(3600, 7200), LAST])
    ours = counterfactual.play(found, Choice())
    theirs = counterfactual.play(found, Choice(policy="megatron"))
    assert theirs.earnings.flop < ours.earnings.flop
    assert theirs.earnings.losses[0].lost_flop > ours.earnings.losses[0].lost_flop


def test_other_weights_give_the_slots_to_another_task() -> None:
    found = recorded([*loss(3600, 7200), LAST])
    other = counterfactual.play(found, Choice(weights={"b": 5.0}))
    assert found.played.work["b"] == 0
    assert other.work["a"] < other.work["b"]
    assert counterfactual.reweighted_flop(found.played, {"b": 5.0}) == found.played.earnings.flop
    assert counterfactual.reweighted_flop(other, {"b": 5.0}) == pytest.approx(other.earnings.flop)


def test_requests_and_later_tasks_are_replayed() -> None:
    found = simulation_scenario.parse(plain())
    late = simulation_scenario.run_input(found, simulation_scenario.policy(found, "unicron")).tasks[
        0
    ]
    happenings: list[AnyEvent] = [
        OperatorRequest(3600, r.TaskCancelRequested(task=0), "a"),
        OperatorRequest(7200, r.TaskSubmitted(spec=late)),
        LAST,
    ]
    log = recorded(happenings)
    assert list(log.names.values()) == ["a", "b", "a.2"]
    again = counterfactual.play(log, Choice())
    assert again.outcome.ignored == 0
    assert again.work["b"] == pytest.approx(log.played.work["b"], rel=0.02)
    assert again.work["a.2"] == pytest.approx(log.played.work["a.2"], rel=0.02) != 0
    # Under a policy that replans nothing after a fault, the new task gets the free slots.
    theirs = counterfactual.play(log, Choice(policy="megatron"))
    assert theirs.work["a.2"] > 0


def test_a_node_that_was_only_unreachable_is_not_lost() -> None:
    silent = r.NodeUnreachable(node="n1", incarnation=1, silence_s=5.0)
    found = recorded(
        [
            NodeReport(3600, "n1", silent),
            NodeReport(3700, "n1", r.NodeReachable(node="n1", incarnation=1)),
            LAST,
        ]
    )
    assert [type(one) for one in found.events] == [NodeReport, NodeReport, OperatorRequest]
    assert found.played.earnings.down_s["detection"] == 0
    assert found.played.earnings.lost_flop["waiting"] == 0
    again = counterfactual.play(found, Choice())
    assert again.earnings.flop == pytest.approx(found.played.earnings.flop, rel=1e-3)


def test_recovery_of_a_process_is_no_external_fault() -> None:
    found = recorded([ExternalEvent(3600, "n2", "fault", CUDA_ERRORS), *loss(7200, 9000), LAST])
    faults = [
        one for one in found.events if isinstance(one, ExternalEvent) and one.event == "fault"
    ]
    assert [one.cause for one in faults] == [CUDA_ERRORS, LOST_CONNECTION]
    assert faults[0].task == "a"
    commands = recorded([ExternalEvent(3600, "n2", "fault", CUDA_ERRORS), LAST], heals=False)
    assert [one.cause for one in commands.events if isinstance(one, ExternalEvent)] == [CUDA_ERRORS]
    again = counterfactual.play(commands, Choice())
    assert again.outcome.transitions == commands.played.outcome.transitions == 1


# --- the command ----------------------------------------------------------------------------------
def test_the_command_on_a_real_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DATA)  # a short relative path keeps the page narrow
    path = Path("demo.jsonl")
    from_log.from_log(
        path, settings=["weight.alpha=4"], policies=["unicron", "megatron"], as_json=True
    )
    output = json.loads(capsys.readouterr().out)
    assert output["decisions"]["differ"] > 0, "another decider version wrote the log"
    for one in (output["recorded"], *output["choices"]):
        lost = sum(one["lost_waf_flop"].values())
        assert sum(each["lost_waf_flop"] for each in one["incidents"]) == pytest.approx(
            lost, rel=1e-6
        )
    as_it_was, paper, doubled, megatron = output["recorded"], *output["choices"]
    assert paper["accumulated_waf_flop"] == pytest.approx(
        as_it_was["accumulated_waf_flop"], rel=0.03
    )
    # Its recorded weight was 2.
    assert doubled["accumulated_waf_flop"] == pytest.approx(2 * paper["accumulated_waf_flop"])
    assert doubled["difference_flop"] == pytest.approx(0, abs=1.0)
    assert megatron["difference_flop"] < 0
    assert [one["what"] for one in paper["incidents"]] == [
        "alpha rank 2, n2: exited abnormally",
        "alpha finished",
    ]
    from_log.from_log(path, settings=(), policies=["requeue"], as_json=False)
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 100
    assert "RECORDED" in page
    assert "23 of 30 decisions differ" in page  # ten of them are not in the log


def test_under_other_weights_policies_are_compared_with_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from_log.from_log(
        DATA / "demo.jsonl", settings=["weight.alpha = 3"], policies=["megatron"], as_json=True
    )
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert [one["choice"] for one in choices] == [
        "",
        "unicron weight.alpha=3",
        "megatron weight.alpha=3",
    ]
    from_log.from_log(
        DATA / "demo.jsonl", settings=["weight.alpha=3"], policies=["megatron"], as_json=False
    )
    page = capsys.readouterr().out
    assert "set        weight.alpha=3" in page
    assert "best       unicron weight.alpha=3: " in page
    assert "as recorded" not in page.split("best  ")[1]


@pytest.mark.parametrize(
    ("settings_", "policies", "said"),
    [
        (["weight.nobody=2"], [], "--set weight.nobody=2: the log has no task nobody"),
        (["weight.alpha=x"], [], "the weight is 'x'"),
        (["weight.alpha=0"], [], "the weight is '0'"),
        (["policy.gain=1"], [], "--set policy.gain: is not a field"),
        (["policy.gain_min=2"], [], "--set policy.gain_min: 2 is not below 1"),
        (["policy.floor=maybe"], [], "--set policy.floor: expected true or false"),
        (["speed=2"], [], "is not a setting"),
        (["weight.alpha"], [], "is not a setting"),
        ([], ["magic"], "--policy magic is no policy"),
    ],
)
def test_an_invalid_choice_is_refused(settings_: list[str], policies: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        from_log.from_log(DATA / "demo.jsonl", settings=settings_, policies=policies, as_json=False)
    assert said in str(refused.value)
    assert refused.value.hint


def test_an_unusable_log_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(UsageError) as error:
            from_log.from_log(path, settings=(), policies=(), as_json=False)
        assert error.value.hint
        return str(error.value)

    whole = (DATA / "demo.jsonl").read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(whole[:50]))
    assert "truncated after 49 records" in refused(cut)
    records = list(archive.read(DATA / "demo.jsonl"))
    empty = tmp_path / "empty.jsonl"
    archive.write(empty, records[:2], cluster="c", code="1")
    assert "no task was submitted" in refused(empty)
    idle = tmp_path / "idle.jsonl"
    first = next(one.seq for one in records if one.kind == "TaskSubmitted")
    archive.write(idle, records[: first + 1], cluster="c", code="1")
    assert refused(idle).startswith(str(idle))
    assert "is not an exported log" in refused(DATA.parent / "golden" / "heart-4.jsonl")
    assert "nowhere" in refused(tmp_path / "nowhere")


def test_lost_work_costs_what_was_earned_for_it() -> None:
    """The weight rises from 0.5 to 1 while the task trains; then all is lost, and again half."""
    job = TaskProgress(
        d.ThroughputSet(task=1, origin="declared", sizes=(1,), rates_flops=(10.0,)),
        10.0,
        SavedState(0.0),
        SavedState(0.0),
    )
    job.weigh(0.5)
    job.set_rate(0.0, 10.0)
    job.settle(100.0)
    job.weigh(1.0)
    job.settle(110.0)
    assert job.take_back(job.restore(110.0), 1.0) == 1000 * 0.5 + 100 * 1.0
    job.settle(120.0)
    job.weigh(4.0)
    job.settle(130.0)
    job.checkpoint.done_flop = 50.0
    assert job.take_back(job.restore(130.0), 4.0) == 50 * 1.0 + 100 * 4.0
    assert job.weights == [(0.0, 1.0), (50.0, 4.0)]


def test_a_request_while_a_task_is_down_is_not_credited_with_its_end() -> None:
    """An idle node is undrained while the only task is down; the task recovers soon after."""
    traced = AttributedWaf()
    traced.set_waf(0.0, 1, 10.0, 4, "waiting")
    traced.begin(0.0)
    traced.record_event(100.0)
    traced.set_waf(100.0, 1, 0.0, 0, "detection")
    traced.record_event(140.0)
    traced.set_waf(160.0, 1, 10.0, 4, "sub-healthy")
    traced.end(1000.0)
    fault, request = traced.losses
    assert (fault.lost_flop, fault.recovered_s) == (600.0, 160.0)
    assert (request.lost_flop, request.has_lost) == (0.0, False)
    assert traced.unattributed.lost_flop == 0


# --- logs of the simulated cluster, with hangs, stopped processes and network faults -------------
SEEDS = {27: (1, 0), 11: (1, 2), 31: (2, 0)}
"""Seed -> the number of hangs and of collective timeouts in its log."""


@pytest.fixture(scope="module", params=SEEDS)
def life(request: pytest.FixtureRequest) -> tuple[int, list[Record], Recording]:
    quiet()
    records = simulate(lambda: World(request.param))[1]
    structlog.reset_defaults()
    return request.param, records, counterfactual.read(lambda: iter(records), "a seed's log")


def whole(one: RunResult) -> float:
    """Check that earned FLOP and losses are finite and complete; the FLOP at full strength."""
    earnings = one.earnings
    assert min(earnings.flop_of.values()) >= -1e-6 * earnings.flop, (
        "no more is lost than was earned"
    )
    assert all(math.isfinite(flop) for flop in earnings.lost_flop.values())
    felt = [*earnings.losses, earnings.unattributed]
    assert math.fsum(one.lost_flop for one in felt) == pytest.approx(
        math.fsum(earnings.lost_flop.values()), rel=1e-6, abs=1e-6 * earnings.flop
    )
    return earnings.full_flop


def test_every_recorded_decision_is_repeated(life: tuple[int, list[Record], Recording]) -> None:
    _, records, found = life
    assert not found.verdict.differ
    assert sum(found.verdict.recomputed.values()) == sum(
        record.source == "heart" for record in records
    )


def test_each_fault_is_read_once(life: tuple[int, list[Record], Recording]) -> None:
    seed, records, found = life
    told = Counter(
        one.cause for one in found.events if isinstance(one, ExternalEvent) and one.event == "fault"
    )
    assert (told[TASK_HANG], told[NCCL_TIMEOUT]) == SEEDS[seed]
    opened = Counter(
        record.body.status
        for record in records
        if isinstance(record.body, d.IncidentOpened | d.IncidentEscalated)
        and record.body.status == TASK_HANG
    )
    assert told[TASK_HANG] >= opened[TASK_HANG] > 0


@pytest.mark.parametrize(
    "choice",
    [Choice(), Choice(policy="shrink"), Choice(policy="megatron")],
    ids=["as recorded", "shrink", "megatron"],
)
def test_each_log_is_replayed_to_its_end(
    life: tuple[int, list[Record], Recording], choice: Choice
) -> None:
    _, _, found = life
    paper = counterfactual.play(found, Choice())
    played = counterfactual.play(found, choice)
    assert len(played.earnings.losses) == sum(map(causes_loss, found.events))
    assert whole(played) > 0
    if choice.policy == "megatron":
        assert played.earnings.flop < paper.earnings.flop
