"""The status screen of one task: state and reason, placement, progress, checkpoints, incidents."""

from __future__ import annotations

import math

from ...control_plane.api.needs import (
    ENDED,
    folders,
    lag_s,
    loss_in_words,
    not_started,
    published_in_words,
    trouble_of_save,
    unsaved,
)
from ...events.records.in_words import work_in_words
from ..terminal import format as fmt
from ..terminal.format import Plain
from . import incident
from .incident import in_words, stacks
from .stragglers import alike_why, degraded_why, slow_nodes

CURVE_COLUMNS = 60
WHAT_COLUMNS = 36
INDENT_COLUMNS = 11
NORMAL_ITERATIONS_MIN = 5
"""The normal step time on a number of slots is the median of at least so many iterations."""
SAME_RATIO = 1.05
RATES_SHOWN_NUM = 8
MARKS_NUM = 3
"""The newest series and spikes of the loss that are named below its curve."""
UNREAD: Plain = {
    "losses": [],
    "loss_marks": [],
    "skipped": 0,
    "pace": None,
    "copied_s": 0.0,
    "incidents": [],
}
"""What is shown of a past that is not read until the present."""
NODES_SHOWN_NUM = 8
"""More nodes of a checkpoint are counted instead of named."""


def waits(task: Plain) -> str:
    """Why a task waits, what it needs to run, and what that would cost the others."""
    words = f"{task['why']}; needs {task['needs']}" if task["needs"] else str(task["why"])
    if task["cost_waf"]:
        words += f"; costs {fmt.scaled(task['cost_waf'], 'FLOP/s')} of WAF"
    if task["weight_from"] and "weight" not in task["needs"]:
        words += f"; runs from weight {above(task['weight_from'])}"
    return words


def computed(cluster: Plain) -> list[str]:
    """The decider version that computed the needs of waiting tasks; empty if none has needs."""
    return (
        fmt.labelled("computed", f"now, by decider version {cluster['computed_by']}")
        if cluster["computed_by"]
        else []
    )


def above(weight: float) -> str:
    """The weight, rounded up to three digits, so that the printed weight is sufficient."""
    unit = 10.0 ** (math.floor(math.log10(weight)) - 2)
    return f"{math.ceil(weight / unit - 1e-9) * unit:.3g}"


def task_status(
    view: Plain, task: Plain, past: Plain, *, now_s: float, option: str = ""
) -> list[str]:
    """One task. `past`: the answer of GET /v1/tasks/ID/curves."""
    slow_s = [one["since_s"] for one in task["slow"] if task["state"] == "degraded"]
    since_s = max(
        [
            task["since_s"],
            *slow_s[:1],
            *(one["opened_s"] for one in view["incidents"] if one["id"] == task["incident"]),
        ]
    )
    since = f"since {fmt.rfc3339(since_s)} ({fmt.span(max(now_s - since_s, 0.0))})"
    state = task["state"].upper()
    if task["state"] == "saving":
        failed = task["failed_saves"][-1]
        since_s = failed["since_s"]
        state += f", {trouble_of_save(failed)}"
        since = f"since {fmt.rfc3339(since_s)} ({fmt.span(max(now_s - since_s, 0.0))})"
    lines = [f"{task['name']}  {state} {since}, task {task['id']}, weight {task['weight']:g}"]
    late_s = lag_s(task, now_s)
    if late_s:
        what = "last progress" if task["progressed_s"] else "no iteration reported; it began"
        lines += fmt.labelled(
            "silent", f"{what} {fmt.span(late_s)} ago, it has stopped training or is very slow"
        )
    if task["stands"]:
        lines += fmt.labelled(
            "stalled",
            f"{task['stands']} (for {fmt.span(max(now_s - task['stands_since_s'], 0.0))})",
        )
        lines += _dumps(task, view)
    lines += _stacks(task, view)
    lines += _works(task, now_s)
    lines += _failing(task, now_s)
    lines += _reasons(task, view["cluster"], option)
    lines += fmt.labelled("next", _next(task, view, option))
    if past["read_seq"] < past["last_seq"]:
        so_far = f"{fmt.count(past['read_seq'])} of {fmt.count(past['last_seq'])} records so far"
        lines += fmt.labelled(
            "past",
            f"the control plane reads its log, {so_far}: ask again for the losses and incidents",
        )
        past = UNREAD
    lines += [
        "",
        *_where(task),
        *_progress(task, past, now_s),
        *_earns(task),
        *_copies(task, past, now_s),
    ]
    if not task["kept_sum"] and task["state"] not in ENDED:
        lines += fmt.labelled(
            "kept sum",
            "none: a fault during a gradient reduction redoes the "
            "iteration from its start; none is lost",
        )
    why = task["rounding_why"]
    if task["reproducible"] != "rounding" and (why or task["generation"]):
        lines += fmt.labelled("sums", f"rounded, not bit for bit: {why}" if why else "exact")
    if task["output"]:
        lines += fmt.labelled("output", task["output"])
    return [*lines, *_ranks(task["ranks"]), *_incidents(past)]


