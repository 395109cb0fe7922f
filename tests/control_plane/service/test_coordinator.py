"""The coordinator decides on each batch and appends it once, also if calls of the log fail."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import replicated_servers
from memory_log import MemoryLog, Outcome
from simulated import virtual_time
from structlog.testing import capture_logs
from unicron.control_plane.decide.replay import verify
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.server import steady_clock
from unicron.control_plane.service.coordinator import Coordinator
from unicron.control_plane.service.dead_letters import DeadLetters
from unicron.control_plane.service.leader import LEASE_S
from unicron.control_plane.service.limits import Limits
from unicron.control_plane.state.cluster import DECIDER_VERSION, ClusterState, state_hash
from unicron.events.errors import Fenced, NewerLog, Unavailable, UsageError
from unicron.events.log import embedded_server
from unicron.events.log.identity import SECRET_BYTES, Identities
from unicron.events.log.port import Batch, Heartbeat
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records import reports as r
from unicron.events.records.codec import UnknownBody
from unicron.events.records.envelope import Record, Report
from unicron.events.records.orders import StartRank
from unicron.events.records.types import Body
from unicron.events.spec import job as spec
from unicron.events.spec.policy import Policy

Redis: Any = redis.Redis
START_S = 1_700_000_000.0
POLICY = Policy()
ITERATIONS = {"iterations": 3, "output": "/out"}


def job(name: str = "job", slots: int = 1) -> r.TaskSubmitted:
    return r.TaskSubmitted(
        spec=spec.parse(
            {
                "apiVersion": spec.API_VERSION,
                "name": name,
                "slots": {"min": slots, "max": slots},
                "train": ITERATIONS,
            }
        )
    )


def reported(number: int, body: Body, source: str = "n1/1") -> Report:
    return Report(source=source, source_seq=number, occurred_s=1.0, body=body)


def joined(node: str = "n1", incarnation: int = 1) -> r.NodeJoined:
    return r.NodeJoined(node=node, incarnation=incarnation, host="h", pid=1, num_slots=2)


def virtual_clock() -> float:
    return START_S + asyncio.get_running_loop().time()


@asynccontextmanager
async def leading(
    log: RedisLog,
    nonce: str = "a",
    *,
    clock: Callable[[], float] = virtual_clock,
    policy: Policy = POLICY,
    limits: Limits | None = None,
    dead_letters: DeadLetters | None = None,
) -> AsyncIterator[Coordinator]:
    """A coordinator that leads. At the end it is cancelled, as if its process had died."""
    coordinator = Coordinator(
        log,
        clock=clock,
        nonce=nonce,
        code="test",
        policy=policy,
        limits=limits or Limits(),
        dead_letters=dead_letters,
    )
    task = asyncio.create_task(coordinator.run())
    try:
        assert await coordinator.find_leader() == ""
        yield coordinator
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await asyncio.sleep(LEASE_S)


async def until(log: RedisLog, *kinds: str, s_max: float = 60.0) -> list[Record]:
    """The whole log, once it holds a record of each kind."""
    deadline = asyncio.get_running_loop().time() + s_max
    while True:
        records = await log.read(after=0, num_max=10_000)
        if set(kinds) <= {record.kind for record in records}:
            return records
        assert asyncio.get_running_loop().time() < deadline, f"{[x.kind for x in records]}"
        await asyncio.sleep(0.01)


def kinds(records: list[Record]) -> list[str]:
    return [record.kind for record in records]


def virtual(test: Callable[[MemoryLog], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run the test in virtual time, with a log in memory."""

    def run() -> None:
        async def main() -> None:
            await test(MemoryLog(virtual_clock))

        virtual_time.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtual
async def test_an_empty_log_gets_its_policy(log: MemoryLog) -> None:
    async with leading(log):
        pass
    assert kinds(await log.read(after=0, num_max=9)) == ["EpochStarted", "PolicySet"]


@virtual
async def test_the_policy_of_the_leader_replaces_that_of_the_log(log: MemoryLog) -> None:
    for nonce, silence_s in (("a", 7.0), ("b", 7.0), ("c", 9.0)):
        async with leading(log, nonce, policy=Policy(silence_s_max=silence_s)) as leader:
            assert (await leader.settled()).policy.silence_s_max == silence_s
    async with leading(log, "d") as leader:
        assert (await leader.settled()).policy == Policy()
    assert kinds(await log.read(after=0, num_max=9)) == [
        "EpochStarted",
        "PolicySet",
        "EpochStarted",
        "EpochStarted",
        "PolicySet",
        "EpochStarted",
        "PolicySet",
    ]


@virtual
async def test_a_write_is_answered_with_its_seq_and_written_once(log: MemoryLog) -> None:
    async with leading(log, "a") as first:
        seqs = await asyncio.gather(first.write("x", job()), first.write("x", job()))
        assert seqs[0] == seqs[1] == 3
        assert first.answer("x") == 3
    async with leading(log, "b") as second:
        assert await second.write("x", job()) == 3, "a new leader knows the answer too"
    assert kinds(await log.read(after=0, num_max=99)).count("TaskSubmitted") == 1


