"""One record of the log as one line: seq, time, kind, the essentials, cause.

Works on the plain data of `codec.to_plain`, so that a kind of a newer Unicron is shown too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from statistics import median
from typing import Any

from ...events.records.statuses import NCCL_TIMEOUT
from .format import (
    clipped,
    count,
    layout_briefly,
    lost_in_words,
    ms,
    plan_waf,
    ranks,
    rfc3339,
    scaled,
    span,
)

Plain = dict[str, Any]
ESSENTIALS_LENGTH_MAX = 160
_SOURCE = re.compile(r"\[[^\]\s]{1,400}\.(?:cc|cpp|cu|c|hpp|h):\d{1,6}\] ?")
"""Where a C++ library raised it, for example `[/pytorch/third_party/gloo/tcp/pair.cc:598] `."""


def line(record: Plain) -> str:
    """For example `    42 2026-11-20T03:20:07.402Z IncidentOpened    SEV2 ...  <41`."""
    body: Plain = record["body"]
    told = clipped(essentials(record["kind"], body), ESSENTIALS_LENGTH_MAX)
    cause = f"  <{record['cause']}" if record["cause"] else ""
    return f"{record['seq']:>6} {rfc3339(record['at_s'])} {record['kind']:<17} {told}{cause}"


def essentials(kind: str, body: Plain) -> str:
    """What a person needs to know of this body."""
    return ESSENTIALS.get(kind, _anything)(body)


def _anything(body: Plain) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in body.items())


def _last_line(text: str) -> str:
    """Of a traceback or of what a process printed: what it came to."""
    lines = [line for line in text.splitlines() if line.strip()]
    return " ".join(lines[-1].split()) if lines else ""


def _first_line(text: str) -> str:
    """Of an error's own words: what it is, without the advice and the frames below."""
    lines = [line for line in text.splitlines() if line.strip()]
    return " ".join(lines[0].split()) if lines else ""


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _drained_earns(waf: float) -> str:
    return (f"would earn {scaled(waf, 'FLOP/s')}" if waf >= 0 else
            f"would cost {scaled(-waf, 'FLOP/s')}")


def _meaning(body: Plain) -> str:
    """The row of the paper's table that it is of; empty where none is known."""
    if not body.get("status"):
        return ""
    from_ = ", second-hand" if body.get("second_hand") else ""
    return f" ({status_in_words(body['status'])}{from_})"


def _collective_failed(body: Plain) -> str:
    """What a library says in its own words, without the type and the source file around them."""
    said = _SOURCE.sub("", _first_line(body["error"])).removeprefix("RuntimeError: ")
    peer = body.get("peer", "")
    host, _, port = peer.rpartition(":")
    named = not peer or peer in said or (host.strip("[]") in said and port in said)
    from_ = "" if named else f", peer {peer}"
    return f"{_who(body)} iteration {body['iteration']}: {said}{_meaning(body)}{from_}"


def status_in_words(status: str) -> str:
    """A row of the paper's table, in a word that is true of any backend."""
    return "collective timeout" if status == NCCL_TIMEOUT else status


def _who(body: Plain) -> str:
    return f"task {body['task']} rank {body['rank']}.{body['attempt']}"


def _at(body: Plain) -> str:
    """A node, and the slots of it that are meant."""
    devices = " ".join(str(device) for device in body["devices"])
    return f"{body['node']}{'/' + devices if devices else ''}"


def _joined(body: Plain) -> str:
    return (f"{body['node']} {body['num_slots']} {body['accelerator']} slots, "
            f"pid {body['pid']}, at {body['host']}" + "".join(
                f", {key} {value}" for key, value in body.get("labels", {}).items() if value))


def _submitted(body: Plain) -> str:
    spec = body["spec"]
    slots, train = spec["slots"], spec.get("train")
    what = f"{train['iterations']} iterations" if train else " ".join(
        " ".join(spec["command"]).split())
    return f"{spec['name']} weight {spec['weight']:g}, {slots['min']}-{slots['max']} slots, {what}"


def _ready(body: Plain) -> str:
    return (f"{_who(body)} at {body['endpoint']}, {scaled(body['num_params'], ' parameters')}, "
            f"{scaled(body['state_bytes'], 'B')} of state")


def _exited(body: Plain) -> str:
    how = (f"signal {body['signal']}" if body["signal"] is not None
           else f"exit code {body['exit_code']}")
    why = body.get("cause") or (_last_line(body["tail"]) if body["exit_code"] else "")
    how = "" if why.startswith(how) else f" {how}"  # the cause may begin with it
    return f"{_who(body)} pid {body['pid']}{how}{_meaning(body)}{_because(why)}"


