"""Blame by experiment: whether a failing rank's slot is at fault, or its task.

A device error proves that a slot is at fault. Without one, the count of failures proves nothing: a
bug fails on every slot. So a rank that failed again and again is tried on another slot. If it makes
progress there, its old slot is at fault. If it fails there in the same way, the task is.
"""

from collections.abc import Container, Iterator, Sequence

from ...events.records.decisions import ExperimentBegun, SlotsJudged, Verdict
from ...events.records.order_format import needed_format
from ...events.records.statuses import (
    CONNECTION_REFUSED,
    CONNECTION_RESET,
    NCCL_TIMEOUT,
    OTHER_NETWORK,
    OTHER_SOFTWARE,
    TASK_HANG,
    WRONG_INPUT,
)
from ...events.records.types import Body, Seat, Slot
from ..state.cluster import NUM_UNNAMED_MAX, ClusterState, allocatable_slots, live_tasks
from ..state.incident import HungRank
from ..state.members import has_progressed, is_pinned
from ..state.node import Node
from ..state.task import Task
from .hangs import STALLED, WORKS_ON
from .root_cause import Cause

UNNAMED = frozenset((NCCL_TIMEOUT, OTHER_NETWORK, CONNECTION_RESET, CONNECTION_REFUSED))
"""Statuses that name no cause: unnamed.py judges them."""
DAY_S = 86_400.0
"""Faults add up over incidents and tasks for so long."""


def cannot_start(state: ClusterState, task: Task, cause: Cause) -> str:
    """Why no restart can help; empty: one may. The input is wrong, or all ranks have failed before
    the first iteration with the same words, by a fault that does not pass. A slot that is out by
    now explains the failure there."""
    series = task.failures
    if not task.max_iteration and any(
        task.ranks[number].error == WRONG_INPUT for number in cause.ranks if number in task.ranks
    ):
        return "it cannot start"
    if series is None:
        return ""
    lives = any(rank.has_state for rank in task.living_members())
    if series.status == WRONG_INPUT and series.num > 1 and (len(series.ranks) > 1 or not lives):
        # Another process has met the same wrong input: no restart changes it. But what one rank
        # alone meets may be of its node, as long as others hold the state.
        return (
            f"{series.num} times the same ({series.status}) at iteration {series.iteration}, "
            "in whichever rank"
        )
    unexplained = [slot for slot in series.slots if not _is_out(state, slot)]
    is_everywhere = len(unexplained) >= len(task.target) > 1
    if (
        series.status == OTHER_SOFTWARE
        and not (series.iteration or series.can_pass)
        and is_everywhere
        and series.are_alike
    ):
        return "it cannot start, no rank can"
    return ""


def _is_out(state: ClusterState, slot: Slot) -> bool:
    node = state.nodes.get(slot.node)
    return node is not None and node.is_disabled(slot.index)


def refuted(task: Task, cause: Cause) -> tuple[Seat, ...]:
    """The suspected slots, each with its rank, that are not at fault: the rank fails on another
    slot as it did there."""
    return tuple(
        Seat(place.rank, suspect.slot)
        for place in cause.where
        if (suspect := task.suspects.get(place.rank)) is not None
        and suspect.status == cause.status
        and suspect.slot != place.slot
    )


def guilty(state: ClusterState, task: Task, cause: Cause) -> tuple[Seat, ...]:
    """The suspected slots, each with the rank that has left it, that are at fault: another rank,
    which has the slot in exchange, fails there again and again in the same way, and the first does
    not fail any more."""
    limit, hung = state.policy.restarts_max, hung_twice(state, task, cause)
    failed = {
        place.slot: place.rank
        for place in cause.where
        if task.restarts.get(place.rank, 0) > limit or place.rank in hung
    }
    return tuple(
        Seat(number, suspect.slot)
        for number, suspect in task.suspects.items()
        if suspect.status == cause.status
        and failed.get(suspect.slot, number) != number
        and not task.restarts.get(number)
    )


