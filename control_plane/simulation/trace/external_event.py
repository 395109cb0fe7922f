"""External events: what happens to a cluster during a simulated run."""

from typing import Literal, NamedTuple, get_args

from ....events.records.types import Body
from ..policies.policy import Costs

Event = Literal["fault", "repaired", "joined", "left"]
EVENTS: dict[str, Event] = {name: name for name in get_args(Event)}
AT_S_MAX = 1e12


class ExternalEvent(NamedTuple):
    """An event of a node, at `at_s` of the scenario. The `cause` of a fault is a row of the paper's
    table. A fault may hit a single process, on `slot` of the node, or with `rank` in `task`. Such a
    fault does not drain the node."""

    at_s: float
    node: str
    event: Event
    cause: str = ""
    task: str = ""
    rank: int = -1
    slot: int = -1
    num_slots: int = 0
    """Of a node that joins. 0: as in the scenario; a new node has as many as the largest there."""
    detected_in_s: float = -1.0
    """Time until the fault is reported; negative: the policy's time for its cause."""
    peers_detect_in_s: float = -1.0
    """Time until peers report the node's loss; negative: the time until the fault is reported."""


class OperatorRequest(NamedTuple):
    """An operator's request, or a new policy file. `task`: the name of the task it is about."""

    at_s: float
    body: Body
    task: str = ""


class NodeReport(NamedTuple):
    """A report by the node, or by the leader about the node, in its current incarnation."""

    at_s: float
    node: str
    body: Body


class CostChange(NamedTuple):
    """From `at_s` on, the steps of the policy take the durations in `costs`."""

    at_s: float
    costs: Costs


AnyEvent = ExternalEvent | OperatorRequest | NodeReport | CostChange


def causes_loss(one: AnyEvent) -> bool:
    """Whether this event can cause a loss. Losses until a repair are attributed to the fault."""
    return not isinstance(one, CostChange) and not (
        isinstance(one, ExternalEvent) and one.event in ("joined", "repaired")
    )
