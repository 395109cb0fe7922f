"""The tools that run the tests: lanes, the page of runs, and a clean stop on SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import interrupts
import lane_report
import pytest
import rank_places
import suite
import tiers
from agent_driver import dies
from hypothesis import given, settings
from hypothesis import strategies as st

NUM_STATED = 400
WAIT_S = 60.0
_tried: list[int] = []


@settings(max_examples=NUM_STATED)
@given(st.integers())
def test_a_property(number: int) -> None:
    _tried.append(number)


def test_a_property_is_tried_with_a_quarter_of_its_examples(request: pytest.FixtureRequest) -> None:
    if not _tried:
        pytest.skip("test_a_property did not run")
    share = 1.0 if request.config.getoption("hypothesis_profile") == "thorough" else 0.25
    assert len(_tried) == pytest.approx(NUM_STATED * share, rel=0.1)


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


def test_thorough_lanes_of_one_commit_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "test-runs.md"
    page.parent.mkdir()
    page.write_text(f"# Runs\n\nWords.\n\n{suite.BEGIN}\nan older run\n")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "FOLDER", tmp_path)
    monkeypatch.setattr(suite, "PAGE", page)
    monkeypatch.setattr(suite, "LANES", {"a": [], "b": [], "c": []})

    def note(lanes: list[str], commit: str, **counts: int) -> str:
        words: dict[str, list[str]] = {lane: [] for lane in lanes}
        suite._write(suite._added_up(words, commit, Counter(counts), 900.0), commit)
        return page.read_text()

    assert "an older run" in note(["c"], "fff0000", passed=7)  # of another commit
    assert "LANES=a,b have not run at fff0000" in capsys.readouterr().out
    assert "an older run" in note(["a", "b"], "abc1234", passed=5, failed=1)
    assert "LANES=c have not run at abc1234" in capsys.readouterr().out
    text = note(["c"], "abc1234", passed=2, skipped=3)
    assert text.startswith(f"# Runs\n\nWords.\n\n{suite.BEGIN}\n| commit |")
    assert "| abc1234 |" in text
    assert "| 7 passed, 1 failed, 3 skipped | 30 |" in text
    assert "older" not in text
    # A lane that runs again takes the place of the run that it was in.
    assert "| 7 passed" in note(["a"], "abc1234", passed=100)
    assert "LANES=b have not run" in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one lane, whose tests are in test_it.py."""
    (tmp_path / "flakes.txt").write_text("# name, commit, load\n")
    for name, value in {
        "ROOT": tmp_path,
        "FOLDER": tmp_path / "build",
        "PLACES": tmp_path / "build" / "places",
        "FLAKES": tmp_path / "flakes.txt",
        "LANES": {"one": ["test_it.py"]},
        "TELL_S": 0.5,
    }.items():
        monkeypatch.setattr(suite, name, value)
    monkeypatch.setattr(suite.sys, "argv", ["suite.py"])
    monkeypatch.setattr(interrupts.signal, "signal", Mock())
    return tmp_path


@pytest.mark.parametrize(
    ("num", "passes_again", "code"), [(1, True, 0), (1, False, 1), (4, True, 1)]
)
def test_a_few_failed_tests_are_run_again_alone(
    folder: Path, capfd: pytest.CaptureFixture[str], num: int, passes_again: bool, code: int
) -> None:
    """It passes the second time, since its file `seen` is there."""
    (folder / "test_it.py").write_text(
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
    assert suite.main() == code
    out = capfd.readouterr().out
    assert "FAILED    test_it.py::test_it[0]\n" in out
    assert ("again     test_it.py::test_it[0]" in out) == (num == 1)
    assert (f"1 passed, {num} failed, which passed alone," in out) == (code == 0)
    counted = (folder / "flakes.txt").read_text().splitlines()[1:]
    assert len(counted) == (code == 0)
    if counted:
        assert counted[0].split()[:2] == ["test_it.py::test_it[0]", "unknown"]
        assert f"          {counted[0]}\n" in out


def test_a_test_that_often_passes_only_alone_fails_the_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "test_it.py").write_text("def test_it(): pass\n")
    (folder / "flakes.txt").write_text("t.py::a[x y] 12 3\nt.py::b 12 3\nt.py::a[x y] 13 9\n")
    assert suite.main() == 0
    (folder / "flakes.txt").write_text("t.py::a[x y] 12 3\n" * 3)
    assert suite.main() == 1
    assert "FAILED    t.py::a[x y] passed only alone more than 2 times" in capfd.readouterr().out


