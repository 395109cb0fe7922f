"""Options that several commands share, and the state folder that --state names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from ...events import tls
from ...events.errors import UsageError
from ..cluster import state_dir
from ..cluster.state_dir import StateDir


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


State = Annotated[Path | None, typer.Option(
    "--state", metavar="DIR", parser=_named, help="The cluster's folder on this machine "
    "[$UNICRON_STATE, else ~/.local/state/unicron].")]
Url = Annotated[list[str] | None, typer.Option(
    "--url", metavar="URL", help="The control plane, if it runs elsewhere; of several each one "
    "[$UNICRON_URL, with commas between; the token is $UNICRON_TOKEN].")]
Ca = Annotated[str | None, typer.Option(
    "--ca", metavar="FILE|sha256:DIGEST", callback=_trusted, help="The authority of the "
    "certificate at https:// [$UNICRON_CA, else the system's].")]
Form = Annotated[Literal["text", "json"], typer.Option("-o", "--output", help="text or json.")]
TaskArg = Annotated[str, typer.Argument(metavar="TASK", help="A task's name or id.")]
NodeArg = Annotated[str, typer.Argument(metavar="NODE", help="A node's name.")]
NodesArg = Annotated[str, typer.Argument(
    metavar="NODE", help="A node's name, or several with commas between.")]
Reason = Annotated[str, typer.Option(
    "--reason", metavar="TEXT", help="Why; it goes into the log [your login name].")]
Insecure = Annotated[bool, typer.Option(
    "--insecure", help="Talk to other hosts without encryption: on a network that you trust.")]
Checks = Annotated[Path | None, typer.Option(
    "--checks", metavar="DIR", help="Your own checks of the node: each executable in DIR is run "
    "periodically; it exits with 0 healthy, 1 degraded, 2 unhealthy, 3 unknown.")]


def folder(given: Path | None) -> StateDir:
    """The folder of --state, of $UNICRON_STATE, or the default."""
    return StateDir(given if given is not None else state_dir.default())
