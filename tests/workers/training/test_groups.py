"""The groups of layouts, made by the members themselves."""

from __future__ import annotations

import pytest
import world_work
import worlds
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates, holders, num_positions, replica

WIDE = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")


@pytest.mark.parametrize(("axes", "num_groups"), [
    (Axes(dp=4), 2), (Axes(tp=2, dp=2), 3), (Axes(pp=2, dp=2), 3), (Axes(tp=2, pp=2), 5),
    (Axes(pp=4), 4), (Axes(dp=3), 2), (Axes(pp=3), 4),
], ids=["dp4", "tp2dp2", "pp2dp2", "tp2pp2", "pp4", "dp3 and one beside", "pp3 and one beside"])
def test_each_member_meets_those_that_its_place_says(axes: Axes, num_groups: int) -> None:
    told = worlds.run(4, world_work.members_by_role, axes)
    for place, (met, num) in enumerate(told):
        if place >= num_positions(axes):
            assert {tuple(members) for members in met.values()} == {(place,)}, "beside"
            assert num == 1
            continue
        at = coordinates(axes, place)
        whole = list(replica(axes, at.dp))
        stages = whole[at.tp::axes.tp]
        assert met["dp"] == list(holders(axes, at.tp, at.pp))
        assert met["tp"] == whole[at.pp * axes.tp:(at.pp + 1) * axes.tp]
        assert met["pp"] == stages
        assert met["mp"] == whole
        assert met["embd"] == ([place] if 0 < at.pp < axes.pp - 1 else
                               sorted({stages[0], stages[-1]}))
        assert met["intra_dist_opt"] == met["pos_embd"] == met["cp"] == [place]
        assert all(met[role] == met["dp"] for role in WIDE)
        assert num <= num_groups


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_roles_share_a_group_alike_whatever_the_number_of_replicas(tp: int, pp: int) -> None:
    """Handles are put back by role: a role that shares a group does so in every generation."""
    told = [worlds.run(4, world_work.roles_of_one_group, Axes(tp=tp, pp=pp, dp=dp))[0]
            for dp in (1, 2)]
    assert told[0] == told[1]
