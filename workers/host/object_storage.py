"""Folders at fsspec URLs (`s3://bucket/run`): the one room that knows fsspec, loaded when needed.

What lies there is written object by object, as most of these stores have it: nothing is renamed,
nothing is locked, and what is whole is said by a small object that is written last. A driver may
raise anything, its transport's own errors too: all that is no OSError comes out as Unreachable.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, cast

from ...events.errors import UsageError

WHOLE = ".metadata"
"""torch writes it last: a folder of a checkpoint that has it is whole."""


class Unreachable(OSError):
    """A store did not do what was asked; `str()` says why, in one line."""


@contextmanager
def told(*passing: type[Exception]) -> Generator[None]:
    """Turn whatever a driver raises in here into an OSError, but for `passing`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (OSError, UsageError, *passing)):
            raise
        why = " ".join(str(error).split())
        raise Unreachable(f"{type(error).__name__}: {why}" if why else type(error).__name__
                          ) from error


def reason(error: BaseException) -> str:
    """Why, without the file's name: it stays the same while the cause does."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def is_installed() -> bool:
    return importlib.util.find_spec("fsspec") is not None


def check_driver(url: str, key: str = "output") -> None:
    """Raises UsageError where this Python cannot speak to such a store, with what to install.

    `key` is where the URL stands in a job file.
    """
    scheme = url.partition("://")[0]
    if not is_installed():
        raise UsageError(f"{key}: {scheme}:// needs fsspec, which is not installed",
                         "pip install fsspec, on every node")
    import fsspec

    try:
        cast(Any, fsspec).get_filesystem_class(scheme)
    except ValueError:
        raise UsageError(f"{key}: fsspec knows no {scheme}://",
                         "python -c 'import fsspec; print(fsspec.available_protocols())'"
                         ) from None
    except ImportError as error:
        raise UsageError(f"{key}: the driver of {scheme}:// is not installed",
                         f"{error}, with pip, on every node") from None


class Store:
    """One folder and all below it; `fs` is fsspec's, `root` the folder as that one names it.

    Raises UsageError without a driver, OSError for everything else, in every method.
    """

    def __init__(self, url: str) -> None:
        check_driver(url)
        from fsspec import core

        with told():
            self.fs, root = cast(Any, core).url_to_fs(url)
        self.root: str = root.rstrip("/")

    def read(self, name: str) -> bytes | None:
        """An object's bytes; None if there is none."""
        with told():
            self.fs.invalidate_cache()
            try:
                return bytes(self.fs.cat_file(self._at(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """A small object, in one request."""
        with told():
            self.fs.pipe_file(self._at(name), data)

    def has(self, name: str) -> bool:
        """Whether there is such an object, or such a folder."""
        with told():
            self.fs.invalidate_cache()
            return self._is_there(self._at(name))

    def names(self, name: str = "") -> list[str]:
        """The last parts of the names of what lies directly in a folder."""
        with told():
            self.fs.invalidate_cache()
            try:
                paths = self.fs.ls(self._at(name), detail=False)
            except FileNotFoundError:
                return []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def remove(self, name: str = "") -> None:
        """A folder and all in it, its mark of being whole first; nothing if there is none."""
        with told(), suppress(FileNotFoundError):
            self.fs.invalidate_cache()
            for path in (self._at(f"{name}/{WHOLE}".lstrip("/")), self._at(name)):
                if self._is_there(path):
                    self.fs.rm(path, recursive=True)
            self.fs.invalidate_cache()

    def num_bytes(self) -> int:
        """Of all that lies below."""
        with told():
            self.fs.invalidate_cache()
            return sum(int(info["size"]) for info in self.fs.find(self.root, detail=True).values())

    def check_writable(self) -> None:
        """Write something, and take it away."""
        name = f".probe-{os.urandom(8).hex()}"
        with told():
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(self._at(name), b"unicron")
            self.fs.rm_file(self._at(name))

    def _is_there(self, path: str) -> bool:
        """fsspec's own `exists` says no to every error: what it cannot see, it would have lost."""
        try:
            self.fs.info(path)
        except FileNotFoundError:
            return False
        return True

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root
