"""The shim: the parent of a node's processes, which outlives the agent and holds their files.

It starts processes, tells how they ended and reaps them, as the agent orders; it decides nothing.
An ended process stays a zombie until it is reaped: the kernel holds its exit code for the next
agent. Without an agent for `gone_s` the shim kills all its descendants and ends. If it is killed,
the kernel kills its children. Why: docs/decisions/agent-restart.md.
"""

import argparse
import errno
import os
import selectors
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
from msgspec import Struct

from ...events.bounded_file import BoundedFiles
from ...events.decoding import Decoder
from ...events.errors import UsageError
from . import linux, rank_cgroups, rank_user
from .probe_port import ProbePort

T = TypeVar("T")
FIRST_S_MAX = 120.0
"""How long a new shim waits for its first agent."""
END_S_MAX = 5.0
"""How long the end waits for processes that survive SIGKILL."""
ACCEPT_PAUSE_S = 0.1
"""Time between two attempts to accept an agent after a failure."""
FILES_NUM_MAX = 8
_POLL_S = 0.005
_HEAD = struct.Struct(">I")


class Attach(Struct, frozen=True, tag=True):
    """The agent is there. Comes with an eventfd, which the shim writes when a child changes. The
    reply tells `num`, and a Held follows for each."""


class Served(Struct, frozen=True, tag=True):
    """The agent serves the node: when it is gone, the next one has `gone_s` to do so."""

    gone_s: float


class Held(Struct, frozen=True, tag=True):
    """Hold the files that come with this message under a key, and a note, until Reap or Release.
    `pid`: a child of the shim, 0 if the files are of no process. `bytes_max`: the note is the path
    of an output, which may take so much of its disk while the key is held. `answers`: the file is a
    socket at which the shim answers probes, with the note as secret. The reply is empty."""

    key: str
    note: bytes = b""
    pid: int = 0
    bytes_max: int = 0
    answers: bool = False


class Start(Struct, frozen=True, tag=True):
    """Start a process. Its files: the log; one for each of `names`, which is an option of the
    process, or else an environment variable; and those that are held. `user`: whose rights it
    gets, if not the shim's. `cgroup`: where it is contained ("": by adoption), if it is a rank. The
    reply tells `pid`."""

    key: str
    note: bytes
    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str = ""
    names: tuple[str, ...] = ()
    user: str = ""
    cgroup: str | None = None


class Status(Struct, frozen=True, tag=True):
    """Ask how a child has ended; it is not reaped."""

    pid: int


class Reap(Struct, frozen=True, tag=True):
    """Reap ended children, and release a key. A child that is held under another key stays."""

    pids: tuple[int, ...]
    key: str = ""


class End(Struct, frozen=True, tag=True):
    """Kill all descendants and end. There is no reply."""


class Reply(Struct, frozen=True, tag=True):
    """The reply to any message. After Attach, `pid` is the shim's own, and `contains` says that it
    contains the ranks that it starts: one of an agent of 0.3.0 does not."""

    pid: int = 0
    num: int = 0
    error: str = ""
    has_ended: bool = False
    exit_code: int | None = None
    signal: int | None = None
    dumped: bool = False
    contains: bool = False
    errno: int = 0
    """Of the operating system's error; 0: it is none."""


_Message = Attach | Served | Held | Start | Status | Reap | End
_decoder = Decoder[_Message](_Message)


def send(connection: socket.socket, message: Struct, files: Sequence[int] = ()) -> None:
    """Send a message with its files. Raises OSError."""
    data = msgspec.msgpack.encode(message)
    socket.send_fds(connection, [_HEAD.pack(len(data))], files)
    connection.sendall(data)


def receive(connection: socket.socket, decoder: Decoder[T]) -> tuple[T, list[int]]:
    """The next message and its files. Raises EOFError if the other side is gone, FilesLost,
    OSError."""
    head, files, flags, _ = socket.recv_fds(
        connection, _HEAD.size, FILES_NUM_MAX, socket.MSG_CMSG_CLOEXEC
    )
    num_bytes = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else 0
    data = bytearray()
    while len(data) < num_bytes and (part := connection.recv(num_bytes - len(data))):
        data += part
    is_whole = num_bytes > 0 and len(data) == num_bytes
    if not is_whole or flags & socket.MSG_CTRUNC:
        for file in files:
            os.close(file)
        if not is_whole:
            raise EOFError("the other side is gone")
        raise FilesLost(errno.EMFILE, os.strerror(errno.EMFILE))
    return decoder.decode(bytes(data)), files


class FilesLost(OSError):
    """This process may open no more files: those of a message are closed, the message is lost."""


class _Entry:
    def __init__(self, held: Held, files: list[int], popen: subprocess.Popen[bytes] | None) -> None:
        self.held = held
        self.files = files
        self.popen = popen
        """Kept until the process is reaped: without references, Popen would reap it."""
        self.probes: ProbePort | None = None


