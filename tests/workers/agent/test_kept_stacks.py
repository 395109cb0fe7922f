"""What a process did is kept before it is ended because it hangs: in any state of the process."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path

import pytest
from agent_driver import LocalNode, python, until
from memory_log import MemoryLog
from unicron.events.records.orders import StopRank
from unicron.events.records.reports import RankExited, RankStarted, StacksKept
from unicron.events.timing import STACKS_S_MAX
from unicron.workers.agent.monitoring import kept_stacks, python_stacks
from unicron.workers.agent.processes.rank_process import WORD
from unicron.workers.host import linux
from unicron.workers.training.process.control_thread import Control
from unicron.workers.training.process.exit_report import OWN_THREADS

pytestmark = pytest.mark.usefixtures("nothing_left")
CODE = """
import ctypes, os, sys, threading, time
from unicron.workers.training.process.stack_answer import answer

if {answers}:
    answer(os.environ)
threading.Thread(target=lambda: time.sleep(600), name="reports", daemon=True).start()
def forward():
    if {how!r} == "holds the GIL":
        ctypes.PyDLL(None).sleep(600)
    while {how!r} == "loops":
        pass
    time.sleep(600)
print("hangs", flush=True)
forward()
"""
DETACHED = """
import threading, time

def forward():
    print("hangs", flush=True)
    time.sleep(600)

class Control:
    def run_detached(self, call):
        thread = threading.Thread(target=call, name="collective", daemon=True)
        thread.start()
        thread.join()

