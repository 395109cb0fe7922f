"""Runs the tests in five concurrent lanes, which mostly wait.

`make test` runs the tier `test`: all that is quick, and one test for each kind of fault and of
engine. `make test-real` runs the tests that tests/real.txt lists, `make test-web` those of the
dashboard. `make test-thorough` runs everything, with all examples of each property, and writes its
counts to docs/guides/test-runs.md; LANES=a,b runs a part, and parts of one commit add up.

Each test that fails is named at once, and every ten seconds a line says how far the run is. The
counts are printed also when the run is interrupted, or stopped because no test ends any more. A few
tests that failed are run once more, alone: if they pass, the load was the cause. They do not fail
the run, but each is a line in tests/flakes.txt, and a name that stands there too often fails it.
Output of failed lanes is printed; all output is in build/tests. Exit status: 0, 1 for failed tests,
2 for a run that could not begin, 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import interrupts
from unicron.workers.host import linux

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "tests"
PLACES = FOLDER / "places"
DRIVERS = ROOT / "tests" / "drivers"
PAGE = ROOT / "docs" / "guides" / "test-runs.md"
FLAKES = ROOT / "tests" / "flakes.txt"
BEGIN = "<!-- the last run -->"
PRODUCT = ("events", "control_plane", "workers", "cli")
RANKS = "tests/workers/training"
BROWSER = "tests/browser"


def _of_ranks(*names: str) -> list[str]:
    return [f"{RANKS}/test_{name}.py" for name in names]


WITH_CLUSTERS = _of_ranks("data_loader", "resharding")
WITH_PROGRAMS = _of_ranks("known_versions", "megatron_wheels")
WITH_SERVERS = _of_ranks("overlap", "points", "sharded")
WITH_OTHERS = _of_ranks("checkpoint", "experts", "gpu_check")
"""Tests in lanes of others, so that no lane is much longer than the rest."""
OF_RANKS = [f"{RANKS}/{file.name}" for file in sorted((ROOT / RANKS).glob("test_*.py"))]
IN_OTHER_LANES = [*WITH_CLUSTERS, *WITH_PROGRAMS, *WITH_SERVERS, *WITH_OTHERS]
CLUSTERS = ["tests/cluster", "tests/hosts"]
PROGRAMS = ["tests/cli", "tests/workers/agent"]
SERVERS = [
    *("tests/control_plane/api", "tests/control_plane/service", "tests/events"),
    *("tests/fuzz", "tests/prometheus", "tests/bench"),
]
LANES = {
    "clusters": [*CLUSTERS, *WITH_CLUSTERS],
    "ranks": [RANKS, *(f"--ignore={file}" for file in IN_OTHER_LANES)],
    "programs": [*PROGRAMS, *WITH_PROGRAMS],
    "servers": [*SERVERS, *WITH_SERVERS],
    "others": [
        "tests",
        *(
            f"--ignore={path}"
            for path in (
                *CLUSTERS,
                *PROGRAMS,
                *SERVERS,
                BROWSER,
                *(file for file in OF_RANKS if file not in WITH_OTHERS),
            )
        ),
    ],
}
"""Lane -> arguments of its pytest, which runs one test at a time."""
WEB_LANES = {"browser": [BROWSER]}
"""They need a browser, and the page that npm builds."""
TIERS = {
    "test": ["-m", "not thorough and not real"],
    "real": ["-m", "real and not thorough"],
    "web": ["-m", "not thorough"],
    "thorough": ["--hypothesis-profile=thorough"],
}
"""Tier -> what its pytest processes are told."""
LANE = "UNICRON_TEST_LANE"
"""Environment variable of all processes of a lane."""
RUN_BY = {"real": "make test-real", "thorough": "make test-thorough"}
POLL_S, STOP_S, TELL_S = 0.2, 50.0, 10.0
EARLY_SHARE = 0.05
IDLE_S_MAX = 1200.0
"""If no test ends for so long, the run is stopped. Each test has a limit of its own below that."""
AGAIN_NUM_MAX = 3
"""If more tests fail, none is run again: then it was not the load."""
FLAKES_NUM_MAX = 2
"""As often may a test stand in FLAKES."""
TESTS_FAILED, NO_TESTS = 1, 5
"""pytest's exit codes if tests failed, and if a lane has no test of the tier."""
AGAIN = "again"
"""The lane of tests that are run a second time."""
Line = dict[str, Any]


