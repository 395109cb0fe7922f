"""`incident`: one incident as facts: evidence, decision, plans, effects, cost, what is left."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from ...control_plane.incidents.severity import severity_of
from ...control_plane.planner.alternative_names import OTHERS_WAIT_NUM
from ...control_plane.state.incident import NUM_EVIDENCE_MAX
from ...events.errors import UsageError
from ..cluster.client import connect
from ..cluster.state_dir import StateDir
from ..history.history import History, IncidentHistory, TaskHistory, slot_s
from ..history.incident_records import Began, Story, began, story
from ..history.transitions import moves
from ..screens import incident as incident_screen
from ..screens.incident import folders, name_of
from ..screens.nodes import node_trouble, why_quarantined
from ..screens.plan import bound_by, not_taken
from ..terminal import console
from ..terminal.format import plan_waf, way_to_act
from ..terminal.record_line import essentials, status_in_words
from .request_outcome import hidden
from .tail import incident_id
from .tasks import option_for

Plain = dict[str, Any]
NEWEST_NUM = 5
PHASES = (("detect", "fault_s", "detected_s"), ("decide", "detected_s", "decided_s"),
          ("rebuild", "decided_s", "resumed_s"), ("step", "resumed_s", "stepped_s"),
          ("full", "stepped_s", "closed_s"))
"""Name, from when, until when. `full`: from the first iteration to full strength."""
HELD_PHASES = (*PHASES[:2], ("held", "decided_s", "ordered_s"),
               ("rebuild", "ordered_s", "resumed_s"), *PHASES[3:])


def incident(state: StateDir, url: str | None, which: str, *, every: bool, as_json: bool) -> None:
    """Print one incident's page, the newest without `which`, or the list. Raises UsageError."""
    if which and every:
        raise UsageError("an ID and --all do not go together", "give one of the two")
    option = option_for(state)
    if which:  # nonsense, or a task's name, is told before anybody is asked
        incident_id(which, f"for example inc-41; all, and whose they are: unicron incident "
                           f"--all{option}")
    client = connect(state, url)
    told = History()
    for record in client.records(0, follow=False):
        told.add(record)
    now_s = time.time()
    if every:
        say_all(told, now_s=now_s, as_json=as_json, option=option)
        return
    one = pick(told, which)
    if one is None:
        console.out(json.dumps(None) if as_json else incident_screen.NONE)
        return
    show(told, one, client.records(0, follow=False), view=client.get("/v1/state"), now_s=now_s,
         log=f"--live{option}", option=option, as_json=as_json)


def say_all(told: History, *, now_s: float, as_json: bool, option: str) -> None:
    """Print all incidents of a log, the newest last."""
    if as_json:
        console.out(json.dumps([{**msgspec.to_builtins(one), "slot_s": slot_s(told, one, now_s)}
                            for one in told.incidents.values()]))
        return
    for line in incident_screen.every(told, now_s=now_s, option=option):
        console.out(line)


def pick(told: History, which: str) -> IncidentHistory | None:
    """The incident of that id, or the newest; None where there is none at all.

    Raises UsageError naming the newest ones.
    """
    number = incident_id(which) if which else max(told.incidents, default=0)
    if number in told.incidents or not which:
        return told.incidents.get(number)
    newest = [f"inc-{key}" for key in sorted(told.incidents, reverse=True)[:NEWEST_NUM]]
    raise UsageError(f"no incident {which!r}", f"the newest: {', '.join(newest)}" if newest
                     else "there are none: nothing has failed so far")


def show(told: History, one: IncidentHistory, records: Iterable[Plain], *, view: Plain,
         now_s: float, log: str, as_json: bool, option: str) -> None:
    """Print the page. `records` is the log once more, from its start; `log` is how to name it."""
    found = story(one, records, told_later(one, view))
    facts = facts_of(told, found, view, now_s=now_s, option=option)
    seq = one.closed_seq or told.seq
    facts["verify"] = f"unicron replay {log} --until {seq} --verify"
    if as_json:
        console.out(json.dumps(facts))
        return
    for line in incident_screen.page(facts, option=option):
        console.out(line)


