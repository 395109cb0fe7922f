"""A rank's progress page, the agent's conclusions from it, and the evidence the agent collects."""

from __future__ import annotations

import os
import signal
import socket
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
from guards import unguarded
from unicron.events.records.orders import StartRank
from unicron.events.records.reports import RankStalled, RankUnstalled, StepTimeChanged
from unicron.events.records.types import Body, Slot
from unicron.workers.agent.monitoring import process_state
from unicron.workers.agent.monitoring.flight_recorder_dumps import (
    DUMP_INTERVAL_S,
    Dumps,
    DumpTrigger,
)
from unicron.workers.agent.monitoring.process_state import FLOW_EVERY_S, MOVED_BYTES_MIN
from unicron.workers.agent.monitoring.rank_monitor import (
    PAUSE_S,
    REPORT_S,
    STALL_S_MIN,
    WATCH_S,
    RankMonitors,
)
from unicron.workers.diagnosis.step_time import LENIENT_S, WINDOW_NUM
from unicron.workers.host import cpu_wait, linux
from unicron.workers.host.cpu_wait import NUM_THREADS_MAX, CpuWait
from unicron.workers.ipc import progress_page as pulse_module
from unicron.workers.ipc.group_rows import Row, group_of
from unicron.workers.ipc.progress_page import (
    EVALUATE,
    OUTSIDE_CODE,
    OWN_CODE,
    RING_NUM,
    ProgressPage,
    ProgressWriter,
)
from unicron.workers.ipc.work_row import COMPILES
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


@mock.patch.object(CpuWait, "in_s", mock.Mock(return_value=0.0))  # else subtracted as well
def test_a_mark_is_read_as_it_was_written(page: ProgressPage) -> None:
    pulse = rank_of(page)
    assert page.mark() is None
    assert page.done(0) == []
    pulse.mark("start", OUTSIDE_CODE)
    pulse.begin(3, 7, "boundary")
    pulse.enter("stats")
    before_s = time.monotonic()
    time.sleep(0.02)
    pulse.mark("stats_done", OWN_CODE)
    mark = page.mark()
    assert mark is not None
    assert (mark.num, mark.generation, mark.iteration, mark.kind) == (4, 3, 7, "boundary")
    assert (mark.what, mark.phase, mark.collective) == ("stats_done", OWN_CODE, 1)
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
    assert (mark.collective, mark.waited_s) == (0, 0.0)


def test_every_event_name_fits_into_a_mark(page: ProgressPage) -> None:
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


def test_the_ring_keeps_the_last_iterations(page: ProgressPage) -> None:
    pulse = rank_of(page)
    for iteration in range(10 * RING_NUM + 7):
        pulse.begin(1, iteration, "usual")
        pulse.finish()
    num, found = 0, list[int]()
    while done := page.done(num):
        num = done[-1].num
        found += [one.iteration for one in done]
    assert found == list(range(found[0], 10 * RING_NUM + 7)), "an iteration is missing"


def test_a_page_is_consistent_when_its_writer_is_stopped(page: ProgressPage) -> None:
    os.set_inheritable(page.fd, True)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", WRITER, str(page.fd)],
        pass_fds=[page.fd],
        stdout=subprocess.PIPE,
    ) as writer:
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


# --- the monitor --------------------------------------------------------------------------------
class Monitored:
    """Monitors of ranks that this process simulates, with a simulated clock."""

    def __init__(
        self, patch: pytest.MonkeyPatch, num_ranks: int = 1, first_iteration_s_max: float = 1200.0
    ) -> None:
        self.now_s = 1000.0
        patch.setattr(pulse_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        patch.setattr(CpuWait, "in_s", mock.Mock(return_value=0.0))  # its time is the real one
        patch.setattr(process_state, "cpu_wait_s", mock.Mock(return_value=0.0))
        self.moved_bytes = 0
        patch.setattr(process_state, "moved_bytes", lambda procs: self.moved_bytes)
        self.started_s = 0.0
        patch.setattr(process_state, "newest_start_s", lambda procs: self.started_s)
        self.bodies: list[Body] = []
        self.watch = RankMonitors(lambda body, at_s: self.bodies.append(body), unguarded)
        self.ranks: list[ProgressWriter] = []
        self.orders: list[StartRank] = []
        self.iteration = 0
        for rank in range(num_ranks):
            order = StartRank(
                nodes=("n1",),
                task=1,
                rank=rank,
                attempt=1,
                slot=Slot(node="n1", index=rank),
                spec=train(0),
                num_seats=num_ranks,
                host="",
                port=0,
                checkpoint="",
                first_iteration_s_max=first_iteration_s_max,
            )
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
        """Advance the clock by `in_s`; the monitor looks every WATCH_S."""
        until_s = self.now_s + in_s
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + WATCH_S)
            self.watch.look(self.now_s)

    def take(self, kind: type[Any]) -> list[Any]:
        found = [body for body in self.bodies if isinstance(body, kind)]
        self.bodies = [body for body in self.bodies if not isinstance(body, kind)]
        return found