class Lane:
    """One pytest process, its output and what its tests did so far (drivers/lane_report.py)."""

    def __init__(self, name: str, words: Sequence[str], options: Sequence[str]) -> None:
        self.name = name
        self.output = FOLDER / f"{name}.txt"
        self.num_collected = 0
        self.left_out: Counter[str] = Counter()
        self.tests: list[Line] = []
        self.report = FOLDER / f"{name}.jsonl"
        self.report.write_bytes(b"")
        self._lines = _whole_lines(self.report)
        self.began_s = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "pytest", *words, *options),
                    *("-p", "lane_report", "--durations=15"),
                    *("-o", "faulthandler_timeout=300"),
                    *("-o", f"cache_dir={ROOT / '.pytest_cache' / name}"),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    LANE: str(self.report),
                    "UNICRON_LANE_REPORT": str(self.report),
                    "UNICRON_RANK_PLACES": str(PLACES),
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, (str(DRIVERS), os.environ.get("PYTHONPATH", "")))
                    ),
                },
                start_new_session=True,  # Ctrl-C must reach it only once, through `stop`
            )

    def read(self) -> list[Line]:
        """The tests that have ended since the last call."""
        new = []
        for line in self._lines():
            if "collected" in line:
                self.num_collected = line["collected"]
                self.left_out.update(line["left_out"])
            else:
                new.append(line)
        self.tests += new
        return new

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def num_left(self) -> int:
        """The tests that have not run."""
        return self.num_collected - len(self.tests)

    def tell(self) -> bool:
        """Print how the lane ended; returns True if all its tests ran and passed."""
        text = self.output.read_text(errors="replace").rstrip()
        code = self.process.returncode
        if code not in (0, NO_TESTS):
            print(text)
        lasted_s = time.monotonic() - self.began_s
        last = text.splitlines()[-1] if text else "said nothing"
        print(f"{self.name:9} {last}, {lasted_s:.0f} s", flush=True)
        return code in (0, NO_TESTS) and not self.num_left

    @property
    def broke(self) -> bool:
        """Whether the lane failed otherwise than by a test."""
        return self.process.returncode not in (0, TESTS_FAILED, NO_TESTS)

    def failed(self) -> list[str]:
        """The tests that failed, by their names; empty also if the lane failed as a whole."""
        return [line["test"] for line in self.tests if line["result"] == "failed"]

    def stop(self) -> None:
        """Terminate the lane; its tests end the processes that they started (conftest.py)."""
        if self.process.poll() is None:
            self.process.terminate()

    def wait_stopped(self) -> None:
        """Wait for its end, and kill it if that takes too long."""
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _whole_lines(file: Path) -> Callable[[], list[Line]]:
    """Returns the lines that have become whole since its last call."""
    read_bytes = 0

    def lines() -> list[Line]:
        nonlocal read_bytes
        with file.open("rb") as opened:
            opened.seek(read_bytes)
            whole, _, _ = opened.read().rpartition(b"\n")
        read_bytes += len(whole) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]

    return lines


def main() -> int:
    asks = argparse.ArgumentParser(description=__doc__)
    asks.add_argument("--tier", choices=list(TIERS), default="test")
    asks.add_argument("--lanes", default="", help="names, with commas between")
    asked = asks.parse_args()
    lanes = dict(WEB_LANES if asked.tier == "web" else LANES)
    names = [name for name in asked.lanes.split(",") if name] or list(lanes)
    if unknown := [name for name in names if name not in lanes]:
        asks.error(f"no lane {unknown[0]}; there are {', '.join(lanes)}")
    interrupts.once()
    try:
        PLACES.mkdir(parents=True, exist_ok=True)
        with _alone():
            return run(asked.tier, {name: lanes[name] for name in names})
    except BrokenPipeError:  # nobody reads what it prints: the next print must not fail too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:
        print(f"tests     stopped: {error.filename or FOLDER}: {error.strerror}")
        return 2


