"""What needs a person: computed from the view, for GET /v1/state, notifications and the screens.

Commands in texts are between backquotes. The screens print them with the options of the user.
"""

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, Literal

from msgspec import Struct

from ...events.words import listed, number_of, rfc3339, said, span
from ..incidents.stragglers import LASTS_S
from ..planner.alternative_names import percent

Plain = dict[str, Any]
What = Literal[
    "healing",
    "no room",
    "not limited",
    "unreachable",
    "lost",
    "disabled",
    "quarantined",
    "unhealthy",
    "degraded",
    "suppressed",
    "declined",
    "not started",
    "not ready",
    "no copies",
    "not saved",
    "stalled",
    "silent",
    "loss",
    "drained",
    "incident",
    "failed",
]
ENDED = ("finished", "failed", "cancelled")
NODES = "`unicron status nodes`"
AWAY_S_MIN = 15.0
"""A node that is lost for a shorter time needs nobody: `unicron up`, systemd or Slurm starts its
agent again within seconds."""
INCIDENT_S_MIN = 300.0
"""An incident that is open for longer needs a person."""
FAILED_S_MAX = 24 * 3600.0
"""A failed task needs a person for so long."""
ERRNO_WORDS = {
    "ENOSPC": "disk full",
    "EDQUOT": "quota used up",
    "EFBIG": "file size limit reached",
    "EROFS": "file system read-only",
    "EACCES": "no permission",
    "ESTALE": "file system stale",
    "ENOSYS": "not supported by the file system",
    "EOPNOTSUPP": "not supported by the file system",
    "ENOLCK": "no locks on the file system",
    "EMFILE": "too many open files",
    "ENFILE": "too many open files",
    "ENOMEM": "out of memory",
    "EAGAIN": "no more processes",
    "EIO": "I/O error",
}
LIMITS = {"pids": "rank_pids_max", "memory": "rank_memory_bytes_max"}
LAG_TIMES, LAG_S_MIN = 3.0, 10.0


class Need(Struct, frozen=True, kw_only=True):
    """Something that needs a person. `node` "", `task` 0, `incident` 0: it is of none."""

    what: What
    why: str
    """What is wrong, and for how long."""
    do: str
    since_s: float = 0.0
    """Since when, in seconds since 1970; 0: it is not known."""
    node: str = ""
    task: int = 0
    incident: int = 0


def needs(view: Plain, now_s: float) -> list[Need]:
    """What needs a person, without what belongs to an acknowledged incident."""
    acknowledged = {one["id"] for one in view["incidents"] if one["acknowledged_by"]}
    return [
        one
        for one in (
            *_healing(view),
            *_room(view),
            *_not_limited(view),
            *_nodes(view, now_s),
            *_tasks(view, now_s),
            *_not_started(view),
            *_losses(view, now_s),
            *_unsaved(view, now_s),
            *_blocked_by_drain(view),
            *_incidents(view, now_s),
            *_failures(view, now_s),
        )
        if one.incident not in acknowledged
    ]


def _healing(view: Plain) -> Iterator[Need]:
    healing: str = view["cluster"]["healing"]
    if healing.startswith("frozen"):
        yield Need(
            what="healing",
            do="`unicron unfreeze`",
            why=f"healing is {healing}: faults are reported, not healed",
        )
    elif healing != "on":
        yield Need(
            what="healing",
            why="observing: all is decided and logged, nothing is done; to have it done",
            do="`unicron down; unicron up --act`, which ends every rank",
        )


def _room(view: Plain) -> Iterator[Need]:
    if why := view["cluster"]["no_room"]:
        yield Need(
            what="no room",
            why=f"{why}; processes run on, none is started",
            do="make room there, or end what fills it: `unicron cancel TASK`",
        )


# --- nodes ---
def _not_limited(view: Plain) -> Iterator[Need]:
    there = [node for node in view["nodes"] if node["contact"] == "heard"]
    if names := [node["id"] for node in there if node["unlimited"]]:
        kinds = {name for node in there for name in node["unlimited"]}
        fields = [name for kind, name in LIMITS.items() if kind in kinds]
        yield Need(
            what="not limited",
            why=f"{listed(fields)} of the policy {'do' if len(fields) > 1 else 'does'} not hold on "
            f"{listed(names)}: no cgroup there can limit a rank",
            do="`unicron doctor` there, and docs/guides/systemd.md",
        )


