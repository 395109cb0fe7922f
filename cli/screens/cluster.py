"""The status screen of the cluster: what needs an operator, incidents, failures, totals, tasks."""

import math
from collections import Counter

from ...control_plane.api.needs import ENDED, acknowledged, lag_s
from ...events.records.in_words import outage, status_in_words
from ..terminal import format as fmt
from ..terminal.format import Plain
from .nodes import recovers, slot_use
from .task import computed, waits

INCIDENTS_SHOWN_NUM = 3
OLD_AGENTS_SHOWN_NUM = 8
ENDED_SHOWN_NUM = 8
FAILED_SHOWN_NUM = OUTAGES_SHOWN_NUM = 3
ROWS_NUM_MAX, ROWS_NUM_MIN = 40, 3
"""Tasks that are listed: at most, unless the height is given, and at least."""
REASONS_NUM_MAX = 8
WIDE = ("team", "priority", "tier")
NAME_LENGTH_MAX = 24
NEWS_S = 24 * 3600.0
"""Failures and closed incidents are shown for this long."""


def status(
    view: Plain,
    *,
    cluster: str,
    now_s: float,
    option: str = "",
    height: int = ROWS_NUM_MAX,
    wide: bool = False,
) -> list[str]:
    """The whole cluster: first what needs an operator, then the totals, then the tasks, of which
    so many are listed that the screen has `height` lines if it can; by default ROWS_NUM_MAX."""
    cluster_view = view["cluster"]
    listed: list[Plain] = view["tasks"]
    head = f"{cluster}  {fmt.rfc3339(now_s)}  seq {cluster_view['seq']}"
    lines = [
        f"unicron status{head.rjust(fmt.SCREEN_COLUMNS - len('unicron status'))}",
        *_needs_you(view, option),
        *_incidents(view, now_s, option, are_open=True),
        *_failures(view, option),
        *_incidents(view, now_s, option, are_open=False),
        *_outages(view, now_s, option),
        "",
        *_totals(view, now_s, option),
        "",
    ]
    if not listed:
        return [*lines, f"no tasks yet: unicron submit deploy/examples/demo.yaml{option}"]
    live = sorted(
        (task for task in listed if task["state"] not in ENDED),
        key=lambda task: bool(task["state"] == "waiting"),
    )
    shown = [*live, *[task for task in listed if task["state"] in ENDED][-ENDED_SHOWN_NUM:]]
    rest = [*_waiting(live, option), *computed(cluster_view)]
    if height != ROWS_NUM_MAX:  # that of a terminal
        height -= len(lines) + len(rest) + len(("head", "the number of the others"))
    shown = shown[: max(height, ROWS_NUM_MIN)]
    if (num := len(listed) - len(shown)) > 0:
        rest.insert(0, f"and {num} more: unicron status tasks{option}")
    return [*lines, *tasks(shown, wide=wide), *rest]


def of_tasks(found: list[Plain], option: str, *, wide: bool) -> list[str]:
    """Tasks, why they wait, and their number."""
    return [*tasks(found, wide=wide), *_waiting(found, option), _states(found) or "no task"]


def tasks(chosen: list[Plain], *, wide: bool = False) -> list[str]:
    """A line for each task, with `wide` also its team, priority, tier and nodes."""
    more = (*map(str.upper, WIDE), "NODES") if wide else ()
    return fmt.table(
        (
            "ID",
            "TASK",
            "STATE",
            "SLOTS",
            "LAYOUT",
            "WEIGHT",
            "ITERATION",
            "S/ITER",
            "LOSS",
            "WAF",
            "HEALED",
            "LOST",
            *more,
        ),
        [_task_row(task, wide=wide) for task in chosen],
        right=(0, 3, 5, 7, 8, 9, 10, 11),
    )


def _waiting(listed: list[Plain], option: str) -> list[str]:
    """Why tasks wait and what they need: each reason once, with the tasks that have it."""
    names: dict[str, list[str]] = {}
    for task in listed:
        if task["state"] not in ENDED and (task["why"] or task["needs"]):
            names.setdefault(waits(task), []).append(task["name"])
    lines = [
        line
        for words, of in list(names.items())[:REASONS_NUM_MAX]
        for line in fmt.labelled(
            fmt.clipped(of[0], NAME_LENGTH_MAX),
            f"and {fmt.number_of(len(of) - 1, 'other')}: {words}" if len(of) > 1 else words,
        )
    ]
    if (num := len(names) - REASONS_NUM_MAX) > 0:
        lines.append(f"and {num} other reasons: unicron status TASK{option}")
    return lines


