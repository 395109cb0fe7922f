"""Types shared by several record bodies: slots, seats, members, labels, checkpoint stores."""

import re
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from ..errors import UsageError

Origin = Literal["", "own", "peer", "copy", "checkpoint", "seed"]
"""The source of a member's state, from the nearest to the most remote ("": not recorded)."""


class ReceivedState(Struct, frozen=True):
    """Bytes of state received from rank `rank` on `node`."""

    rank: int
    node: str
    taken_bytes: int
    """How many."""


class GroupProgress(Struct, frozen=True, kw_only=True):
    """What a rank has entered in one of its groups, or of messages to or from one peer."""

    key: int
    """The same on all members of the group, and another one for each group of a generation."""
    role: str
    """What the group is for; "": a group that the loop itself made."""
    members: tuple[int, ...]
    """Places in the generation as two nested loops: start, number, stride, number, stride of the
    outer one. A number of 0: unknown. Of messages: the peer."""
    entered: int
    """How many operations it has entered, in this generation."""
    left: int
    """The last one whose end it has waited for in the call that entered it."""
    kind: str
    """Of the last operation; "send" and "receive" are messages."""
    num_bytes: int
    """Of the first tensor of the last operation."""
    order: int
    """Which operation of this rank the last one was; 0: of an earlier iteration, and ended."""
    in_s: float
    """Time since the last operation was entered."""


# --- Labels of a node: rack and switch, given at the start of its agent ---

LABEL_HINT = "for example --label rack=r1 --label switch=s3"
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z")


class Labels(Struct, frozen=True, kw_only=True):
    """Location of a node; empty: unknown. Nodes of one rack may fail together."""

    rack: str = ""
    """The rack that it is in."""
    switch: str = ""
    """The network switch that it is at."""


LABEL_KEYS = Labels.__struct_fields__


def parse_labels(texts: Iterable[str]) -> Labels:
    """Parse `KEY=VALUE` texts. Raises UsageError for an invalid or repeated label."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--label {text!r} is not KEY=VALUE", LABEL_HINT)
        if key in found:
            raise UsageError(f"--label {key} is given twice", LABEL_HINT)
        found[key] = value
        if why := label_error(key, value):
            raise UsageError(f"--label {text!r}: {why}", LABEL_HINT)
    return Labels(**found)


def label_error(key: str, value: str) -> str:
    """Why a label is invalid; "" if it is valid."""
    if key not in LABEL_KEYS:
        return f"{key!r} is not a label; there are {' and '.join(LABEL_KEYS)}"
    if not LABEL_VALUE.match(value):
        return f"{value!r} is not 1 to 63 of A-Z a-z 0-9 . _ -, a letter or digit at both ends"
    return ""


SaveKind = Literal["checkpoint", "export", "copy"]
"""What a rank saves: a checkpoint that is published; one in Megatron-LM's folder or that a restart
reads without a publication; a share of an in-memory checkpoint."""
FaultKind = Literal["rank", "stop", "node"]
"""Faults that can be injected: kill a rank, stop a rank, kill an agent with its ranks."""
TokenAct = Literal["created", "rotated", "revoked", "enrolled"]
"""`enrolled`: an agent has exchanged a join token for the identity of its node."""


LetterAct = Literal["dropped", "replayed"]
"""`replayed`: sent to the intake again."""


class Body(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=False):
    """Base class of the bodies of all records. VERSIONS (envelope.py) has their versions."""


OWNER = "owner"
"""Who makes the requests with the state folder's own token."""


class OperatorRequest(Body, frozen=True, kw_only=True):
    """Base class of operators' requests: by the holder of which token, and its role at that time.

    Empty in logs of version 0.2, and in simulations.
    """

    who: str = ""
    """The token's name."""
    role: str = ""
    """What the token allowed at that time."""


class RankReport(Body, frozen=True):
    """Base class of reports about one process of a rank. `attempt` is the number of the process."""

    task: int
    rank: int
    attempt: int


Severity = Literal["SEV1", "SEV2", "SEV3"]
QuiesceMode = Literal["now", "boundary"]
Outcome = Literal["healed", "set back", "failed", "ended"]


class Slot(Struct, frozen=True, order=True):
    """One GPU, or one share of a CPU node."""

    node: str
    index: int
    """Its number on the node, from 0."""


class Seat(Struct, frozen=True, order=True):
    """The assignment of a rank (its number in the task, fixed while it lives) to a slot."""

    rank: int
    slot: Slot


class Member(Struct, frozen=True):
    """One process of a generation; its index in the tuple is its torch.distributed rank."""

    rank: int
    attempt: int
    node: str
    endpoint: str
    """The store of its process, for the rendezvous of the generation, host:port."""


class StoreEndpoint(Struct, frozen=True):
    """The checkpoint store of a node, at host:port: it keeps in-memory checkpoints."""

    node: str
    endpoint: str
    """Where the store listens, host:port."""


class NodeStores(Struct, frozen=True):
    """The nodes whose checkpoint stores receive the shares of the members on node `node`."""

    node: str
    stores: tuple[str, ...]
    """The names of these nodes."""


CHECKPOINTS_NUM_MAX = 2
"""Shares of one number of one task that one store keeps: the newest."""


class MemoryCheckpoint(Struct, frozen=True, kw_only=True):
    """An in-memory checkpoint, or one share of it, in a store (MemoryCheckpointStored).

    It is whole if the stores have all `num_shares` shares of one generation and step version. In
    Reconfigure, an entry stands for all shares of the generation in this store.
    """

    node: str
    endpoint: str
    """Where the store listens, host:port."""
    rank: int
    generation: int
    step_version: int
    """The iterations that it has."""
    copy_bytes: int
    """Its size."""
    checksum: str
    """Of its bytes, by the rank that sent it."""
    step_version_max: int = -1
    """The step version from which the task resumed; later state is obsolete. -1: not set."""
    share: int = 0
    """The number of this share, from 0."""
    num_shares: int = 1


# --- Numbers of checkpoint stores: the store processes of a node, in order of their start ---

INTEGER_NUM_MAX = (1 << 53) - 1
"""The largest integer of an agent's report: JSON and Lua hold it exactly, and the state can compute
with it within 64 bits."""
STORES_NUM_MAX = 1 << 10
"""Store processes that one incarnation of an agent may start, one after the other."""


def first_store_number(incarnation: int) -> int:
    """The number of the first store of an incarnation. Each incarnation has STORES_NUM_MAX numbers,
    all above those of earlier incarnations. This also holds for an incarnation that is only one
    above the last, because a clock was set back. It fits into 64 bits, also where a log of an older
    version has an incarnation that an agent had invented."""
    return min(max(incarnation, 0), INTEGER_NUM_MAX) * STORES_NUM_MAX