@virtual
async def test_an_agent_cannot_report_about_another_nodes_process(log: MemoryLog) -> None:
    """Such a report is a dead letter, and lost; its source goes on. So is one of a node that has
    not joined, whose source stays unknown."""
    folder = Path(tempfile.mkdtemp())
    letters = DeadLetters(folder / "letters.jsonl")
    async with leading(log, dead_letters=letters) as leader:
        await log.send([reported(1, joined()), reported(1, joined("n2"), "n2/1")])
        await until(log, "NodeJoined")
        task = await leader.write("x", job(slots=4))
        started = [
            record for record in await until(log, "StartRank") if isinstance(record.body, StartRank)
        ]
        mine = next(record.body for record in started if record.body.nodes == ("n2",))
        his = next(record for record in started if record.body.nodes == ("n1",))
        ended: dict[str, Any] = {"task": task, "pid": 0, "exit_code": 1, "signal": None}
        assert isinstance(his.body, StartRank)
        await log.send(
            [
                reported(1, r.RankExited(rank=mine.rank, attempt=1, **ended), "evil/1"),
                reported(2, r.RankExited(rank=his.body.rank, attempt=1, **ended), "n2/1"),
                reported(3, r.OrderRefused(node="n2", order=his.seq, why=""), "n2/1"),
                reported(4, r.RankExited(rank=mine.rank, attempt=1, **ended), "n2/1"),
            ]
        )
        records = await until(log, "RankExited")
        state = await leader.settled()
    exits = [record.body for record in records if isinstance(record.body, r.RankExited)]
    assert [(exit.task, exit.rank) for exit in exits] == [(task, mine.rank)]
    assert "OrderRefused" not in kinds(records)
    assert state.reports_lost == 2
    assert "evil/1" not in state.sources
    lines = (folder / "letters.jsonl").read_text().splitlines()
    shutil.rmtree(folder)
    whys = [json.loads(one)["why"] for one in lines]
    assert whys == [
        "RankExited 1: node evil has not joined",
        f"RankExited 2: process 1 of rank {his.body.rank} of task {task} is on n1",
        f"OrderRefused 3: order {his.seq} is not to n2",
    ]


@virtual
async def test_reports_are_taken_in_order_each_once(log: MemoryLog) -> None:
    async with leading(log):
        await log.send(
            [reported(2, r.RankStarted(task=9, rank=0, attempt=1, node="n1", pid=1, log_path=""))]
        )
        await log.send([reported(1, joined()), reported(1, joined())])
        await until(log, "NodeJoined")
        await asyncio.sleep(1.0)
        assert await log.acked("n1/1") == 1, "report 2 came before report 1"
        await log.send(
            [reported(2, r.RankStarted(task=9, rank=0, attempt=1, node="n1", pid=1, log_path=""))]
        )
        records = await until(log, "RankStarted")
    assert await log.acked("n1/1") == 2
    assert [x.source_seq for x in records if x.source == "n1/1"] == [1, 2]


class StoppableLog(MemoryLog):
    """The log as one control plane reaches it: while that is stopped, no call of it begins."""

    def __init__(self, log: MemoryLog) -> None:
        self.__dict__ = log.__dict__
        self.runs = asyncio.Event()
        self.runs.set()

    async def append(self, *args: Any, **named: Any) -> None:
        await self.runs.wait()
        await super().append(*args, **named)

    async def renew(self, *args: Any, **named: Any) -> list[str]:
        await self.runs.wait()
        return await super().renew(*args, **named)


@asynccontextmanager
async def running(
    log: RedisLog, nonce: str, access: Any = None
) -> AsyncIterator[tuple[Coordinator, asyncio.Task[None]]]:
    """A coordinator that leads or follows; cancelled at the end."""
    made = Coordinator(
        log, clock=virtual_clock, nonce=nonce, code="test", policy=POLICY, access=access
    )
    task = asyncio.create_task(made.run(f"http://{nonce}"))
    try:
        await made.find_leader()
        yield made, task
    finally:
        task.cancel()
        await asyncio.wait((task,))


@virtual
async def test_a_follower_folds_along_and_succeeds_a_dead_leader(log: MemoryLog) -> None:
    async with running(log, "b") as (first, task), running(log, "a") as (second, _):
        assert await second.find_leader() == "http://b"
        await asyncio.sleep(1.0)
        assert first.followers == ["http://a"]
        seq = await first.write("x", job())
        await asyncio.sleep(0.3)
        assert (second.seq, second.leading, second.answer("x")) == (first.seq, False, seq)
        assert state_hash(await second.settled()) == state_hash(await first.settled())
        with pytest.raises(Unavailable):
            await second.write("y", job())
        read, after = log.read, second.seq

        async def behind(*, after: int, num_max: int) -> list[Record]:
            assert after >= seq, "a follower folds nothing twice"
            return await read(after=after, num_max=num_max)

        log.read = behind  # type: ignore[method-assign]
        began_s = asyncio.get_running_loop().time()
        task.cancel()
        while not second.leading:
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began_s < LEASE_S + 0.3
        assert await second.write("x", job()) == seq
        assert kinds(await read(after=after, num_max=9)) == ["EpochStarted"]


