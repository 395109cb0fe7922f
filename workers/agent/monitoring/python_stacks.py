"""Reads the Python stacks of a process from outside it: by py-spy, else by a signal.

py-spy reads the memory of the process, in any state of it: while C code holds the GIL, while it is
stopped, while it waits for a device. It neither stops the process nor changes anything in it. It
runs as the user of the rank, so that a hostile process gains nothing by what py-spy finds in it.
It needs the right to trace the process. Without that, a process that has promised so is sent a
signal at which Python's faulthandler writes the stacks (docs/decisions/dependency-py-spy.md).
"""

import asyncio
import os
import re
import shutil
import sysconfig
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ....events.decoding import from_json
from ....events.records.reports import StacksReader
from ....events.regular_files import open_regular
from ...host.rank_user import RankUser
from ...ipc import stack_signal

READ_S_MAX = 1.0
"""Limit of py-spy for one process. It takes 15 ms (measured, with torch loaded)."""
END_S_MAX = 0.1
"""How long the end of a py-spy that was killed is waited for."""
READ_BYTES_MAX = 1 << 20
SIGNAL_S_MAX = 0.4
"""How long the answer to the signal is waited for."""
SIGNAL_BYTES_MAX = 128 << 10
QUIET_S = 0.02
"""After this time without a new byte the answer is whole."""
DENIED = ("Permission denied", "Permission Denied", "Operation not permitted")
"""What py-spy, and the kernel by it, says without the right to trace."""
FRAMES_NUM_MAX = 12
"""The innermost frames that a report has."""
_FAULTHANDLER = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class Stacks(NamedTuple):
    """The stacks of one process."""

    pid: int
    reader: StacksReader
    text: str
    """All threads; "": they could not be read."""
    innermost: str
    """The innermost frames of the thread that works, innermost first, a line each."""
    why: str = ""
    """Why they could not be read."""


WORKER, WAITS_IN = "collective", "run_detached"
"""The thread in which a rank lets its model and its collectives run, where a wait for others could
not be interrupted; and where its main thread waits for that (process/control_thread.py)."""


class _Frame(Struct):
    name: str
    filename: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.filename}:{self.line})"

    @property
    def short(self) -> str:
        return f"{self.name} ({os.path.basename(self.filename)}:{self.line})"


class _Thread(Struct):
    frames: list[_Frame]
    os_thread_id: int | None = None
    thread_name: str | None = None
    active: bool = False
    owns_gil: bool = False

    def __str__(self) -> str:
        does = "runs" if self.active else "waits"
        gil = ", holds the GIL" if self.owns_gil else ""
        head = f'Thread {self.os_thread_id} "{self.thread_name or ""}" {does}{gil}'
        return "\n".join([head, *(f"    {frame}" for frame in self.frames)])


async def read(pid: int, user: RankUser | None, dump: Path | None) -> Stacks:
    """Read the stacks of a process, which runs as `user` (None: as the agent). `dump`: the file to
    which it may have promised to write them. Takes READ_S_MAX and SIGNAL_S_MAX at most."""
    stacks = await _by_py_spy(pid, user)
    if not stacks.text and dump is not None:
        answer = await asyncio.to_thread(_by_signal, pid, dump)
        stacks = answer if answer.text else stacks._replace(why=f"{stacks.why}; {answer.why}")
    return stacks


# --- py-spy ---
def py_spy() -> str | None:
    """The program, of this environment or of PATH."""
    own = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(own) if os.access(own, os.X_OK) else shutil.which("py-spy")


async def _by_py_spy(pid: int, user: RankUser | None) -> Stacks:
    program = py_spy()
    if program is None:
        return Stacks(pid, "", "", "", "py-spy is not installed")
    try:
        output, error = await _run(
            (program, "dump", "--json", "--nonblocking", "--pid", str(pid)), user
        )
        threads = from_json(output, list[_Thread]) if output else []
    except TimeoutError:
        return Stacks(pid, "", "", "", f"py-spy did not answer within {READ_S_MAX:g} s")
    except (OSError, ValueError) as failed:
        return Stacks(pid, "", "", "", f"py-spy: {failed}")
    if not threads:
        return Stacks(pid, "", "", "", f"py-spy: {_why(error)}")
    threads = _in_order(threads, pid)
    return Stacks(
        pid, "py-spy", "\n".join(map(str, threads)), _innermost(f.short for f in threads[0].frames)
    )


