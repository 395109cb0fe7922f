"""The transition of a task: one literal table, its conditions and its orders.

`next_decisions` compares the target state (the seats) with the actual state (the processes). It is
level-triggered: a second call yields nothing, so a new leader needs no special case.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...events.records.decisions import TaskEnded, TaskPlaced
from ...events.records.orders import PublishCheckpoint, Quiesce, Reconfigure, Resume
from ...events.records.types import Body, Member, QuiesceMode, Seat
from ..incidents import unnamed
from ..incidents.blame import judge_progress
from ..incidents.lifecycle import close_incident, end_incident, network_incident, open_incidents
from ..state import limits
from ..state.cluster import ClusterState
from ..state.members import awaited, is_pinned, only_publication_left
from ..state.task import Checkpoint, Phase, Rank, Task, whole_path
from . import memory_checkpoints
from .membership import expected_positions, next_membership
from .preemption import (
    all_quiesced,
    is_preempted,
    is_starting,
    may_end,
    may_order_save,
    num_failed_orders,
    num_unsaved,
    position_to_save,
    save_not_ordered,
    savers,
)
from .processes import (
    may_start,
    rendezvous_port,
    start_rank,
    stop_pending,
    stop_rank,
    suppress_orders,
)

NUM_ROWS_MAX = 8
"""The most rows of the table that one record can trigger. More rows are a bug."""
EARLIER_NUM_MAX = 3
"""Checkpoints that a task may fall back to, if the newest ones are damaged."""
PUBLICATIONS_NUM_MAX = 8
"""Open orders to publish checkpoints of one task, at nodes that can answer."""

Condition = Callable[[ClusterState, Task], bool]
Action = Callable[[ClusterState, Task], Iterator[Body]]


class Row(NamedTuple):
    """If `on` is true in `phase`, `then` yields an order. The fold of the order sets phase `to`."""

    phase: Phase
    on: Condition
    then: Action
    to: Phase


# --- conditions ---
def every_seat_ready(state: ClusterState, task: Task) -> bool:
    """Every seat has a healthy rank that is ready (RankReady). The ranks suffice for a layout."""
    return (
        bool(task.target)
        and not _awaits_plan(state, task)
        and all(_ready(task.ranks.get(seat.rank), seat) for seat in task.target)
        and (bool(next_membership(state, task).members))
    )


def member_gone(state: ClusterState, task: Task) -> bool:
    """A process of the generation has ended, has timed out, or has been ordered to stop."""
    living = task.living_members()
    return len(living) < len(task.members) or any(
        rank.timeout_reason or rank.stop_orders for rank in living
    )


def no_root_cause(state: ClusterState, task: Task) -> bool:
    """A collective of the generation failed, and no root cause was found within evidence_s_max."""
    return task.uncaused_generation == task.generation


def seats_differ(state: ClusterState, task: Task) -> bool:
    """A newcomer is ready, or some members have lost their seat and others keep theirs. No other
    newcomer is starting: the task does not wait for a slot that another task still occupies."""
    if not task.target or task.failed_s >= 0:
        return False
    slots = task.seats_at
    keeps = [slots.get(rank.rank) == rank.slot for rank in task.living_members()]
    if len(keeps) == len(task.target) and all(keeps):
        return False  # every seat has its member, so there is no newcomer
    if _unreachable(state, task) or any(is_starting(state, task, seat) for seat in task.target):
        return False
    newcomer = any(_ready(task.ranks.get(seat.rank), seat) for seat in task.target)
    return newcomer or (any(keeps) and not all(keeps))


def output_moved(state: ClusterState, task: Task) -> bool:
    """An operator has moved the output: the next generation saves there."""
    return task.moved_in == task.generation and task.failed_s < 0


def no_slots(state: ClusterState, task: Task) -> bool:
    """The task is preempted, and no fault is in progress."""
    return is_preempted(state, task) and task.failed_s < 0 and not _unreachable(state, task)


def boundary_disturbed(state: ClusterState, task: Task) -> bool:
    """The members cannot reach the end of the iteration: a member is gone or a collective failed.
    Once all members have left the generation, they have reached the end."""
    return (
        task.mode == "boundary"
        and (task.failed_s >= 0 or member_gone(state, task))
        and not may_end(state, task)
        and not all_quiesced(task)
    )


def every_member_quiesced(state: ClusterState, task: Task) -> bool:
    """Every living member has left the generation, and the waiting ranks suffice for a layout."""
    return (
        all_quiesced(task)
        and not _awaits_plan(state, task)
        and bool(next_membership(state, task).members)
    )


def generation_broken(state: ClusterState, task: Task) -> bool:
    """The generation cannot be built: a member is gone or has reported a failure."""
    return member_gone(state, task) or any(
        rank.failed == task.generation for rank in task.living_members()
    )


def every_member_reconfigured(state: ClusterState, task: Task) -> bool:
    """All members have joined the generation and settled it. They wait for Resume."""
    if task.phase == "reconfiguring" and awaited(task):
        return not task.num_outstanding
    return all(rank.reconfigured == task.generation for rank in task.living_members())


def _ready(rank: Rank | None, seat: Seat) -> bool:
    return rank is not None and rank.state == "ready" and rank.is_healthy and rank.slot == seat.slot


def _unreachable(state: ClusterState, task: Task) -> bool:
    return any(
        (node := state.nodes.get(rank.slot.node)) is None or node.health != "healthy"
        for rank in task.living_members()
    )


def _awaits_plan(state: ClusterState, task: Task) -> bool:
    """A plan follows in the same batch. It may give a seat to a rank that has state but no seat."""
    return bool(state.replan) and not task.ending and not is_pinned(state, task)


# --- orders ---
def quiesce_now(state: ClusterState, task: Task) -> Iterator[Body]:
    yield _quiesce(state, task, "now")


def quiesce_boundary(state: ClusterState, task: Task) -> Iterator[Body]:
    yield _quiesce(state, task, "boundary")


def quiesce_again(state: ClusterState, task: Task) -> Iterator[Body]:
    """Repeat the Quiesce order, now with the request to write a checkpoint."""
    wait = task.mode == "boundary" and not all_quiesced(task)
    yield _quiesce(state, task, "boundary" if wait else "now")


def _quiesce(state: ClusterState, task: Task, mode: QuiesceMode) -> Quiesce:
    """The Quiesce order to all living members, with those that save as the first of them."""
    saving = savers(task) if is_preempted(state, task) and may_order_save(task) else []
    living = [*saving, *(rank for rank in task.living_members() if rank not in saving)]
    return Quiesce(
        nodes=_nodes([rank.slot.node for rank in living]),
        task=task.id,
        generation=task.generation,
        mode=mode,
        save=bool(saving),
        ranks=tuple(rank.rank for rank in living),
        saving=tuple(position_to_save(task, rank) for rank in saving),
        save_attempt=num_failed_orders(task) if saving else 0,
        output=task.output if task.moved_in >= 0 else "",
        tell_s=limits.to_leave(state.policy, mode).tell_s,
    )


def reconfigure(state: ClusterState, task: Task) -> Iterator[Body]:
    """Form the next generation from the members that `next_membership` selects."""
    axes, ranks = next_membership(state, task)
    members = tuple(
        Member(rank.rank, rank.attempt, rank.slot.node, rank.endpoint) for rank in ranks
    )
    stores = memory_checkpoints.assign_stores(state, task, [member.node for member in members])
    yield Reconfigure(
        nodes=_nodes([member.node for member in members]),
        task=task.id,
        generation=task.generation + 1,
        members=members,
        store=members[0].endpoint,
        dp=len(members) if axes is None else axes.dp,
        axes=axes,
        checkpoint=task.checkpoint_path,
        earlier=_earlier(task),
        copies=memory_checkpoints.recovery_sources(state, task, ranks),
        keepers=stores.keepers,
        stores=stores.stores,
        copies_bytes_max=state.policy.copies_bytes_max,
        output=task.output if task.moved_in >= 0 else "",
        tell_s=limits.of(state.policy, "reconfigure_s_max").tell_s,
        restore_s_max=limits.restore_s_max(state.policy),
    )


def _earlier(task: Task) -> tuple[str, ...]:
    """The checkpoints that were published before the last one and may still be there."""
    training = task.spec.training
    keep = training.checkpoint_keep if training is not None else "all"
    paths = [whole_path(stored) for stored in task.stored if stored.is_published]
    if task.checkpoint_path not in paths:
        return ()
    before = paths[: paths.index(task.checkpoint_path)][::-1]
    return tuple(before[: EARLIER_NUM_MAX if keep == "all" else min(keep, EARLIER_NUM_MAX)])


def resume(state: ClusterState, task: Task) -> Iterator[Body]:
    """Continue to train. `progress_from` repeats reports that a lost first member did not send."""
    yield Resume(
        nodes=_nodes([member.node for member in task.members]),
        task=task.id,
        generation=task.generation,
        progress_from=min(task.iteration, task.settled),
    )


def _nodes(names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sorted(names)))


TABLE: tuple[Row, ...] = (
    Row("starting", every_seat_ready, reconfigure, "reconfiguring"),
    Row("training", member_gone, quiesce_now, "quiescing"),
    Row("training", no_root_cause, quiesce_now, "quiescing"),
    Row("training", no_slots, quiesce_boundary, "quiescing"),
    Row("training", seats_differ, quiesce_boundary, "quiescing"),
    Row("training", output_moved, quiesce_boundary, "quiescing"),
    Row("quiescing", boundary_disturbed, quiesce_now, "quiescing"),
    Row("quiescing", save_not_ordered, quiesce_again, "quiescing"),
    Row("quiescing", every_member_quiesced, reconfigure, "reconfiguring"),
    Row("reconfiguring", generation_broken, quiesce_now, "quiescing"),
    Row("reconfiguring", every_member_reconfigured, resume, "training"),
)


# --- the next decisions of a task ---
def next_decisions(state: ClusterState, task: Task) -> Iterator[Body]:
    """The next decisions for this task; none if it is in its target state. While healing is paused,
    a transition in progress is completed, and all other orders are suppressed."""
    is_paused = bool(state.held) and task.ending != "cancelled"
    if not is_paused:
        yield from _stop_orphans(state, task)
    if task.outcome:
        yield from memory_checkpoints.drop_checkpoints(state, task)
        return
    yield from open_incidents(state, task)
    if task.suspects:
        yield from judge_progress(state, task)
        yield from unnamed.judge_progress(state, task)
    if task.phase == "quiescing" and task.failed_s >= 0 and every_member_quiesced(state, task):
        yield from network_incident(state, task)
    if is_paused and not (task.heals_in_memory and task.finished):
        if task.heals_in_memory:
            yield from _transition(state, task)
        yield from suppress_orders(state, task, _next_orders(state, task))
    elif task.ending and not is_paused:
        yield from _end(state, task)
    elif not task.heals_in_memory:
        yield from _command(state, task)
    elif task.finished:
        yield from _finish(state, task)
    else:
        yield from _transition(state, task)
        yield from _stop(state, task)
        yield from _start(state, task)
        # This comes last, since it avoids the nodes of processes that were just started.
        yield from memory_checkpoints.replace_stores(state, task)
    if task.outcome:
        yield from memory_checkpoints.drop_checkpoints(state, task)
    else:
        yield from _publish(state, task)
        yield from close_incident(state, task)


def _next_orders(state: ClusterState, task: Task) -> Iterator[Body]:
    """The orders that would follow if healing were on. None depends on the fold of another."""
    yield from _stop_orphans(state, task)
    if task.ending:
        yield from _end(state, task)
    elif not task.heals_in_memory:
        yield from _command(state, task)
    else:
        row = _row(state, task)
        if row is not None:
            yield from row.then(state, task)
        yield from _stop(state, task)
        yield from _start(state, task)


def _row(state: ClusterState, task: Task) -> Row | None:
    return next((row for row in TABLE if row.phase == task.phase and row.on(state, task)), None)


def _transition(state: ClusterState, task: Task) -> Iterator[Body]:
    for _ in range(NUM_ROWS_MAX):
        row = _row(state, task)
        if row is None or (state.held and task.phase == "training"):
            return  # while healing is paused, no new transition begins
        yield from row.then(state, task)
        assert task.phase == row.to, f"task {task.id}: {row} led to {task.phase}"
    raise AssertionError(f"task {task.id}: transitions do not end")


def _stop(state: ClusterState, task: Task) -> Iterator[Body]:
    """Stop processes that have timed out, and processes that no longer have a seat."""
    slots = task.seats_at
    ends: bool | None = None  # it depends on the other tasks: not once for each rank
    for key in sorted(task.ranks):
        rank = task.ranks[key]
        if rank.timeout_reason:
            if not stop_pending(state, task, rank):
                yield stop_rank(task, rank, 0.0, f"it {rank.timeout_reason}")
                ends = None
        elif slots.get(key) != rank.slot and not rank.stopping:
            if task.member(key) is not None:
                ends = may_end(state, task) if ends is None else ends
                if not ends:
                    continue
            num = num_unsaved(task) if task.member(key) is not None else 0
            lost = f"; {num} iterations could not be saved" if num else ""
            yield stop_rank(
                task, rank, state.policy.stop_s_max, f"the plan has no seat for it{lost}"
            )
            ends = None


def _stop_orphans(state: ClusterState, task: Task) -> Iterator[Body]:
    """Stop replaced processes once their node is reachable again."""
    for orphan in list(task.orphans):
        node = state.nodes.get(orphan.slot.node)
        if node is not None and node.health == "healthy" and not stop_pending(state, task, orphan):
            yield stop_rank(task, orphan, 0.0, "it was replaced while its node was silent")


def _start(state: ClusterState, task: Task) -> Iterator[Body]:
    """Start a process in each empty seat whose slot is free."""
    seats = [
        seat for seat in task.target if seat.rank not in task.ranks and may_start(state, task, seat)
    ]
    if not seats:
        return
    axes, places = expected_positions(task)
    for seat in seats:
        yield start_rank(state, task, seat, rendezvous_port(task), axes, places.get(seat.rank, -1))


def _publish(state: ClusterState, task: Task) -> Iterator[Body]:
    """Order the writer's node to publish; if it is gone, another publishes a final checkpoint.
    While many orders wait for an answer, only the newest checkpoint waits for its own. What was
    refused is ordered again when its pause is over."""
    waits = sum(not _is_gone(state, each.node) for each in task.publishing.values())
    if task.saved is not None and task.members and waits < PUBLICATIONS_NUM_MAX:
        writer = task.member(task.saver)
        name = writer.slot.node if writer is not None else task.members[0].node
        yield _publication(task, task.saved, name)
    for waiting in list(task.publishing.values()):
        gone = waiting.final and _is_gone(state, waiting.node)
        other = next(iter(_healthy(state)), "") if gone else ""
        if other:
            yield _publication(task, waiting, other)
    if task.refused is not None and f"publish/{task.id}" not in state.deadlines:
        names = _healthy(state)
        # every second time another node: the fault may be the writer's
        failed = task.failed_saves.get("publication")
        tries = failed.num_orders if failed is not None else 1
        is_other = tries % 2 == 0 or task.refused.node not in names
        if names:
            name = names[tries // 2 % len(names)] if is_other else task.refused.node
            yield _publication(task, task.refused, name)


def _is_gone(state: ClusterState, name: str) -> bool:
    node = state.nodes.get(name)
    return node is None or node.health in ("lost", "left") or node.replace


def _publication(task: Task, checkpoint: Checkpoint, node: str) -> PublishCheckpoint:
    return PublishCheckpoint(
        nodes=(node,),
        task=task.id,
        generation=checkpoint.generation,
        output=checkpoint.output or task.output,
        path=checkpoint.path,
        remove=_removable(task, checkpoint),
    )


def _removable(task: Task, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Those that may go once `checkpoint` is published: not the `checkpoint_keep` newest, and none
    that a recovery may read before the publication is known."""
    keep = task.spec.training.checkpoint_keep if task.spec.training is not None else "all"
    paths = [stored.path for stored in task.stored if not stored.output]
    if keep == "all" or checkpoint.output or checkpoint.path not in paths:
        return ()
    needed = {task.checkpoint_path, checkpoint.path}
    if task.phase != "training":
        needed.add(task.reconfigure_checkpoint)
    needed |= {waiting.path for waiting in task.publishing.values()}
    older = paths[: paths.index(checkpoint.path) + 1]
    return tuple(path for path in older[: max(len(older) - keep, 0)] if path not in needed)


