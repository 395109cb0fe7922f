"""The promises of the log's port, tested on a real server and in memory."""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from intake import reports_of, take
from memory_log import MemoryLog, Outcome
from unicron.events.errors import Ambiguous, Conflict, Fenced, Leased, Unavailable, UsageError
from unicron.events.log.redis_streams import RedisLog
from unicron.events.log.segments import Folder
from unicron.events.records import reports
from unicron.events.records.envelope import Record, Report
from unicron.events.records.orders import Quiesce, Resume
from unicron.events.records.types import Body

TEST_S_MAX = 30.0
Open = Callable[[], AbstractAsyncContextManager[RedisLog]]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TEST_S_MAX))


@pytest.fixture(params=["memory", "redis"])
def opened(request: pytest.FixtureRequest) -> Open:
    """Opens a new client of one fresh log at each call."""
    if request.param == "redis":
        cluster: Open = request.getfixturevalue("redis_log")
        return cluster
    log = MemoryLog(clock=time.monotonic)

    @asynccontextmanager
    async def one() -> AsyncGenerator[RedisLog]:
        yield log

    return one


@pytest.fixture
def log(opened: Open) -> AbstractAsyncContextManager[RedisLog]:
    return opened()


@pytest.fixture
def agent(opened: Open) -> AbstractAsyncContextManager[RedisLog]:
    """Another client of the same log."""
    return opened()


def record(seq: int, epoch: int = 1, body: Body | None = None) -> Record:
    return Record(
        seq=seq,
        epoch=epoch,
        at_s=1000.0 + seq,
        occurred_s=999.5,
        source="n1/7",
        source_seq=seq,
        cause=0,
        incident=0,
        body=body or reports.NodeLeft(node="n1", incarnation=7, reason=f"r{seq}"),
    )


def order(seq: int, epoch: int, *nodes: str) -> Record:
    return record(seq, epoch, Resume(nodes=nodes, task=1, generation=seq, progress_from=0))


def report(source_seq: int, source: str = "n1/7") -> Report:
    return Report(
        source=source,
        source_seq=source_seq,
        occurred_s=5.25,
        body=reports.NodeLeft(node="n1", incarnation=7, reason=f"r{source_seq}"),
    )


async def put(
    log: RedisLog, *records: Record, cursor: str = "", acked: dict[str, int] | None = None
) -> None:
    await log.append(
        records, epoch=records[0].epoch, expect=records[0].seq - 1, cursor=cursor, acked=acked or {}
    )


async def test_an_empty_log(log: RedisLog) -> None:
    assert await log.last_seq() == 0
    assert await log.read(after=0, num_max=10) == []
    assert await log.cursor() == "0-0"
    assert await log.acked("n1/7") == 0
    assert await log.beats(["n1"]) == []
    assert await log.orders("n1", after="0-0", wait_s=0) == []
    assert await take(log) == ()
    await log.trim_reports(before="0-0")


async def test_records_read_back_unchanged_across_epochs(opened: Open) -> None:
    async with opened() as log, opened() as other:
        written: list[Record] = []
        for _ in range(7):
            epoch = await log.start_epoch("x")
            for num in (1, 0, 3):  # one record, none, three
                batch = [record(len(written) + 1 + i, epoch) for i in range(num)]
                await log.append(batch, epoch=epoch, expect=len(written), cursor="", acked={})
                written += batch
            await log.start_epoch("an epoch without records")
        assert await log.last_seq() == len(written) == 28
        assert await log.read(after=0, num_max=100) == written
        for after in range(30):  # from every seq, by a client that has read nothing before
            assert await other.read(after=after, num_max=3) == written[after : after + 3]
        tail = await other.read(after=20, num_max=4)
        assert await other.read(after=tail[-1].seq, num_max=99) == written[24:]


