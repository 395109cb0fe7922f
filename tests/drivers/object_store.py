"""An object store for tests, behind fsspec as `bucket://`.

The objects are files in the folder UNICRON_TEST_BUCKET, so that every process sees them. Objects
appear when complete. There is no rename, and folders exist only as prefixes of names. While a file
`down` exists in the folder, every call fails with an error that is not an OSError, as with some
drivers. Like an sftp driver, a process keeps one connection, to the Door in UNICRON_TEST_DOOR: when
that breaks, every call fails. Importing this module registers it; a rank registers it by running
`KNOWN` first.
"""

from __future__ import annotations

import io
import os
import socket
import socketserver
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem

BUCKET, DOOR = "UNICRON_TEST_BUCKET", "UNICRON_TEST_DOOR"
KNOWN = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import object_store"


class Door:
    """A TCP server at `port` that echoes each byte until it is closed."""

    def __init__(self) -> None:
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with suppress(OSError):
            while data := self.request.recv(1):
                self.request.sendall(data)


class Denied(Exception):
    """The error of every call while the store is down."""


class _Upload(io.BytesIO):
    """Becomes an object when it is closed."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def close(self) -> None:
        if not self.closed:
            partial = self._file.with_name(f".{os.getpid()}-{id(self)}")
            partial.write_bytes(self.getvalue())
            partial.replace(self._file)
        super().close()


class Bucket(AbstractFileSystem):
    protocol = "bucket"
    _connection: socket.socket | None = None

    @property
    def _folder(self) -> Path:
        if self._connection is None:
            self._connection = socket.create_connection(("127.0.0.1", int(os.environ[DOOR])))
        try:
            self._connection.sendall(b".")
            answer = self._connection.recv(1)
        except OSError:
            answer = b""
        if not answer:
            raise Denied("the connection is lost")
        folder = Path(os.environ[BUCKET])
        if (folder / "down").exists():
            raise Denied("403: not\n now")
        return folder

    def _file(self, path: str) -> Path:
        return self._folder / quote(self._strip_protocol(path), safe="")

    def _sizes(self) -> dict[str, int]:
        return {
            unquote(file.name): file.stat().st_size
            for file in self._folder.iterdir()
            if not file.name.startswith(".")
        }

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path, sizes = self._strip_protocol(path), self._sizes()
        if path in sizes:
            return {"name": path, "size": sizes[path], "type": "file"}
        if any(name.startswith(f"{path}/") for name in sizes):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path, sizes = self._strip_protocol(path), self._sizes()
        below = {
            f"{path}/{name.removeprefix(f'{path}/').split('/')[0]}"
            for name in sizes
            if name.startswith(f"{path}/")
        } | ({path} & set(sizes))
        if not below:
            raise FileNotFoundError(path)
        return [self.info(name) if detail else name for name in sorted(below)]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = self._file(path)
        if mode == "wb":
            return _Upload(file)
        return file.open("rb")

    def _rm(self, path: str) -> None:
        self._file(path).unlink()

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        for name in self._sizes():
            if name == path or (recursive and name.startswith(f"{path}/")):
                self._rm(name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: the store has no folders."""

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise NotImplementedError("nothing moves here")


fsspec.register_implementation("bucket", Bucket, clobber=True)