def _healthy(state: ClusterState) -> list[str]:
    return [name for name in sorted(state.nodes) if state.nodes[name].health == "healthy"]


def _finish(state: ClusterState, task: Task) -> Iterator[Body]:
    """All iterations are done: publish the final checkpoint, then stop the processes."""
    member_lost = len(task.living_members()) + len(task.finished) < len(task.members) and any(
        rank.state != "finished" for rank in task.living_members()
    )
    for key in sorted(task.ranks):
        rank = task.ranks[key]
        if rank.state == "finished" and not rank.timeout_reason:
            continue
        if rank.timeout_reason and not stop_pending(state, task, rank):
            yield stop_rank(task, rank, 0.0, f"it {rank.timeout_reason}")
        elif not rank.stopping and (
            task.member(key) is None
            or member_lost
            or (task.final_known and rank.quiesced == task.generation)
        ):
            yield stop_rank(task, rank, state.policy.stop_s_max, "the task is done")
    if only_publication_left(task) and task.target:
        yield TaskPlaced(task=task.id, seats=(), why="only its last publication is left")
    is_pending = task.publishing or task.saved is not None or task.refused is not None
    if not task.ranks and task.final_known and not is_pending:
        yield from end_incident(state, task, "the task is finished")
        yield TaskEnded(task=task.id, outcome="finished", why=_finished(task))