async def test_an_older_epoch_is_fenced_and_changes_nothing(opened: Open) -> None:
    async with opened() as old, opened() as new:
        first = await old.start_epoch("old")
        await put(old, record(1, first))
        second = await new.start_epoch("new")
        assert second > first
        with pytest.raises(Fenced):
            await put(old, order(2, first, "n1"), cursor="9-9", acked={"n1/7": 9})
        with pytest.raises(Fenced):
            await old.rebuild_orders([order(1, first, "n1")], epoch=first, acked={})
        with pytest.raises(Fenced):  # both apply: Fenced takes precedence over Conflict
            await old.append([], epoch=first, expect=77, cursor="", acked={})
        await put(new, record(2, second))
        assert [r.epoch for r in await new.read(after=0, num_max=9)] == [first, second]
        assert await new.cursor() == "0-0"
        assert await new.acked("n1/7") == 0
        assert await new.orders("n1", after="0-0", wait_s=0) == []


async def test_the_lease_lets_one_lead_at_a_time(opened: Open) -> None:
    async with opened() as first, opened() as second:
        epoch = await first.start_epoch("a", url="http://a", lease_s=30.0)
        with pytest.raises(Leased) as refused:
            await second.start_epoch("b", url="http://b", lease_s=30.0)
        assert refused.value.url == "http://a"
        assert await first.renew("a", epoch=epoch, url="http://a", lease_s=30.0) == ["http://b"]
        for stranger, of, error in (("b", epoch, Fenced), ("a", epoch + 1, Conflict)):
            with pytest.raises(error):  # no server forgets an epoch, but one that went back
                await second.renew(stranger, epoch=of, url="http://b", lease_s=30.0)
        await second.release("b", url="", lease_s=30.0)
        with pytest.raises(Leased):
            await second.start_epoch("b", url="http://b", lease_s=30.0)
        assert await first.start_epoch("a", url="http://a", lease_s=30.0) == epoch + 1

        for _ in range(2):  # it ends by itself, and its holder may go on while it is alone
            await first.renew("a", epoch=epoch + 1, url="http://a", lease_s=0.05)
            await asyncio.sleep(0.2)
        assert await second.start_epoch("b", url="http://b", lease_s=30.0) == epoch + 2
        with pytest.raises(Fenced):
            await first.renew("a", epoch=epoch + 1, url="http://a", lease_s=30.0)
        with pytest.raises(Fenced):
            await put(first, record(1, epoch + 1))

        await second.release("b", url="http://c", lease_s=30.0)
        with pytest.raises(Fenced):  # as if it was sent before
            await second.renew("b", epoch=epoch + 2, url="http://b", lease_s=30.0)
        for nonce in ("a", "b"):
            with pytest.raises(Leased) as refused:
                await first.start_epoch(nonce, url=f"http://{nonce}", lease_s=30.0)
            assert refused.value.url == "http://c"
        assert await first.start_epoch("c", url="http://c", lease_s=9.0) == epoch + 3
        await first.release("c", url="", lease_s=9.0)
        assert await second.start_epoch("b", url="http://b", lease_s=30.0) == epoch + 4


async def test_only_the_leader_keeps_tokens(opened: Open) -> None:
    async with opened() as first, opened() as second:
        assert await second.tokens() == b""
        epoch = await first.start_epoch("a")
        await first.keep_tokens(b"some", epoch=epoch)
        assert await second.tokens() == b"some"
        await second.start_epoch("b")
        with pytest.raises(Fenced):
            await first.keep_tokens(b"others", epoch=epoch)
        assert await second.tokens() == b"some"


async def test_a_wrong_seq_is_a_conflict_and_changes_nothing(log: RedisLog) -> None:
    epoch = await log.start_epoch("x")
    await put(log, record(1, epoch), record(2, epoch))
    for seq in (1, 2, 4, 9):
        with pytest.raises(Conflict):
            await put(log, order(seq, epoch, "n1"), cursor="9-9", acked={"n1/7": 9})
    assert await log.last_seq() == 2
    assert await log.cursor() == "0-0"
    assert await log.acked("n1/7") == 0
    assert await log.orders("n1", after="0-0", wait_s=0) == []


