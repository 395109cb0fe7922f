"""`tail`: the log over HTTP, one record per line."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from ...events.errors import UsageError
from ...events.records.in_words import line, matches
from ..cluster.answers import Interrupted
from ..cluster.client import Client, Unable, Unreachable, Urls, connect
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain
from .names import pick
from .offline import connect_to_read, log_of
from .tasks import incident_id, number_of

UNREACHABLE_S_MAX = 120.0
"""Give up after the control plane was unreachable for this long."""
RETRY_S = 0.5
NEWEST_NUM = 4


def kind_named(text: str) -> str:
    """The kind with this name, also a former one, in any case. Raises UsageError."""
    from ...events.records.envelope import FORMER_NAMES, KINDS

    known = {name.lower(): FORMER_NAMES.get(name, name) for name in (*FORMER_NAMES, *KINDS)}
    if text.lower() in known:
        return known[text.lower()]
    near = [kind for kind in sorted(KINDS) if text.lower()[:4] in kind.lower()]
    raise UsageError(
        f"no record is of kind {text!r}",
        f"perhaps {', '.join(near[:4])}" if near else "see docs/reference/records.md",
    )


def tail(
    state: StateDir,
    url: Urls,
    *,
    kind: Sequence[str] | None = None,
    task: str | None = None,
    node: str | None = None,
    incident: str | None = None,
    after: int = 0,
    since: float | None = None,
    follow: bool = False,
    as_json: bool = False,
) -> None:
    """Print the records that pass the filters; None passes all. Ctrl-C ends --follow."""
    kinds = frozenset(map(kind_named, kind or ()))
    number = None if incident is None else incident_id(incident)
    client = connect_to_read(state, url)
    first = log_of(client).after
    view: Plain = client.get("/v1/state")
    after = after or first
    if since is not None:
        after = max(after, _before(client, first, int(view["cluster"]["seq"]), since))
    of = None if task is None else number_of(client, view, task)
    _check(client, view, node, number, None if follow else after)
    incidents = (
        {int(one["id"]) for one in view["incidents"] if one["task"] == of}
        if of is not None
        else set[int]()
    )
    try:
        for record in _records(state, url, client, after, follow=follow):
            if record["kind"] == "IncidentOpened" and record["body"]["task"] == of:
                incidents.add(record["seq"])
            if matches(
                record, kinds=kinds, task=of, node=node, incident=number, incidents=incidents
            ):
                console.show(record, [line(record)], as_json=as_json)
    except KeyboardInterrupt:
        if not follow:
            raise


def _before(client: Client, first: int, last: int, since_s: float) -> int:
    """The last record before a time, of those after `first`; times in the log never fall."""
    return first + bisect_left(
        range(first, last),
        since_s,
        key=lambda seq: float(next(client.records(seq, follow=False))["at_s"]),
    )


def _check(
    client: Client, view: Plain, node: str | None, number: int | None, after: int | None
) -> None:
    """Raises UsageError for a filter that no record can pass."""
    if node is not None:
        pick(view["nodes"], node, "node")
    if number is not None and not _is_incident(client, number):
        newest = sorted((int(one["id"]) for one in view["incidents"]), reverse=True)[:NEWEST_NUM]
        raise UsageError(
            f"no incident {number}",
            "the newest: " + ", ".join(f"inc-{one}" for one in newest)
            if newest
            else "there are none: nothing has failed",
        )
    if after is not None and after > (seq := int(view["cluster"]["seq"])):
        raise UsageError(
            f"--after {after} is beyond the log", f"its last record is {seq}; -f waits for more"
        )


def _is_incident(client: Client, number: int) -> bool:
    """True if the log has an incident of that id; the state drops old incidents."""
    opened = next(client.records(max(number - 1, 0), follow=False), None)
    return opened is not None and (opened["seq"], opened["kind"]) == (number, "IncidentOpened")


def _records(
    state: StateDir, url: Urls, client: Client, after: int, *, follow: bool
) -> Iterator[Plain]:
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
            raise Unreachable(
                f"the control plane was unreachable for {UNREACHABLE_S_MAX:.0f} s", "unicron up"
            )
        time.sleep(RETRY_S)
        try:
            client = connect(state, url)
        except Unreachable:
            continue
