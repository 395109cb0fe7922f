"""What only the log in memory can: wait in virtual time, and fail on demand."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from memory_log import MemoryLog, Outcome
from unicron.events.errors import Ambiguous, Conflict, Fenced, Unavailable
from unicron.events.records import reports
from unicron.events.records.envelope import Record, Report
from unicron.events.records.orders import Resume


class _Leaping(selectors.DefaultSelector):
    """A selector that does not wait: it moves the clock to the next timer."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits, and no timer is set: a deadlock"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.leaping = _Leaping()
        super().__init__(self.leaping)

    def time(self) -> float:
        return self.leaping.now_s


def run(test: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(test)
    finally:
        loop.close()


def record(seq: int, epoch: int) -> Record:
    return Record(seq=seq, epoch=epoch, at_s=1.0, occurred_s=1.0, source="heart", source_seq=0,
                  cause=0, incident=0,
                  body=Resume(nodes=("n1",), task=1, generation=seq, progress_from=0))


def report(source_seq: int) -> Report:
    return Report(source="n1/7", source_seq=source_seq, occurred_s=1.0,
                  body=reports.NodeLeft(node="n1", incarnation=7, reason=""))


def test_a_day_of_waiting_takes_no_time() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        log = MemoryLog(clock=loop.time)
        start = time.monotonic()
        assert (await log.take(after="0-0", num_max=9, wait_s=86400.0)).reports == ()
        assert loop.time() == pytest.approx(86400.0)
        await log.beat("n1", 1)
        waiting = [asyncio.create_task(log.take(after="0-0", num_max=9, wait_s=100.0)),
                   asyncio.create_task(log.take(after="0-0", num_max=9, wait_s=10.0))]
        orders = asyncio.create_task(log.orders("n1", after="0-0", wait_s=100.0))
        await asyncio.sleep(20.0)
        assert [task.done() for task in waiting] == [False, True]
        await log.send([report(1)])
        epoch = await log.start_epoch("x")
        await log.append([record(1, epoch)], epoch=epoch, expect=0, cursor="", acked={})
        assert len((await waiting[0]).reports) == 1
        assert len(await orders) == 1
        assert loop.time() == pytest.approx(86420.0)
        assert (await log.beats())[0].age_s == pytest.approx(20.0)
        assert time.monotonic() - start < 60.0

    run(test())


@pytest.mark.parametrize(("outcome", "error", "stands"), [
    ("unavailable", Unavailable, False), ("lost", Ambiguous, False), ("applied", Ambiguous, True),
])
def test_a_fault_on_demand(outcome: Outcome, error: type[Exception], stands: bool) -> None:
    faults: dict[str, Outcome] = {}
    log = MemoryLog(clock=lambda: 0.0, fault=lambda call: faults.pop(call, "done"))

    async def test() -> None:
        epoch = await log.start_epoch("x")
        faults["append"] = outcome
        with pytest.raises(error):
            await log.append([record(1, epoch)], epoch=epoch, expect=0, cursor="0-5",
                             acked={"a": 1})
        assert await log.last_seq() == int(stands)
        assert await log.cursor() == ("0-5" if stands else "0-0")
        assert await log.acked("a") == int(stands)
        faults["send"] = outcome
        with pytest.raises(error):
            await log.send([report(1)])
        assert len((await log.take(after="0-0", num_max=9, wait_s=0)).reports) == int(stands)
        faults["start_epoch"] = outcome
        with pytest.raises(error):
            await log.start_epoch("y")
        if stands:  # the caller does not know, but it is fenced by itself
            with pytest.raises(Fenced):
                await log.append([], epoch=epoch, expect=1, cursor="", acked={})
        for call in (log.read(after=0, num_max=1), log.beats(), log.orders("n", after="0-0",
                                                                           wait_s=0)):
            faults[call.__name__] = outcome
            with pytest.raises(error):
                await call

    run(test())


def test_a_refusal_whose_reply_is_lost_is_ambiguous_too() -> None:
    outcome: list[Outcome] = ["done"]
    log = MemoryLog(clock=lambda: 0.0, fault=lambda call: outcome[0])

    async def test() -> None:
        epoch = await log.start_epoch("x")
        with pytest.raises(Conflict):
            await log.append([], epoch=epoch, expect=7, cursor="", acked={})
        outcome[0] = "applied"
        with pytest.raises(Ambiguous):
            await log.append([], epoch=epoch, expect=7, cursor="", acked={})

    run(test())
