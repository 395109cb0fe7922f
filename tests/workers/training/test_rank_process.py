"""The lifetime of a rank's process: why it ends, what it reports, and that it leaks nothing."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from rank_driver import EXEC, Drive, Twins
from unicron.events.records import reports as r
from unicron.events.records.types import MemoryCheckpoint
from unicron.workers.training.process.control_thread import EXIT_STUCK

WAIT_S = 60.0
REBUILDS = 12


def _open(pid: int) -> tuple[int, int]:
    """The numbers of open descriptors and of threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.thorough
def test_rebuilds_leak_nothing_and_listen_on_loopback_only(drive: Drive) -> None:
    driver = drive(iterations=10_000)
    driver.start(0)
    driver.by = EXEC  # imports torch after the interface is known; a forked rank has it before
    driver.start(1)
    pids = [driver.processes[rank].popen.pid for rank in (0, 1)]
    seen: list[list[tuple[int, int]]] = []
    for _ in range(REBUILDS):
        driver.form([0, 1])
        driver.quiesce([0, 1], "boundary")
        seen.append([_open(pid) for pid in pids])
    # As few are open as after the third rebuild. Those of the last rebuild close after a delay.
    driver.until(
        lambda: all(
            now <= then
            for pid, early in zip(pids, seen[2], strict=True)
            for now, then in zip(_open(pid), early, strict=True)
        ),
        seen,
    )
    versions = [report.step_version for report in driver.told(r.Quiesced, 0)]
    assert versions == sorted(versions)
    assert versions[-1] >= REBUILDS
    # A rank ignores an order for a stale generation, and answers one for its last generation.
    num_told = len(driver.told(r.Quiesced, 0))
    driver.generation -= 1
    driver.quiesce([0], "now")
    driver.generation += 1
    driver.quiesce([0], "now")

    def more(body: r.Quiesced) -> bool:
        return len(driver.told(r.Quiesced, 0)) > num_told

    driver.wait(r.Quiesced, 0, where=more)
    assert len(driver.told(r.Quiesced, 0)) == num_told + 1
    for pid in pids:
        assert _listens_on_loopback_only(pid)
    # A rank ends when its agent is gone, and on SIGTERM.
    driver.processes[0].socket.shutdown(socket.SHUT_RDWR)
    assert driver.processes[0].popen.wait(WAIT_S) == 3
    driver.processes[1].signal(signal.SIGTERM)
    assert driver.processes[1].popen.wait(WAIT_S) == -signal.SIGTERM


def _tcp(pid: int) -> list[list[str]]:
    """Fields in /proc/net/tcp of the process's TCP sockets. Source: proc_net_tcp in Linux."""
    inodes = set[str]()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [fields for fields in lines if f"socket:[{fields[9]}]" in inodes]


def _listens_on_loopback_only(pid: int) -> bool:
    """Whether every listening TCP socket of the process is bound to 127.0.0.1."""
    bound = {fields[1].split(":")[0] for fields in _tcp(pid) if fields[3] == "0A"}
    return bound == {"0100007F"}


def _unsent_bytes(pid: int) -> int:
    """The largest number of unacknowledged bytes in a TCP send queue of the process."""
    return max((int(fields[4].split(":")[0], 16) for fields in _tcp(pid)), default=0)


def test_an_error_is_reported_before_the_rank_exits(drive: Drive) -> None:
    driver = drive(data=["/nonexistent/text"])
    driver.by = EXEC  # test_zygote.py checks a forked rank
    driver.launch(0)
    report = driver.wait(r.RankErrored, 0)
    assert report.error == "UsageError"
    assert report.text.startswith("train.data: /nonexistent/text: No such file")
    assert driver.processes[0].popen.wait(WAIT_S) == 1
    assert not driver.told(r.RankReady)

    other = drive(output="/proc/nowhere")
    other.launch(0)
    report = other.wait(r.RankErrored, 0)
    assert report.text.startswith("train.output: /proc/nowhere: no such file")
    assert not other.told(r.RankReady)


def test_a_rank_whose_log_is_full_continues(drive: Drive) -> None:
    driver = drive(iterations=3)
    driver.by = ["sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh", *EXEC]
    driver.start(0)
    driver.form([0])
    driver.finish([0])


