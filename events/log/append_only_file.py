"""Reads the append-only files of a server that is down, as data: nothing is executed.

The files are a list of commands. A server that starts on them executes all of them, also MODULE
LOAD, whatever rights clients have: whoever wrote the files would run code here. So all commands
but those that hold data are refused, by those who read the log here (`read`), and before a server
of ours starts on them (`check`).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptLog, UsageError
from ..records.codec import record_of_entry
from ..records.envelope import Record
from ..regular_files import open_regular
from .port import key_prefix

FOLDER, MANIFEST = "appendonlydir", "appendonly.aof.manifest"
ONE_FILE = "appendonly.aof"
"""In place of the folder, of a server before version 7; a later one goes on from it."""
MANIFEST_BYTES_MAX, LINE_BYTES_MAX = 1 << 16, 64
NAME_BYTES_MAX, RECORD_BYTES_MAX = 32, 64 << 20
"""Of a command, and of a record of the log: what is longer is none."""
RECORDS_BYTES_MAX, ENTRY_BYTES = 256 << 20, 256
"""Of the records that are read into memory, and what each takes beside its bytes. A log is sealed
every few MB."""
SKIP_BYTES = 1 << 12
"""So much is read to pass over it; over more the file is moved, which reads no hole."""
_FILE = re.compile(r"file ([A-Za-z0-9._-]+) seq \d+ type ([bhi])(?: .*)?")
_LINE = re.compile(rb"[*$](\d{1,9})\r\n")
_AUX, _END, _CHECKSUM_BYTES = 0xFA, 0xFF, 8
"""Opcodes of a snapshot (RDB): a fact about it, and its end. One without others has no keys."""
DATA = frozenset(
    b"""
    SELECT MULTI EXEC DEL UNLINK EXPIRE EXPIREAT PEXPIRE PEXPIREAT PERSIST RENAME
    SET SETEX PSETEX GETDEL GETSET APPEND INCR INCRBY DECR DECRBY
    LPUSH RPUSH LPOP RPOP LMOVE RPOPLPUSH LTRIM LREM LSET
    HSET HMSET HSETNX HDEL HINCRBY SADD SREM SPOP SMOVE
    ZADD ZREM ZINCRBY ZREMRANGEBYSCORE ZREMRANGEBYRANK ZPOPMIN ZPOPMAX
    XADD XDEL XTRIM XSETID
    """.split()
)
"""What the log's scripts write, and what a server writes for them: commands that hold data, and
can neither load, call nor set anything."""
STRANGE_HINT = "nothing was executed, and no server of Unicron starts on these files"
HINT = "let its owner export the log: unicron export FILE"


class Command(NamedTuple):
    """The name of a command in upper case; of an XADD to the log also its other words."""

    name: bytes
    words: tuple[bytes, ...] = ()


class Unsealed(NamedTuple):
    """Records of the log. `snapshot`: the one of the server that has others, perhaps; "": there is
    none. A server of an older Unicron has made it; only a server reads it. `cut`: the newest file,
    if it ends within a command or a transaction."""

    records: list[Record]
    snapshot: str
    cut: str = ""


def read(server: Path, cluster: str, after: int) -> Unsealed:
    """The records above `after` that the files in the server's folder have; a cut end is passed
    over, as the server does it. Only these records are in memory at a time. Raises CorruptLog,
    UsageError, OSError."""
    key = f"{key_prefix(cluster)}log".encode()
    held = _Held(after)
    snapshot = cut = ""
    for path, parser in _walk(server, key):
        if parser is None:
            snapshot = path.name
            continue
        held.take(parser)
        cut = path.name if parser.is_cut else ""
    first = min(held.wires, default=after + 1)
    if first > after + 1 and snapshot:
        raise UsageError(
            f"records {after + 1} to {first - 1} are in {server / FOLDER / snapshot}, which "
            "only a server reads",
            f"if the folder is yours, unicron up; else {HINT}",
        )
    return Unsealed(
        [
            record_of_entry(*held.wires.pop(seq), expect)
            for expect, seq in enumerate(sorted(held.wires), after + 1)
        ],
        snapshot,
        cut,
    )


def check(server: Path) -> str:
    """Check that the files in the server's folder have data only, so that a server may start on
    them: the name of the snapshot, which is not checked; "": there is none. Raises UsageError,
    OSError."""
    snapshot = ""
    for path, parser in _walk(server):
        if parser is None:
            snapshot = path.name
        for _ in parser.commands() if parser else ():
            pass
    return snapshot


def files(server: Path) -> list[Path]:
    """The files that a server reads, in the order in which they were written. Raises UsageError,
    OSError."""
    folder = server / FOLDER
    if not (folder / MANIFEST).exists():
        return [server / ONE_FILE] * (server / ONE_FILE).exists()
    with _open(folder / MANIFEST) as file:
        text = file.read(MANIFEST_BYTES_MAX + 1)
    named = [_FILE.fullmatch(line) for line in text.decode(errors="replace").splitlines()]
    if None in named or len(text) > MANIFEST_BYTES_MAX:
        raise UsageError(f"{folder / MANIFEST} is not a manifest of a server", HINT)
    # history: the server is about to remove it
    return [folder / file[1] for file in named if file is not None and file[2] != "h"]


def _walk(server: Path, key: bytes = b"") -> Iterator[tuple[Path, _Parser | None]]:
    """The files that a server reads, each with its parser; None: it is a snapshot. A server never
    names a file twice, also not by a second link to it: to read it again could take for ever."""
    seen: set[tuple[int, int]] = set()
    for path in files(server):
        with _open(path) as file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) in seen:
                raise UsageError(f"{server / FOLDER / MANIFEST} names {path.name} twice", HINT)
            seen.add((status.st_dev, status.st_ino))
            yield path, _Parser(file, path, key) if _is_list(file) else None


def _open(path: Path) -> BufferedReader:
    """Open a file of this user; no link, which may lead anywhere, and no fifo, which may hang."""
    try:
        return open_regular(path, follow=False, uid=os.geteuid())
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EINVAL):
            raise UsageError(f"{path} is no file of the log: {error.strerror}", HINT) from None
        raise


def _is_list(file: BufferedReader) -> bool:
    """Whether the file is a list of commands. It may begin with a snapshot without keys; behind
    that the file is read on."""
    if not file.peek(1)[:6].startswith((b"REDIS", b"VALKEY")):
        return True
    if not (end := _end_of_empty(file.read(1 << 12))):
        return False
    file.seek(end)
    return True


class _Parser:
    """Reads the commands of a file, one after the other. It keeps the words of an XADD to `key`
    alone: all others, whatever their number and length, are passed over."""

    def __init__(self, file: BufferedReader, path: Path, key: bytes) -> None:
        self._file, self.path, self._key = file, path, key
        self._size = os.fstat(file.fileno()).st_size
        self.is_cut = False
        """Whether the file ends within a command or a transaction."""

    def commands(self) -> Iterator[Command]:
        """Those up to the end, or to where the file is cut. Raises UsageError at one that holds no
        data, CorruptLog at an XADD to the log that adds no record."""
        while line := self._file.readline(LINE_BYTES_MAX):
            if line.startswith(b"#"):  # a time
                continue
            num = self._number(b"*", line)
            if num == 0 and line.endswith(b"\n"):
                continue
            command = self._command(num) if num else None
            if command is None:
                self.is_cut = True
                return
            yield command

    def _command(self, num: int) -> Command | None:
        """A command of so many words; None if the file ends within it. Raises UsageError."""
        if (name := self._word(NAME_BYTES_MAX)) is None:
            return None
        if name.upper() not in DATA:
            shown = name.decode(errors="replace").upper()
            raise UsageError(
                f"{self.path} has the command {shown if shown.isprintable() else '?'}, which "
                "Unicron does not write there, and a server that starts on it may run a program",
                STRANGE_HINT,
            )
        words: list[bytes] = []
        if self._key and num > 1 and name.upper() == b"XADD":
            bounds = (len(self._key) + 1, LINE_BYTES_MAX, 2, RECORD_BYTES_MAX)
            for bytes_max in bounds[: num - 1]:
                if (word := self._word(bytes_max)) is None:
                    return None
                words.append(word)
                if words[0] != self._key:
                    break
        for _ in range(num - 1 - len(words)):
            if self._word(0) is None:
                return None
        if words[:1] != [self._key]:
            words = []
        elif num != 5:
            raise CorruptLog(0, f"{self.path.name} has an entry that is no record")
        return Command(name.upper(), tuple(words))

    def _word(self, bytes_max: int) -> bytes | None:
        """The next word, at most its first bytes; None if the file ends before the word does."""
        line = self._file.readline(LINE_BYTES_MAX)
        length = self._number(b"$", line)
        if length <= SKIP_BYTES:
            word = self._file.read(length + 2)
            if len(word) < length + 2:
                return None
            return word[:length] if length < bytes_max else word[:bytes_max]
        if length >= self._size:
            return None
        word = self._file.read(min(length, bytes_max))
        end = self._file.seek(length + 2 - len(word), os.SEEK_CUR)
        return word if end <= self._size else None

    def _number(self, sign: bytes, line: bytes) -> int:
        """The number in a line of `sign`; 0 if it is cut. Raises UsageError if it is another."""
        if (line[:1] == sign or not line) and (number := _count(line)) is not None:
            return number
        raise UsageError(f"{self.path} is not an append-only file of a server: {line[:20]!r}", HINT)


@lru_cache(1 << 12)  # the same few lines a million times
def _count(line: bytes) -> int | None:
    if (number := _LINE.fullmatch(line)) is not None:
        return int(number[1])
    return 0 if len(line) < LINE_BYTES_MAX and not line.endswith(b"\n") else None


class _Held:
    """By seq the id and the record of each entry of the log above `after`, of bounded size."""

    def __init__(self, after: int) -> None:
        self.wires: dict[int, tuple[str, bytes]] = {}
        self._after, self._num_bytes = after, 0

    def take(self, parser: _Parser) -> None:
        """The entries of a file, without those of a transaction that has no end. Raises CorruptLog,
        UsageError."""
        begun: list[tuple[int, str, bytes]] | None = None
        for command in parser.commands():
            match command.name:
                case b"MULTI":
                    begun = []
                case b"EXEC":
                    for held in begun or ():
                        self._add(*held)
                    begun = None
                case _ if command.words:
                    seq, entry, wire = _added(command, parser.path.name)
                    if seq <= self._after:
                        continue
                    self._count(len(wire) + ENTRY_BYTES, parser.path)
                    if begun is None:
                        self._add(seq, entry, wire)
                    else:
                        begun.append((seq, entry, wire))
                case _:
                    pass
        parser.is_cut |= begun is not None

    def _add(self, seq: int, entry: str, wire: bytes) -> None:
        if former := self.wires.get(seq):
            self._num_bytes -= len(former[1]) + ENTRY_BYTES
        self.wires[seq] = entry, wire

    def _count(self, num_bytes: int, path: Path) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > RECORDS_BYTES_MAX:
            raise UsageError(
                f"{path} has more than {RECORDS_BYTES_MAX >> 20} MiB of records that are not "
                "sealed: they are not read without a server",
                "where it came from: unicron up, which seals them; then send the folder again",
            )


def _added(command: Command, name: str) -> tuple[int, str, bytes]:
    """Seq, id and record of an XADD to the log."""
    _, entry, field, wire = command.words
    if field == b"r" and re.fullmatch(rb"\d{1,16}-\d{1,16}", entry):
        return int(entry.partition(b"-")[2]), entry.decode(), wire
    raise CorruptLog(0, f"{name} has an entry that is no record")


def _end_of_empty(head: bytes) -> int:
    """Where a snapshot ends that begins so; 0: it has more than facts about itself."""
    at = 9
    while head[at : at + 1] == bytes([_AUX]):
        at = _behind(head, _behind(head, at + 1))
    return at + 1 + _CHECKSUM_BYTES if head[at : at + 1] == bytes([_END]) else 0


def _behind(data: bytes, at: int) -> int:
    """Where a short text or number of a snapshot ends."""
    kind = data[at] if at < len(data) else 0
    return at + 1 + (kind if kind < 0x40 else {0xC0: 1, 0xC1: 2, 0xC2: 4}.get(kind, len(data)))
