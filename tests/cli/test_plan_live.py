"""`unicron plan` on a cluster: its pages, usage errors, and applied dry runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from decider import Driver, spec
from dry_run_jobs import job
from plan_pages import INPUT, Plain, plain_of
from snapshots import check
from two_tasks import gives, plain, seen, train, two_tasks, waits
from unicron.cli.cluster.client import Client
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import plan as plan_live
from unicron.cli.commands.plan import PlanOptions
from unicron.cli.commands.request_outcome import outcome_of, plan_lines, view_before
from unicron.cli.screens import plan as plan_screen
from unicron.control_plane.api import dry_run
from unicron.control_plane.api.dry_run import Change
from unicron.control_plane.decide.replay import replay as replayed
from unicron.control_plane.planner import hot_spare
from unicron.control_plane.planner.problem_of_state import planning_snapshot
from unicron.control_plane.state.cluster import encode_state
from unicron.events.errors import UsageError
from unicron.events.records import reports as r
from unicron.events.records.decisions import Binding
from unicron.events.spec.policy import Policy

pytestmark = pytest.mark.nodes(3)

BETA = {1: 1.5e12, 2: 2.4e12}


class Told(Client):
    """A control plane that answers from a driver's state and applies requests to it."""

    def __init__(self, driver: Driver) -> None:
        super().__init__("http://localhost:1", "")
        self.driver, self.posted = driver, list[tuple[str, Plain]]()

    def get(self, path: str, limit_s: float = 10.0, **query: object) -> Plain:
        if path == "/v1/plan":
            last = int(str(query["at"] or self.driver.state.seq))
            at = replayed([one for one in self.driver.log if one.seq <= last])
            return plain_of(dry_run.explain_present_plan(encode_state(at)))
        return seen(self.driver)

    def post(self, path: str, body: Any, limit_s: float = 10.0, **headers: str) -> Plain:
        self.posted.append((path, {**body, **headers}))
        data = encode_state(self.driver.state)
        if path == "/v1/plan/dry-run":
            change = msgspec.convert(body, Change)
            return {**plain_of(dry_run.run_dry(data, change)), "took_s": 0.0012}
        seq = self.driver.state.seq + 1
        change = msgspec.convert(body["change"], Change)
        for number, one in enumerate(dry_run.operator_requests(data, change, body["reason"]), 1):
            self.driver.seqs["operator/apply"] = number - 1
            self.driver.tell("operator/apply", one)
        return {"seq": seq}

    def records(self, after: int, *, follow: bool) -> Iterator[Plain]:
        return (record for record in plain(self.driver) if record["seq"] > after)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(told: Told, *, as_json: bool = False, **asked: Any) -> list[str]:
        monkeypatch.setattr(plan_live, "connect", lambda state, url: told)
        monkeypatch.setattr(plan_live, "option_for", lambda state: "")
        plan_live.plan(StateDir(tmp_path), None, PlanOptions(**asked), as_json=as_json)
        return capsys.readouterr().out.splitlines()

    return run


# --- pages --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("without", {"without": ("n3",)}),
        ("with", {"slots": 2}),
        ("weight", {"weights": ("beta=4",)}),
        ("several", {"without": ("n1", "n2"), "weights": ("alpha=9",)}),
        ("no-change", {"weights": ("beta=1",)}),
    ],
)
def test_a_dry_run_is_shown_as_a_difference(name: str, asked: Plain, ask: Any) -> None:
    d, _, _ = two_tasks(BETA)
    before = len(d.log)
    lines = ask(Told(d), **asked)
    assert len(d.log) == before, "a dry run must not write records"
    check(f"plan-{name}", lines, columns_max=100)


