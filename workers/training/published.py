"""Megatron's globals of parallel groups, as a script asks `parallel_state` (mpu) for them.

They are of one generation: `groups.forget` clears them when it goes down, the world sizes and ranks
that Megatron has cached among them. So a script that asks each time is told what is so.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

_BY_ROLE = {
    "tp": ("_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    "pp": ("_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS"),
    "mp": ("_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GLOBAL_RANKS"),
    "dp": ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GLOBAL_RANKS"),
    "dp_cp": ("_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"),
    "intra_dp_cp": ("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", ""),
    "intra_expt_dp": ("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", ""),
    "intra_dist_opt": ("_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", ""),
    "cp": ("_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    "embd": ("_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS"),
    "pos_embd": ("_POSITION_EMBEDDING_GROUP", "_POSITION_EMBEDDING_GLOBAL_RANKS"),
    "tp_cp": ("_TENSOR_AND_CONTEXT_PARALLEL_GROUP", ""),
    "ep": ("_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_RANKS"),
    "expt_tp": ("_EXPERT_TENSOR_PARALLEL_GROUP", ""),
    "expt_dp": ("_EXPERT_DATA_PARALLEL_GROUP", ""),
    "tp_ep": ("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", ""),
    "tp_ep_pp": ("_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", ""),
}


def publish(groups: Any, chunks: int) -> None:
    """Say to Megatron's globals what the generation's ProcessGroupCollection says; `chunks` are
    those of each stage, where there is a pipeline."""
    for role, (group_name, ranks_name) in _BY_ROLE.items():
        group = getattr(groups, role)
        setattr(parallel_state, group_name, group)
        if ranks_name and group is not None:
            setattr(parallel_state, ranks_name, dist.get_process_group_ranks(group))
    parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = (
        chunks if chunks > 1 and groups.pp.size() > 1 else None)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    if not torch.cuda.is_available():
        random._CUDA_RNG_STATE_TRACKER = _CpuTracker()
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


class _CpuTracker:
    """Where there is no CUDA: what is drawn for the model-parallel ranks is drawn from the one
    generator that there is, which is seeded for each micro-batch."""

    def is_initialized(self) -> bool:
        return True

    @contextmanager
    def fork(self, name: str = "") -> Generator[None]:
        """As Megatron's own."""
        yield
