"""The training state is complete: every other value that training changes is listed here."""

from __future__ import annotations

import enum
import gc
import hashlib
import re
import shutil
from collections import deque
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import msgspec
import pytest
import reference
import torch
from msgspec.structs import replace
from unicron.control_plane.throughput.state_size import trained_bytes
from unicron.events.errors import UsageError
from unicron.events.records.reports import LossFiniteAgain, LossNotFinite, TaskProgressed
from unicron.events.spec.job import DynamicLossScale, Model, Optimizer, Train
from unicron.workers.training.checkpoint import checkpoint
from unicron.workers.training.model import text_data, training_state
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model.megatron_step import step
from unicron.workers.training.process.history import REPORT_ITERATIONS_MAX, History
from unicron.workers.training.recovery import state_shards

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)
UNSEEN = (type, ModuleType, FunctionType)
pytestmark = pytest.mark.filterwarnings("ignore:::megatron")
TRAIN = Train(
    model=Model(num_layers=1, hidden=32, num_heads=2, sequence=16, dropout=0.1),
    optimizer=Optimizer(lr=1e-2, warmup_iterations=2),
    iterations=10,
    output="unused",
)
# The loss scale doubles every second iteration, until it overflows.
FP16 = DynamicLossScale(initial=2.0**12, window=2)
PRECISIONS = {
    "fp32": TRAIN,
    "bf16": replace(TRAIN, precision="bf16"),
    "bf16-scaled": replace(TRAIN, precision="bf16", loss_scale=1024.0),
    "fp16": replace(TRAIN, precision="fp16", dynamic_loss_scale=FP16),
}
# What training changes besides the tensors of the state. Each entry is stored in Numbers, follows
# from the state, or has no meaning between two iterations.
CHANGES = {
    "adam_step": r"\.state\[\d+\]\[step\]",
    "scheduled_samples": r"scheduler\.num_steps",
    "loss_scales": r"\.grad_scaler\.(_scale|_growth_tracker|_hysteresis_tracker)",
    "of the schedule's position": r"\.param_groups\[\d+\]\[(lr|weight_decay)\]",
    "of the place": r"[.\[]draw[.\]]",
    "gradients, cleared": r"\.(grad|main_grad|grad_data)",
    "set before each use": r"\.found_inf",
}


def leaves(roots: dict[str, Any]) -> dict[str, Any]:
    """Path -> value of everything reachable from `roots`; for a tensor, its address and digest."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    todo = list(roots.items())[::-1]
    while todo:
        path, thing = todo.pop()
        if isinstance(thing, PLAIN):
            found[path] = thing
        elif id(thing) not in seen and not isinstance(thing, UNSEEN):
            seen[id(thing)] = thing  # keeps it alive, so that no other object gets its id
            if isinstance(thing, torch.Tensor):
                found[path] = (thing.data_ptr(), digest(thing))
            elif isinstance(thing, torch.Generator):
                found[path] = digest(thing.get_state())
            todo += [(f"{path}{step}", inner) for step, inner in inside(thing)][::-1]
    return found


def inside(thing: Any) -> list[tuple[str, Any]]:
    """(path step, value) of each part of a thing."""
    if isinstance(thing, dict):
        return [
            (f"[{key if isinstance(key, PLAIN) else number}]", value)
            for number, (key, value) in enumerate(thing.items())
        ]
    if isinstance(thing, (list, tuple, deque)):
        return [(f"[{number}]", value) for number, value in enumerate(thing)]
    if isinstance(thing, MethodType):
        return [(".__self__", thing.__self__)]
    parts = [(f".{name}", value) for name, value in getattr(thing, "__dict__", {}).items()]
    if isinstance(thing, torch.Tensor) and thing.grad is not None:
        parts.append((".grad", thing.grad))
    return parts


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Paths that only one of the two has, or whose content differs."""

    def content(value: Any) -> Any:
        return value[1] if isinstance(value, tuple) else value

    return sorted(
        path
        for path in before.keys() | after.keys()
        if path not in before or path not in after or content(before[path]) != content(after[path])
    )


@pytest.fixture(params=PRECISIONS)
def train(request: pytest.FixtureRequest) -> Train:
    return PRECISIONS[request.param]


