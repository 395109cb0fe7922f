"""In-memory checkpoints: saved during training, completely or not at all, and restored."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_stores import SECRET, TASK, WAIT_S, LocalKeeper, alter, named, put
from msgspec.structs import replace
from rank_driver import Drive, Twins
from structlog.testing import capture_logs
from unicron.events.log.identity import store_key
from unicron.events.records import reports as r
from unicron.events.records.orders import SetCheckpointStores, StartRank
from unicron.events.records.types import Body, MemoryCheckpoint, Slot, StoreEndpoint
from unicron.events.spec.job import JobSpec, Model, Optimizer, Slots, Train
from unicron.workers.checkpoint_store import protocol
from unicron.workers.checkpoint_store.protocol import TransferError
from unicron.workers.training.checkpoint import memory_checkpoint, memory_restore
from unicron.workers.training.checkpoint.memory_checkpoint import StoreOrder
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model import training_state
from unicron.workers.training.process.history import History
from unicron.workers.training.process.trace import Event
from unicron.workers.training.recovery.state_shards import list_shards
from unicron.workers.training.step.own_part import held_by

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")
TRAIN = Train(
    model=Model(num_layers=1, hidden=32, num_heads=2, sequence=16),
    optimizer=Optimizer(lr=1e-2, warmup_iterations=2),
    iterations=10,
    output="unused",
)
EVERY = 3
ITERATIONS = 14
KEYS = {f"n{number}": store_key(SECRET, TASK, 99) for number in range(10)}


class Bench:
    """A MemorySaver with a clock of its own."""

    def __init__(self, trainee: model.TrainingModel) -> None:
        self.trainee = trainee
        self.now_s = 100.0
        self.is_behind = False
        self.told: list[r.MemoryCheckpointStored] = []
        self.failed: list[r.CheckpointFailed] = []
        self.taken: list[int] = []
        self.done = threading.Event()
        start = StartRank(
            nodes=("n1",),
            task=TASK,
            rank=0,
            attempt=1,
            incarnation=1,
            slot=Slot("n1", 0),
            num_seats=1,
            host="",
            port=0,
            spec=JobSpec(
                api_version="unicron/v1", name="bench", train=TRAIN, slots=Slots(min=1, max=1)
            ),
            checkpoint="",
        )
        self.copier = memory_checkpoint.MemorySaver(start, KEYS, tell=self._tell, note=self._note)

    def copy(
        self, step: int, *keepers: LocalKeeper, generation: int = 1, is_whole: bool = True
    ) -> bool:
        """Save, and wait until the stores have it; return whether a checkpoint was taken."""
        self.done.clear()
        order = StoreOrder(tuple(keeper.keeper for keeper in keepers))
        if self.copier.status(order)[0]:
            return False
        self.copier.begin(
            partial(memory_checkpoint.content_of, self.trainee, step, History()),
            step,
            generation,
            order,
            is_whole=is_whole,
        )
        self.copier.detach()
        self.copier.wait()
        return True

    @property
    def is_stored(self) -> bool:
        return not self.copier.status(self.copier._order)[1]  # pyright: ignore[reportPrivateUsage]

    def _tell(self, body: Body) -> bool:
        if not self.is_behind and isinstance(body, r.CheckpointFailed):
            self.failed.append(body)
        elif not self.is_behind:
            assert isinstance(body, r.MemoryCheckpointStored)
            self.told.append(body)
        return not self.is_behind

    def _note(self, event: Event, generation: int, step: int) -> None:
        if event == "copy":
            self.taken.append(step)
        elif event == "copied":
            self.done.set()


@pytest.fixture
def bench(alone: Any, monkeypatch: pytest.MonkeyPatch) -> Bench:
    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    trainee.shards = list_shards(trainee)
    made = Bench(trainee)
    monkeypatch.setattr(memory_checkpoint, "clock", lambda: made.now_s)
    return made


@pytest.fixture
def keeper() -> Iterator[LocalKeeper]:
    made = LocalKeeper("n1")
    yield made
    made.close()


def test_a_refused_checkpoint_is_tried_with_backoff(bench: Bench, keeper: LocalKeeper) -> None:
    room = keeper.shelf.bytes_max
    with capture_logs() as logs:
        for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
            keeper.shelf.bytes_max -= 1 if keeper.shelf.bytes_max < room else room - 100
            assert bench.copy(10, keeper)
            bench.now_s += pause_s - 0.1
            assert not bench.copy(20, keeper), "no retry before the backoff is over"
            bench.now_s += 0.2
        keeper.shelf.bytes_max = room
        assert bench.copy(30, keeper)
        assert bench.copy(40, keeper), "no backoff after a success"
    assert [one["event"] for one in logs] == [
        "in-memory checkpoint not stored",
        "in-memory checkpoint stored again",
    ], "one warning, although each refusal's text differs"


def test_one_store_is_enough_and_new_stores_are_tried_at_once(
    bench: Bench, keeper: LocalKeeper
) -> None:
    full, new = LocalKeeper("n2", bytes_max=1), LocalKeeper("n3")
    try:
        assert bench.copy(10, keeper, full)
        assert bench.copy(20, keeper, full)
        assert bench.copy(30, full)
        assert not bench.copy(40, full)
        assert bench.copy(50, new), "a new store has no backoff"
        assert [one.offer.step_version for one in new.stored(TASK)] == [50]
    finally:
        full.close()
        new.close()


def test_no_memory_for_a_checkpoint_is_logged_once_with_backoff(
    bench: Bench, keeper: LocalKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(*args: object) -> None:
        raise RuntimeError(f"not enough memory: {bench.now_s} bytes")

    with monkeypatch.context() as context, capture_logs() as logs:
        context.setattr(memory_checkpoint, "Snapshot", take)
        for pause_s in (1.0, 2.0, 4.0):
            assert bench.copy(10, keeper)
            assert not bench.copy(11, keeper)
            assert not bench.is_stored
            bench.now_s += pause_s + 0.1
    assert [one["event"] for one in logs] == ["in-memory checkpoint not taken"]
    assert [(one.what, one.path, one.step_version) for one in bench.failed] == [("copy", "", 10)]
    assert bench.copy(20, keeper)
    assert bench.is_stored


def test_a_version_counts_as_whole_when_all_members_have_stored_it(
    bench: Bench, keeper: LocalKeeper
) -> None:
    def offers() -> list[tuple[int, tuple[int, int]]]:
        return [(one.offer.step_version, one.offer.whole) for one in keeper.stored(TASK)]

    assert bench.copy(10, keeper)
    assert bench.copy(20, keeper)
    assert offers() == [(10, (0, 0)), (20, (1, 10))]
    assert bench.copy(30, keeper, is_whole=False)
    assert offers() == [(10, (0, 0)), (30, (1, 10))], "another member has no share of step 20"
    assert bench.copy(40, keeper)
    assert offers() == [(30, (1, 10)), (40, (1, 30))]
    assert bench.copy(50, keeper, generation=2)
    assert offers() == [(30, (1, 10)), (50, (1, 30))], "no version of generation 2 is whole yet"


def test_the_share_of_a_member_that_leaves_is_sent_and_reported_at_once(
    bench: Bench, keeper: LocalKeeper
) -> None:
    assert bench.copy(10, keeper)
    bench.copier.copy_now(bench.trainee, 13, History(), 1, StoreOrder((keeper.keeper,)), None)
    assert [one.step_version for one in bench.told] == [10, 13]
    assert [one.offer.step_version for one in keeper.stored(TASK)] == [10, 13]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't start new thread"), MemoryError(), ValueError("buffer is not contiguous")],
)
def test_a_checkpoint_that_cannot_be_sent_is_no_fault(
    bench: Bench, keeper: LocalKeeper, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def put(*args: object) -> None:
        raise error

    with monkeypatch.context() as context, capture_logs() as logs:
        context.setattr(memory_checkpoint.ShareSender, "send", put)
        assert bench.copy(10, keeper), "the sending thread ends"
    assert [(one["event"], one["why"]) for one in logs] == [
        ("in-memory checkpoint not stored", str(error) or "MemoryError")
    ]
    (failed,) = bench.failed
    assert (failed.what, failed.path, failed.why) == ("copy", "n1", str(error) or "MemoryError")
    bench.now_s += 1.1
    assert bench.copy(20, keeper)
    assert [one.step_version for one in bench.told] == [20], "reported at once"


def test_stored_checkpoints_are_reported_at_intervals_and_on_changes(
    bench: Bench, keeper: LocalKeeper
) -> None:
    def reported() -> list[int]:
        return [one.step_version for one in bench.told]

    bench.is_behind = True
    assert bench.copy(10, keeper)
    assert reported() == [], "no report while the agent is behind"
    bench.is_behind = False
    for step in (20, 30, 40):
        assert bench.copy(step, keeper)
    assert reported() == [20]
    bench.now_s += memory_checkpoint.REPORT_S
    assert bench.copy(50, keeper)
    assert reported() == [20, 50]
    keeper.shelf.start += 1
    assert bench.copy(60, keeper)
    assert reported() == [20, 50, 60], "a restarted store is reported at once"
    assert bench.copy(70, keeper, generation=2)
    assert reported() == [20, 50, 60, 70]


def restored(stores: memory_restore.Stores, trainee: Any) -> memory_restore.Fetched | None:
    """What a member alone restores: the newest version that it can read."""
    for version in stores.versions(stores.shares(0, 1)):
        try:
            return stores.fetch(version, trainee.shards, held_by(trainee), 0)
        except TransferError:
            continue
    return None


def stores_of(bench: Bench, *keepers: LocalKeeper) -> memory_restore.Stores:
    return memory_restore.Stores(
        TASK, [named(keepers, told) for told in bench.told], KEYS, lambda: False
    )


def test_a_restored_state_equals_the_stored_one(bench: Bench, keeper: LocalKeeper) -> None:
    assert bench.copy(10, keeper)
    live = training_state.tensors(bench.trainee)
    before = {name: tensor.clone() for name, tensor in live.items()}
    for tensor in live.values():
        tensor.add_(1.0)
    assert bench.copy(20, keeper)
    for tensor in live.values():
        tensor.zero_()
    found = restored(stores_of(bench, keeper), bench.trainee)
    assert found is not None
    assert found.numbers is not None
    assert (found.numbers.step_version, found.node) == (20, "n1")
    assert found.received_bytes == sum(tensor.nbytes for tensor in live.values())
    assert all(torch.equal(tensor, before[name] + 1.0) for name, tensor in live.items())
    alter(keeper.stored(TASK)[-1])
    with capture_logs() as logs:
        found = restored(stores_of(bench, keeper), bench.trainee)
    assert found is not None
    assert found.numbers is not None
    assert found.numbers.step_version == 10
    assert "checkpoint altered" in logs[0]["why"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in live.items())


def test_shares_of_an_older_generation_are_not_mixed_with_newer_ones(
    bench: Bench, keeper: LocalKeeper
) -> None:
    """A node comes back with the share of another step, or of a discarded generation."""
    old = LocalKeeper("n2")
    try:
        put(keeper.keeper.endpoint, 20, [b"abc"], share=0, num_shares=2, generation=2)
        put(old.keeper.endpoint, 10, [b"abc"], share=1, num_shares=2, generation=2)
        put(old.keeper.endpoint, 20, [b"abc"], share=2, num_shares=3, generation=2)
        bench.told = [
            r.MemoryCheckpointStored(
                task=TASK,
                rank=0,
                attempt=1,
                generation=2,
                step_version=10,
                node=one.keeper.node,
                copy_bytes=3,
                checksum="",
                num_shares=2,
            )
            for one in (keeper, old)
        ]
        stores = stores_of(bench, keeper, old)
        assert stores.versions(stores.shares(0, 1)) == []
        put(old.keeper.endpoint, 20, [b"abc"], share=1, num_shares=2, generation=2)
        assert [
            (one.generation, one.step_version) for one in stores.versions(stores.shares(0, 1))
        ] == [(2, 20)]
        put(keeper.keeper.endpoint, 20, [b"abc"], generation=3)
        assert len(stores.versions(stores.shares(0, 1))) == 1, "the order does not name it"
    finally:
        old.close()


def test_numbers_are_loaded_completely_or_not_at_all(bench: Bench) -> None:
    numbers = training_state.numbers(bench.trainee, 5, History())
    wrong = replace(numbers, adam_step=9.0, precision="fp16")
    with pytest.raises(ValueError, match="numbers of fp16, not"):
        training_state.load(bench.trainee, wrong, History())
    assert training_state.numbers(bench.trainee, 5, History()).adam_step == numbers.adam_step


# --- real ranks ----------------------------------------------------------------------------------
@pytest.fixture
def driver(drive: Drive) -> Any:
    """Ranks that store in-memory checkpoints on two nodes every third iteration."""
    made = drive(copy_every=EVERY)
    made.keepers = [LocalKeeper("n1"), LocalKeeper("n2")]
    return made


def reported(driver: Any) -> tuple[MemoryCheckpoint, ...]:
    """The checkpoints that the ranks reported as stored, newest first, as an order names them."""
    newest = sorted(
        driver.told(r.MemoryCheckpointStored), key=lambda kept: (-kept.step_version, kept.node)
    )
    return tuple(named(driver.keepers, kept) for kept in newest)


def wait_until_sent(driver: Any, iteration: int) -> None:
    """Wait until rank 0 is held and sends no checkpoint: a pending one makes it skip the next."""
    driver.held(0, iteration)

    def sent() -> bool:
        events = [line["event"] for line in driver.trace(0)]
        return events.count("copy") == events.count("copied")

    driver.until(sent)


def hold_in(driver: Any, iteration: int) -> Path:
    """Hold rank 0 at the start of this iteration; return the hold file."""
    path: Path = driver.hold(0, "forward", iteration, micro_batch=0)
    return path


def walk(driver: Any, begin: int, end: int) -> None:
    """Move rank 0 from one iteration to another such that it skips no checkpoint between them."""
    for iteration in range(begin, end):
        wait_until_sent(driver, iteration)
        hold_in(driver, iteration + 1)
    wait_until_sent(driver, end)


def die_at(driver: Any, ranks: list[int], iteration: int) -> None:
    """Kill the ranks in `iteration`, when both stores have every earlier checkpoint."""
    walk(driver, 1, iteration)
    for rank in ranks:
        driver.kill(rank)
    (driver.trace_dir / "hold" / f"{TASK}-0").unlink()


def test_all_ranks_die_and_resume_from_the_last_checkpoint(driver: Any, twin: Twins) -> None:
    driver.start(0, 1)
    hold_in(driver, 1)
    driver.form([0, 1])
    die_at(driver, [0, 1], 11)
    copies = reported(driver)
    assert copies[-1].step_version == EVERY, "the first one is reported at once"
    assert {copy.node for copy in copies} == {"n1", "n2"}
    newest = [one for one in driver.keepers[0].stored(TASK) if one.offer.step_version == 9]
    assert sorted(one.offer.share for one in newest) == [0, 1], "each rank stores its own share"
    driver.start(0, 1, attempt=2)
    first, second = driver.form([0, 1], copies=copies).values()
    assert (first.origin, first.source) == (second.origin, second.source) == ("copy", -1)
    assert {first.origin_node, second.origin_node} <= {"n1", "n2"}
    assert first.step_version == second.step_version == 9, "the newest one, although unreported"
    num_bytes = sum(one.offer.copy_bytes - one.offer.manifest_bytes for one in newest)
    assert first.received_bytes == second.received_bytes == num_bytes, "no rank reads it for others"
    assert driver.told(r.RankErrored) == []
    driver.finish([0, 1])
    assert sorted(driver.losses()) == list(range(ITERATIONS))
    assert twin(0.0).is_equal(driver.final_checkpoint())


@pytest.mark.thorough
def test_an_altered_checkpoint_is_skipped_for_the_next(driver: Any, drive: Drive) -> None:
    driver.start(0)
    hold_in(driver, 1)
    driver.form([0])
    die_at(driver, [0], 7)
    copies = reported(driver)
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


def test_unusable_checkpoints_are_skipped_for_the_next(driver: Any) -> None:
    """Unusable: a store with another secret, a closed one, another model, a missing generation."""
    driver.start(0)
    hold_in(driver, 1)
    driver.form([0])
    die_at(driver, [0], 7)
    good = reported(driver)[0]
    stranger, closed = LocalKeeper("n3", secret=b"another"), LocalKeeper("n4")
    driver.keepers += [stranger, closed]
    closed.close()
    other = LocalKeeper("n5")
    driver.keepers.append(other)
    put(other.keeper.endpoint, 7, [bytes(64)])
    wrong = tuple(
        replace(good, node=one.keeper.node, endpoint=one.keeper.endpoint)
        for one in (stranger, closed, other)
    )
    later = replace(good, generation=2)
    driver.start(0, attempt=2)
    log = driver.processes[0].log
    (came,) = driver.form([0], copies=(*wrong, later, good)).values()
    assert (came.origin, came.origin_node, came.step_version) == ("copy", good.node, 6)
    text = log.read_text()
    assert text.count("in-memory checkpoint not usable") == 2
    for why in ("not the key of task 7", "refused", "another model"):
        assert why in text


def test_a_rank_that_dies_while_it_sends_leaves_the_last_checkpoint(driver: Any) -> None:
    driver.start(0)
    hold_in(driver, EVERY)
    driver.form([0])
    wait_until_sent(driver, EVERY)
    driver.hold(0, "copy_mid", 6)
    driver.held(0, 6)
    driver.strike(0, iteration=8, event="forward")  # training does not wait for the transfer
    driver.kill(0)
    (driver.trace_dir / "hold" / f"{TASK}-0").unlink()
    for keeper in driver.keepers:
        assert [one.offer.step_version for one in keeper.stored(TASK)] == [3]
    first, second = driver.keepers
    driver.until(
        lambda: first.shelf.used_bytes == second.shelf.used_bytes,
        "the half of a checkpoint is still there",
    )
    driver.start(0, attempt=2)
    (came,) = driver.form([0], copies=reported(driver)).values()
    assert (came.origin, came.step_version) == ("copy", 3)
    driver.finish([0])


class SilentStores:
    """Stores that accept connections and never answer."""

    def __init__(self, num: int) -> None:
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]

    def copies(self) -> tuple[MemoryCheckpoint, ...]:
        """One checkpoint at each store."""
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
        """The number of connections to each store since the last call."""
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
def silent() -> Iterator[SilentStores]:
    made = SilentStores(3)
    yield made
    for listener in made.listeners:
        listener.close()


def test_a_store_that_does_not_answer_delays_no_iteration(
    driver: Any, silent: SilentStores
) -> None:
    for keeper in driver.keepers:
        keeper.close()
    store = StoreEndpoint("n9", silent.copies()[0].endpoint)
    driver.keepers = [SimpleNamespace(keeper=store, close=lambda: None)]
    driver.start(0, 1)
    driver.form([0, 1])
    driver.finish([0, 1])
    begun_s = [line["t"] for line in driver.trace(0) if line["event"] == "copy"]
    assert begun_s
    # The saver skips later checkpoints while one is being sent.
    assert all(
        after - before >= 0.9 * protocol.STALL_S_MAX
        for before, after in itertools.pairwise(begun_s)
    ), begun_s
    assert driver.told(r.MemoryCheckpointStored) == []


@pytest.mark.thorough
def test_a_checkpoint_under_way_outlives_its_generation(driver: Any) -> None:
    driver.start(0, 1)
    path = driver.hold(0, "copy_mid", 3)
    there = driver.hold(1, "forward", 4)
    driver.form([0, 1])
    driver.held(0, 3)
    driver.held(1, 4)
    driver.ask_to_leave([0, 1], "now")
    there.unlink()
    driver.quiesced([0, 1])
    assert [one.offer.share for one in driver.keepers[0].stored(TASK)] == [1]
    path.unlink()
    driver.keepers[0].wait(TASK, lambda stored: stored.offer.share == 0)
    kept = driver.wait(r.MemoryCheckpointStored, 0)
    assert (kept.generation, kept.step_version, kept.node) == (1, 3, "n1")
    driver.form([0, 1])
    driver.finish([0, 1])


def test_the_stores_may_change_during_training(driver: Any) -> None:
    driver.start(0)
    path = hold_in(driver, 4)
    driver.form([0])
    wait_until_sent(driver, 4)
    new = LocalKeeper("n3")
    driver.keepers.append(new)
    driver.order(
        SetCheckpointStores(nodes=("n1",), task=TASK, generation=1, keepers=(new.keeper,)), [0]
    )
    driver.heard(0)
    walk(driver, 4, 12)
    path.unlink()
    driver.finish([0])
    kept = new.stored(TASK)
    assert [one.offer.step_version for one in kept] == [9, 12]
    assert max(one.offer.step_version for one in driver.keepers[0].stored(TASK)) == 3


@pytest.mark.thorough
def test_an_in_memory_checkpoint_stalls_less_than_an_iteration(drive: Drive) -> None:
    """An in-memory checkpoint stalls the main thread for less than an iteration.

    The shortest stall counts, because other load of the machine may lengthen the others.
    """
    driver = drive(
        copy_every=2,
        iterations=6,
        batch={"global": 8, "micro": 2},
        model={"num_layers": 4, "hidden": 256, "num_heads": 4, "sequence": 64},
    )
    driver.keepers = [LocalKeeper("n1"), LocalKeeper("n2")]
    driver.start(0)
    driver.form([0])
    driver.finish([0])
    lines: list[dict[str, Any]] = driver.trace(0)
    stalls: list[float] = []
    for line in lines:
        if line["event"] == "copy":
            after = min(
                x["t"]
                for x in lines
                if x["event"] == "micro_batch"
                and x["iteration"] == line["iteration"]
                and x["t"] > line["t"]
            )
            stalls.append(after - line["t"])
    ready = driver.processes[0].ready
    assert ready is not None
    step_s = sorted(step for one in driver.told(r.TaskProgressed) for step in one.step_s)
    print(
        f"state {ready.state_bytes / 1e6:.1f} MB, stalls "
        f"{sorted(round(1e3 * stall, 1) for stall in stalls)} ms, median iteration "
        f"{1e3 * step_s[len(step_s) // 2]:.0f} ms"
    )
    assert min(stalls) < step_s[len(step_s) // 2]


NO_ROOM = """
from unicron.workers.training.checkpoint import memory_checkpoint
def take(*args):
    raise RuntimeError("not enough memory: you tried to allocate a buffer")
