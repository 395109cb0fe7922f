"""The state as plain data: GET /v1/state, `unicron status`."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ...events.spec.model import Axes
from ...events.spec.parallelism import layout_in_words, layout_label, num_positions, part_in_words
from ..decide.memory_checkpoints import (
    StoreAssignment,
    assign_stores,
    bytes_max_of,
    node_bytes,
    storing_nodes,
)
from ..fold.hangs import stalled_command
from ..fold.node_health import RECOVERED_S, recovery_s
from ..fold.pauses import pause_name
from ..fold.work import waited_for
from ..incidents.hangs import locate_hang
from ..incidents.stragglers import LASTS_S, at_fault, slowdown, uniform_slowdown
from ..planner.pending import WaitExplanation, explain_waiting
from ..planner.problem_of_state import input_digest
from ..state import limits
from ..state.cluster import DECIDER_VERSION, WORK_SPAN_S, ClusterState, state_hash
from ..state.limits import Limit
from ..state.members import position_of
from ..state.memory_checkpoints import whole_checkpoints
from ..state.node import Node
from ..state.task import Rank, Straggler, Task, Work
from ..throughput import table
from ..throughput.lost_rank import lost_rank_costs
from ..throughput.transition_cost import transition
from .messages import TASKS_NUM_MAX
from .needs import needs

_PHASES = {
    "idle": "waiting",
    "starting": "starting",
    "training": "running",
    "quiescing": "running",
    "reconfiguring": "running",
}
Slow = list[tuple[int, Straggler]]


def view(
    state: ClusterState,
    *,
    explain: bool = False,
    now_s: float | None = None,
    num_ended: int = TASKS_NUM_MAX,
) -> dict[str, Any]:
    """Cluster, nodes, tasks, incidents, plan, deadlines, and what needs a person at `now_s` (None:
    at the last record); times in seconds since 1970. `explain` adds what each waiting task needs.
    It takes as long as a few plans: call it in a thread. `num_ended`: as `_shown_tasks`."""
    waits = explain_waiting(state) if explain else {}
    slow = [task for task in state.tasks.values() if task.slow]
    shown: dict[str, Any] = {
        "cluster": {
            "seq": state.seq,
            "epoch": state.epoch,
            "at_s": state.at_s,
            "hash": state_hash(state),
            "heart": state.heart,
            "input": input_digest(state),
            "num_slots": sum(
                node.num_slots for node in state.nodes.values() if node.health == "healthy"
            ),
            "num_tasks": len(state.tasks),
            "reports_lost": state.reports_lost,
            "num_open_orders": len(state.orders),
            "computed_by": DECIDER_VERSION if waits else 0,
            "healing": state.held or "on",
            "no_room": state.no_room,
            "allow_inject": state.policy.allow_inject,
            "mtbf_gpu_s": state.mtbf_gpu_s,
            "num_faults": state.num_faults,
            "observed_slot_s": state.observed_slot_s,
            "earned": [
                {"at_s": span * WORK_SPAN_S, "length_s": WORK_SPAN_S, "flop": flop}
                for span, flop in sorted(state.earned.items())
            ],
        },
        "nodes": [node_view(state, state.nodes[name], slow) for name in sorted(state.nodes)],
        "tasks": [
            task_view(state, state.tasks[key], waits.get(key))
            for key in _shown_tasks(state, num_ended)
        ],
        "incidents": [msgspec.to_builtins(state.incidents[key]) for key in sorted(state.incidents)],
        "outages": [msgspec.to_builtins(one) for one in state.outages],
        "plan": {"seq": state.plan_seq, "at_s": state.plan_s, **msgspec.to_builtins(state.plan)}
        if state.plan is not None
        else None,
        "deadlines": [
            {
                "id": name,
                "due_s": state.deadlines[name].due_s,
                "length_s": state.deadlines[name].length_s,
            }
            for name in sorted(state.deadlines)
        ],
    }
    found = needs(shown, state.at_s if now_s is None else now_s)
    return shown | {"needs": msgspec.to_builtins(found)}


def _shown_tasks(state: ClusterState, num_ended: int) -> list[int]:
    """All tasks, or of those that have ended the newest, and failures that no later task of the
    same name follows."""
    keys = sorted(state.tasks)
    if len(keys) <= num_ended:
        return keys
    last = {state.tasks[key].spec.name: key for key in keys}
    ended = [key for key in keys if state.tasks[key].outcome]
    hidden = {
        key
        for key in ended[: max(len(ended) - num_ended, 0)]
        if not ((task := state.tasks[key]).outcome == "failed" and last[task.spec.name] == key)
    }
    return [key for key in keys if key not in hidden]


def state_in_words(state: ClusterState, task: Task) -> str:
    """waiting, starting, running, degraded, healing, saving, finishing, finished, failed or
    cancelled. saving: it is done, and its final state cannot be saved or published yet."""
    if task.outcome:
        return task.outcome
    if task.holds_final_state and not task.ending:
        return "saving"
    if task.ending or task.finished:
        return "finishing"
    incident = state.incidents.get(task.incident)
    if incident is not None and not incident.outcome and task.target:
        return "healing"
    return "degraded" if task.phase == "training" and task.slow else _PHASES[task.phase]


def node_view(
    state: ClusterState, node: Node, tasks: Sequence[Task] | None = None
) -> dict[str, Any]:
    """One node of the view. `tasks`: those with slow ranks, if that is known."""
    slots: list[dict[str, Any]] = []
    slow = _slow_on(state.tasks.values() if tasks is None else tasks, node)
    degraded = _slots_degraded(slow, node)
    due = state.deadlines.get(f"replace/{node.name}")
    for index in range(node.num_slots):
        occupant = node.occupants.get(index)
        slot: dict[str, Any] = {
            "index": index,
            "out": node.is_disabled(index),
            "out_why": (node.disabled_why.get(index, "") if index in node.slots_disabled else ""),
            "suspected_why": node.slots_suspected.get(index, ""),
            "degraded": index in degraded,
            "task": 0,
            "rank": None,
            "pid": 0,
        }
        if occupant is not None:
            task = state.tasks.get(occupant.task)
            rank = task.ranks.get(occupant.rank) if task is not None else None
            slot |= {
                "task": occupant.task,
                "rank": occupant.rank,
                "pid": rank.pid if rank is not None else 0,
            }
        slots.append(slot)
    return {
        "id": node.name,
        "host": node.host,
        "pid": node.pid,
        **_health(state, node, slow),
        "drained": node.drained,
        "drain_reason": node.drain_reason,
        "reached_by": list(node.reached_by) if node.unreachable else [],
        "down": bool(node.down_seq),
        "replaced_s": due.due_s if due is not None else None,
        "quarantine": msgspec.to_builtins(node.quarantine),
        "sick_why": node.unhealthy_why,
        "recovers": _recovers(state, node),
        "checks": [msgspec.to_builtins(check) for check in node.checks],
        "incarnation": node.incarnation,
        "accelerator": node.accelerator,
        "num_slots": node.num_slots,
        "labels": msgspec.to_builtins(node.labels),
        "unlimited": list(node.unlimited),
        "slots": slots,
        "degraded": _degraded(state, node.name, slow),
    }


def _health(state: ClusterState, node: Node, slow: Slow) -> dict[str, Any]:
    """`contact`: heard, unreachable, lost or left. `health`: healthy, degraded or unhealthy if the
    contact is heard, else the contact. `since_s`: since when."""
    if node.health != "healthy":
        return {"contact": node.health, "health": node.health, "since_s": node.since_s}
    word, since_s = "healthy", max(node.since_s, node.improved_s)
    slow_s = [one.since_s for _, one in slow]
    priced = state.degraded.get(node.name)
    for name, also_s in (("degraded", slow_s), ("unhealthy", [])):
        said_s = [check.at_s for check in node.checks if check.health == name] + also_s
        if said_s or (name == "degraded" and priced is not None):
            word = name
            since_s = min(said_s, default=priced.at_s if priced is not None else since_s)
            if name == "degraded":  # it may have been unhealthy before
                since_s = max(since_s, node.improved_s)
    return {"contact": "heard", "health": word, "since_s": since_s}


def _slow_on(tasks: Iterable[Task], node: Node) -> Slow:
    """(slot, straggler) of the slow ranks on the node."""
    return [
        (task.ranks[number].slot.index, slow)
        for task in tasks
        for number, slow in task.slow.items()
        if number in task.ranks and task.ranks[number].slot.node == node.name
    ]


def _slots_degraded(slow: Slow, node: Node) -> set[int]:
    """Slots of degraded checks (all slots if a check names none) and of slow ranks."""
    named = {
        index
        for check in node.checks
        if check.health == "degraded"
        for index in check.devices or range(node.num_slots)
    }
    return named | {index for index, _ in slow}


def _recovers(state: ClusterState, node: Node) -> dict[str, Any] | None:
    """Slots that a check disabled. `from_s`: when all are in use again; None while checks fail."""
    if not node.slots_unhealthy:
        return None
    due = state.deadlines.get(f"recovered/{node.name}")
    ill = any(check.health == "unhealthy" for check in node.checks)
    last_s = max(node.slots_recovering.values(), default=0.0) + RECOVERED_S
    return {
        "slots": list(node.slots_unhealthy),
        "after_s": recovery_s(state, node, node.checks) if ill else RECOVERED_S,
        "from_s": max(due.due_s, last_s) if due is not None and not ill else None,
    }


def _degraded(state: ClusterState, name: str, slow: Slow) -> dict[str, Any] | None:
    """The cost of a degraded node and its cause, once computed."""
    priced = state.degraded.get(name)
    if priced is None:
        return None
    share = priced.drain_waf / priced.now_waf if priced.now_waf else 0.0
    since_s = min((one.since_s for _, one in slow), default=-1.0)
    lasts = since_s < 0 or state.at_s - since_s >= LASTS_S
    return {
        **msgspec.to_builtins(priced),
        "drain_share": share,
        "lasts": lasts,
        "worth_draining": lasts and priced.drain_waf > 0 and share >= state.policy.gain_min,
    }


def task_view(
    state: ClusterState, task: Task, waits: WaitExplanation | None = None
) -> dict[str, Any]:
    """One task of the view, also one that has left the state."""
    spec, waits = task.spec, waits or WaitExplanation(why=task.why, needs="")
    living, (stands, stands_since_s) = task.living_members(), _stalled(state, task)
    copies = _copies(state, task)
    return {
        "id": task.id,
        "name": spec.name,
        "tier": "train" if task.heals_in_memory else "command",
        "state": state_in_words(state, task),
        "phase": task.phase,
        "since_s": task.since_s,
        "submitted_s": task.submitted_s,
        "progressed_s": task.progressed_s,
        "weight": task.weight,
        "priority": spec.priority,
        "team": spec.team,
        "slots": _slots_of_task(task),
        **_layout(task, len(living)),
        "generation": task.generation,
        "iteration": task.iteration,
        "iterations": _iterations(task),
        "logged_batch": task.logged.global_batch if task.logged is not None else 0,
        "model_batch": spec.model.global_batch if spec.model is not None else 0,
        "loss": task.loss,
        **_losses(state, task),
        "step_s": task.step_s,
        "rate_flops": task.rate_flops,
        "waf": task.weight * task.rate_flops if _steps(task) else 0.0,
        "transition": msgspec.to_builtins(transition(state, task)),
        "throughput": {
            **msgspec.to_builtins(task.throughput, str_keys=True),
            "origin": table.origin(spec, task.throughput, task.modelled),
        }
        if task.throughput is not None
        else None,
        "optimizer": (spec.training.parallel.optimizer if spec.training is not None else "whole"),
        "lost_rank": _lost_rank(task, len(living), is_copied=not copies["no_copies"]),
        "modelled_layout": _planned_layout(task),
        "micro_batches": task.micro_batches,
        "forward_calls": task.forward_calls,
        "healed": task.healed,
        "iterations_lost": _iterations_lost(task),
        "failing": _failing(state, task),
        "slow": _slow(task),
        "slowdown": slowdown(task),
        "slower_alike": uniform_slowdown(task),
        "stands": stands,
        "stands_since_s": stands_since_s,
        "hang_after_s": spec.hang_after_s,
        "incident": task.incident,
        **msgspec.structs.asdict(waits),
        "adopted": task.adopted,
        "start_s_max": state.policy.start_s_max,
        "declined": task.declined,
        "from_memory": task.restarts_from_memory,
        "withheld": task.withheld,
        "rounding_why": task.rounding_why
        or (task.declined and "after a fault all its processes start again"),
        "reproducible": spec.training.reproducible if spec.training is not None else "rounding",
        "refused_starts": _refused_starts(task),
        **_checkpoints(task),
        **copies,
        "copy_every": spec.training.copy_every if spec.training is not None else 0,
        "kept_sum": spec.training is None or spec.training.kept_sum,
        "works": _works(state, task),
        "ranks": [_rank(task, task.ranks[key]) for key in sorted(task.ranks)],
    }


def _refused_starts(task: Task) -> list[dict[str, Any]]:
    """Of the seats that the task has now."""
    seats = task.seats_at
    return [
        msgspec.to_builtins(refused)
        for number, refused in sorted(task.refused_starts.items())
        if number in seats and seats[number].node == refused.node and not task.ending
    ]


def _failing(state: ClusterState, task: Task) -> dict[str, Any] | None:
    """Failures of its own processes, until it has passed its point of failure."""
    series = task.failures
    if series is None or task.ending:
        return None
    due_s = [
        state.deadlines[name].due_s
        for number in task.seats_at
        if (name := pause_name(task, number)) in state.deadlines
    ]
    return {
        "why": series.why,
        "since_s": series.since_s,
        "num": max((task.restarts.get(number, 0) for number in series.ranks), default=0),
        "num_max": state.policy.restarts_max + 1,
        "until_s": series.since_s + state.policy.passing_s_max if series.can_pass else None,
        "starts_s": max(due_s, default=None),
        "suspects": [
            {
                "rank": number,
                "node": suspect.slot.node,
                "slot": suspect.slot.index,
                "why": suspect.why,
            }
            for number, suspect in sorted(task.suspects.items())
        ],
    }


def _losses(state: ClusterState, task: Task) -> dict[str, Any]:
    """The series of losses that are not finite, and the checkpoint that is not published for it."""
    last = task.unpublished
    return {
        "not_finite": msgspec.to_builtins(task.not_finite),
        "loss_iterations": state.policy.loss_iterations,
        "not_published": {"path": last.path, "iteration": last.step_version, "loss": last.loss}
        if last is not None
        else None,
    }


def _checkpoints(task: Task) -> dict[str, Any]:
    """Its checkpoints on disk, and what cannot be saved now; the final state comes last."""
    failed = sorted(task.failed_saves.values(), key=lambda each: (each.final, each.since_s))
    return {
        "output": task.output,
        "checkpoint": task.checkpoint_path,
        "checkpoint_iteration": task.saved_iteration,
        "damaged": task.damaged,
        "unsaved": task.lost_with(),
        "unpublished": max(task.iteration - task.saved_iteration, 0),
        "failed_saves": [msgspec.to_builtins(each) for each in failed],
    }


def _slots_of_task(task: Task) -> dict[str, Any]:
    asked = task.spec.slots
    return {
        "now": len(task.ranks),
        "target": len(task.target),
        "min": asked.min,
        "max": asked.max,
        "multiple_of": asked.multiple_of,
        "sizes": list(asked.sizes),
        "limit": task.slots_max,
    }


def _iterations(task: Task) -> int:
    """How many are planned, by the job or by what the command logs; 0: unknown."""
    if task.spec.training is not None:
        return task.spec.training.iterations
    return task.logged.iterations if task.logged is not None else 0


def _copies(state: ClusterState, task: Task) -> dict[str, Any]:
    """The whole in-memory checkpoints, the newest first: those on reachable nodes, or if there are
    none, those that also need unreachable nodes. `copies_bytes`: the most memory that they take on
    one node; `copies_max`: what all tasks may take there, 0: not known. `no_copies`: why the task
    makes none; `copies_fit`: False if they are too large for the stores."""
    reached = [
        copy
        for copy in task.copies
        if (node := state.nodes.get(copy.node)) is not None and node.health == "healthy"
    ]
    charged = node_bytes(task)
    most = max(sorted(charged), key=lambda name: charged[name], default="")
    node = state.nodes.get(most)
    found = StoreAssignment()
    nodes = storing_nodes(task)
    if nodes and not task.keepers:
        found = assign_stores(state, task, nodes)
    return {
        "copies": [
            {
                "generation": whole.generation,
                "step_version": whole.step_version,
                "nodes": list(whole.nodes),
                "num_shares": whole.num_shares,
                "copy_bytes": whole.copy_bytes,
            }
            for whole in whole_checkpoints(reached) or whole_checkpoints(task.copies)
        ],
        "copies_bytes": charged.get(most, 0),
        "copies_max": bytes_max_of(state, node) if node is not None else 0,
        "no_copies": found.why,
        "copies_fit": found.fits,
    }


def _layout(task: Task, num_living: int) -> dict[str, Any]:
    """The generation's layout if it has living members. `replica_ranks`: ranks of one replica."""
    axes = task.axes
    if not num_living or axes is None:
        return {
            "layout": f"DP{num_living}" if num_living else "",
            "layout_in_words": "",
            "beside": 0,
            "replica_ranks": 1,
        }
    return {
        "layout": layout_label(axes),
        "layout_in_words": layout_in_words(axes),
        "beside": len(task.members) - num_positions(axes),
        "replica_ranks": axes.tp * axes.pp,
    }


