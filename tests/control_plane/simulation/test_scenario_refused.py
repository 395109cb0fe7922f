"""Invalid scenarios are refused in one line with the field, the reason and a hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner
from unicron.cli.app import app
from unicron.cli.files import job_file
from unicron.cli.simulate import compare
from unicron.events.errors import SpecError, UsageError
from unicron.events.spec.policy import BOUNDS

DRAWN = {"mtbf_gpu_h": 2400}


def plain(**changes: Any) -> dict[str, Any]:
    return {
        "apiVersion": "unicron/v1",
        "name": "plain",
        "cluster": {"nodes": 4, "slots": 2},
        "tasks": [{"name": "one", "slots": {"min": 1, "max": 8}, "throughput": {1: 1e12, 8: 7e12}}],
        "policies": {"unicron": {}},
        "trace": {"drawn": DRAWN},
        "horizon_s": 1e4,
    } | changes


def task(**changes: Any) -> dict[str, Any]:
    return {"tasks": [{"name": "x", "slots": {"max": 8}, "throughput": {1: 1e12}} | changes]}


def drawn(**changes: Any) -> dict[str, Any]:
    return {"trace": {"drawn": {**DRAWN, **changes}}}


def check(path: Path, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        compare.load(path)
    line = str(refused.value)
    assert said in line
    assert "\n" not in line
    assert line.isprintable()
    assert len(line) < 400
    assert refused.value.hint


@pytest.mark.parametrize(
    "without", ["apiVersion", "name", "cluster", "tasks", "policies", "trace", "horizon_s"]
)
def test_a_missing_field_is_refused(without: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        yaml.safe_dump({name: value for name, value in plain().items() if name != without})
    )
    check(path, f"s.yaml: {without}: is missing")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"apiVersion": "v2"}, "apiVersion: is 'v2'"),
        ({"horizon": 5}, "horizon: is not a field"),
        ({"\x1b[1m": 5}, ".yaml: '\\x1b[1m': is not a field"),
        ({"k" * 5000: 5}, "kkk: is not a field"),
        ({"trace": "t" * 5000}, "trace: names no file"),
        ({"name": ""}, "name: '' is not a name"),
        ({"name": "a\x1b[31m"}, "name: 'a\\x1b[31m' is not a name"),
        ({"name": "a\nb"}, "name: 'a\\nb' is not a name"),
        ({"cluster": {}}, "cluster.nodes: is missing"),
        ({"cluster": {"nodes": 0}}, "cluster.nodes: must be at least 1"),
        ({"cluster": {"nodes": 10**18}}, "cluster.nodes: must be at least 1 and at most 100000"),
        ({"cluster": {"nodes": -1}}, "cluster.nodes: must be at least 1"),
        (
            {"cluster": {"nodes": 1.5}},
            "cluster.nodes: expected a whole number or a list, got a frac",
        ),
        ({"cluster": {"nodes": []}}, "cluster.nodes: must be at least 1"),
        ({"cluster": {"nodes": ["a", "a"]}}, "cluster.nodes: names a node twice"),
        ({"cluster": {"nodes": ["a", "b\x07"]}}, "cluster.nodes[1]: 'b\\x07' names no node"),
        ({"cluster": {"nodes": 2, "slots": 0}}, "cluster.slots: must be at least 1"),
        ({"cluster": {"nodes": 2, "gpus": 8}}, "cluster.gpus: is not a field"),
        ({"horizon_s": 0}, "horizon_s: is 0"),
        ({"horizon_s": float("nan")}, "horizon_s: is nan"),
        ({"horizon_s": float("inf")}, "horizon_s: is inf"),
        ({"horizon_s": 1e300}, "horizon_s: is 1e+300"),
        ({"horizon_s": "14 d"}, "horizon_s: expected a number, got text"),
        ({"iteration_s": -1}, "iteration_s: is -1"),
        ({"iteration_s": 1e9}, "iteration_s: is 1e+09"),
        ({"tasks": []}, "tasks: is empty"),
        ({"tasks": {}}, "tasks: expected a list"),
        ({"tasks": [{"name": "x"}]}, "tasks[0]: has to have one of throughput and model"),
        (
            {"tasks": [*task()["tasks"], *task()["tasks"]]},
            "tasks[1].name: 'x' is another task's too",
        ),
        (task(name="X"), "tasks[0]: name: 'X' is not a name"),
        (task(weight=-1), "tasks[0]: weight: "),
        (task(weight=float("nan")), "tasks[0]: weight: "),
        (task(throughput={1: 1e300}), "tasks[0]: throughput"),
        (task(throughput={1: float("nan")}), "tasks[0]: throughput"),
        (task(throughput={0: 1e12}), "tasks[0]: "),
        (task(slots={"min": 9, "max": 8}), "tasks[0]: slots"),
        ({"policies": {}}, "policies: is empty"),
        ({"policies": []}, "policies: expected a mapping, got a list"),
        ({"policies": None}, "policies: is missing"),
        ({"policies": ["magic"]}, "policies: 'magic' is no policy"),
        ({"policies": [3]}, "policies: expected a mapping, got a list"),
        ({"policies": {"magic": {}}}, "policies: 'magic' is no policy"),
        ({"policies": {"\x1b[1m": {}}}, "policies: '\\x1b[1m' is no policy"),
        ({"policies": {"unicron": 3}}, "policies.unicron: is no mapping"),
        ({"policies": {"unicron": None}}, "policies.unicron: is no mapping"),
        ({"policies": {"unicron": {"start": 1}}}, "policies.unicron: start: is not a field"),
        ({"policies": {"unicron": {"start_s": -1}}}, "policies.unicron: start_s: must be a number"),
        (
            {"policies": {"unicron": {"start_s": 1e300}}},
            "policies.unicron: start_s: must be a number",
        ),
        ({"policies": {"unicron": {"speed": 1e9}}}, "policies.unicron: speed: must be a number"),
        (
            {"policies": {"unicron": {"quiesce_s": float("nan")}}},
            "policies.unicron: quiesce_s: must",
        ),
        (
            {"policies": {"unicron": {"detect_s": {"gremlins": 1}}}},
            "unicron: 'gremlins' is no cause",
        ),
        ({"policies": {"unicron": {"detect_s": {"task hang": -1}}}}, "task hang: must be a number"),
        ({"limits": {"silence": 1}}, "limits: silence: is not a field"),
        ({"limits": {"silence_s_max": -1}}, "limits: silence_s_max: must be between"),
        ({"limits": {"alpha": 3}}, "limits: alpha: 3 is not one of"),
        ({"limits": {"observe": True}}, "limits: observe: is not a field of a policy"),
        ({"limits": 3}, "limits: expected a mapping"),
        ({"trace": 5}, "trace: expected text or a mapping, got a whole number"),
        ({"trace": ""}, "trace: names no file"),
        ({"trace": "a\0b"}, "trace: names no file"),
        ({"trace": "nowhere.csv"}, "nowhere.csv: no such file"),
        ({"trace": "."}, "is a directory"),
        ({"trace": {"drawing": {}}}, "trace.drawing: is not a field"),
        ({"trace": {"drawn": {}}}, "trace.drawn: has 0 of its rates, not one"),
        (drawn(mtbf_node_h=5), "trace.drawn: has 2 of its rates, not one"),
        (drawn(count=5), "trace.drawn.count: is not a field"),
        (drawn(mtbf_gpu_h=0), "trace.drawn.mtbf_gpu_h: is 0"),
        (drawn(mtbf_gpu_h=float("nan")), "trace.drawn.mtbf_gpu_h: is nan"),
        (drawn(mtbf_gpu_h=1e-12), "trace.drawn: draws about"),
        (drawn(seed=-1), "trace.drawn.seed: is -1"),
        (drawn(causes="nasa"), "trace.drawn.causes: 'nasa' is no study"),
        (drawn(causes={"gremlins": 1}), "trace.drawn.causes: 'gremlins' is no cause"),
        (drawn(causes={"task hang": 0}), "trace.drawn.causes: has shares that are none"),
        (drawn(causes={"task hang": float("nan")}), "trace.drawn.causes: has shares that are none"),
        (drawn(repair="soon"), "trace.drawn.repair: 'soon' is no study"),
        (drawn(repair={}), "trace.drawn.repair: has 0 of its keys"),
        (drawn(repair={"constant_s": 1, "parts_s": [[1, 0, 1]]}), "repair: has 2 of its keys"),
        (drawn(repair={"constant_s": -1}), "trace.drawn.repair.constant_s: is -1"),
        (
            drawn(repair={"parts_s": [[1, 5, 1]]}),
            "trace.drawn.repair.parts_s: ends before it begins",
        ),
        (drawn(repair={"lognormal_s": {"median": 5, "mean": 1}}), "repair.lognormal_s: has a mean"),
        (drawn(repair={"parts_s": [[0.5, 0, 1]]}), "repair.parts_s: its shares add up to 0.5"),
    ],
)
def test_an_invalid_field_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(plain(**changes)))
    check(path, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "s.yaml: a scenario is a mapping"),
        ("- 1", "s.yaml: a scenario is a mapping"),
        ("a: [", "s.yaml: line 1"),
        ("name: a\nname: b", "duplicate key 'name'"),
        ("horizon_s: 99999999999999999999999", "too large a number"),
        ("\0", "s.yaml: "),
    ],
)
def test_a_file_without_a_scenario_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    check(path, said)


def test_a_trace_must_fit_the_cluster(tmp_path: Path) -> None:
    path, trace = tmp_path / "s.yaml", tmp_path / "t.csv"
    path.write_text(yaml.safe_dump(plain(trace="t.csv")))
    trace.write_text("at_s,node,event,cause\n5,n9,left,\n")
    check(path, "t.csv: at 5 s, left of n9, which is no node at that time")
    path.write_text(yaml.safe_dump(plain(trace="t.csv", cluster={"slots": 2})))
    check(path, "s.yaml: cluster.nodes: is missing")


def test_limits_have_the_same_bounds_as_a_policy_file(tmp_path: Path) -> None:
    path, policy = tmp_path / "s.yaml", tmp_path / "p.yaml"
    for name, (_, most) in BOUNDS.items():
        for value in (-1, most * 10):
            limits = {name: {"red": value} if name == "quotas" else value}
            path.write_text(yaml.safe_dump(plain(limits=limits)))
            policy.write_text(yaml.safe_dump(limits))
            with pytest.raises(UsageError) as theirs:
                job_file.load_policy(policy)
            check(path, str(theirs.value).removeprefix(f"{policy}: "))


def test_the_command_raises_the_error(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(plain(horizon_s=-1)))
    for more in ([], ["-o", "json"]):
        done = CliRunner().invoke(app, ["simulate", "--scenario", str(path), *more])
        assert isinstance(done.exception, SpecError | UsageError)


def test_a_task_larger_than_the_cluster_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        yaml.safe_dump(
            plain(
                tasks=[
                    *plain()["tasks"],
                    {"name": "huge", "slots": {"min": 9, "max": 16}, "throughput": {9: 1e13}},
                ]
            )
        )
    )
    compare.simulate(path, log=None, as_json=False)
    assert "huge needs 9 slots" in capsys.readouterr().out