SENDS_SLOWLY = """
import os, socket
from unicron.workers.training.communicators import sockets
from unicron.workers.training.step.iteration import Iteration
right = Iteration.run
SO_MAX_PACING_RATE = 47
def run(self, *given):
    if self.step_version == 2:
        for descriptor in sockets.inodes().values():
            with socket.socket(fileno=os.dup(descriptor)) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6):
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
                    if os.environ["UNICRON_RANK"] == "0":
                        own.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 100_000)
    return right(self, *given)
Iteration.run = run
"""
"""Paces rank 0 to half a minute for its part of the third iteration's sum, however busy the cores
are. The socket buffers hold only a small part of that sum."""
PART_BYTES = 4096
"""More than any other message has in a send queue."""


@pytest.mark.parametrize("overlap", [False, True])
def test_a_half_sent_sum_does_not_block_a_quiesce(drive: Drive, overlap: bool) -> None:
    """gloo does not fail every half-done send when its connection is closed."""
    model = {"num_layers": 2, "hidden": 256, "num_heads": 4, "sequence": 16}
    driver = drive(
        model=model,
        batch={"global": 4, "micro": 1},
        iterations=6,
        overlap=overlap,
        bucket_params=400_000 if overlap else 0,
    )
    driver.patch = SENDS_SLOWLY
    driver.start(0, 1)
    driver.form([0, 1])
    for rank in (0, 1):
        driver.strike(rank, iteration=2, event="bucket")
    sender = driver.processes[0].popen.pid
    # A rank that is stopped at the start of the bucket has not requested the sum yet.
    driver.until(lambda: _unsent_bytes(sender) > PART_BYTES)
    driver.processes[1].signal(signal.SIGSTOP)
    unsent = [0]

    def stuck() -> bool:
        """Whether the send queue is not empty and has not changed in five readings."""
        time.sleep(0.1)
        unsent.append(_unsent_bytes(sender))
        return all(unsent[-5:]) and len(set(unsent[-5:])) == 1

    driver.until(stuck, unsent)
    held = driver.quiesce([0], "now")
    driver.kill(1)
    assert len(held[0].micro_batches) == 2, "the reduction of the sum was interrupted"
    driver.form([0], progress_from=2)
    driver.finish([0])
    assert len(driver.losses()) == 6


@pytest.mark.parametrize("event", ["stats", "bucket"])
def test_a_late_reduction_starts_nothing_in_the_next_generation(
    drive: Drive, twin: Twins, event: str
) -> None:
    """The reduction of rank 2 is held until the next generation has formed."""
    driver = drive()
    driver.start(0, 1, 2)
    path = driver.hold(2, event, 4)
    driver.form([0, 1, 2])
    driver.held(2, 4)
    driver.kill(1)
    driver.quiesce([0, 2], "now")
    driver.reconfigure([0, 2])
    driver.reconfigured([0, 2])
    path.unlink()
    time.sleep(0.2)
    driver.resume([0, 2])
    driver.finish([0, 2])
    assert twin(0.0).is_equal(driver.final_checkpoint())


@pytest.mark.thorough
def test_buckets_of_the_previous_iteration_are_not_reported(drive: Drive) -> None:
    driver = drive()
    driver.start(0, 1, 2)
    driver.hold(1, "stats", 4)
    driver.form([0, 1, 2])
    driver.held(1, 4)
    driver.kill(1)
    held = driver.quiesced([0, 2])
    assert {report.step_version for report in held.values()} == {4}
    assert not any(report.buckets_reduced for report in held.values()), "no bucket in iteration 4"


ABORTS = """
import time
from unicron.workers.training.communicators import communicators
from unicron.workers.training.communicators.communicators import Communicators
right_up, right_wake, right_abort = Communicators.up, Communicators.interrupt, communicators._abort
def abort(*given):
    time.sleep(1)
    right_abort(*given)
communicators._abort = abort
def up(self, *given):
    self.backend = "gloo"
    costs_s = right_up(self, *given)
    self.backend = "nccl"
    return costs_s
def wake(self):
    right_wake(self)
    print("woken in", self.generation, flush=True)
Communicators.up, Communicators.interrupt = up, wake
"""
"""Aborts gloo's groups as NCCL's are aborted: torch no longer knows them, and the aborts last until
the next groups are built."""


