"""Why a process ended: the order of the evidence, on texts and files and with a real agent."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agent_driver import (
    LocalNode,
    alive,
    command,
    go,
    local_node,
    new_shim,
    python,
    start,
    train,
    until,
    until_gone,
    until_text,
)
from memory_log import MemoryLog
from unicron.events.records import reports as r
from unicron.events.records.orders import Resume
from unicron.events.records.statuses import (
    CONNECTION_REFUSED,
    CONNECTION_RESET,
    EXITED_ABNORMALLY,
    ILLEGAL_MEMORY_ACCESS,
    OTHER_SOFTWARE,
)
from unicron.events.spec.job import JobSpec
from unicron.workers.agent import order_executor
from unicron.workers.agent.processes import exit_report, torch_files
from unicron.workers.agent.processes import process as process_module
from unicron.workers.agent.processes.exit_report import (
    CAUSE_CHARS_MAX,
    ExitEvidence,
    cause_of,
    clipped,
)
from unicron.workers.agent.processes.oom_kills import RECENT_S_MAX, Kills
from unicron.workers.agent.processes.process import Exit, Process
from unicron.workers.diagnosis.classifier import NOTHING, Verdict
from unicron.workers.host import linux

DATA = Path(__file__).parents[2] / "data"
REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"
RESET = "RuntimeError: Connection reset by peer"
ONE = Exit(1, None)
KILLED = Exit(None, signal.SIGKILL)
NO_FILE = Path("/nonexistent/error.json")
FAILS = "raise ConnectionRefusedError(111, 'Connection refused')\n"
pytestmark = pytest.mark.usefixtures("nothing_left")


def why(
    how: Exit, text: str = "", *, path: Path = NO_FILE, kills: dict[int, str] | None = None
) -> Verdict:
    """The cause that this evidence gives. `kills`: pid -> the kernel's line about an OOM kill."""
    by_pid = kills or {}
    return cause_of(
        ExitEvidence(
            how=how,
            text=text,
            path=path,
            killed=lambda pid: by_pid.get(pid, ""),
            pid=7,
            uid=os.geteuid(),
        )
    )


def error_file(folder: Path, message: object = REFUSED) -> Path:
    """An error file of an exception, as torch writes it."""
    path = folder / "error.json"
    path.write_text(json.dumps({"message": message}))
    return path


def raised(innermost: str, wrapper: str) -> str:
    return (
        'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    step()\n'
        f"{innermost}\n\nThe above exception was the direct cause of the following exception:"
        '\n\nTraceback (most recent call last):\n  File "train.py", line 9, in <module>\n'
        f"    main()\n{wrapper}\n"
    )


# --- which evidence is believed -----------------------------------------------------------------
def test_the_evidence_order_is_kernel_file_output_signal(tmp_path: Path) -> None:
    path = error_file(tmp_path)
    kills = {7: "Memory cgroup out of memory: Killed process 7 (python)"}
    assert why(KILLED, RESET, path=path, kills=kills) == Verdict(
        EXITED_ABNORMALLY, "oom-killer", line=kills[7]
    )
    assert why(KILLED, RESET, path=path).status == CONNECTION_REFUSED
    assert why(ONE, RESET, path=path).status == CONNECTION_REFUSED
    assert why(ONE, RESET).status == CONNECTION_RESET
    assert why(Exit(None, signal.SIGSEGV)) == NOTHING._replace(
        line="signal 11 (SIGSEGV): it accessed invalid memory (segmentation fault)"
    )
    assert why(Exit(None, signal.SIGABRT, dumped=True)).line.endswith(", core dumped")


def test_a_successful_exit_has_no_cause(tmp_path: Path) -> None:
    path = error_file(tmp_path)
    assert why(Exit(0, None), RESET, path=path, kills={0: "oom", 7: "oom"}) == NOTHING


def test_every_member_of_an_exception_group_is_read() -> None:
    group = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "train.py", line 9, in main\n  | ExceptionGroup: two (2 sub-exceptions)\n'
        "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n"
        '    |   File "train.py", line 3, in step\n'
        "    | RuntimeError: CUDA error: an illegal memory access was encountered\n"
        "    +---------------- 2 ----------------\n    | Traceback (most recent call last):\n"
        f'    |   File "train.py", line 4, in send\n    | {RESET}\n'
        "    +------------------------------------\n"
    )
    assert why(ONE, f"{raised(REFUSED, RESET)}\nthe next try went well\n{group}").status == (
        ILLEGAL_MEMORY_ACCESS
    )


