"""The support table: what it promises is shown by tests, and what it refuses is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from unicron.cli.commands import doctor
from unicron.events.errors import SpecError
from unicron.events.spec.job import parse
from unicron.events.spec.support import ROWS

ROOT = Path(__file__).resolve().parents[2]
KEYS: dict[str, dict[str, Any]] = {
    "sequence parallel": {"parallel": {"sequence": [2]}},
    "context parallel": {"parallel": {"context": [2]}},
    "expert parallel": {"parallel": {"expert": [2]}},
    "experts": {"model": {"num_experts": 2}},
    "overlapped reduction, other layouts": {"overlap": True, "parallel": {"tensor": [2]}},
    "overlapped parameter gather": {"overlap_param_gather": True},
    "several instances of the distributed optimizer": {"parallel": {"optimizer": "partial"}},
    "FSDP": {"parallel": {"optimizer": "fsdp"}},
    "Transformer Engine": {"model": {"transformer_impl": "transformer_engine"}},
    "FP8 or FP4": {"precision": "fp8"},
    "CUDA graphs": {"cuda_graphs": True},
    "torch.compile": {"compile": True},
    "registered communication buffers": {"nccl_ub": True},
    "activation recomputation": {"model": {"recompute": "full"}},
    "offloading to the CPU": {"offload": True},
    "gradients summed in 16 bits": {"grad_reduce_in_fp32": False},
    "an optimizer other than Adam": {"optimizer": {"name": "sgd"}},
}
"""For each row that a training task refuses: how a job file would have to ask for it."""


def _spec(train: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "unicron/v1", "name": "t", "slots": {"min": 2, "max": 2},
            "train": {"iterations": 1, "output": "/tmp/t"} | train}


def test_each_row_says_why_and_what_is_shown_is_a_test() -> None:
    assert len({row.what for row in ROWS}) == len(ROWS)
    for answer in (answer for row in ROWS for answer in (row.train, row.loop)):
        assert answer.why
        assert not answer.shown or (ROOT / answer.shown).is_file()
        assert not answer.shown or answer.grade != "refused"
        assert answer.in_words.startswith(answer.grade)


def test_what_a_training_task_refuses_is_refused() -> None:
    assert list(KEYS) == [row.what for row in ROWS if row.train.grade == "refused"]
    parse(_spec({}))
    for what, train in KEYS.items():
        with pytest.raises(SpecError):
            pytest.fail(f"{what}: {parse(_spec(train))} is taken")


def test_doctor_prints_the_table_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.print_support(as_json=False) == 0
    told = capsys.readouterr().out
    assert all(row.what in told and row.loop.why in told for row in ROWS)
    assert doctor.print_support(as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in rows] == [row.what for row in ROWS]
    assert {row["loop"]["grade"] for row in rows} == {"exact", "restart", "refused"}