@virtual
async def test_a_leader_that_was_stopped_is_fenced_when_it_wakes(log: MemoryLog) -> None:
    port = StoppableLog(log)
    async with running(port, "a") as (first, task), running(log, "b") as (second, _):
        seq = await first.write("x", job())
        port.runs.clear()
        write = asyncio.create_task(first.write("y", job()))
        while not second.leading:
            await asyncio.sleep(0.01)
        after = await log.last_seq()
        port.runs.set()
        with pytest.raises(Fenced):
            await task
        with pytest.raises(Unavailable):
            await write
        assert not first.leading
        assert await log.last_seq() == after
        assert await second.write("x", job()) == seq
        assert await second.write("y", job()) > after


@virtual
async def test_an_idle_leader_learns_that_it_is_fenced(log: MemoryLog) -> None:
    async with running(log, "a") as (_, task):
        log._lease = "", "", 0.0  # as after a pause
        await log.start_epoch("b", lease_s=LEASE_S)
        with pytest.raises(Fenced):
            await asyncio.wait_for(task, LEASE_S)


@virtual
async def test_a_handover_loses_no_request(log: MemoryLog) -> None:
    async with running(log, "a") as (first, _), running(log, "b") as (second, _):
        with pytest.raises(UsageError, match="no other"):
            await first.hand_over(first.epoch)
        await asyncio.sleep(1.0)
        stopped, seqs = False, list[int]()

        async def submit(client: int) -> None:
            number = 0
            while not stopped:
                for one in (first, second):
                    with suppress(Unavailable):
                        seqs.append(await one.write(f"{client}-{number}", job()))
                        number += 1
                await asyncio.sleep(0.01)

        clients = [asyncio.create_task(submit(number)) for number in range(4)]
        began_s = asyncio.get_running_loop().time()
        assert await first.hand_over(first.epoch) == "http://b"
        while not second.leading:
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began_s < LEASE_S / 2
        await asyncio.sleep(2.0)
        assert (first.leading, first.leader_url) == (False, "http://b")
        assert await second.hand_over(second.epoch) == "http://a"
        await asyncio.sleep(2.0)
        assert first.leading
        stopped = True
        await asyncio.gather(*clients)
        records = await log.read(after=0, num_max=10_000)
        submitted = [x.seq for x in records if x.kind == "TaskSubmitted"]
        assert sorted(seqs) == submitted
        assert len(submitted) > 100
        assert kinds(records).count("EpochStarted") == 3


@virtual
async def test_one_that_starts_again_does_not_follow_its_dead_predecessor(log: MemoryLog) -> None:
    """The lease of the process that died names the URL at which the next one listens."""
    await log.start_epoch("killed", url="http://a", lease_s=LEASE_S)
    made = Coordinator(log, clock=virtual_clock, nonce="a", code="test", policy=POLICY)
    task = asyncio.create_task(made.run("http://a"))
    try:
        await asyncio.sleep(LEASE_S / 2)
        assert (made.leading, made.leader_url) == (False, "")
        assert (await made.find_leader(), made.leading) == ("", True)
    finally:
        task.cancel()
        await asyncio.wait((task,))


@virtual
async def test_a_log_that_lost_records_is_never_silently_folded(log: MemoryLog) -> None:
    await losing(log, "a follower")


@virtual
async def test_a_leader_finds_that_the_log_lost_its_records(log: MemoryLog) -> None:
    await losing(log, "the leader")


async def losing(log: MemoryLog, who: str) -> None:
    """Whoever leads on says it in a line and in the log, in an epoch above the lost one."""
    async with running(log, "a") as (first, task), running(log, "b") as (second, _):
        for number in range(5):
            await first.write(str(number), job(str(number)))
        await asyncio.sleep(0.3)
        lost, epoch = second.seq, first.epoch
        if who == "a follower":
            task.cancel()
        del log._records[4:]  # an older copy of the server's data
        log._epoch -= 1
        leader = second if who == "a follower" else first
        with capture_logs() as logged:
            writing = asyncio.create_task(leader.write("5", job("5"))) if leader is first else None
            while not leader.leading or leader.epoch <= epoch:
                await asyncio.sleep(0.01)
            await asyncio.sleep(2.0)
        told = [line for line in logged if line["log_level"] == "error"]
        assert len(told) == (1 if who == "a follower" else 2), "each that had seen them says it"
        for line in told:
            assert "lost records" in line["event"]
            assert (line["lost_from"], line["lost_to"], line["epoch"]) == (5, lost, epoch)
        records = await log.read(after=0, num_max=100)
        assert [x.body for x in records if isinstance(x.body, r.EpochStarted)][1:] == [
            r.EpochStarted(
                nonce="b" if leader is second else "a",
                code="test",
                heart=DECIDER_VERSION,
                durability="always",
            )
        ]
        assert [
            (x.what, x.lost_from, x.lost_to) for x in leader._leader.state.outages if x.lost_to
        ] == [("server", 5, lost)]
        assert all(x.epoch > epoch for x in records[4:])
        if writing is not None:
            assert await writing == leader.answer("5")
        assert leader.answer("4") is None
        assert await leader.write("4", job("4")) == leader.answer("4")
        await leader.settled()
        state = ClusterState()
        for one in await log.read(after=0, num_max=100):
            fold(state, one)
        assert state_hash(leader._leader.state) == state_hash(state)


