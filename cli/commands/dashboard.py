"""`open` shows the cluster in a browser; `view` shows an exported log, or a state folder."""

import asyncio
import os
import sys
import time
import webbrowser
from pathlib import Path

from ...events import tls
from ...events.errors import UsageError
from ..cluster.client import Urls, connect
from ..cluster.state_dir import StateDir, opened
from ..terminal import console

PART_RECORDS, SAY_S = 2_000, 5.0


def open_page(state: StateDir, url: Urls, *, role: str, print_only: bool) -> None:
    """Print and open a URL that lets one browser in, once, within a minute. Raises UsageError if
    the code and what the browser then does would cross a network unencrypted."""
    client = connect(state, url)
    code = client.post("/v1/sessions/codes", {"role": role})["code"]
    at = (client.leader or client).url
    if tls.is_plain(at):
        tls.check_plain(at, insecure=client.insecure)
    _show(f"{at.rstrip('/')}/#code={code}", print_only)


def view(path: Path, *, port: int, print_only: bool) -> None:
    """Serve the pages over a log until Ctrl-C. Raises UsageError."""
    from ...control_plane.api import recorded
    from ...control_plane.history.timeline import Timeline
    from ...events.log import archive
    from .offline import folder_of
    from .replay import foldable, open_log

    log = open_log(StateDir(path.parent), None, path)
    cluster = folder_of(opened(path)).cluster if path.is_dir() else archive.header(path).cluster
    console.talk(f"{path}: reading the log")
    with foldable(path):
        records, state = list(log.read()), log.state()
        timeline, said_s = Timeline(state), time.monotonic()
        for begin in range(0, len(records), PART_RECORDS):
            if time.monotonic() - said_s > SAY_S:
                said_s = time.monotonic()
                console.talk(f"{begin:,} of {len(records):,} records folded")
            timeline.add(records[begin : begin + PART_RECORDS])
    if not records:
        raise UsageError(f"{path} has no record", "export the log of a cluster that has run")
    console.talk(f"{len(records):,} records folded; the page needs this command: Ctrl-C ends it")
    try:
        asyncio.run(
            recorded.serve(
                records,
                timeline,
                state,
                cluster=cluster,
                file=path.name,
                port=port,
                told=lambda url: _show(url, print_only),
            )
        )
    except OSError as error:
        raise UsageError(
            f"cannot listen on port {port}: {error.strerror}", "choose another --port"
        ) from None


def _show(url: str, print_only: bool) -> None:
    console.out(url)
    if not print_only and (
        sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        webbrowser.open(url)
