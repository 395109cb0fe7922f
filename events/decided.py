"""What was decided about nodes that erred or are slow: bodies of decisions, frozen."""

from __future__ import annotations

from .reports import Body


class NodeQuarantined(Body, frozen=True):
    """The node gets no tasks until `until_s`, also when its agent joins again; `why` names what
    it did, `incidents` are those that count against it."""

    node: str
    until_s: float
    why: str
    incidents: tuple[int, ...]


class DegradedPriced(Body, frozen=True):
    """What a degraded node costs, and what it would earn to drain it; nothing is done about it.

    `tasks` run there and are slowed down, each to `1 / ratios[i]` of its pace.
    """

    node: str
    tasks: tuple[int, ...]
    ratios: tuple[float, ...]
    cost_waf: float
    """WAF that is not achieved for it, now."""
    drain_waf: float
    """How much more WAF than now the best plan without the node has; below 0: less."""
    why: str
    now_waf: float = 0.0
    """WAF that is achieved now, of which `drain_waf` is a share; 0: not told."""
