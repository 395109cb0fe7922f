"""`export` writes the log to a file. `replay` folds a log without a server or torch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unicron import __version__

from ...events.errors import CorruptLog, UnicronError, UsageError
from ...events.log import archive
from ...events.records.envelope import Record
from ...events.records.in_words import line
from ..cluster.client import Urls
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain, count, labelled, lost_cell, table
from .offline import UNFOLDABLE, Log, OfflineClient, connect_to_read, log_of
from .tasks import incident_id, option_for

if TYPE_CHECKING:
    from ...control_plane.history.history import History, IncidentHistory

NEWEST_NUM = 5


class CorruptError(UnicronError):
    """The log does not verify; exit code 1."""

    hint = "every record before that seq can be trusted; keep the file, and export the log again"


def export(state: StateDir, url: Urls, path: Path) -> None:
    """Write the running cluster's log to a file. Raises UsageError."""
    if path.exists():
        raise UsageError(f"{path} exists", "name a new file")
    client = connect_to_read(state, url)
    cluster = client.get("/v1/health")["cluster"]
    log = log_of(client)
    num = archive.write(
        path,
        log.read(),
        cluster=cluster,
        code=__version__,
        first_seq=log.after + 1,
        begins=log.begins if log.after else "",
    )
    console.out(f"{path}  {count(num)} records")
    console.talk(f"next: unicron replay {path} --verify")


def open_log(state: StateDir, url: Urls, path: Path | None) -> Log:
    """The log of an exported file or a state folder, else of the cluster. Raises UsageError, as do
    its reads."""
    with _usage_errors(path):
        if path is None:
            found = log_of(connect_to_read(state, url))
        elif path.is_dir():
            found = log_of(OfflineClient.open_whole(path))
        else:
            head = archive.header(path)
            found = Log(lambda: archive.read(path), head.first_seq - 1, head.begins)

    def read() -> Iterator[Record]:
        with _usage_errors(path):
            yield from found.read()

    return found._replace(read=read)


@contextmanager
def _usage_errors(path: Path | None) -> Generator[None]:
    """Turn a damaged log into UsageError."""
    try:
        yield
    except CorruptLog as error:
        raise UsageError(
            f"{path}: {error}" if path is not None else str(error),
            "the records before that seq are valid; export the log again",
        ) from None


@contextmanager
def foldable(path: Path | None) -> Generator[None]:
    """Turn a failed fold of a log into UsageError."""
    try:
        yield
    except UNFOLDABLE as error:
        raise UsageError(
            f"{path or 'the log'} cannot be folded: {error}",
            "unicron replay FILE --verify names the first seq that differs",
        ) from None


def replay(
    state: StateDir,
    url: Urls,
    path: Path | None,
    *,
    live: bool,
    until: int | None,
    verify: bool,
    as_json: bool,
    incident: str | None = None,
    diff: tuple[str, str] | None = None,
) -> None:
    """Print the final state, an incident, or a difference. Raises UsageError, CorruptError,
    DifferError."""
    if diff is not None and (verify or until is not None or incident is not None):
        raise UsageError("--diff goes with no other option than --live", "give one of them")
    if (path is None) == (not live) and (diff is None or live):
        raise UsageError(
            "name either an exported file, a state folder or --live",
            "unicron replay FILE|DIR, or unicron replay --live",
        )
    if diff is not None and path is None and not live:
        for name in diff:
            if not Path(name).exists():
                raise UsageError(
                    f"--diff {name}: no such file",
                    "--live for two tasks of the "
                    "cluster; unicron replay FILE --diff A B for those of a file",
                )
    if incident is not None and verify:
        raise UsageError("--incident and --verify do not go together", "give one of the two")

    with foldable(path):
        if diff is not None:
            from . import log_difference

            logs = (
                [open_log(state, url, path)]
                if path is not None or live
                else [open_log(state, url, Path(name)) for name in diff]
            )
            log_difference.diff(logs, *diff, as_json=as_json)
            return
        log = open_log(state, url, path).up_to(until)
        if incident is not None:
            option = option_for(state)
            name = f"--live{option}" if path is None else str(path)
            _incident(log, incident, name=name, option=option, as_json=as_json)
        elif verify:
            _verify(log, complete=until is None, as_json=as_json)
        else:
            _fold(log, as_json=as_json)


