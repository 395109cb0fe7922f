"""Checkpoints at an fsspec URL: torch's own files, and nothing that needs a rename.

torch writes `.metadata` under another name and renames it; most stores know no rename, so here its
few bytes are written once more under their own name, last of all. A checkpoint without it is half.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter

from ...host.object_storage import WHOLE, Store, told


class _Files(FileSystem):
    """torch's way to fsspec, without renames and without yesterday's listings."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """A small object under another name."""
        assert self.fs is not None
        self.fs.pipe_file(new_path, self.fs.cat_file(path))
        self.fs.rm_file(path)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether it is there now."""
        assert self.fs is not None
        self.fs.invalidate_cache()
        return super().exists(path)


class Writer(FsspecWriter):
    """torch's, but for that. Nothing is synced: a store that has taken an object has it.

    For what is no file of its own, torch would sync every disk of the machine.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, sync_files=False, per_thread_copy_ahead=0)
        files: Any = _Files()
        self.fs = files
        self.path = self.fs.init_path(url)


def reader(url: str) -> FsspecReader:
    """What torch reads a checkpoint with. Raises UsageError, OSError."""
    Store(url)
    with told():
        return FsspecReader(url)


def clear(output: str, generation: int) -> None:
    """Remove what members of generations before this one left half written. Raises OSError."""
    store = Store(output)
    for name in store.names():
        number = name.removeprefix("gen-")
        if name != number and number.isdecimal() and int(number) < generation:
            for folder in store.names(name):
                if WHOLE not in store.names(f"{name}/{folder}"):
                    store.remove(f"{name}/{folder}")


def discard(url: str) -> None:
    """Remove what is left of one that could not be written, as far as the store lets us."""
    with suppress(OSError):
        Store(url).remove()
