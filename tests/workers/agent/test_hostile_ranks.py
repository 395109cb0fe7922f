"""A rank that says anything, over pipe and page, ends at most itself: real agents and ranks."""

from __future__ import annotations

import asyncio
import math
import os
import struct
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_driver import PlaneStub, alive, ended, train, until, until_text
from hypothesis import given
from hypothesis import strategies as st
from rank_bodies import body_of
from unicron.events.records import reports as r
from unicron.events.records import statuses
from unicron.events.records.codec import not_finite
from unicron.events.records.orders import StartRank
from unicron.events.records.types import Body, Slot
from unicron.workers.agent.monitoring.rank_monitor import WATCH_S, RankMonitors
from unicron.workers.agent.processes.pipe import Pipe
from unicron.workers.agent.processes.rank_guard import Key, Part, RankGuard
from unicron.workers.ipc.pipe_protocol import Frame, pack
from unicron.workers.ipc.progress_page import PAGE_BYTES, ProgressPage
from unicron.workers.ipc.violation import Violation

LOG_BYTES_MAX = 50_000
HOSTILE = """
import mmap, os, socket, struct, sys, time
fd = int(sys.argv[sys.argv.index("--fd") + 1])
page = int(sys.argv[sys.argv.index("--pulse") + 1])
folder = os.environ["FOLDER"]
def mark(num=1, kind=1, phase=0, at_s=1.0, what=b"x"):
    os.pwrite(page, struct.pack("<QqqI4xBB16sdddQ", num, 1, 1, 0, phase, kind, what, at_s, 1.0,
                                0.0, num), num % 2 * 128)
def done(own_s):
    os.pwrite(page, struct.pack("<QqqddBQ", 1, 1, 1, 1.0, own_s, 1, 1), 256 + 64)
def after(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.01)
open(os.path.join(folder, "up-" + os.environ["UNICRON_RANK"]), "w").write("up")
if os.environ["UNICRON_RANK"] == "1":
    after("go")
    sys.exit(0)
"""
"""A rank: 1 waits for a file, and 0 does what a test says."""
ATTACKS = {
    "a page cut to nothing": (
        "try:\n    os.ftruncate(page, 0)\nexcept PermissionError:\n    mark(kind=200)",
        "kind 200",
    ),
    "no number in the ring": ("mark(); done(float('nan'))", "nan"),
    "a deep frame": (
        "deep = b'\\x86' + b''.join(bytes([0xa0 + len(k)]) + k + v for k, v in [\n"
        "    (b'kind', b'\\xa3Foo'), (b'v', b'\\x01'), (b'seq', b'\\x01'),\n"
        "    (b'epoch', b'\\x00'), (b'at_s', b'\\xcb' + bytes(8))])\n"
        "deep += b'\\xa4body' + b'\\x81\\xa1a' * 5000 + b'\\xc0'\n"
        "os.write(fd, struct.pack('>I', len(deep)) + deep)",
        "frame",
    ),
}


async def started(plane: PlaneStub, folder: Path, attack: str) -> subprocess.Popen[bytes]:
    """An agent with both ranks."""
    script = folder / "hostile.py"
    script.write_text(HOSTILE + attack + "\ntime.sleep(600)")
    agent = plane.agent(RANK=str(script), FOLDER=str(folder))
    await plane.wait(r.NodeJoined)
    for rank in (1, 0):
        await plane.start_rank(train(0), rank=rank)
    await plane.wait(r.RankStarted, 2)
    await until_text(folder / "up-1")
    return agent


async def assert_only_it_ends(
    plane: PlaneStub, folder: Path, agent: subprocess.Popen[bytes], said: str
) -> None:
    await until(lambda: plane.all(r.RankExited) or agent.poll() is not None or None)
    assert agent.poll() is None, plane.said()
    (exited,) = plane.all(r.RankExited)
    assert (exited.rank, exited.signal, exited.status) == (0, 9, statuses.OTHER_SOFTWARE)
    part = "pipe" if "frame" in said else "page"
    assert f"it violated the {part} protocol: " in exited.cause
    assert said.removeprefix("frame") in exited.cause
    (other,) = [one for one in plane.all(r.RankStarted) if one.rank == 1]
    assert alive(other.pid)
    assert agent.poll() is None, plane.said()
    (folder / "go").touch()
    _, calm = await plane.wait(r.RankExited, 2)
    assert (calm.rank, calm.exit_code) == (1, 0)
    assert len(plane.said()) < LOG_BYTES_MAX
    agent.terminate()
    assert await ended(agent) == 0, plane.said()


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_rank_that_breaks_the_protocol_ends_alone(
    plane: PlaneStub, tmp_path: Path, name: str
) -> None:
    attack, said = ATTACKS[name]
    agent = await started(plane, tmp_path, attack)
    await assert_only_it_ends(plane, tmp_path, agent, said)