def _works(task: Plain, now_s: float) -> list[str]:
    """What its ranks do while it waits for them, and how long that still takes."""
    lines: list[str] = []
    for work in task["works"]:
        done = work["done"], work["total"], work["unit"], work["moved_bytes"]
        words = f"{fmt.ranks(work['ranks'])}: {work_in_words(work['what'], *done)}"
        if work["ends_s"] is not None and work["done"] < work["total"]:
            words += f", {fmt.span(max(work['ends_s'] - now_s, 0.0))} left"
        words += ", computing" if work["computes"] else ""
        idle_s = now_s - work["moved_s"]
        if idle_s >= work["limit_s"] / 2:
            limit = f"{work['limit']}: {fmt.span(work['limit_s'])}"
            words += f"; nothing moved for {fmt.span(idle_s)} ({limit})"
        lines += fmt.labelled("works", words)
    return lines


def _failing(task: Plain, now_s: float) -> list[str]:
    """How its processes fail, which try that was, and when the next one begins."""
    failing = task["failing"]
    if failing is None:
        return []
    if failing["until_s"] is not None:
        left = fmt.span(max(failing["until_s"] - now_s, 0.0))
        budget = f"it may pass: started again for {left} more"
    elif failing["num"]:
        budget = f"failure {failing['num']} of {failing['num_max']} without progress"
    else:
        budget = "tried again" if not failing["suspects"] else "tried on another slot"
    starts_s = failing["starts_s"]
    pause = fmt.span(max(starts_s - now_s, 0.0)) if starts_s is not None else ""
    then = f", starts again in {pause}" if pause else ""
    lines = fmt.labelled("failing", f"{failing['why']} ({budget}{then})")
    for suspect in failing["suspects"]:
        lines += fmt.labelled("suspects", f"{suspect['node']}/{suspect['slot']}: {suspect['why']}")
    return lines


def _reasons(task: Plain, cluster: Plain, option: str) -> list[str]:
    """Why it is not as it should be: it waits, is slow, cannot save, restarts as a whole, gets no
    orders."""
    lines: list[str] = []
    if limit := task["slots"]["limit"]:
        lines += fmt.labelled(
            "limited", f"to {limit} of {task['slots']['max']} slots until it ends: more ranks fail"
        )
    if task["damaged"]:
        lines += fmt.labelled("damaged", task["damaged"])
    for refused in task["refused_starts"]:
        lines += fmt.labelled("not started", fmt.said(*not_started(refused), option))
    for failed in task["failed_saves"]:
        why, do = unsaved(task, failed)
        lines += fmt.labelled("not saved", fmt.said(f"{task['name']}{why}", do, option))
    if task["why"] or task["needs"]:
        lines += fmt.labelled("why", waits(task))
        lines += computed(cluster) if task["needs"] else []
    lacks = len(task["ranks"]) < task["slots"]["target"] and task["state"] not in ENDED
    if cluster.get("no_room") and lacks:
        lines += fmt.labelled("held", f"{cluster['no_room']}; no process is started")
    if task["state"] == "degraded":
        lines += fmt.labelled("why", degraded_why(task, cluster["healing"]))
    if task["phase"] == "training" and (alike := alike_why(task)):
        lines += fmt.labelled("slower", alike)
    if task["declined"] and task["state"] in ENDED:
        lines += fmt.labelled("healed", f"not in memory: {task['declined']}")
    elif task["declined"]:
        how = (
            "as a whole, from memory, and does not heal in place"
            if task["from_memory"]
            else "as a whole, and does not heal in memory"
        )
        lines += fmt.labelled("restarts", f"{how}: {task['declined']}")
    if task["withheld"]:
        lines += fmt.labelled("suppressed", f"{task['withheld']} (healing {cluster['healing']})")
    return lines


