"""What befell a cluster, by its log: faults of the world and requests, without what followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ....events.records import decisions as d
from ....events.records import orders as o
from ....events.records import reports as r
from ....events.records.envelope import Record
from ....events.records.statuses import LOST_CONNECTION, OTHER_NETWORK
from ....events.spec import policy
from ...incidents.severity import TABLE
from ...state.cluster import ClusterState
from ...state.incident import Fault
from ..accounting import Key
from ..trace.external_event import Asked, Happening, Said

HARM_S = 10.0
"""What somebody broke on purpose shows within this time."""
REQUESTS = (r.TaskCancelRequested, r.TaskWeightSet, r.HealingFrozen, r.HealingResumed,
            r.NodeDrained, r.NodeUndrained, r.QuarantineLifted)


class Stroke(NamedTuple):
    """At `at_s` processes were gone, or stood: one, or all of a node. Record `seq` tells of it.

    `generation`: of a collective that failed in it; the process lives.
    """

    at_s: float
    seq: int
    node: str
    key: Key = (0, -1, 0)
    generation: int = 0


class Silence(NamedTuple):
    """A node that was silenced, until it is heard again, comes back, or the log ends."""

    from_s: float
    told_s: float
    seq: int
    tasks: tuple[int, ...]
    body: r.NodeUnreachable


class Befallen(NamedTuple):
    """Times are the log's. `num_hearsay` faults were only told by others. `behind_s`: how far each
    node's clock is behind the leader's, at least."""

    strokes: list[Stroke]
    happenings: list[Happening | Asked | Said]
    num_hearsay: int
    behind_s: dict[str, float]


class Befell:
    """Is shown each record of a log, folded, before what is decided upon it (replay.verify)."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """Of tasks; where another had it before, with a number."""
        self._found: list[Happening | Asked | Said] = []
        self._strokes: list[tuple[Stroke, str]] = []
        """And whose clock says when."""
        self._behind_s: dict[str, float] = {}
        """By node, as they will be told."""
        self._faults: list[tuple[Stroke, str, Fault, float]] = []
        self._silent: dict[str, Silence] = {}
        self._lost: list[Silence] = []
        self._told_s: dict[int, float] = {}
        """When collectives that failed were told of, by seq."""
        self._up: dict[str, int] = {}
        self._harmed: dict[Key | str, float] = {}
        self._failed: dict[int, Stroke] = {}
        """Collectives, by seq."""
        self._rounds: set[tuple[int, int]] = set()
        self._stops_s: dict[Key, float] = {}
        """When processes were told to end."""
        self._num_hearsay = 0
        self._policy: policy.Policy | None = None

    def see(self, state: ClusterState, record: Record) -> None:
        """The next record."""
        body, node = record.body, record.source.rpartition("/")[0]
        if record.source != "heart" and record.source_seq and not node.startswith(
                ("leader", "operator")):
            behind_s = record.at_s - record.occurred_s
            self._behind_s[node] = min(self._behind_s.get(node, behind_s), behind_s)
        match body:
            case r.TaskSubmitted():
                self._found.append(Asked(record.at_s, body, self._name(record.seq, body)))
            case r.NodeJoined():
                self._joined(state, record, body)
            case r.NodeLeft() if body.node in self._up:
                del self._up[body.node]
                self._found.append(Happening(record.at_s, body.node, "left"))
            case r.NodeUnreachable():
                self._silenced(state, record, body)
            case r.NodeReachable() if body.node in self._silent:
                was = self._silent.pop(body.node)
                self._found += [Said(was.told_s, body.node, was.body),
                                Said(record.at_s, body.node, body)]
            case r.HealthChanged() | r.DeviceErred():
                self._found.append(Said(record.at_s, body.node, body))
            case r.PolicySet():
                if self._policy not in (None, body.policy):
                    self._found.append(Asked(record.at_s, body))
                self._policy = body.policy
            case o.InjectFault():
                self._harmed[(body.task, body.rank, body.attempt) if body.what != "node"
                             else body.nodes[0]] = record.at_s
            case r.CollectiveFailed():
                self._collective(state, record, body, node)
            case o.StopRank():
                self._stops_s.setdefault((body.task, body.rank, body.attempt), record.at_s)
            case r.RankExited():
                key = (body.task, body.rank, body.attempt)
                at_s = record.occurred_s + self._behind_s.get(node, 0.0)
                if at_s < self._stops_s.get(key, at_s) and body.task in state.tasks:
                    self._strokes.append((Stroke(record.occurred_s, record.seq, "", key), node))
            case d.IncidentOpened():
                self._opened(record, body)
            case d.TaskEnded() if body.outcome != "cancelled":
                self._found.append(Asked(record.at_s, r.TaskCancelRequested(
                    task=body.task, reason=body.outcome), self.names.get(body.task, "")))
            case _ if isinstance(body, REQUESTS):
                self._found.append(Asked(record.at_s, body,
                                         self.names.get(getattr(body, "task", 0), "")))
            case _:
                pass
        if record.source != "heart":
            self._see_faults(state, record, node)

    def _name(self, number: int, body: r.TaskSubmitted) -> str:
        name, num = body.spec.name, 1
        while name in self.names.values():
            num += 1
            name = f"{body.spec.name}.{num}"
        self.names[number] = name
        return name

    # --- nodes ----------------------------------------------------------------------------------
    def _joined(self, state: ClusterState, record: Record, body: r.NodeJoined) -> None:
        name, silence = body.node, self._silent.pop(body.node, None)
        if silence is not None:
            self._lost.append(silence)
        elif self._up.get(name, body.incarnation) < body.incarnation:  # its agent ended, unseen
            faults = [fault for task in state.tasks.values() for fault in task.faults
                      if record.seq in fault.evidence]
            at_s = min((fault.at_s for fault in faults), default=record.at_s)
            at_s = max(at_s, self._harmed.get(name, at_s))
            self._strokes.append((Stroke(at_s, record.seq, name), ""))
            self._found.append(Happening(at_s, name, "fault", LOST_CONNECTION,
                                         told_in_s=record.at_s - at_s))
        self._up[name] = body.incarnation
        self._found.append(Happening(record.at_s, name, "joined", num_slots=body.num_slots))

    def _silenced(self, state: ClusterState, record: Record, body: r.NodeUnreachable) -> None:
        from_s = max(record.at_s - body.silence_s, self._harmed.get(body.node, 0.0))
        tasks = tuple(task.id for task in state.tasks.values()
                      if any(rank.slot.node == body.node for rank in task.ranks.values()))
        self._silent[body.node] = Silence(from_s, record.at_s, record.seq, tasks, body)

    # --- processes ------------------------------------------------------------------------------
    def _collective(self, state: ClusterState, record: Record, body: r.CollectiveFailed,
                    node: str) -> None:
        if body.task in state.tasks:
            stroke = Stroke(record.occurred_s, record.seq, "", (
                body.task, body.rank, body.attempt), body.generation)
            self._failed[record.seq], self._told_s[record.seq] = stroke, record.at_s
            self._strokes.append((stroke, node))

    def _see_faults(self, state: ClusterState, record: Record, node: str) -> None:
        number = getattr(record.body, "task", 0)
        if isinstance(record.body, r.NodeJoined):
            return
        tasks = ([state.tasks[number]] if number in state.tasks else
                 state.tasks.values() if isinstance(record.body, r.DeadlineReached) else ())
        for task in tasks:
            for fault in task.faults:
                if fault.evidence[-1] == record.seq:
                    self._fault(state, record, task.id, fault, node)

    def _fault(self, state: ClusterState, record: Record, number: int, fault: Fault,
               node: str) -> None:
        task = state.tasks[number]
        failed = [self._failed[seq] for seq in fault.evidence if seq in self._failed]
        if isinstance(record.body, r.DeadlineReached) and fault.second_hand and failed:
            self._network(failed, fault.status, fault.node)
            return
        if not task.heals_in_memory:  # what takes one process of it takes the others with it
            if (number, task.rounds) in self._rounds:
                return
            self._rounds.add((number, task.rounds))
        if fault.second_hand:
            self._num_hearsay += 1
            return
        told_late = isinstance(record.body, r.DeadlineReached)
        for rank in fault.ranks:
            attempt = getattr(record.body, "attempt", 0) or task.attempts.get(rank, 0)
            key = (number, rank, attempt)
            at_s = fault.at_s if told_late else record.occurred_s
            harmed_s = self._harmed.pop(key, None)
            if harmed_s is not None and record.at_s - harmed_s < HARM_S:
                at_s, told_late = harmed_s, True
            stroke = Stroke(at_s, record.seq, "", key)
            self._strokes.append((stroke, "" if told_late else node))
            if rank == fault.ranks[0] or TABLE.get(fault.status) != "SEV3":  # else all saw the same
                self._faults.append((stroke, "" if told_late else node, fault, record.at_s))

    def _opened(self, record: Record, body: d.IncidentOpened) -> None:
        failed = [self._failed[seq] for seq in body.evidence if seq in self._failed]
        if body.severity == "SEV3" and failed and len(failed) == len(body.evidence):
            self._network(failed, body.status, body.node)

    def _network(self, failed: list[Stroke], status: str, node: str) -> None:
        """A collective failed, and nothing else did."""
        first = min(failed)
        for one in failed:
            self._failed.pop(one.seq, None)
        told = Fault(ranks=(first.key[1],), node=node, status=status or OTHER_NETWORK, why="",
                     evidence=(first.seq,), at_s=first.at_s, hurts=True, ended=False)
        whose = next((node for stroke, node in self._strokes if stroke == first), "")
        self._faults.append((first, whose, told, -1.0))

    # --- all of it --------------------------------------------------------------------------------
    def _dated(self) -> Iterator[tuple[Stroke, float]]:
        """By the leader's clock."""
        for stroke, node in self._strokes:
            yield stroke, stroke.at_s + self._behind_s.get(node, 0.0)

    def _gone(self, silence: Silence) -> tuple[Stroke, Happening]:
        """A node that was lost: since the first sign of it."""
        name = silence.body.node
        signs = sorted((at_s, stroke.seq) for stroke, at_s in self._dated()
                       if stroke.key[0] in silence.tasks
                       and silence.from_s <= at_s <= silence.told_s)
        at_s, seq = signs[0] if signs else (silence.from_s, 0)
        return Stroke(at_s, silence.seq, name), Happening(
            at_s, name, "fault", LOST_CONNECTION, told_in_s=silence.told_s - at_s,
            seen_in_s=max(self._told_s.get(seq, at_s) - at_s, 0.0) if seq else -1.0)

    def all(self) -> Befallen:
        """When the log has been read."""
        gone = [self._gone(one) for one in (*self._lost, *self._silent.values())]
        happenings = [*self._found, *(one for _, one in gone)]
        for stroke, node, fault, told_s in self._faults:
            at_s = stroke.at_s + self._behind_s.get(node, 0.0)
            happenings.append(Happening(
                at_s, fault.node, "fault",
                fault.status if fault.status in TABLE else OTHER_NETWORK,
                task=self.names.get(stroke.key[0], ""), rank=stroke.key[1],
                told_in_s=max(told_s - at_s, 0.0) if told_s >= 0 else -1.0))
        strokes = sorted([*(stroke._replace(at_s=at_s) for stroke, at_s in self._dated()),
                          *(stroke for stroke, _ in gone)])
        return Befallen(strokes, sorted(happenings, key=lambda one: one.at_s), self._num_hearsay,
                        self._behind_s)
