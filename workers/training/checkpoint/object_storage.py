"""Checkpoints at an fsspec URL, in torch's file format and without renames.

torch writes `.metadata` under another name and renames it. Most object stores have no rename, so
this module writes the file a second time under its final name, after all others. A checkpoint
without `.metadata` is partial.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter

from ...host.object_storage import COMPLETE_MARK, Store, as_os_errors


class _Files(FileSystem):
    """torch's fsspec layer without renames and without cached listings."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Write a small object again under another name, then remove the original."""
        assert self.fs is not None
        self.fs.pipe_file(new_path, self.fs.cat_file(path))
        self.fs.rm_file(path)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Query the store, not the cache."""
        assert self.fs is not None
        self.fs.invalidate_cache()
        return super().exists(path)


class Writer(FsspecWriter):
    """torch's writer with `_Files` and without syncs: an object store is durable after a write, and
    for a remote file torch would sync every disk of the machine."""

    def __init__(self, url: str) -> None:
        super().__init__(url, sync_files=False, per_thread_copy_ahead=0)
        files: Any = _Files()
        self.fs = files
        self.path = self.fs.init_path(url)


def reader(url: str) -> FsspecReader:
    """torch's reader of a checkpoint at a URL. Raises UsageError, OSError."""
    Store(url)
    with as_os_errors():
        return FsspecReader(url)


def clear(output: str, generation: int) -> None:
    """Remove partial checkpoints of earlier generations. Raises OSError."""
    store = Store(output)
    for name in store.names():
        number = name.removeprefix("gen-")
        if name != number and number.isdecimal() and int(number) < generation:
            for folder in store.names(name):
                if COMPLETE_MARK not in store.names(f"{name}/{folder}"):
                    store.remove(f"{name}/{folder}")


def discard(url: str) -> None:
    """Remove a partial checkpoint after a failed write; errors are ignored."""
    with suppress(OSError):
        Store(url).remove()