def _ranks(ranks: list[Plain]) -> list[str]:
    """A line for each rank; with what it has of the model, where the ranks have parts of it."""
    if not ranks:
        return []
    head = ("RANK", "STATE", "NODE/SLOT", "PID", "ATTEMPT")
    rows = [
        [
            str(rank["rank"]),
            rank["state"],
            f"{rank['node']}/{rank['slot']}",
            str(rank["pid"] or "-"),
            str(rank["attempt"]),
            rank["part"],
        ]
        for rank in ranks
    ]
    has = "HAS" * any(rank["part"] for rank in ranks)
    return ["", *fmt.table((*head, has), rows, right=(0, 3, 4))]


def _dumps(task: Plain, view: Plain) -> list[str]:
    found = folders(((one["node"], one["log_path"]) for one in task["ranks"]), view["nodes"])
    return fmt.labelled("dumps", in_words(found)) if found and task["tier"] == "train" else []


def _stacks(task: Plain, view: Plain) -> list[str]:
    """What its ranks did before they were ended, in the incident that is open."""
    hosts = {node["id"]: node["host"] for node in view["nodes"]}
    return [
        line
        for incident_view in view["incidents"]
        if incident_view["id"] == task["incident"]
        for line in stacks(
            [{**kept, "host": hosts.get(kept["node"], "")} for kept in incident_view["stacks"]]
        )
    ]


def _next(task: Plain, view: Plain, option: str) -> str:
    name = task["id"] if task["state"] in ENDED else task["name"]  # a newer task may have the name
    follow = "" if task["state"] in ENDED else " -f"
    words = [f"unicron plan --without {node}{option}" for node in slow_nodes(task, view["nodes"])]
    words += [f"unicron logs {name}{follow}{option}", f"unicron tail{follow} --task {name}{option}"]
    if task["state"] == "waiting" and task["weight_from"]:
        # a dry run: a weight takes slots from others, and it says which and for how long they stop
        words.insert(0, f"unicron plan --weight {name}={above(task['weight_from'])}{option}")
    if task["withheld"]:
        words.insert(0, fmt.way_to_act(view["cluster"]["healing"], option))
    if task["incident"]:
        words.insert(0, f"unicron incident {task['incident']}{option}")
    return "   ".join(map(fmt.command, words[:2]))


def _where(task: Plain) -> list[str]:
    if not task["ranks"]:
        return []
    nodes: dict[str, int] = {}
    for one in task["ranks"]:
        nodes[one["node"]] = nodes.get(one["node"], 0) + 1
    places = " ".join(f"{node} x{num}" for node, num in nodes.items())
    if task["tier"] != "train":
        return fmt.labelled("where", places)
    batch = (
        f", global batch {task['micro_batches']} micro-batches (never changed)"
        if task["micro_batches"]
        else ""
    )
    generation = task["generation"]
    if task["layout"]:
        beside = f", {fmt.number_of(task['beside'], 'spare')}" if task["beside"] else ""
        built = f"{task['layout_in_words'] or task['layout']}{beside}, generation {generation}"
    else:
        built = f"no member left of generation {generation}" if generation else "no generation yet"
    return fmt.labelled("where", f"{places}, {built}{batch}")


