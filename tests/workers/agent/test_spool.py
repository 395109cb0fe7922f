"""The agent's spool: numbering, trimming, what a full spool drops, and what its file keeps."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest
import unicron.workers.agent.delivery.spool as spool_file
from msgspec.structs import replace
from unicron.events.log.identity import sign_report
from unicron.events.log.intake import read_report
from unicron.events.log.port import Sent
from unicron.events.records.codec import encode_report
from unicron.events.records.envelope import Report
from unicron.events.records.reports import (
    MemoryCheckpointStored,
    NodeJoined,
    OrderRefused,
    RankExited,
    ReportsLost,
    TaskProgressed,
)
from unicron.events.records.types import Body
from unicron.workers.agent.delivery.spool import Spool, load_spool
from unicron.workers.agent.main import open_spools

JOINED = NodeJoined(node="n1", incarnation=7, host="127.0.0.1", pid=1, num_slots=2)


def clock() -> float:
    return 1000.0


def progressed(iteration: int, num: int = 4) -> TaskProgressed:
    return TaskProgressed(
        task=1,
        generation=1,
        first_iteration=iteration,
        losses=(2.5,) * num,
        step_s=(0.25,) * num,
        rate_flops=1e9,
        micro_batches=8,
    )


def exited(rank: int) -> RankExited:
    return RankExited(task=1, rank=rank, attempt=1, pid=9, exit_code=0, signal=None, tail="x" * 60)


def accept(reports: list[Report], last: int = 0) -> tuple[list[Report], int]:
    """What a leader appends: the next report of the source, or a ReportsLost above it."""
    taken: list[Report] = []
    for report in reports:
        above = isinstance(report.body, ReportsLost) and report.source_seq > last
        if report.source_seq == last + 1 or above:
            taken.append(report)
            last = report.source_seq
    return taken, last


def test_reports_count_from_one_and_are_sent_again_until_trimmed() -> None:
    spool = Spool("n1/7", "n1", clock)
    for body in (JOINED, exited(0), progressed(1)):
        spool.put(body)
    assert [r.source_seq for r in spool.behind(0, 10)] == [1, 2, 3]
    assert [r.source_seq for r in spool.behind(0, 2)] == [1, 2]
    spool.trim(2)
    assert [r.source_seq for r in spool.behind(0, 10)] == [3]
    assert spool.behind(3, 10) == []
    assert spool.put(exited(1), occurred_s=5.0).occurred_s == 5.0
    assert spool.last == 4


def test_a_report_that_cannot_be_written_takes_no_number() -> None:
    spool = Spool("n1/7", "n1", clock)
    with pytest.raises(ValueError):
        spool.put(
            TaskProgressed(
                task=1,
                generation=1,
                first_iteration=0,
                losses=(float("nan"),),
                step_s=(1.0,),
                rate_flops=0.0,
                micro_batches=1,
            )
        )
    assert spool.put(JOINED).source_seq == 1


@pytest.mark.parametrize(
    "body",
    [
        replace(progressed(1), digests={2**60: "0" * 16}),
        replace(progressed(1), skipped=2**53),
        replace(exited(0), pid=2**64),
    ],
)
def test_a_report_that_the_control_plane_refuses_costs_only_itself(body: Body) -> None:
    spool = Spool("n1/7", "n1", clock)
    for one in (JOINED, body, exited(1)):
        spool.put(one)
    entries = [sign_report(b"key", encode_report(report)) for report in spool.behind(0, 10)]
    sent = [
        read_report(lambda _: b"key", Sent(cursor="", node="n1", data=data, num_bytes=len(data)))
        for data in entries
    ]
    taken, last = accept([report for report in sent if isinstance(report, Report)])
    assert last == 3
    assert [one.body for one in taken] == [JOINED, ReportsLost(node="n1", num_lost=1), exited(1)]


def test_a_full_spool_drops_progress_first_and_reports_the_loss() -> None:
    spool = Spool("n1/7", "n1", clock, bytes_max=20_000)
    spool.put(JOINED)
    for number in range(200):
        spool.put(progressed(number))
        if number % 10 == 0:
            spool.put(exited(number))
    bodies = [r.body for r in spool.behind(0, 10_000)]
    assert sum(isinstance(body, RankExited) for body in bodies) == 20
    num_lost = sum(body.num_lost for body in bodies if isinstance(body, ReportsLost))
    assert num_lost + sum(isinstance(body, TaskProgressed) for body in bodies) == 200
    kept = [body.first_iteration for body in bodies if isinstance(body, TaskProgressed)]
    assert kept == list(range(200 - len(kept), 200)), "the oldest are dropped first"
    taken, last = accept(spool.behind(0, 10_000))
    assert last == spool.last == 221
    assert len(taken) == len(bodies), "no report follows a gap"


def test_a_full_spool_drops_reports_of_superseded_checkpoints_first() -> None:
    spool = Spool("n1/7", "n1", clock, bytes_max=40_000)
    spool.put(JOINED)
    for number in range(40):
        spool.put(progressed(number))
    for step in range(400):
        for node in ("n1", "n2"):
            spool.put(
                MemoryCheckpointStored(
                    task=1,
                    rank=0,
                    attempt=1,
                    generation=1,
                    step_version=step,
                    node=node,
                    copy_bytes=1 << 30,
                    checksum="crc32:00000001",
                )
            )
    spool.put(
        MemoryCheckpointStored(
            task=2,
            rank=0,
            attempt=1,
            generation=1,
            step_version=1,
            node="n1",
            copy_bytes=1 << 30,
            checksum="crc32:00000001",
        )
    )
    for number in range(40, 80):
        spool.put(progressed(number))
    bodies = [r.body for r in spool.behind(0, 10_000)]
    assert sum(isinstance(body, TaskProgressed) for body in bodies) == 80
    kept = [body for body in bodies if isinstance(body, MemoryCheckpointStored)]
    assert {(body.task, body.node, body.step_version) for body in kept} >= {
        (1, "n1", 399),
        (1, "n2", 399),
        (2, "n1", 1),
    }
    num_lost = sum(body.num_lost for body in bodies if isinstance(body, ReportsLost))
    assert num_lost + len(kept) == 801
    assert num_lost > 400
    taken, last = accept(spool.behind(0, 10_000))
    assert (len(taken), last) == (len(bodies), spool.last), "no report follows a gap"


def test_a_full_spool_drops_the_oldest_but_never_node_joined() -> None:
    spool = Spool("n1/7", "n1", clock, bytes_max=10_000)
    spool.put(JOINED)
    for number in range(500):
        spool.put(exited(number))
    first, lost, *rest = spool.behind(0, 10_000)
    assert first.body == JOINED
    assert isinstance(lost.body, ReportsLost)
    assert lost.body.num_lost + len(rest) == 500
    assert lost.source_seq == lost.body.num_lost + 1
    assert [r.body.rank for r in rest if isinstance(r.body, RankExited)] == list(
        range(lost.body.num_lost, 500)
    )


def test_a_full_spool_drops_faults_last() -> None:
    spool = Spool("n1/7", "n1", clock, bytes_max=10_000)
    spool.put(JOINED)
    for number in range(30):
        spool.put(exited(number))
    for number in range(500):
        spool.put(OrderRefused(node="n1", order=number, why="full"))
    bodies = [r.body for r in spool.behind(0, 10_000)]
    assert [x.rank for x in bodies if isinstance(x, RankExited)] == list(range(30))
    assert sum(x.num_lost for x in bodies if isinstance(x, ReportsLost)) > 100


def test_a_flood_of_one_slot_drops_only_its_own_reports() -> None:
    """Half of the spool is the quota of two slots: slot 0 is above it, slot 1 and the agent not."""
    spool = Spool("n1/7", "n1", clock, bytes_max=40_000)
    spool.put(JOINED)
    for number in range(20):
        spool.put(progressed(number, num=2), slot=1)
        spool.put(exited(number))
    for number in range(1000):
        spool.put(progressed(number), slot=0)
        spool.put(OrderRefused(node="n1", order=number, why="of slot 0"), slot=0)
    bodies = [r.body for r in spool.behind(0, 10_000)]
    assert sum(isinstance(body, RankExited) for body in bodies) == 20
    assert [len(body.losses) for body in bodies if isinstance(body, TaskProgressed)].count(2) == 20
    num_lost = sum(body.num_lost for body in bodies if isinstance(body, ReportsLost))
    assert num_lost + sum(not isinstance(body, ReportsLost) for body in bodies) == 2041
    assert num_lost > 1500


def test_a_dropped_report_that_arrived_is_not_lost() -> None:
    spool = Spool("n1/7", "n1", clock, bytes_max=10_000)
    intake: list[Report] = []
    spool.put(JOINED)
    for number in range(500):
        intake.append(spool.put(exited(number)))
    intake.insert(0, spool.behind(0, 1)[0])
    taken, last = accept(intake + spool.behind(0, 10_000))
    assert last == 501
    assert not any(isinstance(report.body, ReportsLost) for report in taken)


@pytest.mark.parametrize("seed", range(20))
def test_every_number_is_delivered_or_counted_as_lost(seed: int) -> None:
    rng = random.Random(seed)
    spool = Spool("n1/7", "n1", clock, bytes_max=6_000)
    spool.put(JOINED)
    log: list[Report] = []
    last = 0
    for _ in range(600):
        match rng.randrange(5):
            case 0:
                spool.put(exited(rng.randrange(4)))
            case 1 | 2:
                spool.put(progressed(rng.randrange(100), num=rng.randrange(1, 20)))
            case 3:
                taken, last = accept(spool.behind(spool.acked, rng.randrange(40)), last)
                log += taken
            case _:
                spool.trim(rng.randrange(spool.acked, last + 1) if last > spool.acked else last)
        num_bytes = sum(len(encode_report(r)) for r in spool.behind(0, 10_000))
        assert num_bytes <= 6_000
    taken, last = accept(spool.behind(spool.acked, 10_000), last)
    log += taken
    assert last == spool.last
    num_accounted = sum(r.body.num_lost if isinstance(r.body, ReportsLost) else 1 for r in log)
    # A ReportsLost may also count reports that reached the log before they were dropped.
    assert num_accounted >= spool.last
    assert log[0].body == JOINED


@pytest.mark.parametrize(("num_kept", "num_lost"), [(9, 0), (2, 0), (1, 1), (0, 2)])
def test_a_log_that_lost_its_end_gets_it_again_or_a_report_of_the_gap(
    monkeypatch: pytest.MonkeyPatch, num_kept: int, num_lost: int
) -> None:
    monkeypatch.setattr(spool_file, "NUM_KEPT", num_kept)
    spool = Spool("n1/7", "n1", clock)
    sent = [spool.put(body) for body in (JOINED, exited(0), exited(1), exited(2))]
    spool.trim(3)
    assert spool.take_back(1) == num_lost
    found = spool.behind(spool.acked, 10)
    if num_lost:
        lost = found.pop(0)
        assert (lost.source_seq, lost.body) == (
            1 + num_lost,
            ReportsLost(node="n1", num_lost=num_lost),
        )
    assert found == sent[1 + num_lost :]
    assert spool.acked == 1
    spool.trim(4)
    assert spool.num_unacked == 0


# --- the file -----------------------------------------------------------------------------------
def bodies(spool: Spool) -> list[Body]:
    return [report.body for report in spool.behind(0, 10_000)]


def test_a_successor_delivers_what_was_left_under_the_old_source(tmp_path: Path) -> None:
    first, none = open_spools(tmp_path, "n1", "n1/7")
    assert none == []
    for body in (JOINED, exited(0), exited(1)):
        first.put(body)
    second, (left,) = open_spools(tmp_path, "n1", "n1/8")
    assert left.source == "n1/7"
    assert bodies(left) == [JOINED, exited(0), exited(1)]
    assert second.last == 0
    left.trim(3)
    left.close(forget=True)
    second.put(JOINED)
    _, (only,) = open_spools(tmp_path, "n1", "n1/9")
    assert only.source == "n1/8"


def test_another_nodes_spools_are_not_ours(tmp_path: Path) -> None:
    for node in ("n1.a", "n10", "n1"):
        spool, left = open_spools(tmp_path, node, f"{node}/7")
        assert left == []
        spool.put(JOINED)


def test_a_truncated_end_is_dropped_and_empty_files_vanish(tmp_path: Path) -> None:
    path = tmp_path / "n1.7.spool"
    spool = Spool("n1/7", "n1", clock, file=path)
    assert load_spool(path, "n1/7", "n1", clock) is None
    spool.put(JOINED)
    spool.put(exited(0))
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        left = load_spool(path, "n1/7", "n1", clock)
        assert bodies(left) if left else True
        if left is not None:
            assert bodies(left) == [JOINED]


def test_the_file_is_bounded_and_holds_what_memory_holds(tmp_path: Path) -> None:
    path = tmp_path / "n1.7.spool"
    spool = Spool("n1/7", "n1", clock, file=path, bytes_max=30_000)
    spool.put(JOINED)
    for number in range(3_000):
        spool.put(OrderRefused(node="n1", order=number, why="full"))
        if number % 7 == 0:
            spool.trim(spool.acked + 5)
        assert path.stat().st_size <= 2 * 30_000 + (64 << 10) + 1_000
    left = load_spool(path, "n1/7", "n1", clock)
    assert left is not None
    left.trim(spool.acked)
    assert left.behind(0, 10_000) == spool.behind(0, 10_000)


def test_a_full_disk_raises_nothing_and_the_file_is_restored(tmp_path: Path) -> None:
    """A limit on file sizes replaces the full disk: a write fails halfway with OSError."""
    path = tmp_path / "n1.7.spool"
    spool = Spool("n1/7", "n1", clock, file=path)
    spool.put(JOINED)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for rank in range(20):
            spool.put(exited(rank))
        spool.trim(5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [report.source_seq for report in spool.behind(5, 99)] == list(range(6, 22))
    spool.trim(6)
    spool.put(exited(20))
    spool.close(forget=False)
    left = load_spool(path, "n1/7", "n1", clock)
    assert left is not None
    assert [report.source_seq for report in left.behind(0, 99)] == list(range(7, 23))
