"""`unicron simulate` as a command; simulate.py does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..events.errors import UsageError
from .options import Form

app = typer.Typer(invoke_without_command=True)


@app.callback()
def simulate(
    context: typer.Context,
    scenario: Annotated[Path | None, typer.Option(
        "--scenario", metavar="FILE", help="A YAML file: cluster, tasks, policies, a trace of "
        "faults, and how long (docs/guides/simulate.md).")] = None,
    log: Annotated[Path | None, typer.Option(
        "--log", metavar="FILE", help="Write the log of the policy `unicron`, as `export` "
        "does.")] = None,
    print_trace: Annotated[bool, typer.Option(
        "--print-trace", help="Play nothing: print what befalls the cluster, drawn or read, as "
        "CSV.")] = False,
    output: Form = "text",
) -> None:
    """What each policy would have earned: the heart under a virtual clock, no cluster needed."""
    from . import simulate as command

    if context.invoked_subcommand is not None:
        if scenario is not None or log is not None or print_trace:
            raise UsageError(f"--scenario, --log and --print-trace do not go with "
                             f"{context.invoked_subcommand}",
                             f"unicron simulate {context.invoked_subcommand} --help")
        return
    if scenario is None:
        raise UsageError("nothing to simulate", "unicron simulate --scenario FILE, or the paper's "
                         "evaluation: unicron simulate paper")
    if print_trace:
        command.print_trace(scenario)
        return
    command.simulate(scenario, log=log, as_json=output == "json")
