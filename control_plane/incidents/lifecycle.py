"""From faults to incidents: opened, escalated and closed, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator

from ...events.records.decisions import IncidentClosed, IncidentEscalated, IncidentOpened
from ...events.records.statuses import LOST_CONNECTION, TASK_HANG, WRONG_INPUT
from ...events.records.types import Body, Outcome, Severity
from ..state.cluster import ClusterState
from ..state.task import Rank, Task
from .root_cause import root_cause
from .severity import worse

NUM_STOPS_MAX = 3
"""StopRank orders for one process before it is given up."""


def open_incidents(state: ClusterState, task: Task) -> Iterator[Body]:
    """Turn the task's faults, and what silence and patience prove, into incidents."""
    if task.faults:
        yield from _from_faults(state, task)
    yield from _lost(state, task)
    if not any(rank.overdue for rank in task.ranks.values()):
        return
    for rank in [task.ranks[key] for key in sorted(task.ranks)]:
        told = len(rank.stop_orders) >= NUM_STOPS_MAX
        if rank.overdue and told and not _armed(state, task, rank):
            yield _tell(state, task, "SEV1", TASK_HANG, rank.slot.node, (rank.rank,),
                        f"rank {rank.rank} could not be ended in {NUM_STOPS_MAX} orders",
                        tuple(rank.stop_orders[-1:]))


def _from_faults(state: ClusterState, task: Task) -> Iterator[Body]:
    limit = state.policy.restarts_max
    cause = root_cause(state, task)
    severity, status, ranks, why, evidence = (
        cause.severity, cause.status, cause.ranks, cause.why, cause.evidence)
    if task.reattempts > limit:
        ranks, severity = tuple(x.rank for x in task.living_members()), worse(severity, "SEV2")
        why = f"{limit} reattempts in place did not help, the processes start again: {why}"
    yield _tell(state, task, severity, status, cause.node, ranks, why, evidence, root=cause.root)
    if not task.furthest and any(task.ranks[number].error == WRONG_INPUT
                                 for number in ranks if number in task.ranks):
        yield _close(state, task, "failed", f"it cannot start: {why}")
        return
    series = task.series
    if series is not None and series.num > 2 * (limit + 1):
        yield _close(state, task, "failed", f"{series.num} times the same ({series.status}) at "
                     f"iteration {series.iteration}, in whichever rank: {why}")
        return
    spent = [number for number in ranks if task.restarts.get(number, 0) > limit]
    if not spent or cause.is_hearsay:
        return
    left = [rank for rank in task.living_members() if rank.rank not in spent]
    followed = [number for number in spent if number in task.blamed]
    if left and task.heals_in_memory and not followed:
        names = " ".join(str(number) for number in spent)
        spent_why = f"rank {names} {_again(state)}, its slot is taken out"
        yield _tell(state, task, "SEV1", status, "", tuple(spent), spent_why, evidence)
        return
    slot = task.blamed[followed[0]] if followed else None
    also = f", and before that on {slot.node}/{slot.index}" if slot is not None else ""
    last = f"{_again(state)}{also}: {why}"
    yield _tell(state, task, "SEV1", status, "", (), last, evidence)
    yield _close(state, task, "failed", last)


def _again(state: ClusterState) -> str:
    """By which rule there are no more restarts: what lasts long enough is forgiven."""
    limit, num = state.policy.restarts_max, state.policy.restart_iterations
    return (f"failed {limit + 1} times without {num} new iterations in between" if limit else
            "failed, and restarts_max is 0")


def _lost(state: ClusterState, task: Task) -> Iterator[Body]:
    """Ranks on nodes that are silent count as lost when a second source says so."""
    if not state.silent:
        return
    silent = [name for name in sorted({rank.slot.node for rank in task.ranks.values()})
              if name in state.nodes and state.nodes[name].silent]
    for name in silent:
        node = state.nodes[name]
        there = [task.ranks[key] for key in sorted(task.ranks)
                 if task.ranks[key].slot.node == name]
        peers = [rank for rank in task.living_members()
                 if rank.slot.node not in silent and rank.failed == task.generation]
        late = [rank for rank in there if rank.overdue]
        if peers and len(task.living_members()) == len(task.members):
            second = f"a collective failed under its peer rank {peers[0].rank}"
            seq = peers[0].failed_seq
        elif late:
            second = f"rank {late[0].rank} {late[0].overdue}"
            seq = min((stall.seq for stall in task.stalls.values()), default=0)
        elif not state.held and node.replace and _replaced(state, task):
            second, seq = f"silent for {state.policy.replace_after_s:g} s, the whole task on it", 0
        else:
            continue
        evidence = tuple(sorted(x for x in (node.silenced_seq, seq) if x))
        yield _tell(state, task, "SEV1", LOST_CONNECTION, name,
                    tuple(rank.rank for rank in there), f"node {name} is silent; {second}",
                    evidence)


