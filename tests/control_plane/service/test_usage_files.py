"""The figures of the sealed log in files: counted once, and again if they are bad."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from decider import Driver
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.history.history import usage
from unicron.control_plane.history.usage import SCHEMA, Usage
from unicron.control_plane.service import snapshots, usage_files
from unicron.control_plane.state.cluster import ClusterState
from unicron.events.errors import Unavailable
from unicron.events.log.segments import Folder, SealedLog
from unicron.events.records.envelope import Record

DAY_S = 86_400.0


def life(num_turns: int = 300) -> list[Record]:
    """A task that is killed now and then, over some days."""
    d = Driver(now_s=10 * DAY_S)
    task = d.running()
    for turn in range(1, num_turns):
        d.now_s += 1_000.0
        if turn % 30 == 0:
            d.obey(d.exit(task, turn % 4))
        d.progress(task)
    return d.log


RECORDS = life()


def seal(folder: Folder, records: list[Record], num: int = 25) -> None:
    """Write segments of at least `num` records, which begin with a report."""
    prev = (folder.chain() or [None])[-1]
    begins = [at for at, one in enumerate(records) if not one.cause]
    first = 0
    while first < len(records):
        last = next((at for at in begins if at >= first + num), len(records))
        prev = folder.write(records[first:last], prev)
        first = last


def plain(found: Usage) -> Usage:
    """With FLOP rounded: their sums depend on the order."""
    return msgspec.structs.replace(
        found,
        days={
            day: {
                what: float(f"{value:.9g}") if isinstance(value, float) else value
                for what, value in sorted(one.items())
            }
            for day, one in sorted(found.days.items())
        },
    )


def whole(last: int) -> Usage:
    return plain(usage([one for one in RECORDS if one.seq <= last], ClusterState()))


@pytest.fixture(params=["folder", "url"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param == "folder":
        made = Folder(tmp_path / "log", "c")
        seal(made, RECORDS)
        yield made
        return
    fsspec = pytest.importorskip("fsspec")
    made = Folder("memory://log", "c")
    seal(made, RECORDS)
    yield made
    fsspec.filesystem("memory").store.clear()


def of_sealed(folder: Folder) -> Usage:
    return plain(usage_files.of_sealed(SealedLog(folder)))


def test_the_first_answer_counts_and_later_ones_read(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = folder.chain()
    assert len(chain) > usage_files.BATCH_SEGMENTS_NUM
    assert of_sealed(folder) == whole(RECORDS[-1].seq)
    monkeypatch.setattr(folder, "read", lambda segment: pytest.fail("read a segment"))
    assert of_sealed(folder) == whole(RECORDS[-1].seq)


def test_counted_segment_by_segment_two_files_stay(tmp_path: Path) -> None:
    folder, ends = Folder(tmp_path, "c"), list[int]()
    begins = [at for at, one in enumerate(RECORDS) if not one.cause]
    for number, first in enumerate(begins[:60]):
        seal(folder, RECORDS[first : begins[number + 1]], 1)
        usage_files.of_sealed(SealedLog(folder), 0.0)
        ends.append(RECORDS[begins[number + 1] - 1].seq)
        assert [one.seq for one in folder.snapshots("usage")] == ends[-2:]
    assert of_sealed(folder) == whole(ends[-1])


def test_files_of_another_log_do_not_count(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "c")
    seal(folder, RECORDS)
    folder.write_snapshot(
        RECORDS[-1].seq + 1,
        1,
        SCHEMA,
        msgspec.msgpack.encode(("f" * 16, Usage({1: {"records": 1}}))),
        "usage",
    )
    assert of_sealed(folder) == whole(RECORDS[-1].seq)


def test_what_is_sealed_later_is_counted_from_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, "c")
    half = next(at for at in range(len(RECORDS) // 2, len(RECORDS)) if not RECORDS[at].cause)
    seal(folder, RECORDS[:half])
    of_sealed(folder)
    snapshots.write_at(folder, SealedLog(folder), RECORDS[half - 1].seq)
    old = folder.chain()
    seal(folder, RECORDS[half:])
    read = folder.read
    monkeypatch.setattr(
        folder,
        "read",
        lambda segment: pytest.fail("read an old segment") if segment in old else read(segment),
    )
    assert of_sealed(folder) == whole(RECORDS[-1].seq)


@pytest.mark.parametrize("harm", ["missing", "damaged", "another schema"])
def test_bad_files_are_counted_again(tmp_path: Path, harm: str) -> None:
    folder = Folder(tmp_path, "c")
    seal(folder, RECORDS)
    of_sealed(folder)
    for file in folder.snapshots("usage"):
        path = tmp_path / file.name
        if harm == "missing":
            path.unlink()
        elif harm == "damaged":
            path.write_bytes(path.read_bytes()[:-7])
        else:
            path.unlink()
            folder.write_snapshot(
                file.seq,
                file.epoch,
                "unicron-usage-0",
                msgspec.msgpack.encode((folder.chain()[-1].digest, Usage({1: {"records": 1}}))),
                "usage",
            )
    assert of_sealed(folder) == whole(RECORDS[-1].seq)


def test_the_figures_of_pruned_segments_stay(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "c")
    seal(folder, RECORDS)
    of_sealed(folder)
    chain = folder.chain()
    first = chain[len(chain) // 2].first
    snapshots.write_at(folder, SealedLog(folder), first - 1)
    assert folder.prune(chain, first)
    assert folder.chain()[0].first == first
    assert of_sealed(folder) == whole(RECORDS[-1].seq)


def test_what_was_pruned_before_it_was_counted_is_unknown(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "c")
    seal(folder, RECORDS)
    chain = folder.chain()
    first = chain[len(chain) // 2].first
    snapshots.write_at(folder, SealedLog(folder), first - 1)
    folder.prune(chain, first)
    state = ClusterState()
    for record in RECORDS[: first - 1]:
        fold(state, record)
    assert of_sealed(folder) == plain(usage(RECORDS[first - 1 :], state))


def test_a_reader_that_may_not_write_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, "c")
    seal(folder, RECORDS)

    def refuse(*args: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(folder, "write_snapshot", refuse)
    assert of_sealed(folder) == whole(RECORDS[-1].seq)
    assert folder.snapshots("usage") == []


def test_an_answer_in_time_or_none_and_the_next_goes_on(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "c")
    seal(folder, RECORDS)
    chain = folder.chain()
    with pytest.raises(Unavailable, match="are left"):
        usage_files.of_sealed(SealedLog(folder), 0.0)
    for _ in range(len(chain) // usage_files.BATCH_SEGMENTS_NUM - 1):
        with suppress(Unavailable):
            usage_files.of_sealed(SealedLog(folder), 0.0)
    assert plain(usage_files.of_sealed(SealedLog(folder), 0.0)) == whole(RECORDS[-1].seq)
