"""The fold of stalls: stalled ranks, ranks that continue, and hangs that time out."""

from ...events.records import reports as r
from ...events.records.envelope import Record
from ...events.records.statuses import NCCL_TIMEOUT, TASK_HANG
from ..incidents.hangs import STALLED, WAITED_FOR, WORKS_ON, limit_of, locate_hang
from ..state.cluster import ClusterState
from ..state.incident import NUM_STACKS_MAX, STACK_CHARS_MAX, KeptStacks
from ..state.limits import Limit
from ..state.members import current_member
from ..state.task import Rank, SlowIteration, Stall, Task
from . import edits
from .work import acted

# --- commands that log no progress ---
# Slow storage, a long evaluation and a hang look the same, and there is no second source. So the
# stall is only shown, unless the job spec sets a time limit (`hang_after_s`) for a restart.

UNPRINTED = "has printed no line of progress"
"""Timeout reason of a stalled command: of its process that logs progress."""


def stalled_command(state: ClusterState, task: Task) -> tuple[str, float]:
    """Why a command counts as stalled, and since when; ("", 0) if it does not."""
    stalled = _stalled(task)
    if stalled is None:
        return "", 0.0
    rank, stall = stalled
    act_s = task.spec.hang_after_s
    then = (
        f"all start again after {act_s:g} s of that (hang_after_s)"
        if act_s is not None
        else "nothing is done about that: its job spec has no hang_after_s"
    )
    return f"{_why(rank, stall)}; {then}", stall.since_s


def command_stalled(
    state: ClusterState, task: Task, number: int, attempt: int, stall: Stall
) -> None:
    """Record a stall of the process whose log counts; other processes are ignored."""
    rank, logged = edits.find_rank(task, number, attempt), task.logged
    if rank is None or logged is None or task.phase != "training" or rank.stopping:
        return
    if (logged.round, logged.rank) != (task.rounds, number):
        return
    task.stalls[number] = stall
    if task.spec.hang_after_s is not None:
        edits.set_deadline(
            state,
            _deadline(task, rank),
            max(stall.since_s + task.spec.hang_after_s - state.at_s, 0.0),
        )


def command_unstalled(state: ClusterState, task: Task, number: int, attempt: int) -> None:
    """Clear the stall. Cancel its timeout if that was not acted upon, as healing was paused."""
    rank = edits.find_rank(task, number, attempt)
    if rank is None:
        return
    task.stalls.pop(number, None)
    edits.clear_deadline(state, _deadline(task, rank))
    if rank.timeout_reason == UNPRINTED and not rank.stopping:
        rank.timeout_reason = ""


def command_hang_timed_out(
    state: ClusterState, record: Record, task: Task, rest: list[int]
) -> None:
    """The stall exceeds the spec's limit: record a fault, so that all processes restart. Wait while
    the node's log may be delayed, or while a process is stopped, which a person intends."""
    stalled, after_s = _stalled(task), task.spec.hang_after_s
    if stalled is None or after_s is None or [stalled[0].rank, stalled[0].attempt] != rest:
        return
    rank, stall = stalled
    node = state.nodes.get(rank.slot.node)
    if node is None or task.ending or rank.stopping or rank.timeout_reason:
        return
    if (
        node.unreachable
        or record.at_s < node.since_s + state.policy.evidence_s_max
        or any(one.is_stopped for one in task.ranks.values())
    ):
        edits.set_deadline(state, _deadline(task, rank), max(after_s, state.policy.evidence_s_max))
        return
    rank.timeout_reason = UNPRINTED
    edits.record_fault(
        task,
        record,
        [rank],
        TASK_HANG,
        f"{_why(rank, stall)}, {record.at_s - stall.since_s:.3g} s ago"
        + acted(state, Limit("hang_after_s", after_s)),
        evidence=(stall.seq,),
        since_s=stall.since_s,
        own=False,
    )


def _stalled(task: Task) -> tuple[Rank, Stall] | None:
    if task.logged is None or task.heals_in_memory:
        return None
    rank, stall = task.ranks.get(task.logged.rank), task.stalls.get(task.logged.rank)
    return (rank, stall) if rank is not None and stall is not None else None


def _why(rank: Rank, stall: Stall) -> str:
    """For example `rank 3 on n2 has printed no line of progress since iteration 40; ...`."""
    does = f" and {stall.stack}" if stall.stack else ""
    return (
        f"rank {rank.rank} on {rank.slot.node} {UNPRINTED} since iteration {stall.iteration}"
        f"{does}, an iteration took {stall.normal_s:.3g} s"
    )


def _deadline(task: Task, rank: Rank) -> str:
    return f"printed/{task.id}/{rank.rank}/{rank.attempt}"


NORMAL_S_MAX = 1e6
"""Limit of a reported iteration time."""


