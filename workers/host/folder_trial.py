"""A trial of an output folder: what checkpoints need of its file system, and the free room."""

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...events import object_storage
from ...events.file_lock import FileLock
from ...events.words import scaled

PROOF = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOSYS,
        errno.ENOTDIR,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Errors that another attempt meets again. A full disk may have room later, a server may answer."""
ANOTHER = "name a place that every node can reach and write"
_OTHER_FILES = "name a folder of another file system, or a URL"


class Flaw(NamedTuple):
    """What a file system does not do; `is_proof`: no checkpoint can be written there."""

    text: str
    hint: str
    is_proof: bool


def flaws(folder: Path) -> list[Flaw]:
    """Make the folder, and try in it what a save and a publication do. Nothing is left behind."""
    trial = _Trial(folder)
    noticed: list[Flaw] = []
    try:
        for call, what, hint in trial.steps:
            try:
                call()
            except OSError as error:
                why = object_storage.reason(error).lower()
                text = f"{folder}: {what}: {why}" if what else f"{folder}: {why}"
                noticed.append(Flaw(text, hint, error.errno in PROOF))
                if not what:
                    break
    finally:
        trial.clear()
    return noticed


def shortage(folder: Path, num: int, ckpt_bytes: int) -> Flaw | None:
    """What lacks for `num` checkpoints of about this size; None: nothing, or it is not known."""
    free_bytes = free(folder)
    if free_bytes < 0 or free_bytes >= num * ckpt_bytes:
        return None
    return Flaw(
        f"{folder} has {scaled(free_bytes, 'B')} free, and {num} checkpoints need about "
        f"{scaled(num * ckpt_bytes, 'B')}",
        "make room, lower checkpoint_keep, or name another output",
        is_proof=False,
    )


def free(folder: Path) -> int:
    """Free bytes where the folder is or will be; -1: not known."""
    for place in (folder, *folder.parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                return shutil.disk_usage(place).free
            except PermissionError:
                return -1
    return -1


class _Trial:
    """Files in the folder whose names begin with `_name`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = f".trial-{secrets.token_hex(8)}"
        self._file, self._other = folder / self._name, folder / f"{self._name}.other"
        self.steps: tuple[tuple[Callable[[], object], str, str], ...] = (
            (self._write, "", ANOTHER),
            (self._sync, "what is written cannot be synced to the disk", _OTHER_FILES),
            (self._rename, "a file cannot be renamed", _OTHER_FILES),
            (self._link, "no symbolic link can be made, and latest is one", _OTHER_FILES),
            (self._lock, "no lock can be taken", _OTHER_FILES),
        )

    def clear(self) -> None:
        with suppress(OSError):
            for path in self._folder.glob(f"{self._name}*"):
                path.unlink(missing_ok=True)

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file.write_bytes(bytes(4096))

    def _sync(self) -> None:
        for path, flags in ((self._file, os.O_RDWR), (self._folder, os.O_RDONLY)):
            opened = os.open(path, flags | os.O_CLOEXEC)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)

    def _rename(self) -> None:
        self._other.write_bytes(b"")
        self._file.replace(self._other)

    def _link(self) -> None:
        link, new = self._folder / f"{self._name}.latest", self._folder / f"{self._name}.new"
        for path in (link, new):
            path.symlink_to(self._other.name)
        new.replace(link)

    def _lock(self) -> None:
        with FileLock(self._folder / f"{self._name}.lock").acquire() as lock:
            lock.check()
