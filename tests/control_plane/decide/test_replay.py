"""Replay: the same state from the log, every decision again, and tampering named by its seq."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from decider import Driver, kinds
from unicron.control_plane.decide.advance import DECIDER_VERSION, advance
from unicron.control_plane.decide.replay import replay, verify
from unicron.control_plane.state.cluster import decode_state, encode_state, open_orders, state_hash
from unicron.events.records import decisions as d
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.codec import decode_record, encode_record, from_plain, to_plain
from unicron.events.records.envelope import Record, Report


@pytest.fixture(scope="module")
def driver() -> Driver:
    """A task that lost a rank and healed, then the control plane started again."""
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


def test_after_any_record_a_new_leader_goes_on_alike(driver: Driver) -> None:
    """Fold a prefix up to any batch's end, go on with the same reports: the same log."""
    for cut, record in enumerate(driver.log):
        if not record.is_report:
            continue
        state = replay(driver.log[:cut])
        rest: list[Record] = []
        for report in [x for x in driver.log[cut:] if x.is_report]:
            rest += advance(state, Report(source=report.source, source_seq=report.source_seq,
                                          occurred_s=report.occurred_s, body=report.body),
                            epoch=report.epoch, at_s=report.at_s)
        assert rest == driver.log[cut:]
        assert state_hash(state) == state_hash(driver.state)


def _edited(record: Record) -> Record:
    if isinstance(record.body, o.Quiesce):
        return msgspec.structs.replace(
            record, body=msgspec.structs.replace(record.body, mode="boundary", ranks=(0,)))
    return msgspec.structs.replace(record, occurred_s=record.occurred_s, cause=record.cause + 1)


def test_an_edited_decision_is_named(driver: Driver) -> None:
    for index, record in enumerate(driver.log):
        if record.is_report:
            continue
        log = [*driver.log[:index], _edited(record), *driver.log[index + 1:]]
        verdict = verify(log)
        assert verdict.seq == record.seq, record.kind
        assert verdict.expected == to_plain(record)
        assert verdict.recorded == to_plain(log[index])


def test_an_edited_report_is_named_where_it_first_matters(driver: Driver) -> None:
    index = next(i for i, record in enumerate(driver.log) if record.kind == "RankExited")
    body = msgspec.structs.replace(driver.log[index].body, rank=1)
    log = list(driver.log)
    log[index] = msgspec.structs.replace(log[index], body=body)
    verdict = verify(log)
    assert verdict.seq == log[index].seq + 1
    assert verdict.problem


def test_a_dropped_record_is_named(driver: Driver) -> None:
    for index in range(len(driver.log) - 1):
        assert verify(driver.log[:index] + driver.log[index + 1:]).seq == index + 1


def test_swapped_records_are_named(driver: Driver) -> None:
    for index in range(len(driver.log) - 1):
        log = list(driver.log)
        log[index], log[index + 1] = log[index + 1], log[index]
        assert verify(log).seq == index + 1


def test_dropped_and_renumbered_is_named_too(driver: Driver) -> None:
    """Who hides a gap by numbering anew still breaks a source's own count, or a decision."""
    for index, gone in enumerate(driver.log[:-1]):
        if gone.source.startswith("operator/"):
            continue
        rest = [msgspec.structs.replace(record, seq=record.seq - 1)
                for record in driver.log[index + 1:]]
        assert not verify([*driver.log[:index], *rest]).ok


def test_a_log_cut_inside_a_batch(driver: Driver) -> None:
    cut = next(i for i, record in enumerate(driver.log) if record.kind == "Quiesce")
    assert verify(driver.log[:cut]).seq == cut + 1
    assert verify(driver.log[:cut], complete=False).ok


def test_another_hearts_log_is_not_corrupt(driver: Driver) -> None:
    log = list(driver.log)
    for index, record in enumerate(log):
        if isinstance(record.body, r.EpochStarted):
            log[index] = msgspec.structs.replace(
                record, body=msgspec.structs.replace(record.body, heart=DECIDER_VERSION + 1))
        if isinstance(record.body, d.TaskPlaced):
            log[index] = msgspec.structs.replace(
                record, body=msgspec.structs.replace(record.body, why="because"))
    verdict = verify(log)
    assert verdict.ok
    assert verdict.differ["TaskPlaced"] == 1
    assert "differ" in verdict.words


def test_a_log_of_heart_4_is_not_corrupt() -> None:
    """tests/golden/heart-4.jsonl is the log of test_checkpoints.py's
    `test_all_die_and_the_order_names_the_newest_copy_then_the_nearest` at commit af1f586.

    Its agents number no keepers, and its copies count all the same: the Reconfigure that names
    them is made again. What an incident says of what it cost, and a plan of the time between
    faults, has changed since; what follows from a plan is not compared either.
    """
    path = Path(__file__).parents[2] / "golden" / "heart-4.jsonl"
    log = [from_plain(json.loads(line)) for line in path.read_text().splitlines()]
    assert sum(record.kind == "MemoryCheckpointStored" for record in log) == 3
    verdict = verify(log)
    assert verdict.ok, verdict.words
    assert verdict.hearts == [4]
    assert verdict.differ == {"IncidentClosed": 1, "PlanChosen": 2, "StartRank": 2, "TaskPlaced": 1}
    assert any(isinstance(record.body, o.Reconfigure) and record.body.copies for record in log)


def test_nothing_and_nonsense() -> None:
    assert verify([]).ok
    stray = Record(seq=1, epoch=0, at_s=0.0, occurred_s=0.0, source="heart", source_seq=0, cause=0,
                   incident=0, body=o.Resume(nodes=(), task=9, generation=1, progress_from=0))
    assert verify([stray]).seq == 1
