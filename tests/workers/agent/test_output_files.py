"""What an agent reads for the control plane: files in its folder of logs, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unicron.events.log.port import FilePart, FileRequest
from unicron.workers.agent.output_files import PART_BYTES_MAX, read_part


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "logs"
    (made / "5-job").mkdir(parents=True)
    (made / "5-job" / "rank-0.attempt-1.log").write_bytes(b"ab" * PART_BYTES_MAX)
    return made


def read(folder: Path, path: Path | str, offset: int = 0) -> FilePart:
    return read_part(folder, FileRequest(number="n", path=str(path), offset=offset))


def test_a_file_is_read_in_parts_up_to_its_end(folder: Path) -> None:
    log, found = folder / "5-job" / "rank-0.attempt-1.log", b""
    while data := read(folder, log, len(found)).data:
        assert len(data) <= PART_BYTES_MAX
        found += data
    assert found == log.read_bytes()


def test_nothing_else_is_read(folder: Path) -> None:
    secret = folder.parent / "token"
    secret.write_text("secret")
    (folder / "link.log").symlink_to(secret)
    (folder / "up").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe.log")
    for path in (
        secret,
        folder / "link.log",
        folder / ".." / "token",
        folder / "up" / "token",
        folder / "pipe.log",
        folder,
        "token",
        "",
        folder / "absent.log",
    ):
        part = read(folder, path)
        assert (part.data, bool(part.error)) == (b"", True), path
