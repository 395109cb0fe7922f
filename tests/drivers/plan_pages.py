"""`unicron plan` of a cluster: its pages, what is typed wrongly, and a dry run carried out.

`UNICRON_SNAPSHOTS=write pytest tests/cli/test_plan_live.py` writes the pages anew; read the
difference.
"""

from __future__ import annotations

from typing import Any

import msgspec
from two_tasks import VERSION
from unicron.control_plane.api import dry_run

Plain = dict[str, Any]
INPUT = 9


def plain_of(found: dry_run.DryRunResult) -> Plain:
    """As the control plane answers; another digest of the plan's input would be another screen."""
    told: Plain = msgspec.json.decode(msgspec.json.encode(found))
    return {**told, "input": INPUT, "computed_by": VERSION}
