"""What a control plane tells the process that answers its reads."""

from msgspec import Struct, msgpack

from ...events.spec.policy import Policy
from .address import Address

TOLD = "Unicron-Told"
"""The header of a request to the process that has its `Told`, as JSON."""
GAUGES = "/gauges"
"""What the process answers besides the API: the gauges of /metrics."""
LENGTH_BYTES = 8
ALIVE_S = 1.0
"""The process writes a byte to its standard output so often."""
TOLD_BYTES_MAX = 1 << 20
"""Of the header: it may name thousands of nodes."""


class Begin(Struct, frozen=True, kw_only=True):
    """What the process needs of its control plane. It has secrets, so it is in no argument."""

    redis_url: str
    """The log's server."""
    ca: str
    """The authorities of that server, as Options has them."""
    cluster: str
    """Its name."""
    folder: str
    """Where segments and snapshots are."""
    policy: Policy
    """As the control plane has it for the log."""
    address: Address
    """As the control plane's API has it."""
    token: str
    """Who has it may read."""


class Told(Struct, frozen=True, kw_only=True):
    """What a read may show: all records up to `seq`, which the log has acknowledged."""

    seq: int
    """The last record."""
    fold: int
    """Counts the times that the process has got a state."""
    now_s: float
    """The time by the log's clock."""
    leading: bool
    """Whether the control plane leads."""
    leader_url: str
    """Whom it follows, if it does."""
    followers: list[str]
    """The URLs of those that follow it."""
    ca: str
    """The digest of its certificate's authority."""
    num_dead_letters: int
    """What its intake has rejected, and is kept."""
    old_agents: list[str]
    """Nodes whose agents are of release 0.3.0."""
    state: bytes = b""
    """The state after `seq`, once for each `fold`."""


def frame(message: Begin | Told) -> bytes:
    """A message for the process's standard input: its length, then MessagePack."""
    data = msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data
