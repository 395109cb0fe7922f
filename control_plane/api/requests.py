"""Operators' requests: turn a JSON body into a report, or refuse it."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ...events.errors import UsageError
from ...events.network_address import is_loopback
from ...events.records import reports as r
from ...events.records import types as t
from ...events.spec.job import WEIGHT_RATIO_MAX, JobSpec, check_output, is_url, parse
from ...events.spec.model import Modelled
from ...events.whole_numbers import whole_number
from ..fold.edits import find_orphan
from ..fold.node_health import recovery_s
from ..planner.problem_of_state import input_digest
from ..state.cluster import ClusterState, live_tasks
from ..state.node import Node
from ..state.task import Rank, Task
from ..throughput.layout_search import modelled
from ..throughput.training_layouts import refusal, with_mirrors

NUM_NAMED_MAX = 8
"""The most names that a refusal lists."""
REASON_CHARS_MAX = 200
SPEC_BYTES_MAX = 64 << 10
"""Each order to start a rank repeats the spec."""
OUTPUT_CHARS_MAX = 4_096
LIVE_TASKS_NUM_MAX = 1_000
"""A plan's cost grows with the live tasks."""

NO_ROOM = (
    "more sizes in loop.parallel, optimizer: sharded, a larger slots.max, or more recomputation"
)

T = TypeVar("T")


class Refusal(UsageError):
    """A request that is refused; `status` is the HTTP status."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.status = status


class Reason(Struct, frozen=True, forbid_unknown_fields=True):
    reason: str = ""
    """For the log, on one line of 200 characters at most."""


class Letters(Reason, frozen=True, forbid_unknown_fields=True):
    numbers: tuple[int, ...] = ()
    """Of dead letters."""
    all: bool = False
    """Whatever their numbers."""


class Drain(Reason, frozen=True, forbid_unknown_fields=True):
    down: bool = False
    """Its machine is off."""


class Weight(Struct, frozen=True, forbid_unknown_fields=True):
    weight: float
    reason: str = ""


class Destination(Reason, frozen=True, kw_only=True, forbid_unknown_fields=True):
    output: str
    """A whole path or a URL."""


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """A fault on purpose. `stop_s` 0: for ever."""

    what: t.FaultKind
    task: int = 0
    rank: int = -1
    node: str = ""
    stop_s: float = 0.0
    reason: str = ""


# Each function makes one report from a body and the name in the path. All raise Refusal.
def submit(state: ClusterState, job: JobSpec, _: str) -> t.Body:
    """Submit a task."""
    if (size := len(msgspec.json.encode(job))) > SPEC_BYTES_MAX:
        raise Refusal(
            413,
            f"the job file has {size} bytes as JSON, and at most {SPEC_BYTES_MAX} fit",
            "put data and long texts into files of their own",
        )
    if job.training is not None and (why := refusal(job.training, job.slots.counts)):
        raise Refusal(422, why, NO_ROOM)
    job = with_mirrors(job)
    _admit(state, job)
    return r.TaskSubmitted(spec=job, modelled=search_layouts(job))


def search_layouts(job: JobSpec) -> Modelled | None:
    """T(t, x) of the job's model; may take seconds. It is cached: a second call costs nothing."""
    return modelled(job.model, job.slots.max) if job.model is not None else None


def cancel(state: ClusterState, request: Reason, task: str) -> t.Body:
    return r.TaskCancelRequested(task=_live_task(state, task).id, reason=one_line(request.reason))


def set_weight(state: ClusterState, request: Weight, task: str) -> t.Body:
    found = _live_task(state, task)
    if not 1 / WEIGHT_RATIO_MAX <= request.weight <= WEIGHT_RATIO_MAX:
        raise Refusal(
            422,
            f"weight: {request.weight:g} is not between "
            f"{1 / WEIGHT_RATIO_MAX:g} and {WEIGHT_RATIO_MAX:g}",
            "1 is the usual weight; only the ratio counts",
        )
    return r.TaskWeightSet(task=found.id, weight=request.weight, reason=one_line(request.reason))


