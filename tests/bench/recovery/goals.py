"""The goals of the recovery bench, most of them ratios of what one run measured."""

from __future__ import annotations

from collections.abc import Sequence

from bench.recovery.bare_torch import LAYOUTS, NAME
from bench.recovery.rows import Row

METRIC = "fault_to_step_s"
OVER_FLOOR, OVER_US = "over_bare_torch", "fastest_peer_over_it"
FLOOR_TIMES_MAX = 3.0
PEER_TIMES_MIN = 4.0
PEERS_CASE = "dp4_sigkill"
"""The case of a killed rank that the peers take part in."""
STOPPED_S_MAX = 2.3
"""The limit for a stopped rank is 2 s, by the policy's `stopped_s_max`."""
OVERHEADS_MAX = {"overhead": 1.01, "overhead_copies": 1.03}


def ratios(rows: Sequence[Row]) -> list[Row]:
    """In each case of a killed rank: every system over `bare_torch`, and the fastest peer over us.
    A ratio of which one side was not measured is None, with the reason."""
    found: list[Row] = []
    for case in LAYOUTS:
        times = {row.system: row for row in rows if (row.case, row.metric) == (case, METRIC)}
        for system in times:
            if system != NAME:
                found.append(_ratio(case, system, OVER_FLOOR, times[system], times.get(NAME)))
        if case == PEERS_CASE and "unicron" in times:
            ours = times["unicron"]
            peers = [
                row
                for row in times.values()
                if row.value is not None and row.system not in ("unicron", NAME)
            ]
            fastest = min(peers, key=lambda row: row.value or 0.0, default=None)
            note = f"the fastest peer: {fastest.system}" if fastest else "no peer recovered"
            found.append(_ratio(case, "unicron", OVER_US, fastest, ours, note))
    return found


def _ratio(
    case: str, system: str, metric: str, above: Row | None, below: Row | None, note: str = ""
) -> Row:
    if above is None or above.value is None or below is None or not below.value:
        missing = "bare_torch" if metric == OVER_FLOOR and below is None else METRIC
        return Row(case, system, metric, None, "ratio", 0, note or f"{missing} was not measured")
    num = min(above.n, below.n)
    return Row(case, system, metric, above.value / below.value, "ratio", num, note)


def held_to(rows: Sequence[Row]) -> list[str]:
    """Each measured value beside its goal; what was asked for and not measured says so."""
    lines: list[str] = []

    def goal(row: Row, wanted: float, *, at_least: bool = False) -> None:
        aim = f"goal {'at least' if at_least else 'at most'} {wanted:g}"
        if row.value is None:
            lines.append(f"UNKNOWN {row.case} {row.system} {row.metric}: not measured, {aim}")
            return
        is_held = row.value >= wanted if at_least else row.value <= wanted
        lines.append(
            f"{'holds ' if is_held else 'BROKEN'}  {row.case} {row.system} {row.metric}: "
            f"{row.value:.4g}, {aim}"
            + (f"; {row.note}" if row.metric == OVER_US and row.note else "")
        )

    for row in rows:
        if not row.system.startswith("unicron"):
            continue
        if row.metric == OVER_FLOOR:
            goal(row, FLOOR_TIMES_MAX)
        elif row.metric == OVER_US:
            goal(row, PEER_TIMES_MIN, at_least=True)
        elif (row.case, row.metric) == ("dp4_sigstop", METRIC):
            goal(row, STOPPED_S_MAX)
        elif row.case in LAYOUTS and row.metric == "loss_equal":
            goal(row, 1.0, at_least=True)
        elif row.case in LAYOUTS and row.metric == "iterations_lost":
            if row.system != "unicron_sharded":  # only a copy has the lost shard
                goal(row, 0.0)
        elif row.case in OVERHEADS_MAX and row.metric == "iteration_ratio":
            goal(row, OVERHEADS_MAX[row.case])
    return lines
