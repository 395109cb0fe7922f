"""Options that many commands share, and the cluster's folder that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import state_dir
from .state_dir import StateDir

State = Annotated[Path | None, typer.Option(
    "--state", metavar="DIR", help="The cluster's folder on this machine "
    "[$UNICRON_STATE, else ~/.local/state/unicron].")]
Url = Annotated[str | None, typer.Option(
    "--url", metavar="URL", help="The control plane, if it runs elsewhere "
    "[$UNICRON_URL; the token is $UNICRON_TOKEN].")]
Form = Annotated[Literal["text", "json"], typer.Option("-o", "--output", help="text or json.")]
TaskArg = Annotated[str, typer.Argument(metavar="TASK", help="A task's name or id.")]
NodeArg = Annotated[str, typer.Argument(metavar="NODE", help="A node's name.")]
Reason = Annotated[str, typer.Option(
    "--reason", metavar="TEXT", help="Why; it goes into the log [your login name].")]


def folder(given: Path | None) -> StateDir:
    """The folder of --state, of $UNICRON_STATE, or the usual one."""
    return StateDir(given if given is not None else state_dir.default())
