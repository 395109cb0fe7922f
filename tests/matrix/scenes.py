"""How each cell is played: real ranks come to the point, are struck there, and the rest heals.

The driver plays the agents and the control plane, by the orders that these give. Nothing here is
a race: who is to be struck, or to be late, is held where it is.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from rank_driver import START_S, Driver
from unicron.events.reports import Quiesced, RankErrored, RankFinished, RankReady, Reconfigured

from .cells import NEWCOMER, RANKS, STRUCK, Cell

LATE = 0
"""Who is late where some ranks are further than others."""


class Play:
    """One cell's run. `claims` is what the survivors held, `settled` what they agreed on."""

    def __init__(self, driver: Driver, cell: Cell) -> None:
        self.driver, self.cell = driver, cell
        self.point, self.fault = cell.point, cell.fault
        self.victims = [self.point.victim]
        if self.fault in ("lost agent", "two at once", "two in turn"):
            self.victims.append(self.point.mate)
        self.members = list(RANKS)
        self.claims: dict[int, Quiesced] = {}
        self.settled: dict[int, Reconfigured] = {}
        self._at_point = self.victims[:1]
        if self.fault == "two at once" and self.point.all_come:
            self._at_point = self.victims
        self.finished: dict[int, RankFinished] = {}
        self._armed: dict[int, int] = {}
        self._late: list[Path] = []

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.victims]

    def run(self) -> None:
        """Play it, to the end of the training."""
        getattr(self, f"_play_{self.point.scene}")()
        self.finished = self.driver.finish(self.survivors)

    # --- the scenes -----------------------------------------------------------------------------
    def _play_start(self) -> None:
        """Nobody is in a generation yet; the others begin without."""
        self._arm(dict.fromkeys(self._at_point, -1))
        self.driver.launch(*RANKS)
        self._come()
        for rank in self._others:
            self.driver.processes[rank].ready = self.driver.wait(RankReady, rank, limit_s=START_S)
        self._strike()
        self._heal()

    def _play_sum(self, others_in: int = STRUCK) -> None:
        """In an iteration; the others come as far as they can without."""
        self.driver.start(*RANKS)
        self._arm(dict.fromkeys(self._at_point, STRUCK))
        self.driver.form(self.members)
        self._come()
        self._others_come("reduce", others_in)
        self._strike()
        self._heal()

    def _play_beside(self) -> None:
        """While a thread of the victim's is at it, and all train; nobody leaves the iteration."""
        self.driver.start(*RANKS)
        late = self.driver.hold(RANKS[-1], "reduce", STRUCK)
        self._arm(dict.fromkeys(self._at_point, STRUCK))
        self.driver.form(self.members)
        self.driver.held(RANKS[-1], STRUCK)
        self._come()
        self._others_come("reduce", STRUCK)
        self._strike()
        late.unlink()
        self._heal()

    def _play_step(self) -> None:
        """When the reduction is whole everywhere: the others step, and miss it in the next."""
        self._play_sum(others_in=STRUCK + 1)

    def _play_partial(self) -> None:
        """When the reduction is whole on some ranks, and on one that is late no bucket is."""
        self._strike_late(lambda: self._others_come("reduce", STRUCK + 1))

    def _play_partly(self) -> None:
        """When some buckets are whole on some ranks, none on one that is late, and nowhere all."""
        self._strike_late(lambda: self._others_come("bucket_done", STRUCK, nth=self.point.bucket))

    def _strike_late(self, others_come: Callable[[], None]) -> None:
        self.driver.start(*RANKS)
        self._late = [self.driver.hold(LATE, "bucket_done", STRUCK, bucket=0)]
        self._arm(dict.fromkeys(self._at_point, STRUCK))
        self.driver.form(self.members)
        self.driver.held(LATE, STRUCK)
        self._come()
        others_come()
        self._strike()
        self._heal()
        assert len({(told.step_version, told.buckets_reduced)
                    for told in self.claims.values()}) > 1, "the survivors held the same"

    def _play_meeting(self) -> None:
        """While a new generation is built of members of which one is a step behind."""
        self.driver.start(*RANKS)
        late = self.driver.hold(LATE, "bucket_done", STRUCK, bucket=0)
        self.driver.form(self.members)
        self.driver.held(LATE, STRUCK)
        for rank in self.members:
            if rank != LATE:
                self.driver.strike(rank, iteration=STRUCK + 1, event="reduce")
        held = self.driver.quiesce(self.members, "now")
        assert {held[rank].step_version - held[LATE].step_version
                for rank in self.members} == {0, 1}
        late.unlink()
        self._arm({rank: held[rank].step_version for rank in self._at_point})
        self.driver.reconfigure(self.members)
        self._come()
        self._strike()
        self._heal()

    def _play_ready(self) -> None:
        """A newcomer that nobody has met yet."""
        self.driver.start(*RANKS)
        waits = self.driver.hold(LATE, "micro_batch", STRUCK)
        self.settled = self.driver.form(self.members)
        self.driver.held(LATE, STRUCK)
        self._arm({NEWCOMER: -1})
        self.driver.launch(NEWCOMER)
        self._come()
        self._strike()
        waits.unlink()
        if self.survivors != self.members:
            self._heal()
        elif self.fault == "SIGSTOP":
            self.driver.kill(NEWCOMER)

    def _play_receive(self) -> None:
        """A newcomer that takes its state."""
        self._newcomer_is_met()
        self._arm({NEWCOMER: -1})
        self.driver.reconfigure(self.members)
        self._come()
        self._strike()
        self._heal()

    def _play_joined(self) -> None:
        """A newcomer in its first iteration."""
        version = self._newcomer_is_met()
        self._arm(dict.fromkeys(self._at_point, version))
        self.driver.form(self.members)
        self._come()
        self._others_come("reduce", version)
        self._strike()
        self._heal()

    # --- their parts ----------------------------------------------------------------------------
    def _newcomer_is_met(self) -> int:
        """All have left for a generation with a newcomer; the step that they have come to."""
        self.driver.start(*RANKS)
        waits = self.driver.hold(LATE, "micro_batch", STRUCK)
        self.driver.form(self.members)
        self.driver.held(LATE, STRUCK)
        self.driver.start(NEWCOMER)
        self.driver.ask_to_leave(self.members, "boundary")
        waits.unlink()
        (version,) = {told.step_version for told in self.driver.quiesced(self.members).values()}
        self.members.append(NEWCOMER)
        return version

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.members if rank not in self._at_point]

    def _arm(self, iterations: dict[int, int]) -> None:
        """Each of these is stopped at the point in that iteration."""
        for rank, iteration in iterations.items():
            self._hold(rank, iteration)
        self._armed = iterations

    def _hold(self, rank: int, iteration: int, then: str = "wait") -> None:
        where = {}
        if self.point.nth >= 0:
            where["micro_batch"] = rank + self.point.nth * len(self.members)
        if self.point.bucket >= 0:
            where["bucket"] = self.point.bucket
        self.driver.hold(rank, self.point.event, iteration, then=then, **where)

    def _come(self) -> None:
        """Wait until they are there."""
        for rank, iteration in self._armed.items():
            self.driver.held(rank, iteration)

    def _others_come(self, event: str, iteration: int, nth: int = 1) -> None:
        """Wait until all others begin this, but who is late."""
        for rank in self._others:
            if not (self._late and rank == LATE):
                self.driver.strike(rank, iteration=iteration, event=event, nth=nth)

    def _strike(self) -> None:
        victim = self.victims[0]
        if self.fault == "lost agent":
            self.driver.lose_agents(*self.victims)
        elif self.fault == "exception":
            self._hold(victim, self._armed[victim], then="raise")
            assert self.driver.wait(RankErrored, victim).error == "Struck"
            assert self.driver.processes.pop(victim).popen.wait(20) == 1
        elif self.fault == "SIGSTOP":
            self.driver.processes[victim].signal(signal.SIGSTOP)
        elif self.fault == "two at once":
            for rank in self.victims:
                self.driver.processes[rank].signal(signal.SIGKILL)
            for rank in self.victims:
                self.driver.kill(rank)
        else:
            self.driver.kill(victim)

    def _heal(self) -> None:
        """As the control plane has it done: leave, end who is stopped, meet, settle, go on."""
        driver, victim = self.driver, self.victims[0]
        left = [rank for rank in self.members if rank in driver.processes and rank != victim]
        if driver.generation:
            self.claims = driver.quiesce(left, "now")
        for file in self._late:
            file.unlink()
        if self.fault == "SIGSTOP":
            driver.kill(victim)
        if self.fault == "two in turn":
            mate = self.point.mate
            version = self.claims[mate].step_version if mate in self.claims else -1
            driver.hold(mate, "meet", version)
            driver.reconfigure(left)
            driver.held(mate, version)
            driver.kill(mate)
            self.claims = driver.quiesce(self.survivors, "now")
        self.settled = driver.form(self.survivors)
