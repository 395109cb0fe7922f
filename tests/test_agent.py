"""The agent on real parts: processes, pipes, a private server; a small leader writes the log."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from unicron.events.errors import Ambiguous, Unavailable
from unicron.events.log import LogPort
from unicron.events.memory_log import MemoryLog
from unicron.events.orders import (
    Member,
    Order,
    PublishCheckpoint,
    Quiesce,
    Reconfigure,
    Resume,
    Slot,
    StartRank,
    StopRank,
)
from unicron.events.records import Record, Report
from unicron.events.reports import (
    Body,
    CheckpointPublished,
    NodeJoined,
    NodeLeft,
    OrderRefused,
    Quiesced,
    RankErrored,
    RankExited,
    RankReady,
    RankStarted,
    ReportsLost,
    TaskProgressed,
)
from unicron.events.spec import JobSpec, parse
from unicron.workers.agent import linux
from unicron.workers.agent.agent import Agent
from unicron.workers.agent.ranks import Node
from unicron.workers.agent.spool import Spool

LIMIT_S = 20.0
T = TypeVar("T")
B = TypeVar("B", bound=Body)

RANK = '''
"""A rank that speaks the real wire: answers what it is told, and acts on its spec's seed."""
import os, signal, socket, sys, time
from unicron.events.orders import Quiesce, Reconfigure, Resume, StartRank
from unicron.events.reports import Quiesced, RankErrored, RankReady, TaskProgressed, NodeLeft
from unicron.workers.wire import Frame, Unpacker, pack

link = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
unpacker = Unpacker()
order = None
def say(body):
    link.sendall(pack(Frame(body=body, at_s=1234.5)))
while data := link.recv(65536):
    for frame in unpacker.feed(data):
        body = frame.body
        print(type(body).__name__, frame.seq, frame.epoch, flush=True)
        if isinstance(body, StartRank):
            order = body
            ids = dict(task=order.task, rank=order.rank, attempt=order.attempt)
            say(RankReady(**ids, endpoint=os.environ["UNICRON_HOST"] + ":1", num_params=1,
                          state_bytes=1, iteration_flops=1.0,
                          data_digest=os.environ["OMP_NUM_THREADS"]))
        elif isinstance(body, Quiesce):
            say(Quiesced(**ids, generation=body.generation, step_version=0, micro_batches=(),
                         buckets_reduced=0, num_buckets=1))
        elif isinstance(body, Resume):
            seed = order.spec.train.seed
            if seed == 1:      # says much, then dies at once
                for i in range(500):
                    say(TaskProgressed(task=order.task, generation=1, first_iteration=i,
                                       losses=(1.0,), step_s=(1.0,), rate_flops=1.0,
                                       micro_batches=1))
                say(RankErrored(**ids, generation=1, iteration=500, error="E", text="last words"))
                os.kill(os.getpid(), signal.SIGKILL)
            elif seed == 2:    # says what is not a rank's to say
                say(NodeLeft(node="n1", incarnation=1, reason="no"))
                time.sleep(60)
            elif seed == 3:
                link.sendall(b"\\xff" * 100)
                time.sleep(60)