def _states(of: list[Plain]) -> str:
    """The number of tasks in each state: `6 running, 194 waiting`."""
    return ", ".join(
        f"{num} {state}" for state, num in Counter(str(task["state"]) for task in of).most_common()
    )


# --- News. ---
def _needs_you(view: Plain, option: str) -> list[str]:
    """Without the failed tasks."""
    return [
        line
        for one in view["needs"]
        if one["what"] != "failed"
        for line in fmt.labelled("NEEDS YOU", fmt.said(one["why"], one["do"], option))
    ]


def _failures(view: Plain, option: str) -> list[str]:
    """Each recently failed task; if there are many, their number and the last one."""
    failed = [one for one in view["needs"] if one["what"] == "failed"]
    of = f"{len(failed)} tasks failed, the last: " if len(failed) > FAILED_SHOWN_NUM else ""
    return [
        line
        for one in (failed[-1:] if of else failed)
        for line in fmt.labelled("NEEDS YOU", of + fmt.said(one["why"], one["do"], option))
    ]


def _incidents(view: Plain, now_s: float, option: str, *, are_open: bool) -> list[str]:
    """All open incidents; or the newest closed ones, with the number of those of ended tasks."""
    names = {task["id"]: task["name"] for task in view["tasks"]}
    over = {task["id"] for task in view["tasks"] if task["state"] in ENDED}
    found = sorted(view["incidents"], key=lambda one: -int(one["id"]))
    if are_open:
        lines = [
            line
            for one in _as_one([x for x in found if not x["outcome"]])
            for line in _incident(view, one, names, now_s, option)
        ]
        for node in view["nodes"]:
            if node["contact"] == "heard" and (back := recovers(node)):
                lines += fmt.labelled("HEALING", f"{node['id']} {back}")
        return lines
    shown = {one["task"] for one in view["needs"] if one["what"] == "failed"}  # listed above
    closed = [
        one
        for one in found
        if one["outcome"]
        and now_s - one["closed_s"] < NEWS_S
        and (one["outcome"] != "failed" or one["task"] not in shown)
    ]
    news = [one for one in closed if one["task"] not in over]
    lines = [
        line
        for one in _as_one(news)[:INCIDENTS_SHOWN_NUM]
        for line in _incident(view, one, names, now_s, option)
    ]
    if past := [one for one in closed if one["task"] in over]:
        lines += fmt.labelled(
            "OVER",
            f"{fmt.number_of(len(past), 'incident')} of tasks that have "
            "ended, the last: " + fmt.command(f"unicron incident {past[0]['id']}{option}"),
        )
    return lines


def _as_one(found: list[Plain]) -> list[Plain]:
    """The first of incidents that share evidence (a lost node's), with the number of others."""
    kept: dict[int, Plain] = {}
    for one in found:
        seqs = (one["id"], *one["evidence"])
        first = next((kept[seq] for seq in seqs if seq in kept), {**one, "num_others": -1})
        first["num_others"] += 1
        kept |= dict.fromkeys(seqs, first)
    return list({one["id"]: one for one in kept.values()}.values())


def _incident(
    view: Plain, one: Plain, names: dict[int, str], now_s: float, option: str
) -> list[str]:
    who = names.get(one["task"], one["node"] or "cluster")
    what = (
        f"inc-{one['id']} {fmt.rfc3339(one['opened_s'])[11:16]} {one['severity']} {who} "
        f"{fmt.ranks(one['ranks'])}, {status_in_words(one['status'])}"
    )
    end = (
        f"{fmt.lost_in_words(one['iterations_lost'])}, pause {fmt.ms(one['pause_s'])}"
        if one["outcome"] or one["recovering_s"]
        else f"since {fmt.span(max(now_s - one['opened_s'], 0.0))}"
    )
    if one["recovering_s"]:
        end += f", until iteration {fmt.count(one['until_iteration'])}"
    if one["num_times"] > 1:
        end += f", {one['num_times']} times"
    if known := acknowledged(one):
        end += f", {known}"
    going_on = "healing" if view["cluster"]["healing"] == "on" else "paused"
    going_on = "recovering" if one["recovering_s"] else going_on
    which = one["id"]
    if num := one["num_others"]:
        end, which = f"{end}; with it {fmt.number_of(num, 'other task')}", "--all"
    return fmt.labelled(
        (one["outcome"] or going_on).upper(),
        f"{what}: {end}: " + fmt.command(f"unicron incident {which}{option}"),
    )