async def test_append_is_atomic(log: RedisLog, agent: RedisLog) -> None:
    epoch = await log.start_epoch("x")
    quiesce = record(
        2, epoch, Quiesce(nodes=("n1", "n2"), task=1, generation=1, mode="now", ranks=(0, 1))
    )
    batch = [record(1, epoch), quiesce, record(3, epoch), order(4, epoch, "n2")]
    await put(log, *batch, cursor="5-1", acked={"n1/7": 12, "n2/8": 3})
    assert await log.cursor() == "5-1"
    assert await agent.acked("n1/7") == 12
    assert await agent.acked("n2/8") == 3
    one = await agent.orders("n1", after="0-0", wait_s=0)
    two = await agent.orders("n2", after="0-0", wait_s=0)
    assert [sent.record for sent in one] == [quiesce]
    assert [sent.record for sent in two] == [quiesce, batch[3]]
    assert await agent.orders("n2", after=two[0].cursor, wait_s=0) == two[1:]
    assert await agent.orders("n2", after=two[1].cursor, wait_s=0) == []
    await put(log, record(5, epoch), acked={"n1/7": 13})
    assert await log.cursor() == "5-1", "an empty cursor changes nothing"
    assert await agent.acked("n1/7") == 13
    assert await agent.acked("n2/8") == 3


async def test_sealed_orders_that_are_closed_leave_the_server(
    redis_log: Any, tmp_path: Path
) -> None:
    async with redis_log(folder=Folder(tmp_path, redis_log.name)) as log:
        epoch = await log.start_epoch("a")
        batch = [
            order(seq, epoch, *nodes)
            for seq, nodes in enumerate((("n1",), ("n1", "n2"), ("n1",), ("n1", "n2")), 1)
        ]
        await put(log, *batch)
        await log.open_segments()
        await log.seal(batch[:3], epoch=epoch, open_orders=[3])
        for node, seqs in (("n1", [3, 4]), ("n2", [4])):
            left = await log.orders(node, after="0-0", wait_s=0)
            assert [one.record.seq for one in left] == seqs
        await log.seal(batch[3:], epoch=epoch, open_orders=[])
        assert await log.orders("n1", after="0-0", wait_s=0) == []


async def test_rebuilt_orders_replace_all_streams_and_are_read_again(
    log: RedisLog, agent: RedisLog
) -> None:
    first = await log.start_epoch("a")
    batch = [order(1, first, "n1"), order(2, first, "n1", "n2"), order(3, first, "n3")]
    await put(log, *batch)
    seen = (await agent.orders("n1", after="0-0", wait_s=0))[-1].cursor
    second = await log.start_epoch("b")
    await log.rebuild_orders([batch[2], batch[0]], epoch=second, acked={})
    again = await agent.orders("n1", after=seen, wait_s=0)
    assert [sent.record for sent in again] == [batch[0]], "a rebuilt order is sent again"
    assert await agent.orders("n2", after="0-0", wait_s=0) == []
    await put(log, order(4, second, "n1", "n2"))
    more = await agent.orders("n1", after=again[-1].cursor, wait_s=0)
    assert [sent.record.seq for sent in more] == [4]
    assert [s.record.seq for s in await agent.orders("n1", after="0-0", wait_s=0)] == [1, 4]
    assert [s.record.seq for s in await agent.orders("n2", after="0-0", wait_s=0)] == [4]
    third = await log.start_epoch("c")
    await log.rebuild_orders([], epoch=third, acked={})
    for node in ("n1", "n2", "n3"):
        assert await agent.orders(node, after="0-0", wait_s=0) == []


async def test_reports_are_taken_in_order_behind_a_cursor(log: RedisLog, agent: RedisLog) -> None:
    sent = [report(number) for number in range(1, 8)]
    await log.admit({"n1": 7})
    await agent.send([])
    await agent.send(sent[:5])
    await agent.send(sent[5:])
    first = await log.take(after="0-0", num_max=3, wait_s=0)
    assert list(reports_of(log, first)) == sent[:3]
    assert not first.is_whole
    cursor = first.entries[-1].cursor
    rest = await log.take(after=cursor, num_max=99, wait_s=0)
    assert list(reports_of(log, rest)) == sent[3:]
    assert rest.is_whole
    await log.trim_reports(before=cursor)
    assert list(await take(log)) == sent[3:]
    cursor = rest.entries[-1].cursor
    assert await take(log, cursor) == ()
    await log.trim_reports(before=cursor)
    await agent.send([report(8)])
    assert [one.source_seq for one in await take(log, cursor)] == [8]


