"""The orders that start, end or break one process, and whether they are due."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from ...events.records import decisions as d
from ...events.records import orders as o
from ...events.records.orders import StartRank, StopRank
from ...events.records.types import Body, Seat
from ..incidents.lifecycle import NUM_STOPS_MAX
from ..state.cluster import ClusterState, usable_slots
from ..state.task import Rank, Task
from ..throughput import table

PORT_FIRST = 20_000
NUM_PORTS = 10_000


def port(task: Task) -> int:
    """Where the processes of a command meet. It changes with each round: the last one's may still
    be held."""
    return PORT_FIRST + (task.id * 131 + task.rounds * 17) % NUM_PORTS if task.spec.command else 0


def start_rank(state: ClusterState, task: Task, seat: Seat, port: int) -> StartRank:
    """The order that starts the seat's next process."""
    spec = task.spec
    host = state.nodes[task.target[0].slot.node].host if spec.command else ""
    if task.declined:  # from now on it is a command as any other
        spec = replace(spec, heal=None)
    return StartRank(
        nodes=(seat.slot.node,), task=task.id, rank=seat.rank,
        attempt=task.attempts.get(seat.rank, 0) + 1, slot=seat.slot, spec=spec,
        num_seats=len(task.target), host=host, port=port,
        checkpoint=task.checkpoint.path if task.checkpoint is not None else "",
        incarnation=state.nodes[seat.slot.node].incarnation,
        axes=None if task.heals_in_memory else table.axes(
            task.spec, task.modelled, len(task.target)))


def stop_rank(task: Task, rank: Rank, grace_s: float, why: str) -> StopRank:
    """The order that ends one process."""
    return StopRank(nodes=(rank.slot.node,), task=task.id, rank=rank.rank, attempt=rank.attempt,
                    grace_s=grace_s, why=why)


def stop_pending(state: ClusterState, task: Task, rank: Rank) -> bool:
    """Whether another StopRank would be too early, or one too many."""
    armed = f"stop/{task.id}/{rank.rank}/{rank.attempt}" in state.deadlines
    return armed or len(rank.stop_orders) >= NUM_STOPS_MAX


def slot_free(state: ClusterState, seat: Seat) -> bool:
    """Whether the seat's slot can be started on now: its last process is reaped.

    Nothing starts on a drained node, also not for a task whose seats are yet to move.
    """
    node = state.nodes.get(seat.slot.node)
    return (node is not None and node.takes_tasks and seat.slot.index not in node.occupants
            and not node.is_out(seat.slot.index))


# --- Healing held: what would be ordered, in words, instead of the orders. ---


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
        yield d.OrderSuppressed(task=task.id, what=what, why=state.held)


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