def _quiesced(body: Plain) -> str:
    return (f"{_who(body)} left generation {body['generation']} at step {body['step_version']}, "
            f"keeps {len(body['micro_batches'])} micro-batches, "
            f"{body['buckets_reduced']} of {body['num_buckets']} buckets reduced")


def _reconfigured(body: Plain) -> str:
    got = scaled(body["received_bytes"], "B")
    from_ = {"copy": f"{got} from a copy on {body.get('origin_node')}",
             "checkpoint": f"{got} from the checkpoint"}.get(
        body.get("origin", ""), {body["rank"]: "own state", -1: "no state yet"}.get(
            body["source"], f"{got} from rank {body['source']}"))
    return (f"{_who(body)} generation {body['generation']} step {body['step_version']}, "
            f"{from_}, kept {len(body['kept'])} todo {len(body['todo'])} "
            f"dealt {len(body['dealt'])}, {ms(body['down_s'] + body['up_s'] + body['settle_s'])}")


def _progressed(body: Plain) -> str:
    first, num = body["first_iteration"], len(body["losses"])
    if not num:
        return f"task {body['task']} iteration {first}"
    last = f"-{first + num - 1}" if num > 1 else ""
    return (f"task {body['task']} iteration {first}{last} loss {body['losses'][-1]:.4f}, "
            f"{span(median(body['step_s']))} each, {scaled(body['rate_flops'], 'FLOP/s')}")


def _logged(body: Plain) -> str:
    of = f" of {count(body['iterations'])}" if body["iterations"] else ""
    loss = "" if body.get("loss") is None else f" loss {body['loss']:.4f}"
    each = f"{span(body['step_s'])} each"
    num = f" (of {count(body['num_iterations'])})" if body["num_iterations"] else " (warming up)"
    batch = f", global batch {count(body['global_batch'])}" if body.get("global_batch") else ""
    lost = "".join(f", {count(body[key])} {key}" for key in ("skipped", "nan") if body.get(key))
    return f"{_who(body)} iteration {count(body['iteration'])}{of}{loss}, {each}{num}{batch}{lost}"


def _opened(body: Plain) -> str:
    where = [f"task {body['task']}"] if body["task"] else []
    where += [ranks(body["ranks"])] if body["ranks"] else []
    where += [body["node"]] if body["node"] else []
    status = status_in_words(body["status"])
    return f"{body['severity']} {status}, {' '.join(where)}: {body['why']}"


def _closed(body: Plain) -> str:
    lost = lost_in_words(body["iterations_lost"], is_over=body["outcome"] in ("failed", "ended"))
    return (f"inc-{body['of']} {body['outcome']}, pause {ms(body['pause_s'])}, {lost}, "
            f"kept {body['kept']} dealt {body['dealt']}"
            f"{', ' if (whence_ := whence(body)) else ''}{whence_}{_because(body['why'])}")


def whence(told: Plain) -> str:
    """Where the state came from that no member had kept, and how much; empty: a member had it.

    `told` is an IncidentClosed, or what the page of an incident says of its cost.
    """
    got = scaled(told.get("origin_bytes", 0), "B")
    of = f", of iteration {count(told.get('origin_step_version', 0))}"
    passed_on = told.get("peer_bytes", 0)
    more = f"; {scaled(passed_on, 'B')} from peers" if passed_on else ""
    near = told.get("near_bytes", 0)
    more += f", {scaled(near, 'B')} of it on the same node" if near else ""
    words = {"copy": f"{got} from a copy on {told.get('origin_node')}{of}{more}",
             "checkpoint": f"{got} from the checkpoint {told.get('origin_path')}{of}{more}",
             "seed": "begun again from the seed"}.get(told.get("origin", ""), "")
    return words or ("a checkpoint was read" if told["ckpt_read"] else "")


def _plan(body: Plain) -> str:
    gives = " ".join(f"{one['task']}:{one['slots']}" for one in body["allocations"])
    beaten = body["alternatives"][0] if body["alternatives"] else None
    beat = f"; beat {beaten['what']}: {scaled(beaten['waf'], 'FLOP/s')}" if beaten else ""
    if why := body.get("why"):
        beat = f"; {why}; bound by {body['bound']}" if body["bound"] != "nothing" else f"; {why}"
    ideal = body.get("ideal_waf", 0.0)
    share = f", {100 * plan_waf(body) / ideal:.0f} % of ideal" if ideal else ""
    kept = " ".join(f"{one['task']}:{one['slots']}" for one in body.get("kept", ()))
    alone = f", left alone {kept}" if kept else ""
    return (f"{body['trigger']}: {body['num_slots']} slots, task:slots {gives or 'none'}{alone}, "
            f"WAF {scaled(plan_waf(body), 'FLOP/s')}{share}{beat}")


