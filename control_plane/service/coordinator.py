"""The coordinator: the asyncio skin that tails the intake, lets the heart decide, and appends."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

import structlog
from msgspec import Struct

from ...events.errors import Ambiguous, Conflict, LogError, Unavailable, UsageError
from ...events.log.port import Batch, LogPort
from ...events.records.envelope import Record, Report
from ...events.records.reports import DeadlineReached
from ...events.records.types import Body
from ...events.spec.policy import Policy
from ..state.cluster import ClusterState
from .leader import Leader
from .leases import Leases

T = TypeVar("T")
Check = Callable[[ClusterState], None]
"""Looks at the state that a write would meet. Raises UsageError to have it not written."""


class Limits(Struct, frozen=True, kw_only=True):
    """Every limit of the skin; the heart's are in the Policy."""

    batch_reports_max: int = 256
    take_wait_s: float = 5.0
    """How long one blocking read of the intake stands before it is renewed."""
    call_s_max: float = 10.0
    """How long one call of the log may take before it counts as lost."""
    retry_s_min: float = 0.05
    retry_s_max: float = 2.0
    disputes_max: int = 50
    """Conflicts or lost replies in a row after which something else must be wrong."""
    beats_s: float = 1.0
    """How often heartbeats are looked at, at most; oftener where leases are short."""
    trim_s: float = 1.0
    writes_max: int = 256
    recent_records_max: int = 4_096


class _Write(Struct):
    """An operator's write, from its arrival to the append that holds it."""

    reports: list[Report]
    """Of one source: all of them in one append, one behind the other."""
    check: Check | None
    done: asyncio.Future[int]

    @property
    def source(self) -> str:
        return self.reports[0].source


