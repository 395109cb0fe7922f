"""A second simulator of the restarting policies, independent of the first.

Source: docs/guides/simulate.md and the policies' own descriptions. A node is a slot. There is no
decider, record or protocol. A task trains, is stalled, waits or starts; each change is an event. It
shares only the names of events with the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from unicron.control_plane.incidents.severity import TABLE
from unicron.control_plane.simulation.policies.policy import Costs
from unicron.control_plane.simulation.trace.external_event import ExternalEvent

NODE = "lost connection"


@dataclass
class Job:
    """A task. `status`: trains; stands (stalled, not reported yet); starts; waits."""

    rates: Mapping[int, float]
    weight: float
    nodes: tuple[str, ...]
    iteration_flop: float
    full_flops: float = 0.0
    size: int = 0
    status: str = "trains"
    round: int = 0
    """Number of starts. Events of an older start are ignored."""
    alive: set[str] = field(default_factory=set[str])
    """Nodes on which a process of the task lives."""
    done_flop: float = 0.0
    kept_flop: float = 0.0
    kept_s: float = 0.0

    @property
    def rate_flops(self) -> float:
        return rate(self.rates, len(self.nodes))


def rate(rates: Mapping[int, float], num: int) -> float:
    """The throughput of the largest size that `num` nodes allow."""
    return max((flops for size, flops in rates.items() if size <= num), default=0.0)


class Second:
    """`how`: kept, moved or shrunk, as the policy says. `jobs` have their initial nodes."""

    def __init__(
        self, nodes: Sequence[str], jobs: Sequence[Job], costs: Costs, how: str, iteration_s: float
    ) -> None:
        self.nodes, self.jobs, self.costs, self.how = sorted(nodes), jobs, costs, how
        self.iteration_s = iteration_s
        self.away: set[str] = set()
        self.out: set[str] = set()
        """Nodes that the cluster knows to be out."""
        self.repaired_soon: set[str] = set()
        """Nodes with a failed device, which will be repaired."""
        self.life = dict.fromkeys(nodes, 0)
        self.lost = dict.fromkeys(
            ("detection", "transition", "waiting", "sub-healthy", "recomputed"), 0.0
        )
        self.earned = 0.0
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num = 0
        for job in jobs:
            job.size, job.full_flops = len(job.nodes), job.rate_flops
            job.alive = set(job.nodes)

    def play(self, happenings: Sequence[ExternalEvent], horizon_s: float) -> None:
        for one in happenings:
            self._later(one.at_s, lambda one=one: self._happens(one))
        while self._due and self._due[0][0] <= horizon_s:
            at_s, _, call = heappop(self._due)
            self._pass(at_s)
            call()
        self._pass(horizon_s)

    def _later(self, at_s: float, call: Callable[[], None]) -> None:
        self._num += 1
        heappush(self._due, (at_s, self._num, call))

    # --- what is earned -------------------------------------------------------------------------
    def _pass(self, at_s: float) -> None:
        past_s, self.now_s = at_s - self.now_s, at_s
        for job in self.jobs:
            flops = job.rate_flops if job.status == "trains" else 0.0
            self.earned += job.weight * flops * past_s
            self.lost[self._why(job)] += job.weight * (job.full_flops - flops) * past_s
            if flops:
                job.done_flop += flops * past_s
                job.kept_s += past_s
                if job.kept_s >= self.costs.checkpoint_s:
                    job.kept_s %= self.costs.checkpoint_s
                    num = (job.done_flop - flops * job.kept_s) / job.iteration_flop
                    job.kept_flop = int(num + 1e-9) * job.iteration_flop

    def _why(self, job: Job) -> str:
        if job.status == "trains":
            return "sub-healthy"
        if job.status == "stands":
            return "detection"
        return "waiting" if not job.nodes or set(job.nodes) & self.out else "transition"

    # --- what happens ---------------------------------------------------------------------------
    def _happens(self, one: ExternalEvent) -> None:
        node = one.node
        if one.event == "fault" and node not in self.away:
            told_s = self.now_s + self.costs.detection_s(one.cause, self.iteration_s)
            life = self.life[node]
            struck = [job for job in self.jobs if node in job.alive]
            for job in struck:
                self._strikes(job)
                job.alive.discard(node)
            if one.cause == NODE:
                self.away.add(node)
                self._later(told_s, lambda: self._is_lost(node, life))
            else:
                if TABLE[one.cause] == "SEV1":
                    self.repaired_soon.add(node)
                    self._later(told_s, lambda: self._is_drained(node))
                for job in struck:
                    self._later(
                        told_s, lambda job=job, round=job.round: self._told(job, round, node, life)
                    )
        elif one.event == "repaired" and (node in self.away or node in self.repaired_soon):
            for job in self.jobs:
                if node in job.alive:
                    self._strikes(job)
                    job.alive.discard(node)
            self.away.discard(node)
            self.repaired_soon.discard(node)
            self.out.discard(node)
            self.life[node] += 1
            self._tell_all(node)
            self._plan()

    def _strikes(self, job: Job) -> None:
        if job.status in ("trains", "starts"):
            job.status = "stands"

    def _told(self, job: Job, round: int, node: str, life: int) -> None:
        """The node reports the fault, if it is still up."""
        lives = node not in self.away and self.life[node] == life
        if lives and job.round == round and job.status == "stands":
            self._stop(job)
            self._plan()

    def _is_lost(self, node: str, life: int) -> None:
        if node in self.away and self.life[node] == life:
            self.out.add(node)
            self._tell_all(node)
            self._plan()

    def _is_drained(self, node: str) -> None:
        if node in self.repaired_soon:
            self.out.add(node)
            self._plan()

    def _tell_all(self, node: str) -> None:
        """The loss or return of the node is reported; tasks that stalled because of it end."""
        for job in self.jobs:
            if job.status in ("stands", "starts") and node in job.nodes and (node not in job.alive):
                self._stop(job)

    # --- what the policy makes of it --------------------------------------------------------------
    def _stop(self, job: Job) -> None:
        """All processes of the task end. A lost node cannot confirm that: it is known to be out."""
        self.out |= set(job.nodes) & self.away
        job.status, job.round, job.alive = "waits", job.round + 1, set()

    def _plan(self) -> None:
        known = -1
        while len(self.out) > known:  # again if `_stop` found a node that is out
            known = len(self.out)
            for job, seats in zip(self.jobs, self._seats(), strict=True):
                if sorted(seats) != sorted(job.nodes):
                    job.nodes = tuple(sorted(seats))
                    if job.status in ("trains", "starts", "stands"):
                        self._stop(job)
        for job in self.jobs:
            if job.status == "waits" and job.nodes and not set(job.nodes) & self.out:
                self._start(job)

    def _seats(self) -> list[list[str]]:
        left = [[node for node in job.nodes if node not in self.out] for job in self.jobs]
        taken = {node for nodes in left for node in nodes}
        free = [node for node in self.nodes if node not in taken and node not in self.out]
        if self.how != "shrunk":
            for at, job in enumerate(self.jobs):
                num = job.size - len(left[at])
                if self.how == "moved" and num <= len(free):
                    left[at], free = [*left[at], *free[:num]], free[num:]
                else:
                    left[at] = [*job.nodes]
            return left
        before: list[list[str]] = []
        while before != left:  # until the released slots are assigned
            before = [[*nodes] for nodes in left]
            for at, job in enumerate(self.jobs):
                num = job.size - len(left[at])
                found, free = [*left[at], *free[:num]], free[num:]
                most = max((size for size in job.rates if size <= len(found)), default=0)
                left[at], free = found[:most], [*free, *found[most:]]
        return left

    def _start(self, job: Job) -> None:
        job.status, job.round, round = "starts", job.round + 1, job.round + 1
        again_flop, job.done_flop, job.kept_s = job.done_flop - job.kept_flop, job.kept_flop, 0.0
        self.earned -= job.weight * again_flop
        self.lost["recomputed"] += job.weight * again_flop
        job.alive = {node for node in job.nodes if node not in self.away}
        if len(job.alive) == len(job.nodes):  # else a node is lost, not yet reported
            self._later(self.now_s + self.costs.start_s, lambda: self._is_up(job, round))

    def _is_up(self, job: Job, round: int) -> None:
        if job.round == round and job.status == "starts":
            job.status = "trains"


class Heals:
    """One task that continues with the surviving members. Faults are far apart: each recovery ends
    before the next fault, except for nodes that stay away.

    A fault stops the task until its detection, and for one regrouping without the lost member. A
    new or returning member starts beside the task. It joins at the end of an iteration, by another
    regrouping. After a failed collective without a lost member, the task waits `evidence_s` for a
    cause.
    """

    def __init__(
        self,
        rates: Mapping[int, float],
        nodes: Sequence[str],
        costs: Costs,
        iteration_s: float,
        evidence_s: float,
    ) -> None:
        self.rates, self.costs, self.iteration_s = rates, costs, iteration_s
        self.evidence_s = evidence_s
        self.size = max(rates)
        self.members, self.free = set(nodes[: self.size]), list(nodes[self.size :])
        self.away: set[str] = set()
        self.now_s = self.done_flop = self.earned = 0.0
        self.down_s = dict.fromkeys(("detection", "transition"), 0.0)
        self.joins: list[tuple[float, str]] = []

    @property
    def rate_flops(self) -> float:
        return rate(self.rates, len(self.members))

    def play(self, happenings: Sequence[ExternalEvent], horizon_s: float) -> None:
        for one in happenings:
            self._until(one.at_s)
            if one.event == "fault" and one.node in self.members:
                self._fault(one.node, one.cause)
            elif one.event == "fault" and one.cause in (NODE, "ECC errors"):
                self.away.add(one.node)
                self.free = [node for node in self.free if node != one.node]
            elif one.event == "repaired" and one.node in self.away:
                self.away.remove(one.node)
                self._offers(one.node, one.at_s)
        self._until(horizon_s)

    def _offers(self, node: str, at_s: float) -> None:
        """The node joins if the task has too few members; otherwise it is free."""
        if len(self.members) + len(self.joins) < self.size:
            self.joins.append((at_s + self.costs.start_s, node))
        else:
            self.free = sorted([*self.free, node])

    def _fault(self, node: str, cause: str) -> None:
        took_s = self.costs.detection_s(cause, self.iteration_s)
        told_s = self.now_s + took_s
        self._stands(took_s, "detection")
        if TABLE[cause] == "SEV3":
            self._stands(self.evidence_s, "transition")
        else:
            self.members.remove(node)
        if TABLE[cause] == "SEV2":
            self.joins.append((told_s + self.costs.start_s, node))
        elif TABLE[cause] == "SEV1":
            self.away.add(node)
            if self.free:
                self._offers(self.free.pop(0), told_s)
        self._stands(self.costs.quiesce_s + self.costs.regroup_s, "transition")

    def _stands(self, for_s: float, why: str) -> None:
        self.now_s += for_s
        self.down_s[why] += for_s

    def _trains(self, until_s: float) -> None:
        self.earned += self.rate_flops * (until_s - self.now_s)
        self.done_flop += self.rate_flops * (until_s - self.now_s)
        self.now_s = until_s

    def _until(self, at_s: float) -> None:
        while self.joins and self.joins[0][0] < at_s:
            ready_s, node = self.joins.pop(0)
            self._trains(max(ready_s, self.now_s))
            flop = max(self.rates.values()) * self.iteration_s
            left = flop - self.done_flop % flop
            self._trains(self.now_s + left / self.rate_flops)
            self._stands(self.costs.regroup_s, "transition")
            self.members.add(node)
        self._trains(at_s)
