"""The phases of every micro-batch: as progress marks, and for the trace of a test.

If UNICRON_TRACE_DIR names a folder with a file `trace.py`, the class `Trace` in it is told of each
phase that begins. That of tests/drivers/rank_trace.py writes it down, and can inject a fault there.

With `train.overlap`, `reduce` and `stats` come between the forward and the backward of a rank's
last micro-batch, `bucket` as each bucket is launched, `bucket_done` as each completes, in order,
after the backward. `tensor` comes before the last part of a layer, whose results tensor-parallel
ranks add up; `stage` before a stage sends to another or waits for one; `embedding` before the
gradients of a tied embedding are added up, `mirror` before each reduced shard goes to the rank that
mirrors it. `gate` is the entry of the step barrier, `passed` its
exit; `staged` and `commit` are of a part of another layout. `read` comes before a stored state is
read, `moved` after that, and after all that a rank gives and receives.
"""

import os
import runpy
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from ...ipc.progress_page import COLLECTIVE_CODE, OWN_CODE, Phase, ProgressWriter

Event = Literal[
    "start",
    "build",
    "ready",
    "meet",
    "settle",
    "give",
    "receive",
    "read",
    "moved",
    "micro_batch",
    "forward",
    "forward_mid",
    "backward",
    "backward_mid",
    "tensor",
    "stage",
    "reduce",
    "stats",
    "bucket",
    "bucket_done",
    "embedding",
    "mirror",
    "reduced",
    "gate",
    "passed",
    "staged",
    "commit",
    "scale",
    "unscale",
    "scaler",
    "norm",
    "clip",
    "step",
    "step_mid",
    "stepped",
    "schedule",
    "done",
    "gather",
    "copy",
    "copy_mid",
    "copied",
    "save",
    "saving",
    "save_mid",
    "saved",
]
FILE = "trace.py"


class Note(Protocol):
    """Called when a phase begins."""

    def __call__(self, event: Event, bucket: int = -1) -> None: ...


class Trace:
    """Is told when a phase of rank `rank` begins. This one does nothing."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def note(
        self,
        event: Event,
        generation: int,
        iteration: int,
        *,
        micro_batch: int = -1,
        bucket: int = -1,
    ) -> None:
        """Returns when the rank may continue."""

    def watch(self, engine: Any, note: Note) -> None:
        """A new model: what it does between the phases may be noted too."""


def trace_of(folder: str, task: int, rank: int, attempt: int) -> Trace:
    """The trace of a rank: of the class `Trace` in FILE of this folder, if there is one."""
    file = os.path.join(folder, FILE)
    if not folder or not os.path.exists(file):
        return Trace(rank)
    made: Trace = runpy.run_path(file)["Trace"](folder, task, rank, attempt)
    return made


# --- Trace events as progress marks, and the phase that each one starts ---
#
# Without overlap, a member waits in each collective that it enters. With overlap, it starts those
# of the reduction in its last backward and waits for all of them afterwards. In a replica of
# several members, it may wait for the others anywhere in its passes.

_REDUCES = {"stats", "bucket"}
_ENTERS = {"embedding", "mirror", "gate", "gather"}
_PASSES = {"micro_batch", "forward", "forward_mid", "backward", "backward_mid", "tensor", "stage"}


class Marks:
    """Writes the progress marks of one member's iterations to `pulse`."""

    def __init__(self, pulse: ProgressWriter, *, overlap: bool) -> None:
        self.pulse = pulse
        self.passes: Phase = OWN_CODE
        """The phase during the member's passes."""
        self._on_entry: Phase = OWN_CODE if overlap else COLLECTIVE_CODE
        self._between: Phase = COLLECTIVE_CODE if overlap else OWN_CODE
        self._mine = threading.get_ident()
        self._is_in_collective = False

    def note(self, event: Event) -> None:
        if not self._counts():
            return
        if event in _ENTERS:
            self.pulse.enter(event, COLLECTIVE_CODE)
        elif event in _REDUCES:
            self.pulse.enter(event, self._on_entry)
        elif event == "bucket_done":
            self.pulse.mark(event, self._between)
        elif event in _PASSES:
            self.pulse.mark(event, self.passes)
        else:
            self.pulse.mark(event, OWN_CODE)

    def stats_received(self) -> None:
        """Mark that the stats have arrived. The member's own work follows."""
        if self._counts():
            self.pulse.mark("stats_done", OWN_CODE)

    def wait_begins(self) -> None:
        """Mark that the member waits for all collectives that it has started."""
        if self._counts():
            self.pulse.mark("land", COLLECTIVE_CODE)

    def _counts(self) -> bool:
        """False in the thread of an abandoned reduction: its events do not count."""
        return self._is_in_collective or threading.get_ident() == self._mine

    @contextmanager
    def in_collective(self) -> Generator[None]:
        """In this context, marks from another thread count too."""
        self._is_in_collective = True
        try:
            yield
        finally:
            self._is_in_collective = False
