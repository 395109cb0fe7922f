"""Checks invariants at every appended record, and counts what happened."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from simulated.health_checks import HealthWitness
from simulated.plans import is_small, wrong_plan, wrong_price
from state_check import check
from unicron.control_plane.decide import transition
from unicron.control_plane.fold.edits import STOPPED
from unicron.control_plane.fold.fold import fold
from unicron.control_plane.fold.stragglers import SLOWED
from unicron.control_plane.incidents.hangs import locate_hang as hang_of
from unicron.control_plane.planner import pending
from unicron.control_plane.state.cluster import ClusterState
from unicron.control_plane.state.members import is_complete
from unicron.control_plane.state.task import Task
from unicron.events.records import decisions as d
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records import types as t
from unicron.events.records.envelope import Record
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions, replica

FAULTS = ("rank killed", "node lost", "collective failed", "leader died")
SEATED = "idle/seats_given"
"""Orders that no row of the table gives: StartRank for each assigned slot."""
ROWS = (SEATED, *(f"{row.phase}/{row.on.__name__}" for row in transition.TABLE))
UNSCRIPTED = {(SEATED, "collective failed"), ("quiescing/save_not_ordered", "collective failed")}
"""Pairs that no script produces: no rank is in a generation yet, or most have left theirs.

Late deliveries still produce these pairs: a few seeds meet each of them.
"""
NUM_PLANS_MAX = 20
NUM_PRICES_MAX = 5
"""How many plans and prices are computed again per world."""


class Witness:
    """Folds the log record by record, and keeps the violations that it finds."""

    def __init__(self) -> None:
        self.state = ClusterState()
        self.violations: list[str] = []
        self.health = HealthWitness()
        self.rows: Counter[str] = Counter()
        self.hits: Counter[tuple[str, str]] = Counter()
        """(row of the table, fault) -> how often the fault struck while that row was the last."""
        self.counts: Counter[str] = Counter()
        self.row_of: dict[int, str] = {}
        """Task -> the row that was last executed for it."""
        self._settled: dict[int, list[r.Reconfigured]] = {}
        self._version: dict[tuple[int, int], tuple[int, int, int]] = {}
        """(task, rank) -> attempt, generation and step version of the rank's last Quiesced."""
        self._reached: dict[int, tuple[int, bool]] = {}
        """Task -> the highest step version of all reachable ranks at the last Reconfigure, and
        whether these ranks had the complete state between them."""
        self._lost: Counter[int] = Counter()
        self._from: dict[int, list[r.Reconfigured]] = defaultdict(list)
        """Incident -> the members' Reconfigured reports that count for the state's origin."""
        self._received_bytes: Counter[int] = Counter()
        self._resumes: Counter[int] = Counter()
        self._published: dict[int, tuple[int, int]] = {}
        self._not_acted_on: set[int] = set()
        """The deadlines at which an iteration was perhaps only slow."""

    def see(self, record: Record) -> str:
        """Check and fold the next record; returns its row of the transition table, or ""."""
        if not record.cause:
            self._all_rest(record)
        body, task = record.body, self.state.tasks.get(getattr(record.body, "task", 0))
        row = _row(self.state, task, body)
        if task is not None and row:
            self.rows[row] += 1
            self.row_of[task.id] = row
        if self.state.held and task is not None:
            self._check(record, not _forbidden(task, body), f"while {self.state.held}")
        look = LOOKS.get(type(body))
        if look is not None:
            look(self, record, body)
        wrong = self.health.before(self.state, record)
        self._check(record, not wrong, wrong)
        fold(self.state, record)
        wrong = self.health.after(self.state, record)
        self._check(record, not wrong, wrong)
        unsound = check(self.state)
        self._check(record, not unsound, "; ".join(unsound))
        return row

    def _all_rest(self, record: Record) -> None:
        """Before each report no task has a decision left: the control plane passed over none
        (`affected_tasks` in decide.py)."""
        for task in self.state.tasks.values():
            more = next(transition.next_decisions(self.state, task), None)
            self._check(record, more is None, f"comes before {more} of task {task.id}")

    def hit(self, task: int, fault: str) -> None:
        """A fault struck this task now."""
        if task in self.row_of:
            self.hits[self.row_of[task], fault] += 1

    def _check(self, record: Record, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(f"seq {record.seq} {record.kind} {what}: {record.body}")

    # --- the plan --------------------------------------------------------------------------------
    def _plan(self, record: Record, body: d.PlanChosen) -> None:
        self.counts["plans"] += 1
        if body.hot_spare is not None:
            self.counts[f"plans with a spare: {body.hot_spare.verdict}"] += 1
        if self.counts["plans by brute force"] < NUM_PLANS_MAX and is_small(body):
            self.counts["plans by brute force"] += 1
            wrong = wrong_plan(self.state, body)
            self._check(record, not wrong, wrong)

    def _waiting(self, record: Record, body: d.TaskWaiting) -> None:
        if self.counts["prices by a new plan"] == NUM_PRICES_MAX:
            return
        if self.state.starts_held:  # the tasks do not have what the plan gives them
            return
        waits = pending.explain_waiting(self.state).get(body.task)
        if waits is not None and waits.weight_from > 0:
            self.counts["prices by a new plan"] += 1
            wrong = wrong_price(self.state, body.task, waits.weight_from)
            self._check(record, not wrong, wrong)

    # --- orders ----------------------------------------------------------------------------------
    def _start(self, record: Record, body: o.StartRank) -> None:
        node = self.state.nodes[body.slot.node]
        self._check(record, not node.drained, f"on the drained node {node.name}")
        self._check(record, node.health == "healthy", f"on {node.name}, which is {node.health}")
        self._check(record, body.slot.index not in node.occupants, f"{body.slot} is taken")

    def _stop(self, record: Record, body: o.StopRank) -> None:
        """A rank that is ended as stopped was stopped for at least `stopped_s_max`."""
        rank = self.state.tasks[body.task].ranks.get(body.rank)
        if rank is not None and rank.timeout_reason == STOPPED and not rank.stopping:
            stood_s = record.at_s - rank.suspended_s if rank.is_stopped else 0.0
            self._check(record, stood_s >= self.state.policy.stopped_s_max, f"after {stood_s} s")
            self.counts["stopped ranks ended"] += 1
        if rank is not None and rank.timeout_reason == SLOWED and not rank.stopping:
            self.counts["slow ranks ended"] += 1

    def _deadline(self, record: Record, body: r.DeadlineReached) -> None:
        """A hang is acted on only after every reachable member has stalled for long enough."""
        what, *of = body.deadline.split("/")
        task = self.state.tasks.get(int(of[0])) if what == "hang" else None
        if task is None or record.at_s < self.state.deadlines[body.deadline].due_s:
            return
        silent = {node.name for node in self.state.nodes.values() if node.unreachable}
        ranks = [
            rank
            for rank in task.living_members()
            if not rank.is_stopped and rank.slot.node not in silent
        ]
        hang = hang_of(self.state, task)
        self._check(record, hang is not None and int(of[1]) == task.generation, "without a hang")
        assert hang is not None
        if not hang.is_actionable:  # the deadline is of a hang that was another one then
            self._not_acted_on.add(record.seq)
            return
        going = {rank.rank for rank in ranks if rank.rank not in task.stalls}
        self._check(
            record,
            going == (set(hang.ranks) if hang.kind == "slow" else set()),
            "while members make progress",
        )
        for number in going:
            crawl = task.slow_iterations[number]
            least_s = max(10 * crawl.normal_s, self.state.policy.hang_s_min)
            self._check(
                record,
                crawl.own_s >= least_s and crawl.iteration >= task.iteration,
                "of an iteration that may only be slow",
            )
        stalls = {rank.rank: task.stalls[rank.rank] for rank in ranks if rank.rank not in going}
        own = [number for number, stall in stalls.items() if stall.where == "own"]
        self._check(
            record,
            hang.kind != "rank" or set(hang.ranks) <= set(own),
            "blames a rank that waits for others",
        )
        if hang.kind == "silent":
            self._check(
                record,
                not own and all(task.ranks[x].slot.node in silent for x in hang.ranks),
                "blames a reachable rank",
            )
        for stall in (
            stalls.values()
            if hang.kind == "silent"
            else [stalls[number] for number in hang.ranks if number not in going]
        ):
            least_s = max(3 * stall.normal_s, self.state.policy.hang_s_min)
            self._check(record, record.at_s - stall.since_s >= least_s - 0.01, "too early")
        self.counts[f"hangs found: {hang.kind}"] += 1

    def _evidence(self, record: Record, body: d.IncidentOpened | d.IncidentEscalated) -> None:
        idle = self._not_acted_on.intersection(body.evidence)
        self._check(record, not idle, f"acts on {idle}: an iteration that may only be slow")

    def _reconfigure(self, record: Record, body: o.Reconfigure) -> None:
        task = self.state.tasks[body.task]
        known = [self._known(task, number) for number in task.ranks]
        best = max(known, default=-1)
        self._settled[task.id] = []
        ranks = [rank for number, rank in task.ranks.items() if self._known(task, number) >= 0]
        self._reached[task.id] = best, is_complete(task, ranks, best)
        members = [(member.rank, member.attempt) for member in body.members]
        self._check(record, len({rank for rank, _ in members}) == len(members), "has a rank twice")

    def _known(self, task: Task, number: int) -> int:
        """The step version that a rank reported, if the rank can still be reached; else -1."""
        rank, node = task.ranks[number], self.state.nodes[task.ranks[number].slot.node]
        attempt, generation, version = self._version.get((task.id, number), (0, 0, -1))
        fit = (
            not (rank.stopping or rank.timeout_reason or rank.error_seq)
            and node.health == "healthy"
        )
        told = (attempt, generation) == (rank.attempt, task.generation)
        return version if fit and told and task.member(number) is rank else -1

    def _resume(self, record: Record, body: o.Resume) -> None:
        task, told = self.state.tasks[body.task], self._settled.get(body.task, [])
        self._check(record, len({x.step_version for x in told}) == 1, "but step versions differ")
        version = told[0].step_version
        best, is_whole = self._reached[task.id]
        self._check(
            record,
            version >= best or not is_whole,
            f"from step {version}, a member had {best}",
        )
        train = task.spec.training
        assert train is not None
        at = {member.rank: place for place, member in enumerate(task.members)}
        axes = task.axes or Axes(dp=len(task.members))
        firsts = {replica(axes, dp)[0] for dp in range(axes.dp)}
        batch = sorted(
            i
            for x in told
            if at[x.rank] in firsts
            for i in (*x.kept_micro_batches, *x.remaining_micro_batches)
        )
        for dp in range(axes.dp):
            parts = {
                (x.kept_micro_batches, x.remaining_micro_batches)
                for x in told
                if at[x.rank] in replica(axes, dp)
            }
            self._check(record, len(parts) == 1, "although a replica's members disagree")
        if task.axes is not None:
            self.counts["generations with a layout"] += 1
            self.counts["generations with members beside"] += len(task.members) > num_positions(
                axes
            )
        whole = version >= train.iterations or batch == list(range(train.num_micro_batches))
        self._check(record, whole, f"with micro-batches {batch}")
        lost = max(task.iteration - version, 0)
        self._check(record, not lost or task.incident > 0, f"lost {lost} iterations without fault")
        if task.incident:
            self._lost[task.incident] += lost
            self._resumes[task.incident] += 1
        self.counts["iterations lost"] += lost

    def _publish(self, record: Record, body: o.PublishCheckpoint) -> None:
        task = self.state.tasks[body.task]
        again = any(
            x is not None and (x.generation, x.path) == (body.generation, body.path)
            for x in (task.refused, *task.publishing.values())
        )
        self._check(record, again or body.generation == task.generation, "of a stale generation")

    # --- reports ---------------------------------------------------------------------------------
    def _quiesced(self, record: Record, body: r.Quiesced) -> None:
        self._version[body.task, body.rank] = body.attempt, body.generation, body.step_version

    def _reconfigured(self, record: Record, body: r.Reconfigured) -> None:
        task = self.state.tasks.get(body.task)
        if task is None or body.generation != task.generation or task.phase != "reconfiguring":
            return
        rank = task.member(body.rank)
        if rank is not None and rank.attempt == body.attempt:
            told = self._settled.setdefault(task.id, [])
            if all(x.rank != body.rank for x in told):
                told.append(body)
                self._received_bytes[task.incident] += body.received_bytes
                known = self._from[task.incident]
                if body.origin in ("copy", "checkpoint", "seed"):
                    known[:] = [
                        x
                        for x in known
                        if x.generation == body.generation or x.generation <= task.stepped
                    ]
                known.append(body)

    def _published_is(self, record: Record, body: r.CheckpointPublished) -> None:
        task = self.state.tasks.get(body.task)
        found = task.publishing.get(body.order) if task is not None else None
        if found is not None:
            now = found.generation, found.step_version
            self._check(record, now >= self._published.get(body.task, (0, 0)), "of an older state")
            self._published[body.task] = now

    def _failed(self, record: Record, body: r.CollectiveFailed | r.ReconfigureFailed) -> None:
        task = self.state.tasks.get(body.task)
        if task is not None and body.generation == task.generation and task.phase != "ended":
            self.hit(task.id, "collective failed")

    # --- incidents -------------------------------------------------------------------------------
    def _opened(self, record: Record, body: d.IncidentOpened) -> None:
        task = self.state.tasks.get(body.task)
        open_ = self.state.incidents.get(task.incident) if task is not None else None
        self._check(record, open_ is None or bool(open_.outcome), "while another is open")
        self._check(record, all(0 < seq < record.seq for seq in body.evidence), "has bad evidence")
        self._evidence(record, body)
        self.counts["incidents"] += 1

    def _closed(self, record: Record, body: d.IncidentClosed) -> None:
        incident = self.state.incidents.get(body.of)
        self._check(record, incident is not None and not incident.outcome, "has no open incident")
        assert incident is not None
        if not incident.task:
            self._check(
                record,
                (body.outcome, body.iterations_lost) == ("healed", 0),
                "of a node is not healed without loss",
            )
            self.counts["incidents of nodes"] += 1
            return
        train = self.state.tasks[incident.task].spec.training
        lost = body.iterations_lost
        self._check(
            record,
            train is None or lost in (None, self._lost[body.of]),
            f"but {self._lost[body.of]} iterations were lost",
        )
        told = self._from[body.of]
        self._check(
            record,
            body.ckpt_read == any(x.origin == "checkpoint" for x in told),
            "has a wrong ckpt_read",
        )
        self._check(
            record, body.received_bytes == self._received_bytes[body.of], "has wrong received_bytes"
        )
        self._check(
            record,
            not told
            or any(
                (x.origin, x.origin_node, x.step_version, x.received_bytes)
                == (body.origin, body.origin_node, body.origin_step_version, body.origin_bytes)
                for x in told
            ),
            "has a wrong origin",
        )
        self.counts[f"incidents from {body.origin}"] += 1
        most = train.num_micro_batches * self._resumes[body.of] if train is not None else 0
        if body.outcome not in ("failed", "ended"):
            self._check(
                record, 0 <= body.kept + body.dealt <= most, f"has not 0 to {most} micro-batches"
            )
            self._check(
                record,
                (body.outcome == "set back") == bool(body.iterations_lost),
                f"does not agree with {body.iterations_lost} lost iterations",
            )
        self._check(record, body.pause_s >= 0, "has a negative pause")
        self.counts[f"incidents {body.outcome}"] += 1


def _row(state: ClusterState, task: Task | None, body: t.Body) -> str:
    if task is None:
        return ""
    if isinstance(body, (o.Quiesce, o.Reconfigure, o.Resume)):
        row = transition._row(state, task)
        return f"{row.phase}/{row.on.__name__}" if row is not None else ""
    first = isinstance(body, o.StartRank) and task.heals_in_memory and not task.ranks
    return SEATED if first else ""


def _forbidden(task: Task, body: t.Body) -> bool:
    """True for an order that was not requested and that no transition in progress needs."""
    match body:
        case o.StartRank() | d.TaskPlaced():
            return True
        case o.Quiesce():
            return task.phase not in ("quiescing", "reconfiguring")
        case o.StopRank():
            rank = task.ranks.get(body.rank)
            late = rank is not None and bool(rank.timeout_reason) and task.phase != "training"
            return task.ending != "cancelled" and not task.finished and not late
        case o.Reconfigure():
            return task.phase not in ("starting", "quiescing")
        case o.Resume():
            return task.phase != "reconfiguring"
        case _:
            return False


LOOKS: dict[type[t.Body], Callable[[Witness, Record, Any], None]] = {
    d.PlanChosen: Witness._plan,
    d.TaskWaiting: Witness._waiting,
    o.StartRank: Witness._start,
    o.StopRank: Witness._stop,
    o.Reconfigure: Witness._reconfigure,
    o.Resume: Witness._resume,
    o.PublishCheckpoint: Witness._publish,
    d.IncidentOpened: Witness._opened,
    d.IncidentEscalated: Witness._evidence,
    d.IncidentClosed: Witness._closed,
    r.Quiesced: Witness._quiesced,
    r.Reconfigured: Witness._reconfigured,
    r.CheckpointPublished: Witness._published_is,
    r.DeadlineReached: Witness._deadline,
    r.CollectiveFailed: Witness._failed,
    r.ReconfigureFailed: Witness._failed,
}
