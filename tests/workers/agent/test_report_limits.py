"""What a rank may report through its pipe: only about itself, within bounds, at a bounded rate."""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from agent_driver import LocalNode, local_node, train
from memory_log import MemoryLog
from rank_bodies import IDENTITY, body_of, counts, lies
from unicron.events.records.reports import (
    LossNotFinite,
    Quiesced,
    RankExited,
    TaskProgressed,
)
from unicron.events.records.types import Body
from unicron.workers.agent.processes.report_limits import AGE_S_MAX, KINDS
from unicron.workers.ipc.pipe_protocol import Frame, pack

pytestmark = pytest.mark.usefixtures("nothing_left")
SAYS = """
import os, socket, sys, time
link = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
with open(f"{sys.argv[1]}/says-{os.environ['UNICRON_RANK']}", "rb") as file:
    link.sendall(file.read())
time.sleep(60)
"""
"""A rank that sends the bytes of a file."""


def saying(memory: MemoryLog, folder: Path, **changes: Any) -> Any:
    return local_node(memory, folder,
                      rank_argv=(sys.executable, "-I", "-c", SAYS, str(folder)), **changes)


async def say(node: LocalNode, folder: Path, rank: int, *frames: Frame) -> None:
    """Start a rank that sends these frames, and then sleeps."""
    (folder / f"says-{rank}").write_bytes(b"".join(pack(frame) for frame in frames))
    await node.start(train(0), rank=rank)


def own(kind: type[Body], of_rank: int, /, **changes: Any) -> Body:
    """A body that the rank may send."""
    ids = {"task": 1, "rank": of_rank, "attempt": 1}
    return body_of(kind, **{name: value for name, value in ids.items()
                            if name in kind.__struct_fields__} | changes)


def reported(node: LocalNode) -> list[Body]:
    return [r.body for r in node.leader.records if isinstance(r.body, KINDS)]


async def assert_refused(node: LocalNode, num: int) -> dict[int, str]:
    """Wait until `num` ranks were killed for a violation; return the causes."""
    exits = await node.leader.wait(RankExited, num)
    assert {one.signal for one in exits} == {signal.SIGKILL}
    assert all("it violated the pipe protocol" in one.cause for one in exits)
    assert reported(node) == [], "a report of a rank that broke the protocol is in the log"
    return {one.rank: one.cause for one in exits}


async def test_a_rank_may_send_every_kind_about_itself(memory: MemoryLog, tmp_path: Path) -> None:
    async with saying(memory, tmp_path) as node:
        await say(node, tmp_path, 0, *(Frame(body=own(kind, 0)) for kind in KINDS))
        for kind in KINDS:
            await node.leader.wait(kind)
        assert [type(body) for body in reported(node)] == list(KINDS)


async def test_a_rank_speaks_only_for_its_own_task_rank_and_attempt(
        memory: MemoryLog, tmp_path: Path) -> None:
    """Each lie is followed by a true report, which does not count any more."""
    async with saying(memory, tmp_path, num_slots=len(lies())) as node:
        for rank, (kind, name) in enumerate(lies()):
            await say(node, tmp_path, rank, Frame(body=own(kind, rank, **{name: 77})),
                      Frame(body=own(Quiesced, rank)))
        causes = await assert_refused(node, len(lies()))
        for rank, (kind, name) in enumerate(lies()):
            own_value = rank if name == "rank" else 1
            assert f"{kind.__name__} of {name} 77 by {name} {own_value}" in causes[rank]
    assert {name for _, name in lies()} == set(IDENTITY)


@pytest.mark.parametrize("value", [-2, 2**53])
async def test_a_number_out_of_range_breaks_the_protocol(
        memory: MemoryLog, tmp_path: Path, value: int) -> None:
    async with saying(memory, tmp_path, num_slots=len(counts()) + 1) as node:
        for rank, (kind, name) in enumerate(counts()):
            await say(node, tmp_path, rank, Frame(body=own(kind, rank, **{name: value})))
        nested = len(counts())
        await say(node, tmp_path, nested,
                  Frame(body=own(Quiesced, nested, micro_batches=(1, value))))
        causes = await assert_refused(node, nested + 1)
    assert f"Quiesced.micro_batches[1] is {value}" in causes[nested]


async def test_the_time_of_a_report_is_near_the_agents_clock(
        memory: MemoryLog, tmp_path: Path) -> None:
    times = (-1e300, -1.0, 0.0, 1.0, time.time() + 3600, 1e300)
    async with saying(memory, tmp_path) as node:
        begin_s = time.time()
        await say(node, tmp_path, 0, *(Frame(body=own(LossNotFinite, 0), at_s=at_s)
                                       for at_s in times))
        await node.leader.wait(LossNotFinite, len(times))
        for record in node.leader.records:
            if isinstance(record.body, LossNotFinite):
                assert begin_s - AGE_S_MAX <= record.occurred_s <= time.time()


@pytest.mark.parametrize("at_s", [math.nan, math.inf, -math.inf])
async def test_a_time_that_is_no_number_breaks_the_protocol(
        memory: MemoryLog, tmp_path: Path, at_s: float) -> None:
    async with saying(memory, tmp_path) as node:
        await say(node, tmp_path, 0, Frame(body=own(TaskProgressed, 0), at_s=at_s))
        await assert_refused(node, 1)
