"""The page of one incident, and the list of all: facts (cli/commands/incident.py) as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from ...events.records.in_words import outage, stack_in_words, state_source, status_in_words
from ..terminal import format as fmt
from ..terminal.format import Plain

PHASE_WORDS = {"held": "paused", "stood": "stalled", "full": "regrow"}
"""The page's words for phases that have another name in the JSON."""
BAR_COLUMNS = 40
WHO_COLUMNS = 10
WHO_NUM_MAX = 3
NAME_COLUMNS = 24
EVIDENCE_LENGTH_MAX = 140
TYPED = re.compile(r"unicron [a-z][^,:]*")
"""A command line within a sentence."""
MIRRORS = {"sharded": "; with train.parallel.optimizer: mirrored, the loss of one rank loses none"}
NONE = "no incidents: nothing has failed so far"
HEAD = ("INCIDENT", "DETECTED", "SEV", "WHAT", "OUTCOME", "PAUSE", "LOST", "SLOT-S")
PER_RANK = (
    "Quiesced",
    "Reconfigured",
    "CollectiveFailed",
    "RankStarted",
    "RankAdopted",
    "RankReady",
    "StartRank",
    "StopRank",
    "RankExited",
)
"""Kinds with one record per rank: consecutive records of a task share one line."""
STACKS_NUM_MAX = 4
"""Ranks whose stacks are printed; the JSON has all."""
NODES_NUM_MAX = 4
"""Nodes that are listed; the rest are counted."""


# --- The flight-recorder dumps of a stalled task. ---
def in_words(found: list[Plain]) -> str:
    """The command that reads one folder of dumps, or how to collect several folders first."""
    places = {(one["host"], one["folder"]) for one in found}
    until = "the flight recorders, until it stalls again"
    if len(places) == 1:
        (place,) = places
        return f"{fmt.command(f'unicron locate {shlex.quote(place[1])}')}: {until}"
    shown = found[:NODES_NUM_MAX]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    where = ", ".join(f"{one['node']} {one['host']}:{one['folder']}" for one in shown)
    names = " ".join(one["node"] for one in shown) + " ..." * bool(more)
    return (
        f"{until}, each node's on itself: {where}{more}; copy each folder to one machine "
        f"({fmt.command('scp -r HOST:FOLDER NODE')}), then "
        f"{fmt.command(f'unicron locate {names}')}"
    )


# --- What ranks did before they were ended. ---
def stacks(kept: list[Plain]) -> list[str]:
    """The innermost frames of each rank, and where its file is."""
    lines: list[str] = []
    for rank in kept[:STACKS_NUM_MAX]:
        where = f"rank {rank['rank']} on {rank['node']}"
        lines += fmt.labelled("stack", f"{where}, {_did(rank)}")
        if rank["path"]:
            lines += fmt.labelled("", f"all threads: {rank.get('host', '')}:{rank['path']}")
        if rank["nccl_ras"]:
            lines += fmt.labelled("", f"NCCL: {' '.join(rank['nccl_ras'].split())}")
    if len(kept) > STACKS_NUM_MAX:
        lines += fmt.labelled("", f"{len(kept) - STACKS_NUM_MAX} ranks more: -o json")
    return lines


def _did(rank: Plain) -> str:
    mark = f"{rank['mark']}; " if rank["mark"] else ""
    return f"{mark}{stack_in_words(rank['stack'])}{': ' * bool(rank['why'])}{rank['why']}"


