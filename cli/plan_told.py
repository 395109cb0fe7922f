"""A plan in plain data: what each task gets, earns and pays, what was beaten, what binds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..control_plane import knapsack
from ..control_plane.explain import cost_flop, objective_flop
from ..control_plane.foreseen import Foreseen, after
from ..control_plane.plan_words import percent
from ..control_plane.planner import Choice, gains
from ..control_plane.wishes import PlanInput, waf_of
from .figures import count, number_of, scaled

Plain = dict[str, Any]
NAMED_NUM_MAX = 3
"""Tasks that one sentence names."""


def told(asked: PlanInput, choice: Choice, *, more: int) -> Plain:
    """All that `unicron plan` tells of a plan. `more`: the GPUs whose gain is told beside it."""
    slots = choice.plan.slots
    worth = objective_flop(asked, slots)
    tasks: Plain = {}
    for wish, x in zip(asked.wishes, slots, strict=True):
        tasks[wish.name] = {
            "current": wish.now, "gpus": x, "faulted": wish.hurt,
            "waf_before": waf_of(wish, wish.now), "waf": waf_of(wish, x),
            "earned": waf_of(wish, x) * asked.running_s, "transition": cost_flop(wish, x)}
    others = sorted((_alternative(asked, choice, other, worth) for other in choice.alternatives),
                    key=lambda other: other["loses"])
    found: Plain = {
        "allocation": {wish.name: x for wish, x in zip(asked.wishes, slots, strict=True)},
        "objective": worth, "reason": "", "waf": choice.plan.waf,
        "waf_before": math.fsum(waf_of(wish, wish.now) for wish in asked.wishes),
        "transition": math.fsum(task["transition"] for task in tasks.values()),
        "gpus": asked.num_slots, "used": sum(slots), "running_s": asked.running_s,
        "binding": _binding(asked, choice, worth, more), "tasks": tasks, "alternatives": others}
    found["reason"] = _reason(found)
    return found


def _alternative(asked: PlanInput, choice: Choice, other: Any, worth: float) -> Plain:
    """A plan that was beaten; `loses` is never below 0: what is rounded differently is equal."""
    slots = [x for _, x in other.slots]
    its = objective_flop(asked, slots)
    changed = {wish.name: x for wish, x, ours in
               zip(asked.wishes, slots, choice.plan.slots, strict=True) if x != ours}
    return {"what": other.what, "objective": its, "loses": max(worth - its, 0.0),
            "waf": other.waf, "instead": changed}


def _binding(asked: PlanInput, choice: Choice, worth: float, more: int) -> Plain:
    """What would be earned with more GPUs (D_running as it is), and who has its largest size."""
    rows = gains(asked)
    found = knapsack.best(rows, asked.num_slots + more)
    gain = max(objective_flop(asked, found[0]) - worth, 0.0) if found is not None else 0.0
    full = [wish.name for wish, x in zip(asked.wishes, choice.plan.slots, strict=True)
            if wish.sizes and x == wish.sizes[-1]]
    return {"gpus": gain > 0, "more_gpus": more, "more_earn_waf": gain / asked.running_s,
            "at_largest": full}


def foretold(known: Foreseen) -> Iterator[Plain]:
    """Every event of the table, and the plan that it would be answered with."""
    names = {wish.task: wish.name for wish in known.asked.wishes}
    for event, outlook in known.outlooks.items():
        then = after(known.asked, event, known.gpus_per_node)
        slots = outlook.plan[0]
        allocation = {wish.name: x for wish, x in zip(then.wishes, slots, strict=True)}
        yield {"event": event.what, "task": names.get(event.task, ""), "gpus": then.num_slots,
               "allocation": allocation, "objective": objective_flop(then, slots),
               "moves": moves({"tasks": {wish.name: {"current": wish.now, "gpus": x,
                                                     "faulted": False}
                                         for wish, x in zip(then.wishes, slots, strict=True)}})}


def _reason(found: Plain) -> str:
    """One sentence: what moves, what binds, and by how much the next plan is worse."""
    return f"{moves(found)}; {binds(found)}; {runner_up(found)}"


def moves(found: Plain) -> str:
    """Who changes, those who give first: `a 32 -> 24, b 16 -> 24`."""
    changed = [(name, task) for name, task in found["tasks"].items()
               if task["gpus"] != task["current"]]
    changed.sort(key=lambda one: one[1]["gpus"] > one[1]["current"])
    hurt = [name for name, task in found["tasks"].items()
            if task["faulted"] and task["gpus"] == task["current"] > 0]
    words = [f"{name} {task['current']} -> {task['gpus']}" for name, task in changed]
    words += [f"{name}, which was hurt, stays on {found['tasks'][name]['gpus']}" for name in hurt]
    if not words:
        return "nothing moves"
    if len(words) > NAMED_NUM_MAX + 1:
        left = len(words) - NAMED_NUM_MAX
        words = [*words[:NAMED_NUM_MAX], f"{count(left)} others"]
    return ", ".join(words)


def binds(found: Plain) -> str:
    """`the 120 GPUs bind: 8 more would earn 2.1 PFLOP/s`."""
    binding, num = found["binding"], found["gpus"]
    if binding["gpus"]:
        return (f"{count(num)} GPUs bind: {binding['more_gpus']} more would earn "
                f"{scaled(binding['more_earn_waf'], 'FLOP/s')}")
    idle = num - found["used"]
    return (f"no GPU is lacking, {count(idle)} idle" if idle
            else f"{number_of(binding['more_gpus'], 'GPU')} more would earn nothing")


def runner_up(found: Plain) -> str:
    """`the next best plan earns 0.8 % less`."""
    if not found["alternatives"]:
        return "there is no other plan"
    other = found["alternatives"][0]
    return f"the runner-up ({other['what']}) {loses(found, other)}"


def loses(found: Plain, other: Plain) -> str:
    """By how much a plan that was beaten is worse."""
    if other["loses"] == 0:
        return "is worth as much"
    share = other["loses"] / found["objective"] if found["objective"] > 0 else 0.0
    return f"loses {scaled(other['loses'], 'FLOP')}" + (f" ({percent(share)})" if share else "")
