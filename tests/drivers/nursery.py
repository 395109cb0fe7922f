"""Starts training ranks quickly: a zygote whose ranks become children of the test process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from unicron.workers.agent.processes.zygote import ONE_THREAD, WITHOUT_CUDA
from unicron.workers.host import linux
from unicron.workers.ipc.pipe_protocol import REQUEST_BYTES_MAX, ForkReply, ForkRequest

START_S = 90.0
PATCH = "UNICRON_TEST_PATCH"
"""Environment variable of a rank: code that it runs first. `fd` is the socket to the agent."""
ZYGOTE = f"""
import os
from unicron.workers.training import rank, zygote
right = rank.run_rank
def be(fd):
    exec(os.environ.pop({PATCH!r}, ""), {{"fd": fd}})
    right(fd)
rank.run_rank = be
zygote.main()
"""


class Forked:
    """A forked child, with the methods of Popen that the tests need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        last_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > last_s:
                raise subprocess.TimeoutExpired(f"rank of pid {self.pid}", timeout)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The product's zygote; its ranks become children of the test process."""

    def __init__(self, log: Path) -> None:
        linux.adopt_orphans()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with log.open("wb") as output, theirs:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    ZYGOTE,
                    "--fd",
                    str(theirs.fileno()),
                    "--parent",
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=output,
                env={**os.environ, **ONE_THREAD, **WITHOUT_CUDA},
                start_new_session=True,
            )
        self.socket.settimeout(START_S)
        assert self.socket.recv(REQUEST_BYTES_MAX), log.read_text()

    def fork(self, environment: dict[str, str], log: int, pipe: int) -> Forked:
        request = msgspec.msgpack.encode(ForkRequest(env=environment))
        socket.send_fds(self.socket, [request], [log, pipe])
        reply = msgspec.msgpack.decode(self.socket.recv(REQUEST_BYTES_MAX), type=ForkReply)
        last_s = time.monotonic() + START_S
        while (proc := linux.read(reply.pid)) is not None and proc.ppid != os.getpid():
            assert time.monotonic() < last_s, "the rank did not become a child of this process"
            time.sleep(0.0005)
        return Forked(reply.pid)

    def close(self) -> None:
        self.socket.close()
        self.popen.kill()
        self.popen.wait(10)
