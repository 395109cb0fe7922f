"""A snapshot of state that a background thread reads from live memory while training continues.

Before the state changes, the main thread calls `detach`. docs/ARCHITECTURE.md, "Checkpoints".
"""

import threading
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from ..process.exit_report import is_cuda_error
from ..recovery.regions import State
from ..recovery.resharding import Shard
from .share import num_rows, rows

PIECE_BYTES = 16 << 20
"""Size of a piece; a longer row is one piece. A reader holds at most two pieces."""
BUFFER_BYTES_MIN = 32 << 20
BUFFERS_NUM_PER_STATE = 16
"""On the CPU, `detach` copies at most 1/16 of the state: then a checkpoint on disk and one in
memory together need less than 15 % more memory than training."""
STALLED_S = 10.0
"""`detach` waits while the thread reads pieces. If it reads none for this long, `detach` gives the
snapshot up, because training must not wait for a disk or a store that hangs."""


class SnapshotLost(RuntimeError):
    """The snapshot was given up before the thread had read it."""


def buffer_bytes(state: State) -> int | None:
    """How much of a snapshot of this state `detach` may copy; None: all. Of a state on a GPU it may
    copy all: host memory is not what training needs."""
    if any(tensor.device.type == "cuda" for tensor in state.values()):
        return None
    state_bytes = sum(tensor.nbytes for tensor in state.values())
    return max(BUFFER_BYTES_MIN, state_bytes // BUFFERS_NUM_PER_STATE)


class Snapshot:
    """The values of `share` at the moment of construction. One thread iterates over `read`; the
    main thread calls `detach` before it changes the state. `limit_bytes`: how much `detach` may
    copy (None: all)."""

    def __init__(self, share: State, limit_bytes: int | None) -> None:
        self.pieces: list[Shard] = []
        """The regions that `read` yields, in order."""
        self._live: list[Tensor | None] = []
        for shard, tensor in share.items():
            num = num_rows(shard.region)
            num_per_piece = max(1, PIECE_BYTES * num // max(tensor.nbytes, 1))
            for first in range(0, num, num_per_piece):
                region, view = rows(tensor, shard.region, first, min(first + num_per_piece, num))
                self.pieces.append(shard._replace(region=region))
                self._live.append(view)
        self.num_bytes = sum(tensor.nbytes for tensor in share.values())
        self._limit_bytes = self.num_bytes if limit_bytes is None else limit_bytes
        self._copies: dict[int, Tensor] = {}
        self._buffer = bytearray()
        """For the piece that `read` yields: memory that is new for each costs more than the copy.
        """
        self._next = 0
        self._why = ""
        self._changed = threading.Condition()
        on_gpu = next((tensor for tensor in share.values() if tensor.device.type == "cuda"), None)
        self._stream: Any = None if on_gpu is None else _stream(on_gpu.device)

    def read(self) -> Generator[tuple[Shard, Tensor]]:
        """Each piece and a copy of it in host memory, which the next one overwrites. The reader
        must exhaust or close the iterator, else `detach` waits for it. Raises SnapshotLost."""
        try:
            for index, shard in enumerate(self.pieces):
                with self._changed:
                    if self._why:
                        raise SnapshotLost(self._why)
                    tensor = self._copies.pop(index, None)
                    if tensor is None:
                        tensor = self._copy(index, is_read=True)
                    self._live[index] = None
                    self._next = index + 1
                    self._changed.notify_all()
                yield shard, tensor
                del tensor  # the consumer has written it: free it before the next one is copied
        finally:
            self.release()

    def detach(self) -> None:
        """Return when the live memory is no longer read. Call it before the state changes."""
        index = len(self.pieces)
        copied_bytes = 0
        while index:  # from the end, since the thread reads from the beginning
            index -= 1
            with self._changed:
                live = self._live[index] if index < len(self._live) else None
                if live is None or copied_bytes + live.nbytes > self._limit_bytes:
                    break
                try:
                    self._copies[index] = self._copy(index)
                except (RuntimeError, MemoryError) as error:
                    if is_cuda_error(error):
                        raise
                    self._lose(str(error) or type(error).__name__)
                self._live[index : index + 1] = [None] * bool(self._live)
                copied_bytes += live.nbytes
        with self._changed:
            while any(live is not None for live in self._live):
                before = self._next
                if not self._changed.wait(STALLED_S) and self._next == before:
                    self._lose(f"nothing was written for {STALLED_S:.0f} s")

    def release(self) -> None:
        """Drop all references to live memory. The reader calls it when it ends, also early."""
        with self._changed:
            self._live, self._copies = [], {}
            self._changed.notify_all()

    def _lose(self, why: str) -> None:
        self._why = self._why or why
        self._live, self._copies = [], {}
        self._changed.notify_all()

    def _copy(self, index: int, *, is_read: bool = False) -> Tensor:
        """A copy of a live piece in host memory, complete when this returns."""
        live = self._live[index]
        assert live is not None, "a piece is read or copied once"
        if is_read and live.nbytes and self._stream is None:
            return self._buffered(live).copy_(live)
        copy = torch.empty(live.shape, dtype=live.dtype, pin_memory=self._stream is not None)
        if self._stream is None:
            return copy.copy_(live)
        with torch.cuda.stream(self._stream):
            copy.copy_(live, non_blocking=True)
        self._stream.synchronize()
        return copy

    def _buffered(self, live: Tensor) -> Tensor:
        """A tensor of this shape in the buffer, whose storage ends with it."""
        if len(self._buffer) < live.nbytes:
            self._buffer = bytearray(live.nbytes)
        flat = torch.frombuffer(self._buffer, dtype=live.dtype, count=live.numel())
        return flat.view(live.shape)


def _stream(device: torch.device) -> Any:
    """A CUDA stream for copies. It begins after the work of the current stream: the last step."""
    found: Any = torch.cuda
    stream = found.Stream(device)
    stream.wait_stream(found.current_stream(device))
    return stream
