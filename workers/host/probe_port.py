"""The port at which a node answers probes: a signed challenge for this node, and nothing else.

The shim answers, because the ranks live as long as it does: also while the agent is stopped, or
restarts.
"""

import socket
import time
from contextlib import suppress

from ...events.node_probe import DATAGRAM_BYTES, RATE_NUM_MAX, proof

LOOKED_AT_NUM_MAX = 1000
"""Datagrams a second that are looked at, whoever sends them: 10 us each."""


class Rate:
    """At most `per_s` of something in any second that begins with one."""

    def __init__(self, per_s: int) -> None:
        self._per_s, self._begun_s, self._num = per_s, 0.0, 0

    def takes(self, now_s: float) -> bool:
        """Whether one more may be; if so, it counts."""
        if now_s - self._begun_s >= 1.0:
            self._begun_s, self._num = now_s, 0
        self._num += self._num < self._per_s + 1
        return self._num <= self._per_s


class ProbePort:
    """Answers with the secret of this node's incarnation. `file`: a bound UDP socket, which stays
    the caller's."""

    def __init__(self, file: int, secret: bytes) -> None:
        self._socket = socket.socket(fileno=socket.dup(file))
        self._secret = secret
        self._answers, self._looks = Rate(RATE_NUM_MAX), Rate(LOOKED_AT_NUM_MAX)

    def answer(self) -> None:
        """Answer what has come. Of a flood all but the beginning of each second is dropped."""
        with suppress(OSError):
            datagram, sender = self._socket.recvfrom(DATAGRAM_BYTES + 1, socket.MSG_DONTWAIT)
            now_s = time.monotonic()
            if not self._looks.takes(now_s):
                return
            answer = proof(self._secret, datagram)
            if answer and self._answers.takes(now_s):
                self._socket.sendto(answer, socket.MSG_DONTWAIT, sender)

    def close(self) -> None:
        self._socket.close()