memory_checkpoint.Snapshot = take
"""


def test_training_continues_without_memory_for_a_checkpoint(drive: Drive) -> None:
    driver = drive(copy_every=EVERY)
    driver.keepers = [LocalKeeper("n1")]
    driver.patch = NO_ROOM
    driver.start(0)
    driver.form([0])
    driver.finish([0])
    assert driver.processes[0].log.read_text().count("in-memory checkpoint not taken") == 1
    assert driver.keepers[0].stored(TASK) == []


# --- stores that do not answer -------------------------------------------------------------------
def test_stores_that_do_not_answer_are_asked_once_at_the_same_time(
    silent: SilentStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "STALL_S_MAX", 2.0)
    first, second, third = silent.copies()
    named = (first, first, second, first, second, third)
    began_s = time.monotonic()
    stores = memory_restore.Stores(TASK, named, KEYS, lambda: False)
    assert stores.versions(stores.shares(0, 1)) == []
    assert 1.9 <= time.monotonic() - began_s < 5.9, "one after another they would take 6 s"
    assert silent.num_asked() == [1, 1, 1]
    assert stores.shares(1, 2) == []
    assert silent.num_asked() == [0, 1, 0], "each store is asked by one of the members"


def test_no_store_is_asked_after_the_limit_or_the_next_order(silent: SilentStores) -> None:
    stores = memory_restore.Stores(TASK, silent.copies(), KEYS, lambda: True)
    assert stores.shares(0, 1) == []
    stores = memory_restore.Stores(TASK, silent.copies(), KEYS, lambda: False, silent_s_max=0.0)
    assert stores.shares(0, 1) == []
    assert silent.num_asked() == [0, 0, 0]


@pytest.mark.thorough
def test_a_rank_that_restores_its_state_obeys_the_next_order(
    drive: Callable[..., Any], silent: SilentStores
) -> None:
    driver = drive()
    driver.start(0, 1)
    driver.reconfigure([0, 1], copies=silent.copies())
    silent.listeners[0].settimeout(WAIT_S)
    connection, _ = silent.listeners[0].accept()
    with connection:
        driver.ask_to_leave([0, 1], "now")
        failed = driver.wait(r.ReconfigureFailed, 0)
    assert failed.error.startswith("stopped; ")
    driver.quiesced([0, 1])
    reports = driver.form([0, 1])
    assert [(one.origin, one.step_version) for one in reports.values()] == [("seed", 0)] * 2
    driver.finish([0, 1])
