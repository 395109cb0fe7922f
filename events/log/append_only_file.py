"""Reads the append-only files of a server that is down, as data: nothing is executed.

The files are a list of commands. A server that starts on them executes all of them, also MODULE
LOAD, whatever rights clients have: whoever wrote the files would run code here. So all commands
but those that hold data are refused, by those who read the log here (`read`), and before a server
of ours starts on them (`check`).
"""

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
WORD_BYTES_MAX = 64 << 20
"""A longer word is passed over: it is no record."""
_FILE = re.compile(r"file ([A-Za-z0-9._-]+) seq \d+ type ([bhi])(?: .*)?")
_LINE = re.compile(rb"[*$](\d{1,9})\r\n")
_AUX, _END, _CHECKSUM_BYTES = 0xFA, 0xFF, 8
"""Opcodes of a snapshot (RDB): a fact about it, and its end. One without others has no keys."""
Command = list[bytes]
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


class Unsealed(NamedTuple):
    """Records of the log, and the snapshot of the server that has others, perhaps; "": there is
    none. A server of an older Unicron has made it; only a server reads it."""

    records: list[Record]
    snapshot: str


def read(server: Path, cluster: str, after: int) -> Unsealed:
    """The records above `after` that the files in the server's folder have; a cut end is passed
    over, as the server does it. Raises CorruptLog, UsageError, OSError."""
    key = f"{key_prefix(cluster)}log".encode()
    wires: dict[int, tuple[str, bytes]] = {}
    snapshot = ""
    for path, commands in _walk(server):
        if commands is None:
            snapshot = path.name
            continue
        for command in _executed(commands):
            if command[0].upper() == b"XADD" and command[1:2] == [key]:
                entry, wire = _added(command, path.name)
                if (seq := int(entry.partition("-")[2])) > after:
                    wires[seq] = entry, wire
    first = min(wires, default=after + 1)
    if first > after + 1 and snapshot:
        raise UsageError(
            f"records {after + 1} to {first - 1} are in {server / FOLDER / snapshot}, which "
            "only a server reads",
            f"if the folder is yours, unicron up; else {HINT}",
        )
    return Unsealed(
        [
            record_of_entry(*wires[seq], expect)
            for expect, seq in enumerate(sorted(wires), after + 1)
        ],
        snapshot,
    )


def check(server: Path) -> str:
    """Check that the files in the server's folder have data only, so that a server may start on
    them: the name of the snapshot, which is not checked; "": there is none. Raises UsageError,
    OSError."""
    snapshot = ""
    for path, commands in _walk(server):
        if commands is None:
            snapshot = path.name
        for _ in commands or ():
            pass
    return snapshot


def files(server: Path) -> list[Path]:
    """The files that a server reads, in the order in which they were written."""
    folder = server / FOLDER
    if not (folder / MANIFEST).exists():
        return [server / ONE_FILE] * (server / ONE_FILE).exists()
    with _open(folder / MANIFEST) as file:
        lines = file.read(MANIFEST_BYTES_MAX).decode(errors="replace").splitlines()
    named = [_FILE.fullmatch(line) for line in lines]
    if None in named:
        raise UsageError(f"{folder / MANIFEST} is not a manifest of a server", HINT)
    # history: the server is about to remove it
    return [folder / file[1] for file in named if file is not None and file[2] != "h"]


def _walk(server: Path) -> Iterator[tuple[Path, Iterator[Command] | None]]:
    """The files that a server reads, each with its commands; None: it is a snapshot."""
    for path in files(server):
        with _open(path) as file:
            yield path, _commands(file, path) if _is_list(file) else None


def _open(path: Path) -> BufferedReader:
    """Open a file of this user; no link, which may lead anywhere, and no fifo, which may hang."""
    try:
        return open_regular(path, follow=False, uid=os.geteuid())
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EINVAL):
            raise UsageError(f"{path} is not a file of this user", HINT) from None
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


def _commands(file: BufferedReader, path: Path) -> Iterator[Command]:
    """The commands of a file, as lists of words, up to its end or to where it is cut. Raises
    UsageError at one that holds no data."""
    size = os.fstat(file.fileno()).st_size
    while line := file.readline(LINE_BYTES_MAX):
        if line.startswith(b"#"):  # a time
            continue
        command: Command = []
        for _ in range(_number(b"*", line, path)):
            length = _number(b"$", file.readline(LINE_BYTES_MAX), path)
            if length > WORD_BYTES_MAX and file.tell() + length + 2 <= size:
                file.seek(length + 2, os.SEEK_CUR)
                command.append(b"")
                continue
            if length >= size or len(word := file.read(length + 2)) < length + 2:
                return
            command.append(word[:length])
        if not command:
            continue
        if command[0] not in DATA and command[0].upper() not in DATA:
            name = command[0][:32].decode(errors="replace").upper()
            raise UsageError(
                f"{path} has the command {name if name.isprintable() else '?'}, which Unicron "
                "does not write there, and a server that starts on it may run a program",
                STRANGE_HINT,
            )
        yield command


def _number(sign: bytes, line: bytes, path: Path) -> int:
    """The number in the line; 0 if that is cut. Raises UsageError if it is no line of `sign`."""
    if (line[:1] == sign or not line) and (number := _count(line)) is not None:
        return number
    raise UsageError(f"{path} is not an append-only file of a server: {line[:20]!r}", HINT)


@lru_cache(1 << 12)  # the same few lines a million times
def _count(line: bytes) -> int | None:
    if (number := _LINE.fullmatch(line)) is not None:
        return int(number[1])
    return 0 if len(line) < LINE_BYTES_MAX and not line.endswith(b"\n") else None


def _executed(commands: Iterator[Command]) -> Iterator[Command]:
    """Without the commands of a transaction that has no end."""
    held: list[Command] | None = None
    for command in commands:
        match command[0].upper():
            case b"MULTI":
                held = []
            case b"EXEC":
                yield from held or ()
                held = None
            case _ if held is not None:
                held.append(command)
            case _:
                yield command


def _added(command: Command, name: str) -> tuple[str, bytes]:
    """The id and the record of an XADD to the log."""
    if len(command) == 5 and command[3] == b"r" and re.fullmatch(rb"\d{1,16}-\d{1,16}", command[2]):
        return command[2].decode(), command[4]
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
