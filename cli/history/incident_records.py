"""Since when a fault lasted, as far as its first evidence tells: seldom to the moment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, Literal

from msgspec import Struct, field

from ...events.records.envelope import PROGRESS
from ...events.records.statuses import NCCL_TIMEOUT
from ..terminal.format import ranks, span
from .downtime import told_to
from .history import IncidentHistory

Plain = dict[str, Any]
TO_THE_MOMENT = frozenset({"RankExited", "RankErrored", "RankSuspended", "DeviceErred",
                           "NodeUnreachable", "NodeJoined", "NodeLeft"})
"""Kinds that tell when what they tell of happened, or since when (NodeUnreachable)."""


class Began(Struct, frozen=True):
    """How long before `detected_s` the fault began: `at most`, `at least`, not known, or exactly.
    """

    bound: Literal["", "at most", "at least", "unknown"] = ""
    length_s: float = 0.0
    """Of a bound."""
    why: str = ""


def began(one: IncidentHistory, evidence: list[Plain]) -> Began:
    """By what the incident was opened for."""
    first = [x for x in evidence if x["seq"] < one.id]
    kinds = {x["kind"] for x in first}
    if kinds & TO_THE_MOMENT or not first:
        return Began()
    paced = [x for x in first if x["kind"] == "StepTimeChanged"]
    crawls = [x for x in paced if x["body"]["num_iterations"] == 1]
    if crawls:  # an iteration that has not ended, though the rank passes marks
        since_s = min(x["at_s"] - max(x["body"]["iteration_s"], 0.0) for x in crawls)
        length_s = max(one.detected_s - since_s, 0.0)
        return Began("at most", length_s, f"after that iteration began, {span(length_s)} before "
                     "it was told; the moment itself is not known")
    stalls = [x for x in first if x["kind"] == "RankStalled"]
    if stalls:
        return _after_a_mark(one, [x for x in stalls if x["body"]["rank"] in one.ranks] or stalls)
    if paced:
        num = int(paced[0]["body"]["num_iterations"])
        length_s = math.ceil(num / 2) * float(paced[0]["body"]["iteration_s"])
        return Began("at least", length_s, f"not known: of the last {num} iterations at least half "
                     "were too slow, and that tells it")
    if "HealthChanged" in kinds:
        return Began("unknown", 0.0, "not known: before its check ran, which it does from time to "
                     "time")
    if NCCL_TIMEOUT in {one.status, *(x["body"].get("status") for x in first)}:
        return Began("unknown", 0.0, "not known: a collective waited until its timeout, for what "
                     "had happened before")
    if kinds == {"DeadlineReached"}:
        return Began("unknown", 0.0, "not known: nothing but that it is overdue shows it")
    return Began()


def _after_a_mark(one: IncidentHistory, stalls: list[Plain]) -> Began:
    """It passed that mark, and no other; what happened between nobody saw."""
    since_s, seq = min((x["at_s"] - max(x["body"]["in_s"], 0.0), x["seq"]) for x in stalls)
    length_s = max(one.detected_s - since_s, 0.0)
    (who,) = (x["body"]["rank"] for x in stalls if x["seq"] == seq)
    return Began("at most", length_s, f"after the last sign of {ranks([who])}, {span(length_s)} "
                 "before it was told; the moment itself is not known")


# --- The story of an incident: which records of a log belong to it, those of unhurt tasks too. ---
#
# A record carries the incident of the hurt task alone. A plan that follows from the same cause, and
# what it makes another task do until that one steps again, are found by cause and by placement.
Other = Literal["moves", "leaves", "done"]
"""An unhurt task on its way to other seats, or to none; done: it steps again, or is over."""
AFTER_RECORDS_MAX = 10_000
"""How far behind the incident's end other tasks are followed."""


