"""A recovery ends the connections of the generation that it leaves, and no other."""

from __future__ import annotations

import datetime
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import kept_connections
import pytest
import torch
import torch.distributed as dist
from loop_driver import SAMPLE, changed_example, drive_loop
from nursery import Nursery
from unicron.events import network_address
from unicron.events.records import reports as r
from unicron.workers.training.communicators import sockets
from unicron.workers.training.communicators.sockets import Ends, NamingStore
from unicron.workers.training.dependencies import private_torch

LIMIT_S = 60.0
KILLS_NUM = 20
EVENTS = ("forward", "backward", "reduce", "step")
Group = Any
GLOO: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]


def hosts() -> list[str]:
    """The addresses of this machine, of both families."""
    found = dict.fromkeys(host for _, host in network_address.interfaces())
    return [host for host in found if not host.startswith("fe80")]


def groups(host: str, stores: list[Any]) -> list[Group]:
    """A gloo group of as many members as there are stores, all in this process."""

    def build(place: int) -> Group:
        options = GLOO._Options()
        options._devices = [GLOO.create_device(hostname=host)]
        options._timeout = datetime.timedelta(seconds=LIMIT_S)
        return GLOO(stores[place], place, len(stores), options)

    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(build, range(len(stores))))


def total(members: list[Group]) -> list[float]:
    """What each member has after an all-reduce of ones."""
    values = [torch.ones(1) for _ in members]
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(lambda at: members[at].allreduce([values[at]]).wait(), range(len(members))))
    return [value.item() for value in values]


def pair(host: str) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection to another port of this address."""
    with socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    ) as listener:
        near = socket.create_connection(listener.getsockname()[:2])
        far, _ = listener.accept()
        return near, far


@pytest.mark.parametrize("host", hosts())
def test_what_a_generations_store_names_is_ended_and_nothing_else(host: str) -> None:
    """Beside it: another group of the same members with a store of its own, a plain connection,
    and a listener, all on the same address."""
    store, own_store = dist.HashStore(), dist.HashStore()
    ends = [Ends() for _ in range(3)]
    members = groups(host, [NamingStore(store, each) for each in ends])
    others = groups(host, [own_store] * 3)
    near, far = pair(host)
    with closing(near), closing(far):
        assert total(members) == total(others) == [3.0] * 3
        assert [len(each.listeners) for each in ends] == [1, 1, 1]
        assert [len(each.peers) for each in ends] == [3, 3, 3]
        assert {end[0] for each in ends for end in each.peers} == {host}
        work = members[0].allreduce([torch.ones(1)])  # the others do not come
        sockets.shut_down(ends[0])
        with pytest.raises(RuntimeError):
            work.wait()
        assert total(others) == [3.0] * 3
        near.sendall(b"x")
        assert far.recv(1) == b"x"


@pytest.mark.parametrize("host", hosts())
def test_only_the_generations_own_listeners_are_connected_to(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as ours,
        socket.create_server((host, 0), family=family) as users,
    ):
        ends = Ends()
        ends.listeners.add(ours.getsockname()[:2])
        sockets.connect_to_listeners(ends, 3)
        users.setblocking(False)
        with pytest.raises(BlockingIOError):
            users.accept()
        numbers = [ours.accept()[0].recv(8) for _ in range(3)]
        assert [int.from_bytes(each, "little") for each in numbers] == [0, 1, 2]


def test_an_address_of_ipv4_is_the_same_in_a_socket_of_ipv6() -> None:
    """As of a user's server on all addresses; and as of a member that listens so."""
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as near,
    ):
        far, _ = listener.accept()
        with far:
            assert far.getsockname()[0] == "::ffff:127.0.0.1"
            ends = Ends()
            ends.peers.add(("127.0.0.1", listener.getsockname()[1] + 1))
            sockets.shut_down(ends)
            near.sendall(b"x")
            assert far.recv(1) == b"x"
            ends.listeners.add(("127.0.0.1", listener.getsockname()[1]))
            sockets.shut_down(ends)
            assert near.recv(1) == b""


CONNECTS = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"


def test_a_connection_that_gloos_listener_has_accepted_is_ended() -> None:
    """Its other end is in another process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        with subprocess.Popen([sys.executable, "-c", CONNECTS, port]) as peer:
            far, _ = listener.accept()
            with far:
                far.setblocking(False)
                ends = Ends()
                sockets.shut_down(ends)
                with pytest.raises(BlockingIOError):
                    far.recv(1)
                ends.listeners.add(listener.getsockname())
                sockets.shut_down(ends)
                assert far.recv(1) == b""
            assert peer.wait(LIMIT_S) == 0


@pytest.mark.parametrize("is_named", [True, False])
def test_a_connection_without_an_answer_is_ended_by_where_it_goes(is_named: bool) -> None:
    """The system does not tell its process of the other end yet."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        target = full.getsockname()
        last_s = time.monotonic() + LIMIT_S
        while True:  # until the listener takes no more
            assert time.monotonic() < last_s
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.3)
            try:
                waiting.connect(target)
            except TimeoutError:
                break
        ends = Ends()
        ends.peers.add(target if is_named else (target[0], target[1] + 1))
        sockets.shut_down(ends)
        state = waiting.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        assert (state == sockets.SYN_SENT_CODE) is not is_named


