"""The life cycle of incidents: opened, escalated, closed, each with a reason."""

from collections.abc import Iterator

from ...events.records.decisions import (
    IncidentClosed,
    IncidentEscalated,
    IncidentOpened,
    IncidentRecovering,
)
from ...events.records.statuses import LOST_CONNECTION, TASK_HANG
from ...events.records.types import Body, Outcome, Seat, Severity
from ..state.cluster import ClusterState
from ..state.incident import Incident
from ..state.task import Task
from . import blame, recovery, unnamed
from .node_loss import lost_nodes
from .root_cause import Cause, accused_peer, root_cause
from .severity import worst

NUM_STOPS_MAX = 3
"""StopRank orders for a process before it counts as impossible to end and is orphaned."""


def open_incidents(state: ClusterState, task: Task) -> Iterator[Body]:
    """Open or escalate incidents for faults, lost nodes and processes that cannot be stopped."""
    if task.faults:
        yield from _from_faults(state, task)
    for loss in lost_nodes(state, task):
        yield _open_or_escalate(state, task, "SEV1", LOST_CONNECTION, *loss)
    if not any(rank.timeout_reason for rank in task.ranks.values()):
        return
    for rank in [task.ranks[key] for key in sorted(task.ranks)]:
        is_stuck = len(rank.stop_orders) >= NUM_STOPS_MAX and (
            f"stop/{task.id}/{rank.rank}/{rank.attempt}" not in state.deadlines
        )
        if rank.timeout_reason and is_stuck:
            yield _open_or_escalate(
                state,
                task,
                "SEV1",
                TASK_HANG,
                rank.slot.node,
                (rank.rank,),
                f"rank {rank.rank} could not be ended in {NUM_STOPS_MAX} orders",
                tuple(rank.stop_orders[-1:]),
            )


def _from_faults(state: ClusterState, task: Task) -> Iterator[Body]:
    limit = state.policy.restarts_max
    cause = root_cause(state, task)
    severity, ranks, why = cause.severity, cause.ranks, cause.why
    if task.reattempts > limit:
        severity = worst(severity, "SEV2")
        ranks = tuple(x.rank for x in task.living_members())
        why = f"{limit} reattempts in place did not help, the processes start again: {why}"
    yield _open_or_escalate(
        state,
        task,
        severity,
        cause.status,
        cause.node,
        ranks,
        why,
        cause.evidence,
        root=cause.root,
        keeps_slots=severity == "SEV1" and not cause.is_proved,
    )
    if cause.severity == "SEV3" and cause.status in blame.UNNAMED and not cause.is_proved:
        yield from _unnamed(state, task, cause)
        return
    if last := blame.cannot_start(state, task, cause):
        yield from blame.acquit(task, f"{last}: {why}")
        yield _close(state, state.incidents[task.incident], "failed", f"{last}: {why}")
        return
    cleared, bad = blame.refuted(task, cause), blame.guilty(state, task, cause)
    has_moved_on = bool(cleared) and blame.has_moved_on(task, cleared)
    yield from blame.judge_failures(task, cause, cleared, bad)
    if bad and not cleared:
        return  # the slots are out, and the plan moves the ranks that fail there
    if has_moved_on:
        cleared = ()  # it may move again
    spent = blame.exhausted(state, task, cause, cleared)
    hung = blame.hung_twice(state, task, cause)
    tried = spent or hung or (cause.ranks if blame.says_device(task, cause) else ())
    if spent and cause.is_proved:  # of an error that alone takes no slot out
        names = " ".join(str(number) for number in spent)
        spent_why = f"rank {names} {_budget_spent(state)}, its slot is taken out"
        yield _open_or_escalate(
            state, task, "SEV1", cause.status, "", spent, spent_why, cause.evidence
        )
        return
    whys = f"reports {cause.status}" if not hung else "has hung there twice in 24 h"
    whys = _budget_spent(state) if spent else whys
    experiment = blame.experiment(state, task, cause.status, tried, whys)
    if experiment is not None and not cleared:
        yield experiment
    elif spent and not blame.may_pass(state, task):
        yield from _give_up(state, task, cause, spent, cleared)


