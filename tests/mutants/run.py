"""`make mutants`: each patch plants one fault in a copy of the product; the tests must fail.

A patch begins with two lines: `what:` says what it breaks, `tests:` names the tests that mirror it.
The tests first run on the copy as it is: what fails there counts for no mutant. Then they run on
the copy with the fault.

PYTHONPATH makes Python import the copy in place of the checkout. The copy and all temporary files
lie in one folder that is removed at the end, also after Ctrl-C. Rows are in
build/bench/mutants.json; rows of other mutants remain if they are of the same commit. The exit code
is 1 if a mutant passes its tests, or could not be run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import interrupts
import tiers
from bench.recovery.rows import Row, row, write
from mutants.table import IN_REAL, IN_TEST, SYSTEM, TOOK, num_unseen, rows_of_this_commit
from unicron.workers.host import linux

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).parent
FIGURES = ROOT / "build" / "bench" / "mutants.json"
COPIED = ("events", "control_plane", "workers", "cli", "__init__.py")
LINKED = ("control_plane/web", "deploy")
"""What the product reads and no patch changes: the page that npm builds, its packages, scripts."""
MUTANT_S_MAX = 240.0
"""Time limit for the tests of one mutant. What failed until then counts."""
UNCHANGED_S_MAX = 600.0
"""Time limit for the same tests without it."""
STOP_S = 60.0
"""Time for the tests to end the processes that they started (conftest.py)."""
MARK = "UNICRON_MUTANT"
"""Environment variable of all processes of one run."""
SHOWN_NUM = 3


class NotRun(Exception):
    """A mutant that cannot be run; `str()` says why, in one line."""


class Mutant(NamedTuple):
    """What the patch breaks, and the tests to run: its lines `what:` and `tests:`."""

    patch: Path
    what: str
    tests: tuple[str, ...]

    @classmethod
    def read(cls, patch: Path) -> Mutant:
        """Raises NotRun if a line is missing, or names a test that does not exist."""
        head = dict(
            re.findall(r"^(what|tests): (.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
        )
        if missing := [f"`{key}:`" for key in ("what", "tests") if key not in head]:
            raise NotRun(f"it has no line {' and no line '.join(missing)}")
        tests = tuple(head["tests"].split())
        for test in tests:
            path, _, name = test.partition("::")
            function = f"def {name.partition('[')[0]}" if name else ""
            if not (ROOT / path).exists() or (
                function and function not in (ROOT / path).read_text()
            ):
                raise NotRun(f"there is no test {test}")
        return cls(patch, head["what"], tests)


class Result(NamedTuple):
    """The tests that failed, how many ran, whether the time limit ended them."""

    failed: list[str]
    num_run: int
    is_stopped: bool


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--only", default="", help="patches whose name begins so")
    asked = parser.parse_args()
    patches = [path for path in sorted(PATCHES.glob("*.patch")) if path.name.startswith(asked.only)]
    if not patches:
        parser.error(f"no patch begins with {asked.only!r}")
    interrupts.once()
    rows: list[Row] = []
    num_not_run, began_s = 0, time.monotonic()
    try:
        with copied() as place:
            trial = Trial(place)
            for patch in patches:
                try:
                    rows += trial.rows(Mutant.read(patch))
                except NotRun as error:
                    num_not_run += 1
                    print(f"{patch.stem:32} NOT RUN   {error}", flush=True)
    except KeyboardInterrupt:
        print("mutants   interrupted")
        return 130
    took_s = round(time.monotonic() - began_s)
    about = {"cores": os.cpu_count(), "load_1min": os.getloadavg()[0], "took_s": took_s}
    write([*rows_of_this_commit(FIGURES, rows), *rows], FIGURES, about)
    unseen = num_unseen(rows)
    print(
        f"{len(patches) - unseen - num_not_run} of {len(patches)} mutants are seen, {unseen} are "
        f"not, {num_not_run} could not be run; {took_s} s"
    )
    return 1 if unseen or num_not_run else 0


class Trial:
    """Runs mutants on the copy in `place`, and remembers what their tests did without a mutant."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._tried: set[str] = set()
        self._real = set(tiers.listed(ROOT / "tests" / "real.txt"))
        self._failing: set[str] = set()

    def rows(self, mutant: Mutant) -> list[Row]:
        """Run the tests of a mutant, and print who sees it. Raises NotRun."""
        self._try_unchanged([test for test in mutant.tests if test not in self._tried])
        began_s = time.monotonic()
        with planted(self._place, mutant.patch):
            result = tried(self._place, mutant.tests, MUTANT_S_MAX)
        took_s = time.monotonic() - began_s
        seen = [test for test in result.failed if test not in self._failing]
        num_real = sum(not self._real.isdisjoint(tiers.names_of(test)) for test in seen)
        num_test, name = len(seen) - num_real, mutant.patch.stem
        told = f"seen by {num_test} + {num_real}" if seen else "NOT SEEN"
        stopped = f", stopped after {MUTANT_S_MAX:.0f} s" if result.is_stopped else ""
        print(
            f"{name:32} {told:14} {mutant.what}; {took_s:.0f} s{stopped}",
            *(f"      {test}" for test in seen[:SHOWN_NUM]),
            sep="\n",
            flush=True,
        )
        return [
            row(name, SYSTEM, IN_TEST, [float(num_test)], "1", mutant.what),
            row(name, SYSTEM, IN_REAL, [float(num_real)], "1"),
            row(name, SYSTEM, TOOK, [took_s], "s"),
        ]

    def _try_unchanged(self, tests: Sequence[str]) -> None:
        if not tests:
            return
        result = tried(self._place, tests, UNCHANGED_S_MAX)
        if result.is_stopped:
            raise NotRun(f"its tests take more than {UNCHANGED_S_MAX:.0f} s without it")
        self._tried.update(tests)
        self._failing.update(result.failed)
        for test in result.failed:
            print(f"fails without a mutant, so it does not count: {test}", flush=True)


