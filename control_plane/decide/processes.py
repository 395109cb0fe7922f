"""The orders that start or stop one process, and the conditions for them."""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from ...events.records import decisions as d
from ...events.records import orders as o
from ...events.records.orders import StartRank, StopRank
from ...events.records.types import Body, Seat
from ...events.spec.model import Axes
from ..fold.pauses import pause_name
from ..incidents.lifecycle import NUM_STOPS_MAX
from ..placement.usable_slots import reads
from ..state import limits
from ..state.cluster import ClusterState, allocatable_slots
from ..state.task import Rank, Task
from ..throughput import table
from .memory_checkpoints import recovery_sources

PORT_FIRST = 20_000
NUM_PORTS = 10_000


def rendezvous_port(task: Task) -> int:
    """A command's rendezvous port. It changes in each round, since the last may still be in use."""
    return PORT_FIRST + (task.id * 131 + task.rounds * 17) % NUM_PORTS if task.spec.command else 0


def start_rank(
    state: ClusterState,
    task: Task,
    seat: Seat,
    port: int,
    axes: Axes | None = None,
    place: int = -1,
) -> StartRank:
    """The order that starts the seat's next process, at position `place` of the layout `axes`."""
    spec = task.spec
    host = state.nodes[task.target[0].slot.node].host if spec.command else ""
    if task.declined and not (task.restarts_from_memory or task.may_adopt):
        # It is restarted as a plain command, without a pipe.
        spec = replace(spec, heal=None)
    return StartRank(
        nodes=(seat.slot.node,),
        task=task.id,
        rank=seat.rank,
        attempt=task.attempts.get(seat.rank, 0) + 1,
        slot=seat.slot,
        spec=spec,
        num_seats=len(task.target),
        host=host,
        port=port,
        checkpoint=task.checkpoint_path,
        incarnation=state.nodes[seat.slot.node].incarnation,
        axes=axes
        if task.heals_in_memory or task.may_adopt
        else table.axes(task.spec, task.modelled, len(task.target)),
        place=place,
        declined=task.declined if task.restarts_from_memory else "",
        copies=recovery_sources(state, task, ()) if task.restarts_from_memory else (),
        has_begun=task.generation > 0,
        first_iteration_s_max=state.policy.first_iteration_s_max,
        local_slots=_local_slots(task, seat),
        tell_s=limits.of(state.policy, "start_s_max").tell_s,
        restore_s_max=limits.restore_s_max(state.policy),
    )


def _local_slots(task: Task, seat: Seat) -> tuple[int, ...]:
    """The slots of the task on the seat's node, by rank."""
    seats = sorted({*task.target, seat}, key=lambda each: each.rank)
    return tuple(each.slot.index for each in seats if each.slot.node == seat.slot.node)


def stop_rank(
    task: Task, rank: Rank, grace_s: float, why: str, *, keeps_stacks: bool = False
) -> StopRank:
    """The order that ends a process. What it does is kept first (`keeps_stacks`) if it has timed
    out: its stacks say why. The second order to the same process does not wait again."""
    return StopRank(
        nodes=(rank.slot.node,),
        task=task.id,
        rank=rank.rank,
        attempt=rank.attempt,
        grace_s=grace_s,
        why=why,
        keeps_stacks=(keeps_stacks or bool(rank.timeout_reason)) and not rank.stop_orders,
    )


def stop_pending(state: ClusterState, task: Task, rank: Rank) -> bool:
    """True if another StopRank order would be too early, or one more than NUM_STOPS_MAX."""
    armed = f"stop/{task.id}/{rank.rank}/{rank.attempt}" in state.deadlines
    return armed or len(rank.stop_orders) >= NUM_STOPS_MAX


def may_start(state: ClusterState, task: Task, seat: Seat) -> bool:
    """True if a process can be started in the seat's slot: the log has room, no process occupies
    the slot any more, and no pause of the rank runs. On a drained node nothing is started, nor
    where the agent cannot read the order, even for tasks whose seats still have to move."""
    node = state.nodes.get(seat.slot.node)
    return (
        node is not None
        and not state.no_room
        and node.takes_tasks
        and seat.slot.index not in node.occupants
        and pause_name(task, seat.rank) not in state.deadlines
        and not node.is_disabled(seat.slot.index)
        and reads(node, task)
    )


# --- Healing paused: orders are suppressed and described ---
def suppress_orders(state: ClusterState, task: Task, bodies: Iterable[Body]) -> Iterator[Body]:
    """Yield the decisions among `bodies`, and one OrderSuppressed that describes the orders and the
    changes of the plan, unless it is in the log. The orders are never folded: no body may rely on
    one."""
    words = _plan_changes(state, task)
    for body in bodies:
        if isinstance(body, o.ORDERS):
            words.append(_in_words(body))
        else:
            yield body
    what = "; ".join(words)
    if what != task.withheld and not task.outcome:
        yield d.OrderSuppressed(task=task.id, what=what, why=state.held)


def _plan_changes(state: ClusterState, task: Task) -> list[str]:
    """The changes that the last plan has for this task, and the nodes that it has to leave."""
    given = [x.slots for x in state.plan.allocations if x.task == task.id] if state.plan else []
    num = len(task.target)
    words = [
        f"from {num} to {slots} slot{'s' * (slots != 1)}, by the plan"
        for slots in given
        if slots != num
    ]
    usable = set(allocatable_slots(state))
    left = dict.fromkeys(
        seat.slot.node
        for seat in task.target
        if seat.slot not in usable and state.nodes[seat.slot.node].health != "unreachable"
    )
    return [*words, f"move off {' '.join(left)}"] if left else words


def _in_words(order: Body) -> str:
    match order:
        case o.StartRank():
            return f"start rank {order.rank} on {order.slot.node}/{order.slot.index}"
        case o.StopRank():
            return f"stop rank {order.rank}: {order.why}"
        case o.Quiesce():
            one = len(order.ranks) == 1
            ranks = f"rank{'s' * (not one)} {' '.join(map(str, order.ranks))} leave{'s' * one}"
            when = "at once" if order.mode == "now" else "at the iteration's end"
            return f"{ranks} generation {order.generation} {when} and rebuild{'s' * one}"
        case o.Reconfigure():
            ranks = " ".join(str(member.rank) for member in order.members)
            return f"generation {order.generation} of ranks {ranks}"
        case _:
            return type(order).__name__