def _progress(task: Plain, past: Plain, now_s: float) -> list[str]:
    if not task["iteration"] and not task["iterations"]:
        return fmt.labelled("progress", "a command: is supervised only")
    loss = "" if task["loss"] is None else f", loss {task['loss']:.4f}"
    if task["not_finite"]:
        loss = f", {loss_in_words(task)}"
    of = f" of {fmt.count(task['iterations'])}" if task["iterations"] else ""
    printed = "" if task["tier"] == "train" else ", as it prints"
    lines = fmt.labelled("progress", f"{fmt.count(task['iteration'])}{of}{loss}{printed}")
    lines += [" " * INDENT_COLUMNS + line for line in loss_curve(past)]
    if past["skipped"]:
        steps = f"{fmt.count(past['skipped'])} of {fmt.count(task['iteration'])} steps"
        lines += fmt.labelled("skipped", f"{steps}: loss or gradient were not finite")
    if task["step_s"] and task["state"] in ("running", "degraded"):
        left = task["iterations"] - task["iteration"]
        # ranks that still prepare are not counted
        own = past["pace"] or {"num": 0}
        own = own if own["num"] >= NORMAL_ITERATIONS_MIN else {}
        normal = (
            f", own normal on {fmt.number_of(own['slots'], 'slot')} "
            f"{fmt.span(own['median_s'])} (median of {fmt.count(own['num'])})"
            if own
            else ""
        )
        ends = f"{fmt.rfc3339(now_s + left * task['step_s'])} at this pace"
        if own and not 1 / SAME_RATIO < task["step_s"] / own["median_s"] < SAME_RATIO:
            ends += f"; {fmt.rfc3339(now_s + left * own['median_s'])} at its own"
        rate = f"; {fmt.scaled(task['rate_flops'], 'FLOP/s')}" if task["rate_flops"] else ""
        lines += fmt.labelled("pace", f"{fmt.span(task['step_s'])} an iteration{normal}{rate}")
        lines += fmt.labelled("finish", ends) if task["iterations"] else []
    return lines


def loss_curve(past: Plain, width: int = CURVE_COLUMNS) -> list[str]:
    """The losses as blocks between the first and last value, with a `!` below each incident."""
    losses = [one for one in past["losses"] if one is not None]
    if not losses:
        return []
    first = f"{losses[0]:.2f} "
    lines = [f"{first}{fmt.curve(losses, width)} {losses[-1]:.2f}"]
    faults = [one["iteration"] for one in past["incidents"] if one["iteration"] is not None]
    if faults:
        line = (
            " " * len(first)
            + fmt.marks([(at, "!") for at in faults], len(losses), width)
            + f"   (!) fault at iteration {', '.join(map(str, faults))}"
        )
        lines.append(fmt.clipped(line, fmt.SCREEN_COLUMNS - INDENT_COLUMNS))
    return lines + [
        f"at iteration {mark['iteration']}: {mark['what']}"
        for mark in past["loss_marks"][-MARKS_NUM:]
    ]


def _earns(task: Plain) -> list[str]:
    """T(t, x) and its origin; if there are many sizes, only those near the present one."""
    rates = task["throughput"]
    if rates is None or task["state"] in ENDED:
        return []
    rows = list(zip(rates["sizes"], rates["rates_flops"], strict=True))
    now = task["slots"]["target"]
    near = sorted(sorted(rows, key=lambda row: abs(row[0] - now))[:RATES_SHOWN_NUM])
    words = ", ".join(
        f"{size}: {fmt.scaled(rate, 'FLOP/s')}{' (now)' * (size == now)}" for size, rate in near
    )
    lines = fmt.labelled("earns", f"on slots {words}; {rates['origin']}")
    if rates["origin"] == "nominal":
        lines = fmt.labelled(
            "earns",
            "nothing that is known: a command without a model; plans "
            f"rank it by {fmt.scaled(rows[0][1] / rows[0][0], 'FLOP/s')} a slot",
        )
    layout = task["modelled_layout"]
    if task["model_batch"] and task["logged_batch"] not in (0, task["model_batch"]):
        lines += fmt.labelled(
            "measures",
            f"nothing: it prints a global batch of "
            f"{fmt.count(task['logged_batch'])}, its model has "
            f"{fmt.count(task['model_batch'])}",
        )
    return lines + (fmt.labelled("by model", layout) if layout else [])


