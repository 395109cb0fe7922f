"""Where two runs differ by their digests, and where this version decides otherwise than a log."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...control_plane.decide.replay import Different
from ...events.errors import UnicronError, UsageError
from ...events.records.reports import RankReady, TaskProgressed, TaskSubmitted
from ...events.spec.job import JobSpec
from ..terminal import console
from ..terminal import format as fmt
from .offline import Log

DECISIONS_NUM_MAX = 20
HINT = "with reproducible: bitwise a task has digests every digest_every iterations; 0: none"
KEYS = (
    "model",
    "batch",
    "micro_batches",
    "iterations",
    "seed",
    "data",
    "precision",
    "loss",
    "loss_scale",
    "dynamic_loss_scale",
    "optimizer",
    "reproducible",
    "reproducible_bits",
)
"""Of `train` or `loop`: what decides the result."""


@dataclass
class Run:
    """A task. An iteration that ran again has several digests, equal if nothing went wrong.
    `why`: why it trained with rounding, although its job asks for exact sums."""

    spec: JobSpec
    why: str = ""
    digests: dict[int, list[str]] = field(default_factory=dict[int, list[str]])


class DifferError(UnicronError):
    """Two logs differ, or what two decider versions make of one; exit code 1."""


def diff(logs: Sequence[Log], a: str, b: str, *, as_json: bool) -> None:
    """Compare the tasks of two logs by name, of one name the newest; or of one log the tasks `a`
    and `b`, by name or number, which may be the same. Raises DifferError, UsageError."""
    runs, lines = [_runs(log) for log in logs], list[str]()
    if len(logs) == 1:
        pairs = [(a, _named(runs[0], a), b, _named(runs[0], b))]
    else:
        of = [{run.spec.name: run for run in some.values() if run.digests} for some in runs]
        pairs = [(name, run, name, of[1][name]) for name, run in of[0].items() if name in of[1]]
        if not pairs:
            raise UsageError(
                f"no task with digests has the same name in {a} and {b}",
                f"there are {fmt.listed([*of[0], *of[1]]) or 'none'}; {HINT}",
            )
        lines += [
            f"not in both logs: {fmt.listed(alone)}"
            for alone in [sorted(of[0].keys() ^ of[1].keys())]
            if alone
        ]
    rows = list[dict[str, Any]]()
    for x, run, y, against in pairs:
        what = f"task {x}" if x == y else f"tasks {x} and {y}"
        both, at, digests = _compared(run, against, what)
        rows.append({"tasks": [x, y], "compared": both, "iteration": at, "digests": digests})
        lines.append(
            f"{what}: no iteration with a digest ran again"
            if not both
            else f"{what}: {fmt.number_of(len(both), 'equal digest')}, of iterations "
            f"{both[0]} to {both[-1]}"
            if at is None
            else f"{what}: iteration {at} is the first compared that began with another state, "
            f"after {fmt.number_of(len(both) - 1, 'equal digest')}: {', '.join(digests)}"
        )
        if keys := list(_differing(run.spec.training, against.spec.training)):
            lines.append(f"{what}: the jobs differ in {', '.join(keys)}")
    is_equal = all(row["iteration"] is None for row in rows)
    console.show({"equal": is_equal, "tasks": rows}, lines, as_json=as_json)
    if not is_equal:
        raise DifferError(
            f"{a} and {b} differ",
            "the cause is between the last equal digest, or "
            "the start, and that iteration: a fault (unicron incident), another job, "
            "other data or software",
        )


def _differing(a: object, b: object, keys: Sequence[str] = KEYS, within: str = "") -> Iterator[str]:
    for key in keys:
        one, other = getattr(a, key, None), getattr(b, key, None)
        if isinstance(one, msgspec.Struct) and isinstance(other, type(one)):
            yield from _differing(one, other, one.__struct_fields__, f"{within}{key}.")
        elif one != other:
            yield within + key


def _runs(log: Log) -> dict[str, Run]:
    """The training tasks, by number, as text."""
    runs = {str(seq): Run(task.spec, task.rounding_why) for seq, task in log.state().tasks.items()}
    for record in log.read():
        if isinstance(record.body, TaskSubmitted):
            runs[str(record.seq)] = Run(record.body.spec)
        elif isinstance(record.body, RankReady) and (run := runs.get(str(record.body.task))):
            run.why = record.body.rounding_why
        elif isinstance(record.body, TaskProgressed) and (run := runs.get(str(record.body.task))):
            for at, digest in record.body.digests.items():
                run.digests.setdefault(at, []).append(digest)
    return runs


def _named(runs: dict[str, Run], word: str) -> Run:
    found = [seq for seq, run in runs.items() if word in (seq, run.spec.name)]
    if not found:
        names = list(dict.fromkeys(run.spec.name for run in runs.values()))
        raise UsageError(f"the log has no task {word}", f"it has {fmt.listed(names) or 'none'}")
    if len(found) > 1:
        raise UsageError(
            f"the log has {len(found)} tasks {word}: {fmt.listed(found)}", "give the number of one"
        )
    run = runs[found[0]]
    if not run.digests:
        raise UsageError(
            f"task {word} has no digests"
            + (f": it trained with rounding: {run.why}" if run.why else ""),
            HINT,
        )
    return run


def _compared(run: Run, against: Run, what: str) -> tuple[list[int], int | None, list[str]]:
    """The iterations that were compared; the first that differs, and its digests."""
    one, other = run.digests, against.digests
    both = [at for at in sorted(one.keys() & other.keys()) if run is not against or one[at][1:]]
    if not both and run is not against:
        raise UsageError(f"{what}: no iteration with a digest is in both", HINT)
    for num, at in enumerate(both, 1):
        if len(found := list(dict.fromkeys((*one[at], *other[at])))) > 1:
            return both[:num], at, found
    return both, None, []


def decisions(found: Sequence[Different]) -> list[str]:
    """The first decisions that this version makes otherwise."""
    rows = [
        [str(one.seq), *(record["kind"] if record else "-" for record in (one.recorded, one.now))]
        for one in found[:DECISIONS_NUM_MAX]
    ]
    return [
        "",
        *fmt.table(("SEQ", "RECORDED", "NOW"), rows, right=(0,)),
        "-o json has each decision as a whole" + ", and the others" * (len(found) > len(rows)),
    ]
