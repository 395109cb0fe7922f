"""A trace of every phase of every micro-batch, for observation and for fault injection in tests.

The trace is on if UNICRON_TRACE_DIR names a folder. When a phase begins, the rank writes one line
of JSON to `<task>-<rank>.jsonl`: `t` (seconds since 1970), task, rank, attempt, pid, generation,
iteration, micro_batch and bucket (-1 if meaningless), event.

With `train.overlap`, `reduce` and `stats` come between the forward and the backward of a rank's
last micro-batch, `bucket` as each bucket is launched, `bucket_done` as each completes, in order,
after the backward. `tensor` comes before the last part of a layer, whose results tensor-parallel
ranks add up; `stage` before a stage sends to another or waits for one; `embedding` before the
gradients of a tied embedding are added up. `gate` is the entry of the step barrier, `passed` its
exit; `staged` and `commit` are of a part of another layout.

Tests can hold a rank at an event to inject a fault there (tests/drivers/real_cluster.py, `hold`).
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

from ...ipc.progress_page import COLLECTIVE_CODE, OWN_CODE, Phase, ProgressWriter

Event = Literal[
    "start", "build", "ready", "meet", "settle", "give", "receive",
    "micro_batch", "forward", "forward_mid", "backward", "backward_mid", "tensor", "stage",
    "reduce", "stats", "bucket", "bucket_done", "embedding", "reduced", "gate", "passed",
    "staged", "commit",
    "scale", "unscale", "scaler", "norm", "clip", "step", "step_mid", "stepped", "schedule", "done",
    "gather",
    "copy", "copy_mid", "copied", "save", "saving", "save_mid", "saved",
]
HOLD_S = 0.002


class Note(Protocol):
    """Called when a phase begins."""

    def __call__(self, event: Event, bucket: int = -1) -> None: ...


class InjectedFault(Exception):
    """An injected fault, which is never treated as the failure of a collective."""


RAISED: dict[str, type[Exception]] = {"raise": InjectedFault, "fail": RuntimeError}


def _hold_gil() -> NoReturn:
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter's lock in every call
    while True:
        library.sleep(1 << 20)


def _loop() -> NoReturn:
    while True:
        pass


BLOCKING: dict[str, Callable[[], NoReturn]] = {"gil": _hold_gil, "loop": _loop}


class Trace:
    """The trace of one rank. If `folder` is empty, it writes nothing and never holds the rank."""

    def __init__(self, folder: str, task: int, rank: int, attempt: int) -> None:
        self.rank = rank
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
        """Record a phase. Returns when the rank may continue. Raises an injected fault."""
        if not self.is_on:
            return
        where = {"generation": generation, "iteration": iteration, "micro_batch": micro_batch,
                 "bucket": bucket, "event": event}
        self._write(where)
        is_held = False
        while (hold := self._read_hold()) is not None and all(
                where[name] == hold[name] for name in where if name in hold):
            then = hold.get("then", "")
            if then == "slow":
                time.sleep(float(hold["slow_s"]))
                return
            if error := RAISED.get(then):
                self._hold.unlink()
                raise error(f"injected: {event} of iteration {iteration}")
            if block := BLOCKING.get(then):
                self._hold.unlink()
                self._write(where | {"event": "held"})
                block()
            if not is_held:
                self._write(where | {"event": "held"})
                is_held = True
            time.sleep(HOLD_S)

    def _read_hold(self) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self._hold.read_bytes()))
        except (FileNotFoundError, ValueError):  # no file, or an incomplete one
            return None

    def _write(self, where: dict[str, Any]) -> None:
        line = json.dumps({"t": time.time(), **self._head, **where})
        os.write(self._file, line.encode() + b"\n")


# --- Trace events as progress marks, and the phase that each one starts ---
#
# Without overlap, a member waits in each collective that it enters. With overlap, it starts those
# of the reduction in its last backward and waits for all of them afterwards. In a replica of
# several members, it may wait for the others anywhere in its passes.

_REDUCES = {"stats", "bucket"}
_ENTERS = {"embedding", "gate", "gather"}
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
