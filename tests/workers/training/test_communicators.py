"""Communicators of successive generations: each releases every handle and socket it opened."""

from __future__ import annotations

import datetime
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import world_work
import worlds
from megatron.core import parallel_state
from rank_driver import Drive
from unicron.events.records.reports import ReconfigureFailed
from unicron.events.spec.job import Model, Train
from unicron.events.spec.model import Axes
from unicron.events.timing import RENDEZVOUS_S_MAX
from unicron.workers.ipc.pipe_protocol import Unpacker
from unicron.workers.ipc.progress_page import ProgressWriter
from unicron.workers.training.communicators import communicators, sockets
from unicron.workers.training.communicators.communicators import (
    COLLECTIVE_S_MAX,
    Communicators,
    NcclAborts,
)
from unicron.workers.training.communicators.nccl_errors import NcclErrors
from unicron.workers.training.model import cpu_device
from unicron.workers.training.model import trainee as model
from unicron.workers.training.process.control_thread import Control
from unicron.workers.training.process.trace import Marks
from unicron.workers.training.step.collective import Collectives
from unicron.workers.training.step.results import Stopped

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")
TRAIN = Train(
    model=Model(num_layers=1, hidden=32, num_heads=2, sequence=16),
    iterations=10,
    output="unused",
    overlap=True,
    bucket_params=3_000,
)
CLOSED_S_MAX = 60.0
WAIT_S = 60.0
DIES_BEFORE_PUBLISHING = """
import os
from unicron.workers.training.communicators.communicators import Communicators
right = Communicators.up
def up(self, *given):
    if self.generation == 1:
        os._exit(9)
    return right(self, *given)
Communicators.up = up
"""
PATIENT = """
from unicron.workers.training.communicators import communicators
communicators.GROUP_S_MAX = 600.0
"""
"""A rank that waits for a group stops waiting only when it is interrupted."""
DIES_AFTER_PUBLISHING = """
import os
import torch.distributed as dist
from unicron.workers.training.communicators.communicators import Communicators
right = Communicators.up
HERE, FAR = bytes([127, 0, 0, 1]), bytes([127, 255, 255, 254])
class Telling(dist.Store):
    def __init__(self, store):
        super().__init__()
        self.store = store
    def set(self, key, value):
        changed = bytes(value).replace(HERE, FAR)
        self.store.set(key, changed)
        if FAR in changed:
            os._exit(9)
    def get(self, key):
        return self.store.get(key)
    def wait(self, keys, *limit):
        self.store.wait(keys, *limit)
    def add(self, key, number):
        return self.store.add(key, number)
def up(self, *given):
    if self.generation == 1:
        self.rounds.store = Telling(self.rounds.store)
    return right(self, *given)
Communicators.up = up
"""
"""Publishes a high address and exits. gloo makes the rank with the lower address wait for it."""


def groups_in(thing: Any, seen: set[int]) -> int:
    """The number of process groups that are reachable from `thing`."""
    if isinstance(thing, dist.ProcessGroup):
        return 1
    if id(thing) in seen or isinstance(thing, (torch.Tensor, str, type)):
        return 0
    seen.add(id(thing))
    parts = (
        list(thing.values())
        if isinstance(thing, dict)
        else list(thing)
        if isinstance(thing, (list, tuple, set))
        else []
    )
    return sum(groups_in(part, seen) for part in [*parts, *getattr(thing, "__dict__", {}).values()])


def limit_s(group: Any) -> float:
    limit: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return limit


def globals_kept() -> list[str]:
    return [
        name for name, value in vars(parallel_state).items() if isinstance(value, dist.ProcessGroup)
    ]


def test_leaving_a_generation_releases_its_handles_and_sockets() -> None:
    cpu_device.prepare_device()
    ours = Communicators("127.0.0.1", torch.device("cpu"))
    before = set(sockets.inodes())  # some may be garbage that is collected meanwhile
    ours.meet(0, 0, 1, ours.endpoint, b"")
    ours.up(Axes(dp=ours.num_members))
    trainee = model.build(TRAIN, torch.device("cpu"), ours.groups)
    roots = list(trainee.roots)
    num_handles = groups_in(roots, set())
    assert num_handles > 10
    for generation in (1, 2):
        group = ours.groups.dp
        assert set(sockets.inodes()) - before
        assert globals_kept()
        assert limit_s(group) == COLLECTIVE_S_MAX
        del group
        ours.down(roots)
        assert not groups_in(roots, set())
        assert not globals_kept()
        last_s = time.monotonic() + CLOSED_S_MAX
        while set(sockets.inodes()) - before:  # gloo closes them in its own thread
            assert time.monotonic() < last_s, "a reference keeps sockets open"
            time.sleep(0.01)
        ours.meet(generation, 0, 1, ours.endpoint, b"")
        costs_s = ours.up(Axes(dp=ours.num_members))
        assert [*costs_s] == ["world", "cp"], "plain: all other groups are the world"
        assert all(0 < cost_s < CLOSED_S_MAX for cost_s in costs_s.values())
        ours.bind()
        assert groups_in(roots, set()) == num_handles, "a handle is missing"
    ours.down(roots)


