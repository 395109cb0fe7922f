"""`unicron plan --offline`: the optimal plan of a plan file, as JSON and as a page."""

import io
import itertools
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_process import refused, unicron
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unicron.cli.commands import plan_offline
from unicron.cli.files.job_file import read_yaml
from unicron.cli.screens import plan as plan_screen
from unicron.control_plane.api import dry_run

GOOD = """\
gpus: 120                 # n'
mtbf_gpu_s: 7.2e7
tasks:
  - name: a
    weight: 1.0
    current: 32
    faulted: true
    transition_s: 60
    flops: {8: 1.0e15, 16: 1.9e15, 24: 2.7e15, 32: 3.4e15}
  - {name: b, weight: 2, current: 96, transition_s: 60, flops: {64: 6e15, 88: 8e15, 96: 8.6e15}}
  - {name: c, flops: {0: 0, 8: 1e14, 16: 2e14}}
"""


def page_of(tried: dry_run.DryRunResult) -> list[str]:
    return plan_screen.offline({**msgspec.to_builtins(tried), "took_s": 0.001}, "plan.yaml")


def planned(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "plan.yaml").write_text(text)
    return unicron("plan", "--offline", "plan.yaml", *options, folder=folder)


def answer(folder: Path, text: str) -> dict[str, Any]:
    result = planned(folder, text, "-o", "json")
    assert result.returncode == 0, result.stderr
    answered: dict[str, Any] = json.loads(result.stdout)
    return answered


def test_the_chosen_plan_as_json(tmp_path: Path) -> None:
    answered = answer(tmp_path, GOOD)
    assert answered["allocation"] == {"a": 24, "b": 96, "c": 0}
    assert answered["running_s"] == 7.2e7 / 120
    earned = (2.7e15 + 2 * 8.6e15) * answered["running_s"]
    assert math.isclose(answered["objective"], earned - 3.4e15 * 60, rel_tol=1e-15)
    assert answered["tasks"]["a"]["transition"] == 3.4e15 * 60
    assert answered["tasks"]["b"]["transition"] == 0.0
    assert answered["reason"] == "a 32 -> 24: the runner-up is worth 2.5 % less"
    assert answered["binding"] == {
        "gpus": True,
        "more_gpus": 8,
        "more_earn_waf": 7e14,
        "at_largest": ["b"],
    }
    best = answered["alternatives"][0]
    assert best["instead"] == {"a": 32, "b": 88}
    assert best["loses"] == answered["objective"] - best["objective"]
    assert all(other["loses"] >= best["loses"] for other in answered["alternatives"])


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    rate = st.floats(0, 1e16, allow_nan=False) | st.sampled_from([1e15, 2e15])
    tasks: list[dict[str, Any]] = []
    for i in range(draw(st.integers(0, 4))):
        flops = draw(st.dictionaries(st.integers(1, 9), rate, max_size=4))
        tasks.append(
            {
                "name": f"t{i}",
                "weight": draw(st.sampled_from([0.5, 1.0, 3.0])),
                "current": draw(st.integers(0, 9)),
                "faulted": draw(st.booleans()),
                "transition_s": draw(st.sampled_from([0.0, 60.0, 1e5])),
                "flops": flops,
            }
        )
    return {
        "gpus": draw(st.integers(0, 12)),
        "mtbf_gpu_s": draw(st.sampled_from([100.0, 7.2e7])),
        "tasks": tasks,
    }


def objective_of(file: dict[str, Any], slots: tuple[int, ...]) -> float:
    """The paper's objective G of an allocation, computed from the file."""
    running_s = file["mtbf_gpu_s"] / max(file["gpus"], 1)
    terms: list[float] = []
    for task, x in zip(file["tasks"], slots, strict=True):
        terms.append(task["weight"] * task["flops"].get(x, 0.0) * running_s)
        if task["faulted"] or x != task["current"]:
            now = task["weight"] * task["flops"].get(task["current"], 0.0)
            terms.append(-now * task["transition_s"])
    return math.fsum(terms)


@given(files())
@example(
    {
        "gpus": 2,
        "mtbf_gpu_s": 100.0,
        "tasks": [
            {
                "name": "t0",
                "weight": 1.0,
                "current": 0,
                "faulted": False,
                "transition_s": 0.0,
                "flops": {1: 1.0, 2: 0.0, 3: 2.88e15},
            }
        ],
    }
)
@settings(max_examples=300, deadline=None)
def test_the_chosen_plan_is_optimal(file: dict[str, Any]) -> None:
    asked, _ = plan_offline.parse(file)
    tried = dry_run.of_problem(asked, 1)
    answered = plan_offline.plain(asked, tried)
    slots = tuple(answered["allocation"].values())
    every = [
        objective_of(file, plan)
        for plan in itertools.product(*([0, *task["flops"]] for task in file["tasks"]))
        if sum(plan) <= file["gpus"]
    ]
    assert sum(slots) <= file["gpus"]
    assert math.isclose(
        answered["objective"], objective_of(file, slots), rel_tol=1e-12, abs_tol=1e-3
    )
    scale = max(map(abs, every))
    assert answered["objective"] >= max(every) - 1e-12 * scale
    for other in answered["alternatives"]:
        assert other["objective"] <= answered["objective"] + 1e-12 * scale
        assert other["instead"]
    assert max(map(len, page_of(tried))) <= 100


