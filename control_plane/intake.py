"""The intake: which report is the next of its source, and which was told before."""

from __future__ import annotations

from typing import Literal

from ..events.records import Report
from ..events.reports import ReportsLost
from .state import ClusterState


def accepts(state: ClusterState, report: Report) -> Literal["next", "duplicate", "later"]:
    """Whether a report is the next of its source (ARCHITECTURE, "Sources and acknowledgement")."""
    node, _, incarnation = report.source.rpartition("/")
    known, last = state.nodes.get(node), state.sources.get(report.source, 0)
    old = known is not None and incarnation.isdecimal() and int(incarnation) < known.incarnation
    if old and last == 0:
        return "duplicate"
    if report.source_seq <= last:
        return "duplicate"
    if report.source_seq == last + 1 or isinstance(report.body, ReportsLost):
        return "next"
    return "later"
