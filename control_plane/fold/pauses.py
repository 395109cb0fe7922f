"""The fold of pauses before ranks start again."""

import hashlib
from collections.abc import Iterable

from ...events.timing import pause_after_s
from ..state.cluster import ClusterState
from ..state.task import Rank, Task
from .edits import clear_deadline, set_deadline

JITTER_SHARE = 0.1
"""Pauses differ between tasks by up to this share, so that they do not all start at once."""
REFUSED_PAUSE_S_MAX = 10.0
"""Longest pause after a node has refused a start for want of something (our choice): the task is
healed within seconds once it is there."""
RESTART = "restart"
"""The deadline `restart/TASK/RANK` at which a pause is over."""


def pause_s(task: int, num_failures: int, longest_s: float) -> float:
    """The pause after so many failures without progress. Equal for equal arguments."""
    digest = hashlib.blake2b(f"{task}/{num_failures}".encode(), digest_size=2).digest()
    share = 1 + JITTER_SHARE * (2 * int.from_bytes(digest, "big") / 0xFFFF - 1)
    return min(pause_after_s(num_failures) * share, longest_s)


def pause_name(task: Task, number: int) -> str:
    return f"{RESTART}/{task.id}/{number}"


def pause_restart(state: ClusterState, task: Task, rank: Rank) -> None:
    """A process ended by itself: unless it trained an iteration, its next one starts later."""
    length_s = pause_s(task.id, task.restarts.get(rank.rank, 1), state.policy.restart_pause_s_max)
    if not _has_trained(task, rank) and length_s > 0 and not task.ending:
        set_deadline(state, pause_name(task, rank.rank), length_s)


def pause_start(state: ClusterState, task: Task, number: int, num_refused: int) -> None:
    """A node has refused to start the rank: it is tried again later, whatever the policy says."""
    if not task.ending:
        length_s = pause_s(task.id, num_refused, REFUSED_PAUSE_S_MAX)
        set_deadline(state, pause_name(task, number), length_s)


def end_pauses(state: ClusterState, task: Task, numbers: Iterable[int]) -> None:
    """The ranks start at once."""
    for number in numbers:
        clear_deadline(state, pause_name(task, number))


def _has_trained(task: Task, rank: Rank) -> bool:
    """Whether the task finished an iteration while this process was part of it."""
    if not task.heals_in_memory:
        return task.logged_now is not None
    return 0 < rank.joined <= task.stepped