def _replaced(state: ClusterState, task: Task) -> bool:
    """Its members, or where it has none its processes, were silent for so long that others go on.

    Newcomers elsewhere are no part of it: nobody is left who would let them in.
    """
    nodes = [state.nodes.get(rank.slot.node)
             for rank in task.living_members() or task.ranks.values()]
    return all(node is not None and node.replace for node in nodes)


def network_incident(state: ClusterState, task: Task) -> Iterator[Body]:
    """A collective failed and nothing else did: SEV3, before the reattempt in place."""
    told = [rank for rank in task.living_members() if rank.failed == task.generation]
    if told and task.failed_s >= 0 and not task.incident:
        yield _tell(state, task, "SEV3", told[0].failed_status, told[0].slot.node,
                    tuple(rank.rank for rank in told), "a collective failed, no rank is lost",
                    tuple(rank.failed_seq for rank in told))


def close_incident(state: ClusterState, task: Task) -> Iterator[Body]:
    """The task steps with all that the plan gives it: healed, or set back where that cost steps."""
    incident = state.incidents.get(task.incident)
    if incident is None or incident.down_since_s >= 0 or task.ending or not task.target:
        return
    if task.phase != "training" or (task.heals_in_memory and task.stepped != task.generation):
        return
    full = all((rank := task.ranks.get(seat.rank)) is not None and rank.slot == seat.slot
               and (not task.heals_in_memory or task.member(seat.rank) is not None)
               for seat in task.target)
    if full and len(task.ranks) == len(task.target):
        what = (f"generation {task.generation} steps" if task.heals_in_memory
                else "all processes run")
        outcome: Outcome = "set back" if incident.iterations_lost else "healed"
        yield _close(state, task, outcome, f"{what}, {len(task.target)} of {len(task.target)}")


def end_incident(state: ClusterState, task: Task, why: str) -> Iterator[Body]:
    """The task is over, and with it what was wrong with it."""
    incident = state.incidents.get(task.incident)
    if incident is not None and not incident.outcome:
        yield _close(state, task, "ended", why)


def _armed(state: ClusterState, task: Task, rank: Rank) -> bool:
    return f"stop/{task.id}/{rank.rank}/{rank.attempt}" in state.deadlines


def _tell(state: ClusterState, task: Task, severity: Severity, status: str, node: str,
          ranks: tuple[int, ...], why: str, evidence: tuple[int, ...], *,
          root: bool = False) -> Body:
    incident = state.incidents.get(task.incident)
    if incident is not None and not incident.outcome:
        # The severity of what is told now: SEV1 takes slots out, and only those of these ranks.
        return IncidentEscalated(of=incident.id, severity=severity, ranks=ranks, why=why,
                                 evidence=evidence, status=status, node=node, root=root)
    return IncidentOpened(severity=severity, status=status, task=task.id, node=node, ranks=ranks,
                          why=why, evidence=evidence)


def _close(state: ClusterState, task: Task, outcome: Outcome, why: str) -> Body:
    incident = state.incidents[task.incident]
    source = incident.source
    down_s = state.at_s - incident.down_since_s if incident.down_since_s >= 0 else 0.0
    return IncidentClosed(of=incident.id, outcome=outcome, pause_s=incident.pause_s + down_s,
                          iterations_lost=incident.iterations_lost, kept=incident.kept,
                          dealt=incident.dealt, ckpt_read=incident.ckpt_read, why=why,
                          origin=source.origin, origin_node=source.node,
                          origin_step_version=source.step_version, origin_path=source.path,
                          origin_bytes=source.num_bytes, peer_bytes=incident.peer_bytes,
                          near_bytes=incident.near_bytes,
                          received_bytes=incident.received_bytes)