def test_one_slot_is_singular() -> None:
    asked, _ = plan_offline.parse(
        {
            "gpus": 1,
            "mtbf_gpu_s": 100.0,
            "tasks": [
                {
                    "name": "a",
                    "weight": 1.0,
                    "current": 0,
                    "faulted": False,
                    "transition_s": 0.0,
                    "flops": {1: 1.0},
                }
            ],
        }
    )
    assert page_of(dry_run.of_problem(asked, 1))[0].endswith("  1 slot, exact, 1.0 ms")


def test_the_screen_of_a_plan(tmp_path: Path) -> None:
    result = planned(tmp_path, GOOD)
    head, *lines = result.stdout.splitlines()
    assert head.startswith("unicron plan --offline plan.yaml  ")
    assert "120 slots, exact, " in head
    assert (
        lines
        == """\
why        a 32 -> 24: the runner-up is worth 2.5 % less
worth      -700 TFLOP/s of WAF (-3.4 %); the changes cost 204 PFLOP

TASK  SLOTS       WAF                           PAUSE  LOST
a     32 -> 24    3.4 PFLOP/s -> 2.7 PFLOP/s    60 s   -
b     96          17.2 PFLOP/s                  -      unchanged
c     0           0 FLOP/s                      -      waits
all   128 -> 120  20.6 PFLOP/s -> 19.9 PFLOP/s

   PLAN                    WAF
1  this plan      19.9 PFLOP/s  chosen
2  the next best  19.4 PFLOP/s  loses 301 EFLOP (2.5 %)

bound by   120 slots (8 more: +700 TFLOP/s)
horizon    6.9 d, the expected time until the next fault; the plan is worth 11.9 ZFLOP in it
""".splitlines()
    )


@pytest.mark.parametrize("text", ["[" * 30000, '{"a":' * 40000, "- " * 40000])
def test_deep_nesting_is_refused(tmp_path: Path, text: str) -> None:
    """libyaml alone would overflow the stack."""
    result = planned(tmp_path, text)
    assert result.returncode == 2
    assert result.stderr.startswith("error: plan.yaml: nested too deeply\n")


def test_an_empty_file_is_called_so(tmp_path: Path) -> None:
    assert planned(tmp_path, "# nothing\n").stderr.startswith("error: plan.yaml: is empty\n")


def test_a_current_number_without_throughput_is_noted(tmp_path: Path) -> None:
    result = planned(tmp_path, GOOD.replace("current: 32", "current: 40"))
    assert (
        "note       a has no throughput on its current 40: it counts as earning nothing before"
        in (result.stdout.splitlines())
    )


def test_a_yaml_error_points_to_the_guide(tmp_path: Path) -> None:
    result = planned(tmp_path, "gpus: [")
    assert result.returncode == 2
    assert "hint: see docs/guides/plan-offline.md" in result.stderr


def test_standard_input_is_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(GOOD.encode())))
    result = unicron("plan", "--offline", "-", "-o", "json", folder=tmp_path)
    assert json.loads(result.stdout)["allocation"] == {"a": 24, "b": 96, "c": 0}


def test_json_is_yaml_too(tmp_path: Path) -> None:
    text = json.dumps(read_yaml(GOOD))
    assert '"32"' in text
    assert answer(tmp_path, text)["allocation"] == {"a": 24, "b": 96, "c": 0}


def test_a_size_beyond_the_gpus_is_not_a_candidate(tmp_path: Path) -> None:
    """After an event, the sizes and the present number of a task may exceed what is left."""
    answered = answer(tmp_path, GOOD.replace("gpus: 120", "gpus: 20"))
    assert answered["allocation"] == {"a": 16, "b": 0, "c": 0}
    assert answered["tasks"]["b"]["current"] == 96


def test_the_types_of_the_answer(tmp_path: Path) -> None:
    """Checks outside of this tree read these keys."""
    answered = answer(tmp_path, GOOD)
    types = {key: type(value) for key, value in answered.items()}
    assert types == {
        "allocation": dict,
        "objective": float,
        "reason": str,
        "waf": float,
        "waf_before": float,
        "transition": float,
        "gpus": int,
        "used": int,
        "running_s": float,
        "tasks": dict,
        "binding": dict,
        "alternatives": list,
    }
    assert all(type(x) is int for x in answered["allocation"].values())
    assert {key: type(value) for key, value in answered["tasks"]["a"].items()} == {
        "current": int,
        "gpus": int,
        "faulted": bool,
        "waf_before": float,
        "waf": float,
        "earned": float,
        "transition": float,
    }
    assert {key: type(value) for key, value in answered["alternatives"][0].items()} == {
        "what": str,
        "objective": float,
        "loses": float,
        "waf": float,
        "instead": dict,
    }


