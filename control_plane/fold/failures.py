"""The fold of failures of a task's own processes."""

import re
from collections.abc import Iterable, Sequence

from ..state.cluster import ClusterState
from ..state.incident import FailureSeries
from ..state.task import Rank, Task

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_WORDS_CHARS_MAX = 200


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
