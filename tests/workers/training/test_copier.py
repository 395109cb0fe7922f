"""The sending side of copies by itself: when one is taken, what is told, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from checkpoint_stores import SECRET, TASK, WAIT_S, LocalKeeper, named
from msgspec.structs import replace
from structlog.testing import capture_logs
from unicron.events.records.orders import StartRank
from unicron.events.records.reports import MemoryCheckpointStored
from unicron.events.records.types import Body, Slot
from unicron.events.spec.job import JobSpec, Model, Optimizer, Slots, Train
from unicron.workers.training.checkpoint import memory_checkpoint
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model import training_state
from unicron.workers.training.process.history import History
from unicron.workers.training.process.trace import Event

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

TRAIN = Train(model=Model(num_layers=1, hidden=32, num_heads=2, sequence=16),
              optimizer=Optimizer(lr=1e-2, warmup_iterations=2), iterations=10, output="unused")


class Bench:
    """A copier with a clock of its own."""

    def __init__(self, trainee: model.TrainingModel) -> None:
        self.trainee = trainee
        self.now_s = 100.0
        self.is_behind = False
        self.told: list[MemoryCheckpointStored] = []
        self.taken: list[int] = []
        self.done = threading.Event()
        start = StartRank(nodes=("n1",), task=TASK, rank=0, attempt=1, incarnation=1,
                          slot=Slot("n1", 0), num_seats=1, host="", port=0,
                          spec=JobSpec(api_version="unicron/v1", name="bench", train=TRAIN,
                                       slots=Slots(min=1, max=1)),
                          checkpoint="")
        self.copier = memory_checkpoint.MemorySaver(
            start, SECRET, spare=lambda descriptor: nullcontext(), tell=self._tell, note=self._note
        )

    def copy(self, step: int, *keepers: LocalKeeper, generation: int = 1) -> bool:
        """Whether it took one; returns when it is with the keepers."""
        self.done.clear()
        num = len(self.taken)
        self.copier.copy(self.trainee, step, History(), generation,
                         tuple(keeper.keeper for keeper in keepers))
        if len(self.taken) == num:
            return False
        assert self.done.wait(WAIT_S)
        for thread in threading.enumerate():
            if thread.name == "copies":
                thread.join(WAIT_S)
        return True

    def _tell(self, body: Body) -> bool:
        assert isinstance(body, MemoryCheckpointStored)
        if not self.is_behind:
            self.told.append(body)
        return not self.is_behind

    def _note(self, event: Event, generation: int, step: int) -> None:
        if event == "copy":
            self.taken.append(step)
        elif event == "copied":
            self.done.set()


@pytest.fixture
def bench(alone: Any, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(model.build(TRAIN, torch.device("cpu"), alone))
    monkeypatch.setattr(memory_checkpoint, "clock", lambda: made.now_s)
    return made


@pytest.fixture
def keeper() -> Iterator[LocalKeeper]:
    made = LocalKeeper("n1")
    yield made
    made.close()


def test_where_no_keeper_takes_it_a_copy_is_tried_less_and_less(
        bench: Bench, keeper: LocalKeeper) -> None:
    room = keeper.shelf.bytes_max
    with capture_logs() as said:
        for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
            keeper.shelf.bytes_max -= 1 if keeper.shelf.bytes_max < room else room - 100
            assert bench.copy(10, keeper)
            bench.now_s += pause_s - 0.1
            assert not bench.copy(20, keeper), "the keeper has refused the last one"
            bench.now_s += 0.2
        keeper.shelf.bytes_max = room
        assert bench.copy(30, keeper)
        assert bench.copy(40, keeper), "all is well again"
    assert [one["event"] for one in said] == [
        "in-memory checkpoint not stored", "in-memory checkpoint stored again"], \
        "the text is another one each time"


def test_one_keeper_that_takes_it_is_enough_and_others_are_tried_at_once(
        bench: Bench, keeper: LocalKeeper) -> None:
    full, new = LocalKeeper("n2", bytes_max=1), LocalKeeper("n3")
    try:
        assert bench.copy(10, keeper, full)
        assert bench.copy(20, keeper, full)
        assert bench.copy(30, full)
        assert not bench.copy(40, full)
        assert bench.copy(50, new), "who has not refused any"
        assert [one.offer.step_version for one in new.stored(TASK)] == [50]
    finally:
        full.close()
        new.close()


def test_no_memory_for_a_copy_is_said_once_and_tried_less_and_less(
        bench: Bench, keeper: LocalKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*asked: object) -> None:
        raise RuntimeError(f"not enough memory: {bench.now_s} bytes")

    with monkeypatch.context() as context, capture_logs() as said:
        context.setattr(bench.copier._snapshot, "take", take)  # pyright: ignore[reportPrivateUsage]
        bench.done.set()
        for pause_s in (1.0, 2.0, 4.0):
            num = len(bench.taken)
            bench.copier.copy(bench.trainee, 10, History(), 1, (keeper.keeper,))
            bench.copier.copy(bench.trainee, 11, History(), 1, (keeper.keeper,))
            assert len(bench.taken) == num + 1
            bench.now_s += pause_s + 0.1
    assert [one["event"] for one in said] == ["in-memory checkpoint not taken"]
    assert bench.copy(20, keeper)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError(),
                                   ValueError("buffer is not contiguous")])
def test_a_copy_that_cannot_be_sent_is_no_fault(
        bench: Bench, keeper: LocalKeeper, monkeypatch: pytest.MonkeyPatch,
        error: Exception) -> None:
    def put(*asked: object) -> None:
        raise error

    with monkeypatch.context() as context, capture_logs() as said:
        context.setattr(memory_checkpoint.protocol, "put", put)
        assert bench.copy(10, keeper), "the thread comes to its end"
    assert [(one["event"], one["why"]) for one in said] == [
        ("in-memory checkpoint not stored", str(error) or "MemoryError")]
    bench.now_s += 1.1
    assert bench.copy(20, keeper)


def test_it_is_told_from_time_to_time_and_when_something_is_new(
        bench: Bench, keeper: LocalKeeper) -> None:
    def told() -> list[int]:
        return [one.step_version for one in bench.told]

    bench.is_behind = True
    assert bench.copy(10, keeper)
    assert told() == [], "the agent does not take what it has been told"
    bench.is_behind = False
    for step in (20, 30, 40):
        assert bench.copy(step, keeper)
    assert told() == [20]
    bench.now_s += memory_checkpoint.REPORT_S
    assert bench.copy(50, keeper)
    assert told() == [20, 50]
    keeper.shelf.start += 1
    assert bench.copy(60, keeper)
    assert told() == [20, 50, 60], "another process of that keeper"
    assert bench.copy(70, keeper, generation=2)
    assert told() == [20, 50, 60, 70]


@pytest.mark.parametrize("change", [
    {"loss_scales": [training_state.LossScale(scale=1.0, growth_tracker=0, hysteresis_tracker=0)]},
    {"precision": "bf16"},
])
def test_what_does_not_fit_is_found_before_anything_is_changed(
        bench: Bench, keeper: LocalKeeper, monkeypatch: pytest.MonkeyPatch,
        change: dict[str, Any]) -> None:
    numbers = training_state.numbers
    monkeypatch.setattr(
        training_state, "numbers", lambda *asked: replace(numbers(*asked), **change)
    )
    assert bench.copy(10, keeper)
    monkeypatch.setattr(training_state, "numbers", numbers)
    live = training_state.tensors(bench.trainee)
    for tensor in live.values():
        tensor.add_(1.0)
    before = {name: tensor.clone() for name, tensor in live.items()}
    copy = named(keeper, bench.told[0])
    with capture_logs() as said:
        assert memory_checkpoint.restore(bench.trainee, History(), TASK, (copy,), SECRET,
                              lambda: False) is None
    assert "does not fit" in said[0]["why"]
    for name, tensor in live.items():
        assert torch.equal(tensor, before[name]), name


def test_numbers_are_taken_over_whole_or_not_at_all(bench: Bench) -> None:
    told = training_state.numbers(bench.trainee, 5, History())
    wrong = replace(told, adam_step=9.0, precision="fp16")
    with pytest.raises(ValueError, match="numbers of fp16, not"):
        training_state.load(bench.trainee, wrong, History())
    assert training_state.numbers(bench.trainee, 5, History()).adam_step == told.adam_step
