"""How each cell is run: ranks reach the point, the fault strikes, the task recovers.

The driver plays the agents and the control plane, with their orders. There are no races: the
victims and the late rank are held at their events. If a replica has several ranks and one is held,
the others of that replica go only as far as they can without it.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from checkpoint_stores import TASK, named, whole_steps
from matrix.cells import COPIES, NEWCOMER, STRUCK, Cell
from rank_driver import START_S, Driver
from unicron.control_plane.decide.membership import order_members
from unicron.control_plane.state.task import HeldState, Rank
from unicron.events.records import reports as r
from unicron.events.records.types import MemoryCheckpoint, Slot
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates, has_every_part, num_positions

LATE = 0
"""The late rank, in scenes where some ranks are further than others."""
BEFORE_GATE = ("reduced", "gate")
"""No rank passes the gate while one member is held at these events."""
AFTER_STEP = ("give", "receive")
"""Events in which a new generation transfers state. A rank that was in the gate steps before."""


class Play:
    """One cell's run. `claims`: what the survivors held. `settled`: what they agreed on.

    `members`: the newest generation, by position in `axes`. `trained`: the members of the last
    generation that has trained; `trained_in`: its layout. `struck` and `struck_in`: the same for
    the last generation that had trained before the fault. `layouts`: those of all generations.
    `copied`: the steps of the newest copies until the settlement, if the survivors lack a part of
    the state.
    """

    def __init__(self, driver: Driver, cell: Cell) -> None:
        self.driver, self.cell = driver, cell
        self.point, self.fault, self.variant = cell.point, cell.fault, cell.variant
        self.newcomer = self.variant.newcomer
        self.victims = [self.newcomer if self.point.victim == NEWCOMER else self.point.victim]
        if self.fault in ("lost agent", "two at once", "two in turn"):
            self.victims.append(self.point.mate)
        self.there = list(range(num_positions(self.variant.axes)))
        self.members: list[int] = []
        self.trained: list[int] = []
        self.struck: list[int] = []
        self.axes = self.trained_in = self.struck_in = Axes()
        self.layouts: dict[int, Axes] = {}
        self.copied: set[int] = set()
        self.claims: dict[int, r.Quiesced] = {}
        self.settled: dict[int, r.Reconfigured] = {}
        self._at_point = self.victims[:1]
        if self.fault == "two at once" and self.point.all_come:
            self._at_point = self.victims
        self.finished: dict[int, r.RankFinished] = {}
        self._armed: dict[int, int] = {}
        self._bucket = cell.point.bucket
        self._late: list[Path] = []
        self._seat(self.variant.axes)

    @property
    def survivors(self) -> list[int]:
        """The surviving members of the newest generation, by position."""
        return [rank for rank in self.members if rank not in self.victims]

    def run(self) -> None:
        """Run the scene, to the end of the training."""
        getattr(self, f"_play_{self.point.scene}")()
        self.finished = self.driver.finish(self.survivors)

    # --- the scenes -----------------------------------------------------------------------------
    def _play_start(self) -> None:
        """At start-up, before the first generation. The others start without the victim."""
        self._arm(dict.fromkeys(self._at_point, -1))
        self.driver.launch(*self.there)
        self._come()
        for rank in self._others:
            self.driver.processes[rank].ready = self.driver.wait(r.RankReady, rank, limit_s=START_S)
        self._strike()
        self._heal()

    def _play_sum(self) -> None:
        """Within an iteration. The others go as far as they can without the victim."""
        self._begin_armed()
        self._come()
        self._come_to(self._free, "reduce", STRUCK)
        self._strike()
        self._heal()

    def _play_beside(self) -> None:
        """While a thread of the victim works beside the training. One rank delays the iteration."""
        last = self.there[-1]
        (late,) = self._begin_armed({last: "reduce"})
        self.driver.held(last, STRUCK)
        self._come()
        self._come_to(self._others, "reduce", STRUCK)
        self._strike()
        late.unlink()
        self._heal()

    def _play_step(self) -> None:
        """When the reduction is complete everywhere. The others go on until they wait for the
        victim: at the gate, or after their step."""
        self._begin_armed()
        self._come()
        self._step_without()
        self._strike()
        self._heal()

    def _play_passed(self) -> None:
        """When some ranks are past the gate, and a late one does not know that all entered it."""
        self._strike_late("passed", self._step_without)

    def _play_partial(self) -> None:
        """When the reduction is complete on some ranks, and the late one has no full bucket."""

        def others_come() -> None:
            # Some wait for the largest element of the late rank, or for its shard.
            if self.variant.is_exact or self.variant.optimizer == "mirrored":
                self._come_to(self._others, "bucket_done", STRUCK)
                return
            if self.variant.is_plain:
                self._come_to(self._free, "reduce", STRUCK + 1)
                return
            self._come_to(self._free, "gate", STRUCK)
            for rank in self._others:
                if rank not in self._free:
                    # Only the first and the last stage have an embedding, which they reduce.
                    stage = coordinates(self.axes, self.members.index(rank)).pp
                    has_embedding = self.axes.pp > 1 and stage in (0, self.axes.pp - 1)
                    self._come_to([rank], "embedding" if has_embedding else "gate", STRUCK)

        # Each chunk of layers has its own bucket, and with a sharded optimizer the embedding that
        # two stages share. The last bucket completes the reduction.
        has_own = self.axes.pp > 1 and self.variant.optimizer != "whole"
        self._bucket = self.axes.chunks - 1 + has_own
        self._strike_late("bucket_done", others_come, bucket=self._bucket)

    def _play_partly(self) -> None:
        """When some ranks have completed some of their buckets, but the late rank none."""
        self._strike_late(
            "bucket_done",
            lambda: self._come_to(self._free, "bucket_done", STRUCK, nth=self.point.bucket),
            bucket=0,
        )

    def _strike_late(self, event: str, others_come: Callable[[], None], **where: int) -> None:
        self._late = [self.driver.hold(LATE, event, STRUCK, **where)]
        self._begin_armed()
        self._come()
        self.driver.held(LATE, STRUCK)
        others_come()
        self._strike()
        self._heal()
        assert (
            len(self.claims) == 1
            or len({(told.step_version, told.buckets_reduced) for told in self.claims.values()}) > 1
        ), "the survivors have equal claims"

    def _play_meeting(self) -> None:
        """While a new generation is built, and one member is a step behind.

        If the variant has a gate, that member has entered it and may still step, and the new
        generation has another layout, so that there is state to transfer.
        """
        self.driver.start(*self.there)
        has_gate = self.variant.has_gate
        late = (
            self.driver.hold(LATE, "passed", STRUCK)
            if has_gate
            else self.driver.hold(LATE, "bucket_done", STRUCK, bucket=0)
        )
        self._form()
        self.driver.held(LATE, STRUCK)
        others = [rank for rank in self.members if rank != LATE]
        self._come_to(others, "done", STRUCK)
        self._come_on([rank for rank in others if not self._is_with(rank, LATE)])
        held = self.driver.quiesce(self.members, "now")
        newest = max(told.step_version for told in held.values())
        assert {held[rank].step_version - held[LATE].step_version for rank in self.members} == {
            0,
            1,
        }
        late.unlink()
        has_stepped = has_gate and self.point.event in AFTER_STEP
        self._arm(
            {rank: newest if has_stepped else held[rank].step_version for rank in self._at_point}
        )
        if not self.variant.is_plain:
            self._seat(self.variant.other, beside=True)
        self._meet()
        self._come()
        self._strike()
        self._heal()

    def _play_ready(self) -> None:
        """When a newcomer is ready, but in no generation yet."""
        self.driver.start(*self.there)
        waits = self.driver.hold(LATE, "micro_batch", STRUCK)
        self.settled = self._form()
        self.driver.held(LATE, STRUCK)
        self._arm({self.newcomer: -1})
        self.driver.launch(self.newcomer)
        self._come()
        self._strike()
        waits.unlink()
        if self.survivors != self.members:
            self._heal()
        elif self.fault == "SIGSTOP":
            self.driver.kill(self.newcomer)

    def _play_receive(self) -> None:
        """While a newcomer, or a rank with another part of the model, receives its state."""
        version = self._newcomer_is_met()
        self._arm({rank: -1 if rank == self.newcomer else version for rank in self._at_point})
        self._meet()
        self._come()
        self._strike()
        self._heal()

    def _play_joined(self) -> None:
        """In the first iteration of a newcomer."""
        version = self._newcomer_is_met()
        self._arm(dict.fromkeys(self._at_point, version))
        self._form()
        self._come()
        self._come_to(self._free, "reduce", version)
        self._strike()
        self._heal()

    # --- their parts ----------------------------------------------------------------------------
    def _begin_armed(self, late: Mapping[int, str] = MappingProxyType({})) -> list[Path]:
        """Start training with the victims held at the point, and the `late` ranks at events of the
        same iteration. Returns the files that hold the late ranks."""
        self.driver.start(*self.there)
        waiting = self._form_idle() if self.point.train == COPIES else {}
        self._arm(dict.fromkeys(self._at_point, STRUCK))
        files = [self.driver.hold(rank, event, STRUCK) for rank, event in late.items()]
        if not waiting:
            self._form()
        for rank, file in waiting.items():
            if rank not in self._at_point and rank not in late:
                file.unlink()
        return files

    def _form_idle(self) -> dict[int, Path]:
        """Train to the struck iteration, and hold each first stage until no rank sends an in-memory
        checkpoint: none is begun while another is sent. Returns the files that hold the ranks."""
        waiting = {
            rank: self.driver.hold(rank, "forward", STRUCK - 1)
            for rank in self.there
            if coordinates(self.axes, self.members.index(rank)).pp == 0
        }
        self._form()
        for rank in waiting:
            self.driver.held(rank, STRUCK - 1)
        for rank in self.there:
            self.driver.until(partial(self._is_idle, rank), f"rank {rank} sends no checkpoint")
        return waiting

    def _is_idle(self, rank: int) -> bool:
        events = Counter(line["event"] for line in self.driver.trace(rank))
        return events["copy"] == events["copied"]

    def _step_without(self) -> None:
        """The others step if they can, and go as far into the next iteration as they can."""
        if self.variant.has_gate and self.point.event in BEFORE_GATE:
            self._come_to(self._others, "gate", STRUCK)
            return
        self._come_to(self._others, "done", STRUCK)
        self._come_on(self._free)

    def _come_on(self, ranks: list[int]) -> None:
        """Let these ranks go on after their step, while one rank has not stepped. They enter the
        next iteration, unless they need the parameters that the late rank updates."""
        if self.variant.optimizer == "whole":
            self._come_to(ranks, "reduce", STRUCK + 1)
        else:
            self._come_to(ranks, "gather", STRUCK)

    def _newcomer_is_met(self) -> int:
        """Quiesce all for a generation with a newcomer; return the step that they have reached.

        That generation has the variant's layout: before it, one rank was missing.
        """
        if not self.variant.is_plain:
            self.there.pop()
            self._seat(self.variant.left(len(self.there)))
        self.driver.start(*self.there)
        waits = self.driver.hold(LATE, "micro_batch", STRUCK)
        self._form()
        self.driver.held(LATE, STRUCK)
        self.driver.start(self.newcomer)
        self.driver.ask_to_leave(self.members, "boundary")
        waits.unlink()
        (version,) = {told.step_version for told in self.driver.quiesced(self.members).values()}
        self.there.append(self.newcomer)
        self._seat(Axes(dp=len(self.there)) if self.variant.is_plain else self.variant.axes)
        return version

    # --- generations ----------------------------------------------------------------------------
    def _seat(self, axes: Axes, *, beside: bool = False) -> None:
        """Select the members of the next generation, as the control plane does.

        `beside`: ranks without a position are standby members, and give their state.
        """
        self.axes = axes
        if self.variant.is_plain:
            self.members = self.there[:]
            return
        held = {
            rank: HeldState(generation=1, axes=self.trained_in, place=place)
            for place, rank in enumerate(self.trained)
        }
        ranks = [
            Rank(rank=rank, attempt=1, slot=Slot("n1", rank), held=held.get(rank))
            for rank in self.there
        ]
        apart = self.variant.optimizer == "mirrored"
        seated = [rank.rank for rank in order_members(axes, ranks, apart=apart)]
        self.members = seated if beside else seated[: num_positions(axes)]

    def _meet(self) -> None:
        copies = newest(self.driver) if self.copied else ()
        generation = self.driver.reconfigure(
            self.members, copies=copies, axes=None if self.variant.is_plain else self.axes
        )
        self.layouts[generation] = self.axes

    def _form(self) -> dict[int, r.Reconfigured]:
        """Start a generation of the selected members; return their reports."""
        self._meet()
        reports = self.driver.reconfigured(self.members)
        if self.copied:
            # A copy on its way when the survivors stopped may have arrived.
            self.copied |= {
                step for step in whole_steps(self.driver.keepers) if step > max(self.copied)
            }
        self.driver.resume(self.members)
        self.trained, self.trained_in = self.members[:], self.axes
        return reports

    def _is_with(self, one: int, other: int) -> bool:
        """True if both ranks are in one replica."""
        return (
            len({coordinates(self.axes, self.members.index(rank)).dp for rank in (one, other)}) == 1
        )

    @property
    def _others(self) -> list[int]:
        """Members that are neither held at the point nor late."""
        return [
            rank
            for rank in self.members
            if rank not in self._at_point and not (self._late and rank == LATE)
        ]

    @property
    def _free(self) -> list[int]:
        """The others in whose replica no rank is held."""
        return [
            rank
            for rank in self._others
            if not any(
                self._is_with(rank, held) for held in self.members if held not in self._others
            )
        ]

    # --- the fault ------------------------------------------------------------------------------
    def _arm(self, iterations: dict[int, int]) -> None:
        """Hold each of these ranks at the point in that iteration."""
        for rank, iteration in iterations.items():
            self._hold(rank, iteration)
        self._armed = iterations

    def _hold(self, rank: int, iteration: int, then: str = "wait") -> None:
        where = {}
        # A replica of several ranks records no micro-batch in the middle of a pass.
        if self.point.nth >= 0 and (self.variant.is_plain or not self.point.event.endswith("_mid")):
            dp = coordinates(self.axes, self.members.index(rank)).dp
            where["micro_batch"] = dp + self.point.nth * self.axes.dp
        if self._bucket >= 0:
            where["bucket"] = self._bucket
        self.driver.hold(rank, self.point.event, iteration, then=then, **where)

    def _come(self) -> None:
        """Wait until the victims are at the point."""
        for rank, iteration in self._armed.items():
            self.driver.held(rank, iteration)

    def _come_to(self, ranks: Iterable[int], event: str, iteration: int, nth: int = 1) -> None:
        """Wait until all of these ranks start this event."""
        for rank in ranks:
            self.driver.strike(rank, iteration=iteration, event=event, nth=nth)

    def _strike(self) -> None:
        victim = self.victims[0]
        if self.variant.loses and self.driver.generation:
            self.driver.wait(r.MemoryCheckpointStored, self.trained[0])
        if self.fault == "lost agent":
            self.driver.lose_agents(*self.victims)
        elif self.fault == "exception":
            self._hold(victim, self._armed[victim], then="raise")
            assert self.driver.wait(r.RankErrored, victim).error == "InjectedFault"
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
        """Recover as the control plane would: quiesce, kill a stopped rank, meet, settle, go on."""
        driver, victim = self.driver, self.victims[0]
        left = [rank for rank in self.members if rank in driver.processes and rank != victim]
        self.there = [rank for rank in self.there if rank in driver.processes and rank != victim]
        if driver.generation:
            self.claims = driver.quiesce(left, "now")
        for file in self._late:
            file.unlink()
        if self.fault == "SIGSTOP":
            driver.kill(victim)
        self.struck, self.struck_in = self.trained, self.trained_in
        left_places = [place for place, rank in enumerate(self.struck) if rank in self.there]
        if self.struck and not has_every_part(self.struck_in, self.variant.optimizer, left_places):
            self.copied = steps(driver)
            driver.until(self._is_told, "the survivors report their shares of it")
        self._seat(self.variant.left(len(self.there)))
        if self.fault == "two in turn":
            self._lose_another()
        self.settled = self._form()

    def _is_told(self) -> bool:
        """True if each survivor with a share of the newest in-memory checkpoint has reported one of
        that generation. Without a report an order refers to none, and a store has a share a little
        before its report."""
        shares = [one.offer for keeper in self.driver.keepers for one in keeper.stored(TASK)]
        generation = max((one.generation for one in shares), default=0)
        stored = {one.rank for one in shares if one.generation == generation}
        return stored & set(self.there) <= {
            told.rank
            for told in self.driver.told(r.MemoryCheckpointStored)
            if told.generation == generation
        }

    def _lose_another(self) -> None:
        """Kill the second victim during the meeting."""
        driver, mate = self.driver, self.point.mate
        version = self.claims[mate].step_version if mate in self.claims else -1
        driver.hold(mate, "meet", version)
        self._meet()
        driver.held(mate, version)
        driver.kill(mate)
        self.claims = driver.quiesce(self.survivors, "now")
        self.there.remove(mate)
        self._seat(self.variant.left(len(self.there)))


def newest(driver: Driver) -> tuple[MemoryCheckpoint, ...]:
    """The reported in-memory checkpoints, as the control plane would name them, newest first.

    A store gives a newer one if it has one.
    """
    told = sorted(
        driver.told(r.MemoryCheckpointStored), key=lambda kept: (-kept.step_version, kept.node)
    )
    return tuple(named(driver.keepers, kept) for kept in told)


def steps(driver: Driver) -> set[int]:
    """The step of the newest whole in-memory checkpoint, if there is any."""
    return set(whole_steps(driver.keepers)[-1:])
