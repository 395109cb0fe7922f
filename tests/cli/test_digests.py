"""`replay --diff A B`: two runs, or a run and its past, compared by their digests."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from cli_process import refused, unicron
from unicron.events.log import archive
from unicron.events.records.reports import RankReady, TaskProgressed, TaskSubmitted

PAST = Path(__file__).parents[1] / "golden" / "release-0.3.0.jsonl"
Digests = dict[int, str]


def log_with(path: Path, *digests: Digests) -> str:
    """A log whose first reports of progress have these digests, one after the other."""
    given = iter(digests)
    records = list(archive.read(PAST))
    first = next(record.body.task for record in records if isinstance(record.body, TaskProgressed))
    for at, record in enumerate(records):
        body = record.body
        if isinstance(body, TaskProgressed) and body.task == first:
            records[at] = msgspec.structs.replace(
                record, body=msgspec.structs.replace(body, digests=next(given, {}))
            )
    archive.write(path, records, cluster="c", code="0")
    return str(path)


def name_of(path: str) -> str:
    records = list(archive.read(Path(path)))
    task = next(
        record.body.task
        for record in records
        if isinstance(record.body, TaskProgressed) and record.body.digests
    )
    return next(
        record.body.spec.name
        for record in records
        if isinstance(record.body, TaskSubmitted) and record.seq == task
    )


def number_of(path: str) -> str:
    return str(
        next(
            record.body.task
            for record in archive.read(Path(path))
            if isinstance(record.body, TaskProgressed) and record.body.digests
        )
    )


def compare(*args: str) -> tuple[int, str, dict[str, object]]:
    result = unicron("replay", *args)
    return (
        result.returncode,
        result.stdout,
        json.loads(unicron("replay", *args, "-o", "json").stdout),
    )


def test_two_runs_are_compared_by_iteration(tmp_path: Path) -> None:
    calm = log_with(tmp_path / "calm.jsonl", {2: "aa", 4: "bb"}, {6: "cc"})
    healed = log_with(tmp_path / "healed.jsonl", {2: "aa"}, {4: "bb", 6: "cc", 8: "dd"})
    name = name_of(calm)
    code, told, data = compare("--diff", calm, healed)
    assert (code, told) == (0, f"task {name}: 3 equal digests, of iterations 2 to 6\n")
    assert data["equal"] is True
    broken = log_with(tmp_path / "broken.jsonl", {2: "aa", 4: "b0"}, {6: "c0"})
    code, told, data = compare("--diff", calm, broken)
    assert (code, told) == (
        1,
        f"task {name}: iteration 4 is the first compared that began with "
        "another state, after 1 equal digest: bb, b0\n",
    )
    assert data["tasks"] == [
        {"tasks": [name, name], "compared": [2, 4], "iteration": 4, "digests": ["bb", "b0"]}
    ]


def test_other_jobs_are_named(tmp_path: Path) -> None:
    calm = log_with(tmp_path / "calm.jsonl", {2: "aa"})
    records = list(archive.read(Path(calm)))
    for at, record in enumerate(records):
        body = record.body
        if isinstance(body, TaskSubmitted) and body.spec.train is not None:
            slower = msgspec.structs.replace(body.spec.train.optimizer, min_lr=1e-9)
            train = msgspec.structs.replace(
                body.spec.train, seed=99, copy_every=3, optimizer=slower
            )
            records[at] = msgspec.structs.replace(
                record,
                body=msgspec.structs.replace(
                    body, spec=msgspec.structs.replace(body.spec, train=train)
                ),
            )
    archive.write(tmp_path / "other.jsonl", records, cluster="c", code="0")
    code, told, _ = compare("--diff", calm, str(tmp_path / "other.jsonl"))
    assert (code, told.splitlines()[1:]) == (
        0,
        [f"task {name_of(calm)}: the jobs differ in seed, optimizer.min_lr"],
    )


def test_a_run_is_compared_with_its_own_past(tmp_path: Path) -> None:
    again = log_with(tmp_path / "again.jsonl", {2: "aa", 4: "bb"}, {4: "bb"})
    name = name_of(again)
    assert compare(again, "--diff", name, name)[:2] == (
        0,
        f"task {name}: 1 equal digest, of iterations 4 to 4\n",
    )
    assert compare(again, "--diff", number_of(again), name)[0] == 0
    other = log_with(tmp_path / "other.jsonl", {2: "aa", 4: "bb"}, {4: "b0"})
    code, told, _ = compare(other, "--diff", name, name)
    assert (code, "iteration 4" in told) == (1, True)
    once = log_with(tmp_path / "once.jsonl", {2: "aa", 4: "bb"})
    code, told, data = compare(once, "--diff", name, name)
    assert (code, told) == (0, f"task {name}: no iteration with a digest ran again\n")
    assert data["equal"] is True


def test_a_task_that_declined_is_told_why(tmp_path: Path) -> None:
    some = log_with(tmp_path / "some.jsonl", {2: "aa"})
    records = [
        msgspec.structs.replace(
            record, body=msgspec.structs.replace(record.body, rounding_why="a mixture of experts")
        )
        if isinstance(record.body, RankReady)
        else record
        for record in archive.read(Path(log_with(tmp_path / "without.jsonl")))
    ]
    archive.write(tmp_path / "declined.jsonl", records, cluster="c", code="0")
    refused(
        unicron("replay", str(tmp_path / "declined.jsonl"), "--diff", name_of(some), name_of(some)),
        "has no digests: it trained with rounding: a mixture of experts",
    )


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    without = log_with(tmp_path / "without.jsonl")
    some = log_with(tmp_path / "some.jsonl", {2: "aa"})
    late = log_with(tmp_path / "late.jsonl", {4: "aa"})
    for args, words in (
        (("--diff", some, without), "no task with digests has the same name"),
        (("--diff", some, late), "no iteration with a digest is in both"),
        ((some, "--diff", "nobody", name_of(some)), "the log has no task nobody"),
        ((without, "--diff", name_of(some), name_of(some)), "has no digests"),
        (("--diff", some, "nowhere"), "--diff nowhere: no such file"),
        ((some, "--diff", "a", "b", "--verify"), "no other option"),
    ):
        refused(unicron("replay", *args), words)
