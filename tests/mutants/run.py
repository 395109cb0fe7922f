"""`make mutants`: each patch plants one fault in a copy of the tree; the tests must fail.

The first lines of a patch say what it breaks and which tests run on it. The copy lies in
build/mutants; PYTHONPATH makes Python import it instead of the checkout. Prints a table of the
failing tests and writes build/bench/mutants.json. The exit code is 1 if a mutant passes all of its
tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench.recovery.rows import row, write

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "mutants"
TEST_S_MAX = 900.0
PACKAGES = ("events", "control_plane", "workers", "cli", "__init__.py")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--only", default="", help="patches whose name begins so")
    asked = parser.parse_args()
    patches = [
        path
        for path in sorted(Path(__file__).parent.glob("*.patch"))
        if path.name.startswith(asked.only)
    ]
    if not patches:
        parser.error(f"no patch begins with {asked.only!r}")
    rows, survivors, began_s = [], 0, time.monotonic()
    for patch in patches:
        what, tests = described(patch)
        failed = failing(plant(patch), tests)
        survivors += not failed
        rows.append(row(patch.stem, "unicron", "tests_that_see_it", [float(len(failed))], "1"))
        print(
            f"{patch.stem:32} {'seen by' if failed else 'NOT SEEN':8} {len(failed):3}  {what}",
            *(f"      {name}" for name in failed[:3]),
            sep="\n",
            flush=True,
        )
    write(
        rows,
        ROOT / "build" / "bench" / "mutants.json",
        {"took_s": round(time.monotonic() - began_s)},
    )
    print(f"{len(patches) - survivors} of {len(patches)} mutants are seen")
    return 1 if survivors else 0


def described(patch: Path) -> tuple[str, list[str]]:
    """What the patch breaks, and the tests to run: its lines `what:` and `tests:`."""
    head = dict(
        re.findall(r"^(what|tests): (.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    )
    return head["what"], head["tests"].split()


def plant(patch: Path) -> Path:
    """Copy the product and apply the patch; return the folder for PYTHONPATH."""
    place = FOLDER / patch.stem
    shutil.rmtree(place, ignore_errors=True)
    copy = place / "unicron"
    copy.mkdir(parents=True)
    for name in PACKAGES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
            )
        else:
            shutil.copy(source, copy / name)
    # Without GIT_DIR, git would apply the patch to the checkout.
    subprocess.run(
        ["git", "apply", "--recount", "-C1", str(patch)],
        cwd=copy,
        check=True,
        env={**os.environ, "GIT_DIR": str(place / "none")},
    )
    return place


def failing(place: Path, tests: list[str]) -> list[str]:
    """The names of the tests that fail on the copy. Raises RuntimeError if none ran."""
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-q",
            "-m",
            "not thorough",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            "-rfE",
            *tests,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        capture_output=True,
        check=False,
        timeout=TEST_S_MAX,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-500:]}")
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
