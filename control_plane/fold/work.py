"""The fold of RankWorked: a rank that is waited for and works has its whole limit again."""

from ...events import words
from ...events.records import reports as r
from ...events.records.envelope import Record
from ...events.records.in_words import work_in_words
from ..state import limits
from ..state.cluster import ClusterState, Deadline
from ..state.limits import Limit
from ..state.task import Rank, Task, Work

IDLE = "nothing moved"
"""Why a limit has acted, if nothing else is known."""
NAMED_SINCE_HEART = 27
"""The decider that names the limit that has acted; the texts of earlier logs do not change."""


def rank_worked(
    state: ClusterState, record: Record, task: Task, rank: Rank, body: r.RankWorked
) -> None:
    waited = waited_for(state, task, rank)
    if waited is None:
        rank.work = None
        return
    rank.work = work = _work(rank.work, record, body)
    name, limit = waited
    limit = limits.of_work(state.policy, limit, work)
    deadline = state.deadlines.get(name)
    if deadline is not None:
        due_s = _due_s(work, limit, state.policy.silent_s_max)
        state.deadlines[name] = Deadline(max(deadline.due_s, due_s), limit.s)


def waited_for(state: ClusterState, task: Task, rank: Rank) -> tuple[str, Limit] | None:
    """The deadline of what the task waits for from this process, and its limit; None: for nothing
    that is limited."""
    policy = state.policy
    if rank.state in ("ordered", "started"):
        name = f"start/{task.id}/{rank.rank}/{rank.attempt}"
        # A script prepares for as long as it likes.
        return None if task.spec.command else (name, limits.of(policy, "start_s_max"))
    if task.member(rank.rank) is not rank or rank.state == "finished":
        return None
    of = f"{task.id}/{task.generation}"
    if task.phase == "reconfiguring" and rank.reconfigured < task.generation:
        return f"reconfigure/{of}", limits.of(policy, "reconfigure_s_max")
    if task.phase == "quiescing" and rank.quiesced < task.generation:
        return f"quiesce/{of}", limits.to_leave(policy, task.mode)
    if task.finished:
        return f"finish/{of}", limits.of(policy, "boundary_s_max")
    return None


def acted(state: ClusterState, limit: Limit) -> str:
    """The limit that has acted; "": the decider of that time did not say it."""
    if 0 < state.heart < NAMED_SINCE_HEART:
        return ""
    return f" ({limit.field}: {limit.s:g} s)"


def why_late(state: ClusterState, limit: Limit, ranks: list[Rank], what: str = IDLE) -> str:
    """The limit that has acted on these ranks because of `what`, and which of them moved last; "":
    the decider of that time did not say it."""
    if 0 < state.heart < NAMED_SINCE_HEART:
        return ""
    told = [(rank.work.moved_s, -rank.rank, rank.work) for rank in ranks if rank.work is not None]
    if not told:
        return f" ({limit.field}: {what} for {limit.s:g} s)"
    moved_s, number, work = max(told, key=lambda last: last[:2])
    idle_s = state.at_s - moved_s
    limit = limits.of_work(state.policy, limit, work)
    if work.computes and idle_s >= state.policy.silent_s_max:
        limit = limits.of(state.policy, "silent_s_max")
    last = f"rank {-number} {in_words(work)}, moved {words.span(idle_s)} ago"
    return f" ({limit.field}: {what} for {limit.s:g} s; {last})"


def in_words(work: Work) -> str:
    return work_in_words(work.what, work.done, work.total, work.unit, work.moved_bytes)


def _work(old: Work | None, record: Record, body: r.RankWorked) -> Work:
    is_same = (
        old is not None
        and (old.generation, old.what, old.total) == (body.generation, body.what, body.total)
        and body.done >= old.done
    )
    return Work(
        generation=body.generation,
        what=body.what,
        unit=body.unit,
        done=body.done,
        total=body.total,
        moved_bytes=body.moved_bytes,
        moved_s=record.at_s - max(body.idle_s, 0.0),
        computes=body.computes,
        is_storage=body.is_storage,
        told_s=record.at_s,
        first=old.first if old is not None and is_same else body.done,
        first_s=old.first_s if old is not None and is_same else record.at_s,
    )


def _due_s(work: Work, limit: Limit, silent_s_max: float) -> float:
    """When the limit acts if nothing moves any more. To compute counts, but not for long."""
    if work.computes:
        return min(work.told_s + limit.s, work.moved_s + silent_s_max)
    return work.moved_s + limit.s