def judge_failures(
    task: Task, cause: Cause, cleared: Sequence[Seat], bad: Sequence[Seat]
) -> Iterator[Body]:
    """Judge the experiments that these failures decide. `cleared`: as `refuted`; `bad`: as
    `guilty`."""
    if cleared:
        now = [Seat(place.rank, place.slot) for place in cause.where]
        where = names_of([seat.slot for seat in now])
        why = f"{ranks_in_words(cleared)}, in the same way on {where}: {cause.why}"
        if len({seat.slot.node for seat in (*cleared, *now)}) > 1:
            yield _judged(task, cleared, "task", why)
        else:  # the node may be bad
            yield _judged(task, [*cleared, *now], "open", why)
    elif bad:
        yield _judged(task, bad, "slot", f"another rank, in the same way there: {cause.why}")


def passed(state: ClusterState, task: Task) -> list[Seat]:
    """The ranks that make progress on another slot than the suspected one, each with that one."""
    seats = task.seats_at
    return [
        Seat(number, suspect.slot)
        for number, suspect in task.suspects.items()
        if (rank := task.ranks.get(number)) is not None
        and rank.slot == seats.get(number)
        and rank.slot != suspect.slot
        and has_progressed(state, task, rank)
    ]


def judge_progress(state: ClusterState, task: Task) -> Iterator[Body]:
    """Judge the experiments whose ranks make progress elsewhere, but those of unnamed.py."""
    named = [seat for seat in passed(state, task) if not _is_unnamed(task, seat)]
    alone = [seat for seat in named if _hung_alone(state, task, seat)]
    if bad := [seat for seat in named if seat not in alone]:
        yield _judged(task, bad, "slot", _progress(task, bad))
    if alone:  # its software may hang at times: another rank that hangs there tells
        why = f"{_progress(task, alone)}; no other rank has hung there"
        yield _judged(task, alone, "open", why)


def _progress(task: Task, seats: Sequence[Seat]) -> str:
    names = names_of([task.seats_at[seat.rank] for seat in seats])
    status = task.suspects[seats[0].rank].status
    return f"{status} there, and progress of {ranks_in_words(seats)} on {names}"


def _is_unnamed(task: Task, seat: Seat) -> bool:
    return task.suspects[seat.rank].is_unnamed


def exhausted(
    state: ClusterState, task: Task, cause: Cause, cleared: Sequence[Seat]
) -> tuple[int, ...]:
    """The ranks that are not simply started again: their restarts are used up, another slot has
    not helped (`cleared`), or the task fails at the same point on several nodes."""
    if cause.is_indirect or (cause.is_proved and cause.severity == "SEV1"):
        return ()
    limit, series = state.policy.restarts_max, task.failures
    if series is not None and series.num > limit and _is_of_task(task):
        return cause.ranks
    again = {seat.rank for seat in cleared}
    return tuple(
        number for number in cause.ranks if number in again or task.restarts.get(number, 0) > limit
    )


def has_moved_on(task: Task, cleared: Sequence[Seat]) -> bool:
    """Whether the task has finished iterations between a rank's hang on one slot and on the next:
    then it does not hang wherever it is at one point of the task."""
    return all(
        (suspect := task.suspects[seat.rank]).status == TASK_HANG
        and suspect.iteration < task.max_iteration
        for seat in cleared
    )


def hung_twice(state: ClusterState, task: Task, cause: Cause) -> tuple[int, ...]:
    """The ranks that have hung on their slot for the second time within a day. A rank that hangs is
    seldom the slot's fault, but to move it costs no more than to restart it."""
    if cause.status != TASK_HANG or cause.is_proved or not task.heals_in_memory:
        return ()
    return tuple(
        place.rank
        for place in cause.where
        if sum(
            (hang.task, hang.rank, hang.slot) == (task.id, place.rank, place.slot)
            for hang in _hung_lately(state)
        )
        > 1
        and place.rank not in task.suspects
    )


def remember_hangs(state: ClusterState, task: Task) -> None:
    """Fold: keep the ranks that hang in their own work, over incidents and tasks."""
    new = [
        HungRank(at_s=state.at_s, task=task.id, rank=strike.rank, slot=strike.slot)
        for fault in task.faults
        if fault.status == TASK_HANG and not fault.on_purpose
        for strike in fault.strikes
        if (rank := task.ranks.get(strike.rank)) is not None
        and rank.timeout_reason in (STALLED, WORKS_ON)
    ]
    if new:
        state.hung = [*_hung_lately(state), *new][-NUM_UNNAMED_MAX:]


