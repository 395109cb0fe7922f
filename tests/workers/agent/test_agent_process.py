"""The agent's process: kills, disconnections and refusals, injected faults, and pauses."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import pytest
from agent_driver import (
    CANARY,
    CHILD_OF_ITS_OWN,
    LIMIT_S,
    SECRETS,
    TOKEN,
    WAITS,
    LocalNode,
    PlaneStub,
    alive,
    ended,
    plane,
    python,
    until,
    until_gone,
    until_text,
)
from unicron.events.errors import UsageError
from unicron.events.log import embedded_server
from unicron.events.records.orders import InjectFault
from unicron.events.records.reports import (
    NodeJoined,
    NodeLeft,
    OrderRefused,
    RankContinued,
    RankExited,
    RankStarted,
    RankSuspended,
)
from unicron.events.records.types import FaultKind, Labels
from unicron.workers.agent.agent import LOOK_S
from unicron.workers.agent.delivery import join as join_module
from unicron.workers.agent.delivery.join import join
from unicron.workers.agent.delivery.log_link import CALL_S_MAX
from unicron.workers.host import linux

SLEEP = "import time; time.sleep(120)"
POLITE = (
    "import signal, sys\nsignal.signal(15, lambda *a: sys.exit(7))\nprint('up', flush=True)\n"
    + SLEEP
)


LOOKS_AROUND = """
import os
print(dict(os.environ))
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            print(pid, file.read())
    except OSError:
        pass
"""


async def test_a_rank_finds_no_secret_of_its_agent(plane: PlaneStub, tmp_path: Path) -> None:
    """Neither in its own environment nor in that of any process which it may read."""
    checks, seen = tmp_path / "checks", tmp_path / "seen"
    checks.mkdir()
    check = checks / "env"
    check.write_text(f"#!/bin/sh\nenv > {seen}.new && mv {seen}.new {seen}\n")
    check.chmod(0o755)
    plane.agent(**SECRETS, CHECKS=str(checks), UNICRON_HEALTH="on")
    await plane.wait(NodeJoined)
    await plane.start(LOOKS_AROUND)
    (exited,) = await plane.wait(RankExited)
    (started,) = plane.all(RankStarted)
    found = Path(started.log_path).read_text()
    assert exited.exit_code == 0
    assert f"{plane.agents[0].pid} b'" in found, "the rank could read its agent's environment"
    assert CANARY not in found
    text = await until_text(seen)
    assert "UNICRON_CHECK=env" in text
    assert CANARY not in text


@pytest.mark.thorough
async def test_ranks_die_with_their_node_and_the_next_agent_clears_up(
    plane: PlaneStub, tmp_path: Path
) -> None:
    first = plane.agent()
    await plane.wait(NodeJoined)
    note = tmp_path / "child"
    await plane.start(CHILD_OF_ITS_OWN, str(note))
    (started,) = await plane.wait(RankStarted)
    child = int(await until_text(note))
    plane.kill_shim()
    assert await ended(first) == 1
    await until_gone(started.pid)
    second = plane.agent()
    old, new = await plane.wait(NodeJoined, 2)
    assert new.incarnation > old.incarnation
    assert not alive(child)
    await plane.start("pass", attempt=2)  # the agent reads the old StartRank again and ignores it
    await plane.wait(RankExited)
    assert [s.attempt for s in plane.all(RankStarted)] == [1, 2]
    second.terminate()
    assert await ended(second) == 0, plane.said()


async def test_a_server_killed_and_started_again_loses_and_doubles_nothing(
    plane: PlaneStub, own_server: embedded_server.Server, tmp_path: Path
) -> None:
    """Ranks continue meanwhile. The agent reports their exits afterwards, once and in order."""
    server = own_server
    agent = plane.agent()
    await plane.wait(NodeJoined)
    for number in range(2):
        await plane.start(WAITS, str(tmp_path / f"go-{number}"), rank=number)
    await plane.wait(RankStarted, 2)
    for number in range(2):
        os.kill(server.pid, signal.SIGKILL)
        await until_gone(server.pid)
        (tmp_path / f"go-{number}").touch()
        pid = plane.all(RankStarted)[number].pid
        await until_gone(pid)
        await asyncio.sleep(0.3)
        assert agent.poll() is None
        server = embedded_server.start(tmp_path / "server")
        assert server.url == own_server.url
        exits = await plane.wait(RankExited, number + 1)
        assert [e.exit_code for e in exits] == [0] * (number + 1)
    agent.terminate()
    assert await ended(agent) == 0, plane.said()
    await plane.wait(NodeLeft)
    logged = await plane.log.read(after=0, num_max=1000)
    numbers = [r.source_seq for r in logged if r.source != "heart"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert plane.kinds() == [
        "NodeJoined",
        "RankStarted",
        "RankStarted",
        "RankExited",
        "RankExited",
        "NodeLeft",
    ]
    assert plane.said().count("the log is unreachable") == 2, plane.said()


@pytest.mark.thorough
async def test_an_agent_asks_where_the_log_is_when_it_is_unreachable(
    plane: PlaneStub, own_server: embedded_server.Server, tmp_path: Path
) -> None:
    """The server moves with its data; the agent's reports follow it."""
    agent = plane.agent()
    await plane.wait(NodeJoined)
    await plane.start(WAITS, str(tmp_path / "go"))
    await plane.wait(RankStarted)
    own_server.stop()
    (tmp_path / "server").rename(tmp_path / "elsewhere")
    moved = embedded_server.start(tmp_path / "elsewhere")
    try:
        (tmp_path / "go").touch()
        assert moved.url != own_server.url
        await plane.move(moved.url)
        assert [e.exit_code for e in await plane.wait(RankExited)] == [0]
        agent.terminate()
        assert await ended(agent) == 0, plane.said()
        assert "the log has moved" in plane.said()
        assert plane.kinds() == ["NodeJoined", "RankStarted", "RankExited", "NodeLeft"]
    finally:
        moved.stop(grace_s=1.0)


