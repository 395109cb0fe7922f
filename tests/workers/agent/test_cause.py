"""Why a process ended: which of several witnesses is believed, on texts and files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from unicron.events.records.statuses import (
    CONNECTION_REFUSED,
    CONNECTION_RESET,
    EXITED_ABNORMALLY,
    ILLEGAL_MEMORY_ACCESS,
    OTHER_SOFTWARE,
)
from unicron.workers.agent.processes import torch_files
from unicron.workers.agent.processes.exit_cause import (
    CAUSE_CHARS_MAX,
    Cause,
    ExitEvidence,
    cause_of,
    clipped,
)
from unicron.workers.agent.processes.oom_kills import RECENT_S_MAX, Kills
from unicron.workers.agent.processes.process import Exit

DATA = Path(__file__).parents[2] / "data"
REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"
RESET = "RuntimeError: Connection reset by peer"
ONE = Exit(1, None)
KILLED = Exit(None, signal.SIGKILL)
NO_FILE = Path("/nonexistent/error.json")


def why(how: Exit, text: str = "", *, path: Path = NO_FILE, kills: dict[int, str] | None = None
        ) -> Cause:
    """`kills` is what the kernel says of a process's number."""
    said = kills or {}
    return cause_of(
        ExitEvidence(how=how, text=text, path=path, killed=lambda pid: said.get(pid, ""), pid=7)
    )


def raised(innermost: str, wrapper: str) -> str:
    return ('Traceback (most recent call last):\n  File "train.py", line 3, in main\n    step()\n'
            f"{innermost}\n\nThe above exception was the direct cause of the following exception:"
            '\n\nTraceback (most recent call last):\n  File "train.py", line 9, in <module>\n'
            f"    main()\n{wrapper}\n")


# --- who is believed ----------------------------------------------------------------------------
def test_the_kernel_before_the_file_before_the_output_before_the_signal(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": REFUSED}))
    kills = {7: "Memory cgroup out of memory: Killed process 7 (python)"}
    assert why(KILLED, RESET, path=path, kills=kills) == Cause(
        EXITED_ABNORMALLY, "oom-killer", kills[7])
    assert why(KILLED, RESET, path=path).status == CONNECTION_REFUSED
    assert why(ONE, RESET, path=path).status == CONNECTION_REFUSED
    assert why(ONE, RESET).status == CONNECTION_RESET
    assert why(Exit(None, signal.SIGSEGV)) == Cause(
        line="signal 11 (SIGSEGV): it accessed invalid memory (segmentation fault)")
    assert why(Exit(None, signal.SIGABRT, dumped=True)).line.endswith(", core dumped")


def test_what_ended_well_has_no_cause(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": REFUSED}))
    assert why(Exit(0, None), RESET, path=path, kills={0: "oom", 7: "oom"}) == Cause()


def test_of_an_exception_group_every_member_is_read() -> None:
    group = ("  + Exception Group Traceback (most recent call last):\n"
             '  |   File "train.py", line 9, in main\n  | ExceptionGroup: two (2 sub-exceptions)\n'
             "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n"
             '    |   File "train.py", line 3, in step\n'
             "    | RuntimeError: CUDA error: an illegal memory access was encountered\n"
             "    +---------------- 2 ----------------\n    | Traceback (most recent call last):\n"
             f'    |   File "train.py", line 4, in send\n    | {RESET}\n'
             "    +------------------------------------\n")
    assert why(ONE, f"{raised(REFUSED, RESET)}\nthe next try went well\n{group}").status == (
        ILLEGAL_MEMORY_ACCESS)


def test_what_means_nothing_has_no_cause() -> None:
    assert why(ONE, "iteration 7 of 9\nsaved\n") == Cause()
    assert why(ONE) == Cause()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_what_others_send_is_not_explained_by_what_was_printed(number: int) -> None:
    told = why(Exit(None, number), RESET)
    assert told.status == ""
    assert told.line.startswith(f"signal {number} (SIG")
    assert why(Exit(None, signal.SIGABRT), RESET).status == CONNECTION_RESET


def test_the_oom_killer_of_a_child_is_believed_only_where_a_child_was_killed() -> None:
    kills = {0: "the OOM killer"}
    text = "RuntimeError: DataLoader worker (pid 8) is killed by signal: Killed. \n"
    assert why(ONE, text, kills=kills).rule == "oom-killer"
    assert why(ONE, f"{REFUSED}\n", kills=kills).status == CONNECTION_REFUSED
    assert why(Exit(137, None), kills=kills | {7: "its own"}).rule == "oom-killer"


def test_a_shells_exit_code_says_which_signal() -> None:
    assert why(Exit(139, None)).line.startswith("exit code 139, in a shell signal 11 (SIGSEGV): ")
    assert why(Exit(130, None)).line.startswith("exit code 130, in a shell signal 2 (SIGINT)")
    assert why(Exit(255, None)) == Cause()


def test_the_last_traceback_comes_before_what_a_retry_printed() -> None:
    text = f"warning: {REFUSED}, trying again\niteration 7\n" + raised(RESET, "ValueError: no")
    told = why(ONE, text)
    assert (told.status, told.line) == (CONNECTION_RESET, RESET)


def test_the_innermost_of_a_chain_decides_not_its_wrapper() -> None:
    told = why(ONE, raised(REFUSED, "ValueError: the batch could not be made"))
    assert (told.status, told.line) == (CONNECTION_REFUSED, REFUSED)


def test_a_long_line_is_bounded_around_what_decided() -> None:
    told = why(ONE, "x" * 40_000 + " Connection refused " + "y" * 20_000)
    assert told.status == CONNECTION_REFUSED
    assert len(told.line) <= CAUSE_CHARS_MAX
    assert "Connection refused" in told.line


def test_a_cause_does_nothing_to_a_screen() -> None:
    assert clipped("a\x1b[2Jb\0\tc\r\n d\u202e") == "a [2Jb c d"


# --- torch's error file -------------------------------------------------------------------------
def test_a_file_of_an_exception_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "ValueError: no batch", "extraInfo": {
        "py_callstack": raised(REFUSED, "ValueError: no batch"), "timestamp": "1"}}}))
    told = why(ONE, path=path)
    assert (told.status, told.line) == (CONNECTION_REFUSED, REFUSED)


