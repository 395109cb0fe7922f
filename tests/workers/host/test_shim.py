"""The shim outlasts a shortage of descriptors: it is the parent of all ranks of its node."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_driver import alive
from unicron.events import unix_socket
from unicron.workers.agent.processes.shim import Shim
from unicron.workers.host.shim import ACCEPT_PAUSE_S

MARKER = ("UNICRON_PROCESS", "test:shim")


@pytest.fixture
def shim(tmp_path: Path) -> Generator[Shim]:
    found = Shim.open(tmp_path / "shim", os.environ, MARKER, tmp_path / "shim.log")
    yield found
    found.end()
    os.waitpid(found.pid, 0)


@contextmanager
def limited(shim: Shim, more_num: int) -> Generator[None]:
    """The shim may open so many more files."""
    before = resource.prlimit(shim.pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{shim.pid}/fd")}
    free = (number for number in itertools.count() if number not in used)
    soft = next(itertools.islice(free, more_num, None))
    resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, (soft, before[1]))
    yield
    resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, before)


def start(shim: Shim, key: str, folder: Path) -> int:
    pipe = os.pipe()
    try:
        with (folder / "out").open("ab") as log:
            argv, env = ["sleep", "60"], dict(os.environ)
            files, held = {"PIPE": pipe[0]}, [pipe[1]]
            return shim.start(key, b"", argv, env, log.fileno(), files=files, held=held)
    finally:
        for end in pipe:
            os.close(end)


@pytest.mark.parametrize("more_num", [0, 1, 2, 4])
def test_a_start_without_descriptors_fails_alone(shim: Shim, tmp_path: Path, more_num: int) -> None:
    other = start(shim, "1.0.1", tmp_path)
    with limited(shim, more_num):
        with pytest.raises(OSError, match="Too many open files"):
            start(shim, "1.1.1", tmp_path)
        shim.check()
    assert alive(other)
    assert alive(start(shim, "1.1.1", tmp_path))


def test_files_that_cannot_be_held_are_an_error(shim: Shim) -> None:
    with limited(shim, 0), pytest.raises(OSError, match="Too many open files"):
        shim.hold("1.0.1", b"", [0])
    shim.hold("1.0.1", b"", [0])


def test_a_new_agent_waits_for_a_descriptor(shim: Shim, tmp_path: Path) -> None:
    other = start(shim, "1.0.1", tmp_path)
    connection = socket.socket(socket.AF_UNIX)
    before = resource.prlimit(shim.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    connection.connect(unix_socket.address(str(tmp_path / "shim")))
    time.sleep(5 * ACCEPT_PAUSE_S)
    assert alive(shim.pid)
    resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, before)
    second = Shim(connection, tmp_path / "shim")
    assert second.pids == {"1.0.1": other}
    assert alive(other)
    second.end()
