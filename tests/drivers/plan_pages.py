"""`unicron plan` of a cluster: its pages, what is typed wrongly, and a dry run carried out.

`UNICRON_SNAPSHOTS=write pytest tests/cli/test_plan_live.py` writes the pages anew; read the
difference.
"""

from __future__ import annotations

from typing import Any

import msgspec
from unicron.control_plane.api import dry_run

Plain = dict[str, Any]


def plain_of(found: dry_run.Tried) -> Plain:
    told: Plain = msgspec.json.decode(msgspec.json.encode(found))
    return told