def told_later(one: IncidentHistory, view: Plain) -> list[int]:
    """What the state joined to the incident after it was decided upon, by seq."""
    return [seq for x in view["incidents"] if x["id"] == one.id
            for seq in x["evidence"] if seq not in one.evidence]


def facts_of(told: History, found: Story, view: Plain, *, now_s: float,
             option: str = "") -> Plain:
    """All that the page tells, as plain data; times in s since 1970, `after_s` since detection."""
    one = found.incident
    task = told.tasks.get(one.task)
    evidence = [x for x in found.records if x["seq"] in {*one.evidence, *found.later}]
    first = began(one, evidence)
    decisions = [x for x in found.records if x["kind"] in ("IncidentOpened", "IncidentEscalated")]
    return {
        "id": one.id, "task": one.task,
        "name": name_of(told, one.task) if one.task else f"node {one.node}",
        "node": one.node, "ranks": list(one.ranks), "status": one.status,
        "severity": one.severity, "outcome": one.outcome, "detected_s": one.detected_s,
        "closed_s": one.closed_s, "seq": told.seq, "over": bool(task is not None and task.outcome),
        "cost": {"pause_s": one.pause_s, "iterations_lost": one.iterations_lost,
                 "slot_s": slot_s(told, one, now_s), "kept": one.kept, "dealt": one.dealt,
                 "ckpt_read": one.ckpt_read, "origin": one.origin,
                 "origin_node": one.origin_node, "origin_path": one.origin_path,
                 "origin_step_version": one.origin_step_version,
                 "origin_bytes": one.origin_bytes, "peer_bytes": one.peer_bytes,
                 "near_bytes": one.near_bytes, "received_bytes": one.received_bytes},
        "layouts": one.layouts, "lost": one.lost, "optimizer": one.optimizer,
        "copies_gone": [_event(told, one, x) for x in found.gone],
        "no_copies": found.no_copies,
        "phases": phases(one, max((x["body"]["silence_s"] for x in evidence
                                   if x["kind"] == "NodeUnreachable"
                                   and x["at_s"] <= one.detected_s), default=0.0),
                         stood=_stood(one, evidence), began=first,
                         held=any(x["kind"] == "OrderSuppressed" and x["body"]["task"] == one.task
                                  for x in found.records)),
        "on_purpose": [{"seq": x.seq, "what": x.what} for x in told.on_purpose.behind(
            task=one.task, ranks=one.ranks, node=one.node,
            first_seq=one.first_seq, last_seq=max([one.id, *one.evidence]))],
        "began": msgspec.to_builtins(first),
        "evidence": [{**_event(told, one, x), "later": x["seq"] in found.later} for x in evidence],
        "evidence_is_cut": len(one.evidence) + len(found.later) >= NUM_EVIDENCE_MAX,
        "decisions": [{"seq": x["seq"], "severity": x["body"]["severity"],
                       "why": x["body"]["why"], "rule": rule(x)} for x in decisions],
        "plans": [_plan(told, x) for x in found.records if x["kind"] == "PlanChosen"],
        "effects": [*([_hurt(told, found, now_s)] if one.task else []),
                    *(_other(told, key, found) for key in found.others)],
        "dumps": folders(found.started.values(), view["nodes"]) if task is not None and (
            task.num_iterations and any(x["kind"] == "RankStalled" for x in evidence)) else [],
        "timeline": [_event(told, one, x) for x in found.records],
        "left": left(one, task, found, view, option),
    }


STOOD = {"stopped": "stopped", "hang": "stood", "printed": "stood"}
"""Deadlines that give who stands a time to go on -> the name of that phase."""


def _stood(one: IncidentHistory, evidence: list[Plain]) -> tuple[str, float]:
    """Until when who stood was given to go on, with the phase's name; "" where that was no fault.
    """
    due = [(STOOD[name], float(x["at_s"])) for x in evidence if x["kind"] == "DeadlineReached"
           and (name := x["body"]["deadline"].partition("/")[0]) in STOOD
           and x["at_s"] <= one.decided_s]
    return due[0] if due else ("", 0.0)