async def test_a_broken_page_does_not_end_the_agent_that_adopts_it(
    plane: PlaneStub, tmp_path: Path
) -> None:
    first = await started(plane, tmp_path, "after('broken')\nmark(kind=200)\nafter('never')")
    first.kill()
    await ended(first)
    (tmp_path / "broken").touch()
    second = plane.agent(RANK=str(tmp_path / "hostile.py"), FOLDER=str(tmp_path))
    await plane.wait(r.AgentRestarted)
    await assert_only_it_ends(plane, tmp_path, second, "kind 200")
    await until(lambda: None if plane.shims() else True)


# --- anything, over page and pipe ---
KEY, OTHER = (1, 0, 1), (2, 0, 1)
BIG = 2**63
INTEGERS = st.integers(-BIG, BIG - 1) | st.integers(-2, 5)
NUMBERS = st.integers(0, 2 * BIG - 1) | st.integers(0, 70)
BYTES = st.integers(0, 255) | st.integers(0, 3)
TIMES = st.floats(width=64) | st.floats(0, 100)
MARKS = st.tuples(
    NUMBERS, INTEGERS, INTEGERS, st.integers(0, 2**32 - 1), BYTES, BYTES, st.binary(max_size=16)
).flatmap(lambda head: st.tuples(TIMES, TIMES, TIMES).map(lambda times: (*head, *times, head[0])))
DONES = st.tuples(NUMBERS, INTEGERS, INTEGERS, TIMES, TIMES, BYTES).map(lambda at: (*at, at[0]))


def order(task: int) -> StartRank:
    return StartRank(
        nodes=("n1",),
        task=task,
        rank=0,
        attempt=1,
        slot=Slot(node="n1", index=task - 1),
        spec=train(0),
        num_seats=1,
        host="127.0.0.1",
        port=1,
        checkpoint="",
        incarnation=1,
    )


class Guarded:
    """Monitors of two ranks, and which of them a guard has ended."""

    def __init__(self) -> None:
        self.bodies: list[Body] = []
        self.ended: dict[Key, str] = {}
        self.watch = RankMonitors(lambda body, at_s: self.report(body), self.guard)

    def guard(self, key: Key, part: Part) -> RankGuard:
        return RankGuard(self.ended.__setitem__, key, part)

    def report(self, body: Body) -> None:
        assert not not_finite(body), body
        self.bodies.append(body)


@given(
    st.lists(
        st.tuples(st.lists(MARKS, max_size=2), st.lists(DONES, max_size=6), st.binary(max_size=99)),
        max_size=3,
    ),
    st.booleans(),
)
def test_a_page_with_anything_ends_at_most_its_rank(
    looks: list[tuple[list[Any], list[Any], bytes]], is_stalled: bool
) -> None:
    guarded, now_s = Guarded(), 50.0
    pages = [ProgressPage(), ProgressPage()]
    try:
        for key, page in zip((KEY, OTHER), pages, strict=True):
            guarded.watch.begin(order(key[0]), page, os.getpid(), is_stalled=is_stalled)
        for marks, dones, junk in looks:
            for mark in marks:
                os.pwrite(pages[0].fd, struct.pack("<QqqI4xBB16sdddQ", *mark), mark[0] % 2 * 128)
            for done in dones:
                data = struct.pack("<QqqddBQ", *done)
                os.pwrite(pages[0].fd, data, 256 + done[0] % 60 * 64)
            os.pwrite(pages[0].fd, junk[: PAGE_BYTES - 1000], 1000)
            now_s += WATCH_S
            guarded.watch.look(now_s)
        assert set(guarded.ended) <= {KEY}
        assert all(getattr(body, "task", 0) == KEY[0] for body in guarded.bodies)
    finally:
        for page in pages:
            page.close()


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers(-BIG, BIG) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
KINDS = st.sampled_from(["Adopted", "TaskProgressed", "RankErrored", "StartRank", "Foo"])
WIRES = st.fixed_dictionaries(
    {"kind": KINDS, "v": st.integers(0, 3), "body": NESTED, "seq": INTEGERS, "epoch": INTEGERS},
    optional={"at_s": st.floats()},
)
FRAMES = (WIRES | NESTED).map(msgspec.msgpack.encode) | st.binary(max_size=60)
SAID = st.lists(FRAMES.map(lambda data: struct.pack(">I", len(data)) + data), max_size=4)


@given(SAID, st.binary(max_size=8), st.sampled_from([None, Violation, KeyError, RecursionError]))
def test_a_pipe_with_anything_ends_at_most_its_rank(
    said: list[bytes], rest: bytes, raised: type[Exception] | None
) -> None:
    """`raised`: what the handling of a frame raises."""
    guarded = Guarded()

    def on_frame(frame: Frame) -> None:
        if raised is not None:
            raise raised("a frame")

    async def run() -> None:
        pipe = Pipe(on_frame, lambda: guarded.guard(KEY, "pipe"))
        pipe.theirs.sendall(b"".join(said) + rest)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pipe.drain()

    asyncio.run(run())
    assert set(guarded.ended) <= {KEY}


