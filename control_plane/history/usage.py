"""What slots were used for and what they were lost to, by UTC day: figures that add up.

Every figure follows from a record and the state before and after it. So any stretch of the log has
figures of its own, read from the state at its beginning, and those of adjoining stretches add up to
those of both. A stretch begins with a report, never between a report and its decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum

from msgspec import Struct, field

from ...events.records.decisions import IncidentOpened
from ...events.records.envelope import Record
from ...events.records.orders import Quiesce, Reconfigure, Resume, StartRank, StopRank
from ...events.records.reports import (
    IterationsLogged,
    MemoryCheckpointStored,
    Quiesced,
    RankReady,
    RankStarted,
    Reconfigured,
    TaskProgressed,
    TaskSubmitted,
)
from ..state.cluster import WORK_SPAN_S, ClusterState
from ..state.task import Task
from ..throughput.table import origin

SCHEMA = "unicron-usage-1"
"""To be raised with each change of what is counted, or of ClusterState as it is read here."""
DAY_US = 86_400_000_000
CAUSES = ("detection", "decision", "rebuild", "redone", "transition", "waiting", "unavailable")
"""What slot time is lost to (docs/guides/log-files.md, "History by day")."""
USES = ("used", "idle", *CAUSES)
"""All slot time is one of these."""
SAME_SLOTS = (
    TaskProgressed,
    IterationsLogged,
    MemoryCheckpointStored,
    RankStarted,
    RankReady,
    Quiesced,
    Reconfigured,
    StartRank,
    StopRank,
    Quiesce,
    Reconfigure,
    Resume,
)
"""The frequent records after which tasks have the same slots, and nodes as many."""
Figures = dict[str, float]
"""USES, `observed`: slot microseconds, whole numbers, so that sums are exact. `earned`, `planned`,
`ideal`: weighted FLOP. Counts: `records`, `faults`, and `incident SEVERITY STATUS`."""


class Usage(Struct):
    """Figures of a stretch of the log."""

    days: dict[int, Figures] = field(default_factory=dict[int, Figures])
    """By day since 1970."""

    def count(self, day: int, what: str, value: float) -> None:
        if value:
            figures = self.days.setdefault(day, {})
            figures[what] = figures.get(what, 0) + value

    def spread(self, what: str, rate: float, from_us: int, to_us: int) -> None:
        """Add `rate` for each microsecond, to the days that have them."""
        while rate and from_us < to_us:
            day = from_us // DAY_US
            until_us = min((day + 1) * DAY_US, to_us)
            self.count(day, what, rate * (until_us - from_us))
            from_us = until_us

    def add(self, other: Usage) -> None:
        """Add the figures of another stretch."""
        for day, figures in other.days.items():
            for what, value in figures.items():
                self.count(day, what, value)


class UsageMeter:
    """Counts for each record that the state has folded."""

    def __init__(self, state: ClusterState) -> None:
        """`state`: that before the records; the fold changes it."""
        self._state, self._usage = state, Usage()
        self._rates: dict[int, tuple[int, dict[str, float]]] = {}
        """Since when a task's slots do what; task 0: the slots of no task, and the plan's WAF."""
        self._live = dict.fromkeys(state.tasks)
        """Tasks that have not ended, in order; one that has ended until the next look."""
        self._stopped: dict[int, tuple[str, float]] = {}
        """Tasks that stopped with the last report: what their slots did before, and how many."""
        self._note()
        if state.seq:
            self._refresh(_us(state.at_s))

    def add(self, record: Record) -> None:
        """Count a record that the state has just folded."""
        state, usage, body = self._state, self._usage, record.body
        at_us = _us(record.at_s)
        day, number = at_us // DAY_US, getattr(body, "task", 0)
        if isinstance(body, TaskSubmitted):
            self._live[record.seq] = None
        if not record.cause:
            self._stopped.clear()
        usage.count(day, "records", 1)
        usage.count(day, "observed", _us(state.observed_slot_s) - self._observed_us)
        usage.count(day, "faults", state.num_faults - self._num_faults)
        if (task := state.tasks.get(number)) is not None:
            span = int(state.at_s // WORK_SPAN_S)
            usage.count(
                day,
                "earned",
                state.earned.get(span, 0.0) - (self._earned if span == self._span else 0.0),
            )
        if isinstance(body, IncidentOpened):
            usage.count(day, f"incident {body.severity} {body.status}", 1)
        if task is None or not isinstance(body, SAME_SLOTS):
            self._refresh(at_us)
        elif not isinstance(body, MemoryCheckpointStored):  # frequent, and changes no use
            self._set(number, at_us, uses(state, task))
        for key in list(self._stopped):
            self._stopped_before(key, at_us)
        self._note()

    def until_now(self) -> Usage:
        """The figures until the last record."""
        for key, (_, by_use) in list(self._rates.items()):
            self._set(key, _us(self._state.at_s), by_use)
        return self._usage

    def _note(self) -> None:
        """Keep the totals of the state, to see by how much the next record raises them."""
        state = self._state
        self._observed_us, self._num_faults = _us(state.observed_slot_s), state.num_faults
        self._span = int(state.at_s // WORK_SPAN_S)
        self._earned = state.earned.get(self._span, 0.0)

    def _refresh(self, at_us: int) -> None:
        """Look at all tasks and nodes."""
        state = self._state
        for key in list(self._live):
            task = state.tasks.get(key)
            self._set(key, at_us, uses(state, task) if task is not None else {})
            if task is None or task.phase == "ended":
                del self._live[key], self._rates[key]
        plan, tasks = state.plan, {key: state.tasks[key] for key in self._live}
        earns = (
            [
                one.waf
                for one in (*plan.allocations, *plan.kept)
                if (task := tasks.get(one.task)) is not None
                and origin(task.spec, task.throughput, task.modelled) != "nominal"
            ]
            if plan is not None
            else []
        )
        self._set(
            0,
            at_us,
            {
                **uses_of_no_task(state, tasks.values()),
                "planned": fsum(earns) / 1e6,
                "ideal": plan.ideal_waf / 1e6 if plan is not None else 0,
            },
        )

    def _set(self, key: int, at_us: int, by_use: dict[str, float]) -> None:
        """Count what the slots did until now; from now on they do `by_use`."""
        since_us, before = self._rates.get(key, (at_us, dict[str, float]()))
        for what, rate in before.items():
            self._usage.spread(what, rate, since_us, at_us)
        for what in STEPPING:
            if (num := before.get(what, 0)) and not any(map(by_use.get, STEPPING)):
                self._stopped[key] = what, num
        self._rates[key] = at_us, by_use

    def _stopped_before(self, key: int, at_us: int) -> None:
        """The task of an incident had stopped before the report that told of it."""
        task = self._state.tasks.get(key)
        incident = self._state.incidents.get(task.incident) if task is not None else None
        if incident is not None and incident.down_since_s >= 0:
            what, num = self._stopped.pop(key)
            self._detect(key, what, num, _us(incident.down_since_s), at_us)

    def _detect(self, key: int, what: str, num: float, since_us: int, at_us: int) -> None:
        """The slots of a task did `what` no longer since then: its fault was not known yet."""
        self._usage.spread(what, -num, since_us, at_us)
        self._usage.spread("detection", num, since_us, at_us)


STEPPING = ("used", "redone")


def _us(at_s: float) -> int:
    return round(at_s * 1e6)


def uses(state: ClusterState, task: Task) -> dict[str, float]:
    """What the slots of the task do now: how many of each use."""
    num = len(task.target)
    if not num or task.phase == "ended":
        return {}
    stepping = min(num_stepping(state, task), num)
    uses: dict[str, float] = {}
    if stepping:
        uses["redone" if task.iteration < task.max_iteration else "used"] = stepping
    if stepping < num:
        uses[_cause(state, task, stepping)] = num - stepping
    return uses


def uses_of_no_task(state: ClusterState, tasks: Iterable[Task]) -> dict[str, float]:
    """What the slots of no task do now; `tasks`: those that have not ended."""
    held: dict[str, set[int]] = {}
    waits = False
    for task in tasks:
        waits = waits or not (task.target or task.ending or task.finished)
        for seat in task.target:
            held.setdefault(seat.slot.node, set()).add(seat.slot.index)
    num_free = num_out = 0
    for name, node in state.nodes.items():
        mine = held.get(name, ())
        num = max(node.num_slots - len(mine), 0) if node.health != "left" else 0
        out = 0 if node.takes_tasks else num
        if node.takes_tasks and (node.slots_disabled or node.slots_unhealthy):
            out = len({*node.slots_disabled, *node.slots_unhealthy}.difference(mine))
        num_free, num_out = num_free + num - out, num_out + out
    return {"waiting" if waits else "idle": num_free, "unavailable": num_out}


def _cause(state: ClusterState, task: Task, stepping: int) -> str:
    """Why not all slots of the task step."""
    incident = state.incidents.get(task.incident)
    if (incident is None or incident.outcome) and task.failed_s < 0:
        return "transition"
    undecided = task.withheld or (
        task.heals_in_memory and task.phase == "training" and task.stepped == task.generation
    )
    return "decision" if undecided and not stepping else "rebuild"


def num_stepping(state: ClusterState, task: Task) -> int:
    """The number of the task's slots that step now. It is 0 from a fault, or from the time when the
    first member leaves the generation, until the first iteration of the next generation."""
    incident = state.incidents.get(task.incident)
    if incident is not None and incident.down_since_s >= 0:
        return 0
    if not task.heals_in_memory:
        return len(task.ranks) if task.phase == "training" else 0
    at_boundary = task.phase == "quiescing" and task.mode == "boundary"
    if task.stepped != task.generation or not (task.phase == "training" or at_boundary):
        return 0
    living = task.living_members()
    whole = (
        len(living) == len(task.members)
        and task.failed_s < 0
        and not any(
            rank.error_seq
            or rank.timeout_reason
            or (at_boundary and rank.quiesced == task.generation)
            for rank in living
        )
    )
    return len(living) if whole else 0
