"""The facts of an incident: evidence, decision, plans, effects, cost, what is left to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from ...events.errors import UsageError
from ...events.records.codec import to_plain
from ...events.records.decisions import (
    IncidentEscalated,
    IncidentOpened,
    OrderSuppressed,
    PlanChosen,
    TaskPlaced,
    TaskWaiting,
)
from ...events.records.envelope import Record
from ...events.records.in_words import essentials, status_in_words
from ...events.records.orders import Reconfigure, Resume
from ...events.records.reports import (
    DeadlineReached,
    NodeUnreachable,
    Quiesced,
    RankStalled,
    StepTimeChanged,
)
from ...events.records.statuses import NCCL_TIMEOUT
from ...events.spec.model import Axes
from ...events.spec.parallelism import Sharding, missing_parts, num_positions, part_in_words
from ...events.words import plan_waf, ranks, span, way_to_act
from ..decide.replay import replay
from ..history.history import History, IncidentHistory
from ..history.history import history as read_history
from ..history.incident_records import IncidentRecords, incident_records
from ..incidents.severity import severity_of
from ..planner.alternative_names import NOT_COMPARABLE_NUM, bound_by, hidden, not_taken
from ..state.cluster import ClusterState, decode_state, encode_state
from ..state.incident import FARTHER, NUM_EVIDENCE_MAX, Incident
from ..state.task import Task
from . import needs
from .dry_run import explain_present_plan
from .requests import Refusal
from .view import view

Plain = dict[str, Any]
PHASES = (
    ("detect", "fault_s", "detected_s"),
    ("decide", "detected_s", "decided_s"),
    ("rebuild", "decided_s", "resumed_s"),
    ("step", "resumed_s", "stepped_s"),
    ("full", "stepped_s", "whole_s"),
)
"""Name, start, end, of the first occurrence. `full`: from the first iteration to full size."""
PAUSED_PHASES = (
    *PHASES[:2],
    ("held", "decided_s", "ordered_s"),
    ("rebuild", "ordered_s", "resumed_s"),
    *PHASES[3:],
)
RECORDS_BEFORE_NUM = 4_000
"""Records before an incident that are read for its facts: they tell of in-memory checkpoints."""
LATE_RECORDS_NUM = 1_000
"""Records after an incident's end that are read for late evidence."""
RECOVERING_RECORDS_NUM = 20_000
"""Records after an incident's end that are read for its IncidentClosed. It follows within 15
minutes, but others' records may be many."""
NEWEST_NUM = 5
PARTS_NUM_MAX = 3
"""Lost parts of the state that are listed."""


class Reading:
    """The records that the facts of one incident need, from `begin` until none is missing."""

    def __init__(self, number: int, start: bytes, shown: ClusterState) -> None:
        """`start`: the state before the first record. `shown`: as of which the facts are."""
        self._number, self._start, self._shown = number, start, shown
        self._past = read_history((), decode_state(start))
        self._records: list[Record] = []
        self._found: IncidentRecords | None = None
        self.num_missing = max(shown.seq - self.last, 0) if shown.seq >= number else 0
        """How many more records may belong to it, at most; 0: all are there."""

    @property
    def last(self) -> int:
        """The last record that was added."""
        return self._past.seq

    def add(self, records: Sequence[Record]) -> None:
        """Add the next records."""
        self._records += records
        for record in records:
            self._past.add(record)
        self.num_missing = self._shown.seq - self.last
        one = self._past.incidents.get(self._number)
        if one is None:
            self.num_missing *= self.last < self._number
        elif not self.num_missing or self._is_read(one):
            self._found = incident_records(one, self._records, decode_state(self._start))
            self.num_missing *= not self._found.is_over(self.last)

    def _is_read(self, incident: IncidentHistory) -> bool:
        """Whether what follows tells no more of the incident itself."""
        num = LATE_RECORDS_NUM if incident.ended_seq else RECOVERING_RECORDS_NUM
        return bool(incident.closed_seq) and self.last >= incident.closed_seq + num

    def facts(self, option: str, now_s: float) -> Plain:
        """The facts and waiting tasks. `option`: what commands have behind them. Raises Refusal if
        the log has no such incident."""
        past, shown, found = self._past, self._shown, self._found
        if found is None:
            newest = sorted(shown.incidents, reverse=True)[:NEWEST_NUM]
            raise Refusal(
                404,
                f"no incident {self._number} in the log",
                "the newest: " + ", ".join(f"inc-{key}" for key in newest)
                if newest
                else "there are none: nothing has failed so far",
            )
        for key, task in shown.tasks.items():
            if key in past.tasks:
                past.tasks[key].task = task

        def plan_at(seq: int) -> Plain:
            state = replay(
                takewhile(lambda one: one.seq <= seq, self._records), decode_state(self._start)
            )
            return cast(Plain, msgspec.to_builtins(explain_present_plan(encode_state(state))))

        return {
            **facts_of(past, found, view(shown, now_s=now_s), now_s=now_s, option=option),
            **waits_of(past, found, plan_at),
            "seq": shown.seq,
            "verify": f"unicron replay --live{option} --until "
            f"{found.incident.closed_seq or shown.seq} --verify",
        }


