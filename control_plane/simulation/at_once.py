"""Answers that are awaited together, folded at once where nobody keeps the log.

Of all members that leave a generation, or are up in the next one, nothing follows until the last
has said so; nor of all processes of a command that are ended. The first and the last go through the
heart's one door (heart.py); those between them change the state as they would there, without the
look at all that may follow from other records.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...events.records import reports as r
from ...events.records.envelope import Record
from ..decide import calm
from ..fold.fold import HANDLERS
from ..state.cluster import ClusterState
from ..state.members import has_settled, is_mute, is_pinned
from ..state.task import Task

Answer = r.Quiesced | r.Reconfigured | r.RankStarted | r.RankExited


def is_awaited(state: ClusterState, first: Answer, last: Answer, nodes: Collection[str]) -> bool:
    """Whether nothing follows of any answer between these two, of which the first is folded.
    `nodes`: of all that answer."""
    task = state.tasks.get(first.task)
    if task is None or not calm.is_quiet(state, first) or not calm.is_one_of_many(state, first):
        return False
    rank = task.ranks.get(last.rank)
    if rank is None or rank.attempt != last.attempt:
        return False
    if isinstance(last, r.RankExited):
        return not task.ending and not task.slow and not is_pinned(state, task) and _is_alone(
            state, task, nodes)
    if isinstance(last, r.RankStarted):
        return not task.heals_in_memory and rank.state == "ordered" and any(
            seat.rank == last.rank for seat in task.target)
    if task.member(last.rank) is None or last.generation != task.generation:
        return False
    return is_mute(task, rank) if isinstance(last, r.Quiesced) else not has_settled(task, rank)


def _is_alone(state: ClusterState, task: Task, nodes: Collection[str]) -> bool:
    """Whether no other task has anything of these nodes, or waits for what becomes free there."""
    there = [one for name in nodes for one in state.seated.tasks(name)]
    there += [one.task for name in nodes for one in state.nodes[name].occupants.values()]
    return all(one == task.id for one in there) and not any(
        calm.roams(state.tasks[one], nodes) for one in sorted(state.resting - state.calm))


def fold_answers(state: ClusterState, told: Sequence[tuple[str, int, Answer]]) -> None:
    """Answers as their sources number them, at the time of the last record: the state is as after
    `fold` of each."""
    for source, source_seq, body in told:
        state.seq += 1
        state.sources[source] = max(source_seq, state.sources.get(source, 0))
        HANDLERS[type(body)](state, Record(
            seq=state.seq, epoch=state.epoch, at_s=state.at_s, occurred_s=state.at_s,
            source=source, source_seq=source_seq, cause=0,
            incident=state.tasks[body.task].incident, body=body), body)
