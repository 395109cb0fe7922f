"""Leases of the nodes: heartbeats become NodeUnreachable and NodeReachable reports."""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from ...events.log.port import Heartbeat
from ...events.records.reports import NodeReachable, NodeUnreachable
from ...events.records.types import Body
from ...events.spec.policy import Policy
from ..incidents.node_loss import suspects
from ..state.cluster import ClusterState
from ..state.node import Node


class _LastBeat(Struct, frozen=True):
    incarnation: int
    at_s: float
    num_spooled: int = 0


class Leases:
    """The last heartbeat of each node, by the leader's clock.

    After a time without reads (a takeover, a stall, an unreachable server), a leader cannot know
    which nodes were silent: `grant` gives each a full lease. A node that members of a task suspect
    (incidents/node_loss.py) has a shorter one, `suspect_s_max`.
    """

    def __init__(self) -> None:
        self._last_beats: dict[str, _LastBeat] = {}
        self._late: set[str] = set()
        """Nodes whose last beat was older than the shortest lease at the last observation."""
        self._granted_s = self._granted_suspect_s = self._observed_s = 0.0

    def grant(self, now_s: float) -> None:
        """Start a full lease for every node."""
        self._granted_s = self._granted_suspect_s = self._observed_s = now_s

    def observe(
        self, beats: Iterable[Heartbeat], now_s: float, *, pause_s: float, state: ClusterState
    ) -> None:
        """Read the latest heartbeats. The server, not our clock, measures their age. If a read is
        more than half a lease late (it is due after `pause_s`), leases start again."""
        policy = state.policy
        late_s = now_s - self._observed_s - pause_s
        if late_s > policy.silence_s_max / 2:
            self._granted_s = now_s
        if late_s > policy.suspect_s_max / 2:
            self._granted_suspect_s = now_s
        self._observed_s = now_s
        for beat in beats:
            self._last_beats[beat.node] = _LastBeat(
                beat.incarnation, now_s - beat.age_s, beat.num_spooled
            )
        least_s = now_s - _shortest(policy)
        self._late = {name for name, node in state.nodes.items() if self._beat_s(node) < least_s}

    def _beat_s(self, node: Node) -> float:
        """When the last heartbeat of this incarnation came; 0: none has come."""
        beat = self._last_beats.get(node.name)
        return beat.at_s if beat and beat.incarnation == node.incarnation else 0.0

    def num_spooled(self, state: ClusterState) -> int:
        """Reports that wait on the agents that have not left."""
        return sum(
            beat.num_spooled
            for name, beat in self._last_beats.items()
            if (node := state.nodes.get(name)) is not None and node.health != "left"
        )

    def verdicts(self, state: ClusterState) -> Iterator[Body]:
        """Yield, by node, the changes as of the last observation that the state does not have yet.
        Later heartbeats are unknown, so the time of the observation counts, not the present. This
        is asked after each batch of reports, so it looks only at nodes that may have a change."""
        policy, now_s = state.policy, self._observed_s
        names = self._late.union(state.unreachable)
        suspected = suspects(state) if names else ()
        for name in sorted(names):
            node = state.nodes.get(name)
            if node is None or node.health == "left":
                continue
            beat_s = self._beat_s(node)
            if node.health != "healthy":
                # The heartbeat must be more recent than the shortest lease.
                if now_s - beat_s <= _shortest(policy):
                    yield NodeReachable(node=name, incarnation=node.incarnation)
                continue
            is_suspect = name in suspected and policy.suspect_s_max < policy.silence_s_max
            lease_s = policy.suspect_s_max if is_suspect else policy.silence_s_max
            granted_s = self._granted_suspect_s if is_suspect else self._granted_s
            silence_s = now_s - max(beat_s, granted_s, node.since_s, node.away_until_s)
            if silence_s > lease_s:
                yield NodeUnreachable(node=name, incarnation=node.incarnation, silence_s=silence_s)


def _shortest(policy: Policy) -> float:
    return min(policy.silence_s_max, policy.suspect_s_max)
