"""The pages of plans: the present plan, a dry run, and what constrains a plan."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...control_plane.planner.alternative_names import (
    NOT_COMPARABLE_NUM,
    bound_by,
    not_taken,
    percent,
)
from ...control_plane.throughput.memory import in_gib
from ..terminal import format as fmt
from ..terminal.format import Plain
from .stragglers import degraded_lines

ROWS_NUM_MAX = 20
"""Tasks that are listed; the rest are counted."""
PLACES_NUM_MAX = 8
"""Nodes that one line names."""
NAME_COLUMNS, WHAT_COLUMNS = 24, 44


def present(found: Plain, *, now_s: float, option: str = "") -> list[str]:
    """The plan in force at `now_s`, and why it was chosen."""
    plan = found["plan"]
    if plan is None:
        return [
            _head("unicron plan", f"input {found['input']}"),
            f"no task, no plan: unicron submit deploy/examples/demo.yaml{option}",
        ]
    ago = fmt.span(max(now_s - found["plan_s"], 0.0))
    made = f"made {ago} ago (seq {found['plan_seq']})"
    rows = [
        [
            fmt.clipped(one["name"], NAME_COLUMNS),
            _arrow(fmt.count, one["slots_before"], one["slots"]),
            f"{one['weight']:g}",
            _waf(one["waf"]),
            one["origin"],
            one["waits"] and "waits",
        ]
        for one in found["tasks"][:ROWS_NUM_MAX]
    ]
    if (left := len(found["tasks"]) - ROWS_NUM_MAX) > 0:
        rows.append([f"{fmt.count(left)} more", "", "", "", "", ""])
    return [
        _head(
            "unicron plan",
            f"input {found['input']}, {fmt.number_of(plan['num_slots'], 'slot')}, {made}",
        ),
        *fmt.labelled("after", plan["trigger"]),
        *fmt.labelled("why", plan["why"]),
        "",
        *fmt.table(("TASK", "SLOTS", "WEIGHT", "WAF", "BY", ""), rows, right=(2, 3)),
        "",
        *_alternatives(plan),
        "",
        *_constraints(found),
        *_layouts(found["tasks"]),
        *_each_that("waits", found),
        *_each_that("fails", found),
        *_paused(found, option),
        *_computed(found),
        *fmt.labelled(
            "try",
            fmt.command(f"unicron plan --without NODE{option}")
            + "   "
            + fmt.command(f"--with {found['more_slots']}")
            + "   "
            + fmt.command("--weight TASK=W")
            + "   "
            + fmt.command("--submit JOB.yaml"),
        ),
    ]


def dry_run(found: Plain, asked: str, *, option: str = "") -> list[str]:
    """The plan after a change. `asked`: the options of the change as typed."""
    typed = f"unicron plan {asked}"
    plan = found["plan"]
    if plan is None:
        return [
            _head(typed, f"dry run, input {found['input']}"),
            "no task, no plan: nothing would follow",
        ]
    num = _arrow(fmt.count, found["num_slots_before"], plan["num_slots"])
    lines = [
        _head(
            typed,
            f"dry run, input {found['input']}, {num} slots, exact, {fmt.span(found['took_s'])}",
        ),
        *_gain(found),
        *degraded_lines(found),
    ]
    if found["planned"]:
        lines += ["", *_changes(found), "", *_alternatives(plan)]
    # The payback time belongs to one plan: it is not shown for several plans, or for none.
    lines += [
        "",
        *_constraints(found, with_payback=found["num_plans"] == 1),
        *_moves(found),
        *_layouts([one for one in found["tasks"] if one["layout"] != one["layout_before"]]),
        *_copies(found["tasks"]),
        *_each_that("waits", found),
        *_assumes(found),
        *_paused(found, option),
    ]
    if not found["planned"]:
        return lines
    if "--with " in f"{asked} ":
        return [
            *lines,
            *fmt.labelled(
                "do it",
                "to add slots, add a machine, and on it run "
                + fmt.command("unicron agent --url URL"),
            ),
        ]
    return [
        *lines,
        *fmt.labelled("do it", fmt.command(f"{typed} --apply --check {found['input']}{option}")),
    ]


def offline(shown: Plain, path: str) -> list[str]:
    """The plan of a file of tasks, without a cluster."""
    plan = shown["plan"]
    slots = fmt.number_of(plan["num_slots"], "slot")
    return [
        _head(f"unicron plan --offline {path}", f"{slots}, exact, {fmt.span(shown['took_s'])}"),
        *_gain(shown),
        "",
        *_changes(shown, each=True),
        "",
        *_alternatives(plan),
        "",
        *_constraints(shown),
        *(
            line
            for task in shown["tasks"]
            if task["slots_before"] and not task["waf_before"]
            for line in fmt.labelled(
                "note",
                f"{task['name']} has no throughput on its current {task['slots_before']}: it "
                "counts as earning nothing before",
            )
        ),
    ]


# --- Parts of the pages. ---
def _head(typed: str, note: str) -> str:
    width = fmt.SCREEN_COLUMNS - len(note) - 2
    return f"{fmt.clipped(typed, width):<{width}}  {note}"


def _gain(found: Plain) -> list[str]:
    if not found["planned"]:
        return ["no plan would follow from it: all stays as it is"]
    before, after = _sum(found, "waf_before"), _sum(found, "waf")
    gain, cost = after - before, found["transition_flop"]
    why = found["plan"]["why"]
    if found["num_plans"] > 1:  # each step has its own plan; none covers the whole change
        why = (
            f"{_moved(found)}, by {found['num_plans']} plans, one for each step; the last one: "
            f"{why.partition(': ')[2]}"
        )
    lines = fmt.labelled("why", why)
    if not gain and not cost:
        return lines
    share = f" ({'+' if gain > 0 else '-'}{percent(abs(gain) / before)})" if before > 0 else ""
    earns = f"{'+' if gain > 0 else '-'}{_waf(abs(gain))} of WAF{share}" if gain else "the same WAF"
    return [*lines, *fmt.labelled("worth", f"{earns}; the changes cost {fmt.scaled(cost, 'FLOP')}")]


def _moved(found: Plain) -> str:
    return (
        fmt.listed(
            [
                f"{one['name']} {one['slots_before']} -> {one['slots']}"
                for one in found["tasks"]
                if one["slots"] != one["slots_before"]
            ]
        )
        or "every task keeps its number"
    )


def _sum(found: Plain, name: str) -> float:
    return math.fsum(one[name] for one in found["tasks"])


def _changes(found: Plain, *, each: bool = False) -> list[str]:
    """Tasks that change or pause, by change of WAF; then the other tasks, in sum or (`each`) one by
    one, and the total."""

    def busy(one: Plain) -> bool:
        return bool(one["slots"] != one["slots_before"] or one["pause_s"] or not one["task"])

    still = [one for one in found["tasks"] if not busy(one)]
    moved = sorted(
        (one for one in found["tasks"] if busy(one)),
        key=lambda one: -abs(one["waf"] - one["waf_before"]),
    )
    if each:
        moved, still = [*moved, *still], []
    rows = [
        [
            fmt.clipped(one["name"], NAME_COLUMNS),
            _arrow(fmt.count, one["slots_before"], one["slots"]),
            _arrow(_waf, one["waf_before"], one["waf"]),
            fmt.span(one["pause_s"]) if one["pause_s"] else "-",
            _lost(one) if busy(one) or not one["slots"] else "unchanged",
        ]
        for one in moved[:ROWS_NUM_MAX]
    ]
    if len(moved) > ROWS_NUM_MAX:
        rows.append(
            [f"{fmt.count(len(moved) - ROWS_NUM_MAX)} more", "change" * (not each), "", "", ""]
        )
    if still:
        rows.append(
            [
                fmt.number_of(len(still), "other"),
                fmt.count(sum(x["slots"] for x in still)),
                _waf(math.fsum(x["waf"] for x in still)),
                "-",
                "unchanged",
            ]
        )
    rows.append(
        [
            "all",
            _arrow(
                fmt.count,
                sum(x["slots_before"] for x in found["tasks"]),
                sum(x["slots"] for x in found["tasks"]),
            ),
            _arrow(_waf, _sum(found, "waf_before"), _sum(found, "waf")),
            "",
            "",
        ]
    )
    return fmt.table(("TASK", "SLOTS", "WAF", "PAUSE", "LOST"), rows)


def _lost(one: Plain) -> str:
    """The iterations that the change costs a task; 0 if its state moves in memory, or is saved."""
    if not one["pause_s"] or not one["tier"]:
        return "-" if one["slots"] else "waits"
    if one["tier"] == "command":
        return "stopped" if not one["slots"] else "starts again"
    return "0" if one["slots"] else "0, saved first"


def _alternatives(plan: Plain) -> list[str]:
    """The plan and its alternatives, the nearest first."""
    worth = plan["objective_flop"]
    rows = [["1", "this plan", _waf(plan["waf"]), "chosen"]]
    if plan.get("alpha"):
        return _by_alpha(plan, rows)
    others = sorted(plan["alternatives"], key=lambda other: other["behind_flop"])
    for place, other in enumerate(others, 2):
        behind = other["behind_flop"]
        share = f" ({percent(behind / worth)})" if behind > 0 < worth else ""
        value = (
            f"loses {fmt.scaled(behind, 'FLOP')}{share}"
            if behind > 0
            else "is worth as much"
            if not behind
            else f"gains {fmt.scaled(-behind, 'FLOP')}" + not_taken(plan, other["what"])
        )
        if behind > 0 and other["waf"] > plan["waf"]:
            value += ": its changes cost more than they earn"
        what = fmt.clipped(other["what"], WHAT_COLUMNS)
        rows.append([str(place), what, _waf(other["waf"]), value])
    return fmt.table(("", "PLAN", "WAF", ""), rows, right=(2,))


def _by_alpha(plan: Plain, rows: list[list[str]]) -> list[str]:
    """The same under alpha-fairness. `behind_share` is the difference of the objectives as a
    share: a slowdown of all tasks of the plan by this share costs as much."""
    others = sorted(plan["alternatives"], key=lambda other: -other["objective"])
    for place, other in enumerate(others, 2):
        behind, by = other["behind_share"], f" by alpha-fairness {plan['alpha']:g}"
        value = (
            "not comparable: other tasks wait"
            if other["objective"] == NOT_COMPARABLE_NUM
            else "is worth as much"
        )
        if behind:
            value = f"{'loses' if behind > 0 else 'gains'} {percent(abs(behind))}{by}" + (
                "" if behind > 0 else not_taken(plan, other["what"])
            )
        what = fmt.clipped(other["what"], WHAT_COLUMNS)
        rows.append([str(place), what, _waf(other["waf"]), value])
    return fmt.table(("", "PLAN", "WAF", ""), rows, right=(2,))


def _constraints(found: Plain, *, with_payback: bool = True) -> list[str]:
    """The binding constraint of the plan, its horizon, its payback time and its hot spare."""
    plan = found["plan"]
    names: dict[int, str] = {one["task"]: one["name"] for one in found["tasks"]}
    if found["planned"] and 0 in names:  # a task of the dry run has no id yet
        names = {**dict.fromkeys(plan["bound_tasks"], names[0]), **names}
    bound = bound_by(plan, names) or "unknown"
    more = (
        f"{found['more_slots']} more: +{_waf(found['more_waf'])}"
        if found["more_waf"]
        else f"{found['more_slots']} more would earn nothing"
        + " because of sizes, gain_min or costs of changes" * (plan.get("bound") == "slots")
    )
    hold = (
        f"{fmt.span(plan['running_s'])}, the expected time until the next fault; the plan is "
        f"worth {fmt.scaled(plan['objective_flop'], 'FLOP')} in it"
        if plan["running_s"]
        else "unknown"
    )
    return [
        *fmt.labelled("bound by", f"{bound} ({more})"),
        *fmt.labelled("horizon", hold),
        *(_paid_back(plan) if with_payback else []),
        *_spare(plan),
    ]


def _paid_back(plan: Plain) -> list[str]:
    """When the plan has earned back the cost of changing healthy tasks; empty if there is none."""
    back_s = plan.get("paid_back_s", 0.0)
    return (
        fmt.labelled(
            "paid back",
            f"after {fmt.span(back_s)} of the horizon, compared with "
            "leaving healthy tasks as they are",
        )
        if back_s
        else []
    )


def _spare(plan: Plain) -> list[str]:
    """Whether a hot spare is kept, its cost and its benefit; empty if none is configured."""
    spare = plan.get("spare")
    if spare is None:
        return []
    slots = fmt.number_of(spare["num_slots"], "slot")
    cost = f"cost{{}} {fmt.scaled(max(spare['cost_flop'], 0.0), 'FLOP')} until the next fault"
    saves = spare["saves_flop"]
    then = (
        f"save{{}} {fmt.scaled(saves, 'FLOP')}"
        if saves > 0
        else f"lose{{}} {fmt.scaled(-saves, 'FLOP')} more"
        if saves < 0
        else "save{} nothing"
    )
    return fmt.labelled(
        "hot spare",
        {
            "kept": f"{slots} kept idle: {cost.format('s')}, {then.format('s')} then",
            "not kept": f"{slots} not kept: would {cost.format('')}, {then.format('')} then",
            "idle anyway": f"{slots} idle anyway: they are the spare, and cost nothing",
        }.get(spare["verdict"], f"{slots} not priced: too many tasks and sizes to do so in time"),
    )


def _moves(found: Plain) -> list[str]:
    lines: list[str] = []
    for one in found["tasks"][:ROWS_NUM_MAX]:
        old, new = ([seat["slot"] for seat in one[key]] for key in ("seats_before", "seats"))
        leaves = [slot for slot in old if slot not in new]
        takes = [slot for slot in new if slot not in old]
        words = [
            f"{word} {_places(slots)}"
            for word, slots in (("leaves", leaves), ("takes", takes))
            if slots
        ]
        if words:
            lines += fmt.labelled("moves" if not lines else "", f"{one['name']} {', '.join(words)}")
    return lines


def _layouts(tasks: Sequence[Plain]) -> list[str]:
    layouts = [
        f"{one['name']} "
        + _arrow(str, one["layout_before"] or one["layout"], one["layout"] or one["layout_before"])
        for one in tasks
        if one["layout"] or one["layout_before"]
    ][:ROWS_NUM_MAX]
    return [
        line for i, one in enumerate(layouts) for line in fmt.labelled("" if i else "layout", one)
    ]


def _copies(tasks: Sequence[Plain]) -> list[str]:
    """The host memory of a submitted task's in-memory checkpoints on one node, or why none."""
    lines: list[str] = []
    for one in tasks:
        if one["no_copies"]:
            lines += fmt.labelled(
                "copies", f"{one['name']} will keep no in-memory checkpoints: {one['no_copies']}"
            )
        elif one["copies_bytes"]:
            of = f" of the {in_gib(one['copies_max'])} for all tasks" if one["copies_max"] else ""
            lines += fmt.labelled(
                "copies",
                f"{one['name']} takes up to "
                f"{in_gib(one['copies_bytes'])} of host memory{of} on "
                "a node",
            )
    return lines


