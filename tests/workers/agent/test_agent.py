"""The agent: how its processes end, which orders it carries out, and what it reports."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from agent_driver import (
    LIMIT_S,
    LocalNode,
    alive,
    command,
    local_node,
    python,
    train,
    until,
    until_gone,
    until_text,
)
from memory_log import MemoryLog, Outcome
from unicron.events.records import orders as o
from unicron.events.records.codec import UnknownBody
from unicron.events.records.reports import (
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
from unicron.events.records.types import Member, Slot
from unicron.workers.agent import order_executor
from unicron.workers.agent.processes.launcher import NodeConfig, environment
from unicron.workers.agent.publish import PublishRefused, publish
from unicron.workers.host import linux

pytestmark = pytest.mark.usefixtures("nothing_left")
FAULTS: list[Outcome] = ["unavailable", "lost", "applied"]


# --- how processes end --------------------------------------------------------------------------
async def test_output_goes_to_a_file_and_its_tail_into_the_record(
    node: LocalNode, tmp_path: Path
) -> None:
    code = (
        "import os, sys; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK',"
        "'MASTER_ADDR', 'MASTER_PORT', 'UNICRON_TASK', 'UNICRON_ATTEMPT', 'UNICRON_HOST', "
        "'GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME')));"
        "sys.exit('x' * 9000 + 'the end')"
    )
    await node.start(python(code), rank=1, attempt=4, local_slots=(0, 1))
    (exited,) = await node.leader.wait(RankExited)
    assert len(exited.tail) == 4096
    assert exited.tail.endswith("the end\n")
    (started,) = node.leader.all(RankStarted)
    assert started.log_path == str(tmp_path / "logs/1-job/rank-1.attempt-4.log")
    text = Path(started.log_path).read_text()
    assert text.splitlines()[0] == "1 2 1 127.0.0.1 4242 1 4 127.0.0.9 lo =lo"


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
async def test_a_slot_is_free_only_when_grandchildren_are_gone(
    node: LocalNode, tmp_path: Path, how: str
) -> None:
    linux.adopt_orphans()
    note = tmp_path / "children"
    await node.start(command(sys.executable, "-c", GRANDCHILDREN, str(note), how))
    if how == "stay":
        await until(lambda: (note.exists() and note.read_text().count(" ")) or None)
        await node.stop_rank(grace_s=0.0)
    await node.leader.wait(RankExited)
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    assert [pid for pid in pids if alive(pid)] == []


async def test_stop_gives_grace_then_kills(node: LocalNode) -> None:
    polite = "import signal, sys, time\nsignal.signal(15, lambda *a: sys.exit(7))\nprint('up')\n"
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\n"
    for rank, code in enumerate((polite, deaf)):
        await node.start(python(code + "time.sleep(60)"), rank=rank)
    await node.leader.wait(RankStarted, 2)
    for started in node.leader.all(RankStarted):
        await until_text(started.log_path)
    for rank in (0, 1):
        await node.stop_rank(rank, grace_s=0.3)
        await node.stop_rank(rank, grace_s=0.3)  # the same order twice
    by_rank = {e.rank: e for e in await node.leader.wait(RankExited, 2)}
    assert by_rank[0].exit_code == 7
    assert by_rank[1].signal == signal.SIGKILL
    await node.stop_rank(0)  # the rank has already exited: no error
    assert node.leader.all(OrderRefused) == []


async def test_a_suspended_process_is_killed_after_its_grace(node: LocalNode) -> None:
    await node.start(
        python("import signal, time; signal.signal(15, print); print('up');time.sleep(60)")
    )
    (started,) = await node.leader.wait(RankStarted)
    await until_text(started.log_path)
    os.kill(started.pid, signal.SIGSTOP)
    await node.stop_rank(grace_s=0.2)
    (exited,) = await node.leader.wait(RankExited)
    assert exited.signal == signal.SIGKILL


def test_the_environment_of_a_rank(tmp_path: Path) -> None:
    node = NodeConfig(
        name="n1", incarnation=7, cluster="c", host="10.0.0.1", num_slots=2, state_dir=tmp_path
    )
    order = o.StartRank(
        nodes=("n1",),
        task=5,
        rank=3,
        attempt=2,
        slot=Slot(node="n1", index=1),
        spec=train(0),
        num_seats=4,
        host="",
        port=0,
        checkpoint="",
        local_slots=(0, 1),
    )
    on_cpu = environment(order, node, {"UNICRON_MINE": "x"})
    assert on_cpu["UNICRON_MINE"] == "x"
    assert (on_cpu["OMP_NUM_THREADS"], on_cpu["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    assert "RANK" not in on_cpu
    assert environment(order, node, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    with_gpus = msgspec.structs.replace(node, devices=("4", "5"))
    on_gpu = environment(order, with_gpus, {})
    assert (on_gpu["CUDA_VISIBLE_DEVICES"], on_gpu["LOCAL_RANK"]) == ("4,5", "1")
    env = environment(msgspec.structs.replace(order, spec=python("pass")), with_gpus, {})
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("3", "4", "1")
    assert (env["CUDA_VISIBLE_DEVICES"], env["LOCAL_WORLD_SIZE"]) == ("4,5", "2")


# --- which orders are carried out ---------------------------------------------------------------
async def test_a_slot_is_used_by_one_rank_at_a_time(node: LocalNode) -> None:
    sleep = python("import time; time.sleep(60)")
    await node.start(sleep)
    await node.leader.wait(RankStarted)
    await node.start(sleep, task=2)  # waits for the slot
    await node.start(sleep, task=3)  # waits, and is stopped before it starts
    await node.leader.order(
        o.StopRank(nodes=("n1",), task=3, rank=0, attempt=1, grace_s=1.0, why="test")
    )
    (never,) = await node.leader.wait(RankExited)
    assert (never.task, never.pid, never.signal) == (3, 0, signal.SIGTERM)
    await node.stop_rank(grace_s=0.0)
    await node.leader.wait(RankStarted, 2)
    kinds = [
        (type(r.body).__name__, getattr(r.body, "task", 0))
        for r in node.leader.records
        if isinstance(r.body, RankStarted | RankExited)
    ]
    assert kinds == [("RankStarted", 1), ("RankExited", 3), ("RankExited", 1), ("RankStarted", 2)]


async def test_a_higher_attempt_fences_the_lower(node: LocalNode) -> None:
    sleep = python("import time; time.sleep(60)")
    await node.start(sleep, attempt=2)
    await node.leader.wait(RankStarted)
    await node.start(sleep, attempt=1)  # lower than the running attempt
    await node.start(sleep, attempt=3)
    await node.leader.wait(RankStarted, 2)
    assert [s.attempt for s in node.leader.all(RankStarted)] == [2, 3]
    assert [e.attempt for e in node.leader.all(RankExited)] == [2]


async def test_orders_are_refused_with_a_reason(node: LocalNode) -> None:
    seqs = [
        await node.start(command("/no/such/program")),
        await node.start(python("pass"), slot=Slot(node="n1", index=2)),
        await node.start(python("pass"), slot=Slot(node="n2", index=0)),
    ]
    refused = await node.leader.wait(OrderRefused, 3)
    assert {r.order for r in refused} == set(seqs)
    assert any("/no/such/program" in r.why for r in refused)
    await node.start(python("pass"))  # the slot is free again
    await node.leader.wait(RankExited)


async def test_an_order_that_is_not_understood_is_refused_and_the_next_is_carried_out(
    node: LocalNode,
) -> None:
    class Unknown(UnknownBody, frozen=True, kw_only=True):
        nodes: tuple[str, ...]

    seq = await node.leader.order(
        Unknown(kind="StartRank", version=1, raw=b"\x80", why="unknown field `hint`", nodes=("n1",))
    )
    await node.start(python("pass"))
    (refused,) = await node.leader.wait(OrderRefused)
    assert refused.order == seq
    assert "StartRank: unknown field `hint`; start a newer agent" in refused.why
    (exited,) = await node.leader.wait(RankExited)
    assert exited.exit_code == 0


async def test_a_command_starts_in_the_folder_of_its_job(node: LocalNode, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.py").write_text("import os; print(os.getcwd())")
    spec = msgspec.structs.replace(command(sys.executable, "train.py"), folder=str(folder))
    await node.start(spec)
    (exited,) = await node.leader.wait(RankExited)
    (started,) = node.leader.all(RankStarted)
    assert exited.exit_code == 0
    assert Path(started.log_path).read_text().strip() == str(folder.resolve())
    await node.start(msgspec.structs.replace(spec, folder=str(tmp_path / "gone")), attempt=2)
    (refused,) = await node.leader.wait(OrderRefused)
    assert f"its folder {tmp_path / 'gone'} is not on this node" in refused.why


async def test_orders_for_a_predecessor_start_nothing(memory: MemoryLog, tmp_path: Path) -> None:
    before = LocalNode(memory, tmp_path)
    leading = asyncio.create_task(before.leader.run())
    await until(lambda: before.leader.epoch or None)
    # The first order precedes the join and names no incarnation; the second races with the join.
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


async def test_rewritten_orders_are_duplicates(node: LocalNode, memory: MemoryLog) -> None:
    await node.start(python("pass"))
    await node.leader.wait(RankExited)
    orders = [r for r in node.leader.records if isinstance(r.body, o.StartRank)]
    node.leader.epoch = await memory.start_epoch("again")
    await memory.rebuild_orders(orders, epoch=node.leader.epoch, acked={})
    await node.start(python("pass"), rank=1)
    await node.leader.wait(RankExited, 2)
    assert [s.rank for s in node.leader.all(RankStarted)] == [0, 1]


# --- the pipe -----------------------------------------------------------------------------------
def reconfigure(*members: int, generation: int = 1) -> o.Reconfigure:
    return o.Reconfigure(
        nodes=("n1",),
        task=1,
        generation=generation,
        store="x:1",
        dp=2,
        checkpoint="",
        members=tuple(Member(rank=rank, attempt=1, node="n1", endpoint="x:1") for rank in members),
    )


async def test_a_training_rank_receives_orders_through_its_pipe(
    memory: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    async with local_node(memory, tmp_path) as node:
        for rank in (0, 1):
            await node.start(train(0), rank=rank)
        ready = await node.leader.wait(RankReady, 2)
        assert {(r.endpoint, r.data_digest) for r in ready} == {("127.0.0.9:1", "1")}
        records = [r for r in node.leader.records if isinstance(r.body, RankReady)]
        assert all(4 < time.time() - r.occurred_s < LIMIT_S for r in records)
        await node.leader.order(reconfigure(0))
        resume = await node.leader.order(
            o.Resume(nodes=("n1",), task=1, generation=1, progress_from=0)
        )
        quiesce = await node.leader.order(
            o.Quiesce(nodes=("n1",), task=1, generation=1, mode="now", ranks=(0,))
        )
        (quiesced,) = await node.leader.wait(Quiesced)
        assert quiesced.rank == 0
        logs = {s.rank: Path(s.log_path).read_text() for s in node.leader.all(RankStarted)}
        assert "Reconfigure" in logs[0]
        assert f"Resume {resume} 1" in logs[0]
        assert f"Quiesce {quiesce} 1" in logs[0]
        assert logs[1].split()[0] == "StartRank"
        assert len(logs[1].splitlines()) == 1, "orders for rank 0 do not reach rank 1"


async def test_a_log_that_lost_records_is_told_again_and_obeyed(
    node: LocalNode, memory: MemoryLog
) -> None:
    """The agent sends again what was lost. New orders have the numbers of lost ones, and are
    carried out, also by a rank that has read those."""
    leader = node.leader
    await node.start(train(0))
    await leader.wait(RankReady)
    await leader.order(reconfigure(0))
    num_kept = len(leader.records)
    await node.start(python("pass"), rank=1, task=2)
    await leader.wait(RankExited)
    for _ in range(9):
        await leader.order(o.Resume(nodes=("n1",), task=1, generation=1, progress_from=0))
    quiesce = o.Quiesce(nodes=("n1",), task=1, generation=1, mode="now", ranks=(0,))
    lost = [await leader.order(quiesce) for _ in range(2)][-1]
    await leader.wait(Quiesced, 2)
    async with leader._writing:
        del memory._records[num_kept:], leader.records[num_kept:]
        sources = {one.source: one.source_seq for one in leader.records}
        memory._acked, leader._last = dict(sources), dict(sources)
        leader.epoch = await memory.start_epoch("again", above=leader.epoch)
        await memory.rebuild_orders([], epoch=leader.epoch, acked=sources)
    await leader.wait(RankExited)
    await leader.wait(Quiesced, 2)
    assert leader.all(ReportsLost) == []
    assert await leader.order(quiesce) < lost
    await leader.wait(Quiesced, 3)
    assert [(x.task, x.rank) for x in leader.all(RankStarted)] == [(1, 0), (2, 1)]


async def test_the_error_report_precedes_the_exit(node: LocalNode) -> None:
    await node.start(train(1))
    await node.leader.wait(RankReady)
    await node.leader.order(reconfigure(0))
    await node.leader.order(o.Resume(nodes=("n1",), task=1, generation=1, progress_from=0))
    await node.leader.wait(RankExited)
    bodies = [r.body for r in node.leader.records if r.source == "n1/7"]
    assert [p.first_iteration for p in bodies if isinstance(p, TaskProgressed)] == list(range(50))
    assert isinstance(bodies[-2], RankErrored)
    assert isinstance(bodies[-1], RankExited)


async def test_the_exit_of_a_rank_is_reported_before_its_children_are_gone(
    memory: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of the rank survives: the slot stays taken, and the exit is reported at once."""
    table, left = linux.table, [True]

    def more() -> list[linux.Proc]:
        (started, *_) = begun
        one = linux.Proc(1 << 30, "D", 1, started.pid, started.pid, 1)
        return [*table(), *([one] if left else [])]

    begun: list[RankStarted] = []
    async with local_node(memory, tmp_path) as one:
        await one.start(train(1))
        await one.leader.wait(RankReady)
        begun.extend(one.leader.all(RankStarted))
        monkeypatch.setattr(linux, "table", more)
        monkeypatch.setattr(order_executor, "REAP_S_MAX", 2 * LIMIT_S)
        await one.leader.order(reconfigure(0))
        await one.leader.order(o.Resume(nodes=("n1",), task=1, generation=1, progress_from=0))
        await one.leader.wait(RankExited)
        await one.start(train(0), attempt=2)
        await asyncio.sleep(0.5)
        assert len(one.leader.all(RankStarted)) == 1, "the slot was freed too early"
        left.clear()
        await one.leader.wait(RankStarted, 2)