def _nodes(view: Plain, now_s: float) -> Iterator[Need]:
    names = {task["id"]: task["name"] for task in view["tasks"]}
    last = {
        node: one["id"]
        for one in view["incidents"]
        for node in (one["node"], *(strike["slot"]["node"] for strike in one["strikes"]))
    }
    for node in view["nodes"]:
        name, since_s = node["id"], node["since_s"]
        found = [*_troubles(node, view["tasks"], now_s - since_s, last.get(name, 0))]
        priced: Plain | None = node["degraded"]
        if (
            not found
            and priced is not None
            and priced["worth_draining"]
            and node["contact"] == "heard"
            and not node["drained"]
        ):
            slower = ", ".join(
                f"{names.get(task, '?')} {ratio:.3g} x slower"
                for task, ratio in zip(priced["tasks"], priced["ratios"], strict=True)
            )
            found.append(
                (
                    "degraded",
                    "is degraded" + (f", {slower}" if slower else f": {priced['why']}"),
                    worth_draining(node),
                    0,
                )
            )
        for what, why, do, incident in found:
            yield Need(
                what=what, why=f"{name} {why}", do=do, node=name, since_s=since_s, incident=incident
            )


def _troubles(
    node: Plain, tasks: list[Plain], length_s: float, incident: int
) -> Iterator[tuple[What, str, str, int]]:
    """What is wrong, the words for it, what to do, and the incident."""
    if length_s >= AWAY_S_MIN and (found := away(node, f" for {span(length_s)}")):
        yield node["contact"], found[0], _joined(found[1], _moved(node, tasks), NODES), incident
    if found := quarantined(node):
        yield "quarantined", *found, node["quarantine"]["incidents"][-1]
    if node["contact"] == "heard" and (found := disabled(node)):
        yield "disabled", found[0], _joined(found[1], NODES, _wanted(tasks)), incident
    if found := unhealthy(node):
        yield (
            "unhealthy",
            f"is unhealthy, {found[0]}",
            _joined(found[1], NODES),
            max(check["incident"] for check in node["checks"]),
        )


def _moved(node: Plain, tasks: list[Plain]) -> str:
    """When tasks that have ranks on this silent node only are moved."""
    only = [
        task["name"] for task in tasks if {rank["node"] for rank in task["ranks"]} == {node["id"]}
    ]
    if not only or node["replaced_s"] is None:
        return ""
    return (
        f"{listed(only)}: moved at {rfc3339(node['replaced_s'])[11:19]}Z, or now if its "
        f"machine is off: `unicron drain {node['id']} --down`"
    )


def _joined(*words: str) -> str:
    return "; ".join(filter(None, words))


def away(node: Plain, since: str = "") -> tuple[str, str] | None:
    """What is wrong with a silent node `since` when, and what to do; None if it is heard."""
    if node["contact"] == "unreachable":
        runs = any(slot["task"] for slot in node["slots"])
        words = f"unreachable{since}{', its ranks go on' * runs}"
        if reached_by := node.get("reached_by"):
            who = f"{' '.join(reached_by)} {'reach' if len(reached_by) > 1 else 'reaches'}"
            return (
                f"{words}; {who} its machine: its agent has stopped, or its link to the control "
                "plane is cut",
                "look at its agent and that link",
            )
        return words, "look at its machine and network"
    if node["contact"] != "lost":
        return None
    then = (
        f"{_quarantine(node)}. It is given tasks when that ends, or after `unicron lift "
        f"{node['id']}`"
        if node["quarantine"]
        else "it is given tasks at once"
    )
    return f"lost{since}", f"repair it and start its agent, {then}"


def undrain(node: Plain) -> str:
    """What ends a drain: the command of who drained it."""
    if node["drain_reason"].startswith("slurm: "):
        return f"scontrol update NodeName={node['id']} State=RESUME"
    return f"`unicron undrain {node['id']}`"


def until(node: Plain) -> str:
    """`quarantined to 2026-11-21 01:14Z`; empty if the node is not quarantined."""
    if not node.get("quarantine"):
        return ""
    return f"quarantined to {rfc3339(node['quarantine']['until_s'])[:16].replace('T', ' ')}Z"


