"""The work of the members in test_megatron_checkpoints.py: dist_checkpointing, both ways.

The state of a layout is that of share_work.py: equal in every layout, bit by bit.
"""

from __future__ import annotations

import multiprocessing
import queue
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import share_work
import stock_megatron
import torch
import torch.distributed as dist
from reshard_work import Layout
from unicron.events.errors import UsageError
from unicron.events.spec.job import Train
from unicron.events.spec.parallelism import num_positions
from unicron.workers.training.model import cpu_device

with cpu_device.uncompiled():
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from unicron.workers.host import checkpoint_index
    from unicron.workers.training.checkpoint import share_files
    from unicron.workers.training.checkpoint.folder import Folder
    from unicron.workers.training.checkpoint.megatron_format import MegatronFormat
    from unicron.workers.training.checkpoint.megatron_state import MegatronState
    from unicron.workers.training.checkpoint.snapshot import Snapshot
    from unicron.workers.training.model.trainee import TrainingModel
    from unicron.workers.training.process.history import History
    from unicron.workers.training.recovery.state_shards import list_shards

ITERATION = 7


def _state_dict(trainee: TrainingModel, kind: str, *, is_loading: bool = False) -> dict[str, Any]:
    """What Megatron-LM saves and loads; `kind`: how a distributed optimizer stores its state."""
    for part in trainee.optimizer.chained_optimizers:
        part.data_parallel_group_idx = trainee.at.pp * trainee.axes.tp + trainee.at.tp
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if kind:
        metadata |= {
            "distrib_optim_sharding_type": kind,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
    metadata["dp_cp_group"] = trainee.ddps[0].dp_cp_group
    found: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": ITERATION}
    for index, module in enumerate(trainee.modules):
        found[f"model{index}"] = module.sharded_state_dict(metadata=metadata)
    found["optimizer"] = trainee.optimizer.sharded_state_dict(
        {key: value for key, value in found.items() if key.startswith("model")},
        is_loading=is_loading,
        metadata=metadata,
    )
    return found | {"opt_param_scheduler": trainee.scheduler.state_dict()}


class _Queue(NamedTuple):
    """A queue without a thread or a process of its own: a result is there as soon as it is put."""

    pipe: Any

    def put(self, item: Any) -> None:
        self.pipe.put(item)

    def get_nowait(self) -> Any:
        if self.pipe.empty():
            raise queue.Empty
        return self.pipe.get()


def save_as_megatron(place: int, train: Train, layout: Layout, folder: str, kind: str) -> None:
    trainee = share_work.build(place, train, layout)
    args = Namespace(
        tensor_model_parallel_size=layout.axes.tp,
        pipeline_model_parallel_size=layout.axes.pp,
        enum=dist.ReduceOp,
    )
    if place == 0:
        Path(folder).mkdir()
    dist.barrier()
    # Megatron writes with child processes, which a test's world must not leave behind.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    filesystem_async._results_queue = _Queue(multiprocessing.get_context("fork").SimpleQueue())
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    dist_checkpointing.save(
        _state_dict(trainee, kind) | {"args": args},
        folder,
        content_metadata=content | ({"distrib_optim_sharding_type": kind} if kind else {}),
    )
    dist.barrier()


def read_as_unicron(
    place: int, train: Train, layout: Layout, folder: str, with_optimizer: bool
) -> list[str]:
    """Read it into a model of another state; returns what is then wrong."""
    trainee = share_work.build(place, train, layout)
    expected = {shard: tensor.clone() for shard, tensor in trainee.shards.items()}
    num_steps = trainee.scheduler.num_steps
    for tensor in trainee.shards.values():
        tensor.fill_(7)
    trainee.scheduler.step(12)
    history = History()
    try:
        version = MegatronState(folder).read(
            trainee, history, with_optimizer=with_optimizer, iteration=ITERATION
        )
    except UsageError as error:
        return [f"{error}; {error.hint}"]
    assert version == history.first == history.end == ITERATION
    assert trainee.scheduler.num_steps == (num_steps if with_optimizer else 0)
    if not with_optimizer:
        for shard, tensor in expected.items():
            if shard.key.startswith("optimizer."):
                tensor.zero_()
            elif shard.key.startswith("master."):  # as far as 16 bits tell
                tensor.copy_(tensor.bfloat16())
    return [
        str(shard) for shard, tensor in trainee.shards.items() if not tensor.equal(expected[shard])
    ]


def save_as_unicron(place: int, train: Train, layout: Layout, folder: str) -> None:
    trainee = share_work.build(place, train, layout)
    saving = tuple(range(num_positions(layout.axes)))
    form = MegatronFormat(folder, 0, lambda trainee, iteration: {"args": Namespace(a=1)})
    target = Folder(form.folder(1, ITERATION), "token")
    content = form.content(trainee, ITERATION, History(), saving)
    taken = Snapshot(content.share, None)
    share_files.write_share(target, place, ITERATION, taken.read(), content.values)
    dist.barrier()
    if place == 0:
        indexes = [
            checkpoint_index.read_index(target.read(target.index_name(each))) for each in saving
        ]
        size = share_files.complete(
            target, [one for one in indexes if one is not None], content.common
        )
        form.saved(1, ITERATION, size, final=False)
    dist.barrier()


def load_as_megatron(place: int, train: Train, layout: Layout, folder: str, kind: str) -> list[str]:
    """Load it by Megatron into a model of another state; returns what is then wrong."""
    trainee = share_work.build(place, train, layout)
    expected = {shard: tensor.clone() for shard, tensor in trainee.shards.items()}
    for tensor in trainee.shards.values():
        tensor.fill_(7)
    stock_megatron.load_torch_steps()
    loaded = dist_checkpointing.load(_state_dict(trainee, kind, is_loading=True), folder)
    for index, module in enumerate(trainee.modules):
        module.load_state_dict(loaded[f"model{index}"])
    trainee.optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["iteration"] == ITERATION
    assert loaded["opt_param_scheduler"] == trainee.scheduler.state_dict()
    steps = {
        float(state["step"])
        for part in trainee.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    }
    assert steps == {1.0}, steps
    return [
        str(shard)
        for shard, tensor in list_shards(trainee).items()
        if not torch.equal(tensor, expected[shard])
    ]