def set_output(state: ClusterState, request: Destination, task: str) -> t.Body:
    """Let the task save to another folder from now on."""
    live, output = _live_task(state, task), request.output
    name = live.spec.name
    if not live.output:
        raise Refusal(422, f"{name} is a command: it saves by itself", "change its arguments")
    if live.declined:
        raise Refusal(
            409,
            f"the processes of {name} save by themselves, to {live.output}",
            f"free room there, or unicron cancel {name}",
        )
    if live.finished:
        raise Refusal(
            409,
            f"the files of {name} are complete in {live.output}: only their publication is left",
            "unicron status",
        )
    check_output(output, "output")
    if len(output) > OUTPUT_CHARS_MAX or not output.isprintable():
        raise Refusal(422, "output: is not a plain path or URL", "a folder, or a URL")
    if not is_url(output) and not output.startswith("/"):
        raise Refusal(422, f"output: {output} is not a whole path", "begin it with /")
    if os.path.normpath(output) == os.path.normpath(live.output):
        raise Refusal(409, f"{name} saves to {output} already", f"unicron status {name}")
    for other in live_tasks(state):
        if other is not live and os.path.normpath(other.output) == os.path.normpath(output):
            raise Refusal(
                409,
                f"output: {output} is being written, by task {other.id} ({other.spec.name})",
                "name another folder",
            )
    _check_shared(state, output, "output")
    return r.TaskOutputSet(task=live.id, output=output, reason=one_line(request.reason))


def freeze(state: ClusterState, request: Reason, _: str) -> t.Body:
    """Pause healing. A second freeze is refused, so the first reason stays."""
    if state.frozen:
        raise Refusal(
            409,
            f"healing is frozen already: {state.frozen}",
            "unicron unfreeze first, to freeze it for another reason",
        )
    return r.HealingFrozen(reason=one_line(request.reason))


def unfreeze(state: ClusterState, request: Reason, _: str) -> t.Body:
    """Resume healing."""
    if not state.frozen:
        held = "; it is held by --observe" if state.policy.observe else ""
        raise Refusal(
            409,
            f"healing is not frozen{held}",
            "only unicron up --act acts" if held else "unicron status",
        )
    return r.HealingResumed(reason=one_line(request.reason))


def drain(state: ClusterState, request: Drain, node: str) -> t.Body:
    """Drain the node: its tasks move away. `down`: its machine is off."""
    found = _node(state, node)
    if request.down and found.health == "healthy":
        raise Refusal(
            409, f"node {node} is heard, so its machine is not off", f"unicron drain {node}"
        )
    if found.drained and not (request.down and found.unreachable):
        why = f": {found.drain_reason}" if found.drain_reason else ""
        raise Refusal(409, f"node {node} is drained already{why}", f"unicron undrain {node}")
    return r.NodeDrained(node=node, reason=one_line(request.reason), down=request.down)


def undrain(state: ClusterState, request: Reason, node: str) -> t.Body:
    """Let the node have tasks again."""
    if not _node(state, node).drained:
        raise Refusal(409, f"node {node} is not drained", _undrain_hint(state, node))
    return r.NodeUndrained(node=node, reason=one_line(request.reason))


def lift(state: ClusterState, request: Reason, name: str) -> r.QuarantineLifted:
    """Lift what keeps a node out: its quarantine, and disabled slots that do not fail now.
    Suspected slots are so no more. `name`: a node, or one slot as n1/0, in a path n1:0. What took
    it out no longer counts."""
    node, is_slot, digits = name.replace(":", "/").partition("/")
    found, reason = _node(state, node), one_line(request.reason)
    if is_slot:
        slot = _disabled_slot(state, found, digits)
        return r.QuarantineLifted(node=node, reason=reason, slots=(slot,), quarantine=False)
    slots = tuple(
        index
        for index in sorted({*found.slots_disabled, *found.slots_suspected})
        if found.health == "healthy" and not _stays_out(state, found, index)
    )
    if found.quarantine is None and not slots:
        for index in found.slots_disabled:
            _disabled_slot(state, found, str(index))  # refuses, and says why
        raise Refusal(
            409,
            f"node {node} is not quarantined, and no slot of it was taken out",
            _undrain_hint(state, node),
        )
    return r.QuarantineLifted(
        node=node, reason=reason, slots=slots, quarantine=found.quarantine is not None
    )


def without_sick(body: t.Body, answers: Mapping[str, str]) -> t.Body:
    """A lift without the slots that shall stay out. `answers`: by name of a slot, what its check
    has found; "": it is healthy. Raises Refusal if nothing is left of the lift."""
    if not isinstance(body, r.QuarantineLifted):
        return body
    whys = {
        name: answers.get(name, "it has failed just now")
        for name in (f"{body.node}/{index}" for index in body.slots)
    }
    slots = tuple(index for index in body.slots if not whys[f"{body.node}/{index}"])
    for name, why in whys.items():
        if why and not (slots or body.quarantine):
            raise Refusal(
                409, f"{name} is still sick: {why}", f"repair it, then unicron lift {name}"
            )
    return replace(body, slots=slots)


