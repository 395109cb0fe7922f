"""What an agent tells of a rank that its task waits for: seldom, and only while it works."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from agent_driver import command, train
from msgspec.structs import replace
from unicron.events.records.orders import StartRank
from unicron.events.records.reports import RankWorked
from unicron.events.records.types import Slot
from unicron.events.spec.job import JobSpec
from unicron.workers.agent.monitoring import process_state
from unicron.workers.agent.monitoring.rank_monitor import RankMonitors
from unicron.workers.agent.monitoring.work_monitor import WorkMonitor
from unicron.workers.ipc.group_rows import BYTES as ROWS_BYTES
from unicron.workers.ipc.progress_page import (
    FILE_BYTES,
    OUTSIDE_CODE,
    OWN_CODE,
    PAGE_BYTES,
    ProgressPage,
    ProgressWriter,
)
from unicron.workers.ipc.violation import Violation
from unicron.workers.ipc.work_row import WorkCount

TELL_S = 10.0
LOOK_S = 0.05


def order(job: JobSpec) -> StartRank:
    return StartRank(
        nodes=("n1",),
        task=1,
        rank=0,
        attempt=1,
        slot=Slot(node="n1", index=0),
        spec=job,
        num_seats=1,
        host="",
        port=0,
        checkpoint="",
    )


class Watched:
    """A page with its rank, and its monitor with a clock of its own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.page = ProgressPage()
        self.pulse = ProgressWriter(os.dup(self.page.fd))
        self.count = WorkCount(self.pulse.work)
        self.moved_bytes = 5 << 30
        self.cpu_s = 100.0
        patch.setattr(process_state, "moved_bytes", lambda procs: self.moved_bytes)
        patch.setattr(process_state, "used_cpu_s", lambda procs: self.cpu_s)
        self.monitor = WorkMonitor(order(train(0)), TELL_S)
        self.turns: dict[int, float] = {}
        self.now_s = 1000.0
        self.told: list[RankWorked] = []

    def go(self, in_s: float, *, bytes_per_s: float = 0.0, cores: float = 0.0) -> list[RankWorked]:
        """Let time pass; the reports of it."""
        num, until_s = len(self.told), self.now_s + in_s
        while self.now_s < until_s:
            self.now_s += LOOK_S
            self.moved_bytes += int(bytes_per_s * LOOK_S)
            self.cpu_s += cores * LOOK_S
            body = self.monitor.look(self.now_s, os.getpid(), self.page, self.turns)
            if body is not None:
                self.told.append(body)
        return self.told[num:]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(monkeypatch)
    yield made
    made.page.close()


def test_what_is_short_is_not_told(watched: Watched) -> None:
    watched.pulse.mark("settle", OUTSIDE_CODE)
    with watched.count.of("reads its checkpoint", 100):
        watched.count.add(100)
    assert watched.go(TELL_S - 1) == []
    watched.pulse.begin(1, 0, "usual")
    assert watched.go(10 * TELL_S, bytes_per_s=1e9, cores=1.0) == []


def test_a_count_that_grows_is_told_with_its_total(watched: Watched) -> None:
    watched.pulse.mark("settle", OUTSIDE_CODE)
    with watched.count.of("reads its checkpoint", 980):
        for _ in range(31):
            watched.count.add(10)
            watched.go(1.0)
    told = watched.told
    assert [body.done for body in told] == pytest.approx([100, 200, 300], abs=20)
    assert {(body.what, body.unit, body.total, body.computes) for body in told} == {
        ("reads its checkpoint", "B", 980, False)
    }
    assert max(body.idle_s for body in told) < 2


