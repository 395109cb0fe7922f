"""The fold of stalls: who stands, who went on, and what becomes of a task that stands for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...events.records import reports as r
from ...events.records.envelope import Record
from ...events.records.statuses import NCCL_TIMEOUT, TASK_HANG
from ...events.records.types import Body
from ..incidents.hangs import STANDS, WAITED_FOR, WORKS_ON, located
from ..state.cluster import ClusterState
from ..state.task import Crawl, Rank, Stall, Task
from .edits import EARLY_S, arm, await_hang, disarm, fault, find

# --- The fold of a command's silence: it has printed no line of progress for too long. ---
#
# What it does between two lines nobody sees, and there is no second source: a slow store, a long
# evaluation and a hang look alike. So it is told, and no more; unless the job spec says after how
# long (`hang_after_s`) it is to start again.

UNPRINTED = "has printed no line of progress"
"""Why the process that prints is overdue."""


def unprinted(state: ClusterState, task: Task) -> tuple[str, float]:
    """Why a command is held to stand, and since when; "" where it is not."""
    told = _stands(task)
    if told is None:
        return "", 0.0
    rank, stall = told
    act_s = task.spec.hang_after_s
    then = (f"all start again after {act_s:g} s of that (hang_after_s)" if act_s is not None else
            "nothing is done about that: its job spec has no hang_after_s")
    return f"{_why(rank, stall)}; {then}", stall.since_s


def prints_no_more(state: ClusterState, task: Task, number: int, attempt: int,
                   stall: Stall) -> None:
    """An agent tells so of the process whose lines count; what others print says nothing."""
    rank, logged = find(task, number, attempt), task.logged
    if rank is None or logged is None or task.phase != "training" or rank.stopping:
        return
    if (logged.round, logged.rank) != (task.rounds, number):
        return
    task.stalls[number] = stall
    if task.spec.hang_after_s is not None:
        arm(state, _deadline(task, rank),
            max(stall.since_s + task.spec.hang_after_s - state.at_s, 0.0))


def prints_again(state: ClusterState, task: Task, number: int, attempt: int) -> None:
    """Where healing was held meanwhile, there is nothing left to end it for."""
    rank = find(task, number, attempt)
    if rank is None:
        return
    task.stalls.pop(number, None)
    disarm(state, _deadline(task, rank))
    if rank.overdue == UNPRINTED and not rank.stopping:
        rank.overdue = ""


def late_printed(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """It has stood for as long as its spec allows: the round starts again.

    Not while its node is silent or only just back, for of that nobody knows, nor while one of its
    processes is stopped: whoever stopped it wants that.
    """
    told, after_s = _stands(task), task.spec.hang_after_s
    if told is None or after_s is None or [told[0].rank, told[0].attempt] != rest:
        return
    rank, stall = told
    node = state.nodes.get(rank.slot.node)
    if node is None or task.ending or rank.stopping or rank.overdue:
        return
    if (node.silent or record.at_s < node.since_s + state.policy.evidence_s_max
            or any(one.suspended for one in task.ranks.values())):
        arm(state, _deadline(task, rank), max(after_s, state.policy.evidence_s_max))
        return
    rank.overdue = UNPRINTED
    fault(task, record, [rank], TASK_HANG,
          f"{_why(rank, stall)}, {record.at_s - stall.since_s:.3g} s ago", evidence=(stall.seq,),
          since_s=stall.since_s)


def _stands(task: Task) -> tuple[Rank, Stall] | None:
    logged = task.logged
    prints = logged is not None and not task.heals_in_memory
    stall = task.stalls.get(logged.rank) if logged is not None and prints else None
    rank = task.ranks.get(logged.rank) if logged is not None else None
    return (rank, stall) if rank is not None and stall is not None else None


def _why(rank: Rank, stall: Stall) -> str:
    """For example `rank 3 on n2 has printed no line of progress since iteration 40; ...`."""
    does = f" and {stall.stack}" if stall.stack else ""
    return (f"rank {rank.rank} on {rank.slot.node} {UNPRINTED} since iteration {stall.iteration}"
            f"{does}, an iteration took {stall.normal_s:.3g} s")


def _deadline(task: Task, rank: Rank) -> str:
    return f"printed/{task.id}/{rank.rank}/{rank.attempt}"

NORMAL_S_MAX = 1e6
"""Of an iteration; more is absurd."""


def _rank_stalled(state: ClusterState, record: Record, body: r.RankStalled) -> None:
    task = state.tasks.get(body.task)
    stall = Stall(
        iteration=body.iteration, where=body.where, what=body.what, collective=body.collective,
        since_s=record.at_s - min(max(body.in_s, 0.0), record.at_s),
        normal_s=min(max(body.normal_s, 0.0), NORMAL_S_MAX), told_s=record.at_s, seq=record.seq,
        stack=body.stack)
    if task is not None and not task.heals_in_memory:
        prints_no_more(state, task, body.rank, body.attempt, stall)
        return
    rank = _member(task, body.rank, body.attempt, body.generation)
    if task is None or rank is None or task.phase not in ("training", "quiescing"):
        return
    task.stalls[rank.rank] = stall
    if stall.where == "collective":
        task.crawls.pop(rank.rank, None)  # its own work did end
    await_hang(state, task, anew=True)


def crawls(state: ClusterState, record: Record, task: Task, body: r.StepTimeChanged) -> None:
    """A member's one iteration lasts too long by its own work, and it has not ended."""
    if task.phase not in ("training", "quiescing") or body.iteration < task.iteration:
        return
    task.crawls[body.rank] = Crawl(
        iteration=body.iteration, own_s=body.own_s,
        normal_s=min(max(body.normal_s, 0.0), NORMAL_S_MAX),
        since_s=record.at_s - min(max(body.iteration_s, 0.0), record.at_s), told_s=record.at_s,
        seq=record.seq)
    await_hang(state, task, anew=True)