def test_output_without_an_error_has_no_cause() -> None:
    assert why(ONE, "iteration 7 of 9\nsaved\n") == NOTHING
    assert why(ONE) == NOTHING


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_from_outside_is_not_explained_by_the_output(number: int) -> None:
    cause = why(Exit(None, number), RESET)
    assert cause.status == ""
    assert cause.line.startswith(f"signal {number} (SIG")
    assert why(Exit(None, signal.SIGABRT), RESET).status == CONNECTION_RESET


def test_an_oom_kill_of_a_child_counts_only_if_a_child_was_killed() -> None:
    kills = {0: "the OOM killer"}
    text = "RuntimeError: DataLoader worker (pid 8) is killed by signal: Killed. \n"
    assert why(ONE, text, kills=kills).rule == "oom-killer"
    assert why(ONE, f"{REFUSED}\n", kills=kills).status == CONNECTION_REFUSED
    assert why(Exit(137, None), kills=kills | {7: "its own"}).rule == "oom-killer"


def test_a_shells_exit_code_says_which_signal() -> None:
    assert why(Exit(139, None)).line.startswith("exit code 139, in a shell signal 11 (SIGSEGV): ")
    assert why(Exit(130, None)).line.startswith("exit code 130, in a shell signal 2 (SIGINT)")
    assert why(Exit(255, None)) == NOTHING


@pytest.mark.parametrize(
    ("text", "status", "line"),
    [
        (
            f"warning: {REFUSED}, trying again\niteration 7\n" + raised(RESET, "ValueError: no"),
            CONNECTION_RESET,
            RESET,
        ),
        (raised(REFUSED, "ValueError: the batch could not be made"), CONNECTION_REFUSED, REFUSED),
    ],
    ids=["an earlier retry", "a wrapper exception"],
)
def test_the_innermost_of_the_last_traceback_decides(text: str, status: str, line: str) -> None:
    cause = why(ONE, text)
    assert (cause.status, cause.line) == (status, line)


def test_a_long_line_is_bounded_around_the_deciding_text() -> None:
    cause = why(ONE, "x" * 40_000 + " Connection refused " + "y" * 20_000)
    assert cause.status == CONNECTION_REFUSED
    assert len(cause.line) <= CAUSE_CHARS_MAX
    assert "Connection refused" in cause.line


def test_a_cause_contains_no_control_characters() -> None:
    assert clipped("a\x1b[2Jb\0\tc\r\n d\u202e") == "a [2Jb c d"


# --- torch's error file -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("message", "status", "line"),
    [
        (
            {
                "message": "ValueError: no batch",
                "extraInfo": {
                    "py_callstack": raised(REFUSED, "ValueError: no batch"),
                    "timestamp": "1",
                },
            },
            CONNECTION_REFUSED,
            REFUSED,
        ),
        ({"message": "Odd: 7 of 9"}, OTHER_SOFTWARE, "Odd: 7 of 9"),  # matches no rule
    ],
)
def test_an_error_file_is_read_completely(
    tmp_path: Path, message: object, status: str, line: str
) -> None:
    cause = why(ONE, path=error_file(tmp_path, message))
    assert (cause.status, cause.line) == (status, line)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"7",
        b"[]",
        b"null",
        b"{",
        b'{"message": 7}',
        b'{"message": {}}',
        b'{"message": {"message": 7, "extraInfo": []}}',
        b'{"message": "  "}',
        b'{"message": {"extraInfo": {"py_callstack": null}}}',
        b"[" * 100_000,
        b'{"message": "' + b"x" * torch_files.FILE_BYTES_MAX + b'"}',
    ],
)
def test_garbage_is_no_error_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(data)
    assert torch_files.read(path, os.geteuid()) is None


def test_only_an_own_regular_file_is_read(tmp_path: Path) -> None:
    """A pipe would block the reader, and a link may point anywhere."""
    real = tmp_path / "real"
    real.write_text(json.dumps({"message": REFUSED}))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(real)
    for name in ("pipe", "link", "."):
        assert torch_files.read(tmp_path / name, os.geteuid()) is None
    assert torch_files.read(Path("/dev/zero"), os.geteuid()) is None
    assert torch_files.read(Path("a\0b"), os.geteuid()) is None
    assert torch_files.read(real, os.geteuid()) is not None
    if os.geteuid() == 0:
        os.chown(real, 12345, -1)
        assert torch_files.read(real, os.geteuid()) is None


