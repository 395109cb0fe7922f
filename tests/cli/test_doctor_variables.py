"""`unicron doctor` names variables of torch that are not as healing in place needs them."""

from __future__ import annotations

import json

import pytest
from cli_process import unicron
from unicron.workers.ipc import rank_variables


@pytest.mark.parametrize(("given", "grade"), [
    ({}, "ok"), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "ok"),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "note")])
def test_doctor_names_them(given: dict[str, str], grade: str, monkeypatch: pytest.MonkeyPatch
                           ) -> None:
    from unicron.cli.commands import doctor

    for name in (*rank_variables.NEEDED, *doctor.INTERFACES):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = doctor.variables()
    assert found.grade == grade
    for name, value in ({} if grade == "ok" else given).items():
        assert f"{name}={value}: an NCCL fault may end a rank" in found.result
    if grade == "ok":
        assert all(name in found.result for name in (*rank_variables.NEEDED, *doctor.INTERFACES))


def test_doctor_has_the_line(tmp_path) -> None:
    findings = json.loads(unicron("doctor", "-o", "json", folder=tmp_path).stdout)
    assert "variables" in [one["what"] for one in findings]
