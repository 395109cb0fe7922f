"""The limits of what a rank may report: kinds, identity, values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from msgspec import Struct

from ....events.records import reports
from ....events.records.orders import StartRank
from ...ipc.pipe_protocol import Frame

KINDS = (
    reports.RankReady, reports.RankErrored, reports.CollectiveFailed, reports.Quiesced,
    reports.Reconfigured, reports.ReconfigureFailed, reports.TaskProgressed, reports.LossNotFinite,
    reports.MemoryCheckpointStored, reports.CheckpointSaved, reports.RankFinished,
    reports.InMemoryRecoveryDeclined)
"""The record kinds that a rank may send through its pipe."""
IDENTITY = ("task", "rank", "attempt")
NUMBER_MIN, NUMBER_END = -1, 1 << 53
"""Bounds of every integer of a report; -1: no value, as the step version without a state."""
AGE_S_MAX = 60.0
"""How long before its arrival a report may have occurred. Agent and rank read the same clock."""


class ReportLimits:
    """The limits of one attempt of a rank. `clock` gives seconds since 1970."""

    def __init__(self, order: StartRank, clock: Callable[[], float]) -> None:
        self._order = order
        self._clock = clock

    def violation(self, frame: Frame) -> str:
        """Why the rank must not send this report; "" if it may."""
        body, kind = frame.body, type(frame.body).__name__
        if not isinstance(body, KINDS):
            return f"a rank must not send {kind}"
        for name in IDENTITY:
            own = getattr(self._order, name)
            if (value := getattr(body, name, own)) != own:
                return f"{kind} of {name} {value} by {name} {own}"
        if not math.isfinite(frame.at_s):
            return f"{kind} at time {frame.at_s}"
        where = _out_of_range(body)
        return f"{kind}{where}" if where else ""

    def occurred_s(self, at_s: float) -> float:
        """The time of a report. The agent's own time limits the rank's: a report is not from the
        future, and is at most AGE_S_MAX old. 0: the rank gives no time."""
        now_s = self._clock()
        return min(max(at_s, now_s - AGE_S_MAX), now_s) if at_s else now_s


def _out_of_range(value: object) -> str:
    """The path of the first integer that is out of range, "" if there is none."""
    if isinstance(value, int):
        return "" if NUMBER_MIN <= value < NUMBER_END else f" is {value}"
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            if where := _out_of_range(getattr(value, name)):
                return f".{name}{where}"
    elif isinstance(value, tuple):
        for index, item in enumerate(cast("tuple[object, ...]", value)):
            if where := _out_of_range(item):
                return f"[{index}]{where}"
    return ""