async def test_a_blocking_take_ends_with_a_report_or_a_timeout(
    log: RedisLog, agent: RedisLog
) -> None:
    await log.admit({"n1": 7})
    start = time.monotonic()
    assert await take(log, wait_s=0.3) == ()
    assert time.monotonic() - start > 0.25
    waiting = asyncio.create_task(take(log, wait_s=20.0))
    await asyncio.sleep(0.1)
    start = time.monotonic()
    assert await log.cursor() == "0-0", "other calls must not wait for take"
    await agent.send([report(1)])
    assert [r.source_seq for r in await waiting] == [1]
    assert time.monotonic() - start < 18.0


async def test_blocking_orders_of_two_nodes_through_one_client(
    log: RedisLog, agent: RedisLog
) -> None:
    epoch = await log.start_epoch("x")
    one = asyncio.create_task(agent.orders("n1", after="0-0", wait_s=20.0))
    two = asyncio.create_task(agent.orders("n2", after="0-0", wait_s=20.0))
    await asyncio.sleep(0.1)
    await put(log, order(1, epoch, "n2"))
    assert [sent.record.seq for sent in await two] == [1]
    assert not one.done()
    await log.rebuild_orders([], epoch=epoch, acked={})  # deletes a stream that is awaited
    await put(log, order(2, epoch, "n1"))
    assert [sent.record.seq for sent in await one] == [2]


async def test_a_cancelled_wait_leaves_the_client_usable(log: RedisLog) -> None:
    for _ in range(3):
        waiting = asyncio.create_task(log.take(after="0-0", num_max=9, wait_s=20.0))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await log.admit({"n1": 7})
    await log.send([report(1)])
    assert len(await take(log, wait_s=5.0)) == 1


async def test_beats_keep_the_newest_incarnation(log: RedisLog, agent: RedisLog) -> None:
    await agent.beat("n2", 1700000000001)
    await agent.beat("n1", 1700000000005)
    await asyncio.sleep(0.2)
    await agent.beat("n1", 1700000000009, 17)
    await agent.beat("n1", 1700000000005, 99)  # a late beat of an earlier incarnation
    one, two = await log.beats(["n1", "n2", "n3"])
    assert (one.node, one.incarnation) == ("n1", 1700000000009)
    assert (two.node, two.incarnation) == ("n2", 1700000000001)
    assert (one.num_spooled, two.num_spooled) == (17, 0)
    assert 0 <= one.age_s < two.age_s < 10.0
    assert two.age_s >= 0.19


async def test_a_non_finite_number_is_refused(log: RedisLog) -> None:
    epoch = await log.start_epoch("x")
    bad = reports.NodeUnreachable(node="n1", incarnation=1, silence_s=math.nan)
    with pytest.raises(ValueError, match="silence_s is nan"):
        await put(log, record(1, epoch), record(2, epoch, bad))
    with pytest.raises(ValueError, match="silence_s is nan"):
        await log.send([Report(source="a/1", source_seq=1, occurred_s=0.0, body=bad)])
    assert await log.last_seq() == 0
    assert await take(log) == ()


async def test_two_leaders_race_and_nothing_is_lost_or_doubled(opened: Open) -> None:

    async def lead(log: RedisLog, name: str, acknowledged: list[tuple[int, int]]) -> None:
        epoch, seq = await log.start_epoch(name), await log.last_seq()
        while seq < 60:
            try:
                batch = [record(seq + 1, epoch), record(seq + 2, epoch)]
                await log.append(batch, epoch=epoch, expect=seq, cursor="", acked={})
                acknowledged += [(r.seq, r.epoch) for r in batch]
                seq += 2
                await asyncio.sleep(0.001)
            except (Conflict, Fenced):
                await asyncio.sleep(0.01)
                epoch, seq = await log.start_epoch(name), await log.last_seq()

    async with opened() as a, opened() as b:
        acknowledged: list[tuple[int, int]] = []
        await asyncio.gather(lead(a, "a", acknowledged), lead(b, "b", acknowledged))
        entries = [(r.seq, r.epoch) for r in await a.read(after=0, num_max=1000)]
        assert [seq for seq, _ in entries] == list(range(1, len(entries) + 1))
        assert sorted(acknowledged) == entries


