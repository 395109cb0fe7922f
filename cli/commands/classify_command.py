"""`unicron classify` as a command; classify.py does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.options import Form

app = typer.Typer()


@app.command()
def classify(
    file: Annotated[Path | None, typer.Argument(
        metavar="FILE", help="Error text: a log, or one JSON object with `text` (or a log's "
        "`event`, `msg`, `message`, ...) a line; none, or -: standard input.")] = None,
    output: Form = "text",
) -> None:
    """Say what lines of error text mean: status, severity, and the rule that matched."""
    from . import classify as command

    command.classify(file, as_json=output == "json")
