"""Runs the tests in four concurrent lanes; three of them mostly wait.

`make test` skips tests marked `thorough` and tries a quarter of each property's examples.
`make test-thorough` runs everything and writes its counts to docs/guides/test-runs.md.
`make test-web` runs the tests of the dashboard, in a lane of its own.

A few tests that failed are run once more, alone: if they pass, the load was the cause; they are
named, and do not fail the run. Otherwise the exit status is 1. Output of failed lanes is printed;
all output is in build/tests.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "tests"
PAGE = ROOT / "docs" / "guides" / "test-runs.md"
BEGIN = "<!-- the last run -->"
RANKS = "tests/workers/training"
WITH_PROGRAMS = [
    f"{RANKS}/test_{name}.py"
    for name in ("data_loader", "known_versions", "megatron_wheels", "resharding")
]
WITH_OTHERS = [f"{RANKS}/test_{name}.py" for name in ("checkpoint", "experts", "gpu_check")]
HOSTS = "tests/hosts/test_hosts.py"
"""Tests of ranks and hosts in another lane, so that no lane is much longer than the rest."""
BROWSER = "tests/browser"
OF_RANKS = [f"{RANKS}/{file.name}" for file in sorted((ROOT / RANKS).glob("test_*.py"))]
PROGRAMS = ["tests/cli", "tests/workers/agent"]
LANES = {
    "clusters": ["tests/cluster", HOSTS],
    "ranks": [RANKS, *(f"--ignore={file}" for file in (*WITH_PROGRAMS, *WITH_OTHERS))],
    "programs": [*PROGRAMS, "tests/hosts", f"--ignore={HOSTS}", *WITH_PROGRAMS],
    "others": [
        "tests",
        *(
            f"--ignore={path}"
            for path in (
                "tests/cluster",
                "tests/hosts",
                BROWSER,
                *PROGRAMS,
                *(file for file in OF_RANKS if file not in WITH_OTHERS),
            )
        ),
    ],
}
"""Lane -> arguments of its pytest, which runs one test at a time and at most six real ranks."""
WEB_LANES = {"browser": [BROWSER]}
"""They need a browser, and the page that npm builds."""
POLL_S, STOP_S = 0.2, 50.0
AGAIN_NUM_MAX = 3
"""If more tests fail, none is run again: then it was not the load."""


class Lane:
    """One pytest process, its output and its counts."""

    def __init__(self, name: str, words: list[str], options: list[str]) -> None:
        self.name = name
        self.output, self.counts_file = FOLDER / f"{name}.txt", FOLDER / f"{name}.xml"
        cache = ROOT / ".pytest_cache" / name
        self._failed = cache / "v" / "cache" / "lastfailed"
        self._failed.unlink(missing_ok=True)
        self.began_s = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "pytest",
                    *words,
                    *options,
                    "--durations=15",
                    f"--junitxml={self.counts_file}",
                    "-o",
                    "faulthandler_timeout=300",
                    "-o",
                    f"cache_dir={cache}",
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )  # Ctrl-C must reach it only once, through `stop`

    def tell(self) -> bool:
        """Print how the lane ended; returns True if it passed."""
        text = self.output.read_text(errors="replace").rstrip()
        if self.process.returncode:
            print(text)
        lasted_s = time.monotonic() - self.began_s
        print(
            f"{self.name:9} {text.splitlines()[-1] if text else 'said nothing'}, {lasted_s:.0f} s",
            flush=True,
        )
        return self.process.returncode == 0

    def failed(self) -> list[str]:
        """The tests that failed, by their names; empty also if the lane failed as a whole."""
        if self.process.returncode != 1 or not self._failed.exists():
            return []
        return list(json.loads(self._failed.read_text()))

    def counts(self) -> Counter[str]:
        """How many tests the lane ran, and their results."""
        if not self.counts_file.exists():
            return Counter()
        suite = ET.parse(self.counts_file).getroot().find("testsuite")
        assert suite is not None
        return Counter(
            {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
        )

    def stop(self) -> None:
        """Terminate the lane; its tests then end the processes that they started (conftest.py)."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> int:
    asks = argparse.ArgumentParser(description=__doc__)
    asks.add_argument("--thorough", action="store_true", help="everything, and write the page")
    asks.add_argument("--web", action="store_true", help="the tests of the dashboard")
    asked = asks.parse_args()
    thorough = asked.thorough
    options = ["--hypothesis-profile=thorough"] if thorough else ["-m", "not thorough"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in FOLDER.glob("*.xml"):
        file.unlink()
    began_s, commit = time.monotonic(), _commit()
    lanes = [
        Lane(name, words, options) for name, words in (WEB_LANES if asked.web else LANES).items()
    ]
    try:
        well = _wait(lanes) or _pass_alone(lanes, options)
    except KeyboardInterrupt:
        print("tests     interrupted")
        return 130
    finally:
        for lane in lanes:
            lane.stop()
    total = sum((lane.counts() for lane in lanes), Counter[str]())
    lasted_s = time.monotonic() - began_s
    used = os.times()
    cpu_s = used.children_user + used.children_system
    alone = ", which passed alone," if well and total["failures"] + total["errors"] else ""
    print(f"tests     {_said(total, alone)} in {lasted_s / 60:.1f} min, CPU {cpu_s / 60:.1f} min")
    if thorough:
        _write(total, commit, lasted_s)
    return 0 if well else 1


def _wait(lanes: list[Lane]) -> bool:
    """Wait for all lanes and print each result; returns True if all passed."""
    running, well = list(lanes), True
    while running:
        time.sleep(POLL_S)
        for lane in [lane for lane in running if lane.process.poll() is not None]:
            running.remove(lane)
            well &= lane.tell()
    return well


def _pass_alone(lanes: list[Lane], options: list[str]) -> bool:
    """Run the failed tests again, if they are few; returns True if now all pass."""
    names = [name for lane in lanes for name in lane.failed()]
    if not 0 < len(names) <= AGAIN_NUM_MAX or any(
        lane.process.returncode and not lane.failed() for lane in lanes
    ):
        return False
    well = (
        subprocess.run(
            [sys.executable, "-P", "-m", "pytest", *names, *options],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode
        == 0
    )
    for name in names:
        print(f"again     {name} {'passed' if well else 'was run'} alone", flush=True)
    return well


def _said(counts: Counter[str], alone: str = "") -> str:
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return f"{passed} passed, {failed} failed{alone}, {counts['skipped']} skipped"


def _commit() -> str:
    """The checked-out commit, marked if tracked files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{git('rev-parse', '--short', 'HEAD') or 'unknown'}{changed}"


def _write(counts: Counter[str], commit: str, lasted_s: float) -> None:
    """Replace the last run on the page."""
    before, _, _ = PAGE.read_text().partition(BEGIN)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    PAGE.write_text(
        f"{before}{BEGIN}\n"
        f"| commit | date | result | minutes | cores |\n|---|---|---|---|---|\n"
        f"| {commit} | {today} | {_said(counts)} | {lasted_s / 60:.0f} "
        f"| {os.cpu_count()} |\n"
    )
    print(f"page: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