@pytest.fixture
def monitored(monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitored]:
    made = Monitored(monkeypatch)
    yield made
    made.close()


def test_a_stall_is_reported_once_with_its_place_and_then_its_end(monitored: Monitored) -> None:
    monitored.iterate(10)
    (pulse,) = monitored.ranks
    pulse.begin(1, 50, "usual")
    pulse.mark("forward", OWN_CODE)
    monitored.go(STALL_S_MIN - WATCH_S)
    assert monitored.bodies == []
    monitored.go(10)
    (stalled,) = monitored.take(RankStalled)
    assert (stalled.iteration, stalled.where, stalled.what, stalled.collective) == (
        50,
        "own",
        "forward",
        0,
    )
    assert STALL_S_MIN < stalled.in_s <= STALL_S_MIN + 2 * WATCH_S
    assert stalled.normal_s == pytest.approx(0.2)
    assert stalled.stack
    pulse.enter("stats")
    monitored.go(WATCH_S)
    (ended,) = monitored.take(RankUnstalled)
    assert (ended.iteration, monitored.bodies) == (50, [])
    assert ended.stalled_s == pytest.approx(10 + STALL_S_MIN - WATCH_S)
    monitored.go(10)
    (stalled,) = monitored.take(RankStalled)
    assert (stalled.where, stalled.collective) == ("collective", 1)


def test_a_rank_that_enters_operations_makes_progress(monitored: Monitored) -> None:
    monitored.iterate(10)
    (pulse,) = monitored.ranks
    assert pulse.rows is not None
    row = Row(group_of("tp", (0, 1)), 3)
    pulse.begin(1, 50, "usual")
    for _ in range(10):
        monitored.go(STALL_S_MIN / 2)
        pulse.rows.enter(row, 0, 4096)
    assert monitored.take(RankStalled) == []
    monitored.go(10)
    (stalled,) = monitored.take(RankStalled)
    assert (stalled.where, stalled.are_groups_complete, stalled.waits) == ("own", True, False)
    (told,) = stalled.groups
    assert (told.role, told.members, told.entered) == ("tp", (0, 2, 1, 1, 0), 10)
    assert (told.kind, told.num_bytes, told.left) == ("all_reduce", 4096, 0)
    monitored.go(10)
    assert monitored.take(RankStalled) == []
    pulse.rows.enter(row, 0, 4096)
    monitored.go(WATCH_S)
    (ended,) = monitored.take(RankUnstalled)
    assert ended.stalled_s > 10
    monitored.go(10)
    assert len(monitored.take(RankStalled)) == 1


def test_the_stall_limit_of_long_iterations_is_three_times_as_long(monitored: Monitored) -> None:
    monitored.iterate(10, own_s=1.5, wait_s=0.5)
    monitored.ranks[0].begin(1, 50, "usual")
    monitored.go(6.0)
    assert monitored.bodies == []
    monitored.go(2 * WATCH_S)
    assert len(monitored.take(RankStalled)) == 1


def test_no_stall_is_reported_outside_training(monitored: Monitored) -> None:
    monitored.iterate(10)
    monitored.ranks[0].mark("receive", OUTSIDE_CODE)
    monitored.go(2 * LENIENT_S)
    assert monitored.bodies == []


