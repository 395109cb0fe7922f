"""Injected faults: requested, ordered, and the incidents that they explain."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from ...events.records.decisions import TaskEnded
from ...events.records.envelope import Record
from ...events.records.orders import InjectFault
from ...events.records.reports import (
    FaultRequested,
    IterationsLogged,
    NodeJoined,
    RankExited,
    TaskProgressed,
)


class Injected(Struct, kw_only=True):
    """One InjectFault. It affects one attempt of a rank, or one incarnation of an agent."""

    request: Record
    """The FaultRequested, or the order itself."""
    order: InjectFault
    at_s: float
    over_seq: int = 0
    """Reports from here on are unrelated; 0: it may still have effects."""

    def is_over(self, record: Record) -> bool:
        """Whether its effects are over: the rank ended or trains, or the node has joined again."""
        order, body = self.order, record.body
        if order.what == "node":
            return (isinstance(body, NodeJoined) and body.node in order.nodes
                    and body.incarnation > order.incarnation)
        if getattr(body, "task", 0) != order.task:
            return False
        if isinstance(body, RankExited):
            return body.rank == order.rank and body.attempt >= order.attempt
        if isinstance(body, TaskProgressed | IterationsLogged):  # it continues on its own
            return (order.what == "stop" and order.stop_s > 0
                    and record.at_s > self.at_s + order.stop_s)
        return isinstance(body, TaskEnded)


class InjectedFaults(Struct):
    """All injected faults of a log."""

    faults: list[Injected] = field(default_factory=list[Injected])
    request: Record | None = None
    """The last request."""

    def add(self, record: Record) -> None:
        if isinstance(record.body, FaultRequested):
            self.request = record
        elif isinstance(record.body, InjectFault):
            asked = self.request is not None and self.request.seq == record.cause
            self.faults.append(Injected(
                request=self.request if asked and self.request is not None else record,
                order=record.body, at_s=record.at_s))
        for one in self.faults:
            if not one.over_seq and one.is_over(record):
                one.over_seq = record.seq

    def behind(self, *, task: int, ranks: Sequence[int], node: str, first_seq: int,
               last_seq: int) -> list[Injected]:
        """Injected faults that explain an incident with signs from `first_seq` to `last_seq`."""
        return [one for one in self.faults
                if one.request.seq < last_seq
                and (not one.over_seq or one.over_seq >= first_seq)
                and (node in one.order.nodes if one.order.what == "node"
                     else one.order.task == task and one.order.rank in ranks)]