async def test_a_fault_of_the_machine_is_no_violation() -> None:
    """A full disk while a frame is handled: the rank goes on, and says it again."""
    guarded, frames = Guarded(), list[Frame]()

    def on_frame(frame: Frame) -> None:
        frames.append(frame)
        if len(frames) == 1:
            raise OSError(28, "No space left on device")

    pipe = Pipe(on_frame, lambda: guarded.guard(KEY, "pipe"))
    pipe.theirs.sendall(pack(Frame(body=body_of(r.RankErrored), seq=1)))
    await until(lambda: len(frames) == 2 or None)
    assert guarded.ended == {}
    pipe.close()


def test_a_shortage_of_threads_is_no_violation() -> None:
    """The search for the cause of an exit needs one."""
    guarded = Guarded()
    with guarded.guard(KEY, "exit"):
        raise RuntimeError("can't start new thread")
    assert guarded.ended == {}


async def test_what_outlives_a_rank_does_not_hold_up_the_agent() -> None:
    """It writes into the rank's pipe as fast as the agent reads."""
    guarded, frames, data = Guarded(), list[Frame](), pack(Frame(body=body_of(r.RankErrored)))

    def on_frame(frame: Frame) -> None:
        frames.append(frame)
        if len(frames) < 10_000:
            with suppress(BrokenPipeError):
                orphan.sendall(data)

    pipe = Pipe(on_frame, lambda: guarded.guard(KEY, "pipe"))
    with pipe.theirs.dup() as orphan:
        pipe.started()
        orphan.sendall(3 * data)
        pipe.drain()
    assert len(frames) == 3
    assert guarded.ended == {}


def test_old_marks_are_no_flood_of_stalls() -> None:
    guarded, page, now_s = Guarded(), ProgressPage(), 50.0
    guarded.watch.begin(order(1), page, os.getpid())
    for num in range(1, 30):
        os.pwrite(page.fd, struct.pack("<QqqddBQ", num, 1, num, 0.1, 0.1, 1, num), 256 + num * 64)
    for num in range(1, 200):
        mark = (num // 2, 1, 99, 0, 1, 1, b"x", 0.0, now_s, 0.0, num // 2)
        os.pwrite(page.fd, struct.pack("<QqqI4xBB16sdddQ", *mark), num // 2 % 2 * 128)
        guarded.watch.look(now_s)
        now_s += WATCH_S
    assert not any(isinstance(body, r.RankStalled) for body in guarded.bodies)
    for _ in range(40):
        guarded.watch.look(now_s)
        now_s += WATCH_S
    assert len([body for body in guarded.bodies if isinstance(body, r.RankStalled)]) == 1
    page.close()


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (4, 9, "phase 9"),
        (5, 200, "kind 200"),
        (1, -1, "number -1"),
        (2, 2**53, f"number {2**53}"),
        (7, math.nan, "time nan"),
        (8, 1e300, "time 1e"),
        (9, -1.0, "time -1.0"),
    ],
)
def test_a_mark_that_no_rank_writes_is_a_violation(at: int, value: float, why: str) -> None:
    fields: list[Any] = [1, 1, 1, 0, 0, 1, b"x", 1.0, 1.0, 0.0, 1]
    guarded, page = Guarded(), ProgressPage()
    guarded.watch.begin(order(1), page, os.getpid())
    os.pwrite(page.fd, struct.pack("<QqqI4xBB16sdddQ", *fields), 128)
    guarded.watch.look(50.0)
    assert guarded.ended == {}
    fields[at] = value
    os.pwrite(page.fd, struct.pack("<QqqI4xBB16sdddQ", *fields), 128)
    guarded.watch.look(50.0)
    assert guarded.ended[KEY].startswith(f"it violated the page protocol: {why}")
    page.close()


def test_a_page_without_seals_that_is_cut_is_a_violation() -> None:
    """As of an agent of 0.3.0."""
    page = ProgressPage(os.memfd_create("unsealed", os.MFD_CLOEXEC))
    os.ftruncate(page.fd, PAGE_BYTES)
    assert page.mark() is None
    os.ftruncate(page.fd, 100)
    with pytest.raises(Violation, match="it ends after 100 bytes"):
        page.mark()
    page.close()


def test_a_rank_cannot_cut_its_page() -> None:
    page = ProgressPage()
    for size in (0, PAGE_BYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(page.fd, size)
    page.close()


async def test_a_pipe_where_the_next_output_will_be_stops_no_agent(plane: PlaneStub) -> None:
    """Whoever opens a pipe to write waits for a reader: the agent would, with all its ranks."""
    agent = plane.agent()
    await plane.wait(r.NodeJoined)
    await plane.start(
        "import os, sys\n"
        "own = os.readlink('/proc/self/fd/1')\n"
        "os.mkfifo(own.replace('attempt-1', 'attempt-2'))\n"
        "os.mkfifo(own + '.1')\n"
        "sys.exit(3)"
    )
    await plane.wait(r.RankExited)
    await plane.start("print('it runs'); import time; time.sleep(600)", attempt=2)
    (_, second) = await plane.wait(r.RankStarted, 2)
    await plane.start("pass", rank=1)
    await plane.wait(r.RankExited, 2)
    assert agent.poll() is None
    await until_text(Path(second.log_path))
    assert Path(second.log_path).read_text() == "it runs\n"
