"""The tests themselves leave no process behind, however they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_driver import alive

SLEEPS = '''
import time
from pathlib import Path


def test_sleeps(own_server):
    Path("pid").write_text(str(own_server.pid))
    time.sleep(60)
'''
WAIT_S = 60.0
TESTS = Path(__file__).parents[1]


def test_tests_that_are_terminated_stop_what_they_started(tmp_path: Path) -> None:
    (tmp_path / "test_sleeps.py").write_text(SLEEPS)
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "test_sleeps.py"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS / 'drivers'}"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    told, last_s = tmp_path / "pid", time.monotonic() + WAIT_S
    try:
        while not (told.exists() and told.read_text()) and time.monotonic() < last_s:
            time.sleep(0.05)
        server = int(told.read_text())
        tests.terminate()
        assert tests.wait(WAIT_S) == pytest.ExitCode.INTERRUPTED
    finally:
        tests.kill()
        tests.wait()
    assert not alive(server)
