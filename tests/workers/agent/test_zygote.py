"""Ranks forked by a zygote. The zygote loads torch once; the ranks are the shim's children."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agent_driver import (
    CANARY,
    SECRETS,
    PlaneStub,
    alive,
    ended,
    processes_with,
    until,
    until_gone,
)
from unicron.events.records import reports as r
from unicron.events.spec.job import JobSpec, parse
from unicron.workers.host import linux

ZYGOTE, RANK = "workers.training.zygote", "workers.training.rank"


def tiny(output: Path, **changes: Any) -> JobSpec:
    return parse(
        {
            "apiVersion": "unicron/v1",
            "name": "tiny",
            "train": {
                "model": {"num_layers": 1, "hidden": 16, "num_heads": 1, "sequence": 16},
                "iterations": 9,
                "output": str(output),
                **changes,
            },
        }
    )


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def zygotes(shim: int) -> list[int]:
    """The shim's zygotes. A forked rank has the same command line, but another process name."""
    children = [proc.pid for proc in linux.table() if proc.ppid == shim and proc.state != "Z"]
    return [
        pid
        for pid in children
        if ZYGOTE in command_line(pid)
        and not Path(f"/proc/{pid}/comm").read_text().startswith("rank ")
    ]


@asynccontextmanager
async def joined(plane: PlaneStub, **env: str) -> AsyncGenerator[int]:
    """Run an agent that has joined; yield its shim's pid. Stop the agent at the end, if it runs."""
    agent = plane.agent(**env)
    await plane.wait(r.NodeJoined)
    yield plane.shims()[0]
    if plane.shims():
        agent.terminate()
        assert await ended(agent) == 0, plane.said()
    assert await ended(agent) in (0, 1), plane.said()
    for started in plane.all(r.RankStarted):
        await until_gone(started.pid)


async def test_ranks_are_forked_as_children_of_the_shim(plane: PlaneStub, tmp_path: Path) -> None:
    async with joined(plane, **SECRETS, SEEN=CANARY[:-1]) as shim:
        assert not zygotes(shim), "no training rank, no zygote"
        await plane.start_rank(tiny(tmp_path / "a"))
        await plane.start_rank(tiny(tmp_path / "a"), rank=1)
        first, second = await plane.wait(r.RankStarted, 2)
        await plane.wait(r.RankReady, 2)
        (zygote,) = zygotes(shim)
        assert processes_with(CANARY) == [], "no process has a secret of the agent"
        assert len(processes_with(f"SEEN={CANARY[:-1]}")) == 5, "all five can be read"
        for started in (first, second):
            proc = linux.read(started.pid)
            assert proc is not None
            assert (proc.ppid, proc.pgid, proc.sid) == (shim, started.pid, started.pid)
            assert ZYGOTE in command_line(started.pid), "the rank was not forked by the zygote"
        os.kill(first.pid, signal.SIGKILL)
        (killed,) = await plane.wait(r.RankExited)
        assert (killed.pid, killed.signal, killed.exit_code) == (first.pid, signal.SIGKILL, None)
        await until(lambda: True if linux.read(first.pid) is None else None)  # it is reaped
        await plane.start_rank(tiny(tmp_path / "a"), attempt=2)
        await plane.wait(r.RankReady, 3)
        assert zygotes(shim) == [zygote]

        # A rank that exits by itself: its exit code and the tail of its log.
        os.kill(second.pid, signal.SIGKILL)
        await plane.wait(r.RankExited, 2)
        await plane.start_rank(tiny(tmp_path / "b", data=["/nonexistent/text"]), rank=1, attempt=2)
        *_, exited = await plane.wait(r.RankExited, 3)
        assert (exited.exit_code, exited.signal) == (1, None)
        assert exited.tail.startswith("train.data: /nonexistent/text: No such file")
        (errored,) = plane.all(r.RankErrored)
        assert errored.error == "UsageError"
        (started,) = [one for one in plane.all(r.RankStarted) if one.pid == exited.pid]
        assert Path(started.log_path).read_text() == exited.tail


@pytest.mark.thorough
async def test_a_zygote_that_exits_is_replaced_and_the_shims_end_ends_all(
    plane: PlaneStub, tmp_path: Path
) -> None:
    async with joined(plane) as shim:
        await plane.start_rank(tiny(tmp_path / "a"))
        await plane.wait(r.RankReady)
        (zygote,) = zygotes(shim)
        os.kill(zygote, signal.SIGKILL)
        await until_gone(zygote)
        await plane.start_rank(tiny(tmp_path / "a"), rank=1)
        await plane.wait(r.RankReady, 2)
        assert zygotes(shim) != [zygote]
        pids = [started.pid for started in plane.all(r.RankStarted)]
        assert [alive(pid) for pid in pids] == [True, True], "a rank exited with its zygote"
        pids += zygotes(shim)
        assert len(pids) == 3
        os.kill(shim, signal.SIGKILL)
        for pid in pids:
            await until_gone(pid)


@pytest.mark.parametrize(
    "why", ["disabled", pytest.param("cannot fork", marks=pytest.mark.thorough)]
)
async def test_without_a_zygote_ranks_are_started_by_exec(
    plane: PlaneStub, tmp_path: Path, why: str
) -> None:
    env = {"UNICRON_ZYGOTE": "0"}
    if why == "cannot fork":  # a second thread in the zygote, which therefore does not fork
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, threading, time\n"
            f"if any('{ZYGOTE}' in word for word in sys.orig_argv):\n"
            "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        )
        env = {"PYTHONPATH": str(tmp_path)}
    async with joined(plane, **env) as shim:
        await plane.start_rank(tiny(tmp_path / "a"))
        (started,) = await plane.wait(r.RankStarted)
        await until(lambda: True if RANK in command_line(started.pid) else None)
        await plane.wait(r.RankReady)
        assert not zygotes(shim)
