"""The state folder of a cluster on this machine: whose it is, its paths and its lock."""

from __future__ import annotations

import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any

from ...events import file_lock
from ...events.decoding import from_json
from ...events.errors import UsageError
from ...events.file_lock import FileLock, Held
from ...events.private_files import write_private
from ...events.regular_files import read_regular

FILE_BYTES_MAX = 1 << 20


def default() -> Path:
    """$UNICRON_STATE, else $XDG_STATE_HOME/unicron, else ~/.local/state/unicron."""
    if given := os.environ.get("UNICRON_STATE"):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "unicron"


def shown(path: Path) -> str:
    """The path as a user would type it: relative if it is below the working directory."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def opened(path: Path) -> StateDir:
    """The state folder at this path, which need not exist yet. Raises UsageError if it belongs to
    another user, or if others may write in it: they would choose what is read and started."""
    state = StateDir(path)
    try:
        status = state.path.stat()
    except OSError:
        return state  # there is nothing to read; who writes there, sees why not
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"{state.path} belongs to user {status.st_uid}, not to {os.geteuid()}: "
            "who owns it chooses what is read",
            "name a folder of yours with --state; to look at that one, "
            "let the owner export the log: unicron export FILE",
        )
    if status.st_mode & 0o022:
        raise UsageError(
            f"{state.path} has mode {stat.S_IMODE(status.st_mode):04o}: others may write in it, "
            "and so choose what is read",
            f"chmod go-w {shlex.quote(shown(state.path))}, if nobody else has written there",
        )
    return state


class StateDir:
    """Paths in one state folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.server = self.path / "server"  # the embedded server's folder
        self.pids = self.path / "pids"
        self.logs = self.path / "logs"  # the output of our processes, one file each
        self.ca = self.path / "ca.pem"  # what the agent trusts at https://
        self.cluster = self.path / "cluster.json"  # the options of `up`, for a later `up`
        self.log = self.path / "log.json"  # where the control plane's segments are
        # Our copy of `up`'s policy file: the original may change or be deleted.
        self.policy = self.path / "policy.yaml"

    @property
    def option(self) -> str:
        """`--state DIR`, quoted for a shell, for hints."""
        return f"--state {shlex.quote(shown(self.path))}"

    def control_planes(self) -> list[Path]:
        """Of each control plane here the private file that it writes: url, socket and token."""
        return sorted(self.path.glob("control_plane*.json"))

    def agent(self, node: str) -> Path:
        return self.path / "agents" / node

    def create(self) -> None:
        """Make the folders, for the owner only; existing ones keep their mode. Raises OSError."""
        for folder in (self.path, self.pids, self.logs, self.path / "agents"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def is_held(self) -> bool:
        """Whether an `up` holds the folder's lock."""
        return file_lock.is_held(self.path / "up.lock")

    def lock(self) -> FileLock:
        """Lock the folder for the life of this process. Raises UsageError if it is locked."""
        # owner only: any user who can read a lock file can lock it
        lock = FileLock(self.path / "up.lock", 0o600)
        try:
            lock.acquire()
        except Held as held:
            said = read_regular(lock.path, FILE_BYTES_MAX).decode(errors="replace")
            holder = said.strip() or "another process"
            far = f" ({held.holder})" if held.holder else ""
            raise UsageError(
                f"{self.path} is locked by {holder}{far}",
                f"stop it with unicron down {self.option}, "
                "or use another --state for the new cluster",
            ) from None
        os.ftruncate(lock.fd, 0)
        os.pwrite(lock.fd, f"unicron up, pid {os.getpid()}".encode(), 0)
        return lock


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in the file; None if it is missing or not valid, or no file of this user."""
    try:
        data: Any = from_json(read_regular(path, FILE_BYTES_MAX, follow=False, uid=os.geteuid()))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None  # pyright: ignore[reportUnknownVariableType]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write the file atomically, readable by the owner only."""
    write_private(path, json.dumps(data).encode())
