"""Files that hold secrets, against other users of the machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from unicron.events.errors import UsageError
from unicron.events.private_files import read_private, write_private


def test_written_for_the_owner_only_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"old")
    path.chmod(0o666)
    write_private(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_private(path) == b"new"
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


def test_of_several_that_make_a_file_the_first_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_private(path, b"first", replaces=False)
    with pytest.raises(FileExistsError):
        write_private(path, b"second", replaces=False)
    assert read_private(path) == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["secret"]


def test_a_name_that_others_laid_is_not_written_to(tmp_path: Path) -> None:
    """The names of before could be foreseen: NAME.new and .NAME.PID."""
    theirs = tmp_path / "theirs"
    theirs.touch()
    for name in ("token.new", f".token.{os.getpid()}"):
        (tmp_path / name).symlink_to(theirs)
    write_private(tmp_path / "token", b"secret")
    assert theirs.read_bytes() == b""
    assert not (tmp_path / "token").is_symlink()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with pytest.raises(OSError, match="token"):
        write_private(tmp_path / "token", b"x")
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize(("mode", "may"), [(0o644, "read"), (0o640, "read"), (0o602, "change")])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int, may: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"x")
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"{mode:04o}: others may {may} it") as refused:
        read_private(path)
    assert refused.value.hint.startswith("chmod 600 ")


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_private(tmp_path / "token")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(UsageError, match="is not a file"):
        read_private(tmp_path / "fifo")
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path = tmp_path / "token"
    write_private(path, b"x")
    os.chown(path, 65534, -1)
    with pytest.raises(UsageError, match="belongs to user 65534, not to 0"):
        read_private(path)