def test_the_ranks_of_a_node_are_told_of_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are, a task has one record of a node in a third of its limit. Starts are
    told of each: each has a limit of its own."""
    told: list[Any] = []
    monitors = RankMonitors(lambda body, _: told.append(body), lambda *_: nullcontext())
    monkeypatch.setattr(process_state, "moved_bytes", lambda procs: 0)
    monkeypatch.setattr(process_state, "used_cpu_s", lambda procs: 0.0)
    counts: list[tuple[ProgressWriter, WorkCount]] = []
    for rank in range(8):
        begun = replace(order(train(0)), rank=rank)
        page = monitors.open(begun)
        assert page is not None
        monitors.begin(begun, page, os.getpid())
        monitors.expect((begun.task, rank, begun.attempt), TELL_S)
        pulse = ProgressWriter(os.dup(page.fd))
        pulse.mark("settle", OUTSIDE_CODE)
        counts.append((pulse, WorkCount(pulse.work)))
    now_s = 1000.0
    with ExitStack() as stack:
        for _, count in counts:
            stack.enter_context(count.of("reads its checkpoint", 1 << 30))
        for _ in range(int(20 * TELL_S)):
            now_s += 1.0
            for _, count in counts:
                count.add(1)
            monitors.look(now_s)
    assert 17 <= len(told) <= 20
    assert {body.rank for body in told} == set(range(8))


def test_nothing_is_told_of_what_stands(watched: Watched) -> None:
    watched.pulse.mark("settle", OUTSIDE_CODE)
    with watched.count.of("reads its checkpoint", 980):
        watched.go(1.0)
        watched.count.add(10)
        assert [body.done for body in watched.go(1.2 * TELL_S)] == [10]
        assert watched.go(20 * TELL_S) == []
        watched.count.add(10)
        (told,) = watched.go(LOOK_S)
        assert (told.done, told.idle_s) == (20, 0.0), "what goes on is told at once"


def test_what_the_kernel_counts_is_progress_too(watched: Watched) -> None:
    watched.pulse.mark("settle", OUTSIDE_CODE)
    told = watched.go(5 * TELL_S, bytes_per_s=1 << 20)
    assert len(told) == 4
    assert {body.what for body in told} == {""}
    moved = [body.moved_bytes for body in told]
    assert moved == sorted(moved)
    assert moved[0] > 0
    watched.go(TELL_S)
    assert watched.go(200 * TELL_S, bytes_per_s=50_000) == [], "what logs moves as much in a while"


def test_a_rank_that_waits_for_orders_moves_nothing_of_its_own(watched: Watched) -> None:
    watched.pulse.mark("ready", OUTSIDE_CODE)
    assert watched.go(5 * TELL_S, bytes_per_s=1e9, cores=4) == []
    watched.pulse.mark("left", OUTSIDE_CODE)
    assert watched.go(5 * TELL_S, bytes_per_s=1e9, cores=4) == []
    with watched.count.of("saves its state", 50):
        watched.count.add(10)
        assert watched.go(2 * TELL_S)[0].what == "saves its state"


def test_to_compute_counts_while_it_starts_and_builds_but_not_while_it_may_wait(
    watched: Watched,
) -> None:
    told = watched.go(5 * TELL_S, cores=1.0)
    assert {(body.what, body.computes) for body in told} == {("starts", True)}
    assert told[-1].idle_s > told[0].idle_s >= TELL_S
    watched.pulse.mark("settle", OUTSIDE_CODE)
    watched.go(LOOK_S)
    watched.monitor.expect(TELL_S)
    assert watched.go(5 * TELL_S, cores=4.0) == [], "NCCL spins while it waits"
    with watched.count.of("receives its state", 100):
        watched.go(2 * TELL_S)
        assert watched.go(5 * TELL_S, cores=4.0) == []
    with watched.count.of("builds its model", unit=""):
        watched.go(2 * TELL_S)
        assert {body.computes for body in watched.go(5 * TELL_S, cores=0.9)} == {True}
        watched.go(TELL_S)
        assert watched.go(5 * TELL_S, cores=0.1) == []


def test_a_script_is_not_waited_for_before_it_has_adopted(watched: Watched) -> None:
    watched.monitor = WorkMonitor(order(command("true")), TELL_S)
    assert watched.go(5 * TELL_S, bytes_per_s=1e9, cores=4) == []


def test_an_older_control_plane_is_told_nothing(watched: Watched) -> None:
    watched.monitor = WorkMonitor(order(train(0)), 0.0)
    assert watched.go(5 * TELL_S, bytes_per_s=1e9, cores=4) == []


def shown(watched: Watched) -> tuple[object, ...]:
    row = watched.page.work()
    assert row is not None
    return row[1:]


def test_the_count_of_an_inner_work_gives_way_to_the_outer_one(watched: Watched) -> None:
    with watched.count.of("builds the initial weights", 8, "parts"):
        watched.count.add(3)
        with watched.count.of("builds its model", unit=""):
            assert shown(watched) == ("builds its model", "", 0, 0, False)
        assert shown(watched) == (
            "builds the initial weights",
            "parts",
            3,
            8,
            False,
        )
    assert shown(watched) == ("", "", 0, 0, False)


def test_work_that_nobody_waits_for_any_more_ends(watched: Watched) -> None:
    goes_on = True
    count = WorkCount(watched.pulse.work, lambda: goes_on)
    with count.of("reads its checkpoint"):
        count.add(1)
        goes_on = False
        with pytest.raises(RuntimeError, match="interrupted"):
            count.add(1)


@pytest.mark.parametrize("size", [PAGE_BYTES, PAGE_BYTES + ROWS_BYTES])
def test_pages_of_earlier_versions_have_no_row(size: int) -> None:
    fd = os.memfd_create("page")
    os.ftruncate(fd, size)
    pulse, page = ProgressWriter(os.dup(fd)), ProgressPage(fd)
    assert pulse.work is None
    assert (pulse.rows is None) == (size == PAGE_BYTES)
    pulse.mark("settle", OWN_CODE)
    assert page.mark() is not None
    assert page.work() is None
    with WorkCount(pulse.work).of("reads its checkpoint"):
        assert page.work() is None
    page.close()


def test_a_false_row_is_a_violation(watched: Watched) -> None:
    with (
        mmap.mmap(watched.page.fd, FILE_BYTES) as page,
        watched.count.of("reads its checkpoint", 10),
    ):
        at = page.rfind(b"reads its checkpoint")
        page[at + 96 : at + 104] = b"\xff" * 8
        with pytest.raises(Violation):
            watched.page.work()


def test_a_real_process_that_reads_slowly_is_told_of(tmp_path: Path) -> None:
    """Its kernel counts are read from /proc: nothing but reading shows that it goes on."""
    file = tmp_path / "data"
    file.write_bytes(bytes(64 << 20))
    code = (
        "import sys, time\n"
        "with open(sys.argv[1], 'rb', buffering=0) as file:\n"
        "    while file.read(1 << 20): time.sleep(0.05)\n"
        "time.sleep(60)\n"
    )
    monitor, page = WorkMonitor(order(train(0)), 0.5), ProgressPage()
    with subprocess.Popen([sys.executable, "-S", "-c", code, str(file)]) as process:
        try:
            told: list[RankWorked] = []
            until_s = time.monotonic() + 60
            while len(told) < 3 and time.monotonic() < until_s:
                body = monitor.look(time.monotonic(), process.pid, page, {})
                told += [body] if body is not None else []
                time.sleep(0.05)
        finally:
            process.kill()
    page.close()
    assert len(told) == 3
    assert not any(body.computes for body in told)
    assert 0 < told[0].moved_bytes < told[-1].moved_bytes <= 80 << 20
