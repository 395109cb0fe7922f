"""The protocol between an agent and its zygote: one message each way, over SOCK_SEQPACKET."""

from __future__ import annotations

from msgspec import Struct

FDS_NUM_MAX = 3
"""Files that come with a ForkRequest: log, end of the pipe, and the progress page if monitored."""
REQUEST_BYTES_MAX = 128 << 10
"""Size limit of an environment in one message. With a larger one, the rank is started by exec."""


class ForkRequest(Struct, frozen=True, kw_only=True):
    """Fork a rank with exactly this environment."""

    env: dict[str, str]


class ForkReply(Struct, frozen=True, kw_only=True):
    """The zygote's reply: 0 when it is ready to fork, then the pid of each rank."""

    pid: int = 0
