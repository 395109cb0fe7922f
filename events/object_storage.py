"""Folders at paths and at fsspec URLs (`s3://bucket/run`), with the same methods.

The only module that uses fsspec, loaded on demand. Most stores at URLs write object by object:
nothing is renamed or locked, and a small object that is written last marks a complete folder. A
driver may raise anything, including errors of its transport: every error that is not an OSError is
raised as Unreachable.
"""

import errno
import importlib.util
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from .errors import UsageError
from .regular_files import open_regular, open_to_write, read_regular

COMPLETE_MARK = ".metadata"
"""torch writes this file last: a checkpoint folder that has it is complete."""

READ_BYTES_MAX = 1 << 30
"""Of a file that is read as a whole."""


class Unreachable(OSError):
    """A request to a store failed; `str()` says why, in one line."""


@contextmanager
def as_os_errors(*passing: type[Exception]) -> Generator[None]:
    """Context that turns a driver's exceptions into an OSError, except for `passing`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (OSError, UsageError, *passing)):
            raise
        why = " ".join(str(error).split())
        raise Unreachable(
            f"{type(error).__name__}: {why}" if why else type(error).__name__
        ) from error


def reason(error: BaseException) -> str:
    """The reason without the file's name: it does not change while the cause is the same."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def root_of(error: BaseException) -> BaseException:
    """The operating system's error behind `error`, which torch may raise in its place; `error` if
    there is none."""
    at: BaseException | None = error
    while at is not None and not (isinstance(at, OSError) and at.errno):
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return at or error


def errno_name(error: BaseException) -> str:
    """The name of the operating system's error, such as ENOSPC; empty if it is none."""
    root = root_of(error)
    return errno.errorcode.get(root.errno or 0, "") if isinstance(root, OSError) else ""


def is_installed() -> bool:
    return importlib.util.find_spec("fsspec") is not None


def check_driver(url: str, key: str = "output") -> None:
    """Raise UsageError if no driver for the URL, that of `key` in a job file, is installed."""
    scheme = url.partition("://")[0]
    if not is_installed():
        raise UsageError(
            f"{key}: {scheme}:// needs fsspec, which is not installed",
            "pip install fsspec, on every node",
        )
    import fsspec

    try:
        cast(Any, fsspec).get_filesystem_class(scheme)
    except ValueError:
        raise UsageError(
            f"{key}: fsspec knows no {scheme}://",
            "python -c 'import fsspec; print(fsspec.available_protocols())'",
        ) from None
    except ImportError as error:
        raise UsageError(
            f"{key}: the driver of {scheme}:// is not installed",
            f"{error}, with pip, on every node",
        ) from None


class Store:
    """A folder and all below it; `fs` is fsspec's, `root` its name there. Without a driver for the
    URL the constructor raises UsageError. Other failures raise OSError."""

    def __init__(self, url: str) -> None:
        check_driver(url)
        from fsspec import core

        with as_os_errors():
            self.fs, root = cast(Any, core).url_to_fs(url)
        self.root: str = root.rstrip("/")

    def read(self, name: str, bytes_max: int = READ_BYTES_MAX) -> bytes | None:
        """The bytes of an object; None if there is none. It is fetched as a whole: not every store
        serves a part."""
        with as_os_errors():
            self.fs.invalidate_cache()
            try:
                data = bytes(self.fs.cat_file(self._at(name)))
            except FileNotFoundError:
                return None
        if len(data) > bytes_max:
            raise OSError(errno.EFBIG, f"larger than {bytes_max} bytes", name)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, in one request."""
        with as_os_errors():
            self.fs.pipe_file(self._at(name), data)

    @contextmanager
    def create(self, name: str) -> Generator[IO[bytes]]:
        """A new object, which appears at the end of the context, unless that is left by an error. A
        RuntimeError or a MemoryError in the context is raised as it is."""
        with as_os_errors(RuntimeError, MemoryError):
            self.fs.makedirs(self.root, exist_ok=True)  # some stores have real folders
            file = self.fs.open(self._at(name), "wb")
            try:
                yield file
            except BaseException:
                with suppress(Exception):
                    getattr(file, "discard", lambda: None)()
                raise
            file.close()

    @contextmanager
    def opened(self, name: str) -> Generator[IO[bytes]]:
        """An object to read. All errors in the context are raised as OSError."""
        with as_os_errors(), self.fs.open(self._at(name), "rb") as file:
            yield file

    def size(self, name: str) -> int | None:
        """The size of an object in bytes; None if there is none."""
        with as_os_errors():
            self.fs.invalidate_cache()
            try:
                return int(self.fs.info(self._at(name))["size"])
            except FileNotFoundError:
                return None

    def has(self, name: str) -> bool:
        """Whether there is such an object or folder."""
        with as_os_errors():
            self.fs.invalidate_cache()
            return self._exists(self._at(name))

    def names(self, name: str = "") -> list[str]:
        """The names of the entries directly in a folder."""
        with as_os_errors():
            self.fs.invalidate_cache()
            try:
                paths = self.fs.ls(self._at(name), detail=False)
            except FileNotFoundError:
                return []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def remove(self, name: str = "") -> None:
        """Remove a folder, its completion mark first. No effect if the folder is missing."""
        with as_os_errors(), suppress(FileNotFoundError):
            self.fs.invalidate_cache()
            for path in (self._at(f"{name}/{COMPLETE_MARK}".lstrip("/")), self._at(name)):
                if self._exists(path):
                    self.fs.rm(path, recursive=True)
            self.fs.invalidate_cache()

    def check_writable(self) -> None:
        """Write a probe object and remove it."""
        name = f".probe-{os.urandom(8).hex()}"
        with as_os_errors():
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(self._at(name), b"unicron")
            self.fs.rm_file(self._at(name))

    def _exists(self, path: str) -> bool:
        """Unlike fsspec's `exists`, do not treat every error as a missing object."""
        try:
            self.fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root


class PathStore:
    """The same at a path. A folder is made when it is written to, with this `mode`."""

    def __init__(self, path: str | Path, mode: int = 0o777) -> None:
        self._path, self._mode = Path(path), mode

    def read(self, name: str, bytes_max: int = READ_BYTES_MAX) -> bytes | None:
        with suppress(FileNotFoundError):
            return read_regular(self._path / name, bytes_max)
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, completely or not at all. When this returns, it is on the disk."""
        partial = self._path / f".{name}.{os.getpid()}.new"
        try:
            with self.create(partial.name) as file:
                file.write(data)
            partial.replace(self._path / name)
            folder = os.open(self._path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    @contextmanager
    def create(self, name: str) -> Generator[IO[bytes]]:
        """A new file, which is on the disk at the end of the context."""
        self._path.mkdir(mode=self._mode, parents=True, exist_ok=True)
        with open_to_write(self._path / name) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def opened(self, name: str) -> IO[bytes]:
        return open_regular(self._path / name)

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return (self._path / name).stat().st_size
        return None

    def names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return os.listdir(self._path)
        return []

    def remove(self, name: str = "") -> None:
        """Remove a file, or the whole folder."""
        if name:
            (self._path / name).unlink(missing_ok=True)
        else:
            shutil.rmtree(self._path, ignore_errors=True)
