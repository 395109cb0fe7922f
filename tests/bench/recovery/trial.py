"""One trial: a system that trains is struck in the middle of an iteration, and watched."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple, Protocol

from bench.recovery import watch as eyes
from bench.recovery.job import NUM_MICRO_BATCHES, NUM_RANKS, SAVE_EVERY_NUM, STRUCK_NUM, VICTIM_NUM

START_S_MAX = 90.0
RECOVER_S_MAX = 15.0
WHOLE_S_MAX = 40.0
WARM_NUM = 5
"""Iterations that a member has done before it is struck."""
AFTER_NUM = 3
"""Iterations from the struck one on whose losses are held to the twin's."""
LOSS_REL_MAX = 1e-5


def signal_of(case: str) -> signal.Signals:
    """By which a case's rank is struck: it ends the case's name."""
    return signal.Signals[case.rpartition("_")[2].upper()]


def is_due(iteration: int) -> bool:
    """Whether this iteration may be struck: some after a checkpoint, the same for all systems."""
    return iteration % SAVE_EVERY_NUM == STRUCK_NUM


class System(Protocol):
    """Something that trains, and heals or does not."""

    name: str
    watch: eyes.Watch

    def comes_back(self, case: str) -> bool:
        """Whether it is at full strength again some time after a rank was struck so."""
        ...

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def tend(self) -> str:
        """What whoever launched it does meanwhile; why it has ended, if it has."""
        ...

    def losses(self) -> dict[int, float]: ...
    def whole_batch(self, step: eyes.Line) -> bool | None:
        """Whether the batch of that step was the whole one; None if it cannot be known."""
        ...


class Trial(NamedTuple):
    """What one strike did. None where there was no next step, for the reason `why`."""

    case: str
    system: str
    struck_s: float
    before: int
    """The newest generation before the fault."""
    iteration_s: float
    why: str = ""
    step: eyes.Line | None = None
    fault_to_step_s: float | None = None
    recompute_s: float | None = None
    iterations_lost: float | None = None
    batch_kept: float | None = None
    loss_equal: float | None = None
    loss_rel: float | None = None
    processes_restarted: float | None = None


class NotStarted(Exception):
    """A system did not come to where it could be struck."""


def strike(system: System, case: str, twin: list[float], num_ranks: int = NUM_RANKS, *,
           stays: bool = False, victim: int = VICTIM_NUM, warm: int = WARM_NUM,
           fits: Callable[[int], bool] = is_due, num_replicas: int | None = None) -> Trial:
    """Strike it, wait for the next step, and some more for its losses and its strength.

    `stays`: it comes back to full strength, which is waited for. `num_replicas` None: each rank is
    one. Raises NotStarted.
    """
    half = NUM_MICRO_BATCHES // (num_replicas or num_ranks) // 2
    pid = ripe(system, num_ranks, min(victim, num_ranks - 1), warm, fits, half)
    watch = system.watch
    began_s = time.time()
    os.kill(pid, signal_of(case))
    usual = eyes.iteration_s(watch.lines, pid, began_s)
    before = eyes.generations(watch.lines, began_s)
    pids = set(eyes.pids(watch.lines, began_s).values())
    trial = Trial(case, system.name, began_s, max(before.values()), median(usual))
    step, why = None, ""
    for _ in watch.until(RECOVER_S_MAX):
        why = system.tend()
        step = eyes.first_step(watch.lines, before, began_s)
        if step or why:
            break
    if step is None:
        return trial._replace(why=why or f"no step within {RECOVER_S_MAX:.0f} s")
    _go_on(system, step, stays=stays, num_ranks=num_ranks)
    redone_s = eyes.recompute_s(watch.lines, step, before, began_s)
    gap = eyes.differs(system.losses(), twin, step["iteration"], AFTER_NUM)
    kept = system.whole_batch(step)
    new = set(eyes.pids(watch.lines, time.time()).values()) - pids
    return trial._replace(
        step=step, fault_to_step_s=step["t"] - began_s - redone_s, recompute_s=redone_s,
        iterations_lost=eyes.iterations_lost(watch.lines, step, before),
        batch_kept=None if kept is None else float(kept),
        loss_equal=None if gap is None else float(gap <= LOSS_REL_MAX), loss_rel=gap,
        processes_restarted=len(new))


def ripe(system: System, num_ranks: int, victim: int, warm: int, fits: Callable[[int], bool],
         half: int) -> int:
    """Wait until the victim has begun more than `half` micro-batches of such an iteration: its pid.
    """
    watch = system.watch
    begun: dict[tuple[int, int, int], int] = {}
    done: dict[tuple[int, int], int] = {}
    watch.look()
    for line in watch.lines:
        _count(line, begun, done)
    for new in watch.until(START_S_MAX):
        if why := system.tend():
            raise NotStarted(why)
        for line in new:
            _count(line, begun, done)
        for line in new:
            key = (line["pid"], line["generation"])
            if (line["event"] == "micro_batch" and line["rank"] == victim
                    and begun[(*key, line["iteration"])] == half + 1
                    and done.get(key, 0) >= warm and fits(line["iteration"])
                    and _is_full(watch, num_ranks, line)):
                return int(line["pid"])
    raise NotStarted(f"not ready to be struck within {START_S_MAX:.0f} s")


def _count(line: eyes.Line, begun: dict[Any, int], done: dict[Any, int]) -> None:
    key = (line["pid"], line["generation"])
    if line["event"] == "micro_batch":
        begun[(*key, line["iteration"])] = begun.get((*key, line["iteration"]), 0) + 1
    elif line["event"] == "done":
        done[key] = done.get(key, 0) + 1


def _is_full(watch: eyes.Watch, num_ranks: int, now: eyes.Line) -> bool:
    """Whether that many processes did the step before."""
    pids = {line["pid"] for line in watch.lines[-400 * num_ranks:] if line["event"] == "done"
            and line["iteration"] == now["iteration"] - 1}
    return len(pids) == num_ranks


def _go_on(system: System, step: eyes.Line, *, stays: bool, num_ranks: int) -> None:
    watch = system.watch
    for _ in watch.until(WHOLE_S_MAX):
        if system.tend():
            return
        steps = [line for line in watch.lines if line["event"] == "done" and line["t"] >= step["t"]]
        last = max(line["iteration"] for line in steps)
        full = num_ranks == len({line["pid"] for line in steps if line["iteration"] == last - 1})
        if last >= step["iteration"] + AFTER_NUM + 1 and (full or not stays):
            return
