"""Nodes that were lost or rebooted, each with the incidents of all its tasks as one event."""

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct, field

from ...events.records import reports as r
from ...events.records.envelope import Record
from ...events.words import rfc3339, span

What = Literal["left", "lost", "agent started again", "rebooted", "whole cluster rebooted"]
NODES_NUM_MAX = 4
"""Nodes that are listed; more are counted."""


class NodeLoss(Struct, kw_only=True):
    """An absence of a node, or a new incarnation without one. Nodes that reboot at the same time
    share one. Times in s since 1970."""

    id: int
    """The seq of its first record."""
    what: What
    nodes: list[str]
    since_s: float
    back_s: float = 0.0
    """When the last node was back; 0: it is still away. `first_back_s`: the first."""
    first_back_s: float = 0.0
    seqs: list[int] = field(default_factory=list[int])
    """Records that begin or end it: incidents rest on them."""
    incidents: list[int] = field(default_factory=list[int])

    @property
    def in_words(self) -> str:
        """What happened to which nodes, since when and for how long they were away."""
        many = len(self.nodes) > NODES_NUM_MAX
        who = f"{len(self.nodes)} nodes" if many else " ".join(self.nodes)
        length = f" for {span(self.back_s - self.since_s)}" if self.back_s else ""
        return f"{self.what}: {who}, away{length} since {rfc3339(self.since_s)[:19]}Z"


class NodeLosses(Struct):
    """All absences of nodes in a log, and the present ones by node."""

    losses: list[NodeLoss] = field(default_factory=list[NodeLoss])
    away: dict[str, NodeLoss] = field(default_factory=dict[str, NodeLoss])
    joined: dict[str, r.NodeJoined] = field(default_factory=dict[str, r.NodeJoined])
    reboot: NodeLoss | None = None
    """The last one."""
    epoch_s: float = 0.0
    unled_s: float = 0.0
    """The time of the last record before this epoch."""

    def add(self, record: Record, before_s: float, lease_s: float) -> None:
        """`before_s`: the time of the record before it. `lease_s`: that of a node's lease."""
        body, at_s = record.body, record.at_s
        if isinstance(body, r.EpochStarted):
            self.epoch_s, self.unled_s = at_s, before_s
        if not isinstance(body, r.NodeJoined | r.NodeUnreachable | r.NodeLeft | r.NodeReachable):
            return
        known = self.joined.get(body.node)
        if isinstance(body, r.NodeJoined):
            if known is None or known.incarnation < body.incarnation:
                self.joined[body.node] = body
            if known is not None and known.incarnation < body.incarnation:
                unseen_s = at_s if at_s > self.epoch_s + lease_s else self.unled_s
                self._back(
                    self._lose(record, body.node, "agent started again", unseen_s),
                    record,
                    is_reboot=known.boot_id != body.boot_id != "" != known.boot_id,
                )
        elif known is None or known.incarnation != body.incarnation:
            return
        elif isinstance(body, r.NodeReachable) and (loss := self.away.pop(body.node, None)):
            loss.back_s = at_s
        elif isinstance(body, r.NodeUnreachable):
            self._lose(record, body.node, "lost", at_s - body.silence_s)
        elif isinstance(body, r.NodeLeft):
            self._lose(record, body.node, "left", at_s)

    def _lose(self, record: Record, node: str, what: What, since_s: float) -> NodeLoss:
        if node not in self.away:
            self.away[node] = NodeLoss(id=record.seq, what=what, nodes=[node], since_s=since_s)
            self.losses.append(self.away[node])
        self.away[node].seqs.append(record.seq)
        return self.away[node]

    def _back(self, loss: NodeLoss, record: Record, *, is_reboot: bool) -> None:
        """The node is back in a new incarnation."""
        del self.away[loss.nodes[0]]
        loss.back_s = loss.first_back_s = record.at_s
        if not is_reboot:
            return
        loss.what, all_ = "rebooted", self.reboot
        if all_ is None or loss.since_s > all_.first_back_s:
            self.reboot = loss
            return
        self.losses.remove(loss)
        all_.nodes += loss.nodes
        all_.seqs += loss.seqs
        all_.since_s, all_.back_s = min(all_.since_s, loss.since_s), record.at_s
        if self.joined.keys() - self.away.keys() <= set(all_.nodes):  # no other node was there
            all_.what = "whole cluster rebooted"

    def of_consequence(self, evidence: Mapping[int, Iterable[int]]) -> list[NodeLoss]:
        """Losses and reboots, and absences that led to incidents. An incident is with the first
        that it rests on. `evidence`: of each incident."""
        resting: dict[int, list[int]] = {}
        for key, seqs in evidence.items():
            for seq in seqs:
                resting.setdefault(seq, []).append(key)
        taken = set[int]()
        for loss in self.losses:
            loss.incidents = sorted(
                dict.fromkeys(
                    key for seq in loss.seqs for key in resting.get(seq, ()) if key not in taken
                )
            )
            taken.update(loss.incidents)
        return [
            loss
            for loss in self.losses
            if loss.incidents
            or loss.what.endswith("rebooted")
            or (loss.what == "lost" and not loss.back_s)
        ]
