"""Trains real ranks through one phase, and measures the peak memory of each in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import rank_driver
from bench.memory.resident import Sampler, resident_bytes
from checkpoint_stores import LocalKeeper
from nursery import Nursery
from rank_driver import Driver, Process
from unicron.events.records import reports as r
from unicron.events.spec.job import JobSpec, parse
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions

LAYOUTS = {
    "dp2": Axes(dp=2),
    "tp2": Axes(tp=2),
    "pp2": Axes(pp=2),
    "tp2pp2": Axes(tp=2, pp=2),
    "tp2dp2": Axes(tp=2, dp=2),
    "pp2dp2": Axes(pp=2, dp=2),
}
GROWN_FROM = {"tp2pp2": "tp2", "tp2dp2": "pp2", "pp2dp2": "pp2"}
"""By layout: the layout of two ranks from which the phase `growth` begins."""
PHASES = ("start", "recovery", "growth", "saving", "copying")
MODEL = {"num_layers": 16, "hidden": 1024, "num_heads": 16, "sequence": 32}
"""202 million parameters, and few activations: the state and the gradients are nearly all memory.
"""
STATE_GB = 2.4
"""The state of that model, in GB (1e9 bytes)."""
TRAINED = 2
"""Iterations, after the first, whose peak counts as that of training."""
EVERY = TRAINED + 2
"""Iterations between two checkpoints, so that the training before the first is undisturbed."""
MMAP_BYTES_MIN = 1 << 20
"""The C library returns freed blocks of this size or more to the system at once. Otherwise it keeps
an amount that depends on the threads, and resident memory shows more than the tensors."""
STORE_BYTES_MAX = 6 << 30
WAIT_S = 900.0
Say = Callable[[str], None]


class Measured(NamedTuple):
    """One trial: the highest ratio of a rank, and that rank's peaks, in bytes."""

    ratio: float
    peak_bytes: int
    training_bytes: int


class Trial:
    """One task of real ranks. Ranks are numbered by their positions."""

    def __init__(self, folder: Path, nursery: Nursery, axes: Axes, **train: Any) -> None:
        rank_driver.WAIT_S = WAIT_S
        self.driver = Driver(_spec(folder / "out", axes, train), folder, nursery)
        self.sampler = Sampler()
        self.floor_bytes = self._empty_rank_bytes(folder, nursery)
        self.axes = axes
        self.training: dict[int, int] = {}
        """By rank: the peak of undisturbed iterations, less that of an empty rank."""

    @property
    def ranks(self) -> list[int]:
        """The ranks of the current layout."""
        return list(range(num_positions(self.axes)))

    def launch(self, ranks: Collection[int], axes: Axes, attempt: int = 1) -> None:
        """Start ranks for their positions in `axes`, and wait until they are ready."""
        self.driver.launch(*ranks, attempt=attempt, axes=axes)
        self.sampler.watch([self._pid(rank) for rank in ranks])
        for rank in ranks:
            self.driver.processes[rank].ready = self.driver.wait(
                r.RankReady, rank, attempt=attempt, limit_s=WAIT_S
            )

    def form(self) -> int:
        """Begin a generation of all ranks. Returns the iteration from which they train."""
        driver, number = self.driver, self.driver.reconfigure(self.ranks, axes=self.axes)
        for rank in self.ranks:
            told = driver.wait(
                r.Reconfigured, rank, limit_s=WAIT_S, where=lambda body: body.generation == number
            )
        driver.resume(self.ranks)
        return int(told.step_version)

    def reach(self, iteration: int) -> None:
        """Wait until every rank has begun this iteration."""
        for rank in self.ranks:
            self.driver.strike(rank, iteration=iteration, event="micro_batch")

    def train(self, first: int) -> None:
        """Train undisturbed from this iteration on, and note the peak of each rank."""
        self.reach(first)
        self.sampler.peaks()
        self.reach(first + TRAINED)
        for rank, peak_bytes in self.peaks().items():
            self.training[rank] = max(peak_bytes, self.training.get(rank, 0))

    def peaks(self) -> dict[int, int]:
        """By rank: its peak in this phase, less that of an empty rank."""
        found = self.sampler.peaks()
        return {rank: found[self._pid(rank)] - self.floor_bytes for rank in self.ranks}

    def measured(self, peaks: dict[int, int]) -> Measured:
        """The highest ratio among the ranks."""
        return max(
            Measured(peak / self.training[rank], peak, self.training[rank])
            for rank, peak in peaks.items()
        )

    def _pid(self, rank: int) -> int:
        return self.driver.processes[rank].popen.pid

    @staticmethod
    def _empty_rank_bytes(folder: Path, nursery: Nursery) -> int:
        """The memory of a rank that has imported everything and does nothing."""
        process = Process(99, 1, nursery, "import time; time.sleep(1e6)", folder, folder / "trace")
        try:
            time.sleep(1.0)
            return resident_bytes(process.popen.pid)
        finally:
            process.popen.kill()
            process.popen.wait(10)
            process.socket.close()


