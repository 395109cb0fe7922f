"""`unicron agent --slots 0`: one slot for each GPU, and each rank its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unicron.cli.commands.serve import num_devices
from unicron.events.errors import UsageError

LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c)
  MIG 1g.10gb Device 0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose nvidia-smi prints the file `listing`."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/listing\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return tmp_path


def test_each_gpu_of_the_driver_is_a_slot(machine: Path) -> None:
    (machine / "listing").write_text(LISTING)
    assert num_devices() == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"].split(",") == [
        "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c",
        "GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c",
    ]


def test_what_the_environment_names_comes_first(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "listing").write_text(LISTING)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,3")
    assert num_devices() == 3
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0,3"


@pytest.mark.parametrize("listing", ["No devices found.\n", ""])
def test_a_node_whose_driver_shows_no_gpu_is_refused(machine: Path, listing: str) -> None:
    """It would train one slot on the CPU, beside GPUs of other nodes."""
    (machine / "listing").write_text(listing)
    with pytest.raises(UsageError, match="nvidia-smi shows no GPU"):
        num_devices()


def test_a_machine_without_a_driver_has_one_slot(machine: Path) -> None:
    (machine / "nvidia-smi").unlink()
    assert num_devices() == 1
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