def test_an_exception_of_no_row_is_software(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "Odd: 7 of 9"}}))
    told = why(ONE, path=path)
    assert (told.status, told.line) == (OTHER_SOFTWARE, "Odd: 7 of 9")


@pytest.mark.parametrize("data", [
    b"", b"\xff\xfe", b"7", b"[]", b"null", b"{", b'{"message": 7}', b'{"message": {}}',
    b'{"message": {"message": 7, "extraInfo": []}}', b'{"message": "  "}',
    b'{"message": {"extraInfo": {"py_callstack": null}}}', b"[" * 100_000,
    b'{"message": "' + b"x" * torch_files.FILE_BYTES_MAX + b'"}'])
def test_garbage_is_no_error_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(data)
    assert torch_files.read(path) is None


def test_only_a_regular_file_of_ones_own_is_read(tmp_path: Path) -> None:
    """A pipe would hold the reader for ever; a link may lead anywhere."""
    real = tmp_path / "real"
    real.write_text(json.dumps({"message": REFUSED}))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(real)
    for name in ("pipe", "link", "."):
        assert torch_files.read(tmp_path / name) is None
    assert torch_files.read(Path("/dev/zero")) is None
    assert torch_files.read(Path("a\0b")) is None
    assert torch_files.read(real) is not None
    if os.geteuid() == 0:
        os.chown(real, 12345, -1)
        assert torch_files.read(real) is None


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


def test_a_torn_summary_is_read_as_far_as_it_goes() -> None:
    text = printed("raise-record")
    for end in range(text.index("Root Cause"), len(text), 7):
        torch_files.root_cause(text[:end])
        why(ONE, text[:end])


def test_what_a_script_raised_stands_above_the_summary() -> None:
    told = why(ONE, printed("raise-plain"))
    assert (told.status, told.line) == (
        ILLEGAL_MEMORY_ACCESS, "RuntimeError: CUDA error: an illegal memory access was encountered")


def test_the_traceback_of_a_summary_decides_and_its_error_file_before_it(tmp_path: Path) -> None:
    text = printed("raise-record").replace(
        "RuntimeError: CUDA error: an illegal memory access was encountered\n", f"{REFUSED}\n")
    path = tmp_path / "error.json"
    (line,) = (line for line in text.splitlines() if "torchelastic_" in line)
    text = text.replace(line, f"  error_file: {path}")
    assert why(ONE, text).status == CONNECTION_REFUSED
    path.write_text(json.dumps({"message": RESET}))
    assert why(ONE, text).status == CONNECTION_RESET


def test_a_rank_that_was_killed_under_torchrun_is_named() -> None:
    text = printed("kill-plain")
    assert why(ONE, text) == Cause(
        line="rank 1 under torchrun (pid 12055): signal 9 (SIGKILL): killed from outside")
    assert why(ONE, text, kills={12055: "Killed process 12055"}).rule == "oom-killer"


# --- the OOM killer's count ---------------------------------------------------------------------
class Machine:
    """A tree as Linux shows it, with one process in one memory group."""

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


@pytest.mark.parametrize(("line", "file"), [
    ("0::/job/7\n", "job/7/memory.events"),
    ("0::/docker/7\n", "memory.events"),  # in a container that does not know its path
    ("4:memory:/job\n1:cpu:/\n0::/\n", "memory/job/memory.oom_control"),
    ("4:cpu,memory:/docker/7\n0::/\n", "memory/memory.oom_control")])
def test_a_kill_explains_one_end(tmp_path: Path, line: str, file: str) -> None:
    machine = Machine(tmp_path, line, file)
    machine.count(3)
    kills = machine.kills()
    group = kills.group(7)
    assert group is not None
    assert group is kills.group(7)
    assert group.claim(0.0) == "", "what was killed before is another's"
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
def test_what_counts_nothing_tells_nothing(tmp_path: Path, text: str) -> None:
    machine = Machine(tmp_path, "0::/job\n", "job/memory.events")
    machine.file.write_text(text)
    assert machine.kills().group(7) is None
    assert machine.kills().group(8) is None, "it has ended"
    (machine.proc / "7" / "cgroup").write_text("nonsense\n::\n:\n")
    assert machine.kills().group(7) is None


def test_a_group_that_is_gone_keeps_its_count(tmp_path: Path) -> None:
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
    """Only where a person names a memory group that may be filled: its limit at most 1 GiB."""
    folder = os.environ.get("UNICRON_TEST_CGROUP", "")
    if not folder:
        pytest.skip("UNICRON_TEST_CGROUP names no memory group (cgroup) that may be filled")
    process: Any = subprocess.Popen([sys.executable, "-c", EATS, folder], stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE, text=True)
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
