"""Where two runs differ by their digests, and where this version decides otherwise than a log."""

import json
from collections.abc import Sequence
from typing import Any

from ...control_plane.decide.replay import Different
from ...events.errors import UnicronError, UsageError
from ...events.records.reports import TaskProgressed, TaskSubmitted
from ..terminal import console
from ..terminal import format as fmt
from .offline import Log

FIELD_LENGTH_MAX = 98
DECISIONS_NUM_MAX = 20
HINT = "with train.reproducible: bitwise a task has digests every digest_every iterations"
Run = dict[int, list[str]]
"""A task's digests by iteration, in the order of the log. An iteration that ran again has several,
equal if nothing went wrong."""


class DifferError(UnicronError):
    """Two logs differ, or what two decider versions make of one; exit code 1."""


def diff(logs: Sequence[Log], a: str, b: str, *, as_json: bool) -> None:
    """Compare the tasks of two logs by name, of one name the newest; or of one log the tasks `a`
    and `b`, which may be the same. Raises DifferError, UsageError."""
    one, other = _runs(logs[0]), _runs(logs[-1])
    names = ([(name, name) for name in one if name in other] if len(logs) > 1 else
             [(a, b)] if a in one and b in one else [])
    if not names:
        raise UsageError("no task with digests has " + (
            f"the same name in {a} and {b}" if len(logs) > 1 else f"the name {a} or {b}"),
            f"there are {fmt.listed(list(dict.fromkeys((*one, *other)))) or 'none'}; {HINT}")
    rows, lines = list[dict[str, Any]](), list[str]()
    for x, y in names:
        num, at, digests = _compared(one[x], other[y])
        rows.append({"tasks": [x, y], "num_compared": num, "iteration": at, "digests": digests})
        what = f"task {x}" if x == y else f"tasks {x} and {y}"
        lines.append(f"{what}: {fmt.number_of(num, 'digest')} are equal" if at is None else
                     f"{what}: iteration {at} is the first that began with another state, after "
                     f"{fmt.number_of(num - 1, 'equal digest')}: {', '.join(digests)}")
    is_equal = all(row["iteration"] is None for row in rows)
    console.show({"equal": is_equal, "tasks": rows}, lines, as_json=as_json)
    if not is_equal:
        raise DifferError(f"{a} and {b} differ", "the cause is between the last equal digest and "
                          "that iteration; unicron incident shows what failed")


def _runs(log: Log) -> dict[str, Run]:
    """The tasks with digests, by name."""
    names = {seq: task.spec.name for seq, task in log.state().tasks.items()}
    runs: dict[int, Run] = {}
    for record in log.read():
        if isinstance(record.body, TaskSubmitted):
            names[record.seq] = record.body.spec.name
        elif isinstance(record.body, TaskProgressed):
            for at, digest in record.body.digests.items():
                runs.setdefault(record.body.task, {}).setdefault(at, []).append(digest)
    return {names.get(task, str(task)): run for task, run in runs.items()}


def _compared(one: Run, other: Run) -> tuple[int, int | None, list[str]]:
    """How many iterations were compared; the first that differs, and its digests."""
    both = sorted(one.keys() & other.keys())
    if not both:
        raise UsageError("the two runs have no digest of the same iteration", HINT)
    for num, at in enumerate(both, 1):
        if len(found := list(dict.fromkeys((*one[at], *other[at])))) > 1:
            return num, at, found
    return len(both), None, []


def decisions(found: Sequence[Different]) -> list[str]:
    """The first decisions that this version makes otherwise, each with the first other field."""
    rows: list[list[str]] = []
    for one in found[:DECISIONS_NUM_MAX]:
        kinds = [record["kind"] if record else "-" for record in (one.recorded, one.now)]
        recorded, now = ((record or {}).get("body", {}) for record in (one.recorded, one.now))
        what = next((f"{name}: {json.dumps(recorded[name])}, {json.dumps(now[name])}"
                     for name in recorded if name in now and kinds[0] == kinds[1]
                     and recorded[name] != now[name]), "")
        rows.append([str(one.seq), *kinds, fmt.clipped(what, FIELD_LENGTH_MAX)])
    return ["", *fmt.table(("SEQ", "RECORDED", "NOW", "FIRST FIELD"), rows, right=(0,)),
            *["... (-o json has more)"] * (len(found) > len(rows))]
