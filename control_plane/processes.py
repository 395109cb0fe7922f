"""The orders that start, end or break one process, and whether they are due."""

from __future__ import annotations

from msgspec.structs import replace

from ..events.orders import InjectFault, Seat, StartRank, StopRank
from ..events.reports import FaultRequested
from . import throughput
from .incidents import NUM_STOPS_MAX
from .state import ClusterState, Rank, Task

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
        axes=None if task.heals_in_memory else throughput.axes(
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


def inject_fault(state: ClusterState, asked: FaultRequested) -> InjectFault | None:
    """The order that breaks what was asked for, None where that is not allowed or not there.

    Nor is it kept for a node that is silent: nobody asked for a fault at some later time.
    """
    task = state.tasks.get(asked.task)
    rank = task.ranks.get(asked.rank) if task is not None else None
    node = state.nodes.get(asked.node if asked.what == "node" else rank.slot.node if rank else "")
    if not state.policy.allow_inject or node is None or node.health != "healthy":
        return None
    return InjectFault(nodes=(node.name,), what=asked.what, task=task.id if task else 0,
                       rank=rank.rank if rank else -1, attempt=rank.attempt if rank else 0,
                       incarnation=node.incarnation, stop_s=max(asked.stop_s, 0.0))
