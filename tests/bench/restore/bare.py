"""What the machine does when it only copies: the same bytes by sockets, by `dd`, and in memory."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MESSAGE_BYTES = 4 << 20
TARGET_BYTES_MAX = 256 << 20
"""A receiver writes into as much memory, again and again: it was touched before."""
NEW = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
WAIT_S = 600.0
DD_BLOCK = "4M"
CACHED_RATIO_MAX = 0.01


class Flow(NamedTuple):
    """So many bytes go from one process to another."""

    source: int
    target: int
    num_bytes: int


def socket_copy_s(flows: Sequence[Flow], *, is_new: bool = False) -> float:
    """Seconds in which all flows have gone at once by loopback TCP, from memory into memory, each
    process with a thread for each of its flows. `is_new`: into new memory for all bytes, as that of
    a checkpoint store is; else into memory that was touched before."""
    forked = multiprocessing.get_context("fork")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in flows]
    numbers = sorted({number for flow in flows for number in flow[:2]})
    start, end = forked.Barrier(len(numbers) + 1), forked.Barrier(len(numbers) + 1)
    processes = [
        forked.Process(target=_process, args=(number, flows, listeners, start, end, is_new))
        for number in numbers
    ]
    for process in processes:
        process.start()
    try:
        start.wait(WAIT_S)
        began_s = time.monotonic()
        end.wait(WAIT_S)
        return time.monotonic() - began_s
    finally:
        for process in processes:
            process.join(WAIT_S)
        for listener in listeners:
            listener.close()


def _process(
    number: int,
    flows: Sequence[Flow],
    listeners: Sequence[socket.socket],
    start: Any,
    end: Any,
    is_new: bool,
) -> None:
    threads: list[threading.Thread] = []
    for flow, listener in zip(flows, listeners, strict=True):
        if flow.target == number:
            target = (
                memoryview(mmap.mmap(-1, flow.num_bytes, flags=NEW))
                if is_new
                else memoryview(_touched(min(flow.num_bytes, TARGET_BYTES_MAX)))
            )
            threads.append(
                threading.Thread(target=_receive, args=(listener, flow.num_bytes, target))
            )
        if flow.source == number:
            data = _touched(MESSAGE_BYTES)
            address = listener.getsockname()
            threads.append(threading.Thread(target=_send, args=(address, flow.num_bytes, data)))
    start.wait(WAIT_S)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end.wait(WAIT_S)


def _touched(size: int) -> bytearray:
    return bytearray(os.urandom(1 << 16) * -(-size // (1 << 16)))


def _send(address: tuple[str, int], num_bytes: int, data: bytearray) -> None:
    with socket.create_connection(address) as connection:
        for begin in range(0, num_bytes, len(data)):
            connection.sendall(memoryview(data)[: num_bytes - begin])


def _receive(listener: socket.socket, num_bytes: int, target: memoryview) -> None:
    connection, _ = listener.accept()
    with connection:
        at, left = 0, num_bytes
        while left:
            num = connection.recv_into(target[at:], min(len(target) - at, left))
            assert num, "the sender has ended"
            at, left = (at + num) % len(target), left - num


def memory_copy_s(num_bytes: int) -> float:
    """Seconds in which one thread copies as many bytes from memory into memory."""
    size = min(num_bytes, TARGET_BYTES_MAX)
    source, target = _touched(size), _touched(size)
    began_s = time.monotonic()
    for begin in range(0, num_bytes, size):
        end = min(size, num_bytes - begin)
        memoryview(target)[:end] = memoryview(source)[:end]
    return time.monotonic() - began_s


# --- files ---
def files_in(folder: Path) -> list[Path]:
    """All files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def leave_page_cache(files: Iterable[Path]) -> None:
    """Write the files to the disk, and drop their pages, so that they are read from there. Raises
    AssertionError if the system keeps them."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        assert cached_ratio(path) <= CACHED_RATIO_MAX, f"{path} stays in the page cache"


def cached_ratio(path: Path) -> float:
    """The share of a file's pages that are in the page cache. Source: mincore(2)."""
    size = path.stat().st_size
    if not size:
        return 0.0
    num_pages = -(-size // mmap.PAGESIZE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        held = (ctypes.c_ubyte * num_pages)()
        first = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), held)
        del first
        assert not failed, os.strerror(ctypes.get_errno())
    return sum(byte & 1 for byte in held) / num_pages


def dd_read_s(files: Sequence[Path], num_readers: int) -> float:
    """Seconds in which as many processes have read all files by `dd`, past the page cache."""
    leave_page_cache(files)
    script = "; ".join(f"dd if='{path}' of=/dev/null bs={DD_BLOCK} status=none" for path in files)
    return _all_s([["sh", "-c", script]] * num_readers)


def dd_write_s(folder: Path, sizes: Sequence[int]) -> float:
    """Seconds in which one `dd` for each size has written a file of it to the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [-(-size // MESSAGE_BYTES) for size in sizes]
    how = ("if=/dev/zero", f"bs={DD_BLOCK}", "conv=fsync", "status=none")
    commands = [
        ["dd", *how, f"of={folder / str(number)}", f"count={num}"]
        for number, num in enumerate(blocks)
    ]
    try:
        return _all_s(commands)
    finally:
        for number in range(len(sizes)):
            (folder / str(number)).unlink(missing_ok=True)


def _all_s(commands: Sequence[Sequence[str]]) -> float:
    began_s = time.monotonic()
    running = [subprocess.Popen(command) for command in commands]
    codes = [process.wait(WAIT_S) for process in running]
    assert not any(codes), f"dd has failed: {codes}"
    return time.monotonic() - began_s
