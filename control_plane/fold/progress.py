"""The fold of progress: finished iterations, as ranks report them or a command logs them."""

from ...events.records.envelope import Record
from ...events.records.reports import IterationsLogged, LossNotFinite, TaskProgressed
from ...events.spec.job import RATE_FLOPS_MAX
from ..state.cluster import ClusterState
from ..state.members import has_progressed
from ..state.task import CommandProgress, Rank, Task
from ..throughput.calibration import batch_counts, keep_logged, keep_times
from ..throughput.transition_cost import command_resumed, num_slots, transition_stepped
from .edits import add_work, end_pause
from .failures import clear_suspicion, passed
from .hangs import command_unstalled, iterations_passed
from .losses import finite, not_finite
from .stragglers import restart_stragglers

ITERATIONS_MAX = 10**12
"""Limit of a reported iteration."""


# --- of training tasks ---
def progressed(state: ClusterState, record: Record, task: Task, body: TaskProgressed) -> None:
    is_empty = body.end == body.first_iteration
    if body.generation != task.generation or is_empty or task.phase == "reconfiguring":
        return
    if body.losses:
        finite(state, task, body.first_iteration, body.losses)
    else:
        not_finite(state, task, body.first_iteration, body.end, "not finite")
    task.rate_flops = body.rate_flops
    task.micro_batches = body.micro_batches
    keep_times(state, task, body)
    if body.step_s:
        task.step_s = body.step_s[-1]
    _stepped_to(state, task, body.end)
    restart_stragglers(state, record, task)


def loss_not_finite(state: ClusterState, record: Record, task: Task, body: LossNotFinite) -> None:
    """The iteration counts as finished, although its loss is not finite."""
    if body.generation == task.generation and task.phase != "reconfiguring":
        at = body.iteration
        not_finite(state, task, at, at + 1, body.text, is_saving=body.is_saving)
        _stepped_to(state, task, at + 1)


def _stepped_to(state: ClusterState, task: Task, iteration: int) -> None:
    add_work(state, task, iteration)
    iterations_passed(state, task, iteration)
    task.progressed_s = state.at_s
    task.iteration = max(task.iteration, iteration)
    if iteration > task.max_iteration:
        task.common_nodes, task.common_places, task.unnamed_s = [], [], 0.0
    task.max_iteration = max(task.max_iteration, iteration)
    if task.stepped == task.generation and not (
        task.incident or task.transition or task.restarts or task.failures or task.reattempts
    ):
        return  # nothing has happened: most reports need no look at the ranks
    living = task.living_members()
    progressed = [rank.rank for rank in living if has_progressed(state, task, rank)]
    for number in progressed:
        task.restarts.pop(number, None)
        task.reattempts = 0
    passed(state, task, progressed)
    # A late report of iterations before the fault does not end the interruption.
    whole = len(living) == len(task.members) and not any(
        rank.error_seq or rank.timeout_reason for rank in living
    )
    # An iteration also counts while the generation quiesces at a boundary for a new member.
    at_boundary = task.phase == "quiescing" and task.mode == "boundary"
    if iteration > task.settled and (task.phase == "training" or at_boundary) and whole:
        if task.stepped != task.generation:
            clear_suspicion(state, task)
        task.stepped = task.generation
        end_pause(state, task)
        transition_stepped(state, task, iteration)


# --- of commands ---
def iterations_logged(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: IterationsLogged
) -> None:
    """Record progress of a command, from the first rank of a round that logs any. A command counts
    its own iterations: after a restart it continues from its own checkpoint. Work before its first
    report does not count. `restart_iterations` new iterations clear the count of restarts."""
    if task.heals_in_memory or task.phase == "ended":
        return
    if not 1 <= body.iteration <= ITERATIONS_MAX or body.step_s < 0:
        return
    logged = task.logged
    if logged is None or logged.round != task.rounds:
        _round_begins(state, task, body.iteration)
        task.logged = logged = CommandProgress(
            round=task.rounds,
            rank=body.rank,
            first=body.iteration,
            iterations=0,
            size=num_slots(task),
            max_iteration=task.max_iteration or body.iteration,
        )
        command_resumed(state, task, body.iteration)
        clear_suspicion(state, task)
    elif logged.rank != body.rank:
        return
    command_unstalled(state, task, body.rank, body.attempt)
    if body.iteration < logged.first:
        logged.first = body.iteration
    logged.iterations = body.iterations if body.iterations >= body.iteration else 0
    logged.global_batch = body.global_batch
    keep_logged(state, task, body)
    logged.disturbed = any(one.is_stopped for one in task.ranks.values())
    counts = batch_counts(task)
    new = min(body.iteration - task.max_iteration, body.num_iterations)
    add_work(state, task, task.max_iteration + (new if counts else 0))
    task.max_iteration = max(task.max_iteration, body.iteration)
    task.iteration, task.progressed_s = body.iteration, state.at_s
    task.step_s = body.step_s
    if body.loss_text:
        first = task.not_finite.first if task.not_finite is not None else body.iteration
        not_finite(state, task, first, body.iteration + 1, body.loss_text)
    elif body.loss is not None:
        finite(state, task, body.iteration, (body.loss,))
    else:
        task.loss = None
    rate_flops = task.iteration_flops / body.step_s if counts and body.step_s > 0 else 0.0
    task.rate_flops = min(rate_flops, RATE_FLOPS_MAX)
    if has_progressed(state, task, rank):
        passed(state, task, task.attempts)
        task.restarts.clear()


def _round_begins(state: ClusterState, task: Task, iteration: int) -> None:
    """A new round logs its first line: count the iterations that it repeats. Add them to the newest
    incident, unless that is closed and its loss known: then a plan has moved the task."""
    lost = max(task.iteration - iteration + 1, 0) if task.logged is not None else 0
    task.iterations_lost += lost
    for incident in reversed(state.incidents.values()):
        if incident.task != task.id:
            continue
        if incident.iterations_lost is None or not incident.outcome:
            incident.iterations_lost = (incident.iterations_lost or 0) + lost
            if lost and incident.outcome == "healed":
                incident.outcome = "set back"
                task.healed -= 1
        return