def begin(number: int, first_seq: int) -> int:
    """Behind which record to begin to read for an incident's facts. `first_seq`: of the log.
    Raises Refusal for an incident before it."""
    if 0 < number < first_seq:
        raise Refusal(
            404,
            f"incident {number} began before the log, which was pruned",
            f"the log begins at seq {first_seq}",
        )
    return max(first_seq - 1, number - RECORDS_BEFORE_NUM)


def facts_of(
    history: History, found: IncidentRecords, shown: Plain, *, now_s: float, option: str = ""
) -> Plain:
    """All facts of the page as plain data; times in s since 1970, `after_s` since detection."""
    one, known = found.incident, found.incident.incident
    task = history.tasks[one.task].task if one.task in history.tasks else None
    evidence = [x for x in found.records if x.seq in known.evidence]
    first = began(one, evidence)
    lost = (
        lost_state(one.order, one.optimizer, one.alive)
        if known.source.origin in FARTHER and one.order is not None and one.alive is not None
        else ""
    )
    return {
        "id": one.id,
        "task": one.task,
        "name": history.name_of(one.task) if one.task else f"node {known.node}",
        "node": known.node,
        "ranks": known.ranks,
        "status": known.status,
        "severity": known.severity,
        "outcome": one.outcome,
        "num_times": known.num_times,
        "until_iteration": known.until_iteration if one.outcome == "recovering" else 0,
        "detected_s": one.detected_s,
        "closed_s": one.closed_s,
        "seq": history.seq,
        "acknowledged": needs.acknowledged(msgspec.to_builtins(known)),
        "over": bool(task is not None and task.outcome),
        "cost": cost(history, one, now_s),
        "layouts": one.layouts,
        "lost": lost,
        "optimizer": one.optimizer,
        "copies_gone": [_event(history, one, x) for x in found.gone],
        "no_copies": found.no_copies,
        "phases": phases(
            one,
            _silence_s(one.detected_s, evidence),
            stalled=_stalled_until(one, evidence),
            began=first,
            paused=any(
                isinstance(x.body, OrderSuppressed) and x.body.task == one.task
                for x in found.records
            ),
        ),
        "part_of": next((x.in_words for x in history.node_losses if one.id in x.incidents), ""),
        "on_purpose": _requests_behind(history, one),
        "began": msgspec.to_builtins(first),
        "evidence": [{**_event(history, one, x), "later": x.seq in found.later} for x in evidence],
        "evidence_is_cut": len(known.evidence) >= NUM_EVIDENCE_MAX,
        "decisions": [
            {"seq": x.seq, "severity": x.body.severity, "why": x.body.why, "rule": rule(x.body)}
            for x in found.records
            if isinstance(x.body, IncidentOpened | IncidentEscalated)
        ],
        "plans": [plan_facts(history, x) for x in found.records if isinstance(x.body, PlanChosen)],
        "waits": [],
        "computed_by": 0,
        "effects": [
            *([_faulted_task(history, found, now_s)] if one.task else []),
            *(_unfaulted_task(history, key, found) for key in found.others),
        ],
        "dumps": needs.folders(one.logs, shown["nodes"]) if _has_dumps(task, evidence) else [],
        "stacks": kept_stacks(known, shown["nodes"]),
        "timeline": [_event(history, one, x) for x in found.records],
        "left": left(one, task, found, shown, option),
    }


