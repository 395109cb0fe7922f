"""`status`: the cluster, one task, or the nodes; once, or every second."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import typer

from ...events.errors import UsageError
from ...events.records.codec import from_plain
from ..cluster.client import DRY_RUN_S_MAX, Client, Interrupted, Unable, Unreachable, Urls, connect
from ..cluster.state_dir import StateDir
from ..screens import cluster as cluster_screen
from ..screens import nodes
from ..screens import task as task_screen
from ..terminal import console
from ..terminal.format import Plain
from .offline import OfflineClient, connect_to_read, log_of
from .tasks import number_of, option_for

if TYPE_CHECKING:
    from ...control_plane.history.history import History

WATCH_S = 1.0
CLEAR = "\x1b[H\x1b[J"


def status(state: StateDir, url: Urls, what: str, *, watch: bool, as_json: bool,
           at: str = "") -> None:
    """Print the screen, of the moment `at`. If it comes from files, exits as Unreachable does."""
    if watch and at:
        raise UsageError("--watch and --at do not go together", "give one of the two")
    client = connect_to_read(state, url)
    history = None
    if what not in ("", "nodes"):
        from ...control_plane.history.history import history as history_of

        history = history_of((), log_of(client).state())
    if not watch:
        console.lines(_screen(state, client, what, history, as_json=as_json, at=at))
        if isinstance(client, OfflineClient) and not at:
            raise typer.Exit(Unreachable.exit_code)
        return
    client.get("/v1/state")  # fail now if the address is wrong
    try:
        while True:
            try:
                lines = _screen(state, connect(state, url), what, history, as_json=as_json)
            except (Interrupted, Unable, Unreachable) as error:
                lines = [] if as_json else [f"{error}; trying again"]
            if sys.stdout.isatty() and not as_json:
                sys.stdout.write(CLEAR)
            elif not as_json:
                lines = [*lines, ""]
            console.lines(lines)
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        return


def _screen(state: StateDir, client: Client, what: str, history: History | None, *,
            as_json: bool, at: str = "") -> list[str]:
    view: Plain = client.get("/v1/state", DRY_RUN_S_MAX, **({"at": at} if at else {"explain": 1}))
    option = option_for(state)
    now_s = view["cluster"]["at_s"] if at else time.time()
    if what == "nodes":
        return ([json.dumps(view["nodes"])] if as_json
                else nodes.nodes(view, now_s=now_s, option=option))
    if what:
        from ...control_plane.api.view import task_view

        _refuse_node(view, what, option)
        number = number_of(client, view, what)
        task = next((one for one in view["tasks"] if one["id"] == number), None)
        if as_json and task is not None:
            return [json.dumps(task)]
        assert history is not None, "of a task"
        for record in client.records(history.seq, follow=False):
            if record["seq"] > view["cluster"]["seq"]:
                break
            history.add(from_plain(record))
        task = task or task_view(history.state, history.tasks[number].task)
        if as_json:
            return [json.dumps(task)]
        return task_screen.task_status(view, task, history, now_s=now_s, option=option)
    if as_json:
        return [json.dumps(view)]
    cluster = client.get("/v1/health")["cluster"]
    return cluster_screen.status(view, cluster=cluster, now_s=now_s, option=option)


def _refuse_node(view: Plain, what: str, option: str) -> None:
    """Raises UsageError for the name of a node: the nodes share one screen."""
    if (what in [node["id"] for node in view["nodes"]]
            and what not in [task["name"] for task in view["tasks"]]):
        raise UsageError(f"{what!r} is a node, not a task", f"unicron status nodes{option}")