def test_a_job_that_would_be_submitted(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _, _ = two_tasks(BETA)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(json.dumps(job("gamma", 3.0, 2, [2, 2])))
    check("plan-submit", ask(Told(d), submit=Path("job.yaml")), columns_max=100)


@pytest.mark.parametrize(("name", "make"), [("present", gives), ("present-waits", waits)])
def test_the_present_plan(name: str, make: Any) -> None:
    d = make()[0]
    found = plain_of(dry_run.explain_present_plan(encode_state(d.state)))
    check(
        name.replace("present", "plan"),
        plan_screen.present(found, now_s=found["plan_s"] + 90),
        columns_max=100,
    )


def test_a_hot_spare_is_one_line_of_the_plan_and_of_dry_runs(d: Driver, ask: Any) -> None:
    d.tell(
        "leader/abc",
        r.PolicySet(policy=Policy(hot_spare=True, mtbf_gpu_s=6 * 120.0, mtbf_faults=1e6)),
    )
    d.running(train("alpha", 1.0, {2: 1e12}, slots={"sizes": [2]}))
    d.running(train("beta", 1.0, {2: 1e12, 4: 1.01e12}, slots={"sizes": [2, 4]}))
    found = plain_of(dry_run.explain_present_plan(encode_state(d.state)))
    check("plan-spare", plan_screen.present(found, now_s=found["plan_s"] + 90), columns_max=100)
    for asked, words in (
        ({"without": ("n3",)}, "2 slots not kept: would cost "),
        ({"slots": 2}, "2 slots idle anyway"),
    ):
        assert [line for line in ask(Told(d), **asked) if line.startswith(f"hot spare  {words}")]
    found["plan"]["spare"] = {
        "num_slots": 2,
        "verdict": "not kept",
        "cost_flop": 3e6,
        "saves_flop": -2e6,
    }
    assert any(
        line.endswith("cost 3 MFLOP until the next fault, lose 2 MFLOP more then")
        for line in plan_screen.present(found, now_s=0.0)
    )
    found["plan"]["spare"] = {
        "num_slots": 2,
        "verdict": "not priced",
        "cost_flop": 0.0,
        "saves_flop": 0.0,
    }
    assert "hot spare  2 slots not priced: too many tasks and sizes to do so in time" in (
        plan_screen.present(found, now_s=0.0)
    )
    found["plan"]["spare"] = None
    assert not [
        line for line in plan_screen.present(found, now_s=0.0) if line.startswith("hot spare")
    ]


def test_without_tasks_there_is_no_plan() -> None:
    found = plain_of(dry_run.explain_present_plan(encode_state(Driver().state)))
    assert plan_screen.present(found, now_s=0.0)[1].startswith("no task, no plan: ")
    tried = plain_of(dry_run.run_dry(encode_state(Driver().state), Change(without=("n1",))))
    assert plan_screen.dry_run(tried, "--without n1")[1].startswith("no task, no plan")


def test_a_dry_run_without_change_shows_no_payback(ask: Any) -> None:
    d, _, beta = two_tasks(BETA)
    assert any(line.startswith("paid back") for line in ask(Told(d), without=("n3",)))
    page = "\n".join(ask(Told(d), weights=(f"beta={d.state.tasks[beta].weight}",)))
    assert "no plan would follow" in page
    assert "paid back" not in page


def test_slots_can_bind_although_another_node_earns_nothing() -> None:
    found = plain_of(dry_run.explain_present_plan(encode_state(gives()[0].state)))
    assert found["plan"]["bound"] == "slots"
    found["more_waf"] = 0.0
    assert (
        "bound by   4 slots (2 more would earn nothing because of sizes, gain_min or "
        "costs of changes)" in plan_screen.present(found, now_s=0.0)
    )


def test_a_job_that_is_not_submitted_binds_by_its_name(ask: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("{apiVersion: unicron/v1, name: small, slots: {max: 1}, command: [a]}")
    page = ask(Told(Driver()), submit=path)
    assert [line for line in page if line.startswith("bound by   the max of small (")], page


def test_the_page_says_that_healing_is_paused(ask: Any) -> None:
    d, _, _ = two_tasks(BETA)
    d.tell("operator/f", r.HealingFrozen(reason="a test"))
    held = [line for line in ask(Told(d), without=("n3",)) if line.startswith("paused")]
    assert held == ["paused     frozen: a test; nothing is ordered. To act: unicron unfreeze"]


@pytest.mark.parametrize("bound", [one for one in get_args(Binding) if one])
def test_every_binding_constraint_is_named(bound: str) -> None:
    plan = {"num_slots": 8, "bound": bound, "bound_tasks": [1]}
    assert plan_screen.bound_by(plan, {1: "alpha"})


def test_many_tasks_and_slots_fit_on_a_page() -> None:
    rows = [
        {
            "task": i,
            "name": f"task-{i}",
            "tier": "train",
            "weight": 1.0,
            "slots_before": 64,
            "slots": 56,
            "waf_before": 2e15,
            "waf": 1e15,
            "pause_s": 3.0,
            "origin": "measured",
            "seats_before": [
                {"slot": {"node": f"n{n}", "index": k}} for n in range(20) for k in range(8)
            ],
            "seats": [],
            "iteration": 9,
            "waits": "",
            "layout_before": "TP8xPP8xDP1",
            "layout": "TP8xPP7xDP1",
            "copies_bytes": 0,
            "copies_max": 0,
            "no_copies": "",
        }
        for i in range(1, 101)
    ]
    plan = {
        "num_slots": 5600,
        "waf": 1e17,
        "objective_flop": 3e23,
        "alternatives": [],
        "running_s": 1e6,
        "bound": "max",
        "bound_tasks": list(range(1, 50)),
        "why": "so",
    }
    found = {
        "plan": plan,
        "tasks": rows,
        "input": 7,
        "num_slots_before": 6400,
        "took_s": 0.1,
        "planned": True,
        "num_plans": 1,
        "transition_flop": 1e18,
        "more_slots": 8,
        "more_waf": 0.0,
        "held": "",
        "degraded": [],
    }
    lines = plan_screen.dry_run(found, "--without n1")
    assert max(map(len, lines)) <= 100
    assert len(lines) < 100
    assert any("80 more" in line for line in lines)
    assert any("the max of task-1, task-2, task-3 and 46 more" in line for line in lines)


def test_json_output_equals_the_control_planes_answer(ask: Any) -> None:
    d, _, beta = two_tasks(BETA)
    told = Told(d)
    (line,) = ask(told, as_json=True, without=("n3",))
    assert json.loads(line) == told.post(*told.posted[0])
    (line,) = ask(told, as_json=True)
    assert json.loads(line)["tried"] is False
    assert told.posted[0] == ("/v1/plan/dry-run", {"slots": 0, "without": ["n3"], "weights": {}})
    ask(told, weights=(f"task-{beta}=2.5",))
    assert told.posted[-1][1]["weights"] == {str(beta): 2.5}


def test_names_can_be_separated_by_commas(ask: Any) -> None:
    control_plane = Told(two_tasks(BETA)[0])
    ask(control_plane, without=("n1,n2",))
    assert control_plane.posted[0][1]["without"] == ["n1", "n2"]


def explanation(page: list[str]) -> list[str]:
    """The lines of a page that give the reason, the alternatives and the binding constraint."""
    return [
        " ".join(line.split()) for line in page if re.match(r"(why|bound by|horizon|[12]  )", line)
    ]


def test_a_plan_has_one_explanation_live_in_a_dry_run_and_offline(ask: Any) -> None:
    d, _, _ = two_tasks(BETA)
    tried = ask(Told(d), without=("n3",))
    d.tell("operator/drain", r.NodeDrained(node="n3", reason=""))
    at = d.log[next(i for i, one in enumerate(d.log) if isinstance(one.body, r.NodeDrained))]
    before = replayed([record for record in d.log if record.seq <= at.seq])
    snapshot = planning_snapshot(before).problem
    live = ask(Told(d))
    choice = hot_spare.with_hot_spare(snapshot)
    recorded = d.state.plan
    assert recorded is not None
    assert choice.allocations == recorded.allocations
    page = plan_screen.offline({**plain_of(dry_run.of_problem(snapshot, 2)), "took_s": 0.1}, "-")
    told = [explanation(lines) for lines in (live, tried, page)]
    assert len(told[0]) == 5, live
    assert told[0] == told[1] == told[2]


def test_a_past_plan_is_explained_from_the_log(ask: Any) -> None:
    d, _, beta = waits()
    found = plain_of(dry_run.explain_present_plan(encode_state(d.state)))
    seq, page = len(d.log), ask(Told(d))
    later = Driver()
    later.log, later.state = list(d.log), replayed(d.log)
    later.now_s, later.seqs, later.epoch = d.now_s, dict(d.seqs), d.epoch
    later.tell("operator/x", r.TaskCancelRequested(task=beta))
    assert not any(
        one["waits"]
        for one in plain_of(dry_run.explain_present_plan(encode_state(later.state)))["tasks"]
    )
    assert plain_of(dry_run.explain_present_plan(encode_state(replayed(later.log[:seq])))) == found
    assert ask(Told(later), seq=seq)[1:] == page[1:], "only the age of the plan may differ"
    with pytest.raises(UsageError, match="--seq shows a past plan"):
        ask(Told(later), seq=seq, without=("n1",))


# --- applied ------------------------------------------------------------------------------------
def test_an_applied_change_is_printed_as_one(ask: Any) -> None:
    d, _, _ = two_tasks(BETA)
    control_plane = Told(d)
    found = plain_of(dry_run.run_dry(encode_state(d.state), Change(without=("n1", "n2"))))
    lines = ask(control_plane, without=("n1", "n2"), apply=True, check=INPUT, reason="a rack")
    assert control_plane.posted == [
        (
            "/v1/plan/apply",
            {
                "change": {"slots": 0, "without": ["n1", "n2"], "weights": {}},
                "reason": "a rack",
                "If-Match": f'"{found["input"]}"',
            },
        )
    ]
    assert lines[0].startswith("applied  --without n1 --without n2 (seq ")
    given = {one["name"]: (one["slots_before"], one["slots"]) for one in found["tasks"]}
    for name, (before, after) in given.items():
        assert (
            any(line.startswith(name) and f"{before} -> {after} slot" in line for line in lines)
            or before == after
        )
    assert lines[-1] == "look     unicron status -w"
    assert [d.state.nodes[name].drained for name in ("n1", "n2", "n3")] == [True, True, False]


def test_a_change_applied_while_paused_orders_nothing(ask: Any) -> None:
    d, _, _ = two_tasks(BETA)
    d.tell("operator/f", r.HealingFrozen(reason="a test"))
    lines = ask(Told(d), weights=("alpha=9",), apply=True, check=INPUT)
    assert lines[-2:] == [
        "paused   frozen: a test; nothing is ordered. To act: unicron unfreeze",
        "look     unicron status -w",
    ]


def test_a_new_task_does_not_start_again() -> None:
    d = Driver()
    before, seq = seen(d), len(d.log) + 1
    command = {"train": None, "command": ["sleep", "1"]}
    d.obey(d.tell("operator/once", r.TaskSubmitted(spec=spec(name="once", **command))))
    found = outcome_of(Told(d), seq)  # type: ignore[arg-type]
    assert seen(d)["tasks"][0]["ranks"]
    told = plan_lines(found, view_before(before, seen(d)))
    assert told[-1].startswith("once ")
    assert ": n1/0 " in told[-1]
    assert "starts again" not in told[-1]


def test_only_the_outcome_of_the_own_request_is_printed() -> None:
    d, alpha, _ = two_tasks(BETA)
    view, seq = seen(d), len(d.log) + 1
    d.tell("operator/w", r.TaskWeightSet(task=alpha, weight=9.0))
    d.tell("operator/x", r.TaskWeightSet(task=alpha, weight=1.0))
    found = outcome_of(Told(d), seq)  # type: ignore[arg-type]
    assert found.plan is not None
    assert found.plan["trigger"] == "task alpha has weight 9"
    assert plan_lines(found, view)[0].startswith("plan     6 slots, WAF ")


# --- usage errors -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "error", "hint"),
    [
        ({"without": ("n9",)}, "no node 'n9'", "there is n1, n2, n3"),
        ({"weights": ("gamma=2",)}, "no task 'gamma'", "there is alpha, beta"),
        ({"weights": ("alpha",)}, "--weight 'alpha' is not TASK=W", "for example --weight alpha=2"),
        ({"weights": ("=2",)}, "--weight '=2' is not TASK=W", "for example --weight alpha=2"),
        (
            {"weights": ("alpha=0",)},
            "0 is not a weight: a weight is above 0",
            "for example --weight alpha=2",
        ),
        (
            {"weights": ("alpha=nan",)},
            "nan is not a weight: a weight is above 0",
            "for example --weight alpha=2",
        ),
        (
            {"weights": ("alpha=1_0",)},
            "'1_0' is not a number: a weight is above 0",
            "for example --weight alpha=2",
        ),
        (
            {"reason": "why", "without": ("n1",)},
            "--reason goes with --apply: a dry run leaves nothing in the log",
            "leave --reason out",
        ),
        (
            {"weights": ("alpha=much",)},
            "'much' is not a number: a weight is above 0",
            "for example --weight alpha=2",
        ),
        (
            {"weights": ("alpha=2", "alpha=3")},
            "task alpha is weighed twice",
            "give each task one weight",
        ),
        (
            {"submit": Path("/nowhere/job.yaml")},
            "/nowhere/job.yaml: no such file or directory",
            "name a job file; examples are in deploy/examples/",
        ),
        (
            {"apply": True, "check": 3},
            "--apply has nothing to apply",
            "unicron plan --without NODE first",
        ),
        (
            {"apply": True, "without": ("n1",)},
            "--apply needs --check INPUT",
            "unicron plan --without n1 shows what would be, and the input to check",
        ),
        (
            {"apply": True, "check": 3, "slots": 2},
            "--with cannot be applied: it names no machine",
            "to add slots, run unicron agent on a new machine",
        ),
        (
            {"check": 3, "without": ("n1",)},
            "--check goes with --apply",
            "unicron plan --without n1 --apply --check 3",
        ),
        (
            {"check": 3},
            "--check goes with --apply",
            "unicron plan --without NODE --apply --check INPUT",
        ),
    ],
)
def test_usage_errors_have_one_line_and_a_hint(
    asked: Plain, error: str, hint: str, ask: Any
) -> None:
    control_plane = Told(two_tasks(BETA)[0])
    with pytest.raises(UsageError) as refused:
        ask(control_plane, **asked)
    assert (str(refused.value), refused.value.hint) == (error, hint)
    assert not control_plane.posted


@pytest.mark.parametrize("face", ["commands.plan", "files.job_file"])
def test_a_screen_loads_no_planner(face: str) -> None:
    """Importing numpy takes 0.1 s, which commands that only show decisions must not spend."""
    subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            (f"import sys, unicron.cli.{face}; assert 'numpy' not in sys.modules"),
        ],
        check=True,
        timeout=60,
    )