@virtual
async def test_followers_learn_of_changed_tokens(log: MemoryLog) -> None:
    asked: list[int] = []

    async def access(epoch: int) -> tuple[str, ...]:
        asked.append(epoch)
        return ("n9",)

    async with running(log, "a") as (first, task), running(log, "b", access) as (second, _):
        await first.write("x", job())
        await asyncio.sleep(1.0)
        assert asked == [0]
        await first.write("y", r.TokenChanged(act="created", name="t", token_role="view"))
        await asyncio.sleep(0.3)
        assert asked == [0, 0]
        task.cancel()
        while not second.leading:
            await asyncio.sleep(0.01)
        assert asked == [0, 0, second.epoch]
        assert second._expelled == {"n9"}


@virtual
async def test_an_older_version_does_not_continue_a_log_that_it_cannot_fold(log: MemoryLog) -> None:
    async with leading(log) as leader:
        seq = (await leader.settled()).seq
    epoch = await log.start_epoch("later")
    bodies = (
        r.EpochStarted(nonce="later", code="0.9.0", heart=DECIDER_VERSION + 1),
        UnknownBody(kind="Later", version=1, raw=b"\x80"),
    )
    await log.append(
        [
            Record(
                seq=seq + n,
                epoch=epoch,
                at_s=START_S + 9,
                occurred_s=START_S,
                source=source,
                source_seq=2 - n,
                cause=0,
                incident=0,
                body=body,
            )
            for n, source, body in zip((1, 2), ("leader/later", "heart"), bodies, strict=True)
        ],
        epoch=epoch,
        expect=seq,
        cursor="",
        acked={},
    )
    older = Coordinator(log, clock=virtual_clock, nonce="b", code="test", policy=POLICY)
    with pytest.raises(NewerLog, match=r"Later .* needs Unicron 0\.9\.0"):
        await older.run()
    assert len(await log.read(after=0, num_max=99)) == seq + 2


@pytest.mark.parametrize("outcome", ["lost", "applied", "unavailable"])
def test_a_lost_reply_neither_loses_nor_repeats_a_record(outcome: Outcome) -> None:
    async def main() -> None:
        log = MemoryLog(virtual_clock)
        async with leading(log) as leader:
            left = [outcome, outcome, outcome]
            log.fault = lambda call: left.pop() if call == "append" and left else "done"
            await log.send([reported(1, joined())])
            seq = await leader.write("x", job())
            records = await until(log, "StartRank")
            assert records[seq - 1].kind == "TaskSubmitted"
            assert kinds(records).count("TaskSubmitted") == kinds(records).count("NodeJoined") == 1
            assert kinds(records).count("EpochStarted") == 1, "the same epoch continues"

    virtual_time.run(main())


@virtual
async def test_an_unreachable_log_is_waited_for(log: MemoryLog) -> None:
    async with leading(log) as leader:
        log.fault = lambda call: "unavailable"
        await asyncio.sleep(20.0)
        with pytest.raises(Unavailable):
            await leader.settled()
        with pytest.raises(Unavailable):
            await leader.write("x", job())
        log.fault = lambda call: "done"
        await asyncio.sleep(5.0)
        assert await leader.write("x", job()) == 3


@virtual
async def test_the_state_is_shown_only_after_the_append(log: MemoryLog) -> None:
    async with leading(log) as leader:
        append, release = log.append, asyncio.Event()

        async def slow(*args: Any, **named: Any) -> None:
            await release.wait()
            await append(*args, **named)

        log.append = slow  # type: ignore[method-assign]
        write = asyncio.create_task(leader.write("x", job()))
        await asyncio.sleep(1.0)
        assert not write.done()
        assert leader.seq == 2
        view = asyncio.create_task(leader.settled())
        await asyncio.sleep(1.0)
        assert not view.done(), "the state was shown while an append was under way"
        release.set()
        assert await write == (await view).tasks[3].id == 3


@virtual
async def test_a_deadline_waits_for_the_backlog(log: MemoryLog) -> None:
    async with leading(log, policy=Policy(start_s_max=30.0, silence_s_max=1e6)) as leader:
        await log.send([reported(1, joined())])
        task = await leader.write("x", job())
        take = log.take

        async def no_reports(*, after: str, num_max: int, wait_s: float) -> Batch:
            if wait_s > 0:
                await asyncio.sleep(8.0)
                return Batch(entries=(), is_whole=True)
            return await take(after=after, num_max=num_max, wait_s=wait_s)

        log.take = no_reports  # type: ignore[method-assign]
        await asyncio.sleep(20.0)
        ready = r.RankReady(
            task=task,
            rank=0,
            attempt=1,
            endpoint="h:1",
            num_params=1,
            state_bytes=1,
            iteration_flops=1.0,
            data_digest="",
        )
        await log.send(
            [
                reported(
                    2, r.RankStarted(task=task, rank=0, attempt=1, node="n1", pid=5, log_path="")
                ),
                reported(3, ready),
            ]
        )
        records = await until(log, "Reconfigure")
        assert "DeadlineReached" not in kinds(records)


