"""The commands that manifests and units start, as `unicron` reads them."""

from __future__ import annotations

from typing import Any

import typer
from unicron.cli.app import app


def options(arguments: list[str]) -> dict[str, Any]:
    """The options of a command line. The command does not run; a wrong option raises."""
    group = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), arguments[0])
    assert command is not None
    return dict(command.make_context(arguments[0], arguments[1:]).params)
