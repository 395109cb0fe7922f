"""A simulated agent's monitor of its ranks: it reports stalled ranks and step times."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from simulated.environment import Environment
from simulated.rank import NUM_PACED, SimulatedRank
from unicron.events.records.reports import RankStalled, RankUnstalled, StepTimeChanged, Whereabouts
from unicron.events.records.types import Body

WATCH_S = 0.25
STANDS_TIMES = 3.0
FALSE_SHARE = 0.002
"""Share of looks at a rank that report a false stall."""
OWN_NOISE = (0.96, 1.04)
CHANGED_RATIO = 1.08
SLOW_AGAIN_TIMES = 2.0
"""A slow iteration that still runs is reported again after this many times its reported time."""


class Told(Struct):
    """The last reports about one process."""

    generation: int
    stalled_s: float = -1.0
    """The progress mark after which the rank was reported stalled; below 0: not stalled."""
    slow: int = -1
    """The iteration that was reported as slow while it ran: too long in the rank's own work."""
    slow_s: float = 0.0
    """How long it had taken by then."""
    own_s: float = 0.0
    normal_s: float = 0.0


class SimulatedRankMonitor:
    """Monitors one node's ranks. The place that it reports (`own`, `collective`) is correct."""

    def __init__(self, net: Environment, say: Callable[[Body], None]) -> None:
        self.net, self.say = net, say
        self._told: dict[int, Told] = {}
        """By pid."""

    def look(self, ranks: list[SimulatedRank]) -> None:
        self._told = {rank.pid: self._told[rank.pid] for rank in ranks if rank.pid in self._told}
        for rank in ranks:
            if not rank.iterates:
                self._told.pop(rank.pid, None)
                continue
            told = self._told.get(rank.pid)
            if told is None or told.generation != rank.seen:
                told = self._told[rank.pid] = Told(generation=rank.seen)
            self._look(rank, told)
            self._pace(rank, told)

    def _look(self, rank: SimulatedRank, control_plane: Told) -> None:
        now_s, computes = self.net.loop.time(), rank.phase == "computing"
        last_s = rank.marks.last_s(now_s, computes=computes, frozen=rank.stopped_s > 0)
        normal_s = rank.marks.normal_s
        if control_plane.stalled_s >= 0 and last_s > control_plane.stalled_s:
            self.say(
                RankUnstalled(
                    task=rank.task,
                    rank=rank.rank,
                    attempt=rank.attempt,
                    generation=rank.seen,
                    iteration=rank.step_version,
                    stalled_s=last_s - control_plane.stalled_s,
                )
            )
            control_plane.stalled_s = -1.0
        false = self.net.rng.random() < FALSE_SHARE
        if control_plane.stalled_s < 0 and (now_s - last_s > STANDS_TIMES * normal_s or false):
            control_plane.stalled_s = last_s
            where: Whereabouts = "own" if computes else "collective"
            self.say(
                RankStalled(
                    task=rank.task,
                    rank=rank.rank,
                    attempt=rank.attempt,
                    generation=rank.seen,
                    iteration=rank.step_version,
                    where=where,
                    what=rank.phase,
                    collective=int(not computes),
                    normal_s=normal_s,
                    in_s=max(now_s - last_s, STANDS_TIMES * normal_s * false),
                )
            )

        elif control_plane.stalled_s < 0 and computes:
            self._slow(rank, control_plane, normal_s)

    def _slow(self, rank: SimulatedRank, control_plane: Told, normal_s: float) -> None:
        own_s = rank.marks.works_s(self.net.loop.time())
        again = control_plane.slow == rank.step_version
        if own_s <= (SLOW_AGAIN_TIMES * control_plane.slow_s if again else STANDS_TIMES * normal_s):
            return
        control_plane.slow, control_plane.slow_s = rank.step_version, own_s
        self.say(
            StepTimeChanged(
                task=rank.task,
                rank=rank.rank,
                attempt=rank.attempt,
                generation=rank.seen,
                iteration=rank.step_version,
                num_iterations=1,
                iteration_s=own_s,
                own_s=own_s,
                normal_s=control_plane.normal_s or normal_s,
            )
        )

    def _pace(self, rank: SimulatedRank, control_plane: Told) -> None:
        iteration_s = rank.marks.iteration_s
        if not iteration_s:
            return
        low_s, high_s = self.net.tempo.micro_batch_s
        own_s = (len(rank.owned) or 1) * (low_s + high_s) / 2 * rank.marks.slow
        own_s *= self.net.draw(OWN_NOISE)
        if control_plane.own_s and 1 / CHANGED_RATIO < own_s / control_plane.own_s < CHANGED_RATIO:
            return
        control_plane.own_s, control_plane.normal_s = own_s, control_plane.normal_s or own_s
        self.say(
            StepTimeChanged(
                task=rank.task,
                rank=rank.rank,
                attempt=rank.attempt,
                generation=rank.seen,
                iteration=rank.step_version,
                num_iterations=NUM_PACED,
                iteration_s=iteration_s,
                own_s=own_s,
                normal_s=control_plane.normal_s,
            )
        )
