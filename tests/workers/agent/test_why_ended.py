"""Why a process ended, as the log is told: real processes, started by a real agent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agent_driver import alive, command, go, house, python, train, until, until_text
from memory_log import MemoryLog
from unicron.events.records.orders import Resume
from unicron.events.records.reports import (
    OrderRefused,
    RankErrored,
    RankExited,
    RankReady,
    RankStarted,
)
from unicron.events.records.statuses import CONNECTION_REFUSED, EXITED_ABNORMALLY
from unicron.events.spec.job import JobSpec
from unicron.workers.agent import order_executor
from unicron.workers.agent.processes import exit_report
from unicron.workers.agent.processes.exit_cause import CAUSE_CHARS_MAX
from unicron.workers.agent.processes.oom_kills import Kills
from unicron.workers.agent.processes.process import Process
from unicron.workers.host import linux

REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"
FAILS = "raise ConnectionRefusedError(111, 'Connection refused')\n"


pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def end_of(memory: MemoryLog, tmp_path: Path) -> Any:
    """Runs a command until its agent has told of its end; what it told."""
    def run(spec: JobSpec) -> RankExited:
        found: list[RankExited] = []

        async def test() -> None:
            async with house(memory, tmp_path) as one:
                await one.start(spec)
                found.extend(await one.leader.wait(RankExited))

        go(test)
        return found[0]

    return run


@pytest.mark.parametrize(("code", "exit_code", "number", "cause"), [
    ("pass", 0, None, ""),
    ("raise SystemExit(0)", 0, None, ""),
    ("raise SystemExit(3)", 3, None, ""),
    ("import os; os.kill(os.getpid(), 9)", None, 9, "signal 9 (SIGKILL): killed from outside"),
    ("import ctypes; ctypes.string_at(0)", None, 11, "signal 11 (SIGSEGV): "),
    ("import os; os.abort()", None, 6, "signal 6 (SIGABRT): ")])
def test_an_end_that_nothing_explains(end_of: Any, code: str, exit_code: int | None,
                                      number: int | None, cause: str) -> None:
    told = end_of(python(code))
    assert (told.exit_code, told.signal, told.status) == (exit_code, number, "")
    assert told.cause.startswith(cause) if cause else told.cause == ""


def test_a_shell_whose_program_is_killed(end_of: Any) -> None:
    told = end_of(command("sh", "-c", f"{sys.executable} -c 'import ctypes; ctypes.string_at(0)'\n"
                                      "exit $?"))
    assert told.exit_code == 139
    assert "egmentation fault" in told.cause, "what the shell printed, or else what its code means"


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
def test_an_exception_is_known_by_its_innermost_line(end_of: Any, tmp_path: Path,
                                                     code: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    told = end_of(command(sys.executable, str(script)))
    assert (told.exit_code, told.status, told.second_hand) == (1, CONNECTION_REFUSED, False)
    assert told.cause.endswith(REFUSED)
    assert told.rule


def test_a_huge_last_line_is_read_at_its_end(end_of: Any) -> None:
    told = end_of(python(LONG))
    assert told.status == CONNECTION_REFUSED
    assert len(told.cause) <= CAUSE_CHARS_MAX
    assert "Connection refused" in told.cause
    assert len(told.tail) == exit_report.TAIL_BYTES


def test_binary_garbage_means_nothing(end_of: Any) -> None:
    told = end_of(python("import os, sys\nos.write(2, bytes(range(256)) * 1000)\nsys.exit(1)"))
    assert (told.exit_code, told.status, told.cause) == (1, "", "")


def test_a_log_that_was_removed_hides_nothing_else(end_of: Any) -> None:
    told = end_of(python("import os\nos.unlink(os.readlink('/proc/self/fd/1'))\n" + FAILS))
    assert told.exit_code == 1
    assert told.tail == "(no output: No such file or directory)"
    assert (told.status, told.cause) == ("", "")


def test_a_log_that_was_emptied_is_read_from_its_beginning(end_of: Any, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "1-job" / "rank-0.attempt-1.log"
    log.parent.mkdir(parents=True)
    log.write_text("of a predecessor: Connection refused\n" * 100)
    told = end_of(python("import os, sys\nos.truncate(1, 0)\nprint('odd')\nsys.exit(1)"))
    assert (told.tail, told.status) == ("odd\n", "")


def test_only_what_this_attempt_printed_counts(end_of: Any, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "1-job" / "rank-0.attempt-1.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"{REFUSED}\n")
    log.with_suffix(".error.json").write_text(json.dumps({"message": REFUSED}))
    told = end_of(python("import sys\nprint('odd')\nsys.exit(1)"))
    assert (told.tail, told.status, told.cause) == ("odd\n", "", "")


def test_children_that_outlive_it_hide_no_cause(end_of: Any, tmp_path: Path) -> None:
    linux.adopt_orphans()
    note = tmp_path / "child"
    told = end_of(python(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],\n"
        "                         start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n" + FAILS, str(note)))
    assert told.status == CONNECTION_REFUSED
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


def test_an_error_file_says_more_than_the_output(end_of: Any) -> None:
    told = end_of(python(RECORDS, f"Traceback (most recent call last):\n{REFUSED}\n"))
    assert (told.status, told.cause) == (CONNECTION_REFUSED, REFUSED)
    assert "reset by peer" in told.tail


def test_what_torchs_own_record_writes_is_read(end_of: Any) -> None:
    """The script itself prints nothing of it."""
    told = end_of(python(UNDER_RECORD))
    assert (told.exit_code, told.status, told.cause) == (1, CONNECTION_REFUSED, REFUSED)
    assert "refused" not in told.tail


def test_each_process_has_an_error_file_of_its_own(memory: MemoryLog, tmp_path: Path) -> None:
    code = "import os; print(os.environ['TORCHELASTIC_ERROR_FILE'])"

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            for rank in (0, 1):
                await one.start(python(code), rank=rank)
            told = {exited.tail for exited in await one.leader.wait(RankExited, 2)}
            logs = [Path(started.log_path) for started in one.leader.all(RankStarted)]
            assert told == {f"{log.with_suffix('.error.json')}\n" for log in logs}

    go(test)


# --- the OOM killer -----------------------------------------------------------------------------
def test_a_kill_that_the_kernel_counted_is_told_apart_from_anybodys(
        memory: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter is a file of ours: no memory group of this machine is filled for it."""
    counters = [tmp_path / "cgroup" / "memory" / "memory.oom_control",
                tmp_path / "cgroup" / "memory.events"]

    def count(num: int) -> None:
        for counter in counters:
            counter.parent.mkdir(parents=True, exist_ok=True)
            counter.write_text(f"oom_kill {num}\n")

    monkeypatch.setattr(exit_report, "Kills", partial(Kills, cgroups=tmp_path / "cgroup"))
    count(4)

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            for rank in (0, 1):
                await one.start(python("print('up'); import time; time.sleep(60)"), rank=rank)
            for started in await one.leader.wait(RankStarted, 2):
                await until_text(started.log_path)
            first, second = one.leader.all(RankStarted)
            count(5)
            os.kill(first.pid, signal.SIGKILL)
            await one.leader.wait(RankExited)
            os.kill(second.pid, signal.SIGKILL)
            by_pid = {told.pid: told for told in await one.leader.wait(RankExited, 2)}
            killed = by_pid[first.pid]
            assert (killed.status, killed.rule) == (EXITED_ABNORMALLY, "oom-killer")
            assert "oom_kill 5" in killed.cause
            assert by_pid[second.pid].cause == "signal 9 (SIGKILL): killed from outside"

    go(test)


