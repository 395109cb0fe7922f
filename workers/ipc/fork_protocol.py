"""What an agent and its zygote say to each other: one message each way, over SOCK_SEQPACKET."""

from __future__ import annotations

from msgspec import Struct

FDS_NUM_MAX = 3
"""Files that come with a Wanted: what the rank writes to, its end of the pipe to the agent, and the
page of its pulse where its agent watches it."""
REQUEST_BYTES_MAX = 128 << 10
"""An environment is bounded by what a socket takes at once; a larger one is started by exec."""


class Wanted(Struct, frozen=True, kw_only=True):
    """A rank is to be forked with exactly this environment."""

    env: dict[str, str]


class Told(Struct, frozen=True, kw_only=True):
    """The zygote's answer: 0 when it is ready to fork, then the pid of each rank."""

    pid: int = 0
