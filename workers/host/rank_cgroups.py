"""The cgroup of each rank: no process of a rank can leave it, whatever its parents and environment.

Only cgroup v2, unified or beside v1 (hybrid). Source: "Control Group v2" in the kernel's
documentation.
"""

import hashlib
import os
import signal
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from . import linux

AGENT = "unicron-agent"
"""The cgroup of an agent in a delegated one: systemd's DelegateSubgroup=. Ranks have theirs beside
it. Only then can the delegated one limit them: it has no process itself."""
_NAME = "unicron-rank"
_PROCS, _GIVEN = "cgroup.procs", "cgroup.subtree_control"


class Limits(NamedTuple):
    """Of one rank, by controller; 0: none. `pids` counts processes and threads, `memory` bytes."""

    pids: int = 0
    memory: int = 0


class RankCgroups:
    """Makes, and removes, the cgroups of the ranks of one node in `base`; `mark` distinguishes it
    from other nodes of this machine."""

    def __init__(self, base: Path, mark: str, limits: Limits) -> None:
        self._base = base
        self._prefix = f"{_NAME}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}-"
        self._limits = limits

    def make(self, key: str) -> Path:
        """The new cgroup of a rank, with its limits. Raises OSError."""
        path = self._base / f"{self._prefix}{key}"
        path.mkdir(exist_ok=True)
        for name, value in self._limits._asdict().items():
            if value and (path / f"{name}.max").exists():
                (path / f"{name}.max").write_text(str(value), "ascii")
        return path

    def clear(self, live: Container[str]) -> bool:
        """Kill and remove the cgroups of ranks whose keys are not `live`. False: one is left until
        its processes have ended."""
        left = False
        for path in self._base.glob(f"{self._prefix}*"):
            if path.name.removeprefix(self._prefix) not in live:
                kill(path)
                remove(path)
                left |= path.exists()
        return not left


def find(proc: Path = Path("/proc/self")) -> Path | None:
    """The cgroup in which this process may make those of ranks; None: there is none."""
    try:
        lines = (proc / "cgroup").read_text("utf-8", "replace").splitlines()
        mounts = (proc / "mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    for line in mounts:
        fields, _, of_file_system = line.partition(" - ")
        root, mounted = (_unescaped(field) for field in fields.split()[3:5])
        if own is None or of_file_system.split()[:1] != ["cgroup2"]:
            continue
        if not Path(own).is_relative_to(root):
            continue  # in a container the path may be the host's
        base = Path(mounted) / Path(own).relative_to(root)
        if base.name == AGENT:
            base = base.parent
        if os.access(base, os.W_OK | os.X_OK) and os.access(base / _PROCS, os.W_OK):
            return base
    return None


def limiting(base: Path) -> frozenset[str]:
    """The controllers that could limit ranks with cgroups in `base`. A cgroup that has processes
    itself gives none on, unless it is the root of all."""
    gives = not pids_of(base) or not (base / "cgroup.type").exists()
    return _known(base / "cgroup.controllers") if gives else _known(base / _GIVEN)


def enable(base: Path) -> frozenset[str]:
    """Give the ranks' cgroups the controllers that can be given; return what they have."""
    for name in Limits._fields:
        with suppress(OSError):
            (base / _GIVEN).write_text(f"+{name}", "ascii")
    return _known(base / _GIVEN)


def enter(path: str) -> bool:
    """Move this process into a cgroup, for good unless it is root. Call it in the child, before
    exec. False: it is not possible."""
    try:
        with open(os.path.join(path, _PROCS), "w", encoding="ascii") as file:
            file.write("0")
    except OSError:
        return False
    return True


def contain(path: str) -> None:
    """Have all descendants of this process, which is to be a rank, be found when it has ended: by
    its cgroup; without one, by adoption: as long as it lives it adopts its orphans, so that the
    shim gets those of ended ranks only. Call it in the child, before exec."""
    if not (path and enter(path)):
        linux.adopt_orphans()


def pids(path: Path) -> set[int]:
    """The live processes of a cgroup and of those in it."""
    inside: set[int] = set()
    for folder in (path, *(file.parent for file in path.rglob(f"*/{_PROCS}"))):
        inside |= pids_of(folder)
    return inside


def pids_of(path: Path) -> set[int]:
    """The live processes of a cgroup, without those in cgroups in it."""
    with suppress(OSError):
        return set(map(int, (path / _PROCS).read_text("ascii").split()))
    return set()


def kill(path: Path) -> None:
    """SIGKILL all processes of a cgroup and of those in it, at one moment."""
    try:
        (path / "cgroup.kill").write_text("1", "ascii")
    except OSError:  # before Linux 5.14; or the cgroup is gone
        for pid in pids(path):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def remove(path: Path) -> None:
    """Remove a cgroup and those in it, as far as they have no process."""
    with suppress(OSError):
        for inner in path.iterdir():
            if inner.is_dir():
                remove(inner)
        path.rmdir()


def path_of(pid: int) -> str:
    """The cgroup of a process, as the kernel names it; "": it is gone, may not be read, or has
    none. Raises OSError if the machine lacks something."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text("utf-8", "replace").splitlines()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return ""
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


def _known(file: Path) -> frozenset[str]:
    with suppress(OSError):
        return frozenset(Limits._fields) & frozenset(file.read_text("ascii").split())
    return frozenset()


def _unescaped(field: str) -> str:
    """A field of mountinfo: white space and backslashes are octal."""
    return field.encode("latin-1", "replace").decode("unicode_escape") if "\\" in field else field