class Coordinator:
    """One control plane's leadership of one log.

    Start order of `run`: a new epoch (older leaders are fenced); the log is folded; the orders
    streams are restored; EpochStarted, and PolicySet where it differs, are appended; the heartbeats
    are watched; the loop. Each turn of the loop takes what has come
    (reports, operators' writes) and, once the intake is known to be empty, what time brought
    (deadlines, leases); decides upon it in order; appends it in one write; and only then answers,
    publishes and trims.

    Conflict, Ambiguous and Unavailable drop the memory and fold the log again; Unavailable for
    ever, since the ranks go on without a leader. Stop order: `stop` lets the current turn end; then
    the blocking read and the heartbeats' watch are cancelled. A cancel ends all at the
    next await: nothing is lost, for the intake's cursor moves only with the append, and an append
    in flight either stands or not; the next leader folds what is there.
    """

    def __init__(self, log: LogPort, *, clock: Callable[[], float], nonce: str, code: str,
                 policy: Policy, jitter: random.Random | None = None,
                 limits: Limits | None = None) -> None:
        self._log = log
        self._limits = limits or Limits()
        self._jitter = jitter or random.Random()
        self._leader = Leader(log, clock=clock, nonce=nonce, code=code, policy=policy)
        self._leases = Leases()
        self._talk = structlog.get_logger("control_plane")
        self._wake = asyncio.Event()
        self._clean = asyncio.Event()
        self._news = asyncio.Event()
        self._writes: list[_Write] = []
        self._taking: asyncio.Task[None] | None = None
        self._taken: tuple[str, Batch | LogError] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._trimmed_s = 0.0
        self._recent: deque[Record] = deque(maxlen=self._limits.recent_records_max)
        self._stopping = False
        self.leading = False
        self.seq = 0
        """The last seq whose append is acknowledged."""

    # --- what others may ask -------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch of this leader; 0 before it has one."""
        return self._leader.epoch

    def answer(self, request_id: str) -> int | None:
        """The seq of a write that is in the log already, None for a new one."""
        return self._leader.answers.get(f"operator/{request_id}")

    async def settled(self) -> ClusterState:
        """The state, when it is what the log says and nothing more. Read it before you await.

        Raises Unavailable when the log cannot be reached for `call_s_max`.
        """
        await self._within(self._clean.wait(), Unavailable("the log cannot be reached"))
        return self._leader.state

    async def write(self, request_id: str, *bodies: Body, check: Check | None = None) -> int:
        """Take an operator's write; returns its seq after the append. The same id writes once.

        Of several bodies the first one's seq is returned: all stand in one append, with what
        follows from each behind it, and nothing else in between. `check` is asked at the moment of
        the write, of the state that all records before it have made; what it raises is raised here,
        and nothing is written. Raises Unavailable when too many wait, or when this one has waited
        for `call_s_max`: it then may still be written, and asking again with the same id tells.
        """
        if len(self._writes) >= self._limits.writes_max or self._stopping:
            raise Unavailable("the control plane takes no more writes at the moment")
        reports = [Report(source=f"operator/{request_id}", source_seq=number,
                          occurred_s=self._leader.now_s(), body=body)
                   for number, body in enumerate(bodies, 1)]
        write = _Write(reports, check, asyncio.get_running_loop().create_future())
        self._writes.append(write)
        self._wake.set()
        return await self._within(asyncio.shield(write.done),
                                  Unavailable("the log cannot be reached; ask again"))

    async def follow(self, after: int) -> AsyncIterator[Sequence[Record]]:
        """Pages of records behind `after`, until this control plane stops. Raises Unavailable."""
        while not self._stopping:
            news = self._news
            page: Sequence[Record] = [r for r in self._recent if r.seq > after]
            if not page or page[0].seq != after + 1:
                page = await self._log.read(after=after, num_max=1_000)
            if page:
                after = page[-1].seq
                yield page
            else:
                await news.wait()

    def stop(self) -> None:
        """End `run` after the current turn."""
        self._stopping = True
        self._wake.set()
        self._news.set()

    # --- life ------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Lead until `stop`. Raises Fenced when a newer leader rules, CorruptLog, or LogError."""
        ended: LogError | None = None
        async with asyncio.TaskGroup() as group:
            try:
                await self._insist(self._leader.take_over)
                # Once: a leader that took the log again after a newer one would never be fenced.
                await self._insist(self._recover)
                watch = group.create_task(self._watch(), name="heartbeats")
                try:
                    await self._lead(group)
                finally:
                    watch.cancel()
            except LogError as error:
                ended = error
            finally:
                self.leading = False
                self._clean.clear()
                self._drop_take()
                if self._alarm:
                    self._alarm.cancel()
                self._refuse_writes()
        if ended is not None:
            raise ended

    def _refuse_writes(self) -> None:
        self.stop()
        for write in self._writes:
            if not write.done.done():
                write.done.set_exception(Unavailable("this control plane has ended; ask again"))
                write.done.exception()  # whoever asked may be gone
        self._writes.clear()

    async def _recover(self) -> None:
        self._clean.clear()
        self._recent.clear()
        await self._leader.recover()
        self._leases.grant(self._leader.now_s())
        self.leading = True
        self._publish(())
        self._talk.info("leading", epoch=self.epoch, seq=self.seq)

    async def _lead(self, group: asyncio.TaskGroup) -> None:
        disputes = 0
        while not self._stopping:
            try:
                await self._turn(group)
                disputes = 0
            except (Conflict, Ambiguous) as error:
                disputes += 1
                if disputes > self._limits.disputes_max:
                    raise
                self._talk.info("folding the log again", why=str(error))
                await self._insist(self._recover)
            except Unavailable:
                await self._insist(self._recover)

    async def _insist(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call until it succeeds; a pause with jitter in between, a line when it changes."""
        pause_s, disputes, told = self._limits.retry_s_min, 0, False
        while True:
            try:
                async with asyncio.timeout(3 * self._limits.call_s_max):
                    await call()
                if told:
                    self._talk.info("the log is reached again")
                return
            except (Unavailable, TimeoutError) as error:
                self._clean.clear()
                if not told:
                    self._talk.warning("the log cannot be reached, ranks go on", why=str(error))
                told = True
            except (Conflict, Ambiguous):
                disputes += 1
                if disputes > self._limits.disputes_max:
                    raise
            await asyncio.sleep(pause_s * self._jitter.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, self._limits.retry_s_max)

    # --- one turn --------------------------------------------------------------------------------
    async def _turn(self, group: asyncio.TaskGroup) -> None:
        """Wait until there is something to do, then do all of it in one append."""
        self._arm(group)
        await self._wake.wait()
        self._wake.clear()
        batch = self._take_result()
        timed = self._is_time()
        if timed:
            # Time speaks only to an intake that is known to be empty: what was told before it
            # may have made the deadline void.
            batch, timed = await self._drain(batch)
        writes = list(self._writes)
        if not batch.reports and not writes and not timed:
            self._leader.position = batch.cursor
            return
        self._clean.clear()
        committed = await self._within(
            self._leader.commit(
                chain(batch.reports, self._asked(writes),
                      self._due(self._leader.now_s()) if timed else ()),
                cursor=batch.cursor),
            Ambiguous("the append was not acknowledged in time"))
        self._publish(committed.records)
        for write in writes:
            self._writes.remove(write)
            seq = self._leader.answers.get(write.source)
            if write.done.done():
                continue
            if seq is None:
                write.done.set_exception(Unavailable("an old request, and its answer is forgotten"))
            else:
                write.done.set_result(seq)
        await self._trim()

    def _asked(self, writes: Sequence[_Write]) -> Iterator[Report]:
        """What operators write, each held against the state as it is when its turn has come."""
        for write in writes:
            if write.done.done():  # refused in a turn that did not come to its end
                continue
            try:
                if write.check is not None and write.source not in self._leader.answers:
                    write.check(self._leader.state)
            except UsageError as error:
                write.done.set_exception(error)
                write.done.exception()  # whoever asked may be gone
                continue
            yield from write.reports

    async def _drain(self, batch: Batch) -> tuple[Batch, bool]:
        """`batch` and what else waits in the intake; whether that is all."""
        num_max = self._limits.batch_reports_max
        more = await self._within(
            self._log.take(after=batch.cursor, num_max=num_max, wait_s=0.0),
            Unavailable("the intake does not answer"))
        full = len(more.reports) >= num_max
        if full:
            self._wake.set()
        return Batch(reports=batch.reports + more.reports, cursor=more.cursor), not full

    def _publish(self, records: Sequence[Record]) -> None:
        """The append stands: who follows the log may read it, who asks may see it."""
        self._recent.extend(records)
        self.seq = self._leader.state.seq
        self._clean.set()
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _trim(self) -> None:
        now_s = self._leader.now_s()
        if now_s - self._trimmed_s >= self._limits.trim_s and self._leader.position != "0-0":
            self._trimmed_s = now_s
            await self._within(self._log.trim_reports(before=self._leader.position),
                               Unavailable("the intake cannot be trimmed"))

    # --- the intake -------------------------------------------------------------------------------
    def _arm(self, group: asyncio.TaskGroup) -> None:
        """One blocking read stands, and one timer for the next deadline."""
        if self._taking is None:
            self._taking = group.create_task(self._take(self._leader.position), name="intake")
        if self._alarm:
            self._alarm.cancel()
            self._alarm = None
        due_s = min((d.due_s for d in self._leader.state.deadlines.values()), default=None)
        if due_s is not None:
            delay_s = max(0.0, due_s - self._leader.now_s())
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._wake.set)

    async def _take(self, after: str) -> None:
        limits = self._limits
        try:
            async with asyncio.timeout(limits.take_wait_s + limits.call_s_max):
                found: Batch | LogError = await self._log.take(
                    after=after, num_max=limits.batch_reports_max, wait_s=limits.take_wait_s)
        except LogError as error:
            found = error
        except TimeoutError:
            found = Unavailable("the intake does not answer")
        self._taken, self._taking = (after, found), None
        self._wake.set()

    def _take_result(self) -> Batch:
        """What the blocking read brought; nothing if the memory has moved on since it began."""
        taken, self._taken = self._taken, None
        if taken is None or taken[0] != self._leader.position:
            return Batch(reports=(), cursor=self._leader.position)
        if isinstance(taken[1], LogError):
            raise taken[1]
        return taken[1]

    def _drop_take(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    # --- what time brings -------------------------------------------------------------------------
    def _is_time(self) -> bool:
        state, now_s = self._leader.state, self._leader.now_s()
        return any(d.due_s <= now_s for d in state.deadlines.values()) or any(
            True for _ in self._leases.verdicts(state))

    def _due(self, now_s: float) -> Iterator[Report]:
        """Deadlines that have passed and leases that have changed, as the state is by then."""
        state = self._leader.state
        due = sorted((d.due_s, name) for name, d in state.deadlines.items() if d.due_s <= now_s)
        for _, name in due:
            still = state.deadlines.get(name)
            if still is not None and still.due_s <= now_s:
                yield self._leader.report(DeadlineReached(deadline=name))
        for body in self._leases.verdicts(state):
            yield self._leader.report(body)

    async def _watch(self) -> None:
        """Look at the heartbeats again and again; deafness of our own grants a full lease."""
        while True:
            policy = self._leader.state.policy
            pause_s = min(self._limits.beats_s, policy.silence_s_max / 5, policy.suspect_s_max / 4)
            await asyncio.sleep(pause_s)
            try:
                beats = await self._within(self._log.beats(), Unavailable("no heartbeats"))
            except LogError:
                continue
            self._leases.observe(beats, self._leader.now_s(), pause_s=pause_s, policy=policy)
            if self._clean.is_set() and self._is_time():
                self._wake.set()

    async def _within(self, call: Awaitable[T], late: LogError) -> T:
        try:
            async with asyncio.timeout(self._limits.call_s_max):
                return await call
        except TimeoutError:
            raise late from None
