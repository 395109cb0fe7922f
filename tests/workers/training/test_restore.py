"""Looking for a copy ends in time: a deaf keeper costs its limit once, and an order ends it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rank_driver import WAIT_S, small_spec
from unicron.events.records.reports import ReconfigureFailed
from unicron.events.records.types import MemoryCheckpoint
from unicron.workers.checkpoint_store import protocol
from unicron.workers.training.checkpoint import memory_checkpoint
from unicron.workers.training.model import cpu_device
from unicron.workers.training.model import trainee as model
from unicron.workers.training.process.history import History
from unicron.workers.training.step import iteration

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

TASK = 7


class Deaf:
    """Keepers that accept connections, and say nothing."""

    def __init__(self, num: int) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]

    def copies(self) -> tuple[MemoryCheckpoint, ...]:
        """One on each of them."""
        return tuple(
            MemoryCheckpoint(
                node=f"n{place}",
                endpoint=f"127.0.0.1:{one.getsockname()[1]}",
                rank=0,
                generation=1,
                step_version=5,
                copy_bytes=100,
                checksum="crc32:0",
            )
            for place, one in enumerate(self.listeners)
        )

    def num_asked(self) -> list[int]:
        """How many connections came to each of them since the last look."""
        return [sum(1 for _ in self._waiting(one)) for one in self.listeners]

    def _waiting(self, listener: socket.socket) -> Iterator[None]:
        listener.setblocking(False)
        while True:
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                return
            yield


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    made = Deaf(3)
    yield made
    for listener in made.listeners:
        listener.close()


@pytest.fixture
def trainee(alone: Any, tmp_path: Any) -> model.TrainingModel:
    train = small_spec(tmp_path).train
    assert train is not None
    return model.build(train, cpu_device.prepare_device(), alone)


def test_who_is_deaf_is_asked_once_and_all_together_have_one_limit(
        deaf: Deaf, trainee: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALL_S_MAX", 0.6)
    monkeypatch.setattr(memory_checkpoint, "RESTORE_S_MAX", 1.0)
    first, second, third = deaf.copies()
    named = (first, first, second, first, second, third)
    began_s = iteration.clock()
    found = memory_checkpoint.restore(trainee, History(), TASK, named, "5ec3e7", lambda: False)
    took_s = iteration.clock() - began_s
    assert found is None
    assert deaf.num_asked() == [1, 1, 0], "what is left of the second is all, the third gets none"
    assert took_s >= 0.99


def test_nobody_is_asked_any_more_when_the_next_order_has_come(
        deaf: Deaf, trainee: Any) -> None:
    asked = iter([False, True])
    first, second, third = deaf.copies()
    deaf.listeners[0].close()
    found = memory_checkpoint.restore(trainee, History(), TASK, (first, second, third), "5ec3e7",
                           lambda: next(asked))
    assert found is None
    assert [sum(1 for _ in deaf._waiting(one)) for one in deaf.listeners[1:]] == [0, 0]


def test_a_rank_that_looks_for_a_copy_heeds_the_next_order(
        drive: Callable[..., Any], deaf: Deaf) -> None:
    driver = drive()
    driver.start(0, 1)
    driver.reconfigure([0, 1], copies=deaf.copies())
    deaf.listeners[0].settimeout(WAIT_S)
    connection, _ = deaf.listeners[0].accept()
    with connection:
        driver.ask_to_leave([0, 1], "now")
        failed = driver.wait(ReconfigureFailed, 0)
    assert failed.error == "stopped; RuntimeError: interrupted while it restored its state"
    assert deaf.num_asked() == [0, 0, 0], "the others are not asked"
    driver.quiesced([0, 1])
    told = driver.form([0, 1])
    assert [(one.origin, one.step_version) for one in told.values()] == [("seed", 0)] * 2
    driver.finish([0, 1])