def rank_stalled(state: ClusterState, record: Record, task: Task, body: r.RankStalled) -> None:
    stall = Stall(
        iteration=body.iteration,
        where=body.where,
        what=body.what,
        collective=body.collective,
        since_s=record.at_s - min(max(body.in_s, 0.0), record.at_s),
        normal_s=min(max(body.normal_s, 0.0), NORMAL_S_MAX),
        told_s=record.at_s,
        seq=record.seq,
        stack=body.stack,
        silent_peers=body.silent_peers,
        groups=body.groups,
        are_groups_complete=body.are_groups_complete,
        waits=body.waits,
        is_untimed=body.is_untimed,
    )
    if not task.heals_in_memory:
        command_stalled(state, task, body.rank, body.attempt, stall)
        return
    rank = current_member(task, body.rank, body.attempt, body.generation)
    if rank is None or task.phase not in ("training", "quiescing"):
        return
    task.stalls[rank.rank] = stall
    if stall.where == "collective":
        task.slow_iterations.pop(rank.rank, None)  # its own work has ended
    edits.update_hang_deadline(state, task, restart=True)


def record_slow_iteration(
    state: ClusterState, record: Record, task: Task, body: r.StepTimeChanged
) -> None:
    """Record a slow iteration: a member's own work takes too long and has not ended yet."""
    if task.phase not in ("training", "quiescing") or body.iteration < task.iteration:
        return
    task.slow_iterations[body.rank] = SlowIteration(
        iteration=body.iteration,
        own_s=body.own_s,
        normal_s=min(max(body.normal_s, 0.0), NORMAL_S_MAX),
        since_s=record.at_s - min(max(body.iteration_s, 0.0), record.at_s),
        told_s=record.at_s,
        seq=record.seq,
    )
    edits.update_hang_deadline(state, task, restart=True)


def rank_unstalled(state: ClusterState, record: Record, task: Task, body: r.RankUnstalled) -> None:
    """Clear the stall. Cancel its timeout if that was not acted upon, as healing was paused."""
    if not task.heals_in_memory:
        command_unstalled(state, task, body.rank, body.attempt)
        return
    rank = current_member(task, body.rank, body.attempt, body.generation)
    if rank is None:
        return
    task.stalls.pop(rank.rank, None)
    if rank.timeout_reason == STALLED and not rank.stopping:
        rank.timeout_reason = ""
    edits.update_hang_deadline(state, task, restart=True)


def stacks_kept(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.StacksKept
) -> None:
    """What a rank did before it is ended is evidence of the incident for which it is."""
    incident = state.incidents.get(task.incident)
    if incident is None or len(incident.stacks) >= NUM_STACKS_MAX:
        return
    edits.add_evidence(incident, record)
    incident.stacks.append(
        KeptStacks(
            rank=rank.rank,
            attempt=rank.attempt,
            node=rank.slot.node,
            path=body.path,
            stack=body.stack[:STACK_CHARS_MAX],
            mark=body.mark,
            why=body.why,
            nccl_ras=body.nccl_ras,
        )
    )


def iterations_passed(state: ClusterState, task: Task, iteration: int) -> None:
    """Clear the stalls that a finished iteration disproves: all members have entered it. At its end
    a member may still be stalled, since a collective can end for some members only, or in its own
    work after it. Such a stall is reported once and stays until RankUnstalled."""
    if any(stall.iteration < iteration - 1 for stall in task.stalls.values()):
        task.stalls = {
            number: stall
            for number, stall in task.stalls.items()
            if stall.iteration >= iteration - 1
        }
        edits.update_hang_deadline(state, task, restart=True)
    for number in [
        one for one, crawl in task.slow_iterations.items() if crawl.iteration < iteration
    ]:
        del task.slow_iterations[number]
        rank = task.member(number)
        if rank is not None and rank.timeout_reason == WORKS_ON and not rank.stopping:
            rank.timeout_reason = ""  # the iteration ended while healing was paused
        edits.update_hang_deadline(state, task, restart=True)
    if (
        task.uncaused_generation == task.generation
        and not task.stalls
        and not any(rank.failed == task.generation for rank in task.living_members())
    ):
        task.uncaused_generation, task.failed_s = 0, -1.0  # the task steps; healing was paused


def hang_timed_out(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """The hang deadline has passed: record a fault of the ranks that hang, or of the network."""
    hang = locate_hang(state, task)
    if hang is None or not hang.is_actionable or rest[0] != task.generation:
        return
    if record.at_s < hang.due_s - edits.EARLY_S:
        edits.set_deadline(state, f"hang/{task.id}/{task.generation}", hang.due_s - record.at_s)
        return
    ranks = [task.ranks[number] for number in hang.ranks]
    if hang.kind == "silent":
        for rank in ranks:  # the loss of their node opens the incident
            rank.timeout_reason = rank.timeout_reason or WAITED_FOR
        return
    if hang.kind == "network":
        task.uncaused_generation, task.failed_s = task.generation, hang.since_s
    else:
        for rank in ranks:
            rank.timeout_reason = WORKS_ON if hang.kind == "slow" else STALLED
    edits.record_fault(
        task,
        record,
        ranks,
        NCCL_TIMEOUT if hang.kind == "network" else TASK_HANG,
        hang.why + acted(state, limit_of(state, task, hang)),
        evidence=hang.evidence,
        since_s=hang.since_s,
    )
