"""`unicron doctor` names variables of torch that are not as healing needs them, and more of it."""

from __future__ import annotations

import socket

import pytest
from unicron.cli.commands import doctor
from unicron.workers.ipc import rank_variables
from unicron.workers.training.dependencies import group_offers
from unicron.workers.training.dependencies.group_offers import Offers


@pytest.mark.parametrize(
    ("given", "grade"),
    [
        ({}, "ok"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "ok"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "note"),
    ],
)
def test_doctor_names_them(
    given: dict[str, str], grade: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*rank_variables.NEEDED, *doctor.INTERFACES):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = doctor.variables()
    assert found.grade == grade
    assert all(name in found.result for name in (*rank_variables.NEEDED, *doctor.INTERFACES))
    for name, value in given.items():
        assert f"{name}={value}" in found.result
        assert (f"without {name}={value} it heals" in found.hint) is (grade == "note")


def test_doctor_tells_what_torch_offers_to_keep_groups() -> None:
    found = doctor.communicators()
    assert found.grade == "ok"
    assert found.result == (
        "built anew in each generation; groups could be split by gloo, "
        "shrunk by no backend here; there is no reconfigure"
    )


def test_doctor_names_the_offers_of_a_build_with_nccl() -> None:
    told = group_offers.in_words(Offers("2.13.0+cu130", "2.28.3", ("nccl",), ("nccl",), True))
    assert told == (
        "built anew in each generation; groups could be split by nccl, "
        "shrunk by nccl, NCCL 2.28.3; there is reconfigure"
    )


def test_doctor_names_the_port_of_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.probe_port()
    assert found.grade == "ok"
    port = int(found.result.split()[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as busy:
        busy.bind(("", port))
        assert f"UDP port {port} " not in doctor.probe_port().result
        monkeypatch.setattr(doctor, "PORT_FIRST", port)
        monkeypatch.setattr(doctor, "PORTS_NUM", 1)
        assert doctor.probe_port().grade == "note"