def _spec(output: Path, axes: Axes, train: dict[str, Any]) -> JobSpec:
    tensor, pipeline = sorted({1, axes.tp}), sorted({1, axes.pp})
    return parse(
        {
            "apiVersion": "unicron/v1",
            "name": "memory",
            "slots": {"min": 1, "max": num_positions(axes)},
            "train": {
                "model": MODEL,
                "batch": {"global": 2, "micro": 1},
                "iterations": 1000,
                "output": str(output),
                "optimizer": {"lr": 1e-4},
                "parallel": {"tensor": tensor, "pipeline": pipeline},
                **train,
            },
        }
    )


@contextmanager
def running(folder: Path, axes: Axes, **train: Any) -> Iterator[Trial]:
    """A trial whose processes end with the context."""
    folder.mkdir(parents=True)
    nursery = Nursery(folder / "zygote.log")
    try:
        trial = Trial(folder, nursery, axes, **train)
        try:
            with trial.sampler:
                yield trial
        finally:
            trial.driver.close()
    finally:
        nursery.close()


def model_of(gb: float) -> dict[str, int]:
    """The model whose state has about so many GB."""
    return {**MODEL, "num_layers": max(1, round(MODEL["num_layers"] * gb / STATE_GB))}


def start(folder: Path, axes: Axes, **train: Any) -> Measured:
    """From the start of the processes to their first iteration."""
    with running(folder, axes, **train) as trial:
        trial.launch(trial.ranks, axes)
        begin = trial.form()
        trial.reach(begin)
        found = trial.peaks()
        trial.train(begin + 1)
        return trial.measured(found)


def recovery(folder: Path, axes: Axes, **train: Any) -> Measured:
    """The last rank is killed in an iteration and started again, until the next iteration."""
    with running(folder, axes, **train) as trial:
        trial.launch(trial.ranks, axes)
        trial.train(trial.form() + 1)
        trial.sampler.peaks()
        victim = trial.ranks[-1]
        trial.driver.kill(victim)
        trial.driver.left_by_themselves(trial.ranks[:-1])
        trial.driver.quiesced(trial.ranks[:-1])
        trial.launch([victim], axes, attempt=2)
        trial.reach(trial.form() + 1)
        return trial.measured(trial.peaks())


def growth(folder: Path, axes: Axes, **train: Any) -> Measured:
    """Two ranks train; two are added, and the layout changes, until the next iteration."""
    small = LAYOUTS[GROWN_FROM[_name(axes)]]
    with running(folder, axes, **train) as trial:
        trial.axes = small
        trial.launch(trial.ranks, small)
        trial.train(trial.form() + 1)
        old = trial.ranks
        trial.sampler.peaks()
        trial.axes = axes
        trial.launch(trial.ranks[len(old) :], axes)
        trial.driver.quiesce(old, "boundary")
        begin = trial.form()
        trial.reach(begin + 1)
        found = trial.peaks()
        trial.train(begin + 2)
        return trial.measured(found)


def saving(folder: Path, axes: Axes, **train: Any) -> Measured:
    """A checkpoint is written while the ranks train."""
    with running(folder, axes, checkpoint_every=EVERY, **train) as trial:
        trial.launch(trial.ranks, axes)
        trial.train(trial.form() + 1)
        trial.sampler.peaks()
        trial.driver.wait(r.CheckpointSaved, 0, limit_s=WAIT_S)
        return trial.measured(trial.peaks())


def copying(folder: Path, axes: Axes, **train: Any) -> Measured:
    """In-memory checkpoints are taken while the ranks train."""
    with running(folder, axes, copy_every=EVERY, **train) as trial:
        trial.driver.keepers = [LocalKeeper(node, bytes_max=STORE_BYTES_MAX) for node in ("n2",)]
        trial.launch(trial.ranks, axes)
        trial.train(trial.form() + 1)
        trial.sampler.peaks()
        trial.driver.wait(r.MemoryCheckpointStored, 0, limit_s=WAIT_S)
        return trial.measured(trial.peaks())


MEASURES: dict[str, Callable[..., Measured]] = {
    "start": start,
    "recovery": recovery,
    "growth": growth,
    "saving": saving,
    "copying": copying,
}


def _name(axes: Axes) -> str:
    return next(name for name, one in LAYOUTS.items() if one == axes)
