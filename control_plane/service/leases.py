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
    """The last heartbeat of each node, by the leader's clock.

    After a time without reads (a takeover, a stall, an unreachable server), a leader cannot know
    which nodes were silent. So `grant` gives every node a full lease from then on. A node that
    other members of a task suspect (incidents/node_loss.py) has a shorter lease, `suspect_s_max`;
    for its lease, a shorter time without reads counts.
    """

    def __init__(self) -> None:
        self._last_beats: dict[str, _LastBeat] = {}
        self._granted_s = self._granted_suspect_s = self._observed_s = 0.0

    def grant(self, now_s: float) -> None:
        """Start a full lease for every node."""
        self._granted_s = self._granted_suspect_s = self._observed_s = now_s

    def observe(self, beats: Iterable[Heartbeat], now_s: float, *, pause_s: float,
                policy: Policy) -> None:
        """Read the latest heartbeats. The server, not our clock, measures their age. If a read is
        more than half a lease late (it is due after `pause_s`), leases start again."""
        late_s = now_s - self._observed_s - pause_s
        if late_s > policy.silence_s_max / 2:
            self._granted_s = now_s
        if late_s > policy.suspect_s_max / 2:
            self._granted_suspect_s = now_s
        self._observed_s = now_s
        for beat in beats:
            self._last_beats[beat.node] = _LastBeat(beat.incarnation, now_s - beat.age_s)

    def verdicts(self, state: ClusterState) -> Iterator[Body]:
        """Yield, by node, the changes at the last observation that the state does not have yet.
        Later heartbeats are unknown, so the time of the observation counts, not the present."""
        policy, now_s = state.policy, self._observed_s
        suspected = suspects(state)
        for name in sorted(state.nodes):
            node = state.nodes[name]
            if node.health == "left":
                continue
            beat = self._last_beats.get(name)
            beat_s = beat.at_s if beat and beat.incarnation == node.incarnation else 0.0
            if node.health != "healthy":
                # The heartbeat must be more recent than the shortest lease.
                if now_s - beat_s <= min(policy.silence_s_max, policy.suspect_s_max):
                    yield NodeReachable(node=name, incarnation=node.incarnation)
                continue
            is_suspect = name in suspected and policy.suspect_s_max < policy.silence_s_max
            lease_s = policy.suspect_s_max if is_suspect else policy.silence_s_max
            granted_s = self._granted_suspect_s if is_suspect else self._granted_s
            silence_s = now_s - max(beat_s, granted_s, node.since_s)
            if silence_s > lease_s:
                yield NodeUnreachable(node=name, incarnation=node.incarnation, silence_s=silence_s)
