"""Megatron-LM's own checkpoints (`torch_dist`): their keys, and writing them in parts.

A folder has `iter_0000010` for each checkpoint, and the iteration of the newest complete one in
`latest_checkpointed_iteration.txt`. The state of the optimizer is stored by parameter
(`fully_reshardable`), so that Megatron-LM reads it in any layout.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ....events.object_storage import PathStore
from ....events.spec.parallelism import coordinates
from ..model.optimizers import chained
from ..model.trainee import TrainingModel
from ..process.history import History
from ..recovery import state_shards
from ..recovery.regions import State, kind_of
from ..recovery.resharding import Region, Shard
from ..recovery.state_shards import EXPONENT, STACKED, StackedName
from .folder import OLD, PARTIAL
from .saver import Content, Save
from .share import name_of, own_share

TRACKER = "latest_checkpointed_iteration.txt"
MASTER = "optimizer.state.fp32_param."
SHARDED_MASTER = "optimizer.state.param."
"""Of a distributed optimizer."""
PREFIXES: Mapping[str, str] = {
    "model": "",
    "buffer": "",
    "optimizer.exp_avg": "optimizer.state.exp_avg.",
    "optimizer.exp_avg_sq": "optimizer.state.exp_avg_sq.",
}
"""The kind of a shard -> the beginning of its key in Megatron's checkpoints; a master's depends on
the optimizer."""

log = structlog.get_logger()


def translated(state: State, names: Mapping[str, StackedName], master: str) -> State:
    """The same memory, under the keys and regions of Megatron's checkpoints."""
    found: State = {}
    prefixes = {**PREFIXES, "master": master}
    for (key, _, region), tensor in state.items():
        if key.startswith(f"{EXPONENT}."):
            continue  # Megatron has no exact sums
        name = name_of(key)
        at = names[name]
        ahead = (1,) * len(at.offset)
        shard = Shard(
            prefixes[key.removesuffix(f".{name}")] + at.key,
            kind_of(tensor, at.shape),
            Region((*at.offset, *region.offset), (*ahead, *region.shape)),
        )
        found[shard] = tensor[(None,) * len(ahead)]
    return found


def iteration_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


class MegatronFormat:
    """Checkpoints in `folder`, every `every` iterations. `common`: what they have beside state."""

    def __init__(
        self, folder: str, every: int, common: Callable[[TrainingModel, int], Mapping[str, Any]]
    ) -> None:
        self.every = every
        self._path = Path(folder)
        self._common = common

    def folder(self, generation: int, step_version: int) -> str:
        return str(self._path / iteration_folder(step_version))

    def content(
        self, trainee: TrainingModel, step_version: int, history: History, saving: tuple[int, ...]
    ) -> Content:
        own = own_share(trainee, saving)
        share = translated(
            own,
            state_shards.stacked_names(trainee),
            SHARDED_MASTER if trainee.is_sharded else MASTER,
        )
        if trainee.is_sharded:  # then Megatron stores a master of a 32-bit parameter too
            trained = {
                f"model.{name}" for name, param in trainee.named_parameters() if param.requires_grad
            }
            share |= {
                shard._replace(key=f"{SHARDED_MASTER}{shard.key}"): tensor
                for (key, *_), (shard, tensor) in zip(own, share.items(), strict=True)
                if key in trained and shard.kind.startswith("float32 ")
            }
        common = (
            {}
            if trainee.place != saving[0]
            else {
                **self._common(trainee, step_version),
                "checkpoint_version": 3.0,
                "optimizer": _optimizer(trainee.optimizer),
                "opt_param_scheduler": trainee.scheduler.state_dict(),
                "content_metadata": {
                    **STACKED,
                    **(
                        {}
                        if not trainee.is_sharded
                        else {
                            "distrib_optim_sharding_type": "fully_reshardable",
                            "distrib_optim_fully_reshardable_mem_efficient": False,
                        }
                    ),
                },
            }
        )
        stages = [coordinates(trainee.axes, place).pp for place in saving]
        values: dict[str, Any] = {}
        if trainee.place == saving[stages.index(trainee.at.pp)]:  # the first one of the stage
            values = {key: [value] for key, value in state_shards.objects(trainee).items()}
        return Content(share, values, common)

    def clear(self, generation: int, name: str) -> None:
        for suffix in (PARTIAL, OLD):
            for found in self._path.glob(f"iter_*{suffix}"):
                if str(found) != name:
                    shutil.rmtree(found, ignore_errors=True)

    def saved(self, save: Save, ckpt_bytes: int, *, final: bool) -> None:
        """The tracker stays where it is if the state is NaN or infinite."""
        if not save.loss:
            PathStore(self._path).write(TRACKER, str(save.step_version).encode())
        log.info(
            "saved in Megatron-LM's format",
            iteration=save.step_version,
            folder=self.folder(save.generation, save.step_version),
            ckpt_bytes=ckpt_bytes,
            **({"loss": save.loss, "latest": "not moved"} if save.loss else {}),
        )


def _optimizer(optimizer: Any) -> dict[Any, Any]:
    """The state of Megatron's optimizer without its tensors, as Megatron stores it."""
    found = [_part(part) for part in chained(optimizer)]
    return found[0] if len(found) == 1 else dict(enumerate(found))


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, DistributedOptimizer):
        return {**part.state_dict(), "param_state_sharding_type": "fully_reshardable"}
    state = {
        key: value for key, value in part.state_dict().items() if key != "fp32_from_fp16_params"
    }
    inner = state.get("optimizer", state)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in inner["param_groups"]
    ]
    steps = [one["step"] for one in inner["state"].values() if "step" in one]
    common = {"common_step": steps[0].clone()} if steps and steps[0] else {}
    plain = {"state": common, "param_groups": groups}
    return {**state, "optimizer": plain} if inner is not state else {**state, **plain}
