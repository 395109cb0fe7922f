"""One trial: inject a fault in the middle of an iteration, and measure the recovery."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple, Protocol

from bench.recovery import watch as eyes
from bench.recovery.job import NUM_MICRO_BATCHES, NUM_RANKS, SAVE_EVERY_NUM, STRUCK_NUM, VICTIM_NUM

STILL_S_MAX = 90.0
"""How long a system that starts may write nothing into its trace: it loads torch and Megatron."""
RIPE_NUM_MAX = 100
"""Iterations within which all ranks must once train together."""
RECOVER_S_MAX = 30.0
WHOLE_S_MAX = 40.0
LOSSES_S_MAX = 5.0
"""How long after the iterations a system may report their losses."""
LOSSES_EVERY_S = 0.1
"""How often a system is asked for its losses."""
WARM_NUM = 5
"""Iterations that the victim has done before the fault."""
AFTER_NUM = 3
"""Number of iterations after the fault whose losses are compared with the reference run."""
LOSS_REL_MAX = 1e-5
"""The tolerance of the data-parallel cases, whose reference run is short."""


def signal_of(case: str) -> signal.Signals:
    """The signal that a case sends: the last word of the case's name."""
    return signal.Signals[case.rpartition("_")[2].upper()]


def is_due(iteration: int) -> bool:
    """True if a fault may strike this iteration: always the same time after a checkpoint."""
    return iteration % SAVE_EVERY_NUM == STRUCK_NUM


class System(Protocol):
    """A system under test."""

    name: str
    watch: eyes.Watch

    def comes_back(self, case: str) -> bool:
        """True if the system returns to full strength after this fault."""
        ...

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def tend(self) -> str:
        """Do the launcher's regular work; return why the system has ended, else ""."""
        ...

    def losses(self) -> dict[int, float]: ...
    def whole_batch(self, step: eyes.Line) -> bool | None:
        """True if that step used the whole batch; None if unknown."""
        ...


class Trial(NamedTuple):
    """The result of one fault. The metrics are None if no step followed, for the reason `why`."""

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


class Reference(NamedTuple):
    """The losses of an undisturbed run, and the relative difference that counts as equal."""

    losses: list[float]
    rel_max: float = LOSS_REL_MAX


class NotStarted(Exception):
    """A system did not reach a state in which a fault can be injected."""


def strike(
    system: System,
    case: str,
    twin: Reference,
    num_ranks: int = NUM_RANKS,
    *,
    stays: bool = False,
    victim: int = VICTIM_NUM,
    warm: int = WARM_NUM,
    fits: Callable[[int], bool] = is_due,
    num_replicas: int | None = None,
) -> Trial:
    """Inject the fault; wait for the next step, and for some more to compare losses.

    `stays`: also wait until the system is at full strength again. `num_replicas` None: each rank is
    a replica. Raises NotStarted.
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
    gap = _gap(system, twin, step["iteration"])
    kept = system.whole_batch(step)
    new = set(eyes.pids(watch.lines, time.time()).values()) - pids
    return trial._replace(
        step=step,
        fault_to_step_s=step["t"] - began_s - redone_s,
        recompute_s=redone_s,
        iterations_lost=eyes.iterations_lost(watch.lines, step, before),
        batch_kept=None if kept is None else float(kept),
        loss_equal=None if gap is None else float(gap <= twin.rel_max),
        loss_rel=gap,
        processes_restarted=len(new),
    )


def _gap(system: System, twin: Reference, first: int) -> float | None:
    """The largest relative difference of the losses from `first` on. None if the reference run is
    shorter, or one is not reported."""
    wanted = range(first, first + AFTER_NUM)
    if wanted.stop > len(twin.losses):
        return None
    losses = reported_losses(system, wanted, LOSSES_S_MAX)
    return eyes.differs(losses, twin.losses, first, AFTER_NUM)


def reported_losses(system: System, wanted: range, still_s: float) -> dict[int, float]:
    """All losses that are reported, as soon as those of the `wanted` iterations are; without them
    if no new one comes for `still_s`, or when the system has ended."""
    num, last_s = 0, time.monotonic()
    while True:
        ended = system.tend()
        system.watch.look()
        losses = system.losses()
        if len(losses) > num:
            num, last_s = len(losses), time.monotonic()
        is_still = time.monotonic() > last_s + still_s
        if ended or is_still or all(index in losses for index in wanted):
            return losses
        time.sleep(LOSSES_EVERY_S)


def ripe(
    system: System, num_ranks: int, victim: int, warm: int, fits: Callable[[int], bool], half: int
) -> int:
    """Wait until the victim is past `half` of the micro-batches of an iteration; its pid. Raises
    NotStarted when nothing new comes, or never all ranks train."""
    watch = system.watch
    begun: dict[tuple[int, int, int], int] = {}
    done: dict[tuple[int, int], int] = {}
    watch.look()
    for line in watch.lines:
        _count(line, begun, done)
    steps_num = 0
    for new in watch.while_new(STILL_S_MAX):
        if why := system.tend():
            raise NotStarted(why)
        steps_num += sum(line["event"] == "done" for line in new)
        if steps_num > RIPE_NUM_MAX * num_ranks:
            raise NotStarted(f"{RIPE_NUM_MAX} iterations passed, none of them by all ranks")
        for line in new:
            _count(line, begun, done)
        for line in new:
            key = (line["pid"], line["generation"])
            if (
                line["event"] == "micro_batch"
                and line["rank"] == victim
                and begun[(*key, line["iteration"])] == half + 1
                and done.get(key, 0) >= warm
                and fits(line["iteration"])
                and _is_full(watch, num_ranks, line)
            ):
                return int(line["pid"])
    raise NotStarted(f"hangs: nothing new in its trace for {STILL_S_MAX:.0f} s")


def _count(line: eyes.Line, begun: dict[Any, int], done: dict[Any, int]) -> None:
    key = (line["pid"], line["generation"])
    if line["event"] == "micro_batch":
        begun[(*key, line["iteration"])] = begun.get((*key, line["iteration"]), 0) + 1
    elif line["event"] == "done":
        done[key] = done.get(key, 0) + 1


def _is_full(watch: eyes.Watch, num_ranks: int, now: eyes.Line) -> bool:
    """True if `num_ranks` processes completed the previous iteration."""
    pids = {
        line["pid"]
        for line in watch.lines[-400 * num_ranks :]
        if line["event"] == "done" and line["iteration"] == now["iteration"] - 1
    }
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
