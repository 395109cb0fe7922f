"""The limits of what a rank may report: kinds, identity, values, size, rate."""

import math
from collections import Counter
from collections.abc import Callable
from typing import cast

from msgspec import Struct

from ....events.records import reports
from ....events.records.orders import StartRank
from ...ipc.pipe_protocol import FRAME_BYTES_MAX, Frame

KINDS = (
    reports.RankReady,
    reports.RankErrored,
    reports.CollectiveFailed,
    reports.Quiesced,
    reports.Reconfigured,
    reports.ReconfigureFailed,
    reports.TaskProgressed,
    reports.LossNotFinite,
    reports.LossFiniteAgain,
    reports.MemoryCheckpointStored,
    reports.CheckpointSaved,
    reports.CheckpointFailed,
    reports.RankFinished,
    reports.InMemoryRecoveryDeclined,
)
"""The record kinds that a rank may send through its pipe."""
IDENTITY = ("task", "rank", "attempt")
NUMBER_MIN, NUMBER_END = -1, 1 << 53
"""Bounds of every integer of a report; -1: no value, as the step version without a state."""
AGE_S_MAX = 60.0
"""How long before its arrival a report may have occurred. Agent and rank read the same clock."""
REPORT_BYTES_MAX, MICRO_BATCH_BYTES = 64 << 10, 12
"""The size of a report. Quiesced and Reconfigured name micro-batches of the task, up to two times,
in up to 5 bytes each: they get more for each."""
BURST_NUM, REPORTS_PER_S = 100, 5.0
"""The rate of one kind of report of one rank: a token bucket. A rank reports progress once a
second, and anything else when it changes. Each kind has its own bucket, so that a flood of progress
takes no place from the report of an error."""
LARGEST_NUM = 10
"""Tokens that a report of the largest size takes; the smallest takes one."""
KEY_CHARS_MAX = 40
DROPPED_S = 10.0
"""Time between two reports of what was dropped."""


class ReportLimits:
    """The limits of one attempt of a rank. `clock` gives seconds since 1970."""

    def __init__(
        self, order: StartRank, clock: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self._order = order
        self._clock = clock
        self._monotonic = monotonic
        training = order.spec.training
        num_micro_batches = training.num_micro_batches if training is not None else 0
        self.bytes_max = min(
            REPORT_BYTES_MAX + MICRO_BATCH_BYTES * num_micro_batches, FRAME_BYTES_MAX
        )
        self._buckets: dict[str, tuple[float, float]] = {}
        """By kind: the tokens, and when they were counted."""
        self._dropped: Counter[str] = Counter()
        self._dropped_since = 0.0

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

    def admits(self, frame: Frame) -> bool:
        """Whether the rate allows this frame. If not, it is counted as dropped."""
        kind, now_s = type(frame.body).__name__, self._monotonic()
        tokens, counted_s = self._buckets.get(kind, (BURST_NUM, now_s))
        tokens = min(BURST_NUM, tokens + REPORTS_PER_S * (now_s - counted_s))
        price = 1 + (LARGEST_NUM - 1) * frame.num_bytes // self.bytes_max
        is_admitted = tokens >= price
        self._buckets[kind] = (tokens - price if is_admitted else tokens), now_s
        if not is_admitted:
            if not self._dropped:
                self._dropped_since = now_s
            self._dropped[kind] += 1
        return is_admitted

    def take_dropped(self, *, is_last: bool = False) -> reports.RankReportsDropped | None:
        """The report of what was dropped, once in DROPPED_S and at the last call; or None."""
        if not self._dropped or not (
            is_last or self._monotonic() >= self._dropped_since + DROPPED_S
        ):
            return None
        order, dropped = self._order, self._dropped
        self._dropped = Counter()
        return reports.RankReportsDropped(
            task=order.task,
            rank=order.rank,
            attempt=order.attempt,
            num_dropped=dropped.total(),
            kinds=tuple(sorted(dropped)),
        )


def _out_of_range(value: object) -> str:
    """The path of the first integer that is out of range, "" if there is none."""
    if isinstance(value, int):
        return "" if NUMBER_MIN <= value < NUMBER_END else f" is {value}"
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            if where := _out_of_range(getattr(value, name)):
                return f".{name}{where}"
    elif isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            if where := _out_of_range(key) or _out_of_range(item):
                return f"[{str(key)[:KEY_CHARS_MAX]}]{where}"
    elif isinstance(value, tuple):
        for index, item in enumerate(cast("tuple[object, ...]", value)):
            if where := _out_of_range(item):
                return f"[{index}]{where}"
    return ""