# --- torchrun's summary, as torch 2.13 prints it (data/torchrun.md) ------------------------
def printed(name: str) -> str:
    return (DATA / f"torchrun-{name}.txt").read_text()


def test_the_root_cause_is_read_from_a_summary() -> None:
    root = torch_files.root_cause(printed("raise-record"))
    assert root is not None
    assert (root.rank, root.exit_code) == ("1", 1)
    assert root.error_file.startswith("/tmp/torchelastic_")
    assert root.error_file.endswith("/attempt_0/1/error.json")
    assert root.trace.startswith('Traceback (most recent call last):\n  File "/home/user/child.py"')
    assert root.trace.endswith("ValueError: the batch could not be made")
    killed = torch_files.root_cause(printed("kill-plain"))
    assert killed is not None
    assert (killed.exit_code, killed.trace, killed.error_file) == (-9, "", "")
    assert "Traceback" not in killed.before
    assert torch_files.root_cause("no summary\n") is None


def test_a_truncated_summary_raises_nothing() -> None:
    text = printed("raise-record")
    for end in range(text.index("Root Cause"), len(text), 7):
        torch_files.root_cause(text[:end])
        why(ONE, text[:end])


def test_the_exception_of_a_script_is_found_above_the_summary() -> None:
    cause = why(ONE, printed("raise-plain"))
    assert (cause.status, cause.line) == (
        ILLEGAL_MEMORY_ACCESS,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    )


def test_the_error_file_of_a_summary_outranks_its_traceback(tmp_path: Path) -> None:
    text = printed("raise-record").replace(
        "RuntimeError: CUDA error: an illegal memory access was encountered\n", f"{REFUSED}\n"
    )
    path = tmp_path / "error.json"
    (line,) = (line for line in text.splitlines() if "torchelastic_" in line)
    text = text.replace(line, f"  error_file: {path}")
    assert why(ONE, text).status == CONNECTION_REFUSED
    path.write_text(json.dumps({"message": RESET}))
    assert why(ONE, text).status == CONNECTION_RESET


def test_a_rank_that_was_killed_under_torchrun_is_named() -> None:
    text = printed("kill-plain")
    assert why(ONE, text) == NOTHING._replace(
        line="rank 1 under torchrun (pid 12055): signal 9 (SIGKILL): killed from outside"
    )
    assert why(ONE, text, kills={12055: "Killed process 12055"}).rule == "oom-killer"


# --- the OOM killer's count ---------------------------------------------------------------------
class Machine:
    """A /proc and cgroup tree with one process in one memory cgroup."""

    def __init__(self, folder: Path, line: str, file: str) -> None:
        self.file = folder / "cgroup" / file
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        (self.proc / "7").mkdir(parents=True)
        (self.proc / "7" / "cgroup").write_text(line)
        self.file.parent.mkdir(parents=True)
        self.count(0)

    def count(self, num: int) -> None:
        self.file.write_text(f"low 0\noom 9\noom_kill {num}\noom_group_kill 0\n")

    def kills(self) -> Kills:
        return Kills(self.proc, self.cgroups)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/job/7\n", "job/7/memory.events"),
        ("0::/docker/7\n", "memory.events"),  # in a container, which does not see the whole path
        ("4:memory:/job\n1:cpu:/\n0::/\n", "memory/job/memory.oom_control"),
        ("4:cpu,memory:/docker/7\n0::/\n", "memory/memory.oom_control"),
    ],
)
def test_an_oom_kill_explains_one_exit(tmp_path: Path, line: str, file: str) -> None:
    machine = Machine(tmp_path, line, file)
    machine.count(3)
    kills = machine.kills()
    group = kills.group(7)
    assert group is not None
    assert group is kills.group(7)
    assert group.claim(0.0) == "", "an earlier kill is not counted"
    machine.count(5)
    assert f"oom_kill 5 in {machine.file}" in group.claim(1.0)
    assert group.claim(1.0)
    assert group.claim(1.0) == ""


