"""Reads a cluster's log when nothing answers: from the segments and the server's files."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice, takewhile
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import msgspec

from ...events.errors import LogError, ServerError, UsageError
from ...events.log import append_only_file, embedded_server
from ...events.log.segments import Folder, SealedLog
from ...events.object_storage import reason
from ...events.records import codec
from ...events.records.envelope import Record
from ...events.spec.job import is_url
from ..cluster.client import (
    DRY_RUN_S_MAX,
    REPLY_S_MAX,
    Client,
    Unable,
    Unreachable,
    Urls,
    connect,
    how_to_start,
    running_here,
)
from ..cluster.state_dir import StateDir, opened, read_json
from ..terminal import console

if TYPE_CHECKING:
    from ...control_plane.state.cluster import ClusterState

PAGE_RECORDS_NUM = 5_000
SEGMENTS = "UNICRON_SEGMENTS"
"""Where the sealed log is, for commands that read it when nothing answers."""
UNFOLDABLE = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
"""What records that no leader wrote make of a fold."""
SAME_NUM_MAX = 3
"""After so many answers in a row that read no further, a command gives up."""


def connect_to_read(state: StateDir, url: Urls) -> Client:
    """As `connect`; if nothing answers there, a client that reads the files of the state folder,
    and says so on stderr."""
    try:
        client = connect(state, url)
        client.get("/v1/health")
        return client
    except Unreachable as error:
        if url or os.environ.get("UNICRON_URL"):
            raise
        client = OfflineClient.open(state)
        if not client.last:
            raise
        at = datetime.fromtimestamp(client.at_s, UTC).isoformat(timespec="seconds")
        console.talk(f"{error}. This is the log up to seq {client.last} of {at}")
        return client


class Log(NamedTuple):
    """A log to fold: its records, behind which record they begin, and the state then as text."""

    read: Callable[[], Iterator[Record]]
    after: int
    begins: str

    def state(self) -> ClusterState:
        """A new copy of the state before the first record. Raises UsageError."""
        from ...control_plane.state.cluster import ClusterState, state_of_text

        return state_of_text(self.begins) if self.after else ClusterState()

    def fold(self) -> ClusterState:
        """The state after the last record. Raises UsageError."""
        from ...control_plane.decide.replay import replay

        return replay(self.read(), self.state())

    def up_to(self, until: int | None) -> Log:
        """The log up to and including record `until`. Raises UsageError if it was pruned; if the
        log ends before it, that is known, and raised, only when the log is read."""
        if until is None:
            return self
        if until < self.after:
            raise UsageError(
                f"record {until} was pruned", f"the log begins at seq {self.after + 1}"
            )

        def read() -> Iterator[Record]:
            last = self.after
            for record in takewhile(lambda one: one.seq <= until, self.read()):
                last = record.seq
                yield record
            if last < until:
                raise UsageError(f"the log ends at seq {last}", f"{last} or lower")

        return self._replace(read=read)


def log_of(client: Client) -> Log:
    """The whole log of a cluster. If its beginning was pruned, that is said on stderr."""
    found = client.get("/v1/log/beginning", DRY_RUN_S_MAX)
    after = int(found["after"])
    _say_pruned(after)
    return Log(
        lambda: map(codec.from_plain, client.records(after, follow=False)), after, found["state"]
    )


def read_to_end(client: Client, path: str, *, whole: bool = True, **query: object) -> Any:
    """The answer of a call that reads the whole log: if `whole`, asked again until the control
    plane has read it. That takes as long as it goes on. If the log's beginning was pruned, that is
    said on stderr. Raises Unable if it does not go on."""
    read_seq, num_same = -1, 0
    while True:
        found = client.get(path, DRY_RUN_S_MAX, **query)
        if not whole or found["read_seq"] >= found["last_seq"]:
            _say_pruned(found["first_seq"] - 1)
            return found
        num_same = num_same + 1 if found["read_seq"] <= read_seq else 0
        read_seq = found["read_seq"]
        so_far = f"{read_seq:,} of {found['last_seq']:,} records"
        if num_same >= SAME_NUM_MAX:
            raise Unable(
                f"the control plane reads its log no further: {so_far}",
                "unicron tail shows the log; see the control plane's own log",
            )
        console.talk(f"the control plane reads its log: {so_far}")


def _say_pruned(after: int) -> None:
    if after:
        console.talk(f"note: the log begins at seq {after + 1}: records 1 to {after} were pruned")


class OfflineClient(Client):
    """Answers the reads of a Client from segments and the `rest`; else raises Unreachable."""

    def __init__(
        self, folder: Folder, sealed: SealedLog, rest: Sequence[Record], hint: str
    ) -> None:
        super().__init__("http://localhost:1", "", hint)
        self._folder, self._sealed, self._rest = folder, sealed, rest

    @classmethod
    def open(cls, state: StateDir) -> OfflineClient:
        """Read the state folder. Raises UsageError."""
        folder = folder_of(state)
        with _usage_errors(folder.where):
            sealed = SealedLog(folder)
            rest = _read_rest(state, folder.cluster, sealed.last)
            return cls(folder, sealed, rest, how_to_start(state))

    @classmethod
    def open_whole(cls, path: Path) -> OfflineClient:
        """Read the state folder at this path. Raises UsageError, also if it has no log."""
        client = cls.open(opened(path))
        if not client.last:
            raise UsageError(f"{path} has no log", "name a state folder, or an exported file")
        return client

    @property
    def last(self) -> int:
        """The last seq; 0: there is no log."""
        return self._rest[-1].seq if self._rest else self._sealed.last

    @property
    def at_s(self) -> float:
        """The time of the last record, in seconds since 1970."""
        return next(self._read(self.last - 1)).at_s

    def get(self, path: str, limit_s: float = REPLY_S_MAX, **query: object) -> Any:
        """See Client.get: the state, the plan, either also of the past, the history, or the
        cluster's name. Raises UsageError for records that no leader wrote."""
        with _usage_errors(self._folder.where):
            try:
                return self._get(path, query)
            except UNFOLDABLE as error:
                raise UsageError(
                    f"{self._folder.where}: the log cannot be folded: {error}", "unicron log verify"
                ) from None

    def _get(self, path: str, query: Mapping[str, object]) -> Any:
        from ...control_plane.api import dry_run, moments
        from ...control_plane.api.view import view
        from ...control_plane.state.cluster import encode_state, state_text

        if path == "/v1/health":
            return {"cluster": self._folder.cluster}

        async def read(seq: int) -> Record:
            return next(self._read(seq - 1))

        if path == "/v1/log/beginning":
            after = self._sealed.first - 1
            return {"after": after, "state": state_text(self._state_at(after))}
        if path == "/v1/history":
            return self._history({key: str(value) for key, value in query.items()})
        if (past := self._of_the_past(path, query)) is not None:
            return past
        moment = str(query.get("at") or self.last)
        state = self._state_at(
            asyncio.run(moments.seq_at(moment, self._sealed.first, self.last, read))
        )
        if path == "/v1/state":
            return view(state, now_s=None if "at" in query else time.time())
        if path == "/v1/plan":
            return msgspec.to_builtins(dry_run.explain_present_plan(encode_state(state)))
        raise Unreachable("no control plane runs here", self._hint)

    def post(self, path: str, body: object, limit_s: float = REPLY_S_MAX, **headers: str) -> Any:
        """Raises Unreachable."""
        raise Unreachable("no control plane runs here", self._hint)

    def records(self, after: int, *, follow: bool) -> Iterator[dict[str, Any]]:
        """See Client.records. Raises Unreachable with `follow`."""
        if follow:
            raise Unreachable("no control plane runs here to follow", self._hint)
        return map(codec.to_plain, self._read(after))

    def _read(self, after: int) -> Iterator[Record]:
        with _usage_errors(self._folder.where):
            yield from self._sealed.records(after=after)
            yield from (one for one in self._rest if one.seq > after)

    def _history(self, query: dict[str, str]) -> Any:
        from ...control_plane.api import usage_answer
        from ...control_plane.history.history import usage
        from ...control_plane.service import usage_files

        first, last = usage_answer.first_day(query), self._sealed.last
        with _usage_errors(self._folder.where):
            found = usage_files.of_sealed(self._sealed)
        found.add(usage(self._read(last), self._state_at(last)))
        return msgspec.to_builtins(usage_answer.answer(found, first))

    def _of_the_past(self, path: str, query: Mapping[str, object]) -> Any:
        """What the calls of incidents and tasks answer that read the log; None: it is another."""
        from ...control_plane.api import timeline_answer
        from ...control_plane.history.timeline import Timeline

        now_s = time.time()

        def timeline() -> Timeline:
            until = int(str(query.get("at", self.last)))
            found = Timeline(self._state_at(self._sealed.first - 1))
            found.add(takewhile(lambda one: one.seq <= until, self._read(found.past.seq)))
            return found

        match [unquote(word) for word in path.split("/")[2:]]:
            case ["tasks", task, "curves"]:
                return msgspec.to_builtins(timeline_answer.curves(timeline(), task, now_s=now_s))
            case ["timeline", "incidents"]:
                return msgspec.to_builtins(
                    timeline_answer.incidents(
                        timeline(), float(str(query.get("since", 0.0))), now_s=now_s
                    )
                )
            case ["incidents", number, "facts"]:
                return msgspec.to_builtins(self._facts(int(number), str(query["option"]), now_s))
            case _:
                return None

    def _facts(self, number: int, option: str, now_s: float) -> Any:
        from ...control_plane.api import incident_facts
        from ...control_plane.state.cluster import encode_state

        start = self._state_at(incident_facts.begin(number, self._sealed.first))
        reading = incident_facts.Reading(number, encode_state(start), self._state_at(self.last))
        records = self._read(start.seq)
        while reading.num_missing:
            reading.add(list(islice(records, min(reading.num_missing, PAGE_RECORDS_NUM))))
        return reading.facts(option, now_s)

    def _state_at(self, seq: int) -> ClusterState:
        from ...control_plane.fold.fold import fold
        from ...control_plane.service import snapshots

        with _usage_errors(self._folder.where):
            state, _ = snapshots.newest(self._folder, seq)
        for record in takewhile(lambda one: one.seq <= seq, self._read(state.seq)):
            fold(state, record)
        return state


