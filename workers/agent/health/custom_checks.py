"""Runs a site's own health checks: executables in a folder; the exit code is the result."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog
from msgspec import Struct

from ....events.errors import UsageError
from ....events.records.reports import CheckHealth
from ...host import linux
from ...host.detached_thread import BlockingCalls, Late
from ..processes import process as processes
from . import limits
from .debounce import Debouncer
from .finding import Finding

HINT = "name a folder of executables: docs/guides/detection.md, Health of nodes"
CODES: tuple[CheckHealth, ...] = ("healthy", "degraded", "unhealthy", "unknown")
"""The meaning of exit codes 0 to 3."""
FILES = "checks/files"
"""The check that reports files in the folder that cannot be run as checks."""
# The agent starts sh from the node's own disk. If the check's disk hangs, only sh hangs.
_START = f'exec nice -n {limits.CHECK_NICE_NUM} "$0"'
_DEVICES = re.compile(r"^gpu(\d+)((?:[, ]+gpu\d+)*): ", re.IGNORECASE)
_log = structlog.get_logger("agent")


class CheckOptions(Struct, frozen=True, kw_only=True):
    """The folder of checks, their period, and the time limit of a run."""

    folder: Path
    every_s: float = limits.CHECKS_EVERY_S
    s_max: float = limits.CHECKS_S_MAX


class CheckResult(NamedTuple):
    """The result of a run: its exit code and output. Without an exit code `why` has the reason."""

    code: int | None
    output: str
    why: str = ""


def check_folder(folder: Path) -> None:
    """Raises UsageError if the folder cannot be read."""
    try:
        with os.scandir(folder):
            pass
    except OSError as error:
        raise UsageError(f"--checks {folder}: {(error.strerror or str(error)).lower()}",
                         HINT) from None


Listing = tuple[dict[str, Path], dict[str, str]]
"""Executables by name, at most CHECKS_NUM_MAX, and skipped files by name with the reason."""


def find_checks(folder: Path) -> Listing:
    """List the checks of a folder. Raises OSError."""
    found: dict[str, Path] = {}
    skipped: dict[str, str] = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") or entry.name.endswith("~"):
            continue
        try:
            is_file = stat.S_ISREG(entry.stat().st_mode)
        except OSError:
            is_file = False
        if not is_file:
            skipped[entry.name] = "not a file"
        elif not os.access(entry.path, os.X_OK):
            skipped[entry.name] = "not executable"
        elif not re.fullmatch(r"[\w.+-]{1,64}", entry.name):
            skipped[entry.name] = "not a plain name"
        elif len(found) == limits.CHECKS_NUM_MAX:
            skipped[entry.name] = f"more than {limits.CHECKS_NUM_MAX}"
        else:
            found[entry.name] = Path(entry.path)
    return found, skipped


def skipped_files(skipped: Mapping[str, str]) -> Finding:
    """The finding on skipped files that the owner may take for checks."""
    reported = {name: why for name, why in skipped.items()
                if not name.lower().endswith((".md", ".txt")) or why != "not executable"}
    if not reported:
        return Finding(FILES, "healthy")
    words = [f"{name} ({why})" for name, why in sorted(reported.items())]
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    why = "".join(char if char.isprintable() else "?" for char in ", ".join(words[:3]) + more)
    return Finding(FILES, "unknown", f"not run: {why}"[:limits.REASON_CHARS_MAX], rule="check")


def finding(name: str, answer: CheckResult, num_slots: int) -> Finding:
    """The finding of a result. An output `gpu0, gpu3: reason` names the affected slots."""
    first = next((line for line in answer.output.splitlines() if line.strip()), "")
    text = "".join(char if char.isprintable() else " " for char in first).strip()
    devices: tuple[int, ...] = ()
    if match := _DEVICES.match(text):
        slots = [int(digits) for digits in re.findall(r"\d+", match[0])]
        if all(slot < num_slots for slot in slots):
            devices = tuple(sorted(set(slots)))
            text = text[match.end():]
    text = text[:limits.REASON_CHARS_MAX]
    if answer.code is None or answer.code >= len(CODES):
        why = answer.why or f"exit code {answer.code}"
        if answer.code in (126, 127):
            why += ", it cannot be run"
        return Finding(f"check/{name}", "unknown", f"{why}: {text}" if text else why, rule="check")
    return Finding(f"check/{name}", CODES[answer.code], text or f"exit code {answer.code}",
                   devices, rule="check")


class CheckRunner:
    """Runs each check as a process, and ends it with its descendants."""

    def __init__(self, environment: Mapping[str, str], mark: tuple[str, str]) -> None:
        self._environment = environment
        self._mark = mark
        self._limit = asyncio.Semaphore(limits.CHECKS_CONCURRENT_NUM)
        self.pids: set[int] = set()
        self._left: dict[str, linux.Proc] = {}

    async def __call__(self, name: str, path: Path, s_max: float) -> CheckResult:
        """Run a check when a place is free. The run takes at most `s_max` plus CHECK_END_S_MAX."""
        left = self._left.get(name)
        now = linux.read(left.pid) if left is not None else None
        if left is not None and now is not None and now.start_ticks == left.start_ticks \
                and now.state not in "ZX":
            return CheckResult(None, "", f"the last run, pid {left.pid}, cannot be killed")
        self._left.pop(name, None)
        async with self._limit:
            mark = self._mark[0], f"{self._mark[1]}check/{name}"
            try:
                popen = _start(path, {**self._environment, mark[0]: mark[1], "UNICRON_CHECK": name})
            except OSError as error:
                return CheckResult(None, "", f"it cannot be run: {error.strerror}")
            assert popen.stdout is not None
            self.pids.add(popen.pid)
            process = processes.Process(popen.pid, Path(os.devnull), 0,
                                        f"{mark[0]}={mark[1]}".encode(), popen)
            output = _Output(popen.stdout.fileno())
            try:
                try:
                    async with asyncio.timeout(s_max):
                        how = await process.wait()
                except TimeoutError:
                    return CheckResult(None, output.text(), f"no answer within {s_max:g} s")
                text = output.text()
                if how.exit_code is None:
                    return CheckResult(None, text, f"ended by signal {how.signal}")
                return CheckResult(how.exit_code, text)
            finally:
                output.close()
                popen.stdout.close()
                if not await process.end_group(limits.CHECK_END_S_MAX):
                    _log.warning("a check cannot be killed", check=name, pid=popen.pid)
                    if (proc := linux.read(popen.pid)) is not None:
                        self._left[name] = proc
                    process.close()
                self.pids.discard(popen.pid)


def _start(path: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a check. The kernel kills it when the agent or this thread ends. Raises OSError."""
    parent = os.getpid()
    return subprocess.Popen(
        ["/bin/sh", "-c", _START, str(path)], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(environment),
        start_new_session=True, preexec_fn=lambda: linux.die_with(parent))