async def test_a_successor_delivers_the_reports_of_a_killed_agent(
    plane: PlaneStub, own_server: embedded_server.Server, tmp_path: Path
) -> None:
    first = plane.agent()
    await plane.wait(NodeJoined)
    await plane.start(WAITS, str(tmp_path / "go"))
    (started,) = await plane.wait(RankStarted)
    os.kill(own_server.pid, signal.SIGKILL)
    await until_gone(own_server.pid)
    (tmp_path / "go").touch()
    await until(lambda: not Path(f"/proc/{started.pid}").exists() or None)
    await asyncio.sleep(0.2)
    first.kill()
    plane.kill_shim()
    await ended(first)
    second = plane.agent()
    embedded_server.start(tmp_path / "server")
    await plane.wait(NodeJoined, 2)
    assert plane.kinds() == ["NodeJoined", "RankStarted", "RankExited", "NodeJoined"]
    sources = [r.source for r in plane.leader.records if r.source != "heart"]
    assert sources[0] == sources[1] == sources[2] != sources[3]
    await until(lambda: len(list((plane.state_dir / "agents").glob("*.spool"))) == 1 or None)
    second.terminate()
    assert await ended(second) == 0, plane.said()
    assert list((plane.state_dir / "agents").glob("*.spool")) == []


async def test_a_second_signal_ends_the_agent_at_once(plane: PlaneStub) -> None:
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\ntime.sleep(60)"
    agent = plane.agent()
    await plane.wait(NodeJoined)
    await plane.start(deaf)
    (started,) = await plane.wait(RankStarted)
    await until_text(started.log_path)
    agent.terminate()
    await asyncio.sleep(0.2)
    assert agent.poll() is None
    assert alive(started.pid)
    agent.terminate()
    assert await ended(agent) == 1, plane.said()
    await until_gone(started.pid)
    assert len(plane.all(NodeLeft)) == 1


async def test_another_log_under_the_same_address_ends_the_agent(
    plane: PlaneStub, own_server: embedded_server.Server, tmp_path: Path
) -> None:
    """Its ranks would have no control plane. The agent may join again as a new incarnation."""
    agent = plane.agent()
    await plane.wait(NodeJoined)
    await plane.start("import time; time.sleep(60)")
    (started,) = await plane.wait(RankStarted)
    own_server.stop(grace_s=1.0)
    for path in (tmp_path / "server").glob("appendonlydir/*"):
        path.unlink()
    embedded_server.start(tmp_path / "server")
    assert await ended(agent) == 1, plane.said()
    await until_gone(started.pid)
    assert "replaced by another one" in plane.said()


async def test_refusals_are_one_line(server: embedded_server.Server, tmp_path: Path) -> None:
    async with plane(server.url, tmp_path / "state") as one:
        wrong = one.agent(token="wrong")
        assert await ended(wrong) == 1
        assert "does not accept the token" in one.said()
        first = one.agent()
        await one.wait(NodeJoined)
        second = one.agent()
        assert await ended(second) == 1
        assert "already runs" in one.said()
        first.terminate()
        assert await ended(first) == 0
    assert "Traceback" not in one.said()


