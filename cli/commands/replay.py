"""`export` writes the log to a file. `replay` folds a log without a server or torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from unicron import __version__

from ...events.errors import CorruptLog, UnicronError, UsageError
from ...events.log import archive
from ...events.records import codec
from ...events.records.envelope import Record
from ..cluster.client import Urls, connect
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain, count, labelled, lost_cell, table
from ..terminal.record_line import line
from .tasks import option_for


class CorruptError(UnicronError):
    """The log does not verify; exit code 1."""

    hint = "every record before that seq can be trusted; keep the file, and export the log again"


def export(state: StateDir, url: Urls, path: Path) -> None:
    """Write the running cluster's log to a file. Raises UsageError."""
    if path.exists():
        raise UsageError(f"{path} exists", "name a new file")
    client = connect(state, url)
    cluster = client.get("/v1/health")["cluster"]
    records = (codec.from_plain(data) for data in client.records(0, follow=False))
    num = archive.write(path, records, cluster=cluster, code=__version__)
    console.out(f"{path}  {count(num)} records")
    console.talk(f"next: unicron replay {path} --verify")


def replay(state: StateDir, url: Urls, path: Path | None, *, live: bool, until: int | None,
           verify: bool, step: bool, as_json: bool, incident: str | None = None) -> None:
    """Fold a log and print the final state, or one incident. Raises UsageError, CorruptError."""
    if (path is None) == (not live):
        raise UsageError("name either an exported file or --live",
                         "unicron replay FILE, or unicron replay --live")
    if step and verify:
        raise UsageError("--step and --verify do not go together", "give one of the two")
    if incident is not None and (step or verify):
        raise UsageError("--incident goes with neither --step nor --verify", "give one of them")

    def read() -> Iterator[Record]:
        records = archive.read(path) if path is not None else map(
            codec.from_plain, connect(state, url).records(0, follow=False))
        return _until(records, until)

    records = read()
    try:
        if incident is not None:
            option = option_for(state)
            log = f"--live{option}" if path is None else str(path)
            _incident(read, incident, log=log, option=option, as_json=as_json)
        elif verify:
            _verify(records, complete=until is None, as_json=as_json)
        elif step:
            _step(records, as_json=as_json)
        else:
            _fold(records, as_json=as_json)
    except AssertionError as error:
        raise UsageError(f"{path or 'the log'} cannot be folded: {error}",
                         "unicron replay FILE --verify names the first seq that differs") from None
    except CorruptLog as error:
        where = f"{path}: " if path is not None else ""
        raise UsageError(f"{where}{error}", "the records before that seq are valid; "
                         "export the log again") from None


def _incident(read: Callable[[], Iterator[Record]], which: str, *, log: str, option: str,
              as_json: bool) -> None:
    """The page of one incident as of the end of the log."""
    import msgspec

    from ...control_plane.api import dry_run
    from ...control_plane.api.view import view
    from ...control_plane.decide.replay import replay
    from ...control_plane.history.history import history as read_history
    from ...control_plane.state.cluster import encode_state
    from . import incident as commands_incident

    def plan_at(seq: int) -> Plain:
        at = replay(_until(read(), seq))
        plan: Plain = msgspec.to_builtins(dry_run.explain_present_plan(encode_state(at)))
        return plan

    history = read_history(read())
    one = commands_incident.pick(history, which)
    if one is None:  # `--incident ""` asks for the newest one, and there is none
        raise UsageError("the log has no incident", "nothing had failed so far")
    commands_incident.show(history, one, read(), view=view(history.state), now_s=history.at_s,
                           log=log, option=option, as_json=as_json, plan_at=plan_at)


def _until(records: Iterable[Record], until: int | None) -> Iterator[Record]:
    """The records up to and including `until`. Raises UsageError if the log ends before it."""
    last = 0
    for record in records:
        if until is not None and record.seq > until:
            return
        last = record.seq
        yield record
    if until is not None and last < until:
        raise UsageError(f"the log ends at seq {last}", f"--until {last} or lower")


def _fold(records: Iterable[Record], *, as_json: bool) -> None:
    from ...control_plane.api.view import view
    from ...control_plane.decide.replay import replay
    from ..screens.cluster import done
    from ..screens.task import computed, waits

    final = view(replay(records), explain=True)
    if as_json:
        console.out(json.dumps(final))
        return
    cluster, tasks = final["cluster"], final["tasks"]
    console.out(f"{count(cluster['seq'])} records folded, epoch {cluster['epoch']}: "
            f"state {cluster['hash']}")
    if tasks:
        console.lines(table(("TASK", "STATE", "ITERATION", "HEALED", "LOST"), [
            [task["name"], task["state"].upper(), done(task), str(task["healed"]),
             lost_cell(task["iterations_lost"])] for task in tasks], right=(2, 3, 4)))
    for task in tasks:
        if task["needs"]:
            console.lines(labelled(task["name"], waits(task)))
    console.lines(computed(cluster))


def _step(records: Iterable[Record], *, as_json: bool) -> None:
    from ...control_plane.fold.fold import fold
    from ...control_plane.state.cluster import ClusterState, state_hash

    state = ClusterState()
    for record in records:
        fold(state, record)
        plain = codec.to_plain(record)
        if as_json:
            console.out(json.dumps({"record": plain, "hash": state_hash(state)}))
        else:
            console.out(f"{state_hash(state).rpartition(':')[2]} {line(plain)}")


def _verify(records: Iterable[Record], *, complete: bool, as_json: bool) -> None:
    import msgspec

    from ...control_plane.decide.replay import verify

    verdict = verify(records, complete=complete)
    if as_json:
        console.out(json.dumps({**msgspec.to_builtins(verdict), "ok": verdict.ok}))
    else:
        console.out(verdict.words)
        kinds = {**dict.fromkeys(verdict.recomputed, 0), **dict.fromkeys(verdict.differ, 0)}
        if kinds:
            console.lines(table(("DECISION", "EQUAL", "DIFFER"), [
                [kind, str(verdict.recomputed.get(kind, 0)), str(verdict.differ.get(kind, 0))]
                for kind in sorted(kinds)], right=(1, 2)))
        console.out(f"state {verdict.state_hash}, log {verdict.log_hash or '-'}")
        for what, record in (("expected", verdict.expected), ("recorded", verdict.recorded)):
            if record is not None:
                console.out(f"{what} {line(record)}")
    if not verdict.ok:
        raise CorruptError(f"seq {verdict.seq}: {verdict.problem}")