def _unnamed(state: ClusterState, task: Task, cause: Cause) -> Iterator[Body]:
    """Nothing names the cause: what it shares with others like it moves. The task fails only if the
    fault is everywhere, or if there are no slots to try."""
    is_over = unnamed.is_everywhere(state, task)
    if not is_over:
        yield from unnamed.experiment(state, task, cause.status)
        spent = blame.exhausted(state, task, cause, ())
        is_over = bool(spent) and not unnamed.may_go_on(state, task)
    if is_over:
        at = f"at iteration {task.max_iteration}"
        lasts = f"for more than {state.policy.passing_s_max:g} s (passing_s_max)"
        where = "whatever nodes it has" if not task.common_nodes else "no slot is left to try"
        why = f"{cause.status} again and again {at}, {lasts}, {where}: {cause.why}"
        yield _open_or_escalate(state, task, "SEV1", cause.status, "", (), why, cause.evidence)
        yield _close(state, state.incidents[task.incident], "failed", why)


def _give_up(
    state: ClusterState,
    task: Task,
    cause: Cause,
    ranks: tuple[int, ...],
    cleared: tuple[Seat, ...],
) -> Iterator[Body]:
    """No restart of these ranks helps: the task goes on without them, or has failed."""
    without = blame.goes_on_without(task, ranks, cause.why)
    if without is not None:
        yield without
        return
    if cleared and cause.status == TASK_HANG:
        ranks_there = " ".join(str(number) for number in ranks)
        budget = f"rank {ranks_there} hangs in iteration {task.max_iteration} wherever it is"
        why = f"{budget}{blame.elsewhere(task, ranks, cleared)}: {cause.why}"
        yield from _fail(state, task, cause, ranks, cleared, why)
        return
    could_pass = task.failures is not None and task.failures.can_pass
    budget = (
        f"failed for more than {state.policy.passing_s_max:g} s (passing_s_max)"
        if could_pass
        else _budget_spent(state)
    )
    why = f"{budget}{blame.elsewhere(task, ranks, cleared)}: {cause.why}"
    yield from _fail(state, task, cause, ranks, cleared, why)


def _fail(
    state: ClusterState,
    task: Task,
    cause: Cause,
    ranks: tuple[int, ...],
    cleared: tuple[Seat, ...],
    why: str,
) -> Iterator[Body]:
    yield _open_or_escalate(state, task, "SEV1", cause.status, "", (), why, cause.evidence)
    if not cleared:
        yield from blame.acquit(task, why)
        yield from blame.leave_open(task, ranks, why)
    yield _close(state, state.incidents[task.incident], "failed", why)


def _budget_spent(state: ClusterState) -> str:
    """Why the restart budget is used up. Enough new iterations restore the budget."""
    limit, num = state.policy.restarts_max, state.policy.restart_iterations
    return (
        f"failed {limit + 1} times without {num} new iterations in between"
        if limit
        else "failed, and restarts_max is 0"
    )


def network_incident(state: ClusterState, task: Task) -> Iterator[Body]:
    """Open a SEV3 incident if only a collective failed, before the reattempt in place; or tell an
    open one that it failed again. What comes back is put on what its members share."""
    failed = [rank for rank in task.living_members() if rank.failed == task.generation]
    incident = state.incidents.get(task.incident)
    if incident is not None and incident.status not in blame.UNNAMED:
        return  # its cause explains the collective
    if failed and task.failed_s >= 0 and not unnamed.is_known(state, task):
        accused, blamed = accused_peer(task)
        named = f"; several nodes name {accused} as the peer" if blamed else ""
        yield _open_or_escalate(
            state,
            task,
            "SEV3",
            failed[0].failed_status,
            accused or failed[0].slot.node,
            blamed or tuple(rank.rank for rank in failed),
            f"a collective failed, no rank is lost{named}",
            tuple(rank.failed_seq for rank in failed),
        )
        yield from unnamed.experiment(state, task, failed[0].failed_status)