def _quarantine(node: Plain) -> str:
    which = " ".join(f"inc-{number}" for number in node["quarantine"]["incidents"])
    return f"{until(node)}: {node['quarantine']['why']} ({which})"


def quarantined(node: Plain) -> tuple[str, str] | None:
    """Why a node is quarantined, and how to end that; None for lost and all other nodes."""
    if not node.get("quarantine") or node["contact"] == "lost":  # `away` tells it
        return None
    return _quarantine(node), f"repair it, then `unicron lift {node['id']}`"


def named(slots: list[int]) -> str:
    return f"slot{'s' * (len(slots) > 1)} {' '.join(map(str, slots))}"


def disabled(node: Plain) -> tuple[str, str] | None:
    """Why slots are disabled, without those that a check disabled, and how to give them back; None
    if no slot is."""
    failed: list[int] = node["recovers"]["slots"] if node["recovers"] else []
    found: dict[int, str] = {
        slot["index"]: slot["out_why"]
        for slot in node["slots"]
        if slot["out"] and slot["index"] not in failed
    }
    whys = "; ".join(dict.fromkeys(filter(None, found.values())))
    back = ",".join(f"{node['id']}/{index}" for index in found)
    return (
        (
            f"{named([*found])} out{f' ({whys})' if whys else ''}",
            f"repair, then `unicron lift {back}`",
        )
        if found
        else None
    )


def _wanted(tasks: list[Plain]) -> str:
    """The tasks that wait for the disabled slots, else those that run below their maximum."""
    return listed(
        [
            f"{task['name']} waits for slots"
            for task in tasks
            if task["state"] == "waiting" and task["why"] == "not enough slots"
        ]
        or [
            f"{task['name']} runs on {task['slots']['target']} of {task['slots']['max']}"
            for task in tasks
            if 0 < task["slots"]["target"] < task["slots"]["max"]
        ]
    )


def unhealthy(node: Plain) -> tuple[str, str] | None:
    """What the checks of a node report as unhealthy, and when its slots return."""
    if not any(one["health"] == "unhealthy" for one in node["checks"]):
        return None
    recovery: Plain | None = node["recovers"]
    return node["sick_why"], (
        f"repair it; its slots are used again {span(recovery['after_s'])} after the check says "
        "healthy"
        if recovery is not None
        else ""
    )


def worth_draining(node: Plain) -> str:
    """The share of all WAF that draining a degraded node gains; the command if it is enough."""
    priced: Plain = node["degraded"]
    share = float(priced["drain_share"])
    if share <= 0:
        return "draining it would " + (
            f"cost {percent(-share)} of all WAF" if share else "earn nothing"
        )
    if priced["worth_draining"]:
        return f"draining it earns {percent(share)}: `unicron plan --without {node['id']}`"
    return f"draining it would earn {percent(share)}, " + (
        "below gain_min" if priced["lasts"] else f"if it lasts longer than {LASTS_S:g} s"
    )


# --- tasks ---
def _tasks(view: Plain, now_s: float) -> Iterator[Need]:
    unreachable = {node["id"] for node in view["nodes"] if node["contact"] == "unreachable"}
    for task in view["tasks"]:
        for what, why, do, since_s in _task(task, now_s, unreachable):
            yield Need(
                what=what,
                why=f"{task['name']}{why}",
                since_s=since_s,
                task=task["id"],
                do=f"`unicron {do.replace('TASK', task['name'])}`" if do else "",
                incident=task["incident"],
            )


