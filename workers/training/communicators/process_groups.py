"""Builds the process groups of one generation as Megatron's explicit collection.

Megatron's initialize_model_parallel makes about twenty groups, most of them with one member, and
gloo takes 10 ms to destroy each (measured: 160 ms per rebuild, 20 ms with this module).
"""

import copy
import datetime
import time
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from ....events.spec.model import Axes
from ....events.spec.parallelism import coordinates, holders, is_plain, num_positions, replica
from ..dependencies import private_megatron, private_torch

DATA_PARALLEL = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")
TENSOR_PARALLEL = ("tp", "tp_cp", "expt_tp", "tp_ep")
REPLICA = ("mp", "tp_ep_pp")
ALONE = ("cp", "ep", "pos_embd", "intra_dist_opt", "tp_dp_cp")
"""Roles with one member. Megatron reduces the norm of a sharded gradient over `intra_dist_opt`.
Here all members have reduced the norm before the step (megatron_step.py). `tp_dp_cp` is for an
auxiliary loss over all replicas, which is refused."""
ROLES = (*DATA_PARALLEL, *TENSOR_PARALLEL, "pp", "embd", *REPLICA, *ALONE)
GROUP_S_MAX = 10.0
"""Timeout for building groups after the rendezvous. gloo waits five times as long to connect."""


def build(axes: Axes, timeout_s: float, costs: dict[str, float] | None = None) -> Any:
    """Build the ProcessGroupCollection of the position that is this torch.distributed rank. A
    standby member gets single-member groups. `timeout_s` is the timeout of every collective.
    `costs`: gets the seconds of each group, by the first role that it has.

    Roles share a group, because each group is expensive. They do only if they share it in all
    layouts that differ only in dp: handles are replaced by role (group_handles.py). One group is
    built after the other: torch names it by the number of earlier ones, and its members must agree.
    """
    place, world_size = dist.get_rank(), dist.get_world_size()
    costs = {} if costs is None else costs

    def group(role: str, places: tuple[int, ...]) -> Any:
        began_s = time.monotonic()
        made = _group(places, timeout_s)
        costs[role] = time.monotonic() - began_s
        return made

    alone = group("cp", (place,))
    groups = dict.fromkeys(ROLES, alone)
    if place < num_positions(axes):
        at = coordinates(axes, place)
        stages = replica(axes, at.dp)[at.tp :: axes.tp]
        if is_plain(axes) and axes.dp == world_size:
            groups |= dict.fromkeys(DATA_PARALLEL, dist.group.WORLD)
        else:
            groups |= dict.fromkeys(DATA_PARALLEL, group("dp", holders(axes, at.tp, at.pp)))
        if axes.tp > 1:
            peers = replica(axes, at.dp)[at.pp * axes.tp : (at.pp + 1) * axes.tp]
            groups |= dict.fromkeys((*TENSOR_PARALLEL, *REPLICA), group("tp", peers))
        if axes.pp > 1:
            groups["pp"] = groups["embd"] = group("pp", stages)
            groups |= dict.fromkeys(REPLICA, groups["pp"])
        if axes.tp > 1 and axes.pp > 1:
            groups |= dict.fromkeys(REPLICA, group("mp", replica(axes, at.dp)))
        if axes.pp > 2:  # last: torch numbers a group by the earlier groups of its members
            ends = (stages[0], stages[-1])
            groups["embd"] = group("embd", ends) if place in ends else alone
    private_megatron.publish_read_globals(tp=groups["tp"], dp_cp=groups["dp_cp"])
    return ProcessGroupCollection(**groups)


def groups_for_building(groups: Any) -> Any:
    """The groups with which a model is built, such that neither the build nor a step communicates:
    Megatron's first and last stage would exchange their embedding, and its optimizer reduce values
    that all members have reduced before (megatron_step.py)."""
    build_groups = copy.copy(groups)
    build_groups.embd, build_groups.mp = None, build_groups.intra_dist_opt
    return build_groups


def _group(places: tuple[int, ...], timeout_s: float) -> Any:
    """Create a group. Only its members take part; `timeout_s` limits its collectives."""
    group: Any = dist.new_group(
        list(places),
        timeout=datetime.timedelta(seconds=GROUP_S_MAX),
        use_local_synchronization=True,
    )
    if dist.get_backend(group) != "fake":  # which has no timeout
        private_torch.set_timeout(timeout_s, group)
    return group


def by_role(groups: Any) -> dict[str, Any]:
    return {role: group for role in ROLES if (group := getattr(groups, role, None)) is not None}
