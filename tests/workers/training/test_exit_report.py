"""Exit reports: the innermost cause decides, and the rank reports it before its process ends."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import unicron
from rank_driver import Driver
from unicron.events.errors import UsageError
from unicron.events.records.reports import CollectiveFailed, RankErrored
from unicron.events.records.statuses import (
    CONNECTION_REFUSED,
    CONNECTION_RESET,
    ILLEGAL_MEMORY_ACCESS,
    OTHER_SOFTWARE,
    SILENT_CORRUPTION,
    WRONG_INPUT,
)
from unicron.workers.diagnosis.classifier import classify
from unicron.workers.ipc.pipe_protocol import Unpacker
from unicron.workers.training.process.exit_report import (
    OWN_THREADS,
    TEXT_CHARS_MAX,
    _walked,
    bounded,
    verdict_of,
)
from unicron.workers.training.step.checks import CorruptionError

CUDA = " CUDA error: an illegal memory access was encountered "
LINE = "ConnectionRefusedError: [Errno 111] Connection refused"
PROGRAM = """
import os, socket, sys, threading
from unicron.events.records.orders import Slot, StartRank
from unicron.events.spec.job import parse
from unicron.workers.training.process.control_thread import Control
from unicron.workers.training.process.exit_report import ExitReporter
from unicron.workers.ipc.pipe_protocol import Unpacker

spec = parse({"apiVersion": "unicron/v1", "name": "small", "slots": {"min": 1, "max": 1},
              "command": ["true"]})
order = StartRank(nodes=("n1",), task=7, rank=2, attempt=1, slot=Slot("n1", 0), spec=spec,
                  num_seats=1, host="", port=0, checkpoint="")
control = Control(socket.socket(fileno=int(sys.argv[1])), 2, Unpacker())
threading.excepthook = ExitReporter(control, order).report_thread

def end(name, error):
    def fail():
        raise error
    thread = threading.Thread(target=fail, name=name)
    thread.start()
    thread.join()
    print(name, "ended", flush=True)

end("QueueFeederThread", OSError("a library's"))
end("checkpoint", SystemExit(0))
error = ValueError("ours" + "!" * 10_000)
error.__cause__ = ConnectionRefusedError(111, "Connection refused")
end("checkpoint", error)
"""
FAILS_IN_ITS_FORWARD = """
from unicron.workers.training.model import trainee as model
right, calls = model.TrainingModel.loss, []
def fails(self, tokens):
    calls.append(1)
    if len(calls) == 7:
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except OSError as error:
            raise ValueError("the batch could not be made") from error
    return right(self, tokens)
