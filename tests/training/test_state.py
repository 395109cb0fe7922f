"""The whole state is listed: whatever else changes in training must be named here first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from unicron.events.reports import LossNotFinite, TaskProgressed
from unicron.events.spec import Model, Optimizer, Train
from unicron.workers.training import checkpoint, cpu, groups, model, state, text
from unicron.workers.training.history import History

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

TRAIN = Train(model=Model(num_layers=1, hidden=32, num_heads=2, sequence=16, dropout=0.1),
              optimizer=Optimizer(lr=1e-2, warmup_iterations=2), iterations=10, output="unused")

# Fixed by the spec, or by the schedule's position.
GROUP_ENTRIES = {
    "params", "lr", "weight_decay", "betas", "eps", "amsgrad", "maximize", "foreach", "capturable",
    "differentiable", "fused", "decoupled_weight_decay", "wd_mult", "lr_mult", "max_lr", "min_lr",
    "is_expert_parallel", "is_decoupled_lr", "default_config", "pre_wd_mult", "pre_lr_mult",
    "start_wd", "end_wd", "initial_lr", "config_override",
}
SCHEDULE_ENTRIES = {
    "max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr",
    "start_wd", "end_wd", "wd_incr_style", "wd_incr_steps",
}


@pytest.fixture
def alone() -> Iterator[Any]:
    """A world of one; its groups."""
    cpu.stand_in()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield groups.data_parallel(60)
    groups.forget()
    dist.destroy_process_group()


def _train(trainee: model.Trainee, first: int, last: int) -> None:
    words = text.load((), 16)
    for iteration in range(first, last):
        trainee.ddp.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        trainee.draw.at(iteration, 0)
        loss = trainee.loss(words.sample(1, iteration, 0, rows=2, sequence=16))
        loss.backward()  # type: ignore[no-untyped-call]
        trainee.optimizer.step()
        trainee.scheduler.step(TRAIN.batch.global_)


def _same(one: model.Trainee, other: model.Trainee) -> bool:
    mine, theirs = state.tensors(one), state.tensors(other)
    return list(mine) == list(theirs) and all(mine[name].equal(theirs[name]) for name in mine)


def test_every_entry_of_the_state_is_listed(alone: Any) -> None:
    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    _train(trainee, 0, 2)
    listed = {id(tensor) for tensor in state.tensors(trainee).values()}
    held = {tensor.data_ptr() for tensor in state.tensors(trainee).values()}
    for name, tensor in [*trainee.module.named_parameters(), *trainee.module.named_buffers()]:
        assert tensor.data_ptr() in held, f"{name} is not listed"
    for key, value in trainee.module.state_dict().items():
        assert value is None or value.data_ptr() in held, f"{key} is not listed"
    for part in model.parts(trainee.optimizer):
        for moments in part.state.values():
            for name, value in moments.items():
                assert name == "step" or id(value) in listed, f"optimizer's {name} is not listed"
        for group in part.param_groups:
            assert set(group) <= GROUP_ENTRIES, set(group) - GROUP_ENTRIES
    assert set(trainee.scheduler.state_dict()) == SCHEDULE_ENTRIES


def test_a_copy_of_the_listed_state_trains_on_the_same(alone: Any, tmp_path: Path) -> None:
    giver = model.build(TRAIN, torch.device("cpu"), alone)
    history = History()
    _train(giver, 0, 3)
    for iteration in range(3):
        history.add(iteration, 5.0 - iteration, 0.1)
    told = state.decode(state.encode(state.numbers(giver, 3, history)))

    taker, theirs = model.build(TRAIN, torch.device("cpu"), alone), History()
    for mine, other in zip(state.tensors(taker).values(), state.tensors(giver).values(),
                           strict=True):
        mine.copy_(other)
    assert state.adopt(taker, told, theirs) == 3
    assert theirs.losses == history.losses

    checkpoint.save(tmp_path / "three", giver, 3, history)
    reader, read = model.build(TRAIN, torch.device("cpu"), alone), History()
    assert checkpoint.load(tmp_path / "three", reader, read) == 3
    assert read.losses == history.losses

    for trainee in (giver, taker, reader):
        _train(trainee, 3, 6)
    assert _same(giver, taker)
    assert _same(giver, reader)
    assert state.numbers(giver, 6, history) == state.numbers(taker, 6, theirs)


def test_an_earlier_tasks_checkpoint_is_not_taken_for_ones_own(alone: Any, tmp_path: Path) -> None:
    """Generations count from 1 in every task: the same output folder has the same paths."""
    earlier = model.build(TRAIN, torch.device("cpu"), alone)
    checkpoint.save(tmp_path / "gen-1" / "iter-3", earlier, 3, History())
    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    _train(trainee, 0, 3)
    checkpoint.save(tmp_path / "gen-1" / "iter-3", trainee, 3, History())
    reader = model.build(TRAIN, torch.device("cpu"), alone)
    checkpoint.load(tmp_path / "gen-1" / "iter-3", reader, History())
    assert _same(reader, trainee)
    assert [folder.name for folder in (tmp_path / "gen-1").iterdir()] == ["iter-3"]


def test_the_same_seed_builds_the_same_model(alone: Any) -> None:
    assert _same(model.build(TRAIN, torch.device("cpu"), alone),
                 model.build(TRAIN, torch.device("cpu"), alone))


def test_dropout_depends_on_the_place_alone(alone: Any) -> None:
    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    tokens = text.load((), 16).sample(1, 0, 0, rows=2, sequence=16)
    losses: list[float] = []
    for place in ((3, 1), (3, 2), (4, 1), (3, 1)):
        trainee.draw.at(*place)
        losses.append(trainee.loss(tokens).item())
    assert losses[0] == losses[3]
    assert len(set(losses)) == 3


def test_a_loss_that_is_no_number_is_a_report_of_its_own() -> None:
    history = History()
    for iteration, loss in enumerate([3.0, 2.0, float("nan"), 1.0]):
        history.add(iteration, loss, 0.5)
    told = list(history.tell(1, task=1, generation=1, micro_batches=4, flops=10.0))
    assert [type(report) for report in told] == [TaskProgressed, LossNotFinite, TaskProgressed]
    assert [report.first_iteration for report in told if isinstance(report, TaskProgressed)] == [
        1, 3]
    assert isinstance(told[0], TaskProgressed)
    assert told[0].rate_flops == pytest.approx(20.0)


def test_history_forgets_what_is_done_again() -> None:
    history = History()
    for iteration in range(5):
        history.add(iteration, float(iteration), 0.1)
    history.add(3, 33.0, 0.1)
    assert history.losses == [0.0, 1.0, 2.0, 33.0]
    history.add(9, 9.0, 0.1)
    assert (history.first, history.losses) == (9, [9.0])