def _hung_lately(state: ClusterState) -> list[HungRank]:
    return [hang for hang in state.hung if state.at_s - hang.at_s <= DAY_S]


def _hung_alone(state: ClusterState, task: Task, seat: Seat) -> bool:
    """Whether the rank has hung in its own work, and no other rank of any task on that slot."""
    there = {(hang.task, hang.rank) for hang in _hung_lately(state) if hang.slot == seat.slot}
    return task.suspects[seat.rank].status == TASK_HANG and there == {(task.id, seat.rank)}


def says_device(task: Task, cause: Cause) -> bool:
    """Whether only the processes say that their device is bad, all on one node: the first of them
    need not fail again and again before it is tried elsewhere."""
    return (
        cause.severity == "SEV1"
        and not (cause.is_proved or cause.is_indirect or task.suspects)
        and not _is_of_task(task)
    )


def experiment(
    state: ClusterState, task: Task, status: str, ranks: Sequence[int], why: str
) -> ExperimentBegun | None:
    """The experiment that tells whether the ranks' slots are at fault. None if one has been made,
    the task fails on several nodes, or it has neither other slots nor ranks to exchange them
    with."""
    suspects = [seat for seat in task.target if seat.rank in ranks]
    if (
        not suspects
        or _is_hung_command(task, status)
        or is_pinned(state, task)
        or _is_of_task(task)
        or (task.failures is not None and task.failures.is_refuted)
        or any(number in task.suspects for number in ranks)
    ):
        return None
    free = free_slots(state, task, suspects)
    nodes = {seat.slot.node for seat in suspects}
    # Another slot of the same node tells least: the node may be bad.
    away = [slot for slot in free if slot.node not in nodes]
    seats = _exchanged(task, suspects, nodes)
    if len(away) >= len(suspects):
        seats, how = moved(task, suspects, away), "tried on"
    elif len(task.target) - len(suspects) + len(away) >= task.smallest_size:
        seats, how = (), f"no slot is free{' on another node' * bool(free)}, the others go on"
    elif seats:
        how = "in exchange on"
    elif len(free) >= len(suspects):
        seats, how = moved(task, suspects, free), "tried on"
    else:
        seats, how = _exchanged(task, suspects, ()), "in exchange on"
        if not seats:
            return None
    ranks_of = {seat.rank for seat in suspects}
    where = " " * bool(seats) + names_of([seat.slot for seat in seats if seat.rank in ranks_of])
    return ExperimentBegun(
        task=task.id,
        suspects=tuple(suspects),
        status=status,
        why=f"{ranks_in_words(suspects)} {why}: {how}{where}",
        seats=seats,
    )


def may_pass(state: ClusterState, task: Task) -> bool:
    """Whether the task's failures may pass by themselves, and have not lasted too long."""
    series = task.failures
    return (
        series is not None
        and series.can_pass
        and state.at_s - series.since_s < state.policy.passing_s_max
    )


def goes_on_without(task: Task, ranks: Sequence[int], why: str) -> SlotsJudged | None:
    """The task goes on without these ranks: the others have finished iterations since the first of
    these failures. None: they have not, or are too few."""
    series = task.failures
    left = [rank for rank in task.living_members() if rank.rank not in ranks]
    if (
        not task.heals_in_memory
        or series is None
        or task.max_iteration <= series.since_iteration
        or len(left) < task.smallest_size
    ):
        return None
    seats = [seat for seat in task.target if seat.rank in ranks]
    why = f"the others go on without {ranks_in_words(seats)}: {why}"
    return _judged(task, seats, "task", why, slots_max=len(left))


def acquit(task: Task, why: str) -> Iterator[Body]:
    """The task has failed on several nodes: an experiment that is still open blames no slot."""
    if task.suspects and _is_of_task(task):
        seats = [Seat(number, suspect.slot) for number, suspect in sorted(task.suspects.items())]
        yield _judged(task, seats, "task", why)