class Story(Struct, kw_only=True):
    """Records by seq, as they are added; `others` are the unhurt tasks that it touched."""

    incident: IncidentHistory
    later: frozenset[int] = frozenset()
    """Seqs of evidence that came after it was decided upon, or even after it was closed."""
    records: list[Plain] = field(default_factory=list[Plain])
    others: dict[int, Other] = field(default_factory=dict[int, Other])
    causes: set[int] = field(default_factory=set[int])
    settled: dict[int, int] = field(default_factory=dict[int, int])
    """Task -> the step version that its newest generation went on from."""
    resumed: set[int] = field(default_factory=set[int])
    """Tasks told to train that have told no step yet."""
    before: dict[int, list[Plain]] = field(default_factory=dict[int, list[Plain]])
    """Task -> the Reconfigure and the Resume by which it trained when the story reached it."""
    ordered: dict[int, Plain] = field(default_factory=dict[int, Plain])
    """Task -> its last Reconfigure."""
    copy_every: int | None = None
    """As its job spec says; None: it has no state, or its spec was not read."""
    kept: dict[tuple[str, int], Plain] = field(default_factory=dict[tuple[str, int], Plain])
    """Its copies by node and step: the last that was told of each."""
    lost: dict[str, Plain] = field(default_factory=dict[str, Plain])
    """By node: what ended the copies that were there, and none came after it."""
    started: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """Its ranks when it was decided upon -> the node and the log of each."""
    plan: Plain | None = None
    """The last plan that was read, as long as nothing made it part of the story."""

    def add(self, record: Plain) -> None:
        """Read the next record of the log."""
        task = record["body"].get("task", 0)
        if self._is_of_copies(record, task):
            return
        self._start(record, task)
        if record["kind"] == "PlanChosen":
            self.plan = record
        self._train(record, task)
        own = self._is_own(record)
        if own:
            self.causes |= {record["seq"], record["cause"]} - {0}
        if not own and not self._follows(record):
            return
        self._keep_plan(record)
        if record["kind"] == "TaskPlaced" and task != self.incident.task:
            self.others[task] = "moves" if record["body"]["seats"] else "leaves"
        if record["kind"] != "PlanChosen" and not self._is_old_progress(record, task):
            self.records.append(record)

    def _start(self, record: Plain, task: int) -> None:
        body = record["body"]
        if task != self.incident.task or record["seq"] > self.incident.id:
            return
        if record["kind"] == "RankStarted":
            self.started[body["rank"]] = body["node"], body["log_path"]
        elif record["kind"] == "TaskPlaced":
            seats = {seat["rank"] for seat in body["seats"]}
            self.started = {rank: at for rank, at in self.started.items() if rank in seats}

    def _is_of_copies(self, record: Plain, task: int) -> bool:
        """Follow where copies of its state are; none of these is news by itself."""
        kind, body, own = record["kind"], record["body"], self.incident.task
        if kind == "TaskSubmitted" and record["seq"] == own:
            train: Plain = body["spec"].get("train") or {}
            self.copy_every = train.get("copy_every")
        ended = (kind == "MemoryCheckpointsLost" and task in (0, own)
                 ) or kind in ("NodeJoined", "NodeLeft")
        before_end = not self.incident.closed_seq or record["seq"] <= self.incident.closed_seq
        if kind == "MemoryCheckpointStored" and task == own and before_end:
            self.kept[body["node"], body["step_version"]] = record
            self.lost.pop(body["node"], None)
        elif ended and before_end and any(node == body["node"] for node, _ in self.kept):
            self.lost[body["node"]] = record
        return bool(kind == "MemoryCheckpointStored")

    @property
    def gone(self) -> list[Plain]:
        """What had ended the copies, where a farther source had to serve."""
        return (sorted(self.lost.values(), key=itemgetter("seq"))
                if self.incident.origin in ("checkpoint", "seed") else [])

    @property
    def no_copies(self) -> str:
        """Why there was no copy at all, where a farther source had to serve."""
        if self.incident.origin not in ("checkpoint", "seed") or self.kept:
            return ""
        if self.copy_every == 0:
            return "none are kept: train.copy_every is 0"
        return "none had been told of" if self.copy_every else ""

    def settle(self) -> None:
        """Take in what tells of the copy that served, or why none did."""
        one = self.incident
        used = self.kept.get((one.origin_node, one.origin_step_version))
        decisive = [*self.gone, *([used] if used is not None and one.origin == "copy" else [])]
        there = {record["seq"] for record in self.records}
        self.records += [record for record in decisive if record["seq"] not in there]
        self.records.sort(key=itemgetter("seq"))

    def _train(self, record: Plain, task: int) -> None:
        if record["kind"] == "Reconfigure":
            self.ordered[task] = record
        elif record["kind"] == "Resume" and task in self.ordered and task not in self.others:
            self.before[task] = [self.ordered[task], record]

    def _is_old_progress(self, record: Plain, task: int) -> bool:
        """Follow whether the task steps: only its first progress after it began anew counts."""
        kind, body = record["kind"], record["body"]
        if kind == "Reconfigured":
            self.settled[task] = body["step_version"]
        elif kind == "Resume" or (kind == "StartRank" and body["host"]):  # a command has no Resume
            self.resumed.add(task)
        steps = task in self.resumed and (kind == "IterationsLogged" or (
            kind == "TaskProgressed" and told_to(body) > self.settled.get(task, 0)))
        if steps:
            self.resumed.discard(task)
        if (steps or kind == "TaskEnded") and task in self.others:
            self.others[task] = "done"
        return kind in PROGRESS and not steps

    def _is_own(self, record: Plain) -> bool:
        number = self.incident.id
        early = self.incident.first_seq <= record["seq"] < number  # a peer's collective failed
        return (number in (record["incident"], record["seq"])
                or record["seq"] in self.incident.evidence or record["seq"] in self.later
                or (early and record["body"].get("task", 0) == self.incident.task))

    def _follows(self, record: Plain) -> bool:
        if record["kind"] in ("PlanChosen", "TaskPlaced", "TaskWaiting", "OrderSuppressed"):
            return record["cause"] in self.causes
        other = self.others.get(record["body"].get("task", 0))
        end = self.incident.closed_seq
        return other == "moves" or (other == "leaves" and (not end or record["seq"] <= end))

    def _keep_plan(self, record: Plain) -> None:
        """A plan comes before the placement that makes it part of the story."""
        plan = self.plan
        if plan is not None and (record is plan or (
                record["kind"] == "TaskPlaced" and plan["cause"] == record["cause"])):
            self.records.append(plan)
            self.plan = None

    def is_over(self, seq: int) -> bool:
        """Whether nothing of a later seq can belong to it."""
        end = self.incident.closed_seq
        return bool(end) and seq >= max(end, *self.later, 0) and (
            "moves" not in self.others.values() or seq > end + AFTER_RECORDS_MAX)


def story(incident: IncidentHistory, records: Iterable[Plain], later: Iterable[int] = ()) -> Story:
    """Read the log from its start, until the story is over and all that came later is read."""
    told = Story(incident=incident, later=frozenset(later))
    for record in records:
        told.add(record)
        if told.is_over(record["seq"]):
            break
    told.settle()
    return told