def _task(
    task: Plain, now_s: float, unreachable: set[str]
) -> Iterator[tuple[What, str, str, float]]:
    """What is wrong, the words for it, the command, and since when."""
    if task["withheld"]:
        yield "suppressed", f", suppressed: {task['withheld']}", "", 0.0
    if task["declined"] and task["state"] not in ENDED:
        yield (
            "declined",
            f" starts again as a whole after a fault, since {task['declined']}",
            "logs TASK",
            0.0,
        )
    if late := not_ready(task, now_s):
        since_s = min(float(one["ordered_s"]) for one in late)
        names = " ".join(str(one["rank"]) for one in late)
        yield (
            "not ready",
            f" has adopted Unicron, but rank{'s' * (len(late) > 1)} {names} not "
            f"ready after {span(now_s - since_s)} (start_s_max: {task['start_s_max']:g} s); "
            "nothing is ended for that",
            "logs TASK",
            since_s,
        )
    if not task["copies_fit"]:
        yield (
            "no copies",
            f" keeps no in-memory checkpoints: {task['no_copies']}",
            "status TASK",
            0.0,
        )
    step, stalled = span(task["step_s"]), span(max(now_s - task["stands_since_s"], 0.0))
    if task["stands"] and task["tier"] == "command":
        after_s: float | None = task["hang_after_s"]
        then = f"; it starts again after {span(after_s)}" if after_s is not None else ""
        yield (
            "stalled",
            f" has printed no line of progress for {stalled}, an iteration took {step}{then}",
            "logs TASK",
            task["stands_since_s"],
        )
    elif task["stands"]:
        yield (
            "stalled",
            f" has stalled for {stalled}: {task['stands']}",
            "status TASK",
            task["stands_since_s"],
        )
    elif late_s := lag_s(task, now_s):
        if silent := sorted({one["node"] for one in task["ranks"]} & unreachable):
            why = f": no report for {span(late_s)}, its reporting rank may be on {' '.join(silent)}"
        elif task["progressed_s"]:
            why = f": last progress {span(late_s)} ago, an iteration took {step}"
        else:
            why = f": no iteration reported since it began {span(late_s)} ago"
        yield "silent", why, "logs TASK -f", now_s - late_s


def _not_started(view: Plain) -> Iterator[Need]:
    """Processes that their node cannot start: once may be an accident, which passes at once."""
    for task in view["tasks"]:
        for refused in task["refused_starts"]:
            if refused["num"] > 1:
                why, do = not_started(refused)
                yield Need(
                    what="not started",
                    why=f"{task['name']}: {why}",
                    do=do,
                    since_s=refused["since_s"],
                    node=refused["node"],
                    task=task["id"],
                )


def not_started(refused: Plain) -> tuple[str, str]:
    """Which rank its node cannot start, and what to do."""
    node, errno = refused["node"], refused["errno"]
    lacks = ERRNO_WORDS.get(errno, errno)
    since = f"{lacks} since {rfc3339(refused['since_s'])[:19]}Z"
    mend = "make room there" if errno in ("ENOSPC", "EDQUOT") else f"mend it on {node}"
    return (
        f"{node} cannot start rank {refused['rank']} ({since}): {refused['why']}",
        f"{mend}: it is tried again every few seconds",
    )


def _unsaved(view: Plain, now_s: float) -> Iterator[Need]:
    """Saves that fail. A store that goes is replaced within seconds, so it needs nobody at once."""
    for task in view["tasks"]:
        for failed in task["failed_saves"]:
            is_copy = failed["what"] == "copy"
            if is_copy and now_s - failed["since_s"] < AWAY_S_MIN:
                continue
            why, do = unsaved(task, failed)
            yield Need(
                what="no copies" if is_copy else "not saved",
                why=f"{task['name']}{why}",
                do=do,
                since_s=failed["since_s"],
                task=task["id"],
            )


def trouble_of_save(failed: Plain) -> str:
    """`disk full`, or what else is wrong with a save that fails."""
    word = {"copy": "not stored in memory", "publication": "not published"}
    return ERRNO_WORDS.get(failed["errno"], word.get(failed["what"], "not saved"))


def unsaved(task: Plain, failed: Plain) -> tuple[str, str]:
    """What could not be saved, behind the task's name, and what to do."""
    name, path = task["name"], failed["path"]
    since = f"{trouble_of_save(failed)} since {rfc3339(failed['since_s'])[:19]}Z"
    if failed["what"] == "copy":
        store = f" on {path}" if path else ""
        return (
            f": no checkpoint store takes its state ({since}){store}: {failed['why']}",
            f"`unicron status {name}`",
        )
    where = f"{since}, {path} on {failed['node']}: {failed['why']}"
    if failed["what"] == "publication":
        begin = " is done, its files are complete" if failed["final"] else ""
        again = f", at least each minute; {_or_end(name)}" if failed["final"] else ""
        return f"{begin}: {where}", f"correct it: it is tried again{again}"
    mend = "free room there" if failed["errno"] in ("ENOSPC", "EDQUOT") else "correct it"
    move = f"`unicron checkpoint {name} --to FOLDER`" if failed["what"] == "checkpoint" else ""
    if failed["final"]:
        return _unsaved_final(task, where, mend, move)
    if not move:
        return f": {where}", f"{mend}: saves go on"
    newest = (
        f"the newest published has iteration {task['checkpoint_iteration']}"
        if task["checkpoint"]
        else "nothing is published yet"
    )
    return f": {where}; {newest}", f"{mend}: saves go on; or move them: {move}"


