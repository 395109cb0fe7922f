"""What happens to a cluster from outside."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ....events.records.types import Body
from ..policies.policy import Costs

Event = Literal["fault", "repaired", "joined", "left"]
EVENTS: dict[str, Event] = {
    "fault": "fault", "repaired": "repaired", "joined": "joined", "left": "left"}
AT_S_MAX = 1e12


class Happening(NamedTuple):
    """At `at_s` of the scenario something befalls a node.

    fault: by `cause`, a row of the paper's table. repaired: it may have tasks again, if a fault
    took it out. joined: it is there for the first time, or again. A fault may be of one process: of
    whoever is on `slot`, or of `rank` of a task; the site then does nothing of its own.
    """

    at_s: float
    node: str
    event: Event
    cause: str = ""
    task: str = ""
    rank: int = -1
    slot: int = -1
    num_slots: int = 0
    """Of a node that joins; 0: as the others."""
    told_in_s: float = -1.0
    """Until the fault is told; below 0: as long as the policy takes for its cause."""
    seen_in_s: float = -1.0
    """Until peers of a lost node tell what they see; below 0: as long."""


class Asked(NamedTuple):
    """An operator's request, of the task of that name; or another policy."""

    at_s: float
    body: Body
    task: str = ""


class Said(NamedTuple):
    """The node says so of itself, or the leader of the node: whatever its incarnation is then."""

    at_s: float
    node: str
    body: Body


class Takes(NamedTuple):
    """From now on the steps of the policy take so long."""

    at_s: float
    costs: Costs


Anything = Happening | Asked | Said | Takes


def is_felt(one: Anything) -> bool:
    """Whether losses may be laid to it; those until a node is back are laid to what took it."""
    return not isinstance(one, Takes) and not (
        isinstance(one, Happening) and one.event in ("joined", "repaired"))
