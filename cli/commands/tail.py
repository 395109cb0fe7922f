"""`tail`: the log over HTTP, one record per line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

from msgspec import Struct

from ...events.errors import UsageError
from ..cluster.client import Client, Interrupted, Unable, Unreachable, Urls, connect
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain
from ..terminal.record_line import line, matches
from .operate import pick_node
from .tasks import pick

UNREACHABLE_S_MAX = 120.0
"""Give up after the control plane was unreachable for this long."""
RETRY_S = 0.5
NEWEST_NUM = 4


class Filter(Struct, frozen=True, kw_only=True):
    """The filters; an empty set or None passes all records."""

    kinds: frozenset[str] = frozenset()
    task: str | None = None
    node: str | None = None
    incident: int | None = None

    @staticmethod
    def make(kinds: Sequence[str], task: str | None, node: str | None,
             incident: str | None) -> Filter:
        """Build it from the options as typed. Raises UsageError."""
        return Filter(kinds=frozenset(_kind(kind) for kind in kinds), task=task, node=node,
                      incident=None if incident is None else incident_id(incident))


def incident_id(text: str, hint: str = "for example 41 or inc-41") -> int:
    """`41` or `inc-41`. Raises UsageError."""
    digits = text.removeprefix("inc-")
    if not digits.isdecimal():
        raise UsageError(f"{text!r} is not an incident", hint)
    return int(digits)


def _kind(text: str) -> str:
    from ...events.records.envelope import FORMER_NAMES, KINDS

    known = {name.lower(): FORMER_NAMES.get(name, name) for name in (*FORMER_NAMES, *KINDS)}
    if text.lower() in known:
        return known[text.lower()]
    near = [kind for kind in sorted(KINDS) if text.lower()[:4] in kind.lower()]
    raise UsageError(f"no record is of kind {text!r}",
                     f"perhaps {', '.join(near[:4])}" if near else "see docs/reference/records.md")


def tail(state: StateDir, url: Urls, wanted: Filter, *, after: int, follow: bool,
         as_json: bool) -> None:
    """Print the records that pass the filters. Ctrl-C ends --follow."""
    client = connect(state, url)
    client.get("/v1/health")  # fail now if the address is wrong
    view: Plain = client.get("/v1/state")
    task = None if wanted.task is None else int(pick(view["tasks"], wanted.task)["id"])
    _check(client, view, wanted, None if follow else after)
    incidents = {int(one["id"]) for one in view["incidents"]
                 if one["task"] == task} if task is not None else set[int]()
    try:
        for record in _records(state, url, client, after, follow=follow):
            if record["kind"] == "IncidentOpened" and record["body"]["task"] == task:
                incidents.add(record["seq"])
            if matches(record, kinds=wanted.kinds, task=task, node=wanted.node,
                        incident=wanted.incident, incidents=incidents):
                console.out(json.dumps(record) if as_json else line(record))
    except KeyboardInterrupt:
        if not follow:
            raise


def _check(client: Client, view: Plain, wanted: Filter, after: int | None) -> None:
    """Raises UsageError for a filter that no record can pass."""
    if wanted.node is not None:
        pick_node(view["nodes"], wanted.node)
    if (number := wanted.incident) is not None and not _is_incident(client, number):
        newest = sorted((int(one["id"]) for one in view["incidents"]), reverse=True)[:NEWEST_NUM]
        raise UsageError(f"no incident {number}", "the newest: " + ", ".join(
            f"inc-{one}" for one in newest) if newest else "there are none: nothing has failed")
    if after is not None and after > (seq := int(view["cluster"]["seq"])):
        raise UsageError(f"--after {after} is beyond the log",
                         f"its last record is {seq}; -f waits for more")


def _is_incident(client: Client, number: int) -> bool:
    """True if the log has an incident of that id; the state drops old incidents."""
    opened = next(client.records(max(number - 1, 0), follow=False), None)
    return opened is not None and (opened["seq"], opened["kind"]) == (number, "IncidentOpened")


def _records(state: StateDir, url: Urls, client: Client, after: int, *,
             follow: bool) -> Iterator[Plain]:
    """The records of the log. --follow goes on after a restart of the control plane."""
    unreachable_s: float | None = None
    while True:
        try:
            for record in client.records(after, follow=follow):
                unreachable_s, after = None, record["seq"]
                yield record
            if not follow:
                return
        except (Interrupted, Unable, Unreachable):
            if not follow:
                raise
        now_s = time.monotonic()
        if unreachable_s is None:
            unreachable_s = now_s
            console.talk("the control plane is unreachable; waiting")
        if now_s - unreachable_s > UNREACHABLE_S_MAX:
            raise Unreachable(f"the control plane was unreachable for {UNREACHABLE_S_MAX:.0f} s",
                              "unicron up")
        time.sleep(RETRY_S)
        try:
            client = connect(state, url)
        except Unreachable:
            continue
