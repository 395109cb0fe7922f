"""What an operator may ask for: from a JSON body and the state to a report, or to a refusal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ...events.errors import UsageError
from ...events.records import reports as r
from ...events.records import types as t
from ...events.records.reports import QuarantineLifted
from ...events.spec.job import WEIGHT_RATIO_MAX, JobSpec, parse
from ...events.spec.model import Modelled
from ..fold.node_health import RECOVERED_S
from ..planner.problem_of_state import input_digest
from ..state.cluster import ClusterState, live_tasks
from ..state.node import Node
from ..state.task import Rank, Task
from ..throughput.layout_search import modelled

NUM_NAMED_MAX = 8
"""A refusal names this many of what there is."""
REASON_CHARS_MAX = 200

T = TypeVar("T")


class Refusal(UsageError):
    """A request that is not carried out; `status` is HTTP's."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.status = status


class _Reason(Struct, frozen=True, forbid_unknown_fields=True):
    reason: str = ""


class _Weight(Struct, frozen=True, forbid_unknown_fields=True):
    weight: float
    reason: str = ""


class _Fault(Struct, frozen=True, forbid_unknown_fields=True):
    what: t.FaultKind
    task: int = 0
    rank: int = -1
    node: str = ""
    stop_s: float = 0.0
    reason: str = ""


# Each of these makes one report of a body and of what the path names; all raise Refusal.
def submit(state: ClusterState, body: Any, _: str) -> t.Body:
    """A new task. Raises SpecError too."""
    job = parse(body)
    _admit(state, job)
    return r.TaskSubmitted(spec=job, modelled=_modelled(job))


def search(body: Any) -> None:
    """What `submit` would search for, ahead of it: it may take seconds. Raises SpecError."""
    _modelled(parse(body))


def _modelled(job: JobSpec) -> Modelled | None:
    """T(t, x) of what the job trains; remembered, so that the second call costs nothing."""
    return modelled(job.model, job.slots.max) if job.model is not None else None


def cancel(state: ClusterState, body: Any, task: str) -> t.Body:
    """The task ends for good."""
    asked = convert(body, _Reason)
    return r.TaskCancelRequested(task=_live_task(state, task).id, reason=one_line(asked.reason))


def set_weight(state: ClusterState, body: Any, task: str) -> t.Body:
    """The task's weight from now on."""
    asked = convert(body, _Weight)
    found = _live_task(state, task)
    if not 1 / WEIGHT_RATIO_MAX <= asked.weight <= WEIGHT_RATIO_MAX:
        raise Refusal(422, f"weight: {asked.weight:g} is not between {1 / WEIGHT_RATIO_MAX:g} and "
                      f"{WEIGHT_RATIO_MAX:g}", "1 is the usual weight; only the ratio counts")
    return r.TaskWeightSet(task=found.id, weight=asked.weight, reason=one_line(asked.reason))


def freeze(state: ClusterState, body: Any, _: str) -> t.Body:
    """Healing is held. The first reason stands: who freezes a second time shall hear of it."""
    asked = convert(body, _Reason)
    if state.frozen:
        raise Refusal(409, f"healing is frozen already: {state.frozen}",
                      "unicron unfreeze first, to freeze it for another reason")
    return r.HealingFrozen(reason=one_line(asked.reason))


def unfreeze(state: ClusterState, body: Any, _: str) -> t.Body:
    """Healing is on again."""
    asked = convert(body, _Reason)
    if not state.frozen:
        told = "; it is held by --observe" if state.policy.observe else ""
        raise Refusal(409, f"healing is not frozen{told}",
                      "only unicron up --act acts" if told else "unicron status")
    return r.HealingResumed(reason=one_line(asked.reason))


def drain(state: ClusterState, body: Any, node: str) -> t.Body:
    """Tasks leave the node."""
    asked = convert(body, _Reason)
    found = _node(state, node)
    if found.drained:
        raise Refusal(409, f"node {node} is drained already{_because(found.drain_reason)}",
                      f"unicron undrain {node}")
    return r.NodeDrained(node=node, reason=one_line(asked.reason))


def undrain(state: ClusterState, body: Any, node: str) -> t.Body:
    """The node may have tasks again."""
    asked = convert(body, _Reason)
    if not _node(state, node).drained:
        raise Refusal(409, f"node {node} is not drained", _way_back(state, node))
    return r.NodeUndrained(node=node, reason=one_line(asked.reason))


def lift(state: ClusterState, body: Any, node: str) -> t.Body:
    """The node is quarantined no longer, and what it did before counts no more."""
    asked = convert(body, _Reason)
    if _node(state, node).quarantine is None:
        raise Refusal(409, f"node {node} is not quarantined", _way_back(state, node))
    return QuarantineLifted(node=node, reason=one_line(asked.reason))


