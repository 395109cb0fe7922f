"""The fold of a command's silence: it has printed no line of progress for too long.

What it does between two lines nobody sees, and there is no second source: a slow store, a long
evaluation and a hang look alike. So it is told, and no more; unless the job spec says after how
long (`hang_after_s`) it is to start again.
"""

from __future__ import annotations

from ..events.records import Record
from ..events.statuses import TASK_HANG
from .folding import arm, disarm, fault, find
from .noticed import Stall
from .state import ClusterState, Rank, Task

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