def test_the_kernels_own_line_is_asked_for_on_the_agents_loop(
        memory: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def killed(pid: int) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return f"Out of memory: Killed process {pid} (python)"

    monkeypatch.setattr(order_executor, "ExitReporter", lambda _: exit_report.ExitReporter(killed))

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(python("import os; os.kill(os.getpid(), 9)"))
            (told,) = await one.leader.wait(RankExited)
            assert (told.rule, told.cause) == (
                "oom-killer", f"Out of memory: Killed process {told.pid} (python)")
            assert threads == [True]

    go(test)


# --- what the agent knows without looking -------------------------------------------------------
def test_who_was_told_to_stop_has_no_cause(memory: MemoryLog, tmp_path: Path) -> None:
    code = "import signal, time\nsignal.signal(15, lambda *_: 1 / 0)\nprint('up')\ntime.sleep(60)"

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(python(code))
            (started,) = await one.leader.wait(RankStarted)
            await until_text(started.log_path)
            await one.stop_rank()
            (told,) = await one.leader.wait(RankExited)
            assert (told.exit_code, told.status, told.cause) == (1, "", "")
            assert "ZeroDivisionError" in told.tail

    go(test)


@pytest.mark.parametrize(("seed", "cause"), [
    (1, "last words"), (2, "killed by its agent: it violated the pipe protocol: a rank must not")])
def test_a_training_ranks_own_words_are_its_cause(memory: MemoryLog, tmp_path: Path, seed: int,
                                                  cause: str) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(train(seed))
            await one.leader.wait(RankReady)
            await one.leader.order(Resume(nodes=("n1",), task=1, generation=0, progress_from=0))
            (told,) = await one.leader.wait(RankExited)
            assert told.signal == signal.SIGKILL
            assert told.cause.startswith(cause)
            kinds = [type(record.body) for record in one.leader.records]
            assert seed == 2 or kinds.index(RankErrored) < kinds.index(RankExited)

    go(test)


def test_a_disk_that_does_not_answer_holds_up_no_end(
        memory: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(process: Process, bytes_max: int) -> bytes:
        time.sleep(3 * exit_report.SEARCH_S_MAX)
        return b""

    monkeypatch.setattr(Process, "output", never)

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(python("import os; os.abort()"))
            (told,) = await one.leader.wait(RankExited)
            assert told.cause.startswith("signal 6 (SIGABRT)")
            assert told.tail == "(no output: reading it took too long)"

    go(test)


# --- watched, or not started at all -------------------------------------------------------------
def test_what_cannot_be_watched_does_not_run(memory: MemoryLog, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    right = os.pidfd_open

    def full(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            monkeypatch.setattr(os, "pidfd_open", full)
            seq = await one.start(python(
                "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\n"
                "time.sleep(60)", str(note)))
            (refused,) = await one.leader.wait(OrderRefused)
            monkeypatch.setattr(os, "pidfd_open", right)
            assert refused.order == seq
            assert "Too many open files" in refused.why
            assert one.leader.all(RankStarted) == []
            assert not note.exists() or not alive(int(note.read_text()))
            await one.start(python("pass"), attempt=2)  # the slot is free
            (told,) = await one.leader.wait(RankExited)
            assert told.exit_code == 0

    go(test)


def test_a_fork_that_ends_before_it_is_adopted_is_waited_for(tmp_path: Path) -> None:
    """Its status is its parent's to take, until that has ended and the agent is its parent."""
    linux.adopt_orphans()
    note = tmp_path / "pid"
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        note.write_text(str(pid))
        time.sleep(1.0)
        os._exit(0)

    async def test() -> None:
        pid = int(await until_text(note))
        await until(lambda: None if alive(pid) else True)
        process = Process(pid, tmp_path / "log", 0, b"UNICRON_TEST=none")
        how = await asyncio.wait_for(process.wait(), 20)
        assert how.exit_code == 7
        assert await process.end_group(5.0)

    go(test)
    os.waitpid(between, 0)