@contextmanager
def _alone() -> Iterator[None]:
    """Raises OSError if another run of the tests has this checkout."""
    with (FOLDER / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(0, "another run of the tests has this checkout", str(ROOT)) from None
        yield


def run(tier: str, words: dict[str, list[str]]) -> int:
    """Run lanes of a tier; returns the exit status."""
    began_s, commit = time.monotonic(), _commit()
    lanes: list[Lane] = []
    interrupted, well = False, False
    try:
        lanes += (Lane(name, given, TIERS[tier]) for name, given in words.items())
        well = _wait(lanes)
        well = well or _pass_alone(lanes, TIERS[tier], commit)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        _stop(lanes)
    lasted_s = time.monotonic() - began_s
    counts = _counts(lanes)
    _tell_all(lanes, counts, well=well, interrupted=interrupted, lasted_s=lasted_s)
    if interrupted:
        return 130
    if tier == "thorough":
        if any(lane.num_left or lane.broke for lane in lanes):
            print("page      not written: not all tests have run")
        else:
            _write(_added_up(words, commit, counts, lasted_s), commit)
    return 0 if _tell_flakes() and well else 1


def _stop(lanes: list[Lane]) -> None:
    """End the lanes that still run, and what their tests have left."""
    running = [lane for lane in lanes if not lane.ended]
    for lane in running:
        lane.stop()
    if running:
        interrupts.end()
        with suppress(BrokenPipeError):  # nobody may read what it prints
            told = f"the tests end what they started, in {STOP_S:.0f} s at most"
            print(f"stopping  {told}", flush=True)
    for lane in lanes:
        lane.wait_stopped()
        lane.read()
    for lane in running:
        linux.kill_marked(f"{LANE}={lane.report}".encode())


def _wait(lanes: list[Lane]) -> bool:
    """Wait for all lanes and tell what happens; returns True if all passed. Raises
    KeyboardInterrupt if no test ends for IDLE_S_MAX."""
    running, well, began_s = list(lanes), True, time.monotonic()
    next_s, moved_s = began_s + TELL_S, began_s
    while running:
        time.sleep(POLL_S)
        for lane in list(running):
            ended = lane.ended
            if new := lane.read():
                moved_s = time.monotonic()
            for test in new:
                if test["result"] == "failed":
                    print(f"FAILED    {test['test']}", flush=True)
            if ended:
                running.remove(lane)
                well &= lane.tell()
        if running and time.monotonic() >= moved_s + IDLE_S_MAX:
            names = ", ".join(lane.name for lane in running)
            print(f"stopped   no test of {names} has ended for {IDLE_S_MAX / 60:.0f} min")
            raise KeyboardInterrupt
        if running and time.monotonic() >= next_s:
            next_s += TELL_S
            _tell_progress(lanes, running, time.monotonic() - began_s)
    return well


def _tell_progress(lanes: list[Lane], running: list[Lane], lasted_s: float) -> None:
    """The time left is that of the slowest lane, if its tests go on as fast as so far."""
    counts, num = _counts(lanes), sum(lane.num_collected for lane in lanes)
    if not all(lane.num_collected for lane in running):
        told = "collecting"
    else:
        done = f"{sum(counts.values())} of {num} done, {counts['failed']} failed"
        left_s = max(lasted_s * lane.num_left / max(1, len(lane.tests)) for lane in running)
        # The first tests of a lane are not typical of the others.
        is_known = all(len(lane.tests) > EARLY_SHARE * lane.num_collected for lane in running)
        left = f"about {left_s / 60:.0f} min left" if left_s >= 60 else "about a minute left"
        told = f"{done}, {left}" if is_known else done
    print(f"{int(lasted_s / 60):3}:{int(lasted_s % 60):02}    {told}", flush=True)


def _pass_alone(lanes: list[Lane], options: list[str], commit: str) -> bool:
    """Run the failed tests again, if they are few; returns True if now all pass."""
    names = [name for lane in lanes for name in lane.failed()]
    if not 0 < len(names) <= AGAIN_NUM_MAX or any(lane.num_left or lane.broke for lane in lanes):
        return False
    load = os.getloadavg()[0]
    again = Lane(AGAIN, names, options)
    try:
        well = _wait([again])
    finally:
        _stop([again])
    for name in names:
        print(f"again     {name} {'passed' if well else 'was run'} alone", flush=True)
    if well:
        with FLAKES.open("a", encoding="utf-8") as file:
            file.writelines(f"{name} {commit.replace(' ', '-')} {load:.0f}\n" for name in names)
    return well


def _tell_flakes() -> bool:
    """Print the tests that ever passed only alone; returns False if one did too often."""
    text = FLAKES.read_text(encoding="utf-8") if FLAKES.exists() else ""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        return True
    print("flakes    each passed only alone (test, commit, load); commit tests/flakes.txt:")
    print("\n".join(f"          {line}" for line in lines))
    often = [
        name
        for name, num in Counter(line.rsplit(" ", 2)[0] for line in lines).items()
        if num > FLAKES_NUM_MAX
    ]
    for name in often:
        print(f"FAILED    {name} passed only alone more than {FLAKES_NUM_MAX} times: mend it")
    return not often


def _counts(lanes: list[Lane]) -> Counter[str]:
    return Counter(test["result"] for lane in lanes for test in lane.tests)


def _said(counts: Counter[str], alone: str = "") -> str:
    return (
        f"{counts['passed']} passed, {counts['failed']} failed{alone}, {counts['skipped']} skipped"
    )


def _tell_all(
    lanes: list[Lane], counts: Counter[str], *, well: bool, interrupted: bool, lasted_s: float
) -> None:
    """The counts, what was skipped and why, what other tiers have."""
    skipped = Counter(
        test["why"] for lane in lanes for test in lane.tests if test["result"] == "skipped"
    )
    for why, num in sorted(skipped.items()):
        print(f"skipped   {num}: {why}")
    for tier, verb in RUN_BY.items():
        if num := sum(lane.left_out[tier] for lane in lanes):
            print(f"left out  {num}: {verb}")
    used = os.times()
    cpu_s = used.children_user + used.children_system
    alone = ", which passed alone" if well and counts["failed"] else ""
    left = sum(lane.num_left for lane in lanes)
    print(
        f"tests     {'interrupted: ' if interrupted else ''}{_said(counts, alone)}"
        f"{f', {left} not run' if left else ''}"
        f" in {lasted_s / 60:.1f} min, CPU {cpu_s / 60:.1f} min",
        flush=True,
    )


def _commit() -> str:
    """The last commit that changed the product or its tests, marked if files differ from it."""

    def git(*words: str) -> str:
        try:
            return subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
            ).stdout.strip()
        except FileNotFoundError:
            return ""

    places = (*PRODUCT, "tests", ":!tests/flakes.txt")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *places)
    commit = git("log", "-1", "--format=%h", "--", *places) or "unknown"
    return f"{commit} with changes" if changed else commit


