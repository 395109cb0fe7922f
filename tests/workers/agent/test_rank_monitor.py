"""A rank's progress page, what its agent concludes from it, and the evidence that it collects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import pytest
from agent_driver import train
from unicron.events.records.orders import StartRank
from unicron.events.records.reports import RankStalled, RankUnstalled, StepTimeChanged
from unicron.events.records.types import Body, Slot
from unicron.workers.agent.monitoring import process_state
from unicron.workers.agent.monitoring.flight_recorder_dumps import (
    DUMP_INTERVAL_S,
    Dumps,
    DumpTrigger,
)
from unicron.workers.agent.monitoring.rank_monitor import (
    PAUSE_S,
    REPORT_S,
    STALL_S_MIN,
    WATCH_S,
    RankMonitors,
)
from unicron.workers.diagnosis.step_time import LENIENT_S, WINDOW_NUM
from unicron.workers.host import cpu_wait
from unicron.workers.host.cpu_wait import NUM_THREADS_MAX, CpuWait
from unicron.workers.ipc import progress_page as pulse_module
from unicron.workers.ipc.progress_page import (
    OUTSIDE_CODE,
    OWN_CODE,
    RING_NUM,
    ProgressPage,
    ProgressWriter,
)
from unicron.workers.training.process.trace import Event

WRITER = """
import sys
from unicron.workers.ipc.progress_page import OWN_CODE, ProgressWriter
pulse = ProgressWriter(int(sys.argv[1]))
print("up", flush=True)
number = 0
while True:
    number += 1
    pulse.begin(number, number, "usual")
    for _ in range(3):
        pulse.enter(str(number % 10) * 16, OWN_CODE)
        pulse.micro_batch_done()
    pulse.finish()
