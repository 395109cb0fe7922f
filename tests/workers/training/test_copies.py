"""Copies in memory: taken beside training, whole or not at all; a task comes back from them."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_stores import LocalKeeper, alter, named
from unicron.events.records.orders import SetCheckpointStores
from unicron.events.records.reports import (
    CheckpointSaved,
    MemoryCheckpointStored,
    RankErrored,
    TaskProgressed,
)
from unicron.events.records.types import MemoryCheckpoint, StoreEndpoint
from unicron.workers.checkpoint_store import protocol
from unicron.workers.checkpoint_store.protocol import Offer

Drive = Callable[..., Any]
Twins = Callable[[float], Any]
TASK = 7
EVERY = 3
ITERATIONS = 14
COPIED_S_MAX = 30.0


@pytest.fixture
def driver(drive: Drive) -> Any:
    """Ranks that copy their state to two nodes every third iteration."""
    made = drive(copy_every=EVERY)
    made.keepers = [LocalKeeper("n1"), LocalKeeper("n2")]
    return made


def told(driver: Any) -> tuple[MemoryCheckpoint, ...]:
    """What the ranks told of kept copies, the newest first, as an order names them."""
    by_node = {one.keeper.node: one for one in driver.keepers}
    newest = sorted(driver.told(MemoryCheckpointStored),
                    key=lambda kept: (-kept.step_version, kept.node))
    return tuple(named(by_node[kept.node], kept) for kept in newest)


def ripe(driver: Any, iteration: int) -> None:
    """Rank 0 stands in this iteration, and no copy is on its way: else the next one is left out."""
    driver.held(0, iteration)
    last_s = time.monotonic() + COPIED_S_MAX
    while time.monotonic() < last_s:
        events = [line["event"] for line in driver.trace(0)]
        if events.count("copy") == events.count("copied"):
            return
        time.sleep(0.005)
    raise AssertionError(driver.story())


def hold_in(driver: Any, iteration: int) -> Path:
    """Rank 0 goes no further than into this iteration; the file that says so."""
    path: Path = driver.hold(0, "forward", iteration, micro_batch=0)
    return path


def walk(driver: Any, begin: int, end: int) -> None:
    """From one iteration to another, every copy between them taken."""
    for iteration in range(begin, end):
        ripe(driver, iteration)
        hold_in(driver, iteration + 1)
    ripe(driver, end)


def die_at(driver: Any, ranks: list[int], iteration: int) -> None:
    """Both keepers have every copy before `iteration`; then all die in the middle of it."""
    walk(driver, 1, iteration)
    for rank in ranks:
        driver.kill(rank)
    (driver.trace_dir / "hold" / f"{TASK}-0").unlink()


def finished(driver: Any, ranks: list[int]) -> Path:
    """Trained to the end: where the final checkpoint lies."""
    driver.finish(ranks)
    final = next(one for one in driver.told(CheckpointSaved) if one.final)
    return Path(driver.spec.train.output) / final.path


def test_all_die_at_once_and_come_back_from_the_last_copy(
        driver: Any, twin: Twins) -> None:
    driver.start(0, 1)
    hold_in(driver, 1)
    driver.form([0, 1])
    die_at(driver, [0, 1], 11)
    copies = told(driver)
    assert copies[-1].step_version == EVERY, "told at once when a generation has its first"
    assert {copy.node for copy in copies} == {"n1", "n2"}
    newest = driver.keepers[0].stored(TASK)[-1]
    driver.start(0, 1, attempt=2)
    first, second = driver.form([0, 1], copies=copies).values()
    assert (first.origin, first.origin_node, first.source) == ("copy", "n1", -1)
    assert first.step_version == 9, "the newest that the keeper has, also if it was not told"
    assert first.received_bytes == newest.offer.copy_bytes == len(newest.memory)
    assert (second.origin, second.source, second.step_version) == ("peer", 0, 9)
    assert driver.told(RankErrored) == []
    final = finished(driver, [0, 1])
    assert sorted(driver.losses()) == list(range(ITERATIONS))
    assert twin(0.0).is_equal(final)


def test_what_was_altered_is_not_taken_but_the_next(driver: Any, drive: Drive) -> None:
    driver.start(0)
    hold_in(driver, 1)
    driver.form([0])
    die_at(driver, [0], 7)
    copies = told(driver)
    for stored in driver.keepers[0].stored(TASK):
        alter(stored)
    driver.start(0, attempt=2)
    log = driver.processes[0].log
    (came,) = driver.form([0], copies=copies).values()
    assert (came.origin, came.origin_node, came.step_version) == ("copy", "n2", 6)
    assert "checkpoint altered" in log.read_text()
    for stored in driver.keepers[1].stored(TASK):
        alter(stored)
    driver.kill(0)
    driver.start(0, attempt=3)
    (came,) = driver.form([0], copies=copies).values()
    assert (came.origin, came.step_version, came.received_bytes) == ("seed", 0, 0)
    driver.finish([0])


def test_a_copy_that_is_not_what_was_asked_for_is_left_alone(driver: Any) -> None:
    """Of another task, another model, another secret, or nobody there: the next one serves."""
    driver.start(0)
    hold_in(driver, 1)
    driver.form([0])
    die_at(driver, [0], 7)
    good = told(driver)[0]
    stranger, closed = LocalKeeper("n3", secret="another"), LocalKeeper("n4")
    driver.keepers += [stranger, closed]
    closed.close()
    other = LocalKeeper("n5")
    driver.keepers.append(other)
    offer = Offer(task=TASK, rank=0, attempt=1, generation=1, step_version=6, layout="0" * 16,
                  copy_bytes=64, numbers_bytes=0)
    memory = other.shelf.reserve(offer)
    other.shelf.add(type(driver.keepers[0].stored(TASK)[0])(
        offer=offer, checksum="crc32:758d6336", memory=memory))
    wrong = tuple(
        MemoryCheckpoint(node=one.keeper.node, endpoint=one.keeper.endpoint, rank=0, generation=1,
             step_version=6, copy_bytes=good.copy_bytes, checksum=good.checksum)
        for one in (stranger, closed, other))
    later = MemoryCheckpoint(
        node="n1",
        endpoint=driver.keepers[0].keeper.endpoint,
        rank=0,
        generation=2,
        step_version=6,
        copy_bytes=good.copy_bytes,
        checksum=good.checksum,
    )
    driver.start(0, attempt=2)
    log = driver.processes[0].log
    (came,) = driver.form([0], copies=(*wrong, later, good)).values()
    assert (came.origin, came.origin_node, came.step_version) == ("copy", good.node, 6)
    said = log.read_text()
    assert said.count("in-memory checkpoint not usable") == 4
    for why in ("another cluster", "refused", "another model",
                "no checkpoint of task 7 generation 2"):
        assert why in said


def test_who_dies_in_the_middle_of_a_copy_leaves_the_last_whole_one(driver: Any) -> None:
    driver.start(0)
    hold_in(driver, EVERY)
    driver.form([0])
    ripe(driver, EVERY)
    driver.hold(0, "copy_mid", 6)
    driver.held(0, 6)
    driver.strike(0, iteration=8, event="forward")  # training does not wait for it
    driver.kill(0)
    (driver.trace_dir / "hold" / f"{TASK}-0").unlink()
    for keeper in driver.keepers:
        assert [one.offer.step_version for one in keeper.stored(TASK)] == [3]
    deadline_s = time.monotonic() + 10
    while driver.keepers[0].shelf.used_bytes != driver.keepers[1].shelf.used_bytes:
        assert time.monotonic() < deadline_s, "the half of a copy is still there"
        time.sleep(0.01)
    driver.start(0, attempt=2)
    (came,) = driver.form([0], copies=told(driver)).values()
    assert (came.origin, came.step_version) == ("copy", 3)
    driver.finish([0])


def test_a_keeper_that_does_not_answer_holds_up_no_iteration_and_no_end(driver: Any) -> None:
    deaf = socket.create_server(("127.0.0.1", 0))
    good = driver.keepers.pop()
    try:
        driver.keepers = [DeafKeeper(StoreEndpoint("n9", f"127.0.0.1:{deaf.getsockname()[1]}"))]
        driver.start(0, 1)
        driver.form([0, 1])
        driver.finish([0, 1])
        begun_s = [line["t"] for line in driver.trace(0) if line["event"] == "copy"]
        assert begun_s
        # Others are skipped while it is on its way.
        assert all(after - before >= 0.9 * protocol.STALL_S_MAX
                   for before, after in itertools.pairwise(begun_s)), begun_s
        assert driver.told(MemoryCheckpointStored) == []
    finally:
        deaf.close()
        good.close()


class DeafKeeper:
    """Accepts connections and says nothing."""

    def __init__(self, keeper: StoreEndpoint) -> None:
        self.keeper = keeper

    def close(self) -> None:
        pass


def test_a_copy_outlives_its_generation_and_its_connection_is_not_shut(driver: Any) -> None:
    """The generation ends while a copy is on its way: it gets there all the same."""
    driver.start(0, 1)
    path = driver.hold(0, "copy_mid", 3)
    there = driver.hold(1, "forward", 4)
    driver.form([0, 1])
    driver.held(0, 3)
    driver.held(1, 4)
    driver.ask_to_leave([0, 1], "now")
    there.unlink()
    driver.quiesced([0, 1])
    assert driver.keepers[0].stored(TASK) == []
    path.unlink()
    driver.keepers[0].wait(TASK)
    kept = driver.wait(MemoryCheckpointStored, 0)
    assert (kept.generation, kept.step_version, kept.node) == (1, 3, "n1")
    driver.form([0, 1])
    driver.finish([0, 1])


def test_other_keepers_may_be_named_while_it_trains(driver: Any) -> None:
    driver.start(0)
    path = hold_in(driver, 4)
    driver.form([0])
    ripe(driver, 4)
    new = LocalKeeper("n3")
    driver.keepers.append(new)
    driver.order(SetCheckpointStores(nodes=("n1",), task=TASK, generation=1,
                                     keepers=(new.keeper,)), [0])
    driver.heard(0)
    walk(driver, 4, 12)
    path.unlink()
    driver.finish([0])
    kept = new.stored(TASK)
    assert [one.offer.step_version for one in kept] == [9, 12]
    assert max(one.offer.step_version for one in driver.keepers[0].stored(TASK)) == 3


def test_the_boundary_waits_for_one_pass_over_the_state(drive: Drive) -> None:
    """What a copy costs the main thread, beside what an iteration takes.

    The shortest stall counts: the others may be what the machine did meanwhile.
    """
    driver = drive(copy_every=2, iterations=8, model={
        "num_layers": 4, "hidden": 256, "num_heads": 4, "sequence": 64})
    driver.keepers = [LocalKeeper("n1"), LocalKeeper("n2")]
    driver.start(0)
    driver.form([0])
    driver.finish([0])
    lines: list[dict[str, Any]] = driver.trace(0)
    stalls: list[float] = []
    for line in lines:
        if line["event"] == "copy":
            after = min(x["t"] for x in lines if x["event"] == "micro_batch"
                        and x["iteration"] == line["iteration"] and x["t"] > line["t"])
            stalls.append(after - line["t"])
    ready = driver.processes[0].ready
    assert ready is not None
    step_s = sorted(step for one in driver.told(TaskProgressed) for step in one.step_s)
    print(f"state {ready.state_bytes / 1e6:.1f} MB, stalls "
          f"{sorted(round(1e3 * stall, 1) for stall in stalls)} ms, median iteration "
          f"{1e3 * step_s[len(step_s) // 2]:.0f} ms")
    assert min(stalls) < step_s[len(step_s) // 2]


NO_ROOM = """
from unicron.workers.training.checkpoint import memory_checkpoint
def take(self, *args):
    raise RuntimeError("not enough memory: you tried to allocate a buffer")
memory_checkpoint.Snapshot.take = take
"""


def test_a_copy_that_there_is_no_room_for_hurts_nobody(drive: Drive) -> None:
    driver = drive(copy_every=EVERY)
    driver.keepers = [LocalKeeper("n1")]
    driver.patch = NO_ROOM
    driver.start(0)
    driver.form([0])
    driver.finish([0])
    assert driver.processes[0].log.read_text().count("in-memory checkpoint not taken") == 1
    assert driver.keepers[0].stored(TASK) == []
