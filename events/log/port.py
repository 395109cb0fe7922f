"""The ports: the interfaces of the log for the leader, for readers and for agents.

A cluster has one `log` (single writer), one intake of `reports` (delivery at least once), one
stream of `orders` per node and the latest heartbeats. tests/events/test_log.py is for every
implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from ..records.envelope import Record, Report
from .identity import StoreKeys
from .segments import SealedLog


class Heartbeat(Struct, frozen=True):
    """The newest heartbeat of the newest incarnation of a node."""

    node: str
    incarnation: int
    age_s: float
    """Seconds since the server received it, by the server's clock."""
    num_spooled: int = 0
    """Reports that wait on the node."""


class Batch(Struct, frozen=True):
    """Reports read from the intake, and the cursor to pass to the append of their records."""

    reports: tuple[Report, ...]
    cursor: str


class SentOrder(Struct, frozen=True):
    """An order as an agent reads it: the log record, and the stream's cursor behind the order."""

    record: Record
    cursor: str
    store_keys: StoreKeys = {}
    """Of the checkpoint stores that the order names, for the ranks that carry it out."""


class FileRequest(Struct, frozen=True):
    """A request to a node's agent for a part of a file."""

    number: str
    path: str
    offset: int


class FilePart(Struct, frozen=True):
    """The answer: some bytes of the file from the offset on, none at its end; or an error."""

    number: str
    data: bytes = b""
    error: str = ""


class LeaderPort(Protocol):
    """The interface of the leader. Raises Conflict, also if the server does not know the leader's
    epoch any more; Fenced, Ambiguous, Unavailable."""

    async def start_epoch(self, nonce: str, *, url: str = "", lease_s: float = 0.0,
                          above: int = 0) -> int:
        """Take the log: start a new epoch above all earlier ones and `above`, which fences older
        leaders. For `lease_s` no other nonce can take it, unless it is released. Raises Leased
        while another one has it, and notes `url` as that of a follower; UsageError if the leader
        has another secret."""
        ...

    async def renew(self, nonce: str, *, epoch: int, url: str, lease_s: float) -> list[str]:
        """Extend the lease by `lease_s` from now; the URLs of the followers. Raises Fenced."""
        ...

    async def release(self, nonce: str, *, url: str, lease_s: float) -> None:
        """End this nonce's lease. With `url`, only that follower can take the log for `lease_s`."""
        ...

    async def tokens(self) -> bytes:
        """What `keep_tokens` has stored; empty if nothing."""
        ...

    async def keep_tokens(self, tokens: bytes, *, epoch: int) -> None:
        """Store the hashes of the tokens for the next leader. Raises Fenced."""
        ...

    async def append(self, records: Sequence[Record], *, epoch: int, expect: int,
                     cursor: str, acked: Mapping[str, int]) -> None:
        """Append atomically if `epoch` is the current epoch and the last seq is `expect`; with it
        send the orders, move the intake's cursor ("": not), publish `acked` (source -> source_seq)
        to the agents."""
        ...

    async def cursor(self) -> str:
        """The intake's cursor of the last append; "0-0" before the first."""
        ...

    async def take(self, *, after: str, num_max: int, wait_s: float) -> Batch:
        """Reports after `after`; if there are none, wait at most `wait_s`."""
        ...

    async def beats(self, nodes: Sequence[str]) -> list[Heartbeat]:
        """The newest heartbeat of each of `nodes` that has sent one since the last call."""
        ...

    async def admit(self, nodes: Mapping[str, int]) -> None:
        """Let these nodes (name -> incarnation) use the log, and no longer their predecessors."""
        ...

    async def expel(self, nodes: Iterable[str]) -> None:
        """End the access of these nodes to the log."""
        ...

    async def mark_admitted(self) -> None:
        """Note that `admit` was called for all nodes."""
        ...

    async def has_users(self) -> bool:
        """Whether that note is still there. If not, no node may use the log any more."""
        ...

    async def rebuild_orders(self, open_orders: Sequence[Record], *, epoch: int,
                             acked: Mapping[str, int]) -> None:
        """Rebuild the order streams with ids of this epoch from the open orders of the fold, and
        publish `acked`: after a takeover, or an append that stopped before its orders."""
        ...

    async def check_durable(self) -> None:
        """Raises Unavailable while the server cannot keep records as the policy asks."""
        ...

    async def trim_reports(self, *, before: str) -> None:
        """Delete the reports up to and including cursor `before`, which are in the log."""
        ...

    async def seal(self, records: Sequence[Record], *, epoch: int, open_orders: Iterable[int]
                   ) -> None:
        """Write the records behind the sealed ones to a segment, then drop all before them from the
        server, and all sealed orders but those in `open_orders` (seqs). Raises Fenced, Conflict,
        OSError."""
        ...


class ReaderPort(Protocol):
    """The interface of readers: the leader's fold, the CLI, tests."""

    async def read(self, *, after: int, num_max: int) -> list[Record]:
        """Records with seq above `after`, in order, at most `num_max`."""
        ...

    async def open_segments(self) -> SealedLog | None:
        """Read which segments are the log's; None: it is in none. Raises CorruptLog, UsageError."""
        ...

    @property
    def first_seq(self) -> int:
        """The oldest record that was not pruned, as of the last `open_segments`."""
        ...

    @property
    def sealed_seq(self) -> int:
        """The last record that is in a segment; 0: none."""
        ...

    async def last_seq(self) -> int:
        """The last seq, 0 for an empty log."""
        ...

    async def ask_file(self, node: str, path: str, *, offset: int, wait_s: float) -> FilePart:
        """Let a node's agent read a part of a file, beside the log. Raises Unavailable."""
        ...


class AgentPort(Protocol):
    """The interface of agents."""

    async def send(self, reports: Sequence[Report]) -> None:
        """Send reports, at least once: on Unavailable or Ambiguous the caller retries."""
        ...

    async def acked(self, source: str) -> int:
        """The highest source_seq of this source that is in the log, 0 for none."""
        ...

    async def orders(self, node: str, *, after: str, wait_s: float) -> list[SentOrder]:
        """Orders for this node after `after` ("0-0": all open orders); waits at most `wait_s`."""
        ...

    async def beat(self, node: str, incarnation: int, num_spooled: int = 0) -> None:
        """Send a heartbeat; that of the newest incarnation counts. `num_spooled` reports wait."""
        ...


class LogPort(LeaderPort, ReaderPort, AgentPort, Protocol):
    """The interface of a whole log."""

    async def close(self) -> None: ...
