"""What the screens say of nodes that a check calls ill, with how they come back."""

from __future__ import annotations

from typing import Any

from .figures import rfc3339, span

Plain = dict[str, Any]


def recovers(node: Plain) -> str:
    """Since no check calls it ill any more: from when on its slots are used; else empty."""
    told: Plain | None = node["recovers"]
    if told is None or told["from_s"] is None:
        return ""
    found = told["slots"]
    which = ("its slots are" if len(found) == node["num_slots"] else
             f"its slot{'s' * (len(found) > 1)} {' '.join(map(str, found))} "
             + ("are" if len(found) > 1 else "is"))
    word = "healthy again" if node["health"] == "healthy" else "no longer unhealthy"
    return (f"{word}, {which} used from {rfc3339(told['from_s'])[11:19]}Z "
            f"({span(told['after_s'])} without a complaint)")


def sick_why(node: Plain) -> str:
    """What its checks call unhealthy, and how it comes back; empty where none does."""
    if not any(one["health"] == "unhealthy" for one in node["checks"]):
        return ""
    told: Plain | None = node["recovers"]
    back = (f": repair it; its slots are used again {span(told['after_s'])} after the check says "
            "healthy" if told is not None else "")
    return f"{node['sick_why']}{back}"


def why_unhealthy(node: Plain) -> str:
    """What its checks say, and what came of it; those that say degraded or unknown too."""
    words = [sick_why(node)] if sick_why(node) else []
    words += [f"{one['check']} {one['health']}: {one['why']}" for one in node["checks"]
              if one["health"] != "unhealthy"]
    return "; ".join(words)
