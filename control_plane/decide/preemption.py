"""Preemption: a task that loses its slots writes a checkpoint before its processes end."""

from ...events.records.types import Seat
from ..state.cluster import ClusterState
from ..state.members import awaited, has_layouts, is_complete, is_standby, position_of
from ..state.memory_checkpoints import whole_checkpoints
from ..state.task import Rank, Task
from .processes import may_start


def is_preempted(state: ClusterState, task: Task) -> bool:
    """True if the task has members but no seats, or must leave its slots first (_blocks_others)."""
    return bool(task.members) and (not task.target or _blocks_others(state, task))


def savers(task: Task) -> list[Rank]:
    """The members that save a checkpoint, each its share, the first completes it; empty if no
    member can, or too late. At the end of an undisturbed iteration all with a position save, else
    one that has the whole state, or those that have the newest one together."""
    if task.save_late == task.generation:
        return []
    able = [rank for rank in task.living_members() if rank.has_state and rank.is_healthy]
    if has_layouts(task) and _was_in_vain(task, able):
        return []
    if _reaches_boundary(task, able):
        seated = [rank for rank in able if not is_standby(task, rank)]
        ordered = [rank for rank in seated if rank.rank == task.saver]
        return [*ordered, *(rank for rank in seated if rank not in ordered)]
    if has_layouts(task):
        return _savers_of_parts(task, able)
    most = max((rank.step_version for rank in able), default=-1)
    ordered = [
        rank
        for rank in able
        if rank.rank == task.saver and (rank.step_version == most or not all_quiesced(task))
    ]
    return [*ordered, *(rank for rank in able if rank.step_version == most)][:1]


def may_order_save(task: Task) -> bool:
    """Whether it is known which members save (`savers`): one member has the whole state, an
    iteration ends undisturbed, or all members have reported their step."""
    able = [rank for rank in task.living_members() if rank.has_state and rank.is_healthy]
    return not has_layouts(task) or _reaches_boundary(task, able) or all_quiesced(task)


def position_to_save(task: Task, rank: Rank) -> int:
    """The position whose share this member saves, in the layout whose state it holds."""
    return rank.held.place if rank.held is not None else position_of(task, rank)


def _reaches_boundary(task: Task, able: list[Rank]) -> bool:
    """Whether all members will end the same iteration together."""
    return (
        task.failed_s < 0
        and task.mode != "now"
        and len(able) == len(task.members)
        and task.phase in ("training", "quiescing")
        and (not all_quiesced(task) or len({rank.step_version for rank in able}) == 1)
        and all(rank.quiesced != task.generation or rank.rank in task.savers for rank in able)
    )


def _was_in_vain(task: Task, able: list[Rank]) -> bool:
    """Whether the members saved at the end of the iteration, and the checkpoint is not complete:
    the first reports it before it reports that it has left."""
    has_left = any(rank.rank == task.saver and rank.quiesced == task.generation for rank in able)
    return (
        task.mode == "boundary"
        and has_left
        and task.saved is None
        and not task.publishing
        and not task.is_save_repeated
        and num_unsaved(task) > 0
    )


def _savers_of_parts(task: Task, able: list[Rank]) -> list[Rank]:
    """Those of `able` that together have the whole state of one step in one layout, the newest."""
    if not all_quiesced(task):
        return able if is_complete(task, able) else []
    states = {(rank.step_version, rank.held.generation) for rank in able if rank.held is not None}
    for state in sorted(states, reverse=True):
        same = [
            rank
            for rank in able
            if rank.held is not None and (rank.step_version, rank.held.generation) == state
        ]
        if is_complete(task, same):
            return sorted(same, key=lambda rank: position_to_save(task, rank))
    return []


def all_quiesced(task: Task) -> bool:
    """True if every living member has left the generation and waits."""
    if task.phase == "quiescing" and awaited(task):
        return not task.num_outstanding
    return all(rank.quiesced == task.generation for rank in task.living_members())


def save_not_ordered(state: ClusterState, task: Task) -> bool:
    """True if the task is preempted, and those that save have no order yet, or are gone."""
    if not is_preempted(state, task) or not may_order_save(task) or may_end(state, task):
        return False
    first = next(iter(savers(task)), None)
    living = {rank.rank for rank in task.living_members()}
    return first is not None and (first.rank != task.saver or not living.issuperset(task.savers))


def may_end(state: ClusterState, task: Task) -> bool:
    """True if the members may end: their state is published, or no member can write it."""
    return (
        task.phase == "quiescing"
        and is_preempted(state, task)
        and (not savers(task) or (all_quiesced(task) and num_unsaved(task) == 0))
    )


def num_unsaved(task: Task) -> int:
    """Iterations done since the newest checkpoint, as far as living members have reported. If
    saves fail, in-memory checkpoints count too, and a state that is NaN or infinite is not worth
    the wait."""
    saved = task.kept_iteration
    if task.is_save_repeated:
        copied = [whole.step_version for whole in whole_checkpoints(task.copies)]
        saved = max([saved, *copied])
    versions = [rank.step_version for rank in task.living_members()]
    if task.is_save_repeated and task.not_finite is not None:
        versions = [version for version in versions if version <= task.not_finite.first]
    return max([0, *(version - saved for version in versions)])


def num_failed_orders(task: Task) -> int:
    """How many orders to save have failed in this generation, in a row."""
    failed = task.failed_saves.get("checkpoint")
    if failed is None or not failed.order or failed.generation != task.generation:
        return 0
    return failed.num_orders


def is_starting(state: ClusterState, task: Task, seat: Seat) -> bool:
    """True if the seat's process is starting, or can be started because its slot is free."""
    rank = task.ranks.get(seat.rank)
    if rank is None:
        return may_start(state, task, seat)
    return rank.slot == seat.slot and rank.state in ("ordered", "started") and rank.is_healthy


def _blocks_others(state: ClusterState, task: Task) -> bool:
    """True if no rank keeps its seat, no newcomer can start, and other tasks wait for its slots.
    Such tasks can wait for each other in a cycle, so one task must leave its slots first."""
    if any(seat.rank in task.ranks or is_starting(state, task, seat) for seat in task.target):
        return False
    own = {rank.slot for rank in task.living_members()}
    return any(
        seat.slot in own
        for other in state.tasks.values()
        if other is not task
        for seat in other.target
    )