def _train(trainee: model.TrainingModel, first: int, last: int) -> list[bool]:
    """Train iterations `first` to `last` - 1; return whether each one stepped."""
    words = text_data.load((), 16)
    stepped: list[bool] = []
    for iteration in range(first, last):
        trainee.clear()
        trainee.draw.at(iteration, 0)
        tokens = words.sample(1, iteration, 0, rows=2, sequence=16)
        trainee.optimizer.scale_loss(trainee.loss(tokens)).backward()
        num_tokens = float(trainee.num_tokens(tokens))
        stepped.append(step(trainee, num_tokens, lambda event: None) is not None)
    trainee.clear()
    return stepped


def _same(one: model.TrainingModel, other: model.TrainingModel) -> bool:
    mine, theirs = training_state.tensors(one), training_state.tensors(other)
    return list(mine) == list(theirs) and all(mine[name].equal(theirs[name]) for name in mine)


def _unlisted(trainee: model.TrainingModel, first: int, last: int) -> list[str]:
    """Paths that change in these iterations, are not state, and are not listed in CHANGES."""
    roots = {
        "module": trainee.modules[0],
        "ddp": trainee.ddps[0],
        "optimizer": trainee.optimizer,
        "scheduler": trainee.scheduler,
    }
    before = leaves(roots)
    _train(trainee, first, last)
    after = leaves(roots)
    held = {tensor.data_ptr() for tensor in training_state.tensors(trainee).values()}
    known = re.compile("|".join(CHANGES.values()))

    def is_state(path: str) -> bool:
        value = after.get(path)
        return isinstance(value, tuple) and value[0] in held

    return [
        path for path in changed(before, after) if not is_state(path) and not known.search(path)
    ]


def test_all_that_training_changes_is_listed(alone: Any, train: Train) -> None:
    trainee = model.build(train, torch.device("cpu"), alone)
    _train(trainee, 0, 1)  # creates what is created at first use
    assert not _unlisted(trainee, 1, 6)


def test_an_unlisted_entry_is_detected(alone: Any) -> None:
    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    layer = trainee.modules[0].decoder.layers[0]
    layer.seen, layer.notes = torch.zeros(3), [{"times": 0}]

    def count(module: Any, given: Any, made: Any) -> None:
        layer.seen += 1
        layer.notes[0]["times"] += 1

    layer.register_forward_hook(count)
    _train(trainee, 0, 1)
    assert [path.rpartition("[0]")[2] or path for path in _unlisted(trainee, 1, 2)] == [
        "[times]",
        ".seen",
    ]


def test_a_buffer_is_part_of_the_state(alone: Any) -> None:
    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    trainee.modules[0].register_buffer("expert_bias", torch.zeros(4))
    assert "buffer.expert_bias" in training_state.tensors(trainee)


def test_a_copy_of_the_state_trains_identically(alone: Any, train: Train, tmp_path: Path) -> None:
    giver = model.build(train, torch.device("cpu"), alone)
    history = History()
    skipped = _train(giver, 0, 5).count(False)
    assert bool(skipped) == (train.precision == "fp16"), "the initial loss scale overflows in fp16"
    for iteration in range(5):
        history.add(iteration, 5.0 - iteration, 0.1)
    numbers = msgspec.msgpack.decode(
        msgspec.msgpack.encode(training_state.numbers(giver, 5, history)),
        type=training_state.Numbers,
    )
    assert (numbers.consumed_samples - numbers.scheduled_samples) / train.batch.global_ == skipped

    taker, theirs = model.build(train, torch.device("cpu"), alone), History()
    for mine, other in zip(
        training_state.tensors(taker).values(), training_state.tensors(giver).values(), strict=True
    ):
        mine.copy_(other)
    assert training_state.load(taker, numbers, theirs) == 5
    assert theirs.losses == history.losses

    checkpoint.save(str(tmp_path / "five"), giver, 5, history)
    reader, read = model.build(train, torch.device("cpu"), alone), History()
    assert checkpoint.load(str(tmp_path / "five"), reader, read) == 5
    assert read.losses == history.losses
    plain = reference.read(tmp_path / "five")
    for name, tensor in training_state.tensors(giver).items():
        assert plain[name].equal(tensor), f"{name}, read by torch alone"
        assert plain[name].dtype == tensor.dtype

    stepped = [_train(trainee, 5, 9) for trainee in (giver, taker, reader)]
    assert stepped[0] == stepped[1] == stepped[2]
    assert _same(giver, taker)
    assert _same(giver, reader)
    assert training_state.numbers(giver, 9, history) == training_state.numbers(taker, 9, theirs)


