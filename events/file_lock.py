"""Exclusive locks by file, also on file systems without `flock`.

`flock` is used where it works. Lustre without its mount option and NFS without locks refuse it.
There, numbered files beside the lock file name its holders: `NAME.7` the seventh. The next number
is made by link(2), or by O_EXCL where links are refused, so one process alone gets it. Its release
is a new name, `NAME.7.free`, for which a full disk has room. The file of the highest number stays
until the next one is there: numbers only grow, and nobody has to remove the lock of another
process, which could be a newer one by then.

Whether a holder still lives is exact on the same machine, by pid and start time. A holder on
another machine renews its file; without a renewal for LEASE_S it counts as gone.
"""

import errno
import fcntl
import os
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .decoding import from_json
from .errors import UnicronError
from .process_identity import boot_id, start_time
from .regular_files import open_regular

LEASE_S = 30.0
"""How long a holder on another machine may not renew its file before it counts as gone."""
RENEW_S = 5.0
POLL_S = 0.1
POLL_COUNTS_S_MAX = 1.0
"""At most this much of one wait counts as time without a renewal: where the file system hangs, the
holder cannot renew."""
FREE = ".free"
OWNER_BYTES_MAX = 1 << 12
NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK})
NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK})


class Held(UnicronError):
    """Another process holds the lock; `holder` names it, if it is known."""

    def __init__(self, path: Path, holder: str = "", hint: str = "") -> None:
        super().__init__(f"{path} is locked by {holder or 'another process'}", hint)
        self.holder = holder


class LockLost(OSError):
    """The lease ended while this process was stopped, and another process has the lock."""


class Machine(Struct, frozen=True, kw_only=True):
    """Where pids have a meaning: one boot of a kernel, and a namespace of pids."""

    host: str
    boot: str
    pids: str

    @classmethod
    def here(cls) -> "Machine":
        machine = pids = ""
        with suppress(OSError):
            machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
        with suppress(OSError):
            pids = os.readlink("/proc/self/ns/pid")
        return cls(host=f"{socket.gethostname()} {machine}".strip(), boot=boot_id(), pids=pids)


class Owner(Struct, frozen=True, kw_only=True):
    """The holder of a lock. `is_renewed`: it has a lease."""

    machine: Machine
    pid: int
    start: str
    is_renewed: bool = True

    @property
    def is_gone(self) -> bool | None:
        """None: it cannot be known from here."""
        here, there = Machine.here(), self.machine
        is_same_host = there.host == here.host
        if is_same_host and "" != there.boot != here.boot != "":
            return True
        if (there.boot, there.pids) != (here.boot, here.pids) or not (here.boot or is_same_host):
            return None
        if began := start_time(self.pid):
            return began != self.start
        try:
            os.kill(self.pid, 0)
        except PermissionError:  # /proc hides the processes of other users (hidepid)
            return None
        except ProcessLookupError:
            pass
        return True

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.machine.host.partition(' ')[0]}"


class FileLock:
    """An exclusive lock that this process holds from `acquire` until `release` or its end.

    `fd` is the open lock file, whose content is the caller's. A process that inherits it holds the
    lock too; `hand_over` names that process where the lock is not the kernel's.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        self.path = path
        self.fd = -1
        self._mode = mode
        self._files: _NumberedFiles | None = None

    def acquire(self, *, waits: bool = False) -> Self:
        """Take the lock. `waits`: until the holder releases it; otherwise raises Held, where the
        holder's end can be seen from its lease alone after up to LEASE_S. Raises OSError."""
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            self.release()
            raise Held(self.path) from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                self.release()
                raise
            try:
                files = _NumberedFiles(self.path, self._mode)
                files.acquire(waits=waits)
                self._files = files
            finally:
                if self._files is None:
                    self.release()
        return self

    def check(self) -> None:
        """Raise LockLost if another process has taken the lock."""
        if self._files is not None and not self._files.is_newest():
            raise LockLost(f"{self.path} is locked by another process by now")

    def hand_over(self, pid: int, start: str) -> None:
        """From now on the process that inherited `fd` holds the lock, until it ends."""
        if self._files is not None:
            self._files.hand_over(pid, start)

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._files is not None:
            self._files.release()
            self._files = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def is_held(path: Path) -> bool:
    """Whether some process holds the lock at `path`."""
    try:
        with open_regular(path, follow=False) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno in NO_FLOCK:
            with suppress(OSError):
                return _NumberedFiles(path, 0o600).is_held()
    return False


