"""Reads the log from the append-only files of a server that is down, as data: nothing is executed.

The files are a list of commands. A server that starts on them executes all of them, also MODULE
LOAD, whatever rights clients have: whoever wrote the files would run code here.
"""

import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptLog, UsageError
from ..records.codec import record_of_entry
from ..records.envelope import Record
from .port import key_prefix

FOLDER, MANIFEST = "appendonlydir", "appendonly.aof.manifest"
MANIFEST_BYTES_MAX, LINE_BYTES_MAX = 1 << 16, 64
_FILE = re.compile(r"file ([A-Za-z0-9._-]+) seq \d+ type ([bhi])(?: .*)?")
_COUNT, _LENGTH = re.compile(rb"\*(\d{1,9})\r\n"), re.compile(rb"\$(\d{1,9})\r\n")
_AUX, _END = 0xFA, 0xFF
"""Opcodes of a snapshot (RDB): a fact about it, and its end. One without others has no keys."""
Command = list[bytes]
PROGRAMS = frozenset(
    {
        b"MODULE",
        b"FUNCTION",
        b"SCRIPT",
        b"EVAL",
        b"EVALSHA",
        b"FCALL",
        b"CONFIG",
        b"DEBUG",
        b"REPLICAOF",
        b"SLAVEOF",
        b"ACL",
    }
)
"""Commands that a server of Unicron never writes there."""
STRANGE_HINT = "nothing was executed; do not start unicron up on this folder"
HINT = "let its owner export the log: unicron export FILE"


class Unsealed(NamedTuple):
    """Records of the log, and the snapshot of the server that has others, perhaps; "": there is
    none. A server of an older Unicron has made it; only a server reads it."""

    records: list[Record]
    snapshot: str


def read(server: Path, cluster: str, after: int) -> Unsealed:
    """The records above `after` that the files in the server's folder have; a cut end is passed
    over, as the server does it. Raises CorruptLog, UsageError, OSError."""
    folder, key = server / FOLDER, f"{key_prefix(cluster)}log".encode()
    if not folder.is_dir():
        return Unsealed([], "")
    wires: dict[int, tuple[str, bytes]] = {}
    snapshot = ""
    for name in file_names(folder):
        with _open(folder / name) as file:
            if file.peek(1)[:6].startswith((b"REDIS", b"VALKEY")):
                snapshot = name if _has_keys(file) else snapshot
                continue
            for command in _executed(_commands(file, name)):
                if (verb := command[0].upper()) in PROGRAMS:
                    raise UsageError(
                        f"{folder / name} has the command {verb.decode()}, which runs "
                        "a program on a server that starts with it",
                        STRANGE_HINT,
                    )
                if verb == b"XADD" and command[1:2] == [key]:
                    entry, wire = _added(command, name)
                    if (seq := int(entry.partition("-")[2])) > after:
                        wires[seq] = entry, wire
    first = min(wires, default=after + 1)
    if first > after + 1 and snapshot:
        raise UsageError(
            f"records {after + 1} to {first - 1} are in {folder / snapshot}, which "
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


def file_names(folder: Path) -> Iterator[str]:
    """The files that the manifest names, in the order in which they were written. Raises
    UsageError, OSError."""
    with _open(folder / MANIFEST) as file:
        lines = file.read(MANIFEST_BYTES_MAX).decode(errors="replace").splitlines()
    for line in lines:
        entry = _FILE.fullmatch(line)
        if entry is None:
            raise UsageError(f"{folder / MANIFEST} is not a manifest of a server", HINT)
        if entry[2] != "h":  # history: the server is about to remove it
            yield entry[1]


def _open(path: Path) -> BufferedReader:
    """Open a file of this user; no link, which may lead anywhere, and no fifo, which may hang."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UsageError(f"{path} is not a file of this user", HINT)


def _commands(file: BufferedReader, name: str) -> Iterator[Command]:
    """The commands of a file, as lists of words, up to its end or to where it is cut."""
    size = os.fstat(file.fileno()).st_size
    while line := file.readline(LINE_BYTES_MAX):
        if line.startswith(b"#"):  # a time
            continue
        command: Command = []
        for _ in range(_number(_COUNT, line, name)):
            length = _number(_LENGTH, file.readline(LINE_BYTES_MAX), name)
            if length >= size or len(word := file.read(length + 2)) < length + 2:
                return
            command.append(word[:length])
        if command:
            yield command


def _number(pattern: re.Pattern[bytes], line: bytes, name: str) -> int:
    found = pattern.fullmatch(line)
    if found is not None:
        return int(found[1])
    if len(line) < LINE_BYTES_MAX and not line.endswith(b"\n"):
        return 0
    raise UsageError(f"{name} is not an append-only file of a server: {line[:20]!r}", HINT)


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


def _has_keys(file: BufferedReader) -> bool:
    """Whether a snapshot has anything but facts about itself."""
    head = file.read(1 << 12)[9:]
    at = 0
    while head[at : at + 1] == bytes([_AUX]):
        at = _behind(head, _behind(head, at + 1))
    return head[at : at + 1] != bytes([_END])


def _behind(data: bytes, at: int) -> int:
    """Where a short text or number of a snapshot ends."""
    kind = data[at] if at < len(data) else 0
    return at + 1 + (kind if kind < 0x40 else {0xC0: 1, 0xC1: 2, 0xC2: 4}.get(kind, len(data)))