def test_a_stall_between_two_iterations_has_no_usual_time(monitored: Monitored) -> None:
    monitored.iterate(10)  # its last mark is the end of an iteration
    monitored.go(LENIENT_S - 2 * WATCH_S)
    assert monitored.bodies == []
    monitored.go(3 * WATCH_S)
    (stalled,) = monitored.take(RankStalled)
    assert (stalled.what, stalled.where, stalled.is_untimed) == ("end", "own", True)


def test_the_limit_of_an_evaluation_is_learnt_from_those_before(monitored: Monitored) -> None:
    (pulse,) = monitored.ranks
    monitored.iterate(10)
    for lasts_s, is_told in ((50.0, False), (149.0, False), (460.0, True)):
        pulse.mark(EVALUATE, OUTSIDE_CODE)
        monitored.go(lasts_s)
        told = monitored.take(RankStalled)
        assert len(told) == is_told, lasts_s
        assert not is_told or (told[0].normal_s, told[0].is_untimed) == (pytest.approx(149), False)
        pulse.mark("end", OUTSIDE_CODE)
        monitored.iterate(1)


def test_a_rank_that_reads_or_writes_is_not_stalled(monitored: Monitored) -> None:
    (pulse,) = monitored.ranks
    pulse.begin(1, 0, "first")
    for _ in range(20):
        monitored.go(LENIENT_S / 4)
        monitored.moved_bytes += MOVED_BYTES_MIN
    assert monitored.bodies == []
    monitored.go(2 * LENIENT_S)
    (stalled,) = monitored.take(RankStalled)
    assert stalled.in_s < LENIENT_S + 2 * FLOW_EVERY_S, "since it last wrote"
    monitored.moved_bytes += MOVED_BYTES_MIN
    monitored.go(FLOW_EVERY_S + WATCH_S)
    assert len(monitored.take(RankUnstalled)) == 1
    for _ in range(20):  # what a monitor in its process writes
        monitored.go(LENIENT_S / 4)
        monitored.moved_bytes += MOVED_BYTES_MIN // 100
    assert len(monitored.take(RankStalled)) == 1
    assert monitored.take(RankUnstalled) == []


def test_a_rank_that_loads_its_samples_for_long_is_neither_stalled_nor_slow(
    monitored: Monitored,
) -> None:
    (pulse,) = monitored.ranks
    monitored.iterate(10)
    pulse.begin(1, 50, "usual")
    for _ in range(100):
        monitored.go(0.3)
        monitored.moved_bytes += 2 * MOVED_BYTES_MIN
    pulse.mark("forward", OWN_CODE)
    monitored.go(STALL_S_MIN - WATCH_S)
    assert monitored.bodies == []
    monitored.go(3 * WATCH_S)
    assert [told.what for told in monitored.take(RankStalled)] == ["forward"]


def test_a_data_loader_may_start_its_workers_anew(monitored: Monitored) -> None:
    """They import for seconds, and their pages are read already, so that no byte moves."""
    (pulse,) = monitored.ranks
    monitored.iterate(10)
    pulse.begin(1, 50, "usual")
    monitored.started_s = monitored.now_s + 0.1
    monitored.go(20.0)
    pulse.mark("forward", OWN_CODE)
    monitored.go(STALL_S_MIN - WATCH_S)
    assert monitored.bodies == []
    pulse.begin(1, 51, "usual")
    monitored.go(2 * STALL_S_MIN)
    (stalled,) = monitored.take(RankStalled)
    assert (stalled.iteration, stalled.is_untimed) == (51, False), "it has started none since"
    monitored.started_s = monitored.now_s + 0.1
    monitored.go(FLOW_EVERY_S + 2 * WATCH_S)
    assert len(monitored.take(RankUnstalled)) == 1, "it has now"
    monitored.go(LENIENT_S + 1.0)
    assert [told.is_untimed for told in monitored.take(RankStalled)] == [True]