def kept_stacks(incident: Incident, nodes: list[Plain]) -> list[Plain]:
    """What ranks did before they were ended, with the hosts that have the files."""
    hosts = {node["id"]: str(node["host"]) for node in nodes}
    return [
        {**cast(Plain, msgspec.to_builtins(rank)), "host": hosts.get(rank.node, "")}
        for rank in incident.stacks
    ]


def _requests_behind(history: History, past: IncidentHistory) -> list[Plain]:
    """The requests of operators for this fault."""
    injected = history.injected.behind(
        task=past.task,
        ranks=past.incident.ranks,
        node=past.incident.node,
        first_seq=past.first_seq,
        last_seq=max([past.id, *past.evidence]),
    )
    return [{"seq": fault.request.seq, "what": _essentials(fault.request)} for fault in injected]


def _silence_s(detected_s: float, evidence: Iterable[Record]) -> float:
    """How long the nodes had been silent on which the fault was detected; 0: none was."""
    silences_s = (
        record.body.silence_s
        for record in evidence
        if isinstance(record.body, NodeUnreachable) and record.at_s <= detected_s
    )
    return max(silences_s, default=0.0)


def _has_dumps(task: Task | None, evidence: Iterable[Record]) -> bool:
    """Ranks of `train:` that stall write dumps of their flight recorders."""
    return (
        task is not None
        and task.spec.train is not None
        and any(isinstance(record.body, RankStalled) for record in evidence)
    )


def lost_state(order: Reconfigure, optimizer: Sharding, alive: Collection[tuple[int, int]]) -> str:
    """The parts of the state that no survivor holds. `alive`: (rank, attempt) of each survivor."""
    members = order.members
    axes = order.axes or Axes(dp=len(members))
    there = [
        place
        for place, member in enumerate(members[: num_positions(axes)])
        if (member.rank, member.attempt) in alive
    ]
    parts: list[str] = []
    for places in missing_parts(axes, optimizer, there):
        part = part_in_words(axes, places[0], sharded=optimizer != "whole")
        if not part:
            return ""  # each member had the whole state: there are no parts to name
        holders = ranks(sorted({members[place].rank for place in places}))
        parts.append(f"{part} (only {holders} had it)")
    more = f" and {len(parts) - PARTS_NUM_MAX} parts more" if len(parts) > PARTS_NUM_MAX else ""
    return "; ".join(parts[:PARTS_NUM_MAX]) + more


def waits_of(history: History, found: IncidentRecords, plan_at: Callable[[int], Plain]) -> Plain:
    """The needs of the tasks that a plan of this incident left waiting: of an old log as it holds
    them, else computed as of the last TaskWaiting. `computed_by`: by which decider version, or
    0."""
    records = [(x.seq, x.body) for x in found.records if isinstance(x.body, TaskWaiting)]
    words = {body.task: f"{body.why}; needs {body.needs}" for _, body in records if body.needs}
    plan: Plain = {"computed_by": 0, "tasks": []}
    if any(body.task not in words for _, body in records):
        try:
            plan = plan_at(records[-1][0])
        except UsageError as error:
            words |= {
                body.task: f"{body.why}; what it needed is not computed: {error}"
                for _, body in records
                if body.task not in words
            }
    waiting = {body.task for _, body in records} - words.keys()
    words |= {x["task"]: x["waits"] for x in plan["tasks"] if x["waits"] and x["task"] in waiting}
    return {
        "computed_by": plan["computed_by"],
        "waits": [{"task": history.name_of(task), "waits": waits} for task, waits in words.items()],
    }


def cost(history: History, one: IncidentHistory, now_s: float) -> Plain:
    known, source = one.incident, one.incident.source
    return {
        "pause_s": one.pause_s,
        "iterations_lost": known.iterations_lost,
        "slot_s": history.slot_s(one, now_s),
        "kept": known.kept,
        "dealt": known.dealt,
        "ckpt_read": known.ckpt_read,
        "origin": source.origin,
        "origin_node": source.node,
        "origin_path": source.path,
        "origin_step_version": source.step_version,
        "origin_bytes": source.num_bytes,
        "peer_bytes": known.peer_bytes,
        "near_bytes": known.near_bytes,
        "received_bytes": known.received_bytes,
    }


