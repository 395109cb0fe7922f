"""What a log tells of tasks and incidents: phases, losses, counts; read from records alone.

Works on the plain data of `codec.to_plain`. Times are the leader's stamps (`at_s`), except that a
fault's own time is the reporter's (`occurred_s` of its first evidence); a hang's, when it began.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct, convert, field

from ...control_plane.incidents.severity import worse
from ...control_plane.throughput.flops import iteration_flops
from ...events.records.envelope import PROGRESS
from ...events.records.types import Severity
from ...events.spec.model import MegatronModel
from ...events.spec.parallelism import Kept
from ..terminal.format import layout, lost_state, optimizer_of, plan_waf, speakers
from ..terminal.record_line import essentials
from .downtime import Stepping, told_to
from .waf import Planned, Waf, Work, over_time

# --- What a command's own lines tell of its restarts: how many iterations it does again. ---

Plain = dict[str, Any]


class Incident(Protocol):
    """What is read and told of one (history.py)."""

    task: int
    iterations_lost: int | None
    outcome: str
    closed_s: float | None


class Printed(Struct):
    """How far a command has told that it is; the state's fold reads the lines the same way."""

    attempts: dict[int, int] = field(default_factory=dict[int, int])
    """Rank -> the attempt that was started last."""
    teller: int = -1
    """Who tells of this round of processes: whoever is first; below 0: nobody has yet."""
    iteration: int = 0
    """As told last, by any round."""

    def started(self, body: Plain) -> None:
        """Read a StartRank: all of a command are started together."""
        self.attempts[body["rank"]], self.teller = body["attempt"], -1

    def told(self, body: Plain) -> int | None:
        """Read an IterationsLogged. Of a round's first line: how many iterations that had been told
        of are done again; else None."""
        if self.attempts.get(body["rank"]) != body["attempt"] or (
                self.teller not in (-1, body["rank"])):
            return None
        begins, before = self.teller < 0, self.iteration
        self.teller, self.iteration = body["rank"], body["iteration"]
        if not begins:
            return None
        return max(before - self.iteration + 1, 0) if before else 0


def begins_again(incidents: Iterable[Incident], task: int, lost: int | None) -> None:
    """As the fold has it: the task's newest incident is told, unless it knows what it cost: then a
    plan has moved the task since."""
    mine = [one for one in incidents if one.task == task]
    if lost is None or not mine or (mine[-1].closed_s is not None
                                    and mine[-1].iterations_lost is not None):
        return
    mine[-1].iterations_lost = (mine[-1].iterations_lost or 0) + lost
    if lost and mine[-1].outcome == "healed":
        mine[-1].outcome = "set back"


# --- Faults that were made on purpose: asked for, ordered, and which incidents they explain. ---


class Fault(Struct, kw_only=True):
    """One InjectFault. It breaks one life of a rank, or of a node's agent, and no later one."""

    seq: int
    """Of the request."""
    what: str
    """In words, with the reason that was given."""
    task: int
    rank: int
    attempt: int
    node: str
    """Empty where a rank is broken."""
    incarnation: int
    goes_on_s: float | None
    """When a stopped rank goes on; None: never, or it is killed."""
    over_seq: int = 0
    """What is told from here on is not of it; 0: it may still show."""


class OnPurpose(Struct):
    """All such faults of a log."""

    faults: list[Fault] = field(default_factory=list[Fault])
    asked: Plain | None = None
    """The last request for one."""

    def add(self, record: Plain) -> None:
        """Read the next record."""
        if record["kind"] == "FaultRequested":
            self.asked = record
        elif record["kind"] == "InjectFault":
            asked = self.asked
            self.faults.append(_fault(record, asked if asked is not None
                                      and asked["seq"] == record["cause"] else record))
        for one in self.faults:
            if not one.over_seq and _is_over(one, record):
                one.over_seq = record["seq"]

    def behind(self, *, task: int, ranks: Sequence[int], node: str, first_seq: int,
               last_seq: int) -> list[Fault]:
        """Those that explain an incident whose signs came from `first_seq` to `last_seq`."""
        return [one for one in self.faults
                if one.seq < last_seq and (not one.over_seq or one.over_seq >= first_seq)
                and (one.node == node if one.node else one.task == task and one.rank in ranks)]


