"""The life of one rank's process: what ends it, what it says, and that it leaks nothing."""

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
from unicron.workers.training.process.control_thread import EXIT_STUCK

WAIT_S = 60.0
REBUILDS = 12


def _open(pid: int) -> tuple[int, int]:
    """Descriptors and threads of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def test_generation_after_generation_leaks_nothing_and_reaches_nobody_else(drive: Drive) -> None:
    driver = drive(iterations=10_000)
    driver.start(0)
    driver.by = EXEC  # torch is imported when the interface is known: what is forked has it before
    driver.start(1)
    pids = [driver.processes[rank].popen.pid for rank in (0, 1)]
    seen: list[list[tuple[int, int]]] = []
    for _ in range(REBUILDS):
        driver.form([0, 1])
        driver.quiesce([0, 1], "boundary")
        seen.append([_open(pid) for pid in pids])
    # No more than after the third; what was left closes and ends in its own time.
    driver.until(lambda: all(now <= then for pid, early in zip(pids, seen[2], strict=True)
                             for now, then in zip(_open(pid), early, strict=True)), seen)
    versions = [told.step_version for told in driver.told(r.Quiesced, 0)]
    assert versions == sorted(versions)
    assert versions[-1] >= REBUILDS
    # A stale generation, and one that it has left: the first is not answered, the second is.
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
    # Agents gone: ranks end.
    driver.processes[0].socket.shutdown(socket.SHUT_RDWR)
    assert driver.processes[0].popen.wait(WAIT_S) == 3
    driver.processes[1].signal(signal.SIGTERM)
    assert driver.processes[1].popen.wait(WAIT_S) == -signal.SIGTERM


def _tcp(pid: int) -> list[list[str]]:
    """The process's TCP sockets: their fields in /proc/net/tcp. Source: proc_net_tcp in Linux."""
    inodes = set[str]()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    lines = [line.split() for table in ("tcp", "tcp6")
             for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return [fields for fields in lines if f"socket:[{fields[9]}]" in inodes]


def _listens_on_loopback_only(pid: int) -> bool:
    """Whether every listening TCP socket of the process is bound to 127.0.0.1."""
    bound = {fields[1].split(":")[0] for fields in _tcp(pid) if fields[3] == "0A"}
    return bound == {"0100007F"}


def _unsent_bytes(pid: int) -> int:
    """What the process has sent on one of its TCP sockets, and nobody has taken."""
    return max((int(fields[4].split(":")[0], 16) for fields in _tcp(pid)), default=0)


def test_an_error_is_reported_before_the_rank_exits(drive: Drive) -> None:
    driver = drive(data=["/nonexistent/text"])
    driver.by = EXEC  # test_zygote.py has it of a rank that is forked
    driver.launch(0)
    told = driver.wait(r.RankErrored, 0)
    assert told.error == "UsageError"
    assert told.text.startswith("train.data: /nonexistent/text: No such file")
    assert driver.processes[0].popen.wait(WAIT_S) == 1
    assert not driver.told(r.RankReady)

    other = drive(output="/proc/nowhere")
    other.launch(0)
    told = other.wait(r.RankErrored, 0)
    assert told.text.startswith("train.output: /proc/nowhere: no such file")
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
"""Half a minute for what rank 0 sends of the third iteration's sum, whatever the cores are busy
with, and no more room on its way than a small part of it."""
PART_BYTES = 4096
"""More than anything has on its way but that sum."""


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sum_that_is_half_sent_blocks_nobody(drive: Drive, overlap: bool) -> None:
    """gloo does not tell every half-done send that its connection is closed."""
    model = {"num_layers": 2, "hidden": 256, "num_heads": 4, "sequence": 16}
    driver = drive(model=model, batch={"global": 4, "micro": 1}, iterations=6, overlap=overlap,
                   bucket_params=400_000 if overlap else 0)
    driver.patch = SENDS_SLOWLY
    driver.start(0, 1)
    driver.form([0, 1])
    for rank in (0, 1):
        driver.strike(rank, iteration=2, event="bucket")
    sender = driver.processes[0].popen.pid
    # Not at the bucket's beginning: who is stopped there has not asked for the sum yet.
    driver.until(lambda: _unsent_bytes(sender) > PART_BYTES)
    driver.processes[1].signal(signal.SIGSTOP)
    unsent = [0]

    def stuck() -> bool:
        """Whether nobody takes what it sends."""
        time.sleep(0.1)
        unsent.append(_unsent_bytes(sender))
        return all(unsent[-5:]) and len(set(unsent[-5:])) == 1

    driver.until(stuck, unsent)
    held = driver.quiesce([0], "now")
    driver.kill(1)
    assert len(held[0].micro_batches) == 2, "the stop came in the middle of the sum"
    driver.form([0], progress_from=2)
    driver.finish([0])
    assert len(driver.losses()) == 6


@pytest.mark.parametrize("event", ["stats", "bucket"])
def test_a_reduction_that_wakes_late_begins_nothing_in_the_next_generation(
        drive: Drive, twin: Twins, event: str) -> None:
    """Starved for longer than anybody waits for it: the others have gone on meanwhile."""
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


def test_buckets_of_the_previous_iteration_are_not_reported(drive: Drive) -> None:
    driver = drive()
    driver.start(0, 1, 2)
    driver.hold(1, "stats", 4)
    driver.form([0, 1, 2])
    driver.held(1, 4)
    driver.kill(1)
    held = driver.quiesced([0, 2])
    assert {told.step_version for told in held.values()} == {4}
    assert not any(told.buckets_reduced for told in held.values()), "none was begun"


ABORTS = """
from unicron.workers.training.communicators.communicators import Communicators
right_up, right_wake = Communicators.up, Communicators.interrupt
def up(self, *given):
    self.backend = "gloo"
    right_up(self, *given)
    self.backend = "nccl"
def wake(self):
    right_wake(self)
    print("woken in", self.generation, flush=True)
Communicators.up, Communicators.interrupt = up, wake
"""
"""gloo's groups, aborted as NCCL's are: torch knows them no more."""


def test_a_member_about_to_use_a_group_that_was_aborted_quiesces(drive: Drive) -> None:
    driver = drive(iterations=3)
    driver.patch = ABORTS
    driver.start(0, 1)
    path = driver.hold(1, "settle", -1)  # before it is told what state there is
    driver.reconfigure([0, 1])
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


def test_what_was_built_is_never_looked_through_again(drive: Drive) -> None:
    """A collection in mid-iteration would cost 100 to 500 ms."""
    driver = drive(iterations=3)
    driver.by = [sys.executable, "-c", COUNTS]  # a zygote has frozen what it forks
    driver.start(0)
    driver.form([0])
    driver.finish([0])
    words = next(line for line in driver.processes[0].log.read_text().splitlines()
                 if line.startswith("frozen")).split()
    frozen, tracked = int(words[1]), int(words[3])
    assert frozen > 100_000
    assert tracked < frozen / 10


RAISES = """
import sys
from unicron.workers.training.step.iteration import Iteration
right = Iteration._micro_batch
def wrong(self, item, begin):
    if self.step_version == 2:
        raise ValueError("raised on purpose")
    right(self, item, begin)
Iteration._micro_batch = wrong
"""


def test_an_exception_in_training_is_reported_and_logged(drive: Drive) -> None:
    driver = drive()
    driver.patch = RAISES
    driver.start(0)
    driver.form([0])
    told = driver.wait(r.RankErrored, 0)
    assert (told.error, told.generation, told.iteration) == ("ValueError", 1, 2)
    assert driver.processes[0].popen.wait(WAIT_S) == 1
    log = driver.processes[0].log.read_text()
    assert "Traceback" in log
    assert "ValueError: raised on purpose" in log


WORN = """
from unicron.workers.training.process import control_thread as control
control.REPLACE_ABANDONED_NUM = 0
"""


def test_members_with_too_many_abandoned_exit_one_by_one_and_never_the_last(
        drive: Drive, twin: Twins) -> None:
    """As after stops that each of them left a collective behind in: they reach the limit together.
    """
    driver = drive(dropout=0.1)
    driver.patch = WORN
    driver.start(0, 1)
    driver.form([0, 1])
    left = driver.quiesced([0])[0]
    assert driver.processes[1].popen.wait(20) == EXIT_STUCK
    driver.form([0])
    driver.strike(0, iteration=left.step_version + 2, event="step")
    driver.quiesce([0], "boundary")
    assert driver.processes[0].popen.poll() is None, "nobody else has what it has"
    driver.patch = ""
    driver.start(1, attempt=2)
    driver.form([0, 1])
    driver.quiesced([1])
    assert driver.processes[0].popen.wait(20) == EXIT_STUCK
    driver.start(0, attempt=2)
    (told, _) = driver.form([0, 1]).values()
    assert (told.origin, told.source) == ("peer", 1)
    driver.finish([0, 1])
    assert sorted(driver.losses()) == list(range(14))
    assert twin(0.1).is_equal(driver.final_checkpoint())
