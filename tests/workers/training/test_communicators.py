"""Communicators of successive generations: what one leaves open would block the next."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rank_driver import Drive
from unicron.events.records.reports import ReconfigureFailed
from unicron.events.spec.job import Model, Train
from unicron.workers.ipc.pipe_protocol import Unpacker
from unicron.workers.ipc.progress_page import ProgressWriter
from unicron.workers.training.communicators import communicators, sockets
from unicron.workers.training.communicators.communicators import COLLECTIVE_S_MAX, Communicators
from unicron.workers.training.model import cpu_device
from unicron.workers.training.model import trainee as model
from unicron.workers.training.process.control_thread import Control
from unicron.workers.training.process.trace import Marks
from unicron.workers.training.step.gradient_reduction import Reduction, Stats

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")
TRAIN = Train(model=Model(num_layers=1, hidden=32, num_heads=2, sequence=16), iterations=10,
              output="unused", overlap=True, bucket_params=3_000)
CLOSED_S_MAX = 60.0
WAIT_S = 60.0
DIES_BEFORE_CONNECTING = """
import os
from unicron.workers.training.communicators.communicators import Communicators
right = Communicators.up
def up(self, *given):
    if self.generation == 1:
        os._exit(9)
    right(self, *given)
Communicators.up = up
"""
PATIENT = """
from unicron.workers.training.communicators import communicators
communicators.GROUP_S_MAX = 600.0
"""
"""Whoever waits for a group ends only where it is woken."""
DIES_BEFORE_IT_CONNECTS = """
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
        told = bytes(value).replace(HERE, FAR)
        self.store.set(key, told)
        if FAR in told:
            os._exit(9)
    def get(self, key):
        return self.store.get(key)
    def wait(self, keys, *limit):
        self.store.wait(keys, *limit)
    def add(self, key, number):
        return self.store.add(key, number)
def up(self, *given):
    if self.generation == 1:
        self.store = Telling(self.store)
    right(self, *given)
Communicators.up = up
"""
"""Of two, gloo has the one of the lower address wait for the other one's connection."""


def handles(thing: Any, seen: set[int]) -> int:
    """How many process groups can be reached from here."""
    if isinstance(thing, dist.ProcessGroup):
        return 1
    if id(thing) in seen or isinstance(thing, (torch.Tensor, str, type)):
        return 0
    seen.add(id(thing))
    parts = (list(thing.values()) if isinstance(thing, dict)
             else list(thing) if isinstance(thing, (list, tuple, set)) else [])
    return sum(handles(part, seen) for part in [*parts, *getattr(thing, "__dict__", {}).values()])


def limit_s(group: Any) -> float:
    limit: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return limit


def globals_kept() -> list[str]:
    return [name for name, value in vars(parallel_state).items()
            if isinstance(value, dist.ProcessGroup)]


def test_a_generation_that_was_left_is_gone_with_all_its_handles_and_sockets() -> None:
    cpu_device.prepare_device()
    ours = Communicators("127.0.0.1", torch.device("cpu"))
    before = set(sockets.inodes())  # some may be garbage, and go meanwhile
    ours.meet(0, 0, 1, ours.endpoint, b"")
    ours.up()
    trainee = model.build(TRAIN, torch.device("cpu"), ours.groups)
    roots = list(trainee.roots)
    num_handles = handles(roots, set())
    assert num_handles > 10
    for generation in (1, 2):
        group = ours.groups.dp
        assert set(sockets.inodes()) - before
        assert globals_kept()
        assert limit_s(group) == COLLECTIVE_S_MAX
        del group
        ours.down(roots)
        assert not handles(roots, set())
        assert not globals_kept()
        last_s = time.monotonic() + CLOSED_S_MAX
        while set(sockets.inodes()) - before:  # by gloo, in a thread of its own
            assert time.monotonic() < last_s, "gloo closes them with its last reference"
            time.sleep(0.01)
        ours.meet(generation, 0, 1, ours.endpoint, b"")
        ours.up()
        ours.bind()
        assert handles(roots, set()) == num_handles, "each is back in its role"
    ours.down(roots)


def test_a_group_that_is_gone_is_an_order_to_leave_only_where_there_was_one() -> None:
    """torch forgets groups that it aborts; here gloo's, aborted as NCCL's are."""
    cpu_device.prepare_device()
    ours = Communicators("127.0.0.1", torch.device("cpu"))
    ours.meet(0, 0, 1, ours.endpoint, b"")
    ours.up()
    trainee = model.build(TRAIN, torch.device("cpu"), ours.groups)
    reduction = Reduction(trainee, lambda event, bucket=-1: None,
                          Marks(ProgressWriter(), overlap=False), closely=False)
    agent, theirs = socket.socketpair()
    with agent, theirs:
        control = Control(theirs, 0, Unpacker())
        ours.backend = "nccl"
        dist.distributed_c10d._abort_process_group()  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="has not been initialized"):
            reduction.meet(control, ours, Stats(0.0, 0))
        ours.interrupt()
        assert reduction.meet(control, ours, Stats(0.0, 0)) == "quiesced"
    ours.down(trainee.roots)


def test_the_device_is_waited_for_before_what_it_works_on_is_given_away(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL is left, here with gloo's groups: aborted first, or nothing would end."""
    cpu_device.prepare_device()
    ours = Communicators("127.0.0.1", torch.device("cpu"))
    ours.meet(0, 0, 1, ours.endpoint, b"")
    ours.up()
    seen: list[tuple[bool, bool]] = []
    monkeypatch.setattr(torch.cuda, "synchronize",
                        lambda: seen.append((ours.is_up, ours.groups is not None)))
    ours.backend = "nccl"
    ours.down([])
    assert seen == [(False, True)]


def test_a_limit_reaches_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_device.prepare_device()
    monkeypatch.setattr(communicators, "COLLECTIVE_S_MAX", 77.0)
    ours = Communicators("127.0.0.1", torch.device("cpu"))
    ours.meet(0, 0, 1, ours.endpoint, b"")
    ours.up()
    assert {limit_s(ours.groups.dp), limit_s(ours.groups.tp)} == {77.0}
    ours.down([])


# --- a member exits while groups are built -------------------------------------------------------
@pytest.mark.parametrize(("dies", "waiting_s"), [
    (DIES_BEFORE_CONNECTING, 0.0),
    (DIES_BEFORE_IT_CONNECTS, 0.5),  # they wait for its connection by then: that cannot be seen
])
def test_a_member_that_dies_while_groups_are_built_blocks_nobody(
        drive: Drive, dies: str, waiting_s: float) -> None:
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