def test_an_aborted_group_means_quiesced_only_after_an_interrupt() -> None:
    """torch forgets aborted groups. Here gloo's groups are aborted as NCCL's would be."""
    cpu_device.prepare_device()
    ours = Communicators("127.0.0.1", torch.device("cpu"))
    ours.meet(0, 0, 1, ours.endpoint, b"")
    ours.up(Axes(dp=ours.num_members))
    trainee = model.build(TRAIN, torch.device("cpu"), ours.groups)
    agent, theirs = socket.socketpair()
    with agent, theirs:
        collectives = Collectives(
            Control(theirs, 0, Unpacker()), ours, Marks(ProgressWriter(), overlap=False)
        )
        operations, values = ours.operations, torch.zeros(3)
        ours.backend = "nccl"
        dist.distributed_c10d._abort_process_group()  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="has not been initialized"):
            collectives.run(lambda: operations.all_reduce(values))
        ours.interrupt()
        assert isinstance(collectives.run(lambda: operations.all_reduce(values)), Stopped)
    ours.down(trainee.roots)


def test_the_device_is_synchronized_before_its_groups_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The groups are aborted first, as NCCL requires, or the device would never finish."""
    cpu_device.prepare_device()
    ours = Communicators("127.0.0.1", torch.device("cpu"))
    ours.meet(0, 0, 1, ours.endpoint, b"")
    ours.up(Axes(dp=ours.num_members))
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda: seen.append((ours.is_up, ours.groups is not None))
    )
    ours.backend = "nccl"
    ours.down([])
    assert seen == [(False, True)]


def test_no_group_is_aborted_before_the_ranks_of_the_node_have_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever interrupts does not wait for that."""
    seen: list[object] = []
    met, aborted = threading.Event(), threading.Event()

    class Group:
        def abort(self) -> None:
            seen.append("aborted")
            if seen.count("aborted") == 2:
                aborted.set()

    def meet(generation: int) -> None:
        seen.append(generation)
        assert met.wait(WAIT_S)

    monkeypatch.setattr(communicators.private_torch, "take_groups", lambda: [Group(), Group()])
    errors = NcclErrors(lambda generation, error: None, torch.device("cpu"))
    aborts = NcclAborts(errors, meet)
    aborts.begin(7)
    assert not aborted.wait(0.3)
    assert seen == [7]
    met.set()
    assert aborted.wait(WAIT_S)
    aborts.wait()
    # A member whose meeting fails aborts as well.
    seen.clear()
    aborted.clear()
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    NcclAborts(errors, lambda generation: 1 // 0).begin(8)
    assert aborted.wait(WAIT_S)


def test_an_interrupt_ends_a_rendezvous() -> None:
    """By the connection to the store: there is no other yet. Whoever interrupts does it again and
    again, as the store may not have been reached."""
    ours = Communicators("127.0.0.1", torch.device("cpu"))
    has_ended = threading.Event()

    def interrupt() -> None:
        while not has_ended.wait(0.1):
            ours.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    began_s = time.monotonic()
    try:
        with pytest.raises(RuntimeError):
            ours.meet(0, 0, 2, ours.endpoint, b"")  # nobody else comes
    finally:
        has_ended.set()
        thread.join()
    assert time.monotonic() - began_s < RENDEZVOUS_S_MAX / 2


def test_the_first_use_of_a_group_may_wait_for_a_compilation() -> None:
    """NCCL asks the store then: longer than for a rendezvous, until somebody interrupts."""
    ours = Communicators("127.0.0.1", torch.device("cpu"))
    ours.meet(0, 0, 1, ours.endpoint, b"")
    ours._client.set_timeout(datetime.timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out"):
        ours.rounds.store.get("the id of a group")
    ours._wait_for_first_uses()
    timer = threading.Timer(1.0, ours.interrupt)
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(RuntimeError):
        ours.rounds.store.get("the id of a group")
    assert 0.9 < time.monotonic() - began_s < WAIT_S / 2
    timer.join()


def test_a_message_is_waited_for_longer_than_its_group_was_built() -> None:
    assert worlds.run(2, world_work.message, 1.0, 2.5) == [1.0, 1.0]


def test_the_collective_timeout_reaches_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_device.prepare_device()
    monkeypatch.setattr(communicators, "COLLECTIVE_S_MAX", 77.0)
    ours = Communicators("127.0.0.1", torch.device("cpu"))
    ours.meet(0, 0, 1, ours.endpoint, b"")
    ours.up(Axes(dp=ours.num_members))
    assert {limit_s(ours.groups.dp), limit_s(ours.groups.tp)} == {77.0}
    ours.down([])


# --- a member exits while groups are built -------------------------------------------------------
@pytest.mark.parametrize(
    ("dies", "waiting_s"),
    [
        (DIES_BEFORE_PUBLISHING, 0.0),
        (DIES_AFTER_PUBLISHING, 0.5),  # by then they wait for its connection; no event shows that
    ],
)
def test_a_death_while_groups_are_built_does_not_block_the_others(
    drive: Drive, dies: str, waiting_s: float
) -> None:
    driver = drive(iterations=3)
    driver.patch = PATIENT
    driver.start(0, 2)
    driver.patch = dies
    driver.start(1)
    driver.reconfigure([0, 1, 2])
    assert driver.processes[1].popen.wait(WAIT_S) == 9
    time.sleep(waiting_s)
    driver.quiesce([0, 2], "now")
    assert len(driver.told(ReconfigureFailed)) == 2
    driver.form([0, 2])
    driver.finish([0, 2])
    assert sorted(driver.losses()) == [0, 1, 2]
