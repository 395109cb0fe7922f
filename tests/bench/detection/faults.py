"""The faults of the detection bench: how each fault is injected, and at which time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

CASES = (
    "rank_killed",
    "exception",
    "agent_killed",
    "network_cut",
    "rank_stopped",
    "gil_held",
    "rank_looping",
    "rank_slow",
)
HELD = {"exception": "raise", "gil_held": "gil", "rank_looping": "loop", "rank_slow": "slow"}
"""Faults that the rank injects itself, by its trace (tests/drivers/rank_trace.py)."""
SIGNALS = {"rank_killed": signal.SIGKILL, "rank_stopped": signal.SIGSTOP}
EVENT = "micro_batch"
"""The trace event at which a rank is held. Every system writes it in the middle of an iteration."""
HELD_S_MAX = 20.0
USUAL_LINES_NUM = 400
LOOK_S = 0.002
NEVER_NUM = 3


class Trial(NamedTuple):
    """One fault and its detection time. `detect_s` None: nothing was reported, see `why`.
    `iteration_s`: how long an iteration took then, where it matters. `named`: 1 if exactly the
    victim was named. `healthy_touched`: how many other processes ended."""

    case: str
    system: str
    detect_s: float | None
    why: str = ""
    iteration_s: float | None = None
    named: float | None = None
    iterations_lost: float | None = None
    healthy_touched: float | None = None


class NotStruck(Exception):
    """The fault could not be injected."""


def inside(folder: Path, task: int, rank: int, case: str) -> float:
    """Make the rank inject the fault at the start of a micro-batch; return the time of the request.

    The rank is first held at that event. The only delay is then the rank's poll of its file (2 ms).
    """
    file = folder / "hold" / f"{task}-{rank}"
    trace = folder / f"{task}-{rank}.jsonl"
    begin = trace.stat().st_size
    ask(file, {"event": EVENT})
    last_s = time.monotonic() + HELD_S_MAX
    while not _is_held(trace, begin):
        if time.monotonic() > last_s:
            file.unlink(missing_ok=True)
            raise NotStruck(f"rank {rank} did not begin a micro-batch in {HELD_S_MAX:g} s")
        time.sleep(LOOK_S)
    asked = {"event": EVENT, "then": HELD[case], "slow_s": micro_batch_s(trace)}
    began_s = time.time()
    ask(file, asked)
    return began_s


def micro_batch_s(trace: Path) -> float:
    """The median time of a micro-batch, or 0.0 if unknown. A slow rank adds it to each."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()[-USUAL_LINES_NUM:]]
    times = [line["t"] for line in lines if line["event"] == EVENT]
    return median(then - before for before, then in pairwise(times)) if len(times) > 1 else 0.0


def undo(folder: Path, task: int, rank: int) -> None:
    """End the slowdown of a rank."""
    (folder / "hold" / f"{task}-{rank}").unlink(missing_ok=True)


def by_signal(pid: int, case: str) -> float:
    """Send the signal of the case; return the time at which it was sent."""
    began_s = time.time()
    os.kill(pid, SIGNALS[case])
    return began_s


def wait(found: Callable[[], float | None], limit_s: float) -> float | None:
    """Poll `found` until it returns a value; return None after `limit_s`."""
    last_s = time.monotonic() + limit_s
    while (at_s := found()) is None and time.monotonic() < last_s:
        time.sleep(LOOK_S)
    return at_s


def never(found: Sequence[Trial]) -> bool:
    """True if NEVER_NUM or more trials all ended without a detection: more trials are useless."""
    return len(found) >= NEVER_NUM and all(trial.detect_s is None for trial in found)


def ask(file: Path, asked: dict[str, Any]) -> None:
    """Write what the trace of a rank is asked to do; it reads the file at its next event."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(asked))
    new.rename(file)


def _is_held(trace: Path, begin: int) -> bool:
    with trace.open("rb") as lines:
        lines.seek(begin)
        return b'"event": "held"' in lines.read()
