"""Logs of earlier decider versions: they fold to the same entities, and `verify` says what differs.

`tests/golden/heart-15.jsonl` is the log of a seeded simulation, written by the last code of decider
version 15; `heart-15-states.json` holds its state, as that code folded it, by seq.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from unicron.control_plane.decide.advance import DECIDER_VERSION
from unicron.control_plane.decide.replay import verify
from unicron.control_plane.fold.check import check
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.state.cluster import ClusterState
from unicron.events.log import archive

GOLDEN = Path(__file__).parents[2] / "golden"
REMOVED = {"num_inputs", "needs", "cost_waf", "weight_from"}
"""Fields of the state and of its tasks that later versions do not have."""
RENAMED = {
    "stood_s": "downtime_s", "standing": "transition", "furthest": "max_iteration",
    "blamed": "disabled_slots", "kept_on": "store_nodes", "overdue": "timeout_reason",
    "harmed_s": "fault_injected_s", "ghosts": "orphans", "paces": "step_times",
    "crawls": "slow_iterations", "slowed": "slow_restarts", "ailing": "undecided",
    "slots_out": "slots_disabled", "out_why": "disabled_why", "slots_sick": "slots_unhealthy",
    "slots_well": "slots_recovering", "sick_why": "unhealthy_why", "eased_s": "improved_s",
    "offences": "node_faults", "silenced_seq": "unreachable_seq",
    "evidence_over": "uncaused_generation", "series": "repeated_failure"}
"""Fields of the state by their names of version 15."""


def test_a_log_of_version_15_folds_to_the_same_entities() -> None:
    states = _renamed(json.loads((GOLDEN / "heart-15-states.json").read_text()))
    state, compared = ClusterState(), 0
    for record in archive.read(GOLDEN / "heart-15.jsonl"):
        fold(state, record)
        assert not check(state), record.seq
        if (old := states.get(str(record.seq))) is None:
            continue
        compared += 1
        new = json.loads(msgspec.json.encode(state))
        for name in old.keys() - REMOVED:
            assert _common(new[name], old[name]) == _common(old[name], new[name]), (
                record.seq, name)
    assert compared == len(states) >= 4


def _renamed(old: Any) -> Any:
    """The old state with today's names of its fields."""
    if isinstance(old, dict):
        return {RENAMED.get(key, key): _renamed(value) for key, value in old.items()}
    return [_renamed(one) for one in old] if isinstance(old, list) else old


def _common(one: Any, other: Any) -> Any:
    """The value without what was removed, and without fields that the other one does not have."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _common(value, other.get(key)) for key, value in one.items()
                if key.isdecimal() or (key in other and key not in REMOVED)}
    return one


def test_its_decisions_differ_and_it_is_not_corrupt() -> None:
    verdict = verify(archive.read(GOLDEN / "heart-15.jsonl"))
    assert verdict.ok, verdict.words
    assert verdict.hearts == [15]
    assert set(verdict.differ) >= {"PlanChosen"}
    differ, equal = sum(verdict.differ.values()), sum(verdict.recomputed.values())
    assert equal > 0
    assert verdict.words == (f"state equal, {differ} of {equal + differ} decisions differ: written "
                             f"by decider version 15, recomputed by version {DECIDER_VERSION}")