# --- The page. ---
def page(facts: Plain, *, option: str = "") -> list[str]:
    """Evidence, decision, plans, effects, phases, cost, and what remains to be done."""
    who = " ".join(x for x in (facts["name"], fmt.ranks(facts["ranks"])) if x)
    head = (
        f"inc-{facts['id']}  {facts['outcome'].upper()}  {facts['severity']} "
        f"{status_in_words(facts['status'])}  {facts['node']}  {who}"
    )
    detected = fmt.rfc3339(facts["detected_s"])
    lines = [
        f"{head}  {detected.rjust(fmt.SCREEN_COLUMNS - len(head) - 2)}",
        _cost(facts["cost"], facts["outcome"], over=facts["over"]),
        *bar(facts["phases"]),
        "",
        *_state(facts),
    ]
    if facts["num_times"] > 1:
        lines += fmt.labelled("again", f"its fault came {facts['num_times']} times")
    if facts["outcome"] == "recovering":
        lines += fmt.labelled(
            "recovers",
            "it trains again, and is healed at iteration "
            f"{fmt.count(facts['until_iteration'])} if the fault stays away",
        )
    if facts["part_of"]:
        lines += fmt.labelled("part of", facts["part_of"])
    for one in facts["on_purpose"]:
        lines += fmt.labelled("on purpose", f"{one['what']} (seq {one['seq']})")
    if facts["began"]["why"]:
        lines += fmt.labelled("began", facts["began"]["why"])
    lines += _evidence(facts)
    lines += stacks(facts["stacks"])
    if facts["dumps"]:
        lines += fmt.labelled("dumps", in_words(facts["dumps"]))
    for one in facts["decisions"]:
        lines += fmt.labelled(
            "decided", f"{one['severity']}: {one['why']} (seq {one['seq']}; {one['rule']})"
        )
    for one in facts["plans"]:
        lines += plan_lines(one)
    if not facts["plans"]:
        lines += fmt.labelled("plan", "the same slots: nothing was to be planned")
    for one in facts["waits"]:
        lines += fmt.labelled("waits", f"{one['task']}: {one['waits']}")
    if facts["computed_by"]:
        lines += fmt.labelled("computed", f"now, by decider version {facts['computed_by']}")
    lines += ["", *_effects(facts["effects"]), "", *_timeline(facts["timeline"]), ""]
    for words in facts["left"]:
        lines += fmt.labelled("you", TYPED.sub(lambda typed: fmt.command(typed[0]), words))
    if facts["acknowledged"]:
        lines += fmt.labelled("known", facts["acknowledged"])
    if not facts["left"]:
        lines += fmt.labelled(
            "you",
            "nothing is left to do"
            if facts["outcome"] != "open"
            else "it is still open: wait, or see " + fmt.command(f"unicron status{option}"),
        )
    return [*lines, *fmt.labelled("verify", fmt.command(facts["verify"]))]


def _cost(cost: Plain, outcome: str, *, over: bool) -> str:
    if outcome == "open":
        return f"not over; {cost['slot_s']:.1f} slot-s so far"
    kept = (
        f"; {cost['kept']} micro-batches kept, {cost['dealt']} dealt"
        if cost["kept"] or cost["dealt"]
        else ""
    )
    return (
        f"{fmt.ms(cost['pause_s'])} pause, "
        f"{fmt.lost_in_words(cost['iterations_lost'], is_over=over)}, "
        f"{cost['slot_s']:.1f} slot-s, {_read(cost)}{kept}"
    )


def _read(cost: Plain) -> str:
    """The source of the state in short; `_state` has the details."""
    if cost["ckpt_read"]:
        return "a checkpoint was read"
    return {"copy": "a copy was read", "seed": "begun again"}.get(
        cost["origin"], "no checkpoint read"
    )


def _evidence(facts: Plain) -> list[str]:
    """A line for each group of equal records, with how many came after the decision."""
    lines: list[str] = []
    groups: dict[str, list[Plain]] = {}
    for one in facts["evidence"]:
        groups.setdefault(one["alike"], []).append(one)
    for alike in groups.values():
        who = list(dict.fromkeys(one["who"] for one in alike))
        by = " ".join(who) if len(who) <= WHO_NUM_MAX else f"{len(who)} nodes"
        what = fmt.clipped(_what(alike), EVIDENCE_LENGTH_MAX)
        to = f" to {alike[-1]['seq']}" if len(alike) > 1 else ""
        num = sum(one["later"] for one in alike)
        late = "" if not num else "; later" if num == len(alike) else f"; {num} later"
        lines += fmt.labelled("evidence", f"{by}: {what} (seq {alike[0]['seq']}{to}{late})")
    if facts["evidence_is_cut"]:
        lines += fmt.labelled("", f"there may be more: so many ({len(facts['evidence'])}) are kept")
    return lines


