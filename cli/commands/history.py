"""`history`: by day, what slots were used for and lost to."""

from ..cluster.client import DRY_RUN_S_MAX, Urls
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain, count, labelled, number_of, rfc3339, scaled, table
from .offline import connect_to_read


def history(state: StateDir, url: Urls, *, since: float | None, as_json: bool) -> None:
    """Print the history of whole days, from that of `since` on."""
    found: Plain = connect_to_read(state, url).get(
        "/v1/history", DRY_RUN_S_MAX, since=rfc3339(since or 0.0)
    )
    console.show(found, screen(found), as_json=as_json)


def screen(found: Plain) -> list[str]:
    """The answer of GET /v1/history as text."""
    total = found["total"]
    if not found["days"]:
        return ["no records of these days"]
    causes = [cause for cause, slot_s in total["lost_slot_s"].items() if slot_s]
    rows = [
        [
            f"{one['day'] or 'total'}{' (no records)' * (not one['records'])}",
            *(_hours(one[f"{what}slot_s"]) for what in ("", "used_", "idle_")),
            _hours(sum(one["lost_slot_s"].values())),
            *(_hours(one["lost_slot_s"][cause]) for cause in causes),
            count(sum(one["incidents"].values())),
        ]
        for one in [*found["days"], total]
    ]
    return [
        *table(
            ("DAY", "SLOT-H", "USED", "IDLE", "LOST", *map(str.upper, causes), "INCIDENTS"),
            rows,
            right=range(1, 6 + len(causes)),
        ),
        "",
        *_totals(total),
    ]


def _hours(slot_s: float) -> str:
    hours = slot_s / 3600
    return "<0.001" if 0 < hours < 0.001 else f"{hours:.3g}" if hours < 1000 else f"{hours:,.0f}"


def _totals(total: Plain) -> list[str]:
    lost_s, faults = sum(total["lost_slot_s"].values()), total["faults"]
    mtbf_s = total["mtbf_slot_s"]
    share = f" ({100 * lost_s / total['slot_s']:.1f} %)" if total["slot_s"] else ""
    mtbf = f"{_hours(mtbf_s)} hours of one slot; " if faults and mtbf_s is not None else ""
    incidents = ", ".join(f"{what} {count(num)}" for what, num in total["incidents"].items())
    return [
        *labelled(
            "lost",
            f"{_hours(lost_s)} of {_hours(total['slot_s'])} slot hours{share}, in "
            "whole days of UTC; a slot is a GPU, or a share of a CPU node",
        ),
        *labelled("incidents", incidents or "none"),
        *labelled("MTBF", f"{mtbf}{number_of(faults, 'fault')}, without injected ones"),
        *labelled(
            "WAF",
            f"earned {scaled(total['earned_flop'], 'FLOP')}, weighted, measured; the "
            f"plans expected {scaled(total['planned_flop'], 'FLOP')}, by throughput that is "
            "declared or modelled until it is measured",
        ),
    ]