def test_an_old_kill_explains_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/job\n", "job/memory.events")
    kills = machine.kills()
    group = kills.group(7)
    assert group is not None
    machine.count(1)
    kills.look(10.0)
    assert group.claim(11.0 + RECENT_S_MAX) == ""
    machine.count(2)
    kills.look(100.0)
    assert group.claim(99.0 + RECENT_S_MAX)


@pytest.mark.parametrize("text", ["", "oom_kill x\n", "oom 7\n", "oom_kill\n"])
def test_a_malformed_counter_is_ignored(tmp_path: Path, text: str) -> None:
    machine = Machine(tmp_path, "0::/job\n", "job/memory.events")
    machine.file.write_text(text)
    assert machine.kills().group(7) is None
    assert machine.kills().group(8) is None, "pid 8 does not exist"
    (machine.proc / "7" / "cgroup").write_text("nonsense\n::\n:\n")
    assert machine.kills().group(7) is None


def test_a_removed_cgroup_explains_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/job\n", "job/memory.events")
    group = machine.kills().group(7)
    assert group is not None
    machine.file.unlink()
    assert group.claim(0.0) == ""


EATS = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
print("in", flush=True)
sys.stdin.readline()
taken = []
while True:
    taken.append(bytearray(b"x" * (1 << 20)))
"""


def test_a_real_kill_is_counted() -> None:
    """Runs only if UNICRON_TEST_CGROUP names a memory cgroup with a limit of at most 1 GiB."""
    folder = os.environ.get("UNICRON_TEST_CGROUP", "")
    if not folder:
        pytest.skip("UNICRON_TEST_CGROUP names no memory group (cgroup) that may be filled")
    process: Any = subprocess.Popen(
        [sys.executable, "-c", EATS, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "in\n"
        group = Kills().group(process.pid)
        assert group is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == -signal.SIGKILL
        assert "OOM killer" in group.claim(time.monotonic())
    finally:
        process.kill()
        process.wait(10)


# --- real processes of a real agent --------------------------------------------------------------
@pytest.fixture
def end_of(memory: MemoryLog, tmp_path: Path) -> Any:
    """Function that runs a command and returns the agent's report of its exit."""

    def run(spec: JobSpec) -> r.RankExited:
        found: list[r.RankExited] = []

        async def test() -> None:
            async with local_node(memory, tmp_path) as one:
                await one.start(spec)
                found.extend(await one.leader.wait(r.RankExited))
                assert [started.pid for started in one.leader.all(r.RankStarted)] == [found[0].pid]
                assert not Path(f"/proc/{found[0].pid}").exists()

        go(test)
        return found[0]

    return run


@pytest.mark.parametrize(
    ("code", "exit_code", "number", "cause"),
    [
        ("pass", 0, None, ""),
        ("raise SystemExit(0)", 0, None, ""),
        ("raise SystemExit(3)", 3, None, ""),
        ("import os; os.kill(os.getpid(), 9)", None, 9, "signal 9 (SIGKILL): killed from outside"),
        ("import ctypes; ctypes.string_at(0)", None, 11, "signal 11 (SIGSEGV): "),
        ("import os; os.abort()", None, 6, "signal 6 (SIGABRT): "),
    ],
)
def test_the_cause_of_an_unexplained_exit(
    end_of: Any, code: str, exit_code: int | None, number: int | None, cause: str
) -> None:
    report = end_of(python(code))
    assert (report.exit_code, report.signal, report.status) == (exit_code, number, "")
    assert report.cause.startswith(cause) if cause else report.cause == ""


def test_a_shell_whose_program_is_killed(end_of: Any) -> None:
    ended = end_of(
        command(
            "sh", "-c", "\"$0\" -c 'import ctypes; ctypes.string_at(0)'\nexit $?", sys.executable
        )
    )
    assert ended.exit_code == 139
    assert "egmentation fault" in ended.cause, "the shell's message or the exit code's meaning"


CHAIN = """
try:
    raise ConnectionRefusedError(111, 'Connection refused')
except OSError as error:
    raise ValueError('the batch could not be made') from error
"""
GROUP = """
async def fail():
    raise ConnectionRefusedError(111, 'Connection refused')
async def main():
    import asyncio
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
import asyncio
asyncio.run(main())
"""
LONG = """
import sys
print('x' * 1_000_000 + ' Connection refused ' + 'y' * 10_000, file=sys.stderr)
sys.exit(1)
"""