STALL_PHASES = {"stopped": "stopped", "hang": "stood", "printed": "stood"}
"""The phase's name for each deadline until which a stalled task may resume."""


def _stalled_until(one: IncidentHistory, evidence: list[Record]) -> tuple[str, float]:
    """The name and the end of the phase in which a stalled task could resume, or "" and 0."""
    due = [
        (STALL_PHASES[name], x.at_s)
        for x in evidence
        if isinstance(x.body, DeadlineReached)
        and (name := x.body.deadline.partition("/")[0]) in STALL_PHASES
        and x.at_s <= one.decided_s
    ]
    return due[0] if due else ("", 0.0)


def phases(
    one: IncidentHistory,
    silence_s: float = 0.0,
    *,
    stalled: tuple[str, float] = ("", 0.0),
    began: FaultStart | None = None,
    paused: bool = False,
) -> list[Plain]:
    """The length of each phase that the incident has reached. `silence_s`: how long the node was
    unreachable before detection; this replaces `detect`. `stalled`: the name and the end of the
    phase in which a stalled task could resume; it precedes `decide`. `began`: the fault's start; if
    it is unknown, there is no `detect`. `paused`: orders were suppressed, which is a phase of its
    own."""
    found = [
        _phase(name, from_s, to_s)
        for name, from_, to in (PAUSED_PHASES if paused else PHASES)
        if (from_s := getattr(one, from_)) is not None
        and (to_s := getattr(one, to)) is not None
        and to_s >= from_s
    ]
    if silence_s:
        silent = _phase("silent", one.detected_s - silence_s, one.detected_s)
        found = [silent, *(x for x in found if x["name"] != "detect")]
    elif began is not None and began.bound:
        detect = _phase("detect", one.detected_s - began.length_s, one.detected_s, began.bound)
        found = [
            *([detect] if began.bound != "unknown" else []),
            *(x for x in found if x["name"] != "detect"),
        ]
    name, until_s = stalled
    if name:
        parts = [_phase(name, one.detected_s, until_s), _phase("decide", until_s, one.decided_s)]
        found = [y for x in found for y in (parts if x["name"] == "decide" else [x])]
    return [x for x in found if x["name"] != "full" or x["length_s"] > 0]


def _phase(name: str, from_s: float, to_s: float, bound: str = "") -> Plain:
    return {"name": name, "from_s": from_s, "length_s": to_s - from_s, "bound": bound}


def rule(body: IncidentOpened | IncidentEscalated) -> str:
    """Why a decision has its severity."""
    if isinstance(body, IncidentEscalated):
        again = f"the same fault again, the {body.num_times}. time, before it counted as healed"
        return again if body.num_times else "more of the same incident"
    by_table, status = severity_of(body.status), status_in_words(body.status)
    if by_table == body.severity:
        return f"{status!r} is {by_table}"
    return (
        f"{status!r} is {by_table}, but a process ended or reattempts did not help: {body.severity}"
    )


def _essentials(record: Record) -> str:
    data = to_plain(record)
    return essentials(data["kind"], data["body"], data["v"])


def _event(history: History, one: IncidentHistory, of: Record) -> Plain:
    record = to_plain(of)
    body: Plain = record["body"]
    task = body.get("task", 0)
    return {
        "seq": of.seq,
        "after_s": of.at_s - one.detected_s,
        "who": _who(record),
        "kind": record["kind"],
        "task": task,
        "rank": body.get("rank"),
        "name": history.name_of(task) if task else "",
        "other": task not in (0, one.task),
        "what": essentials(record["kind"], body, record["v"]),
        "alike": " ".join(
            [record["kind"], *(str(body.get(key)) for key in SAME_EVENT.get(record["kind"], ()))]
        )
        if record["kind"] in SAME_EVENT
        else str(record["seq"]),
    }


SAME_EVENT = {
    "CollectiveFailed": ("task", "generation", "status"),
    "RankStalled": ("task", "where", "iteration", "collective"),
    "DeviceErred": ("node", "origin", "rule", "devices"),
    "HealthChanged": ("node", "check", "health", "devices"),
}
"""Kinds of which several records can report one event, with the fields that identify it."""


