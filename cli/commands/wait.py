"""`wait`: until tasks run, have healed or have finished, for scripts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...control_plane.api.needs import ENDED
from ...events.errors import UnicronError
from ..cluster.client import Interrupted, Unable, Unreachable, Urls, connect
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain, span
from .names import chosen
from .tasks import option_for

POLL_S = 0.5
REACHED = {"running": ("running", "degraded"), "finished": ("finished",),
           "healed": ("running", "degraded", "finishing", "finished")}
"""The states of a task that each wish is fulfilled by; healed: also no incident is open."""


def wait(state: StateDir, url: Urls, task: Sequence[str], until: str, timeout_s: float | None, *,
         as_json: bool) -> None:
    """Return when every task is so. Raises UnicronError after `timeout_s`, or for a task
    that cannot come to be so any more, and Unreachable."""
    began_s = time.monotonic()
    tasks: list[Plain] = connect(state, url).get("/v1/state")["tasks"]
    ids = [one["id"] for one in chosen(task, tasks, tasks)]
    while True:
        late = timeout_s is not None and time.monotonic() - began_s > timeout_s
        try:
            view: Plain = connect(state, url).get("/v1/state")
        except (Interrupted, Unable, Unreachable):
            if late:
                raise
            time.sleep(POLL_S)
            continue
        open_ = {one["task"] for one in view["incidents"] if not one["outcome"]}
        found = [one for one in view["tasks"] if one["id"] in ids]
        left = [one for one in found if one["state"] not in REACHED[until]
                or (until == "healed" and one["id"] in open_)]
        for one in left:
            if one["state"] in ENDED:
                raise UnicronError(f"{one['name']} {one['state']}",
                                   f"unicron status {one['id']}{option_for(state)}")
        if not left:
            console.show(found, [f"{x['name']} {x['state']}" for x in found], as_json=as_json)
            return
        if late:
            name = left[0]["name"]
            more = f" and {len(left) - 1} more" * (len(left) > 1)
            raise UnicronError(f"{name}{more} not {until} after {span(timeout_s or 0.0)}, but "
                            f"{left[0]['state']}", f"unicron status {name}{option_for(state)}")
        time.sleep(POLL_S)
