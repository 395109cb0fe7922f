"""What `submit` and `doctor` say about output folders, before anything is written there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import doctor
from unicron.cli.commands.outputs import check_folder, check_possible
from unicron.control_plane.throughput.state_size import state_bytes
from unicron.events.errors import UsageError
from unicron.events.spec.job import JobSpec, parse
from unicron.events.words import scaled

DISK_BYTES = 16 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of DISK_BYTES."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, timeout=60).returncode:
        pytest.skip("mounts no file system")
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=60)


def job(output: Path, **train: Any) -> JobSpec:
    return parse(
        {
            "apiVersion": "unicron/v1",
            "name": "job",
            "train": {"iterations": 100, "output": str(output), **train},
        }
    )


@pytest.mark.parametrize(
    ("given", "num"),
    [
        ({}, 1),
        ({"checkpoint_every": 10}, 4),
        ({"checkpoint_every": 10, "checkpoint_keep": 1}, 2),
        ({"checkpoint_every": 10, "checkpoint_keep": "all"}, 10),
        ({"checkpoint_every": 50}, 2),
    ],
)
def test_submit_compares_the_room_with_the_checkpoints_that_stay_and_one(
    disk: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], num: int
) -> None:
    spec = job(disk / "out", **given)
    check_folder(spec, [])
    said = capsys.readouterr().err
    needed_bytes = num * state_bytes(spec)
    if needed_bytes <= DISK_BYTES:
        assert said == ""
    else:
        assert said.startswith(
            f"note: train.output: {disk}/out has {scaled(DISK_BYTES, 'B')} free, and {num} "
            f"checkpoints need about {scaled(needed_bytes, 'B')}: make room"
        )


def test_some_of_them_fit_and_some_do_not(disk: Path) -> None:
    """So that the test above can fail in both ways."""
    size_bytes = state_bytes(job(disk))
    assert size_bytes < DISK_BYTES < 4 * size_bytes


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "file is not a folder"),
        ("file/below", "file is not a folder"),
        ("loop/below", "too many levels of symbolic links"),
        ("x" * 3000, "file name too long"),
    ],
)
def test_a_path_that_can_be_no_folder_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match=f"--to: .*{why}"):
        check_possible(str(tmp_path / name), "--to", [])


def test_a_store_that_takes_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    check_possible("http://127.0.0.1:9/run", "--to", [])
    assert "note: --to: http://127.0.0.1:9/run, tried here: " in capsys.readouterr().err


def test_doctor_tries_the_shared_folders_of_the_policy(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "file").write_text("")
    state = StateDir(tmp_path / "state")
    state.create()
    state.policy.write_text(f"shared_folders: [{tmp_path}/good, {tmp_path}/file]\n")
    good, missing = doctor.shared_folders(state)
    assert (good.grade, good.result.partition(",")[0]) == ("ok", f"{tmp_path}/good")
    assert (missing.grade, missing.result) == ("note", f"{tmp_path}/file is not on this host")