@pytest.mark.parametrize("code", [FAILS, CHAIN, GROUP])
def test_an_exception_is_known_by_its_innermost_line(
    end_of: Any, tmp_path: Path, code: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    report = end_of(command(sys.executable, str(script)))
    assert (report.exit_code, report.status, report.second_hand) == (1, CONNECTION_REFUSED, False)
    assert report.cause.endswith(REFUSED)
    assert report.rule
    assert report.can_pass


def test_a_huge_last_line_is_read_at_its_end(end_of: Any) -> None:
    report = end_of(python(LONG))
    assert report.status == CONNECTION_REFUSED
    assert len(report.cause) <= CAUSE_CHARS_MAX
    assert "Connection refused" in report.cause
    assert len(report.tail) == exit_report.TAIL_BYTES


def test_a_search_that_a_disk_fails_blames_nobody(
    end_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(evidence: ExitEvidence) -> Verdict:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(exit_report, "cause_of", fail)
    report = end_of(python("import os; os.kill(os.getpid(), 9)"))
    assert (report.signal, report.status, report.rule) == (9, "", "")
    assert report.cause == "signal 9 (SIGKILL): killed from outside"


def test_binary_output_has_no_cause(end_of: Any) -> None:
    report = end_of(python("import os, sys\nos.write(2, bytes(range(256)) * 1000)\nsys.exit(1)"))
    assert (report.exit_code, report.status, report.cause) == (1, "", "")


def test_a_removed_log_does_not_hide_the_exit_code(end_of: Any) -> None:
    report = end_of(python("import os\nos.unlink(os.readlink('/proc/self/fd/1'))\n" + FAILS))
    assert report.exit_code == 1
    assert report.tail == "(no output: No such file or directory)"
    assert (report.status, report.cause) == ("", "")


def test_a_pipe_in_place_of_the_log_is_not_waited_for(end_of: Any) -> None:
    """A thread that waits for its writer would never end, and others have no thread then."""
    report = end_of(
        python(
            "import os\nlog = os.readlink('/proc/self/fd/1')\nos.unlink(log)\nos.mkfifo(log)\n"
            "raise SystemExit(3)"
        )
    )
    assert (report.exit_code, report.tail) == (3, "(no output: a fifo, not a regular file)")


def test_a_log_that_was_emptied_is_read_from_its_beginning(end_of: Any, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "1-job" / "rank-0.attempt-1.log"
    log.parent.mkdir(parents=True)
    log.write_text("of a predecessor: Connection refused\n" * 100)
    report = end_of(python("import os, sys\nos.truncate(1, 0)\nprint('odd')\nsys.exit(1)"))
    assert (report.tail, report.status) == ("odd\n", "")


def test_only_the_output_of_this_attempt_counts(end_of: Any, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "1-job" / "rank-0.attempt-1.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"{REFUSED}\n")
    log.with_suffix(".error.json").write_text(json.dumps({"message": REFUSED}))
    report = end_of(python("import sys\nprint('odd')\nsys.exit(1)"))
    assert (report.tail, report.status, report.cause) == ("odd\n", "", "")


def test_surviving_children_hide_no_cause(end_of: Any, tmp_path: Path) -> None:
    linux.adopt_orphans()
    note = tmp_path / "child"
    report = end_of(
        python(
            "import subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],\n"
            "                         start_new_session=True)\n"
            "open(sys.argv[1], 'w').write(str(child.pid))\n" + FAILS,
            str(note),
        )
    )
    assert report.status == CONNECTION_REFUSED
    assert not alive(int(note.read_text()))


# --- torch's error file -------------------------------------------------------------------------
RECORDS = """
import json, os, sys
print('RuntimeError: Connection reset by peer', file=sys.stderr)
with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:
    json.dump({'message': {'message': 'ValueError: no batch', 'extraInfo': {
        'py_callstack': sys.argv[1], 'timestamp': '1'}}}, file)
sys.exit(1)
"""
UNDER_RECORD = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    try:
        raise ConnectionRefusedError(111, 'Connection refused')
    except OSError as error:
        raise ValueError('the batch could not be made') from error
try:
    main()
except ValueError:
    raise SystemExit(1)
"""


def test_an_error_file_outranks_the_output(end_of: Any) -> None:
    report = end_of(python(RECORDS, f"Traceback (most recent call last):\n{REFUSED}\n"))
    assert (report.status, report.cause) == (CONNECTION_REFUSED, REFUSED)
    assert "reset by peer" in report.tail


def test_the_file_of_torchs_record_decorator_is_read(end_of: Any) -> None:
    """The script itself does not print the exception."""
    report = end_of(python(UNDER_RECORD))
    assert (report.exit_code, report.status, report.cause) == (1, CONNECTION_REFUSED, REFUSED)
    assert "refused" not in report.tail


async def test_each_process_has_an_error_file_of_its_own(node: LocalNode) -> None:
    code = "import os; print(os.environ['TORCHELASTIC_ERROR_FILE'])"
    for rank in (0, 1):
        await node.start(python(code), rank=rank)
    await node.leader.wait(r.RankExited, 2)
    logs = [Path(started.log_path) for started in node.leader.all(r.RankStarted)]
    assert [log.read_text() for log in logs] == [
        f"{log.with_suffix('.error.json')}\n" for log in logs
    ]


# --- the OOM killer -----------------------------------------------------------------------------
async def test_an_oom_kill_is_distinguished_from_any_other_kill(
    memory: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The OOM counter is a file of the test, so no memory cgroup has to be filled."""
    counters = [
        tmp_path / "cgroup" / "memory" / "memory.oom_control",
        tmp_path / "cgroup" / "memory.events",
    ]

    def count(num: int) -> None:
        for counter in counters:
            counter.parent.mkdir(parents=True, exist_ok=True)
            counter.write_text(f"oom_kill {num}\n")

    monkeypatch.setattr(exit_report, "Kills", partial(Kills, cgroups=tmp_path / "cgroup"))
    count(4)
    async with local_node(memory, tmp_path) as node:
        for rank in (0, 1):
            await node.start(python("print('up'); import time; time.sleep(60)"), rank=rank)
        for started in await node.leader.wait(r.RankStarted, 2):
            await until_text(started.log_path)
        first, second = node.leader.all(r.RankStarted)
        count(5)
        os.kill(first.pid, signal.SIGKILL)
        await node.leader.wait(r.RankExited)
        os.kill(second.pid, signal.SIGKILL)
        by_pid = {report.pid: report for report in await node.leader.wait(r.RankExited, 2)}
        killed = by_pid[first.pid]
        assert (killed.status, killed.rule) == (EXITED_ABNORMALLY, "oom-killer")
        assert "oom_kill 5" in killed.cause
        assert by_pid[second.pid].cause == "signal 9 (SIGKILL): killed from outside"


async def test_the_kernel_log_is_read_on_the_agents_loop(
    memory: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def killed(pid: int) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return f"Out of memory: Killed process {pid} (python)"

    monkeypatch.setattr(order_executor, "ExitReporter", lambda _: exit_report.ExitReporter(killed))
    async with local_node(memory, tmp_path) as node:
        await node.start(python("import os; os.kill(os.getpid(), 9)"))
        (report,) = await node.leader.wait(r.RankExited)
        assert (report.rule, report.cause) == (
            "oom-killer",
            f"Out of memory: Killed process {report.pid} (python)",
        )
        assert threads == [True]


# --- causes that the agent knows without evidence -----------------------------------------------
async def test_a_rank_that_was_ordered_to_stop_has_no_cause(node: LocalNode) -> None:
    code = "import signal, time\nsignal.signal(15, lambda *_: 1 / 0)\nprint('up')\ntime.sleep(60)"
    await node.start(python(code))
    (started,) = await node.leader.wait(r.RankStarted)
    assert (await until_text(started.log_path)).strip() == "up"
    await node.stop_rank(grace_s=60.0)
    (report,) = await node.leader.wait(r.RankExited)
    assert (report.exit_code, report.signal, report.status, report.cause) == (1, None, "", "")
    assert "ZeroDivisionError" in report.tail


@pytest.mark.parametrize(
    ("seed", "cause"),
    [(1, "last words"), (2, "killed by its agent: it violated the pipe protocol: a rank must not")],
)
async def test_a_training_ranks_error_report_or_violation_is_its_cause(
    node: LocalNode, seed: int, cause: str
) -> None:
    await node.start(train(seed))
    await node.leader.wait(r.RankReady)
    await node.leader.order(Resume(nodes=("n1",), task=1, generation=0, progress_from=0))
    (report,) = await node.leader.wait(r.RankExited)
    assert report.signal == signal.SIGKILL
    assert report.cause.startswith(cause)
    kinds = [type(record.body) for record in node.leader.records]
    assert seed == 2 or kinds.index(r.RankErrored) < kinds.index(r.RankExited)


async def test_a_disk_that_does_not_answer_delays_no_exit_report(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(process: Process, bytes_max: int) -> bytes:
        time.sleep(3 * exit_report.SEARCH_S_MAX)
        return b""

    monkeypatch.setattr(Process, "output", never)
    await node.start(python("import os; os.abort()"))
    (report,) = await node.leader.wait(r.RankExited)
    assert report.cause.startswith("signal 6 (SIGABRT)")
    assert report.tail == "(no output: reading it took too long)"


# --- processes that cannot be watched -----------------------------------------------------------
async def test_a_process_that_cannot_be_watched_is_not_started(
    node: LocalNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    right = os.pidfd_open

    def full(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", full)
    seq = await node.start(
        python(
            "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(60)",
            str(note),
        )
    )
    (refused,) = await node.leader.wait(r.OrderRefused)
    monkeypatch.setattr(os, "pidfd_open", right)
    assert refused.order == seq
    assert "Too many open files" in refused.why
    assert node.leader.all(r.RankStarted) == []
    if note.exists() and note.read_text():
        await until_gone(int(note.read_text()))
    await node.start(python("pass"), attempt=2)  # the slot is free
    (report,) = await node.leader.wait(r.RankExited)
    assert report.exit_code == 0


def test_a_fork_that_ends_before_it_is_adopted_is_waited_for(tmp_path: Path) -> None:
    """Only its parent can reap it, until the parent exits and the shim adopts it."""
    shim, note = new_shim(tmp_path), tmp_path / "pid"
    code = (
        "import os, sys, time\npid = os.fork()\nif pid == 0:\n    os._exit(7)\n"
        "open(sys.argv[1], 'w').write(str(pid))\ntime.sleep(1.0)"
    )

    async def test() -> None:
        start(shim, [sys.executable, "-c", code, str(note)], tmp_path / "log", ("MARK", "between"))
        pid = int(await until_text(note))
        await until(lambda: None if alive(pid) else True)
        process = Process(pid, tmp_path / "log", 0, b"UNICRON_TEST=none", shim, "")
        how = await asyncio.wait_for(process.wait(), 20)
        assert how.exit_code == 7
        assert await process.end_group(5.0)
        shim.end()

    go(test)


EXECS = """#!/bin/sh
exec "$0"
"""


def test_an_orphan_inside_execve_is_ended_too(tmp_path: Path) -> None:
    """Only its environment shows whose it is, and inside execve it has none."""
    shim = new_shim(tmp_path)
    script = tmp_path / "execs"
    script.write_text(EXECS)
    script.chmod(0o700)

    def is_orphan(pid: int) -> bool | None:
        proc = linux.read(pid)
        return (proc is not None and (proc.sid, proc.ppid) == (pid, shim.pid)) or None

    async def test() -> None:
        for number in range(30):
            note, mark = tmp_path / f"pid-{number}", f"{tmp_path}-{number}"
            process = start(
                shim,
                ["/bin/sh", "-c", f"setsid {script} & echo $! > {note}"],
                tmp_path / "log",
                ("UNICRON_PROCESS", mark),
            )
            await asyncio.wait_for(process.wait(), 20)
            pid = int(note.read_text())
            await until(partial(is_orphan, pid))
            assert await process.end_group(20.0)
            assert not alive(pid)
        shim.end()

    go(test)


def test_a_child_without_environment_delays_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "EXECVE_S_MAX", 3600.0)

    shim = new_shim(tmp_path)

    async def test() -> None:
        other = subprocess.Popen(["/bin/sleep", "60"], env={})
        try:
            await until(lambda: linux.environ_after_execve(other.pid))
            process = start(
                shim, ["/bin/true"], tmp_path / "log", ("UNICRON_PROCESS", str(tmp_path))
            )
            await asyncio.wait_for(process.wait(), 20)
            assert await process.end_group(20.0)
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()
            shim.end()

    go(test)
