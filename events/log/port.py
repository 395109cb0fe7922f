"""What calls of the log return, and the port of its readers."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from ..records.envelope import Record
from .identity import StoreKeys
from .segments import SealedLog

REPORT_BYTES_MAX = 1 << 20
"""The size of a signed report. A rank's own reports are smaller, but for those that name each
micro-batch of a very large iteration."""

RECORD_BYTES_MAX = 16 << 20
"""The size of a record. The largest honest ones are plans and Reconfigure: some 100 bytes for each
task or member. The server takes 64 MB, `proto-max-bulk-len`, and closes the connection of more."""
DECIDED_BYTES_MAX = 128 << 20
"""The size of all records that follow from one report: those of a start have some kB a rank."""
APPEND_BYTES_MAX = 512 << 20
"""The size of all records of one append. The server takes 1 GB, `client-query-buffer-limit`."""


def size_error(sizes: Sequence[int], bytes_max: int = DECIDED_BYTES_MAX) -> str:
    """Why the server would not take records of these sizes; "": it would."""
    if (largest := max(sizes, default=0)) > RECORD_BYTES_MAX:
        return f"a record has {largest} bytes, and at most {RECORD_BYTES_MAX} are written"
    if (whole := sum(sizes)) > bytes_max:
        return f"the records have {whole} bytes, and at most {bytes_max} are written at once"
    return ""


def key_prefix(cluster: str) -> str:
    """What the names of all keys of a cluster on its server begin with."""
    return f"{{unicron:{cluster}}}:"


class Heartbeat(Struct, frozen=True):
    """The newest heartbeat of the newest incarnation of a node."""

    node: str
    incarnation: int
    age_s: float
    """Seconds since the server received it, by the server's clock."""
    num_spooled: int = 0
    """Reports that wait on the node."""


class Sent(Struct, frozen=True):
    """An entry of the intake, which may hold any bytes."""

    cursor: str
    """The intake's cursor behind it."""
    node: str
    """In whose list it was; "": in the one that the agents of release 0.3.0 share."""
    data: bytes
    """What was sent; if that is larger than REPORT_BYTES_MAX, its beginning."""
    num_bytes: int
    """The size of what was sent."""


class Rejected(Struct, frozen=True):
    """What an agent, or somebody else, has sent, and why it is no report; `source`: as it says."""

    why: str
    source: str
    data: bytes
    num_bytes: int = 0
    """The size of what was sent, if `data` is its beginning."""


class Batch(Struct, frozen=True):
    """Entries of the intake, from the lists of the nodes in turn."""

    entries: tuple[Sent, ...]
    is_whole: bool
    """Whether nothing is left there for which a deadline has to wait."""
    trimmed: dict[str, int] = {}
    """By node: how many entries were dropped from its list, which was too long."""


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
    slots: tuple[int, ...] = ()
    """Check the devices of these slots instead; `path` is empty then, which older agents refuse."""


class FilePart(Struct, frozen=True):
    """The answer: some bytes of the file from the offset on, none at its end; or an error. Of a
    check: msgpack of what is wrong with each slot's device, "" for nothing."""

    number: str
    data: bytes = b""
    error: str = ""
    begin: int = -1
    """Where the bytes begin, for what was dropped is passed over; the file's end if there are none;
    -1: at the offset, of an older agent."""


class ReaderPort(Protocol):
    """The interface of readers: the leader's fold, the CLI, tests."""

    async def read(self, *, after: int, num_max: int) -> list[Record]:
        """Records with seq above `after`, in order, at most `num_max`; none only at the end."""
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

    async def check_devices(self, node: str, slots: Iterable[int], *, wait_s: float) -> FilePart:
        """Let a node's agent check the devices of slots. Raises Unavailable."""
        ...
