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
    RankErrored,
    RankExited,
    RankReportsDropped,
    RankStarted,
    TaskProgressed,
)
from unicron.events.records.types import Body
from unicron.workers.agent.processes import report_limits
from unicron.workers.agent.processes.report_limits import (
    AGE_S_MAX,
    BURST_NUM,
    KINDS,
    REPORT_BYTES_MAX,
    REPORTS_PER_S,
)
from unicron.workers.ipc.pipe_protocol import Frame, pack

pytestmark = pytest.mark.usefixtures("nothing_left")
SAYS = """
import os, socket, sys, time
link = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
with open(f"{sys.argv[1]}/says-{os.environ['UNICRON_RANK']}", "rb") as file:
    data = file.read()
try:
    link.sendall(data)
except OSError:
    pass  # the agent has closed the pipe, and will kill this process
time.sleep(60)
"""
"""A rank that sends the bytes of a file."""


def saying(memory: MemoryLog, folder: Path, **changes: Any) -> Any:
    return local_node(
        memory, folder, rank_argv=(sys.executable, "-I", "-c", SAYS, str(folder)), **changes
    )


async def say(node: LocalNode, folder: Path, rank: int, *frames: Frame) -> None:
    """Start a rank that sends these frames, and then sleeps."""
    (folder / f"says-{rank}").write_bytes(b"".join(pack(frame) for frame in frames))
    await node.start(train(0), rank=rank)


def own(kind: type[Body], of_rank: int, /, **changes: Any) -> Body:
    """A body that the rank may send."""
    ids = {"task": 1, "rank": of_rank, "attempt": 1}
    return body_of(
        kind,
        **{name: value for name, value in ids.items() if name in kind.__struct_fields__} | changes,
    )


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
    memory: MemoryLog, tmp_path: Path
) -> None:
    """Each lie is followed by a true report, which does not count any more."""
    async with saying(memory, tmp_path, num_slots=len(lies())) as node:
        for rank, (kind, name) in enumerate(lies()):
            await say(
                node,
                tmp_path,
                rank,
                Frame(body=own(kind, rank, **{name: 77})),
                Frame(body=own(Quiesced, rank)),
            )
        causes = await assert_refused(node, len(lies()))
        for rank, (kind, name) in enumerate(lies()):
            own_value = rank if name == "rank" else 1
            assert f"{kind.__name__} of {name} 77 by {name} {own_value}" in causes[rank]
    assert {name for _, name in lies()} == set(IDENTITY)


@pytest.mark.parametrize("value", [-2, 2**53])
async def test_a_number_out_of_range_breaks_the_protocol(
    memory: MemoryLog, tmp_path: Path, value: int
) -> None:
    async with saying(memory, tmp_path, num_slots=len(counts()) + 2) as node:
        for rank, (kind, name) in enumerate(counts()):
            await say(node, tmp_path, rank, Frame(body=own(kind, rank, **{name: value})))
        nested = len(counts())
        await say(
            node, tmp_path, nested, Frame(body=own(Quiesced, nested, micro_batches=(1, value)))
        )
        await say(
            node,
            tmp_path,
            nested + 1,
            Frame(body=own(TaskProgressed, nested + 1, digests={value: "0" * 16})),
        )
        causes = await assert_refused(node, nested + 2)
    assert f"Quiesced.micro_batches[1] is {value}" in causes[nested]
    assert f"TaskProgressed.digests[{value}] is {value}" in causes[nested + 1]


async def test_the_time_of_a_report_is_near_the_agents_clock(
    memory: MemoryLog, tmp_path: Path
) -> None:
    times = (-1e300, -1.0, 0.0, 1.0, time.time() + 3600, 1e300)
    async with saying(memory, tmp_path) as node:
        begin_s = time.time()
        await say(
            node, tmp_path, 0, *(Frame(body=own(LossNotFinite, 0), at_s=at_s) for at_s in times)
        )
        await node.leader.wait(LossNotFinite, len(times))
        for record in node.leader.records:
            if isinstance(record.body, LossNotFinite):
                assert begin_s - AGE_S_MAX <= record.occurred_s <= time.time()


@pytest.mark.parametrize("at_s", [math.nan, math.inf, -math.inf])
async def test_a_time_that_is_no_number_breaks_the_protocol(
    memory: MemoryLog, tmp_path: Path, at_s: float
) -> None:
    async with saying(memory, tmp_path) as node:
        await say(node, tmp_path, 0, Frame(body=own(TaskProgressed, 0), at_s=at_s))
        await assert_refused(node, 1)


# --- size and rate ------------------------------------------------------------------------------
FLOOD_NUM = 20_000


async def test_a_flood_of_one_rank_is_dropped_and_counted_and_hides_no_fault(
    memory: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_limits, "DROPPED_S", 0.2)
    begin_s = time.monotonic()
    async with saying(memory, tmp_path) as node:
        level = Frame(body=own(TaskProgressed, 0))
        await say(
            node,
            tmp_path,
            0,
            *[level] * FLOOD_NUM,
            Frame(body=own(LossNotFinite, 0)),
            *[level] * FLOOD_NUM,
            Frame(body=own(RankErrored, 0)),
        )
        await say(node, tmp_path, 1, *[Frame(body=own(Quiesced, 1))] * 20)
        await node.leader.wait(RankErrored)
        await node.leader.wait(Quiesced, 20)
        assert len(node.leader.all(LossNotFinite)) == 1
        await node.stop_rank(0)
        await node.leader.wait(RankExited)
        num_taken = len(node.leader.all(TaskProgressed))
        dropped = node.leader.all(RankReportsDropped)
        assert num_taken + sum(one.num_dropped for one in dropped) == 2 * FLOOD_NUM
        passed_s = time.monotonic() - begin_s
        assert BURST_NUM <= num_taken <= BURST_NUM + REPORTS_PER_S * passed_s
        assert {(one.task, one.rank, one.attempt, one.kinds) for one in dropped} == {
            (1, 0, 1, ("TaskProgressed",))
        }
        assert len(dropped) <= 2 + passed_s / 0.2


async def test_a_report_that_is_too_large_breaks_the_protocol(
    memory: MemoryLog, tmp_path: Path
) -> None:
    """The agent refuses it by its length: it reads no megabytes first."""
    large = Frame(body=own(RankErrored, 0, text="x" * (15 << 20)))
    async with saying(memory, tmp_path) as node:
        await say(node, tmp_path, 0, large)
        causes = await assert_refused(node, 1)
        assert f"a frame of {len(pack(large)) - 4} bytes" in causes[0]
        await say(
            node, tmp_path, 1, Frame(body=own(RankErrored, 1, text="x" * (REPORT_BYTES_MAX - 1000)))
        )
        await node.leader.wait(RankErrored)
        assert len(node.leader.all(RankStarted)) == 2


async def test_large_reports_have_a_lower_rate(memory: MemoryLog, tmp_path: Path) -> None:
    large = Frame(body=own(RankErrored, 0, text="x" * (REPORT_BYTES_MAX - 1000)))
    async with saying(memory, tmp_path) as node:
        await say(node, tmp_path, 0, *[large] * 100, Frame(body=own(Quiesced, 0)))
        await node.leader.wait(Quiesced)
        assert 10 <= len(node.leader.all(RankErrored)) <= 40
