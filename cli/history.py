"""What a log tells of tasks and incidents: phases, losses, counts; read from records alone.

Works on the plain data of `codec.to_plain`. Times are the leader's stamps (`at_s`), except that a
fault's own time is the reporter's (`occurred_s` of its first evidence).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct, field

Plain = dict[str, Any]


class IncidentHistory(Struct, kw_only=True):
    """One incident and when it reached each phase; None for a phase not reached. Times in s."""

    id: int
    task: int
    node: str
    severity: str
    status: str
    ranks: tuple[int, ...]
    why: str
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
    todo: int = 0
    """Micro-batches run after it to complete that iteration."""
    iterations_lost: int = 0
    ckpt_read: bool = False
    outcome: str = "open"
    pause_s: float | None = None


class TaskHistory(Struct, kw_only=True):
    """One task's losses by iteration, and what became of it."""

    id: int
    name: str
    num_iterations: int
    submitted_s: float
    losses: dict[int, float] = field(default_factory=dict[int, float])
    step_s: dict[int, float] = field(default_factory=dict[int, float])
    micro_batches: dict[int, int] = field(default_factory=dict[int, int])
    """Size of the batch -> number of progress records that told it."""
    outcome: str = ""
    why: str = ""
    ended_s: float = 0.0


class History(Struct):
    """All tasks and incidents of a log, by id; `seq` is the last record that was read."""

    seq: int = 0
    tasks: dict[int, TaskHistory] = field(default_factory=dict[int, TaskHistory])
    incidents: dict[int, IncidentHistory] = field(default_factory=dict[int, IncidentHistory])
    stamps: dict[int, tuple[float, float]] = field(
        default_factory=dict[int, tuple[float, float]])
    """(at_s, occurred_s) of what may be evidence, by seq."""

    def add(self, record: Plain) -> None:
        """Read the next record."""
        self.seq = record["seq"]
        kind, body = record["kind"], record["body"]
        if record["source"] != "heart" and kind != "TaskProgressed":
            self.stamps[record["seq"]] = (record["at_s"], record["occurred_s"])
        if kind in ("IncidentOpened", "IncidentEscalated", "IncidentClosed"):
            _incident(self, record)
        else:
            for incident in self.incidents.values():
                if incident.task == body.get("task") and incident.outcome == "open":
                    _phase(incident, record)
        _task(self, record)


def history(records: Iterable[Plain]) -> History:
    """Read a whole log."""
    told = History()
    for record in records:
        told.add(record)
    return told


def _incident(told: History, record: Plain) -> None:
    body: Plain = record["body"]
    if record["kind"] == "IncidentOpened":
        evidence = [told.stamps[seq] for seq in body["evidence"] if seq in told.stamps]
        first = min(evidence, default=(record["at_s"], record["occurred_s"]))
        told.incidents[record["seq"]] = IncidentHistory(
            id=record["seq"], task=body["task"], node=body["node"], severity=body["severity"],
            status=body["status"], ranks=tuple(body["ranks"]), why=body["why"],
            fault_s=min((one[1] for one in evidence), default=first[1]), detected_s=first[0],
            decided_s=record["at_s"])
        return
    incident = told.incidents.get(body["of"])
    if incident is None:
        return
    if record["kind"] == "IncidentEscalated":
        incident.severity = min(incident.severity, body["severity"])  # SEV1 is the gravest
        incident.why = body["why"]
        incident.ranks = tuple(sorted({*incident.ranks, *body["ranks"]}))
        return
    incident.outcome, incident.pause_s = body["outcome"], body["pause_s"]
    incident.iterations_lost, incident.ckpt_read = body["iterations_lost"], body["ckpt_read"]
    incident.kept, incident.dealt = body["kept"], body["dealt"]


def _phase(incident: IncidentHistory, record: Plain) -> None:
    """Note the first time of each phase; a second transition of the same incident starts anew."""
    kind, body, at_s = record["kind"], record["body"], record["at_s"]
    if kind in ("Quiesce", "Reconfigure", "StartRank") and incident.ordered_s is None:
        incident.ordered_s = at_s
    if incident.stepped_s is not None:
        return
    if kind == "Reconfigure":
        incident.rebuilt_s = incident.resumed_s = None
        incident.kept = incident.dealt = incident.todo = 0
    elif kind == "Reconfigured":
        incident.rebuilt_s = at_s
        incident.iteration = body["step_version"]
        incident.kept += len(body["kept"])
        incident.dealt += len(body["dealt"])
        incident.todo += len(body["todo"])
    elif kind == "Resume":
        incident.resumed_s = at_s
    elif kind == "TaskProgressed" and incident.resumed_s is not None:
        incident.stepped_s = at_s


def _task(told: History, record: Plain) -> None:
    kind, body = record["kind"], record["body"]
    if kind == "TaskSubmitted":
        train = body["spec"].get("train")
        told.tasks[record["seq"]] = TaskHistory(
            id=record["seq"], name=body["spec"]["name"], submitted_s=record["at_s"],
            num_iterations=train["iterations"] if train else 0)
        return
    task = told.tasks.get(body.get("task", 0))
    if task is None:
        return
    if kind == "TaskProgressed":
        for offset, loss in enumerate(body["losses"]):
            task.losses[body["first_iteration"] + offset] = loss
        for offset, step_s in enumerate(body["step_s"]):
            task.step_s[body["first_iteration"] + offset] = step_s
        size = body["micro_batches"]
        task.micro_batches[size] = task.micro_batches.get(size, 0) + 1
    elif kind == "TaskEnded":
        task.outcome, task.why, task.ended_s = body["outcome"], body["why"], record["at_s"]