"""
SPIN = "import time\nend_s = time.monotonic() + 20\nwhile time.monotonic() < end_s: pass"


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    made = ProgressPage()
    yield made
    made.close()


def rank_of(page: ProgressPage) -> ProgressWriter:
    return ProgressWriter(os.dup(page.fd))


def test_a_mark_is_read_as_it_was_written(page: ProgressPage) -> None:
    pulse = rank_of(page)
    assert page.mark() is None
    assert page.done(0) == []
    pulse.mark("start", OUTSIDE_CODE)
    pulse.begin(3, 7, "boundary")
    pulse.micro_batch_done()
    pulse.enter("stats")
    before_s = time.monotonic()
    time.sleep(0.02)
    pulse.mark("stats_done", OWN_CODE)
    mark = page.mark()
    assert mark is not None
    assert (mark.num, mark.generation, mark.iteration, mark.kind) == (4, 3, 7, "boundary")
    assert (mark.what, mark.phase, mark.collective, mark.micro_batches) == (
        "stats_done", OWN_CODE, 1, 1)
    assert mark.began_s <= before_s <= mark.at_s <= time.monotonic()
    assert 0.02 <= mark.waited_s <= mark.at_s - mark.began_s
    pulse.finish()
    (done,) = page.done(0)
    assert (done.num, done.generation, done.iteration, done.kind) == (1, 3, 7, "boundary")
    assert done.own_s == pytest.approx(done.iteration_s - mark.waited_s)
    assert page.done(1) == []
    pulse.begin(3, 8, "usual")
    mark = page.mark()
    assert mark is not None
    assert (mark.collective, mark.micro_batches, mark.waited_s) == (0, 0, 0.0)


def test_every_event_has_room(page: ProgressPage) -> None:
    pulse = rank_of(page)
    for event in (*get_args(Event), "stats_done"):
        pulse.mark(event, OWN_CODE)
        mark = page.mark()
        assert mark is not None
        assert mark.what == event


def test_a_rank_without_a_page_writes_nothing() -> None:
    pulse = ProgressWriter()
    pulse.begin(1, 1, "usual")
    pulse.enter("stats")
    pulse.finish()


def test_the_ring_keeps_the_last(page: ProgressPage) -> None:
    pulse = rank_of(page)
    for iteration in range(10 * RING_NUM + 7):
        pulse.begin(1, iteration, "usual")
        pulse.finish()
    num, found = 0, list[int]()
    while done := page.done(num):
        num = done[-1].num
        found += [one.iteration for one in done]
    assert found == list(range(found[0], 10 * RING_NUM + 7)), "in order, up to the last"


def test_what_another_process_writes_is_whole_also_when_it_is_stopped(page: ProgressPage) -> None:
    os.set_inheritable(page.fd, True)
    with subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(page.fd)],
                          pass_fds=[page.fd], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            seen, num = set[int](), 0
            for _ in range(100):
                time.sleep(0.001)
                os.kill(writer.pid, signal.SIGSTOP)
                mark = page.mark()
                if mark is not None:
                    assert mark.num >= num
                    num = mark.num
                    seen.add(num)
                    assert mark.generation == mark.iteration
                    if mark.what not in ("begin", "end"):
                        assert mark.what == str(mark.iteration % 10) * 16
                for done in page.done(max(0, mark.iteration - 5 if mark else 0)):
                    assert done.num == done.generation == done.iteration
                os.kill(writer.pid, signal.SIGCONT)
            assert len(seen) > 10
        finally:
            writer.kill()


# --- the watch ----------------------------------------------------------------------------------
class Told:
    """A watch over ranks that this process plays, by a clock that is ours."""

    def __init__(self, patch: pytest.MonkeyPatch, num_ranks: int = 1) -> None:
        self.now_s = 1000.0
        patch.setattr(pulse_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.bodies: list[Body] = []
        self.watch = RankMonitors(lambda body, at_s: self.bodies.append(body))
        self.ranks: list[ProgressWriter] = []
        self.orders: list[StartRank] = []
        self.iteration = 0
        for rank in range(num_ranks):
            order = StartRank(nodes=("n1",), task=1, rank=rank, attempt=1,
                              slot=Slot(node="n1", index=rank), spec=train(0), num_seats=num_ranks,
                              host="", port=0, checkpoint="")
            page = self.watch.open(order)
            assert page is not None
            self.ranks.append(rank_of(page))
            self.watch.begin(order, page, os.getpid())
            self.orders.append(order)

    def close(self) -> None:
        for order in self.orders:
            self.watch.drop(order)

    def iterate(self, num: int, own_s: float = 0.1, wait_s: float = 0.1) -> None:
        for _ in range(num):
            self.iteration += 1
            for pulse in self.ranks:
                pulse.begin(1, self.iteration, "usual")
            self.go(own_s)
            for pulse in self.ranks:
                pulse.enter("stats")
            self.go(wait_s)
            for pulse in self.ranks:
                pulse.mark("reduced", OWN_CODE)
                pulse.finish()
        self.go(WATCH_S)

    def go(self, in_s: float) -> None:
        """Time passes, and the watch looks as often as it does."""
        until_s = self.now_s + in_s
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + WATCH_S)
            self.watch.look(self.now_s)

    def take(self, kind: type[Any]) -> list[Any]:
        found = [body for body in self.bodies if isinstance(body, kind)]
        self.bodies = [body for body in self.bodies if not isinstance(body, kind)]
        return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    made = Told(monkeypatch)
    yield made
    made.close()


def test_a_stall_is_reported_once_with_its_place_and_then_its_end(told: Told) -> None:
    told.iterate(10)
    (pulse,) = told.ranks
    pulse.begin(1, 50, "usual")
    pulse.mark("forward", OWN_CODE)
    told.go(STALL_S_MIN - WATCH_S)
    assert told.bodies == []
    told.go(10)
    (stalled,) = told.take(RankStalled)
    assert (stalled.iteration, stalled.where, stalled.what, stalled.collective) == (
        50, "own", "forward", 0)
    assert STALL_S_MIN < stalled.in_s <= STALL_S_MIN + 2 * WATCH_S
    assert stalled.normal_s == pytest.approx(0.2)
    assert stalled.stack
    pulse.enter("stats")
    told.go(WATCH_S)
    (went,) = told.take(RankUnstalled)
    assert (went.iteration, told.bodies) == (50, [])
    assert went.stalled_s == pytest.approx(10 + STALL_S_MIN - WATCH_S)
    told.go(10)
    (stalled,) = told.take(RankStalled)
    assert (stalled.where, stalled.collective) == ("collective", 1)


def test_a_long_iteration_has_three_times_as_long(told: Told) -> None:
    told.iterate(10, own_s=1.5, wait_s=0.5)
    told.ranks[0].begin(1, 50, "usual")
    told.go(6.0)
    assert told.bodies == []
    told.go(2 * WATCH_S)
    assert len(told.take(RankStalled)) == 1


def test_outside_of_training_nobody_stalls(told: Told) -> None:
    told.iterate(10)
    told.ranks[0].mark("save", OUTSIDE_CODE)
    told.go(2 * LENIENT_S)
    assert told.bodies == []


def test_a_first_iteration_has_a_lenient_limit_and_none_where_nothing_is_known(told: Told) -> None:
    (pulse,) = told.ranks
    pulse.begin(1, 0, "first")
    told.go(2 * LENIENT_S)
    assert told.bodies == []
    told.iterate(10)
    pulse.begin(2, 11, "first")
    told.go(LENIENT_S)
    assert told.bodies == []
    told.go(2 * WATCH_S)
    (stalled,) = told.take(RankStalled)
    assert (stalled.generation, stalled.iteration) == (2, 11)


def test_a_stall_in_the_second_iteration_is_reported(told: Told) -> None:
    """A newcomer whose peers died under it, and whose connections do not tell it so."""
    (pulse,) = told.ranks
    pulse.begin(1, 0, "first")
    told.go(9.0)
    pulse.finish()
    pulse.begin(1, 1, "usual")
    pulse.enter("stats")
    told.go(10 * 9.0)
    assert told.bodies == []
    told.go(3 * WATCH_S)
    assert told.take(RankStalled)[0].iteration == 1


@pytest.mark.parametrize("away_s", [0.6, PAUSE_S + 0.5, 500.0])
def test_a_watch_that_was_away_lets_everybody_show_themselves_first(told: Told, away_s: float
                                                                    ) -> None:
    told.iterate(10)
    told.ranks[0].begin(1, 50, "usual")
    told.go(0.5)
    told.now_s += away_s
    told.watch.look(told.now_s)
    assert told.bodies == [], "it came back this moment"
    left_s = STALL_S_MIN - 0.5 if away_s < PAUSE_S else STALL_S_MIN
    told.go(left_s - 2 * WATCH_S)
    assert told.bodies == []
    told.go(4 * WATCH_S)
    assert len(told.take(RankStalled)) == 1


def test_a_rank_that_waits_for_a_core_is_not_stalled(told: Told, monkeypatch: pytest.MonkeyPatch
                                                     ) -> None:
    told.iterate(10)
    told.ranks[0].begin(1, 50, "usual")
    began_s = told.now_s

    def look(pid: int) -> process_state.ProcessState:
        at_s = told.now_s - began_s
        return process_state.ProcessState(told.now_s, "R", 0.0, min(at_s, 5.0))

    monkeypatch.setattr(process_state, "look", look)
    told.go(5.0)
    assert told.bodies == [], "it was given no core"
    told.go(STALL_S_MIN)
    assert len(told.take(RankStalled)) == 1, "since then it was"


def test_the_step_time_is_reported_when_known_and_when_it_has_changed(told: Told) -> None:
    told.iterate(WINDOW_NUM - 1)
    assert told.bodies == []
    told.iterate(1)
    (first,) = told.take(StepTimeChanged)
    assert first.num_iterations == WINDOW_NUM
    assert (first.own_s, first.normal_s, first.iteration_s) == pytest.approx((0.1, 0.1, 0.2))
    told.iterate(WINDOW_NUM, own_s=0.1, wait_s=0.4)
    assert told.bodies == [], "it waits longer for others; its own work is as it was"
    told.iterate(2 * WINDOW_NUM, own_s=0.15)
    (second,) = told.take(StepTimeChanged)
    assert (second.own_s, second.normal_s) == pytest.approx((0.15, 0.1))
    told.iterate(10 * WINDOW_NUM, own_s=0.15)
    assert told.bodies == []


def test_step_times_are_reported_at_a_bounded_rate(told: Told) -> None:
    told.iterate(WINDOW_NUM, own_s=0.01, wait_s=0.01)
    began_s = told.now_s
    num = 0
    for _ in range(100):
        told.iterate(WINDOW_NUM, own_s=0.05, wait_s=0.01)
        told.iterate(WINDOW_NUM, own_s=0.01, wait_s=0.01)
        num += len(told.take(StepTimeChanged))
    assert 1 < num <= 2 + (told.now_s - began_s) / REPORT_S / 4, "the window grows each time"


def test_a_very_slow_iteration_is_reported_while_it_runs(told: Told) -> None:
    told.iterate(WINDOW_NUM)
    told.take(StepTimeChanged)
    (pulse,) = told.ranks
    pulse.begin(1, 50, "usual")
    while told.now_s < 1000 + 60 and not told.bodies:
        told.go(0.2)
        pulse.mark("micro_batch", OWN_CODE)
    (slow,) = told.take(StepTimeChanged)
    assert (slow.iteration, slow.num_iterations, told.bodies) == (50, 1, [])
    assert slow.own_s == pytest.approx(STALL_S_MIN, abs=0.3)
    pulse.enter("stats")
    pulse.mark("reduced", OWN_CODE)
    pulse.finish()
    told.iteration = 50
    told.iterate(WINDOW_NUM)
    told.go(REPORT_S)
    (again,) = told.take(StepTimeChanged)
    assert again.own_s == pytest.approx(0.1), "as it has been since"
    assert told.bodies == []


def test_a_rank_that_waits_for_a_slow_one_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, 2)
    told.iterate(10)
    slow, waits = told.ranks
    for pulse in told.ranks:
        pulse.begin(1, 50, "usual")
    waits.enter("stats")
    for _ in range(45):
        slow.mark("forward", OWN_CODE)
        told.go(0.1)
    paced = told.take(StepTimeChanged)
    assert [one.rank for one in paced] == [0] * 3
    assert [one.own_s for one in paced] == pytest.approx([1.0, 2.0, 4.0], abs=0.3)
    (stalled,) = told.take(RankStalled)
    assert (stalled.rank, stalled.where) == (1, "collective")
    told.close()


def test_a_watch_that_was_away_for_many_iterations_reads_the_last(told: Told) -> None:
    (pulse,) = told.ranks
    for iteration in range(10 * RING_NUM):
        pulse.begin(1, iteration, "usual")
        told.now_s += 0.1
        pulse.finish()
    told.watch.look(told.now_s)
    (paced,) = told.take(StepTimeChanged)
    assert paced.own_s == pytest.approx(0.1)


def test_what_is_not_watched_has_no_page(told: Told) -> None:
    assert RankMonitors(lambda body, at_s: None, is_on=False).open(told.orders[0]) is None
    told.close()  # and once more when the test ends


def test_marks_are_whole_at_full_speed(page: ProgressPage) -> None:
    pulse, over = rank_of(page), threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            pulse.begin(number, number, "usual")

    writer = threading.Thread(target=write)
    writer.start()
    last_s = time.monotonic() + 0.3
    while time.monotonic() < last_s:
        mark = page.mark()
        assert mark is None or mark.generation == mark.iteration == mark.num
    over.set()
    writer.join()


# --- time without a core -------------------------------------------------------------------------
def work(in_s: float) -> None:
    """So much work of this thread's own, however long that takes."""
    end_s = time.thread_time() + in_s
    while time.thread_time() < end_s:
        pass


