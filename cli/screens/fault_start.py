"""When a fault began, as far as the first evidence shows."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from ...control_plane.history.history import IncidentHistory
from ...events.records.envelope import Record
from ...events.records.reports import RankStalled, StepTimeChanged
from ...events.records.statuses import NCCL_TIMEOUT
from ..terminal.format import ranks, span

EXACT_KINDS = frozenset({"RankExited", "RankErrored", "RankSuspended", "DeviceErred",
                           "NodeUnreachable", "NodeJoined", "NodeLeft"})
"""Kinds that carry the time of the event, or how long it has lasted (NodeUnreachable)."""


class FaultStart(Struct, frozen=True):
    """How long before `detected_s` the fault began: exactly (""), at most, at least, or unknown."""

    bound: Literal["", "at most", "at least", "unknown"] = ""
    length_s: float = 0.0
    """Set if there is a bound."""
    why: str = ""


def began(one: IncidentHistory, evidence: list[Record]) -> FaultStart:
    """The start of the fault, from the records that opened the incident."""
    first = [x for x in evidence if x.seq < one.id]
    kinds = {x.kind for x in first}
    if kinds & EXACT_KINDS or not first:
        return FaultStart()
    step_times = [(x.at_s, x.body) for x in first if isinstance(x.body, StepTimeChanged)]
    slow_iterations = [(at_s, x) for at_s, x in step_times if x.num_iterations == 1]
    if slow_iterations:  # the iteration has not ended, and the rank still passes marks
        since_s = min(at_s - max(x.iteration_s, 0.0) for at_s, x in slow_iterations)
        length_s = max(one.detected_s - since_s, 0.0)
        return FaultStart("at most", length_s, f"after that iteration began, {span(length_s)} "
                          "before the report; the exact time is not known")
    stalls = [(x.at_s, x.body) for x in first if isinstance(x.body, RankStalled)]
    if stalls:
        own = [x for x in stalls if x[1].rank in one.incident.ranks]
        return _after_last_mark(one, own or stalls)
    if step_times:
        num = step_times[0][1].num_iterations
        length_s = math.ceil(num / 2) * step_times[0][1].iteration_s
        return FaultStart("at least", length_s, f"not known: of the last {num} iterations at least "
                          "half were too slow")
    if "HealthChanged" in kinds:
        return FaultStart("unknown", why="not known: before its check ran; checks run periodically")
    if NCCL_TIMEOUT in {one.incident.status, *(getattr(x.body, "status", "") for x in first)}:
        return FaultStart("unknown", why="not known: a collective waited until its timeout, for "
                          "what had happened before")
    if kinds == {"DeadlineReached"}:
        return FaultStart("unknown", why="not known: only a missed deadline shows it")
    return FaultStart()


def _after_last_mark(one: IncidentHistory, stalls: list[tuple[float, RankStalled]]) -> FaultStart:
    """The fault began after the last progress mark of the stalled rank."""
    at_s, stall = min(stalls, key=lambda x: x[0] - max(x[1].in_s, 0.0))
    length_s = max(one.detected_s - (at_s - max(stall.in_s, 0.0)), 0.0)
    return FaultStart("at most", length_s, f"after the last sign of {ranks([stall.rank])}, "
                 f"{span(length_s)} before the report; the exact time is not known")
