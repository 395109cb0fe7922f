"""An agent that ends and starts again: its ranks run on, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
from pathlib import Path

from agent_driver import WAITS, PlaneStub, alive, ended, train, until, until_gone, until_text
from guards import unguarded
from kubernetes_api import KubernetesApi
from unicron.events.records import reports as r
from unicron.events.records.types import Labels
from unicron.workers.agent.processes.pipe import Pipe
from unicron.workers.host import linux
from unicron.workers.ipc.pipe_protocol import Frame, pack

PROGRESS = """
import os, socket, sys, time
from unicron.events.records.orders import StartRank
from unicron.events.records.reports import RankReady, TaskProgressed
from unicron.workers.ipc.pipe_protocol import Frame, Unpacker, pack
link = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
(frame, *_) = Unpacker().feed(link.recv(65536))
order = frame.body
for number in range(60):
    link.sendall(pack(Frame(seq=number + 1, at_s=time.time(), body=TaskProgressed(
        task=order.task, generation=1, first_iteration=number, losses=(1.0,), step_s=(1.0,),
        rate_flops=1.0, micro_batches=1))))
    time.sleep(0.05)
sys.exit(5)
"""
"""A rank that reports 60 iterations, and exits with code 5."""


def sources(plane: PlaneStub) -> list[tuple[str, int]]:
    return [
        (record.source, record.source_seq)
        for record in plane.leader.records
        if record.source != "heart"
    ]


async def stop(agent: subprocess.Popen[bytes], plane: PlaneStub) -> None:
    agent.terminate()
    assert await ended(agent) == 0, plane.said()
    await until(lambda: None if plane.shims() else True)


async def kill(agent: subprocess.Popen[bytes]) -> None:
    agent.kill()
    await ended(agent)


async def test_a_killed_agents_successor_adopts_its_ranks(plane: PlaneStub, tmp_path: Path) -> None:
    first = plane.agent()
    await plane.wait(r.NodeJoined)
    await plane.start(WAITS, str(tmp_path / "go"))
    (started,) = await plane.wait(r.RankStarted)
    await kill(first)
    assert alive(started.pid)
    second = plane.agent()
    (restarted,) = await plane.wait(r.AgentRestarted)
    assert restarted.pid == second.pid
    assert alive(started.pid)
    await plane.start("raise SystemExit(3)", rank=1)
    await plane.wait(r.RankExited)
    (tmp_path / "go").touch()
    _, exited = await plane.wait(r.RankExited, 2)
    assert (exited.pid, exited.exit_code) == (started.pid, 0)
    assert linux.read(started.pid) is None, "it is reaped"
    await stop(second, plane)
    assert plane.kinds() == [
        "NodeJoined",
        "RankStarted",
        "AgentRestarted",
        "RankStarted",
        "RankExited",
        "RankExited",
        "NodeLeft",
    ]
    (joined,) = plane.all(r.NodeJoined)
    assert sources(plane) == [(f"n1/{joined.incarnation}", number) for number in range(1, 8)]


async def test_an_agent_killed_while_it_stops_has_no_successor(plane: PlaneStub) -> None:
    """The node has left: its ranks end, and the next agent joins with an incarnation of its own."""
    first = plane.agent()
    await plane.wait(r.NodeJoined)
    await plane.start(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    )
    (started,) = await plane.wait(r.RankStarted)
    first.terminate()
    await plane.wait(r.NodeLeft)
    await kill(first)
    second = plane.agent()
    one, two = await plane.wait(r.NodeJoined, 2)
    assert two.incarnation > one.incarnation
    await until_gone(started.pid)
    await stop(second, plane)
    assert plane.kinds()[-2:] == ["NodeJoined", "NodeLeft"]


async def test_a_rank_that_ends_without_an_agent_is_reported_by_the_next(
    plane: PlaneStub, tmp_path: Path
) -> None:
    first = plane.agent()
    await plane.wait(r.NodeJoined)
    code = WAITS + "print('the last words')\nsys.exit(7)"
    await plane.start(code, str(tmp_path / "go"))
    await plane.start(WAITS, str(tmp_path / "never"), rank=1)
    one, two = await plane.wait(r.RankStarted, 2)
    await kill(first)
    (tmp_path / "go").touch()
    os.kill(two.pid, signal.SIGKILL)
    for pid in (one.pid, two.pid):
        await until_gone(pid)
    second = plane.agent()
    exits = {exited.rank: exited for exited in await plane.wait(r.RankExited, 2)}
    assert (exits[0].exit_code, exits[0].signal) == (7, None)
    assert "the last words" in exits[0].tail
    assert (exits[1].exit_code, exits[1].signal) == (None, signal.SIGKILL)
    await kill(second)
    third = plane.agent()
    await plane.wait(r.AgentRestarted, 2)
    await stop(third, plane)
    assert len(plane.all(r.RankExited)) == 2


async def test_a_planned_restart_keeps_the_pid_and_is_a_record(
    plane: PlaneStub, tmp_path: Path
) -> None:
    agent = plane.agent()
    await plane.wait(r.NodeJoined)
    await plane.start(WAITS, str(tmp_path / "go"))
    (started,) = await plane.wait(r.RankStarted)
    for number in (1, 2):
        agent.send_signal(signal.SIGUSR2)
        assert (await plane.wait(r.AgentRestarted, number))[-1].pid == agent.pid
        await until(lambda n=number: True if plane.said().count("adopted a rank") == n else None)
    assert {one.back_s for one in plane.all(r.AgentRestarting)} == {60.0}
    (tmp_path / "go").touch()
    (exited,) = await plane.wait(r.RankExited)
    assert (exited.pid, exited.exit_code) == (started.pid, 0)
    await stop(agent, plane)


async def test_an_agent_that_restarts_without_kubernetes_keeps_its_place_and_ranks(
    plane: PlaneStub, tmp_path: Path
) -> None:
    """Its labels came from there. Without them it would be another node, and end its ranks."""
    api = KubernetesApi()
    async with api.serve(tmp_path) as file:
        agent = plane.agent(KUBERNETES="gpu-1", KUBECONFIG=str(file), UNICRON_HEALTH="on")
        (joined,) = await plane.wait(r.NodeJoined)
        assert joined.labels == Labels(rack="nvl-3", switch="leaf-7")
        # This one's control plane tells none, as an older one.
        assert plane.said().count("the control plane has another version") == 1
        await plane.start(WAITS, str(tmp_path / "go"))
        (started,) = await plane.wait(r.RankStarted)
        await until(lambda: True if api.num_watches else None)
        api.is_cordoned = True
        api.changed()
        await until(
            lambda: (
                True
                if any(
                    (one.check, one.health) == ("kubernetes/unschedulable", "unhealthy")
                    for one in plane.all(r.HealthChanged)
                )
                else None
            )
        )
    agent.send_signal(signal.SIGUSR2)
    assert (await plane.wait(r.AgentRestarted))[0].pid == agent.pid
    (tmp_path / "go").touch()
    (exited,) = await plane.wait(r.RankExited)
    assert (exited.pid, exited.exit_code) == (started.pid, 0)
    assert len(plane.all(r.NodeJoined)) == 1
    await stop(agent, plane)


async def test_a_node_that_kubernetes_does_not_know_ends_its_agent(
    plane: PlaneStub, tmp_path: Path
) -> None:
    async with KubernetesApi().serve(tmp_path) as file:
        agent = plane.agent(KUBERNETES="GPU-1", KUBECONFIG=str(file))
        assert await ended(agent) == 1  # the driver's; the command's is 2
    assert "error: Kubernetes has no node 'GPU-1'; hint: kubectl get nodes" in plane.said()
    assert not plane.all(r.NodeJoined)


async def test_ranks_without_an_agent_end_after_their_time(
    plane: PlaneStub, tmp_path: Path
) -> None:
    plane.gone_s = 1.0
    first = plane.agent()
    await plane.wait(r.NodeJoined)
    child = tmp_path / "child"
    await plane.start(
        "import subprocess, sys\n"
        "one = subprocess.Popen(['sleep', '99'], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(f'{one.pid} ')\none.wait()",
        str(child),
    )
    (started,) = await plane.wait(r.RankStarted)
    pids = [started.pid, int(await until_text(child)), *plane.shims()]
    assert len(pids) == 3
    await kill(first)
    await asyncio.sleep(0.3)
    assert all(alive(pid) for pid in pids)
    for pid in pids:
        await until_gone(pid)
    second = plane.agent()
    old, new = await plane.wait(r.NodeJoined, 2)
    assert new.incarnation > old.incarnation
    await stop(second, plane)


async def test_an_agent_that_cannot_start_does_not_prolong_their_time(
    plane: PlaneStub, tmp_path: Path
) -> None:
    plane.gone_s = 4.0
    first = plane.agent()
    await plane.wait(r.NodeJoined)
    await plane.start(WAITS, str(tmp_path / "go"))
    (started,) = await plane.wait(r.RankStarted)
    await kill(first)
    while alive(started.pid):
        assert await ended(plane.agent("a wrong token")) == 1
    await until(lambda: None if plane.shims() else True)


async def test_one_agent_for_each_node(plane: PlaneStub, tmp_path: Path) -> None:
    first = plane.agent()
    await plane.wait(r.NodeJoined)
    await plane.start(WAITS, str(tmp_path / "go"))
    (started,) = await plane.wait(r.RankStarted)
    first.send_signal(signal.SIGSTOP)  # also while it does nothing
    assert await ended(plane.agent()) == 1
    assert "an agent for node n1 already runs" in plane.said()
    first.send_signal(signal.SIGCONT)
    assert alive(started.pid)
    await stop(first, plane)


async def test_an_agent_with_other_slots_ends_the_ranks_and_joins_anew(
    plane: PlaneStub, tmp_path: Path
) -> None:
    first = plane.agent()
    await plane.wait(r.NodeJoined)
    await plane.start(WAITS, str(tmp_path / "go"))
    (started,) = await plane.wait(r.RankStarted)
    await kill(first)
    second = plane.agent(SLOTS="3")
    _, joined = await plane.wait(r.NodeJoined, 2)
    assert (joined.num_slots, alive(started.pid)) == (3, False)
    await stop(second, plane)


async def test_the_end_of_the_shim_is_the_end_of_its_ranks_and_of_the_agent(
    plane: PlaneStub, tmp_path: Path
) -> None:
    agent = plane.agent()
    await plane.wait(r.NodeJoined)
    await plane.start(WAITS, str(tmp_path / "go"))
    (started,) = await plane.wait(r.RankStarted)
    plane.kill_shim()
    assert await ended(agent) == 1
    await until_gone(started.pid)


async def test_reports_of_a_rank_arrive_once_whenever_its_agent_is_killed(
    plane: PlaneStub, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(PROGRESS)
    agent = plane.agent(RANK=str(tmp_path / "rank.py"))
    await plane.wait(r.NodeJoined)
    await plane.start_rank(train(1))
    await plane.wait(r.TaskProgressed)
    rng, num_kills = random.Random(24), 0
    while not plane.all(r.RankExited) and num_kills < 6:
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        await kill(agent)
        num_kills += 1
        agent = plane.agent(RANK=str(tmp_path / "rank.py"))
        await plane.wait(r.AgentRestarted, num_kills)
    (exited,) = await plane.wait(r.RankExited)
    assert exited.exit_code == 5
    assert [one.first_iteration for one in plane.all(r.TaskProgressed)] == list(range(60))
    assert len(plane.all(r.RankStarted)) == 1
    assert len({source for source, _ in sources(plane)}) == 1
    assert [number for _, number in sources(plane)] == list(range(1, len(sources(plane)) + 1))
    await stop(agent, plane)


async def test_a_frame_leaves_the_pipe_only_after_it_was_handled() -> None:
    ours, theirs = socket.socketpair()
    frames = [
        Frame(
            seq=number,
            body=r.RankErrored(
                task=1, rank=0, attempt=1, generation=1, iteration=number, error="E", text=""
            ),
        )
        for number in (1, 2, 3)
    ]
    data = b"".join(pack(frame) for frame in frames)
    theirs.sendall(data[:-1])
    seen: list[int] = []

    def dies(frame: Frame) -> None:
        seen.append(frame.seq)
        if frame.seq == 2:
            raise InterruptedError

    pipe = Pipe(dies, lambda: unguarded((1, 0, 1), "pipe"), fd=os.dup(ours.fileno()))
    await until(lambda: True if seen == [1, 2] else None)
    pipe.close()
    theirs.sendall(data[-1:])
    again = Pipe(
        lambda frame: seen.append(frame.seq), lambda: unguarded((1, 0, 1), "pipe"), fd=ours.detach()
    )
    await until(lambda: True if seen == [1, 2, 1, 2, 3] else None)
    again.close()
    theirs.close()
