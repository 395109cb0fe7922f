"""What a command's own lines tell of its restarts: how many iterations it does again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from msgspec import Struct, field

Plain = dict[str, Any]


class Incident(Protocol):
    """What is read and told of one (history.py)."""

    task: int
    iterations_lost: int | None
    outcome: str
    closed_s: float | None


class Printed(Struct):
    """How far a command has told that it is; the state's fold reads the lines the same way."""

    attempts: dict[int, int] = field(default_factory=dict[int, int])
    """Rank -> the attempt that was started last."""
    teller: int = -1
    """Who tells of this round of processes: whoever is first; below 0: nobody has yet."""
    iteration: int = 0
    """As told last, by any round."""

    def started(self, body: Plain) -> None:
        """Read a StartRank: all of a command are started together."""
        self.attempts[body["rank"]], self.teller = body["attempt"], -1

    def told(self, body: Plain) -> int | None:
        """Read an IterationsLogged. Of a round's first line: how many iterations that had been told
        of are done again; else None."""
        if self.attempts.get(body["rank"]) != body["attempt"] or (
                self.teller not in (-1, body["rank"])):
            return None
        begins, before = self.teller < 0, self.iteration
        self.teller, self.iteration = body["rank"], body["iteration"]
        if not begins:
            return None
        return max(before - self.iteration + 1, 0) if before else 0


def begins_again(incidents: Iterable[Incident], task: int, lost: int | None) -> None:
    """As the fold has it: the task's newest incident is told, unless it knows what it cost: then a
    plan has moved the task since."""
    mine = [one for one in incidents if one.task == task]
    if lost is None or not mine or (mine[-1].closed_s is not None
                                    and mine[-1].iterations_lost is not None):
        return
    mine[-1].iterations_lost = (mine[-1].iterations_lost or 0) + lost
    if lost and mine[-1].outcome == "healed":
        mine[-1].outcome = "set back"
