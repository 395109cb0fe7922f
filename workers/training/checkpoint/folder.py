"""The folder of a checkpoint that several members write: a path, or an fsspec URL.

At a path, a partial folder is renamed when the checkpoint is complete. At a URL, which has no
rename, names differ by attempt, and `.metadata` comes last: a folder without it is partial.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ....events.object_storage import COMPLETE_MARK, Store, as_os_errors
from ....events.spec.job import is_url

PARTIAL, OLD = ".partial", ".old"
"""Suffixes of folders that are being written and that are being replaced."""


class PathFolder:
    """One attempt to write a checkpoint at a path. `token` is the same for all of its members, and
    differs from that of any other attempt. Methods raise OSError."""

    def __init__(self, path: str, token: str) -> None:
        self.name = path
        self._final = Path(path)
        self._partial = self._final.with_name(f"{self._final.name}.{token}{PARTIAL}")

    @property
    def partial_name(self) -> str:
        return str(self._partial)

    def data_name(self, place: int) -> str:
        return f"__{place}_0.distcp"

    def index_name(self, place: int) -> str:
        return f"__{place}_0.index"

    @contextmanager
    def create(self, name: str) -> Generator[IO[bytes]]:
        """A new file, which is durable at the end of the context."""
        self._partial.mkdir(parents=True, exist_ok=True)
        with (self._partial / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, completely or not at all."""
        with self.create(f".{name}") as file:
            file.write(data)
        (self._partial / f".{name}").replace(self._partial / name)

    def read(self, name: str) -> bytes | None:
        """A small file of this attempt; None if there is none."""
        try:
            return (self._partial / name).read_bytes()
        except FileNotFoundError:
            return None

    def finish(self, metadata: bytes) -> None:
        """Write `.metadata`: it is then complete. It replaces another task's at the same output."""
        self.write(COMPLETE_MARK, metadata)
        old = self._final.with_name(f"{self._partial.name.removesuffix(PARTIAL)}{OLD}")
        if self._final.exists():
            self._final.rename(old)
        self._partial.rename(self._final)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove all files of the attempt; errors are ignored."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            (self._partial / name).unlink()


class UrlFolder:
    """The same at a URL. An existing checkpoint is replaced when this one is complete."""

    def __init__(self, url: str, token: str) -> None:
        self.name = url
        self._token = token
        self._store = Store(url)

    @property
    def partial_name(self) -> str:
        return self.name

    def data_name(self, place: int) -> str:
        return f"__{place}_{self._token}.distcp"

    def index_name(self, place: int) -> str:
        return f"__{place}_{self._token}.index"

    @contextmanager
    def create(self, name: str) -> Generator[IO[bytes]]:
        with as_os_errors(RuntimeError, MemoryError):
            file = self._store.open(name, "wb")
            try:
                yield file
            except BaseException:
                with suppress(Exception):
                    getattr(file, "discard", lambda: None)()
                raise
            file.close()

    def write(self, name: str, data: bytes) -> None:
        self._store.write(name, data)

    def read(self, name: str) -> bytes | None:
        return self._store.read(name)

    def finish(self, metadata: bytes) -> None:
        self._store.write(COMPLETE_MARK, metadata)
        with suppress(OSError):  # files of an earlier attempt or task
            for name in self._store.names():
                if name.startswith("__") and self._token not in name:
                    self._store.remove(name)

    def discard(self) -> None:
        """Remove all files of the attempt, or the whole folder if it has no checkpoint."""
        with suppress(OSError):
            names = self._store.names()
            for name in names if COMPLETE_MARK in names else ("",):
                if self._token in name or not name:
                    self._store.remove(name)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            self._store.remove(name)


Folder = PathFolder | UrlFolder


def folder_at(name: str, token: str) -> Folder:
    """The folder at a path or a URL. For a URL, raises UsageError, OSError."""
    return UrlFolder(name, token) if is_url(name) else PathFolder(name, token)


# --- Partial checkpoints of earlier generations ---


def clear(output: str, generation: int) -> None:
    """Remove partial checkpoints of earlier generations, also those that a member still writes."""
    with suppress(OSError):
        if is_url(output):
            _clear_url(Store(output), generation)
        else:
            _clear_path(Path(output), generation)


def _clear_path(folder: Path, generation: int) -> None:
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
    number = name.removeprefix("gen-")
    return name != number and number.isdecimal() and int(number) < generation
