"""`unicron plan` as a command: of a running cluster (plan_live.py), or of a file (plan_offline.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...events.errors import UsageError
from ..terminal.options import Form, Reason, State, Url, folder

app = typer.Typer()


@app.command()
def plan(
    without: Annotated[list[str] | None, typer.Option(
        "--without", metavar="NODE", help="Dry run: the node is drained; may be repeated.")] = None,
    slots: Annotated[list[int] | None, typer.Option(
        "--with", min=1, max=100_000, metavar="N", help="Dry run: N slots (GPUs) more, in new "
        "nodes as large as most.")] = None,
    weight: Annotated[list[str] | None, typer.Option(
        "--weight", metavar="TASK=W", help="Dry run: the task has weight W; may be "
        "repeated.")] = None,
    submit: Annotated[Path | None, typer.Option(
        "--submit", metavar="JOB.yaml", help="Dry run: this job is submitted.")] = None,
    apply: Annotated[bool, typer.Option(
        "--apply", help="Do what was dry-run, if --check still holds.")] = False,
    check: Annotated[int | None, typer.Option(
        "--check", min=0, metavar="INPUT", help="The input that the dry run told: where it has "
        "changed since, nothing is done.")] = None,
    offline: Annotated[Path | None, typer.Option(
        "--offline", metavar="FILE", help="Plan what this YAML file says, without a cluster; "
        "-: standard input.")] = None,
    table: Annotated[bool, typer.Option(
        "--table", help="With --offline: the plan of every single event that may come next "
        "too.")] = False,
    seq: Annotated[int | None, typer.Option(
        "--seq", min=1, metavar="N", help="The plan that was in force after record N of the "
        "log.")] = None,
    reason: Reason = "",
    state: State = None,
    url: Url = None,
    output: Form = "text",
) -> None:
    """Show which task gets how many GPUs, why, and what was beaten; or what would be if."""
    from .plan import Asked

    if len(slots or ()) > 1:
        raise UsageError("--with is given more than once", "give the sum of them")
    asked = Asked(without=tuple(without or ()), slots=slots[0] if slots else None,
                  weights=tuple(weight or ()), submit=submit,
                  apply=apply, check=check, seq=seq, reason=reason)
    if offline is not None:
        from . import plan_offline

        if asked != Asked() or url is not None or state is not None:
            raise UsageError("--offline goes with --table and -o alone",
                             "unicron plan --offline FILE")
        plan_offline.plan(offline, table=table, as_json=output == "json")
        return
    if table:
        raise UsageError("--table goes with --offline FILE", "unicron plan --offline FILE --table")
    from . import plan as plan_live

    plan_live.plan(folder(state), url, asked, as_json=output == "json")
