"""`logs`: the output of a task's ranks, from files on this host or by the agents of their nodes."""

from __future__ import annotations

import time
from pathlib import Path

from msgspec import Struct

from ...events.errors import UsageError
from ..cluster.client import Client, Interrupted, Refused, Unable, Unreachable, Urls
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain, ranks
from .offline import Log, connect_to_read, log_of
from .tasks import number_of

CHUNK_BYTES = 1 << 16
POLL_S = 0.2
RESCAN_S = 1.0
"""Seconds between two reads of the log for new attempts."""


class _File(Struct):
    """The output of one attempt, and how much of it was printed."""

    rank: int
    attempt: int
    node: str
    path: Path
    offset: int = 0
    rest: str = ""
    next_s: float = 0.0
    """When its agent is asked again, if the file is not on this host."""
    is_told: bool = False

    def lines(self, client: Client, *, whole: bool) -> list[str]:
        """The lines since the last call; an unfinished line only if `whole`."""
        try:
            if self.path.exists():
                self._read()
            elif whole or time.monotonic() > self.next_s:
                self._ask(client)
                self.next_s = time.monotonic() + RESCAN_S
        except OSError:
            return []
        except (Interrupted, Refused, Unable, Unreachable) as error:
            if not self.is_told:
                console.talk(f"note: rank {self.rank}.{self.attempt} printed on {self.node}, "
                             f"in {self.path}: {error}")
            self.is_told = True
        *lines, self.rest = self.rest.split("\n")
        if whole and self.rest:
            lines.append(self.rest)
            self.rest = ""
        return lines

    def _read(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while data := file.read(CHUNK_BYTES):
                self.offset += len(data)
                self.rest += data.decode(errors="replace")

    def _ask(self, client: Client) -> None:
        """Get it from the agent of its node, which has it on its own disk."""
        while True:
            part = client.get(f"/v1/nodes/{self.node}/file", file=str(self.path),
                              offset=self.offset)
            self.rest += part["text"]
            if part["end"] == self.offset:
                return
            self.offset = part["end"]


def logs(state: StateDir, url: Urls, task: str, rank: int | None, *, follow: bool) -> None:
    """Print the output of a task, each line after its rank and attempt. Raises UsageError."""
    client = connect_to_read(state, url)
    number = number_of(client, client.get("/v1/state"), task)
    files: dict[str, _File] = {}
    log = log_of(client)
    has_ended = _begin(log, number, rank, files)
    seq, ends = _find(client, number, rank, files, after=log.after)
    has_ended |= ends
    if not files and (has_ended or not follow):
        who = f"task {task}" if rank is None else f"rank {rank} of task {task}"
        if number <= log.after:
            raise UsageError(f"the records that name the output of {who} were pruned",
                             f"the log begins at seq {log.after + 1}")
        others: dict[str, _File] = {}
        _begin(log, number, None, others)
        _find(client, number, None, others, after=log.after)
        there = {file.rank for file in others.values()}
        raise UsageError(f"{who} {'never started' if has_ended else 'has not started yet'}",
                         f"there {'is' if len(there) == 1 else 'are'} {ranks(there)}" if there
                         else f"unicron status {task}")
    try:
        _show(client, number, rank, files, seq if follow and not has_ended else None)
    except KeyboardInterrupt:
        if not follow:
            raise


def _begin(log: Log, number: int, rank: int | None, files: dict[str, _File]) -> bool:
    """Add the files of the processes that ran when the log begins; whether the task had ended."""
    task = log.state().tasks.get(number)
    for one in task.ranks.values() if task is not None else ():
        if one.log_path and rank in (None, one.rank):
            files[one.log_path] = _File(rank=one.rank, attempt=one.attempt, node=one.slot.node,
                                        path=Path(one.log_path))
    return task is not None and bool(task.outcome)


def _show(client: Client, task: int, rank: int | None, files: dict[str, _File],
          seq: int | None) -> None:
    """Print the output; if `seq` (the last seq read) is given, follow until the task has ended."""
    scanned_s = time.monotonic()
    has_ended = False
    while True:
        for file in files.values():
            for line in file.lines(client, whole=seq is None):
                console.out(f"{file.rank}.{file.attempt} {line}" if rank is None else line)
        if seq is None:
            return
        if has_ended:
            seq = None
            continue
        time.sleep(POLL_S)
        if time.monotonic() - scanned_s > RESCAN_S:
            scanned_s = time.monotonic()
            try:
                seq, has_ended = _find(client, task, rank, files, after=seq)
            except (Interrupted, Unable, Unreachable):  # keep following the files
                pass


def _find(client: Client, task: int, rank: int | None, files: dict[str, _File], *,
          after: int) -> tuple[int, bool]:
    """Add the files of attempts behind `after`; the last seq, and whether the task ended."""
    has_ended = False
    for record in client.records(after, follow=False):
        body: Plain = record["body"]
        after = int(record["seq"])
        if record["kind"] == "TaskEnded" and body["task"] == task:
            has_ended = True
        if record["kind"] != "RankStarted" or body["task"] != task:
            continue
        if rank in (None, body["rank"]) and body["log_path"] not in files:
            files[body["log_path"]] = _File(rank=body["rank"], attempt=body["attempt"],
                                            node=body["node"], path=Path(body["log_path"]))
    return after, has_ended
