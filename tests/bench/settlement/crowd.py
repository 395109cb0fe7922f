"""All members of a settlement at once: their requests to the generation's store, and the seconds.

Each member is a thread with its own connection to a real store, and runs the code of a rank that
talks to the store: the rendezvous, the rounds of the state exchange, the lists of shards that it
reads, and the round of `adopt` before the loop goes on. What a member tells, the same code has
encoded before (ranks.py): its own CPU time is measured there.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed as dist
from bench.settlement.ranks import World, measured_places
from unicron.events import network_address
from unicron.workers.training.adopt.adoption import Job
from unicron.workers.training.communicators.rounds import Rounds
from unicron.workers.training.recovery.state_exchange import answers_to_plans

NUM_PROCESSES_MAX = 4
WAIT_S = 300.0
CONNECT_S_MAX = 60.0
STACK_BYTES = 256 << 10
FILES_BESIDE = 64
"""Open files of the store's process, besides a connection of each member."""
Part = tuple[int, ...]


class Told(NamedTuple):
    """What one member brings: its claim, its offer, what it tells of its plan, the lists of shards
    that it publishes, and the names of those that it reads."""

    claim: bytes
    offer: bytes
    plan: bytes
    publishes: dict[str, bytes]
    reads: Sequence[str]


class Walked(NamedTuple):
    """What one member has done: messages to the store, bytes both ways, and when it was done."""

    num_requests: int
    num_bytes: int
    ended_s: float


class Crowd(NamedTuple):
    """What all members have done. `num_requests`: of the member with most; `wall_s`: from the first
    request to the last answer, with all of them on this machine; `server_cpu_s`: CPU time of the
    process that has the store."""

    num_requests: int
    bytes_a_rank: float
    wall_s: float
    server_cpu_s: float


class Client:
    """A connection to a store. Counts the messages of each call: before torch reads keys, it waits
    for them by another message."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_S_MAX),
        )
        self._store.set_timeout(timedelta(seconds=WAIT_S))
        self.num_requests = self.num_bytes = 0

    def set(self, key: str, value: bytes) -> None:
        """As torch's; so the other methods."""
        self._count(1, [key], [value])
        self._store.set(key, value)  # type: ignore[arg-type]  # torch takes bytes too

    def get(self, key: str) -> bytes:
        found = self._store.get(key)
        self._count(2, [key, key], [found])
        return found

    def wait(self, keys: list[str], wait: timedelta) -> None:
        self._count(1, keys, [])
        self._store.wait(keys, wait)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self._store.multi_get(keys)
        self._count(2, [*keys, *keys], found)
        return found

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._count(1, keys, values)
        self._store.multi_set(keys, values)  # type: ignore[arg-type]

    def _count(self, num: int, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self.num_requests += num
        self.num_bytes += sum(map(len, keys)) + sum(map(len, values))


class Between:
    """What drives a loop: a generation begins, and nothing else happens."""

    def __init__(self, rounds: Rounds) -> None:
        self.settled = 0
        self.communicators = SimpleNamespace(generation=1, interrupt=lambda: None, rounds=rounds)
        self.control = SimpleNamespace(waiting_for_others=lambda *_: nullcontext())

    def steps(self) -> Iterator[None]:
        """One generation."""
        yield None


def walk(place: int, num: int, told: Told, client: Client) -> None:
    """One member's way from the rendezvous to the loop."""
    Rounds(client, place, num, "meet", WAIT_S).gather(told.claim)
    rounds = Rounds(client, place, num, "round", WAIT_S)
    rounds.gather(told.offer)
    for name, data in told.publishes.items():
        client.set(name, data)
    for name in told.reads:
        client.get(name)
    rounds.scatter(told.plan, answers_to_plans)
    driver: Any = Between(rounds)
    work: Any = SimpleNamespace(train=SimpleNamespace(iterations=1), made=None)
    for _ in Job(driver, work):
        break


def all_told(world: World) -> list[Told]:
    """What each member brings."""
    plans, _ = world.told()
    reads: list[str] = []
    for place in measured_places(world.scene.num):
        if place in world.receivers:
            reads = world.cost(place)[1].lists_read
    first: dict[str, int] = {}
    if reads:
        for place, offer in enumerate(world.offers):
            first.setdefault(f"shards/{offer[8:24].hex()}", place)
    return [
        Told(
            claim,
            world.offers[place],
            plans[place],
            {name: data for name, data in world.described.items() if first.get(name) == place},
            reads,
        )
        for place, claim in enumerate(world.claims)
    ]


def allow_files(num: int) -> str:
    """Let this process and those that it starts have the open files that a crowd of `num` members
    needs. Returns why that cannot be; "" if it can."""
    needed = num + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        return f"{num} members need {needed} open files, and `ulimit -Hn` is {hard}"
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return ""


def crowd_of(world: World) -> Crowd:
    """Let all members of a scene walk, in a few processes."""
    told = all_told(world)
    num = len(told)
    forked = multiprocessing.get_context("fork")
    num_processes = min(NUM_PROCESSES_MAX, num)
    start = forked.Barrier(num_processes + 1)
    here, there = forked.Pipe()
    server = forked.Process(target=_serve, args=(there,), daemon=True)
    server.start()
    port: int = here.recv()
    pipes: list[Connection] = []
    members: list[Any] = []
    for number in range(num_processes):
        mine, theirs = forked.Pipe()
        part = tuple(range(number, num, num_processes))
        given = port, part, told, start, theirs
        members.append(forked.Process(target=_members, args=given, daemon=True))
        members[-1].start()
        pipes.append(mine)
    try:
        start.wait(WAIT_S)
    except threading.BrokenBarrierError:
        sys.exit(f"{num} members have not connected within {WAIT_S:.0f} s: is the machine busy?")
    began_s = time.monotonic()
    walked: list[Walked] = [each for pipe in pipes for each in pipe.recv()]
    here.send(None)
    server_cpu_s: float = here.recv()
    for process in (*members, server):
        process.join(WAIT_S)
    return Crowd(
        max(each.num_requests for each in walked),
        sum(each.num_bytes for each in walked) / num,
        max(each.ended_s for each in walked) - began_s,
        server_cpu_s,
    )


def _serve(pipe: Connection) -> None:
    # As a rank has it: on a socket of IPv4. With one of IPv6, torch asks the name server for the
    # name of each member that connects, and may wait 10 s for the answer.
    listener = network_address.listen("127.0.0.1")
    store = dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()),
        use_libuv=True,
    )
    pipe.send(store.port)
    pipe.recv()
    pipe.send(time.process_time())


def _members(port: int, part: Part, told: Sequence[Told], start: Any, pipe: Connection) -> None:
    threading.stack_size(STACK_BYTES)
    walked: dict[int, Walked] = {}
    connected, begins = threading.Barrier(len(part) + 1), threading.Event()

    def member(place: int) -> None:
        client = Client(port)
        with suppress(threading.BrokenBarrierError):
            connected.wait(WAIT_S)
        begins.wait()
        walk(place, len(told), told[place], client)
        walked[place] = Walked(client.num_requests, client.num_bytes, time.monotonic())

    threads = [threading.Thread(target=member, args=(place,), daemon=True) for place in part]
    for thread in threads:
        thread.start()
    try:
        connected.wait(WAIT_S)
        start.wait(WAIT_S)
    except threading.BrokenBarrierError:
        start.abort()
        return
    begins.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(walked) == len(part), "a member has failed"
    pipe.send([walked[place] for place in part])