def phases(one: IncidentHistory, silence_s: float = 0.0, *, stood: tuple[str, float] = ("", 0.0),
           began: Began | None = None, held: bool = False) -> list[Plain]:
    """How long each phase took; those that the incident has not reached are left out.

    `silence_s`: a node's that was not heard of, by which the fault was detected; it takes the place
    of the detection. `stood`: until when who stood had time to go on, which is no part of deciding.
    `began`: what is known of the begin; where nothing is, there is no detection to tell of.
    `held`: orders were withheld, which is no part of rebuilding.
    """
    found: list[Plain] = []
    for name, from_, to in HELD_PHASES if held else PHASES:
        from_s, to_s = getattr(one, from_), getattr(one, to)
        if from_s is not None and to_s is not None and to_s >= from_s:
            found.append({"name": name, "from_s": from_s, "length_s": to_s - from_s, "bound": ""})
    if silence_s:
        silent = _phase("silent", one.detected_s - silence_s, one.detected_s)
        found = [silent, *(x for x in found if x["name"] != "detect")]
    elif began is not None and began.bound:
        told = _phase("detect", one.detected_s - began.length_s, one.detected_s, began.bound)
        found = [*([told] if began.bound != "unknown" else []),
                 *(x for x in found if x["name"] != "detect")]
    name, until_s = stood
    if name:
        parts = [_phase(name, one.detected_s, until_s), _phase("decide", until_s, one.decided_s)]
        found = [y for x in found for y in (parts if x["name"] == "decide" else [x])]
    return [x for x in found if x["name"] != "full" or x["length_s"] > 0]


def _phase(name: str, from_s: float, to_s: float, bound: str = "") -> Plain:
    return {"name": name, "from_s": from_s, "length_s": to_s - from_s, "bound": bound}


def rule(record: Plain) -> str:
    """Why a decision has the severity that it has."""
    body = record["body"]
    if record["kind"] == "IncidentEscalated":
        return "more of the same incident"
    by_table, status = severity_of(body["status"]), status_in_words(body["status"])
    if by_table == body["severity"]:
        return f"{status!r} is {by_table}"
    return (f"{status!r} is {by_table}, but a process ended or reattempts did not help: "
            f"{body['severity']}")


def _event(told: History, one: IncidentHistory, record: Plain) -> Plain:
    body = record["body"]
    task = body.get("task", 0)
    return {"seq": record["seq"], "after_s": record["at_s"] - one.detected_s,
            "who": _who(record), "kind": record["kind"],
            "task": task, "name": name_of(told, task) if task else "",
            "other": task not in (0, one.task), "what": essentials(record["kind"], body),
            "alike": " ".join([record["kind"], *(str(body.get(key)) for key in ALIKE.get(
                record["kind"], ()))]) if record["kind"] in ALIKE else str(record["seq"])}


ALIKE = {"CollectiveFailed": ("task", "generation", "status"),
         "RankStalled": ("task", "where", "iteration", "collective"),
         "DeviceErred": ("node", "origin", "rule", "devices"),
         "HealthChanged": ("node", "check", "health", "devices")}
"""Kinds of which many tell the same, with what is the same then."""


def _who(record: Plain) -> str:
    """The node that told it, or which part of the control plane."""
    if record["source"] != "heart":
        return str(record["source"].partition("/")[0])
    if record["body"].get("nodes"):
        return "order"
    return "plan" if record["kind"] in ("PlanChosen", "TaskPlaced", "TaskWaiting") else "decide"


def _plan(told: History, record: Plain) -> Plain:
    body = record["body"]
    given = body["allocations"]
    return {"seq": record["seq"], "trigger": body["trigger"], "num_slots": body["num_slots"],
            "waf": plan_waf(body), "ideal_waf": body.get("ideal_waf", 0.0),
            "why": body.get("why", ""), "bound": bound_by(
                body, {x["task"]: name_of(told, x["task"]) for x in given}),
            "origins": [name for one in told.plans if one.seq == record["seq"]
                        for name in one.origins],
            "slots": {name_of(told, x["task"]): [x["slots_before"], x["slots"]] for x in given},
            "beaten": [{"what": x["what"], "waf": plan_waf({**body, "waf": x["waf"]}),
                        "by": _by(x, body),
                        "slots": {name_of(told, task): slots for task, slots in x["slots"]}}
                       for x in body["alternatives"]]}


