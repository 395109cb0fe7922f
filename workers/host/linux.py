"""Linux calls of the agent: death signals, adoption of orphans, the process table."""

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# PyDLL keeps the interpreter's lock. The calls are made between fork and exec, where no other
# thread exists that could release the lock.
_libc = ctypes.PyDLL(None, use_errno=True)
_PDEATHSIG_CODE = 1
_NAME_CODE = 15
_OOM_FIRST_NUM = 1000
_SUBREAPER_CODE = 36


class Proc(NamedTuple):
    """One line of the process table. `start_ticks` distinguishes processes that reuse a pid."""

    pid: int
    state: str
    ppid: int
    pgid: int
    sid: int
    start_ticks: int


def die_with(parent: int) -> None:
    """Have the calling process killed when its parent ends. Call it in the child, before exec."""
    _libc.prctl(_PDEATHSIG_CODE, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name of this thread in tools such as ps and top, at most 15 bytes."""
    _libc.prctl(_NAME_CODE, name.encode(), 0, 0, 0)


def prefer_oom_kill() -> None:
    """When memory runs out, the kernel kills this process before any other (proc(5))."""
    Path("/proc/self/oom_score_adj").write_text(str(_OOM_FIRST_NUM), encoding="ascii")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be reaped."""
    if _libc.prctl(_SUBREAPER_CODE, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def read(pid: int) -> Proc | None:
    """Read one process; None if there is none. Zombies (state Z) are included."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return Proc(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def table() -> list[Proc]:
    """Read all processes. Linear in their number: about 20 us each (measured)."""
    found = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [proc for proc in found if proc is not None]


def environ(pid: int) -> list[bytes]:
    """The environment of a process, `NAME=value`; empty if it is gone or may not be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def thread_names() -> list[str]:
    """The names of this process's threads, the main thread first."""
    folders = sorted(Path("/proc/self/task").iterdir(), key=lambda one: int(one.name))
    return [(one / "comm").read_text(encoding="utf-8", errors="replace").strip() for one in folders]


def environ_after_execve(pid: int) -> list[bytes] | None:
    """As `environ`; None while a live process is inside execve, which sets its arguments and its
    environment at the same moment, near its end."""
    entries = environ(pid)
    if any(entries):
        return entries
    try:
        if not Path(f"/proc/{pid}/cmdline").read_bytes():
            return None
    except OSError:
        return []
    return environ(pid)  # execve ended between the two reads, or the environment is empty


def descendants(roots: set[int], procs: list[Proc]) -> list[Proc]:
    """The processes of `roots` and all their descendants."""
    children: dict[int, list[Proc]] = {}
    for proc in procs:
        children.setdefault(proc.ppid, []).append(proc)
    found = [proc for proc in procs if proc.pid in roots]
    for proc in found:  # grows during the loop
        found.extend(child for child in children.get(proc.pid, ()) if child.pid not in roots)
    return found


def family(pid: int) -> list[Proc]:
    """The process and its descendants, without a look at all other processes of the host."""
    members, todo = list[Proc](), [pid]
    while todo:
        process = todo.pop()
        with suppress(OSError):  # of some processes, /proc does not tell
            if (proc := read(process)) is None:
                continue
            members.append(proc)
            for thread in os.listdir(f"/proc/{process}/task"):
                text = Path(f"/proc/{process}/task/{thread}/children").read_text(encoding="ascii")
                todo += map(int, text.split())
    return members


def may_signal(pid: int) -> bool:
    """Whether this process may send signals to another one."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def kill(proc: Proc) -> None:
    """SIGKILL exactly this process; no effect if its pid has been reused, or without the right."""
    try:
        handle = os.pidfd_open(proc.pid)
    except ProcessLookupError:
        return
    try:
        now = read(proc.pid)
        if now is not None and now.start_ticks == proc.start_ticks:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # one with set-user-id
        pass
    finally:
        os.close(handle)


def reap(pid: int) -> None:
    """Reap a child that has ended; no effect if it is alive or not a child."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def dead_children(parent: int) -> list[int]:
    """Zombie children of a process without threads."""
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii").split()
        procs = [proc for pid in children if (proc := read(int(pid))) is not None]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        procs = [proc for proc in table() if proc.ppid == parent]
    return [proc.pid for proc in procs if proc.state == "Z"]


def kill_marked(
    marker: bytes, but: Callable[[Proc, bytes], bool] = lambda proc, entry: False
) -> list[Proc]:
    """SIGKILL every other process with an environment entry that begins with `marker`, unless `but`
    of the process and the entry is true. Returns those that were killed."""
    found: list[Proc] = []
    for proc in table():
        entry = next((one for one in environ(proc.pid) if one.startswith(marker)), b"")
        if entry and proc.pid != os.getpid() and not but(proc, entry):
            kill(proc)
            found.append(proc)
    return found