def _outages(view: Plain, now_s: float, option: str) -> list[str]:
    recent = [one for one in view["outages"] if now_s - one["since_s"] - one["length_s"] < NEWS_S]
    lines = [
        line for one in recent[-OUTAGES_SHOWN_NUM:] for line in fmt.labelled("AWAY", outage(one))
    ]
    if (num := len(recent) - OUTAGES_SHOWN_NUM) > 0:
        lines += fmt.labelled("AWAY", f"{num} times more: unicron incident --all{option}")
    return lines


# --- Totals. ---
def _totals(view: Plain, now_s: float, option: str) -> list[str]:
    cluster = view["cluster"]
    slots, health = _counts(view["nodes"])
    silent = _on_unreachable(view["nodes"])
    spare = min(_spare_slots(view["plan"]), slots["idle"])
    notes = {
        "idle": f" ({f'{spare} of them ' * (spare < slots['idle'])}hot spare)" * (spare > 0),
        "train": silent,
    }
    follows, followers = cluster.get("follows"), cluster.get("followers")
    whose = f"as seen by a follower of {follows}," if follows else "leader of"
    behind = f", followed by {' '.join(followers)}" if followers else ""
    lost = f", {cluster['reports_lost']} reports lost" if cluster["reports_lost"] else ""
    num_dead = cluster.get("dead_letters", 0)
    of = view["tasks"]
    return [
        *_waf(view, now_s),
        *_plan(view),
        *[f"tasks  {_states(of)}"] * (len(of) > ENDED_SHOWN_NUM),
        "slots  "
        + ", ".join(f"{num} {what}{notes.get(what, '')}" for what, num in slots.items())
        + "     nodes  "
        + (", ".join(f"{num} {name}" for name, num in sorted(health.items())) or "none"),
        f"log    {whose} epoch {cluster['epoch']}{behind}, {fmt.count(cluster['seq'])} records"
        f"{lost}, healing {cluster['healing'].partition(':')[0]}, {cluster['hash']}",
        *_old_agents(cluster),
        *[f"dead   {fmt.number_of(num_dead, 'dead letter')}: unicron log dead-letters{option}"]
        * (num_dead > 0),
        *["insecure: what passes between hosts is not encrypted"] * cluster.get("insecure", False),
    ]


def _old_agents(cluster: Plain) -> list[str]:
    """A line if agents are of release 0.3.0, and the leader reads a list that they share."""
    old: list[str] = cluster.get("old_agents", [])
    if not old:
        return []
    names = " ".join(old[:OLD_AGENTS_SHOWN_NUM]) + " ..." * (len(old) > OLD_AGENTS_SHOWN_NUM)
    return [f"agents of release 0.3.0, to be upgraded: {names}"]


def _spare_slots(plan: Plain | None) -> int:
    """Slots that the last plan reserves as a hot spare."""
    spare: Plain | None = plan["spare"] if plan is not None else None
    return int(spare["num_slots"]) if spare is not None and spare["verdict"] == "kept" else 0


def _counts(nodes: list[Plain]) -> tuple[dict[str, int], dict[str, int]]:
    """Slots by use, nodes by health; a node that has left has no slots."""
    slots = {"train": 0, "idle": 0, "out": 0, "drained": 0}
    health: dict[str, int] = {}
    for node in nodes:
        word = node["health"]
        health[word] = health.get(word, 0) + 1
        for slot in node["slots"]:
            use = slot_use(node, slot)
            if use == "unreachable":
                use = "train" if slot["task"] else "out"
            if use != "left":
                slots[use] += 1
    if not slots["drained"]:
        del slots["drained"]
    return slots, health


def _on_unreachable(nodes: list[Plain]) -> str:
    found = [
        sum(bool(slot["task"]) for slot in node["slots"])
        for node in nodes
        if node["contact"] == "unreachable"
    ]
    num = sum(one > 0 for one in found)
    where = "an unreachable node" if num == 1 else "unreachable nodes"
    return f" ({sum(found)} of them on {where})" if num else ""


