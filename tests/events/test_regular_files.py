"""Files that others may have replaced: what is opened to be written is a regular file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unicron.events.regular_files import open_to_write


@pytest.mark.parametrize("appends", [False, True])
def test_what_is_no_file_is_replaced_by_one(tmp_path: Path, appends: bool) -> None:
    elsewhere = tmp_path / "secret"
    elsewhere.write_text("kept")
    path, read = tmp_path / "log", tmp_path / "read"
    os.mkfifo(read)
    for lay in (
        lambda: None,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(elsewhere),
        lambda: path.symlink_to(tmp_path / "absent"),
        lambda: path.symlink_to("/dev/full"),
        lambda: path.symlink_to(path),
    ):
        lay()
        with open_to_write(path, appends=appends) as file:
            assert os.get_blocking(file.fileno())
            file.write(b"x")
        assert not path.is_symlink()
        assert path.read_bytes() == b"x"
        path.unlink()
    assert elsewhere.read_text() == "kept"
    assert not (tmp_path / "absent").exists()
    with pytest.raises(IsADirectoryError):
        open_to_write(tmp_path)


def test_a_pipe_that_somebody_reads_gets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open_to_write(path, appends=True) as file:
        file.write(b"x")
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert path.read_bytes() == b"x"


def test_a_file_is_written_at_its_end_or_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"ab")
    with open_to_write(path, appends=True) as file:
        assert file.tell() == 2
        file.write(b"c")
    assert path.read_bytes() == b"abc"
    with open_to_write(path) as file:
        file.write(b"d")
    assert path.read_bytes() == b"d"
