"""Keeps what a process does before it is ended: its stacks, its last collective, what NCCL says.

All that is in one file beside the output of the process, and its essence in the report StacksKept.
Nothing of it changes what happens to the process: what cannot be read in time is left out.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog

from ....events.collectives import Op
from ....events.errors import UsageError
from ....events.records.reports import StacksKept, StacksReader
from ....events.regular_files import open_to_write
from ....events.timing import STACKS_S_MAX
from ...diagnosis import dump_files
from ...host import linux
from ...host.rank_user import RankUser
from ...ipc import stack_signal
from ..processes.former_outputs import STACKS
from ..processes.process import Process
from ..processes.rank_process import RankAttempt
from . import nccl_ras, process_state, python_stacks
from .flight_recorder_dumps import dump_path
from .python_stacks import Stacks

FILE_BYTES_MAX = 256 << 10
GATHER_S_MAX = STACKS_S_MAX - 0.4
"""The rest is for the file."""
PROCESSES_NUM_MAX = 8
"""Processes of one rank that are read: the one that trains, then its oldest descendants."""
THREADS_NUM_MAX = 64
"""Threads of the main process whose state in the kernel is written down."""
DUMP_BYTES_MAX = 8 << 20
OPS_NUM_MAX = 64
STACK_CHARS_MAX = 2000
INTERPRETERS = ("python", "pypy")
"""Names of programs begin so."""
RESTART_S_MAX = 1.0
"""How much older than its process a dump may look: clocks of the kernel are coarse."""
_log = structlog.get_logger("agent")


def file_of(log_path: Path) -> Path:
    """The file with what a process did, beside its output."""
    return log_path.with_suffix(STACKS)


async def keep(
    rank: RankAttempt, mark: str, user: RankUser | None, environment: Mapping[str, str]
) -> StacksKept:
    """Keep what a running rank does; `mark` is what its progress page says. Takes STACKS_S_MAX at
    most. `environment`: that of the rank, which says where NCCL's service is."""
    process, began_s = rank.process, time.monotonic()
    assert process is not None
    kept = _Found(rank, process, mark)
    kept.why = await _within(
        GATHER_S_MAX,
        asyncio.gather(kept.read_stacks(user), kept.read_dump(), kept.read_ras(environment)),
    )
    data = rank.redactor.text(kept.text()).encode("utf-8", "replace")[:FILE_BYTES_MAX]
    path = file_of(process.log_path)
    left_s = max(STACKS_S_MAX - (time.monotonic() - began_s), 0.05)
    unwritten = await _within(left_s, asyncio.to_thread(_write, path, data))
    order = rank.order
    return StacksKept(
        task=order.task,
        rank=order.rank,
        attempt=order.attempt,
        path="" if unwritten else str(path),
        num_bytes=0 if unwritten else len(data),
        reader=kept.reader,
        stack=rank.redactor.text(kept.innermost)[:STACK_CHARS_MAX],
        mark=mark,
        why=rank.redactor.text("; ".join(filter(None, (*kept.reasons(), unwritten)))),
        nccl_ras=rank.redactor.text(nccl_ras.trouble(kept.ras)),
        took_s=time.monotonic() - began_s,
    )


async def _within(s_max: float, work: Awaitable[object]) -> str:
    """Wait for `work`; why it has not been done, or ""."""
    try:
        async with asyncio.timeout(s_max):
            await work
    except TimeoutError:
        return f"not all was read within {s_max:g} s"
    except OSError as error:
        return f"not written: {error.strerror or error}"
    return ""


def _write(path: Path, data: bytes) -> None:
    with open_to_write(path) as file:  # its process may have put a pipe there
        file.write(data)