@pytest.mark.parametrize("url", ["http://h", "redis://h:port/0", "nonsense"])
def test_an_invalid_url_is_an_error(url: str) -> None:
    from unicron.events.log.redis_streams import RedisLog

    with pytest.raises(UsageError) as raised:
        RedisLog(url, "c")
    assert "redis://" in raised.value.hint


def test_a_cluster_name_is_checked() -> None:
    from unicron.events.log.redis_streams import RedisLog

    with pytest.raises(UsageError):
        RedisLog("redis://127.0.0.1", "a}b")


# --- the log in memory: virtual time, and faults on demand ---------------------------------------
class _VirtualSelector(selectors.DefaultSelector):
    """A selector that does not wait: it advances the clock to the next timer."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "deadlock: all tasks wait and no timer is set"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.leaping = _VirtualSelector()
        super().__init__(self.leaping)

    def time(self) -> float:
        return self.leaping.now_s


def run_in_virtual_time(test: Coroutine[Any, Any, None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(test)
    finally:
        loop.close()


def test_a_day_of_waiting_takes_no_time() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        log = MemoryLog(clock=loop.time)
        start = time.monotonic()
        assert await take(log, wait_s=86400.0) == ()
        assert loop.time() == pytest.approx(86400.0)
        await log.beat("n1", 1)
        waiting = [
            asyncio.create_task(take(log, wait_s=100.0)),
            asyncio.create_task(take(log, wait_s=10.0)),
        ]
        orders = asyncio.create_task(log.orders("n1", after="0-0", wait_s=100.0))
        await asyncio.sleep(20.0)
        assert [task.done() for task in waiting] == [False, True]
        await log.send([report(1)])
        epoch = await log.start_epoch("x")
        await log.append([order(1, epoch, "n1")], epoch=epoch, expect=0, cursor="", acked={})
        assert len(await waiting[0]) == 1
        assert len(await orders) == 1
        assert loop.time() == pytest.approx(86420.0)
        assert (await log.beats(["n1"]))[0].age_s == pytest.approx(20.0)
        assert time.monotonic() - start < 60.0

    run_in_virtual_time(test())


@pytest.mark.parametrize(
    ("outcome", "error", "stands"),
    [
        ("unavailable", Unavailable, False),
        ("lost", Ambiguous, False),
        ("applied", Ambiguous, True),
    ],
)
def test_injected_faults(outcome: Outcome, error: type[Exception], stands: bool) -> None:
    faults: dict[str, Outcome] = {}
    log = MemoryLog(clock=lambda: 0.0, fault=lambda call: faults.pop(call, "done"))

    async def test() -> None:
        epoch = await log.start_epoch("x")
        faults["append"] = outcome
        with pytest.raises(error):
            await log.append(
                [order(1, epoch, "n1")], epoch=epoch, expect=0, cursor="0-5", acked={"a": 1}
            )
        assert await log.last_seq() == int(stands)
        assert await log.cursor() == ("0-5" if stands else "0-0")
        assert await log.acked("a") == int(stands)
        faults["send"] = outcome
        with pytest.raises(error):
            await log.send([report(1)])
        assert len(await take(log)) == int(stands)
        faults["start_epoch"] = outcome
        with pytest.raises(error):
            await log.start_epoch("y")
        if stands:  # the epoch began although the caller got an error, so its old epoch is fenced
            with pytest.raises(Fenced):
                await log.append([], epoch=epoch, expect=1, cursor="", acked={})
        for call in (
            log.read(after=0, num_max=1),
            log.beats(["n"]),
            log.orders("n", after="0-0", wait_s=0),
        ):
            faults[call.__name__] = outcome
            with pytest.raises(error):
                await call

    run_in_virtual_time(test())


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

    run_in_virtual_time(test())