def _fault(order: Plain, asked: Plain) -> Fault:
    body = order["body"]
    goes_on = body["what"] == "stop" and body["stop_s"] > 0
    return Fault(
        seq=asked["seq"], what=essentials(asked["kind"], asked["body"]), task=body["task"],
        rank=body["rank"], attempt=body["attempt"], incarnation=body["incarnation"],
        node=body["nodes"][0] if body["what"] == "node" else "",
        goes_on_s=order["at_s"] + body["stop_s"] if goes_on else None)


def _is_over(one: Fault, record: Plain) -> bool:
    """Its rank has ended, or trains on; its node's next agent has joined."""
    kind, body = record["kind"], record["body"]
    if one.node:
        return bool(kind == "NodeJoined" and body["node"] == one.node
                    and body["incarnation"] > one.incarnation)
    if body.get("task") != one.task:
        return False
    if kind == "RankExited":
        return bool(body["rank"] == one.rank and body["attempt"] >= one.attempt)
    return kind == "TaskEnded" or (kind in PROGRESS and one.goes_on_s is not None
                                   and record["at_s"] > one.goes_on_s)
FARTHER = ("copy", "checkpoint", "seed")
"""Where state comes from that no member has any more."""


class IncidentHistory(Struct, kw_only=True):
    """One incident and when it reached each phase; None for a phase not reached. Times in s."""

    id: int
    task: int
    node: str
    severity: Severity
    status: str
    ranks: tuple[int, ...]
    why: str
    """Of the gravest that was told of it, as severity and status are."""
    fault_s: float
    detected_s: float
    """The first evidence is in the log."""
    decided_s: float
    ordered_s: float | None = None
    """The first order of the transition is in the log."""
    rebuilt_s: float | None = None
    """The last member is in the new generation."""
    resumed_s: float | None = None
    stepped_s: float | None = None
    """The first iteration after it is told."""
    iteration: int | None = None
    """The iteration that was interrupted."""
    kept: int = 0
    dealt: int = 0
    iterations_lost: int | None = 0
    """None: of a command that has not printed since how far it is."""
    ckpt_read: bool = False
    origin: str = ""
    """As IncidentClosed says: the farthest that a member's state came from, and what from peers."""
    origin_node: str = ""
    origin_step_version: int = 0
    origin_path: str = ""
    origin_bytes: int = 0
    received_bytes: int = 0
    peer_bytes: int = 0
    near_bytes: int = 0
    layouts: list[str] = field(default_factory=list[str])
    """That the task was in, one after the other, from the one that it had when it struck."""
    speakers: set[int] = field(default_factory=set[int])
    """Ranks of the generation that tell of micro-batches."""
    order: Plain | None = None
    """Of the generation in which it struck."""
    alive: set[tuple[int, int]] | None = None
    """Rank and attempt of those who went on."""
    optimizer: Kept = "whole"
    outcome: str = "open"
    pause_s: float | None = None
    evidence: list[int] = field(default_factory=list[int])
    """Seqs, also of what escalated it."""
    first_seq: int
    """The first sign of it: evidence, or a peer's collective that failed before."""
    closed_s: float | None = None
    closed_seq: int = 0
    num_slots: int = 0
    """What the task had when it struck."""
    slot_s: float = 0.0
    """Slots of these that did not step, times how long, until `counted_s`: see `slot_s`."""
    counted_s: float = 0.0
    """The last record, or the one that closed it."""

    @property
    def lost(self) -> str:
        """What of the state went with those who died, where it was set back; of a whole nothing
        can be said."""
        if self.origin not in FARTHER or self.order is None or self.alive is None:
            return ""
        return lost_state(self.order, self.optimizer, self.alive)