def close_incident(state: ClusterState, task: Task) -> Iterator[Body]:
    """When the task steps with its whole target, its incident is recovering; closed, healed or set
    back, when the fault has stayed away."""
    incident = state.incidents.get(task.incident)
    if incident is not None and (why := _steps_whole(task, incident)):
        if recovery.has_stayed_away(state, task, incident):
            yield _close(state, incident, _good(incident), why)
        else:
            yield IncidentRecovering(
                of=incident.id,
                until_iteration=recovery.until_iteration(state, incident),
                pause_s=incident.pause_s,
                iterations_lost=incident.iterations_lost,
                why=why,
            )
    for incident in [state.incidents[number] for number in task.recovering]:
        if not task.ending and recovery.has_stayed_away(state, task, incident):
            yield _close(state, incident, _good(incident), _stayed_away(state, task, incident))


def _steps_whole(task: Task, incident: Incident) -> str:
    """How the task steps with its whole target, for people; empty: it does not."""
    if incident.down_since_s >= 0 or task.ending or not task.target:
        return ""
    if task.phase != "training" or (task.heals_in_memory and task.stepped != task.generation):
        return ""
    full = all(
        (rank := task.ranks.get(seat.rank)) is not None
        and rank.slot == seat.slot
        and not rank.stopping
        and (not task.heals_in_memory or task.member(seat.rank) is not None)
        for seat in task.target
    )
    if not full or len(task.ranks) != len(task.target):
        return ""
    what = f"generation {task.generation} steps" if task.heals_in_memory else "all processes run"
    return f"{what}, {len(task.target)} of {len(task.target)}"


def _good(incident: Incident) -> Outcome:
    return "set back" if incident.iterations_lost else "healed"


def _stayed_away(state: ClusterState, task: Task, incident: Incident) -> str:
    num = task.max_iteration - incident.begun_iteration
    if num >= state.policy.restart_iterations:
        return f"{num} iterations beyond the fault"
    return f"the fault has not come back for {state.policy.passing_s_max:g} s (passing_s_max)"


def end_incident(state: ClusterState, task: Task, why: str) -> Iterator[Body]:
    """Close the incidents of a task that has ended. One that has trained to its end is healed."""
    incident = state.incidents.get(task.incident)
    if incident is not None and not incident.outcome:
        yield _close(state, incident, "ended", why)
    for incident in [state.incidents[number] for number in task.recovering]:
        yield _close(state, incident, "ended" if task.ending else _good(incident), why)


def _open_or_escalate(
    state: ClusterState,
    task: Task,
    severity: Severity,
    status: str,
    node: str,
    ranks: tuple[int, ...],
    why: str,
    evidence: tuple[int, ...],
    *,
    root: bool = False,
    keeps_slots: bool = False,
) -> Body:
    incident = state.incidents.get(task.incident)
    num_times = 0
    if incident is None and (incident := recovery.returned(state, task, status, node, ranks)):
        num_times = incident.num_times + 1
    if incident is not None and not incident.outcome:
        # The severity is that of the new evidence: SEV1 disables only the slots of `ranks`.
        return IncidentEscalated(
            of=incident.id,
            severity=severity,
            ranks=ranks,
            why=why,
            evidence=evidence,
            status=status,
            node=node,
            root=root,
            keeps_slots=keeps_slots,
            num_times=num_times,
        )
    return IncidentOpened(
        severity=severity,
        status=status,
        task=task.id,
        node=node,
        ranks=ranks,
        why=why,
        evidence=evidence,
        keeps_slots=keeps_slots,
    )


def _close(state: ClusterState, incident: Incident, outcome: Outcome, why: str) -> Body:
    source = incident.source
    down_s = state.at_s - incident.down_since_s if incident.down_since_s >= 0 else 0.0
    return IncidentClosed(
        of=incident.id,
        outcome=outcome,
        pause_s=incident.pause_s + down_s,
        iterations_lost=incident.iterations_lost,
        kept=incident.kept,
        dealt=incident.dealt,
        ckpt_read=incident.ckpt_read,
        why=why,
        origin=source.origin,
        origin_node=source.node,
        origin_step_version=source.step_version,
        origin_path=source.path,
        origin_bytes=source.num_bytes,
        peer_bytes=incident.peer_bytes,
        near_bytes=incident.near_bytes,
        received_bytes=incident.received_bytes,
    )