@contextmanager
def copied() -> Iterator[Path]:
    """A folder for PYTHONPATH with a copy of the product; it is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder)
        copy = place / "unicron"
        copy.mkdir()
        skipped = {ROOT / name for name in LINKED}
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name,
                    copy / name,
                    ignore=lambda at, names: [
                        name for name in names if name == "__pycache__" or Path(at, name) in skipped
                    ],
                )
            else:
                shutil.copy(ROOT / name, copy / name)
        for name in LINKED:
            if (ROOT / name).exists():
                (copy / name).symlink_to(ROOT / name)
        yield place


@contextmanager
def planted(place: Path, patch: Path) -> Iterator[None]:
    """The copy has this fault. Raises NotRun if the patch does not apply."""
    apply(place, patch)
    try:
        yield
    finally:
        apply(place, patch, "--reverse")


def apply(place: Path, patch: Path, *options: str) -> None:
    """Raises NotRun."""
    try:
        done = subprocess.run(
            ["git", "apply", "--recount", "-C1", *options, str(patch)],
            cwd=place / "unicron",
            text=True,
            capture_output=True,
            check=False,
            # Without GIT_DIR, git would look for a checkout above.
            env={**os.environ, "GIT_DIR": str(place / "none"), "LC_ALL": "C"},
        )
    except OSError as error:
        raise NotRun(f"git cannot be run: {error}") from None
    if done.returncode:
        why = done.stderr.strip().splitlines() or [f"git apply ended with {done.returncode}"]
        raise NotRun(f"it does not apply: {why[0].removeprefix('error: ')}")


def tried(place: Path, tests: Sequence[str], limit_s: float) -> Result:
    """Run the tests on the copy. Raises NotRun if they cannot be run."""
    counts, output = place / "counts.xml", place / "output.txt"
    counts.unlink(missing_ok=True)
    mark = f"{MARK}={place}"
    words = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not thorough", "--tb=line"]
    words += [
        "--hypothesis-profile=mutants",
        "-p",
        "no:cacheprovider",
        f"--basetemp={place / 't'}",
        f"--junitxml={counts}",
    ]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*words, *tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(place), MARK: str(place)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C must reach it only once, through `_stop`
        )
    is_stopped = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        is_stopped = True
    finally:
        _stop(process)
        linux.kill_marked(mark.encode())
    result = _read(counts, is_stopped=is_stopped) if counts.exists() else None
    if result is None or not (result.num_run or is_stopped):
        raise NotRun(f"no test ran: {_why(output.read_text(errors='replace'))}")
    return result


def _why(output: str) -> str:
    """The line of pytest's output that says why it could not run."""
    lines = [line for line in output.splitlines() if line.strip()] or ["pytest said nothing"]
    return next((line for line in lines if line.startswith("ERROR")), lines[-1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End pytest; its tests then end the processes that they started (conftest.py)."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read(counts: Path, *, is_stopped: bool) -> Result:
    """What pytest wrote about each test."""
    tests: list[str] = []
    failed: list[str] = []
    for case in ET.parse(counts).getroot().iter("testcase"):
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        tests.append(test)
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(test)
    return Result(list(dict.fromkeys(failed)), len(set(tests)), is_stopped)


if __name__ == "__main__":
    sys.exit(main())