def _disabled_slot(state: ClusterState, node: Node, digits: str) -> int:
    """The number of a slot that may be given back. Raises Refusal."""
    index = whole_number(digits)
    name = f"{node.name}/{digits[:20]}"
    if index is None or index >= node.num_slots:
        raise Refusal(
            404,
            f"there is no slot {name}",
            _known_names((f"{node.name}/{number}" for number in range(node.num_slots)), "slot"),
        )
    if node.health != "healthy":
        raise Refusal(
            409,
            f"node {node.name} is {node.health}: {name} cannot be given back now",
            "unicron status nodes",
        )
    if why := _stays_out(state, node, index):
        raise Refusal(409, *why)
    if index not in node.slots_disabled and index not in node.slots_suspected:
        raise Refusal(
            409,
            f"{name} is not out",
            f"node {node.name} is quarantined: unicron lift {node.name}"
            if node.quarantine is not None
            else "unicron status nodes",
        )
    return index


def _stays_out(state: ClusterState, node: Node, index: int) -> tuple[str, str] | None:
    """Why the slot cannot be used now, and what to do; None: it may be used."""
    name = f"{node.name}/{index}"
    if index in node.slots_unhealthy:
        return (
            f"{name} is still sick: {node.unhealthy_why}",
            f"repair it; it is used again {recovery_s(state, node, node.checks):g} s after its "
            "check says healthy" + f", then unicron lift {name}" * (index in node.slots_disabled),
        )
    held = node.occupants.get(index)
    task = state.tasks.get(held.task) if held is not None else None
    orphan = find_orphan(task, held.rank, held.attempt) if task and held is not None else None
    if orphan is None:
        return None
    return (
        f"{name} is still held by pid {orphan.pid} of a rank that could not be ended",
        f"end it on {node.name} (kill -9 {orphan.pid}), then unicron lift {name}",
    )


def acknowledge(state: ClusterState, request: Reason, incident: str) -> t.Body:
    """A person knows of the incident."""
    number = whole_number(incident) or 0
    found = state.incidents.get(number)
    if found is None:
        raise Refusal(
            404,
            f"there is no incident {incident[:40]}",
            _known_names(
                (f"{key}" for key, one in state.incidents.items() if not one.outcome),
                "open incident",
            ),
        )
    if found.acknowledged_by:
        raise Refusal(
            409,
            f"incident {number} is acknowledged by {found.acknowledged_by}: "
            f"{found.acknowledged_why}",
            f"unicron incident {number}",
        )
    return r.IncidentAcknowledged(of=number, reason=one_line(request.reason))


def _undrain_hint(state: ClusterState, node: str) -> str:
    """The hint for a node that is not drained; a check may have disabled its slots."""
    named = state.nodes[node]
    if not named.slots_unhealthy:
        return "unicron status nodes"
    return (
        "a check has taken it out: its slots are used again "
        f"{recovery_s(state, named, named.checks):g} s after it says healthy; unicron status nodes"
    )


def input_unchanged(check: int) -> Callable[[ClusterState], None]:
    """A check that the digest of the plan's input is still `check`. It raises Refusal."""

    def verify_digest(state: ClusterState) -> None:
        now = input_digest(state)
        if now != check:
            raise Refusal(
                412,
                f"the plan's input is {now} now, not {check}: what the "
                "plan follows from has changed since; nothing was done",
                "make the dry run again, and look at what it would do now",
            )

    return verify_digest


def inject(state: ClusterState, request: Fault, _: str) -> t.Body:
    """Inject a fault into a running process or a healthy node."""
    if not state.policy.allow_inject:
        raise Refusal(
            403,
            "this cluster does not allow faults on purpose",
            "only where unicron up --allow-inject began it",
        )
    if not 0.0 <= request.stop_s < math.inf:
        raise Refusal(
            422, f"stop_s: {request.stop_s:g} is not a time from 0 on", "0 stops it for ever"
        )
    name = (
        request.node
        if request.what == "node"
        else _running(_live_task(state, str(request.task)), request.rank).slot.node
    )
    node = _node(state, name)
    if node.health == "left":
        raise Refusal(409, f"node {name} has no agent: it has left", "unicron up")
    if node.health != "healthy":
        raise Refusal(
            409,
            f"node {name} is {node.health}: its agent cannot be reached",
            "unicron status nodes",
        )
    return r.FaultRequested(
        what=request.what,
        task=request.task,
        rank=request.rank,
        node=request.node,
        stop_s=request.stop_s,
        reason=one_line(request.reason),
    )


