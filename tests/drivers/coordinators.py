"""The coordinator: a batch is decided and appended once, whatever the log does meanwhile."""

from __future__ import annotations

from unicron.events.records.envelope import Report
from unicron.events.records.reports import NodeJoined
from unicron.events.records.types import Body


def told(number: int, body: Body, source: str = "n1/1") -> Report:
    return Report(source=source, source_seq=number, occurred_s=1.0, body=body)


def joined(node: str = "n1", incarnation: int = 1) -> NodeJoined:
    return NodeJoined(node=node, incarnation=incarnation, host="h", pid=1, num_slots=2)
