"""Leases of the nodes: heartbeats become NodeSilenced or NodeHeard, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from ..events.log import Beat
from ..events.reports import Body, NodeHeard, NodeSilenced
from .state import ClusterState


class _Heard(Struct, frozen=True):
    incarnation: int
    at_s: float


class Leases:
    """Who was heard when, in the leader's own seconds.

    A leader that did not look for a while (a takeover, a stall, a server out of reach) cannot
    tell silence from its own deafness: `grant` gives every node a full lease from that moment.
    """

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._granted_s = self._looked_s = 0.0

    def grant(self, now_s: float) -> None:
        """Every node counts as heard now."""
        self._granted_s = self._looked_s = now_s

    def observe(self, beats: Iterable[Beat], now_s: float, *, late_s_max: float) -> None:
        """Take in the newest heartbeats; their age is the server's, not a matter of our clock.

        Looking `late_s_max` after the last look counts as deafness.
        """
        if now_s - self._looked_s > late_s_max:
            self._granted_s = now_s
        self._looked_s = now_s
        for beat in beats:
            self._heard[beat.node] = _Heard(beat.incarnation, now_s - beat.age_s)

    def verdicts(self, state: ClusterState) -> Iterator[Body]:
        """What the heartbeats said at the last look that the state does not know, by node.

        Never what they may be saying since: nobody has listened.
        """
        lease_s, now_s = state.policy.silence_s_max, self._looked_s
        for name in sorted(state.nodes):
            node = state.nodes[name]
            if node.health == "left":
                continue
            heard = self._heard.get(name)
            beat_s = heard.at_s if heard and heard.incarnation == node.incarnation else 0.0
            if node.health != "healthy":
                if now_s - beat_s <= lease_s:
                    yield NodeHeard(node=name, incarnation=node.incarnation)
                continue
            silence_s = now_s - max(beat_s, self._granted_s, node.since_s)
            if silence_s > lease_s:
                yield NodeSilenced(node=name, incarnation=node.incarnation, silence_s=silence_s)
