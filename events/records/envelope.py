"""The envelope of records and reports, and the registry of record kinds."""

import re
from types import ModuleType

from msgspec import Struct

from . import decisions, orders, reports
from .types import Body

VERSIONS: dict[str, int] = {}
"""Kinds whose body has changed since version 1; the codec has an upcaster for each step."""

IGNORABLE = frozenset(
    {"RankReportsDropped", "TokenChanged", "DeadLettersHandled", "LossFiniteAgain"}
)
"""Kinds that change no state. Their records are marked so in the log: a Unicron that does not know
such a kind passes over it. A log with another unknown kind needs the Unicron that wrote it."""

FORMER_NAMES: dict[str, str] = {
    "CopyKept": "MemoryCheckpointStored",
    "CopiesLost": "MemoryCheckpointsLost",
    "KeepCopies": "SetCheckpointStores",
    "DropCopies": "DropMemoryCheckpoints",
    "RankWentOn": "RankUnstalled",
    "RankPaced": "StepTimeChanged",
    "NodeSilenced": "NodeUnreachable",
    "NodeHeard": "NodeReachable",
    "HealingDeclined": "InMemoryRecoveryDeclined",
    "DegradedPriced": "StragglerCostEstimated",
    "OrderWithheld": "OrderSuppressed",
}
"""Kind in logs of version 0.1 -> current kind. The codec reads both names and writes the current
name; the bodies did not change."""


def _kinds(*modules: ModuleType) -> dict[str, type[Body]]:
    """The bodies that these modules define; their base classes are in types.py."""
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Body)
        and value.__module__ == module.__name__
    }


KINDS: dict[str, type[Body]] = _kinds(reports, orders, decisions)


_INCARNATION = re.compile(r"[0-9]{1,16}")


class Report(Struct, frozen=True, kw_only=True):
    """A body on its way to the log, sent at least once; (source, source_seq) is its identity.

    `source` is `node/incarnation` (at most 16 digits), `operator/<request id>` or
    `leader/<nonce>`. `occurred_s` is the reporter's clock, seconds since 1970.
    """

    source: str
    source_seq: int
    """Its number among the source's reports, from 1."""
    occurred_s: float
    body: Body
    """What is reported."""


class Record(Struct, frozen=True, kw_only=True, gc=False):
    """One entry of the log.

    `seq` is contiguous from 1, also across epochs; `at_s` is stamped by the leader and never
    decreases. `cause` is the seq of the record that caused this one (0: none). `incident` is the
    seq of the IncidentOpened that this record belongs to (0: none). Decisions have source `heart`
    and source_seq 0.
    """

    seq: int
    epoch: int
    at_s: float
    occurred_s: float
    """The reporter's clock, seconds since 1970."""
    source: str
    """Who said it, as in Report; `heart` for decisions."""
    source_seq: int
    """Its number among the source's reports; 0 for decisions."""
    cause: int
    incident: int
    body: Body
    """What it says."""

    @property
    def kind(self) -> str:
        return type(self.body).__name__

    @property
    def v(self) -> int:
        return VERSIONS.get(self.kind, 1)


def incarnation_of(source: str) -> int | None:
    """The incarnation in an agent's source, `node/incarnation`; None for another source."""
    number = source.rpartition("/")[2]
    return int(number) if _INCARNATION.fullmatch(number) else None


def incident_of(body: Body) -> int:
    """The incident that a decision names, else 0."""
    return getattr(body, "of", 0)


def order_nodes(record: Record) -> tuple[str, ...]:
    """The nodes that an order is addressed to; empty for any other record."""
    return getattr(record.body, "nodes", ())
