"""Healing held: what would be ordered, in words, instead of the orders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..events import orders as o
from ..events.reports import Body
from .state import ClusterState, Task, usable_slots


def withhold(state: ClusterState, task: Task, bodies: Iterable[Body]) -> Iterator[Body]:
    """Let decisions through; of the orders, and of what the plan would change, tell in words.

    `bodies` must not rely on the fold of the orders that it yields. Asked again in the same state
    this tells nothing.
    """
    words = _planned(state, task)
    for body in bodies:
        if isinstance(body, o.ORDERS):
            words.append(_in_words(body))
        else:
            yield body
    what = "; ".join(words)
    if what != task.withheld and not task.outcome:
        yield o.OrderWithheld(task=task.id, what=what, why=state.held)


def _planned(state: ClusterState, task: Task) -> list[str]:
    """What the last plan would change for this task."""
    given = [x.slots for x in state.plan.allocations if x.task == task.id] if state.plan else []
    num = len(task.target)
    words = [f"from {num} to {slots} slot{'s' * (slots != 1)}, by the plan"
             for slots in given if slots != num]
    usable = set(usable_slots(state))
    left = dict.fromkeys(seat.slot.node for seat in task.target if seat.slot not in usable
                         and state.nodes[seat.slot.node].health != "unreachable")
    return [*words, f"move off {' '.join(left)}"] if left else words


def _in_words(order: Body) -> str:
    match order:
        case o.StartRank():
            return f"start rank {order.rank} on {order.slot.node}/{order.slot.index}"
        case o.StopRank():
            return f"stop rank {order.rank}: {order.why}"
        case o.Quiesce():
            one = len(order.ranks) == 1
            who = f"rank{'s' * (not one)} {' '.join(map(str, order.ranks))} leave{'s' * one}"
            when = "at once" if order.mode == "now" else "at the iteration's end"
            return f"{who} generation {order.generation} {when} and rebuild{'s' * one}"
        case o.Reconfigure():
            ranks = " ".join(str(member.rank) for member in order.members)
            return f"generation {order.generation} of ranks {ranks}"
        case _:
            return type(order).__name__