class _Output:
    """Keeps the beginning of a check's output; reads and drops the rest, so no check blocks."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kept = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._fd)
            return False
        self._kept = (self._kept + data)[:limits.CHECK_READ_BYTES]
        return len(self._kept) < limits.CHECK_READ_BYTES

    def text(self) -> str:
        """The output of an ended check, at most CHECK_READ_BYTES."""
        while self._read():
            pass
        return self._kept.decode("utf-8", errors="replace")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)


class CheckSchedule:
    """Runs all checks of a folder periodically; files may be added or removed meanwhile."""

    def __init__(self, checks: CheckOptions, run: CheckRunner, num_slots: int,
                 report: Callable[[Finding], None],
                 reported: Callable[[str], Finding | None] = lambda check: None) -> None:
        """`reported` tells the last report of a former agent on a check."""
        self._checks = checks
        self._reported = reported
        self._run = run
        self._num_slots = num_slots
        self._report = report
        self._files = Finding(FILES, "healthy")

    async def run(self) -> None:
        """Run until cancelled."""
        rounds: dict[str, asyncio.Task[None]] = {}
        steady: dict[str, Debouncer] = {}
        calls = BlockingCalls[Listing]("checks")
        async with asyncio.TaskGroup() as group:
            while True:
                found = await self._look(calls)
                for name in set(rounds) - set(found if found is not None else rounds):
                    rounds.pop(name).cancel()
                    if steady.pop(name).reported.health != "healthy":
                        self._report(Finding(f"check/{name}", "healthy", "the check was removed"))
                for name in sorted(set(found or ()) - set(rounds)):
                    steady[name] = Debouncer(num_better=limits.CHECK_LOOKS_BETTER_NUM,
                                             reported=self._reported(f"check/{name}"))
                    rounds[name] = group.create_task(self._repeat(
                        name, self._checks.folder / name, steady[name]), name=f"check {name}")
                await asyncio.sleep(self._checks.every_s)

    async def _look(self, calls: BlockingCalls[Listing]) -> dict[str, Path] | None:
        """The current checks; None if the folder cannot be listed."""
        try:
            found, skipped = await calls.call(lambda: find_checks(self._checks.folder),
                                              self._checks.s_max)
        except (Late, OSError) as error:
            self._report(Finding("checks", "unknown", f"{self._checks.folder} cannot be listed: "
                                 f"{getattr(error, 'strerror', None) or 'no answer'}",
                                 rule="check"))
            return None
        self._report(Finding("checks", "healthy"))
        files = skipped_files(skipped)
        if files != self._files:
            self._files = files
            self._report(files)
        return found

    async def _repeat(self, name: str, path: Path, steady: Debouncer) -> None:
        while True:
            answer = await self._run(name, path, self._checks.s_max)
            changed = steady.see(finding(name, answer, self._num_slots))
            if changed is not None:
                self._report(changed)
            # A second run soon confirms a worse result; the next period confirms a better one.
            every_s = self._checks.every_s
            await asyncio.sleep(min(limits.CHECKS_CONFIRM_S, every_s) if steady.is_worsening
                                else every_s)
