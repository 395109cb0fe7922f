"""`unicron plan` as a command; what a file asks is answered in plan_offline.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..events.errors import UsageError
from .options import Form

app = typer.Typer()


@app.command()
def plan(
    offline: Annotated[Path | None, typer.Option(
        "--offline", metavar="FILE", help="Plan what this YAML file says, without a cluster; "
        "-: standard input.")] = None,
    table: Annotated[bool, typer.Option(
        "--table", help="With --offline: the plan of every single event that may come next "
        "too.")] = False,
    output: Form = "text",
) -> None:
    """Show which task gets how many GPUs, why, and what was beaten."""
    if offline is None:
        raise UsageError("plan needs --offline FILE", "unicron plan --offline FILE; - is standard "
                         "input; docs/guides/plan-offline.md says what the file holds")
    from . import plan_offline

    plan_offline.plan(offline, table=table, as_json=output == "json")
