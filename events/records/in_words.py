"""A log record in words, on one line: seq, time, kind, the essentials, cause.

Works on the plain data of `codec.to_plain`, so records of unknown kinds (of a newer Unicron) are
printed too.
"""

import json
import re
import string
from collections.abc import Callable, Container, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from .. import words as fmt
from ..decoding import from_json
from ..spec.model import Axes
from ..spec.parallelism import layout_label, num_positions
from ..spec.policy import FLAGS_ONLY, Policy
from .envelope import VERSIONS
from .statuses import NCCL_TIMEOUT
from .types import OWNER

Plain = dict[str, Any]

ESSENTIALS_LENGTH_MAX = 160
_SOURCE = re.compile(r"\[[^\]\s]{1,400}\.(?:cc|cpp|cu|c|hpp|h):\d{1,6}\] ?")
"""The source position in a C++ error, as in `[/pytorch/third_party/gloo/tcp/pair.cc:598] `."""


def line(record: Plain) -> str:
    """One line, for example `    42 2026-11-20T03:20:07.402Z IncidentOpened    SEV2 ...  <41`."""
    text = fmt.clipped(
        essentials(record["kind"], record["body"], record["v"]), ESSENTIALS_LENGTH_MAX
    )
    cause = f"  <{record['cause']}" if record["cause"] else ""
    return f"{record['seq']:>6} {fmt.rfc3339(record['at_s'])} {record['kind']:<17} {text}{cause}"


def essentials(kind: str, body: Plain, version: int = 0) -> str:
    """The fields of a body that matter to a reader; all fields if the kind, or its `version`, is
    unknown."""
    template = TEMPLATES.get(kind)
    if template is None or version > VERSIONS.get(kind, 1):
        return " ".join(f"{key}={json.dumps(value)}" for key, value in body.items())
    return _FORMATTER.vformat(template, (body,), body)


def _line_of(text: str, index: int) -> str:
    """The first line that is not blank (0): an error without the advice and the frames below it; or
    the last one (-1), for example the exception at the end of a traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    return " ".join(lines[index].split()) if lines else ""


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _letters(body: Plain) -> str:
    """`dead letters 3, 4, 9 and 2 more`."""
    num, named = int(body["num"]), [str(number) for number in body["numbers"][:3]]
    left = num - len(named)
    return f"dead letter{'s' * (num != 1)} {', '.join(named)}" + f" and {left} more" * (left > 0)


def _by(body: Plain) -> str:
    """Whose token made a request, if it was not that of the state folder."""
    who = body.get("who", "")
    return f"; by {who}, {body['role']}" if who not in ("", OWNER) else ""


def _meaning(body: Plain) -> str:
    """The status of the error in parentheses; empty if the status is unknown."""
    if not body.get("status"):
        return ""
    from_ = ", second-hand" if body.get("second_hand") else ""
    return f" ({status_in_words(body['status'])}{from_})"


def _library_error(body: Plain) -> str:
    """A library's error message without the exception type and the source position."""
    said = _SOURCE.sub("", _line_of(body["error"], 0)).removeprefix("RuntimeError: ")
    peer = body.get("peer", "")
    host, _, port = peer.rpartition(":")
    named = not peer or peer in said or (host.strip("[]") in said and port in said)
    from_ = "" if named else f", peer {peer}"
    return f"{said}{_meaning(body)}{from_}"


def status_in_words(status: str) -> str:
    """The status in words that hold for any communication backend."""
    return "collective timeout" if status == NCCL_TIMEOUT else status


def _devices(body: Plain) -> str:
    """The node and the affected slots, for example `n1/0 1`."""
    devices = " ".join(str(device) for device in body["devices"])
    return f"{body['node']}{'/' + devices if devices else ''}"


def _submitted(body: Plain) -> str:
    spec = body["spec"]
    slots, train = spec["slots"], spec.get("train")
    what = (
        f"{train['iterations']} iterations"
        if train
        else " ".join(" ".join(spec["command"]).split())
    )
    return f"{spec['name']} weight {spec['weight']:g}, {slots['min']}-{slots['max']} slots, {what}"


