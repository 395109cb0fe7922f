"""Since when a fault lasted, as far as its first evidence tells: seldom to the moment."""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec import Struct

from ..events.statuses import NCCL_TIMEOUT
from .figures import ranks, span
from .history import IncidentHistory

Plain = dict[str, Any]
TO_THE_MOMENT = frozenset({"RankExited", "RankErrored", "RankSuspended", "DeviceErred",
                           "NodeSilenced", "NodeJoined", "NodeLeft"})
"""Kinds that tell when what they tell of happened, or since when (NodeSilenced)."""


class Began(Struct, frozen=True):
    """How long before `detected_s` the fault began: `at most`, `at least`, not known, or exactly.
    """

    bound: Literal["", "at most", "at least", "unknown"] = ""
    length_s: float = 0.0
    """Of a bound."""
    why: str = ""


def began(one: IncidentHistory, evidence: list[Plain]) -> Began:
    """By what the incident was opened for."""
    first = [x for x in evidence if x["seq"] < one.id]
    kinds = {x["kind"] for x in first}
    if kinds & TO_THE_MOMENT or not first:
        return Began()
    paced = [x for x in first if x["kind"] == "RankPaced"]
    crawls = [x for x in paced if x["body"]["num_iterations"] == 1]
    if crawls:  # an iteration that has not ended, though the rank passes marks
        since_s = min(x["at_s"] - max(x["body"]["iteration_s"], 0.0) for x in crawls)
        length_s = max(one.detected_s - since_s, 0.0)
        return Began("at most", length_s, f"after that iteration began, {span(length_s)} before "
                     "it was told; the moment itself is not known")
    stalls = [x for x in first if x["kind"] == "RankStalled"]
    if stalls:
        return _after_a_mark(one, [x for x in stalls if x["body"]["rank"] in one.ranks] or stalls)
    if paced:
        num = int(paced[0]["body"]["num_iterations"])
        length_s = math.ceil(num / 2) * float(paced[0]["body"]["iteration_s"])
        return Began("at least", length_s, f"not known: of the last {num} iterations at least half "
                     "were too slow, and that tells it")
    if "HealthChanged" in kinds:
        return Began("unknown", 0.0, "not known: before its check ran, which it does from time to "
                     "time")
    if NCCL_TIMEOUT in {one.status, *(x["body"].get("status") for x in first)}:
        return Began("unknown", 0.0, "not known: a collective waited until its timeout, for what "
                     "had happened before")
    if kinds == {"DeadlineReached"}:
        return Began("unknown", 0.0, "not known: nothing but that it is overdue shows it")
    return Began()


def _after_a_mark(one: IncidentHistory, stalls: list[Plain]) -> Began:
    """It passed that mark, and no other; what happened between nobody saw."""
    since_s, seq = min((x["at_s"] - max(x["body"]["in_s"], 0.0), x["seq"]) for x in stalls)
    length_s = max(one.detected_s - since_s, 0.0)
    (who,) = (x["body"]["rank"] for x in stalls if x["seq"] == seq)
    return Began("at most", length_s, f"after the last sign of {ranks([who])}, {span(length_s)} "
                 "before it was told; the moment itself is not known")
