"""Ranks of a node abort their NCCL communicators together: a real agent, real pipes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from agent_driver import LIMIT_S, LocalNode, local_node, train
from memory_log import MemoryLog
from unicron.events.records import orders as o
from unicron.events.records.reports import RankStarted
from unicron.events.records.types import Member

pytestmark = pytest.mark.usefixtures("nothing_left")
NUM = 3
RANK = """
import os, socket, sys, time
from unicron.events.records.orders import Quiesce
from unicron.workers.ipc.pipe_protocol import Unpacker
from unicron.workers.training.process.control_thread import Control

fd = int(sys.argv[sys.argv.index("--fd") + 1])
control = Control(socket.socket(fileno=fd), int(os.environ["UNICRON_RANK"]), Unpacker())
control.start([])
while True:
    order = control.next_order()
    print("has", type(order).__name__, order.generation, flush=True)
    if isinstance(order, Quiesce):
        met = control.meet_before_abort(order.generation, WAIT_S)
        print("met", order.generation, met, flush=True)
"""


@asynccontextmanager
async def ranks(memory: MemoryLog, folder: Path, wait_s: float) -> AsyncGenerator[LocalNode]:
    """A node with three ranks of one task, in generation 1."""
    script = folder / "abort.py"
    script.write_text(RANK.replace("WAIT_S", str(wait_s)))
    argv = (sys.executable, str(script))
    async with local_node(memory, folder, rank_argv=argv, num_slots=NUM) as node:
        for rank in range(NUM):
            await node.start(train(0), rank)
        await node.leader.wait(RankStarted, NUM)
        await form(node, 1, range(NUM))
        yield node


async def form(node: LocalNode, generation: int, members: range) -> None:
    await node.leader.order(
        o.Reconfigure(
            nodes=("n1",),
            task=1,
            generation=generation,
            members=tuple(Member(rank, 1, "n1", "127.0.0.1:1") for rank in members),
            store="127.0.0.1:1",
            dp=len(members),
            checkpoint="",
        )
    )
    for rank in members:
        await says(node, rank, f"has Reconfigure {generation}\n")


async def leave(node: LocalNode, generation: int, *members: int) -> None:
    await node.leader.order(
        o.Quiesce(nodes=("n1",), task=1, generation=generation, mode="now", ranks=members)
    )
    for rank in members:
        await says(node, rank, f"has Quiesce {generation}\n")


def output(node: LocalNode, rank: int) -> str:
    (started,) = [one for one in node.leader.all(RankStarted) if one.rank == rank]
    return Path(started.log_path).read_text()


async def says(node: LocalNode, rank: int, text: str) -> None:
    last_s = time.monotonic() + LIMIT_S
    while text not in output(node, rank):
        assert time.monotonic() < last_s, output(node, rank)
        await asyncio.sleep(0.01)


async def test_nobody_aborts_while_another_rank_of_the_node_is_in_the_generation(
    memory: MemoryLog, tmp_path: Path
) -> None:
    async with ranks(memory, tmp_path, LIMIT_S) as node:
        await leave(node, 1, 0, 1)
        await asyncio.sleep(0.5)
        assert "met" not in output(node, 0) + output(node, 1)
        await leave(node, 1, 2)
        for rank in range(NUM):
            await says(node, rank, "met 1 True\n")
        # A generation of two: the third, which waits outside, is not waited for.
        await form(node, 2, range(2))
        await leave(node, 2, 0, 1)
        for rank in range(2):
            await says(node, rank, "met 2 True\n")
        assert "met 2" not in output(node, 2)


async def test_a_rank_that_ends_is_not_waited_for(memory: MemoryLog, tmp_path: Path) -> None:
    async with ranks(memory, tmp_path, LIMIT_S) as node:
        await leave(node, 1, 0, 1)
        (started,) = [one for one in node.leader.all(RankStarted) if one.rank == 2]
        os.kill(started.pid, signal.SIGKILL)
        for rank in range(2):
            await says(node, rank, "met 1 True\n")


async def test_a_rank_that_hangs_is_waited_for_until_the_limit(
    memory: MemoryLog, tmp_path: Path
) -> None:
    async with ranks(memory, tmp_path, 1.0) as node:
        (started,) = [one for one in node.leader.all(RankStarted) if one.rank == 2]
        os.kill(started.pid, signal.SIGSTOP)
        await leave(node, 1, 0, 1)
        for rank in range(2):
            await says(node, rank, "met 1 False\n")