def _state(facts: Plain) -> list[str]:
    """The source of the state, the layouts, the lost parts, and why no nearer source had them."""
    source = state_source(facts["cost"]) or _from_peers(facts["cost"])
    lines = fmt.labelled("state", source) if source else []
    if any(word in one for one in facts["layouts"] for word in ("TP ", "PP ", "beside")):
        lines += fmt.labelled("layout", " -> ".join(facts["layouts"]))
    if facts["lost"]:
        lines += fmt.labelled("lost", facts["lost"] + MIRRORS.get(facts["optimizer"], ""))
    for one in facts["copies_gone"]:
        lines += fmt.labelled("no copy", f"{_what([one])} (seq {one['seq']})")
    if facts["no_copies"]:
        lines += fmt.labelled("no copy", facts["no_copies"])
    return lines


def _from_peers(cost: Plain) -> str:
    if not cost["peer_bytes"]:
        return ""
    near, far = cost["near_bytes"], cost["peer_bytes"] - cost["near_bytes"]
    parts = [
        f"{fmt.scaled(num, 'B')} from members on {where}"
        for num, where in ((near, "the same node"), (far, "another node"))
        if num
    ]
    return ", ".join(parts)


def bar(phases: list[Plain]) -> list[str]:
    """The phases with their lengths, each with a proportional bar."""
    longest_s = max((one["length_s"] for one in phases), default=0.0)
    if not longest_s:
        return []
    blocks = BAR_COLUMNS // max(len(phases), 1)
    parts = [
        " ".join(
            filter(
                None,
                (
                    PHASE_WORDS.get(one["name"], one["name"]),
                    one["bound"],
                    fmt.span(one["length_s"]),
                ),
            )
        )
        + " "
        + "█" * round(blocks * one["length_s"] / longest_s)
        for one in phases
    ]
    return ["▏".join(parts).rstrip()]


def plan_lines(one: Plain) -> list[str]:
    """A plan, why it was chosen, and what it was preferred to."""
    moved = [
        f"{name} {before} -> {after}" if before != after else f"{name} {after}"
        for name, (before, after) in one["slots"].items()
    ]
    ideal = (
        f" of {fmt.scaled(one['ideal_waf'], 'FLOP/s')} with every slot" if one["ideal_waf"] else ""
    )
    by = f", throughput {' and '.join(one['origins'])}" if one["origins"] else ""
    lines = fmt.labelled(
        "plan",
        f"{one['trigger']}: {fmt.number_of(one['num_slots'], 'slot')}: "
        f"{', '.join(moved)}: WAF {fmt.scaled(one['waf'], 'FLOP/s')}{ideal}"
        f"{by} (seq {one['seq']})",
    )
    if one["why"]:
        reason = one["why"].partition(": ")[2]  # the changes are printed above
        lines += fmt.labelled("  why", f"{reason}; bound by {one['bound']}")
    for beaten in one["beaten"]:
        slots = " ".join(f"{name} {num}" for name, num in beaten["slots"].items())
        lines += fmt.labelled(
            "  rejected",
            f"{fmt.scaled(beaten['waf'], 'FLOP/s'):>12}  {slots}: {beaten['what']}; {beaten['by']}",
        )
    return lines


def _effects(effects: list[Plain]) -> list[str]:
    return fmt.table(
        ("EFFECT ON", "FAULTED", "SLOTS", "PAUSE", "LOST", "SLOT-S"),
        [
            [
                one["task"],
                "yes" if one["hurt"] else "no",
                f"{one['slots_before']} -> {one['slots']}"
                if one["slots_before"] != one["slots"]
                else str(one["slots"]),
                "waits" if one["slots"] == 0 else fmt.ms(one["pause_s"]),
                fmt.lost_cell(one["iterations_lost"]),
                "-" if one["slot_s"] is None else f"{one['slot_s']:.1f}",
            ]
            for one in effects
        ],
        right=(3, 4, 5),
    )


