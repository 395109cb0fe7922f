"""Removes old checkpoints of a task, once a newer one is published and can be read back.

The order names them: the log knows which are the task's, and which one a recovery may read.
"""

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...events.errors import UnicronError
from ...events.object_storage import Store
from ...events.spec.job import is_url
from ..host import checkpoint_index, output_owner
from ..host.output_owner import Owner

CHECKPOINT = re.compile(r"gen-[0-9]+/iter-[0-9]+")
REMOVED = ".removed"
"""Suffix of a folder that is being removed: it is no checkpoint any more."""


class NotRemoved(UnicronError):
    """Old checkpoints stay; `str()` says why."""


def remove_old(*, output: str, path: str, old: Sequence[str], owner: Owner) -> list[str]:
    """Remove the checkpoints `old` of the output, after the one at `path` was read back. Returns
    those that were removed; a folder that is gone already is none. Blocks on the disk, for as long
    as it takes to read a checkpoint. Raises NotRemoved, OSError, and UsageError for a URL."""
    for name in (path, *old):
        if not CHECKPOINT.fullmatch(name) or (name in old and name == path):
            raise NotRemoved(f"{name!r} is not an old checkpoint inside the output folder")
    there = [name for name in old if _exists(output, name)]
    if not there:
        return []
    if why := checkpoint_index.damage(f"{output.rstrip('/')}/{path}"):
        raise NotRemoved(f"{path} cannot be read back: {why}")
    if is_url(output):
        store = Store(output)
        for name in there:
            store.remove(name)
        return there
    output_owner.check(Path(output), owner)
    return [name for name in there if _remove(Path(output), name)]


def _exists(output: str, name: str) -> bool:
    if is_url(output):
        return Store(output).has(name)
    return any(os.path.lexists(f"{output}/{name}{suffix}") for suffix in ("", REMOVED))


def _remove(output: Path, name: str) -> bool:
    """Remove a folder, unless it is a link or `latest` is one to it."""
    folder = output / name
    with suppress(OSError):
        if os.readlink(output / "latest") == name:
            return False
    if folder.is_symlink() or folder.parent.is_symlink():
        return False
    removed = folder.with_name(f"{folder.name}{REMOVED}")
    shutil.rmtree(removed, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
    with suppress(OSError):  # it is not empty, or gone
        folder.parent.rmdir()
    return True