def _in_order(threads: Sequence[_Thread], pid: int) -> list[_Thread]:
    """The main thread comes first. If it only waits for a thread in which the rank lets its model
    and its collectives run, the newest of these does: that is where the rank hangs."""
    waits = any(
        frame.name.rpartition(".")[2] == WAITS_IN
        for thread in threads
        if thread.os_thread_id == pid
        for frame in thread.frames
    )

    def order(thread: _Thread) -> tuple[bool, bool, int]:
        works = waits and thread.thread_name == WORKER
        return not works, thread.os_thread_id != pid, -(thread.os_thread_id or 0)

    return sorted(threads, key=order)


async def _run(argv: Sequence[str], user: RankUser | None) -> tuple[bytes, str]:
    """What a program prints, READ_BYTES_MAX at most; its error. Raises OSError, TimeoutError."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
        env={"LC_ALL": "C", "RUST_BACKTRACE": "0"},
        user=None if user is None else user.uid,
        group=None if user is None else user.gid,
        extra_groups=None if user is None else user.groups,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(READ_S_MAX):
            output, error = await _bounded(process.stdout), await _bounded(process.stderr)
            await process.wait()
    except BaseException:
        with suppress(ProcessLookupError, TimeoutError):
            process.kill()  # asyncio reaps it, as soon as it can end
            await asyncio.wait_for(process.communicate(), END_S_MAX)
        raise
    return output, error.decode("utf-8", "replace")


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while part := await stream.read(READ_BYTES_MAX - len(data)):
        data += part
        if len(data) >= READ_BYTES_MAX:
            raise OSError(f"more than {READ_BYTES_MAX} bytes")
    return bytes(data)


def _why(error: str) -> str:
    """The reason in what py-spy prints when it fails."""
    if any(words in error for words in DENIED):
        return "this agent may not read the memory of the process (ptrace)"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return (lines[0] if lines else "it printed nothing")[:200]


def _innermost(frames: Iterable[str]) -> str:
    return "\n".join(list(frames)[:FRAMES_NUM_MAX])


# --- the signal ---
def _by_signal(pid: int, dump: Path) -> Stacks:
    """Ask the process itself, if it has promised to answer. Takes SIGNAL_S_MAX at most."""
    try:
        before = dump.stat().st_size
    except OSError:
        return Stacks(pid, "", "", "", "the process does not answer a signal")
    if not stack_signal.answers(pid):
        return Stacks(pid, "", "", "", "the process does not answer a signal any more")
    try:
        os.kill(pid, stack_signal.SIGNAL)
        text = _answer(dump, before)
    except OSError as error:
        return Stacks(pid, "", "", "", f"signal: {error.strerror or error}")
    if not text:
        return Stacks(pid, "", "", "", f"it did not answer a signal within {SIGNAL_S_MAX:g} s")
    return Stacks(pid, "signal", text, _innermost_of_answer(text))


def _answer(dump: Path, before: int) -> str:
    """What is written behind `before` bytes until nothing more comes. Raises OSError."""
    last_s, size, since_s = time.monotonic() + SIGNAL_S_MAX, before, time.monotonic()
    while (now_s := time.monotonic()) < last_s:
        if (now := dump.stat().st_size) != size:
            size, since_s = now, now_s
        elif size > before and now_s - since_s > QUIET_S:
            break
        time.sleep(QUIET_S / 4)
    with open_regular(dump, follow=False) as file:
        file.seek(before)
        return file.read(SIGNAL_BYTES_MAX).decode("utf-8", "replace").strip()


def _innermost_of_answer(text: str) -> str:
    """The frames of the thread that got the signal: the main thread, unless that blocks it."""
    _, _, current = text.rpartition("Current thread")
    frames = (_FAULTHANDLER.match(line) for line in current.splitlines())
    return _innermost(
        f"{frame[3]} ({os.path.basename(frame[1])}:{frame[2]})" for frame in frames if frame
    )