def _finished(task: Task) -> str:
    """How many iterations it has done, and where its state is."""
    last, series = task.unpublished, task.not_finite
    if last is None:
        return f"{task.iteration} iterations; {task.checkpoint_path}"
    since = f" since iteration {series.first}" if series is not None else ""
    latest = f"latest stays at {task.checkpoint_path}" if task.checkpoint_path else "no latest"
    return f"{task.iteration} iterations, loss {last.loss}{since}; {latest}, not {last.path}"


def _end(state: ClusterState, task: Task) -> Iterator[Body]:
    """The task is cancelled or has failed: stop all processes. It ends when all are reaped."""
    for key in sorted(task.ranks):
        rank = task.ranks[key]
        if not rank.stopping or (rank.timeout_reason and not stop_pending(state, task, rank)):
            grace_s = 0.0 if rank.timeout_reason else state.policy.stop_s_max
            yield stop_rank(task, rank, grace_s, task.why)
    if not task.ranks:
        assert task.ending
        outcome, why = task.ending, task.why
        yield from end_incident(state, task, why)
        yield TaskEnded(task=task.id, outcome=outcome, why=why)


# --- The command tier: all processes start together, and the failure of one restarts all ---
def _command(state: ClusterState, task: Task) -> Iterator[Body]:
    seats = task.seats_at
    if task.target and not task.ranks and all(number in task.finished for number in seats):
        yield from end_incident(state, task, "the task is finished")
        yield TaskEnded(task=task.id, outcome="finished", why="all processes exited with 0")
        return
    if not task.ranks:
        if all(may_start(state, task, seat) for seat in task.target):
            port = rendezvous_port(task)  # once for all seats: the fold of StartRank counts a round
            axes, places = expected_positions(task) if task.may_adopt else (None, {})
            for seat in task.target:
                yield start_rank(state, task, seat, port, axes, places.get(seat.rank, -1))
        return
    whole = all(number in task.ranks or number in task.finished for number in seats)
    moved = any(seats.get(rank.rank) != rank.slot for rank in task.ranks.values())
    restarts = (
        moved
        or not whole
        or any(rank.stopping or rank.timeout_reason for rank in task.ranks.values())
    )
    is_hung = any(rank.timeout_reason for rank in task.ranks.values())
    for key in sorted(task.ranks):
        rank = task.ranks[key]
        if rank.timeout_reason:
            if not stop_pending(state, task, rank):
                yield stop_rank(task, rank, 0.0, f"it {rank.timeout_reason}")
        elif not rank.stopping and restarts:
            why = (
                "another process of the task failed"
                if task.incident and not moved
                else "the plan has other seats"
            )
            # Of a command nobody knows which of its processes the others wait for.
            yield stop_rank(task, rank, state.policy.stop_s_max, why, keeps_stacks=is_hung)
    if task.restarts_from_memory and not restarts:
        yield from memory_checkpoints.replace_stores(state, task)