'''


class Leader:
    """Takes reports into the log in the order of their sources, and gives orders. No heart."""

    def __init__(self, log: LogPort) -> None:
        self.log = log
        self.records: list[Record] = []
        self.last: dict[str, int] = {}
        self.epoch = 0
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        cursor = "0-0"
        while True:
            try:
                self.epoch = self.epoch or await self.log.start_epoch("test")
                batch = await self.log.take(after=cursor, num_max=100, wait_s=0.2)
                for report in batch.reports:
                    await self._take(report, batch.cursor)
                cursor = batch.cursor
            except (Unavailable, Ambiguous):
                await asyncio.sleep(0.05)

    async def _take(self, report: Report, cursor: str) -> None:
        last = self.last.get(report.source, 0)
        lost = isinstance(report.body, ReportsLost) and report.source_seq > last
        if report.source_seq == last + 1 or lost:
            await self._append(report.body, report.source, report.source_seq,
                               report.occurred_s, cursor)
            self.last[report.source] = report.source_seq

    async def _append(self, body: Body, source: str, source_seq: int, occurred_s: float,
                      cursor: str = "") -> Record:
        async with self._writing:
            record = Record(seq=len(self.records) + 1, epoch=self.epoch, at_s=0.0,
                            occurred_s=occurred_s, source=source, source_seq=source_seq, cause=0,
                            incident=0, body=body)
            await self.log.append([record], epoch=self.epoch, expect=record.seq - 1,
                                  cursor=cursor, acked={source: source_seq} if source_seq else {})
            self.records.append(record)
            return record

    async def order(self, order: Order) -> int:
        return (await self._append(order, "heart", 0, 0.0)).seq

    def all(self, kind: type[B]) -> list[B]:
        return [record.body for record in self.records if isinstance(record.body, kind)]

    async def wait(self, kind: type[B], num: int = 1) -> list[B]:
        """Until the log holds `num` of a kind."""
        return await until(lambda: found if len(found := self.all(kind)) >= num else None)


async def until(look: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + LIMIT_S
    while (found := look()) is None:
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)
    return found


class House:
    """A leader and an agent on one log, in this process; the agent's ranks are real processes."""

    def __init__(self, log: LogPort, state_dir: Path, **changes: object) -> None:
        script = state_dir / "rank.py"
        script.write_text(RANK)
        self.leader = Leader(log)
        self.node = msgspec.structs.replace(
            Node(name="n1", incarnation=7, cluster="c", host="127.0.0.9", num_slots=2,
                 state_dir=state_dir, rank_argv=(sys.executable, str(script))), **changes)
        self.stop = asyncio.Event()
        self.spool = Spool(self.node.source, self.node.name, time.time)
        self.agent = Agent(self.node, log, time.time, os.getpid(), spool=self.spool, left=[],
                           sweeps=False)
        self.serving: asyncio.Task[None] | None = None

    async def start(self, spec: JobSpec, rank: int = 0, **changes: object) -> int:
        order = StartRank(nodes=("n1",), task=1, rank=rank, attempt=1,
                          slot=Slot(node="n1", index=rank), spec=spec, num_seats=2,
                          host="127.0.0.1", port=4242, checkpoint="", incarnation=7)
        return await self.leader.order(msgspec.structs.replace(order, **changes))

    async def stop_rank(self, rank: int = 0, attempt: int = 1, grace_s: float = 5.0) -> int:
        return await self.leader.order(StopRank(nodes=("n1",), task=1, rank=rank, attempt=attempt,
                                                grace_s=grace_s, why="test"))


@asynccontextmanager
async def house(log: LogPort, state_dir: Path, **changes: object) -> AsyncIterator[House]:
    one = House(log, state_dir, **changes)
    leading = asyncio.create_task(one.leader.run())
    one.serving = asyncio.create_task(one.agent.run(one.stop))
    try:
        await one.leader.wait(NodeJoined)
        yield one
        one.stop.set()
        await asyncio.wait_for(one.serving, LIMIT_S)
    finally:
        for task in (one.serving, leading):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for started in one.leader.all(RankStarted):
            await until(lambda pid=started.pid: not alive(pid) or None)


def alive(pid: int) -> bool:
    proc = linux.read(pid)
    return proc is not None and proc.state not in "ZX"


def command(*argv: str) -> JobSpec:
    return parse({"apiVersion": "unicron/v1", "name": "job", "slots": {"max": 2},
                  "command": list(argv)})


def python(code: str) -> JobSpec:
    return command(sys.executable, "-c", code)


def train(seed: int) -> JobSpec:
    return parse({"apiVersion": "unicron/v1", "name": "gpt",
                  "train": {"iterations": 9, "output": "out", "seed": seed}})


def go(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 2 * LIMIT_S)

    asyncio.run(limited())


@pytest.fixture
def memory() -> MemoryLog:
    return MemoryLog(time.monotonic)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No process that a test's agent started outlives the test."""
    yield
    left = linux.end_marked(f"UNICRON_PROCESS={tmp_path}".encode())
    assert left == []


# --- how processes end --------------------------------------------------------------------------
@pytest.mark.parametrize(("code", "exit_code", "number"), [
    ("pass", 0, None), ("raise SystemExit(3)", 3, None),
    ("import os; os.abort()", None, signal.SIGABRT),
    ("import os; os.kill(os.getpid(), 9)", None, signal.SIGKILL)])
def test_exit_codes_and_signals(memory: MemoryLog, tmp_path: Path, code: str,
                                exit_code: int | None, number: int | None) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(python(code))
            (exited,) = await one.leader.wait(RankExited)
            (started,) = one.leader.all(RankStarted)
            assert (exited.exit_code, exited.signal) == (exit_code, number)
            assert exited.pid == started.pid
            assert not Path(f"/proc/{exited.pid}").exists()

    go(test)


def test_output_goes_to_a_file_and_its_tail_into_the_record(memory: MemoryLog,
                                                            tmp_path: Path) -> None:
    code = ("import os, sys; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK',"
            "'MASTER_ADDR', 'MASTER_PORT', 'UNICRON_TASK', 'UNICRON_ATTEMPT', 'UNICRON_HOST')));"
            "sys.stderr.write('x' * 9000 + 'the end')")

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(python(code), rank=1, attempt=4)
            (exited,) = await one.leader.wait(RankExited)
            assert len(exited.tail) == 4096
            assert exited.tail.endswith("the end")
            (started,) = one.leader.all(RankStarted)
            assert started.log_path == str(tmp_path / "logs/1-job/rank-1.attempt-4.log")
            text = Path(started.log_path).read_text()
            assert text.splitlines()[0] == "1 2 1 127.0.0.1 4242 1 4 127.0.0.9"

    go(test)


GRANDCHILDREN = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
children = [subprocess.Popen(sleep).pid,
            subprocess.Popen(sleep, start_new_session=True).pid]
open(sys.argv[1], "w").write(" ".join(map(str, children)))
if sys.argv[2] == "die":
    os._exit(1)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["die", "stay"])
def test_a_slot_is_free_only_when_grandchildren_are_gone(memory: MemoryLog, tmp_path: Path,
                                                         how: str) -> None:
    linux.adopt_orphans()
    note = tmp_path / "children"

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(command(sys.executable, "-c", GRANDCHILDREN, str(note), how))
            if how == "stay":
                await until(lambda: (note.exists() and note.read_text().count(" ")) or None)
                await one.stop_rank(grace_s=0.0)
            await one.leader.wait(RankExited)
            pids = [int(pid) for pid in note.read_text().split()]
            assert len(pids) == 2
            assert [pid for pid in pids if alive(pid)] == []

    go(test)


def test_stop_gives_grace_then_kills(memory: MemoryLog, tmp_path: Path) -> None:
    polite = "import signal, sys, time\nsignal.signal(15, lambda *a: sys.exit(7))\nprint('up')\n"
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\n"

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            for rank, code in enumerate((polite, deaf)):
                await one.start(python(code + "time.sleep(60)"), rank=rank)
            await one.leader.wait(RankStarted, 2)
            for started in one.leader.all(RankStarted):
                await until(lambda s=started: Path(s.log_path).read_text() or None)
            for rank in (0, 1):
                await one.stop_rank(rank, grace_s=0.3)
                await one.stop_rank(rank, grace_s=0.3)  # told twice
            by_rank = {e.rank: e for e in await one.leader.wait(RankExited, 2)}
            assert by_rank[0].exit_code == 7
            assert by_rank[1].signal == signal.SIGKILL
            await one.stop_rank(0)  # gone already: harmless
            assert one.leader.all(OrderRefused) == []

    go(test)


def test_a_stopped_process_ends_too(memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(python("import signal, time; signal.signal(15, print); print('up');"
                                   "time.sleep(60)"))
            (started,) = await one.leader.wait(RankStarted)
            await until(lambda: Path(started.log_path).read_text() or None)
            os.kill(started.pid, signal.SIGSTOP)
            await one.stop_rank(grace_s=0.2)
            (exited,) = await one.leader.wait(RankExited)
            assert exited.signal == signal.SIGKILL

    go(test)


# --- which orders are obeyed --------------------------------------------------------------------
def test_a_slot_is_used_by_one_at_a_time(memory: MemoryLog, tmp_path: Path) -> None:
    sleep = python("import time; time.sleep(60)")

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(sleep)
            await one.leader.wait(RankStarted)
            await one.start(sleep, task=2)            # waits for the slot
            await one.start(sleep, task=3)            # waits, and is stopped before it starts
            await one.leader.order(StopRank(nodes=("n1",), task=3, rank=0, attempt=1, grace_s=1.0,
                                            why="test"))
            (never,) = await one.leader.wait(RankExited)
            assert (never.task, never.pid, never.signal) == (3, 0, signal.SIGTERM)
            await one.stop_rank(grace_s=0.0)
            await one.leader.wait(RankStarted, 2)
            kinds = [(type(r.body).__name__, getattr(r.body, "task", 0)) for r in
                     one.leader.records if isinstance(r.body, RankStarted | RankExited)]
            assert kinds == [("RankStarted", 1), ("RankExited", 3), ("RankExited", 1),
                             ("RankStarted", 2)]

    go(test)


def test_a_higher_attempt_fences_the_lower(memory: MemoryLog, tmp_path: Path) -> None:
    sleep = python("import time; time.sleep(60)")

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(sleep, attempt=2)
            await one.leader.wait(RankStarted)
            await one.start(sleep, attempt=1)         # overtaken
            await one.start(sleep, attempt=3)
            await one.leader.wait(RankStarted, 2)
            assert [s.attempt for s in one.leader.all(RankStarted)] == [2, 3]
            assert [e.attempt for e in one.leader.all(RankExited)] == [2]

    go(test)


def test_refused_with_a_reason(memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            seqs = [await one.start(command("/no/such/program")),
                    await one.start(python("pass"), slot=Slot(node="n1", index=2)),
                    await one.start(python("pass"), slot=Slot(node="n2", index=0))]
            refused = await one.leader.wait(OrderRefused, 3)
            assert {r.order for r in refused} == set(seqs)
            assert any("/no/such/program" in r.why for r in refused)
            await one.start(python("pass"))           # the slot is free again
            await one.leader.wait(RankExited)

    go(test)


def test_orders_for_a_predecessor_start_nothing(memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        before = House(memory, tmp_path)
        leading = asyncio.create_task(before.leader.run())
        await until(lambda: before.leader.epoch or None)
        # One given before the agent joins, of no incarnation; one that races with its joining.
        await before.start(python("pass"), incarnation=0)
        await before.start(python("pass"), rank=1, incarnation=6)
        serving = asyncio.create_task(before.agent.run(before.stop))
        await before.leader.wait(NodeJoined)
        await before.start(python("pass"), rank=1, incarnation=6)
        await before.start(python("pass"), attempt=2)
        await before.leader.wait(RankExited)
        assert [(s.rank, s.attempt) for s in before.leader.all(RankStarted)] == [(0, 2)]
        before.stop.set()
        await serving
        leading.cancel()

    go(test)


def test_orders_written_anew_are_duplicates(memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(python("pass"))
            await one.leader.wait(RankExited)
            orders = [r for r in one.leader.records if isinstance(r.body, StartRank)]
            one.leader.epoch = await memory.start_epoch("again")
            await memory.rebuild_orders(orders, epoch=one.leader.epoch)
            await one.start(python("pass"), rank=1)
            await one.leader.wait(RankExited, 2)
            assert [s.rank for s in one.leader.all(RankStarted)] == [0, 1]

    go(test)


# --- the pipe -----------------------------------------------------------------------------------
def reconfigure(*members: int, generation: int = 1) -> Reconfigure:
    return Reconfigure(nodes=("n1",), task=1, generation=generation, store="x:1", dp=2,
                       checkpoint="", members=tuple(
                           Member(rank=rank, attempt=1, node="n1", endpoint="x:1")
                           for rank in members))


def test_a_training_rank_is_led_through_its_pipe(memory: MemoryLog, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            for rank in (0, 1):
                await one.start(train(0), rank=rank)
            ready = await one.leader.wait(RankReady, 2)
            assert {(r.endpoint, r.data_digest) for r in ready} == {("127.0.0.9:1", "1")}
            told = [r for r in one.leader.records if isinstance(r.body, RankReady)]
            assert {r.occurred_s for r in told} == {1234.5}
            await one.leader.order(reconfigure(0))
            resume = await one.leader.order(
                Resume(nodes=("n1",), task=1, generation=1, progress_from=0))
            quiesce = await one.leader.order(
                Quiesce(nodes=("n1",), task=1, generation=1, mode="now", ranks=(0,)))
            (quiesced,) = await one.leader.wait(Quiesced)
            assert quiesced.rank == 0
            logs = {s.rank: Path(s.log_path).read_text() for s in one.leader.all(RankStarted)}
            assert "Reconfigure" in logs[0]
            assert f"Resume {resume} 1" in logs[0]
            assert f"Quiesce {quiesce} 1" in logs[0]
            assert logs[1].split()[0] == "StartRank"
            assert len(logs[1].splitlines()) == 1, "what concerns another is not told"

    go(test)


def test_last_words_come_before_the_exit(memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(train(1))
            await one.leader.wait(RankReady)
            await one.leader.order(reconfigure(0))
            await one.leader.order(Resume(nodes=("n1",), task=1, generation=1, progress_from=0))
            await one.leader.wait(RankExited)
            bodies = [r.body for r in one.leader.records if r.source == "n1/7"]
            assert [p.first_iteration for p in bodies if isinstance(p, TaskProgressed)] == list(
                range(500))
            assert isinstance(bodies[-2], RankErrored)
            assert isinstance(bodies[-1], RankExited)

    go(test)


@pytest.mark.parametrize("seed", [2, 3])
def test_a_rank_that_speaks_nonsense_is_ended(memory: MemoryLog, tmp_path: Path,
                                              seed: int) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            await one.start(train(seed))
            await one.leader.wait(RankReady)
            await one.leader.order(reconfigure(0))
            await one.leader.order(Resume(nodes=("n1",), task=1, generation=1, progress_from=0))
            (exited,) = await one.leader.wait(RankExited)
            assert exited.signal == signal.SIGKILL
            assert one.leader.all(NodeLeft) == []

    go(test)


# --- checkpoints --------------------------------------------------------------------------------
def test_publication_moves_forward_only(memory: MemoryLog, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for path in ("gen-1/iter-5", "gen-1/iter-9"):
        (output / path).mkdir(parents=True)

    def order(path: str) -> PublishCheckpoint:
        return PublishCheckpoint(nodes=("n1",), task=1, generation=1, output=str(output),
                                 path=path)

    async def test() -> None:
        async with house(memory, tmp_path) as one:
            first = await one.leader.order(order("gen-1/iter-5"))
            second = await one.leader.order(order("gen-1/iter-9"))
            done = await one.leader.wait(CheckpointPublished, 2)
            assert [d.order for d in done] == [first, second]
            assert os.readlink(output / "latest") == "gen-1/iter-9"
            missing = await one.leader.order(order("gen-1/iter-7"))
            outside = await one.leader.order(order("../elsewhere"))
            refused = await one.leader.wait(OrderRefused, 2)
            assert {r.order for r in refused} == {missing, outside}
        # An agent that starts again reads the same orders: the first is refused, none moves back.
        two = House(memory, tmp_path, incarnation=8)
        two.leader = one.leader
        leading = asyncio.create_task(one.leader.run())
        serving = asyncio.create_task(two.agent.run(two.stop))
        await one.leader.wait(CheckpointPublished, 3)
        assert os.readlink(output / "latest") == "gen-1/iter-9"
        two.stop.set()
        await serving
        leading.cancel()

    go(test)


# --- stopping -----------------------------------------------------------------------------------
def test_stop_ends_ranks_then_says_that_the_node_left(memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(memory, tmp_path) as one:
            for rank in (0, 1):
                await one.start(python("import time; time.sleep(60)"), rank=rank)
            await one.leader.wait(RankStarted, 2)
            one.stop.set()
            assert one.serving is not None
            await one.serving
            kinds = [type(r.body).__name__ for r in one.leader.records]
            assert kinds[-3:] == ["RankExited", "RankExited", "NodeLeft"]
            assert one.spool.num_unacked == 0

    go(test)


def test_cancel_kills_and_says_nothing(memory: MemoryLog, tmp_path: Path) -> None:
    async def test() -> None:
        one = House(memory, tmp_path)
        leading = asyncio.create_task(one.leader.run())
        serving = asyncio.create_task(one.agent.run(one.stop))
        await one.leader.wait(NodeJoined)
        await one.start(python("import time; time.sleep(60)"))
        (started,) = await one.leader.wait(RankStarted)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        await until(lambda: not alive(started.pid) or None)
        assert one.leader.all(NodeLeft) == []
        leading.cancel()

    go(test)


# --- a server that comes and goes ---------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_lost_replies_double_and_lose_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    async def test() -> None:
        log = MemoryLog(time.monotonic)
        async with house(log, tmp_path) as one:
            def fault(call: str) -> str:
                if call in ("send", "acked", "orders", "beat") and rng.random() < 0.4:
                    return rng.choice(["unavailable", "lost", "applied"])
                return "done"

            log.fault = fault  # type: ignore[assignment]
            for number in range(50):
                one.agent._report(OrderRefused(node="n1", order=number, why="test"), None)
                await asyncio.sleep(0.001)
            await one.leader.wait(OrderRefused, 50)
            log.fault = lambda call: "done"
            assert [r.order for r in one.leader.all(OrderRefused)] == list(range(50))

    go(test)
