"""Checkpoints of one member: beside training when one is due, at once when it ends or leaves.

A save that is due takes a snapshot of the state (copies.py) and writes it in a thread that lives
only as long. It is skipped while the last one is being written. CheckpointSaved is told when the
checkpoint is whole, of the generation in which the snapshot was taken: the heart publishes it only
if that is still the current one. What the thread raises ends the process as what the main thread
raises does (rank.py); a disk that does not take a checkpoint is a line in the rank's log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import structlog

from ....events.records.orders import StartRank
from ....events.records.reports import CheckpointSaved
from ....events.records.types import Body
from ..model.trainee import Trainee
from ..process.history import History
from ..process.trace import Event
from ..step.gradient_reduction import poisoned
from . import checkpoint
from .memory_checkpoint import Snapshot

log = structlog.get_logger()


class Saver:
    """`sparing` keeps what a driver connects in it from being shut with a generation's sockets.

    `tell` takes reports, from any thread; `note` is the trace's.
    """

    def __init__(self, start: StartRank, *,
                 sparing: Callable[[], AbstractContextManager[None]], tell: Callable[[Body], None],
                 note: Callable[[Event, int, int], None]) -> None:
        assert start.spec.training is not None, "a command task saves nothing"
        self._output = start.spec.training.output
        self._task = start.task
        self._sparing, self._tell, self._note = sparing, tell, note
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._saved: CheckpointSaved | None = None
        """The last one: it lies there, and may be read."""
        self._writing = ""
        """Where the thread writes, or wrote last."""
        self._overtaken = False
        """Whether that is to end early."""
        self._cleared = 0
        self._failing = ""
        """Why the last one that was due could not be saved; said on change."""

    def begin(self, trainee: Trainee, step_version: int, history: History,
              generation: int) -> None:
        """Save the state as it is now, beside what follows; nothing while one is under way."""
        if self._thread is not None and self._thread.is_alive():
            log.warning("checkpoint skipped: the last one is still being written",
                        iteration=step_version)
            return
        self._note("save", generation, step_version)
        try:
            self._snapshot.take(trainee, step_version, history)
            self._writing = checkpoint.place(generation, step_version)
            self._thread = threading.Thread(target=self._write, args=(generation,),
                                            name="checkpoint", daemon=True)
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # no memory for it, or no thread
            if poisoned(error):
                raise
            self._thread = None
            self._say_failing(step_version, str(error), f"no snapshot of the state: {error}")

    def save(self, trainee: Trainee, step_version: int, history: History, generation: int, *,
             final: bool) -> None:
        """Save at once, behind what is under way; told when this returns.

        Who leaves has time for one write: an older one that is under way ends early. Where the disk
        does not take it, that is a warning, and whoever leaves leaves without. The final one is
        what the task was for: no older one is given up for it, and it raises NotSaved.
        """
        path = checkpoint.place(generation, step_version)
        self._overtaken = not final and self._writing != path
        if self._saved is None or self._saved.path != path:
            self._note("save", generation, step_version)
        self.wait()
        self._overtaken = False
        if self._saved is None or self._saved.path != path:
            try:
                with self._sparing():
                    self._clear(generation)
                    ckpt_bytes = checkpoint.save(checkpoint.within(self._output, path), trainee,
                                                 step_version, history)
            except checkpoint.NotSaved as error:
                if final or poisoned(error):
                    raise
                log.warning("checkpoint not saved", iteration=step_version, why=str(error))
                return
            self._say_saved(generation, step_version, ckpt_bytes, final=final)
        else:
            self._tell(self._saved)

    def wait(self) -> None:
        """Until nothing is being written: a process that ended before would leave a half one."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, generation: int) -> None:
        """In the thread: what the snapshot holds."""
        snapshot = self._snapshot
        path = checkpoint.place(generation, snapshot.step_version)
        self._note("saving", generation, snapshot.step_version)
        assert snapshot.told is not None, "nothing was taken"
        try:
            with self._sparing():
                self._clear(generation)
                ckpt_bytes = checkpoint.write(
                    checkpoint.within(self._output, path), snapshot.tensors, snapshot.told,
                    lambda: self._note("save_mid", generation, snapshot.step_version),
                    lambda: self._overtaken)
        except checkpoint.Overtaken:
            log.info("checkpoint given up: a newer one is wanted",
                     iteration=snapshot.step_version)
            return
        except checkpoint.NotSaved as error:
            self._say_failing(snapshot.step_version, error.why, str(error))
            return
        self._say_saved(generation, snapshot.step_version, ckpt_bytes, final=False)

    def _clear(self, generation: int) -> None:
        """Once in a generation."""
        if generation != self._cleared:
            checkpoint.clear(self._output, generation)
        self._cleared = generation

    def _say_saved(self, generation: int, step_version: int, ckpt_bytes: int, *,
                   final: bool) -> None:
        self._note("saved", generation, step_version)
        if self._failing:
            log.info("checkpoints are saved again", iteration=step_version)
        self._failing = ""
        self._saved = CheckpointSaved(
            task=self._task, generation=generation,
            path=checkpoint.place(generation, step_version), step_version=step_version,
            ckpt_bytes=ckpt_bytes, final=final)
        self._tell(self._saved)

    def _say_failing(self, step_version: int, why: str, text: str) -> None:
        if why != self._failing:
            log.warning("checkpoint not saved; training goes on", iteration=step_version, why=text)
        self._failing = why
