"""The ruler for transitions: how a task went from one generation to the next, from the log.

A task stands still from the moment its last member has left the old generation until Resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

Plain = dict[str, Any]


class Move(Struct, frozen=True, kw_only=True):
    """One transition. Times in seconds; `num_before` is 0 for a task's first generation."""

    task: int
    seq: int
    generation: int
    num_before: int
    """Members of the last generation that was resumed; 0: this is the task's first."""
    num_after: int
    iteration: int
    """The iteration that the new generation goes on with."""
    still_s: float
    step_s: float | None
    """From standing still to the first finished iteration; None: none is told yet."""
    lost: int
    """Iterations that a member had stepped and that are done again."""
    newcomers: tuple[Plain, ...]
    """Of each member that was not in the last generation that was resumed, its first Reconfigured
    since, wherever its state came from; none in the task's first."""


def moves(records: Sequence[Plain], after: int = 0) -> list[Move]:
    """All transitions that were ordered behind `after` and were resumed, in order."""
    return [move for record in records
            if record["kind"] == "Reconfigure" and record["seq"] > after
            and (move := _move(records, record)) is not None]


def _move(records: Sequence[Plain], order: Plain) -> Move | None:
    task, generation = order["body"]["task"], order["body"]["generation"]
    mine = [record for record in records if record["body"].get("task") == task]
    up = list(_of(mine, "Reconfigured", generation))
    resumed = next(_of(mine, "Resume", generation), None)
    if resumed is None or not up:
        return None
    before = _resumed_before(mine, order)
    left = list(_of(mine, "Quiesced", before["body"]["generation"])) if before else []
    first: dict[int, float] = {}
    for record in left:  # one that holds already says so again when it is told to
        first.setdefault(record["body"]["rank"], record["occurred_s"])
    stood_s = max(first.values(), default=resumed["at_s"])
    stepped = next(_of(mine, "TaskProgressed", generation), None)
    settled = min(record["body"]["step_version"] for record in up)
    return Move(
        task=task, seq=order["seq"], generation=generation,
        num_before=len(before["body"]["members"]) if before else 0,
        num_after=len(order["body"]["members"]), iteration=settled,
        still_s=max(resumed["at_s"] - stood_s, 0.0),
        step_s=None if stepped is None else max(stepped["at_s"] - stood_s, 0.0),
        lost=max([record["body"]["step_version"] - settled for record in left] + [0]),
        newcomers=_newcomers(mine, up, before) if before else ())


def _resumed_before(mine: Sequence[Plain], order: Plain) -> Plain | None:
    """The task's last Reconfigure before `order` that came up; others may have failed between."""
    told = [record["body"]["generation"] for record in mine if record["kind"] == "Resume"]
    return next((record for record in reversed(mine)
                 if record["kind"] == "Reconfigure" and record["seq"] < order["seq"]
                 and record["body"]["generation"] in told), None)


def _newcomers(mine: Sequence[Plain], up: Sequence[Plain], before: Plain) -> tuple[Plain, ...]:
    """What one was given in a generation that then failed, it has, and says so in the next."""
    first: dict[tuple[int, int], Plain] = {}
    for record in mine:
        if record["kind"] == "Reconfigured" and record["seq"] > before["seq"]:
            first.setdefault(_process(record["body"]), record["body"])
    old = [_process(member) for member in before["body"]["members"]]
    return tuple(first[_process(record["body"])] for record in up
                 if _process(record["body"]) not in old)


def _process(body: Plain) -> tuple[int, int]:
    return body["rank"], body["attempt"]


def _of(records: Sequence[Plain], kind: str, generation: int) -> Iterator[Plain]:
    return (record for record in records
            if record["kind"] == kind and record["body"]["generation"] == generation)
