"""The fold of failures of a task's own processes, and of pauses before they start again."""

import hashlib
import re
from collections.abc import Iterable, Sequence

from ..state.cluster import ClusterState, Deadline
from ..state.incident import FailureSeries
from ..state.task import Rank, Task

PAUSES_S = (1.0, 4.0, 16.0, 60.0)
"""Pauses before a rank starts again, by its failures without progress; then always the last."""
JITTER_SHARE = 0.1
"""Pauses differ between tasks by up to this share, so that they do not all start at once."""
RESTART = "restart"
"""The deadline `restart/TASK/RANK` at which a pause is over."""
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_WORDS_CHARS_MAX = 200


def pause_s(task: int, num_failures: int, longest_s: float) -> float:
    """The pause after so many failures without progress. Equal for equal arguments."""
    digest = hashlib.blake2b(f"{task}/{num_failures}".encode(), digest_size=2).digest()
    share = 1 + JITTER_SHARE * (2 * int.from_bytes(digest, "big") / 0xFFFF - 1)
    return min(PAUSES_S[min(num_failures, len(PAUSES_S)) - 1] * share, longest_s)


def pause_name(task: Task, number: int) -> str:
    return f"{RESTART}/{task.id}/{number}"


def pause_restart(state: ClusterState, task: Task, rank: Rank) -> None:
    """A process ended by itself: unless it trained an iteration, its next one starts later."""
    length_s = pause_s(task.id, task.restarts.get(rank.rank, 1), state.policy.restart_pause_s_max)
    if not _has_trained(task, rank) and length_s > 0 and not task.ending:
        state.deadlines[pause_name(task, rank.rank)] = Deadline(state.at_s + length_s, length_s)


def end_pauses(state: ClusterState, task: Task, numbers: Iterable[int]) -> None:
    """The ranks start at once."""
    for number in numbers:
        state.deadlines.pop(pause_name(task, number), None)


def _has_trained(task: Task, rank: Rank) -> bool:
    """Whether the task finished an iteration while this process was part of it."""
    if not task.heals_in_memory:
        return task.logged is not None and task.logged.round == task.rounds
    return 0 < rank.joined <= task.stepped


def add_failure(
    task: Task,
    at_s: float,
    ranks: Sequence[Rank],
    status: str,
    why: str,
    words: str,
    *,
    can_pass: bool,
) -> None:
    """Add a failure to the series. Another status or iteration begins to count anew."""
    series = task.failures
    if series is None:
        series = FailureSeries(since_s=at_s, since_iteration=task.max_iteration)
        task.failures = series
    words = _NUMBER.sub("#", words)[:_WORDS_CHARS_MAX]
    if (series.status, series.iteration) != (status, task.max_iteration):
        series.status, series.iteration = status, task.max_iteration
        series.slots, series.num, series.now = [], 0, []
        series.words, series.are_alike = words, True
    generation = task.generation if task.heals_in_memory else task.rounds
    numbers = [rank.rank for rank in ranks]
    if not series.num or series.generation != generation or set(numbers) & set(series.now):
        series.generation, series.num, series.now = generation, series.num + 1, []
    series.now += numbers
    series.ranks = sorted({*series.ranks, *numbers})
    series.slots += [slot for rank in ranks if (slot := rank.slot) not in series.slots]
    series.are_alike = series.are_alike and series.words == words
    series.can_pass, series.why = can_pass, why[:_WORDS_CHARS_MAX]


def passed(state: ClusterState, task: Task, numbers: Iterable[int]) -> None:
    """These ranks have made progress since they failed. If all have: the task may take slots from
    others again."""
    series = task.failures
    if series is None:
        return
    gone = {*numbers, *(number for number in series.ranks if number not in task.seats_at)}
    series.ranks = [number for number in series.ranks if number not in gone]
    if not series.ranks:
        task.failures = None
        if state.plan_s >= series.since_s:
            state.replan = state.replan or f"{task.spec.name} has passed its point of failure"


def clear_suspicion(state: ClusterState, task: Task) -> None:
    """The task trains: the slots of its processes are not suspected any more, except by itself."""
    own = {suspect.slot for suspect in task.suspects.values()}
    for rank in task.ranks.values():
        node = state.nodes.get(rank.slot.node)
        if node is not None and node.slots_suspected and rank.slot not in own:
            node.slots_suspected.pop(rank.slot.index, None)
