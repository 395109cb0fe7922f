"""The fold of stalls: who stands, who went on, and what becomes of a task that stands for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..events import detected as d
from ..events.records import Record
from ..events.reports import Body
from ..events.statuses import NCCL_TIMEOUT, TASK_HANG
from .fold_unprinted import prints_again, prints_no_more
from .folding import EARLY_S, arm, await_hang, fault
from .hang import STANDS, WAITED_FOR, WORKS_ON, located
from .noticed import Crawl, Stall
from .state import ClusterState, Rank, Task

NORMAL_S_MAX = 1e6
"""Of an iteration; more is absurd."""


def _rank_stalled(state: ClusterState, record: Record, body: d.RankStalled) -> None:
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


def crawls(state: ClusterState, record: Record, task: Task, body: d.RankPaced) -> None:
    """A member's one iteration lasts too long by its own work, and it has not ended."""
    if task.phase not in ("training", "quiescing") or body.iteration < task.iteration:
        return
    task.crawls[body.rank] = Crawl(
        iteration=body.iteration, own_s=body.own_s,
        normal_s=min(max(body.normal_s, 0.0), NORMAL_S_MAX),
        since_s=record.at_s - min(max(body.iteration_s, 0.0), record.at_s), told_s=record.at_s,
        seq=record.seq)
    await_hang(state, task, anew=True)


def _rank_went_on(state: ClusterState, record: Record, body: d.RankWentOn) -> None:
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
    d.RankStalled: _rank_stalled, d.RankWentOn: _rank_went_on,
}
