"""GET /v1/history: what slots were used for and lost to, by UTC day."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from math import fsum

from msgspec import Struct

from ...events.errors import UsageError
from ..history.usage import CAUSES, USES, Figures, Usage
from .moments import time_s


class HistoryDay(Struct, kw_only=True):
    """Figures of a day, or of all. Slot seconds; a slot is a GPU, or a share of a CPU node.
    `earned_flop` and so on are weighted: the WAF times its seconds."""

    day: str = ""
    """For example 2026-11-27, of UTC."""
    records: int
    """Of the log on that day; 0: it has none."""
    slot_s: float
    used_slot_s: float
    idle_slot_s: float
    lost_slot_s: dict[str, float]
    """By cause."""
    earned_flop: float
    """Of iterations that were finished for the first time."""
    planned_flop: float
    """By the plans' throughput: declared, modelled or measured; not of commands without a model."""
    ideal_flop: float
    """Of the best plan on all slots of all nodes, as the planner rates tasks."""
    incidents: dict[str, int]
    """By severity and status, as they were opened."""
    faults: int
    """Incidents that count for the MTBF: not those that were injected, or of wrong input."""
    mtbf_slot_s: float | None
    """Slot time of processes while a leader was there, over `faults`; None: no fault."""


class History(Struct, kw_only=True):
    """Figures of whole UTC days."""

    days: list[HistoryDay]
    total: HistoryDay


def first_day(query: Mapping[str, str]) -> int:
    """Read `since` (a time) as a day since 1970. Raises UsageError."""
    since = query.get("since", "1970-01-01")
    at_s = time_s(since)
    if at_s is None:
        raise UsageError(f"since: {since[:40]!r} is not a time", "since=2026-11-27T02:10:00Z")
    if at_s > time.time() + 1.0:
        raise UsageError(f"since: {since[:40]} is in the future", "give a past time")
    return int(at_s // 86400)


def answer(usage: Usage, first: int) -> History:
    """The figures of the days from `first` on that the log has."""
    days = {day: figures for day, figures in usage.days.items() if day >= first}
    return History(
        total=_row(days.values()),
        days=[
            _row([days.get(day, {})], day=f"{datetime.fromtimestamp(day * 86400, UTC):%Y-%m-%d}")
            for day in range(min(days, default=0), max(days, default=-1) + 1)
        ],
    )


def _row(parts: Iterable[Figures], day: str = "") -> HistoryDay:
    """The sum of the figures."""
    total = defaultdict[str, float](float)
    for figures in parts:
        for what, value in figures.items():
            total[what] += value
    slot_s = {what: total[what] / 1e6 for what in USES}
    faults = int(total["faults"])
    return HistoryDay(
        day=day,
        records=int(total["records"]),
        slot_s=fsum(slot_s.values()),
        used_slot_s=slot_s["used"],
        idle_slot_s=slot_s["idle"],
        lost_slot_s={what: slot_s[what] for what in CAUSES},
        earned_flop=total["earned"],
        planned_flop=total["planned"],
        ideal_flop=total["ideal"],
        incidents={
            what.partition(" ")[2]: int(num)
            for what, num in sorted(total.items())
            if what.startswith("incident ")
        },
        faults=faults,
        mtbf_slot_s=total["observed"] / 1e6 / faults if faults else None,
    )
