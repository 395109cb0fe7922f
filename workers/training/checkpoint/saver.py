"""Checkpoints of one member: periodic ones in the background, blocking ones at the end.

A periodic save takes a snapshot of the state (memory_checkpoint.py) and writes it in a thread. It
is skipped while the previous snapshot is being written. When a checkpoint is complete, the member
reports CheckpointSaved with the generation of the snapshot. The decider publishes the checkpoint
only if that generation is still current. If a write fails, the rank logs a warning. Any other
exception in the thread ends the process (rank.py).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import structlog
import torch
from torch import Tensor

from ....events.records.orders import StartRank
from ....events.records.reports import CheckpointSaved
from ....events.records.types import Body
from ..model import training_state
from ..model.trainee import TrainingModel
from ..process.history import History
from ..process.trace import Event
from ..step.gradient_reduction import is_cuda_error
from . import checkpoint

ALIGN_BYTES = 64

log = structlog.get_logger()


class Snapshot:
    """The whole state after `step_version` steps, in host memory.

    The buffer is reused, because copying into newly allocated memory is slow.
    """

    def __init__(self) -> None:
        self.step_version = 0
        self.layout = ""
        self.numbers: training_state.Numbers | None = None
        self.encoded_numbers = b""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {}

    def take(self, trainee: TrainingModel, step_version: int, history: History) -> None:
        """Copy the current state. One pass over its bytes."""
        live = training_state.tensors(trainee)
        layout = layout_of(live)
        if layout != self.layout:
            self._buffer = torch.empty(flat_bytes(live), dtype=torch.uint8,
                                       pin_memory=trainee.device.type == "cuda")
            self.tensors = views(self._buffer, live)
            self.layout = layout
        for name, tensor in live.items():
            self.tensors[name].copy_(tensor)
        self.step_version = step_version
        self.numbers = training_state.numbers(trainee, step_version, history)
        self.encoded_numbers = msgspec.msgpack.encode(self.numbers)

    @property
    def num_bytes(self) -> int:
        """The size of the checkpoint as sent."""
        return self._buffer.numel() + len(self.encoded_numbers)

    def parts(self) -> list[memoryview]:
        """The bytes to send, in order."""
        return [self._buffer.numpy().data, memoryview(self.encoded_numbers)]


def layout_of(tensors: dict[str, Tensor]) -> str:
    """16 hex digits: the hash of the names, dtypes and shapes, in order."""
    described = "".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n"
                        for name, tensor in tensors.items())
    return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()


def flat_bytes(tensors: dict[str, Tensor]) -> int:
    """The size of the tensors in sequence, with padding."""
    return sum(_padded(tensor) for tensor in tensors.values())


def views(buffer: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of `buffer` (bytes) at the tensors' offsets, with their dtypes and shapes."""
    found: dict[str, Tensor] = {}
    begin = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        found[name] = buffer[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        begin += _padded(tensor)
    return found


def _padded(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class Saver:
    """Writes checkpoints. `exclude_new_sockets`: a context in which a storage driver's connections
    do not count as sockets of the generation. `tell` sends reports, from any thread; `note` writes
    the trace.
    """

    def __init__(self, start: StartRank, *,
                 exclude_new_sockets: Callable[[], AbstractContextManager[None]],
                 tell: Callable[[Body], None], note: Callable[[Event, int, int], None]) -> None:
        assert start.spec.training is not None, "a command task saves nothing"
        self._output = start.spec.training.output
        self._task = start.task
        self._exclude_new_sockets, self._tell, self._note = exclude_new_sockets, tell, note
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._saved: CheckpointSaved | None = None
        """The last complete checkpoint."""
        self._writing = ""
        """Path of the thread's current or last write."""
        self._is_superseded = False
        """True if the thread must abandon its write."""
        self._cleared = 0
        self._failing = ""
        """Why the last periodic save failed; logged on change."""

    def begin(self, trainee: TrainingModel, step_version: int, history: History,
              generation: int) -> None:
        """Save the current state in the background, unless a save is in progress."""
        if self._thread is not None and self._thread.is_alive():
            log.warning("checkpoint skipped: the last one is still being written",
                        iteration=step_version)
            return
        self._note("save", generation, step_version)
        try:
            self._snapshot.take(trainee, step_version, history)
            self._writing = checkpoint.relative_path(generation, step_version)
            self._thread = threading.Thread(target=self._write, args=(generation,),
                                            name="checkpoint", daemon=True)
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # no memory for the snapshot, or no thread
            if is_cuda_error(error):
                raise
            self._thread = None
            self._log_failure(step_version, str(error), f"no snapshot of the state: {error}")

    def save(self, trainee: TrainingModel, step_version: int, history: History, generation: int, *,
             final: bool) -> None:
        """Save the current state and report it before returning.

        A preempted member has time for one write: it abandons an older write in progress, and only
        logs a failure. The final save waits for an older write; its own failure raises NotSaved.
        """
        path = checkpoint.relative_path(generation, step_version)
        self._is_superseded = not final and self._writing != path
        if self._saved is None or self._saved.path != path:
            self._note("save", generation, step_version)
        self.wait()
        self._is_superseded = False
        if self._saved is None or self._saved.path != path:
            try:
                with self._exclude_new_sockets():
                    self._clear(generation)
                    ckpt_bytes = checkpoint.save(checkpoint.folder_of(self._output, path), trainee,
                                                 step_version, history)
            except checkpoint.NotSaved as error:
                if final or is_cuda_error(error):
                    raise
                log.warning("checkpoint not saved", iteration=step_version, why=str(error))
                return
            self._report_saved(generation, step_version, ckpt_bytes, final=final)
        else:
            self._tell(self._saved)

    def wait(self) -> None:
        """Wait for a write in progress: a process that exits earlier leaves a partial one."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, generation: int) -> None:
        """Write the snapshot. Runs in the thread."""
        snapshot = self._snapshot
        path = checkpoint.relative_path(generation, snapshot.step_version)
        self._note("saving", generation, snapshot.step_version)
        assert snapshot.numbers is not None, "the snapshot is empty"
        try:
            with self._exclude_new_sockets():
                self._clear(generation)
                ckpt_bytes = checkpoint.write(
                    checkpoint.folder_of(self._output, path), snapshot.tensors, snapshot.numbers,
                    lambda: self._note("save_mid", generation, snapshot.step_version),
                    lambda: self._is_superseded)
        except checkpoint.Superseded:
            log.info("checkpoint abandoned: a newer one is needed", iteration=snapshot.step_version)
            return
        except checkpoint.NotSaved as error:
            self._log_failure(snapshot.step_version, error.why, str(error))
            return
        self._report_saved(generation, snapshot.step_version, ckpt_bytes, final=False)

    def _clear(self, generation: int) -> None:
        """Remove partial checkpoints of earlier generations, once in a generation."""
        if generation != self._cleared:
            checkpoint.clear(self._output, generation)
        self._cleared = generation

    def _report_saved(self, generation: int, step_version: int, ckpt_bytes: int, *,
                      final: bool) -> None:
        self._note("saved", generation, step_version)
        if self._failing:
            log.info("checkpoints are saved again", iteration=step_version)
        self._failing = ""
        self._saved = CheckpointSaved(task=self._task, generation=generation,
                                      path=checkpoint.relative_path(generation, step_version),
                                      step_version=step_version, ckpt_bytes=ckpt_bytes, final=final)
        self._tell(self._saved)

    def _log_failure(self, step_version: int, why: str, text: str) -> None:
        if why != self._failing:
            log.warning("checkpoint not saved; training continues",
                        iteration=step_version, why=text)
        self._failing = why
