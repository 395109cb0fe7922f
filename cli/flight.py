"""Where the flight recorders of a task that stood lie, and what to type to have them read."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from .figures import command

Plain = dict[str, Any]
NODES_NUM_MAX = 4
"""Named; the rest are counted."""


def folders(ranks: Iterable[tuple[str, str]], nodes: list[Plain]) -> list[Plain]:
    """Node, its host and the folder there, for (node, log) of each rank: an agent has them written
    beside the log."""
    hosts = {node["id"]: str(node["host"]) for node in nodes}
    found = dict.fromkeys((node, str(PurePosixPath(log).parent)) for node, log in ranks if log)
    return [{"node": node, "host": hosts.get(node, ""), "folder": folder}
            for node, folder in sorted(found)]


def in_words(found: list[Plain]) -> str:
    """What to type: at once where all lie in one folder, else how to bring them together."""
    places = {(one["host"], one["folder"]) for one in found}
    until = "the flight recorders, until it stalls again"
    if len(places) == 1:
        (place,) = places
        return f"{command(f'unicron locate {shlex.quote(place[1])}')}: {until}"
    shown = found[:NODES_NUM_MAX]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    where = ", ".join(f"{one['node']} {one['host']}:{one['folder']}" for one in shown)
    names = " ".join(one["node"] for one in shown) + " ..." * bool(more)
    return (f"{until}, each node's on itself: {where}{more}; copy each folder to one machine "
            f"({command('scp -r HOST:FOLDER NODE')}), then {command(f'unicron locate {names}')}")