def _lost_rank(task: Task, num_living: int, *, is_copied: bool) -> str:
    """What the loss of one rank costs in the generation's layout, if it has living members."""
    train = task.spec.training
    if train is None or not num_living or not task.heals_in_memory:
        return ""
    return lost_rank_costs(
        train,
        task.axes or Axes(dp=len(task.members)),
        mirrored_params=task.mirrored_params,
        mirrored_bytes=task.mirrored_bytes,
        is_copied=is_copied,
    )


def _planned_layout(task: Task) -> str:
    """The layout on the planned slots, for training and for a command with a model."""
    if task.spec.training is None:
        return table.layout(task.modelled, len(task.target))
    axes = table.axes(task.spec, task.modelled, len(task.target))
    return layout_in_words(axes) if axes is not None else ""


def _stalled(state: ClusterState, task: Task) -> tuple[str, float]:
    """(why the task is stalled, since when); "" if it is not known to be stalled."""
    if not task.heals_in_memory:
        return stalled_command(state, task)
    hang = locate_hang(state, task)
    return (hang.why, hang.since_s) if hang is not None else ("", 0.0)


def _slow(task: Task) -> list[dict[str, Any]]:
    """The slow ranks. `confirmed`: above the threshold, and another process reports it too."""
    confirmed = [rank.rank for rank in at_fault(task)]
    return [
        {
            "rank": number,
            "node": task.ranks[number].slot.node,
            "slot": task.ranks[number].slot.index,
            "confirmed": number in confirmed,
            **msgspec.to_builtins(task.slow[number]),
        }
        for number in sorted(task.slow)
        if number in task.ranks
    ]


