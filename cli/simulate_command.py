"""`unicron simulate` as a command; simulate.py does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Form

app = typer.Typer()


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Option(
        "--scenario", metavar="FILE", help="A YAML file: cluster, tasks, policies, a trace of "
        "faults, and how long (docs/guides/simulate.md).")],
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

    if print_trace:
        command.print_trace(scenario)
        return
    command.simulate(scenario, log=log, as_json=output == "json")
