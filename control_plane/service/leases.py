"""Leases of the nodes: heartbeats become NodeUnreachable or NodeReachable, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from ...events.log.port import Beat
from ...events.records.reports import NodeReachable, NodeUnreachable
from ...events.records.types import Body
from ...events.spec.policy import Policy
from ..incidents.node_loss import suspects
from ..state.cluster import ClusterState


class _Heard(Struct, frozen=True):
    incarnation: int
    at_s: float


class Leases:
    """Who was heard when, in the leader's own seconds.

    A leader that did not look for a while (a takeover, a stall, a server out of reach) cannot
    tell silence from its own deafness: `grant` gives every node a full lease from that moment.

    A node at which a task's other members point (suspicion.py) has a shorter one,
    `suspect_s_max`, and for that a shorter deafness counts.
    """

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._granted_s = self._granted_short_s = self._looked_s = 0.0

    def grant(self, now_s: float) -> None:
        """Every node counts as heard now."""
        self._granted_s = self._granted_short_s = self._looked_s = now_s

    def observe(self, beats: Iterable[Beat], now_s: float, *, pause_s: float,
                policy: Policy) -> None:
        """Take in the newest heartbeats; their age is the server's, not a matter of our clock.

        Looking half a lease later than `pause_s` after the last look counts as deafness.
        """
        late_s = now_s - self._looked_s - pause_s
        if late_s > policy.silence_s_max / 2:
            self._granted_s = now_s
        if late_s > policy.suspect_s_max / 2:
            self._granted_short_s = now_s
        self._looked_s = now_s
        for beat in beats:
            self._heard[beat.node] = _Heard(beat.incarnation, now_s - beat.age_s)

    def verdicts(self, state: ClusterState) -> Iterator[Body]:
        """What the heartbeats said at the last look that the state does not know, by node.

        Never what they may be saying since: nobody has listened.
        """
        policy, now_s = state.policy, self._looked_s
        suspected = suspects(state)
        for name in sorted(state.nodes):
            node = state.nodes[name]
            if node.health == "left":
                continue
            heard = self._heard.get(name)
            beat_s = heard.at_s if heard and heard.incarnation == node.incarnation else 0.0
            if node.health != "healthy":
                # By a beat so fresh that it came after what any lease has called silence.
                if now_s - beat_s <= min(policy.silence_s_max, policy.suspect_s_max):
                    yield NodeReachable(node=name, incarnation=node.incarnation)
                continue
            short = name in suspected and policy.suspect_s_max < policy.silence_s_max
            lease_s = policy.suspect_s_max if short else policy.silence_s_max
            granted_s = self._granted_short_s if short else self._granted_s
            silence_s = now_s - max(beat_s, granted_s, node.since_s)
            if silence_s > lease_s:
                yield NodeUnreachable(node=name, incarnation=node.incarnation, silence_s=silence_s)
