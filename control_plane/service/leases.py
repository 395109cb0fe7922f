"""Leases of the nodes: heartbeats become NodeUnreachable and NodeReachable reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from ...events.log.port import Heartbeat
from ...events.records.reports import NodeReachable, NodeUnreachable
from ...events.records.types import Body
from ...events.spec.policy import Policy
from ..incidents.node_loss import suspects
from ..state.cluster import ClusterState


class _LastBeat(Struct, frozen=True):
    incarnation: int
    at_s: float


class Leases:
    """The last heartbeat of each node, in the leader's own seconds.

    A leader that has not read heartbeats for a while (a takeover, a stall, an unreachable server)
    cannot tell a silent node from its own gap: `grant` gives every node a full lease from then on.

    A node suspected by other members of a task (incidents/node_loss.py) has a shorter lease,
    `suspect_s_max`; a shorter gap then counts.
    """

    def __init__(self) -> None:
        self._last_beats: dict[str, _LastBeat] = {}
        self._granted_s = self._granted_suspect_s = self._observed_s = 0.0

    def grant(self, now_s: float) -> None:
        """Start a full lease for every node."""
        self._granted_s = self._granted_suspect_s = self._observed_s = now_s

    def observe(self, beats: Iterable[Heartbeat], now_s: float, *, pause_s: float,
                policy: Policy) -> None:
        """Read the latest heartbeats; their age is measured by the server, not by our clock. A read
        that is later than `pause_s` by half a lease counts as a gap of the leader."""
        late_s = now_s - self._observed_s - pause_s
        if late_s > policy.silence_s_max / 2:
            self._granted_s = now_s
        if late_s > policy.suspect_s_max / 2:
            self._granted_suspect_s = now_s
        self._observed_s = now_s
        for beat in beats:
            self._last_beats[beat.node] = _LastBeat(beat.incarnation, now_s - beat.age_s)

    def verdicts(self, state: ClusterState) -> Iterator[Body]:
        """Changes of nodes at the last observation that the state does not have yet, by node. Later
        heartbeats are unknown, so the time of the observation counts, not the current time."""
        policy, now_s = state.policy, self._observed_s
        suspected = suspects(state)
        for name in sorted(state.nodes):
            node = state.nodes[name]
            if node.health == "left":
                continue
            beat = self._last_beats.get(name)
            beat_s = beat.at_s if beat and beat.incarnation == node.incarnation else 0.0
            if node.health != "healthy":
                # The beat must be more recent than the shortest lease.
                if now_s - beat_s <= min(policy.silence_s_max, policy.suspect_s_max):
                    yield NodeReachable(node=name, incarnation=node.incarnation)
                continue
            is_suspect = name in suspected and policy.suspect_s_max < policy.silence_s_max
            lease_s = policy.suspect_s_max if is_suspect else policy.silence_s_max
            granted_s = self._granted_suspect_s if is_suspect else self._granted_s
            silence_s = now_s - max(beat_s, granted_s, node.since_s)
            if silence_s > lease_s:
                yield NodeUnreachable(node=name, incarnation=node.incarnation, silence_s=silence_s)
