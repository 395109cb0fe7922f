"""`unicron simulate` as a command; simulate.py does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...events.errors import UsageError
from ..terminal.options import Form

app = typer.Typer(invoke_without_command=True)


@app.callback()
def simulate(
    context: typer.Context,
    scenario: Annotated[Path | None, typer.Option(
        "--scenario", metavar="FILE", help="A YAML file: cluster, tasks, policies, a trace of "
        "faults, and how long (docs/guides/simulate.md); or trace-a or trace-b, the paper's.")]
    = None,
    recorded: Annotated[Path | None, typer.Option(
        "--from-log", metavar="FILE", help="Instead: what befell a cluster by its log, as "
        "`export` writes it, under other choices.")] = None,
    settings: Annotated[list[str] | None, typer.Option(
        "--set", metavar="KEY=VALUE", help="With --from-log: weight.TASK=2, or policy.FIELD=VALUE, "
        "a field of the policy file.")] = None,
    policies: Annotated[list[str] | None, typer.Option(
        "--policy", metavar="NAME", help="With --from-log: another policy than Unicron's.")] = None,
    log: Annotated[Path | None, typer.Option(
        "--log", metavar="FILE", help="Write the log of the policy `unicron`, as `export` "
        "does.")] = None,
    print_trace: Annotated[bool, typer.Option(
        "--print-trace", help="Play nothing: print what befalls the cluster, drawn or read, as "
        "CSV.")] = False,
    output: Form = "text",
) -> None:
    """What each policy would have earned: the heart under a virtual clock, no cluster needed."""
    from ..simulate import compare as command

    if context.invoked_subcommand is not None:
        if scenario is not None or recorded is not None or log is not None or print_trace:
            raise UsageError(f"--scenario, --from-log, --log and --print-trace do not go with "
                             f"{context.invoked_subcommand}",
                             f"unicron simulate {context.invoked_subcommand} --help")
        return
    if recorded is not None:
        if scenario is not None or log is not None or print_trace:
            raise UsageError("--scenario, --log and --print-trace do not go with --from-log",
                             f"unicron simulate --from-log {recorded}")
        from ..simulate import from_log

        from_log.from_log(recorded, settings=settings or (), policies=policies or (),
                          as_json=output == "json")
        return
    if scenario is None:
        raise UsageError("nothing to simulate", "unicron simulate --scenario FILE, or --from-log "
                         "FILE, or the paper's evaluation: unicron simulate paper")
    if settings or policies:
        raise UsageError("--set and --policy go with --from-log",
                         "a scenario names its policies, and their constants")
    if print_trace:
        if log is not None or output == "json":
            raise UsageError("--print-trace prints CSV, and plays nothing", "give it alone")
        command.print_trace(scenario)
        return
    command.simulate(scenario, log=log, as_json=output == "json")


@app.command()
def paper(
    seeds: Annotated[int, typer.Option(
        "--seeds", min=1, max=100, metavar="N", help="Traces drawn of each kind.")] = 3,
    report: Annotated[Path | None, typer.Option(
        "--report", metavar="FOLDER", help="Write report.html there, with each figure as SVG and "
        "PNG.")] = None,
    output: Form = "text",
) -> None:
    """The paper's evaluation: its traces and cases under every policy, beside its figures."""
    from ..simulate import paper_tables

    paper_tables.paper(seeds=seeds, report=report, as_json=output == "json")


Drawn = Annotated[Path | None, typer.Option(
    "--scenario", metavar="FILE", help="A scenario whose trace is drawn; without one the paper's "
    "case 5 at trace-a's rate.")]
Seeds = Annotated[int, typer.Option(
    "--seeds", min=1, max=100, metavar="N", help="Traces drawn for each point.")]
Report = Annotated[Path | None, typer.Option(
    "--report", metavar="FOLDER", help="Write report.html there, with the curves.")]


@app.command()
def mtbf(scenario: Drawn = None, seeds: Seeds = 3, report: Report = None,
         output: Form = "text") -> None:
    """What a worse MTBF costs, by policy, and where two of them break even."""
    from ..simulate import capacity

    capacity.mtbf(scenario, seeds=seeds, report=report, as_json=output == "json")


@app.command()
def spares(
    scenario: Drawn = None,
    most: Annotated[int, typer.Option(
        "--most", min=1, max=1000, metavar="N", help="Up to so many idle nodes.")] = 4,
    seeds: Seeds = 3, report: Report = None, output: Form = "text",
) -> None:
    """How many spare nodes pay."""
    from ..simulate import capacity

    capacity.spares(scenario, most=most, seeds=seeds, report=report, as_json=output == "json")


@app.command()
def weights(
    task: Annotated[str, typer.Option("--task", metavar="TASK", help="Whose weight is another.")],
    scenario: Drawn = None, seeds: Seeds = 3, report: Report = None, output: Form = "text",
) -> None:
    """What a task gets for its weight, and what that costs the others."""
    from ..simulate import capacity

    capacity.weights(scenario, task=task, seeds=seeds, report=report, as_json=output == "json")