def _exit(body: Plain) -> str:
    how = (
        f"signal {body['signal']}"
        if body["signal"] is not None
        else f"exit code {body['exit_code']}"
    )
    why = body.get("cause") or (_line_of(body["tail"], -1) if body["exit_code"] else "")
    how = "" if why.startswith(how) else f" {how}"  # the cause may begin with the same words
    return f"{how}{_meaning(body)}{_because(why)}"


def _state_source(body: Plain) -> str:
    got = fmt.scaled(body["received_bytes"], "B")
    return {
        "copy": f"{got} from a copy on {body.get('origin_node')}",
        "checkpoint": f"{got} from the checkpoint",
    }.get(
        body.get("origin", ""),
        {body["rank"]: "own state", -1: "no state yet"}.get(
            body["source"], f"{got} from rank {body['source']}"
        ),
    )


def _progress(body: Plain) -> str:
    first, num = body["first_iteration"], len(body["losses"]) or len(body["step_s"])
    if not num:
        return str(first)
    last = f"-{first + num - 1}" if num > 1 else ""
    loss = f"{body['losses'][-1]:.4f}" if body["losses"] else "not finite"
    return (
        f"{first}{last} loss {loss}, "
        f"{fmt.span(median(body['step_s']))} each, {fmt.scaled(body['rate_flops'], 'FLOP/s')}"
        + "".join(f", digest of {i} {x}" for i, x in body.get("digests", {}).items())
    )


def work_in_words(what: str, done: int, total: int, unit: str, moved_bytes: int) -> str:
    """What a rank does for which its task waits, and how much of it is done (RankWorked)."""
    if not what:
        return f"has read and written {fmt.scaled(moved_bytes, 'B')}"
    return f"{what}, {fmt.amount(done, total, unit)}" if unit else what


def _work(body: Plain) -> str:
    fields = ("what", "done", "total", "unit", "moved_bytes")
    return work_in_words(*(body[name] for name in fields))


def _where(body: Plain) -> str:
    return " ".join(
        filter(
            None,
            (
                f"task {body['task']}" if body["task"] else "",
                fmt.ranks(body["ranks"]) if body["ranks"] else "",
                body["node"],
            ),
        )
    )


def _cost(body: Plain) -> str:
    over = body["outcome"] in ("failed", "ended")
    lost = fmt.lost_in_words(body["iterations_lost"], is_over=over)
    source = state_source(body)
    return f"{lost}, kept {body['kept']} dealt {body['dealt']}{', ' if source else ''}{source}"


def state_source(cost: Plain) -> str:
    """The source and size of the state if no member held it; empty if a member held it.

    `cost`: the body of an IncidentClosed, or the cost on the page of an incident.
    """
    got = fmt.scaled(cost.get("origin_bytes", 0), "B")
    of = f", of iteration {fmt.count(cost.get('origin_step_version', 0))}"
    passed_on = cost.get("peer_bytes", 0)
    more = f"; {fmt.scaled(passed_on, 'B')} from peers" if passed_on else ""
    near = cost.get("near_bytes", 0)
    more += f", {fmt.scaled(near, 'B')} of it on the same node" if near else ""
    words = {
        "copy": f"{got} from a copy on {cost.get('origin_node')}{of}{more}",
        "checkpoint": f"{got} from the checkpoint {cost.get('origin_path')}{of}{more}",
        "seed": "begun again from the seed",
    }.get(cost.get("origin", ""), "")
    return words or ("a checkpoint was read" if cost["ckpt_read"] else "")


def _plan(body: Plain) -> str:
    gives = " ".join(f"{one['task']}:{one['slots']}" for one in body["allocations"])
    reason = "".join(
        f"; rejected {other['what']}: {fmt.scaled(other['waf'], 'FLOP/s')}"
        for other in body["alternatives"][:1]
    )
    if why := body.get("why"):
        reason = f"; {why}; bound by {body['bound']}" if body["bound"] != "nothing" else f"; {why}"
    ideal = body.get("ideal_waf", 0.0)
    share = f", {100 * fmt.plan_waf(body) / ideal:.0f} % of ideal" if ideal else ""
    kept = " ".join(f"{one['task']}:{one['slots']}" for one in body.get("kept", ()))
    alone = f", left alone {kept}" if kept else ""
    return (
        f"task:slots {gives or 'none'}{alone}, "
        f"WAF {fmt.scaled(fmt.plan_waf(body), 'FLOP/s')}{share}{reason}"
    )


