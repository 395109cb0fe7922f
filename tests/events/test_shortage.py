"""What may pass is waited for, and told once; every other error is raised."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest
from small_disk import fill, small_disk
from unicron.events import shortage
from unicron.events.errors import ServerError
from unicron.events.process_io import LogStream
from unicron.events.shortage import is_full, is_shortage, outlast


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortage, "PAUSE_S", 0.01)


async def test_a_loop_goes_on_after_a_shortage() -> None:
    """Descriptors, memory, room and threads, also within a group; each reason once in a row."""
    full = OSError(errno.ENOSPC, "No space left on device")
    errors: list[Exception] = [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        ExceptionGroup("of tasks", [full, OSError(errno.EIO, "Input/output error")]),
        RuntimeError("can't start new thread"),
    ]
    told: list[str] = []
    done = list[int]()

    async def run() -> None:
        if errors:
            raise errors.pop(0)
        done.append(1)

    await asyncio.wait_for(outlast(run, told.append), 20)
    assert done == [1]
    assert len(told) == 4
    assert told[1] == "out of memory"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        RuntimeError("another bug"),
        PermissionError(errno.EACCES, "no"),
        ExceptionGroup("", [OSError(errno.EMFILE, ""), ValueError("a bug")]),
    ],
)
async def test_another_error_is_raised(error: Exception) -> None:
    async def run() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await outlast(run, lambda why: None)
    assert raised.value is error
    assert not is_shortage(error)


def test_a_full_disk_is_known_by_the_cause() -> None:
    error = ServerError("it cannot start")
    assert not is_full(error)
    error.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded")
    assert is_full(error)


def test_a_log_on_a_full_disk_tells_what_it_could_not_write(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk, (disk / "log").open("w") as file:
        stream, taken = LogStream(file), fill(disk)
        for number in range(500):
            stream.write(f"line {number} {'x' * 100}\n")
            stream.flush()
        taken.unlink()
        stream.write("after\n")
        stream.flush()
        lines = (disk / "log").read_text().splitlines()
        assert os.statvfs(disk).f_bavail
    assert lines[-2] == "after"
    told = json.loads(lines[-1])
    assert told["event"] == "lines of this log could not be written"
    assert 0 < 500 - len(lines) < told["num_lines"] <= 500
