"""Ranks out of a zygote: forked from what has loaded torch once, and the agent's own children."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from agent_driver import LIMIT_S, Plane, alive, ended, plane, until, until_gone
from unicron.events.log import embedded_server
from unicron.events.records.reports import (
    NodeJoined,
    RankErrored,
    RankExited,
    RankReady,
    RankStarted,
)
from unicron.events.spec.job import JobSpec, parse
from unicron.workers.host import linux

ZYGOTE, RANK = "workers.training.zygote", "workers.training.rank"


def tiny(output: Path, **changes: Any) -> JobSpec:
    return parse({"apiVersion": "unicron/v1", "name": "tiny", "train": {
        "model": {"num_layers": 1, "hidden": 16, "num_heads": 1, "sequence": 16},
        "iterations": 9, "output": str(output), **changes}})


def words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def zygotes(agent: int) -> list[int]:
    """A forked rank has the zygote's words too, but calls itself otherwise."""
    children = [proc.pid for proc in linux.table() if proc.ppid == agent and proc.state != "Z"]
    return [pid for pid in children if ZYGOTE in words(pid)
            and not Path(f"/proc/{pid}/comm").read_text().startswith("rank ")]


@pytest.fixture
def on_a_node(own_server: embedded_server.Server, tmp_path: Path) -> Callable[..., None]:
    """Runs `test(plane, its agent's pid)` with an agent that has joined."""
    def run(test: Callable[[Plane, int], Awaitable[None]], **env: str) -> None:
        async def within() -> None:
            async with plane(own_server.url, tmp_path / "state") as one:
                agent = one.agent(**env)
                await one.wait(NodeJoined)
                await test(one, agent.pid)
                if agent.poll() is None:
                    agent.terminate()
                    assert await ended(agent) == 0, one.said()
                for started in one.all(RankStarted):
                    await until_gone(started.pid)

        asyncio.run(asyncio.wait_for(within(), 3 * LIMIT_S))

    return run


def test_ranks_are_forked_and_are_the_agents_own(
        on_a_node: Callable[..., None], tmp_path: Path) -> None:
    async def test(one: Plane, agent: int) -> None:
        assert not zygotes(agent), "who does not train needs none"
        await one.start_rank(tiny(tmp_path / "a"))
        await one.start_rank(tiny(tmp_path / "a"), rank=1)
        first, second = await one.wait(RankStarted, 2)
        await one.wait(RankReady, 2)
        (zygote,) = zygotes(agent)
        for started in (first, second):
            proc = linux.read(started.pid)
            assert proc is not None
            assert (proc.ppid, proc.pgid, proc.sid) == (agent, started.pid, started.pid)
            assert ZYGOTE in words(started.pid), "it was forked, not started by exec"
        os.kill(first.pid, signal.SIGKILL)
        (killed,) = await one.wait(RankExited)
        assert (killed.pid, killed.signal, killed.exit_code) == (first.pid, signal.SIGKILL, None)
        assert linux.read(first.pid) is None, "reaped"
        await one.start_rank(tiny(tmp_path / "a"), attempt=2)
        await one.wait(RankReady, 3)
        assert zygotes(agent) == [zygote]

    on_a_node(test)


def test_what_ends_a_forked_rank_is_told_with_its_exit_code_and_its_last_words(
        on_a_node: Callable[..., None], tmp_path: Path) -> None:
    async def test(one: Plane, agent: int) -> None:
        await one.start_rank(tiny(tmp_path / "a", data=["/nonexistent/text"]))
        (exited,) = await one.wait(RankExited)
        assert (exited.exit_code, exited.signal) == (1, None)
        assert exited.tail.startswith("train.data: /nonexistent/text: No such file")
        (errored,) = one.all(RankErrored)
        assert errored.error == "UsageError"
        (started,) = one.all(RankStarted)
        assert Path(started.log_path).read_text() == exited.tail

    on_a_node(test)


def test_a_zygote_that_dies_takes_no_rank_along_and_is_made_anew(
        on_a_node: Callable[..., None], tmp_path: Path) -> None:
    async def test(one: Plane, agent: int) -> None:
        await one.start_rank(tiny(tmp_path / "a"))
        await one.wait(RankReady)
        (zygote,) = zygotes(agent)
        os.kill(zygote, signal.SIGKILL)
        await until_gone(zygote)
        await one.start_rank(tiny(tmp_path / "a"), rank=1)
        await one.wait(RankReady, 2)
        assert zygotes(agent) != [zygote]
        first, second = one.all(RankStarted)
        assert alive(first.pid)
        assert alive(second.pid)

    on_a_node(test)


def test_zygote_and_ranks_die_with_their_agent(
        on_a_node: Callable[..., None], tmp_path: Path) -> None:
    async def test(one: Plane, agent: int) -> None:
        await one.start_rank(tiny(tmp_path / "a"))
        await one.wait(RankReady)
        pids = [started.pid for started in one.all(RankStarted)] + zygotes(agent)
        assert len(pids) == 2
        os.kill(agent, signal.SIGKILL)
        for pid in pids:
            await until_gone(pid)

    on_a_node(test)


@pytest.mark.parametrize("why", ["asked", "cannot"])
def test_without_a_zygote_ranks_are_started_by_exec(
        on_a_node: Callable[..., None], tmp_path: Path, why: str) -> None:
    async def test(one: Plane, agent: int) -> None:
        await one.start_rank(tiny(tmp_path / "a"))
        (started,) = await one.wait(RankStarted)
        await until(lambda: True if RANK in words(started.pid) else None)
        await one.wait(RankReady)
        assert not zygotes(agent)

    if why == "asked":
        on_a_node(test, UNICRON_ZYGOTE="0")
    else:  # a thread of somebody's, as soon as torch is there
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, threading, time\n"
            f"if any('{ZYGOTE}' in word for word in sys.orig_argv):\n"
            "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
        on_a_node(test, PYTHONPATH=str(tmp_path))
