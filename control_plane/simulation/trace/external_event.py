"""External events: what happens to a cluster during a simulated run."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from ....events.records.types import Body
from ..policies.policy import Costs

Event = Literal["fault", "repaired", "joined", "left"]
EVENTS: dict[str, Event] = {name: name for name in get_args(Event)}
AT_S_MAX = 1e12


class ExternalEvent(NamedTuple):
    """An event of a node, at `at_s` of the scenario.

    fault: with `cause`, a row of the paper's table. repaired: the node is available again after a
    fault. joined: the node is new, or back. A fault may concern one process, on `slot` of the node
    or with `rank` of `task`; the node is then not drained.
    """

    at_s: float
    node: str
    event: Event
    cause: str = ""
    task: str = ""
    rank: int = -1
    slot: int = -1
    num_slots: int = 0
    """Of a node that joins; 0: as the other nodes."""
    detected_in_s: float = -1.0
    """Time until the fault is reported; negative: the policy's time for its cause."""
    peers_detect_in_s: float = -1.0
    """Time until peers of a lost node report; negative: as `detected_in_s`."""


class OperatorRequest(NamedTuple):
    """An operator's request, about the task of this name; or a new policy file."""

    at_s: float
    body: Body
    task: str = ""


class NodeReport(NamedTuple):
    """A report by the node, or by the leader about the node, in its current incarnation."""

    at_s: float
    node: str
    body: Body


class CostChange(NamedTuple):
    """From now on the steps of the policy have these durations."""

    at_s: float
    costs: Costs


AnyEvent = ExternalEvent | OperatorRequest | NodeReport | CostChange


def causes_loss(one: AnyEvent) -> bool:
    """Whether losses may be attributed to it. The time until a repair belongs to the fault."""
    return not isinstance(one, CostChange) and not (
        isinstance(one, ExternalEvent) and one.event in ("joined", "repaired"))