def test_only_what_gloo_publishes_is_an_address() -> None:
    store = dist.HashStore()
    seen: dict[str, bytes] = {}

    class Seen(NamingStore):
        def set(self, key: str, value: Any) -> None:
            seen[key] = bytes(value)
            super().set(key, value)

    ends = [Ends(), Ends()]
    groups("127.0.0.1", [Seen(store, each) for each in ends])
    (value,) = [value for key, value in seen.items() if key.rpartition("/")[2] == "1"]
    address = private_torch.gloo_address("any/1", value)
    assert address is not None
    assert set(address[:1]) == {"127.0.0.1"}
    assert address in ends[1].listeners
    assert private_torch.gloo_address("any/one", value) is None
    for length in range(len(value)):
        assert private_torch.gloo_address("any/1", value[:length]) in (None, address)
    for other in (b"", b"\0" * 400, b"\xff" * 400, b"news", bytes(range(256)) * 2):
        assert private_torch.gloo_address("any/1", other) is None


def test_the_store_of_a_generation_answers_as_the_one_beneath() -> None:
    """Asked through torch's C++, as by its groups."""
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    below = dist.PrefixStore("below", server)
    naming = NamingStore(below, Ends())  # torch does not keep what is Python's of it
    store: Any = dist.PrefixStore("above", naming)
    plain: Any = dist.PrefixStore("plain", server)

    def answers(asked: Any) -> list[Any]:
        soon = datetime.timedelta(seconds=0.1)
        asked.set("a", b"\0\xff")
        asked.append("log", b"x")
        asked.append("log", b"y")
        asked.multi_set(["c", "d"], [b"1", b"2"])
        found = [
            asked.get("a"),
            asked.get("log"),
            asked.multi_get(["c", "d"]),
            asked.add("count", 3),
            asked.add("count", 4),
            asked.check(["a"]),
            asked.check(["b"]),
            asked.compare_set("a", "", "other"),
            asked.delete_key("c"),
            asked.check(["c"]),
            asked.num_keys() > 0,
            asked.has_extended_api(),
        ]
        asked.wait(["a"])
        with pytest.raises(RuntimeError):
            asked.wait(["never"], soon)
        return found

    assert answers(store) == answers(plain)


# --- real ranks ---
@pytest.fixture
def loops(tmp_path: Path, nursery: Nursery, closed: Callable[..., Any]) -> Callable[..., Any]:
    """`loops(services)`: a driver whose ranks run the example, with a user's connections."""

    def make(services: kept_connections.Services, **options: Any) -> Any:
        used = f"    use()\n{SAMPLE}"
        script = changed_example(
            tmp_path, [(SAMPLE, used), ("\nVOCABULARY", f"{services.script}\nVOCABULARY")]
        )
        return closed(
            drive_loop(
                tmp_path,
                nursery,
                [],
                iterations=10_000,
                micro_batches=3,
                slots_max=3,
                script=script,
                **options,
            )
        )

    return make


def killed_again_and_again(loops: Callable[..., Any], tmp_path: Path, num: int) -> None:
    """Kill one of three ranks `num` times, each time at another event. The other two live on, and
    each has used one connection of every kind."""
    with kept_connections.services(tmp_path / "servers") as services:
        driver = loops(services)
        driver.start(0, 1, 2)
        driver.form([0, 1, 2])
        pids = [driver.processes[rank].popen.pid for rank in (0, 2)]
        for kill in range(num):
            at = max(driver.losses(), default=0) + 2
            driver.strike(1, iteration=at, event=EVENTS[kill % len(EVENTS)])
            driver.kill(1)
            driver.quiesce([0, 2], "now")
            driver.start(1, attempt=kill + 2)
            driver.form([0, 1, 2], progress_from=max(driver.losses(), default=-1) + 1)
        last = max(driver.losses())
        driver.until(lambda: max(driver.losses()) > last + 2)
        assert [driver.processes[rank].popen.pid for rank in (0, 2)] == pids
        assert all(driver.processes[rank].popen.poll() is None for rank in (0, 2))
        assert not driver.told(r.RankErrored)
        for pid in pids:
            assert services.num_connections(pid) == {"http": 1, "s3": 1, "redis": 1}


def test_a_users_connections_outlive_a_killed_rank(
    loops: Callable[..., Any], tmp_path: Path
) -> None:
    killed_again_and_again(loops, tmp_path, 2)


@pytest.mark.thorough
def test_a_users_connections_outlive_twenty_kills(
    loops: Callable[..., Any], tmp_path: Path
) -> None:
    killed_again_and_again(loops, tmp_path, KILLS_NUM)