def _places(slots: Sequence[Plain]) -> str:
    """The slots as text, for example `n1/0 n2/0-7`."""
    of: dict[str, list[int]] = {}
    for slot in slots:
        of.setdefault(slot["node"], []).append(slot["index"])
    words: list[str] = []
    for node, indices in of.items():
        whole = len(indices) > 1 and max(indices) - min(indices) + 1 == len(indices)
        words.append(
            f"{node}/{min(indices)}-{max(indices)}"
            if whole
            else " ".join(f"{node}/{index}" for index in sorted(indices))
        )
    left = len(words) - PLACES_NUM_MAX
    return " ".join(words[:PLACES_NUM_MAX]) + (f" and {left} nodes more" if left > 0 else "")


def _each_that(what: str, shown: Plain) -> list[str]:
    """The tasks that have this: `waits` or `fails`, with the reason."""
    return [
        line
        for task in shown["tasks"][:ROWS_NUM_MAX]
        if task[what]
        for line in fmt.labelled(what, f"{task['name']}: {task[what]}")
    ]


def _computed(found: Plain) -> list[str]:
    """Which decider version computed what is not in the log, and at which record."""
    left = "; plans that break a limit are left out: too many tasks and sizes" * found["is_cut"]
    return fmt.labelled(
        "computed", f"now, by decider version {found['computed_by']}, for seq {found['seq']}{left}"
    )


def _assumes(found: Plain) -> list[str]:
    """What the dry run assumes: the origins of the throughput tables, and no further faults."""
    by: dict[str, list[str]] = {}
    for one in found["tasks"]:
        by.setdefault(one["origin"] or "unknown", []).append(one["name"])
    origins = [f"{fmt.listed(names)} {origin}" for origin, names in by.items()]
    counted = "; the table of plans counts nominal rates, by which they are compared, as WAF"
    return (
        fmt.labelled(
            "assumes",
            f"throughput of {'; of '.join(origins)}; nothing fails on the "
            f"way{counted * ('nominal' in by)}",
        )
        if origins
        else []
    )


def _paused(found: Plain, option: str) -> list[str]:
    if not found["held"]:
        return []
    return fmt.labelled(
        "paused",
        f"{found['held']}; nothing is ordered. To act: "
        + fmt.command(fmt.way_to_act(found["held"], option)),
    )


def _waf(value: float) -> str:
    return fmt.scaled(value, "FLOP/s")


def _arrow(show: Callable[[Any], str], before: Any, after: Any) -> str:
    """`32 -> 24`, or `32` if equal."""
    if before == after or show(before) == show(after):
        return show(after)
    return f"{show(before)} -> {show(after)}"
