"""`make mutants` counts who sees a fault, names what it cannot run, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from agent_driver import dies
from mutants import run, table

TESTS = Path(__file__).parents[1]
WAIT_S = 60.0
PATCH = """\
what: the answer is wrong
tests: tests/test_answer.py

diff --git a/events/answer.py b/events/answer.py
--- a/events/answer.py
+++ b/events/answer.py
@@ -1,2 +1,2 @@
-ANSWER = 42
+ANSWER = 43
 QUESTION = ""
"""
ANSWER_TEST = """\
import unicron.events.answer as answer


def test_answer():
    assert answer.ANSWER == 42


def test_answer_slowly():
    assert answer.ANSWER == 42


def test_question():
    assert not answer.QUESTION


def test_that_always_fails():
    assert answer.ANSWER == 0
"""
CONFTEST = """\
import signal
from hypothesis import settings

settings.register_profile("mutants", settings())
signal.signal(signal.SIGTERM, signal.default_int_handler)
"""
SLEEPS = """\
import subprocess
from contextlib import suppress
from pathlib import Path


def test_sleeps():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path("pid").write_text(str(child.pid))
    child.wait()
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one product file, its test and one patch."""
    for folder in ("events", "tests", "patches", "temporary"):
        (tmp_path / folder).mkdir()
    (tmp_path / "__init__.py").touch()
    (tmp_path / "events" / "__init__.py").touch()
    (tmp_path / "events" / "answer.py").write_text('ANSWER = 42\nQUESTION = ""\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:schemathesis\n")
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    (tmp_path / "tests" / "test_answer.py").write_text(ANSWER_TEST)
    (tmp_path / "patches" / "1-wrong.patch").write_text(PATCH)
    (tmp_path / "tests" / "real.txt").write_text("tests/test_answer.py::test_answer_slowly\n")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "PATCHES", tmp_path / "patches")
    monkeypatch.setattr(run, "FIGURES", tmp_path / "mutants.json")
    monkeypatch.setattr(run, "COPIED", ("events", "__init__.py"))
    monkeypatch.setattr(run.sys, "argv", ["run.py"])
    monkeypatch.setattr(run.interrupts, "once", lambda: None)
    monkeypatch.setattr(run.tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def test_a_mutant_is_seen_by_the_tests_that_fail_only_with_it(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main() == 0
    out = capsys.readouterr().out
    assert "count: tests/test_answer.py::test_that_always_fails" in out
    assert "seen by 1 + 1" in out
    assert "1 of 1 mutants are seen, 0 are not, 0 could not be run" in out
    rows = [table.Row(**fields) for fields in json.loads((tree / "mutants.json").read_text())]
    value = {row.metric: row.value for row in rows}
    assert (value[table.IN_TEST], value[table.IN_REAL]) == (1, 1)
    assert "| `1-wrong` | the answer is wrong | test | 1 | 1 |" in table.markdown(rows)
    assert "ANSWER = 42" in (tree / "events" / "answer.py").read_text()
    assert not [*(tree / "temporary").iterdir()]


def test_mutants_that_cannot_be_run_or_are_not_seen_fail_the_run(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "test_answer.py"
    broken = {
        ("-ANSWER = 42", "-ANSWER = 41"): "it does not apply: patch failed: events/answer.py:1",
        ("events/answer", "events/gone"): "it does not apply: events/gone.py: No such file",
        ("what: ", "it does: "): "it has no line `what:`",
        (name, "test_gone.py"): "there is no test tests/test_gone.py",
        (name, f"{name}::test_gone"): "there is no test tests/test_answer.py::test_gone",
        (name, f"{name}::test_answer[x]"): "no test ran: ERROR: not found: ",
    }
    for number, change in enumerate(broken):
        (tree / "patches" / f"0-{number}.patch").write_text(PATCH.replace(*change))
    (tree / "patches" / "1-wrong.patch").write_text(
        PATCH.replace(f"{name}\n", f"{name}::test_question\n")
    )
    assert run.main() == 1
    out = capsys.readouterr().out
    assert "NOT SEEN       the answer is wrong" in out
    lines = [line for line in out.splitlines() if line.startswith("0-")]
    assert len(lines) == len(broken)
    for line, why in zip(lines, broken.values(), strict=True):
        assert f"NOT RUN   {why}" in line
    assert f"0 of 7 mutants are seen, 1 are not, {len(broken)} could not be run" in out


def test_tests_are_ended_in_time_and_what_failed_before_counts(tree: Path) -> None:
    (tree / "tests" / "test_sleeps.py").write_text(
        f"{SLEEPS}\n\ndef test_before():\n    assert False\n".replace("test_sleeps", "test_then")
    )
    tests = ["tests/test_sleeps.py::test_before", "tests/test_sleeps.py::test_then"]
    with run.copied() as place:
        for limit_s in (5.0, 20.0, WAIT_S):  # on a busy machine it takes longer until one sleeps
            with suppress(run.NotRun):
                result = run.tried(place, tests, limit_s)
            if (tree / "pid").exists():
                break
    assert result.is_stopped
    assert result.failed == ["tests/test_sleeps.py::test_before"]
    assert dies(int((tree / "pid").read_text()))


def test_an_interrupted_run_leaves_nothing(tree: Path) -> None:
    (tree / "tests" / "test_answer.py").write_text(SLEEPS)
    program = (
        "from pathlib import Path\nfrom mutants import run\n"
        f"run.ROOT = Path({str(tree)!r})\nrun.PATCHES = run.ROOT / 'patches'\n"
        "run.COPIED, run.STOP_S = ('events', '__init__.py'), 1.0\nraise SystemExit(run.main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": f"{TESTS}:{TESTS / 'drivers'}",
            "TMPDIR": str(tree / "temporary"),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    told, last_s = tree / "pid", time.monotonic() + WAIT_S
    try:
        while not (told.exists() and told.read_text()) and time.monotonic() < last_s:
            time.sleep(0.05)
        child = int(told.read_text())
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)
        out, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out == "mutants   interrupted\n"
    assert dies(child)
    assert not [*(tree / "temporary").iterdir()]


@pytest.mark.parametrize("name", table.PATCHES)
def test_every_patch_names_its_fault_and_tests_that_exist(name: str) -> None:
    assert run.Mutant.read(run.PATCHES / f"{name}.patch").tests
