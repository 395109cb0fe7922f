"""Where a task's checkpoints go: a folder, or an fsspec URL."""

from __future__ import annotations

import re
from collections.abc import Callable

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://(.*)", re.DOTALL)
"""A colon in its scheme makes it a chain of them."""


def is_url(output: str) -> bool:
    """Whether this is an fsspec URL; else it is a path."""
    return URL.match(output) is not None


def check_output(output: str, path: str, need: Callable[..., None]) -> None:
    """Tell `need` what has to hold of what stands at `path`; it raises where something does not."""
    need(output != "", path, "must name a folder")
    if found := URL.match(output):
        scheme, rest = found.groups()
        need(rest.strip("/") != "", path, f"{output} names no folder")
        need("::" not in output, path, "is a chain of URLs", "name one store")
        need(scheme != "memory", path, "memory:// is the memory of one process alone")
        need(not re.match(r"[^/]*:[^/]*@", rest), path,
             "has a password in it, and a spec is kept in the log",
             "leave it to fsspec's configuration on each node (~/.config/fsspec)")
