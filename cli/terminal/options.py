"""Options that several commands share, and the state folder that --state names."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...events import tls
from ...events.errors import UnicronError, UsageError
from ..cluster import state_dir
from ..cluster.state_dir import StateDir
from .times import past_s


def _named(text: str) -> Path:
    """Raises UsageError for an empty name, which would mean the working directory."""
    if not text.strip():
        raise UsageError("--state names no folder", "give its name, or leave --state out")
    return Path(text)


def _trusted(text: str | None) -> str | None:
    """The authority for this process and those that it starts."""
    if text:
        os.environ[tls.CA] = text
    return text


def _accepted(given: bool) -> bool:
    """What --insecure allows this process and those that it starts."""
    if given:
        os.environ[tls.INSECURE] = "1"
    else:
        os.environ.pop(tls.INSECURE, None)
    return given


COMPLETE_S_MAX = 0.7
"""A shell waits for the names no longer."""


def _complete(
    what: str, names_of: Callable[[dict[str, Any]], list[str]]
) -> Callable[[typer.Context, str], list[str]]:
    """Completes the names of the running cluster's `what`; if it does not answer, nothing."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from ..cluster.client import connect

        given: dict[str, Any] = ctx.params
        try:
            client = connect(folder(given.get("state")), given.get("url"))
            names = {
                name
                for one in client.get("/v1/state", COMPLETE_S_MAX)[what]
                for name in names_of(one)
            }
        except (UnicronError, OSError):
            return []
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


def _node_and_slots_out(node: dict[str, Any]) -> list[str]:
    return [node["id"], *(f"{node['id']}/{slot['index']}" for slot in node["slots"] if slot["out"])]


complete_tasks = _complete("tasks", lambda task: [task["name"]])
complete_nodes = _complete("nodes", lambda node: [node["id"]])
complete_slots = _complete("nodes", _node_and_slots_out)
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        parser=_named,
        help="The cluster's folder on this machine [$UNICRON_STATE, else ~/.local/state/unicron].",
    ),
]
Url = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The control plane, if it runs elsewhere; of several each one "
        "[$UNICRON_URL, with commas between; the token is $UNICRON_TOKEN].",
    ),
]
Ca = Annotated[
    str | None,
    typer.Option(
        "--ca",
        metavar="FILE|sha256:DIGEST",
        callback=_trusted,
        help="The authority of the certificate at https:// [$UNICRON_CA, else the system's].",
    ),
]
Form = Annotated[
    Literal["text", "json", "yaml"],
    typer.Option("-o", "--output", help="text, json, or yaml: the same document."),
]
TaskArg = Annotated[
    str, typer.Argument(metavar="TASK", autocompletion=complete_tasks, help="A task's name or id.")
]
NodeArg = Annotated[
    str, typer.Argument(metavar="NODE", autocompletion=complete_nodes, help="A node's name.")
]
TasksArg = Annotated[
    list[str],
    typer.Argument(
        metavar="TASK...",
        autocompletion=complete_tasks,
        help="Names, ids, or patterns of names such as 'sleep-*'.",
    ),
]
NodesArg = Annotated[
    list[str],
    typer.Argument(
        metavar="NODE...",
        autocompletion=complete_nodes,
        help="Names, also with commas between, or patterns such as 'rack1-*'.",
    ),
]
SlotsArg = Annotated[
    list[str],
    typer.Argument(
        metavar="NODE|NODE/SLOT...",
        autocompletion=complete_slots,
        help="Nodes, or slots as n1/0; also with commas between, or patterns such as 'rack1-*'.",
    ),
]
Since = Annotated[
    float | None,
    typer.Option(
        "--since",
        parser=past_s,
        metavar="2h|TIME",
        help="Only what is as young, or younger than a time such as 2026-11-27T02:10:00Z.",
    ),
]
Reason = Annotated[
    str,
    typer.Option("--reason", metavar="TEXT", help="Why; it goes into the log [your login name]."),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar=tls.INSECURE,
        show_envvar=False,
        callback=_accepted,
        help="Talk to other hosts without encryption, on a network that you trust "
        "[$UNICRON_INSECURE=1].",
    ),
]
ChecksEvery = Annotated[
    float, typer.Option(min=1, metavar="S", help="Seconds between two runs of each check.")
]
ProbePort = Annotated[
    int | None,
    typer.Option(
        "--probe-port",
        min=0,
        max=65535,
        metavar="PORT",
        help="The UDP port at which other agents ask whether this node lives, if it falls "
        "silent; 0: none [the first free one from 8430].",
    ),
]
Checks = Annotated[
    Path | None,
    typer.Option(
        "--checks",
        metavar="DIR",
        help="Your own checks of the node: each executable in DIR is run "
        "periodically; it exits with 0 healthy, 1 degraded, 2 unhealthy, 3 unknown.",
    ),
]


def folder(given: Path | None) -> StateDir:
    """The folder of --state, of $UNICRON_STATE, or the default. Raises UsageError."""
    return state_dir.opened(given if given is not None else state_dir.default())