@virtual
async def test_a_deadline_is_a_record(log: MemoryLog) -> None:
    async with leading(log, policy=Policy(start_s_max=30.0, silence_s_max=1e6)) as leader:
        await log.send([reported(1, joined())])
        await leader.write("x", job())
        records = await until(log, "DeadlineReached")
    reached = next(x for x in records if x.kind == "DeadlineReached")
    ordered = next(x for x in records if x.kind == "StartRank")
    assert 30.0 <= reached.at_s - ordered.at_s < 30.1
    assert reached.source == "leader/a"


@virtual
async def test_an_ended_task_leaves_the_state_at_its_time(log: MemoryLog) -> None:
    """Also across a change of leader: the time counts from the task's end."""
    policy = Policy(ended_keep_s=100.0, silence_s_max=1e6)
    async with leading(log, policy=policy) as leader:
        task = await leader.write("x", job())
        other = await leader.write("y", job("other"))
        await leader.write("z", r.TaskCancelRequested(task=task, reason=""))
        await asyncio.sleep(60.0)
        assert (await leader.settled()).tasks.keys() == {task, other}
    async with leading(log, "b", policy=policy) as leader:
        records = await until(log, "DeadlineReached")
        assert (await leader.settled()).tasks.keys() == {other}
        await asyncio.sleep(200.0)
        records = await log.read(after=0, num_max=999)
        shown = state_hash(await leader.settled())
    ended = next(x for x in records if x.kind == "TaskEnded")
    reached = [x for x in records if x.kind == "DeadlineReached"]
    assert len(reached) == 1
    assert 100.0 <= reached[0].at_s - ended.at_s < 101.5
    verdict = verify(records)
    assert (verdict.ok, verdict.state_hash) == (True, shown), verdict.words


@virtual
async def test_time_never_goes_back_with_a_slower_clock(log: MemoryLog) -> None:
    policy = Policy(start_s_max=30.0, silence_s_max=1e6)
    async with leading(log, "a", policy=policy) as leader:
        await log.send([reported(1, joined())])
        await leader.write("x", job())
    async with leading(log, "b", policy=policy, clock=lambda: virtual_clock() - 10_000.0):
        records = await until(log, "DeadlineReached")
    reached = next(x for x in records if x.kind == "DeadlineReached")
    started = [x for x in records if x.kind == "EpochStarted"][-1]
    assert 30.0 <= reached.at_s - started.at_s < 31.0


@virtual
async def test_a_leader_whose_clock_is_a_day_ahead_ends_nothing(log: MemoryLog) -> None:
    """Neither a deadline nor a lease passes by the difference of two clocks, either way."""
    policy = Policy(start_s_max=30.0)
    async with leading(log, "a", policy=policy) as leader:
        await log.send([reported(1, joined())])
        await log.beat("n1", 1)
        await leader.write("x", job())
    for nonce, ahead_s in (("b", 86_400.0), ("c", -3_600.0)):
        async with leading(
            log, nonce, policy=policy, clock=lambda ahead_s=ahead_s: virtual_clock() + ahead_s
        ):
            for _ in range(10):
                await log.beat("n1", 1)
                await asyncio.sleep(1.0)
    records = await log.read(after=0, num_max=99)
    assert not {"NodeUnreachable", "DeadlineReached", "StopRank"} & {*kinds(records)}
    assert [x.at_s for x in records] == sorted(x.at_s for x in records)


def test_the_clock_of_a_control_plane_does_not_follow_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, begun_s = steady_clock(), time.time()
    for step_s in (-3_600.0, 86_400.0):
        monkeypatch.setattr(time, "time", lambda step_s=step_s: begun_s + step_s)
        assert 0.0 <= clock() - begun_s < 60.0


async def test_a_slow_server_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """It stands still for longer than a call may take, and for less; clients repeat requests."""
    server = embedded_server.start(tmp_path)
    log = RedisLog(server.url, "slow", Identities(bytes(SECRET_BYTES), "slow").key)
    try:
        async with leading(log, clock=real_clock, limits=Limits(call_s_max=1.0)) as leader:
            answers: list[int] = []

            async def write(key: str) -> int:
                while True:
                    with suppress(Unavailable):
                        return await leader.write(key, job())
                    await asyncio.sleep(0.1)

            for number, pause_ms in enumerate((200, 2_000, 200, 2_000)):
                with Redis.from_url(server.url) as client:
                    client.execute_command("CLIENT", "PAUSE", str(pause_ms), "ALL")
                answers += await asyncio.wait_for(
                    asyncio.gather(*(write(f"{number}-{each}") for each in range(3))), 60.0
                )
            records = await log.read(after=0, num_max=999)
        assert [records[seq - 1].source for seq in answers] == [
            f"operator/{number}-{each}" for number in range(4) for each in range(3)
        ]
        assert kinds(records).count("TaskSubmitted") == 12
    finally:
        await log.close()
        server.stop(grace_s=1.0)