def _who(record: Plain) -> str:
    """The node that reported the record, or the part of the control plane."""
    if record["source"] != "heart":
        return str(record["source"].partition("/")[0])
    if record["body"].get("nodes"):
        return "order"
    return "plan" if record["kind"] in ("PlanChosen", "TaskPlaced", "TaskWaiting") else "decide"


def plan_facts(history: History, record: Record) -> Plain:
    """A plan (PlanChosen) and the alternatives that it was preferred to."""
    body: Plain = to_plain(record)["body"]
    given = body["allocations"]
    return {
        "seq": record.seq,
        "trigger": body["trigger"],
        "num_slots": body["num_slots"],
        "waf": plan_waf(body),
        "ideal_waf": body.get("ideal_waf", 0.0),
        "why": body.get("why", ""),
        "bound": bound_by(body, {x["task"]: history.name_of(x["task"]) for x in given}),
        "origins": list(history.origins.get(record.seq, ())),
        "slots": {history.name_of(x["task"]): [x["slots_before"], x["slots"]] for x in given},
        "beaten": [
            {
                "what": x["what"],
                "waf": plan_waf({**body, "waf": x["waf"]}),
                "by": _by(x, body),
                "slots": {history.name_of(task): slots for task, slots in x["slots"]},
            }
            for x in body["alternatives"]
        ],
    }


def _by(beaten: Plain, plan: Plain) -> str:
    """Why an alternative was not chosen: its WAF, the cost of its changes, or a tie."""
    if beaten["objective"] == plan["objective"]:
        return "a tie, which the first task wins"
    if plan.get("alpha"):
        return (
            "not comparable: other tasks wait"
            if beaten["objective"] == NOT_COMPARABLE_NUM
            else f"is worth {'less' if beaten['objective'] < plan['objective'] else 'more'} "
            f"by alpha-fairness {plan['alpha']:g}"
        )
    if beaten["waf"] < plan["waf"]:
        return f"earns less{hidden(beaten['waf'], plan['waf'])}"
    if beaten["objective"] > plan["objective"]:
        return f"gains{not_taken(plan, beaten['what'], ' less than gain_min asks for')}"
    return "its changes cost more than they earn"


def _placed(task: int, found: IncidentRecords) -> list[int]:
    return [
        len(x.body.seats)
        for x in found.records
        if isinstance(x.body, TaskPlaced) and x.body.task == task
    ]


def _faulted_task(history: History, found: IncidentRecords, now_s: float) -> Plain:
    one, placed = found.incident, _placed(found.incident.task, found)
    return {
        "task": history.name_of(one.task),
        "hurt": True,
        "slots_before": one.num_slots,
        "slots": placed[-1] if placed else one.num_slots,
        "pause_s": one.pause_s,
        "iterations_lost": one.incident.iterations_lost,
        "slot_s": history.slot_s(one, now_s),
    }


def _unfaulted_task(history: History, task: int, found: IncidentRecords) -> Plain:
    """The cost of the incident for a task without a fault; unknown while that task waits."""
    records = [x for x in found.records if getattr(x.body, "task", 0) == task]
    placed, seqs = _placed(task, found), [x.seq for x in records]
    given = [
        x
        for record in found.records
        if isinstance(record.body, PlanChosen)
        for x in record.body.allocations
        if x.task == task
    ]
    slots_before = given[0].slots_before if given else 0
    mine = [one for one in history.transitions if one.seq in seqs]
    left_seq, resumed_seq = (
        max((x.seq for x in records if isinstance(x.body, kind)), default=0)
        for kind in (Quiesced, Resume)
    )
    waits = left_seq > resumed_seq  # a later plan gives it slots again
    pause_s = None if waits else math.fsum(one.still_s for one in mine)
    return {
        "task": history.name_of(task),
        "hurt": False,
        "slots_before": slots_before,
        "slots": placed[-1] if placed else slots_before,
        "pause_s": pause_s,
        "iterations_lost": max((one.lost for one in mine), default=0),
        "slot_s": None if pause_s is None else pause_s * slots_before,
    }