def _placed(body: Plain) -> str:
    seats = " ".join(f"{seat['rank']}@{seat['slot']['node']}/{seat['slot']['index']}"
                     for seat in body["seats"])
    return f"task {body['task']} {seats or 'no seats'}: {body['why']}"


def _start(body: Plain) -> str:
    return f"{_who(body)} on {body['slot']['node']}/{body['slot']['index']}"


def _reconfigure(body: Plain) -> str:
    members = ranks(member["rank"] for member in body["members"])
    copies = body.get("copies")
    last = body["checkpoint"] or "the seed"
    tries = f", tries copies on {_nodes(copies)}, then {last}" if copies else ""
    return (f"task {body['task']} generation {body['generation']}: {members}, "
            f"{layout_briefly(body)}{tries}")


def _nodes(there: list[Plain]) -> str:
    return " ".join(dict.fromkeys(one["node"] for one in there)) or "nobody"


def _switches(policy: Plain) -> str:
    return ((", OBSERVING" if policy.get("observe") else "")
            + (", faults may be injected" if policy.get("allow_inject") else ""))


def _fault(body: Plain) -> str:
    """What is broken on purpose: asked for, or ordered."""
    if body["what"] == "node":
        return f"kill the agent of {body.get('node') or ' '.join(body['nodes'])} and its ranks"
    who = _who(body) if "attempt" in body else f"task {body['task']} rank {body['rank']}"
    if body["what"] == "rank":
        return f"kill {who}"
    return f"stop {who} for {span(body['stop_s']) if body['stop_s'] else 'good'}"


