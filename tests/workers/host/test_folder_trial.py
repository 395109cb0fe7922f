"""The trial of an output folder, on real file systems and on some that refuse a call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import refusing_files
from unicron.events.errors import UsageError
from unicron.workers.host import folder_trial
from unicron.workers.training.checkpoint import checkpoint

CHILD_S_MAX = 120.0
DISK_BYTES = 1 << 20
TRY = """
import sys
from pathlib import Path
from unicron.workers.host import folder_trial
for flaw in folder_trial.flaws(Path(sys.argv[1])):
    print(flaw.is_proof, flaw.text.partition(": ")[2])
"""


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


def test_a_good_folder_is_made_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert folder_trial.flaws(folder) == []
    assert list(folder.iterdir()) == []
    assert folder_trial.free(tmp_path / "not" / "yet") == shutil.disk_usage(tmp_path).free


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("noflock", ""),
        ("nolinks", ""),
        ("norename", "True a file cannot be renamed: function not implemented"),
        ("nofsync", "True what is written cannot be synced to the disk: invalid argument"),
        (
            "nosymlink",
            "True no symbolic link can be made, and latest is one: operation not permitted",
        ),
    ],
)
def test_a_file_system_that_refuses_a_call(tmp_path: Path, name: str, said: str) -> None:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    folder = tmp_path / name / "out"
    done = subprocess.run(
        [sys.executable, "-P", "-c", TRY, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=CHILD_S_MAX,
        env={**os.environ, "LD_PRELOAD": str(refusing_files.compiled(tmp_path))},
    )
    assert done.stdout.splitlines()[:1] == ([said] if said else []), done
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_no_proof_and_no_error_of_a_rank(disk: Path) -> None:
    (disk / "other").write_bytes(bytes(DISK_BYTES - 8192))
    with (disk / "rest").open("wb", buffering=0) as rest, suppress(OSError):
        while True:
            rest.write(bytes(4096))
    (flaw,) = folder_trial.flaws(disk)
    assert (flaw.text, flaw.is_proof) == (f"{disk}: no space left on device", False)
    checkpoint.check_output(str(disk), "loop.output")


def test_the_room_is_compared_with_what_is_to_be_written(disk: Path) -> None:
    (disk / "other").write_bytes(bytes(DISK_BYTES // 2))
    assert folder_trial.shortage(disk / "out", 4, 100_000) is None
    flaw = folder_trial.shortage(disk / "out", 6, 100_000)
    assert flaw is not None
    assert flaw.text == f"{disk}/out has 524 kB free, and 6 checkpoints need about 600 kB"
    assert "checkpoint_keep" in flaw.hint


def test_a_read_only_disk_is_wrong_input(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=60)
    with pytest.raises(UsageError) as wrong:
        checkpoint.check_output(str(disk / "out"), "loop.output")
    assert str(wrong.value) == f"loop.output: {disk}/out: read-only file system"
    assert wrong.value.hint == folder_trial.ANOTHER


def test_a_file_in_the_place_of_the_folder_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, why in (("file", "file exists"), ("file/out", "not a directory")):
        with pytest.raises(UsageError, match=f"loop.output: {tmp_path}/{place}: {why}"):
            checkpoint.check_output(f"{tmp_path}/{place}", "loop.output")
