"""`replay --diff A B --digests`: the first iteration that two runs began with another state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...events.errors import UsageError
from ...events.records.reports import TaskProgressed, TaskSubmitted
from ...events.words import listed, number_of
from ..terminal import console
from .log_difference import DifferError
from .offline import Log

Run = dict[int, list[str]]
"""A task's digests by iteration, in the order of the log. An iteration that ran again has several,
equal if nothing went wrong."""
HINT = "with train.reproducible: bitwise a task has digests every train.digest_every iterations"


def diff(logs: Sequence[Log], a: str, b: str, *, as_json: bool) -> None:
    """Compare the tasks of two logs by name, of one name the newest; or of one log the tasks `a`
    and `b`, which may be the same. Raises DifferError, UsageError."""
    if len(logs) > 1:
        (one, _), (other, _) = map(_runs, logs)
        pairs = [(f"task {name}", one[name], other[name]) for name in one if name in other]
        if not pairs:
            raise UsageError(f"no task with digests has the same name in {a} and {b}",
                             f"{a} has {_names(one)}, {b} {_names(other)}; {HINT}")
    else:
        named, by_id = _runs(logs[0])
        runs = by_id | named
        for name in (a, b):
            if name not in runs:
                raise UsageError(f"no task {name!r} with digests",
                                 f"the log has {_names(named)}; {HINT}")
        pairs = [(f"task {a}" if a == b else f"tasks {a} and {b}", runs[a], runs[b])]
    rows = [(what, *_compared(*pair)) for what, *pair in pairs]
    console.show({"equal": all(at is None for _, _, at, _ in rows), "tasks": [
        {"what": what, "num_compared": num, "iteration": at, "digests": digests}
        for what, num, at, digests in rows]}, [
        f"{what}: {number_of(num, 'digest')} are equal" if at is None else
        f"{what}: iteration {at} is the first that began with another state, after "
        f"{number_of(num - 1, 'equal digest')}: {', '.join(digests)}"
        for what, num, at, digests in rows], as_json=as_json)
    if any(at is not None for _, _, at, _ in rows):
        raise DifferError(f"{a} and {b} differ", "from that iteration on, or since the digest "
                          "before it; unicron incident shows what failed by then")


def _runs(log: Log) -> tuple[dict[str, Run], dict[str, Run]]:
    """The tasks with digests, by name and by id."""
    names = {seq: task.spec.name for seq, task in log.state().tasks.items()}
    runs: dict[int, Run] = {}
    for record in log.read():
        if isinstance(record.body, TaskSubmitted):
            names[record.seq] = record.body.spec.name
        elif isinstance(record.body, TaskProgressed):
            for at, digest in record.body.digests.items():
                runs.setdefault(record.body.task, {}).setdefault(at, []).append(digest)
    return ({names.get(task, str(task)): run for task, run in runs.items()},
            {str(task): run for task, run in runs.items()})


def _names(runs: Iterable[str]) -> str:
    return listed(list(runs)) or "none"


def _compared(one: Run, other: Run) -> tuple[int, int | None, list[str]]:
    """How many iterations were compared; the first that differs, and its digests."""
    num = 0
    for num, at in enumerate(sorted(one.keys() & other.keys()), 1):
        if len(found := list(dict.fromkeys((*one[at], *other[at])))) > 1:
            return num, at, found
    if not num:
        raise UsageError("the two runs have no digest of the same iteration", HINT)
    return num, None, []
