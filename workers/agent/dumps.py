"""Flight recorders of a task that seems to hang: the agent asks its ranks, and they write files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..wire import Frame, WriteDump
from .pipe import Pipe
from .processes import Process

Dumps = dict[int, Path]
"""Rank -> where its dump will be."""


def ask(ranks: Iterable[tuple[int, Process | None, Pipe | None]]) -> Dumps:
    """Ask each; rank -> where its dump will be, beside its log.

    Waits for nothing and harms no healthy rank. A file appears within milliseconds, whole or not at
    all; a rank that is stopped or holds its GIL writes none before it goes on: no file is evidence
    too. `unicron locate` reads them, once all nodes' are in one folder.
    """
    paths: Dumps = {}
    for rank, process, pipe in ranks:
        if process is None or pipe is None:  # a command's, or one that has not started
            continue
        path = process.log_path.parent / f"flight-rank-{rank}.json"
        path.unlink(missing_ok=True)  # an earlier hang's
        if pipe.send(Frame(body=WriteDump(path=str(path)))):
            paths[rank] = path
    return paths
