"""What the screens say of quarantined nodes, with what a person may do."""

from __future__ import annotations

from typing import Any

from .figures import command, rfc3339

Plain = dict[str, Any]


def until(node: Plain) -> str:
    """`quarantined to 2026-11-21 01:14Z`; empty where it is not."""
    kept: Plain | None = node.get("quarantine")
    return f"quarantined to {rfc3339(kept['until_s'])[:16].replace('T', ' ')}Z" if kept else ""


def why_quarantined(node: Plain, option: str = "") -> str:
    """Why it gets no tasks, by which incidents, and how to end that; empty where it does."""
    kept: Plain | None = node.get("quarantine")
    if not kept or node["contact"] == "lost":  # of a lost one node_trouble tells it all
        return ""
    lift = command(f"unicron lift {node['id']}{option}")
    return f"{quarantine(node)}: repair it, then {lift}"


def quarantine(node: Plain) -> str:
    """Until when it is quarantined, why, by which incidents."""
    kept: Plain = node["quarantine"]
    which = " ".join(f"inc-{number}" for number in kept["incidents"])
    return f"{until(node)}: {kept['why']} ({which})"
