"""The ports: what the control plane and the agents need of a log; and the log in memory.

One cluster has one `log` (single writer), one intake of `reports` (many writers, at least once),
one stream of `orders` per node (a projection of the log) and the nodes' `heartbeats` (levels).
Every implementation passes the one suite in tests/events/test_log.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from ..records.envelope import Record, Report


class Beat(Struct, frozen=True):
    """A node's sign of life: the newest heartbeat of its newest incarnation."""

    node: str
    incarnation: int
    age_s: float
    """Seconds since the server received it, by the server's clock."""


class Batch(Struct, frozen=True):
    """Reports taken from the intake, and the cursor that an append after them moves to."""

    reports: tuple[Report, ...]
    cursor: str


class SentOrder(Struct, frozen=True):
    """An order as an agent reads it: the log record, and where its stream stands after it."""

    record: Record
    cursor: str


class LeaderPort(Protocol):
    """What the one leader does. Raises Conflict, Fenced, Ambiguous, Unavailable."""

    async def start_epoch(self, nonce: str) -> int:
        """Take the log: a new epoch above all before. Older leaders are fenced from now on."""
        ...

    async def append(self, records: Sequence[Record], *, epoch: int, expect: int,
                     cursor: str, acked: Mapping[str, int]) -> None:
        """Append atomically if `epoch` still rules and the last seq is `expect`.

        In the same step: orders go to the streams of their nodes, the intake's cursor moves, and
        `acked` (source -> source_seq) is told to the agents. `cursor` "" leaves it.
        """
        ...

    async def cursor(self) -> str:
        """The intake's cursor as last appended; "0-0" at first."""
        ...

    async def take(self, *, after: str, num_max: int, wait_s: float) -> Batch:
        """Reports behind `after`, at once if there are any, else within `wait_s`."""
        ...

    async def beats(self) -> list[Beat]:
        """The newest heartbeat of every node that ever beat."""
        ...

    async def rebuild_orders(self, open_orders: Sequence[Record], *, epoch: int) -> None:
        """Write the orders streams anew from the fold's open orders, after a takeover."""
        ...

    async def trim_reports(self, *, before: str) -> None:
        """Forget reports up to and including cursor `before`: they are in the log."""
        ...


class ReaderPort(Protocol):
    """Reading the log, for the leader's fold, the CLI and tests."""

    async def read(self, *, after: int, num_max: int) -> list[Record]:
        """Records with seq above `after`, in order, at most `num_max`."""
        ...

    async def last_seq(self) -> int:
        """The last seq, 0 for an empty log."""
        ...


class AgentPort(Protocol):
    """What an agent does."""

    async def send(self, reports: Sequence[Report]) -> None:
        """Hand over reports, at least once: on Unavailable or Ambiguous the caller sends again."""
        ...

    async def acked(self, source: str) -> int:
        """The highest source_seq of this source that is in the log, 0 for none."""
        ...

    async def orders(self, node: str, *, after: str, wait_s: float) -> list[SentOrder]:
        """Orders for this node behind `after` ("0-0": all open ones), within `wait_s`."""
        ...

    async def beat(self, node: str, incarnation: int) -> None:
        """A heartbeat."""
        ...


class LogPort(LeaderPort, ReaderPort, AgentPort, Protocol):
    """All of it."""

    async def close(self) -> None: ...