def _admit(state: ClusterState, job: JobSpec) -> None:
    """Raises Refusal for a task that can never run, or that conflicts with a live task."""
    if job.slots.min > state.num_slots_max > 0:  # 0: no node has joined yet
        raise Refusal(
            422,
            f"slots.min: {job.slots.min}, but the cluster has had at most "
            f"{state.num_slots_max} slots",
            "lower slots.min, or start more agents first",
        )
    if job.training is not None:
        where = "train" if job.train is not None else "loop"
        _check_shared(state, job.training.output, f"{where}.output")
    live = live_tasks(state)
    if len(live) >= LIVE_TASKS_NUM_MAX:
        raise Refusal(
            409,
            f"{len(live)} tasks are live, and at most {LIVE_TASKS_NUM_MAX} may be",
            "wait until some have ended, or unicron cancel TASK",
        )
    for task in live:
        theirs, ours = task.spec.training, job.training
        if task.spec.name == job.name:
            taken, what = f"name: {job.name} is live", "name"
        elif (
            ours is not None
            and theirs is not None
            and (os.path.normpath(ours.output) == os.path.normpath(theirs.output))
        ):
            where = "train" if job.train is not None else "loop"
            taken, what = f"{where}.output: {ours.output} is being written", "output"
        else:
            continue
        is_ending = bool(task.ending or task.finished)
        raise Refusal(
            409,
            f"{taken}, by task {task.id} ({task.spec.name})",
            "it is ending: try again in a moment"
            if is_ending
            else f"unicron cancel {task.id}, or give this one another {what}",
        )


def _check_shared(state: ClusterState, folder: str, path: str) -> None:
    """Raises Refusal for an output that only one host has: ranks and publications may be anywhere.
    `path`: its key in the request."""
    if is_url(folder):
        return
    hosts = {
        "127.0.0.1" if is_loopback(node.host) else node.host
        for node in state.nodes.values()
        if node.health != "left" and node.host
    }
    output = PurePosixPath(os.path.normpath(folder))
    if len(hosts) > 1 and not any(
        output.is_relative_to(os.path.normpath(shared)) for shared in state.policy.shared_folders
    ):
        raise Refusal(
            422,
            f"{path}: {folder} is not known to be a folder that all {len(hosts)} hosts share",
            "a URL, or a folder in shared_folders of the policy file (docs/guides/hosts.md)",
        )


def convert(data: Any, kind: type[T], *, strict: bool = True) -> T:
    """The data as a `kind`. Raises SpecError for a job, else a Refusal that names the field."""
    if kind is JobSpec:
        return cast(T, parse(data))
    try:
        return msgspec.convert(data, kind, strict=strict)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at ")
        where = at.strip("`").removeprefix("$.")
        raise Refusal(400, f"{where}: {message}" if where else message, "") from None


def _live_task(state: ClusterState, text: str) -> Task:
    number = whole_number(text) or 0
    task = state.tasks.get(number)
    if task is None:
        raise Refusal(
            404,
            f"there is no task {text[:40]}",
            _known_names((f"{one.id} ({one.spec.name})" for one in live_tasks(state)), "live task"),
        )
    if task.phase == "ended":
        raise Refusal(409, f"task {number} has ended: {task.outcome}", f"unicron status {number}")
    return task


def _running(task: Task, number: int) -> Rank:
    """The task's process for that rank. Raises Refusal if there is none."""
    rank = task.ranks.get(number)
    if rank is None or not rank.pid:
        raise Refusal(
            404,
            f"task {task.id} ({task.spec.name}) runs no rank {number}",
            _known_names(
                (str(key) for key in sorted(task.ranks) if task.ranks[key].pid), "running rank"
            ),
        )
    return rank


def _node(state: ClusterState, name: str) -> Node:
    node = state.nodes.get(name)
    if node is None:
        raise Refusal(404, f"there is no node {name[:64]!r}", _known_names(state.nodes, "node"))
    return node


def _known_names(names: Iterable[str], what: str) -> str:
    found = list(names)
    more = ", ..." if len(found) > NUM_NAMED_MAX else ""
    return (
        f"there {'is' if len(found) == 1 else 'are'} {', '.join(found[:NUM_NAMED_MAX])}{more}"
        if found
        else f"there is no {what}"
    )


def one_line(reason: str) -> str:
    """The reason on one line. Raises Refusal if it is too long."""
    line = " ".join(reason.split())
    if len(line) > REASON_CHARS_MAX:
        raise Refusal(
            422,
            f"reason: {len(line)} characters, and at most {REASON_CHARS_MAX} fit",
            "say it in a few words",
        )
    return line
