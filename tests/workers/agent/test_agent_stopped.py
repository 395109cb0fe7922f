"""Faults made on purpose; and agents, ranks and servers that stop for a while and go on."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest
from agent_driver import (
    CHILD_OF_ITS_OWN,
    LIMIT_S,
    WAITS,
    House,
    Plane,
    alive,
    ended,
    go,
    house,
    plane,
    python,
    until,
    until_gone,
    until_text,
)
from memory_log import MemoryLog
from unicron.events.log import embedded_server
from unicron.events.records.orders import InjectFault
from unicron.events.records.reports import (
    NodeJoined,
    OrderRefused,
    RankContinued,
    RankExited,
    RankStarted,
    RankSuspended,
)
from unicron.events.records.types import FaultKind
from unicron.workers.agent.agent import LOOK_S
from unicron.workers.agent.delivery.log_link import CALL_S_MAX
from unicron.workers.host import linux

SLEEP = "import time; time.sleep(120)"
POLITE = ("import signal, sys\nsignal.signal(15, lambda *a: sys.exit(7))\nprint('up', flush=True)\n"
          + SLEEP)


def fault(what: FaultKind, *, rank: int = 0, attempt: int = 1, incarnation: int = 7,
          stop_s: float = 0.0) -> InjectFault:
    return InjectFault(nodes=("n1",), what=what, task=1, rank=rank, attempt=attempt,
                       incarnation=incarnation, stop_s=stop_s)


def is_stopped(pid: int) -> bool | None:
    proc = linux.read(pid)
    return True if proc is not None and proc.state == "T" else None


@pytest.fixture
def memory() -> MemoryLog:
    return MemoryLog(time.monotonic)


def test_a_rank_is_killed_on_purpose_and_no_other(memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            for rank in (0, 1):
                await one.start(python(SLEEP), rank=rank)
            await one.leader.wait(RankStarted, 2)
            await one.leader.order(fault("rank", incarnation=6))
            wrong = [await one.leader.order(fault("rank", attempt=2)),
                     await one.leader.order(fault("stop", rank=5))]
            await one.leader.order(fault("rank"))
            (exited,) = await one.leader.wait(RankExited)
            assert (exited.rank, exited.signal) == (0, signal.SIGKILL)
            wrong.append(await one.leader.order(fault("rank")))
            refused = await one.leader.wait(OrderRefused, 3)
            assert [(r.order, r.why) for r in refused] == [
                (order, "there is no such rank") for order in wrong]
            assert len(one.leader.all(RankExited)) == 1

    go(test)


async def _polite(one: House) -> int:
    """A rank that would end well on SIGTERM; its pid."""
    await one.start(python(POLITE))
    (started,) = await one.leader.wait(RankStarted)
    await until_text(started.log_path)
    return started.pid


async def _halted(one: House, stop_s: float = 0.0) -> None:
    """Such a rank, stopped on purpose: for a time, or for ever."""
    pid = await _polite(one)
    await one.leader.order(fault("stop", stop_s=stop_s))
    await until(lambda: is_stopped(pid))


def test_a_rank_is_stopped_on_purpose_for_a_time(memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            pid = await _polite(one)
            began_s = time.monotonic()
            await one.leader.order(fault("stop", stop_s=0.5))
            await until(lambda: is_stopped(pid))
            await until(lambda: None if is_stopped(pid) else True)
            assert time.monotonic() - began_s >= 0.5
            assert alive(pid)
            await one.stop_rank(grace_s=LIMIT_S)
            (exited,) = await one.leader.wait(RankExited)
            assert exited.exit_code == 7

    go(test)


def test_a_rank_stopped_for_ever_ends_by_kill_when_its_grace_is_over(
        memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await _halted(one)
            began_s = time.monotonic()
            await one.stop_rank(grace_s=0.5)
            (exited,) = await one.leader.wait(RankExited)
            assert time.monotonic() - began_s >= 0.5
            assert exited.signal == signal.SIGKILL, "it could not hear SIGTERM"

    go(test)


def test_a_higher_attempt_fences_one_that_is_stopped(
        memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await _halted(one)
            await one.start(python("pass"), attempt=2)
            exits = await one.leader.wait(RankExited, 2)
            assert [(e.attempt, e.exit_code, e.signal) for e in exits] == [
                (1, None, signal.SIGKILL), (2, 0, None)]

    go(test)


@pytest.mark.parametrize(("stop_s", "exit_code"), [(3600.0, 7), (0.0, None)])
def test_an_agent_that_stops_lets_go_on_who_was_stopped_for_a_time(
        memory: MemoryLog, tmp_path: Path, stop_s: float, exit_code: int | None) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await _halted(one, stop_s)
            one.stop.set()
            (exited,) = await one.leader.wait(RankExited)
            assert exited.exit_code == exit_code
            assert exited.signal == (None if exit_code else signal.SIGKILL)

    go(test)


def test_it_is_told_once_that_a_rank_is_stopped_and_once_that_it_goes_on(
        memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            for rank in (0, 1):
                await one.start(python(SLEEP), rank=rank)
            started = {told.rank: told.pid for told in await one.leader.wait(RankStarted, 2)}
            for rank in (0, 1):
                os.kill(started[rank], signal.SIGSTOP)
                stops = await one.leader.wait(RankSuspended, rank + 1)
            os.kill(started[0], signal.SIGCONT)
            (goes_on,) = await one.leader.wait(RankContinued)
            os.kill(started[0], signal.SIGSTOP)
            stops = await one.leader.wait(RankSuspended, 3)
            assert [(told.rank, told.attempt, told.pid) for told in stops] == [
                (rank, 1, started[rank]) for rank in (0, 1, 0)]
            assert (goes_on.rank, goes_on.pid) == (0, started[0])
            os.kill(started[1], signal.SIGKILL)
            await one.leader.wait(RankExited)
            await asyncio.sleep(2 * LOOK_S)
            assert len(one.leader.all(RankContinued)) == 1, "who is killed does not go on"
            assert len(one.leader.all(RankSuspended)) == 3
            os.kill(started[0], signal.SIGCONT)  # so that it ends at once

    go(test)


def test_an_agent_in_a_process_of_its_own_is_told_by_the_kernel(
        own_server: embedded_server.Server, tmp_path: Path) -> None:
    """Not with its next look: of many stops the most are told well before that."""
    async def test() -> None:
        async with plane(own_server.url, tmp_path / "state") as one:
            agent = one.agent()
            await one.wait(NodeJoined)
            await one.start(SLEEP)
            (started,) = await one.wait(RankStarted)
            delays_s: list[float] = []
            for num in range(1, 12):
                stopped_s = time.time()
                os.kill(started.pid, signal.SIGSTOP)
                await one.wait(RankSuspended, num)
                told = [x for x in one.leader.records if isinstance(x.body, RankSuspended)]
                delays_s.append(told[-1].occurred_s - stopped_s)
                os.kill(started.pid, signal.SIGCONT)
                await one.wait(RankContinued, num)
            assert median(delays_s) < LOOK_S / 2, delays_s
            agent.terminate()
            assert await ended(agent) == 0, one.said()

    asyncio.run(asyncio.wait_for(test(), 2 * LIMIT_S))


@contextmanager
def held_by_a_debugger(pid: int) -> Iterator[None]:
    """A child of this process is traced, and stands still."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(16, pid, None, None) == 0, os.strerror(ctypes.get_errno())  # PTRACE_ATTACH
    os.waitpid(pid, 0)
    try:
        yield
    finally:
        assert libc.ptrace(17, pid, None, None) == 0  # PTRACE_DETACH


