"""What the screens say of slots that are out: why, who would have them, how they come back."""

from __future__ import annotations

from typing import Any

Plain = dict[str, Any]
WANTED_NUM_MAX = 3


def slots_out(node: Plain) -> list[int]:
    """Slots that are out until the agent joins again: not those that a check has taken out."""
    sick: list[int] = node["recovers"]["slots"] if node["recovers"] else []
    return [slot["index"] for slot in node["slots"] if slot["out"] and slot["index"] not in sick]


def named(found: list[int]) -> str:
    return f"slot{'s' * (len(found) > 1)} {' '.join(map(str, found))}"


def why_out(node: Plain) -> str:
    """What is wrong with them, and what a person is to do; empty where none is out."""
    found = slots_out(node)
    if not found:
        return ""
    whys = dict.fromkeys(slot["out_why"] for slot in node["slots"]
                         if slot["index"] in found and slot["out_why"])
    why = f" ({'; '.join(whys)})" if whys else ""
    return (f"{named(found)} out{why}: repair, then start its agent again "
            f"(under unicron up: kill {node['pid']})")


def wanted(tasks: list[Plain]) -> str:
    """Which tasks would have slots that are out: those that wait for some, else those that run on
    fewer than they may have."""
    found = [f"{task['name']} waits for slots" for task in tasks
             if task["state"] == "waiting" and task["why"] == "not enough slots"]
    found = found or [f"{task['name']} runs on {task['slots']['target']} of "
                      f"{task['slots']['max']}" for task in tasks
                      if 0 < task["slots"]["target"] < task["slots"]["max"]]
    more = f" and {len(found) - WANTED_NUM_MAX} more" if len(found) > WANTED_NUM_MAX else ""
    return f"{', '.join(found[:WANTED_NUM_MAX])}{more}"
