"""Files that others append to are bounded: their head and tail stay, and no writer notices."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from unicron.events import bounded_file
from unicron.events.bounded_file import HEAD_BYTES, BoundedFile, BoundedFiles, read_part

MIB = 1 << 20
BLOCK_BYTES = 512
CHATTY = """
import sys, time
for number in range(int(sys.argv[1])):
    sys.stdout.buffer.write((b'%09d ' % number) * 100_000)
"""


def taken(path: Path) -> int:
    return path.stat().st_blocks * BLOCK_BYTES


def parts(path: Path) -> list[bounded_file.Part]:
    """The whole file, as a reader of parts finds it."""
    found, offset = [], 0
    with path.open("rb") as file:
        while (part := read_part(file.fileno(), offset, 1 << 16)).data:
            found.append(part)
            offset = part.begin + len(part.data)
    return found


def test_head_and_tail_stay_where_they_are(tmp_path: Path) -> None:
    path, text = tmp_path / "a.log", b"".join(b"%09d\n" % number for number in range(2_000_000))
    path.write_bytes(text)
    BoundedFile(path, 8 * MIB).look()
    assert path.stat().st_size == len(text)
    assert taken(path) <= 4 * MIB + 2 * HEAD_BYTES
    head, *tail = parts(path)
    assert (head.begin, head.data) == (0, text[:HEAD_BYTES])
    assert tail[0].begin + sum(len(part.data) for part in tail) == len(text)
    assert b"".join(part.data for part in tail) == text[tail[0].begin :]
    assert len(text) - tail[0].begin >= 4 * MIB


def test_a_file_below_its_bound_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for data in (b"", b"x", bytes(1 << 16), os.urandom(8 * MIB)):
        path.write_bytes(data)
        assert BoundedFile(path, 8 * MIB).look() >= 0
        assert path.read_bytes() == data == b"".join(part.data for part in parts(path))


def test_a_writer_at_full_speed_stays_near_the_bound(tmp_path: Path) -> None:
    path, files = tmp_path / "a.log", BoundedFiles()
    path.touch()
    files.add("a", path, 32 * MIB)
    most, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.005):
            most = max(most, taken(path))

    with path.open("ab") as log:
        watcher = threading.Thread(target=watch)
        watcher.start()
        command = [sys.executable, "-c", CHATTY, "600"]
        assert subprocess.run(command, stdout=log, check=False, timeout=60).returncode == 0
    files.drop("a")
    ended.set()
    watcher.join()
    assert path.stat().st_size == 600_000_000
    assert most < 280 * MIB, "32 MiB, and what is written between two looks, on a busy machine"
    deadline_s = time.monotonic() + 10
    while taken(path) > 32 * MIB + 2 * HEAD_BYTES and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert taken(path) <= 32 * MIB + 2 * HEAD_BYTES, "it was looked at for the last time"
    assert parts(path)[-1].data.endswith(b"000000599 ")


def test_a_file_that_is_not_there_yet_is_bounded_later(tmp_path: Path) -> None:
    path, files = tmp_path / "a.log", BoundedFiles()
    files.add("a", path, 8 * MIB)
    time.sleep(0.1)
    path.write_bytes(os.urandom(20 * MIB))
    deadline_s = time.monotonic() + 10
    while taken(path) > 8 * MIB and time.monotonic() < deadline_s:
        time.sleep(0.01)
    files.drop("a")
    assert taken(path) <= 4 * MIB + 2 * HEAD_BYTES


def test_an_output_gives_way_on_a_small_disk(mounted: Callable[[str, str], Path]) -> None:
    path = mounted("tmpfs", "60m") / "a.log"
    path.write_bytes(os.urandom(30 * MIB))
    BoundedFile(path, 1 << 40).look()
    assert taken(path) <= 4 * MIB, "half of a quarter of what was free stays"


def test_a_file_system_without_holes_begins_anew(mounted: Callable[[str, str], Path]) -> None:
    path = mounted("ramfs", "60m") / "a.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"first" + bytes(20 * MIB) + b"last")
        one = BoundedFile(path, 8 * MIB)
        one.look()
        assert path.stat().st_size == 0
        log.write(b"more")
        one.look()
    assert path.read_bytes() == b"more"
    aside = (path.parent / "a.log.1").read_bytes()
    assert aside.startswith(b"first")
    assert aside.endswith(b"last")
    assert b"bytes were dropped here]" in aside
    assert len(aside) < 2 * MIB
    with path.open("rb") as file:
        assert read_part(file.fileno(), 20 * MIB, 100) == (4, b""), "a reader sees where it ends"


def test_a_huge_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.truncate(bounded_file.SIZE_BYTES_MAX)
        file.seek(0, os.SEEK_END)
        file.write(os.urandom(16 * MIB))
    BoundedFile(path, 8 * MIB).look()
    assert path.stat().st_size == 0


def test_a_file_that_somebody_empties_is_bounded_again(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(os.urandom(20 * MIB))
    one = BoundedFile(path, 8 * MIB)
    one.look()
    os.truncate(path, 0)
    one.look()
    path.write_bytes(os.urandom(12 * MIB))
    one.look()
    assert taken(path) <= 4 * MIB + 2 * HEAD_BYTES


def test_a_cut_character_before_a_gap_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * (HEAD_BYTES - 1) + "é".encode() + b"y" * (20 * MIB))
    BoundedFile(path, 8 * MIB).look()
    head, tail = parts(path)[:2]
    assert head.data == b"x" * (HEAD_BYTES - 1)
    with path.open("rb") as file:
        assert read_part(file.fileno(), HEAD_BYTES - 1, 10) == (tail.begin, b"y" * 10)


def test_what_is_no_file_is_not_touched(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(os.urandom(20 * MIB))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("pipe", "link", "absent", "."):
        with pytest.raises(OSError, match="Errno"):
            BoundedFile(tmp_path / name, 8 * MIB)
    assert taken(tmp_path / "file") >= 20 * MIB
