"""`status`: the cluster, one task, or the nodes; once, or every second."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import typer

from ...events.errors import UsageError
from ..cluster.answers import Interrupted
from ..cluster.client import DRY_RUN_S_MAX, Client, Unable, Unreachable, Urls, connect
from ..cluster.state_dir import StateDir
from ..screens import cluster as cluster_screen
from ..screens import nodes
from ..screens import task as task_screen
from ..terminal import console
from ..terminal import format as fmt
from ..terminal.format import Plain
from .names import is_pattern, pick
from .offline import OfflineClient, connect_to_read
from .tasks import option_for, past_of

WATCH_S = 1.0
CLEAR = "\x1b[H\x1b[J"


def status(
    state: StateDir,
    url: Urls,
    what: str,
    *,
    watch: bool,
    as_json: bool,
    at: str = "",
    only: str | None = None,
    wide: bool = False,
) -> None:
    """Print the screen, of the moment `at` if that is given. Raises UsageError. If nothing answers,
    exits as Unreachable does, also when the screen comes from files: a script must not take it for
    the present."""
    if watch and at:
        raise UsageError("--watch and --at do not go together", "give one of the two")
    of_many = what in ("", "nodes", "tasks") or is_pattern(what)
    if only and (what == "nodes" or not of_many):
        raise UsageError("--only chooses tasks of a list", f"unicron status tasks --only {only}")
    client = connect_to_read(state, url)
    screen = partial(
        _screen,
        state,
        what=what or "tasks" * bool(only),
        of_many=of_many,
        only=only,
        wide=wide,
        as_json=as_json,
    )
    if not watch:
        console.lines(screen(client, at=at))
        if isinstance(client, OfflineClient) and not at:
            raise typer.Exit(Unreachable.exit_code)
        return
    client.get("/v1/state")  # fail now if the address is wrong
    try:
        while True:
            size = shutil.get_terminal_size()
            has_terminal = sys.stdout.isatty() and not as_json
            if has_terminal:
                fmt.fit(size.columns)
            try:
                lines = screen(
                    connect(state, url),
                    height=(size.lines if has_terminal else cluster_screen.ROWS_NUM_MAX),
                )
            except (Interrupted, Unable, Unreachable) as error:
                lines = [] if as_json else [f"{error}; trying again"]
            if has_terminal:
                console.write(
                    CLEAR
                    + "\n".join(map(console.printable, _fitted(lines, size.columns, size.lines)))
                )
            else:
                console.lines(lines if as_json else [*lines, ""])
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        return


def _fitted(lines: list[str], columns: int, rows: int) -> list[str]:
    """What a terminal can show of the lines, from the top."""
    if (num := len(lines) - rows) > 0:
        lines = [*lines[: rows - 1], f"and {num + 1} more lines"]
    return [fmt.clipped(line, columns) for line in lines]


def _screen(
    state: StateDir,
    client: Client,
    *,
    what: str,
    of_many: bool,
    only: str | None,
    wide: bool,
    as_json: bool,
    at: str = "",
    height: int = cluster_screen.ROWS_NUM_MAX,
) -> list[str]:
    """The lines of the screen; none if the document was asked for, which is printed."""
    view: Plain = client.get("/v1/state", DRY_RUN_S_MAX, **({"at": at} if at else {"explain": 1}))
    option = option_for(state)
    now_s = view["cluster"]["at_s"] if at else time.time()
    found: Any = view
    past: Plain = {}
    if what == "nodes":
        found = view["nodes"]
    elif not of_many:
        _refuse_node(view, what, option)
        found, past = _one_task(
            client, view, what, view["cluster"]["seq"] if at else 0, bare=as_json
        )
    elif what:
        pattern = "*" if what == "tasks" else what
        found = [
            one
            for one in view["tasks"]
            if only in (None, one["state"]) and fnmatchcase(one["name"], pattern)
        ]
    if as_json:
        console.data(found)
        return []
    if what == "nodes":
        return nodes.nodes(view, now_s=now_s, option=option)
    if past:
        return task_screen.task_status(view, found, past, now_s=now_s, option=option)
    if what:
        return cluster_screen.of_tasks(found, option, wide=wide)
    cluster = client.get("/v1/health")["cluster"]
    return cluster_screen.status(
        view, cluster=cluster, now_s=now_s, option=option, height=height, wide=wide
    )


def _one_task(
    client: Client, view: Plain, wanted: str, at: int, *, bare: bool
) -> tuple[Plain, Plain]:
    """A task, and unless `bare` its past as far as it is read; one that has left the state is as it
    was then. Raises UsageError."""
    try:
        found = pick(view["tasks"], wanted)
        return found, {} if bare else past_of(client, found["id"], at, whole=False)
    except UsageError:
        with suppress(UsageError):
            past = past_of(client, wanted, at)
            return past["view"], past
        raise


def _refuse_node(view: Plain, what: str, option: str) -> None:
    """Raises UsageError for the name of a node: the nodes share one screen."""
    if what in [node["id"] for node in view["nodes"]] and what not in [
        task["name"] for task in view["tasks"]
    ]:
        raise UsageError(f"{what!r} is a node, not a task", f"unicron status nodes{option}")