def test_what_is_skipped_and_left_out_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', range(3))\n"
        "@pytest.mark.skip(reason='needs a moon')\n"
        "def test_it(x): pass\n"
        "@pytest.mark.thorough\n"
        "def test_long(): pass\n"
        "@pytest.mark.real\n"
        "def test_real(): pass\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = thorough\n    real\n")
    assert suite.main() == 0
    out = capfd.readouterr().out
    for line in (
        "skipped   3: needs a moon\n",
        "left out  1: make test-real\n",
        "left out  1: make test-thorough\n",
        "tests     0 passed, 0 failed, 3 skipped in ",
    ):
        assert line in out


def test_an_interrupted_run_says_how_far_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "test_it.py").write_text(
        "import time\n"
        "def test_a(): pass\n"
        "def test_b(): assert False\n"
        "def test_c(): time.sleep(600)\n"
        "def test_d(): pass\n"
    )
    tell = suite._tell_progress

    def told(lanes: list[suite.Lane], *rest: Any) -> None:
        tell(lanes, *rest)
        if len(lanes[0].tests) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(suite, "_tell_progress", told)
    assert suite.main() == 130
    out = capfd.readouterr().out
    assert "    2 of 4 done, 1 failed, about " in out
    assert "tests     interrupted: 1 passed, 1 failed, 0 skipped, 2 not run in " in out


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "pytest.exit('x', 0)"])
def test_tests_that_did_not_run_fail_the_run(
    folder: Path, capfd: pytest.CaptureFixture[str], end: str
) -> None:
    """Also if the only test that failed would pass alone."""
    (folder / "test_it.py").write_text(
        "import os, pathlib, pytest\n"
        "def test_a():\n"
        "    seen = pathlib.Path(__file__).with_name('seen')\n"
        "    was = seen.exists()\n"
        "    seen.touch()\n"
        "    assert was\n"
        f"def test_b(): {end}\n"
        "def test_c(): assert False\n"
    )
    assert suite.main() == 1
    out = capfd.readouterr().out
    assert re.search("tests     [01] passed, 1 failed, 0 skipped, [12] not run in ", out)
    assert "again     " not in out


