"""Faults that were made on purpose: asked for, ordered, and which incidents they explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from .record_line import PROGRESS, essentials

Plain = dict[str, Any]


class Fault(Struct, kw_only=True):
    """One InjectFault. It breaks one life of a rank, or of a node's agent, and no later one."""

    seq: int
    """Of the request."""
    what: str
    """In words, with the reason that was given."""
    task: int
    rank: int
    attempt: int
    node: str
    """Empty where a rank is broken."""
    incarnation: int
    goes_on_s: float | None
    """When a stopped rank goes on; None: never, or it is killed."""
    over_seq: int = 0
    """What is told from here on is not of it; 0: it may still show."""


class OnPurpose(Struct):
    """All such faults of a log."""

    faults: list[Fault] = field(default_factory=list[Fault])
    asked: Plain | None = None
    """The last request for one."""

    def add(self, record: Plain) -> None:
        """Read the next record."""
        if record["kind"] == "FaultRequested":
            self.asked = record
        elif record["kind"] == "InjectFault":
            asked = self.asked
            self.faults.append(_fault(record, asked if asked is not None
                                      and asked["seq"] == record["cause"] else record))
        for one in self.faults:
            if not one.over_seq and _is_over(one, record):
                one.over_seq = record["seq"]

    def behind(self, *, task: int, ranks: Sequence[int], node: str, first_seq: int,
               last_seq: int) -> list[Fault]:
        """Those that explain an incident whose signs came from `first_seq` to `last_seq`."""
        return [one for one in self.faults
                if one.seq < last_seq and (not one.over_seq or one.over_seq >= first_seq)
                and (one.node == node if one.node else one.task == task and one.rank in ranks)]


def _fault(order: Plain, asked: Plain) -> Fault:
    body = order["body"]
    goes_on = body["what"] == "stop" and body["stop_s"] > 0
    return Fault(
        seq=asked["seq"], what=essentials(asked["kind"], asked["body"]), task=body["task"],
        rank=body["rank"], attempt=body["attempt"], incarnation=body["incarnation"],
        node=body["nodes"][0] if body["what"] == "node" else "",
        goes_on_s=order["at_s"] + body["stop_s"] if goes_on else None)


def _is_over(one: Fault, record: Plain) -> bool:
    """Its rank has ended, or trains on; its node's next agent has joined."""
    kind, body = record["kind"], record["body"]
    if one.node:
        return bool(kind == "NodeJoined" and body["node"] == one.node
                    and body["incarnation"] > one.incarnation)
    if body.get("task") != one.task:
        return False
    if kind == "RankExited":
        return bool(body["rank"] == one.rank and body["attempt"] >= one.attempt)
    return kind == "TaskEnded" or (kind in PROGRESS and one.goes_on_s is not None
                                   and record["at_s"] > one.goes_on_s)
