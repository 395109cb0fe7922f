"""What the screens say of slow ranks: whom they hold up, what that costs, what is to be typed."""

from __future__ import annotations

from typing import Any

from .figures import command, number_of

Plain = dict[str, Any]


def degraded_news(node: Plain, names: dict[int, str], option: str) -> list[str]:
    """A line for a node that is degraded, with its price; none for another."""
    told: Plain | None = node["degraded"]
    if told is None or node["contact"] != "heard" or node["drained"]:
        return []
    return [f"{node['id']} {_what(told, names)}; {_worth(node['id'], told, option)}"]


def node_degraded(node: Plain, names: dict[int, str], option: str) -> str:
    """The same for the nodes' screen, with the reason; empty for another node."""
    told: Plain | None = node["degraded"]
    if told is None or node["contact"] != "heard" or node["drained"]:
        return ""
    return f"{told['why']}; {_worth(node['id'], told, option)}"


def degraded_why(task: Plain, nodes: list[Plain]) -> str:
    """Which ranks hold up the others, the worst first, and what their nodes say."""
    slow = sorted(task["slow"], key=lambda one: -float(one["holds_up"]))
    num = sum(one["state"] == "member" for one in task["ranks"]) - 1
    words = [f"rank {one['rank']} ({one['node']}/{one['slot']}) holds up "
             f"{number_of(num, 'other')}, {one['holds_up']:.3g} x" for one in slow]
    return f"{'; '.join(words)}. Told, not acted on: below 3 x"


def slow_nodes(task: Plain) -> list[str]:
    """The node of the rank that costs most, where one does."""
    slow = sorted(task["slow"], key=lambda one: -float(one["holds_up"]))
    return [str(slow[0]["node"])] if slow and task["state"] == "degraded" else []


def _what(told: Plain, names: dict[int, str]) -> str:
    slower = ", ".join(f"{names.get(task, '?')} {ratio:.3g} x slower"
                       for task, ratio in zip(told["tasks"], told["ratios"], strict=True))
    return f"is degraded, {slower}" if slower else f"is degraded: {told['why']}"


def _worth(node: str, told: Plain, option: str) -> str:
    share, plan = 100 * told["drain_share"], command(f"unicron plan --without {node}{option}")
    if share < 0:
        return f"draining it would cost {-share:.2g} % more than it does: {plan}"
    return f"draining it earns {share:.2g} %: {plan}"
