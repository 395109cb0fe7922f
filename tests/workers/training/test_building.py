"""A member dies while the groups of a generation are built."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from unicron.events.records.reports import ReconfigureFailed

Drive = Callable[..., Any]
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


@pytest.mark.parametrize(("dies", "waiting_s"), [
    (DIES_BEFORE_CONNECTING, 0.0),
    (DIES_BEFORE_IT_CONNECTS, 0.5),  # they wait for its connection by then: that cannot be seen
])
def test_a_member_that_dies_while_groups_are_built_holds_nobody(
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