def _way_back(state: ClusterState, node: str) -> str:
    """What to do where a person wanted it to have tasks: what a check took out, it brings back."""
    if not state.nodes[node].slots_sick:
        return "unicron status nodes"
    return (f"a check has taken it out: its slots are used again {RECOVERED_S:g} s after it says "
            "healthy; unicron status nodes")


def unchanged(check: int) -> Callable[[ClusterState], None]:
    """A check that what a plan follows from is as it was when its digest was `check`."""
    def look(state: ClusterState) -> None:
        now = input_digest(state)
        if now != check:
            raise Refusal(412, f"the plan's input is {now} now, not {check}: what the "
                          "plan follows from has changed since; nothing was done",
                          "run it again without --apply, and look at what it would do now")
    return look


def inject(state: ClusterState, body: Any, _: str) -> t.Body:
    """Something is broken on purpose: only what runs can be."""
    asked = convert(body, _Fault)
    if not state.policy.allow_inject:
        raise Refusal(403, "this cluster does not allow faults on purpose",
                      "only where unicron up --allow-inject began it")
    if not 0.0 <= asked.stop_s < math.inf:
        raise Refusal(422, f"stop_s: {asked.stop_s:g} is not a time from 0 on",
                      "0 stops it for ever")
    name = asked.node if asked.what == "node" else _running(
        _live_task(state, str(asked.task)), asked.rank).slot.node
    node = _node(state, name)
    if node.health == "left":
        raise Refusal(409, f"node {name} has no agent: it has left", "unicron up")
    if node.health != "healthy":
        raise Refusal(409, f"node {name} is {node.health}: nothing can be told to its agent",
                      "unicron status nodes")
    return r.FaultRequested(what=asked.what, task=asked.task, rank=asked.rank, node=asked.node,
                            stop_s=asked.stop_s, reason=one_line(asked.reason))


def _admit(state: ClusterState, job: JobSpec) -> None:
    """Raises Refusal for a task that could only wait for ever, or would get in another's way."""
    if job.slots.min > state.num_slots_max > 0:  # 0: nobody has joined yet, so nobody can tell
        raise Refusal(422, f"slots.min: {job.slots.min}, but the cluster has had at most "
                      f"{state.num_slots_max} slots", "lower slots.min, or start more agents first")
    for task in live_tasks(state):
        theirs, ours = task.spec.training, job.training
        if task.spec.name == job.name:
            taken, what = f"name: {job.name} is live", "name"
        elif ours is not None and theirs is not None and (
                os.path.normpath(ours.output) == os.path.normpath(theirs.output)):
            where = "train" if job.train is not None else "loop"
            taken, what = f"{where}.output: {ours.output} is being written", "output"
        else:
            continue
        is_ending = bool(task.ending or task.finished)
        raise Refusal(409, f"{taken}, by task {task.id} ({task.spec.name})",
                      "it is ending: try again in a moment" if is_ending else
                      f"unicron cancel {task.id}, or give this one another {what}")


def convert(body: Any, kind: type[T]) -> T:
    """The body as a `kind`. Raises Refusal with the field that is wrong."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at ")
        where = at.strip("`").removeprefix("$.")
        raise Refusal(400, f"{where}: {message}" if where else message, "") from None


def _live_task(state: ClusterState, text: str) -> Task:
    number = int(text) if text.isdecimal() and len(text) < 18 else 0
    task = state.tasks.get(number)
    if task is None:
        raise Refusal(404, f"there is no task {text[:40]}", _there_is(
            (f"{one.id} ({one.spec.name})" for one in live_tasks(state)), "live task"))
    if task.phase == "ended":
        raise Refusal(409, f"task {number} has ended: {task.outcome}", f"unicron status {number}")
    return task


def _running(task: Task, number: int) -> Rank:
    """The task's process for that rank. Raises Refusal if there is none."""
    rank = task.ranks.get(number)
    if rank is None or not rank.pid:
        raise Refusal(404, f"task {task.id} ({task.spec.name}) runs no rank {number}", _there_is(
            (str(key) for key in sorted(task.ranks) if task.ranks[key].pid), "running rank"))
    return rank


def _node(state: ClusterState, name: str) -> Node:
    node = state.nodes.get(name)
    if node is None:
        raise Refusal(404, f"there is no node {name[:64]!r}", _there_is(state.nodes, "node"))
    return node


def _there_is(names: Iterable[str], what: str) -> str:
    found = list(names)
    more = ", ..." if len(found) > NUM_NAMED_MAX else ""
    return (f"there {'is' if len(found) == 1 else 'are'} {', '.join(found[:NUM_NAMED_MAX])}{more}"
            if found else f"there is no {what}")


def one_line(reason: str) -> str:
    """As it fits on a screen. Raises Refusal for one that does not."""
    told = " ".join(reason.split())
    if len(told) > REASON_CHARS_MAX:
        raise Refusal(422, f"reason: {len(told)} characters, and at most {REASON_CHARS_MAX} fit",
                      "say it in a few words")
    return told


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