def _sources(body: Plain) -> str:
    copies = body.get("copies")
    last = body["checkpoint"] or "the seed"
    return f", tries copies on {_nodes(copies)}, then {last}" if copies else ""


def _nodes(there: list[Plain]) -> str:
    return " ".join(dict.fromkeys(one["node"] for one in there)) or "no node"


def _changes(policy: Plain) -> str:
    """The other fields of a policy that are not at their default."""
    usual: Plain = from_json(msgspec.json.encode(Policy()))
    return "".join(
        f", {name} {value}"
        for name, value in policy.items()
        if name in usual
        and value != usual[name]
        and name not in ("silence_s_max", "restarts_max", *FLAGS_ONLY)
    )


def outage(body: Plain) -> str:
    """What was away, for how long, what waited, and whether training went on."""
    name = {"server": "log's server", "leader": "leader"}.get(body["what"], body["what"])
    if body["lost_to"]:
        return (
            f"the log's server had lost records {body['lost_from']} to {body['lost_to']} by "
            f"{fmt.rfc3339(body['since_s'])[:19]}Z; others have these numbers now"
        )
    num = body["num_iterations"]
    trained = (
        f"training went on: {fmt.number_of(num, 'iteration')}"
        if num
        else "no iteration was reported"
    )
    return (
        f"the {name} was away for {fmt.span(body['length_s'])} since "
        f"{fmt.rfc3339(body['since_s'])[:19]}Z{_because(body['why'])}; "
        f"{fmt.number_of(body['num_reports'], 'report')} waited, {trained}"
    )


def _fault(body: Plain) -> str:
    if body["what"] == "node":
        return f"kill the agent of {body.get('node') or ' '.join(body['nodes'])} and its ranks"
    who = f"task {body['task']} rank {body['rank']}"
    who += f".{body['attempt']}" if "attempt" in body else ""
    if body["what"] == "rank":
        return f"kill {who}"
    return f"stop {who} for {fmt.span(body['stop_s']) if body['stop_s'] else 'good'}"


def _lifted(body: Plain) -> str:
    slots = body.get("slots", ())
    of = f"slot{'s' * (len(slots) > 1)} {' '.join(map(str, slots))} of " if slots else ""
    back = [f"{of}{body['node']} given back"] if slots else []
    lifted = [f"{body['node']} is no longer quarantined"] if body.get("quarantine", True) else []
    return ", ".join(lifted + back)


def _layout(order: Plain) -> str:
    """The layout, and the number of members without a position: `TP2xDP1 +1`."""
    num_members, known = len(order["members"]), order.get("axes")
    axes = msgspec.convert(known, Axes) if known else Axes(dp=num_members)
    num = num_members - num_positions(axes)
    return layout_label(axes) + (f" +{num}" if num else "")


FRAMES_NUM_MAX = 4


def stack_in_words(stack: str) -> str:
    """The innermost frames, on one line: `was in sleep (train.py:9) < forward (model.py:4)`."""
    frames = stack.splitlines()
    more = " < ..." * (len(frames) > FRAMES_NUM_MAX)
    return f"was in {' < '.join(frames[:FRAMES_NUM_MAX])}{more}" if frames else "has no stack"


VERDICTS = {
    "slot": "taken out until the task ends",
    "task": "not the slot's fault",
    "open": "suspected, not taken out",
    "cleared": "not its fault",
}


def _probed(body: Plain) -> str:
    if body["error"]:
        return f"could not probe {body['target']}: {body['error']}"
    return f"{'reaches' if body['reached'] else 'does not reach'} {body['target']}"


