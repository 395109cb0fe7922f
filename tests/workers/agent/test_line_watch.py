"""Lines of progress that stop coming are told: of whom, after how long, and when not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from progress_setup import line, order, write
from unicron.events.records.reports import IterationsLogged, RankStalled, RankUnstalled
from unicron.events.records.types import Body
from unicron.workers.agent.monitoring.output_monitor import ANNOUNCED_PAUSE_S, HangLimits
from unicron.workers.agent.monitoring.output_reader import OutputReaders

STEP_S = 2.0
ASIDES = (
    "saving checkpoint at iteration      20 to /ckpt in torch_dist format",
    "[default0]:  successfully saved checkpoint from iteration      20 to /ckpt [ t 1/8, p 1/4 ]",
    "scheduled an async checkpoint save at iteration      20 to /ckpt",
    "Evaluating on 4096 samples", "Evaluating iter 3/8",
    " validation loss at iteration 20 | lm loss value: 2.91E+00 | lm loss PPL: 1.8E+01 | ",
    " validation-2 loss at iteration 20 | lm loss value: 2.91E+00 | lm loss PPL: 1.8E+01 | ",
    " validation results at iteration 20 | lm_loss value: 2.9E+00 | lm_loss_ppl value: 1.8E+01 | ",
)


class Played:
    """Logs of one task, read on paper time: a look every second, as the agent does."""

    def __init__(self, folder: Path, num_ranks: int = 1) -> None:
        self.told: list[Body] = []
        self.readers = OutputReaders(lambda body, _: self.told.append(body))
        self.logs = [folder / f"rank-{rank}.log" for rank in range(num_ranks)]
        self.now_s = 1000.0
        self.iteration = 0
        for rank, path in enumerate(self.logs):
            path.touch()
            self.readers.begin(order(rank), path, 0, os.getpid())

    def wait(self, s: float) -> None:
        for _ in range(round(s)):
            self.now_s += 1.0
            self.readers.look(self.now_s)

    def print(self, num: int = 1, every_s: float = STEP_S) -> None:
        for _ in range(num):
            self.wait(every_s)
            self.iteration += 1
            write(self.logs[-1], line(self.iteration, 1000 * STEP_S))
        self.wait(1.0)

    def stalls(self) -> list[RankStalled]:
        return [body for body in self.told if isinstance(body, RankStalled)]


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    made = Played(tmp_path)
    yield made
    for rank in range(len(made.logs)):
        made.readers.drop(order(rank))


def test_a_command_that_prints_no_more_is_told_once_and_again_when_it_goes_on(
        played: Played) -> None:
    played.print(10)
    played.wait(58.0)
    assert not played.stalls(), "a minute at least, however short iterations are"
    played.wait(100.0)
    (told,) = played.stalls()
    assert (told.task, told.rank, told.where, told.what, told.collective, told.iteration) == (
        7, 0, "own", "no line of progress", 0, 10)
    assert told.normal_s == pytest.approx(STEP_S)
    assert 60 < told.in_s < 63
    assert told.stack, "what its process does"
    played.print()
    went, last = played.told[-2:]
    assert isinstance(went, RankUnstalled)
    assert isinstance(last, IterationsLogged)
    assert went.stalled_s == pytest.approx(161, abs=2)
    played.wait(400.0)
    assert len(played.stalls()) == 1, "what it has shown is waited for three times"
    played.wait(100.0)
    assert len(played.stalls()) == 2


def test_it_is_held_to_its_own_intervals(played: Played) -> None:
    played.print(8, every_s=30.0)
    played.wait(290.0)
    assert not played.stalls(), "ten times the average"
    played.wait(30.0)
    assert len(played.stalls()) == 1


def test_one_long_interval_among_the_last_is_usual(played: Played) -> None:
    played.print(6)
    played.print(1, every_s=50.0)
    played.print(20)
    played.wait(145.0)
    assert not played.stalls()
    played.wait(15.0)
    assert len(played.stalls()) == 1


def test_before_five_intervals_nothing_is_known(played: Played) -> None:
    played.print(5)
    played.wait(3600.0)
    assert not played.stalls()
    played.print(1)
    played.wait(3 * 3600.0)
    assert not played.stalls(), "the hour was an interval"


@pytest.mark.parametrize("said", ASIDES)
def test_what_it_says_it_does_is_waited_for(played: Played, said: str) -> None:
    played.print(10)
    write(played.logs[0], f"{said}\n".encode())
    played.wait(ANNOUNCED_PAUSE_S - 10)
    assert not played.stalls()
    played.wait(20.0)
    assert len(played.stalls()) == 1, "not for ever"


def test_what_was_said_before_the_last_line_is_over(played: Played) -> None:
    played.print(10)
    write(played.logs[0], b"saving checkpoint at iteration 10 to /ckpt\n" + line(11, 2000.0))
    played.wait(70.0)
    assert len(played.stalls()) == 1


def test_rank_0_says_so_and_the_last_rank_prints(tmp_path: Path) -> None:
    """As Megatron does: of checkpoints rank 0, of iterations the last rank."""
    played = Played(tmp_path, num_ranks=2)
    write(played.logs[0], b"saving checkpoint at iteration 1 to /ckpt\n")
    played.print(10)
    played.wait(70.0)
    assert [told.rank for told in played.stalls()] == [1], "that was before"
    played.print(1)
    write(played.logs[0], b"x" * 200_000 + b"\nsaving checkpoint at iteration 11 to /ckpt\n")
    played.wait(600.0)
    write(played.logs[0], b"successfully saved checkpoint\n")
    played.wait(600.0)
    assert len(played.stalls()) == 1
    for rank in range(2):
        played.readers.drop(order(rank))


def test_after_its_last_iteration_no_line_is_waited_for(played: Played) -> None:
    played.iteration = 90
    played.print(10)
    played.wait(2 * ANNOUNCED_PAUSE_S)
    assert not played.stalls()


def test_time_in_which_the_agent_did_not_look_counts_for_nobody(played: Played) -> None:
    played.print(10)
    played.wait(55.0)
    played.now_s += 3600.0
    played.wait(58.0)
    assert not played.stalls(), "and everybody has a full span again"
    played.wait(5.0)
    assert len(played.stalls()) == 1
    played.print(1)
    played.wait(62.0)
    assert len(played.stalls()) == 2, "nor is it an interval that the command has shown"


def test_nobody_is_told_of_where_the_watch_is_off(tmp_path: Path) -> None:
    told: list[Body] = []
    readers = OutputReaders(lambda body, _: told.append(body), limits=None)
    path = tmp_path / "log"
    path.touch()
    readers.begin(order(), path, 0, os.getpid())
    for at in range(1, 200):
        if at < 20:
            write(path, line(at))
        readers.look(float(at))
    assert {type(body) for body in told} == {IterationsLogged}
    readers.drop(order())


PRINTS = """
import itertools, sys, time
for i in itertools.count(1):
    print(f" iteration {i}/ 100000 | elapsed time per iteration (ms): 50.0 |", flush=True)
    time.sleep(0.05)