def test_lanes_end_when_nobody_reads_what_is_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `make test | head -1`: then each print fails, also that of the end."""
    (folder / "test_it.py").write_text(
        "import os, pathlib, time\n"
        "def test_it():\n"
        "    pathlib.Path(__file__).with_name('pid').write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    told = folder / "pid"

    def fails(*words: Any, **options: Any) -> None:
        if told.exists() and told.read_text():
            raise BrokenPipeError

    monkeypatch.setattr("builtins.print", fails)
    monkeypatch.setattr(suite.os, "dup2", Mock())
    assert suite.main() == 2
    assert dies(int(told.read_text()))


@pytest.mark.parametrize("failing", [False, True], ids=["first run", "again"])
def test_processes_of_an_interrupted_run_are_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failing: bool
) -> None:
    """Also of a test that began a process at that moment, and of one that is run again alone."""
    (folder / "test_it.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "def test_it():\n"
        "    seen = pathlib.Path(__file__).with_name('seen')\n"
        "    was = seen.exists()\n"
        "    seen.touch()\n"
        f"    assert was or not {failing}\n"
        "    sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "    process = subprocess.Popen(sleep, start_new_session=True)\n"
        "    seen.with_name('pid').write_text(str(process.pid))\n"
        "    time.sleep(600)\n"
    )
    tell, told = suite._tell_progress, folder / "pid"

    def interrupt(*words: Any) -> None:
        tell(*words)
        if told.exists() and told.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(suite, "_tell_progress", interrupt)
    assert suite.main() == 130
    assert dies(int(told.read_text()))
    out = capfd.readouterr().out
    assert "stopping  the tests end what they started" in out
    assert "tests     interrupted: 0 passed, " in out


def test_a_run_in_which_no_test_ends_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "test_it.py").write_text("import time\ndef test_a(): time.sleep(600)\n")
    monkeypatch.setattr(suite, "IDLE_S_MAX", 3.0)
    assert suite.main() == 130
    out = capfd.readouterr().out
    assert re.search("stopped   no test of .+ has ended for 0 min\n", out)
    assert "tests     interrupted: 0 passed, 0 failed, 0 skipped" in out


def with_plugin(folder: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of the folder in a pytest of their own, with this plugin."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", name, "test_it.py"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


def test_a_test_that_swallows_an_interrupt_ends_the_run(tmp_path: Path) -> None:
    """As a test does that runs a command in its own process, which answers Ctrl-C."""
    (tmp_path / "test_it.py").write_text(
        "import os, signal\n"
        "def test_a():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except KeyboardInterrupt:\n"
        "        assert False\n"
        "def test_b(): pass\n"
    )
    done = with_plugin(tmp_path, "conftest", PYTHONPATH=f"{TESTS}:{TESTS / 'drivers'}")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "no tests ran" in done.stdout


def test_two_runs_in_one_checkout_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "build" / "places").mkdir(parents=True)
    with suite._alone():
        assert suite.main() == 2
    assert capsys.readouterr().out == (
        f"tests     stopped: {folder}: another run of the tests has this checkout\n"
    )


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    told = {"PYTHONPATH": str(TESTS / "drivers"), lane_report.VARIABLE: "/dev/full"}
    done = with_plugin(tmp_path, "lane_report", **told)
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR
    assert "the report of this lane cannot be written: [Errno 28] No space left" in done.stdout


def test_the_page_has_the_marker() -> None:
    assert suite.BEGIN in suite.PAGE.read_text()


def test_each_name_of_a_real_test_is_that_of_a_function() -> None:
    """Whether its parameters exist is checked when the tests are collected."""
    names = tiers.listed()
    assert names == sorted(set(names))
    for name in names:
        file, _, function = name.partition("[")[0].partition("::")
        assert (suite.ROOT / file).exists(), name
        assert not function or re.search(
            rf"^(async )?def {function}\(", (suite.ROOT / file).read_text(), re.M
        ), name


# --- places of ranks -----------------------------------------------------------------------------
def test_ranks_wait_for_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_places.VARIABLE, str(tmp_path))
    running, most = 0, 0
    change = threading.Lock()

    def trains(num: int) -> None:
        nonlocal running, most
        with rank_places.taken(num):
            with change:
                running += num
                most = max(most, running)
            time.sleep(0.05)
            with change:
                running -= num

    tests = [threading.Thread(target=trains, args=(num,)) for num in (4, 2, 4, 4, 1, 6, 4, 3)]
    for test in tests:
        test.start()
    for test in tests:
        test.join(20.0)
        assert not test.is_alive()
    assert rank_places.PLACES_NUM / 2 < most <= rank_places.PLACES_NUM


def test_a_process_that_a_test_forked_keeps_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rank_places.VARIABLE, str(tmp_path))
    with rank_places.taken(rank_places.PLACES_NUM):
        forked = os.fork()
        if not forked:
            time.sleep(WAIT_S)
            os._exit(0)
    try:
        before_s = time.monotonic()
        with rank_places.taken(1):
            assert time.monotonic() - before_s < WAIT_S / 2
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def test_a_test_of_too_many_ranks_has_all_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rank_places.VARIABLE, str(tmp_path))
    with rank_places.taken(rank_places.PLACES_NUM + 5):
        assert len(list(tmp_path.iterdir())) == rank_places.PLACES_NUM + 1  # and the queue


# --- SIGTERM -------------------------------------------------------------------------------------
SLEEPS = """
import time
from pathlib import Path
from unittest.mock import Mock


def test_sleeps(own_server):
    Path("pid").write_text(str(own_server.pid))
    time.sleep(60)
"""
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
    assert dies(server)