FORMATS: dict[str, Callable[[Any], str]] = {
    "because": _because,
    "by": _by,
    "changes": _changes,
    "cost": _cost,
    "devices": _devices,
    "drained": lambda waf: (
        f"would {'earn' if waf >= 0 else 'cost'} {fmt.scaled(abs(waf), 'FLOP/s')}"
    ),
    "exit": _exit,
    "fault": _fault,
    "layout": _layout,
    "letters": _letters,
    "lifted": _lifted,
    "library error": _library_error,
    "first line": lambda text: _line_of(text, 0),
    "last line": lambda text: _line_of(text, -1),
    "len": lambda value: str(len(value)),
    "labels": lambda labels: "".join(f", {key} {name}" for key, name in labels.items() if name),
    "loss": lambda loss: "" if loss is None else f" loss {loss:.4f}",
    "meaning": _meaning,
    "members": lambda members: fmt.ranks(member["rank"] for member in members),
    "ms": fmt.ms,
    "nodes": _nodes,
    "files": lambda body: (
        f" and {fmt.files_in_words(few)}" if (few := body.get("free_files")) is not None else ""
    ),
    "outage": outage,
    "plan": _plan,
    "probe": lambda nodes: "probes" if len(nodes) == 1 else "probe",
    "probed": _probed,
    "progress": _progress,
    "ranks": fmt.ranks,
    "rfc3339": fmt.rfc3339,
    "submitted": _submitted,
    "words": " ".join,
    "rates": lambda body: " ".join(
        f"{size}:{fmt.scaled(rate, 'FLOP/s').replace(' ', '')}"
        for size, rate in zip(body["sizes"], body["rates_flops"], strict=False)
    ),
    "rounding": lambda body: (
        f"; not reproducible bit for bit: {body['rounding_why']}"
        if body.get("rounding_why")
        else ""
    ),
    "seats": lambda seats: (
        " ".join(f"{seat['rank']}@{seat['slot']['node']}/{seat['slot']['index']}" for seat in seats)
        or "no seats"
    ),
    "sources": _sources,
    "span": fmt.span,
    "stack": lambda body: stack_in_words(body["stack"]),
    "state source": _state_source,
    "status": status_in_words,
    "took": lambda body: fmt.ms(body["down_s"] + body["up_s"] + body["settle_s"]),
    "unsaved": lambda body: f" failed: {body['why']}" if body["why"] else " works again",
    "verdict": lambda verdict: VERDICTS.get(verdict, str(verdict)),
    "where": _where,
    "work": _work,
    "ago": lambda idle_s: f", {fmt.span(idle_s)} ago" if idle_s >= 1 else "",
    "window": lambda num: f" (of {fmt.count(num)})" if num else " (warming up)",
}


class _Formatter(string.Formatter):
    """Python's template syntax with these format specs. An absent field is empty.

    A name of FORMATS: the result of that function for the field, or with `{:name}` for the body.
    `~unit`: the number with a decimal prefix. `|text`: the field, or the text if it is empty.
    `?text`: the text, or nothing if the field is empty.
    """

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if field_name.isdigit():
            return args[0], field_name  # Python numbers each `{:name}`; all mean the body
        try:
            return super().get_field(field_name, args, kwargs)
        except KeyError:
            return "", field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        sign, rest = format_spec[:1], format_spec[1:]
        if sign == "|":
            return str(value or rest)
        if sign == "?":
            return rest if value else ""
        if value == "":
            return ""
        if sign == "~":
            return fmt.scaled(value, rest)
        function = FORMATS.get(format_spec)
        return function(value) if function is not None else format(value, format_spec)


