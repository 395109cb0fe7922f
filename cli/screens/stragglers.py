"""Stragglers on the screens: the tasks they slow, the cost, and the command to drain them."""

from ...control_plane.api.needs import worth_draining
from ...control_plane.incidents.stragglers import FAULT_RATIO
from ...control_plane.planner.alternative_names import percent
from ..terminal.format import Plain, acts, labelled, number_of, scaled


def node_degraded(node: Plain, option: str) -> str:
    """Why a node is degraded, and what draining it would gain; for the screen of the nodes."""
    degraded: Plain | None = node["degraded"]
    if degraded is None or node["contact"] != "heard" or node["drained"]:
        return ""
    return f"{degraded['why']}; {acts(worth_draining(node), option)}"


def degraded_why(task: Plain, healing: str) -> str:
    """The ranks that slow the others, the worst first, and why Unicron does not act."""
    slow = sorted(task["slow"], key=lambda one: -float(one["holds_up"]))
    num = sum(one["state"] == "member" for one in task["ranks"]) - len(slow)
    together = " together" if len(slow) > 1 else ""
    words = [
        f"rank {one['rank']} ({one['node']}/{one['slot']}) holds up "
        f"{number_of(num, 'other')}{together}, {one['holds_up']:.3g} x"
        for one in slow
    ]
    return f"{'; '.join(words)}. {_undone(slow, healing)}"


def _undone(slow: list[Plain], healing: str) -> str:
    """Why Unicron does not act; the rule is in control_plane/incidents/stragglers.py."""
    beyond = [one for one in slow if float(one["holds_up"]) > FAULT_RATIO]
    if not beyond:
        return f"Reported, not acted on: below {FAULT_RATIO:g} x"
    if not any(one["confirmed"] for one in beyond):
        return (
            f"Above {FAULT_RATIO:g} x, not acted on: no other process has confirmed yet that "
            "its iterations take as long"
        )
    return f"Above {FAULT_RATIO:g} x: " + (
        "it is about to start again" if healing == "on" else f"not acted on, healing is {healing}"
    )


def alike_why(task: Plain) -> str:
    """A line for a task whose ranks are all equally slower than before; else empty."""
    if task["slower_alike"] <= 1:
        return ""
    return (
        f"all ranks alike, {task['slower_alike']:.3g} x slower than it was: the machines, the "
        "network or the job"
    )


def slow_nodes(task: Plain, nodes: list[Plain]) -> list[str]:
    """The node of the rank that slows the others most, if the node is worth draining."""
    slow = sorted(task["slow"], key=lambda one: -float(one["holds_up"]))
    worth = [
        node["id"] for node in nodes if node["degraded"] and node["degraded"]["worth_draining"]
    ]
    return [
        str(one["node"]) for one in slow[:1] if task["state"] == "degraded" and one["node"] in worth
    ]


def degraded_lines(found: Plain) -> list[str]:
    """For a dry run: what degraded nodes cost now. The plan's tables do not contain this cost."""
    names = {one["task"]: one["name"] for one in found["tasks"]}
    lines: list[str] = []
    for one in found["degraded"]:
        slows = ", ".join(
            f"{names.get(task, '?')} {ratio:.3g} x"
            for task, ratio in zip(one["tasks"], one["ratios"], strict=True)
        )
        gain, now = one["drain_waf"], one["now_waf"]
        share = f" ({percent(abs(gain) / now)})" if gain and now > 0 else ""
        earns = (
            f"{scaled(abs(gain), 'FLOP/s')} {'more' if gain > 0 else 'less'} than it "
            f"achieves now{share}"
            if gain
            else "as much as it achieves now"
        )
        alone = " alone" if len(found["degraded"]) > 1 else ""
        lines += labelled(
            "degraded",
            f"{one['node']} slows {slows} now: without it{alone} the cluster earns {earns}",
        )
    return lines
