"""What happens to a cluster from outside."""

from __future__ import annotations

from typing import Literal, NamedTuple

Event = Literal["fault", "repaired", "joined", "left"]
EVENTS: dict[str, Event] = {
    "fault": "fault", "repaired": "repaired", "joined": "joined", "left": "left"}
AT_S_MAX = 1e12


class Happening(NamedTuple):
    """At `at_s` of the scenario something befalls a node.

    fault: by `cause`, a row of the paper's table. repaired: it may have tasks again, if a fault
    took it out. joined: it is there for the first time, or again after it `left`.
    """

    at_s: float
    node: str
    event: Event
    cause: str = ""
