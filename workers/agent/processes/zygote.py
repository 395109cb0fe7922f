"""The zygote: a process that loads torch and Megatron once and forks ranks.

A rank that is started by exec needs seconds of CPU time to load them (measured: 3.5 s). The first
rank waits for the zygote. If it cannot be used, the agent starts ranks by exec.
"""

import asyncio
import errno
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from ....events.bounded_file import LOG_BYTES_MAX
from ....events.decoding import from_msgpack
from ....events.regular_files import open_to_write
from ...ipc.pipe_protocol import REQUEST_BYTES_MAX, ForkReply, ForkRequest
from .shim import ZYGOTE, Shim

ARGV = (sys.executable, "-P", "-m", "unicron.workers.training.zygote")
LOAD_S_MAX = 60.0
FORK_S_MAX = 2.0
"""A fork takes milliseconds. The agent blocks until it is done, so that no pid is reused."""
CGROUP_BYTES_MAX = 4096
"""The longest path of Linux."""
TRIES_NUM_MAX = 3
"""Starts of the zygote; afterwards ranks are always started by exec."""
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
"""No loaded library may start threads or open a CUDA context."""
WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUDA_VISIBLE_DEVICES": ""}
"""With both, torch counts GPUs without a call of CUDA or NVML, which start a thread (driver 580). A
forked rank has its own environment, and finds its GPU."""

_log = structlog.get_logger("agent")


class Zygote:
    """Forks ranks for one agent; `close` ends it. `UNICRON_ZYGOTE=0` in `env` disables it.

    It runs as the agent's user, and its ranks as the user `run_as`: a rank that had the zygote's
    rights could send to the agent in its place."""

    def __init__(
        self,
        env: Mapping[str, str],
        marker: tuple[str, str],
        log_path: Path,
        shim: Shim,
        run_as: str = "",
    ) -> None:
        self._shim = shim
        self._env = {**env, **ONE_THREAD, **WITHOUT_CUDA, marker[0]: marker[1]}
        self._log_path = log_path
        self._run_as = run_as
        self._tries_num = TRIES_NUM_MAX if env.get("UNICRON_ZYGOTE") == "0" else 0
        self._pid = 0
        self._socket: socket.socket | None = None
        self._loading: asyncio.Future[bool] | None = None

    def can_fork(self, env: Mapping[str, str]) -> bool:
        """Whether the zygote can now fork a rank with this environment."""
        return (
            self._socket is not None
            and self._loading is not None
            and self._loading.done()
            and len(_request(env, "")) <= REQUEST_BYTES_MAX - CGROUP_BYTES_MAX
        )

    async def is_ready(self) -> bool:
        """Start the zygote if necessary and wait until it can fork; False: use exec."""
        if self._pid and (how := self._shim.status(self._pid)).has_ended:
            _log.warning("the zygote has exited", code=how.exit_code, signal=how.signal)
            self.close()
        if not self._pid:
            if self._tries_num >= TRIES_NUM_MAX:
                return False
            self._tries_num += 1
            try:
                self._start()
            except OSError as error:
                _log.warning("no zygote", why=str(error))
                return False
            self._loading = asyncio.ensure_future(self._load())
        assert self._loading is not None
        return await asyncio.shield(self._loading)

    def fork(self, env: Mapping[str, str], cgroup: str, *files: int) -> int:
        """Fork a rank in this cgroup and return its pid. On failure, close the zygote and raise
        OSError. `files`: the rank's log, its end of the pipe, and its progress page if it has one.
        The rank becomes a child of the shim. If it exists despite an OSError, its closed pipe ends
        it."""
        assert self._socket is not None, "the zygote does not run"
        try:
            self._socket.settimeout(FORK_S_MAX)
            socket.send_fds(self._socket, [_request(env, cgroup)], files)
            answer = from_msgpack(self._socket.recv(REQUEST_BYTES_MAX), ForkReply)
        except (OSError, msgspec.MsgspecError) as error:
            self.close()
            # EAGAIN: the same start may succeed without it
            raise OSError(errno.EAGAIN, f"the zygote does not fork: {error}") from None
        return answer.pid

    def close(self) -> None:
        """End the zygote; its forked ranks continue."""
        if self._socket is not None:
            self._socket.close()
        if self._pid:
            self._shim.discard(ZYGOTE, self._pid)
        self._socket, self._pid = None, 0

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open_to_write(self._log_path, appends=True) as log:
            self._shim.bound(ZYGOTE, self._log_path, LOG_BYTES_MAX)
            self._pid = self._shim.start(
                ZYGOTE,
                b"",
                [*ARGV, "--parent", str(self._shim.pid), "--run-as", self._run_as],
                self._env,
                log.fileno(),
                files={"--fd": theirs.fileno()},
            )
        self._socket = ours

    async def _load(self) -> bool:
        """Wait for the first message of the zygote; return whether it came."""
        loop, connection = asyncio.get_running_loop(), self._socket
        assert connection is not None
        connection.setblocking(False)
        try:
            data = await asyncio.wait_for(loop.sock_recv(connection, REQUEST_BYTES_MAX), LOAD_S_MAX)
        except (OSError, TimeoutError) as error:
            data, why = b"", str(error) or f"it has not loaded within {LOAD_S_MAX:g} s"
        else:
            why = "it exited"
        if data:
            return True
        _log.warning("no zygote: ranks are started by exec", why=why, see=str(self._log_path))
        self.close()
        return False


def _request(env: Mapping[str, str], cgroup: str) -> bytes:
    return msgspec.msgpack.encode(ForkRequest(env=dict(env), cgroup=cgroup))