Control().run_detached(forward)
"""
HOWS = ("sleeps", "loops", "holds the GIL")


def code(how: str, *, answers: bool = False) -> str:
    return CODE.format(how=how, answers=answers)


async def end(node: LocalNode, rank: int = 0) -> StacksKept:
    """End a rank as one that hangs; what was kept of it. It has ended."""
    await node.leader.order(
        StopRank(
            nodes=("n1",),
            task=1,
            rank=rank,
            attempt=1,
            grace_s=0.0,
            why="it is stalled",
            keeps_stacks=True,
        )
    )
    (exited,) = await node.leader.wait(RankExited)
    assert exited.signal == signal.SIGKILL
    (kept,) = node.leader.all(StacksKept)
    kinds = [type(record.body) for record in node.leader.records]
    assert kinds.index(StacksKept) < kinds.index(RankExited), "it was told before the end"
    assert kept.took_s < STACKS_S_MAX + 0.5
    assert kept.num_bytes <= kept_stacks.FILE_BYTES_MAX
    return kept


async def hanging(node: LocalNode, script: str) -> RankStarted:
    await node.start(python(script))
    (started,) = await node.leader.wait(RankStarted)
    await until(lambda: "hangs" in Path(started.log_path).read_text() or None)
    return started


async def stop(pid: int) -> None:
    os.killpg(pid, signal.SIGSTOP)
    await until(lambda: ((proc := linux.read(pid)) is not None and proc.state == "T") or None)


def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_stacks, "py_spy", lambda: None)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["", "stopped"])
@pytest.mark.parametrize("how", HOWS)
async def test_all_threads_are_read_from_outside(
    node: LocalNode, how: str, is_stopped: bool
) -> None:
    started = await hanging(node, code(how))
    if is_stopped:
        await stop(started.pid)
    kept = await end(node)
    assert (kept.reader, kept.why) == ("py-spy", "")
    assert kept.stack.startswith("forward (<string>:"), "the innermost frame comes first"
    path = Path(kept.path)
    assert path == kept_stacks.file_of(Path(started.log_path))
    text = path.read_text()
    assert f'Thread {started.pid} "MainThread"' in text
    assert '"reports"' in text
    if how == "holds the GIL":
        assert ", holds the GIL" in text
    if is_stopped:
        assert f"process {started.pid} stopped by a signal" in text


async def test_of_a_rank_whose_main_thread_waits_the_thread_that_works_is_told(
    node: LocalNode,
) -> None:
    await hanging(node, DETACHED)
    kept = await end(node)
    assert kept.stack.startswith("forward (<string>:"), kept.stack


def test_a_rank_has_the_thread_that_works_and_the_wait_for_it_by_these_names() -> None:
    assert python_stacks.WORKER in OWN_THREADS
    assert hasattr(Control, python_stacks.WAITS_IN)


@pytest.mark.parametrize("how", HOWS)
async def test_without_the_right_to_trace_a_rank_answers_a_signal(
    node: LocalNode, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_py_spy(monkeypatch)
    await hanging(node, code(how, answers=True))
    kept = await end(node)
    assert (kept.reader, kept.why) == ("signal", "")
    assert kept.stack.startswith("forward (<string>:")
    text = Path(kept.path).read_text()
    assert "(by signal)" in text
    assert text.count("hread 0x") == 2


async def test_a_stopped_process_that_nobody_may_read_is_ended_with_the_reason(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_py_spy(monkeypatch)
    started = await hanging(node, code("sleeps", answers=True))
    await stop(started.pid)
    kept = await end(node)
    assert (kept.reader, kept.stack) == ("", "")
    assert kept.why == "py-spy is not installed; it did not answer a signal within 0.4 s"
    assert f"process {started.pid} stopped by a signal" in Path(kept.path).read_text()


async def test_no_signal_ends_a_process_that_has_not_promised_to_answer(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_py_spy(monkeypatch)
    await hanging(node, code("sleeps"))
    kept = await end(node)
    assert kept.why == "py-spy is not installed; the process does not answer a signal"


async def test_of_a_command_its_python_descendants_are_read(
    node: LocalNode, tmp_path: Path
) -> None:
    script = tmp_path / "trains.py"
    script.write_text(code("holds the GIL"))
    shell = f"import os; os.system('setsid {sys.executable} {script}; true')"
    await hanging(node, shell)
    kept = await end(node)
    text = Path(kept.path).read_text()
    assert "trains.py:" in text, "its grandchild, in a session of its own"
    assert text.count("--- Python stacks of process") == 2


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exec sleep 60", "py-spy did not answer within 1 s"),
        ("exec yes", "py-spy"),  # more bytes than are read, or on a busy machine no end in time
        ("echo no JSON", "py-spy: "),
        ("echo 'Permission denied (os error 13)' >&2; exit 1", "may not read the memory"),
    ],
)
async def test_a_reader_that_fails_changes_nothing(
    node: LocalNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(python_stacks, "py_spy", lambda: str(program))
    await hanging(node, code("sleeps"))
    kept = await end(node)
    assert (kept.reader, kept.stack) == ("", "")
    assert why in kept.why


async def test_a_file_that_cannot_be_written_changes_nothing(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_stacks, "file_of", lambda log: Path("/proc/version/no"))
    await hanging(node, code("sleeps"))
    kept = await end(node)
    assert (kept.path, kept.num_bytes) == ("", 0)
    assert kept.stack.startswith("forward (")
    assert kept.why == "not written: Not a directory"


async def test_a_secret_in_a_stack_is_redacted(
    node: LocalNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "canary-5b1f")
    script = tmp_path / "canary-5b1f.py"
    script.write_text(code("sleeps"))
    await hanging(node, f"import runpy; runpy.run_path({str(script)!r})")
    kept = await end(node)
    assert f"forward ({WORD}.py:" in kept.stack
    assert "canary-5b1f" not in Path(kept.path).read_text()


async def test_a_second_order_ends_it_at_once(node: LocalNode, tmp_path: Path) -> None:
    await hanging(node, code("sleeps"))
    order = StopRank(
        nodes=("n1",), task=1, rank=0, attempt=1, grace_s=0.0, why="test", keeps_stacks=True
    )
    await node.leader.order(order)
    await node.leader.order(order)
    await node.leader.wait(RankExited)
    assert len(node.leader.all(StacksKept)) <= 1


async def test_files_of_an_attempt_go_with_its_output(memory: MemoryLog, tmp_path: Path) -> None:
    from unicron.workers.agent.processes import former_outputs

    folder = tmp_path / "1-a"
    folder.mkdir()
    log = folder / "rank-0.attempt-1.log"
    for path in (log, kept_stacks.file_of(log), log.with_suffix(".faulthandler")):
        path.write_text("x")
        os.utime(path, (1, 1))
    former_outputs.remove_attempts(folder / "rank-0.attempt-3.log", folder, 1 << 20)
    assert log.exists(), "the newest former one stays"
    former_outputs.remove_attempts(log, folder, 1 << 20)
    assert [path.name for path in folder.iterdir()] == [log.name], "those of a former task go"