@pytest.mark.parametrize("elsewhere", [False, True])
def test_work_beside_another_on_one_core_is_all_but_what_was_waited(elsewhere: bool) -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    pinned = f"import os\nos.sched_setaffinity(0, {{{core}}})\n{SPIN}"
    other = subprocess.Popen([sys.executable, "-c", pinned])
    told = CpuWait()
    try:
        os.sched_setaffinity(0, {core})
        time.sleep(0.3)
        before_s, began_s = told.in_s(), time.monotonic()
        work(0.15)
        if elsewhere:
            thread = threading.Thread(target=told.in_s)
            thread.start()
            thread.join()
        work(0.15)
        took_s, waited_s = time.monotonic() - began_s, told.in_s() - before_s
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
    assert waited_s > 0.1, "two shared it"
    assert took_s - waited_s == pytest.approx(0.3, abs=0.1)
    assert cpu_wait.cpu_wait_s(os.getpid()) > 0


def test_a_sleep_is_no_wait_for_a_core() -> None:
    told = CpuWait()
    before_s = told.in_s()
    time.sleep(1.0)
    assert told.in_s() - before_s < 0.75


def test_threads_that_hand_over_to_each_other_are_one_and_few() -> None:
    told = CpuWait()
    before = len(os.listdir("/proc/self/fd"))
    told.in_s()
    for _ in range(3 * NUM_THREADS_MAX):
        thread = threading.Thread(target=told.in_s)
        thread.start()
        thread.join()
    assert told.in_s() >= 0
    assert len(os.listdir("/proc/self/fd")) <= before + NUM_THREADS_MAX


