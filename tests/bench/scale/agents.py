"""A process of the scale bench that runs many agents with simulated ranks.

Each agent joins, sends heartbeats and reports, and reads its orders by the product's own code. Only
the processes that an order concerns are simulated: they answer at once, as ranks report.

The bench writes its options to stdin, then commands, one a line: `join`, `count`, `kill NODE TASK
RANK`, `lose NODE,NODE,...`. The answer to `count` is one number, the heartbeats so far.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import structlog
from msgspec import Struct
from unicron.events.errors import Ambiguous, Unavailable, UnicronError
from unicron.events.log import redis_streams
from unicron.events.log.identity import only_key
from unicron.events.log.redis_streams import RedisLog
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.order_format import ORDER_FORMAT_VERSION
from unicron.events.records.types import Body, Labels, Member, NodeStores
from unicron.events.timing import BEAT_S
from unicron.workers.agent.agent import ORDERS_WAIT_S
from unicron.workers.agent.delivery.join import join
from unicron.workers.agent.delivery.log_link import LogLink
from unicron.workers.agent.delivery.outbox import Outbox
from unicron.workers.agent.delivery.spool import Spool

PROGRESS_S, REPORT_S = 1.0, 60.0
"""As in workers/training/member.py and checkpoint/memory_checkpoint.py, which load torch."""
JOIN_S_MAX = REPLY_S_MAX = CALL_S_MAX = 600.0
"""The agents share their cores, so that an answer is read late."""
STEP_S = 1.0


class Options(Struct, frozen=True, kw_only=True):
    """The agents of one process, and when iteration 0 began for all ranks."""

    url: str
    token: str
    first: int
    num: int
    num_slots: int
    origin_s: float
    beat_s: float = BEAT_S


class Task(Struct):
    """What an agent knows of a task with ranks on its node."""

    attempts: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """By rank on this node: its process."""
    generation: int = 0
    members: tuple[Member, ...] = ()
    stores: tuple[str, ...] = ()
    has_failed: bool = False
    """Whether the ranks here have reported that a collective of this generation failed."""
    loops: list[asyncio.Task[None]] = msgspec.field(default_factory=list[asyncio.Task[None]])

    def here(self, node: str) -> Iterator[tuple[int, Member]]:
        """The members on the node, with their positions."""
        return (
            (place, one)
            for place, one in enumerate(self.members)
            if one.node == node and self.attempts.get(one.rank) == one.attempt
        )

    def end_loops(self) -> None:
        for loop in self.loops:
            loop.cancel()
        self.loops.clear()


class Agent:
    """One agent; `run` ends when its node is lost."""

    def __init__(self, options: Options, number: int) -> None:
        self.name = f"n{number:05}"
        self._options = options
        self._incarnation = int(time.time() * 1000)
        self._tasks: dict[int, Task] = {}
        self._link = LogLink()
        self.num_beats = 0

    async def run(self) -> None:
        """Join and serve."""
        joined = await join(
            self._options.url,
            self._options.token,
            node=self.name,
            host="127.0.0.1",
            incarnation=self._incarnation,
            labels=Labels(),
            s_max=JOIN_S_MAX,
        )
        self._log = RedisLog(
            joined.redis_url, joined.cluster, only_key(self.name, bytes.fromhex(joined.key))
        )
        source = f"{self.name}/{self._incarnation}"
        await self._link.retry(lambda: self._log.acked(source), CALL_S_MAX)
        self._outbox = Outbox(self._log, self._link, Spool(source, self.name, time.time))
        self._outbox.put(
            r.NodeJoined(
                node=self.name,
                incarnation=self._incarnation,
                host="127.0.0.1",
                pid=1,
                num_slots=self._options.num_slots,
                keeper=f"127.0.0.1:{self.name[1:]}",
                order_format=ORDER_FORMAT_VERSION,
            )
        )
        try:
            async with asyncio.TaskGroup() as self._group:
                for loop in (self._outbox.run(), self._beat(), self._follow()):
                    self._group.create_task(loop)
        finally:
            await self._log.close()

    async def _beat(self) -> None:
        while True:
            with suppress(Unavailable, Ambiguous):
                await self._link.call(
                    lambda: self._log.beat(self.name, self._incarnation), CALL_S_MAX
                )
                self.num_beats += 1
            await asyncio.sleep(self._options.beat_s)

    async def _follow(self) -> None:
        cursor, last = "0-0", 0
        while True:
            for order in await self._link.retry(
                partial(self._log.orders, self.name, after=cursor, wait_s=ORDERS_WAIT_S),
                ORDERS_WAIT_S + CALL_S_MAX,
            ):
                cursor = order.cursor
                if order.record.seq > last:
                    last = order.record.seq
                    self._execute(order.record.seq, order.record.body)

    # --- the ranks --------------------------------------------------------------------------------
    def _execute(self, seq: int, order: Body) -> None:
        task = self._tasks.setdefault(getattr(order, "task", 0), Task())
        match order:
            case o.StartRank():
                task.attempts[order.rank] = order.attempt
                self._start(order)
            case o.StopRank():
                self._end(task, order.task, order.rank, order.attempt, signal=15)
            case o.Quiesce() if order.generation == task.generation:
                self._quiesce(task, order)
            case o.Reconfigure():
                self._reconfigure(task, order)
            case o.SetCheckpointStores() if order.generation == task.generation:
                task.stores = self._stores(order.stores)
            case o.Resume() if order.generation == task.generation:
                self._resume(task, order)
            case o.PublishCheckpoint():
                self._outbox.put(r.CheckpointPublished(task=order.task, order=seq, path=order.path))
            case _:
                pass

    def _start(self, order: o.StartRank) -> None:
        self._outbox.put(
            r.RankStarted(
                task=order.task,
                rank=order.rank,
                attempt=order.attempt,
                node=self.name,
                pid=1000 + order.slot.index,
                log_path=f"{order.rank}.log",
            )
        )
        self._outbox.put(
            r.RankReady(
                task=order.task,
                rank=order.rank,
                attempt=order.attempt,
                endpoint=f"127.0.0.1:{20_000 + order.rank}",
                num_params=10**9,
                state_bytes=10**9,
                iteration_flops=1e15,
                data_digest="d",
            )
        )

    def _quiesce(self, task: Task, order: o.Quiesce) -> None:
        task.end_loops()
        if order.mode == "now":
            self._fail(task, order.task)
        for _, one in task.here(self.name):
            if one.rank in order.ranks:
                self._outbox.put(
                    r.Quiesced(
                        task=order.task,
                        rank=one.rank,
                        attempt=one.attempt,
                        generation=order.generation,
                        step_version=self._iteration(),
                        micro_batches=(),
                        buckets_reduced=0,
                        num_buckets=1,
                    )
                )

    def _reconfigure(self, task: Task, order: o.Reconfigure) -> None:
        task.end_loops()
        task.generation, task.members, task.has_failed = order.generation, order.members, False
        task.stores = self._stores(order.stores)
        for _, one in task.here(self.name):
            self._outbox.put(
                r.Reconfigured(
                    task=order.task,
                    rank=one.rank,
                    attempt=one.attempt,
                    generation=order.generation,
                    step_version=self._iteration(),
                    kept_micro_batches=(),
                    remaining_micro_batches=(),
                    reassigned_micro_batches=(),
                    source=one.rank,
                    received_bytes=0,
                    down_s=0.1,
                    up_s=0.1,
                    settle_s=0.1,
                )
            )

    def _stores(self, stores: Sequence[NodeStores]) -> tuple[str, ...]:
        return next((one.stores for one in stores if one.node == self.name), ())

    def _resume(self, task: Task, order: o.Resume) -> None:
        loops = [self._store(task, order.task, place, one) for place, one in task.here(self.name)]
        if task.members and task.members[0].node == self.name:
            loops.append(self._progress(task, order))
        task.loops += [self._group.create_task(loop) for loop in loops]

    async def _progress(self, task: Task, order: o.Resume) -> None:
        """The first member reports the iterations of each second."""
        done = order.progress_from
        while True:
            await asyncio.sleep(PROGRESS_S)
            num = min(self._iteration() - done, 10)
            first, done = self._iteration() - num, self._iteration()
            if num > 0:
                self._outbox.put(
                    r.TaskProgressed(
                        task=order.task,
                        generation=order.generation,
                        first_iteration=first,
                        losses=(2.5,) * num,
                        step_s=(STEP_S,) * num,
                        rate_flops=1e15,
                        micro_batches=1,
                    )
                )

    async def _store(self, task: Task, number: int, place: int, one: Member) -> None:
        """A member reports its share of in-memory checkpoints at first, then every REPORT_S."""
        pause_s = random.uniform(0.0, REPORT_S)  # as if the ranks had started at different times
        while True:
            for node in task.stores:
                self._outbox.put(
                    r.MemoryCheckpointStored(
                        task=number,
                        rank=one.rank,
                        attempt=one.attempt,
                        generation=task.generation,
                        step_version=self._iteration(),
                        node=node,
                        copy_bytes=10**9,
                        checksum="crc32:00000000",
                        share=place,
                        num_shares=len(task.members),
                    )
                )
            await asyncio.sleep(pause_s)
            pause_s = REPORT_S

    def _iteration(self) -> int:
        return int((time.time() - self._options.origin_s) / STEP_S)

    def _fail(self, task: Task, number: int) -> None:
        """The collectives of all ranks here fail."""
        for _, one in task.here(self.name) if not task.has_failed else ():
            self._outbox.put(
                r.CollectiveFailed(
                    task=number,
                    rank=one.rank,
                    attempt=one.attempt,
                    generation=task.generation,
                    iteration=self._iteration(),
                    error="connection closed by peer",
                )
            )
        task.has_failed = True

    def _end(self, task: Task, number: int, rank: int, attempt: int, signal: int) -> None:
        if task.attempts.get(rank) == attempt:
            del task.attempts[rank]
            self._outbox.put(
                r.RankExited(
                    task=number, rank=rank, attempt=attempt, pid=1, exit_code=None, signal=signal
                )
            )

    def kill(self, number: int, rank: int) -> None:
        """The process of a rank ends."""
        task = self._tasks[number]
        self._end(task, number, rank, task.attempts[rank], signal=9)

    def notice_lost(self, nodes: set[str]) -> None:
        """The ranks here lose peers."""
        for number, task in self._tasks.items():
            if any(member.node in nodes for member in task.members):
                task.end_loops()
                self._fail(task, number)


async def main() -> None:
    """Run the agents until stdin ends."""
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    options = msgspec.json.decode(await commands.readline(), type=Options)
    agents = [
        Agent(options, number) for number in range(options.first, options.first + options.num)
    ]
    named = {agent.name: agent for agent in agents}
    serving: dict[str, asyncio.Task[None]] = {}
    print("ready", flush=True)
    while line := (await commands.readline()).decode().split():
        match line:
            case ["join"]:
                serving |= {agent.name: asyncio.create_task(serve(agent)) for agent in agents}
            case ["count"]:
                print(sum(agent.num_beats for agent in agents), flush=True)
            case ["kill", node, task, rank]:
                if node in named:
                    named[node].kill(int(task), int(rank))
            case ["lose", names]:
                lost = set(names.split(","))
                for name in lost & named.keys():
                    serving.pop(name).cancel()
                    del named[name]
                for agent in named.values():
                    agent.notice_lost(lost)
            case _:
                raise AssertionError(line)


async def serve(agent: Agent) -> None:
    """Run the agent; say why it ends by itself."""
    try:
        await agent.run()
    except (UnicronError, ExceptionGroup) as error:
        print(f"{agent.name}: {error!r}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger("error"),
    )
    redis_streams.REPLY_S_MAX = REPLY_S_MAX
    asyncio.run(main())
