"""What is kept of the local sum: whole again after a reduction that came to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from unicron.events.spec.job import Model, Train
from unicron.workers.training.communicators import process_groups
from unicron.workers.training.model import cpu_device
from unicron.workers.training.model import trainee as model
from unicron.workers.training.step.overlapped_reduction import GradientBackup

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

TRAIN = Train(model=Model(num_layers=1, hidden=32, num_heads=2, sequence=16), iterations=10,
              output="unused", overlap=True, bucket_params=3_000)


@pytest.fixture
def trainee() -> Iterator[model.TrainingModel]:
    """In a world of one."""
    cpu_device.prepare_device()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield model.build(TRAIN, torch.device("cpu"), process_groups.build(None, 60))
    process_groups.clear_globals()
    dist.destroy_process_group()


def backward(trainee: Any) -> None:
    trainee.draw.at(0, 0)
    with trainee.ddps[0].no_sync():
        trainee.loss(torch.arange(34).view(2, 17)).backward()


def test_whatever_is_still_written_to_the_old_memory_counts_nowhere(trainee: Any) -> None:
    """Two buckets had been launched, and the second is still being reduced after all is back."""
    backward(trainee)
    (whole,) = (part.clone() for part in trainee.gradients)
    assert whole.abs().sum() > 0
    first, second, *others = trainee.bucket_groups
    assert others
    kept = GradientBackup(trainee)
    for group in (first, second):
        kept.keep(group)
        group.buckets[0].grad_data.mul_(7)
    late = second.buckets[0].grad_data
    assert sum(copy.numel() for copy in kept._copies) == whole.numel(), "4 bytes a parameter"
    kept.restore()
    late.fill_(float("nan"))
    assert trainee.gradients[0].equal(whole)

    # Megatron's own views are of the memory that counts, and it goes on there
    memory = trainee.gradients[0].untyped_storage().data_ptr()
    views = [bucket.grad_data for group in trainee.bucket_groups for bucket in group.buckets]
    views += [param.main_grad for param in trainee.modules[0].parameters()]
    assert {view.untyped_storage().data_ptr() for view in views} == {memory}
    backward(trainee)
    torch.testing.assert_close(trainee.gradients[0], 2 * whole)
    trainee.ddps[0].zero_grad_buffer()
    assert not trainee.gradients[0].any()


def test_a_whole_reduction_is_what_counts(trainee: Any) -> None:
    backward(trainee)
    (whole,) = (part.clone() for part in trainee.gradients)
    kept = GradientBackup(trainee)
    for group in trainee.bucket_groups:
        kept.keep(group)
    trainee.gradients[0].mul_(3)
    kept.drop()
    kept.restore()
    assert trainee.gradients[0].equal(3 * whole)
    kept.keep(trainee.bucket_groups[0])
    trainee.bucket_groups[0].buckets[0].grad_data.zero_()
    kept.restore()
    assert trainee.gradients[0].equal(3 * whole), "the rest was never in danger"
