"""Slows what ranks read, write, receive and send: appended to the trace.py of a cluster
(rank_trace.py).

Nothing is simulated: a file or a socket is read or written in small parts with a pause after each,
as with a storage that takes so many bytes a second. The file `storage.json` beside trace.py says
how many, for each way; a way that it does not name is as fast as it is. A rate of 0 stands still.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

RATES = "storage.json"
PART_BYTES = 256 << 10
MESSAGE_BYTES = 128 << 10
"""Of a message to a member: nothing moves while one waits."""
SMALL_BYTES = 64 << 10
"""What is shorter is not slowed: indexes, numbers, messages."""


def install(folder: Path) -> None:
    """Let ranks whose UNICRON_TRACE_DIR is this folder be slowed."""
    own = (
        Path(__file__)
        .read_text(encoding="utf-8")
        .replace("from __future__ import annotations\n", "")
    )
    trace = folder / "trace.py"
    trace.write_text(
        f"{trace.read_text(encoding='utf-8')}\n\n{own}\n\nslow(Path({str(folder / RATES)!r}))\n"
    )


def set_rates(folder: Path, **bytes_per_s: float) -> None:
    """`read`: of files of a checkpoint; `write`: the same; `data`: of training data; `copy`: of
    checkpoint stores; `peer`: to other members."""
    new = folder / f".{RATES}"
    new.write_text(json.dumps(bytes_per_s))
    new.replace(folder / RATES)


class _Slow:
    def __init__(self, rates: Path) -> None:
        self._rates = rates
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def wait(self, way: str, num_bytes: int) -> None:
        """As long as so many bytes take on this way, which all threads share; a rate that changes
        meanwhile counts."""
        left = float(num_bytes)
        with self._turns[way]:
            while left > 0:
                rate = self._rate(way)
                if rate is None:
                    return
                time.sleep(0.05)
                left -= rate * 0.05

    def _rate(self, way: str) -> float | None:
        try:
            found: dict[str, float] = json.loads(self._rates.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found.get(way)


class _SlowFile(io.RawIOBase):
    def __init__(self, file: IO[bytes], slow: _Slow, way: str = "read") -> None:
        super().__init__()
        self._file, self._slow, self._way = file, slow, way

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = 0) -> int:
        return self._file.seek(at, whence)

    def close(self) -> None:
        self._file.close()
        super().close()

    def read(self, size: int = -1) -> bytes:
        if 0 <= size < SMALL_BYTES:
            return self._file.read(size)
        parts: list[bytes] = []
        left = size
        while left and (part := self._file.read(min(left, PART_BYTES) if left > 0 else PART_BYTES)):
            self._slow.wait(self._way, len(part))
            parts.append(part)
            left -= len(part) if left > 0 else 0
        return b"".join(parts)

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        part = self.read(len(view))
        view[: len(part)] = part
        return len(part)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), PART_BYTES):
            part = view[begin : begin + PART_BYTES]
            if len(view) >= SMALL_BYTES:
                self._slow.wait("write", len(part))
            self._file.write(part)
        return len(view)


def slow(rates: Path) -> None:
    """Slow this process."""
    from unicron.events import object_storage
    from unicron.workers.checkpoint_store import protocol
    from unicron.workers.training.model import text_data
    from unicron.workers.training.recovery import state_exchange, state_transfer

    made = _Slow(rates)
    opened = object_storage.PathStore.opened
    create = object_storage.PathStore.create
    open_data = text_data.open_regular
    read_exactly = protocol.read_exactly
    seal = state_transfer._seal

    def open_slowly(self: Any, name: str) -> Any:
        return _SlowFile(opened(self, name), made)

    @contextmanager
    def create_slowly(self: Any, name: str) -> Iterator[Any]:
        with create(self, name) as file:
            yield _SlowFile(file, made)
            file.flush()

    def open_data_slowly(path: Path, *rest: Any) -> Any:
        return _SlowFile(open_data(path, *rest), made, "data")

    def read_slowly(connection: Any, target: memoryview, *rest: Any) -> None:
        for begin in range(0, max(len(target), 1), PART_BYTES):
            part = target[begin : begin + PART_BYTES]
            read_exactly(connection, part, *rest)
            if len(target) >= SMALL_BYTES:
                made.wait("copy", len(part))

    def seal_slowly(chunk: Any) -> Any:
        made.wait("peer", chunk.nbytes)
        return seal(chunk)

    object_storage.PathStore.opened = open_slowly  # type: ignore[method-assign]
    object_storage.PathStore.create = create_slowly  # type: ignore[method-assign]
    text_data.open_regular = open_data_slowly  # type: ignore[attr-defined]
    protocol.read_exactly = read_slowly  # type: ignore[assignment]
    state_transfer._seal = seal_slowly
    state_transfer.CHUNK_BYTES = MESSAGE_BYTES
    state_exchange.LARGEST_NUM = MESSAGE_BYTES // 4  # elements of fp32