def test_a_rank_in_a_debugger_is_not_stopped(memory: MemoryLog, tmp_path: Path) -> None:
    """Somebody looks at it, and knows."""
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            for rank in (0, 1):
                await one.start(python(SLEEP), rank=rank)
            pids = {told.rank: told.pid for told in await one.leader.wait(RankStarted, 2)}
            with held_by_a_debugger(pids[0]):
                found = linux.read(pids[0])
                assert found is not None
                assert found.state == "t"
                await asyncio.sleep(2 * LOOK_S)
                os.kill(pids[1], signal.SIGSTOP)
                (told,) = await one.leader.wait(RankSuspended)
                assert told.rank == 1
            os.kill(pids[1], signal.SIGCONT)  # so that it ends at once

    go(test)


def test_a_node_is_lost_on_purpose_once(own_server: embedded_server.Server, tmp_path: Path) -> None:
    """With all its ranks, also one that is stopped and one whose child has left its group."""
    async def test() -> None:
        async with plane(own_server.url, tmp_path / "state") as one:
            first = one.agent()
            (joined,) = await one.wait(NodeJoined)
            note = tmp_path / "child"
            await one.start(CHILD_OF_ITS_OWN, str(note))
            await one.start(SLEEP, rank=1)
            pids = [started.pid for started in await one.wait(RankStarted, 2)]
            pids.append(int(await until_text(note)))
            os.kill(pids[1], signal.SIGSTOP)
            await one.wait(RankSuspended)
            await one.leader.order(fault("node", incarnation=joined.incarnation))
            assert await ended(first) == -signal.SIGKILL
            for pid in pids:
                await until_gone(pid)
            second = one.agent()
            await one.wait(NodeJoined, 2)
            await one.start("pass", attempt=2)  # it read the order before, and lives
            await one.wait(RankExited)
            assert second.poll() is None
            assert one.kinds() == ["NodeJoined", "RankStarted", "RankStarted", "RankSuspended",
                                   "NodeJoined", "RankStarted", "RankExited"]
            second.terminate()
            assert await ended(second) == 0, one.said()

    asyncio.run(asyncio.wait_for(test(), 3 * LIMIT_S))