def leave_open(task: Task, ranks: Sequence[int], why: str) -> Iterator[Body]:
    """Suspect the slots at which a task has failed, if they are on one node and nothing was tried
    elsewhere."""
    seats = [seat for seat in task.target if seat.rank in ranks]
    is_tried = any(number in task.suspects for number in ranks)
    if seats and not (is_tried or _is_of_task(task) or _is_hung_command(task, TASK_HANG)):
        yield _judged(task, seats, "open", why)


def elsewhere(task: Task, ranks: Sequence[int], cleared: Sequence[Seat]) -> str:
    """Where else the ranks have failed, for a sentence; empty: nowhere."""
    slots = [seat.slot for seat in cleared]
    slots += [task.suspects[number].slot for number in ranks if number in task.suspects]
    if slots:
        return f", and before that on {names_of(slots)}"
    series = task.failures
    return f", on {names_of(series.slots)}" if series is not None and _is_of_task(task) else ""


# --- parts ---
def _judged(
    task: Task, seats: Sequence[Seat], verdict: Verdict, why: str, *, slots_max: int = 0
) -> SlotsJudged:
    return SlotsJudged(
        task=task.id, suspects=tuple(seats), verdict=verdict, why=why, slots_max=slots_max
    )


def _is_hung_command(task: Task, status: str) -> bool:
    """Whether a command has stopped printing. The process that prints is seldom the cause."""
    return not task.heals_in_memory and task.failures is None and status == TASK_HANG


def _is_of_task(task: Task) -> bool:
    """Whether the same failure has occurred on several nodes: no slot of one node explains it."""
    series = task.failures
    return (
        series is not None
        and series.status != TASK_HANG
        and len({slot.node for slot in series.slots}) > 1
    )


def is_avoided(state: ClusterState, node: Node) -> bool:
    """Whether placement prefers other nodes: ranks left it, and a fault without a name did not come
    back."""
    return node.avoided_s > 0 and state.at_s - node.avoided_s <= DAY_S


def free_slots(state: ClusterState, task: Task, suspects: Sequence[Seat]) -> list[Slot]:
    """The slots of no task that these ranks may have: on avoided nodes last, those on other nodes
    first, then those on nodes of the task."""
    left = [seat.slot for seat in suspects]
    left += [suspect.slot for suspect in task.suspects.values()]
    taken = {seat.slot for other in live_tasks(state) for seat in other.target}.union(left)
    order_format = needed_format(task.spec)
    away, near = {slot.node for slot in left}, {seat.slot.node for seat in task.target}
    return sorted(
        (
            slot
            for slot in allocatable_slots(state)
            if slot not in taken
            and slot.index not in (node := state.nodes[slot.node]).occupants
            and node.order_format >= order_format
        ),
        key=lambda slot: (
            is_avoided(state, state.nodes[slot.node]),
            slot.node in away,
            slot.node not in near,
            slot,
        ),
    )


def moved(task: Task, suspects: Sequence[Seat], slots: Sequence[Slot]) -> tuple[Seat, ...]:
    """The task's seats with these ranks on other slots."""
    new = {seat.rank: slot for seat, slot in zip(suspects, slots, strict=False)}
    return tuple(Seat(seat.rank, new.get(seat.rank, seat.slot)) for seat in task.target)


def _exchanged(task: Task, suspects: Sequence[Seat], without: Container[str]) -> tuple[Seat, ...]:
    """The seats after an exchange with as many other ranks, the highest ones first, none on the
    nodes `without`; empty if they are too few."""
    others = [
        seat
        for seat in task.target
        if seat not in suspects
        and seat.slot.node not in without
        and seat.rank not in task.suspects
        and seat.rank in task.ranks
    ]
    others.sort(key=lambda seat: -seat.rank)
    if len(others) < len(suspects):
        return ()
    others = others[: len(suspects)]
    return moved(task, [*suspects, *others], [seat.slot for seat in (*others, *suspects)])


def ranks_in_words(seats: Sequence[Seat]) -> str:
    return ("rank " if len(seats) == 1 else "ranks ") + " ".join(str(seat.rank) for seat in seats)


def names_of(slots: Sequence[Slot]) -> str:
    return " ".join(dict.fromkeys(f"{slot.node}/{slot.index}" for slot in slots))
