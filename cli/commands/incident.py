"""`incident`: print the facts of an incident (control_plane/api/incident_facts.py), or list all."""

import time
from collections.abc import Callable

import msgspec

from ...control_plane.api.incident_facts import cost, facts_of, waits_of
from ...control_plane.history.history import History, IncidentHistory
from ...control_plane.history.history import history as read_history
from ...control_plane.history.incident_records import incident_records
from ...events.errors import UsageError
from ..cluster.client import Urls
from ..cluster.state_dir import StateDir
from ..screens import incident as incident_screen
from ..terminal import console
from ..terminal.format import Plain
from .offline import Log, connect_to_read, log_of
from .tasks import incident_id, option_for

NEWEST_NUM = 5
NOT_SHOWN = ("incident", "num_stepping", "logs", "opened_s", "down_since_s", "kept_before",
             "dealt_before", "source", "ckpt_read_before", "source_before", "second_hand",
             "strikes")


def incident(state: StateDir, url: Urls, which: str, *, every: bool, as_json: bool,
             since: float | None = None) -> None:
    """Print one incident's page (without `which` the newest), or the list of those that lasted
    beyond `since`. Raises UsageError."""
    if which and every:
        raise UsageError("an ID and --all do not go together", "give one of the two")
    if since is not None and not every:
        raise UsageError("--since goes with --all", "unicron incident --all --since 2h")
    option = option_for(state)
    if which:  # reject an invalid ID before the first request
        incident_id(which, f"for example inc-41; all, and whose they are: unicron incident "
                           f"--all{option}")
    client = connect_to_read(state, url)
    log = log_of(client)
    history = read_history(log.read(), log.state())
    now_s = time.time()
    if every:
        history.incidents = {key: x for key, x in history.incidents.items()
                             if (x.closed_s or now_s) >= (since or 0.0)}
        history.outages = {seq: x for seq, x in history.outages.items()
                           if x.since_s + x.length_s >= (since or 0.0)}
        listed = [*(plain(history, x, now_s) for x in history.incidents.values()),
                  *({"id": x.id, "what": x.what, "nodes": x.nodes, "since_s": x.since_s,
                     "back_s": x.back_s, "incidents": x.incidents} for x in history.node_losses),
                  *({"id": seq, "outage": msgspec.to_builtins(x)}
                    for seq, x in history.outages.items())]
        console.show(listed, incident_screen.every(history, now_s=now_s, option=option),
                     as_json=as_json)
        return
    if which and incident_id(which) <= log.after:
        raise UsageError(f"incident {which} began before the log, which was pruned",
                         f"the log begins at seq {log.after + 1}")
    one = pick(history, which)
    if one is None:
        console.show(None, [incident_screen.NONE], as_json=as_json)
        return
    show(history, one, log, view=client.get("/v1/state"), now_s=now_s,
         name=f"--live{option}", option=option, as_json=as_json,
         plan_at=lambda seq: client.plan(str(seq)))


def plain(history: History, one: IncidentHistory, now_s: float) -> Plain:
    """One entry of the list as plain data: the fields of the state, and the times."""
    data: Plain = {**msgspec.to_builtins(one.incident), **msgspec.to_builtins(one),
                   **cost(history, one, now_s), "outcome": one.outcome,
                   "counted_s": history.at_s if one.closed_s is None else one.closed_s}
    for name in NOT_SHOWN:
        del data[name]
    return data


def pick(history: History, which: str) -> IncidentHistory | None:
    """The incident of that id, or the newest; None if there is none. Raises UsageError."""
    number = incident_id(which) if which else max(history.incidents, default=0)
    if number in history.incidents or not which:
        return history.incidents.get(number)
    newest = [f"inc-{key}" for key in sorted(history.incidents, reverse=True)[:NEWEST_NUM]]
    raise UsageError(f"no incident {which!r}", f"the newest: {', '.join(newest)}" if newest
                     else "there are none: nothing has failed so far")


def show(history: History, one: IncidentHistory, log: Log, *, view: Plain,
         now_s: float, name: str, as_json: bool, option: str,
         plan_at: Callable[[int], Plain]) -> None:
    """Print the page. `name`: the log's on the command line. `plan_at`: the plan after a record."""
    found = incident_records(one, log.read(), log.state())
    facts = facts_of(history, found, view, now_s=now_s, option=option)
    facts |= waits_of(history, found, plan_at)
    seq = one.closed_seq or history.seq
    facts["verify"] = f"unicron replay {name} --until {seq} --verify"
    console.show(facts, incident_screen.page(facts, option=option), as_json=as_json)