@virtual
async def test_silence_and_its_end_are_reported(log: MemoryLog) -> None:
    async with leading(log):
        await log.send([reported(1, joined())])
        for _ in range(20):
            await log.beat("n1", 1)
            await asyncio.sleep(1.0)
        assert "NodeUnreachable" not in kinds(await log.read(after=0, num_max=99))
        records = await until(log, "NodeUnreachable")
        unreachable = next(x for x in records if x.kind == "NodeUnreachable")
        assert 24.0 < unreachable.at_s - START_S < 27.0
        await log.beat("n1", 1)
        await until(log, "NodeReachable")


@virtual
async def test_a_new_leader_grants_a_full_lease(log: MemoryLog) -> None:
    async with leading(log, "a"):
        await log.send([reported(1, joined())])
        await log.beat("n1", 1)
        await until(log, "NodeJoined")
    await asyncio.sleep(100.0)
    async with leading(log, "b"):
        await asyncio.sleep(4.0)
        assert "NodeUnreachable" not in kinds(await log.read(after=0, num_max=99))
        await until(log, "NodeUnreachable", s_max=3.0)


@virtual
async def test_a_leader_that_reads_no_heartbeats_suspects_no_node(log: MemoryLog) -> None:
    async with leading(log):
        await log.send([reported(1, joined())])
        await log.beat("n1", 1)
        await asyncio.sleep(2.0)
        log.fault = lambda call: "unavailable" if call in ("beats", "beat") else "done"
        await asyncio.sleep(30.0)
        log.fault = lambda call: "done"
        await asyncio.sleep(3.0)
        assert "NodeUnreachable" not in kinds(await log.read(after=0, num_max=99))


@virtual
async def test_followers_see_every_record_once(log: MemoryLog) -> None:
    async with leading(log, "a") as first:
        await first.write("x", job("one"))
    seen: list[int] = []
    async with leading(log, "b") as second:

        async def follow() -> None:
            async for page in second.tail.follow(1):
                seen.extend(record.seq for record in page)

        following = asyncio.create_task(follow())
        task = await second.write("y", job("two"))
        await second.write("z", r.TaskCancelRequested(task=task))
        await asyncio.sleep(1.0)
        following.cancel()
    assert seen == list(range(2, await log.last_seq() + 1))


def real_clock() -> float:
    return time.time()


def test_on_a_real_server_a_report_wakes_the_leader(redis_log: Any) -> None:
    async def main() -> None:
        async with redis_log() as log, redis_log() as agent:
            async with leading(log, "a", clock=real_clock) as leader:
                await log.admit({"n1": 1})
                await agent.send([reported(1, joined())])
                await until(agent, "NodeJoined", s_max=10.0)
                spans: list[float] = []
                for number in range(2, 22):
                    began_s = time.perf_counter()
                    await agent.send(
                        [
                            reported(
                                number,
                                r.RankStarted(
                                    task=9, rank=0, attempt=1, node="n1", pid=1, log_path=""
                                ),
                            )
                        ]
                    )
                    while leader.seq < number + 2:
                        await asyncio.sleep(0.0005)
                    spans.append(time.perf_counter() - began_s)
                # The report wakes the leader, which does not wait for the end of its blocking read.
                assert sorted(spans)[10] < Limits().take_wait_s / 5, f"{spans}"
                seq = await leader.write("x", job())
                orders = await agent.orders("n1", after="0-0", wait_s=5.0)
                assert [o.record.kind for o in orders] == ["StartRank"]
                before = state_hash(await leader.settled())
            async with leading(log, "b", clock=real_clock) as leader:
                assert await leader.write("x", job()) == seq
                assert state_hash(await leader.settled()) != before, "the state includes the epoch"
                again = await agent.orders("n1", after=orders[-1].cursor, wait_s=5.0)
                assert [o.record.seq for o in again] == [o.record.seq for o in orders]

    asyncio.run(asyncio.wait_for(main(), 30))


def test_real_server_dies_and_returns(tmp_path: Path) -> None:
    async def main() -> None:
        server = embedded_server.start(tmp_path)
        log = RedisLog(server.url, "dying", Identities(bytes(SECRET_BYTES), "dying").key)
        try:
            async with leading(log, clock=real_clock) as leader:
                first = await leader.write("x", job())
                server.stop(grace_s=5.0)
                waiting = asyncio.create_task(leader.write("y", job()))
                await asyncio.sleep(0.3)
                assert not waiting.done()
                server = embedded_server.start(tmp_path)
                second = await waiting
                records = await log.read(after=0, num_max=99)
                assert [records[s - 1].kind for s in (first, second)] == ["TaskSubmitted"] * 2
                assert kinds(records).count("TaskSubmitted") == 2
        finally:
            await log.close()
            server.stop(grace_s=1.0)

    asyncio.run(asyncio.wait_for(main(), 40))