_FORMATTER = _Formatter()
_RANK = "task {task} rank {rank}.{attempt}"
_GENERATION = "task {task} generation {generation}"
TEMPLATES = {
    "EpochStarted": "decider {heart}, code {code}{durability:?, durability {durability}}"
    "{replicas_min:? on {replicas_min} replicas}",
    "OutageEnded": "{:outage}",
    "RoomChanged": "{folder} has {free_bytes:~B} free{:files}{is_full:?, no process is started}",
    "PolicySet": "silence {policy[silence_s_max]:g} s, {policy[restarts_max]} restarts"
    "{policy:changes}"
    "{policy[observe]:?, OBSERVING}"
    "{policy[allow_inject]:?, faults may be injected}",
    "DeadlineReached": "{deadline}",
    "NodeUnreachable": "{node} unreachable for {silence_s:span}",
    "NodeReachable": "{node} reachable again",
    "TaskSubmitted": "{:submitted}{:by}",
    "TaskCancelRequested": "task {task}{reason:because}{:by}",
    "TaskOutputSet": "task {task} saves to {output}{reason:because}{:by}",
    "TaskWeightSet": "task {task} weight {weight:g}{reason:because}{:by}",
    "HealingFrozen": "healing is paused{reason:because}{:by}",
    "HealingResumed": "healing is resumed{reason:because}{:by}",
    "NodeDrained": "{node} is drained{down:?, its machine is off}{reason:because}{:by}",
    "NodeUndrained": "{node} may have tasks again{reason:because}{:by}",
    "FaultRequested": "{:fault}{reason:because}{:by}",
    "DeadLettersHandled": "{act} {:letters}{reason:because}{:by}",
    "TokenChanged": "{act} the token {name}, role {token_role}{reason:because}{:by}",
    "NodeJoined": "{node} {num_slots} {accelerator} slots, pid {pid}, at {host}{labels:labels}",
    "NodeProbed": "{node} {:probed}",
    "NodeLeft": "{node}: {reason}",
    "AgentRestarting": "{node}: the agent is back within {back_s:g} s; its ranks run on",
    "AgentRestarted": "{node}: agent pid {pid} has adopted the node's processes",
    "MemoryCheckpointsLost": "{node} lost its in-memory checkpoints{task:? of task {task}}"
    "{why:because}",
    "ReportsLost": "{node} lost {num_lost} reports",
    "OrderRefused": "{node} refused order {order}: {why}",
    "RankStarted": _RANK + " on {node}, pid {pid}",
    "RankAdopted": _RANK + " has adopted Unicron",
    "RankReady": _RANK + " at {endpoint}, {num_params:~ parameters}, {state_bytes:~B} of state"
    "{:rounding}",
    "InMemoryRecoveryDeclined": _RANK + " cannot heal in memory: {why}",
    "RankErrored": _RANK + " iteration {iteration}: {error}{:meaning}: {text:last line}",
    "RankExited": _RANK + " pid {pid}{:exit}",
    "RankReportsDropped": _RANK + ": {num_dropped:,} reports dropped, it sent too many: "
    "{kinds:words}",
    "RankSuspended": _RANK + " pid {pid} is stopped",
    "RankContinued": _RANK + " pid {pid} runs again",
    "CollectiveFailed": _RANK + " iteration {iteration}: {:library error}",
    "Quiesced": _RANK + " left generation {generation} at step {step_version}, "
    "keeps {micro_batches:len} micro-batches, "
    "{buckets_reduced} of {num_buckets} buckets reduced",
    "Reconfigured": _RANK + " generation {generation} step {step_version}, {:state source}, "
    "kept {kept:len} todo {todo:len} dealt {dealt:len}, {:took}{damaged:?, {damaged}}",
    "ReconfigureFailed": _RANK + " generation {generation}: {error:first line}",
    "TaskProgressed": "task {task} iteration {:progress}",
    "IterationsLogged": _RANK + " iteration {iteration:,}{iterations:? of {iterations:,}}"
    "{loss:loss}{loss_text:? loss {loss_text}}, {step_s:span} each"
    "{num_iterations:window}"
    "{global_batch:?, global batch {global_batch:,}}"
    "{skipped:?, {skipped:,} skipped}{nan:?, {nan:,} nan}",
    "LossNotFinite": "task {task} loss {text} from iteration {iteration} on"
    "{is_saving:?, the state before it is being saved}",
    "LossSpiked": "task {task} iteration {iteration}: loss {loss:.4g} for {num:,} iterations, "
    "above {median:.4g} with a deviation of {deviation:.2g}",
    "LossFiniteAgain": "task {task} loss finite again from iteration {iteration} on, "
    "after {num:,} iterations",
    "MemoryCheckpointStored": _RANK + " step {step_version}, {copy_bytes:~B} in memory on {node}",
    "CheckpointSaved": "task {task} step {step_version}, {ckpt_bytes:~B}, {path}{final:?, final}"
    "{loss:?, loss {loss}: not to be published}",
    "CheckpointFailed": _RANK + " step {step_version}{final:?, final}: {what} {path}{:unsaved}",
    "CheckpointPublished": "task {task} {path}",
    "RankFinished": _RANK + " at step {step_version}, {forward_calls} forward calls",
    "HealthChanged": "{:devices} {check} {health}{why:because}",
    "DeviceErred": "{:devices} {status} ({rule}): {text:first line}",
    "RankStalled": _RANK + " iteration {iteration}: {what} for {in_s:span}"
    "{normal_s:?, an iteration takes {normal_s:span}}",
    "StacksKept": _RANK + " {:stack}{mark:?; {mark}}{why:because}"
    "{nccl_ras:?; NCCL: {nccl_ras:first line}}",
    "RankUnstalled": _RANK + " iteration {iteration}, stalled for {stalled_s:span}",
    "RankWorked": _RANK + " {:work}{idle_s:ago}{computes:?, it computes}",
    "StepTimeChanged": _RANK + " works {own_s:span} of {iteration_s:span} an iteration, "
    "at first {normal_s:span}",
    "IncidentAcknowledged": "inc-{of} is known{reason:because}{:by}",
    "PersonNotified": "a message told what needs a person: {opened:len}, no longer: {over:len}",
    "QuarantineLifted": "{:lifted}{reason:because}{:by}",
    "NodeQuarantined": "{node} until {until_s:rfc3339}: {why}",
    "StragglerCostEstimated": "{node} costs {cost_waf:~FLOP/s}, draining it {drain_waf:drained}: "
    "{why}",
    "IncidentOpened": "{severity} {status:status}, {:where}: {why}",
    "IncidentEscalated": "inc-{of} {severity} {ranks:ranks}{num_times:?, time {num_times}}: {why}",
    "IncidentRecovering": "inc-{of} recovers, pause {pause_s:ms} so far, "
    "until iteration {until_iteration:,}{why:because}",
    "IncidentClosed": "inc-{of} {outcome}, pause {pause_s:ms}, {:cost}{why:because}",
    "ThroughputSet": "task {task} {origin}: {:rates}",
    "PlanChosen": "{trigger}: {num_slots} slots, {:plan}",
    "ExperimentBegun": "task {task} {suspects:seats}: {why}",
    "SlotsJudged": "task {task} {suspects:seats}: {verdict:verdict}: {why}"
    "{slots_max:?, {slots_max} slots at most}",
    "TaskPlaced": "task {task} {seats:seats}: {why}",
    "TaskWaiting": "task {task} {why}{needs:?; needs {needs}}",
    "OrderSuppressed": "task {task} {what:|nothing any more}{why:because}",
    "TaskEnded": "task {task} {outcome}{why:because}",
    "StartRank": _RANK + " on {slot[node]}/{slot[index]}",
    "StopRank": _RANK + " grace {grace_s:span}: {why}",
    "Quiesce": _GENERATION + " {mode}, {ranks:ranks}{save:?, saved first}",
    "Reconfigure": _GENERATION + ": {members:members}, {:layout}{:sources}",
    "SetCheckpointStores": _GENERATION + ": copies to {keepers:nodes}",
    "DropMemoryCheckpoints": "task {task} is over, on {nodes:words}",
    "Resume": _GENERATION + " reports progress from iteration {progress_from}",
    "PublishCheckpoint": "task {task} {path}{remove:?, then removes {remove}}",
    "InjectFault": "on purpose: {:fault}",
    "ProbeNode": "{nodes:words} {nodes:probe} {node} at {host}, port {port}",
}


def matches(
    record: Plain,
    *,
    kinds: frozenset[str],
    task: int | None,
    node: str | None,
    incident: int | None,
    incidents: Container[int] = (),
) -> bool:
    """True if the record passes the filters of `tail`; an empty or None filter passes all.

    `incidents`: the incidents of `task`. Only IncidentOpened names a task.
    """
    body: Plain = record["body"]
    if kinds and record["kind"] not in kinds:
        return False
    if (
        task is not None
        and int(body.get("of", 0)) not in incidents
        and task
        not in (body.get("task"), record["seq"] if record["kind"] == "TaskSubmitted" else None)
    ):
        return False
    if node is not None and not (
        body.get("node") == node
        or node in body.get("nodes", ())
        or record["source"].startswith(f"{node}/")
    ):
        return False
    return incident is None or incident in (record["incident"], record["seq"], body.get("of"))
