"""Capacity curves over failure rates and spares, and the break-evens between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from unicron.cli.simulate import capacity
from unicron.cli.simulate.capacity import BreakEven, break_evens
from unicron.events.errors import UsageError

SCENARIO: dict[str, Any] = {
    "apiVersion": "unicron/v1", "name": "small", "cluster": {"nodes": 6, "slots": 2},
    "tasks": [{"name": name, "weight": weight, "slots": {"min": 2, "max": 12, "multiple_of": 2},
               "throughput": {size: 1e12 * size ** 0.9 for size in range(2, 13)}}
              for name, weight in (("heavy", 2.0), ("light", 1.0))],
    "policies": {"unicron": {}, "spares": {}, "megatron": {}},
    "trace": {"drawn": {"mtbf_gpu_h": 400, "repair": {"constant_s": 36000}}},
    "horizon_s": 20 * 86400}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**SCENARIO, **changes}), encoding="utf-8")
    return path


def rows(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str, str], float]:
    return {(row["case"], row["system"], row["metric"]): row["value"]
            for row in json.loads(capsys.readouterr().out)}


def test_curves_break_even_where_they_cross() -> None:
    curves = {"a": [(1.0, 0.0), (4.0, 2.0)], "b": [(1.0, 1.0), (4.0, 1.0)],
              "c": [(1.0, 5.0), (4.0, 5.0)]}
    assert break_evens(curves, geometric=False) == [BreakEven(2.5, "b", "a")]
    assert break_evens(curves, geometric=True) == [BreakEven(pytest.approx(2.0), "b", "a")]


def test_more_faults_cost_more_where_tasks_wait_for_nodes(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capacity.mtbf(written(tmp_path), seeds=1, as_json=True)
    told = rows(capsys)
    for system in ("unicron", "megatron"):
        curve = [told[f"mtbf-{400 * ratio:.6g}", system, "share"] for ratio in capacity.MTBF_RATIOS]
        assert curve[0] < curve[3] < curve[-1] <= 1.0
    assert all(told[f"mtbf-{400 * ratio:.6g}", "unicron", "share"]
               > told[f"mtbf-{400 * ratio:.6g}", "megatron", "share"]
               for ratio in capacity.MTBF_RATIOS)


def test_spares_pay_up_to_a_number(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, trace={"drawn": {
        "mtbf_gpu_h": 300, "causes": {"ECC errors": 1}, "repair": {"constant_s": 72000}}})
    capacity.spares(path, most=5, seeds=1, as_json=True)
    values = rows(capsys)
    curve = [values[f"spares-{num}", "spares", "share"] for num in range(6)]
    assert max(curve) > curve[0], "some number of spares must raise the share"
    assert curve[5] < max(curve), "the fifth spare must not pay"
    assert len({values[f"spares-{num}", "unicron", "share"] for num in range(6)}) == 1


def test_the_screens_are_narrow(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, horizon_s=3 * 86400)
    capacity.mtbf(path, seeds=1, as_json=False)
    capacity.spares(path, most=1, seeds=1, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(("what", "changes", "said"), [
    ("mtbf", {"trace": "faults.csv"}, "trace: is a file"),
    ("spares", {"policies": {"unicron": {}}}, "policies: has none that keeps spares")])
def test_an_impossible_request_is_refused_in_one_line(
        tmp_path: Path, what: str, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "faults.csv").write_text("at_s,node,event,cause\n", encoding="utf-8")
    extra: dict[str, Any] = {"most": 2} if what == "spares" else {}
    with pytest.raises(UsageError, match=said):
        getattr(capacity, what)(written(tmp_path, **changes), seeds=1, as_json=True,
                                **extra)


def test_more_spares_than_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--most 6 leaves no node"):
        capacity.spares(written(tmp_path), most=6, seeds=1, as_json=True)
