"""External events as a trace file, which `simulate` reads."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from io import StringIO

from unicron.control_plane.simulation.trace.external_event import ExternalEvent
from unicron.control_plane.simulation.trace.trace_file import HEADER


def written(happenings: Iterable[ExternalEvent]) -> Iterator[str]:
    """The lines of the CSV file."""
    lines = StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    rows.writerow(HEADER)
    for one in happenings:
        rows.writerow((f"{one.at_s:.3f}".rstrip("0").rstrip("."), one.node, one.event, one.cause))
    yield from lines.getvalue().splitlines()
