"""Builds the process groups of one generation as Megatron's explicit collection.

Megatron's initialize_model_parallel makes about twenty groups, most of them with one member, and
gloo takes 10 ms to destroy each (measured: 160 ms per rebuild, 20 ms with this module).
"""

from __future__ import annotations

import copy
import datetime
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from ....events.spec.model import Axes
from ....events.spec.parallelism import coordinates, holders, is_plain, num_positions, replica

DATA_PARALLEL = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")
TENSOR_PARALLEL = ("tp", "tp_cp", "expt_tp", "tp_ep")
PIPELINE_PARALLEL = ("pp",)
EMBEDDING = ("embd",)
REPLICA = ("mp", "tp_ep_pp")
ALONE = ("cp", "ep", "pos_embd", "intra_dist_opt", "tp_dp_cp")
"""Roles with one member. Megatron reduces the norm of a sharded gradient over `intra_dist_opt`.
Here all members have reduced the norm before the step (optimizer_step.py). `tp_dp_cp` is for an
auxiliary loss over all replicas, which is refused."""
ROLES = (*DATA_PARALLEL, *TENSOR_PARALLEL, *PIPELINE_PARALLEL, *EMBEDDING, *REPLICA, *ALONE)
GROUP_S_MAX = 10.0
"""Timeout for the building of groups after the rendezvous. gloo waits five times as long for a peer
to connect."""


def build(axes: Axes | None, timeout_s: float) -> Any:
    """Build this member's ProcessGroupCollection. Its position is its torch.distributed rank.

    If `axes` is None, every member is one replica. A standby member gets single-member groups.
    `timeout_s` is the timeout of every collective.

    Roles share groups, because each group is expensive. Pure data parallelism has two groups: the
    world and a single-member group. Two roles share a group only if they also share it in all
    layouts that differ only in dp, because handles are replaced by role (group_handles.py).
    """
    place, world_size = dist.get_rank(), dist.get_world_size()
    axes = axes or Axes(dp=world_size)
    alone = _group((place,), timeout_s)
    groups = dict.fromkeys(ROLES, alone)
    if place < num_positions(axes):
        at = coordinates(axes, place)
        stages = replica(axes, at.dp)[at.tp::axes.tp]
        if is_plain(axes) and axes.dp == world_size:
            groups |= dict.fromkeys(DATA_PARALLEL, dist.group.WORLD)
        else:
            groups |= dict.fromkeys(DATA_PARALLEL, _group(holders(axes, at.tp, at.pp), timeout_s))
        if axes.tp > 1:
            peers = replica(axes, at.dp)[at.pp * axes.tp:(at.pp + 1) * axes.tp]
            groups |= dict.fromkeys((*TENSOR_PARALLEL, *REPLICA), _group(peers, timeout_s))
        if axes.pp > 1:
            groups["pp"] = groups["embd"] = _group(stages, timeout_s)
            groups |= dict.fromkeys(REPLICA, groups["pp"])
        if axes.tp > 1 and axes.pp > 1:
            groups |= dict.fromkeys(REPLICA, _group(replica(axes, at.dp), timeout_s))
        if axes.pp > 2:  # last: torch numbers a group by the earlier groups of its members
            ends = (stages[0], stages[-1])
            groups["embd"] = _group(ends, timeout_s) if place in ends else alone
    # Megatron reads these globals even if a collection is given. Its cross entropy reads the first,
    # and its sharded metadata of a tied embedding read the second.
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = groups["tp"]
    parallel_state._DATA_PARALLEL_GROUP_WITH_CP = groups["dp_cp"]
    return ProcessGroupCollection(**groups)


def single_member(groups: Any) -> Any:
    """The generation's single-member group in every role."""
    return ProcessGroupCollection(**dict.fromkeys(ROLES, groups.cp))


def groups_for_building(groups: Any) -> Any:
    """The groups with which a model is built, such that neither the build nor a step communicates.

    Megatron's first and last stage would exchange their embedding. Here the embedding is drawn, or
    received with the state. Megatron's optimizer would reduce values over the replica that all
    members have reduced before (optimizer_step.py).
    """
    build_groups = copy.copy(groups)
    build_groups.embd, build_groups.mp = None, build_groups.intra_dist_opt
    return build_groups


def _group(places: tuple[int, ...], timeout_s: float) -> Any:
    """Create a group. Only its members take part; `timeout_s` limits its collectives."""
    group: Any = dist.new_group(list(places), timeout=datetime.timedelta(seconds=GROUP_S_MAX),
                                use_local_synchronization=True)
    if dist.get_backend(group) != "fake":  # which has no timeout
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    return group


def by_role(groups: Any) -> dict[str, Any]:
    """The groups of a collection by their role."""
    return {role: group for role in ROLES if (group := getattr(groups, role, None)) is not None}


def clear_globals() -> None:
    """Clear Megatron's group globals, also those that its own destroy function leaves set."""
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)


# --- Megatron's group globals, which a script reads through `parallel_state` (mpu) ---
#
# They belong to one generation. At its end, `clear_globals` clears them, and the world sizes and
# ranks that Megatron caches. A script that reads them anew each time gets current values.

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
_GTP = {
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "intra_dp_cp",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "intra_expt_dp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_pp",
    "_GTP_WEIGHT_REMAT_GROUP": "cp", "_EXPERT_GTP_WEIGHT_REMAT_GROUP": "cp",
}
"""From 0.19 on, Megatron can also shard weights over replicas. Here a group of those has one
member, so that groups with and without them are the same."""


def publish_globals(groups: Any, chunks: int) -> None:
    """Set Megatron's globals from the generation's ProcessGroupCollection; `chunks`: model chunks
    per pipeline stage."""
    for role, (group_name, ranks_name) in _BY_ROLE.items():
        group = getattr(groups, role)
        setattr(parallel_state, group_name, group)
        if ranks_name and group is not None:
            setattr(parallel_state, ranks_name, dist.get_process_group_ranks(group))
    for group_name, role in _GTP.items():
        if hasattr(parallel_state, group_name):
            setattr(parallel_state, group_name, getattr(groups, role))
    parallel_state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = (
        chunks if chunks > 1 and groups.pp.size() > 1 else None)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
