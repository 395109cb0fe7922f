"""A trace of every phase of every micro-batch, for those who want to watch or to strike in one.

Off unless UNICRON_TRACE_DIR names a folder. One line of JSON per event, one write each, in
`<task>-<rank>.jsonl`: `t` (seconds since 1970), task, rank, attempt, pid, generation, iteration,
micro_batch and bucket (-1 where they mean nothing), event, each written when the phase begins.

Where the reduction is overlapped with the last backward (`train.overlap`), `reduce` and `stats`
come between the forward and the backward of a rank's last micro-batch, and `bucket` as each bucket
is launched: in the middle of that backward, with its micro-batch's number, or after it, in a rank's
first iteration and where nothing was left to run. `bucket_done` comes after the backward, as each
is seen whole, in order, and `reduced` when all are. Without overlap there is one bucket.

Where a replica is several ranks: `tensor` comes before a layer's last part is computed, which its
tensor-parallel ranks then add up, `stage` before a stage sends to another or waits for what it
sends, `embedding` before the gradients of a tied embedding's two copies are added up. All that a
rank in the `gate` has come out of it is `passed`. A rank that has its part of another layout says
`staged`, and `commit` before it puts that in force.

A rank can be held at an event, to strike it there and nowhere else. Before each event it looks for
`hold/<task>-<rank>` in the folder, JSON of event and iteration, and micro_batch or bucket where
they matter. Where that is what is about to begin, it writes `held`, and goes on when the file is
gone or names something else. With `"then": "raise"` it takes the file away and raises Struck
instead; with `"fail"` a RuntimeError, as a collective does whose connection is cut. With `"gil"`
it takes the file away and sleeps for ever in C code that keeps the interpreter's lock, so that
nothing of the process runs any more; with `"loop"` it takes the file away and loops for ever. With
`"slow"` and `slow_s` it sleeps for so long at each such event for as long as the file is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from ...diagnosis.step_time import Kind
from ...ipc.progress_page import COLLECTIVE_CODE, OWN_CODE, Phase, Pulse

Event = Literal[
    "start", "ready", "meet", "settle", "give", "receive",
    "micro_batch", "forward", "forward_mid", "backward", "backward_mid", "tensor", "stage",
    "reduce", "stats", "bucket", "bucket_done", "embedding", "reduced", "gate", "passed",
    "staged", "commit",
    "scale", "unscale", "scaler", "norm", "clip", "step", "step_mid", "stepped", "schedule", "done",
    "gather",
    "copy", "copy_mid", "copied", "save", "saving", "save_mid", "saved",
]
HOLD_S = 0.002


class Note(Protocol):
    """Tells that a phase begins."""

    def __call__(self, event: Event, bucket: int = -1) -> None: ...


class Struck(Exception):
    """Raised on purpose, where it was asked for: no fault of a collective, whatever it is in."""


THEN: dict[str, type[Exception]] = {"raise": Struck, "fail": RuntimeError}


def _keep_lock() -> NoReturn:
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock in every call
    while True:
        library.sleep(1 << 20)


def _loop() -> NoReturn:
    while True:
        pass


FOR_EVER: dict[str, Callable[[], NoReturn]] = {"gil": _keep_lock, "loop": _loop}


class Trace:
    """Writes nothing, and holds nobody, when `folder` is empty."""

    def __init__(self, folder: str, task: int, rank: int, attempt: int) -> None:
        self._head = {"task": task, "rank": rank, "attempt": attempt, "pid": os.getpid()}
        self._file = -1
        if folder:
            os.makedirs(folder, exist_ok=True)
            self._file = os.open(os.path.join(folder, f"{task}-{rank}.jsonl"),
                                 os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._hold = Path(folder, "hold", f"{task}-{rank}")

    @property
    def is_on(self) -> bool:
        return self._file >= 0

    def note(self, event: Event, generation: int, iteration: int, *, micro_batch: int = -1,
             bucket: int = -1) -> None:
        """Tell that a phase begins; return when it may. Raises Struck where that was asked for."""
        if not self.is_on:
            return
        where = {"generation": generation, "iteration": iteration, "micro_batch": micro_batch,
                 "bucket": bucket, "event": event}
        self._write(where)
        is_held = False
        while (asked := self._asked()) is not None and all(
                where[name] == asked[name] for name in where if name in asked):
            then = asked.get("then", "")
            if then == "slow":
                time.sleep(float(asked["slow_s"]))
                return
            if error := THEN.get(then):
                self._hold.unlink()
                raise error(f"on purpose: {event} of iteration {iteration}")
            if stand := FOR_EVER.get(then):
                self._hold.unlink()
                self._write(where | {"event": "held"})
                stand()
            if not is_held:
                self._write(where | {"event": "held"})
                is_held = True
            time.sleep(HOLD_S)

    def _asked(self) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self._hold.read_bytes()))
        except (FileNotFoundError, ValueError):  # none, or one that is still being written
            return None

    def _write(self, where: dict[str, Any]) -> None:
        line = json.dumps({"t": time.time(), **self._head, **where})
        os.write(self._file, line.encode() + b"\n")


# --- Which events of an iteration are marks of the rank's pulse, and what it is in from there on.
# ---
#
# Without overlap a member waits in each collective that it enters. With overlap it only starts them
# in its last backward, and waits for all of them together when that is over. Where its replica is
# more than one member, it may wait for them anywhere in its passes: nothing there is its own alone.

_ENTERS = {"stats", "bucket", "embedding", "gate", "gather"}
_PASSES = {"micro_batch", "forward", "forward_mid", "backward", "backward_mid", "tensor", "stage"}


class Marks:
    """Marks of one member's iterations; `pulse` takes them."""

    def __init__(self, pulse: Pulse, *, overlap: bool) -> None:
        self.pulse = pulse
        self.passes: Phase = OWN_CODE
        """What it is in during its passes."""
        self._on_entry: Phase = OWN_CODE if overlap else COLLECTIVE_CODE
        self._between: Phase = COLLECTIVE_CODE if overlap else OWN_CODE
        self._mine = threading.get_ident()
        self._are_together = False

    def begin(self, generation: int, iteration: int, kind: Kind) -> None:
        self.pulse.begin(generation, iteration, kind)

    def note(self, event: Event) -> None:
        """The phase has begun."""
        if not self._is_ours():
            return
        if event in _ENTERS:
            self.pulse.enter(event, self._on_entry)
        elif event == "bucket_done":
            self.pulse.mark(event, self._between)
        elif event in _PASSES:
            self.pulse.mark(event, self.passes)
        else:
            self.pulse.mark(event, OWN_CODE)

    def told(self) -> None:
        """The stats are here: what comes next is this member's own turn."""
        if self._is_ours():
            self.pulse.mark("stats_done", OWN_CODE)

    def lands(self) -> None:
        """From now on it waits for all that it has started."""
        if self._is_ours():
            self.pulse.mark("land", COLLECTIVE_CODE)

    def _is_ours(self) -> bool:
        """A thread that was left behind in another reduction (control.py) counts nowhere."""
        return self._are_together or threading.get_ident() == self._mine

    @contextmanager
    def together(self) -> Generator[None]:
        """Within this, another thread may be the one that passes marks."""
        self._are_together = True
        try:
            yield
        finally:
            self._are_together = False