def _by(beaten: Plain, plan: Plain) -> str:
    """What spoke against a plan that was beaten: its WAF, what its changes cost, or nothing."""
    if beaten["objective"] == plan["objective"]:
        return "a tie, which the first task wins"
    if plan.get("alpha"):
        return ("others wait" if beaten["objective"] == OTHERS_WAIT_NUM else
                f"is worth {'less' if beaten['objective'] < plan['objective'] else 'more'} "
                f"by alpha-fairness {plan['alpha']:g}")
    if beaten["waf"] < plan["waf"]:
        return f"earns less{hidden(beaten['waf'], plan['waf'])}"
    if beaten["objective"] > plan["objective"]:
        return f"gains{not_taken(plan, beaten['what'], ' less than gain_min asks for')}"
    return "its changes cost more than they earn"


def _hurt(told: History, found: Story, now_s: float) -> Plain:
    one = found.incident
    placed = [len(x["body"]["seats"]) for x in found.records
              if x["kind"] == "TaskPlaced" and x["body"]["task"] == one.task]
    return {"task": name_of(told, one.task), "hurt": True,
            "slots_before": one.num_slots, "slots": placed[-1] if placed else one.num_slots,
            "pause_s": one.pause_s, "iterations_lost": one.iterations_lost,
            "slot_s": slot_s(told, one, now_s)}


def _other(told: History, task: int, found: Story) -> Plain:
    """What the story cost a task that no fault had hurt; while it waits, that is not known yet."""
    records = [x for x in found.records if x["body"].get("task") == task]
    placed = [len(x["body"]["seats"]) for x in records if x["kind"] == "TaskPlaced"]
    given = [x for record in found.records if record["kind"] == "PlanChosen"
             for x in record["body"]["allocations"] if x["task"] == task]
    slots_before = given[0]["slots_before"] if given else 0
    mine = moves([*found.before.get(task, []), *records])
    left_seq, resumed_seq = (max((x["seq"] for x in records if x["kind"] == kind), default=0)
                             for kind in ("Quiesced", "Resume"))
    waits = left_seq > resumed_seq  # until later plans give it slots
    pause_s = None if waits else math.fsum(one.still_s for one in mine)
    return {"task": name_of(told, task), "hurt": False, "slots_before": slots_before,
            "slots": placed[-1] if placed else slots_before, "pause_s": pause_s,
            "iterations_lost": max((one.lost for one in mine), default=0),
            "slot_s": None if pause_s is None else pause_s * slots_before}


def left(one: IncidentHistory, task: TaskHistory | None, found: Story, view: Plain,
         option: str) -> list[str]:
    """What a person has to do, as things are now; empty: nothing."""
    words: list[str] = []
    evidence = [x for x in found.records if x["seq"] in one.evidence]
    touched = {one.node, *(x["body"].get("node", _who(x)) for x in evidence)}
    words += [f"{node['id']} {trouble}" for node in view["nodes"]
              if node["id"] in touched and (trouble := node_trouble(node, option=option))]
    words += [f"{node['id']} {kept}" for node in view["nodes"]
              if node["id"] in touched and (kept := why_quarantined(node, option))]
    healing = view["cluster"]["healing"]
    if one.outcome == "open" and healing != "on":
        what = (f"healing is {healing}" if healing.startswith("frozen") else
                "Unicron only observes: what would be done is in "
                f"unicron status{option}, to have it done")
        words.append(f"{what}: {way_to_act(healing, option)}")
    if one.outcome == "failed" and task is not None:
        words.append(f"{task.name} failed ({task.why}): unicron logs {task.id}{option}, mend it, "
                     "submit it again")
    return words