@pytest.mark.parametrize("seed", [2, 3])
async def test_a_rank_that_violates_the_protocol_is_killed(node: LocalNode, seed: int) -> None:
    await node.start(train(seed))
    await node.leader.wait(RankReady)
    await node.leader.order(reconfigure(0))
    await node.leader.order(o.Resume(nodes=("n1",), task=1, generation=1, progress_from=0))
    (exited,) = await node.leader.wait(RankExited)
    assert exited.signal == signal.SIGKILL
    assert node.leader.all(NodeLeft) == []


# --- checkpoints --------------------------------------------------------------------------------
async def test_publication_moves_forward_only(memory: MemoryLog, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for path in ("gen-1/iter-5", "gen-1/iter-9"):
        (output / path).mkdir(parents=True)

    def order(path: str) -> o.PublishCheckpoint:
        return o.PublishCheckpoint(
            nodes=("n1",), task=1, generation=1, output=str(output), path=path
        )

    async with local_node(memory, tmp_path) as one:
        first = await one.leader.order(order("gen-1/iter-5"))
        second = await one.leader.order(order("gen-1/iter-9"))
        done = await one.leader.wait(CheckpointPublished, 2)
        assert [d.order for d in done] == [first, second]
        assert os.readlink(output / "latest") == "gen-1/iter-9"
        missing = await one.leader.order(order("gen-1/iter-7"))
        outside = await one.leader.order(order("../elsewhere"))
        refused = await one.leader.wait(OrderRefused, 2)
        assert {r.order for r in refused} == {missing, outside}
    # A restarted agent reads the same orders. An overtaken order does not move `latest` back, and
    # is not answered again.
    two = LocalNode(memory, tmp_path, incarnation=8)
    two.leader = one.leader
    leading = asyncio.create_task(one.leader.run())
    serving = asyncio.create_task(two.agent.run(two.stop))
    again = (await one.leader.wait(CheckpointPublished, 3))[2:]
    assert [d.order for d in again] == [second]
    assert os.readlink(output / "latest") == "gen-1/iter-9"
    refused = (await one.leader.wait(OrderRefused, 4))[2:]
    assert [r.order for r in refused] == [missing, outside]
    # A new order is answered even if another node has overtaken it.
    publish(
        cluster="c",
        order=10_000,
        at_s=9e9,
        task=1,
        generation=1,
        output=str(output),
        path="gen-1/iter-9",
    )
    late = await one.leader.order(order("gen-1/iter-5"))
    refused = (await one.leader.wait(OrderRefused, 5))[4:]
    assert [(r.order, "order 10000 has already published" in r.why) for r in refused] == [
        (late, True)
    ]
    two.stop.set()
    await serving
    leading.cancel()


def test_a_new_log_of_the_same_name_publishes_over_the_old_one(tmp_path: Path) -> None:
    """The orders of a new log count from 1 again. Late orders of the old log are still refused."""
    (tmp_path / "gen-1/iter-9").mkdir(parents=True)
    (tmp_path / "gen-2/iter-9").mkdir(parents=True)

    def give(order: int, at_s: float, generation: int) -> None:
        publish(
            cluster="default",
            order=order,
            at_s=at_s,
            task=1,
            generation=generation,
            output=str(tmp_path),
            path=f"gen-{generation}/iter-9",
        )

    give(90, 1000.0, 1)
    give(40, 2000.0, 2)
    assert os.readlink(tmp_path / "latest") == "gen-2/iter-9"
    give(40, 2000.0, 2)
    with pytest.raises(PublishRefused, match="order 40 has already published gen-2"):
        give(39, 2000.0, 1)
    with pytest.raises(PublishRefused):
        give(91, 1000.0, 1)
    assert os.readlink(tmp_path / "latest") == "gen-2/iter-9"


# --- stopping -----------------------------------------------------------------------------------
async def test_stop_reports_the_leaving_node_and_then_the_exits(node: LocalNode) -> None:
    for rank in (0, 1):
        await node.start(python("import time; time.sleep(60)"), rank=rank)
    await node.leader.wait(RankStarted, 2)
    node.stop.set()
    assert node.serving is not None
    await node.serving
    kinds = [type(r.body).__name__ for r in node.leader.records]
    assert kinds[-3:] == ["NodeLeft", "RankExited", "RankExited"]


async def test_cancel_kills_and_reports_nothing(memory: MemoryLog, tmp_path: Path) -> None:
    one = LocalNode(memory, tmp_path)
    leading = asyncio.create_task(one.leader.run())
    serving = asyncio.create_task(one.agent.run(one.stop))
    await one.leader.wait(NodeJoined)
    await one.start(python("import time; time.sleep(60)"))
    (started,) = await one.leader.wait(RankStarted)
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    await until_gone(started.pid)
    assert one.leader.all(NodeLeft) == []
    leading.cancel()


# --- a log server that fails at times -----------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
async def test_lost_replies_double_and_lose_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    log = MemoryLog(time.monotonic)
    async with local_node(log, tmp_path) as one:

        def fault(call: str) -> Outcome:
            if call in ("send", "acked", "orders", "beat") and rng.random() < 0.4:
                return rng.choice(FAULTS)
            return "done"

        log.fault = fault
        seqs = [
            await one.start(python("pass"), rank=number, slot=Slot(node="n2", index=0))
            for number in range(30)
        ]
        refused = await one.leader.wait(OrderRefused, 30)
        await asyncio.sleep(0.3)
        log.fault = lambda call: "done"  # pyright: ignore[reportUnknownLambdaType]
        assert [r.order for r in refused] == seqs
        assert len(one.leader.all(OrderRefused)) == 30