def test_parameters_of_16_bits_are_their_masters_rounded(alone: Any) -> None:
    trainee = model.build(PRECISIONS["bf16"], torch.device("cpu"), alone)
    _train(trainee, 0, 3)
    held = training_state.tensors(trainee)
    params = [name for name in held if name.startswith("model.")]
    for name in params:
        master = held[name.replace("model.", "master.", 1)]
        assert master.dtype == torch.float32
        assert held[name].equal(master.to(torch.bfloat16))
    # 2 bytes for the parameter; 4 each for its master and its two moments.
    assert sum(tensor.nbytes for tensor in held.values()) == 14 * sum(
        held[name].numel() for name in params
    )


def test_a_checkpoint_of_another_precision_is_refused(alone: Any, tmp_path: Path) -> None:
    giver = model.build(PRECISIONS["bf16"], torch.device("cpu"), alone)
    checkpoint.save(str(tmp_path / "one"), giver, 1, History())
    reader = model.build(TRAIN, torch.device("cpu"), alone)
    before = {name: tensor.clone() for name, tensor in training_state.tensors(reader).items()}
    with pytest.raises(UsageError, match="holds a state of bf16, not fp32") as raised:
        checkpoint.load(str(tmp_path / "one"), reader, History())
    assert raised.value.hint.startswith("set train.precision: bf16")
    assert all(
        tensor.equal(before[name]) for name, tensor in training_state.tensors(reader).items()
    )


def test_a_job_begins_from_a_link_that_another_task_moves(alone: Any, tmp_path: Path) -> None:
    """What a member has found is read; another one that finds a later checkpoint does not mix."""
    latest, giver = tmp_path / "latest", model.build(TRAIN, torch.device("cpu"), alone)
    for at in (3, 5):
        _train(giver, at - 3, at)
        checkpoint.save(str(tmp_path / f"iter-{at}"), giver, at, History())
    latest.symlink_to("iter-3")
    first, second = (checkpoint.StoredBeginning(str(latest)) for _ in range(2))
    assert first.newest() == 3
    latest.unlink()
    latest.symlink_to("iter-5")
    assert second.newest() == 5
    reader, history = model.build(TRAIN, torch.device("cpu"), alone), History()
    first.read(reader, 3, history)
    with pytest.raises(RuntimeError, match="has iteration 5, and the first rank found 3"):
        second.read(reader, 3, history)
    shutil.rmtree(tmp_path / "iter-3")
    with pytest.raises(RuntimeError, match="iter-3 was removed while it was read"):
        first.read(reader, 3, history)
    assert first.newest() == 5, "found anew"


def test_a_checkpoint_of_an_earlier_task_is_replaced(alone: Any, tmp_path: Path) -> None:
    """Generations count from 1 in every task, so tasks with one output folder share paths."""
    earlier = model.build(TRAIN, torch.device("cpu"), alone)
    checkpoint.save(str(tmp_path / "gen-1" / "iter-3"), earlier, 3, History())
    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    _train(trainee, 0, 3)
    checkpoint.save(str(tmp_path / "gen-1" / "iter-3"), trainee, 3, History())
    reader = model.build(TRAIN, torch.device("cpu"), alone)
    checkpoint.load(str(tmp_path / "gen-1" / "iter-3"), reader, History())
    assert _same(reader, trainee)
    assert [folder.name for folder in (tmp_path / "gen-1").iterdir()] == ["iter-3"]


def test_the_same_seed_builds_the_same_model(alone: Any) -> None:
    assert _same(
        model.build(TRAIN, torch.device("cpu"), alone),
        model.build(TRAIN, torch.device("cpu"), alone),
    )


def test_dropout_depends_on_iteration_and_micro_batch_alone(alone: Any) -> None:
    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    tokens = text_data.load((), 16).sample(1, 0, 0, rows=2, sequence=16)
    losses: list[float] = []
    for place in ((3, 1), (3, 2), (4, 1), (3, 1)):
        trainee.draw.at(*place)
        losses.append(trainee.loss(tokens).item())
    assert losses[0] == losses[3]
    assert len(set(losses)) == 3