async def test_an_identity_is_made_once_and_only_its_revocation_ends_an_agent(
    plane: PlaneStub, own_server: embedded_server.Server
) -> None:
    plane.refusal = 503  # it was enrolled, and the answer is lost
    first = plane.agent(ENROLS="1")
    await until(lambda: plane.joined or None)
    first.kill()
    await ended(first)
    plane.refusal = 0
    agent = plane.agent(ENROLS="1")
    await plane.wait(NodeJoined)
    assert len(set(plane.joined)) == 1, "the second agent enrols with the same identity"
    (token, identity), *_ = plane.joined
    assert token == TOKEN
    await plane.start(SLEEP)
    (started,) = await plane.wait(RankStarted)
    plane.joined.clear()
    plane.refusal = 401
    own_server.stop()
    await until(lambda: "does not accept the token" in plane.said() or None)
    assert plane.joined[-1] == (identity, "")
    assert agent.poll() is None
    assert alive(started.pid), "a control plane that does not know it may be a wrong one"
    plane.refusal = 410
    assert await ended(agent) == 1
    await until_gone(started.pid)
    assert "error: " in plane.said().splitlines()[-1]
    assert f"remove {plane.state_dir}/agents/n1.identity" in plane.said().splitlines()[-1]
    (file,) = plane.state_dir.glob("agents/*.identity*")
    file.chmod(0o644)
    assert await ended(plane.agent(ENROLS="1")) == 1
    assert "others may read it" in plane.said()


