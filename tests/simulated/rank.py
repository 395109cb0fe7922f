"""Simulated training processes: they join generations, settle, step and fail as real ranks do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from math import floor, inf
from statistics import fmean, median
from typing import Literal

from msgspec.structs import replace
from simulated.checkpoint_store import COPY_BYTES, SimulatedCheckpoint
from simulated.environment import Environment
from simulated.generation import SimulatedGeneration, next_digest
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.types import Body, StoreEndpoint
from unicron.events.spec.job import JobSpec
from unicron.events.spec.parallelism import num_positions
from unicron.workers.training.recovery.state_sources import NO_STATE, Claim, HeldState

# --- The progress marks of a simulated rank and its iteration times ---

NUM_NORMAL = 20
"""Iterations in the running average."""
FIRST_S = 2.0
"""The average before one iteration has finished; the first iteration is slow."""
NUM_PACED = 8
SHARES_S = 0.2
"""How often the first rank that saves looks for the shares of the others."""


class Marks:
    """The marks of one process. Times are seconds of the loop's clock."""

    def __init__(self) -> None:
        self.slow = 1.0
        """Factor by which the process's own work takes longer than normal."""
        self.num_froze = 0
        self.frozen_until_s = 0.0
        self._frozen_s = self._began_s = self._entered_s = -1.0
        self._generation = 0
        self.took_s: list[float] = []
        """Durations of this generation's last iterations, without its first."""

    def freeze(self, at_s: float, left_s: float) -> None:
        """The process stalls; `left_s`: how much longer an earlier stall lasts (0: none)."""
        self.num_froze += 1
        if left_s <= 0:
            self._frozen_s = at_s

    def begin(self, at_s: float, generation: int) -> None:
        if generation != self._generation:
            self._generation, self.took_s, self._began_s = generation, [], -1.0
        self._entered_s = -1.0
        if self._began_s < 0:
            self._began_s = 0.0  # the generation's first iteration does not count
        else:
            self._began_s = at_s

    def enter(self, at_s: float) -> None:
        self._entered_s = at_s

    def step(self, at_s: float) -> None:
        if self._began_s > 0:
            self.took_s = [*self.took_s, at_s - self._began_s][-NUM_NORMAL:]
        self._began_s, self._entered_s = max(self._began_s, 0.0), -1.0

    @property
    def normal_s(self) -> float:
        """The running average of iteration times."""
        return fmean(self.took_s) if self.took_s else FIRST_S

    @property
    def iteration_s(self) -> float:
        """The median of the last NUM_PACED iteration times; 0: fewer have finished."""
        return median(self.took_s[-NUM_PACED:]) if len(self.took_s) >= NUM_PACED else 0.0

    def works_s(self, now_s: float) -> float:
        """Time spent so far on the rank's own work of this iteration. 0: the rank is in a
        collective, or in its generation's first iteration."""
        return now_s - self._began_s if self._began_s > 0 and self._entered_s < 0 else 0.0

    def last_s(self, now_s: float, *, computes: bool, frozen: bool) -> float:
        """Time of the last mark: work passes marks continuously, unless the rank is frozen."""
        if not computes and self._entered_s >= 0:
            return self._entered_s
        return self._frozen_s if frozen else now_s


FLOPS = 1e9
"""FLOPs of one simulated iteration."""
FOR_GOOD_S = 1e7
"""Longer than any simulation."""
INSTANT_S = 1e-9
"""Durations below this count as 0: sums of seconds are not exact."""
Phase = Literal["loading", "holding", "meeting", "settled", "computing", "reducing"]


LONG_S = (15.0, 60.0)
"""A long time to prepare; start_s_max is 20 s."""


def adoption_s(spec: JobSpec, rng: random.Random) -> float:
    """When a process adopts Unicron, after its start; below 0: a training task has none to adopt.
    The scripts of some tasks adopt late, those of others never: then it is infinite."""
    if spec.loop is None:
        return -1.0
    kind = random.Random(f"adopts {spec.name}").random()
    return inf if kind < 0.15 else rng.uniform(*LONG_S if kind < 0.6 else (0.01, 1.0))