class _Shim:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._agent: socket.socket | None = None
        self._entries: dict[str, _Entry] = {}
        self._outputs = BoundedFiles()
        self._changed = -1
        self._gone_s = 0.0
        self._gone_at = time.monotonic() + FIRST_S_MAX
        self._is_served = False
        """The agent has begun to serve: one that fails before does not count."""
        self._ready = selectors.DefaultSelector()
        self._ready.register(listener, selectors.EVENT_READ)

    def run(self) -> NoReturn:
        signal.signal(signal.SIGCHLD, self._on_child)
        while True:
            left_s = None if self._agent is not None else self._gone_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                self._end()
            for key, _ in self._ready.select(left_s):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._agent:
                    self._serve()
                elif isinstance(key.data, ProbePort):
                    key.data.answer()

    def _accept(self) -> None:
        """A new agent has the node's lock: the former one is dead. Without a descriptor for its
        connection it waits."""
        self._detach()
        try:
            self._agent, _ = self._listener.accept()
        except OSError:
            time.sleep(ACCEPT_PAUSE_S)
            return
        self._ready.register(self._agent, selectors.EVENT_READ)

    def _detach(self) -> None:
        if self._agent is not None:
            self._ready.unregister(self._agent)
            self._agent.close()
            self._agent = None
            if self._is_served:
                self._gone_at = time.monotonic() + self._gone_s
            self._is_served = False
        if self._changed >= 0:
            os.close(self._changed)
            self._changed = -1

    def _on_child(self, number: int, frame: object) -> None:
        if self._changed >= 0:
            with suppress(OSError):
                os.eventfd_write(self._changed, 1)

    def _serve(self) -> None:
        agent = self._agent
        assert agent is not None
        try:
            message, files = receive(agent, _decoder)
            send(agent, self._do(message, files))
            if isinstance(message, Attach):
                for entry in self._entries.values():
                    send(agent, entry.held, entry.files)
        except FilesLost as error:
            self._refuse(agent, error)
        except (OSError, EOFError):
            self._detach()

    def _refuse(self, agent: socket.socket, error: OSError) -> None:
        try:
            send(agent, Reply(error=str(error), errno=_errno_of(error)))
        except OSError:
            self._detach()

    def _do(self, message: _Message, files: list[int]) -> Reply:
        match message:
            case Attach():
                (self._changed,) = files
                return Reply(pid=os.getpid(), num=len(self._entries), contains=True)
            case Served():
                self._gone_s, self._is_served = message.gone_s, True
            case Held():
                self._hold(message, files)
            case Start():
                return self._start(message, files)
            case Status():
                return _status(message.pid)
            case Reap():
                self._release(message.key)
                held = {entry.held.pid for entry in self._entries.values()}
                for pid in message.pids:
                    if pid not in held:
                        linux.reap(pid)
            case End():
                self._end()
        return Reply()

    def _hold(
        self, held: Held, files: list[int], popen: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._release(held.key)
        self._entries[held.key] = entry = _Entry(held, files, popen)
        if held.answers:
            entry.probes = ProbePort(files[0], held.note)
            self._ready.register(files[0], selectors.EVENT_READ, entry.probes)
        if held.bytes_max:
            self._outputs.add(held.key, Path(os.fsdecode(held.note)), held.bytes_max)

    def _release(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        self._outputs.drop(key)
        if entry is not None:
            if entry.probes is not None:
                self._ready.unregister(entry.files[0])
                entry.probes.close()
            for file in entry.files:
                os.close(file)
            if entry.popen is not None:
                entry.popen.poll()

    def _start(self, start: Start, files: list[int]) -> Reply:
        log, theirs, ours = files[0], files[1 : 1 + len(start.names)], files[1 + len(start.names) :]
        argv, env = list(start.argv), dict(start.env)
        for name, file in zip(start.names, theirs, strict=True):
            if name.startswith("--"):
                argv += [name, str(file)]
            else:
                env[name] = str(file)
        parent = os.getpid()
        try:
            user = rank_user.find(start.user)

            def prepare() -> None:
                if start.cgroup is not None:
                    rank_cgroups.contain(start.cgroup)
                rank_user.become(user)
                linux.die_with(parent)  # a change of the user clears it

            popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                pass_fds=theirs,
                cwd=start.folder or None,
                start_new_session=True,
                preexec_fn=prepare,
            )
        except (OSError, ValueError, UsageError, subprocess.SubprocessError) as error:
            for file in ours:
                os.close(file)
            return Reply(error=str(error), errno=_errno_of(error))
        finally:
            for file in (log, *theirs):
                os.close(file)
        self._hold(Held(start.key, start.note, popen.pid), ours, popen)
        return Reply(pid=popen.pid)

    def _end(self) -> NoReturn:
        """Kill all descendants, also those that have left their parents, and end."""
        last_s, me = time.monotonic() + END_S_MAX, os.getpid()
        while time.monotonic() < last_s:
            left = [proc for proc in linux.descendants({me}, linux.table()) if proc.pid != me]
            for proc in left:
                linux.kill(proc)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not left:
                break
            time.sleep(_POLL_S)
        os._exit(0)


def _errno_of(error: Exception) -> int:
    """Of a start that failed; 0: it is no error of the operating system."""
    if isinstance(error, subprocess.SubprocessError):
        return errno.EAGAIN  # before the program: in the preparation, which is ours
    return (isinstance(error, OSError) and error.errno) or 0


def _status(pid: int) -> Reply:
    try:
        how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return Reply(error="it is no child of the shim")
    if how is None:
        return Reply()
    if how.si_code == os.CLD_EXITED:
        return Reply(has_ended=True, exit_code=how.si_status)
    return Reply(has_ended=True, signal=how.si_status, dumped=how.si_code == os.CLD_DUMPED)


def main() -> None:
    """Serve until the end."""
    parser = argparse.ArgumentParser(prog="unicron.workers.host.shim")
    parser.add_argument("--listen", type=int, required=True)
    listener = socket.socket(fileno=parser.parse_args().listen)
    listener.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.adopt_orphans()
    linux.set_process_name("unicron shim")
    _Shim(listener).run()


if __name__ == "__main__":
    main()
