"""`unicron plan` of a cluster, for tests of its screens.

`UNICRON_SNAPSHOTS=write pytest tests/cli/test_plan_live.py` rewrites the screens; check the diff.
"""

from __future__ import annotations

from typing import Any

import msgspec
from two_tasks import VERSION
from unicron.control_plane.api import dry_run

Plain = dict[str, Any]
INPUT = 9


def plain_of(found: dry_run.DryRunResult) -> Plain:
    """The answer of the control plane, with a fixed digest of the plan's input."""
    told: Plain = msgspec.json.decode(msgspec.json.encode(found))
    return {**told, "input": INPUT, "computed_by": VERSION}