class SimulatedRank:
    """One process of a training task. `say` takes what it reports."""

    def __init__(
        self,
        net: Environment,
        order: o.StartRank,
        node: str,
        pid: int,
        say: Callable[[Body], None],
        end: Callable[[int], None],
    ) -> None:
        assert order.spec.training is not None
        self.net, self.node, self.pid, self.say, self._end = net, node, pid, say, end
        self.task, self.rank, self.attempt = order.task, order.rank, order.attempt
        self.train, self.key = order.spec.training, (order.rank, order.attempt)
        self.endpoint = f"{node}.paper:{10_000 + pid}"
        self.phase: Phase = "loading"
        self.alive = True
        self.seen = 0
        """The highest generation that the rank knows of."""
        self.group: SimulatedGeneration | None = None
        self.step_version, self.digest, self.trained_in = -1, 0, 0
        self.kept: tuple[int, ...] = ()
        self.todo: tuple[int, ...] = ()
        self.owned: tuple[int, ...] = ()
        self.assigned_in, self.begun = 0, False
        self.held: HeldState | None = None
        """The part of the model that its state covers; None: the whole model."""
        self.ready, self.barrier, self.beside = False, tuple[float, ...](), False
        """`beside`: a standby member, which only counts the steps of others and has no state."""
        self.keepers: tuple[StoreEndpoint, ...] = ()
        self._kept_s: dict[str, float] = {}
        """Node -> when the rank last reported that the node's store has a copy."""
        self.told = 0
        """Iterations below this one have been reported, as far as this rank knows."""
        self._began_s = self._micro_batch_s = self._told_s = 0.0
        self._saving: tuple[int, ...] = ()
        """The task loses all its slots, and the ranks at these positions save their shares before
        Quiesced; this rank is one of them."""
        self._saved_place = 0
        """The position whose share this rank saves."""
        self._is_completing = False
        """Whether this rank waits for the others' shares and reports the checkpoint."""
        self._finished = False
        self.goes_on_s = self._continues_s = 0.0
        self.marks = Marks()
        self._unread: list[o.Order] = []
        self._timer: asyncio.TimerHandle | None = None
        self._call: Callable[[], None] = self._ready
        adopt_s = adoption_s(order.spec, net.rng)
        if adopt_s < 0:
            self._after(net.draw(net.tempo.load_s), self._ready)
        else:
            self._after(adopt_s, self._adopt)

    # --- called by the agent -----------------------------------------------------------------
    def die(self) -> None:
        """The process is gone at once; peers notice its closed connections."""
        self.alive = False
        self._leave()

    @property
    def stopped_s(self) -> float:
        """How long the rank is still stopped or frozen; 0: it runs."""
        left_s = self.goes_on_s - self.net.loop.time()
        return left_s if left_s > INSTANT_S else 0.0  # its timer may fire a rounding error early

    @property
    def suspended_s(self) -> float:
        """How long the rank is still stopped by SIGSTOP; 0: it is not, but may be frozen."""
        return max(self._continues_s - self.net.loop.time(), 0.0)

    def stop(self, stop_s: float) -> None:
        """SIGSTOP, and SIGCONT after `stop_s` (0: never)."""
        until_s = self.net.loop.time() + (stop_s or FOR_GOOD_S)
        self._continues_s = max(self._continues_s, until_s)
        self.freeze(stop_s)

    def freeze(self, stop_s: float) -> None:
        """Compute and read nothing for `stop_s` (0: for ever); the connections stay open."""
        stop_s = stop_s or FOR_GOOD_S
        self.marks.freeze(self.net.loop.time(), self.stopped_s)
        now_s, added_s = self.net.loop.time(), max(stop_s - self.stopped_s, 0.0)
        left_s = 0.0
        if self._timer:
            left_s = max(self._timer.when() - max(now_s, self.goes_on_s), 0.0)
        self.goes_on_s = max(self.goes_on_s, now_s + stop_s)
        self._began_s += added_s
        if self._timer:
            self._after(left_s, self._call)
        self.net.later(self.stopped_s, self._read)

    def take(self, order: o.Order) -> None:
        """Accept an order. The rank reads it at once, or when the process continues."""
        self._unread.append(order)
        self._read()

    def _read(self) -> None:
        while self._unread and self.alive and not self.stopped_s:
            match self._unread.pop(0):
                case o.Quiesce() as order if self.rank in order.ranks:
                    self.quiesce(order)
                case o.Reconfigure() as order:
                    self.reconfigure(order)
                case o.Resume() as order:
                    self.resume(order)
                case o.SetCheckpointStores() as order if order.generation == self.seen:
                    self.keepers = self._stores(order)
                case _:
                    pass

    def reconfigure(self, order: o.Reconfigure) -> None:
        if order.generation <= self.seen or self.phase == "loading":
            return
        if not any((m.rank, m.attempt) == self.key for m in order.members):
            return
        self._keep_whole()
        self._leave()
        self._saving = ()
        self.train = replace(self.train, output=order.output or self.train.output)
        self.keepers, self._kept_s = self._stores(order), {}
        self.seen, self.phase = order.generation, "meeting"
        self.group = self.net.meet(order)
        self.group.arrive(self)

    def resume(self, order: o.Resume) -> None:
        if self.group and self.group.number == order.generation and self.phase == "settled":
            self.told, self._told_s = order.progress_from, -1.0
            self.trained_in, self.barrier = self.group.number, ()
            if self.group.place(self) is None:
                self.beside, self.step_version = True, self.group.step_version
            self.net.gone_on.setdefault(self.task, []).append(
                (self.group.number, self.step_version)
            )
            self._tell(now=True)
            self.begin()

    def quiesce(self, order: o.Quiesce) -> None:
        if order.generation < self.seen or self.phase == "loading":
            return
        self.seen = order.generation
        self.train = replace(self.train, output=order.output or self.train.output)
        self._saving, self._is_completing = (), False
        if order.save and self.rank in order.ranks[: max(len(order.saving), 1)]:
            place = order.saving[order.ranks.index(self.rank)]
            self._saved_place = place
            self._is_completing = order.ranks[0] == self.rank
            if self.held is None or self.held.place == place:
                self._saving = order.saving
        if self.group is None:
            if self._timer:
                self._timer.cancel()
            self._answer()
        elif order.mode == "boundary" and self.phase in ("computing", "reducing"):
            self.group.stop = True
        elif self.phase == "computing":
            done = (self.net.loop.time() - self._began_s) / self._micro_batch_s
            whole_s = self._began_s + min(floor(done) + 1, len(self.todo)) * self._micro_batch_s
            self._after(whole_s - self.net.loop.time() + 1e-6, self._stop)
        else:
            self._stop()

    # --- iterations --------------------------------------------------------------------------
    def begin(self) -> None:
        """Compute the remaining micro-batches of the iteration, then enter its reduction."""
        self.phase, self._began_s, self.begun = "computing", self.net.loop.time(), True
        self._micro_batch_s = self.net.draw(self.net.tempo.micro_batch_s) * self.marks.slow
        self.marks.begin(self._began_s, self.seen)
        last = self.step_version >= self.train.iterations
        busy_s = len(self.todo) * self._micro_batch_s
        if last and self._is_first:
            busy_s = self.net.draw(self.net.tempo.save_s)
        self._after(busy_s, self._final if last else self._reduce)

    def step(self, batch: tuple[int, ...], stop: bool) -> None:
        """The reduction has completed on this rank: take the optimizer step."""
        assert self.group is not None
        if self.step_version >= self.train.iterations:
            self.say(
                r.RankFinished(
                    task=self.task,
                    rank=self.rank,
                    attempt=self.attempt,
                    generation=self.group.number,
                    step_version=self.step_version,
                    forward_calls=0,
                )
            )
            self.group, self.phase, self._finished = None, "holding", True
            self._after(self.net.draw(self.net.tempo.exit_s), lambda: self._end(0))
            return
        self.take_step(batch)
        self.net.num_steps += 1
        self.marks.step(self.net.loop.time())
        self.kept, self.todo, self.owned, self.begun = (), (), (), False
        self._tell(now=stop or self.step_version == self.train.iterations)
        place = self.group.place(self)
        if (
            place is not None
            and self.train.copy_every
            and (self.step_version % self.train.copy_every == 0)
        ):
            copy = SimulatedCheckpoint(
                generation=self.group.number,
                step_version=self.step_version,
                digest=self.digest,
                share=place,
                num_shares=num_positions(self.group.layout),
            )
            for keeper in self.keepers:
                self.net.later(
                    self.net.draw(self.net.tempo.copy_s),
                    partial(self._send_copy, keeper.node, copy),
                )
        if stop:
            group, self.group, self.phase = self.group, None, "holding"
            group.close(self)
            self._answer()
            return
        every = self.train.checkpoint_every
        last = self.step_version == self.train.iterations
        if self._is_first and every and self.step_version % every == 0 and not last:
            self._save(final=False)
        self.todo = self.owned = self.group.assigned(self)
        self.begin()

    def take_step(self, batch: tuple[int, ...]) -> None:
        self.digest = next_digest(self.digest, self.step_version, batch)
        self.step_version += 1
        self.ready, self.barrier = False, (1.0,)

    def fail(self) -> None:
        """A collective failed on this rank: leave the generation and report the failure."""
        assert self.group is not None
        number, self.seen = self.group.number, max(self.seen, self.group.number)
        was = self.phase
        self._save_alone_if_at_all()
        self._keep_whole()
        self._leave()
        if was == "meeting":
            self.say(
                r.ReconfigureFailed(
                    task=self.task,
                    rank=self.rank,
                    attempt=self.attempt,
                    generation=number,
                    error="connection refused",
                )
            )
            return
        self.say(
            r.CollectiveFailed(
                task=self.task,
                rank=self.rank,
                attempt=self.attempt,
                generation=number,
                iteration=max(self.step_version, 0),
                error="Connection closed by peer",
            )
        )
        self._answer()

    def say_quiesced(self) -> None:
        self.say(
            r.Quiesced(
                task=self.task,
                rank=self.rank,
                attempt=self.attempt,
                generation=self.seen,
                step_version=self.claim().step_version,
                micro_batches=self.kept,
                buckets_reduced=0,
                num_buckets=1,
            )
        )

    def claim(self) -> Claim:
        """The state and micro-batches that this rank brings into a new generation."""
        is_whole = self.train.parallel.optimizer == "whole"
        return Claim(
            step_version=NO_STATE if self.beside else self.step_version,
            kept=self.kept,
            owned=self.owned,
            assigned_in=self.assigned_in,
            begun=self.begun,
            trained_in=self.trained_in,
            held=self.held,
            ready=self.ready,
            barrier=self.barrier,
            reduced=(1.0, 0.0) if self.ready and is_whole else (),
        )

    def hold(self, kept: tuple[int, ...], todo: tuple[int, ...], begun: bool) -> None:
        """Take the rank's part of the iteration after the settlement."""
        self.phase, self.kept, self.todo, self.begun = "settled", kept, todo, begun
        self.owned = tuple(sorted((*kept, *todo)))

    @property
    def iterates(self) -> bool:
        """True in an iteration: not between generations, and not after the last iteration."""
        trains = self.phase in ("computing", "reducing") and self.trained_in == self.seen
        return self.alive and trains and (0 <= self.step_version < self.train.iterations)

    # --- internals ---------------------------------------------------------------------------
    @property
    def _is_first(self) -> bool:
        return self.group is not None and self.group.ranks[0] is self

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        if self._timer:
            self._timer.cancel()
        self._call, self._timer = call, self.net.later(delay_s + self.stopped_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._call()

    def _adopt(self) -> None:
        self.say(r.RankAdopted(task=self.task, rank=self.rank, attempt=self.attempt))
        long = self.net.rng.random() < 0.2
        self._after(self.net.draw(LONG_S if long else self.net.tempo.load_s), self._ready)

    def _ready(self) -> None:
        self.phase = "holding"
        self.say(
            r.RankReady(
                task=self.task,
                rank=self.rank,
                attempt=self.attempt,
                endpoint=self.endpoint,
                num_params=1000,
                state_bytes=16_000,
                iteration_flops=FLOPS,
                data_digest="paper",
            )
        )

    def _reduce(self) -> None:
        assert self.group is not None
        self.kept = tuple(sorted((*self.kept, *self.todo)))
        self.todo, self.phase = (), "reducing"
        self.marks.enter(self.net.loop.time())
        self.group.enter(self)

    def _final(self) -> None:
        """After the last iteration: the first member saves, then all enter one more collective."""
        assert self.group is not None
        if self._is_first:
            self._save(final=True)
        self.phase = "reducing"
        self.group.enter(self)

    def _save(self, *, final: bool) -> None:
        path = f"gen-{self.seen}/iter-{self.step_version}"
        self.net.files[self.train.output, path] = (self.step_version, self.digest)
        self.say(
            r.CheckpointSaved(
                task=self.task,
                generation=self.seen,
                step_version=self.step_version,
                path=path,
                ckpt_bytes=12_000,
                final=final,
                output=self.train.output,
            )
        )

    def _send_copy(self, node: str, copy: SimulatedCheckpoint) -> None:
        """Store a copy if the rank still runs; report it at most once per second and node."""
        at_s, every_s = self.net.loop.time(), self.net.tempo.progress_s
        if not self.alive or self.stopped_s:
            return
        start = self.net.keepers.put(node, self.task, copy)
        if start and at_s - self._kept_s.get(node, -every_s) >= every_s:
            self._kept_s[node] = at_s
            self.say(
                r.MemoryCheckpointStored(
                    task=self.task,
                    rank=self.rank,
                    attempt=self.attempt,
                    generation=copy.generation,
                    step_version=copy.step_version,
                    node=node,
                    copy_bytes=COPY_BYTES,
                    checksum=copy.checksum,
                    keeper_start=start,
                    share=copy.share,
                    num_shares=copy.num_shares,
                )
            )

    def _stores(self, order: o.Reconfigure | o.SetCheckpointStores) -> tuple[StoreEndpoint, ...]:
        """The stores of this rank's node."""
        names = (
            next(one.stores for one in order.stores if one.node == self.node)
            if (order.stores)
            else ()
        )
        return tuple(store for store in order.keepers if store.node in names)

    def _tell(self, now: bool) -> None:
        at_s = self.net.loop.time()
        due = now or self._told_s < 0 or at_s - self._told_s >= self.net.tempo.progress_s
        if not self._is_first or not due or self.told >= self.step_version:
            return
        assert self.group is not None
        span = range(self.told, self.step_version)
        self.say(
            r.TaskProgressed(
                task=self.task,
                generation=self.group.number,
                first_iteration=self.told,
                losses=tuple(5.0 / (1 + 0.1 * i) for i in span),
                step_s=tuple(0.25 for _ in span),
                rate_flops=FLOPS / 0.25,
                micro_batches=self.train.num_micro_batches,
            )
        )
        self.told, self._told_s = self.step_version, at_s

    def _keep_whole(self) -> None:
        """Keep the completed micro-batches of an interrupted computation."""
        if self.phase == "computing" and self._micro_batch_s and self.todo:
            num = floor((self.net.loop.time() - self._began_s) / self._micro_batch_s)
            self.kept = tuple(sorted((*self.kept, *self.todo[:num])))
            self.todo = ()

    def _stop(self) -> None:
        self._keep_whole()
        self._save_alone_if_at_all()
        self._leave()
        self._answer()

    def _answer(self) -> None:
        """Report Quiesced; if the rank is to save, after it has written the checkpoint."""
        if self._saving and self.step_version >= 0 and not self._finished:
            self._after(self.net.draw(self.net.tempo.save_s), self._leave_a_share)
        else:
            self.say_quiesced()

    def _save_alone_if_at_all(self) -> None:
        """The rank leaves in the middle of an iteration: not all have the same step."""
        if self.held is not None or len(self._saving) > 1:
            self._saving = ()

    def _leave_a_share(self) -> None:
        """The share of this rank is written, on disk and in memory. The first one waits for the
        others."""
        written = self.net.shares.setdefault(
            (self.task, self.seen, self.step_version, self._saving), set()
        )
        for keeper in self.keepers if self.rank not in written else ():
            self._kept_s.pop(keeper.node, None)
            self._send_copy(
                keeper.node,
                SimulatedCheckpoint(
                    generation=self.seen,
                    step_version=self.step_version,
                    digest=self.digest,
                    share=sorted(self._saving).index(self._saved_place),
                    num_shares=len(self._saving),
                ),
            )
        written.add(self.rank)
        if not self._is_completing:
            self.say_quiesced()
        elif len(written) == len(self._saving):
            self._save(final=False)
            self.say_quiesced()
        else:
            self._after(SHARES_S, self._leave_a_share)

    def _leave(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        group, self.group, self.phase = self.group, None, "holding"
        if group is not None:
            group.lose(self)