def _copies(task: Plain, past: Plain, now_s: float) -> list[str]:
    """Where the task's state is, and what would be lost if all processes exited. In-memory
    checkpoints are reported seldom: a store may have a newer one than the last report."""
    if task["tier"] != "train" or task["state"] in ENDED:
        if task["not_published"]:
            return fmt.labelled("published", published_in_words(task))
        return fmt.labelled("published", task["checkpoint"]) if task["checkpoint"] else []
    holders = [
        one for one in task["ranks"] if one["state"] in ("member", "stopped") and one["has_state"]
    ]
    if not holders:
        return fmt.labelled("copies", f"no process has its state{_comes_back(task)}")
    lost = task["unsaved"]
    disk = (
        f"published iteration {fmt.count(task['checkpoint_iteration'])} ({task['checkpoint']})"
        if task["checkpoint"]
        else "nothing is published yet"
    )
    what = (
        "what came after the newest of these"
        if task["copies"]
        else fmt.number_of(lost, "iteration")
    )
    disk += f": {what} would be lost if all processes went" if lost else ""
    if task["copies"]:
        newest = task["copies"][0]["step_version"]
        ago = (
            f", as of {fmt.span(max(now_s - past['copied_s'], 0.0))} ago"
            if past["copied_s"]
            else ""
        )
        disk = (
            f"in memory iteration {fmt.count(newest)} or newer ({_stored_on(task['copies'][0])}"
            f"{ago}; one is due every {fmt.number_of(task['copy_every'], 'iteration')}"
            f"{_memory(task)}); {disk}"
        )
    elif task["no_copies"]:
        disk = f"no in-memory checkpoints: {task['no_copies']}; {disk}"
    on = list(dict.fromkeys(one["node"] for one in holders))
    if len(holders) == 1:
        live = f"one seat ({on[0]}): no other process has its state"
    else:
        there = f"all on {on[0]}" if len(on) == 1 else f"on {' '.join(on)}"
        each = task["replica_ranks"]
        of = f" of {each} ranks" if each > 1 else ""
        num = len(holders) // each
        of += " (weights)" if num > 1 and task["lost_rank"] else ""  # not of the optimizer
        live = (
            f"{fmt.number_of(num, 'live replica')}{of}, {there}: "
            f"{fmt.ranks(one['rank'] for one in holders)}"
        )
    held = (
        fmt.labelled("published", published_in_words(task))
        if task["not_published"] or task["not_finite"]
        else []
    )
    lines = fmt.labelled("copies", f"{live}; {disk}")
    if task["lost_rank"]:
        lines += fmt.labelled("if lost", f"a lost rank costs: {task['lost_rank']}")
    return lines + held


def _stored_on(copy: Plain) -> str:
    nodes = copy["nodes"]
    return " ".join(nodes) if len(nodes) <= NODES_SHOWN_NUM else f"on {len(nodes)} nodes"


def _memory(task: Plain) -> str:
    """What the in-memory checkpoints take on the node where they take most, and the limit there."""
    if not task["copies_bytes"]:
        return ""
    of = f" of {fmt.scaled(task['copies_max'], 'B')}" if task["copies_max"] else ""
    return f"; up to {fmt.scaled(task['copies_bytes'], 'B')}{of} a node"


def _comes_back(task: Plain) -> str:
    """The newest known source from which a task without processes resumes, and the loss."""
    done = task["iteration"]
    if not done:
        return ": it begins at iteration 0"
    copies = [one for one in task["copies"] if one["step_version"] >= task["checkpoint_iteration"]]
    most = ""
    if copies:
        newest = copies[0]["step_version"]
        source = (
            f"it comes back from the copy of iteration {fmt.count(newest)} or newer in "
            f"memory ({_stored_on(copies[0])})"
        )
        most = "at most "
    elif task["checkpoint"]:
        newest = task["checkpoint_iteration"]
        source = f"it comes back from {task['checkpoint']}, of iteration {fmt.count(newest)}"
    else:
        newest, source = 0, "no copy and no published checkpoint: it restarts"
    again = max(done - newest, 0)
    if not again:
        return f": {source}, nothing is lost"
    return (
        f": {source}, {most}{fmt.number_of(again, 'iteration')} of {fmt.count(done)} are done again"
    )


def _incidents(past: Plain) -> list[str]:
    rows = [incident.row(one, WHAT_COLUMNS) for one in past["incidents"]]
    return ["", *fmt.table(incident.HEAD, rows, right=(5, 6, 7))] if rows else []
