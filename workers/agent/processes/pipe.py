"""The agent's end of the pipe to a rank (workers/ipc/pipe_protocol.py), on a socket pair."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from ...ipc.pipe_protocol import FRAME_BYTES_MAX, Frame, Unpacker, pack, whole_bytes
from ...ipc.violation import Violation
from .rank_guard import RankGuard

WAITING_BYTES_MAX = 64 << 20
"""Unsent bytes for a rank that does not read; beyond this, `send` refuses frames."""
WHOLE_BYTES_MAX = 16 << 10
"""The kernel wakes a waiting sender when three quarters of its buffer (208 kB) are free: the rest
of a longer frame might never come."""
PART_S = 0.005
"""Wait for the rest of a frame."""
FAILED_S = 0.5
"""Wait after a read that failed through no fault of the rank."""
_READ_BYTES = 256 << 10


class Pipe:
    """Sends frames. Calls `on_frame` for each received frame. All reading is done in `guard`. A
    frame leaves the socket only after `on_frame`, so that the next agent finds it if this one is
    killed; of a frame above WHOLE_BYTES_MAX the parts leave as they come. A closed pipe is not
    reported, because the pidfd reports the rank's exit. `fd`: the agent's end, if the rank has the
    other one already."""

    def __init__(
        self,
        on_frame: Callable[[Frame], None],
        guard: Callable[[], RankGuard],
        bytes_max: int = FRAME_BYTES_MAX,
        fd: int = -1,
    ) -> None:
        self._on_frame = on_frame
        self._guard = guard
        self._bytes_max = bytes_max
        self._unpacker = Unpacker(bytes_max)
        self._waiting = bytearray()
        self._loop = asyncio.get_running_loop()
        if fd < 0:
            self._ours, self.theirs = socket.socketpair()
        else:
            self._ours, self.theirs = socket.socket(fileno=fd), socket.socket()
        self._ours.setblocking(False)
        self._open = True
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._ours, self._read)

    def fileno(self) -> int:
        """The agent's end."""
        return self._ours.fileno()

    def started(self) -> None:
        """Close the rank's end here: the rank has inherited it."""
        self.theirs.close()

    def send(self, frame: Frame) -> bool:
        """Send a frame; False if the pipe is closed or the rank does not read."""
        data = pack(frame)
        if not self._open or len(self._waiting) + len(data) > WAITING_BYTES_MAX:
            return False
        self._waiting += data
        self._write()
        return self._open

    def pause(self, s: float) -> None:
        """Read nothing for `s` seconds. A rank that sends too much then waits in its own calls."""
        if self._open and self._pause is None:
            self._loop.remove_reader(self._ours)
            self._pause = self._loop.call_later(s, self._end_pause)

    def drain(self) -> None:
        """Read everything that the rank wrote before it exited, then close. Its descendants cannot
        add to it any more: they could do so for ever."""
        with suppress(OSError):  # it is closed
            self._ours.shutdown(socket.SHUT_RD)
        while self._open:
            self._read(is_last=True)

    def close(self) -> None:
        """Close both ends. A second call does nothing."""
        self.theirs.close()
        if self._open:
            self._open = False
            if self._pause is not None:
                self._pause.cancel()
            self._loop.remove_reader(self._ours)
            self._loop.remove_writer(self._ours)
            self._ours.close()

    def _end_pause(self) -> None:
        self._pause = None
        self._loop.add_reader(self._ours, self._read)

    def _read(self, is_last: bool = False) -> None:
        with self._guard():
            self._take(is_last)
            return
        if is_last:  # it has raised
            self.close()
        elif self._open:
            self.pause(FAILED_S)

    def _take(self, is_last: bool) -> None:
        try:
            data = self._ours.recv(_READ_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            if is_last:
                self.close()
            return
        except OSError:
            data = b""
        num_bytes = self._num_whole(data)
        if not data or (is_last and not num_bytes):
            self.close()
            return
        if not num_bytes:
            self.pause(PART_S)  # the rest of a frame is on its way; the socket stays readable
            return
        try:
            frames = self._unpacker.feed(data[:num_bytes])
        except (ValueError, msgspec.MsgspecError, OverflowError, RecursionError) as error:
            raise Violation(str(error)) from None
        for frame in frames:
            self._on_frame(frame)
        if self._open:
            self._ours.recv(num_bytes)

    def _num_whole(self, data: bytes) -> int:
        """The bytes of whole frames; all if a part of one is held, or if the last is too long."""
        if self._unpacker.has_part:
            return len(data)
        end = whole_bytes(data, self._bytes_max)
        return end if end or len(data) < WHOLE_BYTES_MAX else len(data)

    def _write(self) -> None:
        try:
            num_bytes = self._ours.send(self._waiting)
        except (BlockingIOError, InterruptedError):
            num_bytes = 0
        except OSError:
            self._waiting.clear()
            # The rank's last frames may still be readable: leave the reading side open.
            self._loop.remove_writer(self._ours)
            return
        del self._waiting[:num_bytes]
        if self._waiting:
            self._loop.add_writer(self._ours, self._write)
        else:
            self._loop.remove_writer(self._ours)