def _timeline(events: list[Plain]) -> list[str]:
    groups: list[list[Plain]] = []
    for one in events:
        last: Plain = groups[-1][0] if groups else {}
        together = one["alike"] == last.get("alike") or (
            one["kind"] in PER_RANK
            and (one["kind"], one["task"]) == (last.get("kind"), last.get("task"))
        )
        if together:
            groups[-1].append(one)
        else:
            groups.append([one])
    rows = [
        [
            "-" * (first["after_s"] < 0) + fmt.span(abs(first["after_s"])),
            fmt.clipped(first["who"], WHO_COLUMNS),
            _what([first, *others]),
            str(first["seq"]),
        ]
        for first, *others in groups
    ]
    width = (
        fmt.SCREEN_COLUMNS
        - max((len(row[0]) + len(row[1]) + len(row[3]) for row in rows), default=0)
        - 12
    )
    for row in rows:
        row[2] = fmt.clipped(row[2], width)
    return fmt.table(("+TIME", "WHO", "WHAT", "SEQ"), rows, right=(0, 3))


def _what(alike: Sequence[Plain]) -> str:
    """The text of the first of these events, with their number and ranks."""
    first = alike[0]
    other = f"[{first['name']}] " if first["other"] else ""
    times = f"{len(alike)} x " if len(alike) > 1 else ""
    ranks = sorted({one["rank"] for one in alike if one["rank"] is not None})
    who = f"{fmt.ranks(ranks)}, the first: " if len(ranks) > 1 else ""
    text = first["what"].removeprefix(f"task {first['task']} ")
    return f"{other}{times}{first['kind']} {who}{text}"


def every(found: Plain, *, option: str = "") -> list[str]:
    """All incidents (GET /v1/timeline/incidents), the newest last, below the node loss that they
    belong to; then outages."""
    incidents, losses = {one["id"]: one for one in found["incidents"]}, found["node_losses"]
    away = [
        line for one in found["outages"] for line in fmt.labelled("AWAY", outage(one["outage"]))
    ]
    if not incidents:
        return [NONE, *(line for loss in losses for line in _node_loss(loss)), *away]
    below = {key for loss in losses for key in loss["incidents"]}
    rows = [row(one, fmt.SCREEN_COLUMNS) for one in incidents.values()]
    for cells, one in zip(rows, incidents.values(), strict=True):
        cells[0] = "  " * (one["id"] in below) + cells[0]
        cells[1] = fmt.rfc3339(one["detected_s"])[:19] + "Z"
        cells.insert(3, fmt.clipped(one["name"], NAME_COLUMNS) if one["task"] else "-")
    head = (*HEAD[:3], "TASK", *HEAD[3:])
    over = max(map(len, fmt.table(head, rows))) - fmt.SCREEN_COLUMNS
    what_columns = max(len(cells[4]) for cells in rows) - max(over, 0)
    for cells in rows:
        cells[4] = fmt.clipped(cells[4], what_columns)
    first, *lines = fmt.table(head, rows, right=(6, 7, 8))
    shown = {key: [line] for key, line in zip(incidents, lines, strict=True)}
    for loss in losses:
        shown[loss["id"]] = [
            *_node_loss(loss),
            *(shown.pop(key)[0] for key in loss["incidents"] if key in shown),
        ]
    return [
        first,
        *(line for key in sorted(shown) for line in shown[key]),
        *away,
        "",
        f"next       unicron incident {max(incidents)}{option}",
    ]


def _node_loss(one: Plain) -> list[str]:
    num = fmt.number_of(len(one["incidents"]), "incident")
    return fmt.labelled("NODES", f"{one['in_words']}; {num}")


def row(one: Plain, what_columns: int) -> list[str]:
    """One incident in the columns of `HEAD`."""
    what = f"{fmt.ranks(one['ranks'])}, {status_in_words(one['status'])}"
    return [
        f"inc-{one['id']}",
        fmt.rfc3339(one["detected_s"])[:16] + "Z",
        one["severity"],
        fmt.clipped(what, what_columns),
        one["outcome"],
        fmt.ms(one["pause_s"]),
        fmt.lost_cell(one["iterations_lost"]),
        f"{one['slot_s']:.1f}",
    ]
