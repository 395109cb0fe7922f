"""The decider's single entry: folds one report and returns the records that follow from it."""

from typing import Literal

from ...events.records.decisions import IncidentOpened
from ...events.records.envelope import (
    Record,
    Report,
    incarnation_of,
    incident_of,
)
from ...events.records.reports import ReportsLost
from ...events.records.types import Body
from ..fold.fold import fold
from ..state.cluster import ClusterState
from .decide import Decide, decide


def advance(
    state: ClusterState, report: Report, *, epoch: int, at_s: float, decide: Decide = decide
) -> list[Record]:
    """Fold the report, which `accepts` has admitted, decide, fold the decisions; return all records
    as one batch for the log. `at_s` is the time on the leader's clock. A new leader's clock may be
    behind: then the records get the time of the last record, for time in the log never decreases. A
    simulation may pass another policy as `decide`."""
    record = report_record(state, report, epoch=epoch, at_s=max(at_s, state.at_s))
    fold(state, record)
    records = [record]
    for body in decide(state, record):
        decision = decision_record(state, body, cause=record)
        fold(state, decision)
        records.append(decision)
    return records


def report_record(state: ClusterState, report: Report, *, epoch: int, at_s: float) -> Record:
    """The report as the next record of the log. Its `incident` is the open incident of the task."""
    return Record(
        seq=state.seq + 1,
        epoch=epoch,
        at_s=at_s,
        occurred_s=report.occurred_s,
        source=report.source,
        source_seq=report.source_seq,
        cause=0,
        incident=_incident(state, report.body),
        body=report.body,
    )


def decision_record(state: ClusterState, body: Body, *, cause: Record) -> Record:
    """The decision as the next record of the log."""
    seq = state.seq + 1
    incident = (
        seq if isinstance(body, IncidentOpened) else (incident_of(body) or _incident(state, body))
    )
    return Record(
        seq=seq,
        epoch=cause.epoch,
        at_s=cause.at_s,
        occurred_s=cause.at_s,
        source="heart",
        source_seq=0,
        cause=cause.seq,
        incident=incident,
        body=body,
    )


def _incident(state: ClusterState, body: Body) -> int:
    task = state.tasks.get(getattr(body, "task", 0))
    return task.incident if task is not None else 0


# --- Intake ---
def accepts(state: ClusterState, report: Report) -> Literal["next", "duplicate", "later"]:
    """Classify a report by its source_seq (ARCHITECTURE, "Sources and acknowledgement")."""
    known = state.nodes.get(report.source.rpartition("/")[0])
    incarnation, last = incarnation_of(report.source), state.sources.get(report.source, 0)
    is_old = known is not None and incarnation is not None and incarnation < known.incarnation
    if is_old and last == 0:
        return "duplicate"
    if report.source_seq <= last:
        return "duplicate"
    if report.source_seq == last + 1 or isinstance(report.body, ReportsLost):
        return "next"
    return "later"
