"""What an operator may ask of a running cluster, as commands; each is carried out in operate.py."""

from __future__ import annotations

from typing import Annotated

import typer

from ..terminal.options import Form, NodeArg, Reason, State, TaskArg, Url, folder

app = typer.Typer()
inject = typer.Typer(help="Break something on purpose (up --allow-inject).")
app.add_typer(inject, name="inject")

WEIGHT, WEIGHT_HINT = "a weight is above 0", "for example unicron set-weight alpha 2"
RankArg = Annotated[int | None, typer.Argument(
    min=0, metavar="RANK", help="Its rank [the highest that trains].", show_default=False)]


@app.command("set-weight")
def set_weight(
    task: TaskArg,
    weight: Annotated[float, typer.Argument(metavar="WEIGHT", help="Only the ratio to the others' "
                                                                   "counts; 1 is usual.")],
    reason: Reason = "", state: State = None, url: Url = None, output: Form = "text",
) -> None:
    """Make a task worth more or less; the plan follows at once."""
    from . import operate

    operate.set_weight(folder(state), url, task, weight, reason, as_json=output == "json")


@app.command()
def drain(node: NodeArg, reason: Reason = "", state: State = None, url: Url = None,
          output: Form = "text") -> None:
    """Have tasks leave a node; no iteration is lost by it."""
    from . import operate

    operate.drain(folder(state), url, node, reason, as_json=output == "json")


@app.command()
def undrain(node: NodeArg, reason: Reason = "", state: State = None, url: Url = None,
            output: Form = "text") -> None:
    """Let a node have tasks again."""
    from . import operate

    operate.undrain(folder(state), url, node, reason, as_json=output == "json")


@app.command()
def lift(node: NodeArg, reason: Reason = "", state: State = None, url: Url = None,
         output: Form = "text") -> None:
    """End the quarantine of a node that failed again and again."""
    from . import operate

    operate.lift(folder(state), url, node, reason, as_json=output == "json")


@app.command()
def freeze(reason: Reason = "", state: State = None, url: Url = None,
           output: Form = "text") -> None:
    """Hold healing: decide and log, order nothing."""
    from . import operate

    operate.freeze(folder(state), url, reason, as_json=output == "json")


@app.command()
def unfreeze(reason: Reason = "", state: State = None, url: Url = None,
             output: Form = "text") -> None:
    """Heal again, and act upon what happened meanwhile."""
    from . import operate

    operate.unfreeze(folder(state), url, reason, as_json=output == "json")


@inject.command("rank")
def inject_rank(task: TaskArg, rank: RankArg = None, reason: Reason = "", state: State = None,
                url: Url = None, output: Form = "text") -> None:
    """Kill one rank of a task."""
    from . import operate

    operate.inject_rank(folder(state), url, task, rank, reason, as_json=output == "json")


@inject.command("stop")
def inject_stop(
    task: TaskArg, rank: RankArg = None,
    for_s: Annotated[float, typer.Option(
        "--for", min=0.0, max=86_400.0, metavar="S", show_default=False,
        help="Let it go on after so many seconds [never].")] = 0.0,
    reason: Reason = "", state: State = None, url: Url = None, output: Form = "text",
) -> None:
    """Stop one rank of a task where it is, so that it hangs."""
    from . import operate

    operate.inject_rank(folder(state), url, task, rank, reason, as_json=output == "json",
                        stop_s=for_s)


@inject.command("node")
def inject_node(node: NodeArg, reason: Reason = "", state: State = None, url: Url = None,
                output: Form = "text") -> None:
    """Kill a node's agent with all its ranks."""
    from . import operate

    operate.inject_node(folder(state), url, node, reason, as_json=output == "json")