model.TrainingModel.loss = fails
"""


def refused() -> None:
    raise ConnectionRefusedError(111, "Connection refused")


def reset() -> None:
    raise RuntimeError("Connection reset by peer")


def plainly() -> None:
    refused()


def from_another() -> None:
    try:
        refused()
    except OSError as error:
        raise ValueError("the batch could not be made") from error


def within_another() -> None:
    try:
        from_another()
    except ValueError:
        {}["no such key"]


def in_a_wrapper_with_a_status() -> None:
    try:
        refused()
    except OSError as error:
        raise RuntimeError("Connection reset by peer") from error


def from_a_key_error_without_a_status() -> None:
    """An error with a status of its own outranks a software error, even one that lies deeper."""
    try:
        {}["no such key"]
    except KeyError:
        refused()


def in_a_group() -> None:
    caught: list[Exception] = []
    for fail in (reset, from_another):
        try:
            fail()
        except (RuntimeError, ValueError) as error:
            caught.append(error)
    raise ExceptionGroup("two of them", caught)


def in_the_cause_of_a_group() -> None:
    try:
        refused()
    except OSError as error:
        raise ExceptionGroup("all of them", [RuntimeError("Connection reset by peer")]) from error


def in_a_circle() -> None:
    one, other = ValueError("one"), ConnectionRefusedError(111, "Connection refused")
    one.__cause__, other.__context__ = other, one
    raise one


def deep() -> None:
    error: Exception = ConnectionRefusedError(111, "Connection refused")
    for number in range(1200):  # above the limit of recursion
        wrapper = ValueError(f"wrapper {number}")
        wrapper.__cause__ = error
        error = wrapper
    raise error


def caught(fail: Callable[[], None]) -> Exception:
    try:
        fail()
    except Exception as error:  # noqa: BLE001 - any exception
        return error
    raise AssertionError("no exception was raised")


@pytest.mark.parametrize(
    "fail",
    [
        plainly,
        from_another,
        within_another,
        in_a_wrapper_with_a_status,
        from_a_key_error_without_a_status,
        in_a_group,
        in_the_cause_of_a_group,
        in_a_circle,
        deep,
    ],
)
def test_the_innermost_cause_decides(fail: Callable[[], None]) -> None:
    verdict = verdict_of(caught(fail))
    assert (verdict.status, verdict.second_hand) == (CONNECTION_REFUSED, False)
    assert "Connection refused" in verdict.line


def test_silent_corruption_is_that_of_the_rank_that_raises_it() -> None:
    def corrupt() -> None:
        raise CorruptionError("silent data corruption in rank 1, iteration 30: its state changed")

    def told() -> None:
        raise RuntimeError("silent data corruption at position 1: its state changed")

    assert verdict_of(caught(corrupt)).status == SILENT_CORRUPTION
    assert verdict_of(caught(told)).status == OTHER_SOFTWARE


def test_an_operator_without_a_deterministic_kernel_is_wrong_input() -> None:
    def put() -> None:
        torch.use_deterministic_algorithms(True)
        try:
            torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2))
        finally:
            torch.use_deterministic_algorithms(False)

    verdict = verdict_of(caught(put))
    assert (verdict.status, verdict.rule) == (WRONG_INPUT, "not-deterministic")
    assert "put_" in verdict.line


def test_a_suppressed_cause_does_not_count() -> None:
    def hidden() -> None:
        try:
            refused()
        except OSError:
            raise RuntimeError("Connection reset by peer") from None

    assert verdict_of(caught(hidden)).status == CONNECTION_RESET


def test_in_a_group_an_own_error_outranks_a_peers_failure() -> None:
    def members(*errors: Exception) -> ExceptionGroup[Exception]:
        return ExceptionGroup("connection reset by peer", errors)

    news, own = ConnectionResetError(104, "Connection reset by peer"), ValueError("no such layer")
    for group in (members(news, own), members(own, news), members(news, members(own))):
        assert verdict_of(group).status == OTHER_SOFTWARE
    assert verdict_of(members(news, members(news))).status == CONNECTION_RESET
    assert verdict_of(members(own, RuntimeError(CUDA), news)).status == ILLEGAL_MEMORY_ACCESS


def test_causes_are_walked_before_their_effects() -> None:
    names = [type(error).__name__ for _, error in _walked(caught(within_another))]
    assert names == ["ConnectionRefusedError", "ValueError", "KeyError"]


def test_a_usage_error_is_wrong_input_whatever_it_says() -> None:
    verdict = verdict_of(UsageError("Connection refused", hint="name another store"))
    assert verdict.status == WRONG_INPUT


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_unprintable_and_huge_errors_are_classified() -> None:
    verdict_of(Unspeakable())
    assert verdict_of(RuntimeError("x" * 10_000_000 + CUDA)).status == ILLEGAL_MEMORY_ACCESS
    assert verdict_of(RuntimeError(CUDA + "x" * 10_000_000)).status == ILLEGAL_MEMORY_ACCESS


def test_a_bounded_text_keeps_the_deciding_line() -> None:
    text = f"{LINE}\n" + "frame\n" * 1000 + "ValueError: no batch"
    kept = bounded(text, LINE, 400, end=True)
    assert len(kept) == 400
    assert kept.startswith(f"{LINE}\n[...]\n")
    assert kept.endswith("ValueError: no batch")
    assert bounded(text, LINE, 400, end=False) == text[:400]
    assert bounded(text, "ValueError: no batch", 400, end=True) == text[-400:]
    assert bounded(text, "", 400, end=True) == text[-400:]
    assert bounded(LINE, LINE, 400, end=True) == LINE
    assert bounded("ab" * 9000, "q" * 9000, 4000, end=True).startswith("q" * 500 + "\n")


# --- threads -------------------------------------------------------------------------------------
def test_an_error_in_a_foreign_thread_ends_no_rank() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        theirs.close()
        (frame,) = Unpacker().feed(ours.recv(1 << 16))
    assert done.stdout == "QueueFeederThread ended\ncheckpoint ended\n", done.stderr
    assert done.returncode == 1
    assert "thread QueueFeederThread has ended, training continues: Traceback" in done.stderr
    assert "OSError: a library's" in done.stderr
    assert isinstance(frame.body, RankErrored)
    assert (frame.body.rank, frame.body.error) == (2, "ValueError")
    assert (frame.body.status, frame.body.second_hand) == (CONNECTION_REFUSED, False)
    assert len(frame.body.text) == TEXT_CHARS_MAX
    assert frame.body.text.startswith("ConnectionRefusedError: [Errno 111] Connection refused\n")
    assert frame.body.text.endswith("!!!\n")


def test_every_thread_that_a_rank_starts_is_known_as_its_own() -> None:
    folder = Path(unicron.__file__).parent / "workers" / "training"
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    starts = re.findall(r"threading\.Thread\(|ThreadPoolExecutor\(", source)
    names = re.findall(r"threading\.Thread\(.*?name=\"([^\"]+)\"", source, re.DOTALL)
    names += re.findall(r"ThreadPoolExecutor\([^\"]*, \"([^\"]+)\"", source)
    assert len(names) == len(starts)
    names += re.findall(r"DetachedThread\(\"([^\"]+)\"", source)
    # An error in these is logged, and training continues.
    optional = {"flight recorder", "NCCL errors", "leave"}
    assert set(names) == {*OWN_THREADS, *optional}


# --- a real rank ---------------------------------------------------------------------------------
def test_a_rank_reports_its_cause_and_its_peers_name_the_lost_peer(
    drive: Callable[..., Driver],
) -> None:
    driver = drive()
    driver.start(0, 2)
    driver.patch = FAILS_IN_ITS_FORWARD
    driver.start(1)
    driver.form([0, 1, 2])
    report = driver.wait(RankErrored, 1)
    assert (report.error, report.status, report.second_hand) == (
        "ValueError",
        CONNECTION_REFUSED,
        False,
    )
    assert (report.generation, report.iteration) == (1, 1)
    assert report.rule
    assert report.can_pass
    assert "ConnectionRefusedError: [Errno 111] Connection refused" in report.text
    assert report.text.endswith("ValueError: the batch could not be made\n")
    assert driver.processes.pop(1).popen.wait(20) == 1, driver.story()
    alone = driver.left_by_themselves([0, 2])
    assert alone, "no survivor quiesced by itself"
    for rank in alone:
        failed = driver.wait(CollectiveFailed, rank)
        assert failed.status == CONNECTION_RESET, failed
        verdict = classify(failed.error)
        assert verdict.second_hand
        assert (failed.rule, failed.peer) == (verdict.rule, verdict.peer)
        named = re.search(r"\[([\d.]+)\]:(\d+)", failed.error)  # some gloo messages name no peer
        assert failed.peer == (":".join(named.groups()) if named is not None else ""), failed.error
    driver.form([0, 2], progress_from=1)
    driver.finish([0, 2])