def left(
    one: IncidentHistory, task: Task | None, found: IncidentRecords, shown: Plain, option: str
) -> list[str]:
    """What an operator still has to do, one step a line."""
    words: list[str] = []
    evidence = [x for x in found.records if x.seq in one.evidence]
    touched = {
        one.incident.node,
        *(getattr(x.body, "node", x.source.partition("/")[0]) for x in evidence),
    }
    words += [
        f"{node['id']} {trouble}"
        for node in shown["nodes"]
        if node["id"] in touched and (trouble := needs.node_trouble(node, option))
    ]
    words += [
        f"{node['id']} {kept}"
        for node in shown["nodes"]
        if node["id"] in touched and (kept := needs.quarantine_reason(node, option))
    ]
    healing = shown["cluster"]["healing"]
    if one.outcome == "open" and healing != "on":
        what = (
            f"healing is {healing}"
            if healing.startswith("frozen")
            else "Unicron only observes: what would be done is in "
            f"unicron status{option}, to have it done"
        )
        words.append(f"{what}: {way_to_act(healing, option)}")
    if one.outcome == "open" and (no_room := shown["cluster"]["no_room"]):
        words.append(f"{no_room}, and no process is started: make room there")
    if task is not None and task.outcome == "failed" and one.outcome != "open":
        later = "" if one.outcome == "failed" else " later"
        words.append(
            f"{task.spec.name} failed{later} ({task.why}): "
            f"unicron logs {task.id}{option}, mend it, submit it again"
        )
    return words


# --- When a fault began, as far as the first evidence shows. ---
EXACT_KINDS = frozenset(
    {
        "RankExited",
        "RankErrored",
        "RankSuspended",
        "DeviceErred",
        "NodeUnreachable",
        "NodeJoined",
        "NodeLeft",
    }
)
"""Kinds that carry the time of the event, or how long it has lasted (NodeUnreachable)."""


class FaultStart(Struct, frozen=True):
    """How long before `detected_s` the fault began: exactly (""), at most, at least, or unknown."""

    bound: Literal["", "at most", "at least", "unknown"] = ""
    length_s: float = 0.0
    """Set if there is a bound."""
    why: str = ""


def began(one: IncidentHistory, evidence: list[Record]) -> FaultStart:
    """The start of the fault, from the records that opened the incident."""
    first = [x for x in evidence if x.seq < one.id]
    kinds = {x.kind for x in first}
    if kinds & EXACT_KINDS or not first:
        return FaultStart()
    step_times = [(x.at_s, x.body) for x in first if isinstance(x.body, StepTimeChanged)]
    slow_iterations = [(at_s, x) for at_s, x in step_times if x.num_iterations == 1]
    if slow_iterations:  # the iteration has not ended, and the rank still passes marks
        since_s = min(at_s - max(x.iteration_s, 0.0) for at_s, x in slow_iterations)
        length_s = max(one.detected_s - since_s, 0.0)
        return FaultStart(
            "at most",
            length_s,
            f"after that iteration began, {span(length_s)} "
            "before the report; the exact time is not known",
        )
    stalls = [(x.at_s, x.body) for x in first if isinstance(x.body, RankStalled)]
    if stalls:
        own = [x for x in stalls if x[1].rank in one.incident.ranks]
        return _after_last_mark(one, own or stalls)
    if step_times:
        num = step_times[0][1].num_iterations
        length_s = math.ceil(num / 2) * step_times[0][1].iteration_s
        return FaultStart(
            "at least",
            length_s,
            f"not known: of the last {num} iterations at least half were too slow",
        )
    if "HealthChanged" in kinds:
        return FaultStart("unknown", why="not known: before its check ran; checks run periodically")
    if NCCL_TIMEOUT in {one.incident.status, *(getattr(x.body, "status", "") for x in first)}:
        return FaultStart(
            "unknown",
            why="not known: a collective waited until its timeout, for what had happened before",
        )
    if kinds == {"DeadlineReached"}:
        return FaultStart("unknown", why="not known: only a missed deadline shows it")
    return FaultStart()


def _after_last_mark(one: IncidentHistory, stalls: list[tuple[float, RankStalled]]) -> FaultStart:
    """The fault began after the last progress mark of the stalled rank."""
    at_s, stall = min(stalls, key=lambda x: x[0] - max(x[1].in_s, 0.0))
    length_s = max(one.detected_s - (at_s - max(stall.in_s, 0.0)), 0.0)
    return FaultStart(
        "at most",
        length_s,
        f"after the last sign of {ranks([stall.rank])}, "
        f"{span(length_s)} before the report; the exact time is not known",
    )