def _rank_went_on(state: ClusterState, record: Record, body: r.RankUnstalled) -> None:
    """Where healing was held meanwhile, there is nothing left to end it for."""
    task = state.tasks.get(body.task)
    if task is not None and not task.heals_in_memory:
        prints_again(state, task, body.rank, body.attempt)
        return
    rank = _member(task, body.rank, body.attempt, body.generation)
    if task is None or rank is None:
        return
    task.stalls.pop(rank.rank, None)
    if rank.overdue == STANDS and not rank.stopping:
        rank.overdue = ""
    await_hang(state, task, anew=True)


def _member(task: Task | None, number: int, attempt: int, generation: int) -> Rank | None:
    if task is None or generation != task.generation or task.phase == "ended":
        return None
    rank = task.member(number)
    return rank if rank is not None and rank.attempt == attempt else None


def passed(state: ClusterState, task: Task, iteration: int) -> None:
    """So many iterations are finished, for who told so.

    Another may still stand at the end of the last of these: its collectives have ended for some
    and not for all, or it hangs in a step of its own. That is told once and holds until the rank
    says that it went on. In those before nobody stands: all have entered the next.
    """
    if any(stall.iteration < iteration - 1 for stall in task.stalls.values()):
        task.stalls = {number: stall for number, stall in task.stalls.items()
                       if stall.iteration >= iteration - 1}
        await_hang(state, task, anew=True)
    for number in [one for one, crawl in task.crawls.items() if crawl.iteration < iteration]:
        del task.crawls[number]
        rank = task.member(number)
        if rank is not None and rank.overdue == WORKS_ON and not rank.stopping:
            rank.overdue = ""  # held, it came to its end
        await_hang(state, task, anew=True)
    if task.evidence_over == task.generation and not task.stalls and not any(
            rank.failed == task.generation for rank in task.living_members()):
        task.evidence_over, task.failed_s = 0, -1.0  # held, it went on by itself


def late_hang(state: ClusterState, record: Record, task: Task, rest: list[int]) -> None:
    """The task has stood for long enough; who is to blame is started again.

    Where nobody is, its collective failed, though nobody said so: a reattempt in place.
    """
    hang = located(state, task)
    if hang is None or not hang.is_sure or rest[0] != task.generation:
        return
    if record.at_s < hang.due_s - EARLY_S:
        arm(state, f"hang/{task.id}/{task.generation}", hang.due_s - record.at_s)
        return
    ranks = [task.ranks[number] for number in hang.ranks]
    if hang.kind == "silent":
        for rank in ranks:  # the silence of their node opens the incident
            rank.overdue = rank.overdue or WAITED_FOR
        return
    if hang.kind == "network":
        task.evidence_over, task.failed_s = task.generation, hang.since_s
    else:
        for rank in ranks:
            rank.overdue = WORKS_ON if hang.kind == "slow" else STANDS
    fault(task, record, ranks, NCCL_TIMEOUT if hang.kind == "network" else TASK_HANG, hang.why,
          evidence=hang.evidence, since_s=hang.since_s)


STALLS: dict[type[Body], Callable[[ClusterState, Record, Any], None]] = {
    r.RankStalled: _rank_stalled, r.RankUnstalled: _rank_went_on,
}