class TaskHistory(Struct, kw_only=True):
    """One task's losses by iteration, and what became of it."""

    id: int
    name: str
    num_iterations: int
    submitted_s: float
    weight: float = 1.0
    """As of the last record."""
    iteration_flops: float = 0.0
    model_batch: int = 0
    """Samples of an iteration of a command's `model`."""
    furthest: int = 0
    """Iterations done for the first time: what is trained again is no work."""
    origin: str = ""
    """Of its throughput: declared, modelled, measured."""
    layout: str = ""
    order: Plain | None = None
    """Of the newest generation."""
    optimizer: Kept = "whole"
    dps: dict[int, int] = field(default_factory=dict[int, int])
    """Generation -> its number of members."""
    stepping: Stepping = field(default_factory=Stepping)
    paces_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Number of members -> how long each iteration took."""
    losses: dict[int, float] = field(default_factory=dict[int, float])
    """As they are now: what was lost is not among them."""
    step_s: dict[int, float] = field(default_factory=dict[int, float])
    micro_batches: dict[int, int] = field(default_factory=dict[int, int])
    """Size of the batch -> number of progress records that told it."""
    skipped: int = 0
    """Iterations that took no step, as last told."""
    printed: Printed = field(default_factory=Printed)
    outcome: str = ""
    why: str = ""
    ended_s: float = 0.0


class History(Struct):
    """All tasks and incidents of a log, by id; `seq` is the last record that was read."""

    seq: int = 0
    at_s: float = 0.0
    """When that was."""
    tasks: dict[int, TaskHistory] = field(default_factory=dict[int, TaskHistory])
    incidents: dict[int, IncidentHistory] = field(default_factory=dict[int, IncidentHistory])
    open: dict[int, IncidentHistory] = field(default_factory=dict[int, IncidentHistory])
    """Incidents that are not closed."""
    stamps: dict[int, tuple[float, float]] = field(
        default_factory=dict[int, tuple[float, float]])
    """(at_s, occurred_s) of what may be evidence, by seq."""
    work: list[Work] = field(default_factory=list[Work])
    plans: list[Planned] = field(default_factory=list[Planned])
    on_purpose: OnPurpose = field(default_factory=OnPurpose)

    def add(self, record: Plain) -> None:
        """Read the next record."""
        self.seq, self.at_s = record["seq"], record["at_s"]
        kind, body = record["kind"], record["body"]
        if record["source"] != "heart" and kind not in PROGRESS:
            self.stamps[record["seq"]] = (record["at_s"], record["occurred_s"])
        for incident in self.open.values():
            _count_slots(self, incident, record["at_s"])
        _stepping(self, record)
        if kind in ("IncidentOpened", "IncidentEscalated", "IncidentClosed"):
            _incident(self, record)
        else:
            for incident in self.open.values():
                if incident.task == body.get("task"):
                    _phase(incident, record)
        _task(self, record)
        _planned(self, record)
        self.on_purpose.add(record)


def history(records: Iterable[Plain]) -> History:
    """Read a whole log."""
    told = History()
    for record in records:
        told.add(record)
    return told


def slot_s(told: History, incident: IncidentHistory, at_s: float) -> float:
    """Slots that did not step, times how long; of one that is open, until `at_s`."""
    task = told.tasks.get(incident.task)
    if task is None or incident.closed_s is not None:
        return incident.slot_s
    still = max(incident.num_slots - task.stepping.num, 0)
    return incident.slot_s + still * max(at_s - incident.counted_s, 0.0)


def waf(it: History, num_buckets: int) -> Waf:
    """WAF over time, from the first submission to the last record, in equal buckets.

    `achieved`: FLOP of an iteration (RankReady) x iterations done for the first time x the weight
    at that time, spread over the time that they took. `planned`, `ideal`: PlanChosen, as steps;
    0 before the first plan and after the last task's end. Raises ValueError on no buckets.
    """
    from_s = min((task.submitted_s for task in it.tasks.values()), default=it.at_s)
    return over_time(it.work, it.plans, from_s=from_s, to_s=it.at_s, num_buckets=num_buckets)


def _worked(told: History, task: TaskHistory, record: Plain) -> None:
    """Iterations were told as finished, one after the other until now."""
    body = record["body"]
    if record["kind"] == "LossNotFinite":
        to, times_s = body["iteration"] + 1, list(task.step_s.values())[-1:]
    else:
        to, times_s = told_to(body), list(body["step_s"])
    num = to - task.furthest
    if num > 0:
        took_s = math.fsum(times_s[-num:])
        told.work.append(Work(record["at_s"] - took_s, record["at_s"],
                              num * task.iteration_flops * task.weight))
        task.furthest = to


def _logged(told: History, task: TaskHistory, record: Plain) -> None:
    """A command printed how far it is. What it did before it was first heard of is no work."""
    body = record["body"]
    lost = task.printed.told(body)
    begins_again(told.incidents.values(), task.id, lost)
    to, num = body["iteration"], body["num_iterations"]
    new = min(to - task.furthest, num)
    if new > 0 and task.iteration_flops and body["global_batch"] in (0, task.model_batch):
        told.work.append(Work(record["at_s"] - new * body["step_s"], record["at_s"],
                              new * task.iteration_flops * task.weight))
    if to > task.furthest:  # else it is done again, or another rank prints it too
        task.furthest, task.skipped = to, task.skipped + body["skipped"]
    if lost is not None:  # it went back to its own checkpoint: the rest was lost
        task.losses = {key: loss for key, loss in task.losses.items() if key <= to - num}
    if body["loss"] is not None:
        task.losses[to] = body["loss"]


def _planned(told: History, record: Plain) -> None:
    body = record["body"]
    if record["kind"] == "PlanChosen":
        origins = {told.tasks[one["task"]].origin
                   for one in [*body["allocations"], *body.get("kept", ())]
                   if one["slots"] and one["task"] in told.tasks}
        told.plans.append(Planned(record["seq"], record["at_s"], plan_waf(body),
                                  body.get("ideal_waf", 0.0), tuple(sorted(origins - {""}))))
    elif record["kind"] == "TaskEnded" and all(x.outcome for x in told.tasks.values()):
        told.plans.append(Planned(record["seq"], record["at_s"]))


def _incident(told: History, record: Plain) -> None:
    body: Plain = record["body"]
    if record["kind"] == "IncidentOpened":
        evidence = [told.stamps[seq] for seq in body["evidence"] if seq in told.stamps]
        first = evidence[0] if evidence else (record["at_s"], record["occurred_s"])
        told.incidents[record["seq"]] = told.open[record["seq"]] = incident = IncidentHistory(
            id=record["seq"], task=body["task"], node=body["node"], severity=body["severity"],
            status=body["status"], ranks=tuple(body["ranks"]), why=body["why"],
            fault_s=min((one[1] for one in evidence), default=first[1]), detected_s=first[0],
            decided_s=record["at_s"], evidence=list(body["evidence"]), counted_s=record["at_s"],
            first_seq=min([record["seq"], *body["evidence"]]))
        task = told.tasks.get(body["task"])
        if task is not None:
            stepping = task.stepping
            incident.layouts = [task.layout] if task.layout else []
            incident.order, incident.optimizer = task.order, task.optimizer
            incident.num_slots = stepping.num_seats
            failed = [stepping.failed_seq] if stepping.failed_seq else []
            stood_s = stepping.stood_s(body)
            incident.first_seq = min([incident.first_seq, *failed])
            incident.fault_s = min([incident.fault_s, *stood_s,
                                    *(told.stamps[seq][1] for seq in failed)])
            if not stepping.num:
                incident.counted_s = max(stepping.stopped_s, min(
                    [incident.detected_s, *stood_s, *(told.stamps[seq][0] for seq in failed)]))
                _count_slots(told, incident, record["at_s"])
        return
    if (known := told.incidents.get(body["of"])) is not None:
        _went_on(told, known, record)


def _went_on(told: History, incident: IncidentHistory, record: Plain) -> None:
    body: Plain = record["body"]
    if record["kind"] == "IncidentEscalated":
        known = incident.ranks
        if body.get("root") or worse(incident.severity, body["severity"]) != incident.severity:
            if (body.get("root") or incident.severity == "SEV3") and body["ranks"]:
                known = ()  # they saw what came of it: here is why
            incident.severity, incident.why = body["severity"], body["why"]
            incident.status = body.get("status") or incident.status
            incident.node = body.get("node") or incident.node
        incident.ranks = tuple(sorted({*known, *body["ranks"]}))
        incident.evidence += [x for x in body["evidence"] if x not in incident.evidence]
        return
    told.open.pop(incident.id, None)
    incident.closed_s, incident.closed_seq = record["at_s"], record["seq"]
    incident.outcome, incident.pause_s = body["outcome"], body["pause_s"]
    incident.iterations_lost, incident.ckpt_read = body["iterations_lost"], body["ckpt_read"]
    incident.kept, incident.dealt = body["kept"], body["dealt"]
    incident.slot_s = max(incident.slot_s, body["pause_s"] * incident.num_slots)  # told late
    incident.origin, incident.origin_node = body.get("origin", ""), body.get("origin_node", "")
    incident.origin_step_version = body.get("origin_step_version", 0)
    incident.origin_path = body.get("origin_path", "")
    incident.origin_bytes = body.get("origin_bytes", 0)
    incident.received_bytes = body.get("received_bytes", 0)
    incident.peer_bytes = body.get("peer_bytes", 0)
    incident.near_bytes = body.get("near_bytes", 0)


def _count_slots(told: History, incident: IncidentHistory, at_s: float) -> None:
    """Slots that have not stepped since they were last counted."""
    incident.slot_s = slot_s(told, incident, at_s)
    incident.counted_s = max(incident.counted_s, at_s)


def _stepping(told: History, record: Plain) -> None:
    task = told.tasks.get(record["body"].get("task", 0))
    if record["kind"] in ("IncidentEscalated", "IncidentClosed"):
        known = told.incidents.get(record["body"]["of"])
        task = told.tasks.get(known.task) if known is not None else None
    stood_slot_s = task.stepping.read(record) if task is not None else 0.0
    for incident in told.open.values():
        if task is not None and incident.task == task.id:
            incident.slot_s += stood_slot_s


def _phase(incident: IncidentHistory, record: Plain) -> None:
    """Note the first time of each phase; a second transition of the same incident starts anew."""
    kind, body, at_s = record["kind"], record["body"], record["at_s"]
    if kind in ("Quiesce", "Reconfigure", "StartRank") and incident.ordered_s is None:
        incident.ordered_s = at_s
    if kind == "Reconfigure" and layout(body) != (incident.layouts or [""])[-1]:
        incident.layouts.append(layout(body))
    if incident.stepped_s is not None:
        return
    if kind == "Reconfigure":
        on = {(one["rank"], one["attempt"]) for one in body["members"]}
        incident.alive = on if incident.alive is None else incident.alive & on
        incident.speakers = speakers(body)
        incident.rebuilt_s = incident.resumed_s = None
        incident.kept = incident.dealt = 0
    elif kind == "Reconfigured":
        incident.rebuilt_s = at_s
        incident.iteration = body["step_version"]
        if body["rank"] in incident.speakers:
            incident.kept += len(body["kept"])
            incident.dealt += len(body["dealt"])
    elif kind == "Resume":
        incident.resumed_s = at_s
    elif (kind == "TaskProgressed" and incident.resumed_s is not None
          and told_to(body) > (incident.iteration or 0)):
        incident.stepped_s = at_s


def _task(told: History, record: Plain) -> None:
    kind, body = record["kind"], record["body"]
    if kind == "TaskSubmitted":
        train, plain = body["spec"].get("train"), body["spec"].get("model")
        model = convert(plain, MegatronModel) if plain else None
        told.tasks[record["seq"]] = TaskHistory(
            id=record["seq"], name=body["spec"]["name"], submitted_s=record["at_s"],
            num_iterations=train["iterations"] if train else 0,
            optimizer=optimizer_of(body["spec"]), weight=body["spec"]["weight"],
            iteration_flops=iteration_flops(model) if model is not None else 0.0,
            model_batch=model.global_batch if model is not None else 0)
        return
    task = told.tasks.get(body.get("task", 0))
    if task is None:
        return
    if kind == "StartRank":
        task.printed.started(body)
    elif kind == "Reconfigure":
        task.dps[body["generation"]] = len(body["members"])
        task.layout, task.order = layout(body), body
    elif kind == "RankReady":
        task.iteration_flops = body["iteration_flops"]
    elif kind == "TaskWeightSet":
        task.weight = body["weight"]
    elif kind == "ThroughputSet":
        task.origin = body["origin"]
    elif kind == "LossNotFinite":
        _worked(told, task, record)
    elif kind == "TaskProgressed":
        _worked(told, task, record)
        for offset, loss in enumerate(body["losses"]):
            task.losses[body["first_iteration"] + offset] = loss
        for offset, step_s in enumerate(body["step_s"]):
            task.step_s[body["first_iteration"] + offset] = step_s
        paces_s = task.paces_s.setdefault(task.dps.get(body["generation"], 0), [])
        paces_s += body["step_s"]
        task.skipped = body.get("skipped", 0)
        size = body["micro_batches"]
        task.micro_batches[size] = task.micro_batches.get(size, 0) + 1
    elif kind == "IterationsLogged":
        _logged(told, task, record)
    elif kind == "TaskEnded":
        task.outcome, task.why, task.ended_s = body["outcome"], body["why"], record["at_s"]
