"""`unicron locate` as a command; locate.py does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.options import Form

app = typer.Typer()


@app.command()
def locate(
    dumps: Annotated[list[Path], typer.Argument(
        metavar="DUMP...", help="Flight-recorder dumps, one per rank or all in one, or their "
        "folder; of several nodes: each node's.")],
    output: Form = "text",
) -> None:
    """Name the ranks that a hung job waits for, from PyTorch's flight-recorder dumps."""
    from . import locate as command

    command.locate(dumps, as_json=output == "json")