@virtual
async def test_a_refused_stop_of_an_unstarted_rank_ends_the_task(log: MemoryLog) -> None:
    async with leading(log, policy=Policy(silence_s_max=1e6)) as leader:
        await log.send([reported(1, joined())])
        task = await leader.write("x", job())
        await until(log, "StartRank")
        await leader.write("y", r.TaskCancelRequested(task=task))
        stop = next(x for x in await until(log, "StopRank") if x.kind == "StopRank")
        await log.send([reported(2, r.OrderRefused(node="n1", order=stop.seq, why="no such rank"))])
        records = await until(log, "TaskEnded")
        assert kinds(records).count("StopRank") == 1
        assert not (await leader.settled()).nodes["n1"].occupants


# --- outages -------------------------------------------------------------------------------------
def outages(records: list[Record]) -> list[r.OutageEnded]:
    return [record.body for record in records if isinstance(record.body, r.OutageEnded)]


def progress(number: int, occurred_s: float) -> Report:
    body = r.TaskProgressed(
        task=9,
        generation=1,
        first_iteration=4,
        losses=(1.0, 1.0, 1.0),
        step_s=(0.1, 0.1, 0.1),
        micro_batches=1,
        rate_flops=1.0,
    )
    return Report(source="n1/1", source_seq=number, occurred_s=occurred_s, body=body)


@virtual
async def test_an_outage_of_the_server_is_a_record_with_what_waited(log: MemoryLog) -> None:
    async with leading(log) as leader:
        await log.send([reported(1, joined())])
        await asyncio.sleep(10.0)
        began_s = virtual_clock()
        log.fault = lambda call: "unavailable"
        await asyncio.sleep(60.0)
        assert re.fullmatch(
            r"nothing is acknowledged since \d{4}-\S+Z \(6\d s\): .* cannot be "
            "reached; ranks train on, their reports wait",
            leader.away,
        )
        with pytest.raises(Unavailable, match="nothing is acknowledged since"):
            await leader.settled()
        log.fault = lambda call: "done"
        ended_s = virtual_clock()
        await asyncio.sleep(3.0)
        assert leader.away == ""
        await log.send(
            [progress(2, began_s + 30.0), progress(3, began_s + 50.0), progress(4, ended_s + 5.0)]
        )
        (one,) = outages(await until(log, "OutageEnded"))
        assert (one.what, one.num_reports, one.num_iterations) == ("server", 2, 6)
        assert began_s - 1.5 < one.since_s <= began_s
        assert ended_s <= one.since_s + one.length_s < ended_s + 3.1
        assert "cannot be reached" in one.why
        await asyncio.sleep(30.0)
        assert len(outages(await log.read(after=0, num_max=999))) == 1
        assert (await leader.settled()).outages == [one]


@virtual
async def test_what_the_server_cannot_keep_is_not_acknowledged(log: MemoryLog) -> None:
    """It answers, and appends: only the check between two appends finds it."""
    async with leading(log) as leader:
        await asyncio.sleep(5.0)
        log.fault = lambda call: "unavailable" if call == "check_durable" else "done"
        await asyncio.sleep(5.0)
        assert "check_durable" in leader.away
        with pytest.raises(Unavailable):
            await leader.write("x", job())
        log.fault = lambda call: "done"
        assert [one.what for one in outages(await until(log, "OutageEnded"))] == ["server"]
        assert leader.answer("x") is not None, "it had waited"


@pytest.mark.parametrize(("follows", "what"), [(False, "control plane"), (True, "leader")])
def test_the_absence_of_a_leader_is_a_record_of_the_next_epoch(follows: bool, what: str) -> None:
    """`follows`: the next leader was there already when the last one went."""

    async def main() -> None:
        log = MemoryLog(virtual_clock)
        next_one = None
        async with leading(log, "a"):
            await asyncio.sleep(2.0)
            if follows:
                next_one = Coordinator(
                    log, clock=virtual_clock, nonce="b", code="test", policy=POLICY
                )
            await asyncio.sleep(8.0)
        gone_s = virtual_clock() - LEASE_S
        await asyncio.sleep(100.0)
        next_one = next_one or Coordinator(
            log, clock=virtual_clock, nonce="b", code="test", policy=POLICY
        )
        task = asyncio.create_task(next_one.run())
        (one,) = outages(await until(log, "OutageEnded"))
        assert (one.what, one.num_reports) == (what, 0)
        assert gone_s - 1.5 < one.since_s <= gone_s
        assert one.since_s + one.length_s == pytest.approx(gone_s + LEASE_S + 100.0, abs=1.0)
        next_one.stop()
        await task

    virtual_time.run(main())


@virtual
async def test_a_leader_killed_before_the_record_hides_no_outage(log: MemoryLog) -> None:
    async with leading(log, "a"):
        await asyncio.sleep(10.0)
    gone_s = virtual_clock() - LEASE_S
    await asyncio.sleep(50.0)
    async with leading(log, "b"):
        await asyncio.sleep(2.0)
    assert outages(await log.read(after=0, num_max=99)) == []
    async with leading(log, "c"):
        (one,) = outages(await until(log, "OutageEnded"))
    assert gone_s - 1.5 < one.since_s <= gone_s
    assert one.length_s > 50.0