def _waf(view: Plain, now_s: float) -> list[str]:
    """The present WAF, measured, and the mean of each half hour of the last 24 h."""
    waf = math.fsum(task["waf"] for task in view["tasks"] if not lag_s(task, now_s))
    line = f"WAF    {fmt.scaled(waf, 'FLOP/s')} achieved, weighted, measured"
    means = earned(view, now_s)
    if len(means) > 1:
        hours = view["cluster"]["earned"][0]["length_s"] * len(means) / 3600
        line += f"   {hours:.3g} h {fmt.curve(means, len(means), 0.0)}"
    return [line]


def earned(view: Plain, now_s: float) -> list[float]:
    """The mean weighted FLOP/s of each time span in the state, since the first submission."""
    spans: list[Plain] = view["cluster"]["earned"]
    if not spans:
        return []
    flops = {span_["at_s"]: span_["flop"] for span_ in spans}
    at_s, length_s = spans[0]["at_s"], spans[0]["length_s"]
    begun_s = min((task["submitted_s"] for task in view["tasks"]), default=at_s)
    means: list[float] = []
    while at_s < now_s:
        took_s = min(at_s + length_s, now_s) - max(at_s, begun_s)
        means.append(flops.get(at_s, 0.0) / max(took_s, 1.0))
        at_s += length_s
    return means


def _plan(view: Plain) -> list[str]:
    """The WAF of the plan and the ideal, both by the throughput tables of the plan."""
    plan, tasks = view["plan"], {task["id"]: task for task in view["tasks"]}
    if plan is None or not any(task["state"] not in ENDED for task in tasks.values()):
        return []
    given = [*plan["allocations"], *plan["kept"]]
    origins = fmt.origins(given, tasks)
    if unearned := fmt.nominal(given, tasks):
        earned = {one["task"] for one in given} - unearned
        by = "".join(f", {origin}" for origin in origins)
        return (
            fmt.labelled(
                "plan",
                f"{fmt.scaled(fmt.plan_waf(plan, earned), 'FLOP/s')}{by}, {fmt.NOT_COUNTED}",
                indent=7,
            )
            if earned
            else []
        )
    waf = fmt.plan_waf(plan)
    ideal = (
        f" of {fmt.scaled(plan['ideal_waf'], 'FLOP/s')} with every slot "
        f"({100 * waf / plan['ideal_waf']:.1f} %)"
        if plan["ideal_waf"]
        else ""
    )
    compares = "" if origins == ["measured"] else ": compares with plans only"
    by = f", {' and '.join(origins)}{compares}" if origins else ""
    return fmt.labelled("plan", f"{fmt.scaled(waf, 'FLOP/s')}{ideal}{by}", indent=7)


# --- The table. ---
def done(task: Plain) -> str:
    """Iterations done, with their total if it is known; `-` if a command has printed none."""
    if task["iterations"]:
        return f"{fmt.count(task['iteration'])}/{fmt.count(task['iterations'])}"
    return fmt.count(task["iteration"]) if task["iteration"] else "-"


def _loss(task: Plain) -> str:
    if task["not_finite"]:
        return str(task["not_finite"]["text"])
    return "-" if task["loss"] is None else f"{task['loss']:.3f}"


def _task_row(task: Plain, *, wide: bool) -> list[str]:
    now, target = task["slots"]["now"], task["slots"]["target"]
    slots = (
        str(now)
        if now == target
        else f"{now} of {target}"
        if now < target
        else (f"{now} -> {target}")
    )
    return [
        str(task["id"]),
        fmt.clipped(task["name"], NAME_LENGTH_MAX),
        task["state"].upper(),
        slots,
        task["layout"] or "-",
        f"{task['weight']:g}",
        done(task),
        f"{task['step_s']:.2f}" if task["step_s"] else "-",
        _loss(task),
        fmt.scaled(task["waf"], "").strip() if task["waf"] else "-",
        str(task["healed"]),
        fmt.lost_cell(task["iterations_lost"]),
        *(
            [
                *(str(task[name] or "-") for name in WIDE),
                " ".join(dict.fromkeys(one["node"] for one in task["ranks"])) or "-",
            ]
            if wide
            else []
        ),
    ]
