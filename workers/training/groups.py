"""The process groups of one generation, as Megatron's explicit collection.

Megatron's own initialize_model_parallel makes some twenty groups, most of them of one member, and
gloo takes 10 ms to give each of them back (measured: 160 ms per rebuild, against 20 ms here).
"""

from __future__ import annotations

import copy
import datetime
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from ...events.model_spec import Axes
from ...events.places import coordinates, holders, is_plain, num_places, replica

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