# --- the page of thorough runs ---
def _added_up(
    words: dict[str, list[str]], commit: str, counts: Counter[str], lasted_s: float
) -> dict[str, Line]:
    """Lane, or lanes that ran together -> its last run at this commit, this run among them."""
    file = FOLDER / "thorough.json"
    former = json.loads(file.read_text()) if file.exists() else {}
    parts = {
        key: part
        for key, part in former.items()
        if part["commit"] == commit and not set(key.split(",")) & set(words)
    }
    parts[",".join(words)] = {"commit": commit, "counts": counts, "s": lasted_s}
    file.write_text(json.dumps(parts))
    return parts


def _write(parts: dict[str, Line], commit: str) -> None:
    """Replace the last run on the page, if all lanes have run."""
    lacking = [lane for lane in LANES if lane not in ",".join(parts).split(",")]
    if lacking:
        print(f"page      not written: LANES={','.join(lacking)} have not run at {commit}")
        return
    counts = sum((Counter(part["counts"]) for part in parts.values()), Counter[str]())
    minutes = sum(part["s"] for part in parts.values()) / 60
    before, _, _ = PAGE.read_text().partition(BEGIN)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    PAGE.write_text(
        f"{before}{BEGIN}\n"
        f"| commit | date | result | minutes | cores |\n|---|---|---|---|---|\n"
        f"| {commit} | {today} | {_said(counts)} | {minutes:.0f} | {os.cpu_count()} |\n"
    )
    print(f"page      {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