async def test_a_follower_that_takes_over_records_the_leaders_absence(
    redis_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real server, which tells each sign of life only once."""
    monkeypatch.setattr("unicron.control_plane.service.outages.SETTLE_S", 0.1)
    async with redis_log() as log, redis_log() as other:
        successor = Coordinator(other, clock=real_clock, nonce="b", code="test", policy=POLICY)
        async with leading(log, "a", clock=real_clock):
            task = asyncio.create_task(successor.run())
            await asyncio.sleep(2.5)
        (one,) = outages(await until(other, "OutageEnded"))
        task.cancel()
    assert (one.what, one.num_reports) == ("leader", 0)
    assert 1.0 <= one.length_s < LEASE_S + 5.0


@virtual
async def test_a_leader_that_did_not_run_says_so(log: MemoryLog) -> None:
    """SIGSTOP: its clock jumps between two lines."""
    jump_s = 0.0
    async with leading(log, clock=lambda: virtual_clock() + jump_s):
        await asyncio.sleep(5.0)
        jump_s = 60.0
        (one,) = outages(await until(log, "OutageEnded"))
    assert (one.what, one.why) == ("control plane", "it did not run")
    assert 60.0 <= one.length_s < 63.0


@pytest.mark.parametrize("outcome", ["lost", "applied"])
def test_an_outage_is_recorded_once_also_if_the_reply_is_lost(outcome: Outcome) -> None:
    async def main() -> None:
        log = MemoryLog(virtual_clock)
        async with leading(log):
            log.fault = lambda call: "unavailable"
            await asyncio.sleep(30.0)
            left = [outcome]
            log.fault = lambda call: left.pop() if call == "append" and left else "done"
            await until(log, "OutageEnded")
            await asyncio.sleep(30.0)
            assert not left
            assert len(outages(await log.read(after=0, num_max=99))) == 1

    virtual_time.run(main())


@virtual
async def test_a_server_that_hangs_is_away_before_its_calls_fail(log: MemoryLog) -> None:
    beats = log.beats

    async def hang(nodes: Sequence[str]) -> list[Heartbeat]:
        await asyncio.sleep(7.0)
        return await beats(nodes)

    async with leading(log) as leader:
        await asyncio.sleep(3.0)
        log.beats = hang  # type: ignore[method-assign]
        await asyncio.sleep(6.0)
        assert "the log's server does not answer" in leader.away
        log.beats = beats  # type: ignore[method-assign]
        (one,) = outages(await until(log, "OutageEnded"))
        assert leader.away == ""
    assert (one.what, one.why) == ("server", "it did not answer")
    assert 6.0 < one.length_s < 10.0


@virtual
async def test_a_moment_without_the_server_is_no_outage(log: MemoryLog) -> None:
    async with leading(log):
        await asyncio.sleep(5.0)
        left = ["check_durable"]
        log.fault = lambda call: "unavailable" if left and left.pop() == call else "done"
        await asyncio.sleep(20.0)
        assert outages(await log.read(after=0, num_max=99)) == []


async def test_a_replica_that_is_gone_stops_the_acknowledgements_and_not_the_log(
    tmp_path: Path,
) -> None:
    """With real servers: nothing is answered or ordered meanwhile, and nothing is lost after."""
    policy = Policy(replicas_min=1)
    with replicated_servers.replicated(tmp_path) as (primary, replica):
        log = RedisLog(
            primary.url, "gone", Identities(bytes(SECRET_BYTES), "gone").key, policy=policy
        )
        agent = RedisLog(primary.url, "gone", Identities(bytes(SECRET_BYTES), "gone").key)
        await log.check()
        coordinator = Coordinator(log, clock=time.time, nonce="a", code="test", policy=policy)
        task = asyncio.create_task(coordinator.run())
        while not coordinator.leading:
            await asyncio.sleep(0.1)
        await log.admit({"n1": 1})
        await agent.send([reported(1, joined())])
        await until(log, "NodeJoined")
        started = next(x for x in await log.read(after=0, num_max=9) if x.kind == "EpochStarted")
        assert isinstance(started.body, r.EpochStarted)
        assert (started.body.durability, started.body.replicas_min) == ("always", 1)
        replica.process.send_signal(signal.SIGSTOP)
        write = asyncio.create_task(coordinator.write("x", job()))
        deadline_s = time.monotonic() + 60.0
        while "0 of 1 replicas" not in coordinator.away:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)
        assert not write.done() or write.exception()
        assert await agent.orders("n1", after="0-0", wait_s=0) == []
        replica.process.send_signal(signal.SIGCONT)
        (one,) = outages(await until(log, "OutageEnded"))
        assert "0 of 1 replicas" in one.why
        with suppress(Unavailable):
            assert await write == coordinator.answer("x")
        assert coordinator.answer("x")
        assert [x.record.kind for x in await agent.orders("n1", after="0-0", wait_s=0)]
        coordinator.stop()
        await task
        await log.close()
        await agent.close()