def _told(history: History, begin: int) -> list[object]:
    """The reports: of progress, the first iteration, the losses and how many iterations."""
    return [
        (report.first_iteration, report.losses, len(report.step_s))
        if isinstance(report, TaskProgressed)
        else report
        for report in history.tell(
            begin, task=1, generation=2, micro_batches=4, flops=10.0, skipped=0
        )
    ]


def test_a_series_of_losses_that_are_not_finite_is_told_once() -> None:
    history, nan = History(), float("nan")
    for iteration, loss in enumerate([3.0, 2.0, nan, float("inf"), nan, 1.0]):
        history.add(iteration, loss, 0.5)
    begins = LossNotFinite(task=1, generation=2, iteration=2, text="nan")
    ends = LossFiniteAgain(task=1, generation=2, iteration=5, num=3)
    assert _told(history, 1) == [
        *((1, (2.0,), 1), begins, (2, (), 3)),
        *(ends, (5, (1.0,), 1)),
    ]
    assert _told(history, 3) == [(3, (), 2), ends, (5, (1.0,), 1)], "the series goes on"
    assert _told(history, 5) == [ends, (5, (1.0,), 1)]
    history.saved_at = 2
    assert msgspec.structs.replace(begins, is_saving=True) in _told(history, 0)


def test_a_series_without_its_begin_is_told_from_what_is_known() -> None:
    history = History()
    history.replace(7, [float("-inf"), 1.0], [0.5, 0.5])
    assert [type(each).__name__ for each in _told(history, 0)] == [
        *("LossNotFinite", "tuple", "LossFiniteAgain", "tuple"),
    ]


@pytest.mark.parametrize("num", [1, REPORT_ITERATIONS_MAX, REPORT_ITERATIONS_MAX + 1])
def test_a_long_series_has_one_begin(num: int) -> None:
    history = History()
    history.replace(0, [float("nan")] * num, [0.5] * num)
    told = _told(history, 0)
    assert sum(isinstance(each, LossNotFinite) for each in told) == 1
    assert sum(each[2] for each in told if isinstance(each, tuple)) == num


def test_progress_says_the_rate() -> None:
    history = History()
    for iteration in range(4):
        history.add(iteration, 1.0, 0.5)
    (report,) = history.tell(1, task=1, generation=1, micro_batches=4, flops=10.0, skipped=0)
    assert isinstance(report, TaskProgressed)
    assert report.rate_flops == pytest.approx(20.0)


def test_history_drops_iterations_that_are_repeated() -> None:
    history = History()
    for iteration in range(5):
        history.add(iteration, float(iteration), 0.1)
    history.add(3, 33.0, 0.1)
    assert history.losses == [0.0, 1.0, 2.0, 33.0]
    history.add(9, 9.0, 0.1)
    assert (history.first, history.losses) == (9, [9.0])


@pytest.mark.parametrize(
    "shape",
    [TRAIN.model, Model(num_layers=3, hidden=64, num_heads=2, sequence=16, tie_embeddings=False)],
)
def test_placement_computes_the_state_size(train: Train, shape: Model, alone: Any) -> None:
    train = replace(train, model=shape)
    trainee = model.build(train, torch.device("cpu"), alone)
    _train(trainee, 0, 2)
    assert trained_bytes(train, 1) == sum(
        tensor.nbytes for tensor in training_state.tensors(trainee).values()
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_released_model_keeps_no_memory(alone: Any, precision: str) -> None:
    """Its objects are part of reference cycles that the frozen collector never sees again."""
    trainee = model.build(PRECISIONS[precision], torch.device("cpu"), alone)
    trainee.clear()
    trainee.shards = state_shards.list_shards(trainee)
    stores = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*training_state.tensors(trainee).values(), *trainee.gradients)
    }
    assert _stores_of_tensors() & stores
    trainee.release()
    assert not _stores_of_tensors() & stores


def _stores_of_tensors() -> set[int]:
    """The memory under every tensor of this process."""
    return {
        one.untyped_storage().data_ptr()
        for one in gc.get_objects()
        if type(one) in (torch.Tensor, torch.nn.Parameter)
        and not one.is_meta
        and one.layout is torch.strided
    }
