"""The replay of a log: recomputed decisions, corruption, and logs of older deciders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from decider import Driver, kinds
from state_check import check
from unicron.control_plane.decide.advance import advance
from unicron.control_plane.decide.replay import replay, verify
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.state.cluster import (
    DECIDER_VERSION,
    ClusterState,
    decode_state,
    encode_state,
    open_orders,
    state_hash,
)
from unicron.events.log import archive
from unicron.events.records import decisions as d
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.codec import decode_record, encode_record, from_plain, to_plain
from unicron.events.records.envelope import Record, Report
from unicron.events.spec.policy import Policy


@pytest.fixture(scope="module")
def driver() -> Driver:
    """A task loses a rank and heals; then a new leader starts."""
    it = Driver()
    task = it.running()
    lost = it.exit(task, 2)
    it.obey(lost, start=False)
    it.progress(task)
    it.obey([record for record in lost if record.kind == "StartRank"])
    it.progress(task)
    it.epoch = 2
    it.tell("leader/def", r.EpochStarted(nonce="def", code="1", heart=DECIDER_VERSION))
    it.progress(task)
    return it


def test_a_log_is_verified(driver: Driver) -> None:
    verdict = verify(driver.log)
    assert verdict.ok
    assert verdict.words.startswith("VERIFIED")
    assert verdict.num_records == len(driver.log)
    decisions = kinds(driver.log)
    assert sum(verdict.recomputed.values()) == len(decisions)
    assert verdict.recomputed["Reconfigure"] == decisions.count("Reconfigure") == 3
    assert verdict.state_hash == state_hash(driver.state) == state_hash(replay(driver.log))


def test_the_log_survives_both_encodings(driver: Driver) -> None:
    wire = [decode_record(encode_record(record)) for record in driver.log]
    lines = [from_plain(to_plain(record)) for record in driver.log]
    assert verify(wire).state_hash == verify(lines).state_hash == state_hash(driver.state)
    assert verify(wire).log_hash == verify(lines).log_hash


def test_the_state_survives_a_snapshot(driver: Driver) -> None:
    again = decode_state(encode_state(driver.state))
    assert again == driver.state
    assert state_hash(again) == state_hash(driver.state)
    assert [x.seq for x in open_orders(again)] == sorted(driver.state.orders)


def test_a_new_leader_decides_the_same_after_any_batch(driver: Driver) -> None:
    """Fold a prefix of the log and decide on the remaining reports again. The log must be equal."""
    for cut, record in enumerate(driver.log):
        if record.cause:
            continue
        state = replay(driver.log[:cut])
        rest: list[Record] = []
        for report in [x for x in driver.log[cut:] if not x.cause]:
            rest += advance(
                state,
                Report(
                    source=report.source,
                    source_seq=report.source_seq,
                    occurred_s=report.occurred_s,
                    body=report.body,
                ),
                epoch=report.epoch,
                at_s=report.at_s,
            )
        assert rest == driver.log[cut:]
        assert state_hash(state) == state_hash(driver.state)


def _edited(record: Record) -> Record:
    if isinstance(record.body, o.Quiesce):
        return msgspec.structs.replace(
            record, body=msgspec.structs.replace(record.body, mode="boundary", ranks=(0,))
        )
    return msgspec.structs.replace(record, occurred_s=record.occurred_s, cause=record.cause + 1)


def test_an_edited_decision_is_named(driver: Driver) -> None:
    for index, record in enumerate(driver.log):
        if not record.cause:
            continue
        log = [*driver.log[:index], _edited(record), *driver.log[index + 1 :]]
        verdict = verify(log)
        assert verdict.seq == record.seq, record.kind
        assert verdict.expected == to_plain(record)
        assert verdict.recorded == to_plain(log[index])


def test_an_edited_report_is_found_at_its_first_decision(driver: Driver) -> None:
    index = next(i for i, record in enumerate(driver.log) if record.kind == "RankExited")
    body = msgspec.structs.replace(driver.log[index].body, rank=1)
    log = list(driver.log)
    log[index] = msgspec.structs.replace(log[index], body=body)
    verdict = verify(log)
    assert verdict.seq == log[index].seq + 1
    assert verdict.problem


def test_a_dropped_record_is_named(driver: Driver) -> None:
    for index in range(len(driver.log) - 1):
        assert verify(driver.log[:index] + driver.log[index + 1 :]).seq == index + 1


def test_swapped_records_are_named(driver: Driver) -> None:
    for index in range(len(driver.log) - 1):
        log = list(driver.log)
        log[index], log[index + 1] = log[index + 1], log[index]
        assert verify(log).seq == index + 1


def test_dropped_and_renumbered_records_are_found(driver: Driver) -> None:
    """Renumbered seqs hide the gap, but a source_seq or a recomputed decision does not match."""
    for index, gone in enumerate(driver.log[:-1]):
        if gone.source.startswith("operator/"):
            continue
        rest = [
            msgspec.structs.replace(record, seq=record.seq - 1)
            for record in driver.log[index + 1 :]
        ]
        assert not verify([*driver.log[:index], *rest]).ok


def test_a_log_cut_inside_a_batch(driver: Driver) -> None:
    cut = next(i for i, record in enumerate(driver.log) if record.kind == "Quiesce")
    assert verify(driver.log[:cut]).seq == cut + 1
    assert verify(driver.log[:cut], complete=False).ok


def test_a_log_of_another_version_is_not_corrupt(driver: Driver) -> None:
    log = list(driver.log)
    for index, record in enumerate(log):
        if isinstance(record.body, r.EpochStarted):
            log[index] = msgspec.structs.replace(
                record, body=msgspec.structs.replace(record.body, heart=DECIDER_VERSION + 1)
            )
        if isinstance(record.body, d.TaskPlaced):
            log[index] = msgspec.structs.replace(
                record, body=msgspec.structs.replace(record.body, why="because")
            )
    verdict = verify(log)
    assert verdict.ok
    assert verdict.differ["TaskPlaced"] == 1
    assert "differ" in verdict.words
    (first, *_) = verdict.different
    assert (first.recorded["body"]["why"], first.now["body"]["why"]) == (
        "because",
        next(x.body.why for x in driver.log if isinstance(x.body, d.TaskPlaced)),
    )


def test_a_decision_that_another_version_does_not_make_is_named(driver: Driver) -> None:
    """Also at the end of the log: the other version may have decided nothing there."""
    closing = [x.seq for x in driver.log if x.kind == "IncidentRecovering"]
    log = [
        record
        if not isinstance(record.body, r.EpochStarted)
        else msgspec.structs.replace(
            record, body=msgspec.structs.replace(record.body, heart=DECIDER_VERSION - 1)
        )
        for record in driver.log[: closing[-1] - 1]
    ]
    verdict = verify(log)
    assert verdict.ok
    assert verdict.differ == {"IncidentRecovering": 1}
    (missing,) = verdict.different
    assert (missing.seq, missing.recorded, missing.now["kind"]) == (
        closing[-1],
        None,
        "IncidentRecovering",
    )


def test_a_log_of_version_4_is_not_corrupt() -> None:
    """tests/golden/heart-4.jsonl is the log of test_checkpoints.py's
    `test_all_die_and_the_order_names_the_newest_copy_then_the_nearest` at commit af1f586.

    The log has no numbers of checkpoint stores (keeper_start). The recomputed Reconfigure assigns
    the stores by node of members, and names one entry for each store. IncidentClosed and PlanChosen
    differ, because costs and MTBF are computed otherwise since then; so do TaskPlaced and
    StartRank, which follow from a plan, and ThroughputSet, which has its noise now. Orders say how
    often agents tell of ranks that work.
    SetCheckpointStores would follow where the log has no decision.
    """
    path = Path(__file__).parents[2] / "golden" / "heart-4.jsonl"
    log = [from_plain(json.loads(line)) for line in path.read_text().splitlines()]
    assert sum(record.kind == "MemoryCheckpointStored" for record in log) == 3
    verdict = verify(log)
    assert verdict.ok, verdict.words
    assert verdict.hearts == [4]
    assert verdict.differ == {
        "IncidentClosed": 1,
        "PlanChosen": 2,
        "Quiesce": 1,
        "Reconfigure": 2,
        "SetCheckpointStores": 5,
        "StartRank": 4,
        "TaskPlaced": 1,
        "ThroughputSet": 1,
    }
    assert any(isinstance(record.body, o.Reconfigure) and record.body.copies for record in log)


def test_a_log_with_a_lease_that_is_refused_now_is_verified(driver: Driver) -> None:
    """A policy is checked where an operator gives it, never where a log has it."""
    driver.tell("leader/def", r.PolicySet(policy=Policy(silence_s_max=0.3)))
    log = [decode_record(encode_record(record)) for record in driver.log]
    verdict = verify(log)
    assert verdict.ok, verdict.words
    assert replay(log).policy.silence_s_max == 0.3
    assert decode_state(encode_state(driver.state)).policy.silence_s_max == 0.3


def test_an_empty_log_and_a_stray_decision() -> None:
    assert verify([]).ok
    stray = Record(
        seq=1,
        epoch=0,
        at_s=0.0,
        occurred_s=0.0,
        source="heart",
        source_seq=0,
        cause=0,
        incident=0,
        body=o.Resume(nodes=(), task=9, generation=1, progress_from=0),
    )
    assert verify([stray]).seq == 1


# --- logs of older deciders ----------------------------------------------------------------------
# tests/golden/README.md tells which code wrote each log. NAME-states.json holds states that this
# code folded, by seq.
GOLDEN = Path(__file__).parents[2] / "golden"
REMOVED = {
    "num_inputs",
    "needs",
    "cost_waf",
    "weight_from",
    "disabled_slots",
    "repeated_failure",
}
"""Fields of the state and of its tasks that later versions do not have."""
RENAMED = {
    "stood_s": "downtime_s",
    "standing": "transition",
    "furthest": "max_iteration",
    "blamed": "disabled_slots",
    "kept_on": "store_nodes",
    "overdue": "timeout_reason",
    "harmed_s": "fault_injected_s",
    "ghosts": "orphans",
    "paces": "step_times",
    "crawls": "slow_iterations",
    "slowed": "slow_restarts",
    "ailing": "undecided",
    "slots_out": "slots_disabled",
    "out_why": "disabled_why",
    "slots_sick": "slots_unhealthy",
    "slots_well": "slots_recovering",
    "sick_why": "unhealthy_why",
    "eased_s": "improved_s",
    "offences": "node_faults",
    "silenced_seq": "unreachable_seq",
    "evidence_over": "uncaused_generation",
    "series": "repeated_failure",
}
"""Fields of the state: the name in version 15 and the present name."""


RELEASES = sorted(path.stem for path in GOLDEN.glob("release-*.jsonl"))
"""Logs of `make golden-log`."""
WITH_STATES = [*(f"heart-{version}" for version in (15, 16, 17, 18, 19, 20, 22, 25, 26)), *RELEASES]


def test_each_release_has_a_golden_log() -> None:
    """A release that CHANGELOG names with its commit: `make golden-log COMMIT=...` of it."""
    changes = (GOLDEN.parents[1] / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[([0-9.]+)\].*from commit (\w+)$", changes, re.MULTILINE)
    heads = [archive.header(GOLDEN / f"{name}.jsonl") for name in RELEASES]
    assert {(head.code, head.cluster.rpartition(" ")[2]) for head in heads} == set(released)
    assert ("0.2.0", "60f2d2b") in released


@pytest.mark.parametrize("name", WITH_STATES)
def test_a_log_of_an_older_version_folds_to_an_equal_state(name: str) -> None:
    states = _renamed(json.loads((GOLDEN / f"{name}-states.json").read_text()))
    state, compared = ClusterState(), 0
    for record in archive.read(GOLDEN / f"{name}.jsonl"):
        fold(state, record)
        assert not check(state), record.seq
        if (old := states.get(str(record.seq))) is None:
            continue
        compared += 1
        new = json.loads(msgspec.json.encode(state))
        # Orders are stored as encoded, with the fields that they have today.
        assert new["orders"].keys() == old["orders"].keys()
        for key in old.keys() - REMOVED - {"orders"}:
            assert _common(new[key], old[key]) == _common(old[key], new[key]), (record.seq, key)
    assert compared == len(states) >= 4


def _renamed(old: Any) -> Any:
    """Rename the fields of an old state to their present names."""
    if isinstance(old, dict):
        return {RENAMED.get(key, key): _renamed(value) for key, value in old.items()}
    return [_renamed(one) for one in old] if isinstance(old, list) else old


def _common(one: Any, other: Any) -> Any:
    """`one` without removed fields and without fields that `other` does not have."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            key: _common(value, other.get(key))
            for key, value in one.items()
            if key.isdecimal() or (key in other and key not in REMOVED)
        }
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_common(*pair) for pair in zip(one, other, strict=True)]
    return one


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("heart-15", "PlanChosen"),
        ("heart-16", "StartRank"),
        ("heart-17", "TaskPlaced"),
        ("heart-18", "StartRank"),
        ("heart-19", "PlanChosen"),
        ("heart-20", "PlanChosen"),
        ("heart-26", "StartRank"),
        ("release-0.2.0", "StartRank"),
    ],
)
def test_decisions_of_an_older_version_may_differ(name: str, kind: str) -> None:
    log = {record.seq: record for record in archive.read(GOLDEN / f"{name}.jsonl")}
    verdict = verify(log.values())
    version = log[1].body.heart
    assert verdict.ok, verdict.words
    assert verdict.hearts == [version]
    assert set(verdict.differ) >= {kind}
    for one in verdict.different:
        assert one.recorded != one.now
        assert one.recorded is None or one.recorded == to_plain(log[one.seq])
        assert one.now is None or one.now["seq"] == one.seq
    differ, equal = sum(verdict.differ.values()), sum(verdict.recomputed.values())
    assert equal > 0
    assert verdict.words == (
        f"state equal, {differ} of {equal + differ} decisions differ: written "
        f"by decider version {version}, recomputed by version "
        f"{DECIDER_VERSION}"
    )
