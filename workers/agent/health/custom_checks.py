"""Runs a site's own health checks: executables in a folder; the exit code is the result."""

import asyncio
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog
from msgspec import Struct

from ....events.detached_thread import BlockingCalls, Late
from ....events.records.reports import CheckHealth
from ....events.words import listed
from ...host import linux
from ..processes.process import Process
from ..processes.shim import CHECK, Shim
from . import limits
from .debounce import Debouncer
from .finding import Finding

CODES: tuple[CheckHealth, ...] = ("healthy", "degraded", "unhealthy", "unknown")
"""The meaning of exit codes 0 to 3."""
FILES = "checks/files"
"""The check that reports files in the folder that cannot be run as checks."""
# The shim starts sh from the node's own disk. If the check's disk hangs, only sh hangs.
_START = f'exec nice -n {limits.CHECK_NICE_NUM} "$0" 2>/dev/null'
_DEVICES = re.compile(r"^gpu([0-9]{1,4})((?:[, ]+gpu[0-9]{1,4})*): ", re.IGNORECASE)
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
    reported = {
        name: why
        for name, why in skipped.items()
        if not name.lower().endswith((".md", ".txt")) or why != "not executable"
    }
    if not reported:
        return Finding(FILES, "healthy")
    words = [f"{name} ({why})" for name, why in sorted(reported.items())]
    why = "".join(char if char.isprintable() else "?" for char in listed(words))
    return Finding(FILES, "unknown", f"not run: {why}"[: limits.REASON_CHARS_MAX], rule="check")


def finding(name: str, answer: CheckResult, num_slots: int) -> Finding:
    """The finding of a result. An output `gpu0, gpu3: reason` names the affected slots."""
    first = next((line for line in answer.output.splitlines() if line.strip()), "")
    text = "".join(char if char.isprintable() else " " for char in first).strip()
    devices: tuple[int, ...] = ()
    if match := _DEVICES.match(text):
        slots = [int(digits) for digits in re.findall("[0-9]+", match[0])]
        if all(slot < num_slots for slot in slots):
            devices = tuple(sorted(set(slots)))
            text = text[match.end() :]
    text = text[: limits.REASON_CHARS_MAX]
    if answer.code is None or answer.code >= len(CODES):
        why = answer.why or f"exit code {answer.code}"
        if answer.code in (126, 127):
            why += ", it cannot be run"
        return Finding(f"check/{name}", "unknown", f"{why}: {text}" if text else why, rule="check")
    return Finding(
        f"check/{name}",
        CODES[answer.code],
        text or f"exit code {answer.code}",
        devices,
        rule="check",
    )


class CheckRunner:
    """Runs each check as a process of the shim, and ends it with its descendants."""

    def __init__(self, shim: Shim, environment: Mapping[str, str], mark: tuple[str, str]) -> None:
        self._shim = shim
        self._environment = environment
        self._mark = mark
        self._limit = asyncio.Semaphore(limits.CHECKS_CONCURRENT_NUM)
        self._left: dict[str, linux.Proc] = {}

    async def __call__(self, name: str, path: Path, s_max: float) -> CheckResult:
        """Run a check when a place is free. The run takes at most `s_max` plus CHECK_END_S_MAX."""
        left = self._left.get(name)
        now = linux.read(left.pid) if left is not None else None
        if (
            left is not None
            and now is not None
            and now.start_ticks == left.start_ticks
            and now.state not in "ZX"
        ):
            return CheckResult(None, "", f"the last run, pid {left.pid}, cannot be killed")
        self._left.pop(name, None)
        async with self._limit:
            output = _Output()
            try:
                process = self._start(name, path, output.theirs)
            except OSError as error:
                output.close()
                return CheckResult(None, "", f"it cannot be run: {error}")
            finally:
                os.close(output.theirs)
            try:
                async with asyncio.timeout(s_max):
                    how = await process.wait()
            except TimeoutError:
                return CheckResult(None, output.text(), f"no answer within {s_max:g} s")
            else:
                text = output.text()
                if how.exit_code is None:
                    return CheckResult(None, text, f"ended by signal {how.signal}")
                return CheckResult(how.exit_code, text)
            finally:
                output.close()
                if not await process.end_group(limits.CHECK_END_S_MAX):
                    _log.warning("a check cannot be killed", check=name, pid=process.pid)
                    if (proc := linux.read(process.pid)) is not None:
                        self._left[name] = proc
                    process.close()

    def _start(self, name: str, path: Path, output: int) -> Process:
        """Start a check, which writes to the file `output`. Raises OSError."""
        key, variable = CHECK + name, self._mark[0]
        mark = self._mark[1] + key
        pid = self._shim.start(
            key,
            b"",
            ["/bin/sh", "-c", _START, str(path)],
            {**self._environment, variable: mark, "UNICRON_CHECK": name},
            output,
            files={},
        )
        return Process(pid, Path(os.devnull), 0, f"{variable}={mark}".encode(), self._shim, key)


class _Output:
    """Keeps the beginning of a check's output; reads and drops the rest, so no check blocks."""

    def __init__(self) -> None:
        self._fd, self.theirs = os.pipe2(os.O_CLOEXEC)
        self._kept = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._read)

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
        self._kept = (self._kept + data)[: limits.CHECK_READ_BYTES]
        return len(self._kept) < limits.CHECK_READ_BYTES

    def text(self) -> str:
        """The output of an ended check, at most CHECK_READ_BYTES."""
        while self._read():
            pass
        return self._kept.decode("utf-8", errors="replace")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class CheckSchedule:
    """Runs all checks of a folder periodically; files may be added or removed meanwhile."""

    def __init__(
        self,
        checks: CheckOptions,
        run: CheckRunner,
        num_slots: int,
        report: Callable[[Finding], None],
        reported: Callable[[str], Finding | None] = lambda check: None,
    ) -> None:
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
                    steady[name] = Debouncer(
                        num_better=limits.CHECK_LOOKS_BETTER_NUM,
                        reported=self._reported(f"check/{name}"),
                    )
                    rounds[name] = group.create_task(
                        self._repeat(name, self._checks.folder / name, steady[name]),
                        name=f"check {name}",
                    )
                await asyncio.sleep(self._checks.every_s)

    async def _look(self, calls: BlockingCalls[Listing]) -> dict[str, Path] | None:
        """The current checks; None if the folder cannot be listed."""
        try:
            found, skipped = await calls.call(
                lambda: find_checks(self._checks.folder), self._checks.s_max
            )
        except (Late, OSError) as error:
            self._report(
                Finding(
                    "checks",
                    "unknown",
                    f"{self._checks.folder} cannot be listed: "
                    f"{getattr(error, 'strerror', None) or 'no answer'}",
                    rule="check",
                )
            )
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
            await asyncio.sleep(
                min(limits.CHECKS_CONFIRM_S, every_s) if steady.is_worsening else every_s
            )