class _Found:
    """What is known of a rank so far."""

    def __init__(self, rank: RankAttempt, process: Process, mark: str) -> None:
        self.ras = ""
        self.why = ""
        self._rank, self._process, self._mark = rank, process, mark
        self._kernel = ""
        self._stacks: list[Stacks] = []
        self._dump = ""

    async def read_stacks(self, user: RankUser | None) -> None:
        """Those of the process that trains, then of its Python descendants."""
        first = self._process.trained_by
        self._kernel = await asyncio.to_thread(_in_kernel, first)
        dump = stack_signal.dump_file_of(self._process.log_path, self._process.folder)
        self._stacks.append(await python_stacks.read(first, user, dump))
        others = await asyncio.to_thread(_python_processes, self._process.live(), first)
        self._stacks += await asyncio.gather(
            *(python_stacks.read(pid, user, None) for pid in others)
        )

    async def read_dump(self) -> None:
        self._dump = await asyncio.to_thread(
            _collectives, dump_path(self._process.folder, self._rank.order.rank), self._process.pid
        )

    async def read_ras(self, environment: Mapping[str, str]) -> None:
        if endpoint := nccl_ras.address(environment):
            self.ras = await nccl_ras.status(endpoint)

    @property
    def _read(self) -> list[Stacks]:
        return [stacks for stacks in self._stacks if stacks.text]

    @property
    def reader(self) -> StacksReader:
        return self._read[0].reader if self._read else ""

    @property
    def innermost(self) -> str:
        return next((stacks.innermost for stacks in self._read), "")

    def reasons(self) -> Iterable[str]:
        """Why the process that trains, or all, could not be read."""
        yield self.why
        if not self._read:
            yield next((stacks.why for stacks in self._stacks), "")

    def text(self) -> str:
        order = self._rank.order
        parts = [
            f"task {order.task} rank {order.rank} attempt {order.attempt}, before it was ended",
            f"progress page: {self._mark}" if self._mark else "",
            *(
                f"--- Python stacks of process {each.pid} (by {each.reader})\n{each.text}"
                if each.text
                else f"--- no Python stacks of process {each.pid}: {each.why}"
                for each in self._stacks
            ),
            f"--- kernel\n{self._kernel}",
            f"--- torch's flight recorder\n{self._dump}" if self._dump else "",
            f"--- NCCL's RAS service\n{self.ras}" if self.ras else "",
            self.why,
        ]
        return "\n\n".join(filter(None, parts)) + "\n"


# --- /proc ---
def _in_kernel(pid: int) -> str:
    """What the process and each of its threads do, as the kernel says."""
    lines = [f"process {pid} {process_state.describe(pid, None)}"]
    with suppress(OSError):
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:THREADS_NUM_MAX]:
            lines.append(f"thread {thread} {_comm(thread)}: {process_state.describe(thread, None)}")
    return "\n".join(lines)


def _comm(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    return ""


def _python_processes(live: Iterable[linux.Proc], first: int) -> list[int]:
    """The Python processes among these, without `first`, oldest first."""
    oldest = sorted(live, key=lambda proc: (proc.start_ticks, proc.pid))
    pids = [proc.pid for proc in oldest if proc.pid != first and _is_python(proc.pid)]
    return pids[: PROCESSES_NUM_MAX - 1]


def _is_python(pid: int) -> bool:
    """Whether it runs an interpreter, by the name of its program. Without the right to read that
    nobody could read its stacks either."""
    with suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(INTERPRETERS)
    return False


# --- the flight recorder ---
def _collectives(path: Path, pid: int) -> str:
    """The unfinished collectives in the dump that this process has written at its stall, and the
    last finished one of each group; "": there is no such dump."""
    try:
        status = path.stat()
        if status.st_size > DUMP_BYTES_MAX or status.st_mtime < _started_s(pid) - RESTART_S_MAX:
            return ""
        (dump,) = dump_files.read_files([path]).dumps
    except (OSError, UsageError, ValueError):
        return ""
    lines = [f"{path}"]
    lines += [f"in {_op(op, dump.dumped_ns)}" for op in dump.pending[:OPS_NUM_MAX]]
    lines += [f"ended {_op(op, dump.dumped_ns)}" for op in dump.ended[-OPS_NUM_MAX:]]
    return "\n".join(lines)


def _op(op: Op, dumped_ns: int) -> str:
    number = f"{op.source}->{op.target}" if op.is_p2p else str(op.seq)
    of = f", {op.tensors}" if op.tensors else ""
    ago = f", entered {(dumped_ns - op.at_ns) / 1e9:.3f} s before" if dumped_ns else ""
    return f"{op.name} {number} of {op.group}{of}{ago}"


def _started_s(pid: int) -> float:
    """When a process began, in seconds since 1970; 0 if it is gone."""
    proc = linux.read(pid)
    if proc is None:
        return 0.0
    since_boot_s = proc.start_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
