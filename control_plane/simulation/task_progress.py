"""A task on paper: what it has done, what of that is kept, and at what rate it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...events.records.decisions import ThroughputSet
from ...events.records.types import Origin


@dataclass
class Kept:
    """What is made every `every_s` of training, and holds all iterations done until then."""

    every_s: float
    done_flop: float = 0.0
    since_s: float = 0.0
    """Of training, since it was made."""

    def pass_by(self, job: Job, past_s: float) -> None:
        """The job went on for so long, at its rate."""
        self.since_s += past_s
        if self.every_s and self.since_s >= self.every_s:
            self.since_s %= self.every_s
            num = job.iterations(job.done_flop - job.rate_flops * self.since_s)
            self.done_flop = max(self.done_flop, num * job.iteration_flop)


@dataclass
class Job:
    """`table` is what it achieves, whatever the heart comes to believe. `iteration_flop` is that of
    one iteration at any size. FLOP are not weighted."""

    task: int
    table: ThroughputSet
    iteration_flop: float
    checkpoint: Kept
    copy: Kept
    done_flop: float = 0.0
    rate_flops: float = 0.0
    since_s: float = 0.0
    stuck: bool = False
    """A fault has stopped it, and it has not gone on since."""
    told: bool = True
    """Whether somebody was told of that."""
    halted: bool = False
    """Its members have come to where they leave their generation."""
    round: int = 0
    """Of a command: how often all of its processes were started."""
    began_flop: float = 0.0
    """What was done when the horizon began."""
    holders: set[str] = field(default_factory=set[str])
    """Nodes, each in its incarnation, that have a part in its copies in memory."""
    origin: Origin = "seed"
    """Where it went on from, the last time that nobody had its state."""

    @property
    def iteration(self) -> int:
        """Iterations that are done."""
        return self.iterations(self.done_flop)

    def iterations(self, flop: float) -> int:
        """Whole ones, sums of floats not being exact."""
        return int(flop / self.iteration_flop + 1e-9) if self.iteration_flop else 0

    def settle(self, at_s: float) -> None:
        """What was done until now."""
        past_s = at_s - self.since_s
        self.since_s = at_s
        if self.rate_flops and past_s > 0:
            self.done_flop += self.rate_flops * past_s
            for kept in (self.checkpoint, self.copy):
                kept.pass_by(self, past_s)

    def goes_at(self, at_s: float, rate_flops: float) -> None:
        self.settle(at_s)
        self.rate_flops = rate_flops

    @property
    def iteration_s(self) -> float:
        """At the rate of now."""
        return self.iteration_flop / self.rate_flops if self.rate_flops else 0.0

    def until_boundary_s(self, at_s: float) -> float:
        """Until the iteration that it is in is done."""
        self.settle(at_s)
        return ((self.iteration + 1) * self.iteration_flop - self.done_flop) / self.rate_flops

    @property
    def since_boundary_s(self) -> float:
        """Since the last iteration was done, where it goes on."""
        return max(self.done_flop - self.iteration * self.iteration_flop, 0.0) / self.rate_flops

    def keep(self, at_s: float) -> None:
        """All that is done is in a checkpoint and copied: what is lost later was done later."""
        self.settle(at_s)
        for kept in (self.checkpoint, self.copy):
            kept.done_flop, kept.since_s = self.done_flop, 0.0
        self.began_flop = self.done_flop

    def lose(self, holder: str) -> None:
        """The node is gone; with the last of them all copies in memory are."""
        if holder in self.holders:
            self.holders.remove(holder)
            if not self.holders:
                self.copy.done_flop = self.copy.since_s = 0.0

    def fall_back(self, at_s: float) -> float:
        """All that its processes held is gone: it goes on from what is kept; the FLOP lost.

        Until the next checkpoint, and the next copy, it is as long as ever from there.
        """
        self.settle(at_s)
        to = max(self.checkpoint.done_flop, self.copy.done_flop)
        self.origin = ("seed" if not to else "copy" if to > self.checkpoint.done_flop
                       else "checkpoint")
        lost, self.done_flop = self.done_flop - to, to
        self.checkpoint.since_s = self.copy.since_s = 0.0
        return lost
