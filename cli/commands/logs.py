"""`logs`: the output of a task's ranks, from files on this host or by the agents of their nodes."""

import codecs
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct, field

from ...events import bounded_file
from ...events.errors import UsageError
from ...events.regular_files import open_regular
from ..cluster.answers import Interrupted
from ..cluster.client import Client, Refused, Unable, Unreachable, Urls
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain, ranks
from .offline import connect_to_read
from .tasks import number_of, past_of

CHUNK_BYTES = 1 << 16
"""An agent sends as much at once."""
BEHIND_END_BYTES = 1 << 50
"""An offset that no file has: the answer is where the file ends."""
POLL_S = 0.2
RESCAN_S = 1.0
"""Seconds between two reads of the log for new attempts."""
GONE = (Interrupted, Unable, Unreachable)


class _File(Struct):
    """The output of one attempt, and how much of it was read."""

    rank: int
    attempt: int
    node: str
    path: Path
    ended_s: float | None = None
    """When its process exited."""
    offset: int = 0
    skip: int = 0
    """Lines to pass over: with --tail."""
    rest: str = ""
    """The beginning of an unfinished line."""
    decoder: codecs.IncrementalDecoder = field(
        default_factory=partial(codecs.getincrementaldecoder("utf-8"), "replace")
    )
    next_s: float = 0.0
    """When its agent is asked again, if the file is not on this host."""
    is_told: bool = False

    def texts(self, client: Client, *, whole: bool, tail: int | None = None) -> Iterator[str]:
        """What is new, in parts: whole lines; parts of a line only if it is longer than a chunk,
        or at the end if `whole`: that is where the file ends now, whatever a process appends then.
        `tail`: begin with so many lines before the end."""
        if not (whole or self.path.exists() or time.monotonic() > self.next_s):
            return
        self.next_s = time.monotonic() + RESCAN_S
        try:
            last = self._end(client) if whole or tail is not None else BEHIND_END_BYTES
            if tail is not None:
                self._seek(client, tail, last)
            while self.offset < last:
                text, begin, end = self._part(client, self.offset, last)
                if end < self.offset:  # it was emptied
                    self.offset = 0
                    continue
                if end == self.offset:
                    break
                if begin > self.offset:
                    yield self._end_at_gap(begin - self.offset)
                self.offset = end
                *passed, text = text.split("\n", self.skip)
                self.skip -= len(passed)
                if self.skip:
                    continue
                text = self.rest + text
                at = text.rfind("\n") + 1 or len(text) * (len(text) > CHUNK_BYTES)
                self.rest = text[at:]
                yield text[:at]
        except OSError:
            return
        except (*GONE, Refused) as error:
            if not self.is_told:
                console.talk(
                    f"note: rank {self.rank}.{self.attempt} printed on {self.node}, "
                    f"in {self.path}: {error}"
                )
            self.is_told = True
        if whole:
            yield self.rest + self.decoder.decode(b"", final=True)
            self.rest = ""

    def _end_at_gap(self, num_bytes: int) -> str:
        """The unfinished line before a gap, and a line about the gap."""
        before, self.rest = self.rest, ""
        told = f"[unicron: {num_bytes:,} bytes were dropped here, see output_bytes_max]\n"
        return before + "\n" * bool(before) + told

    def _part(self, client: Client, offset: int, last: int) -> tuple[str, int, int]:
        """The text from the offset on, or from behind a gap, and where it begins and ends, not
        behind `last`; of no text that is the file's end."""
        if self.path.exists():
            num_bytes = max(min(last - offset, CHUNK_BYTES), 0)
            with open_regular(self.path) as file:
                begin, data = bounded_file.read_part(file.fileno(), offset, num_bytes)
            if begin != offset:
                self.decoder.reset()
            return self.decoder.decode(data), begin, begin + len(data)
        part = client.get(f"/v1/nodes/{self.node}/file", file=str(self.path), offset=offset)
        text, begin, end = part["text"], part.get("begin", offset), part["end"]
        if begin < last < end:
            text, end = text.encode()[: last - begin].decode(errors="ignore"), last
        return text, begin, end

    def _end(self, client: Client) -> int:
        """Where the file ends now."""
        if self.path.exists():
            return self.path.stat().st_size
        _, _, end = self._part(client, BEHIND_END_BYTES, BEHIND_END_BYTES)
        if end == BEHIND_END_BYTES:
            # An agent of a former release does not tell it: read on up to there.
            end = 0
            while (after := self._part(client, end, BEHIND_END_BYTES)[2]) != end:
                end = after
        return end

    def _seek(self, client: Client, tail: int, last: int) -> None:
        """Set where reading begins, and how many lines are passed over from there: at most so many
        as are behind a gap."""
        begin, lines = -(-last // CHUNK_BYTES) * CHUNK_BYTES, 0
        while begin and lines <= tail:
            begin -= CHUNK_BYTES
            text, at, _ = self._part(client, begin, last)
            self.decoder.reset()
            if at > begin:
                self.offset = bounded_file.HEAD_BYTES
                return
            lines += text.count("\n") + (not lines and text[-1:] not in ("", "\n"))
        self.offset, self.skip = begin, max(lines - tail, 0)


class _Printer:
    """Prints the parts of several files: no line has parts of two."""

    def __init__(self, *, prefixed: bool) -> None:
        self._prefixed = prefixed
        self._open: _File | None = None
        """Whose line has not ended."""

    def show(self, file: _File, text: str) -> None:
        """Print a part, each line after the rank and attempt."""
        if not text:
            return
        prefix = f"{file.rank}.{file.attempt} " if self._prefixed else ""
        if self._open is not file:
            self.end()
            text = prefix + text
        ends = text.endswith("\n")
        console.write((text[:-1] if ends else text).replace("\n", f"\n{prefix}") + "\n" * ends)
        self._open = None if ends else file

    def end(self) -> None:
        """End the line."""
        if self._open is not None:
            console.write("\n")
        self._open = None


class _Attempts:
    """The output files of a task's processes, as the log names them."""

    def __init__(self, client: Client, past: Plain) -> None:
        """`past`: the answer of GET /v1/tasks/ID/curves."""
        self._client = client
        self._number = int(past["task"])
        self._seq = int(past["read_seq"])
        self.files = {
            (one["rank"], one["attempt"]): _File(
                rank=one["rank"],
                attempt=one["attempt"],
                node=one["node"],
                path=Path(one["log_path"]),
                ended_s=one["ended_s"],
            )
            for one in past["outputs"]
        }
        self.has_ended = bool(past["ended"])

    def scan(self) -> None:
        """Read what the log has since the last scan."""
        for record in self._client.records(self._seq, follow=False):
            body: Plain = record["body"]
            self._seq = int(record["seq"])
            if body.get("task") != self._number:
                continue
            if record["kind"] == "RankStarted":
                self.files.setdefault(
                    (body["rank"], body["attempt"]),
                    _File(
                        rank=body["rank"],
                        attempt=body["attempt"],
                        node=body["node"],
                        path=Path(body["log_path"]),
                    ),
                )
            elif record["kind"] == "RankExited" and (
                found := self.files.get((body["rank"], body["attempt"]))
            ):
                found.ended_s = record["at_s"]
            self.has_ended |= record["kind"] == "TaskEnded"

    def chosen(self, rank: int | None, since: float, *, previous: bool) -> list[_File]:
        """The files of a rank that were written since a time; with `previous` of each rank that
        before the newest."""
        found = [
            one
            for one in self.files.values()
            if rank in (None, one.rank) and (one.ended_s is None or one.ended_s >= since)
        ]
        of: dict[int, list[_File]] = {}
        for one in sorted(found, key=lambda one: one.attempt):
            of.setdefault(one.rank, []).append(one)
        return [many[-2] for many in of.values() if len(many) > 1] if previous else found


def logs(
    state: StateDir,
    url: Urls,
    task: str,
    rank: int | None,
    *,
    follow: bool,
    lines: int | None = None,
    since: float | None = None,
    previous: bool = False,
) -> None:
    """Print the output of a task, each line after its rank and attempt. Raises UsageError."""
    if previous and follow:
        raise UsageError(
            "--previous and --follow do not go together",
            "the former attempt has ended: leave --follow out",
        )
    client = connect_to_read(state, url)
    past = past_of(client, number_of(client, client.get("/v1/state"), task))
    attempts = _Attempts(client, past)
    follow = follow and not attempts.has_ended
    since = since or 0.0
    chosen = attempts.chosen(rank, since, previous=previous)
    if not chosen and not follow:
        who = f"task {task}" if rank is None else f"rank {rank} of task {task}"
        there = {one.rank for one in attempts.files.values()}
        if there and rank in (None, *there):
            raise UsageError(
                f"{who} has no {'former ' * previous}attempt{' since then' * bool(since)}",
                f"unicron logs {task}",
            )
        if past["task"] < past["first_seq"]:
            raise UsageError(
                f"the records that name the output of {who} were pruned",
                f"the log begins at seq {past['first_seq']}",
            )
        begun = "never started" if attempts.has_ended else "has not started yet"
        raise UsageError(
            f"{who} {begun}",
            f"there {'is' if len(there) == 1 else 'are'} {ranks(there)}"
            if there
            else f"unicron status {task}",
        )
    printer = _Printer(prefixed=rank is None)
    try:
        _show(client, printer, chosen, whole=not follow, tail=lines)
        while follow:
            for _ in range(round(RESCAN_S / POLL_S)):
                time.sleep(POLL_S)
                _show(client, printer, chosen, whole=False)
            with suppress(*GONE):  # keep following the files
                attempts.scan()
            chosen = attempts.chosen(rank, since, previous=False)
            follow = not attempts.has_ended
            _show(client, printer, chosen, whole=not follow)
    except KeyboardInterrupt:
        if not follow:
            raise
    printer.end()


def _show(
    client: Client,
    printer: _Printer,
    files: Iterable[_File],
    *,
    whole: bool,
    tail: int | None = None,
) -> None:
    for file in files:
        for text in file.texts(client, whole=whole, tail=tail):
            printer.show(file, text)