def _unsaved_final(task: Plain, where: str, mend: str, move: str) -> tuple[str, str]:
    """As `unsaved`, of the state after the last iteration."""
    end = _or_end(task["name"])
    if task["state"] != "saving":
        return f": {where}; its last state is lost, it trains again", mend
    if not task["ranks"] and task["copies"]:
        nodes = listed(task["copies"][0]["nodes"])
        return (
            f" is done, its final state is in the memory of {nodes} alone: {where}",
            f"{mend}, and give it slots: it is saved once it has some; {end}",
        )
    move = f"or move it: {move}; " if move else ""
    return (
        f" is done and holds its final state: {where}",
        f"{mend}: it is tried again, at least each minute; {move}{end}",
    )


def _or_end(name: str) -> str:
    return f"or end it: `unicron cancel {name}`, which loses what is not published"


def not_ready(task: Plain, now_s: float) -> list[Plain]:
    """The ranks of a script that has adopted Unicron which prepare longer than `start_s_max`."""
    return [
        one
        for one in task["ranks"]
        if task["adopted"]
        and task["tier"] == "train"
        and one["state"] == "started"
        and now_s - one["ordered_s"] > task["start_s_max"]
    ]


def lag_s(task: Plain, now_s: float) -> float:
    """Seconds since the last progress of a training task; 0 below 3 step times or below 10 s."""
    if (
        task["tier"] != "train"
        or task["phase"] != "training"
        or task["state"] not in ("running", "degraded", "healing")
    ):
        return 0.0
    quiet_s = now_s - max(task["progressed_s"], task["since_s"])
    return quiet_s if quiet_s > max(LAG_TIMES * task["step_s"], LAG_S_MIN) else 0.0


def _losses(view: Plain, now_s: float) -> Iterator[Need]:
    """Tasks whose loss has not been finite for some iterations; a finished one for a day, unless a
    later task has its name."""
    last = {task["name"]: task["id"] for task in view["tasks"]}
    for task in view["tasks"]:
        series: Plain | None = task["not_finite"]
        is_over = task["state"] in ENDED
        if series is None or series["num"] < task["loss_iterations"]:
            continue
        if is_over and not (
            task["state"] == "finished"
            and task["id"] == last[task["name"]]
            and now_s - task["since_s"] < FAILED_S_MAX
        ):
            continue
        name = task["id"] if is_over else task["name"]
        yield Need(
            what="loss",
            why=f"{task['name']}{' has finished with' * is_over}: {loss_in_words(task)}, "
            f"{series['num']} iterations; {published_in_words(task)}",
            do=f"`unicron logs {name}`{' names the micro-batches' * (task['tier'] == 'train')}",
            since_s=series["since_s"],
            task=task["id"],
        )


def loss_in_words(task: Plain) -> str:
    """The loss of a series that is not finite, and since when."""
    series: Plain = task["not_finite"]
    return f"loss {series['text']} since iteration {series['first']}"


def published_in_words(task: Plain) -> str:
    """Which state a task's `latest` has, and which later one is not published."""
    if task["tier"] != "train":
        return "look at its checkpoints"
    held: Plain | None = task["not_published"]
    latest = (
        f"latest stays at iteration {task['checkpoint_iteration']} ({task['checkpoint']})"
        if task["checkpoint"]
        else "no checkpoint is published"
    )
    return latest + (f", {held['path']} is not published (loss {held['loss']})" if held else "")