def test_where_the_kernel_does_not_say_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*told: object) -> int:
        raise PermissionError

    monkeypatch.setattr(cpu_wait.os, "open", refuse)
    told = CpuWait()
    work(0.01)
    assert (told.in_s(), told.in_s()) == (0.0, 0.0)
    assert cpu_wait.cpu_wait_s(2**22 + 1) == 0.0


def test_waits_for_a_core_are_no_work_of_its_own() -> None:
    page = ProgressPage()
    pulse, waited_s = ProgressWriter(os.dup(page.fd)), 0.0
    pulse._cpu_wait = mock.Mock(in_s=lambda: waited_s)
    pulse.begin(1, 1, "usual")
    time.sleep(0.05)
    waited_s = 0.03
    pulse.enter("stats")
    waited_s = 7.0  # in a collective that counts as waiting for others
    time.sleep(0.02)
    pulse.mark("stats_done", OWN_CODE)
    waited_s += 0.01
    pulse.finish()
    mark, (done,) = page.mark(), page.done(0)
    assert mark is not None
    assert done.own_s == pytest.approx(done.iteration_s - mark.waited_s - 0.04)
    page.close()


# --- the state of a process without progress -----------------------------------------------------
def said(code: str, number: signal.Signals | None = None) -> str:
    with subprocess.Popen([sys.executable, "-c", f"print('up', flush=True)\n{code}"],
                          stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            before = process_state.look(child.pid)
            assert before is not None
            if number is not None:
                os.kill(child.pid, number)
            time.sleep(0.4)
            return process_state.describe(child.pid, before)
        finally:
            child.kill()


def test_a_stalled_process_is_described() -> None:
    assert said("while True: pass").startswith("computes")
    assert said("import time; time.sleep(60)").startswith("sleeps in ")
    assert said("import time; time.sleep(60)", signal.SIGSTOP) == "stopped by a signal"
    thread = "import threading, time; threading.Lock().acquire(); time.sleep(60)"
    assert said(thread).startswith("sleeps")


def test_a_process_that_is_gone_is_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    assert process_state.look(child.pid) is None
    assert process_state.describe(child.pid, None) == ""


# --- dumps of flight recorders -------------------------------------------------------------------
def stalled(task: int, rank: int = 0) -> RankStalled:
    return RankStalled(task=task, rank=rank, attempt=1, generation=1, iteration=3, where="own",
                       what="backward", collective=0, in_s=2.0, normal_s=0.5)


def test_once_for_all_ranks_of_a_task_and_again_after_a_minute(tmp_path: Path) -> None:
    asked: list[int] = []
    now_s = [100.0]

    def dump(task: int) -> Dumps:
        asked.append(task)
        if task == 8:
            raise PermissionError("read only")
        return {0: tmp_path / "flight-rank-0.json"}

    asker = DumpTrigger(dump, lambda: now_s[0])
    asker.on_report(RankUnstalled(task=7, rank=0, attempt=1, generation=1, iteration=3,
                                  stalled_s=1.0))
    assert asked == []
    for rank in range(3):
        asker.on_report(stalled(7, rank))
    asker.on_report(stalled(8))
    assert asked == [7, 8]
    now_s[0] += DUMP_INTERVAL_S
    asker.on_report(stalled(7))
    assert asked == [7, 8, 7]