# --- without flock ---
class _NumberedFiles:
    """The files that name the holders of the lock at `path`; `_file` is that of this process."""

    def __init__(self, path: Path, mode: int) -> None:
        self._path, self._mode = path, mode
        self._file = path
        here = Machine.here()
        self._owner = Owner(machine=here, pid=os.getpid(), start=start_time(os.getpid()))
        self._ended = threading.Event()
        self._is_handed_over = False

    def acquire(self, *, waits: bool) -> None:
        mine = self._written(self._owner)
        watch = _Watch(mine.stat().st_mtime)
        try:
            while True:
                newest = self._newest()
                if newest is not None and not watch.is_free(newest):
                    if not waits and not watch.may_expire:
                        raise self._held(newest)
                    time.sleep(POLL_S)
                elif self._take(mine, _number_of(newest) + 1):
                    return
        finally:
            mine.unlink(missing_ok=True)

    def is_held(self) -> bool:
        newest = self._newest()
        if newest is None or newest.suffix == FREE:
            return False
        owner, renewed_s = _read(newest)
        gone = owner.is_gone if owner is not None else None
        return time.time() - renewed_s < LEASE_S if gone is None else not gone

    def is_newest(self) -> bool:
        return self._newest() == self._file

    def hand_over(self, pid: int, start: str) -> None:
        self._ended.set()
        self._is_handed_over = True
        owner = replace(self._owner, pid=pid, start=start, is_renewed=False)
        self._written(owner).replace(self._file)

    def release(self) -> None:
        self._ended.set()
        if not self._is_handed_over:
            with suppress(OSError):
                self._file.rename(f"{self._file}{FREE}")

    def _take(self, mine: Path, number: int) -> bool:
        """Become the holder of this number. False: another process is."""
        self._file = self._path.with_name(f"{self._path.name}.{number}")
        try:
            os.link(mine, self._file)
        except FileExistsError:
            if not self._is_linked(mine):
                return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                self._write(self._file, self._owner)
            except FileExistsError:
                return False
        if not self.is_newest():  # the listing was old, and this number was removed long ago
            self._file.unlink(missing_ok=True)
            return False
        for former in self._all():
            if former != self._file:
                with suppress(OSError):
                    former.unlink()
        threading.Thread(target=self._renew, name="file lock", daemon=True).start()
        return True

    def _is_linked(self, mine: Path) -> bool:
        """Whether the link was made after all: NFS repeats a request whose answer was lost."""
        try:
            return self._file.samefile(mine)
        except FileNotFoundError:
            return False

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            with suppress(OSError):
                os.utime(self._file)

    def _held(self, file: Path) -> Held:
        owner = None
        with suppress(FileNotFoundError):
            owner, _ = _read(file)
        is_far = owner is not None and owner.is_gone is None and not owner.is_renewed
        return Held(
            self._path,
            str(owner or ""),
            f"if it has ended, remove {file}" if is_far else "",
        )

    def _written(self, owner: Owner) -> Path:
        file = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}.new")
        self._write(file, owner)
        return file

    def _write(self, file: Path, owner: Owner) -> None:
        """Raises FileExistsError, and other OSErrors: then nothing is left."""
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
        try:
            with open(opened, "wb") as new:
                new.write(msgspec.json.encode(owner))
        except OSError:
            file.unlink(missing_ok=True)
            raise

    def _newest(self) -> Path | None:
        files = ((_number_of(file), file.suffix == FREE, file) for file in self._all())
        return max(files, default=(0, False, None))[2]

    def _all(self) -> list[Path]:
        pattern = re.compile(rf"{re.escape(self._path.name)}\.[0-9]{{1,17}}({re.escape(FREE)})?")
        names = os.listdir(self._path.parent)
        return [self._path.with_name(name) for name in names if pattern.fullmatch(name)]


def _number_of(file: Path | None) -> int:
    """The number in the name of a holder's file; 0 without one."""
    return int(file.name.removesuffix(FREE).rpartition(".")[2]) if file is not None else 0


class _Watch:
    """Watches a holder's file. `now_s` is the present by the clock that stamps files."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._stamp: tuple[Path, float] | None = None
        self._without_s = self._looked_s = 0.0
        self.may_expire = False
        """Whether the holder's end may show in the next LEASE_S."""

    def is_free(self, file: Path) -> bool:
        """Whether the holder that the file names is gone."""
        if file.suffix == FREE:
            return True
        try:
            owner, renewed_s = _read(file)
        except FileNotFoundError:  # it was released by now, or there is a newer one
            self.may_expire = True
            return False
        gone = owner.is_gone if owner is not None else None
        self.may_expire = False
        if gone is not None or (owner is not None and not owner.is_renewed):
            return bool(gone)
        now_s = time.monotonic()
        if self._stamp != (file, renewed_s):
            is_first = self._stamp is None
            self._stamp, self._without_s = (file, renewed_s), 0.0
            self.may_expire = is_first and not 0.0 <= self._now_s - renewed_s < LEASE_S
        else:
            self._without_s += min(now_s - self._looked_s, POLL_COUNTS_S_MAX)
            self.may_expire = True
        self._looked_s = now_s
        return self._without_s > LEASE_S


def _read(file: Path) -> tuple[Owner | None, float]:
    """Who holds the lock by this file (None: it is cut), and when that was last renewed. The file
    is opened for its time: NFS compares its cache with the server then."""
    with open_regular(file, follow=False) as opened:
        data, renewed_s = opened.read(OWNER_BYTES_MAX), os.fstat(opened.fileno()).st_mtime
    try:
        return from_json(data, Owner), renewed_s
    except msgspec.MsgspecError:
        return None, renewed_s
