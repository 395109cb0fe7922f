"""Plans as a person reads them: what binds one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .figures import number_of

Plain = dict[str, Any]
NAMED_NUM_MAX = 3


def bound_by(plan: Plain, names: Mapping[int, str]) -> str:
    """What keeps a plan (PlanChosen) from earning more; empty where the log does not tell."""
    whose = [names.get(task, f"task {task}") for task in plan.get("bound_tasks", ())]
    more = f" and {len(whose) - NAMED_NUM_MAX} more" if len(whose) > NAMED_NUM_MAX else ""
    of = f"{', '.join(whose[:NAMED_NUM_MAX])}{more}"
    return {"slots": number_of(plan["num_slots"], "slot"), "max": f"the max of {of}",
            "min": f"the min of {of}", "gain_min": "gain_min", "nothing": "nothing"}.get(
                plan.get("bound", ""), "")