def test_a_member_about_to_use_a_group_that_was_aborted_quiesces(drive: Drive) -> None:
    driver = drive(iterations=3)
    driver.patch = ABORTS
    driver.start(0, 1)
    path = driver.hold(1, "settle", -1)  # before it learns what the stores have
    driver.reconfigure(
        [0, 1],
        copies=(
            MemoryCheckpoint(
                node="n9",
                endpoint="127.0.0.1:1",
                rank=0,
                generation=1,
                step_version=1,
                copy_bytes=1,
                checksum="",
            ),
        ),
    )
    driver.held(1, -1)
    driver.ask_to_leave([0, 1], "now")
    driver.says(1, "woken in 1")
    path.unlink()
    assert set(driver.quiesced([0, 1])) == {0, 1}
    assert "process group has not been initialized" in driver.told(r.ReconfigureFailed, 1)[0].error
    driver.form([0, 1])
    driver.finish([0, 1])
    assert sorted(driver.losses()) == [0, 1, 2]


COUNTS = """
import gc
from unicron.workers.training import rank
from unicron.workers.training.step.iteration import Iteration
right = Iteration.run
def run(self, *given):
    print("frozen", gc.get_freeze_count(), "tracked", len(gc.get_objects()), flush=True)
    return right(self, *given)
Iteration.run = run
rank.main()
"""


def test_built_objects_are_frozen_for_the_garbage_collector(drive: Drive) -> None:
    """A full garbage collection during an iteration would take 100 to 500 ms."""
    driver = drive(iterations=3)
    driver.by = [sys.executable, "-c", COUNTS]  # a zygote freezes its objects before it forks
    driver.start(0)
    driver.form([0])
    driver.finish([0])
    words = next(
        line
        for line in driver.processes[0].log.read_text().splitlines()
        if line.startswith("frozen")
    ).split()
    frozen, tracked = int(words[1]), int(words[3])
    assert frozen > 100_000
    assert tracked < frozen / 10


RAISES = """
import sys
from unicron.workers.training.step.passes import PassRunner
right = PassRunner.unit
def wrong(self, *given, **named):
    if self.part.state.step_version == 2:
        raise ValueError("raised on purpose")
    return right(self, *given, **named)
PassRunner.unit = wrong
"""


def test_an_exception_in_training_is_reported_and_logged(drive: Drive) -> None:
    driver = drive()
    driver.patch = RAISES
    driver.start(0)
    driver.form([0])
    report = driver.wait(r.RankErrored, 0)
    assert (report.error, report.generation, report.iteration) == ("ValueError", 1, 2)
    assert driver.processes[0].popen.wait(WAIT_S) == 1
    log = driver.processes[0].log.read_text()
    assert "Traceback" in log
    assert "ValueError: raised on purpose" in log


REPLACED_AFTER_ONE = """
from unicron.workers.training.process import control_thread as control
control.REPLACE_ABANDONED_NUM = 0
"""


@pytest.mark.thorough
def test_members_with_too_many_abandoned_exit_one_by_one_and_never_the_last(
    drive: Drive, twin: Twins
) -> None:
    """All members reach the limit together, because each stop abandons a collective on each."""
    driver = drive(dropout=0.1)
    driver.patch = REPLACED_AFTER_ONE
    driver.start(0, 1)
    driver.form([0, 1])
    left = driver.quiesced([0])[0]
    assert driver.processes[1].popen.wait(20) == EXIT_STUCK
    driver.form([0])
    driver.strike(0, iteration=left.step_version + 2, event="step")
    driver.quiesce([0], "boundary")
    assert driver.processes[0].popen.poll() is None, "the last rank with the state exited"
    driver.patch = ""
    driver.start(1, attempt=2)
    driver.form([0, 1])
    driver.quiesced([1])
    assert driver.processes[0].popen.wait(20) == EXIT_STUCK
    driver.start(0, attempt=2)
    (report, _) = driver.form([0, 1]).values()
    assert (report.origin, report.source) == ("peer", 1)
    driver.finish([0, 1])
    assert sorted(driver.losses()) == list(range(14))
    assert twin(0.1).is_equal(driver.final_checkpoint())