def test_without_tasks_there_is_a_plan_too(tmp_path: Path) -> None:
    answered = answer(tmp_path, "{gpus: 0, mtbf_gpu_s: 1.0, tasks: []}")
    assert (answered["allocation"], answered["objective"], answered["alternatives"]) == (
        {},
        0.0,
        [],
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gpus: 120", "gpus: -1", "gpus: must be between 0 and"),
        ("gpus: 120", "gpus: 12.5", "gpus: expected a whole number"),
        ("gpus: 120", "gpu: 120", "gpu: is not a field"),
        ("gpus: 120   ", "gpus: 99999999999999999999", "too large a number"),
        ("mtbf_gpu_s: 7.2e7\n", "", "mtbf_gpu_s: is missing"),
        ("mtbf_gpu_s: 7.2e7", "mtbf_gpu_s: 0", "mtbf_gpu_s: must be between"),
        ("mtbf_gpu_s: 7.2e7", "mtbf_gpu_s: 5e-324", "mtbf_gpu_s: must be between"),
        ("mtbf_gpu_s: 7.2e7", "mtbf_gpu_s: .nan", "mtbf_gpu_s: must be between"),
        (
            "mtbf_gpu_s: 7.2e7",
            "mtbf_gpu_s: 7.2e7\ngpus_per_node: 0",
            "gpus_per_node: must be between",
        ),
        ("name: b", "name: a", "tasks[1].name: 'a' is that of tasks[0] too"),
        ("name: a", "name: 7", "tasks[0].name: expected text, got a whole number"),
        ("name: a", "name: ''", "tasks[0].name: must be 1 to 100 printable characters"),
        ("weight: 2", "weight: 0", "tasks[1].weight: must be between"),
        ("weight: 2", "wieght: 2", "tasks[1].wieght: is not a field"),
        ("current: 96", "current: -8", "tasks[1].current: must be between"),
        ("current: 96, transition_s: 60", "current: 96", "tasks[1].transition_s: is missing"),
        ("transition_s: 60\n", "transition_s: -1\n", "tasks[0].transition_s: must be between 0"),
        ("faulted: true", "faulted: yes", "tasks[0].faulted: expected true or false, got text"),
        ("8: 1.0e15, 16", "8: .inf, 16", "tasks[0].flops[8]: must be between 0 and 1e+24 FLOP/s"),
        ("8: 1.0e15, 16", "8: .nan, 16", "tasks[0].flops[8]: must be between 0 and 1e+24 FLOP/s"),
        ("8: 1.0e15, 16", "8: -1.0, 16", "tasks[0].flops[8]: must be between 0 and 1e+24 FLOP/s"),
        ("8: 1.0e15, 16", "8: NaN, 16", "tasks[0].flops[...]: expected a number, got text"),
        ("weight: 2", "weight: .nan", "tasks[1].weight: must be between"),
        ("transition_s: 60\n", "transition_s: .nan\n", "tasks[0].transition_s: must be between 0"),
        ("8: 1.0e15, 16", "-8: 1.0, 16", "tasks[0].flops[-8]: must be between 1 and"),
        ("0: 0", "0: 1", "tasks[2].flops[0]: must be between 1 and"),
        ("8: 1.0e15, 16", "8.5: 1.0, 16", "tasks[0].flops"),
        ("8: 1.0e15, 16", "8: 1.0, 8: 2.0, 16", "line 9: duplicate key 8"),
        ("8: 1.0e15, 16", "8: 1.0, '8': 2.0, 16", "tasks[0].flops: names a size twice"),
        ("tasks:\n", "tasks: &t\n", ""),
        ("weight: 2", "weight: *t", "an alias (*) is not supported"),
        ("tasks:\n", "tasks: [\n", "line"),
    ],
)
def test_an_invalid_plan_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in GOOD
    result = planned(tmp_path, GOOD.replace(old, new))
    if words:
        refused(result, words)
        assert result.stderr.startswith("error: plan.yaml: ")
    else:
        assert result.returncode == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        Path.mkdir,
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("#" * 101),
        lambda path: path.write_text("- 1\n"),
        Path.touch,
    ],
    ids=["absent", "folder", "binary", "huge", "list", "empty"],
)
def test_an_unreadable_plan_is_refused(
    tmp_path: Path, make: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_offline, "FILE_BYTES_MAX", 100)
    make(tmp_path / "plan.yaml")
    refused(unicron("plan", "--offline", "plan.yaml", folder=tmp_path), "plan.yaml")