def _blocked_by_drain(view: Plain) -> Iterator[Need]:
    """Each drained node, if a task waits only because of drained nodes."""
    heard = [node for node in view["nodes"] if node["contact"] == "heard"]
    left, every = (
        sum(
            not slot["out"]
            for node in heard
            for slot in node["slots"]
            if node["drained"] <= drained and not node["quarantine"]
        )
        for drained in (False, True)
    )
    for task in view["tasks"]:
        if task["state"] == "waiting" and left < _fewest_slots(task) <= every:
            for node in heard:
                if node["drained"]:
                    because = f" ({node['drain_reason']})" if node["drain_reason"] else ""
                    yield Need(
                        what="drained",
                        node=node["id"],
                        since_s=task["since_s"],
                        why=f"{node['id']} is drained{because}, too few slots are left for "
                        f"{task['name']}",
                        do=undrain(node),
                    )
            return


def _fewest_slots(task: Plain) -> int:
    """The smallest number of slots with a throughput above 0."""
    rates: Plain = task["throughput"] or {"sizes": [], "rates_flops": []}
    return min(
        (size for size, rate in zip(rates["sizes"], rates["rates_flops"], strict=True) if rate > 0),
        default=int(task["slots"]["min"]),
    )


def is_unhealed(incident: Plain) -> bool:
    """Whether an incident is open, and not merely recovering: unless its fault has come back."""
    is_first = incident["num_times"] == 1
    return not (incident["outcome"] or (incident["recovering_s"] and is_first))


def _incidents(view: Plain, now_s: float) -> Iterator[Need]:
    names = {task["id"]: task["name"] for task in view["tasks"]}
    for one in view["incidents"]:
        if is_unhealed(one) and (length_s := now_s - one["opened_s"]) > INCIDENT_S_MIN:
            again = f", its fault came {one['num_times']} times" if one["num_times"] > 1 else ""
            yield Need(
                what="incident",
                since_s=one["opened_s"],
                node=one["node"],
                task=one["task"],
                incident=one["id"],
                do=f"`unicron incident {one['id']}`",
                why=f"inc-{one['id']} {one['severity']} "
                f"{names.get(one['task'], one['node'])} is open for {span(length_s)}"
                f"{again}",
            )


def _not_saved(task: Plain) -> str:
    num = task["unpublished"] if task["tier"] == "train" else 0
    return f"; {number_of(num, 'iteration')} not saved" if num else ""


def _failures(view: Plain, now_s: float) -> Iterator[Need]:
    """Recently failed tasks without a later task of the same name, the last to fail at the end."""
    last = {task["name"]: task["id"] for task in view["tasks"]}
    for task in sorted(view["tasks"], key=lambda task: float(task["since_s"])):
        if (
            task["state"] == "failed"
            and task["id"] == last[task["name"]]
            and now_s - task["since_s"] < FAILED_S_MAX
        ):
            yield Need(
                what="failed",
                task=task["id"],
                since_s=task["since_s"],
                incident=max(
                    (
                        one["id"]
                        for one in view["incidents"]
                        if one["task"] == task["id"] and one["outcome"] == "failed"
                    ),
                    default=0,
                ),
                why=f"{task['name']} failed: {task['why']}{_not_saved(task)}",
                do=f"`unicron logs {task['id']}`; shown for a day, or until you submit "
                f"{task['name']} again",
            )


def acknowledged(one: Plain) -> str:
    """Who knows of an incident, and the reason; empty: nobody has said so."""
    by, why = one["acknowledged_by"], one["acknowledged_why"]
    return f"acknowledged by {by}{': ' * bool(why)}{why}" if by else ""


def folders(ranks: Iterable[tuple[str, str]], nodes: list[Plain]) -> list[Plain]:
    """Each node with its host and dump folder. `ranks`: the node and the log path of each rank; an
    agent writes the dumps beside the log."""
    hosts = {node["id"]: str(node["host"]) for node in nodes}
    found = dict.fromkeys((node, str(PurePosixPath(log).parent)) for node, log in ranks if log)
    return [
        {"node": node, "host": hosts.get(node, ""), "folder": folder}
        for node, folder in sorted(found)
    ]


def node_trouble(node: Plain, option: str = "") -> str:
    """What is wrong with a node, and how to repair it; empty if nothing is wrong."""
    return _said(away(node) or (disabled(node) if node["contact"] == "heard" else None), option)


def quarantine_reason(node: Plain, option: str = "") -> str:
    """Why a node is quarantined, and how to end that; empty for lost and all other nodes."""
    return _said(quarantined(node), option)


def _said(found: tuple[str, str] | None, option: str) -> str:
    return said(*found, option) if found else ""
