"""Progress of a simulated task: the work done, the work saved, and the current rate."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...events.records.decisions import ThroughputSet
from ...events.records.types import Origin


@dataclass
class SavedState:
    """The newest saved state of one kind. It is saved every `every_s` of training, 0 for never."""

    every_s: float
    done_flop: float = 0.0
    since_s: float = 0.0
    """Training time since the last save."""

    def advance(self, job: TaskProgress, past_s: float) -> None:
        """Account for `past_s` of training at the task's rate."""
        self.since_s += past_s
        if self.every_s and self.since_s >= self.every_s:
            self.since_s %= self.every_s
            num = job.iterations(job.done_flop - job.rate_flops * self.since_s)
            self.done_flop = max(self.done_flop, num * job.iteration_flop)


@dataclass
class TaskProgress:
    """`table` has the true throughput; the decider's state may have another. `iteration_flop` is
    the work of one iteration at any size. FLOP are not weighted."""

    table: ThroughputSet
    iteration_flop: float
    checkpoint: SavedState
    memory_checkpoint: SavedState
    done_flop: float = 0.0
    rate_flops: float = 0.0
    since_s: float = 0.0
    is_stalled: bool = False
    """A fault has stopped the task, and it has not resumed since."""
    is_reported: bool = True
    """Whether the fault that has stopped the task has been reported."""
    at_boundary: bool = False
    """The members have reached the point at which they leave their generation."""
    round: int = 0
    """For a command: how many times all its processes were started."""
    began_flop: float = 0.0
    """`done_flop` at the start of the horizon."""
    weights: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(`done_flop`, weight): the work from there on was done at this weight. Ascending."""
    holders: set[str] = field(default_factory=set[str])
    """Nodes, by name and incarnation, that hold part of the in-memory checkpoint."""
    origin: Origin = "seed"
    """Source of the state that was restored last, after no member had the state."""

    @property
    def iteration(self) -> int:
        return self.iterations(self.done_flop)

    def iterations(self, flop: float) -> int:
        """The whole iterations in `flop`. The margin is for rounding of float sums."""
        return int(flop / self.iteration_flop + 1e-9) if self.iteration_flop else 0

    def settle(self, at_s: float) -> None:
        """Add the work done until `at_s`."""
        past_s = at_s - self.since_s
        self.since_s = at_s
        if self.rate_flops and past_s > 0:
            self.done_flop += self.rate_flops * past_s
            for saved in (self.checkpoint, self.memory_checkpoint):
                saved.advance(self, past_s)

    def set_rate(self, at_s: float, rate_flops: float) -> None:
        self.settle(at_s)
        self.rate_flops = rate_flops

    def weigh(self, weight: float) -> None:
        """The work from now on is done at this weight."""
        if not self.weights or self.weights[-1][1] != weight:
            self.weights.append((self.done_flop, weight))

    def take_back(self, lost_flop: float, weight: float) -> float:
        """What was earned for the work that has just been lost, each part at the weight at which it
        was done. It is repeated at `weight`."""
        worth, end = 0.0, self.done_flop + lost_flop
        for since, then in reversed(self.weights or [(0.0, weight)]):
            begin = max(since, self.done_flop)
            worth += max(end - begin, 0.0) * then
            end = min(end, begin)
        self.weights = [part for part in self.weights if part[0] < self.done_flop]
        self.weigh(weight)
        return worth

    @property
    def iteration_s(self) -> float:
        """Time of an iteration at the current rate; 0.0 if the task does not train."""
        return self.iteration_flop / self.rate_flops if self.rate_flops else 0.0

    def until_boundary_s(self, at_s: float) -> float:
        """The time until the current iteration completes. Call it only while the task trains."""
        self.settle(at_s)
        return ((self.iteration + 1) * self.iteration_flop - self.done_flop) / self.rate_flops

    @property
    def since_boundary_s(self) -> float:
        """The time since the last iteration completed. Call it only while the task trains."""
        return max(self.done_flop - self.iteration * self.iteration_flop, 0.0) / self.rate_flops

    def save_all(self, at_s: float) -> None:
        """Save all work done, in both saved states. Only work after `at_s` can be lost."""
        self.settle(at_s)
        for saved in (self.checkpoint, self.memory_checkpoint):
            saved.done_flop, saved.since_s = self.done_flop, 0.0
        self.began_flop = self.done_flop

    def remove_holder(self, holder: str) -> None:
        """A node is lost. The in-memory checkpoint is lost with its last holder."""
        if holder in self.holders:
            self.holders.remove(holder)
            if not self.holders:
                self.memory_checkpoint.done_flop = self.memory_checkpoint.since_s = 0.0

    def restore(self, at_s: float) -> float:
        """Restore the newest saved state, as no process has the state. Returns the lost FLOP. The
        intervals until the next checkpoint and in-memory checkpoint start again."""
        self.settle(at_s)
        to = max(self.checkpoint.done_flop, self.memory_checkpoint.done_flop)
        self.origin = (
            "seed" if not to else "copy" if to > self.checkpoint.done_flop else "checkpoint"
        )
        lost, self.done_flop = self.done_flop - to, to
        self.checkpoint.since_s = self.memory_checkpoint.since_s = 0.0
        return lost
