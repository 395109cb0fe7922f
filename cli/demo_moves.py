"""The demo's ruler for transitions: how a task went from one generation to the next, from the log.

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
    num_after: int
    iteration: int
    """The iteration that the new generation goes on with."""
    still_s: float
    step_s: float
    """From standing still to the first finished iteration."""
    lost: int
    """Iterations that a member had stepped and that are done again."""
    newcomers: tuple[Plain, ...]
    """Reconfigured of each member whose state is another's."""


def moves(records: Sequence[Plain], after: int = 0) -> list[Move]:
    """All transitions that were ordered behind `after` and have stepped, in order."""
    return [move for record in records
            if record["kind"] == "Reconfigure" and record["seq"] > after
            and (move := _move(records, record)) is not None]


def _move(records: Sequence[Plain], order: Plain) -> Move | None:
    task, generation = order["body"]["task"], order["body"]["generation"]
    mine = [record for record in records if record["body"].get("task") == task]
    left = list(_of(mine, "Quiesced", generation - 1))
    up = list(_of(mine, "Reconfigured", generation))
    resumed = next(_of(mine, "Resume", generation), None)
    stepped = next(_of(mine, "TaskProgressed", generation), None)
    if resumed is None or stepped is None or not up:
        return None
    first: dict[int, float] = {}
    for record in left:  # one that holds already says so again when it is told to
        first.setdefault(record["body"]["rank"], record["occurred_s"])
    stood_s = max(first.values(), default=resumed["at_s"])
    before = next(_of(mine, "Reconfigure", generation - 1), None)
    settled = min(record["body"]["step_version"] for record in up)
    return Move(
        task=task, seq=order["seq"], generation=generation,
        num_before=len(before["body"]["members"]) if before is not None else 0,
        num_after=len(order["body"]["members"]), iteration=settled,
        still_s=max(resumed["at_s"] - stood_s, 0.0), step_s=max(stepped["at_s"] - stood_s, 0.0),
        lost=max([record["body"]["step_version"] - settled for record in left] + [0]),
        newcomers=tuple(record["body"] for record in up
                        if record["body"]["source"] not in (-1, record["body"]["rank"])))


def _of(records: Sequence[Plain], kind: str, generation: int) -> Iterator[Plain]:
    return (record for record in records
            if record["kind"] == kind and record["body"]["generation"] == generation)
