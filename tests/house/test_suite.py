"""The tools that run the tests: lanes, the page of runs, and a clean stop on SIGTERM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import suite
from agent_driver import alive
from hypothesis import given, settings
from hypothesis import strategies as st

NUM_STATED = 400
_tried: list[int] = []


@settings(max_examples=NUM_STATED)
@given(st.integers())
def test_a_property(number: int) -> None:
    _tried.append(number)


def test_a_property_is_tried_with_a_quarter_of_its_examples(request: pytest.FixtureRequest) -> None:
    if not _tried:
        pytest.skip("test_a_property did not run")
    share = 1.0 if request.config.getoption("hypothesis_profile") == "thorough" else 0.25
    assert len(_tried) == pytest.approx(NUM_STATED * share, abs=5)


def test_every_test_is_in_one_lane() -> None:
    def runs(words: list[str], file: Path) -> bool:
        ignored = [word.removeprefix("--ignore=") for word in words if word.startswith("--")]
        return any(file.is_relative_to(word) for word in words) and not any(
            file.is_relative_to(word) for word in ignored
        )

    files = [file.relative_to(suite.ROOT) for file in (suite.ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 100
    for file in files:
        lanes = [
            name for name, words in {**suite.LANES, **suite.WEB_LANES}.items() if runs(words, file)
        ]
        assert len(lanes) == 1, f"{file} is in the lanes {lanes}"


def test_a_run_replaces_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs" / "test-runs.md"
    page.parent.mkdir()
    page.write_text(f"# Runs\n\nWords.\n\n{suite.BEGIN}\nan older run\n")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "PAGE", page)
    suite._write(Counter(tests=12, failures=1, errors=1, skipped=3), "abc1234", 1830.0)
    text = page.read_text()
    assert text.startswith(f"# Runs\n\nWords.\n\n{suite.BEGIN}\n| commit |")
    assert "| abc1234 |" in text
    assert "| 7 passed, 2 failed, 3 skipped | 30 |" in text
    assert "older" not in text


@pytest.mark.parametrize(
    ("num", "passes_again", "code"), [(1, True, 0), (1, False, 1), (4, True, 1)]
)
def test_a_few_failed_tests_are_run_again_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    num: int,
    passes_again: bool,
    code: int,
) -> None:
    """It passes the second time, since its file `seen` is there."""
    (tmp_path / "test_it.py").write_text(
        "import pathlib, pytest\n"
        f"@pytest.mark.parametrize('number', range({num}))\n"
        "def test_it(number):\n"
        "    seen = pathlib.Path(__file__).with_name(f'seen-{number}')\n"
        "    was = seen.exists()\n"
        "    seen.touch()\n"
        f"    assert was and {passes_again}\n"
        "def test_another():\n"
        "    pass\n"
    )
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(suite, "LANES", {"one": ["test_it.py"]})
    monkeypatch.setattr(suite.sys, "argv", ["suite.py"])
    monkeypatch.setattr(suite.signal, "signal", Mock())
    assert suite.main() == code
    out = capfd.readouterr().out
    assert ("again     test_it.py::test_it[0]" in out) == (num == 1)
    assert (f"1 passed, {num} failed, which passed alone," in out) == (code == 0)


def test_the_page_has_the_marker() -> None:
    assert suite.BEGIN in suite.PAGE.read_text()


# --- SIGTERM -------------------------------------------------------------------------------------
SLEEPS = """
import time
from pathlib import Path
from unittest.mock import Mock


def test_sleeps(own_server):
    Path("pid").write_text(str(own_server.pid))
    time.sleep(60)
"""
WAIT_S = 60.0
TESTS = Path(__file__).parents[1]


def test_terminated_tests_stop_their_processes(tmp_path: Path) -> None:
    (tmp_path / "test_sleeps.py").write_text(SLEEPS)
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "test_sleeps.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS / 'drivers'}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
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
