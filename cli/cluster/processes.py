"""Detached processes: identity by pid file, start, wait, stop.

The kernel gives the pid of a process that ended to another one. So a pid file also holds the start
time of its process: a signal to a pid alone could end a stranger. And a folder may be a copy, or of
another person: a pid file also holds which folder it was written in.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from ...events.log.embedded_server import start_time
from ...events.process_io import defer_signals
from ...events.regular_files import open_regular, open_to_write
from .state_dir import StateDir, read_json, write_json

POLL_S = 0.02
KILLED_S_MAX = 10.0
LAST_BYTES = 64 << 10
LAST_WORDS_CHARS_MAX = 300
PIDS_NUM_MAX = 1 << 31
WORD = re.compile(r"[^\W_]")


class Process(Struct, frozen=True):
    """One of our processes; `started` distinguishes it from a later process with the same pid."""

    name: str
    pid: int
    started: str

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; a zombie counts as ended. A process that ended before its pid file
        was written has no start time, and counts as ended too."""
        return self.started != "" and start_time(self.pid) == self.started


def find(state: StateDir, name: str) -> Process | None:
    """The live process with this name, by its pid file. A stale file is deleted."""
    path = state.pids / f"{name}.json"
    data = read_json(path)
    if data is None:
        return None
    pid, started = data.get("pid"), data.get("started")
    if isinstance(pid, int) and 1 < pid < PIDS_NUM_MAX and isinstance(started, str):
        process = Process(name=name, pid=pid, started=started)
        if process.is_alive and (data.get("folder") == _identity(state) or _is_of(state, pid)):
            return process
    discard(path)
    return None


def discard(path: Path) -> None:
    """Delete a file about a process that has ended. On a read-only disk it stays: nothing needs it
    to be gone, and all processes have to be ended."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _identity(state: StateDir) -> str:
    """Of the folder; a copy has another one."""
    status = state.path.stat()
    return f"{status.st_dev}:{status.st_ino}"


def _is_of(state: StateDir, pid: int) -> bool:
    """Whether the process has a file of this folder open, as its output or a lock: for pid files of
    0.3.0, and a folder that was mounted again. True where /proc does not tell: there is none, or it
    is another user's process, which gets no signal of ours."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        opened = [os.readlink(link) for link in folder.iterdir()]
    except OSError:
        return True
    root = state.path.resolve()
    return any(Path(path).is_relative_to(root) for path in opened)


def names(state: StateDir) -> list[str]:
    """Every name with a pid file, sorted."""
    return sorted(path.stem for path in state.pids.glob("*.json"))


def record(state: StateDir, name: str, pid: int) -> Process:
    """Write the pid file of a running process."""
    process = Process(name=name, pid=pid, started=start_time(pid))
    note = {"pid": pid, "started": process.started, "folder": _identity(state)}
    write_json(state.pids / f"{name}.json", note)
    return process


def start(
    state: StateDir, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> Process:
    """Start a process in its own session; its output is appended to `logs/NAME.log`."""
    with open_to_write(state.logs / f"{name}.log", appends=True) as log, defer_signals():
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        child.returncode = 0  # nothing waits for it; this keeps Popen from warning
        try:
            return record(state, name, child.pid)
        except OSError:  # without its file nobody finds it
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            raise


def stop_together(state: StateDir, together: Sequence[Process], grace_s: float) -> None:
    """Send SIGTERM to all, and SIGKILL to the rest after `grace_s`; wait until all have ended."""
    for process in together:
        signal_to(process, signal.SIGTERM if grace_s else signal.SIGKILL)
    deadline_s = time.monotonic() + grace_s
    for process in together:
        if not wait_gone(process, max(deadline_s - time.monotonic(), 0.0)):
            signal_to(process, signal.SIGKILL)
            wait_gone(process, KILLED_S_MAX)
        discard(state.pids / f"{process.name}.json")


def signal_to(process: Process, number: int) -> None:
    """Send a signal to the process if it still runs."""
    if process.is_alive:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            pass


def wait_gone(process: Process, limit_s: float) -> bool:
    """Wait until the process has ended; False if it still runs after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while process.is_alive:
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def last_output(state: StateDir, name: str) -> str:
    """The last line of a process's output; an `error:` line among the last two is preferred."""
    try:
        with open_regular(state.logs / f"{name}.log") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - LAST_BYTES, 0))
            text = file.read(LAST_BYTES).decode(errors="replace")
    except OSError:
        return ""
    # The traceback of an exception group has a prefix on each line and a border at its end.
    lines = [line.strip(" |+-") for line in text.splitlines() if WORD.search(line)]
    lines = lines or ["no output"]
    errors = [line.removeprefix("error: ") for line in lines[-2:] if line.startswith("error: ")]
    return " ".join((errors or lines)[-1].split())[:LAST_WORDS_CHARS_MAX]