STOPPED_S = CALL_S_MAX + 1.0
"""Every limit of a call that was under way has passed by then."""
COUNTS = """
import sys, time
while True:
    open(sys.argv[1], "a").write("x")
    time.sleep(0.05)
"""


async def _beats(one: Plane) -> None:
    """Wait for a beat that is younger than two seconds."""
    last_s = time.monotonic() + LIMIT_S
    while not any(beat.age_s < 2.0 for beat in await one.log.beats()):
        assert time.monotonic() < last_s, one.said()
        await asyncio.sleep(0.1)


async def _stop_and_go_on(pid: int, meanwhile: Callable[[], None]) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOPPED_S / 2)
        meanwhile()
        await asyncio.sleep(STOPPED_S / 2)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("who", ["agent", "server"])
def test_who_stops_for_a_while_loses_nothing_and_disturbs_no_rank(
        own_server: embedded_server.Server, tmp_path: Path, who: str) -> None:
    async def test() -> None:
        async with plane(own_server.url, tmp_path / "state") as one:
            agent = one.agent()
            await one.wait(NodeJoined)
            count, end = tmp_path / "count", tmp_path / "end"
            await one.start(COUNTS, str(count))
            await one.start(WAITS, str(end), rank=1)
            ranks = await one.wait(RankStarted, 2)
            await until_text(count)
            sizes: list[int] = []

            def meanwhile() -> None:
                end.touch()
                sizes.append(count.stat().st_size)

            await _stop_and_go_on(agent.pid if who == "agent" else own_server.pid, meanwhile)
            assert count.stat().st_size > sizes[0] + 10, "the other one worked on"
            (exited,) = await one.wait(RankExited)
            assert (exited.rank, exited.exit_code) == (1, 0)
            await _beats(one)
            await one.start("pass", rank=1, attempt=2)
            await one.wait(RankExited, 2)
            assert alive(ranks[0].pid)
            assert agent.poll() is None
            agent.terminate()
            assert await ended(agent) == 0, one.said()
            logged = await one.log.read(after=0, num_max=1000)
            numbers = [r.source_seq for r in logged if r.source != "heart"]
            assert numbers == list(range(1, len(numbers) + 1))
            assert one.kinds() == [
                "NodeJoined", "RankStarted", "RankStarted", "RankExited", "RankStarted",
                "RankExited", "NodeLeft", "RankExited"]

    asyncio.run(asyncio.wait_for(test(), 4 * LIMIT_S))
