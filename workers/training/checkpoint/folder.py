"""The folder of a checkpoint that several members write: a path, or an fsspec URL.

At a path, members write into a partial folder, which is renamed when the checkpoint is complete.
Most object stores have no rename: at a URL, members write into the folder itself, under names that
no other attempt uses, and `.metadata` comes last: a folder without it is partial.
"""

import os
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO

from ....events.object_storage import COMPLETE_MARK, PathStore, Store
from ....events.spec.job import is_url
from ....events.whole_numbers import whole_number

PARTIAL, OLD = ".partial", ".old"
"""Suffixes of folders that are being written and that are being replaced."""


class Folder:
    """One attempt to write a checkpoint. `token` is the same for all of its members, and differs
    from that of any other attempt. Methods raise OSError."""

    def __init__(self, name: str, token: str) -> None:
        """For a URL, raises UsageError."""
        self.name, self._token = name, token
        self.partial_name = name if is_url(name) else f"{Path(name)}.{token}{PARTIAL}"
        self._store = Store(name) if is_url(name) else PathStore(self.partial_name)

    def data_name(self, place: int) -> str:
        return f"__{place}_{self._token if is_url(self.name) else 0}.distcp"

    def index_name(self, place: int) -> str:
        return self.data_name(place).replace(".distcp", ".index")

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A new file, which is durable at the end of the context."""
        return self._store.create(name)

    def sync(self, file: IO[bytes]) -> None:
        """What was written to an unfinished file is on the disk; of no effect at a URL."""
        if not is_url(self.name):
            file.flush()
            os.fdatasync(file.fileno())

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, completely or not at all."""
        self._store.write(name, data)

    def read(self, name: str) -> bytes | None:
        """A small file of this attempt; None if there is none."""
        return self._store.read(name)

    def written_bytes(self, name: str) -> int:
        """How much of a file is written so far; at a URL 0: an object appears when it is whole."""
        return 0 if is_url(self.name) else self._store.size(name) or 0

    def finish(self, metadata: bytes) -> None:
        """Write `.metadata`: it is then complete. It replaces another task's at the same output."""
        self.write(COMPLETE_MARK, metadata)
        if is_url(self.name):
            with suppress(OSError):  # files of an earlier attempt or task
                for name in self._store.names():
                    if name.startswith("__") and self._token not in name:
                        self._store.remove(name)
            return
        final, old = Path(self.name), Path(f"{self.partial_name.removesuffix(PARTIAL)}{OLD}")
        if final.exists():
            final.rename(old)
        Path(self.partial_name).rename(final)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove all files of the attempt, or at a URL the whole folder if it has no checkpoint and
        no other attempt; errors are ignored."""
        with suppress(OSError):
            names = self._store.names() if is_url(self.name) else []
            own = [name for name in names if self._token in name]
            is_shared = COMPLETE_MARK in names or any(
                name.startswith("__") and name not in own for name in names
            )
            for name in own if is_shared else ("",):
                self._store.remove(name)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            self._store.remove(name)


# --- Partial checkpoints of earlier generations ---


def clear(output: str, generation: int) -> None:
    """Remove partial checkpoints of earlier generations. If a member of an earlier one still
    writes, its write then fails: its checkpoint would not be published. If a removal fails, the
    next generation tries again."""
    with suppress(OSError):
        if is_url(output):
            _clear_url(Store(output), generation)
        else:
            folder = Path(output)
            for partial in (*folder.glob(f"gen-*/*{PARTIAL}"), *folder.glob(f"gen-*/*{OLD}")):
                if _is_earlier(partial.parent.name, generation):
                    shutil.rmtree(partial, ignore_errors=True)


def _clear_url(store: Store, generation: int) -> None:
    for name in store.names():
        if _is_earlier(name, generation):
            for folder in store.names(name):
                if COMPLETE_MARK not in store.names(f"{name}/{folder}"):
                    store.remove(f"{name}/{folder}")


def _is_earlier(name: str, generation: int) -> bool:
    number = whole_number(name.removeprefix("gen-")) if name.startswith("gen-") else None
    return number is not None and number < generation
