"""How many of a task's slots step, read from records: since when none does, and until when."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

Plain = dict[str, Any]
INCIDENT = ("IncidentOpened", "IncidentEscalated")


class Stepping(Struct):
    """One task: none steps from a fault or a quiesce to the first iteration. Times in s."""

    num_seats: int = 0
    """Of its last placement."""
    num: int = 0
    """Slots that step now."""
    members: dict[int, int] = field(default_factory=dict[int, int])
    """The newest generation: rank -> attempt."""
    settled: int = 0
    """The step version that its newest generation went on from."""
    resumed: int = 0
    """The generation that was told to train; 0: none is."""
    stopped_s: float = 0.0
    """When it last stopped."""
    suspended_s: dict[int, float] = field(default_factory=dict[int, float])
    """Rank -> since when this member's process stands still."""
    stalled: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    """Member that passes no mark -> the seq of what told so, and since when."""
    failed_seq: int = 0
    """The first collective that failed since it was told to train; 0: none did."""

    def read(self, record: Plain) -> float:
        """Take note of the task's next record: slots x s that it shows not to have stepped, though
        they were taken to step."""
        kind, body, at_s = record["kind"], record["body"], float(record["at_s"])
        if kind == "CollectiveFailed" and body["generation"] == self.resumed:
            self.failed_seq = self.failed_seq or record["seq"]
        if kind == "RankSuspended" and self.members.get(body["rank"]) == body["attempt"]:
            self.suspended_s[body["rank"]] = at_s
        elif kind == "RankContinued":
            self.suspended_s.pop(body["rank"], None)
        elif kind == "RankStalled" and self.members.get(body["rank"]) == body["attempt"]:
            in_s = min(max(body["in_s"], 0.0), at_s)
            self.stalled[body["rank"]] = record["seq"], at_s - in_s
        elif kind == "RankUnstalled":
            self.stalled.pop(body["rank"], None)
        if self._stops(kind, body) and (self.resumed or self.num):
            num, self.num, self.resumed = self.num, 0, 0
            self.stopped_s = self._since_s(kind, body, at_s)
            return num * (at_s - self.stopped_s)
        if kind == "TaskPlaced":
            self.num_seats = len(body["seats"])
        elif kind == "Reconfigure":
            self.members = {one["rank"]: one["attempt"] for one in body["members"]}
            self.suspended_s, self.stalled = {}, {}
        elif kind == "Reconfigured":
            self.settled = body["step_version"]
        elif kind == "Resume":
            self.resumed, self.failed_seq = body["generation"], 0
        elif (kind == "TaskProgressed" and self.resumed == body["generation"]
              and told_to(body) > self.settled):
            self.num = len(self.members)
        return 0.0

    def _stops(self, kind: str, body: Plain) -> bool:
        if kind == "IncidentEscalated":
            return bool(self.stood_s(body))
        return (kind in ("Quiesced", "CollectiveFailed", "TaskEnded")
                or (kind == "Quiesce" and body["mode"] == "now")
                or (kind == "IncidentOpened" and any(x in self.members for x in body["ranks"]))
                or (kind in ("RankExited", "RankErrored")
                    and self.members.get(body["rank"]) == body["attempt"]))

    def stood_s(self, incident: Plain) -> list[float]:
        """Since when those stand whom an incident names, and its evidence tells to stand."""
        return [since_s for rank, (seq, since_s) in self.stalled.items()
                if rank in incident["ranks"] and seq in incident["evidence"]]

    def _since_s(self, kind: str, body: Plain, at_s: float) -> float:
        stood_s = self.stood_s(body) if kind in INCIDENT else []
        return min([at_s, *self.suspended_s.values(), *stood_s])


def told_to(progressed: Plain) -> int:
    """How many iterations are done by this TaskProgressed, which may tell old ones again."""
    return int(progressed["first_iteration"]) + len(progressed["losses"])
