"""The owner of an output folder: the one task that may write there, whatever its path's name.

A symbolic link or a bind mount gives a folder a second name, and another cluster knows nothing of
the first one's tasks. So the folder itself says whose it is, in OWNER_FILE. The control plane
admits no two live tasks with the same path: a task that names the folder as its owner did follows
an owner that has ended, and takes the folder over.
"""

import errno
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from ...events.decoding import from_json
from ...events.object_storage import PathStore
from ...events.spec.job import URL

OWNER_FILE = ".owner.json"
PUBLISHED_FILE = ".published.json"
"""What the publisher notes of the last publication; it names the task too."""
CUT_S_MAX = 2.0
"""How long a file may be empty or cut: it is being written, where the folder has no links."""
_POLL_S = 0.05


class Owner(Struct, frozen=True, kw_only=True):
    """A task. `cluster_id` differs between clusters of the same name; "": not known. `output`: how
    the task names the folder."""

    cluster: str = ""
    cluster_id: str = ""
    task: int = 0
    name: str = ""
    output: str = ""

    def is_same_cluster(self, other: "Owner") -> bool:
        if self.cluster_id and other.cluster_id:
            return self.cluster_id == other.cluster_id
        return self.cluster == other.cluster

    def is_same_task(self, other: "Owner") -> bool:
        """A new log of a cluster may give the id of a task again, so names count too."""
        return (
            self.is_same_cluster(other)
            and self.task == other.task
            and (self.name == other.name or not self.name or not other.name)
        )

    def __str__(self) -> str:
        return f"task {self.task}" + (f" ({self.name})" if self.name else "")


class NotOwner(OSError):
    """The folder is another task's; `str()` says whose. `hint`: what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def local_folder(output: str) -> Path | None:
    """The folder of an output, also of a file:// URL. None: a store, which has no owner file."""
    url = URL.match(output)
    if url is None:
        return Path(output)
    return Path(url[2]) if url[1] in ("file", "local") else None


class Away(OSError):
    """The file system of the folder is away: another one is in its place."""


def device_of(folder: Path) -> int:
    """The file system of a folder, or of the nearest one above it that there is. Raises OSError."""
    while True:
        try:
            return folder.stat().st_dev
        except FileNotFoundError:
            if folder == folder.parent:
                raise
            folder = folder.parent


def check_mounted(folder: Path, device: int) -> None:
    """Raise Away if the task's mark in its folder is gone, and the folder is on another file system
    than `device`, where it was. One that is mounted anew may have another number; a folder that was
    removed is made again."""
    if device_of(folder) != device and read(folder) is None:
        raise Away(errno.ENODEV, "its file system is not mounted any more", str(folder))


def claim(folder: Path, task: Owner, *, takes_over: bool = True) -> None:
    """Make the task the owner of the folder, unless another one is: then raises NotOwner. With
    `takes_over` the owner may be an earlier task of this cluster that names the folder the same
    way. Raises OSError."""
    while (owner := read(folder)) is None:
        folder.mkdir(parents=True, exist_ok=True)
        new = _written(folder, task)
        try:
            if _is_first(new, folder / OWNER_FILE):
                return
        finally:
            new.unlink(missing_ok=True)
    if not _may_have(task, owner, takes_over=takes_over):
        raise _refusal(folder, owner, task)
    if owner != task:
        _written(folder, task).replace(folder / OWNER_FILE)


def check(folder: Path, task: Owner, *, takes_over: bool = False) -> None:
    """Raise NotOwner if `claim` would."""
    owner = read(folder)
    if owner is not None and not _may_have(task, owner, takes_over=takes_over):
        raise _refusal(folder, owner, task)


def _may_have(task: Owner, owner: Owner, *, takes_over: bool) -> bool:
    follows = owner.is_same_cluster(task) and _path(owner) == _path(task)
    return owner.is_same_task(task) or (follows and takes_over)


def _refusal(folder: Path, owner: Owner, task: Owner) -> NotOwner:
    """Why a task that is not the owner may not write there."""
    file = folder / OWNER_FILE
    if not owner.is_same_cluster(task):
        return NotOwner(
            f"{folder} is the folder of {owner} of another cluster ({owner.cluster})",
            f"name another output, or, if that task has ended, remove {file}",
        )
    if _path(owner) == _path(task) or not owner.output:
        return NotOwner(f"{folder} is the folder of {owner}", "name another output")
    return NotOwner(
        f"{folder} is the folder of {owner}, which names it {owner.output}",
        f"name another output; if that task has ended, write {owner.output}, or remove {file}",
    )


def read(folder: Path) -> Owner | None:
    """The owner; None without one. Of a file that is cut, the owner is the task that has published
    there. Raises NotOwner if that cannot be known, OSError."""
    deadline_s = time.monotonic() + CUT_S_MAX
    while True:
        data = PathStore(folder).read(OWNER_FILE)
        if data is None:
            return None
        with suppress(msgspec.MsgspecError):
            return from_json(data, Owner)
        if time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    with suppress(msgspec.MsgspecError):
        if published := PathStore(folder).read(PUBLISHED_FILE):
            return from_json(published, Owner)
    raise NotOwner(
        f"{folder / OWNER_FILE} is damaged: whose folder it is cannot be known",
        "remove it, if no other task writes there",
    )


def _written(folder: Path, task: Owner) -> Path:
    """A new file of its own with the owner, on the disk."""
    name = f"{OWNER_FILE}.{secrets.token_hex(8)}"
    with PathStore(folder).create(name) as file:
        file.write(msgspec.json.encode(task))
    return folder / name


def _is_first(new: Path, file: Path) -> bool:
    """Give `file` the content of `new`, unless it exists: one of all writers does."""
    try:
        os.link(new, file)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            with file.open("xb") as made:
                made.write(new.read_bytes())
        except FileExistsError:
            return False
        except OSError:
            file.unlink(missing_ok=True)
            raise
    return True


def _path(task: Owner) -> str:
    return os.path.normpath(task.output)


# --- who a process is ---
VARIABLE = "UNICRON_CLUSTER"
"""The cluster of a rank: its name, a slash, its id."""


def of_rank(environment: Mapping[str, str], task: int, name: str, output: str) -> Owner:
    cluster, _, cluster_id = environment.get(VARIABLE, "").partition("/")
    return Owner(cluster=cluster, cluster_id=cluster_id, task=task, name=name, output=output)
