"""Which rank of which task sits where, and whether it trains there: read from the log alone."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

Plain = dict[str, Any]


class TaskSeats(Struct):
    """One task: its target, its newest generation, and the last one that stepped."""

    target: dict[int, str] = field(default_factory=dict[int, str])
    """By rank: the node of its seat."""
    members: dict[int, str] = field(default_factory=dict[int, str])
    generation: int = 0
    stepped: int = 0


class Seating(Struct):
    """All tasks by id."""

    tasks: dict[int, TaskSeats] = field(default_factory=dict[int, TaskSeats])

    def add(self, record: Plain) -> None:
        """Read the next record."""
        kind, body = record["kind"], record["body"]
        if kind not in ("TaskPlaced", "Reconfigure", "TaskProgressed"):
            return
        one = self.tasks.setdefault(body["task"], TaskSeats())
        if kind == "TaskPlaced":
            one.target = {seat["rank"]: seat["slot"]["node"] for seat in body["seats"]}
        elif kind == "Reconfigure":
            one.members = {member["rank"]: member["node"] for member in body["members"]}
            one.generation = body["generation"]
        else:
            one.stepped = max(one.stepped, body["generation"])

    def members(self, task: int) -> dict[int, str]:
        """By rank: the node that it is on."""
        return self.tasks.get(task, TaskSeats()).members

    def is_full(self, task: int, num: int) -> bool:
        """Whether it steps with exactly these seats, `num` of them."""
        one = self.tasks.get(task, TaskSeats())
        return (one.members == one.target and len(one.members) == num
                and one.stepped == one.generation)

    def nodes(self, task: int) -> str:
        """The nodes of its target, in words."""
        one = self.tasks.get(task, TaskSeats())
        return " ".join(dict.fromkeys(sorted(one.target.values())))