def _incident(log: Log, which: str, *, name: str, option: str, as_json: bool) -> None:
    """The page of one incident as of the end of the log."""
    import msgspec

    from ...control_plane.api import dry_run
    from ...control_plane.api.incident_facts import facts_of, waits_of
    from ...control_plane.api.view import view
    from ...control_plane.history.history import history as read_history
    from ...control_plane.history.incident_records import incident_records
    from ...control_plane.state.cluster import encode_state
    from ..screens import incident as incident_screen

    def plan_at(seq: int) -> Plain:
        at = log.up_to(seq).fold()
        plan: Plain = msgspec.to_builtins(dry_run.explain_present_plan(encode_state(at)))
        return plan

    history = read_history(log.read(), log.state())
    one = pick(history, which)
    if one is None:  # `--incident ""` asks for the newest one, and there is none
        raise UsageError("the log has no incident", "nothing had failed so far")
    found = incident_records(one, log.read(), log.state())
    facts = {
        **facts_of(history, found, view(history.state), now_s=history.at_s, option=option),
        **waits_of(history, found, plan_at),
        "verify": f"unicron replay {name} --until {one.closed_seq or history.seq} --verify",
    }
    console.show(facts, incident_screen.page(facts, option=option), as_json=as_json)


def pick(history: History, which: str) -> IncidentHistory | None:
    """The incident of that id, or the newest; None if there is none. Raises UsageError."""
    number = incident_id(which) if which else max(history.incidents, default=0)
    if number in history.incidents or not which:
        return history.incidents.get(number)
    newest = [f"inc-{key}" for key in sorted(history.incidents, reverse=True)[:NEWEST_NUM]]
    raise UsageError(
        f"no incident {which!r}",
        f"the newest: {', '.join(newest)}"
        if newest
        else "there are none: nothing has failed so far",
    )


def _fold(log: Log, *, as_json: bool) -> None:
    from ...control_plane.api.view import view
    from ..screens.cluster import done
    from ..screens.task import computed, waits

    final = view(log.fold(), explain=True)
    if as_json:
        console.data(final)
        return
    cluster, tasks = final["cluster"], final["tasks"]
    console.out(
        f"{count(cluster['seq'])} records folded, epoch {cluster['epoch']}: state {cluster['hash']}"
    )
    if tasks:
        console.lines(
            table(
                ("TASK", "STATE", "ITERATION", "HEALED", "LOST"),
                [
                    [
                        task["name"],
                        task["state"].upper(),
                        done(task),
                        str(task["healed"]),
                        lost_cell(task["iterations_lost"]),
                    ]
                    for task in tasks
                ],
                right=(2, 3, 4),
            )
        )
    for task in tasks:
        if task["needs"]:
            console.lines(labelled(task["name"], waits(task)))
    console.lines(computed(cluster))


def _verify(log: Log, *, complete: bool, as_json: bool) -> None:
    import msgspec

    from ...control_plane.decide.replay import verify
    from . import log_difference

    verdict = verify(log.read(), complete=complete, state=log.state())
    if as_json:
        console.data({**msgspec.to_builtins(verdict), "ok": verdict.ok})
    else:
        console.out(verdict.words)
        kinds = {**dict.fromkeys(verdict.recomputed, 0), **dict.fromkeys(verdict.differ, 0)}
        if kinds:
            console.lines(
                table(
                    ("DECISION", "EQUAL", "DIFFER"),
                    [
                        [
                            kind,
                            str(verdict.recomputed.get(kind, 0)),
                            str(verdict.differ.get(kind, 0)),
                        ]
                        for kind in sorted(kinds)
                    ],
                    right=(1, 2),
                )
            )
        console.out(f"state {verdict.state_hash}, log {verdict.log_hash or '-'}")
        if verdict.different:
            console.lines(log_difference.decisions(verdict.different))
        for what, record in (("expected", verdict.expected), ("recorded", verdict.recorded)):
            if record is not None:
                console.out(f"{what} {line(record)}")
    if not verdict.ok:
        raise CorruptError(f"seq {verdict.seq}: {verdict.problem}")
    if verdict.differ:
        raise log_difference.DifferError(
            "this version would decide otherwise",
            "the log is intact; the version that wrote it verifies it",
        )