"""


def test_a_real_process_that_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """Behind a shell, as commands often are: what its one child does is said."""
    told: list[Body] = []
    readers = OutputReaders(lambda body, _: told.append(body), limits=HangLimits(least_s=1.0))
    path = tmp_path / "rank-0.log"
    program = tmp_path / "prints.py"
    program.write_text(PRINTS)
    with path.open("wb") as log:
        shell = subprocess.Popen(["sh", "-c", f"{sys.executable} -S {program}; true"], stdout=log,
                                 start_new_session=True)

    def until(kind: type[Body]) -> Body:
        give_up_s = time.monotonic() + 60
        while time.monotonic() < give_up_s:
            readers.look(time.monotonic())
            if found := [body for body in told if isinstance(body, kind)]:
                return found[0]
            time.sleep(0.05)
        raise AssertionError(f"no {kind.__name__} in {told[-3:]}")

    try:
        readers.begin(order(), path, 0, shell.pid)
        for _ in range(15):
            told.clear()
            until(IterationsLogged)
        os.killpg(shell.pid, signal.SIGSTOP)
        stalled = until(RankStalled)
        assert isinstance(stalled, RankStalled)
        assert (stalled.stack, stalled.in_s >= 1.0) == ("stopped by a signal", True)
        assert stalled.normal_s == pytest.approx(0.05)
        os.killpg(shell.pid, signal.SIGCONT)
        went = until(RankUnstalled)
        assert isinstance(went, RankUnstalled)
        assert went.stalled_s >= stalled.in_s
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        readers.drop(order())