@contextmanager
def _usage_errors(where: str) -> Generator[None]:
    """Turn errors of the log's files into UsageError."""
    try:
        yield
    except (LogError, ServerError) as error:
        raise UsageError(str(error), error.hint) from None
    except OSError as error:
        raise UsageError(
            f"{where}: {reason(error)}", "name the state folder with --state"
        ) from None


def folder_of(state: StateDir, where: str = "") -> Folder:
    """The folder `where` with the sealed log of a state folder's cluster; "": `log` in the state
    folder. Raises UsageError if the control plane that ran last kept the log elsewhere: a state
    folder may come from somebody else, who would choose what is read, or asked."""
    last = read_json(state.log) or {}
    cluster = [*running_here(state), read_json(state.cluster) or last][0].get("cluster", "default")
    where = where or os.environ.get(SEGMENTS, "")
    other = str(last.get("segments") or "")
    if not where and other and (is_url(other) or Path(other) != state.path / "log"):
        raise UsageError(
            f"{state.log} says that the log is at {other}, which is read only if you name it",
            f"if that is yours: export {SEGMENTS}={quote(other)}",
        )
    return Folder(where or state.path / "log", str(cluster))


def _read_rest(state: StateDir, cluster: str, after: int) -> list[Record]:
    """The records that are not sealed: of the state folder's server if it runs, else of its files.
    No server is started: it would execute what the files say."""
    if (running := embedded_server.adopt(state.server)) is not None:
        return asyncio.run(_read_server(running.url, cluster, after))
    found = append_only_file.read(state.server, cluster, after)
    if found.snapshot and not found.records:
        console.talk(
            f"note: {found.snapshot} of the server is not read: only a server reads it. "
            f"Records after {after} may be there"
        )
    if found.cut:
        last = found.records[-1].seq if found.records else after
        console.talk(
            f"note: {found.cut} of the server ends within a command: it was cut, or its server was "
            f"killed while it wrote. Records after {last} may be missing"
        )
    return found.records


async def _read_server(url: str, cluster: str, after: int) -> list[Record]:
    """The records after `after` that a server has."""
    from ...events.log.redis_streams import RedisLog

    log = RedisLog(url, cluster)
    records: list[Record] = []
    try:
        while page := await log.read(after=after, num_max=PAGE_RECORDS_NUM):
            records += page
            after = page[-1].seq
    finally:
        await log.close()
    return records