def _iterations_lost(task: Task) -> int | None:
    """None for a restarted command that has not printed its iteration since."""
    logged = task.logged
    known = task.heals_in_memory or task.rounds == (logged.round if logged is not None else 1)
    return task.iterations_lost if known or not task.rounds else None


def _steps(task: Task) -> bool:
    """True if no known fault keeps the task from stepping, and it is not done."""
    living = task.living_members()
    whole = len(living) == len(task.members) and task.failed_s < 0
    if task.holds_final_state:
        return False
    going = living if task.heals_in_memory else task.ranks.values()
    return task.phase == "training" and whole and not any(rank.is_stopped for rank in going)


def _rank(task: Task, rank: Rank) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "attempt": rank.attempt,
        "node": rank.slot.node,
        "slot": rank.slot.index,
        "pid": rank.pid,
        "log_path": rank.log_path,
        "state": "stopping" if rank.stopping else "stopped" if rank.is_stopped else rank.state,
        "ordered_s": rank.ordered_s,
        "has_state": rank.has_state,
        "part": _part(task, rank),
    }


def _works(state: ClusterState, task: Task) -> list[dict[str, Any]]:
    """What its ranks do while it waits for them, those that do the same together, and the limit
    that acts if nothing moves."""
    alike: dict[tuple[str, str, Limit], list[tuple[int, Work]]] = {}
    for number in sorted(task.ranks):
        rank = task.ranks[number]
        waited = waited_for(state, task, rank) if rank.work is not None else None
        if rank.work is not None and waited is not None:
            limit = limits.of_work(state.policy, waited[1], rank.work)
            key = (rank.work.what, rank.work.unit, limit)
            alike.setdefault(key, []).append((number, rank.work))
    return [
        {
            "ranks": [number for number, _ in works],
            "what": what,
            "unit": unit,
            **_sum_of([work for _, work in works]),
            "limit": limit.field,
            "limit_s": limit.s,
        }
        for (what, unit, limit), works in alike.items()
    ]


def _sum_of(works: list[Work]) -> dict[str, Any]:
    """The work of several ranks. What is left: as long as the slowest one takes."""
    ends_s = [work.told_s + work.left_s for work in works if work.left_s is not None]
    return {
        "done": sum(work.done for work in works),
        "total": sum(work.total for work in works) if all(work.total for work in works) else 0,
        "moved_bytes": sum(work.moved_bytes for work in works),
        "moved_s": max(work.moved_s for work in works),
        "computes": all(work.computes for work in works),
        "ends_s": max(ends_s) if len(ends_s) == len(works) else None,
    }


def _part(task: Task, rank: Rank) -> str:
    """The part of the model that a member has; "" if every member has all of it."""
    training = task.spec.training
    if training is None or task.axes is None or task.member(rank.rank) is None:
        return ""
    return part_in_words(
        task.axes, position_of(task, rank), sharded=training.parallel.optimizer != "whole"
    )