def test_what_is_received_counts() -> None:
    """recv() and send() are in no count of the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    before = process_state.moved_bytes(linux.family(os.getpid()))
    with one, other:
        for _ in range(64):
            one.sendall(bytes(1 << 16))
            left = 1 << 16
            while left:
                left -= len(other.recv(left))
        assert process_state.moved_bytes(linux.family(os.getpid())) - before >= 64 << 16


def test_when_the_newest_child_was_started() -> None:
    before_s = time.monotonic()
    with subprocess.Popen(["sleep", "20"]) as child:
        started_s = process_state.newest_start_s(linux.family(os.getpid())[1:])
        child.kill()
    assert before_s - 0.02 <= started_s <= time.monotonic()


def test_what_a_process_and_its_children_read_counts(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(4 << 20))
    child = f"open({str(file)!r}, 'rb').read()"
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1] + '; input()'])\n"
        "child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code, child], stdin=subprocess.PIPE) as process:
        flow, until_s = process_state.DataFlow(process.pid), time.monotonic() + 20
        flow.look(time.monotonic(), 20)
        while not flow.look(time.monotonic(), 20):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        assert process.stdin is not None
        process.stdin.close()
        assert flow.moved_s > 0
    assert process_state.moved_bytes(linux.family(process.pid)) == 0, "it has ended"


def test_a_first_iteration_has_the_limit_of_the_policy_or_a_lenient_one(
    monitored: Monitored,
) -> None:
    (pulse,) = monitored.ranks
    pulse.begin(1, 0, "first")
    monitored.go(LENIENT_S - WATCH_S)
    assert monitored.bodies == []
    monitored.go(LENIENT_S)
    (stalled,) = monitored.take(RankStalled)
    assert (stalled.is_untimed, stalled.normal_s, stalled.iteration) == (True, 0.0, 0)
    monitored.iterate(10)
    assert len(monitored.take(RankUnstalled)) == 1
    pulse.begin(2, 11, "first")
    monitored.go(LENIENT_S)
    assert monitored.bodies == []
    monitored.go(2 * WATCH_S)
    (stalled,) = monitored.take(RankStalled)
    assert (stalled.generation, stalled.iteration, stalled.is_untimed) == (2, 11, False)


def test_a_first_iteration_that_compiled_may_compile_again(monitored: Monitored) -> None:
    (pulse,) = monitored.ranks
    pulse.begin(1, 0, "first")
    monitored.go(480.0)
    pulse.finish()
    monitored.iterate(10)
    monitored.bodies.clear()
    pulse.begin(2, 11, "first")
    monitored.go(590.0)
    assert monitored.bodies == []
    monitored.go(20.0)
    assert [told.is_untimed for told in monitored.take(RankStalled)] == [False]


def test_a_rank_that_says_that_it_compiles_has_no_usual_time(monitored: Monitored) -> None:
    monitored.iterate(10)
    (pulse,) = monitored.ranks
    row = pulse.work
    assert row is not None
    pulse.begin(1, 50, "usual")
    pulse.mark("forward", OWN_CODE)
    row.write(COMPILES, "", 0, 0, is_storage=False)
    monitored.go(50.0)
    assert monitored.bodies == []
    monitored.go(20.0)
    assert [told.is_untimed for told in monitored.take(RankStalled)] == [True]
    pulse.mark("backward", OWN_CODE)
    row.write("", "", 0, 0, is_storage=False)
    monitored.bodies.clear()
    monitored.go(10.0)
    assert [told.is_untimed for told in monitored.take(RankStalled)] == [False]


def test_torch_says_when_it_compiles(page: ProgressPage) -> None:
    """Also for a new shape, and not while what was compiled runs."""
    import torch
    from unicron.workers.training.process import compiling

    compiling.tell_in(rank_of(page).work)
    seen: list[str] = []

    def look() -> str:
        row = page.work()
        return row.what if row is not None else ""

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(look())

        def run(*given: Any) -> Any:
            assert look() == ""
            return graph.forward(*given)

        return run

    compiled = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
    for size in (3, 3, 4):
        assert compiled(torch.ones(size)).sum() == 2 * size
        assert look() == ""
    assert seen == [COMPILES, COMPILES]


def test_a_shorter_limit_of_the_policy_is_the_lenient_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitored = Monitored(monkeypatch, first_iteration_s_max=6.0)
    (pulse,) = monitored.ranks
    monitored.iterate(10)
    pulse.begin(1, 11, "boundary")
    monitored.go(6.0)
    assert monitored.bodies == []
    monitored.go(2 * WATCH_S)
    assert [told.iteration for told in monitored.take(RankStalled)] == [11]
    monitored.close()


def test_a_stall_in_the_second_iteration_is_reported(monitored: Monitored) -> None:
    """The rank is a newcomer whose peers have died while its connections report no error."""
    (pulse,) = monitored.ranks
    pulse.begin(1, 0, "first")
    monitored.go(9.0)
    pulse.finish()
    pulse.begin(1, 1, "usual")
    pulse.enter("stats")
    monitored.go(LENIENT_S)
    assert monitored.bodies == []
    monitored.go(3 * WATCH_S)
    (stalled,) = monitored.take(RankStalled)
    assert (stalled.iteration, stalled.normal_s, stalled.is_untimed) == (
        1,
        pytest.approx(9.0),
        True,
    )


@pytest.mark.parametrize("away_s", [0.6, PAUSE_S + 0.5, 500.0])
def test_a_paused_monitor_lets_ranks_report_first(monitored: Monitored, away_s: float) -> None:
    monitored.iterate(10)
    monitored.ranks[0].begin(1, 50, "usual")
    monitored.go(0.5)
    monitored.now_s += away_s
    monitored.watch.look(monitored.now_s)
    assert monitored.bodies == [], "the monitor has just resumed"
    left_s = STALL_S_MIN - 0.5 if away_s < PAUSE_S else STALL_S_MIN
    monitored.go(left_s - 2 * WATCH_S)
    assert monitored.bodies == []
    monitored.go(4 * WATCH_S)
    assert len(monitored.take(RankStalled)) == 1


def test_a_rank_that_waits_for_a_core_is_not_stalled(
    monitored: Monitored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitored.iterate(10)
    monitored.ranks[0].begin(1, 50, "usual")
    began_s = monitored.now_s

    def look(pid: int) -> process_state.ProcessState:
        at_s = monitored.now_s - began_s
        return process_state.ProcessState(monitored.now_s, "R", 0.0, min(at_s, 5.0))

    monkeypatch.setattr(process_state, "look", look)
    monitored.go(5.0)
    assert monitored.bodies == [], "the rank was waiting for a core"
    monitored.go(STALL_S_MIN)
    assert len(monitored.take(RankStalled)) == 1, "the rank has had a core since then"


def test_the_step_time_is_reported_when_known_and_when_it_has_changed(monitored: Monitored) -> None:
    monitored.iterate(WINDOW_NUM - 1)
    assert monitored.bodies == []
    monitored.iterate(1)
    (first,) = monitored.take(StepTimeChanged)
    assert first.num_iterations == WINDOW_NUM
    assert (first.own_s, first.normal_s, first.iteration_s) == pytest.approx((0.1, 0.1, 0.2))
    monitored.iterate(WINDOW_NUM, own_s=0.1, wait_s=0.4)
    assert monitored.bodies == [], "only the wait for others is longer"
    monitored.iterate(2 * WINDOW_NUM, own_s=0.15)
    (second,) = monitored.take(StepTimeChanged)
    assert (second.own_s, second.normal_s) == pytest.approx((0.15, 0.1))
    monitored.iterate(10 * WINDOW_NUM, own_s=0.15)
    assert monitored.bodies == []


def test_step_times_are_reported_at_a_bounded_rate(monitored: Monitored) -> None:
    monitored.iterate(WINDOW_NUM, own_s=0.01, wait_s=0.01)
    began_s = monitored.now_s
    num = 0
    for _ in range(100):
        monitored.iterate(WINDOW_NUM, own_s=0.05, wait_s=0.01)
        monitored.iterate(WINDOW_NUM, own_s=0.01, wait_s=0.01)
        num += len(monitored.take(StepTimeChanged))
    assert 1 < num <= 2 + (monitored.now_s - began_s) / REPORT_S / 4, "the window does not grow"


def test_a_very_slow_iteration_is_reported_while_it_runs(monitored: Monitored) -> None:
    monitored.iterate(WINDOW_NUM)
    monitored.take(StepTimeChanged)
    (pulse,) = monitored.ranks
    pulse.begin(1, 50, "usual")
    while monitored.now_s < 1000 + 60 and not monitored.bodies:
        monitored.go(0.2)
        pulse.mark("micro_batch", OWN_CODE)
    (slow,) = monitored.take(StepTimeChanged)
    assert (slow.iteration, slow.num_iterations, monitored.bodies) == (50, 1, [])
    assert slow.own_s == pytest.approx(STALL_S_MIN, abs=0.3)
    pulse.enter("stats")
    pulse.mark("reduced", OWN_CODE)
    pulse.finish()
    monitored.iteration = 50
    monitored.iterate(WINDOW_NUM)
    monitored.go(REPORT_S)
    (again,) = monitored.take(StepTimeChanged)
    assert again.own_s == pytest.approx(0.1), "the time of the later iterations"
    assert monitored.bodies == []


def test_a_rank_that_waits_for_a_slow_one_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch, 2)
    monitored.iterate(10)
    slow, waits = monitored.ranks
    for pulse in monitored.ranks:
        pulse.begin(1, 50, "usual")
    waits.enter("stats")
    for _ in range(45):
        slow.mark("forward", OWN_CODE)
        monitored.go(0.1)
    paced = monitored.take(StepTimeChanged)
    assert [one.rank for one in paced] == [0] * 3
    assert [one.own_s for one in paced] == pytest.approx([1.0, 2.0, 4.0], abs=0.3)
    (stalled,) = monitored.take(RankStalled)
    assert (stalled.rank, stalled.where) == (1, "collective")
    monitored.close()


def test_a_monitor_paused_for_many_iterations_reads_the_last(monitored: Monitored) -> None:
    (pulse,) = monitored.ranks
    for iteration in range(10 * RING_NUM):
        pulse.begin(1, iteration, "usual")
        monitored.now_s += 0.1
        pulse.finish()
    monitored.watch.look(monitored.now_s)
    (paced,) = monitored.take(StepTimeChanged)
    assert paced.own_s == pytest.approx(0.1)


def test_what_a_rank_does_has_the_last_operations_of_its_groups(monitored: Monitored) -> None:
    (pulse,), key = monitored.ranks, (1, 0, 1)
    assert monitored.watch.mark_in_words(key) == ""
    pulse.begin(1, 7, "usual")
    pulse.enter("forward")
    words = monitored.watch.mark_in_words(key)
    assert words.startswith("iteration 7: forward, a collective, for ")
    assert words.endswith("; 1 collectives entered")
    assert pulse.rows is not None
    pulse.rows.enter(Row(group_of("tp", (0, 1)), 3), 0, 4096)
    pulse.rows.set_waits(1)
    assert monitored.watch.mark_in_words(key) == (
        f"{words}; its last operation is all_reduce 1 of tp, entered, not left"
    )


def test_without_monitoring_a_rank_has_no_page(monitored: Monitored) -> None:
    assert (
        RankMonitors(lambda body, at_s: None, unguarded, is_on=False).open(monitored.orders[0])
        is None
    )
    monitored.close()  # the fixture closes it again


def test_marks_are_consistent_at_full_speed(page: ProgressPage) -> None:
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
    """Use `in_s` seconds of CPU time in this thread."""
    end_s = time.thread_time() + in_s
    while time.thread_time() < end_s:
        pass


@pytest.mark.parametrize("elsewhere", [False, True])
def test_cpu_wait_is_the_time_without_a_shared_core(elsewhere: bool) -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    pinned = f"import os\nos.sched_setaffinity(0, {{{core}}})\n{SPIN}"
    other = subprocess.Popen([sys.executable, "-c", pinned])
    cpu = CpuWait()
    try:
        os.sched_setaffinity(0, {core})
        time.sleep(0.3)
        before_s, began_s = cpu.in_s(), time.monotonic()
        work(0.15)
        if elsewhere:
            thread = threading.Thread(target=cpu.in_s)
            thread.start()
            thread.join()
        work(0.15)
        took_s, waited_s = time.monotonic() - began_s, cpu.in_s() - before_s
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
    assert waited_s > 0.1, "two processes shared the core"
    assert took_s - waited_s == pytest.approx(0.3, abs=0.1)
    assert cpu_wait.cpu_wait_s(os.getpid()) > 0


def test_a_sleep_is_no_wait_for_a_core() -> None:
    cpu = CpuWait()
    before_s = cpu.in_s()
    time.sleep(1.0)
    assert cpu.in_s() - before_s < 0.75


def test_cpu_waits_of_many_threads_keep_few_files_open() -> None:
    cpu = CpuWait()
    before = len(os.listdir("/proc/self/fd"))
    cpu.in_s()
    for _ in range(3 * NUM_THREADS_MAX):
        thread = threading.Thread(target=cpu.in_s)
        thread.start()
        thread.join()
    assert cpu.in_s() >= 0
    assert len(os.listdir("/proc/self/fd")) <= before + NUM_THREADS_MAX


def test_without_kernel_support_the_cpu_wait_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*cpu: object) -> int:
        raise PermissionError

    monkeypatch.setattr(cpu_wait.os, "open", refuse)
    cpu = CpuWait()
    work(0.01)
    assert (cpu.in_s(), cpu.in_s()) == (0.0, 0.0)
    assert cpu_wait.cpu_wait_s(2**22 + 1) == 0.0


def test_cpu_wait_does_not_count_as_own_work() -> None:
    page = ProgressPage()
    pulse, waited_s = ProgressWriter(os.dup(page.fd)), 0.0
    pulse._cpu_wait = mock.Mock(in_s=lambda: waited_s)
    pulse.begin(1, 1, "usual")
    time.sleep(0.05)
    waited_s = 0.03
    pulse.enter("stats")
    waited_s = 7.0  # during a collective, it counts as waiting for others
    time.sleep(0.02)
    pulse.mark("stats_done", OWN_CODE)
    waited_s += 0.01
    pulse.finish()
    mark, (done,) = page.mark(), page.done(0)
    assert mark is not None
    assert done.own_s == pytest.approx(done.iteration_s - mark.waited_s - 0.04)
    page.close()


# --- the state of a process without progress -----------------------------------------------------
def is_described(code: str, wanted: str, number: signal.Signals | None = None) -> bool:
    """Whether a process that runs this code is so described. On a busy machine it may take a
    while until it does what it is to do."""
    with subprocess.Popen(
        [sys.executable, "-c", f"print('up', flush=True)\n{code}"], stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            if number is not None:
                os.kill(child.pid, number)
            for _ in range(50):
                before = process_state.look(child.pid)
                assert before is not None
                time.sleep(0.4)
                if process_state.describe(child.pid, before).startswith(wanted):
                    return True
            return False
        finally:
            child.kill()


def test_a_stalled_process_is_described() -> None:
    assert is_described("while True: pass", "computes")
    assert is_described("import time; time.sleep(60)", "sleeps in ")
    assert is_described("import time; time.sleep(60)", "stopped by a signal", signal.SIGSTOP)
    thread = "import threading, time; threading.Lock().acquire(); time.sleep(60)"
    assert is_described(thread, "sleeps")


def test_a_process_that_is_gone_has_no_description() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    assert process_state.look(child.pid) is None
    assert process_state.describe(child.pid, None) == ""


# --- dumps of flight recorders -------------------------------------------------------------------
def stalled(task: int, rank: int = 0) -> RankStalled:
    return RankStalled(
        task=task,
        rank=rank,
        attempt=1,
        generation=1,
        iteration=3,
        where="own",
        what="backward",
        collective=0,
        in_s=2.0,
        normal_s=0.5,
    )


def test_dumps_are_requested_once_per_task_and_interval(tmp_path: Path) -> None:
    requested: list[int] = []
    now_s = [100.0]

    def dump(task: int) -> Dumps:
        requested.append(task)
        if task == 8:
            raise PermissionError("read only")
        return {0: tmp_path / "flight-rank-0.json"}

    asker = DumpTrigger(dump, lambda: now_s[0])
    asker.on_report(
        RankUnstalled(task=7, rank=0, attempt=1, generation=1, iteration=3, stalled_s=1.0)
    )
    assert requested == []
    for rank in range(3):
        asker.on_report(stalled(7, rank))
    asker.on_report(stalled(8))
    assert requested == [7, 8]
    now_s[0] += DUMP_INTERVAL_S
    asker.on_report(stalled(7))
    assert requested == [7, 8, 7]
