"""The decisions that follow from one operator request: their records, and as text."""

from msgspec import Struct

from ...control_plane.planner.alternative_names import hidden
from ..cluster.client import Client
from ..terminal.format import (
    NOT_COUNTED,
    Plain,
    labelled,
    listed,
    nominal,
    number_of,
    origins,
    plan_waf,
    scaled,
)

NAME_COLUMNS_MIN = 8
EXPLAINED = ("why", "needs", "cost_waf", "weight_from")
"""Fields of a waiting task that are computed on request."""


class Outcome(Struct, frozen=True, kw_only=True):
    """The decisions that follow from one request: bodies of the records of one append."""

    seq: int
    plan: Plain | None
    placed: list[Plain]
    waiting: list[Plain]
    withheld: list[Plain]
    orders: list[str]
    """The kinds of the orders in the same append."""


def outcome_of(client: Client, seq: int) -> Outcome:
    """The decisions that a request caused. The control plane may append several requests at once:
    then their decisions are one set, and belong to each of them."""
    found: list[Plain] = []
    source, causes = "", {seq}
    for record in client.records(seq - 1, follow=False):
        source = source or record["source"]
        if record["source"] == source:
            causes.add(record["seq"])
        elif record["cause"] in causes:
            found.append(record)
        else:
            break

    def bodies(kind: str) -> list[Plain]:
        return [record["body"] for record in found if record["kind"] == kind]

    return Outcome(
        seq=seq,
        plan=_joined(bodies("PlanChosen")),
        placed=bodies("TaskPlaced"),
        waiting=_explained(client, bodies("TaskWaiting")),
        withheld=bodies("OrderSuppressed"),
        orders=[record["kind"] for record in found if "nodes" in record["body"]],
    )


def _explained(client: Client, waiting: list[Plain]) -> list[Plain]:
    """Add what each waiting task needs as of now: the log holds only why it waits."""
    if not waiting:
        return []
    tasks = {task["id"]: task for task in client.get("/v1/state", explain=1)["tasks"]}
    return [
        {**body, **{key: tasks[body["task"]][key] for key in EXPLAINED}}
        if tasks.get(body["task"], {}).get("needs")
        else body
        for body in waiting
    ]


def _joined(plans: list[Plain]) -> Plain | None:
    """The last of several plans, with `slots_before` as before the first plan."""
    if not plans:
        return None
    before = {
        one["task"]: one["slots_before"] for plan in reversed(plans) for one in plan["allocations"]
    }
    return {
        **plans[-1],
        "allocations": [
            {**one, "slots_before": before[one["task"]]} for one in plans[-1]["allocations"]
        ],
    }


def plan_lines(followed: Outcome, view: Plain) -> list[str]:
    """The plan compared with that of `view`, the state before; a line for each changed task."""
    plan, before = followed.plan, view["plan"]
    tasks = {task["id"]: task for task in view["tasks"]}
    if plan is None:
        return ["plan     as it was", *_waits(followed.waiting, tasks)]
    running = [*plan["allocations"], *plan.get("kept", ())]
    unearned = nominal(running, tasks)
    now = {one["task"] for one in running} - unearned
    waf = scaled(plan_waf(plan, now), "FLOP/s")
    was = f"{scaled(plan_waf(before, now), 'FLOP/s')} -> " if before else ""
    rejected = [
        str(one["what"])
        if unearned
        else f"{one['what']}: {scaled(one['waf'], 'FLOP/s')}{hidden(one['waf'], plan['waf'])}"
        for one in plan["alternatives"][:2]
    ]
    by = origins(running, tasks)
    how = f", {' and '.join(by)}" if by not in ([], ["measured"]) else ""
    how += f", {NOT_COUNTED}" if unearned else ""
    lines = [
        f"plan     {number_of(plan['num_slots'], 'slot')}, WAF {was}{waf}{how}",
        *([f"rejected {'; '.join(rejected)}"] if rejected else []),
    ]
    placed = {body["task"]: body["seats"] for body in followed.placed}
    waiting = {body["task"]: body for body in followed.waiting}
    changed = [
        one
        for one in plan["allocations"]
        if one["task"] in placed or one["slots"] != one["slots_before"]
    ]
    names = {
        one["task"]: str(tasks[one["task"]]["name"])
        if one["task"] in tasks
        else f"task {one['task']}"
        for one in changed
    }
    width = max([NAME_COLUMNS_MIN, *map(len, names.values())])
    for one in changed:
        number = one["task"]
        lines.append(
            f"{names[number]:<{width}} {one['slots_before']} -> "
            + number_of(one["slots"], "slot")
            + _placement(tasks.get(number), placed.get(number), waiting.get(number))
        )
    waits = _waits([body for body in followed.waiting if body["task"] not in names], tasks)
    if waits:  # otherwise nothing has changed for waiting tasks
        given = {one["task"]: one["slots"] for one in plan["allocations"]}
        rest = [
            task["name"]
            for number, task in tasks.items()
            if number not in waiting
            and number not in names
            and task["state"] == "waiting"
            and not given.get(number)
        ]
        waits += labelled("waits", f"as before: {listed(rest)}", 9) if rest else []
    return [*lines, *([] if changed else ["         no task moves"]), *waits]


def view_before(before: Plain, after: Plain) -> Plain:
    """The view before a request, plus the tasks that the request added, without ranks."""
    known = {task["id"] for task in before["tasks"]}
    return {
        **before,
        "tasks": [
            *before["tasks"],
            *({**task, "ranks": []} for task in after["tasks"] if task["id"] not in known),
        ],
    }


def _waits(waiting: list[Plain], tasks: dict[int, Plain]) -> list[str]:
    """Tasks without slots before and now: why they wait, and what they need."""
    return [
        line
        for body in waiting
        if body["task"] in tasks
        for line in labelled(
            "waits", f"{tasks[body['task']]['name']}: {body['why']}{_needs(body, '; needs')}", 9
        )
    ]


def _needs(body: Plain, words: str) -> str:
    return f"{words} {body['needs']}" if body["needs"] else ""


def _placement(task: Plain | None, seats: list[Plain] | None, waits: Plain | None) -> str:
    """The new placement of a task, or how it stops; empty for a new task."""
    if seats is None or task is None:
        return ""
    if not seats:
        first = (
            "stopped"
            if task["tier"] == "command"
            else "saved first, no iteration lost"
            if task["iteration"]
            else "stopped"
        )
        needs = _needs(waits, ", needs") if waits is not None else ""
        return f": {first}; then it waits{needs}"
    places = " ".join(f"{seat['slot']['node']}/{seat['slot']['index']}" for seat in seats)
    stays = {seat["slot"]["node"] for seat in seats}
    leaves = " ".join(sorted({str(rank["node"]) for rank in task["ranks"]} - stays))
    again = "; it starts again" if task["tier"] == "command" and task["ranks"] else ""
    return f": {places}{f', leaves {leaves}' if leaves else ''}{again}"