ESSENTIALS: dict[str, Callable[[Plain], str]] = {
    "EpochStarted": lambda b: f"heart {b['heart']}, code {b['code']}",
    "PolicySet": lambda b: f"silence {b['policy']['silence_s_max']:g} s, "
                           f"{b['policy']['restarts_max']} restarts{_switches(b['policy'])}",
    "DeadlineReached": lambda b: str(b["deadline"]),
    "NodeUnreachable": lambda b: f"{b['node']} silent for {span(b['silence_s'])}",
    "NodeReachable": lambda b: f"{b['node']} heard again",
    "TaskSubmitted": _submitted,
    "TaskCancelRequested": lambda b: f"task {b['task']}{_because(b['reason'])}",
    "TaskWeightSet": lambda b: f"task {b['task']} weight {b['weight']:g}{_because(b['reason'])}",
    "HealingFrozen": lambda b: f"healing is held{_because(b['reason'])}",
    "HealingResumed": lambda b: f"healing is held no longer{_because(b['reason'])}",
    "NodeDrained": lambda b: f"{b['node']} shall be empty{_because(b['reason'])}",
    "NodeUndrained": lambda b: f"{b['node']} may have tasks again{_because(b['reason'])}",
    "FaultRequested": lambda b: f"{_fault(b)}{_because(b['reason'])}",
    "NodeJoined": _joined,
    "NodeLeft": lambda b: f"{b['node']}: {b['reason']}",
    "MemoryCheckpointsLost": lambda b: f"{b['node']} has no copies any more"
                                       f"{' of task ' + str(b['task']) if b['task'] else ''}"
                                       f"{_because(b['why'])}",
    "ReportsLost": lambda b: f"{b['node']} lost {b['num_lost']} reports",
    "OrderRefused": lambda b: f"{b['node']} refused order {b['order']}: {b['why']}",
    "RankStarted": lambda b: f"{_who(b)} on {b['node']}, pid {b['pid']}",
    "RankReady": _ready,
    "InMemoryRecoveryDeclined": lambda b: f"{_who(b)} cannot heal in memory: {b['why']}",
    "RankErrored": lambda b: f"{_who(b)} iteration {b['iteration']}: {b['error']}{_meaning(b)}: "
                             f"{_last_line(b['text'])}",
    "RankExited": _exited,
    "RankSuspended": lambda b: f"{_who(b)} pid {b['pid']} is stopped",
    "RankContinued": lambda b: f"{_who(b)} pid {b['pid']} runs again",
    "CollectiveFailed": _collective_failed,
    "Quiesced": _quiesced,
    "Reconfigured": _reconfigured,
    "ReconfigureFailed": lambda b: f"{_who(b)} generation {b['generation']}: "
                                   f"{_first_line(b['error'])}",
    "TaskProgressed": _progressed, "IterationsLogged": _logged,
    "LossNotFinite": lambda b: f"task {b['task']} iteration {b['iteration']}: loss {b['text']}",
    "MemoryCheckpointStored": lambda b: f"{_who(b)} step {b['step_version']}, "
                                        f"{scaled(b['copy_bytes'], 'B')} in memory on {b['node']}",
    "CheckpointSaved": lambda b: f"task {b['task']} step {b['step_version']}, "
                                 f"{scaled(b['ckpt_bytes'], 'B')}, {b['path']}"
                                 f"{', final' if b['final'] else ''}",
    "CheckpointPublished": lambda b: f"task {b['task']} {b['path']}",
    "RankFinished": lambda b: f"{_who(b)} at step {b['step_version']}, "
                              f"{b['forward_calls']} forward calls",
    "HealthChanged": lambda b: f"{_at(b)} {b['check']} {b['health']}{_because(b['why'])}",
    "DeviceErred": lambda b: f"{_at(b)} {b['status']} ({b['rule']}): {_first_line(b['text'])}",
    "RankStalled": lambda b: f"{_who(b)} iteration {b['iteration']}: {b['what']} for "
                             f"{span(b['in_s'])}, an iteration takes {span(b['normal_s'])}",
    "RankUnstalled": lambda b: f"{_who(b)} iteration {b['iteration']}, "
                               f"stalled for {span(b['stalled_s'])}",
    "StepTimeChanged": lambda b: f"{_who(b)} works {span(b['own_s'])} of {span(b['iteration_s'])} "
                                 f"an iteration, at first {span(b['normal_s'])}",
    "QuarantineLifted": lambda b: f"{b['node']} is no longer quarantined{_because(b['reason'])}",
    "NodeQuarantined": lambda b: f"{b['node']} until {rfc3339(b['until_s'])}: {b['why']}",
    "StragglerCostEstimated": lambda b: f"{b['node']} costs {scaled(b['cost_waf'], 'FLOP/s')}, "
                                        f"draining it {_drained_earns(b['drain_waf'])}: "
                                        f"{b['why']}",
    "IncidentOpened": _opened,
    "IncidentEscalated": lambda b: f"inc-{b['of']} {b['severity']} {ranks(b['ranks'])}: {b['why']}",
    "IncidentClosed": _closed,
    "ThroughputSet": lambda b: f"task {b['task']} {b['origin']}: " + " ".join(
        f"{size}:{scaled(rate, 'FLOP/s').replace(' ', '')}"
        for size, rate in zip(b["sizes"], b["rates_flops"], strict=False)),
    "PlanChosen": _plan,
    "TaskPlaced": _placed,
    "TaskWaiting": lambda b: f"task {b['task']} {b['why']}"
                             + (f"; needs {b['needs']}" if b.get("needs") else ""),
    "OrderSuppressed": lambda b: f"task {b['task']} {b['what'] or 'nothing any more'}"
                                 f"{_because(b['why'])}",
    "TaskEnded": lambda b: f"task {b['task']} {b['outcome']}{_because(b['why'])}",
    "StartRank": _start,
    "StopRank": lambda b: f"{_who(b)} grace {span(b['grace_s'])}: {b['why']}",
    "Quiesce": lambda b: f"task {b['task']} generation {b['generation']} {b['mode']}, "
                         f"{ranks(b['ranks'])}{', saved first' if b.get('save') else ''}",
    "Reconfigure": _reconfigure,
    "SetCheckpointStores": lambda b: f"task {b['task']} generation {b['generation']}: copies to "
                                     f"{_nodes(b['keepers'])}",
    "DropMemoryCheckpoints": lambda b: f"task {b['task']} is over, on {' '.join(b['nodes'])}",
    "Resume": lambda b: f"task {b['task']} generation {b['generation']} "
                        f"tells progress from iteration {b['progress_from']}",
    "PublishCheckpoint": lambda b: f"task {b['task']} {b['path']}",
    "InjectFault": lambda b: f"on purpose: {_fault(b)}",
}


def concerns(record: Plain, *, kinds: frozenset[str], task: int | None, node: str | None,
             incident: int | None, incidents: Container[int] = ()) -> bool:
    """Whether the record passes the filters of `tail`; an empty or None filter passes all.

    `incidents`: those of `task`; what becomes of one names the incident alone.
    """
    body: Plain = record["body"]
    if kinds and record["kind"] not in kinds:
        return False
    if task is not None and int(body.get("of", 0)) not in incidents and task not in (
            body.get("task"), record["seq"] if record["kind"] == "TaskSubmitted" else None):
        return False
    if node is not None and not (
            body.get("node") == node or node in body.get("nodes", ())
            or record["source"].startswith(f"{node}/")):
        return False
    return incident is None or incident in (record["incident"], record["seq"], body.get("of"))