async def test_an_unreachable_control_plane_is_tried_and_then_named() -> None:
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"cannot join http://127\.0\.0\.1:9"):
        await join(
            "http://127.0.0.1:9",
            TOKEN,
            node="n1",
            host="h",
            incarnation=1,
            labels=Labels(),
            s_max=0.5,
        )
    assert 0.1 < time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "sends an invalid answer"),
        (b"HTTP/1.1 200 OK\r\n\r\n\xff", "sends an invalid answer"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(join_module.ANSWER_BYTES_MAX + 1), "sends more than"),
        (b"HTTP/1.1 307 Follow\r\nContent-Length: 0\r\n\r\n", "refuses to let n1 join"),
        (b"HTTP/1.1 400 No\r\n\r\n" + b"[" * 100_000, "refuses to let n1 join"),
    ],
    ids=["deep", "no text", "endless", "nowhere", "deep problem"],
)
async def test_any_answer_to_a_join_is_one_error(answer: bytes, says: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(UsageError, match=says):
            await join(url, TOKEN, node="n1", host="h", incarnation=1, labels=Labels(), s_max=5.0)


# --- injected faults, and processes that are suspended -------------------------------------------
def fault(
    what: FaultKind, *, rank: int = 0, attempt: int = 1, incarnation: int = 7, stop_s: float = 0.0
) -> InjectFault:
    return InjectFault(
        nodes=("n1",),
        what=what,
        task=1,
        rank=rank,
        attempt=attempt,
        incarnation=incarnation,
        stop_s=stop_s,
    )


def is_stopped(pid: int) -> bool | None:
    proc = linux.read(pid)
    return True if proc is not None and proc.state == "T" else None


async def test_an_injected_kill_hits_only_its_rank(node: LocalNode) -> None:
    for rank in (0, 1):
        await node.start(python(SLEEP), rank=rank)
    await node.leader.wait(RankStarted, 2)
    await node.leader.order(fault("rank", incarnation=6))
    wrong = [
        await node.leader.order(fault("rank", attempt=2)),
        await node.leader.order(fault("stop", rank=5)),
    ]
    await node.leader.order(fault("rank"))
    (exited,) = await node.leader.wait(RankExited)
    assert (exited.rank, exited.signal) == (0, signal.SIGKILL)
    wrong.append(await node.leader.order(fault("rank")))
    refused = await node.leader.wait(OrderRefused, 3)
    assert [(r.order, r.why) for r in refused] == [
        (order, "there is no such rank") for order in wrong
    ]
    assert len(node.leader.all(RankExited)) == 1


async def _polite(one: LocalNode) -> int:
    """Start a rank that exits with code 7 on SIGTERM; return its pid."""
    await one.start(python(POLITE))
    (started,) = await one.leader.wait(RankStarted)
    await until_text(started.log_path)
    return started.pid


async def _stopped(one: LocalNode, stop_s: float = 0.0) -> None:
    """Start such a rank and inject a stop of `stop_s` seconds; 0 is a stop without end."""
    pid = await _polite(one)
    await one.leader.order(fault("stop", stop_s=stop_s))
    await until(lambda: is_stopped(pid))


async def test_an_injected_stop_ends_after_its_time(node: LocalNode) -> None:
    pid = await _polite(node)
    began_s = time.monotonic()
    await node.leader.order(fault("stop", stop_s=3.0))  # long enough to be seen at any load
    await until(lambda: is_stopped(pid))
    await until(lambda: None if is_stopped(pid) else True)
    assert time.monotonic() - began_s >= 3.0
    assert alive(pid)
    await node.stop_rank(grace_s=LIMIT_S)
    (exited,) = await node.leader.wait(RankExited)
    assert exited.exit_code == 7


async def test_a_rank_stopped_without_end_is_killed_after_its_grace(node: LocalNode) -> None:
    await _stopped(node)
    began_s = time.monotonic()
    await node.stop_rank(grace_s=0.5)
    (exited,) = await node.leader.wait(RankExited)
    assert time.monotonic() - began_s >= 0.5
    assert exited.signal == signal.SIGKILL, "a stopped process does not handle SIGTERM"


async def test_a_higher_attempt_fences_a_stopped_rank(node: LocalNode) -> None:
    await _stopped(node)
    await node.start(python("pass"), attempt=2)
    exits = await node.leader.wait(RankExited, 2)
    assert [(e.attempt, e.exit_code, e.signal) for e in exits] == [
        (1, None, signal.SIGKILL),
        (2, 0, None),
    ]


@pytest.mark.parametrize(("stop_s", "exit_code"), [(3600.0, 7), (0.0, None)])
async def test_an_agent_that_exits_continues_ranks_stopped_for_a_time(
    node: LocalNode, stop_s: float, exit_code: int | None
) -> None:
    await _stopped(node, stop_s)
    node.stop.set()
    (exited,) = await node.leader.wait(RankExited)
    assert exited.exit_code == exit_code
    assert exited.signal == (None if exit_code else signal.SIGKILL)


async def test_a_stop_is_reported_once_and_so_is_its_end(node: LocalNode) -> None:
    for rank in (0, 1):
        await node.start(python(SLEEP), rank=rank)
    started = {report.rank: report.pid for report in await node.leader.wait(RankStarted, 2)}
    for rank in (0, 1):
        os.kill(started[rank], signal.SIGSTOP)
        stops = await node.leader.wait(RankSuspended, rank + 1)
    os.kill(started[0], signal.SIGCONT)
    (continued,) = await node.leader.wait(RankContinued)
    os.kill(started[0], signal.SIGSTOP)
    stops = await node.leader.wait(RankSuspended, 3)
    assert [(report.rank, report.attempt, report.pid) for report in stops] == [
        (rank, 1, started[rank]) for rank in (0, 1, 0)
    ]
    assert (continued.rank, continued.pid) == (0, started[0])
    os.kill(started[1], signal.SIGKILL)
    await node.leader.wait(RankExited)
    await asyncio.sleep(2 * LOOK_S)
    assert len(node.leader.all(RankContinued)) == 1, "a killed rank is not reported as continued"
    assert len(node.leader.all(RankSuspended)) == 3
    os.kill(started[0], signal.SIGCONT)  # lets it end at once


async def test_the_kernel_tells_the_agent_of_stops_before_its_next_poll(plane: PlaneStub) -> None:
    """The median delay of several reports is less than half the polling interval."""
    agent = plane.agent()
    await plane.wait(NodeJoined)
    await plane.start(SLEEP)
    (started,) = await plane.wait(RankStarted)
    delays_s: list[float] = []
    for num in range(1, 12):
        stopped_s = time.time()
        os.kill(started.pid, signal.SIGSTOP)
        await plane.wait(RankSuspended, num)
        records = [x for x in plane.leader.records if isinstance(x.body, RankSuspended)]
        delays_s.append(records[-1].occurred_s - stopped_s)
        os.kill(started.pid, signal.SIGCONT)
        await plane.wait(RankContinued, num)
    assert median(delays_s) < LOOK_S / 2, delays_s
    agent.terminate()
    assert await ended(agent) == 0, plane.said()


@contextmanager
def held_by_a_debugger(pid: int) -> Iterator[None]:
    """Trace a child of this process, which stops the child."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(16, pid, None, None) == 0, os.strerror(ctypes.get_errno())  # PTRACE_ATTACH
    os.waitpid(pid, 0)
    try:
        yield
    finally:
        assert libc.ptrace(17, pid, None, None) == 0  # PTRACE_DETACH


async def test_a_rank_in_a_debugger_is_not_stopped(node: LocalNode) -> None:
    for rank in (0, 1):
        await node.start(python(SLEEP), rank=rank)
    pids = {report.rank: report.pid for report in await node.leader.wait(RankStarted, 2)}
    with held_by_a_debugger(pids[0]):
        found = linux.read(pids[0])
        assert found is not None
        assert found.state == "t"
        await asyncio.sleep(2 * LOOK_S)
        os.kill(pids[1], signal.SIGSTOP)
        (report,) = await node.leader.wait(RankSuspended)
        assert report.rank == 1
    os.kill(pids[1], signal.SIGCONT)  # lets it end at once


async def test_an_injected_node_loss_happens_once(plane: PlaneStub, tmp_path: Path) -> None:
    first = plane.agent()
    (joined,) = await plane.wait(NodeJoined)
    note = tmp_path / "child"
    await plane.start(CHILD_OF_ITS_OWN, str(note))
    await plane.start(SLEEP, rank=1)
    pids = [started.pid for started in await plane.wait(RankStarted, 2)]
    pids.append(int(await until_text(note)))
    os.kill(pids[1], signal.SIGSTOP)
    await plane.wait(RankSuspended)
    await plane.leader.order(fault("node", incarnation=joined.incarnation))
    assert joined.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert await ended(first) == -signal.SIGKILL
    for pid in pids:
        await until_gone(pid)
    second = plane.agent()
    await plane.wait(NodeJoined, 2)
    await plane.start("pass", attempt=2)  # the new agent has read the fault order and survived it
    await plane.wait(RankExited)
    assert second.poll() is None
    assert plane.kinds() == [
        "NodeJoined",
        "RankStarted",
        "RankStarted",
        "RankSuspended",
        "NodeJoined",
        "RankStarted",
        "RankExited",
    ]
    second.terminate()
    assert await ended(second) == 0, plane.said()


STOPPED_S = CALL_S_MAX + 1.0
"""Long enough for every time limit of a call in progress to pass."""
COUNTS = """
import sys, time
while True:
    open(sys.argv[1], "a").write("x")
    time.sleep(0.05)
"""


async def _wait_for_heartbeat(one: PlaneStub) -> None:
    """Wait for a heartbeat that is younger than two seconds."""
    last_s = time.monotonic() + LIMIT_S
    while not any(beat.age_s < 2.0 for beat in await one.log.beats(["n1"])):
        assert time.monotonic() < last_s, one.said()
        await asyncio.sleep(0.1)


async def _pause(pid: int, meanwhile: Callable[[], None]) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOPPED_S / 2)
        meanwhile()
        await asyncio.sleep(STOPPED_S / 2)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("who", ["agent", "server"])
@pytest.mark.thorough
async def test_an_agent_or_server_that_stops_for_a_while_loses_nothing(
    plane: PlaneStub, own_server: embedded_server.Server, tmp_path: Path, who: str
) -> None:
    agent = plane.agent()
    await plane.wait(NodeJoined)
    count, end = tmp_path / "count", tmp_path / "end"
    await plane.start(COUNTS, str(count))
    await plane.start(WAITS, str(end), rank=1)
    ranks = await plane.wait(RankStarted, 2)
    await until_text(count)
    sizes: list[int] = []

    def meanwhile() -> None:
        end.touch()
        sizes.append(count.stat().st_size)

    await _pause(agent.pid if who == "agent" else own_server.pid, meanwhile)
    assert count.stat().st_size > sizes[0] + 10, "rank 0 runs during the pause"
    (exited,) = await plane.wait(RankExited)
    assert (exited.rank, exited.exit_code) == (1, 0)
    await _wait_for_heartbeat(plane)
    await plane.start("pass", rank=1, attempt=2)
    await plane.wait(RankExited, 2)
    assert alive(ranks[0].pid)
    assert agent.poll() is None
    agent.terminate()
    assert await ended(agent) == 0, plane.said()
    logged = await plane.log.read(after=0, num_max=1000)
    numbers = [r.source_seq for r in logged if r.source != "heart"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert plane.kinds() == [
        "NodeJoined",
        "RankStarted",
        "RankStarted",
        "RankExited",
        "RankStarted",
        "RankExited",
        "NodeLeft",
        "RankExited",
    ]
