"""The process groups of one generation, as Megatron's explicit collection.

Megatron's own initialize_model_parallel makes some twenty groups, most of them of one member, and
gloo takes 10 ms to give each of them back (measured: 160 ms per rebuild, against 20 ms here).
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random

from ....events.spec.model import Axes
from ....events.spec.parallelism import coordinates, holders, is_plain, num_places, replica

DATA_PARALLEL = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")
TENSOR_PARALLEL = ("tp", "tp_cp", "expt_tp", "tp_ep")
PIPELINE_PARALLEL = ("pp",)
EMBEDDING = ("embd",)
REPLICA = ("mp", "tp_ep_pp")
ALONE = ("cp", "ep", "pos_embd", "intra_dist_opt")
"""Roles that meet nobody. Megatron adds up a sharded gradient's norm over `intra_dist_opt`: here
all members have told each other of it before the step (stepping.py)."""
ROLES = (*DATA_PARALLEL, *TENSOR_PARALLEL, *PIPELINE_PARALLEL, *EMBEDDING, *REPLICA, *ALONE)
GROUP_S_MAX = 10.0
"""Building groups among members that have all come may take this long; gloo waits five times as
long for a peer to connect."""


def build(axes: Axes | None, timeout_s: float) -> Any:
    """The ProcessGroupCollection of this member of the world, which has the place of its rank.

    None: every member of the world is one replica. A member beside the layout gets groups of its
    own alone. `timeout_s` is the limit of every collective.

    Few groups serve all roles, since each is dear; data-parallel alone has two, the world and one
    of this member alone. Two roles have the same group only where they have in every layout with
    the same sizes but dp's, since handles are put back by role (handles.py).
    """
    place, world_size = dist.get_rank(), dist.get_world_size()
    axes = axes or Axes(dp=world_size)
    alone = _group((place,), timeout_s)
    found = dict.fromkeys(ROLES, alone)
    if place < num_places(axes):
        at = coordinates(axes, place)
        stages = replica(axes, at.dp)[at.tp::axes.tp]
        if is_plain(axes) and axes.dp == world_size:
            found |= dict.fromkeys(DATA_PARALLEL, dist.group.WORLD)
        else:
            found |= dict.fromkeys(DATA_PARALLEL, _group(holders(axes, at.tp, at.pp), timeout_s))
        if axes.tp > 1:
            peers = replica(axes, at.dp)[at.pp * axes.tp:(at.pp + 1) * axes.tp]
            found |= dict.fromkeys((*TENSOR_PARALLEL, *REPLICA), _group(peers, timeout_s))
        if axes.pp > 1:
            found["pp"] = found["embd"] = _group(stages, timeout_s)
            found |= dict.fromkeys(REPLICA, found["pp"])
        if axes.tp > 1 and axes.pp > 1:
            found |= dict.fromkeys(REPLICA, _group(replica(axes, at.dp), timeout_s))
        if axes.pp > 2:  # the last: torch names a group by how many its members made before it
            ends = (stages[0], stages[-1])
            found["embd"] = _group(ends, timeout_s) if place in ends else alone
    # The globals that Megatron still reads when it is given a collection: its cross entropy the
    # first, its sharded metadata of a tied embedding the second.
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = found["tp"]
    parallel_state._DATA_PARALLEL_GROUP_WITH_CP = found["dp_cp"]
    return ProcessGroupCollection(**found)


def alone(groups: Any) -> Any:
    """The same generation's groups of this member alone, in every role."""
    return ProcessGroupCollection(**dict.fromkeys(ROLES, groups.cp))


def to_build(groups: Any) -> Any:
    """The same, for what is built to hold: nobody is asked while it is built, or in a step.

    Megatron's first and last stage would tell each other their embedding, which here is drawn, or
    brought; its optimizer would ask the replica what all have told each other before (stepping.py).
    """
    told = copy.copy(groups)
    told.embd, told.mp = None, told.intra_dist_opt
    return told


def _group(places: tuple[int, ...], timeout_s: float) -> Any:
    """Only its members make it, all with the same limit for that."""
    group: Any = dist.new_group(list(places), timeout=datetime.timedelta(seconds=GROUP_S_MAX),
                                use_local_synchronization=True)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    return group


def by_role(groups: Any) -> dict[str, Any]:
    """The groups of a collection by their role."""
    return {role: group for role in ROLES if (group := getattr(groups, role, None)) is not None}


def forget() -> None:
    """Clear what Megatron keeps of groups in globals, also what its own destroy forgets."""
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)


# --- Megatron's globals of parallel groups, as a script asks `parallel_state` (mpu) for them. ---
#
# They are of one generation: `groups.forget` clears them when it goes down, the world sizes and
# ranks that Megatron has cached among them. So a script that asks each time is told what is so.

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
